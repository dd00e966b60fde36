"""The list structure's MMA warps on Hopper: warps 0-3 run GEMM1, and GEMM2 together with the helpers.

A stage is 64 rows x 2 K blocks. Every K block goes into its own wgmma fragment, which is promoted into FP32 registers with its
block scales, K ascending: a row's sum does not depend on which tokens are in the call.

Where a W2 tile has few stages, the two warpgroups take tiles in turn: one stores while the other's MMAs run. Each waits for its own
tiles' ``full`` only, and a parity wait must not be two phases early. It is not: when a stage is asked for, the one FLIGHTS stages
before it is full, so a group that has seen its last tile has seen all stages up to FLIGHTS before that tile's end, and the group's next
stage lies at most a tile more than that behind it: less than a ring. Before their first tile both know that all W1 units' stages were full.

What the MMAs of so few columns take is the time to read their weights from shared memory. Where each group has one tile at one token,
it takes the tile into registers while it waits for the sums of GEMM1 (``ListPlan.held``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from kernels import ptx
from megamoe_aot.abi import FLAG_GATE_FIRST
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import HELPER_WARP, SCALE_SLOTS, STAGE_BYTES, UNIT_ROWS, ListPlan

from . import common, instructions
from .common import Cta, Ring, barrier
from .packets import packet_address
from .producer import scale_shift

AHEAD_STAGES = 3
"""Stages of a W2 tile up to which its MMAs run ahead of the promotion: that loop is unrolled. In a longer one they follow one another."""


@cute.jit
def w1_units(
    spec: cutlass.Constexpr[KernelSpec], without: cutlass.Constexpr[frozenset[str]], at: Cta, scratch: Int64, flags: Uint32
) -> None:
    """Warps 0-3: this CTA's W1 units, whose sums go out as packets."""
    plan = spec.work_list
    ptx.mbarrier_wait(barrier(spec, at.base, "list"), Uint32(0))
    experts = common.expert_count(spec, at.base)
    epoch = common.launch_epoch(spec, at.base)
    ring, done, ready = Ring(Uint32(0), Uint32(0)), Uint32(0), Uint32(0)
    size = common.deal_size(spec, at.tokens)
    for d in cutlass.range(Int32(common.first_deal(at)), Int32(common.deals(spec, at, experts)), Int32(at.grid), unroll=1):
        place, tile, first_part = common.split_unit(plan, Uint32(d) * size)
        mask = common.load_table(at.base, plan.mask, place)
        ready = wait_for_tokens(spec, at.base, mask, ready)
        sums = [Float32(0.0)] * (plan.columns // 2)
        for p in cutlass.range(Int32(size), unroll=1):
            block = (first_part + Uint32(p)) * Uint32(plan.unit_blocks)
            operand = at.base + Uint32(plan.x_tile) + block * Uint32(plan.columns * 128)
            x_scale = at.base + Uint32(plan.x_scale) + block * Uint32(plan.columns * 4)
            operands = Operands(operand, scale_slot(spec, at.base, done), x_scale)
            acc, ring = gemm(spec, without, plan.unit_blocks, at.base, at.lane, operands, ring)
            ptx.sync_warp()  # all lanes have read the unit's scales: their slot is refilled sixteen units later
            done = done + Uint32(1)
            sums = add_part(Uint32(p), sums, acc)
        send_sums(spec, at, scratch, epoch, place, first_part, logical_row(spec, tile, flags) + at.warp * Uint32(16), mask, sums)
    ptx.mbarrier_arrive_if(at.lane == Uint32(0), barrier(spec, at.base, "w1"))


def runs_w2_tiles(spec: KernelSpec, warp: Any) -> Any:
    """Whether the warp is of one of the warpgroups that run W2 tiles."""
    first = warp < Uint32(4)
    if spec.work_list.tile_groups == 1:
        return first
    return first | ((warp >= Uint32(HELPER_WARP)) & (warp < Uint32(HELPER_WARP + 4)))


@cute.jit
def w2_tiles(spec: cutlass.Constexpr[KernelSpec], without: cutlass.Constexpr[frozenset[str]], at: Cta, out: Int64) -> None:
    """One warpgroup's share of this CTA's W2 tiles, whose sums are rows of ``out``."""
    plan = spec.work_list
    groups = const_expr(plan.tile_groups)
    row = (at.warp & Uint32(3)) * Uint32(16)
    ptx.mbarrier_wait(barrier(spec, at.base, "list"), Uint32(0))
    experts = common.expert_count(spec, at.base)
    units = common.unit_count(spec, at, experts)
    group = ptx.select(at.warp < Uint32(4), Uint32(0), Uint32(1))
    if const_expr(plan.held):
        ptx.mbarrier_wait(barrier(spec, at.base, "w1"), Uint32(0))  # the second group has seen no stage yet, and no hidden tile tells it
    turn, before = Uint32(0), Uint32(0)  # runs and tiles that came before
    run = common.await_run(spec, at.base, turn)
    while run.count != Uint32(0):
        place = run.begin // Uint32(plan.tiles)
        buffer = turn & Uint32(1)
        mask = common.load_table(at.base, plan.mask, place)
        expert = common.load_table(at.base, plan.expert, place)
        hidden = barrier(spec, at.base, "hidden", buffer), (turn >> Uint32(1)) & Uint32(1)
        if const_expr(not plan.held):
            ptx.mbarrier_wait(*hidden)
        operand = at.base + Uint32(plan.hidden) + buffer * Uint32(plan.blocks2 * plan.columns * 128)
        x_scale = at.base + Uint32(plan.hidden_scale) + buffer * Uint32(4 * plan.blocks2 * plan.columns)
        first = Uint32(0)
        if const_expr(groups == 2):
            first = (before ^ group) & Uint32(1)
        for j in cutlass.range(Int32(first), Int32(run.count), groups, unroll=1):
            tile = run.begin + Uint32(j) - place * Uint32(plan.tiles)
            number = before + Uint32(j)
            ring = common.ring_at(spec, units * Uint32(plan.stages1) + number * Uint32(plan.stages2))
            scales = scale_slot(spec, at.base, units + number)
            if const_expr(plan.blocks2 % 4 != 0):
                scales = scales + scale_shift(plan, expert, tile)
            operands = Operands(operand, scales, x_scale)
            weights = None
            if const_expr(plan.held):
                weights = hold_tile(spec, without, at, ring)
                ptx.mbarrier_wait(*hidden)
            if const_expr(plan.stages2 <= AHEAD_STAGES):
                acc = gemm_ahead(spec, without, at.base, at.lane, operands, ring, weights)
            else:
                acc, _ = gemm(spec, without, plan.blocks2, at.base, at.lane, operands, ring)
            ptx.sync_warp()  # as above; behind the last tile also for the arrival on free
            if const_expr("store" not in without):
                store_rows(spec, at, out, place, tile * Uint32(UNIT_ROWS) + row, mask, acc)
        if const_expr(plan.held):
            ptx.mbarrier_wait(*hidden)  # also a group without a tile in this run: it must not be a run ahead of the other
        ptx.mbarrier_arrive_if(at.lane == Uint32(0), barrier(spec, at.base, "free", buffer))
        turn, before = turn + Uint32(1), before + run.count
        run = common.await_run(spec, at.base, turn)


@cute.jit
def wait_for_tokens(spec: cutlass.Constexpr[KernelSpec], base: Uint32, mask: Uint32, ready: Uint32) -> Any:
    """Until the tokens in ``mask`` are quantised; returns ``ready``, the tokens known to be, with them.

    The other columns may still be in the making: nobody reads their sums.
    """
    needed = mask & (ready ^ Uint32(0xFFFFFFFF))
    while needed != Uint32(0):
        ptx.mbarrier_wait(barrier(spec, base, "x", instructions.lowest_bit(needed)), Uint32(0))
        needed = needed & (needed - Uint32(1))
    return ready | mask


def add_part(p: Any, sums: list[Any], acc: list[Any]) -> list[Any]:
    """``sums`` with K part number ``p`` of a deal added, in part order; the first replaces them."""
    return [ptx.select(p == Uint32(0), a, ptx.add(s, a)) for s, a in zip(sums, acc, strict=True)]


def scale_slot(spec: KernelSpec, base: Any, done: Any) -> Any:
    """Shared address of the block scales of this CTA's unit or tile number ``done``."""
    return base + Uint32(spec.work_list.slots) + (done & Uint32(SCALE_SLOTS - 1)) * Uint32(spec.work_list.slot_bytes)


def logical_row(spec: KernelSpec, tile: Any, flags: Any) -> Any:
    """First logical row (up rows first) of a 64-row tile of w13, whichever half lies first in memory."""
    row = tile * Uint32(UNIT_ROWS)
    swapped = ptx.select(row < Uint32(spec.inter), row + Uint32(spec.inter), row - Uint32(spec.inter))
    return ptx.select((flags & Uint32(FLAG_GATE_FIRST)) != Uint32(0), swapped, row)


class Operands(NamedTuple):
    """What a stage's weights are multiplied by."""

    tokens: Any
    """Shared address of the FP8 tokens of its first K block."""
    w_scale: Any
    """Of that block's weight scale."""
    x_scale: Any
    """Of that block's token scales."""


def after_stage(plan: ListPlan, at: Operands) -> Operands:
    """Two K blocks further on."""
    return Operands(at.tokens + Uint32(2 * plan.columns * 128), at.w_scale + Uint32(8), at.x_scale + Uint32(8 * plan.columns))


@cute.jit
def gemm(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
    blocks: cutlass.Constexpr[int],
    base: Uint32,
    lane: Uint32,
    operands: Operands,
    ring: Ring,
) -> Any:
    """64 rows x all tokens: acc[4 g + 2 h + i] is row l // 4 + 8 h of the warp's 16, token 2 (l % 4) + i + 8 g."""
    plan = spec.work_list
    acc = [Float32(0.0) for _ in range(plan.columns // 2)]
    for _s in cutlass.range(blocks // 2, unroll=1):
        acc = finish_stage(spec, base, lane, start_stage(spec, without, 2, base, lane, operands, ring), acc)
        ring = common.after(spec, ring)
        operands = after_stage(plan, operands)
    if const_expr(blocks % 2 == 1):
        acc = finish_stage(spec, base, lane, start_stage(spec, without, 1, base, lane, operands, ring), acc)
        ring = common.after(spec, ring)
    return acc, ring


def gemm_ahead(
    spec: KernelSpec, without: frozenset[str], base: Any, lane: Any, operands: Operands, ring: Ring, held: list[list[Any]] | None
) -> list[Any]:
    """:func:`gemm` of a W2 tile of few stages, each begun before the one before it is promoted. ``held``: see :func:`hold_tile`."""
    plan = spec.work_list
    acc: list[Any] = [Float32(0.0) for _ in range(plan.columns // 2)]
    before: Stage | None = None
    for s in range(plan.stages2):
        stage = start_stage(spec, without, stage_blocks(plan, s), base, lane, operands, ring, held[s] if held is not None else None)
        ring = common.after(spec, ring)
        operands = after_stage(plan, operands)
        if before is not None:
            acc = finish_stage(spec, base, lane, before, acc, later=1)
        before = stage
    return finish_stage(spec, base, lane, stage, acc)


def stage_blocks(plan: ListPlan, s: int) -> int:
    """K blocks of a W2 tile's stage ``s``."""
    return min(2, plan.blocks2 - 2 * s)


class Stage(NamedTuple):
    """A stage whose MMAs have been started."""

    ring: Ring
    scales: list[Any]
    """Products of block scales, per K block and group of 8 columns those of this lane's two columns."""
    fragments: Sequence[Any]
    """A fragment of columns / 2 registers per K block; empty in a breakdown without MMAs."""


def start_stage(
    spec: KernelSpec,
    without: frozenset[str],
    blocks: int,
    base: Any,
    lane: Any,
    operands: Operands,
    ring: Ring,
    held: Sequence[Any] | None = None,
) -> Stage:
    """Start one stage's MMAs, each K block into its own fragment. ``held``: its weights, where they are in registers."""
    columns = spec.work_list.columns
    if held is None:
        ptx.mbarrier_wait(barrier(spec, base, "full", ring.stage), ring.parity)
    if "mma" in without:
        return Stage(ring, [], ())
    weights = ptx.wgmma_descriptor(base + ring.stage * Uint32(STAGE_BYTES)) if held is None else held
    fragments = instructions.wgmma_fresh(columns, blocks, weights, ptx.wgmma_descriptor(operands.tokens))
    scales = []
    for block in range(blocks):
        w = ptx.load_shared_f32(operands.w_scale + Uint32(4 * block))
        for group in range(columns // 8):
            x = ptx.load_shared_f32x2(operands.x_scale + Uint32(4 * (block * columns + 8 * group)) + (lane & Uint32(3)) * Uint32(8))
            scales.append((ptx.mul(w, x[0]), ptx.mul(w, x[1])))
    return Stage(ring, scales, fragments)


def finish_stage(spec: KernelSpec, base: Any, lane: Any, stage: Stage, acc: list[Any], later: int = 0) -> list[Any]:
    """``acc`` with a stage's fragments added, each with its scales; the stage is given back. ``later``: stages started since."""
    each, groups = spec.work_list.columns // 2, spec.work_list.columns // 8
    fragments = ptx.wgmma_wait(stage.fragments, later) if stage.fragments else ()
    ptx.mbarrier_arrive_if(lane == Uint32(0), barrier(spec, base, "empty", stage.ring.stage))
    acc = list(acc)
    for number, fragment in enumerate(fragments):
        block, register = divmod(number, each)
        scale = stage.scales[block * groups + register // 4][register & 1]
        acc[register] = ptx.fma(fragment, scale, acc[register])
    return acc


def hold_tile(spec: KernelSpec, without: frozenset[str], at: Cta, ring: Ring) -> list[list[Any]]:
    """A W2 tile's weights, by stage, in the registers in which wgmma takes A; waits until the tile is there.

    Of the warp's 16 rows and each 32 bytes of K, matrices 0 and 1 are the first 16 bytes of its upper and lower 8 rows, 2 and 3 the others.
    """
    plan = spec.work_list
    row = (at.warp & Uint32(3)) * Uint32(16) + (at.lane & Uint32(15))
    chunk = (at.lane >> Uint32(4)) ^ (at.lane & Uint32(7))  # 128-byte swizzle: chunk c of row r lies at c ^ r % 8
    held: list[list[Any]] = []
    for s in range(plan.stages2):
        ptx.mbarrier_wait(barrier(spec, at.base, "full", ring.stage), ring.parity)
        first = at.base + ring.stage * Uint32(STAGE_BYTES) + row * Uint32(128)
        held.append([])
        for step in range(4 * stage_blocks(plan, s) if "mma" not in without else 0):
            place = first + Uint32(8192 * (step // 4)) + (chunk ^ Uint32(2 * (step % 4))) * Uint32(16)
            held[-1] += instructions.load_matrices(place)
        ring = common.after(spec, ring)
    # What comes next in these stages is written by the async proxy; lane 0's arrival on empty tells that every lane has read.
    ptx.fence_proxy_async()
    ptx.sync_warp()
    return held


@cute.jit
def send_sums(
    spec: cutlass.Constexpr[KernelSpec],
    at: Cta,
    scratch: Int64,
    epoch: Uint32,
    place: Uint32,
    part: Uint32,
    row: Uint32,
    mask: Uint32,
    acc: list[Any],
) -> None:
    """Packets of one W1 unit. ``row``: logical row of the warp's first.

    trtllm_gen puts logical row 2 i at MMA row i and 2 i + 1 at i + 8 of each 16, so a lane's two rows are neighbours.
    """
    for group in cutlass.range_constexpr(spec.work_list.columns // 8):
        for i in cutlass.range_constexpr(2):
            token = (at.lane & Uint32(3)) * Uint32(2) + Uint32(i + 8 * group)
            chosen = ((mask >> token) & Uint32(1)) != Uint32(0)
            route = common.route_of(spec, at.base, place, token)
            low, high = acc[4 * group + i], acc[4 * group + 2 + i]
            quad = at.lane >> Uint32(2)
            if const_expr(spec.layout == "trtllm_gen"):
                pair = packet_address(spec, scratch, route, part, row + quad * Uint32(2))
                instructions.store_packets_if(chosen, pair, low, high, epoch)
            else:
                lower = packet_address(spec, scratch, route, part, row + quad)
                instructions.store_packet_if(chosen, lower, low, epoch)
                instructions.store_packet_if(chosen, lower + Int64(64), high, epoch)


@cute.jit
def store_rows(spec: cutlass.Constexpr[KernelSpec], at: Cta, out: Int64, place: Uint32, row: Uint32, mask: Uint32, acc: list[Any]) -> None:
    """One W2 tile as BF16. ``row``: the warp's first. For the order of rows see :func:`send_sums`."""
    for group in cutlass.range_constexpr(spec.work_list.columns // 8):
        for i in cutlass.range_constexpr(2):
            token = (at.lane & Uint32(3)) * Uint32(2) + Uint32(i + 8 * group)
            chosen = ((mask >> token) & Uint32(1)) != Uint32(0)
            first = (at.lane >> Uint32(2)) * Uint32(2 if spec.layout == "trtllm_gen" else 1) + row
            line = out + (Int64(common.route_of(spec, at.base, place, token)) * Int64(spec.hidden) + Int64(first)) * Int64(2)
            pair = ptx.bf16x2(acc[4 * group + i], acc[4 * group + 2 + i])
            if const_expr(spec.layout == "trtllm_gen"):
                instructions.store_kept_b32_if(chosen, line, pair)
            else:
                instructions.store_kept_b16_if(chosen, line, pair)
                instructions.store_kept_b16_if(chosen, line + Int64(16), pair >> Uint32(16))
