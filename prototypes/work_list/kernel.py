"""The persistent work list on Hopper (sm_90a): see plan.py for the geometry.

All W1 units of the call's unique experts, then all W2 tiles. GEMM1's sums cross between CTAs through global memory (L2) as
8-byte {value, epoch} packets: the reader polls the data itself, so there are no flags and nothing to reset.

Warps 0-3: MMA (both GEMMs) and stores. 4-7: hidden tiles. 8: routing of token 0, then the weight stream. 9: list of experts.
Warps 0-7 also route and quantise the tokens.

| barrier | completed by | waited for by |
|---|---|---|
| full[s] | producer's expect_tx + TMA and scale bytes | MMA warps; producer (boxes in flight) |
| empty[s] | lane 0 of each MMA warp | producer |
| ids | one arrival per token: its experts are in shared memory | warp 9 |
| list | warp 9 | all |
| x[t] | eight warps: token t is quantised | MMA warps |
| w1 | four MMA warps: this CTA's W1 units are done, polling may begin | hidden warps |
| hidden[b] | four hidden warps: hidden tile in buffer b is written | MMA warps |
| free[b] | four MMA warps: buffer b has been read | hidden warps |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, GridConstant, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from kernels import ptx, quantise, routing
from megamoe_aot.abi import FLAG_GATE_FIRST, FLAG_UE8M0
from megamoe_aot.spec import KernelSpec

from . import instructions
from .plan import SCALE_SLOTS, STAGE_BYTES, THREADS, ListPlan, name_of

PRODUCER, LISTER = 8, 9
WORKERS = 8
FIRST = 2
"""Boxes that the producer asks for before it meets any other warp."""
FLIGHT1, FLIGHT = 3, 4
"""Boxes in flight at most, for one token and for more."""


def bar(plan: ListPlan, base: Any, name: str, index: Any = 0) -> Any:
    if isinstance(index, int):
        return base + Uint32(plan.barriers[name] + 8 * index)
    return base + Uint32(plan.barriers[name]) + index * Uint32(8)


def following(plan: ListPlan, stage: Any, parity: Any) -> tuple[Any, Any]:
    after = stage + Uint32(1)
    wrapped = after == Uint32(plan.ring)
    return ptx.select(wrapped, Uint32(0), after), ptx.select(wrapped, parity ^ Uint32(1), parity)


def row_address(plan: ListPlan, tile: Any, block: Any, token: Any, lane: Any) -> Any:
    """Where this lane's four FP8 bytes of (block, token) lie in an operand tile."""
    row = token & Uint32(7)
    at = tile + block * Uint32(plan.columns * 128) + (token >> Uint32(3)) * Uint32(1024) + row * Uint32(128)
    return at + ((lane >> Uint32(2)) ^ row) * Uint32(16) + (lane & Uint32(3)) * Uint32(4)


@cute.jit
def route_token(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    logits: Int64,
    bias: list[Any],
    token: Uint32,
    warp: Uint32,
    lane: Uint32,
) -> Any:
    """Whole warp: choose the token's experts and publish them."""
    values = routing.load_logits(spec, logits, token, lane)
    scratch = base + Uint32(plan.routing) + warp * Uint32(routing.SCRATCH_BYTES)
    chosen = routing.choose(spec, routing.selection_keys(spec, values, bias), lane, scratch)
    publish(spec, plan, base, token, lane, chosen)
    return chosen


@cute.jit
def publish(
    spec: cutlass.Constexpr[KernelSpec], plan: cutlass.Constexpr[ListPlan], base: Uint32, token: Uint32, lane: Uint32, chosen: Uint32
) -> None:
    at = base + Uint32(plan.ids) + (token * Uint32(spec.top_k) + lane) * Uint32(4)
    if ptx.per_lane(lane < Uint32(spec.top_k)):
        ptx.store_shared_u32(at, chosen)
    ptx.sync_warp()
    if ptx.per_lane(lane == Uint32(0)):
        ptx.mbarrier_arrive(bar(plan, base, "ids"))


def load_token(spec: KernelSpec, plan: ListPlan, x: Any, token: Any, warp: Any, lane: Any) -> list[Any]:
    """Ask for this warp's share of a token: blocks warp, warp + 8, ...; two words per block."""
    first = token * Uint32(spec.hidden) + lane * Uint32(4)
    words: list[Any] = []
    for i in range(plan.blocks1 // WORKERS):
        words += ptx.load_global_b32x2(x + Int64(first + (warp + Uint32(WORKERS * i)) * Uint32(128)) * Int64(2))
    return words


@cute.jit
def quantise_tokens(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    x: Int64,
    words: list[Any],
    tokens: Uint32,
    warp: Uint32,
    lane: Uint32,
    flags: Uint32,
) -> None:
    """Worker warp: its share of every token; the next token's loads are under way while one is quantised.

    ``words``: token 0's.
    """
    for t in cutlass.range(Int32(tokens), unroll=1):
        token = Uint32(t)
        following_token = ptx.select(token + Uint32(1) < tokens, token + Uint32(1), token)
        later = load_token(spec, plan, x, following_token, warp, lane)
        for i in cutlass.range_constexpr(plan.blocks1 // WORKERS):
            block = warp + Uint32(WORKERS * i)
            values = [*quantise.unpack_bf16(words[2 * i]), *quantise.unpack_bf16(words[2 * i + 1])]
            scale = ptx.div(quantise.block_amax(values), Float32(quantise.FP8_MAX))
            scale = ptx.select((flags & Uint32(FLAG_UE8M0)) != Uint32(0), quantise.power_of_two_above(scale), scale)
            inverse = ptx.rcp(scale)
            word = ptx.fp8x4(*[ptx.mul(v, inverse) for v in values])
            ptx.store_shared_u32(row_address(plan, base + Uint32(plan.x_tile), block, token, lane), word)
            at = base + Uint32(plan.x_scale) + (block * Uint32(plan.columns) + token) * Uint32(4)
            ptx.store_shared_f32_if(lane == Uint32(0), at, scale)
        ptx.fence_proxy_async()
        ptx.sync_warp()
        ptx.mbarrier_arrive_if(lane == Uint32(0), bar(plan, base, "x", token))
        words = later


@cute.jit
def build_list(spec: cutlass.Constexpr[KernelSpec], plan: cutlass.Constexpr[ListPlan], base: Uint32, lane: Uint32, tokens: Uint32) -> Any:
    """Warp 9: the unique experts in order of first appearance, the tokens that chose each, and their routes."""
    routes = tokens * Uint32(spec.top_k)
    rounds = (routes + Uint32(31)) >> Uint32(5)
    ids, first = base + Uint32(plan.ids), base + Uint32(plan.first)
    for j in cutlass.range(Int32(rounds), unroll=1):
        r = Uint32(j) * Uint32(32) + lane
        if ptx.per_lane(r < routes):
            instructions.reduce_shared_min(first + ptx.load_shared_u32(ids + r * Uint32(4)) * Uint32(4), r)
    ptx.sync_warp()
    count = Uint32(0)
    below = (Uint32(1) << lane) - Uint32(1)
    for j in cutlass.range(Int32(rounds), unroll=1):
        r = Uint32(j) * Uint32(32) + lane
        known = ptx.select(r < routes, r, Uint32(0))
        expert = ptx.load_shared_u32(ids + known * Uint32(4))
        is_first = (ptx.load_shared_u32(first + expert * Uint32(4)) == r) & (r < routes)
        votes = ptx.ballot(is_first)
        place = count + ptx.population(votes & below)
        if ptx.per_lane(is_first):
            ptx.store_shared_u32(base + Uint32(plan.expert) + place * Uint32(4), expert)
            ptx.store_shared_u32(first + expert * Uint32(4), place | Uint32(0x10000))
        ptx.sync_warp()
        count = count + ptx.population(votes)
    for j in cutlass.range(Int32(rounds), unroll=1):
        r = Uint32(j) * Uint32(32) + lane
        if ptx.per_lane(r < routes):
            expert = ptx.load_shared_u32(ids + r * Uint32(4))
            place = ptx.load_shared_u32(first + expert * Uint32(4)) & Uint32(0xFFFF)
            token = r // Uint32(spec.top_k)
            instructions.store_shared_u16(base + Uint32(plan.route) + (place * Uint32(plan.columns) + token) * Uint32(2), r)
            instructions.reduce_shared_or(base + Uint32(plan.mask) + place * Uint32(4), Uint32(1) << token)
    ptx.sync_warp()
    return count


@cute.jit
def next_epoch(scratch: Int64, grid: Uint32) -> Any:
    """One thread per CTA: this launch's epoch. The last CTA to ask leaves the counters ready for the next launch."""
    epoch = instructions.load_relaxed_u32(scratch) + Uint32(1)
    epoch = ptx.select(epoch == Uint32(0), Uint32(1), epoch)  # zeroed packets must never match
    if instructions.atomic_add_u32(scratch + Int64(4), Uint32(1)) == grid - Uint32(1):
        instructions.store_relaxed_u32(scratch + Int64(4), Uint32(0))
        instructions.store_relaxed_u32(scratch, epoch)
    return epoch


def active_ctas(plan: ListPlan, top_k: int, launched: Any, tokens: Any) -> Any:
    """CTAs that take work. With one token nobody can start W2 before all of W1 is done, so a few CTAs that would only take W2
    tiles end last: they stay idle where the others have an equal number of W1 units."""
    units = top_k * plan.units
    equal = units // -(-units // 128)
    fits = (Uint32(equal) <= launched) & (Uint32(20 * equal) >= launched * Uint32(19))
    return ptx.select((tokens == Uint32(1)) & fits, Uint32(equal), launched)


def w2_bound(plan: ListPlan, k: Any, grid: Any, total: Any, whole: Any, rest: Any, tiles: Any) -> Any:
    """First W2 tile of the k-th CTA in W2 order: the boundaries even out the stages of both phases."""
    share = (k * total) // grid
    late = ptx.select(k > grid - rest, k - (grid - rest), Uint32(0))
    done = (k * whole + late) * Uint32(plan.stages1)
    left = ptx.select(share > done, share - done, Uint32(0)) // Uint32(plan.stages2)
    left = ptx.select(left < tiles, left, tiles)
    return ptx.select(k == grid, tiles, left)


def my_w2_range(plan: ListPlan, cta: Any, grid: Any, experts: Any) -> tuple[Any, Any]:
    """CTAs with fewer W1 units come first: they get to W2 first, and so do the first experts' sums."""
    units, tiles = experts * Uint32(plan.units), experts * Uint32(plan.tiles)
    whole = units // grid
    rest = units - whole * grid
    total = units * Uint32(plan.stages1) + tiles * Uint32(plan.stages2)
    place = ptx.select(cta < rest, cta + grid - rest, cta - rest)
    place = ptx.select(cta < grid, place, grid)
    begin = w2_bound(plan, place, grid, total, whole, rest, tiles)
    after = ptx.select(place < grid, place + Uint32(1), grid)
    end = w2_bound(plan, after, grid, total, whole, rest, tiles)
    return begin, ptx.select(end > begin, end, begin)


@cute.jit
def put(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    blocks: cutlass.Constexpr[int],
    depth: cutlass.Constexpr[int],
    scale_bytes: cutlass.Constexpr[int],
    base: Uint32,
    tensor_map: Int64,
    inner: Uint32,
    row: Uint32,
    outer: Uint32,
    scales: Int64,
    slot: Uint32,
    first: Uint32,
    n: Uint32,
    flight: Uint32,
    stage: Uint32,
    parity: Uint32,
    seen: Uint32,
    seen_parity: Uint32,
) -> Any:
    """Load one stage of ``blocks`` K blocks; with the unit's ``first`` stage also its block scales."""
    if n >= flight:  # so many boxes in flight at most
        ptx.mbarrier_wait(bar(plan, base, "full", seen), seen_parity)
        seen, seen_parity = following(plan, seen, seen_parity)
    if n >= Uint32(plan.ring):
        ptx.mbarrier_wait(bar(plan, base, "empty", stage), parity)
    full = bar(plan, base, "full", stage)
    size = Uint32(blocks * 8192)
    instructions.mbarrier_expect_dynamic(full, ptx.select(first == Uint32(0), size + Uint32(scale_bytes), size))
    target = base + stage * Uint32(STAGE_BYTES)
    if const_expr(spec.layout == "trtllm_gen"):
        ptx.tma_load_3d(target, tensor_map, Uint32(0), row, outer + inner, full)
        if const_expr(blocks == 2 and depth == 1):
            ptx.tma_load_3d(target + Uint32(8192), tensor_map, Uint32(0), row, outer + inner + Uint32(1), full)
    else:
        ptx.tma_load_3d(target, tensor_map, inner * Uint32(128), row, outer, full)
        if const_expr(blocks == 2):
            ptx.tma_load_3d(target + Uint32(8192), tensor_map, inner * Uint32(128) + Uint32(128), row, outer, full)
    if first == Uint32(0):
        instructions.bulk_load(base + Uint32(plan.slots) + slot * Uint32(plan.slot_bytes), scales, scale_bytes, full)
    stage, parity = following(plan, stage, parity)
    return n + Uint32(1), stage, parity, seen, seen_parity


@cute.jit
def producer(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    expert0: Uint32,
    w13: Int64,
    w2: Int64,
    w13_scale: Int64,
    w2_scale: Int64,
    cta: Uint32,
    grid: Uint32,
    tokens: Uint32,
) -> None:
    """One thread: the weight stream. The first unit needs only token 0's experts; the rest waits for the list."""
    flight = ptx.select(tokens == Uint32(1), Uint32(FLIGHT1), Uint32(FLIGHT))
    asked = ptx.select(first_unit(cta, grid) < Uint32(spec.top_k * plan.units), Uint32(FIRST), Uint32(0))  # by first_boxes
    n, stage, parity, seen, seen_parity = asked, asked, Uint32(1), Uint32(0), Uint32(0)
    unit, i, experts, known = Uint32(0), first_unit(cta, grid), Uint32(0), asked == Uint32(0)
    total = Uint32(spec.top_k * plan.units)
    if known:
        ptx.mbarrier_wait(bar(plan, base, "list"), Uint32(0))
        experts = ptx.load_shared_u32(base + Uint32(plan.count))
        total = experts * Uint32(plan.units)
    while i < total:
        u = i // Uint32(plan.units)
        tile = i - u * Uint32(plan.units)
        expert = expert0
        if known:
            expert = ptx.load_shared_u32(base + Uint32(plan.expert) + u * Uint32(4))
        scales = w13_scale + Int64((expert * Uint32(2 * plan.blocks2) + (tile >> Uint32(1))) * Uint32(plan.blocks1)) * Int64(4)
        outer = expert if spec.layout == "row_major" else expert * Uint32(plan.blocks1)
        for s in cutlass.range(Int32(asked), plan.stages1, unroll=1):
            n, stage, parity, seen, seen_parity = put(
                spec,
                plan,
                2,
                2,
                4 * plan.blocks1,
                base,
                w13,
                Uint32(s) * Uint32(2),
                tile * Uint32(64),
                outer,
                scales,
                unit & Uint32(SCALE_SLOTS - 1),
                Uint32(s),
                n,
                flight,
                stage,
                parity,
                seen,
                seen_parity,
            )
        asked = Uint32(0)
        unit = unit + Uint32(1)
        i = i + grid
        if not known:
            ptx.mbarrier_wait(bar(plan, base, "list"), Uint32(0))
            experts = ptx.load_shared_u32(base + Uint32(plan.count))
            total = experts * Uint32(plan.units)
            known = i >= Uint32(0)
    begin, end = my_w2_range(plan, cta, grid, experts)
    scale2 = scale2_bytes(plan)
    for tile2 in cutlass.range(Int32(begin), Int32(end), unroll=1):
        u = Uint32(tile2) // Uint32(plan.tiles)
        tile = Uint32(tile2) - u * Uint32(plan.tiles)
        expert = ptx.load_shared_u32(base + Uint32(plan.expert) + u * Uint32(4))
        index = (expert * Uint32(plan.blocks1) + (tile >> Uint32(1))) * Uint32(plan.blocks2)
        scales = w2_scale + Int64((index >> Uint32(2)) << Uint32(2)) * Int64(4)
        outer = expert if spec.layout == "row_major" else expert * Uint32(plan.blocks2)
        slot = unit & Uint32(SCALE_SLOTS - 1)
        for s in cutlass.range(plan.blocks2 // 2, unroll=1):
            n, stage, parity, seen, seen_parity = put(
                spec,
                plan,
                2,
                2 - plan.blocks2 % 2,
                scale2,
                base,
                w2,
                Uint32(s) * Uint32(2),
                tile * Uint32(64),
                outer,
                scales,
                slot,
                Uint32(s),
                n,
                flight,
                stage,
                parity,
                seen,
                seen_parity,
            )
        if const_expr(plan.blocks2 % 2 == 1):
            n, stage, parity, seen, seen_parity = put(
                spec,
                plan,
                1,
                1,
                scale2,
                base,
                w2,
                Uint32(plan.blocks2 - 1),
                tile * Uint32(64),
                outer,
                scales,
                slot,
                Uint32(plan.blocks2 - 1),
                n,
                flight,
                stage,
                parity,
                seen,
                seen_parity,
            )
        unit = unit + Uint32(1)


def scale2_bytes(plan: ListPlan) -> int:
    """Bytes of the 16-byte aligned span that holds one W2 tile's scales at any offset."""
    if plan.blocks2 % 4 == 0:
        return 4 * plan.blocks2
    return -(-(4 * plan.blocks2 + 12) // 16) * 16


@cute.jit
def gemm_stage(
    plan: cutlass.Constexpr[ListPlan],
    blocks: cutlass.Constexpr[int],
    base: Uint32,
    lane: Uint32,
    operand: Uint32,
    w_scale: Uint32,
    x_scale: Uint32,
    acc: list[Any],
    stage: Uint32,
    parity: Uint32,
) -> Any:
    """One stage: each K block into its own fragment, promoted with its scales; K blocks ascending."""
    each = plan.columns // 2
    ptx.mbarrier_wait(bar(plan, base, "full", stage), parity)
    fragments = instructions.wgmma_fresh(
        plan.columns, blocks, ptx.wgmma_descriptor(base + stage * Uint32(STAGE_BYTES)), ptx.wgmma_descriptor(operand)
    )
    scales = []
    for block in cutlass.range_constexpr(blocks):
        w = ptx.load_shared_f32(w_scale + Uint32(4 * block))
        for group in cutlass.range_constexpr(plan.columns // 8):
            at = x_scale + Uint32(4 * (block * plan.columns + 8 * group)) + (lane & Uint32(3)) * Uint32(8)
            x = ptx.load_shared_f32x2(at)
            scales.append((ptx.mul(w, x[0]), ptx.mul(w, x[1])))
    fragments = ptx.wgmma_wait(fragments)
    ptx.mbarrier_arrive_if(lane == Uint32(0), bar(plan, base, "empty", stage))
    for block in cutlass.range_constexpr(blocks):
        for group in cutlass.range_constexpr(plan.columns // 8):
            for i in cutlass.range_constexpr(4):
                scale = scales[block * (plan.columns // 8) + group][i & 1]
                acc[4 * group + i] = ptx.fma(fragments[each * block + 4 * group + i], scale, acc[4 * group + i])
    stage, parity = following(plan, stage, parity)
    return acc, stage, parity


@cute.jit
def gemm(
    plan: cutlass.Constexpr[ListPlan],
    blocks: cutlass.Constexpr[int],
    base: Uint32,
    lane: Uint32,
    operand: Uint32,
    w_scale: Uint32,
    x_scale: Uint32,
    stage: Uint32,
    parity: Uint32,
) -> Any:
    """64 rows x all tokens: acc[4 g + 2 h + i] is row l // 4 + 8 h of warp w's 16, token 2 (l % 4) + i + 8 g."""
    acc = [Float32(0.0) for _ in range(plan.columns // 2)]
    for _s in cutlass.range(blocks // 2, unroll=1):
        acc, stage, parity = gemm_stage(plan, 2, base, lane, operand, w_scale, x_scale, acc, stage, parity)
        operand = operand + Uint32(2 * plan.columns * 128)
        w_scale = w_scale + Uint32(8)
        x_scale = x_scale + Uint32(8 * plan.columns)
    if const_expr(blocks % 2 == 1):
        acc, stage, parity = gemm_stage(plan, 1, base, lane, operand, w_scale, x_scale, acc, stage, parity)
    return acc, stage, parity


def first_unit(cta: Any, grid: Any) -> Any:
    """The CTA's first W1 unit; beyond all units for an idle CTA."""
    return ptx.select(cta < grid, cta, Uint32(0x7FFFFFF))


def route_of(plan: ListPlan, base: Any, u: Any, token: Any) -> Any:
    return instructions.load_shared_u16(base + Uint32(plan.route) + (u * Uint32(plan.columns) + token) * Uint32(2))


@cute.jit
def send_sums(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    scratch: Int64,
    epoch: Uint32,
    u: Uint32,
    row: Uint32,
    mask: Uint32,
    lane: Uint32,
    acc: list[Any],
) -> None:
    """Packets of one W1 unit. ``row``: logical row of the warp's first."""
    for group in cutlass.range_constexpr(plan.columns // 8):
        for i in cutlass.range_constexpr(2):
            token = (lane & Uint32(3)) * Uint32(2) + Uint32(i + 8 * group)
            chosen = ((mask >> token) & Uint32(1)) != Uint32(0)
            first = (lane >> Uint32(2)) * Uint32(2 if spec.layout == "trtllm_gen" else 1) + row
            at = scratch + Int64(128) + Int64(route_of(plan, base, u, token) * Uint32(2 * spec.inter) + first) * Int64(8)
            low, high = acc[4 * group + i], acc[4 * group + 2 + i]
            if const_expr(spec.layout == "trtllm_gen"):
                instructions.store_packets_if(chosen, at, low, high, epoch)
            else:
                instructions.store_packet_if(chosen, at, low, epoch)
                instructions.store_packet_if(chosen, at + Int64(64), high, epoch)


@cute.jit
def store_rows(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    out: Int64,
    u: Uint32,
    row: Uint32,
    mask: Uint32,
    lane: Uint32,
    acc: list,
) -> None:
    """One W2 tile as BF16."""
    for group in cutlass.range_constexpr(plan.columns // 8):
        for i in cutlass.range_constexpr(2):
            token = (lane & Uint32(3)) * Uint32(2) + Uint32(i + 8 * group)
            chosen = ((mask >> token) & Uint32(1)) != Uint32(0)
            first = (lane >> Uint32(2)) * Uint32(2 if spec.layout == "trtllm_gen" else 1) + row
            at = out + (Int64(route_of(plan, base, u, token)) * Int64(spec.hidden) + Int64(first)) * Int64(2)
            pair = ptx.bf16x2(acc[4 * group + i], acc[4 * group + 2 + i])
            if const_expr(spec.layout == "trtllm_gen"):
                instructions.store_global_b32_if(chosen, at, pair)
            else:
                instructions.store_global_b16_if(chosen, at, pair)
                instructions.store_global_b16_if(chosen, at + Int64(16), pair >> Uint32(16))


@cute.jit
def mma_warps(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    lane: Uint32,
    warp: Uint32,
    cta: Uint32,
    grid: Uint32,
    tokens: Uint32,
    out: Int64,
    scratch: Int64,
    flags: Uint32,
) -> None:
    ptx.mbarrier_wait(bar(plan, base, "list"), Uint32(0))
    experts = ptx.load_shared_u32(base + Uint32(plan.count))
    epoch = ptx.load_shared_u32(base + Uint32(plan.count + 4))
    begin, end = my_w2_range(plan, cta, grid, experts)
    stage, parity, unit = Uint32(0), Uint32(0), Uint32(0)
    slots = base + Uint32(plan.slots)
    for i in cutlass.range(Int32(first_unit(cta, grid)), Int32(experts * Uint32(plan.units)), Int32(grid), unroll=1):
        u = Uint32(i) // Uint32(plan.units)
        tile = Uint32(i) - u * Uint32(plan.units)
        mask = ptx.load_shared_u32(base + Uint32(plan.mask) + u * Uint32(4))
        for t in cutlass.range(Int32(tokens), unroll=1):
            if ((mask >> Uint32(t)) & Uint32(1)) != Uint32(0):
                ptx.mbarrier_wait(bar(plan, base, "x", Uint32(t)), Uint32(0))
        scales = slots + (unit & Uint32(SCALE_SLOTS - 1)) * Uint32(plan.slot_bytes)
        acc, stage, parity = gemm(
            plan, plan.blocks1, base, lane, base + Uint32(plan.x_tile), scales, base + Uint32(plan.x_scale), stage, parity
        )
        unit = unit + Uint32(1)
        row = tile * Uint32(64)
        swapped = ptx.select(row < Uint32(spec.inter), row + Uint32(spec.inter), row - Uint32(spec.inter))
        row = ptx.select((flags & Uint32(FLAG_GATE_FIRST)) != Uint32(0), swapped, row) + warp * Uint32(16)
        send_sums(spec, plan, base, scratch, epoch, u, row, mask, lane, acc)
    ptx.mbarrier_arrive_if(lane == Uint32(0), bar(plan, base, "w1"))
    first = begin // Uint32(plan.tiles)
    last = ptx.select(end > begin, (end - Uint32(1)) // Uint32(plan.tiles) + Uint32(1), first)
    for e in cutlass.range(Int32(first), Int32(last), unroll=1):
        u = Uint32(e)
        turn = u - first
        buffer = turn & Uint32(1)
        mask = ptx.load_shared_u32(base + Uint32(plan.mask) + u * Uint32(4))
        ptx.mbarrier_wait(bar(plan, base, "hidden", buffer), (turn >> Uint32(1)) & Uint32(1))
        operand = base + Uint32(plan.hidden) + buffer * Uint32(plan.blocks2 * plan.columns * 128)
        x_scale = base + Uint32(plan.hidden_scale) + buffer * Uint32(4 * plan.blocks2 * plan.columns)
        lo, hi = u * Uint32(plan.tiles), (u + Uint32(1)) * Uint32(plan.tiles)
        lo, hi = ptx.select(lo > begin, lo, begin), ptx.select(hi < end, hi, end)
        for j in cutlass.range(Int32(lo), Int32(hi), unroll=1):
            tile = Uint32(j) - u * Uint32(plan.tiles)
            scales = slots + (unit & Uint32(SCALE_SLOTS - 1)) * Uint32(plan.slot_bytes)
            if const_expr(plan.blocks2 % 4 != 0):
                expert = ptx.load_shared_u32(base + Uint32(plan.expert) + u * Uint32(4))
                index = (expert * Uint32(plan.blocks1) + (tile >> Uint32(1))) * Uint32(plan.blocks2)
                scales = scales + (index & Uint32(3)) * Uint32(4)
            acc, stage, parity = gemm(plan, plan.blocks2, base, lane, operand, scales, x_scale, stage, parity)
            unit = unit + Uint32(1)
            store_rows(spec, plan, base, out, u, tile * Uint32(64) + warp * Uint32(16), mask, lane, acc)
        ptx.mbarrier_arrive_if(lane == Uint32(0), bar(plan, base, "free", buffer))


@cute.jit
def hidden_warps(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    lane: Uint32,
    warp: Uint32,
    cta: Uint32,
    grid: Uint32,
    scratch: Int64,
    limit: Float32,
) -> None:
    """For each expert of this CTA's W2 range: collect its GEMM1 sums, apply SwiGLU, quantise. One expert ahead of the MMAs."""
    ptx.mbarrier_wait(bar(plan, base, "list"), Uint32(0))
    experts = ptx.load_shared_u32(base + Uint32(plan.count))
    epoch = ptx.load_shared_u32(base + Uint32(plan.count + 4))
    begin, end = my_w2_range(plan, cta, grid, experts)
    first = begin // Uint32(plan.tiles)
    last = ptx.select(end > begin, (end - Uint32(1)) // Uint32(plan.tiles) + Uint32(1), first)
    ptx.mbarrier_wait(bar(plan, base, "w1"), Uint32(0))
    for e in cutlass.range(Int32(first), Int32(last), unroll=1):
        u = Uint32(e)
        turn = u - first
        buffer = turn & Uint32(1)
        ptx.mbarrier_wait(bar(plan, base, "free", buffer), ((turn >> Uint32(1)) & Uint32(1)) ^ Uint32(1))
        tile = base + Uint32(plan.hidden) + buffer * Uint32(plan.blocks2 * plan.columns * 128)
        scale_at = base + Uint32(plan.hidden_scale) + buffer * Uint32(4 * plan.blocks2 * plan.columns)
        rest = ptx.load_shared_u32(base + Uint32(plan.mask) + u * Uint32(4))
        while rest != Uint32(0):
            token = instructions.lowest_bit(rest)
            rest = rest & (rest - Uint32(1))
            sums = scratch + Int64(128) + Int64(route_of(plan, base, u, token) * Uint32(2 * spec.inter) + lane * Uint32(4)) * Int64(8)
            for b in cutlass.range(Int32(warp), plan.blocks2, 4, unroll=1):
                block = Uint32(b)
                up_at = sums + Int64(block * Uint32(1024))
                v = instructions.poll_packets(up_at, up_at + Int64(8 * spec.inter), epoch)
                ptx.sync_warp()
                act = [quantise.clamped_swiglu(v[4 + i], v[i], limit) for i in range(4)]
                scale = ptx.div(quantise.block_amax(act), Float32(quantise.FP8_MAX))
                ptx.store_shared_u32(row_address(plan, tile, block, token, lane), ptx.fp8x4(*[ptx.div(a, scale) for a in act]))
                ptx.store_shared_f32_if(lane == Uint32(0), scale_at + (block * Uint32(plan.columns) + token) * Uint32(4), scale)
        ptx.fence_proxy_async()
        ptx.sync_warp()
        ptx.mbarrier_arrive_if(lane == Uint32(0), bar(plan, base, "hidden", buffer))


@cute.jit
def store_routes(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    lane: Uint32,
    cta: Uint32,
    tokens: Uint32,
    logits: Int64,
    ids: Int64,
    weights: Int64,
    scale: Float32,
) -> None:
    """CTA t writes token t's ids and weights."""
    if cta < tokens:
        known = ptx.select(lane < Uint32(spec.top_k), lane, Uint32(0))
        chosen = ptx.load_shared_u32(base + Uint32(plan.ids) + (cta * Uint32(spec.top_k) + known) * Uint32(4))
        weight = routing.weigh(spec, logits, cta, chosen, lane, scale)
        if ptx.per_lane(lane < Uint32(spec.top_k)):
            at = Int64(cta * Uint32(spec.top_k) + lane) * Int64(4)
            ptx.store_global_u32(ids + at, chosen)
            ptx.store_global_f32(weights + at, weight)


@cute.jit
def program(
    spec: cutlass.Constexpr[KernelSpec],
    x: Int64,
    logits: Int64,
    bias: Int64,
    w13_scale: Int64,
    w2_scale: Int64,
    out: Int64,
    ids: Int64,
    weights: Int64,
    w13: Int64,
    w2: Int64,
    scale: Float32,
    limit: Float32,
    flags: Uint32,
    scratch: Int64,
    tokens: Uint32,
) -> None:
    plan = ListPlan.of(spec)
    thread = ptx.special("%tid.x")
    lane = thread & Uint32(31)
    warp = cute.arch.make_warp_uniform(thread >> Uint32(5))
    cta, launched = ptx.special("%ctaid.x"), ptx.special("%nctaid.x")
    grid = active_ctas(plan, spec.top_k, launched, tokens)
    base = Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
    biases = routing.load_bias(spec, bias, lane)
    if warp == Uint32(PRODUCER):
        # Nothing that other warps prepare stands before the first boxes: this warp initialises the full barriers itself
        # (named barrier 1 tells the others) and meets the other initialisations (barrier 2) after those boxes.
        if ptx.per_lane(lane == Uint32(0)):
            ptx.prefetch_tensor_map(w13)
        ptx.grid_dependency_wait()
        values = routing.load_logits(spec, logits, Uint32(0), lane)
        if ptx.per_lane(lane == Uint32(0)):
            for i in cutlass.range_constexpr(plan.ring):
                ptx.mbarrier_init(bar(plan, base, "full", i), 1)
            ptx.fence_mbarrier_init()
        ptx.sync_warp()
        scratch_at = base + Uint32(plan.routing + PRODUCER * routing.SCRATCH_BYTES)
        chosen = routing.choose(spec, routing.selection_keys(spec, values, biases), lane, scratch_at)
        rank = cta // Uint32(plan.units)
        expert0 = ptx.shuffle(chosen, ptx.select(rank < Uint32(spec.top_k), rank, Uint32(0)))
        instructions.cta_barrier_arrive(1, THREADS)
        if ptx.per_lane(lane == Uint32(0)):
            first_boxes(spec, plan, base, expert0, w13, w13_scale, first_unit(cta, grid))
        ptx.sync_warp()
        ptx.cta_barrier(2, THREADS)
        publish(spec, plan, base, Uint32(0), lane, chosen)
        if ptx.per_lane(lane == Uint32(0)):
            producer(spec, plan, base, expert0, w13, w2, w13_scale, w2_scale, cta, grid, tokens)
        ptx.sync_warp()
    else:
        prepare(spec, plan, base, thread, warp, lane, tokens)
        instructions.cta_barrier_arrive(2, THREADS)
        ptx.grid_dependency_wait()
        ptx.cta_barrier(1, THREADS)  # held until the producer knows its experts: starting all at once slows its routing down
        if warp == Uint32(LISTER):
            epoch = Uint32(0)
            if ptx.per_lane(lane == Uint32(0)):
                epoch = next_epoch(scratch, launched)
                ptx.prefetch_tensor_map(w2)
            ptx.mbarrier_wait(bar(plan, base, "ids"), Uint32(0))
            count = build_list(spec, plan, base, lane, tokens)
            if ptx.per_lane(lane == Uint32(0)):
                ptx.store_shared_u32(base + Uint32(plan.count), count)
                ptx.store_shared_u32(base + Uint32(plan.count + 4), epoch)
                ptx.mbarrier_arrive(bar(plan, base, "list"))
            ptx.sync_warp()
            store_routes(spec, plan, base, lane, cta, tokens, logits, ids, weights, scale)
        else:
            words = load_token(spec, plan, x, Uint32(0), warp, lane)
            for t in cutlass.range(Int32(warp + Uint32(1)), Int32(tokens), WORKERS, unroll=1):
                route_token(spec, plan, base, logits, biases, Uint32(t), warp, lane)
            quantise_tokens(spec, plan, base, x, words, tokens, warp, lane, flags)
            if warp < Uint32(4):
                mma_warps(spec, plan, base, lane, warp, cta, grid, tokens, out, scratch, flags)
            else:
                hidden_warps(spec, plan, base, lane, warp - Uint32(4), cta, grid, scratch, limit)


@cute.jit
def first_boxes(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    expert: Uint32,
    w13: Int64,
    w13_scale: Int64,
    cta: Uint32,
) -> None:
    """One thread: the first boxes of the first unit, which no other warp's work stands before."""
    if cta < Uint32(spec.top_k * plan.units):
        tile = cta - cta // Uint32(plan.units) * Uint32(plan.units)
        scales = w13_scale + Int64((expert * Uint32(2 * plan.blocks2) + (tile >> Uint32(1))) * Uint32(plan.blocks1)) * Int64(4)
        outer = expert if spec.layout == "row_major" else expert * Uint32(plan.blocks1)
        for s in cutlass.range_constexpr(FIRST):
            put(
                spec,
                plan,
                2,
                2,
                4 * plan.blocks1,
                base,
                w13,
                Uint32(2 * s),
                tile * Uint32(64),
                outer,
                scales,
                Uint32(0),
                Uint32(s),
                Uint32(s),
                Uint32(FIRST),
                Uint32(s),
                Uint32(1),
                Uint32(0),
                Uint32(0),
            )


@cute.jit
def prepare(
    spec: cutlass.Constexpr[KernelSpec],
    plan: cutlass.Constexpr[ListPlan],
    base: Uint32,
    thread: Uint32,
    warp: Uint32,
    lane: Uint32,
    tokens: Uint32,
) -> None:
    """All warps but the producer: the other barriers, and zeroed operands and tables."""
    if warp == Uint32(LISTER):
        if ptx.per_lane(lane == Uint32(0)):
            instructions.mbarrier_init_dynamic(bar(plan, base, "ids"), tokens)
            ptx.mbarrier_init(bar(plan, base, "list"), 1)
            for i in cutlass.range_constexpr(2):
                ptx.mbarrier_init(bar(plan, base, "hidden", i), 4)
                ptx.mbarrier_init(bar(plan, base, "free", i), 4)
            ptx.mbarrier_init(bar(plan, base, "w1"), 4)
            ptx.fence_mbarrier_init()
    else:
        if ptx.per_lane(lane == Uint32(0)):
            for i in cutlass.range_constexpr(-(-plan.ring // WORKERS)):
                index = warp + Uint32(WORKERS * i)
                if ptx.per_lane(index < Uint32(plan.ring)):
                    ptx.mbarrier_init(bar(plan, base, "empty", index), 4)
            for i in cutlass.range_constexpr(plan.columns // WORKERS):
                ptx.mbarrier_init(bar(plan, base, "x", warp + Uint32(WORKERS * i)), WORKERS)
            ptx.fence_mbarrier_init()
        zero(base, plan.x_tile, plan.blocks1 * plan.columns * 128, thread)
        zero(base, plan.hidden, 2 * plan.blocks2 * plan.columns * 128, thread)
        zero(base, plan.x_scale, plan.ids - plan.x_scale, thread)
        zero(base, plan.mask, plan.count - plan.mask, thread)
        for offset in cutlass.range_constexpr(0, spec.experts, 256):
            at = thread + Uint32(offset)
            ptx.store_shared_u32_if(at < Uint32(spec.experts), base + Uint32(plan.first) + at * Uint32(4), Uint32(0xFFFFFFFF))
    ptx.sync_warp()


@cute.jit
def zero(base: Uint32, start: cutlass.Constexpr[int], size: cutlass.Constexpr[int], thread: Uint32) -> None:
    """256 threads zero ``size`` bytes."""
    for offset in cutlass.range_constexpr(0, size, 4096):
        at = thread * Uint32(16) + Uint32(offset)
        if const_expr(offset + 4096 <= size):
            ptx.store_shared_zero16(base + Uint32(start) + at)
        else:
            if ptx.per_lane(at < Uint32(size)):
                ptx.store_shared_zero16(base + Uint32(start) + at)


@cute.kernel
def moe_list(
    spec: cutlass.Constexpr[KernelSpec],
    x: cute.Pointer,
    logits: cute.Pointer,
    bias: cute.Pointer,
    w13_scale: cute.Pointer,
    w2_scale: cute.Pointer,
    out: cute.Pointer,
    ids: cute.Pointer,
    weights: cute.Pointer,
    w13_map: GridConstant[TensorMap],
    w2_map: GridConstant[TensorMap],
    scale: Float32,
    limit: Float32,
    flags: Uint32,
    scratch: cute.Pointer,
    tokens: Uint32,
) -> None:
    program(
        spec,
        x.toint(),
        logits.toint(),
        bias.toint(),
        w13_scale.toint(),
        w2_scale.toint(),
        out.toint(),
        ids.toint(),
        weights.toint(),
        w13_map.get_ptr().toint(),
        w2_map.get_ptr().toint(),
        scale,
        limit,
        flags,
        scratch.toint(),
        tokens,
    )


@cute.jit
def launch_list(
    spec: cutlass.Constexpr[KernelSpec],
    x: cute.Pointer,
    logits: cute.Pointer,
    bias: cute.Pointer,
    w13_scale: cute.Pointer,
    w2_scale: cute.Pointer,
    out: cute.Pointer,
    ids: cute.Pointer,
    weights: cute.Pointer,
    scale: Float32,
    limit: Float32,
    flags: Uint32,
    scratch: cute.Pointer,
    tokens: Uint32,
) -> None:
    """Never run: it only fixes the kernel's parameter types."""
    maps = [
        create_tensor_map_tiled(x.toint(), cutlass.Uint8, [128, 128, 4], [8, 1024], [128, 128, 1], swizzle=TensorMapSwizzle.s128b)
        for _ in range(2)
    ]
    moe_list(spec, x, logits, bias, w13_scale, w2_scale, out, ids, weights, maps[0], maps[1], scale, limit, flags, scratch, tokens).launch(
        grid=[1, 1, 1],
        block=[THREADS, 1, 1],
        smem=ListPlan.of(spec).total,
        min_blocks_per_mp=1,
        preferred_smem_carveout=100,
    )


def host_function(spec: KernelSpec) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The host function and the example arguments for ``cute.compile``; the symbol is ``<name_of(spec)>_0``."""
    moe_list.set_name_prefix(name_of(spec), remove_cutlass_symbol=True, keep_mangled_name=False)
    pointer = make_ptr(cutlass.Uint8, 0x1000, cute.AddressSpace.gmem, assumed_align=4)
    return launch_list, (spec, *[pointer] * 8, Float32(1.0), Float32(1.0), Uint32(0), pointer, Uint32(1))
