"""Grids whose CTAs are all alive at once: schedules, poll loops, atomics, and memory that outlives a launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulator import OFF, POLICIES, Buffer, Launch, Limits, Pointer, emulate, polling
from tests.emulator.test_copies import EXCHANGE
from tests.emulator.test_launch import TWO_POINTERS
from tests.emulator.tiny import Run, module, run, store

WHO = "mov.u32 %r8, %ctaid.x; mov.u32 %r9, %nctaid.x; griddepcontrol.wait; "
"""%r8: this CTA, %r9: how many."""

SEND = """
    mul.wide.u32 %rd10, %r6, 8; add.s64 %rd11, %rd1, %rd10;
    add.s32 %r20, %r6, 1000; mov.b32 %r21, 7; mov.b64 %rd12, {%r20, %r21};
    st.relaxed.gpu.global.b64 [%rd11], %rd12;
"""
"""Every thread of the launch stores the packet {its number + 1000, epoch 7} at its place in the input buffer."""

POLL = """
    add.s32 %r22, %r8, 1; setp.eq.u32 %p1, %r22, %r9; selp.b32 %r23, 0, %r22, %p1;
    mad.lo.s32 %r24, %r23, %r5, %r1; mul.wide.u32 %rd13, %r24, 8; add.s64 %rd14, %rd1, %rd13; mov.b32 %r28, 7;
    { .reg .pred p; AGAIN: ld.relaxed.gpu.global.b64 %rd15, [%rd14]; mov.b64 {%r25, %r26}, %rd15;
    setp.ne.b32 p, %r26, %r28; @p bra AGAIN; }
"""
"""%r25: the value of the same thread of the next CTA; the last CTA reads the first one's."""

RING = WHO + SEND + POLL + "st.global.b32 [%rd3], %r25;"


def ring(body: str = RING, ctas: int = 4, threads: int = 64, **options: Any) -> Run:
    return grid(body, ctas, threads, data=np.zeros(2 * ctas * threads, np.uint32), **options)


def grid(body: str, ctas: int = 4, threads: int = 32, **options: Any) -> Run:
    """``ctas`` CTAs without clusters, all alive; the input may be written."""
    given: dict[str, Any] = {"in_role": "inout", "co_resident": True} | options
    return run(body, clusters=ctas, threads=threads, **given)


def expected(ctas: int = 4, threads: int = 64) -> list[int]:
    number = np.arange(ctas * threads)
    return ((number + threads) % (ctas * threads) + 1000).tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_ctas_wait_for_each_other_through_global_memory(policy: str) -> None:
    for seed in range(3):
        done = ring(policy=policy, seed=seed)
        assert done.result.findings == [], done.result.report()
        assert done.out.tolist() == expected()


def test_clusters_that_run_one_after_another_cannot_wait_for_each_other() -> None:
    done = ring(co_resident=False, limits=Limits(5000))
    assert "E-DEADLOCK" in done.ids


def test_without_the_sanitizer() -> None:
    assert ring(checks=OFF).out.tolist() == expected()


def test_same_seed_same_run() -> None:
    first, second = ring(seed=5).result, ring(seed=5).result
    assert first.steps == second.steps and first.counts == second.counts
    assert {i: t.events for i, t in first.timelines.items()} == {i: t.events for i, t in second.timelines.items()}
    assert sorted(first.timelines) == [0, 1, 2, 3]
    assert first.steps != ring(seed=6).result.steps


def test_clusters_of_several_ctas_can_be_co_resident() -> None:
    """Three clusters exchange inside themselves as they do alone, and their ranks and shared memory do not mix."""
    alone = run(EXCHANGE, ctas=2, clusters=3)
    for policy in POLICIES:
        together = run(EXCHANGE, ctas=2, clusters=3, co_resident=True, policy=policy)
        assert together.result.findings == [], together.result.report()
        np.testing.assert_array_equal(together.out, alone.out)


def test_packets_cross_clusters_of_several_ctas() -> None:
    for seed in range(3):
        done = run(RING, ctas=2, clusters=2, threads=64, seed=seed, in_role="inout", data=np.zeros(512, np.uint32), co_resident=True)
        assert done.result.findings == [], done.result.report()
        assert done.out.tolist() == expected()


def test_twenty_four_full_ctas_fit() -> None:
    done = ring(ctas=24, threads=320, shared=232_448)
    assert done.result.findings == [] and done.out.tolist() == expected(24, 320)


def test_arguments() -> None:
    launch = Launch((4, 1, 1), (32, 1, 1), co_resident=True)
    buffers = [Buffer("in", np.zeros(4, np.uint8)), Buffer("out", np.zeros(512, np.uint8), "output")]
    with pytest.raises(ValueError, match="runs whole"):
        emulate(module(store("%r6")), launch, buffers, TWO_POINTERS, clusters=[1])
    with pytest.raises(ValueError, match=r"initialised must be bool \[4\]"):
        Buffer("s", np.zeros(4, np.uint8), "inout", initialised=np.ones(3, bool))
    with pytest.raises(ValueError, match="and the buffer inout"):
        Buffer("s", np.zeros(4, np.uint8), "output", initialised=np.ones(4, bool))


@pytest.mark.parametrize(
    "name", ["ld.relaxed.sys.global.b32 %r10, [%rd1];", "ld.relaxed.gpu.global.b16 %h1, [%rd1];", "fence.acq_rel.gpu;"]
)
def test_what_is_not_known_names_itself(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown instruction {name.split()[0].rstrip(';')}"):
        grid(name)


# ---- poll loops ----


def test_only_pollers_is_a_deadlock_that_says_who_polls_what_for_what() -> None:
    """CTA 2 sends nothing, so its neighbour waits for ever."""
    silent = WHO + "setp.eq.u32 %p2, %r8, 2; @%p2 bra SKIP;" + SEND + "SKIP: " + POLL + "st.global.b32 [%rd3], %r25;"
    (finding,) = [f for f in ring(silent).result.findings if f.id == "E-DEADLOCK"]
    assert finding.message.startswith("nothing can run")
    assert finding.message.count("polls") == 2, "the two warps of CTA 1"
    assert "cluster 1 CTA 0 warp 1" in finding.message
    assert "polls 8 bytes at byte 1280 of buffer in (lane 0), last read 0x0 0x0" in finding.message
    assert "the loop compares with %r28 = 0x7" in finding.message


SLOW = (
    WHO
    + "setp.ne.u32 %p2, %r8, 0; @%p2 bra POLLER; mov.b32 %r30, 0;"
    + "COUNT: add.s32 %r30, %r30, 1; setp.lt.u32 %p3, %r30, 1000; @%p3 bra COUNT;"
    + SEND
    + "st.global.b32 [%rd3], %r30; ret;"
    + "POLLER: mul.wide.u32 %rd13, %r1, 8; add.s64 %rd14, %rd1, %rd13; mov.b32 %r31, 0;"
    + "AGAIN: ld.relaxed.gpu.global.b64 %rd15, [%rd14]; IN mov.b64 {%r25, %r26}, %rd15;"
    + "setp.ne.b32 %p4, %r26, 7; @%p4 bra AGAIN; BEHIND st.global.b32 [%rd3], %r25;"
)


def slow(inside: str = "", behind: str = "", send: str = SEND, **options: Any) -> Run:
    """CTA 0 counts to 1000 before it sends; the others poll, and do something more in the loop and behind it."""
    return ring(SLOW.replace("IN ", inside).replace("BEHIND ", behind).replace(SEND, send), threads=32, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_polling_is_cheap_and_ends(policy: str) -> None:
    done = slow(policy=policy)
    assert done.result.findings == [] and done.out[32:].tolist() == 3 * list(range(1000, 1032))
    loads = done.result.counts.instructions[0]["ld.relaxed.gpu.global.b64"]
    assert loads < 40, "three warps, a handful of rounds each"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_that_counts_its_rounds_spins(policy: str) -> None:
    """It may not park: the number of rounds is a result. It must not starve the others either."""
    done = slow("add.s32 %r31, %r31, 1;", "mov.b32 %r25, %r31;", policy=policy)
    assert done.result.findings == []
    assert done.out[32:].max() > 5


def test_a_loop_that_counts_its_rounds_may_give_up() -> None:
    done = slow("add.s32 %r31, %r31, 1; setp.gt.u32 %p5, %r31, 20; @%p5 bra OUT;", "OUT: ", "")
    assert "E-DEADLOCK" not in done.ids and (done.out[:32] == 1000).all()


def test_a_spinning_loop_without_end_says_what_it_polls() -> None:
    done = slow("add.s32 %r31, %r31, 1;", "mov.b32 %r25, %r31;", "", limits=Limits(3000))
    (finding,) = [f for f in done.result.findings if f.id == "E-DEADLOCK"]
    assert finding.message.startswith("no end after 12000 instructions")
    assert "running; polls 8 bytes at byte 0 of buffer in" in finding.message


def test_parking_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels with every poll loop spinning."""
    analyse = polling.analyse
    monkeypatch.setattr(polling, "analyse", lambda ops: {at: polling.PollSite(s.loop, False, s.inputs) for at, s in analyse(ops).items()})
    for policy in POLICIES:
        done = ring(ctas=3, threads=32, policy=policy)
        assert done.result.findings == [], done.result.report()
        assert done.out.tolist() == expected(3, 32)


TWO_LOADS = (
    WHO
    + "setp.ne.u32 %p2, %r8, 0; @%p2 bra POLLER;"
    + "st.relaxed.gpu.global.b32 [%rd1], 1; st.relaxed.gpu.global.b32 [%rd1+256], 1; ret;"
    + "POLLER: AGAIN: ld.relaxed.gpu.global.b32 %r20, [%rd1]; ld.relaxed.gpu.global.b32 %r21, [%rd1+256];"
    + "and.b32 %r22, %r20, %r21; setp.eq.b32 %p3, %r22, 0; @%p3 bra AGAIN; st.global.b32 [%rd3], 5;"
)
"""A round of two loads on different lines: a store to the second after it was read must end the wait."""


@pytest.mark.parametrize("policy", POLICIES)
def test_a_round_of_several_loads(policy: str) -> None:
    for seed in range(10):
        done = grid(TWO_LOADS, 2, policy=policy, seed=seed, data=np.zeros(128, np.uint32))
        assert done.result.findings == [], done.result.report()
        assert (done.out[32:] == 5).all()


def sites(body: str) -> dict[str, bool]:
    """Text of each poll load -> may it park?"""
    from emulator import Arithmetic
    from emulator.decode import decode
    from emulator.parser import parse

    parsed = parse(module(body))
    program = decode(parsed, parsed.kernel(), Launch((1, 1, 1), (32, 1, 1)), Arithmetic(), 0)
    return {program.ops[at].source.text.split(" ", 1)[1]: site.parks for at, site in program.polls.items()}


LOAD = "ld.relaxed.gpu.global.b32 %r20, [%rd1];"


@pytest.mark.parametrize(
    ("body", "parks"),
    [
        ("A: " + LOAD + "setp.eq.b32 %p1, %r20, 0; @%p1 bra A;", [True]),
        ("A: " + LOAD + "setp.eq.b32 %p1, %r20, 0; vote.sync.any.pred %p2, %p1, -1; @%p2 bra A;", [True]),
        # tested at the top of the loop: the predicate is dead at the load
        ("mov.pred %p1, 1; A: @!%p1 bra B; " + LOAD + "setp.eq.b32 %p1, %r20, 0; bra A; B:", [True]),
        # the address, a counter or the previous value is carried round
        ("A: " + LOAD + "add.s64 %rd1, %rd1, 4; setp.eq.b32 %p1, %r20, 0; @%p1 bra A;", [False]),
        ("mov.b32 %r21, 0; A: " + LOAD + "add.s32 %r21, %r21, %r20; setp.lt.u32 %p1, %r21, 9; @%p1 bra A;", [False]),
        ("mov.b32 %r21, 0; A: " + LOAD + "setp.eq.b32 %p1, %r20, %r21; mov.b32 %r21, %r20; @%p1 bra A;", [False]),
        # written in some lanes only, so that the rest is carried round
        ("A: " + LOAD + "setp.eq.b32 %p1, %r20, 0; @%p1 mov.b32 %r21, %r20; setp.eq.b32 %p2, %r21, 0; @%p2 bra A;", [False]),
        # something else happens in the loop, or there is none: not a poll loop
        ("A: " + LOAD + "st.shared.b32 [%r3], %r20; setp.eq.b32 %p1, %r20, 0; @%p1 bra A;", []),
        ("A: " + LOAD + "ld.shared.b32 %r21, [%r3]; setp.eq.b32 %p1, %r20, %r21; @%p1 bra A;", []),
        (LOAD, []),
    ],
)
def test_which_loops_may_park(body: str, parks: list[bool]) -> None:
    assert list(sites(body).values()) == parks


# ---- relaxed stores on their way ----

FLAGGED = (
    WHO
    + "setp.ne.u32 %p2, %r8, 0; @%p2 bra READER;"
    + "st.relaxed.gpu.global.b64 [%rd1], 5; {}.gpu.global.b32 [%rd1+256], 1; ret;"
    + "READER: AGAIN: {}.gpu.global.b32 %r21, [%rd1+256]; setp.eq.b32 %p3, %r21, 0; @%p3 bra AGAIN;"
    + "ld.relaxed.gpu.global.b64 %rd12, [%rd1]; cvt.u32.u64 %r22, %rd12; st.global.b32 [%rd3], %r22;"
)
"""CTA 0 stores data, then a flag; CTA 1 waits for the flag and reads the data. Orders of the flag's store and load to be filled in."""


def seen(store: str, load: str) -> set[int]:
    """What the reader's first thread finds, over many schedules."""
    body = FLAGGED.format(store, load)
    one = "setp.ne.u32 %p9, %r1, 0; @%p9 ret; "
    return {int(grid(one + body, 2, seed=seed, data=np.zeros(128, np.uint32)).out[32]) for seed in range(24)}


def test_relaxed_stores_become_visible_in_any_order_unless_released() -> None:
    assert seen("st.relaxed", "ld.relaxed") == {0, 5}
    assert seen("st.release", "ld.acquire") == {5}


def test_the_elements_of_a_vector_are_stores_of_their_own() -> None:
    """A reader that looks at the first packet only may find the second one old."""
    body = (
        WHO
        + "setp.ne.u32 %p9, %r1, 0; @%p9 ret; setp.ne.u32 %p2, %r8, 0; @%p2 bra READER;"
        + "mov.b64 %rd12, {1, 7}; mov.b64 %rd13, {2, 7}; st.relaxed.gpu.global.v2.b64 [%rd1], {%rd12, %rd13}; ret;"
        + "READER: AGAIN: ld.relaxed.gpu.global.v2.b64 {%rd12, %rd13}, [%rd1]; mov.b64 {%r20, %r21}, %rd12; mov.b64 {%r22, %r23}, %rd13;"
        + "CHECK setp.ne.b32 %p3, %r21, 7; @%p3 bra AGAIN; st.global.b32 [%rd3], %r22;"
    )

    def values(check: str) -> set[int]:
        found = [grid(body.replace("CHECK", check), 2, seed=seed, data=np.zeros(16, np.uint32)) for seed in range(24)]
        assert all(done.result.ok for done in found)
        return {int(done.out[32]) for done in found}

    assert values("and.b32 %r21, %r21, %r23;") == {2}
    assert values("") == {0, 2}


def test_a_cluster_sees_its_own_stores_at_once() -> None:
    body = WHO + "st.relaxed.gpu.global.b32 [%rd4], 9; ld.global.b32 %r20, [%rd4]; st.relaxed.gpu.global.b32 [%rd4], 11; bar.warp.sync -1;"
    body += "ld.relaxed.gpu.global.b32 %r21, [%rd4]; mad.lo.s32 %r22, %r20, 100, %r21; st.global.b32 [%rd3], %r22;"
    for policy in POLICIES:
        done = grid(body, 3, policy=policy)
        assert done.result.findings == [], done.result.report()
        assert (done.out == 911).all()


# ---- atomics ----


def test_a_ticket_is_given_once() -> None:
    for seed in range(3):
        done = grid(
            WHO + "atom.acq_rel.gpu.global.add.u32 %r10, [%rd1], 1; st.global.b32 [%rd3], %r10;", data=np.zeros(1, np.uint32), seed=seed
        )
        assert done.result.findings == [] and sorted(done.out.tolist()) == list(range(128))


ATOMICS = {
    # operation: (old, operands, new)
    "add.u32": (0xFFFFFFFF, (2,), 1),
    "min.u32": (5, (0xFFFFFFFF,), 5),
    "min.s32": (5, (0xFFFFFFFF,), 0xFFFFFFFF),
    "max.u32": (5, (0xFFFFFFFF,), 0xFFFFFFFF),
    "max.s32": (5, (0xFFFFFFFF,), 5),
    "and.b32": (0b1100, (0b1010,), 0b1000),
    "or.b32": (0b1100, (0b1010,), 0b1110),
    "xor.b32": (0b1100, (0b1010,), 0b0110),
    "exch.b32": (3, (4,), 4),
    "cas.b32": (3, (3, 4), 4),
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("space", ["relaxed.gpu.global", "relaxed.cta.shared::cta"])
def test_atomic_operations(name: str, space: str) -> None:
    old, operands, new = ATOMICS[name]
    values = ", ".join(map(str, operands))
    place = "%rd1" if "global" in space else "%r3"
    body = (
        f"griddepcontrol.wait; setp.ne.u32 %p9, %r1, 0; @%p9 ret; st{'.shared' if 'shared' in space else '.global'}.b32 [{place}], {old};"
    )
    load = f"ld{'.shared' if 'shared' in space else '.global'}.b32 %r21, [{place}];"
    done = grid(
        body + f"atom.{space}.{name} %r20, [{place}], {values}; {load} st.global.b32 [%rd2], %r20; st.global.b32 [%rd2+4], %r21;", 1
    )
    assert done.result.findings == [], done.result.report()
    assert done.out[:2].tolist() == [old, new]
    if name.split(".")[0] not in ("exch", "cas"):
        done = grid(body + f"red.{space}.{name} [{place}], {values}; {load} st.global.b32 [%rd2], %r21;", 1)
        assert done.result.findings == [] and done.out[0] == new


def test_a_failed_compare_and_swap_changes_nothing() -> None:
    body = WHO + "setp.ne.u32 %p9, %r1, 0; @%p9 ret; atom.relaxed.gpu.global.cas.b32 %r20, [%rd1], 1, 2; ld.global.b32 %r21, [%rd1];"
    assert grid(body + "st.global.b32 [%rd2], %r21;", 1, data=np.array([5], np.uint32)).out[0] == 5


# ---- memory over several launches ----

COUNTED = (
    WHO
    + "setp.ne.u32 %p9, %r1, 0; @%p9 ret; ld.relaxed.gpu.global.b32 %r10, [%rd1]; add.s32 %r11, %r10, 1; sub.s32 %r13, %r9, 1;"
    + "atom.acq_rel.gpu.global.add.u32 %r12, [%rd1+4], 1; setp.ne.u32 %p1, %r12, %r13; @%p1 bra LATER;"
    + "st.relaxed.gpu.global.b32 [%rd1+4], 0; st.relaxed.gpu.global.b32 [%rd1], %r11; LATER:"
    + "mul.wide.u32 %rd10, %r8, 8; add.s64 %rd11, %rd1, %rd10; mov.b64 %rd12, {%r8, %r11}; st.relaxed.gpu.global.b64 [%rd11+128], %rd12;"
    + "add.s32 %r22, %r8, 1; setp.eq.u32 %p1, %r22, %r9; selp.b32 %r23, 0, %r22, %p1;"
    + "mul.wide.u32 %rd13, %r23, 8; add.s64 %rd14, %rd1, %rd13;"
    + "AGAIN: ld.relaxed.gpu.global.b64 %rd15, [%rd14+128]; mov.b64 {%r25, %r26}, %rd15; setp.ne.b32 %p4, %r26, %r11; @%p4 bra AGAIN;"
    + "st.global.b32 [%rd3], %r25; st.global.b32 [%rd3+4], %r11;"
)
"""Each launch has an epoch of its own; the last CTA to ask for it prepares the next. Packets of one launch never match in another."""


@pytest.mark.parametrize("policy", POLICIES)
def test_epochs_survive_launches(policy: str) -> None:
    scratch = np.zeros(64, np.uint32)
    scratch[0] = 0xFFFFFFFD
    for launch in range(4):
        done = grid(COUNTED, data=scratch, policy=policy, seed=launch)
        assert done.result.findings == [], done.result.report()
        epoch = (0xFFFFFFFE + launch) & 0xFFFFFFFF
        assert done.out.reshape(4, 32)[:, :2].tolist() == [[(cta + 1) % 4, epoch] for cta in range(4)]
        assert scratch[:2].tolist() == [epoch, 0]
        if epoch == 0:
            break


def test_scratch_that_nobody_initialised_is_found_and_what_a_launch_wrote_stays() -> None:
    memory, known = np.full(256, 0xFF, np.uint8), np.zeros(256, bool)
    memory[:128], known[:128] = 0, True

    def launch() -> set[str]:
        out = np.zeros(1024, np.uint8)
        result = emulate(
            module(COUNTED),
            Launch((4, 1, 1), (32, 1, 1), co_resident=True),
            [Buffer("scratch", memory, "inout", initialised=known), Buffer("out", out, "output")],
            [Pointer("scratch"), Pointer("out")],
            policy="round-robin",
        )
        return result.ids()

    assert launch() == {"E-UNINIT"}, "the packets are polled before anybody has stored them"
    assert known[:160].all() and not known[160:].any()
    assert launch() == set()
