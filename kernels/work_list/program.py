"""The list structure: one CTA's program. Geometry and shared memory: megamoe_aot/work_list.py; the whole picture: docs/design.md.

| warp | work |
|---|---|
| 0-3 | quantise token 0; Hopper: MMAs and stores; Blackwell: read the accumulators and store |
| 4-7 | with the helpers: route all tokens but the first, quantise those of even number; then hidden tiles |
| 8-11 | helpers: route tokens, quantise those of odd number; then hidden tiles too, or on Hopper MMAs and stores of every other W2 tile |
| 12 | routing of token 0, then the weight stream |
| 13 | list of unique experts, epoch, ids and weights; then plans the W2 tiles |
| 14 | Blackwell: issues the MMAs and owns the TMEM allocation |

"MMA warps" are 0-3, and for W2 tiles on Hopper those helpers; "reader" is warp 14's issuing thread on Blackwell and the MMA warps on
Hopper.

| barrier | completed by | waited for by |
|---|---|---|
| full[s] | producer's expect_tx + TMA bytes (Hopper: and block scales) | reader; producer (stages in flight) |
| empty[s] | Hopper: lane 0 of the four warps that read it; Blackwell: commit of the stage's MMAs, and the issuing thread | producer |
| ids | one arrival per token: its experts are in shared memory | list warp |
| list | list warp: tables, count and epoch are written | all but the list warp |
| x[t] | four warps: token t is quantised | reader, MMA warps |
| w1 | four MMA warps: this CTA's sums are sent, polling may begin | hidden warps; Hopper: MMA warps that hold weights |
| run[n] | list warp: slot n of the queue of runs is written | producer, reader, MMA warps, hidden warps |
| begun | producer: it has begun to ask for a run's boxes | list warp |
| hidden[b] | four or eight hidden warps: the hidden tile in buffer b is written | reader, MMA warps |
| free[b] | four or eight MMA warps: buffer b has been read | hidden warps |
| scales[n] | Blackwell: producer's expect_tx + block scales of slot n | MMA warps |
| acc[a] | Blackwell: commit of the MMAs into accumulator buffer a | MMA warps |
| drained[a] | Blackwell: four MMA warps, accumulator buffer a has been read | issuing thread |
| named 1 | producer arrives: the first full barriers (and scales[0]) are initialised, its first boxes are asked for | all others |
| named 2 | all others arrive: their barriers are initialised, operands and tables zeroed | producer |
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64, Uint32, const_expr

from kernels import ptx, routing
from megamoe_aot.abi import FLAG_TRIGGER
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import HELPER_WARP, ISSUE_WARP, LIST_WARP, PRODUCER_WARP, WORKERS

from . import blackwell, common, hidden, hopper, instructions, packets, planner, producer, tokens
from .common import Cta, barrier
from .producer import FIRST

KNOWN_BARRIER, PREPARED_BARRIER = 1, 2
PREPARING, INITIALISING = 8, 12
"""Warps that zero shared memory, and that initialise barriers."""
SHARED_OUT = ("full", "empty", "x", "run")
"""Barriers that those warps initialise, each a share: an init takes its thread a while. The first full barriers are the producer's."""


@cute.jit
def program(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
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
    m: Uint32,
) -> None:
    """The whole CTA. Up to grid_dependency_wait nothing that a preceding kernel may write is read, and nothing is stored.

    ``without``: stages left out for a measured breakdown ("routing", "exchange", "mma", "store"); empty in every shipped kernel.
    """
    thread = ptx.special("%tid.x")
    launched = ptx.special("%nctaid.x")
    at = Cta(
        base=Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()),
        lane=thread & Uint32(31),
        warp=cute.arch.make_warp_uniform(thread >> Uint32(5)),
        cta=ptx.special("%ctaid.x"),
        grid=common.active_ctas(spec, launched, m),
        tokens=m,
    )
    biases = routing.load_bias(spec, bias, at.lane)
    if at.warp == Uint32(PRODUCER_WARP):
        # Nothing that other warps prepare stands before the first boxes: this warp initialises their barriers itself, while its
        # logits travel, and meets the other initialisations after those boxes.
        if ptx.per_lane(at.lane == Uint32(0)):
            ptx.prefetch_tensor_map(w13)
        ptx.grid_dependency_wait()
        values = routing.load_logits(spec, logits, Uint32(0), at.lane)
        if ptx.per_lane(at.lane == Uint32(0)):
            init_first_barriers(spec, at.base)
        chosen = tokens.choose(spec, without, at, Uint32(WORKERS), Uint32(0), values, biases)
        rank = at.cta * common.deal_size(spec, m) // Uint32(spec.work_list.units)
        expert0 = ptx.shuffle(chosen, ptx.select(rank < Uint32(spec.top_k), rank, Uint32(0)))
        if ptx.per_lane(at.lane == Uint32(0)):
            producer.first_stages(spec, at, expert0, w13, w13_scale)
        ptx.sync_warp()
        instructions.cta_barrier_arrive(KNOWN_BARRIER, spec.block_threads)
        ptx.sync_warp()
        ptx.cta_barrier(PREPARED_BARRIER, spec.block_threads)
        tokens.publish(spec, at, Uint32(0), chosen)
        if ptx.per_lane(at.lane == Uint32(0)):
            producer.produce(spec, at, expert0, w13, w2, w13_scale, w2_scale)
        ptx.sync_warp()
    elif issues(spec, at.warp):
        if const_expr(spec.engine == "blackwell"):
            blackwell.prepare(spec, at)
            instructions.cta_barrier_arrive(PREPARED_BARRIER, spec.block_threads)
            ptx.cta_barrier(KNOWN_BARRIER, spec.block_threads)
            blackwell.issue_warp(spec, at)  # no grid_dependency_wait: this role touches shared memory, barriers and TMEM only
    else:
        prepare(spec, at, thread)
        instructions.cta_barrier_arrive(PREPARED_BARRIER, spec.block_threads)
        ptx.grid_dependency_wait()
        # All of these hold still until the producer has asked for its first boxes: a start of all warps at once slows it down.
        if at.warp < Uint32(4):
            words = tokens.load_share(spec, x, Uint32(0), at.warp, at.lane)
            ptx.cta_barrier(KNOWN_BARRIER, spec.block_threads)
            tokens.quantise_share(spec, at, words, Uint32(0), at.warp, flags)
            if const_expr(spec.engine == "hopper"):
                hopper.w1_units(spec, without, at, scratch, flags)
            else:
                blackwell.mma_warps(spec, without, at, out, scratch, flags)
        elif at.warp == Uint32(LIST_WARP):
            epoch = Uint32(0)
            if ptx.per_lane(at.lane == Uint32(0)):
                epoch = packets.next_epoch(scratch, launched)
            ptx.sync_warp()
            ptx.cta_barrier(KNOWN_BARRIER, spec.block_threads)
            list_warp(spec, at, logits, ids, weights, w2, scale, flags, scratch, epoch, launched)
        else:
            helper = at.warp >= Uint32(HELPER_WARP)
            worker = ptx.select(helper, at.warp - Uint32(HELPER_WARP), at.warp)
            values = tokens.load_logits(spec, logits, worker + Uint32(1), m, at.lane)
            ptx.cta_barrier(KNOWN_BARRIER, spec.block_threads)
            tokens.route_others(spec, without, at, worker, values, logits, biases)
            tokens.quantise_others(spec, at, x, ptx.select(helper, Uint32(1), Uint32(2)), worker & Uint32(3), flags)
            if at.warp < Uint32(4 + spec.work_list.hidden_warps):
                hidden.hidden_warps(spec, without, at, at.warp - Uint32(4), scratch, limit)
        if const_expr(spec.engine == "hopper"):
            runs_tiles = hopper.runs_w2_tiles(spec, at.warp)
            if runs_tiles:
                hopper.w2_tiles(spec, without, at, out)


@cute.jit
def list_warp(
    spec: cutlass.Constexpr[KernelSpec],
    at: Cta,
    logits: Int64,
    ids: Int64,
    weights: Int64,
    w2: Int64,
    scale: Float32,
    flags: Uint32,
    scratch: Int64,
    epoch: Uint32,
    launched: Uint32,
) -> None:
    """The list of experts, then what is off the critical path: the trigger, ids and weights, the sweep, the W2 tiles' plan.

    ``epoch``: lane 0's.
    """
    if ptx.per_lane(at.lane == Uint32(0)):
        ptx.prefetch_tensor_map(w2)
    ptx.mbarrier_wait(barrier(spec, at.base, "ids"), Uint32(0))
    count = tokens.build_list(spec, at)
    if ptx.per_lane(at.lane == Uint32(0)):
        ptx.store_shared_u32(at.base + Uint32(spec.work_list.count), count)
        ptx.store_shared_u32(at.base + Uint32(spec.work_list.count + 4), epoch)
        ptx.mbarrier_arrive(barrier(spec, at.base, "list"))
    ptx.sync_warp()
    if (flags & Uint32(FLAG_TRIGGER)) != Uint32(0):
        ptx.launch_dependents()
    begin, end = common.w2_range(spec, at, count)
    run = common.first_run(spec.work_list, begin, end)
    if ptx.per_lane((at.lane == Uint32(0)) & (run.count != Uint32(0))):
        common.publish_run(spec, at.base, Uint32(0), run)
    ptx.sync_warp()
    tokens.store_routes(spec, at, logits, ids, weights, scale)
    if ptx.per_lane(at.lane == Uint32(0)):
        packets.sweep(spec, scratch, epoch, at.cta, launched, at.tokens)
        planner.plan_runs(spec, at, count, run, end, scratch, epoch)
    ptx.sync_warp()


def issues(spec: KernelSpec, warp: Any) -> Any:
    """Whether this is Blackwell's issuing warp."""
    return warp == Uint32(ISSUE_WARP) if spec.engine == "blackwell" else Boolean(False)


def init_first_barriers(spec: KernelSpec, base: Uint32) -> None:
    """Producer, one thread: what its first boxes complete."""
    for index in range(FIRST):
        ptx.mbarrier_init(barrier(spec, base, "full", index), 1)
    if spec.engine == "blackwell":
        ptx.mbarrier_init(barrier(spec, base, "scales", 0), 1)
    ptx.fence_mbarrier_init()


@cute.jit
def prepare(spec: cutlass.Constexpr[KernelSpec], at: Cta, thread: Uint32) -> None:
    """The other barriers, and zeroed operands and tables: warps 0-11 and the list warp."""
    plan = spec.work_list
    if at.warp == Uint32(LIST_WARP):
        if ptx.per_lane(at.lane == Uint32(0)):
            instructions.mbarrier_init(barrier(spec, at.base, "ids"), at.tokens)
            for name in const_expr([n for n in plan.barrier_counts if n not in ("ids", *SHARED_OUT, *blackwell.BARRIERS)]):
                number, arrivals = plan.barrier_counts[name]
                for i in cutlass.range_constexpr(number):
                    ptx.mbarrier_init(barrier(spec, at.base, name, i), arrivals)
            ptx.fence_mbarrier_init()
    elif at.warp < Uint32(INITIALISING):
        elected = ptx.per_lane(at.lane == Uint32(0))
        if elected:
            for name in const_expr(SHARED_OUT):
                number, arrivals = plan.barrier_counts[name]
                for first in cutlass.range_constexpr(FIRST if name == "full" else 0, number, INITIALISING):
                    index = at.warp + Uint32(first)
                    if ptx.per_lane(index < Uint32(number)):
                        ptx.mbarrier_init(barrier(spec, at.base, name, index), arrivals)
            ptx.fence_mbarrier_init()
    if at.warp < Uint32(PREPARING):
        zero(at.base, plan.x_tile, plan.blocks1 * plan.columns * 128, thread)
        zero(at.base, plan.hidden, 2 * plan.blocks2 * plan.columns * 128, thread)
        zero(at.base, plan.x_scale, plan.ids - plan.x_scale, thread)
        zero(at.base, plan.mask, plan.count - plan.mask, thread)
        for offset in cutlass.range_constexpr(0, spec.experts, 32 * PREPARING):
            index = thread + Uint32(offset)
            ptx.store_shared_u32_if(index < Uint32(spec.experts), at.base + Uint32(plan.first) + index * Uint32(4), Uint32(0xFFFFFFFF))
    ptx.sync_warp()


@cute.jit
def zero(base: Uint32, start: cutlass.Constexpr[int], size: cutlass.Constexpr[int], thread: Uint32) -> None:
    """Warps 0-7 zero ``size`` bytes."""
    for offset in cutlass.range_constexpr(0, size, 32 * PREPARING * 16):
        at = thread * Uint32(16) + Uint32(offset)
        if const_expr(offset + 32 * PREPARING * 16 <= size):
            ptx.store_shared_zero16(base + Uint32(start) + at)
        else:
            if ptx.per_lane(at < Uint32(size)):
                ptx.store_shared_zero16(base + Uint32(start) + at)
