"""From logits and x to the call's list of experts and its quantised tokens."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from kernels import ptx, quantise, routing
from megamoe_aot.abi import FLAG_UE8M0
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import ROUTING_BYTES, WORKERS

from . import common, instructions
from .common import Cta, barrier


@cute.jit
def choose(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
    at: Cta,
    slot: Uint32,
    token: Uint32,
    values: list[Any],
    bias: list[Any],
) -> Any:
    """Whole warp: the experts of ``token``, rank by lane.

    ``slot``: this warp's routing scratch; ``values``: the token's logits as ``routing.load_logits`` gives them.
    """
    chosen = token * Uint32(spec.top_k) + at.lane
    if const_expr("routing" not in without):
        scratch = at.base + Uint32(spec.work_list.routing) + slot * Uint32(ROUTING_BYTES)
        chosen = routing.choose(spec, routing.selection_keys(spec, values, bias), at.lane, scratch)
    return chosen


@cute.jit
def publish(spec: cutlass.Constexpr[KernelSpec], at: Cta, token: Uint32, chosen: Uint32) -> None:
    """Put a token's experts into the table and arrive on ``ids``."""
    address = at.base + Uint32(spec.work_list.ids) + (token * Uint32(spec.top_k) + at.lane) * Uint32(4)
    if ptx.per_lane(at.lane < Uint32(spec.top_k)):
        ptx.store_shared_u32(address, chosen)
    ptx.sync_warp()
    ptx.mbarrier_arrive_if(at.lane == Uint32(0), barrier(spec, at.base, "ids"))


def load_share(spec: KernelSpec, x: Any, token: Any, warp: Any, lane: Any) -> list[Any]:
    """Ask for one warp's share of a token, K blocks warp, warp + 4, ... (``warp``: 0 to 3); two words of two BF16 each per block."""
    first = token * Uint32(spec.hidden) + lane * Uint32(4)
    words: list[Any] = []
    for i in range(spec.work_list.blocks1 // 4):
        words += ptx.load_global_b32x2(x + Int64(first + (warp + Uint32(4 * i)) * Uint32(128)) * Int64(2))
    return words


@cute.jit
def quantise_share(spec: cutlass.Constexpr[KernelSpec], at: Cta, words: list[Any], token: Uint32, warp: Uint32, flags: Uint32) -> None:
    """Quantise what :func:`load_share` asked for, store rows and scales, arrive on ``x[token]``.

    Lane i divides for the share's block i: one division instead of one after the other for every block.
    """
    plan = spec.work_list
    number = plan.blocks1 // 4
    amax = [quantise.block_amax([*quantise.unpack_bf16(words[2 * i]), *quantise.unpack_bf16(words[2 * i + 1])]) for i in range(number)]
    mine = amax[0]
    for i in cutlass.range_constexpr(1, number):
        mine = ptx.select(at.lane == Uint32(i), amax[i], mine)
    scale = ptx.div(mine, Float32(quantise.FP8_MAX))
    scale = ptx.select((flags & Uint32(FLAG_UE8M0)) != Uint32(0), quantise.power_of_two_above(scale), scale)
    inverse = ptx.rcp(scale)
    for i in cutlass.range_constexpr(number):
        block = warp + Uint32(4 * i)
        factor = ptx.shuffle_f32(inverse, Uint32(i))
        values = [*quantise.unpack_bf16(words[2 * i]), *quantise.unpack_bf16(words[2 * i + 1])]
        word = ptx.fp8x4(*[ptx.mul(v, factor) for v in values])
        ptx.store_shared_u32(common.row_address(plan, at.base + Uint32(plan.x_tile), block, token, at.lane), word)
    block = warp + at.lane * Uint32(4)
    place = at.base + Uint32(plan.x_scale) + (block * Uint32(plan.columns) + token) * Uint32(4)
    ptx.store_shared_f32_if(at.lane < Uint32(number), place, scale)
    ptx.fence_proxy_async()
    ptx.sync_warp()
    ptx.mbarrier_arrive_if(at.lane == Uint32(0), barrier(spec, at.base, "x", token))


def load_logits(spec: KernelSpec, logits: Any, token: Any, tokens: Any, lane: Any) -> list[Any]:
    """``routing.load_logits`` of ``token``, or of the last token where there is none of that number."""
    last = tokens - Uint32(1)
    return routing.load_logits(spec, logits, ptx.select(token < tokens, token, last), lane)


@cute.jit
def route_others(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
    at: Cta,
    worker: Uint32,
    values: list[Any],
    logits: Int64,
    bias: list[Any],
) -> None:
    """Worker ``worker`` (0 to 7): experts of tokens worker + 1, worker + 9, ... ``values``: logits of the first of them."""
    for t in cutlass.range(Int32(worker + Uint32(1)), Int32(at.tokens), WORKERS, unroll=1):
        token = Uint32(t)
        later = load_logits(spec, logits, token + Uint32(WORKERS), at.tokens, at.lane)
        publish(spec, at, token, choose(spec, without, at, worker, token, values, bias))
        values = later


@cute.jit
def quantise_others(spec: cutlass.Constexpr[KernelSpec], at: Cta, x: Int64, first: Uint32, warp: Uint32, flags: Uint32) -> None:
    """A group's warp ``warp`` (0 to 3): its share of tokens first, first + 2, ...; the next one's loads are under way meanwhile."""
    last = at.tokens - Uint32(1)
    words = load_share(spec, x, ptx.select(first < last, first, last), warp, at.lane)
    for t in cutlass.range(Int32(first), Int32(at.tokens), 2, unroll=1):
        token = Uint32(t)
        following = ptx.select(token + Uint32(2) < last, token + Uint32(2), last)
        later = load_share(spec, x, following, warp, at.lane)
        quantise_share(spec, at, words, token, warp, flags)
        words = later


@cute.jit
def build_list(spec: cutlass.Constexpr[KernelSpec], at: Cta) -> Any:
    """List warp: the unique experts in order of first appearance, the tokens that chose each, and their routes. Returns how many."""
    plan = spec.work_list
    routes = at.tokens * Uint32(spec.top_k)
    rounds = (routes + Uint32(31)) >> Uint32(5)
    first = at.base + Uint32(plan.first)
    for j in cutlass.range(Int32(rounds), unroll=1):
        route = Uint32(j) * Uint32(32) + at.lane
        if ptx.per_lane(route < routes):
            instructions.reduce_shared_min(first + common.load_table(at.base, plan.ids, route) * Uint32(4), route)
    ptx.sync_warp()
    count = Uint32(0)
    below = (Uint32(1) << at.lane) - Uint32(1)
    for j in cutlass.range(Int32(rounds), unroll=1):
        route = Uint32(j) * Uint32(32) + at.lane
        known = ptx.select(route < routes, route, Uint32(0))
        expert = common.load_table(at.base, plan.ids, known)
        is_first = (ptx.load_shared_u32(first + expert * Uint32(4)) == route) & (route < routes)
        votes = ptx.ballot(is_first)
        ptx.sync_warp()  # everybody has read the table before it changes
        place = count + ptx.population(votes & below)
        if ptx.per_lane(is_first):
            ptx.store_shared_u32(at.base + Uint32(plan.expert) + place * Uint32(4), expert)
            ptx.store_shared_u32(first + expert * Uint32(4), place | Uint32(0x10000))  # no route has such a number
        ptx.sync_warp()
        count = count + ptx.population(votes)
    for j in cutlass.range(Int32(rounds), unroll=1):
        route = Uint32(j) * Uint32(32) + at.lane
        if ptx.per_lane(route < routes):
            expert = common.load_table(at.base, plan.ids, route)
            place = ptx.load_shared_u32(first + expert * Uint32(4)) & Uint32(0xFFFF)
            token = route // Uint32(spec.top_k)
            instructions.store_shared_u16(at.base + Uint32(plan.route) + (place * Uint32(plan.columns) + token) * Uint32(2), route)
            instructions.reduce_shared_or(at.base + Uint32(plan.mask) + place * Uint32(4), Uint32(1) << token)
    ptx.sync_warp()
    return count


@cute.jit
def store_routes(spec: cutlass.Constexpr[KernelSpec], at: Cta, logits: Int64, ids: Int64, weights: Int64, scale: Float32) -> None:
    """List warp of CTA t: write token t's ids and weights."""
    if at.cta < at.tokens:
        known = ptx.select(at.lane < Uint32(spec.top_k), at.lane, Uint32(0))
        chosen = common.load_table(at.base, spec.work_list.ids, at.cta * Uint32(spec.top_k) + known)
        weight = routing.weigh(spec, logits, at.cta, chosen, at.lane, scale)
        if ptx.per_lane(at.lane < Uint32(spec.top_k)):
            offset = Int64(at.cta * Uint32(spec.top_k) + at.lane) * Int64(4)
            ptx.store_global_u32(ids + offset, chosen)
            ptx.store_global_f32(weights + offset, weight)
