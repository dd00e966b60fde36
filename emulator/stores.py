"""Relaxed stores on their way: other clusters see them later, element by element, in an order that the seed decides.

PTX orders relaxed stores to different addresses only through a release. The own cluster always sees its stores; stores to one address
become visible in the order in which they were issued; a release makes everything visible that its cluster has stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .config import Bytes
from .scheduler import AsyncOp

if TYPE_CHECKING:
    from .cluster import Cluster
    from .cta import Cta
    from .memory import Allocation
    from .wave import Wave

PARTS = 3
"""Pieces, at most, in which the elements of one instruction become visible."""
WORD = 4
"""Bytes of the smallest relaxed store, to which all are aligned."""

Index = NDArray[np.int64]


@dataclasses.dataclass(eq=False)
class _Store:
    """Elements that become visible together."""

    slot: int
    allocation: Allocation
    offsets: Index
    """Byte offset of each element."""
    values: Bytes
    """uint8 [elements, bytes of an element]."""
    landed: Callable[[], None]


class StoreBuffer:
    """What the clusters of a wave have stored and not all of them can see."""

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self._pending: dict[int, _Store] = {}
        self._next = 1
        self._words: dict[str, NDArray[np.int32]] = {}
        """Buffer name -> per word the number of its pending store, 0 where there is none."""

    def issue(
        self, cta: Cta, allocation: Allocation, offsets: Index, values: Bytes, landed: Callable[[Index], None], at_once: bool
    ) -> None:
        """Store uint8 ``values`` [n, size] at byte ``offsets`` [n]; ``landed(offsets)`` is called as they become visible."""
        cluster, wave = cta.cluster, self._wave
        self.settle(allocation, offsets, values.shape[1])
        if at_once or len(wave.clusters) == 1:
            _land(_Store(cluster.slot, allocation, offsets, values, partial(landed, offsets)))
            return
        part = wave.numpy_rng.integers(PARTS, size=len(offsets))
        for number in range(PARTS):
            if len(chosen := np.flatnonzero(part == number)):
                store = _Store(cluster.slot, allocation, offsets[chosen], values[chosen], partial(landed, offsets[chosen]))
                self._submit(cta, store)

    def _submit(self, cta: Cta, store: _Store) -> None:
        number = self._next
        self._next += 1
        self._pending[number] = store
        self._mark(store, number)
        cluster = cta.cluster
        cluster.scheduler.submit(AsyncOp("relaxed store", cta.number, cluster.where(), lambda: self._land(number)))

    def settle(self, allocation: Allocation, offsets: Index, size: int, cluster: Cluster | None = None) -> None:
        """Before ``size`` bytes at each of ``offsets`` are accessed: pending stores there become visible (of ``cluster``, or all)."""
        words = self._words.get(allocation.buffer.name)
        if not self._pending or words is None:
            return
        touched = words[(offsets[:, None] // WORD + np.arange(-(-size // WORD))).ravel()]
        for number in np.unique(touched[touched > 0]).tolist():
            if cluster is None or self._pending[number].slot == cluster.slot:
                self._land(number)

    def flush(self, cluster: Cluster) -> None:
        """All that the cluster has stored becomes visible."""
        for number in [n for n, store in self._pending.items() if store.slot == cluster.slot]:
            self._land(number)

    def _land(self, number: int) -> None:
        store = self._pending.pop(number, None)
        if store is not None:  # else it had to become visible earlier
            self._mark(store, 0)
            _land(store)

    def _mark(self, store: _Store, number: int) -> None:
        buffer = store.allocation.buffer
        if buffer.name not in self._words:
            self._words[buffer.name] = np.zeros(-(-buffer.size // WORD), np.int32)
        at = store.offsets[:, None] // WORD + np.arange(store.values.shape[1] // WORD)
        self._words[buffer.name][at.ravel()] = number


def _land(store: _Store) -> None:
    at = (store.offsets[:, None] + np.arange(store.values.shape[1])).ravel()
    store.allocation.write(at, store.values.ravel())
    store.landed()
