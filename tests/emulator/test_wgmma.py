"""A small Hopper GEMM: D[64, 8] = A[64, 128] B[8, 128]^T with wgmma, both operands by ordinary stores; and wrong lines."""

from __future__ import annotations

import re

import numpy as np
import pytest

from emulator import Arithmetic, Checks, Limits
from emulator.numerics import E4M3
from tests.emulator.tiny import WAIT, Run, run, wait

B = 8192
DESCRIPTOR = (1 << 62) | (1 << 16) | (64 << 32)
MMA = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"

# thread t copies row t / 2 of [A; B], chunks 4 (t % 2) .. +3, swizzled; 144 threads' worth in two rounds
WRITE = """
    shr.u32 %r30, %r1, 1; and.b32 %r31, %r1, 1; shl.b32 %r31, %r31, 2; and.b32 %r32, %r30, 7;
    shl.b32 %r34, %r30, 7; add.s32 %r34, %r34, %r3;
    mul.wide.u32 %rd10, %r1, 64; add.s64 %rd11, %rd1, %rd10;
    ROUND:
    {}
    setp.ge.u32 %p6, %r1, 16; @%p6 bra WRITTEN;
    setp.ne.b32 %p7, %r30, %r30; add.s64 %rd11, %rd1, %rd10; add.s64 %rd11, %rd11, 8192; add.s32 %r34, %r34, 8192;
    {}
    WRITTEN: fence.proxy.async.shared::cta;
    bar.sync 0;
"""
_CHUNKS = " ".join(
    f"ld.global.v4.b32 {{%r40, %r41, %r42, %r43}}, [%rd11+{16 * i}]; add.s32 %r33, %r31, {i}; xor.b32 %r33, %r33, %r32; "
    f"shl.b32 %r33, %r33, 4; add.s32 %r35, %r34, %r33; st.shared.v4.b32 [%r35], {{%r40, %r41, %r42, %r43}};"
    for i in range(4)
)

ISSUE = f"""
    shr.u32 %r50, %r3, 4; and.b32 %r50, %r50, 16383; cvt.u64.u32 %rd14, %r50; or.b64 %rd15, %rd14, {DESCRIPTOR};
    add.s64 %rd16, %rd15, {B >> 4};
    mov.pred %p4, 0;
    wgmma.fence.sync.aligned;
    {MMA} {{%f1, %f2, %f3, %f4}}, %rd15, %rd16, %p4, 1, 1;
    add.s64 %rd17, %rd15, 2; add.s64 %rd18, %rd16, 2;
    {MMA} {{%f1, %f2, %f3, %f4}}, %rd17, %rd18, 1, 1, 1;
    add.s64 %rd17, %rd15, 4; add.s64 %rd18, %rd16, 4;
    {MMA} {{%f1, %f2, %f3, %f4}}, %rd17, %rd18, 1, 1, 1;
    add.s64 %rd17, %rd15, 6; add.s64 %rd18, %rd16, 6;
    {MMA} {{%f1, %f2, %f3, %f4}}, %rd17, %rd18, 1, 1, 1;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {" ".join(f"st.global.b32 [%rd3+{512 * i}], %f{i + 1};" for i in range(4))}
"""

GEMM = WAIT + WRITE.format(_CHUNKS, _CHUNKS) + ISSUE


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0x30, 0x48, (64, 128), np.uint8), rng.integers(0xB0, 0xC8, (8, 128), np.uint8)  # sums are exact in FP32


def gemm(body: str = GEMM, threads: int = 128, **options: object) -> Run:
    data = np.concatenate([o.ravel() for o in operands()])
    limits = Limits(instructions=20_000)
    options = {"words": 4 * threads, "shared": 9216} | options
    return run(body, threads=threads, data=data, limits=limits, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["random", "round-robin", "starve-warp", "async-last"])
def test_gemm(policy: str) -> None:
    a, b = operands()
    wanted = (E4M3[a] @ E4M3[b].T).astype(np.float32)
    done = gemm(policy=policy, arithmetic=Arithmetic(wgmma=None))
    assert done.result.findings == [], done.result.report()
    got = done.out.view(np.float32).reshape(4, 4, 8, 4)  # register, warp, quad, lane of the quad
    for register in range(4):
        for warp in range(4):
            rows, columns = 16 * warp + np.arange(8)[:, None] + 8 * (register >> 1), 2 * np.arange(4)[None, :] + (register & 1)
            np.testing.assert_array_equal(got[register, warp], wanted[rows, columns])


def test_sixteen_columns() -> None:
    """Columns 8 to 15 are in registers 4 to 7."""
    a, _ = operands()
    b = np.random.default_rng(2).integers(0xB0, 0xC8, (16, 128), np.uint8)
    body = GEMM.replace("m64n8k32", "m64n16k32").replace("{%f1, %f2, %f3, %f4}", "{%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}")
    body = body.replace("setp.ge.u32 %p6, %r1, 16;", "setp.ge.u32 %p6, %r1, 32;")
    body += " ".join(f"st.global.b32 [%rd3+{512 * i}], %f{i + 1};" for i in range(4, 8))
    data = np.concatenate([a.ravel(), b.ravel()])
    done = run(body, threads=128, data=data, words=1024, shared=10240, arithmetic=Arithmetic(wgmma=None))
    assert done.result.findings == [], done.result.report()
    got = done.out.view(np.float32).reshape(2, 2, 2, 4, 8, 4)  # half of the columns, rows + 8, column, warp, quad, lane of the quad
    wanted = (E4M3[a] @ E4M3[b].T).astype(np.float32)
    np.testing.assert_array_equal(got.transpose(3, 1, 4, 0, 5, 2).reshape(64, 16), wanted)


def test_bit_model_truncates() -> None:
    """13 fraction bits: the low ten bits of every FP32 result are zero, and the error is visible."""
    got = gemm().out
    assert (got & 0x3FF == 0).all()
    assert (got != gemm(arithmetic=Arithmetic(wgmma=None)).out).any()


EDITS = {
    "no proxy fence": (("fence.proxy.async.shared::cta;", ""), {"E-PROXY"}),
    "no barrier after the stores": (("bar.sync 0;", ""), {"E-RACE"}),
    "no wait_group": (("wgmma.wait_group.sync.aligned 0;", ""), {"E-WGMMA"}),
    "one group too few": (("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"), {"E-WGMMA"}),
    "no commit_group": (("wgmma.commit_group.sync.aligned;", ""), {"E-WGMMA"}),
    "accumulator written after the fence": (
        ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.f32 %f1, 0f00000000;"),
        {"E-WGMMA"},
    ),
    "accumulate onto nothing": (("mov.pred %p4, 0;", "mov.pred %p4, 1;"), {"E-UNINIT"}),
    "operand overwritten": (("wgmma.wait_group", "st.shared.b32 [%r35], %r40; wgmma.wait_group"), {"E-RACE"}),
    "descriptors differ between warps": (
        (
            "add.s64 %rd16, %rd15, 512;",
            "shr.u32 %r60, %r1, 6; mul.wide.u32 %rd20, %r60, 64;add.s64 %rd16, %rd15, 512; sub.s64 %rd16, %rd16, %rd20;",
        ),
        {"E-WGMMA"},
    ),
    "descriptors differ between lanes": (
        ("add.s64 %rd16, %rd15, 512;", "mul.wide.u32 %rd20, %r4, 64; sub.s64 %rd16, %rd15, %rd20;"),
        {"E-WGMMA"},
    ),
    "bad descriptor": ((str(DESCRIPTOR), str(DESCRIPTOR | 1 << 46)), {"E-DESC"}),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_found(name: str) -> None:
    (old, new), wanted = EDITS[name]
    assert old in GEMM, name
    done = gemm(GEMM.replace(old, new, 1))
    assert done.ids >= wanted, done.result.report()


LOAD_A = """
    shr.u32 %r60, %r1, 5; shl.b32 %r60, %r60, 4; and.b32 %r61, %r4, 15; add.s32 %r60, %r60, %r61; shl.b32 %r60, %r60, 7;
    add.s32 %r60, %r60, %r3; shr.u32 %r61, %r4, 4; and.b32 %r62, %r4, 7; xor.b32 %r61, %r61, %r62;
""" + "".join(
    f"xor.b32 %r63, %r61, {2 * k}; shl.b32 %r63, %r63, 4; add.s32 %r63, %r63, %r60; "
    f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{', '.join(f'%r{100 + 4 * k + i}' for i in range(4))}}}, [%r63];\n"
    for k in range(4)
)
"""Lane l points to chunk 2 k + l / 16 of row 16 w + l % 16, so the warp's 16 rows x 32 bytes of K step k come into %r100 + 4 k .. + 3."""


def held(body: str = GEMM) -> str:
    """``body`` with A in registers."""
    for k, descriptor in enumerate(("%rd15, %rd16", "%rd17, %rd18", "%rd17, %rd18", "%rd17, %rd18")):
        registers = ", ".join(f"%r{100 + 4 * k + i}" for i in range(4))
        body = body.replace(f"}}, {descriptor}, ", f"}}, {{{registers}}}, {descriptor.split(', ')[1]}, ", 1)
    return body.replace("wgmma.fence.sync.aligned;", LOAD_A + "wgmma.fence.sync.aligned;")


@pytest.mark.parametrize("policy", ["random", "starve-warp", "async-last"])
def test_a_in_registers(policy: str) -> None:
    """The same sums as with A in shared memory, also where A's rows there have changed by then: threads from 16 on last wrote to A."""
    for body in (held(), held().replace("wgmma.fence", "bar.sync 0; @%p6 st.shared.b32 [%r35], %r1; wgmma.fence", 1)):
        done = gemm(body, policy=policy)
        assert not done.ids, done.result.report()
        np.testing.assert_array_equal(done.out, gemm().out)


HELD_EDITS = {
    "written after the fence": (("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.b32 %r105, 0;"), "E-WGMMA"),
    "written while the MMAs run": (("wgmma.wait_group", "mov.b32 %r105, 0; wgmma.wait_group"), "E-WGMMA"),
    "read while the MMAs run": (("wgmma.wait_group", "mov.b32 %r110, %r105; wgmma.wait_group"), "E-WGMMA"),
    "never written": (("{%r104, %r105, %r106, %r107}, [%r63];", "{%r120, %r121, %r122, %r123}, [%r63];"), "E-UNINIT"),
    "loaded before the barrier": (("bar.sync 0;", ""), "E-RACE"),
    "address not aligned": (("%r61, 2; shl.b32 %r63, %r63, 4;", "%r61, 2; shl.b32 %r63, %r63, 3;"), "E-SMEM"),
}


@pytest.mark.parametrize("name", HELD_EDITS)
def test_edits_of_a_in_registers_are_found(name: str) -> None:
    (old, new), wanted = HELD_EDITS[name]
    assert old in held(), name
    done = gemm(held().replace(old, new, 1))
    assert wanted in done.ids, done.result.report()


def test_rows_of_a_that_race_make_rows_of_d_that_prove_nothing() -> None:
    """A may be in the making (columnwise memory) while it is loaded; nobody may store what is computed from it."""
    racing = held().replace(LOAD_A, "@%p6 st.shared.b32 [%r35], %r40;" + LOAD_A)
    assert gemm(racing.split("st.global", 1)[0], columnwise=(range(B),)).ids == set()
    done = gemm(racing, columnwise=(range(B),))
    assert {(f.id, f.where.text.split(".")[0]) for f in done.result.findings} == {("E-RACE", "st")}, done.result.report()


def test_divergent_lanes_are_missing() -> None:
    """The two halves of a warp issue the same MMA one after another: what a loop unswitched on the lane does."""
    fence = "wgmma.fence.sync.aligned;"
    body = GEMM.replace(fence, f"setp.gt.u32 %p5, %r4, 15; @%p5 bra HIGH; {fence} bra JOIN; HIGH: {fence} JOIN:")
    assert "E-SYNC" in gemm(body).ids


def test_incomplete_warpgroup() -> None:
    assert "E-WGMMA" in gemm(threads=64, seed=1).ids


def test_what_st_async_tells_about_mmas_is_a_choice() -> None:
    """Warp 1 sends a word after its MMA; warp 0 waits for it and overwrites the operand: ordered if st.async releases completed MMAs."""
    setup = """
    add.s32 %r20, %r3, 9216; shr.u32 %r7, %r1, 5; setp.ne.b32 %p1, %r1, 0; @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r20], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 12;
    READY:
    """
    overlay = f"""
    setp.eq.b32 %p2, %r7, 0; @%p2 bra OVERWRITE;
    setp.ne.b32 %p3, %r4, 0; @%p3 bra END;
    mapa.shared::cluster.u32 %r60, %r3, %r2; mapa.shared::cluster.u32 %r61, %r20, %r2;
    shl.b32 %r62, %r7, 2; add.s32 %r60, %r60, %r62;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r60+9224], %r1, [%r61]; bra END;
    OVERWRITE: {wait("%r20", scope="cluster")}
    shl.b32 %r63, %r1, 2; add.s32 %r63, %r63, %r3;
    st.shared.b32 [%r63+{B}], %r1;
    END:
    """
    twice = re.sub(r"%rd3\+(\d+)", lambda m: f"%rd3+{2 * int(m[1])}", GEMM)  # two CTAs store their results side by side
    for mode, wanted in (("data", {"E-RACE"}), ("reads", set())):
        done = gemm(setup + twice + overlay, shared=9248, ctas=2, words=2048, checks=Checks(st_async_releases=mode))  # type: ignore[arg-type]
        assert done.ids == wanted, done.result.report()
