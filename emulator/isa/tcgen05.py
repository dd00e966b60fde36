"""Blackwell's tensor core: TMEM allocation, MMA, commit, loads, fences. Only cta_group::1.

MMAs of one thread into one accumulator with one shape execute in issue order; all else is free to reorder, and does.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import mma, tmem
from ..cluster import Cluster
from ..decode import Decoder, Execute, Signal, opcode
from ..mbarrier import Mbarrier
from ..memory import SHARED_START
from ..parser import Address, Instruction
from ..sanitizer import taint
from ..scheduler import AsyncOp
from ..warp import FULL, Fragment, Lanes, RegisterWait, Warp, lanes_of, pack
from . import barriers
from .loads import granules, own_shared
from .warp import whole_warp

Chain = tuple[int, int, int]
"""Accumulator address, M, N."""


@dataclasses.dataclass
class Tcgen05State:
    """What one warp has in flight."""

    allocs: int = 0
    """tcgen05.allocs so far."""
    issued: int = 0
    """MMAs issued; their numbers start at 1."""
    lane: int = -1
    """Lane that issued the last one."""
    running: set[int] = dataclasses.field(default_factory=set)
    """Numbers of MMAs not yet executed."""
    chains: dict[Chain, deque[AsyncOp]] = dataclasses.field(default_factory=dict)
    """Per accumulator and shape, the MMAs in order; the first one is with the scheduler."""
    commits: list[tuple[int, AsyncOp]] = dataclasses.field(default_factory=list)
    """Commits that wait for all MMAs up to a number."""
    loads: int = 0
    """tcgen05.ld issued."""
    loading: int = 0
    """Of those, not yet executed."""
    waited: int = 0
    """Loads that wait::ld has seen complete."""
    waiting: Fragment | None = None
    """Fragment in wait::ld."""


def state_of(warp: Warp) -> Tcgen05State:
    if warp.tcgen05 is None:
        warp.tcgen05 = Tcgen05State()
    state: Tcgen05State = warp.tcgen05
    return state


def _uniform(fragment: Fragment, lanes: Lanes, index: int, what: str) -> int:
    """The value of an operand that all lanes must agree on."""
    values = fragment.u[index][lanes.index]
    if (values != values[0]).any():
        fragment.warp.cta.cluster.report("E-T5-LANE", f"{what} differs between the lanes of the warp")
    return int(values[0])


# ---- allocation ----


@opcode("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32")
def _alloc(decoder: Decoder, instruction: Instruction) -> Execute:
    a, columns = decoder.expect(2)
    base, offset = decoder.address(a, 32)
    number = decoder.source(columns, 32)

    def execute(fragment: Fragment, lanes: Lanes) -> Signal | None:
        warp = fragment.warp
        cta = warp.cta
        cluster = cta.cluster
        whole_warp(fragment, lanes, aligned=True)
        count = _uniform(fragment, lanes, number, "the number of columns")
        if not tmem.valid_columns(count):
            cluster.report("E-T5-ALLOC", f"alloc of {count} columns: a power of two from 32 to 512 is needed")
            return None
        if cta.tmem.relinquished:
            cluster.report("E-T5-ALLOC", "alloc after relinquish_alloc_permit")
        if count > cta.tmem.last_request:
            cluster.report("E-T5-ALLOC", f"alloc of {count} columns after one of {cta.tmem.last_request}: requests must not grow")
        place = cta.tmem.place(count, cluster.numpy_rng)
        if place is None:
            cluster.report("E-T5-ALLOC", f"alloc of {count} columns can never succeed: {cta.tmem.allocations} are allocated")
            return None
        cta.tmem.allocations[place] = count
        cta.tmem.last_request = count
        state = state_of(warp)
        state.allocs += 1
        first = lanes_of(1 << lanes.first)
        found = own_shared(fragment, first, fragment.u[base] + np.uint32(offset), 4, "tcgen05.alloc")
        if found:
            if cluster.sanitizer:
                cluster.sanitizer.tensor(cta.rank).allocated(warp.clock, place, count, state.allocs)
                at, lane_of = granules(cluster, found[0], 4, first.index)
                cluster.sanitizer.shared.generic_write(warp.clock, first, at, lane_of)
            cluster.shared.views[32][found[0] // 4] = place
        return None

    return execute


@opcode("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
def _relinquish(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        whole_warp(fragment, lanes, aligned=True)
        fragment.warp.cta.tmem.relinquished = True

    return execute


@opcode("tcgen05.dealloc.cta_group::1.sync.aligned.b32")
def _dealloc(decoder: Decoder, instruction: Instruction) -> Execute:
    address, columns = decoder.expect(2)
    base, number = decoder.source(address, 32), decoder.source(columns, 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cta = warp.cta
        cluster = cta.cluster
        whole_warp(fragment, lanes, aligned=True)
        at, count = _uniform(fragment, lanes, base, "the address"), _uniform(fragment, lanes, number, "the number of columns")
        if cta.tmem.allocations.get(at) != count:
            cluster.report("E-T5-ALLOC", f"dealloc of {count} columns at {at:#x}; allocated are {cta.tmem.allocations}")
            return
        busy = [w.index for w in cta.warps if w.tcgen05 and (w.tcgen05.running or w.tcgen05.loading)]
        if busy:
            cluster.report("E-T5-ALLOC", f"dealloc while asynchronous tcgen05 operations of warps {busy} are outstanding")
        if cluster.sanitizer:
            cluster.sanitizer.tensor(cta.rank).dealloc(warp.clock, lanes, at, count)
        del cta.tmem.allocations[at]

    return execute


# ---- MMA ----


@opcode("tcgen05.mma.cta_group::1.kind::f8f6f4")
def _mma(decoder: Decoder, instruction: Instruction) -> Execute:
    """D[tmem] = A[shared] B[shared] (+ D), issued by one thread."""
    d, a, b, description, enable = decoder.expect(5)
    if not isinstance(d, Address) or isinstance(a, Address):
        decoder.fail("only D in [tmem], A and B as descriptors are supported")
    target, offset = decoder.address(d, 32)
    if offset:
        decoder.fail("no offset is allowed")
    left, right = decoder.source(a, 64), decoder.source(b, 64)
    shape, accumulate = decoder.source(description, 32), decoder.source(enable, 1)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cluster = fragment.warp.cta.cluster
        if lanes.count != 1:
            cluster.report("E-T5-ISSUE", f"{lanes.count} lanes issue the MMA, so it happens {lanes.count} times")
        u = fragment.u
        for lane in lanes.index:
            try:
                operands = mma.tcgen05_operand(int(u[left][lane])), mma.tcgen05_operand(int(u[right][lane]))
                form = mma.tcgen05_instruction(int(u[shape][lane]))
            except mma.DescriptorError as error:
                cluster.report("E-DESC", str(error))
                return
            _issue(fragment, lanes_of(1 << int(lane)), int(u[target][lane]), operands, form, bool(u[accumulate][lane]))

    return execute


def accumulator_rows(address: int, m: int) -> Any:
    """TMEM lanes of rows 0..m-1; a problem as a string. M = 128 uses all lanes, M = 64 half of the datapaths ("layout F")."""
    lane = address >> 16
    if m == 128:
        return np.arange(128) if lane == 0 else f"the lane part of D's address is {lane}; M = 128 needs 0"
    row = np.arange(64)
    return row % 16 + 32 * (row // 16) + lane if lane in (0, 16) else f"the lane part of D's address is {lane}; M = 64 needs 0 or 16"


def _issue(fragment: Fragment, lane: Lanes, address: int, operands: tuple[mma.Operand, mma.Operand], form: mma.Shape, adds: bool) -> None:
    warp = fragment.warp
    cta = warp.cta
    cluster = cta.cluster
    state = state_of(warp)
    column = address & 0xFFFF
    rows = accumulator_rows(address, form.m)
    if isinstance(rows, str):
        cluster.report("E-T5-LANE", rows)
        return
    if not cta.tmem.allocated(column, form.n):
        cluster.report("E-T5-ALLOC", f"the MMA writes columns {column} to {column + form.n - 1}; allocated are {cta.tmem.allocations}")
        return
    parts = (operands[0], 0, form.m), (operands[1], 0, form.n)
    chunks = [mma.operand_chunks(*part) for part in parts]
    if any(c.max() + 16 > cluster.shared.end or c.min() < SHARED_START for c in chunks):
        cluster.report("E-DESC", "an operand reaches outside this CTA's shared memory")
        return
    state.issued += 1
    state.lane = lane.first
    cta.mma_warps.add(warp.index)
    number, chain = state.issued, (address, form.m, form.n)
    columns = slice(column, column + form.n)
    base = cta.rank * cluster.shared.span
    if cluster.sanitizer:
        granule = cluster.program.granule
        read = mma.operand_granules(parts, granule) + base // granule
        places = mma.operand_granules(parts, 16) + base // 16
        spoiled = cluster.sanitizer.shared.mma_read_operand(warp.clock, lane, read, places, form.n, number)
        cluster.sanitizer.tensor(cta.rank).mma(warp.clock, lane, rows, columns, adds, number, hash(chain), spoiled)
    step, name = cluster.scheduler.step, cluster.label(int(chunks[0].min()) // 1024 * 1024 - SHARED_START)

    def run() -> None:
        a, b = (mma.gather(cluster.chunks, part + base) for part in chunks)
        cells = cta.tmem.cells
        old = cells[rows, columns].view(np.float32) if adds else None
        cells[rows, columns] = mma.dot(a, b, old, cluster.arithmetic.tcgen05).view(np.uint32)
        cluster.counts.mmas += 1
        cluster.timeline.add("mma", cta.rank, "mma", step, cluster.scheduler.step, name)
        state.running.discard(number)
        queue = state.chains[chain]
        queue.popleft()
        if queue:
            cluster.scheduler.submit(queue[0])
        _release_commits(cluster, state)

    op = AsyncOp("tcgen05.mma", cta.number, cluster.where(), run)
    state.running.add(number)
    queue = state.chains.setdefault(chain, deque())
    queue.append(op)
    if len(queue) == 1:
        cluster.scheduler.submit(op)


@opcode("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64")
def _commit(decoder: Decoder, instruction: Instruction) -> Execute:
    """Arrive once, when all MMAs that this thread has issued are complete."""
    base, offset = decoder.address(decoder.expect(1)[0], 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cta = warp.cta
        cluster = cta.cluster
        state = state_of(warp)
        if lanes.count != 1:
            cluster.report("E-T5-ISSUE", f"{lanes.count} lanes commit, so the barrier gets {lanes.count} arrivals")
        for lane in lanes.index:
            if (state.issued and state.lane != int(lane)) or (not state.issued and cta.mma_warps):
                cluster.report("E-T5-ISSUE", "commit by a thread that did not issue the MMAs: it tracks nothing")
            barrier = barriers.find(cluster, int(fragment.u[base][lane]) + offset, cta.rank, True, "tcgen05.commit")
            if barrier is None:
                continue
            payload = None
            if cluster.sanitizer:
                one = lanes_of(1 << int(lane))
                cluster.sanitizer.barriers.used(barrier, warp.clock, one, "asynchronous")
                payload = cluster.sanitizer.commit_payload(warp, one, state.issued)
            barrier.commits += 1
            op = AsyncOp("commit", cta.number, cluster.where(), _arrival(cluster, barrier, cta.rank, payload))
            state.commits.append((state.issued, op))
        _release_commits(cluster, state)

    return execute


def _arrival(cluster: Cluster, barrier: Mbarrier, rank: int, payload: Any) -> Callable[[], None]:
    def arrive() -> None:
        barrier.commits -= 1
        if not cluster.ctas[barrier.cta].alive:
            return  # reported at the exit
        barrier.committed = barrier.phase
        if cluster.sanitizer:
            cluster.sanitizer.delivered(barrier, payload)
        barriers.arrive(cluster, barrier, rank, 1)

    return arrive


def _release_commits(cluster: Cluster, state: Tcgen05State) -> None:
    """Commits whose MMAs are all done go to the scheduler."""
    oldest = min(state.running, default=None)
    ready = [op for upto, op in state.commits if oldest is None or upto < oldest]
    state.commits = [(upto, op) for upto, op in state.commits if oldest is not None and upto >= oldest]
    for op in ready:
        cluster.scheduler.submit(op)


# ---- loads ----


@dataclasses.dataclass(frozen=True)
class LoadShape:
    """What one repetition of a tcgen05.ld shape covers."""

    lanes: int
    columns: int
    registers: int
    most: int
    """Repetitions at most."""


LOAD_SHAPES = {"32x32b": LoadShape(32, 1, 1, 128), "16x128b": LoadShape(16, 4, 2, 64), "16x256b": LoadShape(16, 8, 4, 32)}


def load_places(shape: str, repetitions: int) -> list[tuple[Any, Any]]:
    """Per register, (TMEM lane, column) that each lane t of the warp gets, relative to the address."""
    t = np.arange(32)
    if shape == "32x32b":
        return [(t, np.full(32, r)) for r in range(repetitions)]
    if shape == "16x128b":  # r = 2 block + bank
        return [(8 * (r % 2) + t // 4, 4 * (r // 2) + t % 4) for r in range(2 * repetitions)]
    return [(8 * (r // 2 % 2) + t // 4, 8 * (r // 4) + 2 * (t % 4) + r % 2) for r in range(4 * repetitions)]  # r = 4 block + 2 bank + j


def _load_names() -> list[str]:
    return [f"tcgen05.ld.sync.aligned.{s}.x{1 << i}.b32" for s, shape in LOAD_SHAPES.items() for i in range(8) if 1 << i <= shape.most]


@opcode(*_load_names())
def _ld(decoder: Decoder, instruction: Instruction) -> Execute:
    """Registers get cells of TMEM some time before wait::ld returns."""
    name, repetitions = instruction.opcode.split(".")[4], int(instruction.opcode.split(".")[5][1:])
    shape, places = LOAD_SHAPES[name], load_places(name, repetitions)
    columns = shape.columns * repetitions
    d, a = decoder.expect(2)
    registers = [decoder.late_result(item, 32) for item in decoder.vector(d, shape.registers * repetitions)]
    base, offset = decoder.address(a, 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cta = warp.cta
        cluster = cta.cluster
        whole_warp(fragment, lanes, aligned=True)
        state = state_of(warp)
        address = _uniform(fragment, lanes, base, "the TMEM address") + offset
        lane, column = address >> 16, address & 0xFFFF
        state.loads += 1
        number = state.loads
        for register in registers:
            warp.held[register] = RegisterWait("tcgen05.ld", "E-T5-ORDER", FULL, number)
            warp.defined[register] |= lanes.bits
        quarter = 32 * (warp.index % 4)
        if lane not in range(quarter, quarter + 32, shape.lanes):
            text = f"warp {warp.index} reaches TMEM lanes {quarter} .. +31, not {lane} .. {lane + shape.lanes - 1}"
            cluster.report("E-T5-LANE", text)
            return
        if not cta.tmem.allocated(column, columns):
            text = f"tcgen05.ld of columns {column} to {column + columns - 1}; allocated are {cta.tmem.allocations}"
            cluster.report("E-T5-ALLOC", text)
            return
        if cluster.sanitizer:
            tensor = cluster.sanitizer.tensor(cta.rank)
            tensor.load(warp.clock, lanes, slice(lane, lane + shape.lanes), column, columns, number)
            for register, (rows, at) in zip(registers, places, strict=True):
                taint.clear(warp, register)
                taint.mark(warp, register, pack(tensor.spoiled[lane + rows, column + at]), taint.RACE)
        state.loading += 1

        def run() -> None:
            for register, (rows, at) in zip(registers, places, strict=True):
                warp.u[register][:] = cta.tmem.cells[lane + rows, column + at]
            state.loading -= 1
            if not state.loading and state.waiting is not None:
                waiting, state.waiting = state.waiting, None
                cluster.scheduler.wake(waiting)

        cluster.scheduler.submit(AsyncOp("tcgen05.ld", cta.number, cluster.where(), run))

    return execute


@opcode("tcgen05.wait::ld.sync.aligned")
def _wait_ld(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> Signal | None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        whole_warp(fragment, lanes, aligned=True)
        state = state_of(warp)
        if state.loading:
            state.waiting = fragment
            cluster.scheduler.park(fragment, "wait::ld", lambda: f"waits for {state.loading} tcgen05.ld")
            return Signal.RETRY
        state.waited = state.loads
        for register in [r for r, wait in warp.held.items() if wait.check == "E-T5-ORDER"]:
            del warp.held[register]
        return None

    return execute


# ---- fences ----


@opcode("tcgen05.fence::before_thread_sync")
def _fence_before(decoder: Decoder, instruction: Instruction) -> Execute:
    """Allocs, and loads that wait::ld has seen complete, are ordered before what follows the next synchronisation."""
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        if cluster.sanitizer:
            state, clocks, rank = state_of(warp), cluster.sanitizer.clocks, warp.cta.rank
            warp.clock.learn(lanes, clocks.loads(rank, warp.index), state.waited)
            warp.clock.learn(lanes, clocks.allocs(rank, warp.index), state.allocs)

    return execute


@opcode("tcgen05.fence::after_thread_sync")
def _fence_after(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        if fragment.warp.cta.cluster.sanitizer:
            fragment.warp.clock.fence_tensor(lanes)

    return execute
