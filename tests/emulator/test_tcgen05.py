"""A small Blackwell GEMM, D[128, 16] = A[128, 128] B[16, 128]^T, A by TMA, B by ordinary stores; and wrong lines in it."""

from __future__ import annotations

import numpy as np
import pytest

from emulator import Buffer, Limits, TensorMap
from emulator.numerics import E4M3
from tests.emulator.test_copies import Box
from tests.emulator.tiny import WAIT, Run, run, wait

A, B, FULL, DONE, ADDRESS, WRITTEN = 0, 16384, 18432, 18440, 18448, 18456
"""Offsets in shared memory: operands, two barriers, the TMEM address, a third barrier."""

DESCRIPTOR = (2 << 61) | (1 << 46) | (1 << 16) | (64 << 32)
"""128-byte swizzle, K-major, groups of 8 rows 1024 bytes apart."""

PROLOGUE = f"""
    shr.u32 %r7, %r1, 5;
    add.s32 %r20, %r3, {FULL}; add.s32 %r21, %r3, {DONE}; add.s32 %r22, %r3, {ADDRESS}; add.s32 %r23, %r3, {WRITTEN};
    setp.ne.b32 %p1, %r1, 0; setp.ne.b32 %p2, %r7, 1;
    @%p1 bra INIT;
    mbarrier.init.shared::cta.b64 [%r20], 1;
    mbarrier.init.shared::cta.b64 [%r21], 1;
    mbarrier.init.shared::cta.b64 [%r23], 4;
    fence.mbarrier_init.release.cluster;
    INIT: bar.warp.sync -1;
    @%p2 bra ALLOC;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r22], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ALLOC:
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    {WAIT}
    ld.shared.b32 %r24, [%r22];
"""

# thread t copies bytes 16 t .. 16 t + 15 of B: row t / 8, chunk t % 8, to chunk (t % 8) ^ (row % 8)
WRITE_B = f"""
    shr.u32 %r30, %r1, 3; and.b32 %r31, %r1, 7; and.b32 %r32, %r30, 7; xor.b32 %r33, %r31, %r32;
    shl.b32 %r34, %r30, 7; shl.b32 %r35, %r33, 4; add.s32 %r36, %r34, %r35; add.s32 %r37, %r36, %r3;
    mul.wide.u32 %rd10, %r1, 16; add.s64 %rd11, %rd1, %rd10;
    ld.global.v4.b32 {{%r40, %r41, %r42, %r43}}, [%rd11];
    st.shared.v4.b32 [%r37+{B}], {{%r40, %r41, %r42, %r43}};
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    setp.ne.b32 %p3, %r4, 0;
    @%p3 bra ARRIVED;
    mbarrier.arrive.shared::cta.b64 _, [%r23];
    ARRIVED: bar.warp.sync -1;
"""

ISSUE = f"""
    @%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 16384;
    mov.b64 %rd12, k_map0; cvta.param.u64 %rd13, %rd12;
    cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd13, {{0, 0, 0}}], [%r20];
    {wait("%r20")}
    {wait("%r23")}
    shr.u32 %r50, %r3, 4; and.b32 %r50, %r50, 16383; cvt.u64.u32 %rd14, %r50; or.b64 %rd15, %rd14, {DESCRIPTOR};
    add.s64 %rd16, %rd15, {B >> 4};
    mov.b32 %r51, {0x08040010};
    mov.pred %p4, 0;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r24], %rd15, %rd16, %r51, %p4;
    add.s64 %rd17, %rd15, 2; add.s64 %rd18, %rd16, 2;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r24], %rd17, %rd18, %r51, 1;
    add.s64 %rd17, %rd15, 4; add.s64 %rd18, %rd16, 4;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r24], %rd17, %rd18, %r51, 1;
    add.s64 %rd17, %rd15, 6; add.s64 %rd18, %rd16, 6;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r24], %rd17, %rd18, %r51, 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r21];
    ISSUED: bar.warp.sync -1;
"""

EPILOGUE = f"""
    {wait("%r21")}
    tcgen05.fence::after_thread_sync;
    shl.b32 %r52, %r7, 21; add.s32 %r53, %r24, %r52;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{", ".join(f"%r{100 + i}" for i in range(16))}}}, [%r53];
    tcgen05.wait::ld.sync.aligned;
    {" ".join(f"st.global.b32 [%rd3+{512 * i}], %r{100 + i};" for i in range(16))}
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    @%p2 bra END;
    tcgen05.fence::after_thread_sync;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r24, 32;
    END:
"""

GEMM = PROLOGUE + WRITE_B + ISSUE + EPILOGUE


def operands(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0x30, 0x48, (128, 128), np.uint8), rng.integers(0xB0, 0xC8, (16, 128), np.uint8)
    return a, b  # magnitudes 0.5 to 3.75: every sum is exact in FP32, in any order


def gemm(body: str = GEMM, **options: object) -> Run:
    a, b = operands()
    return run(
        body,
        threads=128,
        data=b,
        words=2048,
        shared=18464,
        maps=(TensorMap(Box((128, 128, 1), (128, 16384), (128, 128, 1)), "a"),),
        buffers=(Buffer("a", a.ravel()),),
        limits=Limits(instructions=20_000),
        **options,  # type: ignore[arg-type]
    )


def product() -> np.ndarray:
    a, b = operands()
    return (E4M3[a] @ E4M3[b].T).astype(np.float32)


@pytest.mark.parametrize("policy", ["random", "round-robin", "starve-warp", "async-first", "async-last"])
def test_gemm(policy: str) -> None:
    for seed in range(2):
        done = gemm(policy=policy, seed=seed)
        assert done.result.findings == [], done.result.report()
        np.testing.assert_array_equal(done.out.view(np.float32).reshape(16, 128).T, product())


def test_m64_uses_half_of_each_lane_quarter() -> None:
    """Row m of a 64-row tile lies in lane m % 16 + 32 (m // 16)."""
    done = gemm(GEMM.replace(str(0x08040010), str(0x04040010)))
    got = done.out.view(np.float32).reshape(16, 4, 32).transpose(1, 2, 0)  # quarter, lane, column
    np.testing.assert_array_equal(got[:, :16].reshape(64, 16), product()[:64])
    assert done.ids == {"E-UNINIT"}, "lanes 16 to 31 of a quarter were not written"


TWO_ISSUERS = f"""
    add.s32 %r25, %r3, 18464;
    {PROLOGUE.replace("[%r22], 32", "[%r22], 512").replace("[%r23], 4;", "[%r23], 4; mbarrier.init.shared::cta.b64 [%r25], 1;")}
    setp.ge.u32 %p5, %r1, 128; @%p5 bra FED;
    {WRITE_B}
    @%p1 bra FED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 16384;
    mov.b64 %rd12, k_map0; cvta.param.u64 %rd13, %rd12;
    cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd13, {{0, 0, 0}}], [%r20];
    FED: bar.warp.sync -1;
    setp.eq.u32 %p6, %r7, 0; setp.eq.u32 %p7, %r7, 5; or.pred %p8, %p6, %p7; @!%p8 bra ISSUED;
    setp.eq.u32 %p9, %r4, 0; @!%p9 bra ISSUED;
    {wait("%r20")}
    {wait("%r23")}
    selp.b32 %r60, 0, 512, %p6; selp.b32 %r61, 0, 64, %p6; selp.b32 %r62, 0, 504, %p6; selp.b32 %r63, %r21, %r25, %p6;
    shr.u32 %r50, %r3, 4; and.b32 %r50, %r50, 16383; cvt.u64.u32 %rd14, %r50; or.b64 %rd15, %rd14, {DESCRIPTOR};
    cvt.u64.u32 %rd20, %r60; cvt.u64.u32 %rd21, %r61; add.s64 %rd16, %rd15, {B >> 4}; add.s64 %rd16, %rd16, %rd21;
    add.s64 %rd15, %rd15, %rd20;
    add.s32 %r64, %r24, %r62; mov.b32 %r51, {0x04020010}; mov.pred %p4, 0; mov.b32 %r65, 0;
    STEP: tcgen05.mma.cta_group::1.kind::f8f6f4 [%r64], %rd15, %rd16, %r51, %p4;
    add.s64 %rd15, %rd15, 2; add.s64 %rd16, %rd16, 2; mov.pred %p4, 1; add.s32 %r65, %r65, 1; setp.lt.u32 %p10, %r65, 4; @%p10 bra STEP;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r63];
    ISSUED: bar.warp.sync -1;
    setp.ge.u32 %p11, %r7, 8; @%p11 bra LOADED;
    and.b32 %r66, %r7, 3; shl.b32 %r52, %r66, 21; add.s32 %r53, %r24, %r52; setp.ge.u32 %p12, %r7, 4; @%p12 bra SECOND;
    {wait("%r21")}
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.16x256b.x1.b32 {{%r100, %r101, %r102, %r103}}, [%r53];
    bra.uni STORED;
    SECOND:
    {wait("%r25")}
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.16x128b.x2.b32 {{%r100, %r101, %r102, %r103}}, [%r53+504];
    STORED:
    tcgen05.wait::ld.sync.aligned;
    {" ".join(f"st.global.b32 [%rd3+{1280 * i}], %r{100 + i};" for i in range(4))}
    LOADED:
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    @%p2 bra END;
    tcgen05.fence::after_thread_sync;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r24, 512;
    END:
"""
"""Ten warps. Two of them each multiply half of A's rows with half of B's (M = 64, N = 8), into the first and the last of 512 columns."""


@pytest.mark.parametrize("policy", ["random", "round-robin", "starve-warp", "async-last"])
def test_two_issuing_warps_and_all_of_tensor_memory(policy: str) -> None:
    a, b = operands()
    for seed in range(3):
        done = run(
            TWO_ISSUERS,
            threads=320,
            data=b,
            words=1280,
            shared=18472,
            maps=(TensorMap(Box((128, 128, 1), (128, 16384), (128, 128, 1)), "a"),),
            buffers=(Buffer("a", a.ravel()),),
            limits=Limits(instructions=40_000),
            policy=policy,
            seed=seed,
        )
        assert done.result.findings == [], done.result.report()
        got = done.out.view(np.float32).reshape(4, 10, 8, 4)  # register, warp, t / 4, t % 4
        first = np.empty((4, 2, 8, 4, 2), np.float32)  # quarter, upper or lower 8 rows, row, pair of columns, column
        second = np.empty((4, 2, 8, 2, 4), np.float32)
        for r in range(4):
            first[:, r // 2, :, :, r % 2] = got[r, :4]
            second[:, r % 2, :, r // 2, :] = got[r, 4:8]
        np.testing.assert_array_equal(first.reshape(64, 8), product()[:64, :8])
        np.testing.assert_array_equal(second.reshape(64, 8), product()[64:, 8:])


EDITS = {
    # (text, replacement): what must be found
    "no proxy fence": (("fence.proxy.async.shared::cta;", ""), {"E-PROXY"}),
    "B not waited for": ((wait("%r23"), ""), {"E-RACE"}),
    "A not waited for": ((wait("%r20"), ""), {"E-RACE"}),
    "no wait for the commit": ((EPILOGUE.split("tcgen05.fence::after")[0], "\n"), {"E-T5-ORDER"}),
    "no fence after the wait": (("tcgen05.fence::after_thread_sync;\n    shl", "shl"), {"E-T5-ORDER"}),
    "no wait::ld": (("tcgen05.wait::ld.sync.aligned;", ""), {"E-T5-ORDER"}),
    "no commit": (("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r21];", ""), {"E-DEADLOCK"}),
    "no dealloc": (("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r24, 32;", ""), {"E-T5-ALLOC"}),
    "dealloc of another size": (("b32 %r24, 32;\n    END", "b32 %r24, 64;\n    END"), {"E-T5-ALLOC"}),
    "dealloc without the loads": (
        ("tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n    @%p2 bra END", "bar.sync 0; @%p2 bra END"),
        {"E-T5-ALLOC"},
    ),
    "33 columns": (("[%r22], 32;", "[%r22], 33;"), {"E-T5-ALLOC"}),
    "a wait for the cluster with the permit held": (
        (
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n    ALLOC:",
            "ALLOC: barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;",
        ),
        {"A-T5-PERMIT"},
    ),
    "alloc after relinquish": (
        (
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r22+8], 32;",
        ),
        {"E-T5-ALLOC"},
    ),
    "no fences after alloc": (
        ("tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n    tcgen05.fence::after_thread_sync;", "bar.sync 0;"),
        {"A-T5-ALLOC-FENCE"},
    ),
    "accumulate onto nothing": (("mov.pred %p4, 0;", "mov.pred %p4, 1;"), {"E-UNINIT"}),
    "columns outside": (("[%r24], %rd15", "[%r54], %rd15"), {"E-T5-ALLOC"}),
    "wrong quarter": (("shl.b32 %r52, %r7, 21;", "shl.b32 %r52, %r7, 20;"), {"E-T5-LANE"}),
    "lane part in D": (("[%r24], %rd15", "[%r55], %rd15"), {"E-T5-LANE"}),
    "operand outside": ((f"add.s64 %rd16, %rd15, {B >> 4};", f"add.s64 %rd16, %rd15, {0x8000 >> 4};"), {"E-DESC"}),
    "swizzle off": ((str(DESCRIPTOR), str(DESCRIPTOR | 1 << 61)), {"E-DESC"}),
    "MMA by a whole warp": (("@%p1 bra ISSUED;", "setp.ne.b32 %p1, %r7, 0; @%p1 bra ISSUED;"), {"E-T5-ISSUE"}),
    "commit by another lane": (
        (
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r21];\n    ISSUED: bar.warp.sync -1;",
            "ISSUED: bar.warp.sync -1; setp.ne.b32 %p5, %r1, 1; @%p5 bra OTHER;"
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r21]; OTHER: bar.warp.sync -1;",
        ),
        {"E-T5-ISSUE"},
    ),
    "B overwritten while the MMA may read it": (
        ("ISSUED: bar.warp.sync -1;", f"ISSUED: bar.warp.sync -1; st.shared.b32 [%r37+{B}], %r40;"),
        {"E-RACE"},
    ),
    "exit without waiting for the commit": (
        (EPILOGUE, "bar.sync 0; @%p2 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r24, 32; END:"),
        {"E-T5-ALLOC", "A-COMMIT-EXIT"},
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_found(name: str) -> None:
    (old, new), wanted = EDITS[name]
    assert old in GEMM, name
    body = GEMM.replace(old, new, 1)
    body = body.replace("ld.shared.b32 %r24, [%r22];", "ld.shared.b32 %r24, [%r22]; add.s32 %r54, %r24, 24; or.b32 %r55, %r24, 0x50000;")
    assert gemm(body).ids >= wanted, gemm(body).result.report()


def test_second_use_of_the_accumulator_must_wait_for_the_loads() -> None:
    """ld ; wait::ld ; fence::before ; barrier ; fence::after ; mma is in order; without one of the fences it is not."""
    again = f"""
    {{ordered}}
    @%p1 bra AGAIN;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r24], %rd15, %rd16, %r51, 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r21];
    AGAIN: bar.warp.sync -1;
    {wait("%r21", "1")}
    tcgen05.fence::after_thread_sync;
    """
    marker = "tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n    @%p2 bra END"
    assert marker in GEMM

    def ids(ordered: str) -> set[str]:
        return gemm(GEMM.replace(marker, again.replace("{ordered}", ordered) + marker)).ids

    before, after = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
    assert ids(f"{before} bar.sync 1, 128; {after}") == set()
    assert ids(f"bar.sync 1, 128; {after}") == {"E-T5-ORDER"}
    assert ids(f"{before} bar.sync 1, 128;") == {"E-T5-ORDER"}
    assert ids(f"{before} {after}") == {"E-T5-ORDER"}
