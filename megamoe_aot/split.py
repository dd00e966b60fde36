"""The work split: which CTA of a route's cluster computes which rows and K blocks of the two GEMMs.

One cluster serves one route. GEMM1's rows are cut in 128-row *tiles*, its K blocks in *parts*; a (tile, part) pair is a
*unit*. CTA ``c`` owns part ``c % parts`` of every tile ``c // parts + j * cluster / parts``, so all its units read the
same slice of the token and it quantises that slice once. GEMM2 gives each CTA ``hidden / cluster`` whole output rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import KernelSpec

PARTS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class WorkSplit:
    """Derived numbers; blocks are 128 wide, rows and tiles are logical (up tiles first, then gate tiles)."""

    cluster: int
    blocks1: int
    """K blocks of GEMM1: hidden / 128."""
    blocks2: int
    """K blocks of GEMM2, which is also the number of up tiles and of gate tiles: inter / 128."""
    parts: int
    """K parts of GEMM1; their sums are added in part order."""
    units: int
    """GEMM1 units (tile, part) per CTA."""
    unit_blocks: int
    """K blocks in one unit."""
    rows2: int
    """Output rows per CTA."""
    tile2_rows: int
    """Rows of one GEMM2 tile: 128, or 64 where rows2 is no multiple of 128."""

    @classmethod
    def candidates(cls, spec: KernelSpec) -> Iterator[WorkSplit]:
        """Every legal split, fewest parts (so least exchange traffic) first."""
        blocks1, blocks2 = spec.hidden // 128, spec.inter // 128
        tiles1, rows2 = 2 * blocks2, spec.hidden // spec.cluster
        for parts in PARTS:
            if blocks1 % parts == 0 and tiles1 * parts % spec.cluster == 0:
                yield cls(
                    cluster=spec.cluster,
                    blocks1=blocks1,
                    blocks2=blocks2,
                    parts=parts,
                    units=tiles1 * parts // spec.cluster,
                    unit_blocks=blocks1 // parts,
                    rows2=rows2,
                    tile2_rows=128 if rows2 % 128 == 0 else 64,
                )

    @property
    def tiles1(self) -> int:
        """128-row tiles of GEMM1: up tiles 0 .. blocks2-1, gate tiles blocks2 .. 2*blocks2-1."""
        return 2 * self.blocks2

    @property
    def tiles2(self) -> int:
        """GEMM2 tiles per CTA."""
        return self.rows2 // self.tile2_rows

    @property
    def stages1(self) -> int:
        """Pipeline stages that one CTA consumes in GEMM1."""
        return self.units * self.unit_blocks

    @property
    def stages2(self) -> int:
        """Pipeline stages that one CTA consumes in GEMM2."""
        return self.tiles2 * self.blocks2

    def part(self, cta: int) -> int:
        """K part of every GEMM1 unit of CTA ``cta``."""
        return cta % self.parts

    def tile(self, cta: int, unit: int) -> int:
        """Logical tile of unit ``unit`` of CTA ``cta``."""
        return cta // self.parts + unit * (self.cluster // self.parts)

    def stages(self, cta: int) -> Iterator[tuple[int, int, int, int]]:
        """What CTA ``cta`` loads, in order: (gemm, first logical row, rows, K block)."""
        for unit in range(self.units):
            for block in range(self.unit_blocks):
                yield 1, self.tile(cta, unit) * 128, 128, self.part(cta) * self.unit_blocks + block
        for tile in range(self.tiles2):
            for block in range(self.blocks2):
                yield 2, cta * self.rows2 + tile * self.tile2_rows, self.tile2_rows, block
