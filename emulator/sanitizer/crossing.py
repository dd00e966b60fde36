"""What the threads of one cluster know of the other clusters of the wave: releases and acquires through global memory.

Clusters have clocks of their own. What a thread acquires of another cluster is kept as a record of that thread at that time; whoever knows
the thread's time, through the clocks of their cluster, knows the record. So knowledge travels inside a cluster without further work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..warp import Lanes
from .clocks import ASYNC, MEMORY, TENSOR, Clocks, Group, Views, WarpClock

Knowledge = dict[int, Views]
"""Slot of a cluster -> what is known of it; the arrays are never changed."""


def merge(into: Knowledge, other: Knowledge) -> None:
    """Add ``other``."""
    for slot, views in other.items():
        mine = into.get(slot)
        into[slot] = views if mine is None else np.maximum(mine, views)


class Crossings:
    """One per wave."""

    def __init__(self) -> None:
        self._records: dict[int, dict[int, list[tuple[int, Knowledge]]]] = {}
        """Slot -> component of a thread -> (its time, what it knew of other clusters from then on), in order."""

    def release(self, clocks: Clocks, clock: WarpClock, lane: Lanes) -> Knowledge:
        """All that the one lane knows and did."""
        views = clocks.empty()
        clock.release(lane, views)
        views[TENSOR] = 0
        known: Knowledge = {clocks.slot: views}
        merge(known, self._of(clocks.slot, views[MEMORY]))
        return known

    def acquire(self, clocks: Clocks, clock: WarpClock, lane: Lanes, knowledge: Knowledge) -> None:
        """The one lane learns ``knowledge``."""
        own = knowledge.get(clocks.slot)
        if own is not None:
            clock.acquire(lane, own)
        component = clock.first + lane.first
        records = self._records.setdefault(clocks.slot, {}).setdefault(component, [])
        others = dict(records[-1][1]) if records else {}
        merge(others, {slot: views for slot, views in knowledge.items() if slot != clocks.slot})
        if others:
            records.append((clock.now, others))

    def known(self, slot: int, group: Group, own: int, view: int) -> dict[int, NDArray[np.int32]]:
        """What a thread of cluster ``slot`` (its component: ``own``) in ``group`` knows of other clusters in one view."""
        if slot not in self._records:
            return {}
        memory = group.views[MEMORY].copy()
        memory[own] = np.iinfo(np.int32).max  # program order
        found = {other: views[view] for other, views in self._of(slot, memory).items()}
        if view == ASYNC:  # a proxy fence covers all that its thread had acquired
            for other, views in self._of(slot, group.views[ASYNC]).items():
                found[other] = np.maximum(found[other], views[MEMORY])
        return found

    def _of(self, slot: int, memory: NDArray[np.int32]) -> Knowledge:
        known: Knowledge = {}
        for component, records in self._records.get(slot, {}).items():
            for time, knowledge in reversed(records):  # a later record includes the earlier ones
                if time <= memory[component]:
                    merge(known, knowledge)
                    break
        return known
