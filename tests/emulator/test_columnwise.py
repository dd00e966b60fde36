"""Shared memory with one entry per MMA column: a race there counts only if the column does."""

from __future__ import annotations

import numpy as np
import pytest

from emulator import POLICIES, Limits, TensorMap
from emulator.config import Buffer
from tests.emulator import test_tcgen05, test_wgmma
from tests.emulator.test_copies import Box
from tests.emulator.test_sanitizer import OTHER, SLOT
from tests.emulator.tiny import Run, run, store, wait

FIRST_WORDS = (range(128),)


@pytest.mark.parametrize(
    ("use", "counts"),
    [
        ("mul.rn.f32 %r12, %r10, %r10; selp.b32 %r13, %r12, %r10, %p4;", False),
        ("mul.rn.f32 %r12, %r10, %r10; mov.b32 %r12, 7; st.shared.b32 [%r11], %r12;", False),
        ("mul.rn.f32 %r12, %r10, %r10; setp.gt.f32 %p5, %r12, %r12;", True),
        ("st.shared.b32 [%r11], %r10;", True),
        ("and.b32 %r12, %r10, 4; add.s32 %r12, %r12, %r3; ld.shared.b32 %r13, [%r12];", True),
        ("setp.eq.u32 %p5, %r4, 5; @%p5 st.shared.b32 [%r11], %r10;", True),
        ("setp.eq.u32 %p5, %r4, 40; @%p5 st.shared.b32 [%r11], %r10;", False),
        ("bar.warp.sync -1; shfl.sync.idx.b32 %r12, %r10, 3, 31, -1; st.shared.b32 [%r11], %r12;", True),
    ],
)
def test_what_may_be_done_with_a_spoiled_value(use: str, counts: bool) -> None:
    """Warp 0 stores its words while warp 1 loads them; words 32 and up are warp 1's own."""
    body = (
        SLOT
        + OTHER
        + "mov.pred %p4, 1; st.shared.b32 [%r11], %r1; bar.sync 0; setp.ge.u32 %p1, %r1, 32; @%p1 bra READER; st.shared.b32 [%r11], 1; ret;"
        + f"READER: ld.shared.b32 %r10, [%r12]; {use}"
    )
    found = [run(body, threads=64, columnwise=FIRST_WORDS, policy=policy, seed=seed).ids for policy in POLICIES for seed in range(4)]
    assert {frozenset(ids) for ids in found} == ({frozenset({"E-RACE"}), frozenset()} if counts else {frozenset()})
    assert all(run(body, threads=64, seed=seed).ids == {"E-RACE"} for seed in range(4)), "elsewhere the race itself is an error"


def test_unordered_stores_race_there_as_anywhere() -> None:
    body = "shl.b32 %r11, %r4, 2; add.s32 %r11, %r11, %r3; st.shared.b32 [%r11], %r1;"
    assert run(body, threads=64, columnwise=FIRST_WORDS).ids == {"E-RACE"}


def test_a_new_value_is_not_spoiled() -> None:
    body = (
        SLOT
        + OTHER
        + "st.shared.b32 [%r11], %r1; bar.sync 0; setp.ge.u32 %p1, %r1, 32; @%p1 bra READER; st.shared.b32 [%r11], 1; bar.sync 1, 64; ret;"
        + "READER: ld.shared.b32 %r10, [%r12]; bar.sync 1, 64; ld.shared.b32 %r10, [%r12];"
        + store()
    )
    for policy in POLICIES:
        assert run(body, threads=64, columnwise=FIRST_WORDS, policy=policy).ids == set()


# ---- wgmma ----

ROW = 3
"""The row of B, so the column of D, that is being written during the MMAs; lane 1 of a quad has it in registers 1 and 3."""

WGMMA = (
    "setp.ge.u32 %p20, %r1, 128; @%p20 bra EXTRA;"
    + test_wgmma.GEMM.replace("bar.sync 0;", "bar.sync 0, 160;").replace("st.global.b32 [%rd3+", "KEPT st.global.b32 [%rd3+")
    + "ret; EXTRA: bar.sync 0, 160; and.b32 %r61, %r4, 3; shl.b32 %r61, %r61, 2; add.s32 %r61, %r61, %r3;"
    + f"st.shared.b32 [%r61+{test_wgmma.B + 128 * ROW}], 0; fence.proxy.async.shared::cta;"
)
"""A fifth warp overwrites 16 bytes of the row."""
NOT_THE_COLUMN = "and.b32 %r60, %r4, 3; setp.ne.b32 %p21, %r60, 1; "


def wgmma(kept: str, columnwise: tuple[range, ...], **options: object) -> Run:
    """``kept``: guard of the stores of registers 1 and 3."""
    body, at = WGMMA, 0
    for register in range(4):
        at = body.index("KEPT", at)
        body = body[:at] + (kept if register % 2 else "") + body[at + 4 :]
    return test_wgmma.gemm(NOT_THE_COLUMN + body, threads=160, columnwise=columnwise, words=640, **options)


def test_wgmma_spoils_the_columns_of_racing_rows() -> None:
    rows = (range(test_wgmma.B, test_wgmma.B + 1024),)
    seen = set()
    for policy in POLICIES:
        for seed in range(3):
            dropped = wgmma("@%p21", rows, policy=policy, seed=seed)
            assert dropped.ids == set(), dropped.result.report()
            seen |= wgmma("", rows, policy=policy, seed=seed).ids
            assert wgmma("@%p21", (), policy=policy, seed=seed).ids == {"E-RACE"}
    assert seen == {"E-RACE"}


# ---- tcgen05 ----

TCGEN05 = test_tcgen05.GEMM.replace(
    "ARRIVED: bar.warp.sync -1;",
    "ARRIVED: bar.warp.sync -1; setp.eq.u32 %p20, %r1, 96; @!%p20 bra ON;"
    + wait("%r23")
    + f"st.shared.b32 [%r3+{test_tcgen05.B + 128 * ROW}], 0; fence.proxy.async.shared::cta; ON: bar.warp.sync -1;",
)


def tcgen05(body: str, columnwise: tuple[range, ...], **options: object) -> Run:
    a, b = test_tcgen05.operands()
    return run(
        body,
        threads=128,
        data=b,
        words=2048,
        shared=18464,
        maps=(TensorMap(Box((128, 128, 1), (128, 16384), (128, 128, 1)), "a"),),
        buffers=(Buffer("a", a.ravel()),),
        limits=Limits(instructions=20_000),
        columnwise=columnwise,
        **options,  # type: ignore[arg-type]
    )


def test_tcgen05_spoils_the_columns_of_racing_rows() -> None:
    rows = (range(test_tcgen05.B, test_tcgen05.B + 2048),)
    dropped = TCGEN05.replace(f"st.global.b32 [%rd3+{512 * ROW}], %r{100 + ROW};", "")
    assert dropped != TCGEN05
    seen = set()
    for policy in POLICIES:
        for seed in range(3):
            found = tcgen05(dropped, rows, policy=policy, seed=seed)
            assert found.ids == set(), found.result.report()
            kept = [c for c in range(16) if c != ROW]
            got = found.out.view(np.float32).reshape(16, 128)[kept].T
            np.testing.assert_array_equal(got, test_tcgen05.product()[:, kept])
            seen |= tcgen05(TCGEN05, rows, policy=policy, seed=seed).ids
            assert tcgen05(dropped, (), policy=policy, seed=seed).ids == {"E-RACE"}
    assert seen == {"E-RACE"}
