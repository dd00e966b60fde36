"""Tensor memory of one CTA: 128 lanes x 512 columns of 32-bit cells, and its allocator."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

LANES = 128
COLUMNS = 512


def valid_columns(columns: int) -> bool:
    """May tcgen05.alloc ask for this many?"""
    return 32 <= columns <= COLUMNS and columns & (columns - 1) == 0


@dataclasses.dataclass
class TensorMemory:
    """Cells and allocations. Address: lane in bits 31-16, column in bits 15-0."""

    allocations: dict[int, int] = dataclasses.field(default_factory=dict)
    """First column -> number of columns."""
    last_request: int = COLUMNS
    relinquished: bool = False

    @functools.cached_property
    def cells(self) -> NDArray[np.uint32]:
        """[lane, column]; made when it is first used."""
        return np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)

    def place(self, columns: int, rng: np.random.Generator) -> int | None:
        """A random free base, multiple of 32; None where nothing fits. On hardware a lone CTA usually gets 0: code must not rely on it."""
        free = [b for b in range(0, COLUMNS - columns + 1, 32) if not self._taken(b, columns)]
        return int(rng.choice(free)) if free else None

    def _taken(self, base: int, columns: int) -> bool:
        return any(base < start + count and start < base + columns for start, count in self.allocations.items())

    def allocated(self, first: int, columns: int) -> bool:
        """Do the columns lie inside one allocation?"""
        return any(start <= first and first + columns <= start + count for start, count in self.allocations.items())
