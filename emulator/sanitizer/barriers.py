"""Checks on mbarriers, and the clocks that they carry from arrivals to waiters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ..mbarrier import Mbarrier
from ..warp import LANES, Lanes
from .clocks import MEMORY, ORDER, Clocks, Views, WarpClock

if TYPE_CHECKING:
    from . import Sanitizer

Use = Literal["local", "remote", "asynchronous"]


@dataclasses.dataclass(eq=False)
class BarrierClock:
    """What the sanitizer keeps per mbarrier."""

    local: int
    """Component of bytes that the own CTA sent."""
    remote: int
    """Component of bytes that other CTAs sent."""
    arriving: Views
    """Everything released to it so far."""
    complete: Views
    """The same as of the last completed phase: what a waiter learns."""
    creator: int
    """Component of the thread that initialised it."""
    created: int
    """Time of the init."""
    seen: NDArray[np.int64]
    """Per thread of the CTA, the latest phase whose completion it saw."""
    fenced: bool = False
    """The creator ran fence.mbarrier_init (or a proxy fence) after the init."""
    remote_landed: int = 0
    """Phase number (1-based) in which something of another CTA last arrived."""


class BarrierChecks:
    """One per cluster."""

    def __init__(self, clocks: Clocks, sanitizer: Sanitizer) -> None:
        self.clocks, self.sanitizer = clocks, sanitizer
        self._slots = [0] * clocks.ctas
        self._unfenced: dict[int, list[Mbarrier]] = {}
        """Creator component -> barriers it initialised since its last fence."""

    def initialised(self, barrier: Mbarrier, clock: WarpClock, lanes: Lanes) -> None:
        slot = self._slots[barrier.cta]
        self._slots[barrier.cta] += 1
        creator = clock.first + lanes.first
        barrier.clock = BarrierClock(
            local=self.clocks.transactions(barrier.cta, slot, False),
            remote=self.clocks.transactions(barrier.cta, slot, True),
            arriving=self.clocks.empty(),
            complete=self.clocks.empty(),
            creator=creator,
            created=clock.now,
            seen=np.full(self.clocks.warps * LANES, -1, np.int64),
        )
        self._unfenced.setdefault(creator, []).append(barrier)

    def init_fence(self, clock: WarpClock, lanes: Lanes) -> None:
        """fence.mbarrier_init or fence.proxy.async by these lanes: it covers the inits that these threads ran."""
        if not self._unfenced:
            return
        for lane in lanes.index:
            for barrier in self._unfenced.pop(clock.first + int(lane), ()):
                barrier.clock.fenced = True

    def used(self, barrier: Mbarrier, clock: WarpClock, lanes: Lanes, use: Use) -> None:
        """The init happens before any use, and is fenced before remote or asynchronous use."""
        state: BarrierClock = barrier.clock
        for group in clock.groups_of(lanes):
            own = group.lanes.count == 1 and state.creator == clock.first + group.lanes.first
            if not own and state.created > group.views[ORDER, state.creator]:
                self.sanitizer.report("E-MBAR-UNINIT", f"the init of {barrier.name} of CTA {barrier.cta} does not happen before its use")
        if use != "local" and not state.fenced:
            self.sanitizer.report("E-MBAR-INITFENCE", f"{use} use of {barrier.name} without fence.mbarrier_init after its init")

    def arriving(self, barrier: Mbarrier, from_cta: int) -> None:
        """An arrival counts: somebody must have seen the previous phase complete."""
        if barrier.observed < barrier.phase - 1:
            text = f"arrival on {barrier.name} in phase {barrier.phase} although nobody has waited for phase {barrier.phase - 1}"
            self.sanitizer.report("E-MBAR-LAP", text)
        if from_cta != barrier.cta:
            barrier.clock.remote_landed = barrier.phase + 1

    def completed(self, barrier: Mbarrier) -> None:
        """A phase has completed: its bytes and releases become visible to waiters."""
        state: BarrierClock = barrier.clock
        for view in (MEMORY, ORDER):
            state.arriving[view, state.local] = state.arriving[view, state.remote] = barrier.phase
        np.copyto(state.complete, state.arriving)

    def observed(self, barrier: Mbarrier, clock: WarpClock, lanes: Lanes, scope: str, relaxed: bool) -> None:
        """A wait returned True in these lanes.

        They have seen earlier phases themselves, or synchronised with somebody who had: a wait for every other use of a barrier is
        right as long as the uses between are known to be over.
        """
        state: BarrierClock = barrier.clock
        phase = barrier.phase - 1
        threads = clock.index * LANES + lanes.index
        if (phase - state.seen[threads] >= 3).any():
            self._look_for_lapped(barrier, clock, lanes, phase)
        state.seen[threads] = phase
        clock.acquire(lanes, state.complete, scope, relaxed)

    def _look_for_lapped(self, barrier: Mbarrier, clock: WarpClock, lanes: Lanes, phase: int) -> None:
        """Of lanes that did not see the last phases themselves: those that do not know of them through others either."""
        state: BarrierClock = barrier.clock
        for group in clock.groups_of(lanes):
            seen = state.seen[clock.index * LANES + group.lanes.index]
            known = np.maximum(seen, int(group.views[ORDER, state.local]) - 1)
            if (phase - known >= 3).any():
                text = f"{barrier.name} has completed phase {phase}; this thread knows of phase {int(known.min())} only: it was lapped"
                self.sanitizer.report("E-MBAR-LAP", text)
