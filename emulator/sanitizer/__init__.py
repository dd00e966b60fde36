"""The sanitizer: happens-before over all memories, initialisation, and the rules of barriers, TMEM and PDL.

Execution calls the hooks below; they never change what the kernel computes. The ids are in ``emulator.findings``. What it
assumes where PTX is silent:

* A commit's arrival releases the completion of the MMAs, and what ``Checks.commit_releases`` says.
* The completion of TMA bytes releases those bytes only; that of st.async the bytes and what ``Checks.st_async_releases`` says.
* Data of st.async is written by the generic proxy.
* wgmma of each warp reads its own 16 rows of A and all of B, and completes for each warp on its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..mbarrier import Mbarrier
from ..memory import SHARED_START
from ..warp import Lanes, Warp
from .barriers import BarrierChecks, BarrierClock
from .clocks import MEMORY, ORDER, Clocks, Views, WarpClock
from .globals import GlobalShadow
from .shared import SharedShadow
from .tensor import TensorShadow

if TYPE_CHECKING:
    from ..cluster import Cluster

__all__ = ["BarrierClock", "Clocks", "GlobalShadow", "Sanitizer", "WarpClock"]


class Sanitizer:
    """All checks of one cluster."""

    def __init__(self, cluster: Cluster, globals: GlobalShadow, warps: int, granule: int) -> None:
        """``globals`` is the wave's."""
        self.cluster = cluster
        self.report = cluster.report
        ctas = cluster.launch.ctas
        self.span = cluster.shared.span
        self.clocks = Clocks(ctas, warps, cluster.slot)
        self.shared = SharedShadow(self.clocks, self, len(cluster.shared.data), granule, self._columnwise(cluster, granule))
        self._tensor: dict[int, TensorShadow] = {}
        self.globals = globals
        self.barriers = BarrierChecks(self.clocks, self)
        self._gone: dict[int, Views] = {}
        """Per CTA, what its exited threads knew."""

    def _columnwise(self, cluster: Cluster, granule: int) -> NDArray[np.bool_] | None:
        """Granules of ``Launch.columnwise``, in all CTAs."""
        ranges = cluster.launch.columnwise
        if not ranges:
            return None
        marked = np.zeros((cluster.launch.ctas, self.span // granule), bool)
        first = SHARED_START + cluster.program.static_shared
        for part in ranges:
            marked[:, (first + part.start) // granule : (first + part.stop) // granule] = True
        return marked.ravel()

    def tensor(self, cta: int) -> TensorShadow:
        """The shadow of a CTA's tensor memory, made when it is first used."""
        if cta not in self._tensor:
            self._tensor[cta] = TensorShadow(self.clocks, self, cta)
        return self._tensor[cta]

    def start(self, warp: Warp) -> WarpClock:
        """A warp begins."""
        clock = WarpClock(self.clocks, warp.cta.rank, warp.index, warp.live)
        clock.learn(clock.groups[0].lanes, self.clocks.started(warp.cta.rank), 1, ORDER)
        return clock

    def place(self, flat: int) -> str:
        """A byte of shared memory, for messages."""
        cta, offset = divmod(flat, self.span)
        return f"{self.cluster.label(offset - SHARED_START)} of CTA {cta}"

    # ---- lifetime of CTAs ----

    def remote_access(self, clock: WarpClock, lanes: Lanes, ranks: NDArray[np.int64]) -> None:
        """Shared memory of other CTAs may be touched once they are known to run."""
        for rank in np.unique(ranks):
            if rank == clock.cta:
                continue
            for group in clock.groups_of(lanes):
                if not group.views[ORDER, self.clocks.started(int(rank))]:
                    self.report("E-DSMEM-LIFE", f"access to shared memory of CTA {rank}, which is not known to have started")
                    break

    def exited(self, warp: Warp, lanes: Lanes) -> None:
        """Threads end."""
        known = self._gone.setdefault(warp.cta.rank, self.clocks.empty())
        warp.clock.release(lanes, known)

    def cta_exited(self, cta: int, barriers: list[Mbarrier]) -> None:
        """Whatever arrived from other CTAs must have been waited for by somebody: else it might have arrived after the exit."""
        known = self._gone.get(cta)
        for barrier in barriers:
            state: BarrierClock = barrier.clock
            if known is not None and state.remote_landed > known[ORDER, state.remote]:
                text = f"CTA {cta} exits although nobody waited for what other CTAs send to {barrier.name}: it may arrive in a dead CTA"
                self.report("E-DSMEM-LIFE", text)

    # ---- what asynchronous operations carry ----

    def commit_payload(self, warp: Warp, lanes: Lanes, number: int) -> Views:
        """What a tcgen05.commit releases once MMA ``number`` of the warp's queue and all before it are complete."""
        known = self._acquired(warp, lanes)
        if self.cluster.checks.commit_releases == "operands":
            known[:, : self.clocks.threads] = 0
        known[:, self.clocks.queue(warp.cta.rank, warp.index)] = number
        return known

    def _acquired(self, warp: Warp, lanes: Lanes) -> Views:
        """What the lanes know, without their own accesses."""
        known = self.clocks.empty()
        for group in warp.clock.groups_of(lanes):
            np.maximum(known, group.views, out=known)
        return known

    def st_async_payload(self, warp: Warp, lanes: Lanes) -> Views | None:
        """What a st.async releases beside its bytes."""
        mode = self.cluster.checks.st_async_releases
        if mode == "data":
            return None
        known = self._acquired(warp, lanes)
        if mode == "all":
            warp.clock.release(lanes, known)
            return known
        reads = self.clocks.empty()
        reads[MEMORY, self.clocks.queues()] = known[MEMORY, self.clocks.queues()]
        return reads

    def delivered(self, barrier: Mbarrier, payload: Views | None) -> None:
        """An asynchronous completion reaches a barrier."""
        if payload is not None:
            state: BarrierClock = barrier.clock
            np.maximum(state.arriving, payload, out=state.arriving)
