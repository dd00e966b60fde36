"""Dynamic shared memory of one CTA: the byte offsets that kernel, loader and tests share.

The base is 1024-aligned (the swizzle pattern's period). There is no static shared memory beside it: static bytes would
move the base and cost the second CTA of the SM.

| region | bytes | written by | read by |
|---|---|---|---|
| stages | ring * 16384 | TMA | MMA |
| operand | one 1 KiB row group per K block (+ a shared zero group on Blackwell) | consumer warps | MMA |
| sums | parts * tiles1 * 512 | st.async of every CTA of the cluster | consumer warps |
| staging | 4 warps * 128 | before the CTA barrier the producer warp (routing scratch), then a consumer warp each | the same warp |
| scales | see the fields | consumer warps | consumer warps |
| ids | 4 * 32 | producer warp | consumer warps |
| tmem | 4, padded to 16 | tcgen05.alloc (Blackwell) | MMA and consumer warps |
| barriers | 8 each | | |
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .split import WorkSplit

STAGE_BYTES = 16384
GROUP_BYTES = 1024
"""Eight operand rows of 128 bytes."""
MAX_DYNAMIC_SHARED = 115_712
"""Two CTAs per SM: 228 KiB = 2 * (113 KiB + 1 KiB that the system reserves per CTA)."""
MAX_STAGES = 8
MIN_STAGES = 3


@dataclasses.dataclass(frozen=True)
class SharedMap:
    """Offsets in bytes from the dynamic shared memory base."""

    ring: int
    """Pipeline stages."""
    operand: int
    """First operand row group. Block b's group holds its values in row b % 8; see :meth:`operand_group`."""
    zero_group: int | None
    """Blackwell: offset of the all-zero row group that every N=16 tile shares."""
    operand_blocks: int
    """K blocks that need a row group of their own: GEMM2's hidden blocks reuse the groups of GEMM1's token blocks."""
    operand_bytes: int
    sums: int
    """FP32 [parts][tiles1][128]: GEMM1's partial sums, scales applied, rows in logical order."""
    staging: int
    w13_scale: int
    """FP32 [units][scale_columns(unit_blocks)]; the padding columns are zero."""
    x_scale: int
    """FP32 [scale_columns(unit_blocks)]."""
    w2_scale: int
    """FP32 [tiles2][scale_columns(blocks2)]."""
    hidden_scale: int
    """FP32 [scale_columns(blocks2)]."""
    ids: int
    """INT32 [32]: the token's experts in rank order."""
    tmem: int
    """u32: base address that tcgen05.alloc wrote (Blackwell)."""
    barriers: dict[str, int]
    """Name -> offset of its first mbarrier; see :attr:`barrier_counts`."""
    barrier_counts: dict[str, tuple[int, int]]
    """Name -> (how many mbarriers, arrivals per phase)."""
    total: int

    @classmethod
    def of(cls, split: WorkSplit, engine: str) -> SharedMap | None:
        """The map with the deepest ring that lets two CTAs share an SM; None where not even MIN_STAGES fit."""
        for ring in range(MAX_STAGES, MIN_STAGES - 1, -1):
            candidate = cls._with_ring(split, engine, ring)
            if candidate.total <= MAX_DYNAMIC_SHARED:
                return candidate
        return None

    @classmethod
    def _with_ring(cls, split: WorkSplit, engine: str, ring: int) -> SharedMap:
        blackwell = engine == "blackwell"
        blocks = max(split.unit_blocks, split.blocks2)
        operand = ring * STAGE_BYTES
        operand_bytes = (blocks + blackwell) * GROUP_BYTES
        zero = operand + low_groups(blocks) * GROUP_BYTES if blackwell else None
        at = operand + operand_bytes

        def take(size: int) -> int:
            nonlocal at
            start, at = at, at + -(-size // 16) * 16
            return start

        columns1, columns2 = scale_columns(split.unit_blocks), scale_columns(split.blocks2)
        offsets = {
            "sums": take(split.parts * split.tiles1 * 512),
            "staging": take(4 * 128),
            "w13_scale": take(4 * split.units * columns1),
            "x_scale": take(4 * columns1),
            "w2_scale": take(4 * split.tiles2 * columns2),
            "hidden_scale": take(4 * columns2),
            "ids": take(4 * 32),
            "tmem": take(16),
        }
        counts = barrier_counts(split, engine, ring)
        barriers = {name: take(8 * number) for name, (number, _) in counts.items()}
        return cls(
            ring=ring,
            operand=operand,
            zero_group=zero,
            operand_blocks=blocks,
            operand_bytes=operand_bytes,
            barriers=barriers,
            barrier_counts=counts,
            total=at,
            **offsets,
        )

    def operand_group(self, block: int) -> int:
        """Offset of the row group that holds K block ``block``.

        Blackwell orders them [low tiles | zero group | high tiles]: a tile whose column is 0..7 uses (own, zero) as its
        two row groups, one with column 8..15 (zero, own), and the descriptor's stride is unsigned.
        """
        if self.zero_group is None:
            return self.operand + block * GROUP_BYTES
        index = block // 16 * 8 + block % 8
        return self.operand + index * GROUP_BYTES if block % 16 < 8 else self.zero_group + (1 + index) * GROUP_BYTES


def low_groups(blocks: int) -> int:
    """How many of the first ``blocks`` K blocks fall in columns 0..7 of their 16-column accumulator."""
    return blocks // 16 * 8 + min(blocks % 16, 8)


def scale_columns(blocks: int) -> int:
    """Scale slots for ``blocks`` K blocks, padded to whole groups of 8 columns."""
    return -(-blocks // 8) * 8


def barrier_counts(split: WorkSplit, engine: str, ring: int) -> dict[str, tuple[int, int]]:
    """The barrier table: name -> (number, arrivals per phase).

    | barrier | completed by | waited for by |
    |---|---|---|
    | full[s] | producer's expect_tx arrive + the stage's TMA bytes | MMA (consumer warps on Hopper) |
    | empty[s] | MMA commit; on Hopper the four consumer warps | producer |
    | sums | one expect_tx arrive + parts * tiles1 * 512 bytes of st.async | consumer warps |
    | operand (Blackwell) | four consumer warps: operand rows are written and fenced; phase 0 token, phase 1 hidden | MMA |
    | acc1[u], acc2[t] (Blackwell) | MMA commit: the accumulator of unit u / tile t is complete | consumer warps |
    """
    common = {"full": (ring, 1), "empty": (ring, 4), "sums": (1, 1)}
    if engine == "hopper":
        return common
    return common | {
        "empty": (ring, 1),
        "operand": (1, 4),
        "acc1": (split.units, 1),
        "acc2": (split.tiles2, 1),
    }
