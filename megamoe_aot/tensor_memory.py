"""Tensor memory (TMEM) columns of the Blackwell engine: one 16-column accumulator per 16 K blocks of a unit or tile."""

from __future__ import annotations

import dataclasses

from .split import WorkSplit

COLUMNS = 16
"""Columns of one accumulator, and N of the MMA: K block b owns column b % 16."""
MAX_COLUMNS = 256
"""Two CTAs share the SM's 512 columns."""


@dataclasses.dataclass(frozen=True)
class TensorMemory:
    """Column offsets from the CTA's TMEM base."""

    unit_columns: int
    """Columns of one GEMM1 unit."""
    tile_columns: int
    """Columns of one GEMM2 tile."""
    tiles: int
    """Column of GEMM2's first tile; GEMM1's units start at 0."""
    allocated: int
    """What tcgen05.alloc asks for: a power of two, at least 32."""

    @classmethod
    def of(cls, split: WorkSplit) -> TensorMemory:
        unit = -(-split.unit_blocks // COLUMNS) * COLUMNS
        tile = -(-split.blocks2 // COLUMNS) * COLUMNS
        needed = split.units * unit + split.tiles2 * tile
        return cls(unit, tile, split.units * unit, max(32, 1 << (needed - 1).bit_length()))
