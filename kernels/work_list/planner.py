"""Which W2 tiles a CTA runs: its own range of the list, then chunks of the pool, as long as there are any.

The list warp's lane 0 plans and the producer does not, whose next box would wait for the divisions and for the pool's counter.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint32

from kernels import ptx
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import ListPlan

from . import common, instructions
from .common import Cta, Run, barrier
from .packets import pool_counter


@cute.jit
def plan_runs(spec: cutlass.Constexpr[KernelSpec], at: Cta, experts: Uint32, run: Run, end: Uint32, scratch: Int64, epoch: Uint32) -> None:
    """One thread: put the runs after ``run``, the first one, into the queue; the last is empty. ``end``: of this CTA's own tiles.

    A run is published when the producer has begun the one before it, and a chunk of the pool asked for a run earlier: both are known
    in time, and hardly more than one chunk is held by a CTA that has no time for it.
    """
    plan = spec.work_list
    tiles, pool = experts * Uint32(plan.tiles), common.pool_begin(spec, at, experts)
    counter = pool_counter(scratch, epoch)
    turn, ticket = Uint32(0), Uint32(0)
    if pool < tiles:
        ticket = instructions.take_pool_ticket(counter)
    if run.count == Uint32(0):
        run, ticket = pool_run(plan, tiles, pool, counter, ticket)
        common.publish_run(spec, at.base, turn, run)
    while run.count != Uint32(0):
        ptx.mbarrier_wait(barrier(spec, at.base, "begun"), turn & Uint32(1))
        last = run.begin + run.count
        run = common.first_run(plan, last, end)
        if last >= end:
            run, ticket = pool_run(plan, tiles, pool, counter, ticket)
        turn = turn + Uint32(1)
        common.publish_run(spec, at.base, turn, run)


@cute.jit
def pool_run(plan: cutlass.Constexpr[ListPlan], tiles: Uint32, pool: Uint32, counter: Int64, ticket: Uint32) -> Any:
    """The chunk that ``ticket`` stands for, an empty one where the pool is exhausted; and the ticket for the chunk after it."""
    begin = pool + ticket * Uint32(plan.pool_chunk)
    run = Run(begin, Uint32(0))
    if begin < tiles:
        rest = tiles - begin
        run = Run(begin, ptx.select(rest < Uint32(plan.pool_chunk), rest, Uint32(plan.pool_chunk)))
        ticket = instructions.take_pool_ticket(counter)
    return run, ticket
