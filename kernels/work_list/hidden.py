"""The hidden warps: from GEMM1's packets to the FP8 hidden tile of an expert."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from kernels import ptx, quantise
from kernels.division import divide_all
from megamoe_aot.spec import KernelSpec

from . import common, instructions
from .common import Cta, barrier
from .packets import packet_address


@cute.jit
def hidden_warps(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
    at: Cta,
    warp: Uint32,
    scratch: Int64,
    limit: Float32,
) -> None:
    """For each run of this CTA's W2 tiles: collect its expert's GEMM1 sums, apply SwiGLU, quantise. One run ahead of the MMAs.

    ``warp``: 0 to hidden_warps - 1. Polling starts when this CTA's own W1 units are done, so that it takes no bandwidth from them.
    """
    plan = spec.work_list
    ptx.mbarrier_wait(barrier(spec, at.base, "list"), Uint32(0))
    epoch = common.launch_epoch(spec, at.base)
    ptx.mbarrier_wait(barrier(spec, at.base, "w1"), Uint32(0))
    turn = Uint32(0)
    run = common.await_run(spec, at.base, turn)
    while run.count != Uint32(0):
        place = run.begin // Uint32(plan.tiles)
        buffer = turn & Uint32(1)
        ptx.mbarrier_wait(barrier(spec, at.base, "free", buffer), ((turn >> Uint32(1)) & Uint32(1)) ^ Uint32(1))
        tile = at.base + Uint32(plan.hidden) + buffer * Uint32(plan.blocks2 * plan.columns * 128)
        scales = at.base + Uint32(plan.hidden_scale) + buffer * Uint32(4 * plan.blocks2 * plan.columns)
        rest = common.load_table(at.base, plan.mask, place)
        while rest != Uint32(0):
            token = instructions.lowest_bit(rest)
            rest = rest & (rest - Uint32(1))
            route = common.route_of(spec, at.base, place, token)
            for b in cutlass.range(Int32(warp), plan.blocks2, plan.hidden_warps, unroll=1):
                block = Uint32(b)
                up, gate = collect(spec, without, at, scratch, route, block * Uint32(128) + at.lane * Uint32(4), epoch)
                act = clamped_swiglu(gate, up, limit)
                scale = ptx.div(quantise.block_amax(act), Float32(quantise.FP8_MAX))
                word = ptx.fp8x4(*divide_all(act, [scale] * 4))
                ptx.store_shared_u32(common.row_address(plan, tile, block, token, at.lane), word)
                ptx.store_shared_f32_if(at.lane == Uint32(0), scales + (block * Uint32(plan.columns) + token) * Uint32(4), scale)
        ptx.fence_proxy_async()
        ptx.sync_warp()
        ptx.mbarrier_arrive_if(at.lane == Uint32(0), barrier(spec, at.base, "hidden", buffer))
        turn = turn + Uint32(1)
        run = common.await_run(spec, at.base, turn)


@cute.jit
def collect(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
    at: Cta,
    scratch: Int64,
    route: Uint32,
    row: Uint32,
    epoch: Uint32,
) -> Any:
    """Four up and four gate sums from ``row`` on; waits until all packets carry ``epoch``. See ``common.deal_size``."""
    sums = [Float32(0.0)] * 8
    if const_expr("exchange" not in without):
        if const_expr(spec.work_list.parts == 1):
            sums = poll(spec, 1, scratch, route, row, epoch)
        else:
            if common.deal_size(spec, at.tokens) == Uint32(1):
                sums = poll(spec, spec.work_list.parts, scratch, route, row, epoch)
            else:
                sums = poll(spec, 1, scratch, route, row, epoch)
        ptx.sync_warp()  # lanes leave the poll one by one
    return sums[:4], sums[4:]


def poll(spec: KernelSpec, parts: int, scratch: Any, route: Any, row: Any, epoch: Any) -> list[Any]:
    """The eight sums, K parts added in part order."""
    addresses = []
    for part in range(parts):
        up = packet_address(spec, scratch, route, Uint32(part), row)
        addresses += [up, up + Int64(8 * spec.inter)]
    found = instructions.poll_packets(addresses, epoch)
    sums = list(found[:8])
    for first in range(8, len(found), 8):
        sums = [ptx.add(sums[i], found[first + i]) for i in range(8)]
    return sums


def clamped_swiglu(gate: list[Any], up: list[Any], limit: Any) -> list[Any]:
    """``quantise.clamped_swiglu`` of several values, divided side by side."""
    gate = [ptx.min_keep_nan(g, limit) for g in gate]
    up = [ptx.min_keep_nan(ptx.max_keep_nan(u, -limit), limit) for u in up]
    silu = divide_all(gate, [ptx.add(Float32(1.0), cute.math.exp(-g)) for g in gate])
    return [ptx.mul(s, u) for s, u in zip(silu, up, strict=True)]
