"""The list structure's MMA warps on Hopper: warps 0-3 run GEMM1, and GEMM2 together with the helpers.

A stage is 64 rows x 2 K blocks. Every K block goes into its own wgmma fragment, which is promoted into FP32 registers with its
block scales, K ascending: a row's sum does not depend on which tokens are in the call.

Where a W2 tile has few stages, the two warpgroups take tiles in turn: one stores while the other's MMAs run. Each waits for its own
tiles' ``full`` only, and a parity wait must not be two phases early. It is not: when a stage is asked for, the one FLIGHTS stages
before it is full, so a group that has seen its last tile has seen all stages up to FLIGHTS before that tile's end, and the group's next
stage lies at most a tile more than that behind it: less than a ring.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from kernels import ptx
from megamoe_aot.abi import FLAG_GATE_FIRST
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import HELPER_WARP, SCALE_SLOTS, STAGE_BYTES, UNIT_ROWS

from . import common, instructions
from .common import Cta, Ring, barrier
from .packets import packet_address
from .producer import scale_shift


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
            acc, ring = gemm(spec, without, plan.unit_blocks, at.base, at.lane, operand, scale_slot(spec, at.base, done), x_scale, ring)
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
    turn, before = Uint32(0), Uint32(0)  # runs and tiles that came before
    run = common.await_run(spec, at.base, turn)
    while run.count != Uint32(0):
        place = run.begin // Uint32(plan.tiles)
        buffer = turn & Uint32(1)
        mask = common.load_table(at.base, plan.mask, place)
        expert = common.load_table(at.base, plan.expert, place)
        ptx.mbarrier_wait(barrier(spec, at.base, "hidden", buffer), (turn >> Uint32(1)) & Uint32(1))
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
            acc, _ = gemm(spec, without, plan.blocks2, at.base, at.lane, operand, scales, x_scale, ring)
            ptx.sync_warp()  # as above; behind the last tile also for the arrival on free
            if const_expr("store" not in without):
                store_rows(spec, at, out, place, tile * Uint32(UNIT_ROWS) + row, mask, acc)
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


@cute.jit
def gemm(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
    blocks: cutlass.Constexpr[int],
    base: Uint32,
    lane: Uint32,
    operand: Uint32,
    w_scale: Uint32,
    x_scale: Uint32,
    ring: Ring,
) -> Any:
    """64 rows x all tokens: acc[4 g + 2 h + i] is row l // 4 + 8 h of the warp's 16, token 2 (l % 4) + i + 8 g."""
    columns = spec.work_list.columns
    acc = [Float32(0.0) for _ in range(columns // 2)]
    for _s in cutlass.range(blocks // 2, unroll=1):
        acc, ring = gemm_stage(spec, without, 2, base, lane, operand, w_scale, x_scale, acc, ring)
        operand = operand + Uint32(2 * columns * 128)
        w_scale = w_scale + Uint32(8)
        x_scale = x_scale + Uint32(8 * columns)
    if const_expr(blocks % 2 == 1):
        acc, ring = gemm_stage(spec, without, 1, base, lane, operand, w_scale, x_scale, acc, ring)
    return acc, ring


@cute.jit
def gemm_stage(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
    blocks: cutlass.Constexpr[int],
    base: Uint32,
    lane: Uint32,
    operand: Uint32,
    w_scale: Uint32,
    x_scale: Uint32,
    acc: list[Any],
    ring: Ring,
) -> Any:
    """One stage: each K block into its own fragment, promoted with its scales."""
    columns = spec.work_list.columns
    each, groups = columns // 2, columns // 8
    ptx.mbarrier_wait(barrier(spec, base, "full", ring.stage), ring.parity)
    if const_expr("mma" not in without):
        a = ptx.wgmma_descriptor(base + ring.stage * Uint32(STAGE_BYTES))
        fragments = instructions.wgmma_fresh(columns, blocks, a, ptx.wgmma_descriptor(operand))
        scales = []
        for block in cutlass.range_constexpr(blocks):
            w = ptx.load_shared_f32(w_scale + Uint32(4 * block))
            for group in cutlass.range_constexpr(groups):
                x = ptx.load_shared_f32x2(x_scale + Uint32(4 * (block * columns + 8 * group)) + (lane & Uint32(3)) * Uint32(8))
                scales.append((ptx.mul(w, x[0]), ptx.mul(w, x[1])))
        fragments = ptx.wgmma_wait(fragments)
        ptx.mbarrier_arrive_if(lane == Uint32(0), barrier(spec, base, "empty", ring.stage))
        for block in cutlass.range_constexpr(blocks):
            for group in cutlass.range_constexpr(groups):
                for i in cutlass.range_constexpr(4):
                    scale = scales[block * groups + group][i & 1]
                    acc[4 * group + i] = ptx.fma(fragments[each * block + 4 * group + i], scale, acc[4 * group + i])
    else:
        ptx.mbarrier_arrive_if(lane == Uint32(0), barrier(spec, base, "empty", ring.stage))
    return acc, common.after(spec, ring)


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
