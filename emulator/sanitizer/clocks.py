"""Vector clocks: who knows what to have happened.

A *component* is one source of events; an event is a (component, time) pair, and a clock holds, per component, the time up to
which its owner knows the events. Components of one cluster:

| component | its time counts |
|---|---|
| thread (CTA, thread) | the warp's clock ticks: one per release or fence of the warp |
| local / remote transactions (CTA, barrier slot) | completed phases: bytes that TMA or st.async delivered in them |
| queue (CTA, warp) | MMAs of that warp, in issue order |
| loads (CTA, warp) | tcgen05.ld of that warp, in issue order |
| allocs (CTA, warp) | tcgen05.alloc of that warp |
| started (CTA) | 1 once the CTA is known to run |
| dependency | 1 once griddepcontrol.wait has returned |

Each thread has four views, because different things order different accesses:

| view | holds | moved by |
|---|---|---|
| MEMORY | ordinary happens-before | release and acquire |
| ASYNC | generic accesses that the async proxy also sees | fence.proxy.async copies MEMORY into it; release and acquire carry it |
| ORDER | execution order without memory ordering | every synchronisation, also relaxed ones |
| TENSOR | what later tcgen05 instructions come after | tcgen05.fence::after_thread_sync copies MEMORY into it; never released to others |

Lanes of a warp that know the same share one :class:`Group`; an own access needs no entry, program order covers it. One
simplification: lanes of one group that run fence.proxy.async together share its effect, so ASYNC alone is not an ordering;
every check asks for MEMORY too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..warp import FULL, LANES, Lanes, lanes_of

MEMORY, ASYNC, ORDER, TENSOR = range(4)  # TENSOR is last: what is released to others are the views before it
VIEWS = 4
SLOTS = {True: 128, False: 64}
"""Barrier slots per CTA, alone in its cluster or not: all clocks have room for those of the whole cluster."""

Views = NDArray[np.int32]
"""int32 [VIEWS, components]."""


@dataclasses.dataclass
class Group:
    """Lanes of a warp with equal knowledge."""

    lanes: Lanes
    views: Views
    dropped: NDArray[np.int32] | None = None
    """Per component, what a CTA-scope acquire left out: tells E-SCOPE from E-RACE."""


class WarpClock:
    """Clock state of one warp."""

    __slots__ = ("cta", "first", "groups", "index", "live", "local", "now", "slot", "synced", "thread")

    def __init__(self, clocks: Clocks, cta: int, index: int, live: int) -> None:
        self.cta, self.index, self.live = cta, index, live
        self.first = clocks.thread(cta, index * LANES)
        """Component of lane 0; the lanes' components follow each other."""
        self.slot = clocks.slot
        self.thread = clocks.slot * clocks.threads + self.first
        """Number of lane 0 among the threads of the wave."""
        self.now = 1
        self.synced = 0
        """Time of the last synchronisation of all live lanes with each other."""
        self.local = clocks.local[cta]
        self.groups = [Group(lanes_of(live), clocks.empty())]

    def groups_of(self, lanes: Lanes) -> list[Group]:
        """Groups that cover exactly these lanes, splitting where needed."""
        if len(self.groups) == 1 and self.groups[0].lanes.bits == lanes.bits:
            return self.groups
        found = []
        for group in list(self.groups):
            inside = group.lanes.bits & lanes.bits
            if not inside:
                continue
            if outside := group.lanes.bits & ~lanes.bits:
                rest = None if group.dropped is None else group.dropped.copy()
                self.groups.append(Group(lanes_of(outside), group.views.copy(), rest))
                group.lanes = lanes_of(inside)
            found.append(group)
        return found

    def own(self, lanes: Lanes) -> Any:
        """Index of the lanes' own components."""
        return slice(self.first, self.first + LANES) if lanes.bits == FULL else self.first + lanes.index

    def release(self, lanes: Lanes, into: Views, relaxed: bool = False) -> None:
        """Everything that the lanes know and did goes into ``into`` (relaxed: only execution order)."""
        own = self.own(lanes)
        for group in self.groups_of(lanes):
            if relaxed:
                np.maximum(into[ORDER], group.views[ORDER], out=into[ORDER])
            else:
                np.maximum(into[:TENSOR], group.views[:TENSOR], out=into[:TENSOR])
        into[ORDER, own] = self.now
        if not relaxed:
            into[MEMORY, own] = self.now
        self.now += 1

    def acquire(self, lanes: Lanes, source: Views, scope: str = "cluster", relaxed: bool = False) -> None:
        """Learn ``source``; at CTA scope nothing of what other CTAs did, except execution order."""
        for group in self.groups_of(lanes):
            views = group.views
            if relaxed:
                np.maximum(views[ORDER], source[ORDER], out=views[ORDER])
            elif scope == "cta":
                np.maximum(views[ORDER], source[ORDER], out=views[ORDER])
                for view in (MEMORY, ASYNC):
                    np.maximum(views[view], source[view], out=views[view], where=self.local)
                left_out = np.where(self.local, 0, source[MEMORY])
                if left_out.any():
                    group.dropped = left_out if group.dropped is None else np.maximum(group.dropped, left_out)
            else:
                np.maximum(views, source, out=views)

    def fence_proxy(self, lanes: Lanes) -> None:
        """fence.proxy.async: all generic accesses known so far, and the lanes' own, are ordered before async-proxy ones."""
        for group in self.groups_of(lanes):
            np.maximum(group.views[ASYNC], group.views[MEMORY], out=group.views[ASYNC])
            group.views[ASYNC, self.own(group.lanes)] = self.now
        self.now += 1

    def fence_tensor(self, lanes: Lanes) -> None:
        """tcgen05.fence::after_thread_sync."""
        for group in self.groups_of(lanes):
            np.maximum(group.views[TENSOR], group.views[MEMORY], out=group.views[TENSOR])

    def learn(self, lanes: Lanes, component: int, time: int, view: int = MEMORY) -> None:
        """The lanes know one event (and whatever comes before it in that component)."""
        for group in self.groups_of(lanes):
            group.views[view, component] = max(int(group.views[view, component]), time)

    def sync(self, lanes: Lanes) -> None:
        """The lanes synchronise with each other (bar.warp.sync): one group with common knowledge."""
        groups = self.groups_of(lanes)
        merged = groups[0]
        for group in groups[1:]:
            np.maximum(merged.views, group.views, out=merged.views)
            if group.dropped is not None:
                merged.dropped = group.dropped if merged.dropped is None else np.maximum(merged.dropped, group.dropped)
            self.groups.remove(group)
        merged.lanes = lanes
        own = self.own(lanes)
        merged.views[MEMORY, own] = self.now
        merged.views[ORDER, own] = self.now
        if lanes.bits & self.live == self.live:
            self.synced = self.now
        self.now += 1


class Clocks:
    """Numbering of the components of one cluster, and all its warps' clocks."""

    def __init__(self, ctas: int, warps: int, slot: int) -> None:
        self.ctas, self.warps, self.slot = ctas, warps, slot
        self.slots = SLOTS[ctas == 1]
        threads = ctas * warps * LANES
        self.threads = threads
        """Components below are threads."""
        self._transactions = threads
        self._queues = self._transactions + 2 * ctas * self.slots
        self._loads = self._queues + ctas * warps
        self._allocs = self._loads + ctas * warps
        self._started = self._allocs + ctas * warps
        self.dependency = self._started + ctas
        self.size = self.dependency + 1
        owner = np.full(self.size, -1)
        owner[:threads] = np.repeat(np.arange(ctas), warps * LANES)
        local_transactions = owner[self._transactions : self._queues].reshape(ctas, self.slots, 2)
        local_transactions[:, :, 0] = np.arange(ctas)[:, None]  # [.., 1], the remote ones, belong to nobody's CTA
        owner[self._queues : self._loads] = np.repeat(np.arange(ctas), warps)
        owner[self._loads : self._allocs] = np.repeat(np.arange(ctas), warps)
        owner[self._allocs : self._started] = np.repeat(np.arange(ctas), warps)
        self.local = [(owner == cta) | (np.arange(self.size) >= self._started) for cta in range(ctas)]
        """Per CTA, bool [components]: what a CTA-scope acquire takes over."""

    def empty(self) -> Views:
        return np.zeros((VIEWS, self.size), np.int32)

    def thread(self, cta: int, thread: int) -> int:
        return cta * self.warps * LANES + thread

    def transactions(self, cta: int, slot: int, remote: bool) -> int:
        if slot >= self.slots:
            raise NotImplementedError(f"more than {self.slots} mbarriers in one CTA: raise SLOTS in emulator/sanitizer/clocks.py")
        return self._transactions + 2 * (cta * self.slots + slot) + remote

    def queue(self, cta: int, warp: int) -> int:
        return self._queues + cta * self.warps + warp

    def loads(self, cta: int, warp: int) -> int:
        return self._loads + cta * self.warps + warp

    def allocs(self, cta: int, warp: int) -> int:
        return self._allocs + cta * self.warps + warp

    def started(self, cta: int) -> int:
        return self._started + cta

    def queues(self) -> slice:
        """All MMA queues."""
        return slice(self._queues, self._loads)

    def name(self, component: int) -> str:
        """For messages."""
        per_cta = self.warps * LANES
        if component < self.threads:
            thread = component % per_cta
            return f"CTA {component // per_cta} thread {thread} (warp {thread // LANES})"
        if component < self._queues:
            return f"asynchronous bytes for CTA {(component - self._transactions) // (2 * self.slots)}"
        index = component - self._queues
        if component < self._loads:
            return f"MMA of CTA {index // self.warps} warp {index % self.warps}"
        return "another event"
