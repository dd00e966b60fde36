"""The persistent work list ("list" structure): geometry and shared memory of one CTA.

Every CTA of a grid of one CTA per SM takes W1 units (64 rows of one expert's w13, all of K) round robin and then a contiguous
range of W2 tiles (64 rows of w2), over the *unique* experts of the call: an expert that several tokens chose is read
once, its tokens are columns of the MMA. A stage of the ring holds 64 rows x 2 K blocks.
"""

from __future__ import annotations

import dataclasses

from megamoe_aot.spec import KernelSpec

STAGE_BYTES = 16384
MAX_SHARED = 232_448
"""227 KiB: one CTA per SM."""
SCALE_SLOTS = 16
"""Units whose block scales are held at once: more than the ring can hold stages."""
MAX_RING = 12
THREADS = 320
"""Warps 0-3 MMA, 4-7 hidden tiles, 8 producer, 9 list of experts."""


@dataclasses.dataclass(frozen=True)
class ListPlan:
    """Derived numbers and byte offsets."""

    columns: int
    """MMA columns, one per token: 8 or 16."""
    blocks1: int
    blocks2: int
    units: int
    """W1 units per expert: 2I / 64."""
    tiles: int
    """W2 tiles per expert: H / 64."""
    stages1: int
    """Stages per W1 unit."""
    stages2: int
    """Stages per W2 tile; the last may hold one K block."""
    ring: int
    x_tile: int
    """FP8 [blocks1][columns][128], swizzled: the quantised tokens."""
    hidden: int
    """FP8 [2][blocks2][columns][128], swizzled: hidden tiles of two experts."""
    slot_bytes: int
    slots: int
    """FP32 block scales of a unit, [SCALE_SLOTS][slot_bytes]."""
    x_scale: int
    """FP32 [blocks1][columns]."""
    hidden_scale: int
    """FP32 [2][blocks2][columns]."""
    ids: int
    """u32 [16 * 32]: experts of all tokens."""
    first: int
    """u32 [E]: first route that chose the expert, then its place in the list."""
    expert: int
    """u32 [512]: the unique experts in order of first appearance."""
    mask: int
    """u32 [512]: tokens that chose them."""
    route: int
    """u16 [512][columns]: the route of (expert, token)."""
    count: int
    """u32: number of unique experts; u32: epoch."""
    routing: int
    """Scratch of the nine warps that route, 512 bytes each."""
    barriers: dict[str, int]
    total: int

    @classmethod
    def of(cls, spec: KernelSpec) -> ListPlan:
        for ring in range(MAX_RING, 3, -1):
            plan = cls._with_ring(spec, ring)
            if plan.total <= MAX_SHARED:
                return plan
        raise ValueError(f"no ring fits: {spec}")

    @classmethod
    def _with_ring(cls, spec: KernelSpec, ring: int) -> ListPlan:
        columns = 8 if spec.tokens <= 8 else 16
        blocks1, blocks2 = spec.hidden // 128, spec.inter // 128
        routes = columns * spec.top_k
        at = ring * STAGE_BYTES

        def take(size: int) -> int:
            nonlocal at
            start, at = at, at + -(-size // 16) * 16
            return start

        slot = -(-(4 * max(blocks1, blocks2) + 12) // 16) * 16
        offsets = {
            "x_tile": take(blocks1 * columns * 128),
            "hidden": take(2 * blocks2 * columns * 128),
            "slots": take(SCALE_SLOTS * slot),
            "x_scale": take(4 * blocks1 * columns),
            "hidden_scale": take(8 * blocks2 * columns),
            "ids": take(4 * routes),
            "first": take(4 * spec.experts),
            "expert": take(4 * routes),
            "mask": take(4 * routes),
            "route": take(2 * routes * columns),
            "count": take(16),
            "routing": take(512 * 9),
        }
        barriers = {}
        for name, number in (
            ("full", ring),
            ("empty", ring),
            ("x", columns),
            ("ids", 1),
            ("list", 1),
            ("hidden", 2),
            ("free", 2),
            ("w1", 1),
        ):
            barriers[name] = take(8 * number)
        return cls(
            columns=columns,
            blocks1=blocks1,
            blocks2=blocks2,
            units=2 * spec.inter // 64,
            tiles=spec.hidden // 64,
            stages1=blocks1 // 2,
            stages2=-(-blocks2 // 2),
            ring=ring,
            slot_bytes=slot,
            barriers=barriers,
            total=at,
            **offsets,
        )


def name_of(spec: KernelSpec) -> str:
    """File name and symbol prefix: the entry's code, and how many token columns the MMA has."""
    return f"list_{spec.code_name}_n{8 if spec.tokens <= 8 else 16}"
