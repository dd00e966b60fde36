"""Shadow of the global buffers that the kernel writes: initialisation, conflicting accesses, and the PDL rules."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..memory import Allocation
from ..warp import Lanes
from .clocks import MEMORY, Clocks, Group, WarpClock

if TYPE_CHECKING:
    from . import Sanitizer

Index = NDArray[np.int64]


@dataclasses.dataclass
class BufferShadow:
    """Per byte of one buffer; components are those of the current cluster."""

    writer: NDArray[np.int32]
    written: NDArray[np.int32]
    reader: NDArray[np.int32]
    """Last reader; one is kept (a second concurrent reader replaces the first)."""
    read: NDArray[np.int32]

    @classmethod
    def of(cls, size: int) -> BufferShadow:
        return cls(*(np.full(size, fill, np.int32) for fill in (-1, 0, -1, 0)))


class GlobalShadow:
    """Buffers that are not inputs get a shadow at their first access by the cluster."""

    def __init__(self, clocks: Clocks, sanitizer: Sanitizer) -> None:
        self.clocks, self.sanitizer = clocks, sanitizer
        self.shadows: dict[str, BufferShadow] = {}
        self.triggered = np.zeros(clocks.ctas, bool)
        """Some thread of the CTA ran griddepcontrol.launch_dependents."""

    def _shadow(self, allocation: Allocation) -> BufferShadow:
        buffer = allocation.buffer
        if buffer.name not in self.shadows:
            self.shadows[buffer.name] = BufferShadow.of(buffer.size)
        return self.shadows[buffer.name]

    def load(self, clock: WarpClock, lanes: Lanes, allocation: Allocation, offsets: Index, lane_of: Index) -> None:
        """Bytes ``offsets`` [n] of the buffer are read by lanes ``lane_of`` [n]."""
        if allocation.buffer.predecessor:
            self._after_dependency(clock, lanes, f"read of {allocation.buffer.name}, which a preceding kernel may write,")
        if allocation.buffer.role == "input":
            return
        shadow = self._shadow(allocation)
        who, when = shadow.writer[offsets], shadow.written[offsets]
        if allocation.buffer.role == "output" and (who < 0).any() and not self._earlier_cluster(allocation, offsets[who < 0]):
            self.sanitizer.report("E-UNINIT", f"read of bytes of {allocation.buffer.name} that nobody wrote")
        for group in clock.groups_of(lanes):
            self._ordered(group, clock, who, when, lane_of, f"{allocation.buffer.name} is read while a store to it is not ordered before")
        shadow.reader[offsets], shadow.read[offsets] = clock.first + lane_of, clock.now

    def store(self, clock: WarpClock, lanes: Lanes, allocation: Allocation, offsets: Index, lane_of: Index) -> None:
        """Bytes ``offsets`` [n] are written."""
        name = allocation.buffer.name
        self._after_dependency(clock, lanes, f"store to {name}")
        if self.triggered[clock.cta]:
            text = f"store to {name} after this CTA's launch_dependents: a dependent that does not wait first may miss it"
            self.sanitizer.report("E-PDL", text)
        if allocation.buffer.role == "input":
            return
        shadow = self._shadow(allocation)
        if self._earlier_cluster(allocation, offsets[shadow.writer[offsets] < 0]):
            self.sanitizer.report("E-RACE", f"two clusters store to the same bytes of {name}; clusters are not ordered")
        for group in clock.groups_of(lanes):
            self._ordered(group, clock, shadow.writer[offsets], shadow.written[offsets], lane_of, f"two unordered stores to {name}")
            self._ordered(group, clock, shadow.reader[offsets], shadow.read[offsets], lane_of, f"store to {name} not ordered after a read")
        shadow.writer[offsets], shadow.written[offsets] = clock.first + lane_of, clock.now
        shadow.reader[offsets] = -1

    def bulk_read(self, clock: WarpClock, lanes: Lanes, allocation: Allocation) -> None:
        """A bulk copy reads the buffer: only the PDL rule applies, kernels do not write what TMA reads."""
        if allocation.buffer.predecessor:
            self._after_dependency(clock, lanes, f"TMA read of {allocation.buffer.name}, which a preceding kernel may write,")

    def _earlier_cluster(self, allocation: Allocation, offsets: Index) -> bool:
        return allocation.dirty is not None and len(offsets) > 0 and bool(allocation.dirty[offsets].any())

    def _after_dependency(self, clock: WarpClock, lanes: Lanes, what: str) -> None:
        for group in clock.groups_of(lanes):
            if not group.views[MEMORY, self.clocks.dependency]:
                self.sanitizer.report("E-PDL", f"{what} before griddepcontrol.wait")

    def _ordered(
        self, group: Group, clock: WarpClock, who: NDArray[np.int32], when: NDArray[np.int32], lane_of: Index, message: str
    ) -> None:
        inside = group.lanes.array[lane_of]
        late = inside & (who >= 0) & (when > group.views[MEMORY, who]) & (who != clock.first + lane_of)
        if late.any():
            self.sanitizer.report("E-RACE", f"{message} (by {self.clocks.name(int(who[late][0]))})")
