"""The persistent work list (structure "list"): geometry, shared memory and scratch of one launch.

The grid is one CTA per SM. A call's *unique* experts form a list, in order of first appearance; an expert that several tokens
chose is read once, its tokens are columns of the MMA. Work of two kinds:

* a *W1 unit* is 64 rows of one expert's w13 and one K part of them. Units are dealt out round robin.
* a *W2 tile* is 64 rows of one expert's w2, all of K. Every CTA has one contiguous range of tiles; the list's last tiles are a
  pool from which CTAs that are done take a few at a time.

What a CTA runs of one expert's W2 tiles, one after the other, is a *run*: its list warp puts them into a queue that the others follow.

GEMM1's sums cross between CTAs through global scratch memory as 8-byte {FP32 value, epoch} packets. Readers poll the packets
themselves, so there is no flag and nothing to reset: see docs/design.md.

The shared memory base is 1024-aligned.

| region | bytes | written by | read by |
|---|---|---|---|
| stages | ring * 16384 (64 rows x 2 K blocks) | TMA | MMA |
| x_tile, hidden | see the fields | worker warps; hidden warps | MMA |
| slots | SCALE_SLOTS * slot_bytes | bulk copies | MMA warps |
| ids, first, expert, mask, route, count | tables of the call | routing warps, then the list warp | all |
| runs | 8 for each of RUN_SLOTS | list warp | producer, MMA issuer, MMA and hidden warps |
| routing | 512 for each of nine warps | a routing warp | the same warp |
| tmem | 16 (Blackwell) | tcgen05.alloc | MMA issuer and MMA warps |
| barriers | 8 each | | |
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import KernelSpec

UNIT_ROWS = 64
STAGE_BYTES = 16384
MAX_DYNAMIC_SHARED = 232_448
"""227 KiB: one CTA per SM."""
SCALE_SLOTS = 16
"""Units whose block scales are held at once: more than can be between the producer and the last read of their scales."""
MAX_RING, MIN_RING = 12, 4
FLIGHTS = {"hopper": (3, 4), "blackwell": (5, 6)}
"""Stages in flight at most: the first number while tokens * hidden is small, the second beyond FEW_W1 in the W1 phase and beyond FEW_W2 in
the W2 phase. With more, queues grow and the SMs drift apart; with fewer, the SMs that stream last leave bandwidth unused (measured, see
docs/performance.md). The ring is deeper: it fills only while the MMAs are held up. Blackwell's are not measured: as many bytes per SM as
cover Hopper's latency at a B200's bandwidth, 1.6 times as high per SM."""
FEW_W1, FEW_W2 = 2 * 7168, 7168
RUN_SLOTS = 16
"""Runs in the queue: more than can be between the list warp, which is one run ahead of the producer, and the last reader. A run has at
least one stage, so the ring's MAX_RING runs and two more."""
POOL_SHARE = 5
"""One in so many stages is in the pool."""
POOL_STAGES = 72
"""Stages per CTA from which on there is a pool. In less time the CTAs do not drift apart by more than the pool's hidden tiles cost."""
WORKERS = 8
"""Warps that route tokens: the hidden warps 4-7 and four helpers, warps 8-11."""
HELPER_WARP = 8
"""The first helper; a multiple of four, so that the helpers can be a warpgroup of MMAs."""
PRODUCER_WARP, LIST_WARP, ISSUE_WARP = 12, 13, 14
"""ISSUE_WARP, which issues the MMAs, exists on Blackwell only."""
FEW_BLOCKS = 4
"""K blocks of a hidden tile that four warps make in one round. With more of them the helpers join the hidden warps; with so few they can
run MMAs, and the W2 tiles are small, so that it pays."""
ROUTING_BYTES = 512
SCRATCH_HEADER = 128
"""u32 tickets taken, u32 epoch of the last launch; at POOL_COUNTERS what was taken from the pool; the packets follow."""
POOL_COUNTERS = 64
"""Offset of two u32 for launches of even and of odd epoch: each launch zeroes the next one's."""
PACKET_BYTES = 8
ACC_COLUMNS = 64
"""TMEM columns of one of Blackwell's accumulator buffers; a K block owns ``columns`` of them. Few: what remains to be read when a
unit's last MMA is complete stands between the last weight byte and the sums."""
ACC_BUFFERS = 2
BALANCED_CTAS = 128
"""Every GPU of the supported kinds has so many SMs: W1 units should come in multiples of it."""


@dataclasses.dataclass(frozen=True)
class ListPlan:
    """Derived numbers; offsets are bytes from the dynamic shared memory base."""

    columns: int
    """MMA columns, one per token: 8 or 16."""
    blocks1: int
    """K blocks of GEMM1."""
    blocks2: int
    """K blocks of GEMM2."""
    parts: int
    """K parts of GEMM1: 1 or 2. Their sums are added in part order."""
    top_k: int
    row_tiles: int
    """64-row tiles of w13 per expert: 2I / 64."""
    tiles: int
    """W2 tiles per expert: H / 64."""
    ring: int
    """Stages."""
    x_tile: int
    """FP8 [blocks1][columns][128], swizzled: the quantised tokens."""
    hidden: int
    """FP8 [2][blocks2][columns][128], swizzled: hidden tiles of two experts."""
    slots: int
    """FP32 [SCALE_SLOTS][slot_bytes / 4]: block scales of a unit or tile."""
    slot_bytes: int
    x_scale: int
    """FP32 [blocks1][columns]."""
    hidden_scale: int
    """FP32 [2][blocks2][columns]."""
    ids: int
    """u32 [columns * top_k]: experts of all tokens."""
    first: int
    """u32 [E]: first route that chose the expert, then its place in the list."""
    expert: int
    """u32 [columns * top_k]: the unique experts in order of first appearance."""
    mask: int
    """u32 [columns * top_k]: bit t is set where token t chose that expert."""
    route: int
    """u16 [columns * top_k][columns]: the route of (place, token)."""
    count: int
    """u32: number of unique experts; u32: epoch."""
    runs: int
    """u32 [RUN_SLOTS][2]: first W2 tile of a run, number of tiles; none: there are no more runs."""
    routing: int
    """Routing scratch of nine warps, ROUTING_BYTES each."""
    tmem: int
    """u32: base address that tcgen05.alloc wrote (Blackwell)."""
    warps: int
    """Warps of a CTA."""
    tile_groups: int
    """Hopper's warpgroups that run W2 tiles, in turn: 1, or 2 where the helpers join in."""
    hidden_warps: int
    """Warps that make hidden tiles: 4, or 8 where the helpers join in."""
    barriers: dict[str, int]
    """Name -> offset of its first mbarrier."""
    barrier_counts: dict[str, tuple[int, int]]
    """Name -> (how many mbarriers, arrivals per phase; 0: the launch's number of tokens)."""
    total: int
    scratch_bytes: int
    """Global scratch of one bound layer on one stream: header and packets, zeroed once."""

    @classmethod
    def of(cls, spec: KernelSpec) -> ListPlan | None:
        """The plan with the deepest ring that fits an SM; None where not even MIN_RING stages fit."""
        for ring in range(MAX_RING, MIN_RING - 1, -1):
            plan = cls._with_ring(spec, ring)
            if plan.total <= MAX_DYNAMIC_SHARED:
                return plan
        return None

    @classmethod
    def _with_ring(cls, spec: KernelSpec, ring: int) -> ListPlan:
        columns = spec.columns
        blocks1, blocks2 = spec.hidden // 128, spec.inter // 128
        parts = k_parts(spec)
        routes = columns * spec.top_k
        at = ring * STAGE_BYTES

        def take(size: int) -> int:
            nonlocal at
            start, at = at, at + -(-size // 16) * 16
            return start

        slot = -(-(4 * max(blocks1 // parts, blocks2) + 12) // 16) * 16
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
            "runs": take(8 * RUN_SLOTS),
            "routing": take(ROUTING_BYTES * (WORKERS + 1)),
            "tmem": take(16),
        }
        counts = barrier_counts(spec, ring)
        barriers = {name: take(8 * number) for name, (number, _) in counts.items()}
        return cls(
            columns=columns,
            blocks1=blocks1,
            blocks2=blocks2,
            parts=parts,
            top_k=spec.top_k,
            row_tiles=2 * spec.inter // UNIT_ROWS,
            tiles=spec.hidden // UNIT_ROWS,
            ring=ring,
            slot_bytes=slot,
            warps=(LIST_WARP if spec.engine == "hopper" else ISSUE_WARP) + 1,
            tile_groups=tile_groups(spec, ring),
            hidden_warps=hidden_warps(spec),
            barriers=barriers,
            barrier_counts=counts,
            total=at,
            scratch_bytes=SCRATCH_HEADER + routes * parts * 2 * spec.inter * PACKET_BYTES,
            **offsets,
        )

    @property
    def units(self) -> int:
        """W1 units per expert: unit = tile * parts + part."""
        return self.row_tiles * self.parts

    @property
    def whole_from(self) -> int:
        """Tokens from which on the K parts of a row tile go to one CTA: enough for two rounds."""
        return -(-2 * BALANCED_CTAS // (self.top_k * self.row_tiles))

    @property
    def unit_blocks(self) -> int:
        """K blocks of a W1 unit."""
        return self.blocks1 // self.parts

    @property
    def stages1(self) -> int:
        """Stages per W1 unit, two K blocks each."""
        return self.unit_blocks // 2

    @property
    def pool_chunk(self) -> int:
        """W2 tiles that a CTA takes from the pool at a time: a few stages, for a hidden tile is made for each. Divides ``tiles``."""
        return -(-4 // self.stages2)

    @property
    def held(self) -> bool:
        """Whether Hopper's MMA warps take a W2 tile's weights into registers before its hidden tile is there.

        Where a CTA has more tiles than warpgroups even at one token, what the first tile gains is lost at the others (measured).
        """
        return self.tile_groups == 2 and self.top_k * self.tiles <= 2 * BALANCED_CTAS

    @property
    def stages2(self) -> int:
        """Stages per W2 tile; the last may hold one K block."""
        return -(-self.blocks2 // 2)


def tile_groups(spec: KernelSpec, ring: int) -> int:
    """See :attr:`ListPlan.tile_groups`. On Blackwell one thread issues all MMAs, and nothing waits for a tile's before the next's.

    Two need a ring that is longer than what is in flight and a tile: kernels/work_list/hopper.py says why.
    """
    fits = ring > max(FLIGHTS["hopper"]) + -(-spec.inter // 256)
    return 2 if spec.engine == "hopper" and hidden_warps(spec) == 4 and fits else 1


def hidden_warps(spec: KernelSpec) -> int:
    """See :attr:`ListPlan.hidden_warps`."""
    return 4 if spec.inter <= 128 * FEW_BLOCKS else 8


def k_parts(spec: KernelSpec) -> int:
    """1, or 2 where the units of one token's experts, all of K each, would leave SMs without work in the last round.

    The rule looks at the shape alone: the same shape has the same sums whatever M is.
    """
    units = spec.top_k * 2 * spec.inter // UNIT_ROWS
    rounds = -(-units // BALANCED_CTAS)
    return 1 if units >= 0.95 * rounds * BALANCED_CTAS else 2


def barrier_counts(spec: KernelSpec, ring: int) -> dict[str, tuple[int, int]]:
    """Name -> (how many mbarriers, arrivals per phase); the kernels' modules say who arrives and who waits."""
    counts = {
        "full": (ring, 1),
        "empty": (ring, 4 if spec.engine == "hopper" else 2),
        "x": (spec.columns, 4),
        "ids": (1, 0),
        "list": (1, 1),
        "run": (RUN_SLOTS, 1),
        "begun": (1, 1),
        "hidden": (2, hidden_warps(spec)),
        "free": (2, 4 * tile_groups(spec, ring)),
        "w1": (1, 4),
    }
    if spec.engine == "blackwell":
        counts |= {"scales": (SCALE_SLOTS, 1), "acc": (ACC_BUFFERS, 1), "drained": (ACC_BUFFERS, 4)}
    return counts
