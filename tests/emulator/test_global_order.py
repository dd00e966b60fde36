"""Order of global memory accesses between co-resident CTAs, and of atomics on shared memory: what races, and what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulator import CATALOGUE, POLICIES
from tests.emulator.test_sanitizer import INIT, SLOT, TWO_WARPS, Case, instance
from tests.emulator.tiny import Run, run, store, wait

GRID: dict[str, Any] = {"clusters": 2, "in_role": "inout", "co_resident": True}
START = "griddepcontrol.wait; mov.u32 %r8, %ctaid.x; setp.ne.u32 %p9, %r8, 0; setp.ne.u32 %p8, %r1, 0;"
"""%p9: not CTA 0, %p8: not thread 0."""


def two(writer: str, reader: str) -> str:
    """Thread 0 of CTA 0 does one thing, thread 0 of CTA 1 another."""
    return f"{START} @%p8 ret; @%p9 bra READER; {writer} ret; READER: {reader}"


KEEP = "st.global.b32 [%rd2], %r21;"
PACKET = "mov.b64 %rd12, {5, 7}; st.relaxed.gpu.global.b64 [%rd1], %rd12;"
POLL_PACKET = "AGAIN: ld.relaxed.gpu.global.b64 %rd13, [%rd1]; mov.b64 {%r21, %r22}, %rd13; setp.ne.b32 %p7, %r22, 7; @%p7 bra AGAIN;"
HALVES = "st.relaxed.gpu.global.b32 [%rd1], 5; st.relaxed.gpu.global.b32 [%rd1+4], 7;"
POLL_HALVES = (
    "AGAIN: ld.relaxed.gpu.global.b32 %r21, [%rd1]; ld.relaxed.gpu.global.b32 %r22, [%rd1+4]; setp.ne.b32 %p7, %r22, 7; @%p7 bra AGAIN;"
)
PAIR = "mov.b64 %rd12, {5, 7}; mov.b64 %rd13, {6, 7}; st.relaxed.gpu.global.v2.b64 [%rd1], {%rd12, %rd13};"
BOTH = "and.b32 %r25, %r22, %r24; setp.ne.b32 %p7, %r25, 7; @%p7 bra AGAIN;"
POLL_PAIR = "AGAIN: ld.relaxed.gpu.global.v2.b64 {%rd14, %rd15}, [%rd1]; mov.b64 {%r21, %r22}, %rd14; mov.b64 {%r23, %r24}, %rd15;" + BOTH
POLL_WORDS = "AGAIN: ld.relaxed.gpu.global.v4.b32 {%r21, %r22, %r23, %r24}, [%rd1];" + BOTH

ACQ_REL, RELAXED = "atom.acq_rel.gpu.global.add.u32", "atom.relaxed.gpu.global.add.u32"
COUNTER = " %r30, [%rd1+64], "
"""Operands of an atomic on a word apart, up to the number to add."""
UNTIL = COUNTER + "0; setp.eq.b32 %p7, %r30, 0; @%p7 bra AGAIN; "
SET_FLAG = ".gpu.global.b32 [%rd1+64], 1;"
FLAG_SET = ".gpu.global.b32 %r20, [%rd1+64]; setp.eq.b32 %p7, %r20, 0; @%p7 bra AGAIN;"
STORED, LOADED = "st.global.b32 [%rd1], 5;", "ld.global.b32 %r21, [%rd1];" + KEEP
"""A weak store and a weak load, which need an order."""
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 16, [%r20];"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 16;"

OR = "red.relaxed.cta.shared::cta.or.b32 [%r3]"
ZERO = "setp.ne.u32 %p1, %r1, 0; setp.ne.u32 %p2, %r1, 1; @!%p1 st.shared.b32 [%r3], 0;"
"""Thread 0 clears the first word; %p1: not thread 0, %p2: not thread 1."""

CASES = {
    # ---- packets ----
    "packet polled in two halves": Case("E-RACE", two(PACKET, "{}" + KEEP), POLL_PACKET, POLL_HALVES, GRID, False),
    "two packets polled as four words": Case("E-RACE", two(PAIR, "{}" + KEEP), POLL_PAIR, POLL_WORDS, GRID, False),
    "packet stored in two halves": Case("E-RACE", two("{}", POLL_PACKET + KEEP), PACKET, HALVES, GRID),
    "packet in halves on both sides": Case("A-PACKET", two(HALVES, POLL_HALVES + "st.global.b32 [%rd2], {};"), "%r1", "%r21", GRID),
    "half a packet in arithmetic": Case(
        "A-PACKET", two(HALVES, POLL_HALVES + "mov.b32 %r30, {}; add.rn.f32 %r31, %r30, %r30;"), "%r1", "%r21", GRID
    ),
    "half a packet for other lanes": Case(
        "A-PACKET",
        f"{START} @%p9 bra READER; @%p8 ret; {HALVES} ret;"
        f"READER: {POLL_HALVES} shfl.sync.idx.b32 %r30, {{}}, 0, 31, -1; setp.ne.u32 %p1, %r1, 3; @!%p1 st.global.b32 [%rd2], %r30;",
        "%r1",
        "%r21",
        GRID,
    ),
    "half a packet as an index": Case(
        "A-PACKET",
        two(HALVES, POLL_HALVES + "cvt.u64.u32 %rd20, {}; add.s64 %rd21, %rd2, %rd20; st.global.b32 [%rd21+3], 1;"),
        "%r8",
        "%r21",
        GRID,
        False,
    ),
    # ---- weak and strong accesses ----
    "weak load of what another CTA stored": Case(
        "E-RACE", two(PACKET, "{}.b64 %rd13, [%rd1];"), "ld.relaxed.gpu.global", "ld.global", GRID
    ),
    "weak store to what another CTA loads": Case(
        "E-RACE", two("{}.b32 [%rd1], 5;", "ld.relaxed.gpu.global.b32 %r20, [%rd1];"), "st.relaxed.gpu.global", "st.global", GRID
    ),
    "weak store and relaxed store": Case(
        "E-RACE", two("{}.b32 [%rd1], 5;", "st.relaxed.gpu.global.b32 [%rd1], 6;"), "st.relaxed.gpu.global", "st.global", GRID
    ),
    "weak load of a counter": Case(
        "E-RACE", two(f"{RELAXED} %r30, [%rd1], 1;", "{}.b32 %r31, [%rd1];"), "ld.relaxed.gpu.global", "ld.global", GRID
    ),
    "weak stores of two CTAs": Case("E-RACE", START + "@%p8 ret; st.global.b32 [{}], %r8;", "%rd4", "%rd1", GRID),
    # ---- releases and acquires ----
    "no release": Case("E-RACE", two(f"{STORED} {{}} {COUNTER} 1;", f"AGAIN: {ACQ_REL} {UNTIL} {LOADED}"), ACQ_REL, RELAXED, GRID),
    "no acquire": Case("E-RACE", two(f"{STORED} {ACQ_REL} {COUNTER} 1;", f"AGAIN: {{}} {UNTIL} {LOADED}"), ACQ_REL, RELAXED, GRID),
    "flag without a release": Case(
        "E-RACE", two(f"{STORED} {{}}{SET_FLAG}", f"AGAIN: ld.acquire{FLAG_SET} {LOADED}"), "st.release", "st.relaxed", GRID
    ),
    "flag without an acquire": Case(
        "E-RACE", two(f"{STORED} st.release{SET_FLAG}", f"AGAIN: {{}}{FLAG_SET} {LOADED}"), "ld.acquire", "ld.relaxed", GRID
    ),
    "a relaxed store ends what was released": Case(
        # an atomic in between does not
        "E-RACE",
        two(
            f"{STORED} st.release{SET_FLAG} {{}}",
            "AGAIN: ld.relaxed.gpu.global.b32 %r20, [%rd1+64]; setp.lt.u32 %p7, %r20, 2; @%p7 bra AGAIN;"
            f"ld.acquire.gpu.global.b32 %r20, [%rd1+64]; {LOADED}",
        ),
        f"{RELAXED} {COUNTER} 1;",
        "st.relaxed.gpu.global.b32 [%rd1+64], 2;",
        GRID,
    ),
    "acquired by one thread, read by others": Case(
        "E-RACE",
        f"{START} @%p9 bra READER; @%p8 ret; {STORED} {ACQ_REL} {COUNTER} 1; ret;"
        f"READER: @%p8 bra MEET; AGAIN: {ACQ_REL} {UNTIL} MEET: {{}} ld.global.b32 %r21, [%rd1];",
        "bar.sync 0;",
        "",
        GRID | TWO_WARPS,
    ),
    "stored by many threads, released by one": Case(
        "E-RACE",
        f"{START} @%p9 bra READER; st.global.b32 [%rd4], 5; {{}} @%p8 ret; {ACQ_REL} {COUNTER.replace('64', '128')} 1; ret;"
        f"READER: @%p8 ret; AGAIN: {ACQ_REL} {UNTIL.replace('64', '128')} ld.global.b32 %r21, [%rd1+124];",
        "bar.warp.sync -1;",
        "",
        GRID,
    ),
    "store over what other CTAs read": Case(
        # the last to ask for a ticket stores; whether it was also the last to read makes no difference
        "E-RACE",
        f"{START} @%p8 ret; ld.global.b32 %r21, [%rd1]; {{}} {COUNTER} 1; setp.ne.b32 %p7, %r30, 3; @%p7 ret; {STORED}",
        ACQ_REL,
        RELAXED,
        GRID | {"clusters": 4},
    ),
    # ---- the asynchronous proxy ----
    "bulk copy of ordinary stores": Case(
        "E-PROXY",
        INIT + f"@%p1 bra END; st.global.v4.b32 [%rd1], {{1, 2, 3, 4}}; {{}} {EXPECT} {COPY} END:" + wait("%r20"),
        "fence.proxy.async;",
        "",
        GRID | {"clusters": 1},
    ),
    "bulk copy of another CTA's stores": Case(
        "E-RACE",
        INIT
        + "mov.u32 %r8, %ctaid.x; setp.ne.u32 %p9, %r8, 0; @%p1 bra END; @%p9 bra READER;"
        + f"{STORED} {{}} {COUNTER} 1; mbarrier.arrive.shared::cta.b64 _, [%r20]; bra END;"
        + f"READER: AGAIN: {ACQ_REL} {UNTIL} fence.proxy.async; {EXPECT} {COPY} END:"
        + wait("%r20"),
        ACQ_REL,
        RELAXED,
        GRID,
    ),
    # ---- initialisation, programmatic dependent launch, addresses ----
    "packet polled where nobody wrote": Case(
        "E-UNINIT", "griddepcontrol.wait; {} ld.relaxed.gpu.global.b32 %r20, [%rd3];", "st.relaxed.gpu.global.b32 [%rd3], 0;"
    ),
    "relaxed store too early": Case("E-PDL", "{} st.relaxed.gpu.global.b32 [%rd3], %r1;", "griddepcontrol.wait;"),
    "atomic too early": Case("E-PDL", "{} atom.relaxed.gpu.global.add.u32 %r10, [%rd4], 1;", "griddepcontrol.wait;", "", GRID),
    "scratch polled too early": Case(
        "E-PDL",
        "{} AGAIN: ld.relaxed.gpu.global.b32 %r20, [%rd4]; setp.ge.u32 %p1, %r20, 64; @%p1 bra AGAIN; griddepcontrol.wait;",
        "griddepcontrol.wait;",
        "",
        GRID | {"predecessor": True},
    ),
    "relaxed store after the dependents": Case(
        "E-PDL",
        "griddepcontrol.wait; {0} st.relaxed.gpu.global.b32 [%rd3], %r1; {1}",
        "|griddepcontrol.launch_dependents;",
        "griddepcontrol.launch_dependents;|",
        {"clusters": 2, "co_resident": True},
    ),
    "atomic on an input": Case(
        "E-GLOBAL", "griddepcontrol.wait; st.global.b32 [%rd3], 0; atom.relaxed.gpu.global.add.u32 %r10, [{}], 1;", "%rd3", "%rd4"
    ),
    "relaxed store to an input": Case("E-GLOBAL", "griddepcontrol.wait; st.relaxed.gpu.global.b32 [{}], 1;", "%rd3", "%rd4"),
    "misaligned packet": Case("E-GLOBAL", START + "ld.relaxed.gpu.global.b64 %rd12, [%rd1+{}];", "8", "4", GRID),
    "lanes of one relaxed store disagree": Case(
        "E-RACE", "griddepcontrol.wait; st.relaxed.gpu.global.b32 [%rd2], {};", "7", "%r1", {"words": 32}
    ),
    # ---- atomics on shared memory ----
    "atomic where nobody wrote": Case("E-UNINIT", "{} " + OR + ", 1;", "st.shared.b32 [%r3], 0; bar.warp.sync -1;"),
    "store before an atomic of another warp": Case(
        "E-RACE", ZERO + "bar.warp.sync -1; {} " + OR + ", 1;", "bar.sync 0;", "", TWO_WARPS, False
    ),
    "atomics before a load": Case(
        "E-RACE", ZERO + "bar.sync 0;" + OR + ", 1; {} ld.shared.b32 %r10, [%r3];" + store(), "bar.sync 0;", "", TWO_WARPS
    ),
    "atomics before a store": Case(
        "E-RACE", ZERO + "bar.sync 0;" + OR + ", 1; {} @!%p1 st.shared.b32 [%r3], 3;", "bar.sync 0;", "", TWO_WARPS
    ),
    "an atomic hidden behind another": Case(
        "E-RACE",
        ZERO + f"bar.warp.sync -1; @!%p1 {OR}, 1; {{}} @!%p2 {OR}, 2; @!%p2 ld.shared.b32 %r10, [%r3];",
        "bar.warp.sync -1;",
    ),
    "a store hidden behind an atomic": Case("E-RACE", ZERO + f"@!%p1 {OR}, 1; {{}} @!%p2 {OR}, 2;", "bar.warp.sync -1;"),
    "atomic over what another lane reads": Case(
        "E-RACE", ZERO + f"bar.warp.sync -1; ld.shared.b32 %r10, [%r3]; {{}} @!%p1 {OR}, 1;", "bar.warp.sync -1;"
    ),
    "MMA operand changed by an atomic": Case(
        "E-PROXY",
        INIT + ZERO + f"bar.warp.sync -1; @%p1 bra END; {OR}, 1; {{}} {EXPECT} {COPY} END:" + wait("%r20"),
        "fence.proxy.async;",
        "",
        GRID | {"clusters": 1},
    ),
    # ---- barriers that are only arrived at ----
    "no arrival between two warps": Case(
        "E-RACE",
        SLOT
        + "setp.ge.u32 %p1, %r1, 32; @%p1 bra READER; st.shared.b32 [%r11], %r1; {0} ret;"
        + "READER: bar.sync 1, {1}; ld.shared.b32 %r10, [%r11+-128];",
        "bar.arrive 1, 64;|64",
        "|32",
        TWO_WARPS | {"policy": "round-robin"},
        False,
    ),
    "arrival that nobody waits for": Case("E-SYNC", "bar.arrive 1, 64; {}", "bar.arrive 1, 64;"),
}


def done(case: Case, text: str, **options: Any) -> Run:
    """Run the case on fresh zeros."""
    return run(instance(case, text), **({"data": np.zeros(256, np.uint32)} | case.options | options))


@pytest.mark.parametrize("name", CASES)
def test_check_fires(name: str) -> None:
    case = CASES[name]
    found = done(case, case.bad)
    assert case.check in found.ids, found.result.report()
    if case.exactly:
        assert found.ids == {case.check}, found.result.report()
    finding = next(f for f in found.result.findings if f.id == case.check)
    assert finding.severity == CATALOGUE[case.check][0]


@pytest.mark.parametrize("name", CASES)
def test_put_right_it_is_clean(name: str) -> None:
    case = CASES[name]
    assert done(case, case.good).ids == set()


@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if c.check in ("E-RACE", "A-PACKET") and c.exactly and "clusters" in c.options]
)
def test_findings_between_ctas_hardly_depend_on_the_schedule(name: str) -> None:
    """An unordered pair is found from whichever side comes second."""
    case = CASES[name]
    for policy in POLICIES:
        for seed in range(3):
            assert done(case, case.bad, policy=policy, seed=seed).ids == {case.check}, (policy, seed)
            assert done(case, case.good, policy=policy, seed=seed).ids == set(), (policy, seed)


def test_knowledge_passes_through_a_third_cta() -> None:
    """CTA 0 stores and releases to CTA 1, which releases to CTA 2; CTA 2 never saw CTA 0's counter."""
    body = (
        f"{START} @%p8 ret; setp.eq.u32 %p1, %r8, 1; setp.eq.u32 %p2, %r8, 2; @%p1 bra MIDDLE; @%p2 bra LAST;"
        f"{STORED} {ACQ_REL} %r30, [%rd1+64], 1; ret;"
        f"MIDDLE: A: {ACQ_REL} %r30, [%rd1+64], 0; setp.eq.b32 %p7, %r30, 0; @%p7 bra A; KIND %r30, [%rd1+128], 1; ret;"
        f"LAST: B: {ACQ_REL} %r30, [%rd1+128], 0; setp.eq.b32 %p7, %r30, 0; @%p7 bra B; {LOADED}"
    )
    case = Case("E-RACE", body.replace("KIND", "{}"), ACQ_REL, RELAXED, GRID | {"clusters": 3})
    for seed in range(4):
        right = done(case, case.good, seed=seed)
        assert right.ids == set(), right.result.report()
        assert right.out[0] == 5
        assert done(case, case.bad, seed=seed).ids == {"E-RACE"}


def test_a_race_names_the_other_thread_and_both_accesses() -> None:
    case = CASES["packet stored in two halves"]
    messages = {done(case, case.bad, seed=seed).result.findings[0].message for seed in range(8)}
    assert any("8 bytes, strong here, 4 bytes, strong by cluster 0 CTA 0 thread 0 (warp 0)" in m for m in messages), messages
