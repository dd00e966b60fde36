"""Shadow of tensor memory: which MMA wrote each cell and which tcgen05.ld has read it since, with the tcgen05 ordering rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..tmem import COLUMNS, LANES
from ..warp import Lanes
from .clocks import MEMORY, TENSOR, Clocks, WarpClock

if TYPE_CHECKING:
    from . import Sanitizer

NOBODY = -1


class TensorShadow:
    """Cells [128, 512] of one CTA."""

    def __init__(self, clocks: Clocks, sanitizer: Sanitizer, cta: int) -> None:
        self.clocks, self.sanitizer, self.cta = clocks, sanitizer, cta
        self.writer = np.full((LANES, COLUMNS), NOBODY, np.int32)
        """Component (an MMA queue) of the last write."""
        self.written = np.zeros((LANES, COLUMNS), np.int32)
        """Number of the MMA in its queue."""
        self.chain = np.full((LANES, COLUMNS), -1, np.int64)
        """Accumulator and shape of that MMA: only MMAs of one chain execute in order."""
        self.read = np.zeros((LANES, COLUMNS), np.int32)
        """Number of the last tcgen05.ld that read the cell (each cell belongs to one lane quarter)."""
        self.reader = np.zeros((LANES, COLUMNS), np.int32)
        """Component of that ld."""
        self.spoiled = np.zeros((LANES, COLUMNS), bool)
        """Sums that were computed from a racing operand row (``Launch.columnwise``)."""
        self.allocator = np.zeros(COLUMNS, np.int32)
        """Per column, component of the alloc."""
        self.allocation = np.zeros(COLUMNS, np.int32)
        """Its number."""

    def allocated(self, clock: WarpClock, first: int, columns: int, number: int) -> None:
        """tcgen05.alloc ``number`` of this warp: whatever the columns hold is another kernel's."""
        self.writer[:, first : first + columns] = NOBODY
        self.read[:, first : first + columns] = 0
        self.allocator[first : first + columns] = self.clocks.allocs(clock.cta, clock.index)
        self.allocation[first : first + columns] = number

    def _after_alloc(self, clock: WarpClock, lanes: Lanes, columns: slice) -> None:
        """NVIDIA's samples put tcgen05 fences between an alloc and other warps' use; PTX does not ask for them in so many words."""
        who, when = self.allocator[columns], self.allocation[columns]
        others = who != self.clocks.allocs(clock.cta, clock.index)
        for group in clock.groups_of(lanes):
            if (others & (when > group.views[TENSOR, who])).any():
                self._report("A-T5-ALLOC-FENCE", "TMEM is used without fence::before, barrier, fence::after since another warp's alloc")

    def mma(
        self,
        clock: WarpClock,
        lanes: Lanes,
        rows: NDArray[np.int64],
        columns: slice,
        accumulates: bool,
        number: int,
        chain: int,
        spoiled: list[int],
    ) -> None:
        """MMA ``number`` of this warp's queue was issued; it writes (and with ``accumulates`` reads) the cells.

        ``spoiled``: columns of D whose operand rows race.
        """
        self._after_alloc(clock, lanes, columns)
        at = (rows[:, None], np.arange(columns.start, columns.stop)[None, :])
        who, when = self.writer[at], self.written[at]
        queue = self.clocks.queue(clock.cta, clock.index)
        if accumulates and (who == NOBODY).any():
            self._report("E-UNINIT", "the MMA accumulates onto TMEM cells that nobody wrote")
        for group in clock.groups_of(lanes):
            in_order = (who == queue) & (self.chain[at] == chain)
            if ((who >= 0) & ~in_order & (when > group.views[TENSOR, who])).any():
                self._report("E-T5-ORDER", "the MMA touches an accumulator that another, unordered MMA wrote")
            if (self.read[at] > group.views[TENSOR, self.reader[at]]).any():
                text = "the MMA overwrites cells whose tcgen05.ld is not ordered before it (wait::ld, fence::before, barrier, fence::after)"
                self._report("E-T5-ORDER", text)
        self.writer[at], self.written[at], self.chain[at], self.read[at] = queue, number, chain, 0
        self.spoiled[at] = self.spoiled[at] & accumulates
        self.spoiled[rows[:, None], columns.start + np.array(spoiled, np.int64)] = True

    def load(self, clock: WarpClock, lanes: Lanes, rows: slice, first_column: int, columns: int, number: int) -> None:
        """tcgen05.ld ``number`` of this warp was issued."""
        self._after_alloc(clock, lanes, slice(first_column, first_column + columns))
        at = (rows, slice(first_column, first_column + columns))
        who, when = self.writer[at], self.written[at]
        if (who == NOBODY).any():
            self._report("E-UNINIT", "tcgen05.ld reads TMEM cells that nobody wrote")
        for group in clock.groups_of(lanes):
            late = (who >= 0) & (when > group.views[TENSOR, who])
            if late.any():
                known = not ((who >= 0) & (when > group.views[MEMORY, who])).any()
                why = "tcgen05.fence::after_thread_sync is missing" if known else "the MMA's commit has not been waited for"
                self._report("E-T5-ORDER", f"tcgen05.ld of an accumulator: {why}")
        self.read[at] = number
        self.reader[at] = self.clocks.loads(clock.cta, clock.index)

    def dealloc(self, clock: WarpClock, lanes: Lanes, first: int, columns: int) -> None:
        """All MMAs and loads on the columns must be ordered before."""
        at = (slice(None), slice(first, first + columns))
        who, when = self.writer[at], self.written[at]
        for group in clock.groups_of(lanes):
            if ((who >= 0) & (when > group.views[TENSOR, who])).any():
                self._report("E-T5-ALLOC", "dealloc while MMAs on these columns are not known to be complete")
            if (self.read[at] > group.views[TENSOR, self.reader[at]]).any():
                self._report("E-T5-ALLOC", "dealloc while tcgen05.ld of these columns is not ordered before it")

    def _report(self, check: str, text: str) -> None:
        self.sanitizer.report(check, text)
