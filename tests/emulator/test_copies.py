"""TMA boxes, bulk copies and st.async against brute force."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator import Buffer, SparseBuffer, TensorMap
from tests.emulator.tiny import WAIT, Run, run, wait


@dataclasses.dataclass(frozen=True)
class Box:
    """A rank-3 map over bytes."""

    dims: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]


BARRIER = 8192


def load(coordinates: tuple[int, int, int], size: int, extra: str = "", destination: int = 0, expect: int | None = None) -> str:
    """One thread loads a box to shared offset ``destination``; the CTA waits and copies ``size`` bytes to the output."""
    c = ", ".join(str(x) for x in coordinates)
    return f"""
    add.s32 %r20, %r3, {BARRIER}; add.s32 %r21, %r3, {destination};
    setp.ne.b32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r20], 1;
    fence.mbarrier_init.release.cluster;
    READY: bar.sync 0;
    {WAIT}
    {extra}
    @%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {size if expect is None else expect};
    mov.b64 %rd10, k_map0; cvta.param.u64 %rd11, %rd10;
    cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r21], [%rd11, {{{c}}}], [%r20];
    ISSUED: {wait("%r20")}
    shl.b32 %r22, %r1, 2; add.s32 %r23, %r22, %r3;
    mov.b32 %r24, 0;
    COPY: setp.ge.u32 %p2, %r22, {size}; @%p2 bra COPIED;
    ld.shared.b32 %r25, [%r23];
    cvt.u64.u32 %rd12, %r22; add.s64 %rd13, %rd2, %rd12;
    st.global.b32 [%rd13], %r25;
    add.s32 %r22, %r22, 128; add.s32 %r23, %r23, 128; bra COPY;
    COPIED:
    """


def run_load(box: Box, coordinates: tuple[int, int, int], source: np.ndarray | SparseBuffer, swizzle: int = 128, **kwargs: object) -> Run:
    size = int(np.prod(box.box))
    body = load(coordinates, size, **kwargs)  # type: ignore[arg-type]
    return run(body, words=size // 4, shared=BARRIER + 8, maps=(TensorMap(box, "w", swizzle=swizzle),), buffers=(Buffer("w", source),))


def brute(box: Box, coordinates: tuple[int, int, int], source: np.ndarray, pattern: int) -> np.ndarray:
    """Byte by byte; the destination is 1024-aligned, so offsets may be swizzled instead of addresses."""
    out = np.zeros(int(np.prod(box.box)), np.uint8)
    bits = {0: 0, 32: 1, 64: 3, 128: 7}[pattern]
    for k in range(box.box[2]):
        for j in range(box.box[1]):
            for i in range(box.box[0]):
                at = (k * box.box[1] + j) * box.box[0] + i
                index = (coordinates[0] + i, coordinates[1] + j, coordinates[2] + k)
                inside = all(0 <= x < d for x, d in zip(index, box.dims, strict=True))
                value = source[index[0] + index[1] * box.strides[0] + index[2] * box.strides[1]] if inside else 0
                out[at ^ ((at >> 7) & bits) << 4] = value
    return out


@given(
    st.sampled_from([(128, 8, 1), (128, 5, 2), (64, 8, 2), (32, 16, 1), (16, 8, 1)]),
    st.tuples(st.integers(-40, 150), st.integers(-3, 12), st.integers(-1, 4)),
    st.data(),
)
@settings(max_examples=12)
def test_boxes(shape: tuple[int, int, int], coordinates: tuple[int, int, int], data: st.DataObject) -> None:
    swizzle = data.draw(st.sampled_from([s for s in (0, 32, 64, 128) if s == 0 or s >= shape[0]]))
    box = Box((150, 11, 4), (160, 2048), shape)
    source = np.random.default_rng(0).integers(0, 256, 4 * 2048, dtype=np.uint8)
    result = run_load(box, coordinates, source, swizzle)
    assert result.result.ok, result.result.report()
    assert (result.out.view(np.uint8) == brute(box, coordinates, source, swizzle)).all()


def test_sparse_pages_and_holes() -> None:
    box = Box((128, 8, 4), (128, 1024), (128, 8, 1))
    pages = {2: np.arange(1024, dtype=np.uint16).view(np.uint8)[:1024]}
    got = run_load(box, (0, 0, 2), SparseBuffer(4096, 1024, pages), 0)
    assert got.result.ok, got.result.report()
    assert (got.out.view(np.uint8) == pages[2]).all()
    hole = run_load(box, (0, 0, 1), SparseBuffer(4096, 1024, pages), 0)
    assert hole.ids == {"E-GLOBAL"}
    assert (hole.out == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    ("change", "finding", "text"),
    [
        ({"destination": 128}, "E-TMA", "not 1024-byte aligned"),
        ({"destination": BARRIER}, "E-TMA", "bytes at offset 8192"),
        ({"expect": 1024 + 16}, "E-DEADLOCK", "16 bytes pending"),
        ({"expect": 1024 - 16}, "E-DEADLOCK", "-16 bytes pending"),
    ],
)
def test_bad_loads(change: dict[str, int], finding: str, text: str) -> None:
    box = Box((128, 8, 1), (128, 1024), (128, 8, 1))
    result = run_load(box, (0, 0, 0), np.zeros(1024, np.uint8), **change)
    assert finding in result.ids
    assert text in result.result.report()


def test_bad_maps() -> None:
    source = np.zeros(4096, np.uint8)
    assert run_load(Box((128, 8, 1), (100, 1024), (128, 8, 1)), (0, 0, 0), source).ids >= {"E-TMA"}
    assert run_load(Box((256, 8, 1), (256, 2048), (256, 4, 1)), (0, 0, 0), source).ids >= {"E-TMA"}, "inner box above the swizzle"
    reaching_out = run_load(Box((128, 64, 1), (128, 8192), (128, 8, 1)), (0, 40, 0), source)
    assert "E-GLOBAL" in reaching_out.ids, "the map says more rows than the buffer has"


def test_bulk_copy() -> None:
    body = load((0, 0, 0), 512).replace(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r21], [%rd11, {0, 0, 0}], [%r20];",
        "add.s64 %rd14, %rd1, 16;cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%rd14], 512, [%r20];",
    )
    data = np.arange(256, dtype=np.uint32)
    box = Box((128, 4, 1), (128, 512), (128, 4, 1))
    result = run(body, data=data, words=128, shared=BARRIER + 8, maps=(TensorMap(box, "in"),))
    assert result.result.ok, result.result.report()
    assert result.out.tolist() == list(range(4, 132))


EXCHANGE = f"""
    add.s32 %r20, %r3, 1024; xor.b32 %r21, %r2, 1;
    setp.ne.b32 %p1, %r1, 0; @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r20], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 256;
    READY: bar.sync 0;
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
    {WAIT}
    shl.b32 %r22, %r1, 3; add.s32 %r23, %r22, %r3;
    mapa.shared::cluster.u32 %r24, %r23, %r21; mapa.shared::cluster.u32 %r25, %r20, %r21;
    mul.lo.s32 %r26, %r2, 1000; add.s32 %r27, %r26, %r1;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r24], {{%r27, %r1}}, [%r25];
    {wait("%r20", scope="cluster")}
    ld.shared.b32 %r10, [%r23];
    st.global.b32 [%rd3], %r10;
"""
"""Two CTAs send each other 1000 * rank + thread."""


@pytest.mark.parametrize("policy", ["random", "round-robin", "async-first", "async-last", "starve-cta", "starve-warp"])
def test_exchange_through_remote_stores(policy: str) -> None:
    for seed in range(3):
        result = run(EXCHANGE, ctas=2, policy=policy, seed=seed)
        assert result.result.ok, result.result.report()
        assert result.out.tolist() == [*range(1000, 1032), *range(32)]
    assert result.result.counts.bytes["st.async"] == 512
