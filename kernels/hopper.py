"""The Hopper engine (sm_90a): one CTA's program with wgmma. See docs/design.md for the whole picture.

Warps 0-3 are the consumer warpgroup (quantise, MMA, epilogue), warp 4 is the producer.

| barrier | completed by | waited for by |
|---|---|---|
| full[s] | producer's arrive.expect_tx + TMA bytes | consumer warps |
| empty[s] | lane 0 of each consumer warp, once its MMAs on the stage are complete | producer |
| sums | one arrive.expect_tx in the prologue + every CTA's st.async bytes | consumer warps (cluster scope) |
| named 3 | all threads: barriers are initialised, operands zeroed, the token's experts in shared memory | |
| named 1 | consumer warps, three times: (1) token rows and scales are written and fenced, (2) GEMM1's MMAs have read the | |
| | token rows, so hidden rows may overwrite them, (3) hidden rows and scales are written and fenced | |
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from megamoe_aot.shared_memory import GROUP_BYTES, STAGE_BYTES, scale_columns
from megamoe_aot.spec import KernelSpec

from . import exchange, pipeline, ptx, quantise, routing
from .pipeline import CONSUMER_BARRIER, CONSUMER_THREADS, PROLOGUE_BARRIER, barrier

PRODUCER_WARP = 4


@cute.jit
def gemm_tile(
    spec: cutlass.Constexpr[KernelSpec],
    blocks: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
    base: Uint32,
    lane: Uint32,
    w_scale: Uint32,
    x_scale: Uint32,
    stage: Uint32,
    parity: Uint32,
) -> Any:
    """Consume ``blocks`` stages of ``rows`` weight rows; returns (this lane's scaled sum, stage, parity).

    K block b of a group of eight owns accumulator column b. A lane holds columns 2q and 2q+1 (q = lane % 4) of two rows per
    64-row half. Sum order: per lane group by group, 2q before 2q+1; then (q0 + q2) + (q1 + q3). The quad's four row sums are
    spread over its lanes: see exchange.py.
    """
    halves = rows // 64
    sums = [Float32(0.0)] * (2 * halves)
    quad = lane & Uint32(3)
    for group in cutlass.range_constexpr(0, blocks, 8):
        fragment = tuple([Float32(0.0)] * (4 * halves))
        for b in cutlass.range(min(8, blocks - group), unroll=1):
            ptx.mbarrier_wait(barrier(spec, base, "full", stage), parity)
            a = ptx.wgmma_descriptor(base + stage * Uint32(STAGE_BYTES))
            operand = ptx.wgmma_descriptor(base + Uint32(spec.shared.operand + group * GROUP_BYTES) + Uint32(b) * Uint32(GROUP_BYTES))
            fragment = ptx.wgmma_block(fragment, a, operand, Uint32(b))
            fragment = ptx.wgmma_wait(fragment)
            ptx.mbarrier_arrive_if(lane == Uint32(0), barrier(spec, base, "empty", stage))
            stage, parity = pipeline.next_stage(spec, stage, parity)
        at = Uint32(4 * group) + quad * Uint32(8)
        w, x = ptx.load_shared_f32x2(w_scale + at), ptx.load_shared_f32x2(x_scale + at)
        for column in cutlass.range_constexpr(2):
            scale = ptx.mul(w[column], x[column])
            for i in cutlass.range_constexpr(2 * halves):
                sums[i] = ptx.fma(fragment[2 * i + column], scale, sums[i])
    return spread_quad(sums, quad), stage, parity


def spread_quad(sums: list[Any], quad: Any) -> Any:
    """Add the quad's partial sums, (q0 + q2) + (q1 + q3), and leave sum i on lane q = i (i = q % 2 for two sums)."""
    if len(sums) == 4:
        upper = quad >= Uint32(2)
        kept = [ptx.select(upper, sums[i + 2], sums[i]) for i in range(2)]
        sent = [ptx.select(upper, sums[i], sums[i + 2]) for i in range(2)]
        sums = [ptx.add(kept[i], ptx.shuffle_xor(sent[i], 2)) for i in range(2)]
    else:
        sums = [ptx.add(s, ptx.shuffle_xor(s, 2)) for s in sums]
    odd = (quad & Uint32(1)) != Uint32(0)
    return ptx.add(ptx.select(odd, sums[1], sums[0]), ptx.shuffle_xor(ptx.select(odd, sums[0], sums[1]), 1))


@cute.jit
def consumer_warps(
    spec: cutlass.Constexpr[KernelSpec],
    base: Uint32,
    thread: Uint32,
    lane: Uint32,
    warp: Uint32,
    cta: Uint32,
    token: Uint32,
    rank: Uint32,
    words: list[Any],
    logits: Int64,
    w13_scale: Int64,
    w2_scale: Int64,
    out: Int64,
    ids: Int64,
    weights: Int64,
    scale: Float32,
    limit: Float32,
    flags: Uint32,
) -> None:
    """Quantise, GEMM1, exchange, GEMM2, store. ``words``: this lane's part of the token."""
    split, shared = spec.split, spec.shared
    part = cta % Uint32(split.parts)
    expert = ptx.load_shared_u32(base + Uint32(shared.ids) + rank * Uint32(4))
    scales = pipeline.fetch_scales(spec, thread, expert, cta, w13_scale, w2_scale, flags)
    quantise.quantise_token(spec, base, words, warp, lane, flags)
    pipeline.store_scales(base, scales)
    ptx.fence_proxy_async()
    ptx.cta_barrier(CONSUMER_BARRIER, CONSUMER_THREADS)

    stage, parity = Uint32(0), Uint32(0)
    w_scale = base + Uint32(shared.w13_scale)
    for unit in cutlass.range(split.units, unroll=1):
        value, stage, parity = gemm_tile(spec, split.unit_blocks, 128, base, lane, w_scale, base + Uint32(shared.x_scale), stage, parity)
        w_scale = w_scale + Uint32(4 * scale_columns(split.unit_blocks))
        if Uint32(unit) == Uint32(0):
            ptx.cluster_wait()  # every CTA of the cluster has initialised its barriers: remote stores may land
        exchange.broadcast_sums(spec, base, part, pipeline.unit_tile(spec, cta, Uint32(unit)), warp, lane, value)

    ptx.cta_barrier(CONSUMER_BARRIER, CONSUMER_THREADS)  # all four warps' MMAs are done with the token rows
    pipeline.store_route(spec, base, warp, lane, cta, token, rank, logits, ids, weights, scale)
    ptx.mbarrier_wait(barrier(spec, base, "sums"), Uint32(0), "cluster")  # also: nothing more arrives in this CTA
    quantise.quantise_hidden(spec, base, warp, lane, limit)
    ptx.fence_proxy_async()
    ptx.cta_barrier(CONSUMER_BARRIER, CONSUMER_THREADS)

    row = out + Int64(token * Uint32(spec.top_k) + rank) * Int64(2 * spec.hidden)
    w_scale = base + Uint32(shared.w2_scale)
    for tile in cutlass.range(split.tiles2, unroll=1):
        value, stage, parity = gemm_tile(
            spec, split.blocks2, split.tile2_rows, base, lane, w_scale, base + Uint32(shared.hidden_scale), stage, parity
        )
        w_scale = w_scale + Uint32(4 * scale_columns(split.blocks2))
        column = cta * Uint32(split.rows2) + Uint32(tile) * Uint32(split.tile2_rows)
        exchange.store_output(spec, base, row, column, warp, lane, value)


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
) -> None:
    """The whole CTA. Up to grid_dependency_wait nothing that a preceding kernel may write is read, and nothing is stored."""
    base, lane, warp, cta, token, rank = pipeline.locate(spec)
    thread = warp * Uint32(32) + lane
    biases = routing.load_bias(spec, bias, lane)
    if warp == Uint32(PRODUCER_WARP):
        if ptx.per_lane(lane == Uint32(0)):
            ptx.prefetch_tensor_map(w13)
            ptx.prefetch_tensor_map(w2)
        ptx.grid_dependency_wait()
        expert = pipeline.route_and_begin(spec, base, lane, cta, token, rank, logits, biases, w13, flags)
        ptx.cta_barrier(PROLOGUE_BARRIER, spec.block_threads)
        ptx.cluster_arrive_relaxed()
        if ptx.per_lane(lane == Uint32(0)):
            pipeline.stream_weights(spec, base, w13, w2, expert, cta, flags)
        ptx.sync_warp()
        ptx.cluster_wait()
    else:
        if ptx.per_lane(thread == Uint32(0)):
            pipeline.init_other_barriers(spec, base)
        pipeline.zero_operands(spec, base, thread)
        ptx.grid_dependency_wait()
        words = quantise.load_token(spec, x, token, cta % Uint32(spec.split.parts), warp, lane)
        ptx.cta_barrier(PROLOGUE_BARRIER, spec.block_threads)
        ptx.cluster_arrive_relaxed()
        consumer_warps(
            spec, base, thread, lane, warp, cta, token, rank, words, logits, w13_scale, w2_scale, out, ids, weights, scale, limit, flags
        )
