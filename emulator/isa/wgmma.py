"""Hopper's warpgroup MMA, m64nNk32 e4m3: each warp of the group computes its own 16 rows, asynchronously and in order.

B lies in shared memory, A there or in registers.

PTX leaves the timing between the four warps open, so each runs on its own: only barriers of the kernel tie them together.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np

from .. import mma
from ..cluster import Cluster
from ..decode import Decoder, Execute, Signal, opcode
from ..memory import SHARED_START
from ..parser import Instruction, Vector
from ..sanitizer import taint
from ..scheduler import AsyncOp
from ..warp import FULL, Fragment, Lanes, RegisterWait, Warp, pack
from .warp import whole_warp

ROWS = 16
"""Rows of D that one warp holds."""


@dataclasses.dataclass
class WarpgroupState:
    """What one warp has in flight."""

    issued: int = 0
    """MMAs issued; their numbers start at 1."""
    done: int = 0
    """MMAs executed (in order)."""
    groups: list[int] = dataclasses.field(default_factory=list)
    """For each committed group not yet waited for, the number of its last MMA."""
    queue: list[Any] = dataclasses.field(default_factory=list)
    """MMAs that wait for their predecessor, as functions."""
    waiting: Fragment | None = None
    """Fragment in wait_group."""
    wanted: int = 0
    """Number of the MMA that it waits for."""
    log: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """(instruction, scale-d, descriptors) of every MMA: all warps of the group must agree."""


def state_of(warp: Warp) -> WarpgroupState:
    if warp.wgmma is None:
        warp.wgmma = WarpgroupState()
    state: WarpgroupState = warp.wgmma
    return state


def _names() -> list[str]:
    return [f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3" for n in range(8, 257, 8)]


@opcode(*_names())
def _mma(decoder: Decoder, instruction: Instruction) -> Execute:
    n = int(instruction.opcode.split(".")[4].split("n")[1].split("k")[0])
    d, a, b, scale_d, scale_a, scale_b = decoder.expect(6)
    registers = [decoder.late_result(item, 32) for item in decoder.vector(d, n // 2)]
    decoder.accumulators.update(registers)
    held = [decoder.source(item, 32) for item in decoder.vector(a, 4)] if isinstance(a, Vector) else []
    decoder.accumulators.update(held)
    descriptors = [decoder.source(item, 64) for item in ((b,) if held else (a, b))]
    accumulate = decoder.source(scale_d, 1)
    if decoder.literal(scale_a) != 1 or decoder.literal(scale_b) != 1:
        decoder.fail("only scale-a = scale-b = 1 is supported")
    here = decoder.here

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        whole_warp(fragment, lanes, aligned=True)
        u = fragment.u
        words = [int(u[index][lanes.first]) for index in descriptors]
        adds = bool(u[accumulate][lanes.first])
        for index, word in zip(descriptors, words, strict=True):
            if (u[index][lanes.index] != np.uint64(word)).any():
                cluster.report("E-WGMMA", "the lanes of the warp have different descriptors")
        state = state_of(warp)
        _agree(warp, state, (here, adds, *words))
        _check_registers(warp, registers, adds, lanes)
        if warp.unfenced.intersection(held):
            cluster.report("E-WGMMA", "registers of A were written since the last wgmma.fence")
        try:
            operands = [mma.wgmma_operand(word) for word in words]
        except mma.DescriptorError as error:
            cluster.report("E-DESC", str(error))
            return
        _issue(fragment, lanes, state, registers, held, operands, n, adds)

    return execute


def _agree(warp: Warp, state: WarpgroupState, entry: tuple[int, ...]) -> None:
    """The k-th MMA must be the same in all warps of the warpgroup."""
    first = warp.index // 4 * 4
    group = warp.cta.warps[first : first + 4]
    if len(group) < 4:
        warp.cta.cluster.report("E-WGMMA", "wgmma in an incomplete warpgroup")
    number = len(state.log)
    state.log.append(entry)
    for other in group:
        log = state_of(other).log
        if len(log) > number and log[number] != entry:
            warp.cta.cluster.report("E-WGMMA", f"warps {warp.index} and {other.index} of a warpgroup issue different MMAs")


def _check_registers(warp: Warp, registers: list[int], adds: bool, lanes: Lanes) -> None:
    cluster = warp.cta.cluster
    if adds and any(lanes.bits & ~warp.defined[r] for r in registers if r not in warp.held):
        cluster.report("E-UNINIT", "the MMA accumulates onto registers that nobody wrote")
    if warp.unfenced.intersection(registers):
        cluster.report("E-WGMMA", "accumulator registers were written since the last wgmma.fence")


def _issue(
    fragment: Fragment,
    lanes: Lanes,
    state: WarpgroupState,
    registers: list[int],
    held: list[int],
    operands: list[mma.Operand],
    n: int,
    adds: bool,
) -> None:
    """``held``: the registers of A; empty where the first of ``operands`` is A's, the last is B's."""
    warp = fragment.warp
    cluster, rank = warp.cta.cluster, warp.cta.rank
    base = rank * cluster.shared.span
    rows = warp.index % 4 * ROWS
    parts = (*((operand, rows, ROWS) for operand in operands[:-1]), (operands[-1], 0, n))
    chunks = [mma.operand_chunks(*part) for part in parts]
    if any(c.max() + 16 > cluster.shared.end or c.min() < SHARED_START for c in chunks):
        cluster.report("E-DESC", "an operand reaches outside this CTA's shared memory")
        return
    state.issued += 1
    number = state.issued
    for register in registers + held:
        warp.held[register] = RegisterWait("an MMA", "E-WGMMA", FULL, number)
    for register in registers:
        warp.defined[register] |= lanes.bits
    if cluster.sanitizer:
        granule = cluster.program.granule
        read = mma.operand_granules(parts, granule) + base // granule
        places = mma.operand_granules(parts, 16) + base // 16
        spoiled = cluster.sanitizer.shared.mma_read_operand(warp.clock, lanes, read, places, n, number)
        if spoiled or warp.tainted:
            _spoil(warp, registers, spoiled, adds)
            _pass_on(warp, held, registers)
    model = cluster.arithmetic.wgmma
    step = cluster.scheduler.step
    name = cluster.label(int(chunks[0].min()) // 1024 * 1024 - SHARED_START)
    from_registers = [_registers_to_rows(warp, held)] if held else []

    def run() -> None:
        a, b = from_registers + [mma.gather(cluster.chunks, part + base) for part in chunks]
        old = _fragment_to_tile(warp, registers) if adds else None
        _tile_to_fragment(warp, registers, mma.dot(a, b, old, model))
        state.done = number
        cluster.counts.mmas += 1
        cluster.timeline.add("mma", rank, f"mma {warp.index}", step, cluster.scheduler.step, name)
        _advance(cluster, warp, state)

    state.queue.append(AsyncOp("wgmma", warp.cta.number, cluster.where(), run))
    if len(state.queue) == 1:
        cluster.scheduler.submit(state.queue[0])


def _spoil(warp: Warp, registers: list[int], columns: list[int], adds: bool) -> None:
    """The sums of ``columns`` are computed from a racing operand row; sums that are not added to are new."""
    for register, (_, column) in zip(registers, fragment_positions(len(registers)), strict=True):
        if not adds:
            taint.clear(warp, register)
        taint.mark(warp, register, pack(np.isin(column, columns)), taint.RACE)


def _pass_on(warp: Warp, held: list[int], registers: list[int]) -> None:
    """Rows of A that prove nothing make such rows of D: a row is spread over the four lanes of a quad."""
    for number, register in enumerate(held):
        for kind, lanes in enumerate(warp.tainted.get(register, ())):
            quads = sum(0xF << lane for lane in range(0, 32, 4) if lanes >> lane & 0xF)
            for d, (row, _) in zip(registers, fragment_positions(len(registers)), strict=True):
                if row[0] // 8 == number % 2:
                    taint.mark(warp, d, quads, kind)


def _registers_to_rows(warp: Warp, held: list[int]) -> Any:
    """uint8 [16, 32]: register r of lane l holds bytes 16 (r / 2) + 4 (l % 4) .. + 3 of row l / 4 + 8 (r % 2)."""
    rows = np.empty((ROWS, mma.STEP), np.uint8)
    for number, register in enumerate(held):
        words = warp.u[register].view(np.uint8).reshape(8, 16)
        rows[8 * (number % 2) : 8 * (number % 2) + 8, 16 * (number // 2) : 16 * (number // 2) + 16] = words
    return rows


def _advance(cluster: Cluster, warp: Warp, state: WarpgroupState) -> None:
    """The oldest MMA is done: start the next one, and wake the warp if it waited for this one."""
    state.queue.pop(0)
    if state.queue:
        cluster.scheduler.submit(state.queue[0])
    if state.waiting is not None and state.done >= state.wanted:
        fragment, state.waiting = state.waiting, None
        cluster.scheduler.wake(fragment)


_LANE = np.arange(32)


@lru_cache
def fragment_positions(count: int) -> list[tuple[Any, Any]]:
    """Row (of 16) and column of register r = v0 + 2 v1 + 4 v2 in each lane, for each of ``count`` registers."""
    return [(_LANE // 4 + 8 * (r >> 1 & 1), 2 * (_LANE % 4) + (r & 1) + 8 * (r >> 2)) for r in range(count)]


def _fragment_to_tile(warp: Warp, registers: list[int]) -> Any:
    tile = np.empty((ROWS, 2 * len(registers)), np.float32)
    for register, (row, column) in zip(registers, fragment_positions(len(registers)), strict=True):
        tile[row, column] = warp.f[register]
    return tile


def _tile_to_fragment(warp: Warp, registers: list[int], tile: Any) -> None:
    for register, (row, column) in zip(registers, fragment_positions(len(registers)), strict=True):
        warp.u[register][:] = tile[row, column].view(np.uint32)


@opcode("wgmma.fence.sync.aligned")
def _fence(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        whole_warp(fragment, lanes, aligned=True)
        fragment.warp.unfenced.clear()

    return execute


@opcode("wgmma.commit_group.sync.aligned")
def _commit(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        whole_warp(fragment, lanes, aligned=True)
        state = state_of(fragment.warp)
        state.groups.append(state.issued)

    return execute


@opcode("wgmma.wait_group.sync.aligned")
def _wait(decoder: Decoder, instruction: Instruction) -> Execute:
    """All but the newest N groups are complete; includes the proxy fence from async to generic."""
    newest = decoder.literal(decoder.expect(1)[0])

    def execute(fragment: Fragment, lanes: Lanes) -> Signal | None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        whole_warp(fragment, lanes, aligned=True)
        state = state_of(warp)
        old = state.groups[: max(0, len(state.groups) - newest)]
        if old and state.done < old[-1]:
            state.waiting, state.wanted = fragment, old[-1]
            cluster.scheduler.park(fragment, "wgmma", lambda: f"waits for MMA {state.wanted} of this warp")
            return Signal.RETRY
        if old:
            del state.groups[: len(old)]
            if cluster.sanitizer:
                warp.clock.learn(lanes, cluster.sanitizer.clocks.queue(warp.cta.rank, warp.index), old[-1])
            for register in [r for r, wait in warp.held.items() if wait.check == "E-WGMMA" and wait.number <= old[-1]]:
                del warp.held[register]
        return None

    return execute
