"""What every warp role of the list structure needs: where this thread stands, barriers, ring positions, who takes which work."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Uint32

from kernels import ptx
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import BALANCED_CTAS, POOL_SHARE, POOL_STAGES, RUN_SLOTS, ListPlan

from . import instructions

NO_UNIT = 0x7FFFFFF
"""Beyond every W1 unit and deal."""


class Cta(NamedTuple):
    """Where this thread stands, and how large the call is. Run-time values."""

    base: Any
    """u32 shared address of the dynamic shared memory."""
    lane: Any
    warp: Any
    cta: Any
    """Index of this CTA in the grid."""
    grid: Any
    """CTAs that take work, see :func:`active_ctas`; the others have an index of at least ``grid``."""
    tokens: Any


class Ring(NamedTuple):
    """A position in the ring of stages: the stage, and the parity to wait for."""

    stage: Any
    parity: Any


def barrier(spec: KernelSpec, base: Any, name: str, index: Any = 0) -> Any:
    """Shared address of mbarrier ``name[index]``."""
    offset = spec.work_list.barriers[name]
    if isinstance(index, int):
        return base + Uint32(offset + 8 * index)
    return base + Uint32(offset) + index * Uint32(8)


def after(spec: KernelSpec, ring: Ring) -> Ring:
    """The next ring position; the parity flips at the wrap."""
    following = ring.stage + Uint32(1)
    wrapped = following == Uint32(spec.work_list.ring)
    return Ring(ptx.select(wrapped, Uint32(0), following), ptx.select(wrapped, ring.parity ^ Uint32(1), ring.parity))


def ring_at(spec: KernelSpec, position: Any) -> Ring:
    """The ring position of this CTA's stage number ``position``."""
    lap = position // Uint32(spec.work_list.ring)
    return Ring(position - lap * Uint32(spec.work_list.ring), lap & Uint32(1))


def row_address(plan: ListPlan, tile: Any, block: Any, token: Any, lane: Any) -> Any:
    """Where this lane's four FP8 bytes of (K block, token) lie in an operand tile at ``tile``: groups of 8 rows, swizzled."""
    row = token & Uint32(7)
    at = tile + block * Uint32(plan.columns * 128) + (token >> Uint32(3)) * Uint32(1024) + row * Uint32(128)
    return at + ((lane >> Uint32(2)) ^ row) * Uint32(16) + (lane & Uint32(3)) * Uint32(4)


def load_table(base: Any, table: int, index: Any) -> Uint32:
    """Entry ``index`` of a u32 table in shared memory."""
    return ptx.load_shared_u32(base + Uint32(table) + index * Uint32(4))


def expert_count(spec: KernelSpec, base: Any) -> Uint32:
    """Unique experts of the call; valid once ``list`` is complete."""
    return ptx.load_shared_u32(base + Uint32(spec.work_list.count))


def launch_epoch(spec: KernelSpec, base: Any) -> Uint32:
    """This launch's epoch; valid once ``list`` is complete."""
    return ptx.load_shared_u32(base + Uint32(spec.work_list.count + 4))


def route_of(spec: KernelSpec, base: Any, place: Any, token: Any) -> Uint32:
    """The route (token * top_k + rank) of the list's expert ``place`` for ``token``, which chose it."""
    plan = spec.work_list
    return instructions.load_shared_u16(base + Uint32(plan.route) + (place * Uint32(plan.columns) + token) * Uint32(2))


def active_ctas(spec: KernelSpec, launched: Any, tokens: Any) -> Uint32:
    """CTAs that take work.

    With one token nobody can start W2 before all of W1 is done, so a few CTAs that would only take W2 tiles end last: they
    stay idle where the others have an equal number of W1 units.
    """
    units = spec.top_k * spec.work_list.units
    equal = units // -(-units // BALANCED_CTAS)
    fits = (Uint32(equal) <= launched) & (Uint32(20 * equal) >= launched * Uint32(19))
    return ptx.select((tokens == Uint32(1)) & fits, Uint32(equal), launched)


def deal_size(spec: KernelSpec, tokens: Any) -> Any:
    """W1 units that are dealt out together: deal d is units d * size and so on.

    With few tokens every unit on its own, so that the CTAs have equal work; else, where there is enough of it, all K parts of a row
    tile, whose sums are then added up here and travel as one packet.
    """
    plan = spec.work_list
    return Uint32(1) if plan.parts == 1 else ptx.select(tokens < Uint32(plan.whole_from), Uint32(1), Uint32(plan.parts))


def deals(spec: KernelSpec, at: Cta, experts: Any) -> Any:
    """How many deals ``experts`` experts make."""
    return experts * Uint32(spec.work_list.units) // deal_size(spec, at.tokens)


def unit_count(spec: KernelSpec, at: Cta, experts: Any) -> Uint32:
    """This CTA's W1 units, which come before its W2 tiles in the ring."""
    dealt = deals(spec, at, experts)
    whole = dealt // at.grid
    mine = whole + ptx.select(at.cta < dealt - whole * at.grid, Uint32(1), Uint32(0))
    return ptx.select(at.cta < at.grid, mine, Uint32(0)) * deal_size(spec, at.tokens)


def first_deal(at: Cta) -> Uint32:
    """The CTA's first deal, the others follow at distance ``grid``; NO_UNIT for an idle CTA."""
    return ptx.select(at.cta < at.grid, at.cta, Uint32(NO_UNIT))


def split_unit(plan: ListPlan, unit: Any) -> tuple[Any, Any, Any]:
    """W1 unit -> (place of its expert in the list, 64-row tile, K part)."""
    place = unit // Uint32(plan.units)
    rest = unit - place * Uint32(plan.units)
    if plan.parts == 1:
        return place, rest, Uint32(0)
    return place, rest >> Uint32(1), rest & Uint32(1)


class Run(NamedTuple):
    """W2 tiles of one expert that this CTA runs one after the other."""

    begin: Any
    count: Any
    """0: there are no more runs."""


def publish_run(spec: KernelSpec, base: Any, number: Any, run: Run) -> None:
    """Planner: put run number ``number`` into the queue."""
    slot = number & Uint32(RUN_SLOTS - 1)
    instructions.store_shared_u32x2(base + Uint32(spec.work_list.runs) + slot * Uint32(8), run.begin, run.count)
    ptx.mbarrier_arrive(barrier(spec, base, "run", slot))


def await_run(spec: KernelSpec, base: Any, number: Any) -> Run:
    """Run number ``number``, once it is known."""
    slot = number & Uint32(RUN_SLOTS - 1)
    ptx.mbarrier_wait(barrier(spec, base, "run", slot), (number // Uint32(RUN_SLOTS)) & Uint32(1))
    return Run(*instructions.load_shared_u32x2(base + Uint32(spec.work_list.runs) + slot * Uint32(8)))


def pool_begin(spec: KernelSpec, at: Cta, experts: Any) -> Any:
    """The first W2 tile of the pool, which the list's end follows; a multiple of ``pool_chunk``."""
    plan = spec.work_list
    tiles = experts * Uint32(plan.tiles)
    stages = experts * Uint32(plan.units * plan.stages1) + tiles * Uint32(plan.stages2)
    pool = stages // Uint32(POOL_SHARE * plan.stages2)
    pool = ptx.select(pool < tiles, pool, tiles)
    begin = (tiles - pool) // Uint32(plan.pool_chunk) * Uint32(plan.pool_chunk)
    return ptx.select(stages < at.grid * Uint32(POOL_STAGES), tiles, begin)


def w2_range(spec: KernelSpec, at: Cta, experts: Any) -> tuple[Any, Any]:
    """This CTA's W2 tiles [begin, end) outside the pool.

    CTAs with fewer deals come first: they get to W2 first, and so do the first experts' sums.
    """
    plan = spec.work_list
    dealt, tiles = deals(spec, at, experts), pool_begin(spec, at, experts)
    stages = deal_size(spec, at.tokens) * Uint32(plan.stages1)
    whole = dealt // at.grid
    rest = dealt - whole * at.grid
    total = dealt * stages + tiles * Uint32(plan.stages2)
    place = ptx.select(at.cta < rest, at.cta + at.grid - rest, at.cta - rest)
    place = ptx.select(at.cta < at.grid, place, at.grid)
    begin = _w2_bound(plan, place, at.grid, total, stages, whole, rest, tiles)
    following = ptx.select(place < at.grid, place + Uint32(1), at.grid)
    end = _w2_bound(plan, following, at.grid, total, stages, whole, rest, tiles)
    return begin, ptx.select(end > begin, end, begin)


def _w2_bound(plan: ListPlan, k: Any, grid: Any, total: Any, stages: Any, whole: Any, rest: Any, tiles: Any) -> Any:
    """First W2 tile of the k-th CTA in W2 order: the boundaries even out the stages of both phases. ``stages``: of a deal."""
    share = (k * total) // grid
    late = ptx.select(k > grid - rest, k - (grid - rest), Uint32(0))
    done = (k * whole + late) * stages
    left = ptx.select(share > done, share - done, Uint32(0)) // Uint32(plan.stages2)
    left = ptx.select(left < tiles, left, tiles)
    return ptx.select(k == grid, tiles, left)


def first_run(plan: ListPlan, begin: Any, end: Any) -> Run:
    """The tiles of [begin, end) that belong to the first one's expert."""
    following = (begin // Uint32(plan.tiles) + Uint32(1)) * Uint32(plan.tiles)
    return Run(begin, ptx.select(following < end, following, end) - begin)
