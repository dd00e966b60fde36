"""Every check of the catalogue: a kernel that makes it fire, and the same kernel put right, which is clean.

Checks about tensor cores are in test_tcgen05.py and test_wgmma.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from emulator import CATALOGUE, OFF, Buffer, Checks, Launch, Limits, Pointer, TensorMap, emulate
from tests.emulator import test_tcgen05, test_wgmma
from tests.emulator.test_copies import EXCHANGE, Box, load
from tests.emulator.tiny import WAIT, module, run, store, wait

INIT = """
    add.s32 %r20, %r3, 1024; setp.ne.b32 %p1, %r1, 0; setp.ne.b32 %p2, %r4, 0; shr.u32 %r7, %r1, 5;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r20], 1;
    fence.mbarrier_init.release.cluster;
    READY: bar.sync 0;
    griddepcontrol.wait;
"""
"""An mbarrier of one arrival at [%r20]; %p1: not thread 0, %p2: not lane 0, %r7: warp."""

SLOT = "shl.b32 %r11, %r1, 2; add.s32 %r11, %r11, %r3; "
"""This thread's word of shared memory."""

OTHER = "xor.b32 %r12, %r11, 128; "
"""The same lane's word of the neighbouring warp."""


@dataclasses.dataclass
class Case:
    """``bad`` contains ``old`` instead of ``new``; a case with only a body has nothing to put right."""

    check: str
    body: str
    good: str = ""
    bad: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    exactly: bool = True
    """The bad kernel has this finding and no other."""


TWO_WARPS: dict[str, Any] = {"threads": 64}
TWO_CTAS: dict[str, Any] = {"ctas": 2}
TMA: dict[str, Any] = {
    "maps": (TensorMap(Box((128, 8, 1), (128, 1024), (128, 8, 1)), "in"),),
    "data": np.arange(256, dtype=np.uint32),
    "words": 256,
    "shared": 8200,
}

CASES = {
    # ---- initialisation ----
    "uninitialised shared memory": Case("E-UNINIT", SLOT + "{} ld.shared.b32 %r10, [%r11];" + store(), "st.shared.b32 [%r11], %r1;"),
    "uninitialised register": Case("E-UNINIT", "{} add.s32 %r10, %r50, 1;" + store(), "mov.b32 %r50, 1;"),
    "register defined in some lanes only": Case(
        "E-UNINIT", "setp.gt.u32 %p1, %r4, 3; {} mov.b32 %r50, 1; add.s32 %r10, %r50, 1;" + store(), "", "@%p1"
    ),
    "output read before it is written": Case(
        "E-UNINIT", "griddepcontrol.wait; {} ld.global.b32 %r10, [%rd3]; st.global.b32 [%rd3], %r10;", "st.global.b32 [%rd3], %r1;"
    ),
    # ---- happens-before in a CTA ----
    "read of another warp's store": Case(
        "E-RACE", SLOT + OTHER + "st.shared.b32 [%r11], %r1; {} ld.shared.b32 %r10, [%r12];" + store(), "bar.sync 0;", "", TWO_WARPS, False
    ),
    "read of another lane's store": Case(
        "E-RACE", SLOT + "xor.b32 %r12, %r11, 4; st.shared.b32 [%r11], %r1; {} ld.shared.b32 %r10, [%r12];" + store(), "bar.warp.sync -1;"
    ),
    "store over what another warp reads": Case(
        "E-RACE",
        SLOT + OTHER + "st.shared.b32 [%r11], %r1; bar.sync 0; ld.shared.b32 %r10, [%r12]; {} st.shared.b32 [%r11], %r10;" + store(),
        "bar.sync 0;",
        "",
        TWO_WARPS,
    ),
    "two lanes store different values to one word": Case(
        "E-RACE", SLOT + "{} st.shared.b32 [%r11], %r1; bar.warp.sync -1; ld.shared.b32 %r10, [%r11];" + store(), "", "mov.b32 %r11, %r3;"
    ),
    "arrival before the other lanes' stores are collected": Case(
        "E-RACE",
        INIT + SLOT + OTHER + "setp.eq.b32 %p3, %r7, 1; @%p3 bra READER; st.shared.b32 [%r11], %r1; {}"
        "@!%p2 mbarrier.arrive.shared::cta.b64 _, [%r20]; ret; READER: " + wait("%r20") + "ld.shared.b32 %r10, [%r12];" + store(),
        "bar.warp.sync -1;",
        "",
        TWO_WARPS,
    ),
    "two unordered stores to global memory": Case(
        "E-RACE", "griddepcontrol.wait; st.global.b32 [{}], %r1;", "%rd3", "%rd2", {**TWO_WARPS, "words": 64}
    ),
    "two clusters store to one word": Case(
        "E-RACE", "griddepcontrol.wait; setp.ne.b32 %p1, %r4, 0; @%p1 ret; st.global.b32 [{}], %r1;", "%rd3", "%rd2", {"clusters": 2}
    ),
    # ---- proxies ----
    "TMA over ordinary stores": Case(
        "E-PROXY",
        load((0, 0, 0), 1024, extra=SLOT + "st.shared.b32 [%r11], 0; {} bar.sync 0;"),
        "fence.proxy.async.shared::cta;",
        "",
        TMA,
    ),
    "TMA over ordinary loads": Case(
        "W-PROXY-WAR",
        load((0, 0, 0), 1024, extra=SLOT + "st.shared.b32 [%r11], 0; fence.proxy.async; ld.shared.b32 %r60, [%r11]; {} bar.sync 0;"),
        "fence.proxy.async.shared::cta;",
        "",
        TMA,
    ),
    "TMA over st.async bytes": Case(
        "A-STASYNC",
        EXCHANGE + "{} bar.warp.sync -1; @%p1 bra LATER; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 256;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 256, [%r20]; LATER: " + wait("%r20", "1"),
        "fence.proxy.async;",
        "",
        TWO_CTAS | {"data": np.arange(64, dtype=np.uint32)},
        False,
    ),
    # ---- addresses ----
    "shared memory out of bounds": Case("E-SMEM", SLOT + "st.shared.b32 [%r11+{}], %r1; griddepcontrol.wait;", "8060", "8192"),
    "misaligned shared access": Case("E-SMEM", SLOT + "st.shared.b32 [%r11+{}], %r1; griddepcontrol.wait;", "4", "2"),
    "global memory out of bounds": Case("E-GLOBAL", "ld.global.b32 %r10, [%rd4+{}];" + store(), "0", "4"),
    "misaligned global access": Case("E-GLOBAL", "ld.global.b32 %r10, [%rd1+{}];" + store(), "4", "2"),
    "store to an input": Case("E-GLOBAL", "griddepcontrol.wait; st.global.b32 [{}], %r1;", "%rd3", "%rd4"),
    "null pointer": Case("E-GLOBAL", "mov.b64 %rd9, {}; ld.global.b32 %r10, [%rd9];" + store(), "%rd1", "0"),
    # ---- clusters ----
    "remote store before the other CTA has started": Case(
        "E-DSMEM-LIFE",
        EXCHANGE.replace("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;", "{}"),
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;",
        "",
        TWO_CTAS,
        False,
    ),
    "exit before the remote stores have come": Case(
        "E-DSMEM-LIFE",
        EXCHANGE.replace(wait("%r20", scope="cluster"), "{}").replace("ld.shared.b32 %r10, [%r23];", "mov.b32 %r10, 0;"),
        wait("%r20", scope="cluster"),
        "",
        TWO_CTAS,
        False,
    ),
    "remote bytes through a CTA-scope wait": Case(
        "E-SCOPE", EXCHANGE.replace("acquire.cluster.shared", "acquire.{}.shared"), "cluster", "cta", TWO_CTAS
    ),
    "cluster barrier not waited for": Case(
        "A-CLUSTER-WAIT", "barrier.cluster.arrive.relaxed.aligned; {}" + store("%r1"), "barrier.cluster.wait.acquire.aligned;", "", TWO_CTAS
    ),
    "arrived twice": Case(
        "E-SYNC",
        "barrier.cluster.arrive.aligned; {} barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" + store("%r1"),
        "barrier.cluster.wait.aligned;",
        "",
        TWO_CTAS,
        False,
    ),
    "waited without arriving": Case(
        "E-SYNC", "{} barrier.cluster.wait.aligned;" + store("%r1"), "barrier.cluster.arrive.aligned;", "", TWO_CTAS
    ),
    # ---- programmatic dependent launch ----
    "input of the preceding kernel read too early": Case(
        "E-PDL",
        "{0} ld.global.b32 %r10, [%rd4]; {1} st.global.b32 [%rd3], %r10;",
        "griddepcontrol.wait;|",
        "|griddepcontrol.wait;",
        {"predecessor": True},
    ),
    "store before the preceding kernel has ended": Case("E-PDL", "{} st.global.b32 [%rd3], %r1;", WAIT),
    "the wait of another warp does not help by itself": Case(
        "E-PDL", "setp.ne.b32 %p1, %r1, 0; @!%p1 griddepcontrol.wait; {} st.global.b32 [%rd3], %r1;", "bar.sync 0;", "", TWO_WARPS
    ),
    "dependents launched before the last store": Case(
        "E-PDL",
        "griddepcontrol.wait; {0} st.global.b32 [%rd3], %r1; {1}",
        "|griddepcontrol.launch_dependents;",
        "griddepcontrol.launch_dependents;|",
    ),
    # ---- mbarriers ----
    "no barrier there": Case(
        "E-MBAR-UNINIT", INIT + "{}" + wait("%r20"), "@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];", "add.s32 %r20, %r20, 8;"
    ),
    "init not ordered before the use": Case(
        "E-MBAR-UNINIT",
        INIT.replace("bar.sync 0;", "{}").replace("[%r20], 1;", "[%r20], 2;")
        + "@!%p2 mbarrier.arrive.shared::cta.b64 _, [%r20];"
        + wait("%r20"),
        "bar.sync 0;",
        "",
        {"threads": 64, "policy": "round-robin"},
        False,
    ),
    "initialised twice": Case(
        "E-MBAR-REINIT",
        INIT + "{} @!%p1 mbarrier.init.shared::cta.b64 [%r20], 1; bar.sync 0;",
        "@!%p1 mbarrier.inval.shared::cta.b64 [%r20];",
    ),
    "count of zero": Case("E-MBAR-RANGE", INIT.replace("[%r20], 1;", "[%r20], {};"), "1", "0"),
    "misaligned barrier": Case("E-MBAR-RANGE", INIT.replace("%r3, 1024", "%r3, {}"), "1024", "1028"),
    "transaction count too large": Case(
        "E-MBAR-RANGE", INIT + "@!%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r20], {};", "0", "1048576", {}, False
    ),
    "too many arrivals": Case(
        "E-MBAR-UNDERFLOW", INIT.replace("[%r20], 1;", "[%r20], 2;") + "@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r20], {};", "2", "3"
    ),
    "data over a barrier": Case("E-MBAR-OVERLAP", INIT + "@!%p1 st.shared.b32 [%r3+{}], 1;", "1032", "1028"),
    "wait on another CTA's barrier": Case(
        "E-MBAR-REMOTE",
        INIT + "@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r20]; xor.b32 %r30, %r2, {};"
        "mapa.shared::cluster.u32 %r31, %r20, %r30;" + wait("%r31"),
        "0",
        "1",
        TWO_CTAS,
    ),
    "barrier not fenced for TMA": Case(
        "E-MBAR-INITFENCE",
        load((0, 0, 0), 1024).replace("fence.mbarrier_init.release.cluster;", "{}"),
        "fence.mbarrier_init.release.cluster;",
        "",
        TMA,
    ),
    "a phase that nobody saw": Case(
        "E-MBAR-LAP",
        INIT + "@%p1 bra END; mbarrier.arrive.shared::cta.b64 _, [%r20]; {} mbarrier.arrive.shared::cta.b64 _, [%r20]; END:"
        "bar.warp.sync -1;" + wait("%r20", "1"),
        wait("%r20"),
    ),
    "a waiter that was lapped": Case(
        "E-MBAR-LAP",
        INIT
        + "@%p1 bra FOLLOW;"
        + "".join(f"mbarrier.arrive.shared::cta.b64 _, [%r20]; {wait('%r20', str(i % 2))}" for i in range(3))
        + "FOLLOW: {} setp.eq.b32 %p3, %r7, 0; @%p3 bra END;"
        + "mov.b32 %r9, 0;"
        + "add.s32 %r9, %r9, 1;" * 300
        + wait("%r20")
        + "END:",
        "bar.sync 0;",
        "",
        TWO_WARPS,
    ),
    "expected bytes that never come": Case(
        "E-TX", INIT + "@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {};", "0", "16", {}, False
    ),
    "a bulk copy that nobody waits for": Case(
        "E-COPY-EXIT",
        INIT
        + "@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 128;"
        + "@!%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 128, [%r20];"
        + "bar.sync 0;" * 40
        + "{}",
        wait("%r20"),
    ),
    "half a phase": Case(
        "E-MBAR-PARTIAL", INIT.replace("[%r20], 1;", "[%r20], 2;") + "@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r20], {};", "2", "1"
    ),
    # ---- execution ----
    "nobody arrives": Case("E-DEADLOCK", INIT + "{}" + wait("%r20"), "@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];"),
    "a warp is missing from the barrier": Case("E-DEADLOCK", "{} bar.sync 1, 64;", "", "setp.gt.u32 %p1, %r1, 31; @%p1 ret;", TWO_WARPS),
    "a loop without end": Case("E-DEADLOCK", "LOOP: setp.eq.b32 %p1, %r4, %r4; @{}%p1 bra LOOP;", "!", "", {"limits": Limits(2000)}),
    "different counts": Case(
        "E-SYNC",
        "shr.u32 %r7, %r1, 5; mul.lo.s32 %r8, %r7, {}; add.s32 %r9, %r8, 64; bar.sync 1, %r9;",
        "0",
        "32",
        {"threads": 64, "policy": "round-robin"},
        False,
    ),
    "lanes missing from a shuffle": Case(
        "E-SYNC", "setp.gt.u32 %p1, %r4, 15; {} bra END; shfl.sync.idx.b32 %r10, %r4, 0, 31, -1; END: mov.b32 %r11, 0;", "@!%p3", "@%p1"
    ),
    "aligned instruction after divergence": Case(
        "A-CONVERGE",
        "setp.gt.u32 %p1, %r4, 15; @%p1 bra MEET; mov.b32 %r10, 1; MEET: {}barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        "bar.warp.sync -1;",
    ),
    "product and sum that may be fused": Case(
        "E-CONTRACT", "mov.f32 %f1, 0f3F800000; mul{}.f32 %f2, %f1, %f1; add.f32 %f3, %f2, %f1;" + store("%f3"), ".rn", ""
    ),
    "destination of TMA in another CTA": Case(
        "E-TMA",
        load((0, 0, 0), 1024)
        .replace("[%r21], [%rd11", "[{}], [%rd11")
        .replace("mov.b64 %rd10", "mov.b32 %r60, 1; mapa.shared::cluster.u32 %r61, %r21, %r60; mov.b64 %rd10"),
        "%r21",
        "%r61",
        TMA | {"ctas": 2, "words": 256},
        False,
    ),
}

CASES["lanes missing from a shuffle"].body = "setp.gt.u32 %p3, %r4, 31; " + CASES["lanes missing from a shuffle"].body
CASES["lanes missing from a shuffle"].good = "@%p3"
RACES_ANYWAY = {"destination of TMA in another CTA"}
"""Cases whose good version has findings of another kind (two CTAs run the same load of one output)."""


def instance(case: Case, text: str) -> str:
    if "{0}" in case.body:
        return case.body.format(*text.split("|"))
    return case.body.replace("{}", text)


@pytest.mark.parametrize("name", CASES)
def test_check_fires(name: str) -> None:
    case = CASES[name]
    done = run(instance(case, case.bad), **case.options)
    assert case.check in done.ids, done.result.report()
    if case.exactly:
        assert done.ids == {case.check}, done.result.report()
    finding = next(f for f in done.result.findings if f.id == case.check)
    assert finding.severity == CATALOGUE[case.check][0]


@pytest.mark.parametrize("name", CASES)
def test_put_right_it_is_clean(name: str) -> None:
    case = CASES[name]
    done = run(instance(case, case.good), **case.options)
    assert case.check not in done.ids, done.result.report()
    if name not in RACES_ANYWAY:
        assert done.ids == set(), done.result.report()


def test_every_check_has_a_case() -> None:
    from tests.emulator import test_global_order

    tested = {case.check for case in (*CASES.values(), *test_global_order.CASES.values())}
    for edits in (test_tcgen05.EDITS, test_wgmma.EDITS):
        for _, ids in edits.values():
            tested |= ids
    assert tested == set(CATALOGUE)


def test_checks_can_be_switched_off_one_by_one_and_all_together() -> None:
    case = CASES["read of another lane's store"]
    body = instance(case, case.bad)
    assert run(body, checks=Checks(disabled=frozenset({"E-RACE"}))).ids == set()
    assert run(body, checks=OFF).ids == set()
    with pytest.raises(ValueError, match="unknown check ids"):
        run(body, checks=Checks(disabled=frozenset({"E-NONSENSE"})))


def test_what_dependents_wait_for_is_a_choice() -> None:
    case = CASES["dependents launched before the last store"]
    body = instance(case, case.bad)
    assert run(body, checks=Checks(dependents_wait=True)).ids == set()
    early = body.replace("griddepcontrol.wait;", "")
    assert run(early, checks=Checks(dependents_wait=True)).ids == {"E-PDL"}, "the own predecessor is another matter"


def test_what_st_async_releases_is_a_choice() -> None:
    """Warp 1 reads what warp 0 stored before its st.async to their CTA's barrier: ordered only if st.async releases that too."""
    body = (
        INIT
        + SLOT
        + OTHER
        + "setp.ne.b32 %p3, %r7, 0; @%p3 bra READER;"
        + "@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 4;"
        + "st.shared.b32 [%r11], %r1; bar.warp.sync -1; @%p1 bra END;"
        + "mapa.shared::cluster.u32 %r30, %r3, %r2; mapa.shared::cluster.u32 %r31, %r20, %r2;"
        + "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r30+2048], %r1, [%r31]; bra END;"
        + "READER: "
        + wait("%r20", scope="cluster")
        + "ld.shared.b32 %r10, [%r12];"
        + store()
        + "END:"
    )
    for mode, wanted in (("data", {"E-RACE"}), ("reads", {"E-RACE"}), ("all", set())):
        checks = Checks(st_async_releases=mode)  # type: ignore[arg-type]
        assert run(body, threads=64, ctas=2, checks=checks).ids == wanted, mode


def test_remote_arrival_needs_cluster_scope() -> None:
    """CTA 1 stores, then arrives at CTA 0's barrier; CTA 0 stores to the same global word after its wait."""
    body = (
        INIT
        + "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; setp.eq.b32 %p3, %r2, 0; @%p3 bra FIRST;"
        + "@!%p1 st.global.b32 [%rd2], 1; mov.b32 %r30, 0; mapa.shared::cluster.u32 %r31, %r20, %r30;"
        + "@!%p1 mbarrier.arrive{}.shared::cluster.b64 _, [%r31]; bra END;"
        + "FIRST: "
        + wait("%r20", scope="cluster")
        + "@!%p1 st.global.b32 [%rd2], 2; END:"
    )
    right = run(body.replace("{}", ".release.cluster"), ctas=2)
    assert right.ids == set() and right.out[0] == 2
    for scope in ("", ".release.cta", ".relaxed.cluster"):
        assert run(body.replace("{}", scope), ctas=2).ids == {"E-RACE"}


def test_deadlock_report_says_who_waits_for_what() -> None:
    labels = {1024: "full[0]"}
    result = emulate(
        module(INIT + "@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 32;" + wait("%r20")),
        Launch((1, 1, 1), (64, 1, 1), (1, 1, 1), 2048, labels),
        [Buffer("in", np.zeros(4, np.uint8)), Buffer("out", np.zeros(4, np.uint8), "output")],
        [Pointer("in"), Pointer("out")],
    )
    (finding,) = [f for f in result.findings if f.id == "E-DEADLOCK"]
    for piece in ("CTA 0 warp 1", "waits for parity 0 of full[0]", "phase 0", "0 of 1 arrivals", "32 bytes pending"):
        assert piece in finding.message


def test_findings_name_cta_warp_line_and_text() -> None:
    done = run("st.shared.b32 [%r3+9000], %r1;", threads=64, ctas=2)
    (finding,) = done.result.findings
    assert finding.where.cta in (0, 1) and finding.where.warp in (0, 1)
    assert "st.shared.b32 [%r3+9000], %r1" in finding.where.text
    assert finding.count == 4 and finding.where.line > 0
