"""Accumulator values leave the consumer warps here: GEMM1 sums to every CTA of the cluster, GEMM2 sums to global memory.

A warp first puts its 32 (or 16) FP32 values into its own 128 bytes of staging memory, in *logical* row order: the weight
layout's row shuffle is undone at this one place. Then each lane reads four consecutive rows, a *chunk*.

| engine, tile rows | this lane's value is physical row | chunks of warp w cover rows |
|---|---|---|
| hopper, 128 | 64 (q >> 1) + 16 w + l // 4 + 8 (q & 1), q = l % 4 | 64 (c >> 2) + 16 w + 4 (c & 3) |
| hopper, 64 | 16 w + l // 4 + 8 (q & 1), lanes with q < 2 | 16 w + 4 c |
| blackwell, 128 | 32 w + l | 32 w + 4 c |
| blackwell, 64 | 16 w + l, lanes below 16 | 16 w + 4 c |
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, const_expr

from megamoe_aot.spec import KernelSpec

from . import ptx


def logical_row(spec: KernelSpec, row: Any) -> Any:
    """Logical row within 16 of the physical row ``row`` (0..15): trtllm_gen interleaves the two halves."""
    if spec.layout == "row_major":
        return row
    return ptx.select(row < Uint32(8), row * Uint32(2), row * Uint32(2) - Uint32(15))


def staging_slot(spec: KernelSpec, tile_rows: int, lane: Any) -> tuple[Any, Any]:
    """(staging index of this lane's value, whether the lane has one)."""
    if spec.engine == "hopper":
        quad = lane & Uint32(3)
        row = (lane >> Uint32(2)) + (quad & Uint32(1)) * Uint32(8)
        if tile_rows == 128:
            return (quad >> Uint32(1)) * Uint32(16) + logical_row(spec, row), None
        return logical_row(spec, row), quad < Uint32(2)
    slot = (lane & Uint32(16)) + logical_row(spec, lane & Uint32(15))
    return slot, None if tile_rows == 128 else lane < Uint32(16)


def chunk_row(spec: KernelSpec, tile_rows: int, warp: Any, chunk: Any) -> Any:
    """First row, within the tile, of chunk ``chunk`` of warp ``warp``."""
    if tile_rows == 64:
        return warp * Uint32(16) + chunk * Uint32(4)
    if spec.engine == "hopper":
        return (chunk >> Uint32(2)) * Uint32(64) + warp * Uint32(16) + (chunk & Uint32(3)) * Uint32(4)
    return warp * Uint32(32) + chunk * Uint32(4)


@cute.jit
def stage_values(
    spec: cutlass.Constexpr[KernelSpec], tile_rows: cutlass.Constexpr[int], base: Uint32, warp: Uint32, lane: Uint32, value: Float32
) -> Any:
    """Put the warp's values into its staging bytes; ends with the warp synchronised. Returns the staging address."""
    staging = base + Uint32(spec.shared.staging) + warp * Uint32(128)
    ptx.sync_warp()  # the previous tile's chunks have been read
    slot, present = staging_slot(spec, tile_rows, lane)
    if const_expr(present is None):
        ptx.store_shared_f32(staging + slot * Uint32(4), value)
    else:
        ptx.store_shared_f32_if(present, staging + slot * Uint32(4), value)
    ptx.sync_warp()
    return staging


@cute.jit
def broadcast_sums(
    spec: cutlass.Constexpr[KernelSpec], base: Uint32, part: Uint32, tile: Uint32, warp: Uint32, lane: Uint32, value: Float32
) -> None:
    """Send one unit's 128 sums to every CTA of the cluster: lane l sends chunk l % 8 to CTAs l // 8 + 4 i."""
    split, shared = spec.split, spec.shared
    staging = stage_values(spec, 128, base, warp, lane, value)
    chunk = lane & Uint32(7)
    values = ptx.load_shared_f32x4(staging + chunk * Uint32(16))
    row = chunk_row(spec, 128, warp, chunk)
    slot = (part * Uint32(split.tiles1) + tile) * Uint32(512) + row * Uint32(4)
    for i in cutlass.range_constexpr(spec.cluster // 4):
        cta = (lane >> Uint32(3)) + Uint32(4 * i)
        destination = ptx.map_to_cta(base + Uint32(shared.sums) + slot, cta)
        ptx.store_async_f32x4(destination, values, ptx.map_to_cta(base + Uint32(shared.barriers["sums"]), cta))


@cute.jit
def store_output(
    spec: cutlass.Constexpr[KernelSpec], base: Uint32, out: Int64, column: Uint32, warp: Uint32, lane: Uint32, value: Float32
) -> None:
    """Store one GEMM2 tile as BF16. ``out``: address of the route's row; ``column``: the tile's first logical row."""
    rows = spec.split.tile2_rows
    staging = stage_values(spec, rows, base, warp, lane, value)
    chunks = 8 if rows == 128 else 4
    chunk = lane & Uint32(chunks - 1)
    v = ptx.load_shared_f32x4(staging + chunk * Uint32(16))
    at = out + Int64(column + chunk_row(spec, rows, warp, chunk)) * Int64(2)
    ptx.store_global_b32x2_if(lane < Uint32(chunks), at, ptx.bf16x2(v[0], v[1]), ptx.bf16x2(v[2], v[3]))
