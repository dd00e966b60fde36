"""The parts of a CTA that both engines share: identity, prologue, weight stream, scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, const_expr

from megamoe_aot.abi import FLAG_GATE_FIRST
from megamoe_aot.shared_memory import STAGE_BYTES, scale_columns
from megamoe_aot.spec import KernelSpec

from . import ptx, routing

CONSUMER_THREADS = 128
CONSUMER_BARRIER = 1
"""Named barrier of the four consumer warps."""
TMEM_BARRIER = 2
"""Named barrier of the consumer and MMA warps (Blackwell)."""
PROLOGUE_BARRIER = 3
"""Named barrier of the whole CTA. Not 0: tools take barrier 0 for __syncthreads(), which all threads reach at one place."""


class Place(NamedTuple):
    """Where this thread stands."""

    base: Any
    """u32 shared address of the dynamic shared memory."""
    lane: Any
    warp: Any
    """Warp index in the CTA."""
    cta: Any
    """Rank of this CTA in its cluster."""
    token: Any
    rank: Any
    """The route is (token, rank): rank counts the token's experts, best first."""


def locate(spec: KernelSpec) -> Place:
    thread = ptx.special("%tid.x")
    route = ptx.special("%clusterid.x")
    token = route // Uint32(spec.top_k)
    return Place(
        base=Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()),
        lane=thread & Uint32(31),
        warp=cute.arch.make_warp_uniform(thread >> Uint32(5)),
        cta=ptx.special("%cluster_ctarank"),
        token=token,
        rank=route - token * Uint32(spec.top_k),
    )


def barrier(spec: KernelSpec, base: Any, name: str, index: Any = 0) -> Any:
    """Shared address of mbarrier ``name[index]``."""
    if isinstance(index, int):
        return base + Uint32(spec.shared.barriers[name] + 8 * index)
    return base + Uint32(spec.shared.barriers[name]) + index * Uint32(8)


def init_full_barriers(spec: KernelSpec, base: Any) -> None:
    """Producer, one thread: the barriers that its first boxes need; the rest are initialised by another warp meanwhile."""
    for index in range(spec.shared.ring):
        ptx.mbarrier_init(barrier(spec, base, "full", index), 1)
    ptx.fence_mbarrier_init()


def init_other_barriers(spec: KernelSpec, base: Any) -> None:
    """One thread of another warp: all other mbarriers, and ``sums`` armed with the bytes that the cluster will send."""
    for name, (number, arrivals) in spec.shared.barrier_counts.items():
        if name != "full":
            for index in range(number):
                ptx.mbarrier_init(barrier(spec, base, name, index), arrivals)
    ptx.fence_mbarrier_init()
    ptx.mbarrier_expect(barrier(spec, base, "sums"), spec.split.parts * spec.split.tiles1 * 512)


@cute.jit
def zero_operands(spec: cutlass.Constexpr[KernelSpec], base: Uint32, thread: Uint32) -> None:
    """Consumer warps: zero the operand groups and the scale arrays (padding columns multiply by zero)."""
    shared = spec.shared
    for start, size in const_expr(((shared.operand, shared.operand_bytes), (shared.w13_scale, shared.ids - shared.w13_scale))):
        for offset in cutlass.range_constexpr(0, size, CONSUMER_THREADS * 16):
            at = thread * Uint32(16) + Uint32(offset)
            if const_expr(offset + CONSUMER_THREADS * 16 <= size):
                ptx.store_shared_zero16(base + Uint32(start) + at)
            else:
                if ptx.per_lane(at < Uint32(size)):
                    ptx.store_shared_zero16(base + Uint32(start) + at)


@cute.jit
def first_row13(spec: cutlass.Constexpr[KernelSpec], tile: Uint32, flags: Uint32) -> Any:
    """Row of w13 at which logical tile ``tile`` (up tiles first) begins, for either order of the halves."""
    row = tile * Uint32(128)
    swapped = ptx.select(row < Uint32(spec.inter), row + Uint32(spec.inter), row - Uint32(spec.inter))
    return ptx.select((flags & Uint32(FLAG_GATE_FIRST)) != Uint32(0), swapped, row)


def unit_tile(spec: KernelSpec, cta: Any, unit: Any) -> Any:
    """The twin of WorkSplit.tile for run-time values."""
    split = spec.split
    return cta // Uint32(split.parts) + unit * Uint32(split.cluster // split.parts)


def box_coordinates(spec: KernelSpec, blocks: int, expert: Any, block: Any) -> tuple[Any, Any]:
    """Innermost and outermost coordinate of K block ``block`` of ``expert``: see tensor_map.py."""
    if spec.layout == "trtllm_gen":
        return Uint32(0), expert * Uint32(blocks) + block
    return block * Uint32(128), expert


@cute.jit
def first_boxes(spec: cutlass.Constexpr[KernelSpec], base: Uint32, w13: Int64, expert: Uint32, cta: Uint32, flags: Uint32) -> None:
    """Producer, one thread: the first boxes of the first unit, before this warp meets any other. They find empty stages."""
    part = cta % Uint32(spec.split.parts)
    row = first_row13(spec, unit_tile(spec, cta, Uint32(0)), flags)
    for b in cutlass.range_constexpr(first_box_count(spec)):
        inner, outer = box_coordinates(spec, spec.split.blocks1, expert, part * Uint32(spec.split.unit_blocks) + Uint32(b))
        load_stage(spec, base, Uint32(b), w13, inner, row, outer, STAGE_BYTES)


def first_box_count(spec: KernelSpec) -> int:
    """Two boxes are on their way while the rest of the CTA wakes up; more would hold the others up (140 clocks each)."""
    return min(2, spec.shared.ring, spec.split.unit_blocks)


@cute.jit
def stream_weights(
    spec: cutlass.Constexpr[KernelSpec], base: Uint32, w13: Int64, w2: Int64, expert: Uint32, cta: Uint32, flags: Uint32
) -> None:
    """Producer, one thread: this CTA's stages after the first boxes in the order of WorkSplit.stages, GEMM1's and straight on GEMM2's.

    A stage is refilled when ``empty`` says that its MMAs are complete; the first lap passes at once (parity 1 of a fresh
    barrier).
    """
    split = spec.split
    begun = first_box_count(spec)
    stage, parity = Uint32(begun % spec.shared.ring), Uint32(int(begun < spec.shared.ring))
    stage, parity = stream_unit(spec, begun, base, w13, expert, cta, Uint32(0), flags, stage, parity)
    for unit in cutlass.range(1, split.units, unroll=1):
        stage, parity = stream_unit(spec, 0, base, w13, expert, cta, Uint32(unit), flags, stage, parity)
    for tile in cutlass.range(split.tiles2, unroll=1):
        row = cta * Uint32(split.rows2) + Uint32(tile) * Uint32(split.tile2_rows)
        for b in cutlass.range(split.blocks2, unroll=1):
            inner, outer = box_coordinates(spec, split.blocks2, expert, Uint32(b))
            ptx.mbarrier_wait(barrier(spec, base, "empty", stage), parity)
            load_stage(spec, base, stage, w2, inner, row, outer, split.tile2_rows * 128)
            stage, parity = next_stage(spec, stage, parity)
    for _ in cutlass.range(spec.shared.ring, unroll=1):  # no commit may still be on its way to this CTA's barriers when it exits
        ptx.mbarrier_wait(barrier(spec, base, "empty", stage), parity)
        stage, parity = next_stage(spec, stage, parity)


@cute.jit
def stream_unit(
    spec: cutlass.Constexpr[KernelSpec],
    begun: cutlass.Constexpr[int],
    base: Uint32,
    w13: Int64,
    expert: Uint32,
    cta: Uint32,
    unit: Uint32,
    flags: Uint32,
    stage: Uint32,
    parity: Uint32,
) -> Any:
    """The stages of one GEMM1 unit, of which ``begun`` are already asked for."""
    split = spec.split
    row = first_row13(spec, unit_tile(spec, cta, unit), flags)
    first = cta % Uint32(split.parts) * Uint32(split.unit_blocks)
    for b in cutlass.range(begun, split.unit_blocks, unroll=1):
        inner, outer = box_coordinates(spec, split.blocks1, expert, first + Uint32(b))
        ptx.mbarrier_wait(barrier(spec, base, "empty", stage), parity)
        load_stage(spec, base, stage, w13, inner, row, outer, STAGE_BYTES)
        stage, parity = next_stage(spec, stage, parity)
    return stage, parity


def load_stage(spec: KernelSpec, base: Any, stage: Any, tensor_map: Any, inner: Any, row: Any, outer: Any, byte_count: int) -> None:
    full = barrier(spec, base, "full", stage)
    ptx.mbarrier_expect(full, byte_count)
    ptx.tma_load_3d(base + stage * Uint32(STAGE_BYTES), tensor_map, inner, row, outer, full)


def next_stage(spec: KernelSpec, stage: Any, parity: Any) -> tuple[Any, Any]:
    """Advance a ring position; the parity flips at the wrap."""
    following = stage + Uint32(1)
    wrapped = following == Uint32(spec.shared.ring)
    return ptx.select(wrapped, Uint32(0), following), ptx.select(wrapped, parity ^ Uint32(1), parity)


@cute.jit
def route_and_begin(
    spec: cutlass.Constexpr[KernelSpec],
    base: Uint32,
    lane: Uint32,
    cta: Uint32,
    token: Uint32,
    rank: Uint32,
    logits: Int64,
    bias: list[Any],
    w13: Int64,
    flags: Uint32,
) -> Any:
    """Producer warp, up to the CTA barrier: choose the token's experts, ask for the first boxes. Returns this route's expert.

    Nothing that other warps prepare stands before the first boxes. The CTA barrier publishes the ids in shared memory;
    the other warps wait there, because a start of all warps at once slows the routing down.
    """
    values = routing.load_logits(spec, logits, token, lane)
    if ptx.per_lane(lane == Uint32(0)):
        init_full_barriers(spec, base)
    scratch = base + Uint32(spec.shared.staging)  # the consumer warps use it only after the CTA barrier
    chosen = routing.choose(spec, routing.selection_keys(spec, values, bias), lane, scratch)
    if ptx.per_lane(lane < Uint32(spec.top_k)):
        ptx.store_shared_u32(base + Uint32(spec.shared.ids) + lane * Uint32(4), chosen)
    expert = ptx.shuffle(chosen, rank)
    if ptx.per_lane(lane == Uint32(0)):
        first_boxes(spec, base, w13, expert, cta, flags)
    ptx.sync_warp()
    return expert


def fetch_scales(
    spec: KernelSpec, thread: Any, expert: Any, cta: Any, w13_scale: Any, w2_scale: Any, flags: Any
) -> list[tuple[Any, Any, Any]]:
    """Consumer thread: ask for its block scales of this CTA's tiles of ``expert``: (in range, shared offset, value) each.

    Threads beyond the last scale ask for scale 0 again.
    """
    split, shared = spec.split, spec.shared
    part = cta % Uint32(split.parts)
    fetched = []
    for start in range(0, split.stages1, CONSUMER_THREADS):
        index = thread + Uint32(start)
        wanted = index < Uint32(split.stages1)
        index = ptx.select(wanted, index, Uint32(0))
        unit = index // Uint32(split.unit_blocks)
        block = index - unit * Uint32(split.unit_blocks)
        tile = first_row13(spec, unit_tile(spec, cta, unit), flags) >> Uint32(7)
        at = (expert * Uint32(split.tiles1) + tile) * Uint32(split.blocks1) + part * Uint32(split.unit_blocks) + block
        slot = unit * Uint32(scale_columns(split.unit_blocks)) + block
        fetched.append((wanted, Uint32(shared.w13_scale) + slot * Uint32(4), ptx.load_global_f32(w13_scale + Int64(at) * Int64(4))))
    for start in range(0, split.stages2, CONSUMER_THREADS):
        index = thread + Uint32(start)
        wanted = index < Uint32(split.stages2)
        index = ptx.select(wanted, index, Uint32(0))
        tile = index // Uint32(split.blocks2)
        block = index - tile * Uint32(split.blocks2)
        row = cta * Uint32(split.rows2) + tile * Uint32(split.tile2_rows)
        at = (expert * Uint32(split.blocks1) + (row >> Uint32(7))) * Uint32(split.blocks2) + block
        slot = tile * Uint32(scale_columns(split.blocks2)) + block
        fetched.append((wanted, Uint32(shared.w2_scale) + slot * Uint32(4), ptx.load_global_f32(w2_scale + Int64(at) * Int64(4))))
    return fetched


def store_scales(base: Any, fetched: list[tuple[Any, Any, Any]]) -> None:
    """Put the fetched scales where the epilogues read them."""
    for wanted, offset, value in fetched:
        ptx.store_shared_f32_if(wanted, base + offset, value)


@cute.jit
def store_route(
    spec: cutlass.Constexpr[KernelSpec],
    base: Uint32,
    warp: Uint32,
    lane: Uint32,
    cta: Uint32,
    token: Uint32,
    rank: Uint32,
    logits: Int64,
    ids: Int64,
    weights: Int64,
    scale: Float32,
) -> None:
    """Consumer warp 0 of CTA 0 writes the route's id and weight, off the path to the first weight byte."""
    if warp + cta == Uint32(0):
        known = ptx.select(lane < Uint32(spec.top_k), lane, Uint32(0))
        chosen = ptx.load_shared_u32(base + Uint32(spec.shared.ids) + known * Uint32(4))
        routing.store_routing(spec, logits, ids, weights, token, rank, chosen, lane, scale)
