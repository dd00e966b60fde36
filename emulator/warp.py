"""One warp: a register file of numpy vectors, and the fragments of lanes that run together.

Lanes that a branch separates become fragments of their own and meet again at the branch's immediate post-dominator; until
then each runs on its own schedule, as on hardware with independent thread scheduling. Code whose lanes meet elsewhere than
at a post-dominator would be reported as lanes missing from a collective instruction.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .cta import Cta
    from .decode import Program
    from .polling import PollRecord
    from .sanitizer.clocks import WarpClock

LANES = 32
FULL = 0xFFFFFFFF


class Lanes:
    """A non-empty set of lanes in the forms that operations need."""

    __slots__ = ("array", "bits", "count", "index", "where")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.array: NDArray[np.bool_] = np.array([bits >> i & 1 for i in range(LANES)], dtype=bool)
        self.where: Any = True if bits == FULL else self.array
        """For numpy's ``where=``."""
        self.index: NDArray[np.int64] = np.flatnonzero(self.array)
        self.count = len(self.index)

    @property
    def first(self) -> int:
        return int(self.index[0])


@lru_cache(maxsize=4096)
def lanes_of(bits: int) -> Lanes:
    """The Lanes for a 32-bit mask."""
    return Lanes(bits)


def pack(mask: NDArray[np.bool_]) -> int:
    """Bool [32] -> 32-bit mask."""
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


@dataclasses.dataclass
class Join:
    """Where the lanes of a diverged branch meet."""

    pc: int
    missing: int
    """Lanes that have neither arrived nor exited."""
    outer: Join | None
    arrived: int = 0


class Fragment:
    """Lanes of one warp at one program counter: what the scheduler runs."""

    __slots__ = ("f", "join", "join_pc", "lanes", "pc", "poll", "queued", "s", "u", "waiting", "warp")

    def __init__(self, warp: Warp, pc: int, lanes: Lanes, join: Join | None) -> None:
        self.warp = warp
        self.pc = pc
        self.lanes = lanes
        self.join = join
        self.join_pc = join.pc if join else -1
        self.u, self.s, self.f = warp.u, warp.s, warp.f
        self.waiting: Any = None
        """What a parked fragment waits for (a Wait), None while it can run."""
        self.poll: PollRecord | None = None
        """What it has read since it last did anything but poll."""
        self.queued = False
        """In the scheduler's list of runnable fragments."""


@dataclasses.dataclass
class RegisterWait:
    """Registers that an asynchronous instruction will write or is still reading."""

    what: str
    check: str
    """Id of the finding for a use too early."""
    bits: int
    """Lanes."""
    number: int
    """Which of the warp's asynchronous instructions it is."""


class Warp:
    """Registers and fragments. Register r of width 32 is ``u[r]`` (uint32 [32]), ``s[r]`` (int32) or ``f[r]`` (float32) of the
    same storage; other widths accordingly; predicates are bool. Constants and special registers follow the registers in
    the same lists."""

    def __init__(self, program: Program, cta: Cta, index: int) -> None:
        self.cta = cta
        self.index = index
        self.number = cta.number * cta.warp_count + index
        """Index in the wave."""
        self.executed = [0] * len(program.ops)
        """How often each instruction has run."""
        live = min(LANES, cta.threads - index * LANES)
        self.live = (1 << live) - 1
        """Lanes that exist and have not exited."""
        self.u: list[Any] = []
        self.s: list[Any] = []
        self.f: list[Any] = []
        program.layout.fill(self)
        self.defined: list[int] = [0] * program.layout.registers + [FULL] * program.layout.constants
        """Per register, the lanes that have been written."""
        self.held: dict[int, RegisterWait] = {}
        """Registers in use by an asynchronous instruction."""
        self.fragments: list[Fragment] = [Fragment(self, 0, lanes_of(self.live), None)]
        self.sync_wait: list[tuple[Fragment, int]] = []
        """Fragments in bar.warp.sync, with their member masks."""
        self.clock: WarpClock
        """Exists only under the sanitizer, which sets it."""
        self.tainted: dict[int, tuple[int, int]] = {}
        """Registers whose values prove nothing, with the lanes of each kind: see sanitizer.taint."""
        self.merged = False
        """Lanes have met after a divergent branch, and no barrier has aligned them since."""
        self.unfenced: set[int] = set()
        """wgmma accumulators that ordinary instructions wrote since the last wgmma.fence."""
        self.wgmma: Any = None
        """State of isa.wgmma."""
        self.tcgen05: Any = None
        """State of isa.tcgen05."""

    def thread(self, lane: int) -> int:
        """Thread index in the CTA."""
        return self.index * LANES + lane

    # ---- divergence ----

    def diverge(self, fragment: Fragment, taken: int, target: int, meeting: int) -> list[Fragment]:
        """Split ``fragment`` (whose pc already points past the branch): lanes ``taken`` go to ``target``.

        Returns the fragments that can run now; the old one is gone.
        """
        if fragment.join is not None and fragment.join.pc == meeting:
            join: Join | None = fragment.join
        else:
            join = Join(meeting, fragment.lanes.bits, fragment.join)
        self.fragments.remove(fragment)
        runnable: list[Fragment] = []
        for bits, pc in ((taken, target), (fragment.lanes.bits & ~taken, fragment.pc)):
            piece = Fragment(self, pc, lanes_of(bits), join)
            self.fragments.append(piece)
            if pc == piece.join_pc:
                runnable += self.arrive(piece)
            else:
                runnable.append(piece)
        return [f for f in runnable if f in self.fragments]

    def arrive(self, fragment: Fragment) -> list[Fragment]:
        """``fragment`` has reached its meeting point. Returns the merged fragments that can run now."""
        join = fragment.join
        assert join is not None
        self.fragments.remove(fragment)
        join.arrived |= fragment.lanes.bits
        join.missing &= ~fragment.lanes.bits
        return self._complete(join)

    def exit(self, fragment: Fragment, bits: int) -> list[Fragment]:
        """Lanes ``bits`` of ``fragment`` end. Returns the fragments that can run because of that (or go on running)."""
        self.live &= ~bits
        self.fragments.remove(fragment)
        runnable: list[Fragment] = []
        if rest := fragment.lanes.bits & ~bits:
            piece = Fragment(self, fragment.pc, lanes_of(rest), fragment.join)
            self.fragments.append(piece)
            runnable.append(piece)
        join = fragment.join
        while join is not None:
            join.missing &= ~bits
            runnable += self._complete(join)
            join = join.outer
        return runnable

    def _complete(self, join: Join) -> list[Fragment]:
        if join.missing or not join.arrived:
            return []
        merged = Fragment(self, join.pc, lanes_of(join.arrived), join.outer)
        join.arrived = 0
        self.merged = True
        self.fragments.append(merged)
        return self.arrive(merged) if merged.pc == merged.join_pc else [merged]
