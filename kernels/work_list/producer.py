"""The weight stream of one CTA: its W1 units, then its W2 tiles, each with its block scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from kernels import ptx
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import FEW_W1, FEW_W2, FLIGHTS, SCALE_SLOTS, STAGE_BYTES, UNIT_ROWS, ListPlan

from . import common, instructions
from .common import Cta, Ring, barrier

FIRST = 2
"""Stages that the producer asks for before it meets any other warp."""


class Stream(NamedTuple):
    """How far the producer is."""

    asked: Any
    """Stages asked for so far."""
    ring: Ring
    """The next stage, and the parity of its ``empty``."""
    seen: Ring
    """The oldest stage in flight, and the parity of its ``full``."""


class Span(NamedTuple):
    """One unit's or tile's weights and scales."""

    row: Any
    """First of its 64 rows."""
    outer: Any
    """Outermost box coordinate of its K block 0: see tensor_map.py."""
    block: Any
    """Its first K block."""
    scales: Any
    """Global address of its block scales, 16-byte aligned."""
    slot: Any
    """Where they go."""


def w1_span(spec: KernelSpec, expert: Any, tile: Any, part: Any, w13_scale: Any, unit: Any) -> Span:
    """W1 unit: ``tile``'s rows as they lie in w13, whichever half comes first. ``unit``: how many units came before."""
    plan = spec.work_list
    index = (expert * Uint32(2 * plan.blocks2) + (tile >> Uint32(1))) * Uint32(plan.blocks1)
    block = part * Uint32(plan.unit_blocks)
    return Span(
        row=tile * Uint32(UNIT_ROWS),
        outer=outer(spec, plan.blocks1, expert),
        block=block,
        scales=w13_scale + Int64(index + block) * Int64(4),
        slot=unit & Uint32(SCALE_SLOTS - 1),
    )


def w2_span(spec: KernelSpec, expert: Any, tile: Any, w2_scale: Any, unit: Any) -> Span:
    """W2 tile. Its scales need not begin at a 16-byte boundary: what is fetched begins at the one before, see :func:`scale_shift`."""
    plan = spec.work_list
    index = w2_scale_index(plan, expert, tile)
    return Span(
        row=tile * Uint32(UNIT_ROWS),
        outer=outer(spec, plan.blocks2, expert),
        block=Uint32(0),
        scales=w2_scale + Int64((index >> Uint32(2)) << Uint32(2)) * Int64(4),
        slot=unit & Uint32(SCALE_SLOTS - 1),
    )


def outer(spec: KernelSpec, blocks: int, expert: Any) -> Any:
    return expert if spec.layout == "row_major" else expert * Uint32(blocks)


def w2_scale_index(plan: ListPlan, expert: Any, tile: Any) -> Any:
    """Index of a W2 tile's first scale in w2_scale."""
    return (expert * Uint32(plan.blocks1) + (tile >> Uint32(1))) * Uint32(plan.blocks2)


def scale_shift(plan: ListPlan, expert: Any, tile: Any) -> Any:
    """Bytes by which a W2 tile's scales begin behind their slot's start."""
    return (w2_scale_index(plan, expert, tile) & Uint32(3)) * Uint32(4)


def w2_scale_bytes(plan: ListPlan) -> int:
    """Bytes of the 16-byte units that hold one W2 tile's scales, and not a unit more: the last tile's scales end the tensor.

    Where blocks2 = 4 n + 3, scales that begin in the second half of a unit reach into one more.
    """
    return 16 * -(-plan.blocks2 // 4)


@cute.jit
def load_stage(
    spec: cutlass.Constexpr[KernelSpec],
    blocks: cutlass.Constexpr[int],
    pair: cutlass.Constexpr[bool],
    scale_bytes: cutlass.Constexpr[int],
    base: Uint32,
    tensor_map: Int64,
    span: Span,
    first: Uint32,
    flight: Uint32,
    stream: Stream,
) -> Any:
    """Ask for ``blocks`` K blocks from the span's block ``first`` on (``pair``: in one box); with block 0 also for its scales.

    From stage number ``flight`` on, the oldest stage in flight must be there first: so many are in flight, if it is never changed. A stage
    is refilled when ``empty`` says that its MMAs are complete.
    """
    if stream.asked >= flight:
        ptx.mbarrier_wait(barrier(spec, base, "full", stream.seen.stage), stream.seen.parity)
        stream = Stream(stream.asked, stream.ring, common.after(spec, stream.seen))
    if stream.asked >= Uint32(spec.work_list.ring):
        ptx.mbarrier_wait(barrier(spec, base, "empty", stream.ring.stage), stream.ring.parity)
    full = barrier(spec, base, "full", stream.ring.stage)
    weights = Uint32(blocks * 8192)
    slot = base + Uint32(spec.work_list.slots) + span.slot * Uint32(spec.work_list.slot_bytes)
    if const_expr(spec.engine == "hopper"):
        instructions.mbarrier_expect(full, ptx.select(first == Uint32(0), weights + Uint32(scale_bytes), weights))
    else:
        instructions.mbarrier_expect(full, weights)
    target = base + stream.ring.stage * Uint32(STAGE_BYTES)
    inner = span.block + first
    for i in cutlass.range_constexpr(1 if pair else blocks):
        half = target + Uint32(8192 * i)
        if const_expr(spec.layout == "trtllm_gen"):
            ptx.tma_load_3d(half, tensor_map, Uint32(0), span.row, span.outer + inner + Uint32(i), full)
        else:
            ptx.tma_load_3d(half, tensor_map, (inner + Uint32(i)) * Uint32(128), span.row, span.outer, full)
    if first == Uint32(0):
        if const_expr(spec.engine == "hopper"):
            instructions.bulk_load(slot, span.scales, scale_bytes, full)
        else:
            arrived = barrier(spec, base, "scales", span.slot)
            ptx.mbarrier_expect(arrived, scale_bytes)
            instructions.bulk_load(slot, span.scales, scale_bytes, arrived)
    return Stream(stream.asked + Uint32(1), common.after(spec, stream.ring), stream.seen)


def w13_in_pairs(spec: KernelSpec) -> bool:
    """Whether one box of w13 holds both K blocks of a stage; see tensor_map.py."""
    return spec.layout == "trtllm_gen"


def w2_in_pairs(spec: KernelSpec) -> bool:
    """As :func:`w13_in_pairs` for w2: not where an odd last block stands alone."""
    return spec.layout == "trtllm_gen" and spec.work_list.blocks2 % 2 == 0


@cute.jit
def first_stages(spec: cutlass.Constexpr[KernelSpec], at: Cta, expert: Uint32, w13: Int64, w13_scale: Int64) -> None:
    """One thread: the first stages of the first unit, which no other warp's work stands before. ``expert``: that unit's."""
    plan = spec.work_list
    unit = common.first_deal(at) * common.deal_size(spec, at.tokens)
    if unit < Uint32(spec.top_k * plan.units):
        _, tile, part = common.split_unit(plan, unit)
        span = w1_span(spec, expert, tile, part, w13_scale, Uint32(0))
        stream = Stream(Uint32(0), Ring(Uint32(0), Uint32(1)), Ring(Uint32(0), Uint32(0)))
        for s in cutlass.range_constexpr(FIRST):
            stream = load_stage(
                spec, 2, w13_in_pairs(spec), 4 * plan.unit_blocks, at.base, w13, span, Uint32(2 * s), Uint32(FIRST + 1), stream
            )


@cute.jit
def produce(
    spec: cutlass.Constexpr[KernelSpec],
    at: Cta,
    expert0: Uint32,
    w13: Int64,
    w2: Int64,
    w13_scale: Int64,
    w2_scale: Int64,
) -> None:
    """One thread: the stream after :func:`first_stages`. The first deal needs only token 0's experts; the rest waits for the list.

    ``expert0``: the first deal's expert.
    """
    plan = spec.work_list
    few, many = (min(number, plan.ring) for number in FLIGHTS[spec.engine])  # a stage waited for must not be on its next lap
    values = at.tokens * Uint32(spec.hidden)
    flight = ptx.select(values <= Uint32(FEW_W1), Uint32(few), Uint32(many))
    size = common.deal_size(spec, at.tokens)
    deal = common.first_deal(at)
    begun = ptx.select(deal * size < Uint32(spec.top_k * plan.units), Uint32(FIRST), Uint32(0))
    stream = Stream(begun, Ring(begun, Uint32(1)), Ring(Uint32(0), Uint32(0)))
    done = Uint32(0)
    if begun != Uint32(0):
        for p in cutlass.range(Int32(size), unroll=1):
            _, tile, part = common.split_unit(plan, deal * size + Uint32(p))
            asked = ptx.select(Uint32(p) == Uint32(0), begun, Uint32(0))
            stream = load_unit(spec, at.base, w13, w1_span(spec, expert0, tile, part, w13_scale, done), asked, flight, stream)
            done = done + Uint32(1)
        deal = deal + at.grid
    ptx.mbarrier_wait(barrier(spec, at.base, "list"), Uint32(0))
    experts = common.expert_count(spec, at.base)
    for d in cutlass.range(Int32(deal), Int32(common.deals(spec, at, experts)), Int32(at.grid), unroll=1):
        for p in cutlass.range(Int32(size), unroll=1):
            place, tile, part = common.split_unit(plan, Uint32(d) * size + Uint32(p))
            expert = common.load_table(at.base, plan.expert, place)
            stream = load_unit(spec, at.base, w13, w1_span(spec, expert, tile, part, w13_scale, done), Uint32(0), flight, stream)
            done = done + Uint32(1)
    deeper = (values <= Uint32(FEW_W1)) & (values > Uint32(FEW_W2))  # the next stages are asked for without waiting for one
    flight = ptx.select(deeper, ptx.select(stream.asked > flight, stream.asked, flight) + Uint32(many - few), flight)
    turn = Uint32(0)
    run = common.await_run(spec, at.base, turn)
    while run.count != Uint32(0):
        ptx.mbarrier_arrive(barrier(spec, at.base, "begun"))
        place = run.begin // Uint32(plan.tiles)
        expert = common.load_table(at.base, plan.expert, place)
        first = run.begin - place * Uint32(plan.tiles)
        for j in cutlass.range(Int32(first), Int32(first + run.count), unroll=1):
            span = w2_span(spec, expert, Uint32(j), w2_scale, done)
            stream = load_tile(spec, at.base, w2, span, scale_shift(plan, expert, Uint32(j)), flight, stream)
            done = done + Uint32(1)
        turn = turn + Uint32(1)
        run = common.await_run(spec, at.base, turn)
    if const_expr(spec.engine == "blackwell"):  # no commit may still be on its way to this CTA's barriers when it exits
        ring = stream.ring
        for _ in cutlass.range(plan.ring, unroll=1):
            ptx.mbarrier_wait(barrier(spec, at.base, "empty", ring.stage), ring.parity)
            ring = common.after(spec, ring)


@cute.jit
def load_unit(
    spec: cutlass.Constexpr[KernelSpec], base: Uint32, w13: Int64, span: Span, begun: Uint32, flight: Uint32, stream: Stream
) -> Any:
    """The stages of one W1 unit, of which ``begun`` are already asked for."""
    plan = spec.work_list
    for s in cutlass.range(Int32(begun), plan.stages1, unroll=1):
        stream = load_stage(spec, 2, w13_in_pairs(spec), 4 * plan.unit_blocks, base, w13, span, Uint32(s) * Uint32(2), flight, stream)
    return stream


@cute.jit
def load_tile(
    spec: cutlass.Constexpr[KernelSpec], base: Uint32, w2: Int64, span: Span, shift: Uint32, flight: Uint32, stream: Stream
) -> Any:
    """The stages of one W2 tile, whose scales begin ``shift`` bytes behind a 16-byte boundary."""
    size = w2_scale_bytes(spec.work_list)
    if const_expr(spec.work_list.blocks2 % 4 == 3):
        if shift >= Uint32(8):
            stream = load_tile_stages(spec, size + 16, base, w2, span, flight, stream)
        else:
            stream = load_tile_stages(spec, size, base, w2, span, flight, stream)
    else:
        stream = load_tile_stages(spec, size, base, w2, span, flight, stream)
    return stream


@cute.jit
def load_tile_stages(
    spec: cutlass.Constexpr[KernelSpec],
    size: cutlass.Constexpr[int],
    base: Uint32,
    w2: Int64,
    span: Span,
    flight: Uint32,
    stream: Stream,
) -> Any:
    """``size``: bytes of the tile's scales."""
    plan = spec.work_list
    for s in cutlass.range(plan.blocks2 // 2, unroll=1):
        stream = load_stage(spec, 2, w2_in_pairs(spec), size, base, w2, span, Uint32(s) * Uint32(2), flight, stream)
    if const_expr(plan.blocks2 % 2 == 1):
        stream = load_stage(spec, 1, False, size, base, w2, span, Uint32(plan.blocks2 - 1), flight, stream)
    return stream
