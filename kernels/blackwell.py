"""The Blackwell engine (sm_100f): one CTA's program with tcgen05. See docs/design.md for the whole picture.

Warp 0 is the producer, warp 1 issues the MMAs and owns the TMEM allocation, warps 2-5 are the consumers (quantise, epilogue).

| barrier | completed by | waited for by |
|---|---|---|
| full[s] | producer's arrive.expect_tx + TMA bytes | MMA warp |
| empty[s] | commit of the stage's MMAs | producer |
| operand | lane 0 of each consumer warp, rows written and fenced; phase 0: token, phase 1: hidden | MMA warp |
| acc1[u] | commit after the last MMA of unit u | consumer warps |
| sums | one arrive.expect_tx in the prologue + every CTA's st.async bytes | consumer warps (cluster scope) |
| acc2[t] | commit after the last MMA of tile t | consumer warps |
| named 3 | all threads: barriers are initialised, operands zeroed, TMEM allocated, the token's experts in shared memory | |
| named 1 | consumer warps: scales are in shared memory | |
| named 2 | consumer and MMA warps: the last accumulator has been read, TMEM may be freed | |
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from megamoe_aot.shared_memory import STAGE_BYTES, scale_columns
from megamoe_aot.spec import KernelSpec
from megamoe_aot.tensor_memory import COLUMNS, MAX_COLUMNS, TensorMemory

from . import exchange, pipeline, ptx, quantise, routing
from .pipeline import CONSUMER_BARRIER, CONSUMER_THREADS, PROLOGUE_BARRIER, TMEM_BARRIER, barrier

PRODUCER_WARP, MMA_WARP, FIRST_CONSUMER = 0, 1, 2


def tensor_memory(spec: KernelSpec) -> TensorMemory:
    memory = TensorMemory.of(spec.split)
    assert memory.allocated <= MAX_COLUMNS, f"{memory} leaves no TMEM for the SM's second CTA"
    return memory


def operand_descriptor(spec: KernelSpec, base: Any, block: Any) -> Int64:
    """B tile of K block ``block``: its own row group and the shared zero group, in the order that its column needs.

    The descriptor's stride is unsigned, hence the low groups lie below the zero group and the high ones above it.
    """
    zero = spec.shared.zero_group
    assert zero is not None
    own, zeros = quantise.group_address(spec, base, block), base + Uint32(zero)
    low = (block & Uint32(8)) == Uint32(0)
    return ptx.tcgen05_descriptor(ptx.select(low, own, zeros), ptx.select(low, zeros - own, own - zeros))


@cute.jit
def issue_tile(
    spec: cutlass.Constexpr[KernelSpec],
    blocks: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
    base: Uint32,
    accumulator: Uint32,
    done: Uint32,
    stage: Uint32,
    parity: Uint32,
) -> Any:
    """One thread: the MMAs of ``blocks`` stages of ``rows`` weight rows, then a commit on ``done``.

    K block b adds into column b % 16 of its 16-column accumulator; the first block of each accumulator overwrites.
    """
    instruction = ptx.tcgen05_instruction(rows, COLUMNS)
    for b in cutlass.range(blocks, unroll=1):
        block = Uint32(b)
        ptx.mbarrier_wait(barrier(spec, base, "full", stage), parity)
        a = ptx.tcgen05_descriptor(base + stage * Uint32(STAGE_BYTES), Uint32(1024))
        column = accumulator + (block >> Uint32(4)) * Uint32(COLUMNS)
        ptx.tcgen05_block(column, a, operand_descriptor(spec, base, block), instruction, block & Uint32(15))
        ptx.tcgen05_commit(barrier(spec, base, "empty", stage))
        stage, parity = pipeline.next_stage(spec, stage, parity)
    ptx.tcgen05_commit(done)
    return stage, parity


@cute.jit
def mma_warp(spec: cutlass.Constexpr[KernelSpec], base: Uint32, lane: Uint32) -> None:
    """Issue all MMAs of this CTA from one thread (commits must come from the thread that issued), then free TMEM."""
    split, memory = spec.split, tensor_memory(spec)
    tmem = ptx.load_shared_u32(base + Uint32(spec.shared.tmem))
    if ptx.per_lane(lane == Uint32(0)):
        operand = barrier(spec, base, "operand")
        stage, parity = Uint32(0), Uint32(0)
        ptx.mbarrier_wait(operand, Uint32(0))
        ptx.tcgen05_fence_after()
        for unit in cutlass.range(split.units, unroll=1):
            accumulator = tmem + Uint32(unit) * Uint32(memory.unit_columns)
            done = barrier(spec, base, "acc1", Uint32(unit))
            stage, parity = issue_tile(spec, split.unit_blocks, 128, base, accumulator, done, stage, parity)
        ptx.mbarrier_wait(operand, Uint32(1))
        ptx.tcgen05_fence_after()
        for tile in cutlass.range(split.tiles2, unroll=1):
            accumulator = tmem + Uint32(memory.tiles) + Uint32(tile) * Uint32(memory.tile_columns)
            done = barrier(spec, base, "acc2", Uint32(tile))
            stage, parity = issue_tile(spec, split.blocks2, split.tile2_rows, base, accumulator, done, stage, parity)
    ptx.sync_warp()
    ptx.cluster_wait()
    ptx.cta_barrier(TMEM_BARRIER, CONSUMER_THREADS + 32)
    ptx.tcgen05_fence_after()
    ptx.tcgen05_dealloc(tmem, memory.allocated)


@cute.jit
def read_tile(
    spec: cutlass.Constexpr[KernelSpec],
    blocks: cutlass.Constexpr[int],
    accumulator: Uint32,
    w_scale: Uint32,
    x_scale: Uint32,
) -> Any:
    """This lane's row: the sum over K blocks, ascending, of column b times its scales. ``accumulator``: the warp's quarter."""
    total = Float32(0.0)
    for group in cutlass.range_constexpr(0, blocks, COLUMNS):
        columns = ptx.tcgen05_load(accumulator + Uint32(group), COLUMNS)
        for first in cutlass.range_constexpr(0, min(COLUMNS, blocks - group), 4):
            at = Uint32(4 * (group + first))
            w, x = ptx.load_shared_f32x4(w_scale + at), ptx.load_shared_f32x4(x_scale + at)
            for i in cutlass.range_constexpr(min(4, blocks - group - first)):
                total = ptx.fma(columns[first + i], ptx.mul(w[i], x[i]), total)
    return total


@cute.jit
def arrive_operand(spec: cutlass.Constexpr[KernelSpec], base: Uint32, lane: Uint32) -> None:
    """This warp's operand rows are written: order them before the MMA's async-proxy reads, then arrive once."""
    ptx.fence_proxy_async()
    ptx.sync_warp()
    if ptx.per_lane(lane == Uint32(0)):
        ptx.mbarrier_arrive(barrier(spec, base, "operand"))


@cute.jit
def consumer_warps(
    spec: cutlass.Constexpr[KernelSpec],
    base: Uint32,
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
    """Quantise, drain GEMM1, exchange, drain GEMM2, store. ``words``: this lane's part of the token.

    ``warp`` is the warp's TMEM quarter, warp index % 4: the quarter fixes its accumulator rows, and everything else is
    numbered by it too.
    """
    split, shared, memory = spec.split, spec.shared, tensor_memory(spec)
    part = cta % Uint32(split.parts)
    expert = ptx.load_shared_u32(base + Uint32(shared.ids) + rank * Uint32(4))
    scales = pipeline.fetch_scales(spec, warp * Uint32(32) + lane, expert, cta, w13_scale, w2_scale, flags)
    quantise.quantise_token(spec, base, words, warp, lane, flags)
    arrive_operand(spec, base, lane)
    pipeline.store_scales(base, scales)
    ptx.cta_barrier(CONSUMER_BARRIER, CONSUMER_THREADS)
    ptx.cluster_wait()  # every CTA of the cluster has initialised its barriers: remote stores may land

    quarter = ptx.load_shared_u32(base + Uint32(shared.tmem)) + (warp << Uint32(21))
    for unit in cutlass.range(split.units, unroll=1):
        u = Uint32(unit)
        ptx.mbarrier_wait(barrier(spec, base, "acc1", u), Uint32(0))
        ptx.tcgen05_fence_after()
        w_scale = base + Uint32(shared.w13_scale) + u * Uint32(4 * scale_columns(split.unit_blocks))
        value = read_tile(spec, split.unit_blocks, quarter + u * Uint32(memory.unit_columns), w_scale, base + Uint32(shared.x_scale))
        exchange.broadcast_sums(spec, base, part, pipeline.unit_tile(spec, cta, u), warp, lane, value)

    pipeline.store_route(spec, base, warp, lane, cta, token, rank, logits, ids, weights, scale)
    ptx.mbarrier_wait(barrier(spec, base, "sums"), Uint32(0), "cluster")  # also: nothing more arrives in this CTA
    quantise.quantise_hidden(spec, base, warp, lane, limit)
    arrive_operand(spec, base, lane)
    ptx.cta_barrier(CONSUMER_BARRIER, CONSUMER_THREADS)  # hidden scales

    row = out + Int64(token * Uint32(spec.top_k) + rank) * Int64(2 * spec.hidden)
    for tile in cutlass.range(split.tiles2, unroll=1):
        t = Uint32(tile)
        ptx.mbarrier_wait(barrier(spec, base, "acc2", t), Uint32(0))
        ptx.tcgen05_fence_after()
        w_scale = base + Uint32(shared.w2_scale) + t * Uint32(4 * scale_columns(split.blocks2))
        accumulator = quarter + Uint32(memory.tiles) + t * Uint32(memory.tile_columns)
        value = read_tile(spec, split.blocks2, accumulator, w_scale, base + Uint32(shared.hidden_scale))
        column = cta * Uint32(split.rows2) + t * Uint32(split.tile2_rows)
        exchange.store_output(spec, base, row, column, warp, lane, value)
    ptx.tcgen05_fence_before()
    ptx.cta_barrier(TMEM_BARRIER, CONSUMER_THREADS + 32)


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
    biases = routing.load_bias(spec, bias, lane)
    if warp == Uint32(PRODUCER_WARP):
        if ptx.per_lane(lane == Uint32(0)):
            ptx.prefetch_tensor_map(w13)
            ptx.prefetch_tensor_map(w2)
        ptx.grid_dependency_wait()
        expert = pipeline.route_and_begin(spec, base, lane, cta, token, rank, logits, biases, w13, flags)
        begin_together(spec)
        if ptx.per_lane(lane == Uint32(0)):
            pipeline.stream_weights(spec, base, w13, w2, expert, cta, flags)
        ptx.sync_warp()
        ptx.cluster_wait()
    elif warp == Uint32(MMA_WARP):
        if ptx.per_lane(lane == Uint32(0)):
            pipeline.init_other_barriers(spec, base)
        ptx.sync_warp()
        ptx.tcgen05_alloc(base + Uint32(spec.shared.tmem), tensor_memory(spec).allocated)
        ptx.tcgen05_relinquish()
        ptx.tcgen05_fence_before()  # the consumers' fence behind acc1 is the other half
        begin_together(spec)  # no grid_dependency_wait: this role touches shared memory, barriers and TMEM only
        mma_warp(spec, base, lane)
    else:
        quarter = warp & Uint32(3)
        pipeline.zero_operands(spec, base, (warp - Uint32(FIRST_CONSUMER)) * Uint32(32) + lane)
        ptx.grid_dependency_wait()
        words = quantise.load_token(spec, x, token, cta % Uint32(spec.split.parts), quarter, lane)
        begin_together(spec)
        consumer_warps(
            spec, base, lane, quarter, cta, token, rank, words, logits, w13_scale, w2_scale, out, ids, weights, scale, limit, flags
        )


def begin_together(spec: KernelSpec) -> None:
    """The CTA barrier of the prologue, and this CTA's word to its cluster that its barriers are initialised."""
    ptx.cta_barrier(PROLOGUE_BARRIER, spec.block_threads)
    ptx.cluster_arrive_relaxed()
