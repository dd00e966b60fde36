"""Shadow of the global buffers that the kernel writes: initialisation, conflicting accesses, and the PDL rules.

An access is *weak* (ld, st) or *strong* (relaxed, acquire, release, atomic: all of gpu scope). Two conflicting accesses need an order,
unless both are strong and touch the very same element: PTX calls that morally strong, and no race.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..memory import Allocation
from ..warp import Lanes
from .clocks import ASYNC, MEMORY, Group, WarpClock
from .crossing import Crossings, Knowledge, merge

if TYPE_CHECKING:
    from ..wave import Wave

Index = NDArray[np.int64]
WEAK = 0
"""Size of a weak access; that of a strong one is the bytes of its element."""


@dataclasses.dataclass
class BufferShadow:
    """Per byte of one buffer. Threads are numbered through the wave; -1 is nobody."""

    writer: NDArray[np.int32]
    written: NDArray[np.int32]
    wrote: NDArray[np.uint8]
    """Size of the last write."""
    reader: NDArray[np.int32]
    """[byte, cluster]: last weak reader; of one cluster one is kept (a second concurrent reader replaces the first)."""
    read: NDArray[np.int32]
    """Its time; 0 where nobody has read since the last write."""
    strong_reader: NDArray[np.int32]
    """[byte]: last strong reader; one is kept."""
    strong_read: NDArray[np.int32]
    strong_size: NDArray[np.uint8]

    @classmethod
    def of(cls, size: int, clusters: int) -> BufferShadow:
        def zeros(*shape: int) -> NDArray[np.int32]:
            return np.zeros(shape, np.int32)  # memory that is not touched costs nothing

        narrow = np.zeros((2, size), np.uint8)
        writer = np.full(size, -1, np.int32)
        return cls(writer, zeros(size), narrow[0], zeros(size, clusters), zeros(size, clusters), zeros(size), zeros(size), narrow[1])


class GlobalShadow:
    """One per wave. Buffers that are not inputs get a shadow at their first access."""

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.crossings = Crossings()
        self.shadows: dict[str, BufferShadow] = {}
        self.released: dict[tuple[str, int], Knowledge] = {}
        """(buffer, offset) of a word -> what whoever acquires it learns."""
        self.triggered: dict[int, bool] = {}
        """Number of a CTA: some thread of it ran griddepcontrol.launch_dependents."""

    def _shadow(self, allocation: Allocation) -> BufferShadow:
        buffer = allocation.buffer
        if buffer.name not in self.shadows:
            self.shadows[buffer.name] = BufferShadow.of(buffer.size, len(self.wave.clusters))
        return self.shadows[buffer.name]

    def _report(self, clock: WarpClock, check: str, text: str) -> None:
        self.wave.clusters[clock.slot].report(check, text)

    # ---- accesses ----

    def load(
        self, clock: WarpClock, lanes: Lanes, allocation: Allocation, offsets: Index, lane_of: Index, size: int = WEAK
    ) -> Index | None:
        """Bytes ``offsets`` [n] of the buffer are read by lanes ``lane_of`` [n]; ``size``: of a strong access.

        Of a strong access: which of the bytes a store gave their value that is not ordered before this load (None: of none).
        """
        name = allocation.buffer.name
        if allocation.buffer.predecessor:
            self._after_dependency(clock, lanes, f"read of {name}, which a preceding kernel may write,")
        if allocation.buffer.role == "input":
            return None
        shadow = self._shadow(allocation)
        who = shadow.writer[offsets]
        self._initialised(clock, allocation, offsets, who)
        late = self._late(clock, lanes, who, shadow.written[offsets], lane_of)
        if late is not None:
            self._judge(clock, late, who, shadow.wrote[offsets], size, f"{name} is read while a store to it is not ordered before")
        if size == WEAK:
            shadow.reader[offsets, clock.slot], shadow.read[offsets, clock.slot] = clock.thread + lane_of, clock.now
        else:
            shadow.strong_reader[offsets], shadow.strong_read[offsets], shadow.strong_size[offsets] = (
                clock.thread + lane_of,
                clock.now,
                size,
            )
        return None if late is None or size == WEAK else np.flatnonzero(late)

    def store(self, clock: WarpClock, lanes: Lanes, allocation: Allocation, offsets: Index, lane_of: Index, size: int = WEAK) -> None:
        """Bytes ``offsets`` [n] are written; ``size``: of a strong access."""
        name = allocation.buffer.name
        self._after_dependency(clock, lanes, f"store to {name}")
        if not self.wave.checks.dependents_wait and self.triggered.get(self.wave.clusters[clock.slot].ctas[clock.cta].number):
            text = f"store to {name} after this CTA's launch_dependents: a dependent that does not wait first may miss it"
            self._report(clock, "E-PDL", text)
        if allocation.buffer.role == "input":
            return
        shadow = self._shadow(allocation)
        who = shadow.writer[offsets]
        assert allocation.dirty is not None
        if (who < 0).any() and allocation.dirty[offsets[who < 0]].any():
            self._report(clock, "E-RACE", f"two clusters store to the same bytes of {name}; clusters are not ordered")
        late = self._late(clock, lanes, who, shadow.written[offsets], lane_of)
        if late is not None:
            self._judge(clock, late, who, shadow.wrote[offsets], size, f"two unordered stores to {name}")
        self._after_reads(clock, lanes, shadow, offsets, lane_of, size, f"store to {name} not ordered after a read")
        shadow.writer[offsets], shadow.written[offsets], shadow.wrote[offsets] = clock.thread + lane_of, clock.now, size

    def _after_reads(
        self, clock: WarpClock, lanes: Lanes, shadow: BufferShadow, offsets: Index, lane_of: Index, size: int, message: str
    ) -> None:
        rows = shadow.read[offsets]
        if rows.any():
            for slot in np.flatnonzero(rows.any(axis=0)).tolist():
                who = np.where(rows[:, slot] > 0, shadow.reader[offsets, slot], -1)
                late = self._late(clock, lanes, who, rows[:, slot], lane_of)
                if late is not None:
                    self._judge(clock, late, who, np.zeros(len(who), np.uint8), size, message)
            shadow.read[offsets] = 0
        times = shadow.strong_read[offsets]
        if times.any():
            who = np.where(times > 0, shadow.strong_reader[offsets], -1)
            late = self._late(clock, lanes, who, times, lane_of)
            if late is not None:
                self._judge(clock, late, who, shadow.strong_size[offsets], size, message)
            shadow.strong_read[offsets] = 0

    def bulk_read(self, clock: WarpClock, lanes: Lanes, allocation: Allocation, offsets: Index | None) -> None:
        """A copy of the async proxy reads bytes ``offsets`` (None: of an input, which nobody writes)."""
        name = allocation.buffer.name
        if allocation.buffer.predecessor:
            self._after_dependency(clock, lanes, f"TMA read of {name}, which a preceding kernel may write,")
        if offsets is None:
            return
        shadow = self._shadow(allocation)
        who, when = shadow.writer[offsets], shadow.written[offsets]
        self._initialised(clock, allocation, offsets, who)
        lane_of = np.full(len(offsets), lanes.first)
        late = self._late(clock, lanes, who, when, lane_of)
        if late is not None:
            self._judge(clock, late, who, shadow.wrote[offsets], WEAK, f"{name} is read by TMA while a store to it is not ordered before")
        elif self._late(clock, lanes, who, when, lane_of, ASYNC) is not None:
            self._report(clock, "E-PROXY", f"{name} is stored to and then read by TMA without fence.proxy.async between them")

    # ---- releases and acquires ----

    def release(self, clock: WarpClock, lane: Lanes, allocation: Allocation, offset: int, follows: bool) -> None:
        """The one lane releases through the word at ``offset``; ``follows``: by a read-modify-write, which keeps what is there."""
        key = allocation.buffer.name, offset
        knowledge = self.crossings.release(self.wave.clocks(clock.slot), clock, lane)
        if follows:
            merge(knowledge, self.released.get(key, {}))
        self.released[key] = knowledge

    def acquire(self, clock: WarpClock, lane: Lanes, allocation: Allocation, offset: int) -> None:
        """The one lane has read the word at ``offset`` and acquires what was released through it."""
        if knowledge := self.released.get((allocation.buffer.name, offset)):
            self.crossings.acquire(self.wave.clocks(clock.slot), clock, lane, knowledge)

    def overwritten(self, allocation: Allocation, offsets: Index) -> None:
        """An ordinary store to these words ends what was released through them."""
        for offset in offsets.tolist() if self.released else ():
            self.released.pop((allocation.buffer.name, offset), None)

    # ---- the checks ----

    def _initialised(self, clock: WarpClock, allocation: Allocation, offsets: Index, who: NDArray[np.int32]) -> None:
        undefined = allocation.undefined(offsets)
        if undefined is not None and (undefined & (who < 0)).any():
            self._report(clock, "E-UNINIT", f"read of bytes of {allocation.buffer.name} that nobody wrote")

    def _after_dependency(self, clock: WarpClock, lanes: Lanes, what: str) -> None:
        dependency = self.wave.clocks(clock.slot).dependency
        for group in clock.groups_of(lanes):
            if not group.views[MEMORY, dependency]:
                self._report(clock, "E-PDL", f"{what} before griddepcontrol.wait")

    def _late(
        self, clock: WarpClock, lanes: Lanes, who: NDArray[np.int32], when: NDArray[np.int32], lane_of: Index, view: int = MEMORY
    ) -> NDArray[np.bool_] | None:
        """Bool [n]: accesses by threads ``who`` at times ``when`` that are not ordered before this one; None where all are."""
        others = who >= 0
        if view == MEMORY:
            others &= who != clock.thread + lane_of  # program order
        if not others.any():
            return None
        clocks = self.wave.clocks(clock.slot)
        local = who - clock.slot * clocks.threads
        near = (local >= 0) & (local < clocks.threads)
        at = np.where(near, local, 0)
        late = np.zeros(len(who), bool)
        for group in clock.groups_of(lanes):
            inside = others & group.lanes.array[lane_of]
            late |= inside & (~near | (when > group.views[view, at]))
            far = late & inside & ~near
            if far.any():
                self._forgive(clock, group, late, far, who, when, lane_of, view)
        return late if late.any() else None

    def _forgive(
        self,
        clock: WarpClock,
        group: Group,
        late: Any,
        far: Any,
        who: NDArray[np.int32],
        when: NDArray[np.int32],
        lane_of: Index,
        view: int,
    ) -> None:
        """Clear ``late`` where the access of another cluster is known after all."""
        threads = self.wave.clocks(clock.slot).threads
        for lane in np.unique(lane_of[far]).tolist():
            for slot, times in self.crossings.known(clock.slot, group, clock.first + lane, view).items():
                at = np.flatnonzero(far & (lane_of == lane) & (who // threads == slot))
                late[at] = when[at] > times[who[at] % threads]

    def _judge(
        self, clock: WarpClock, late: NDArray[np.bool_], who: NDArray[np.int32], other: NDArray[np.uint8], size: int, message: str
    ) -> None:
        """Unordered conflicting accesses race, unless both are strong accesses of one element."""
        race = late if size == WEAK else late & (other != size)
        if not race.any():
            return
        first = int(np.flatnonzero(race)[0])
        kinds = tuple("weak" if s == WEAK else f"{s} bytes, strong" for s in (size, int(other[first])))
        self._report(clock, "E-RACE", f"{message}: {kinds[0]} here, {kinds[1]} by {self.name(int(who[first]))}")

    def name(self, thread: int) -> str:
        """A thread of the wave, for messages."""
        slot, local = divmod(thread, self.wave.clocks(0).threads)
        place = f"cluster {self.wave.clusters[slot].index} " if len(self.wave.clusters) > 1 else ""
        return place + self.wave.clocks(slot).name(local)
