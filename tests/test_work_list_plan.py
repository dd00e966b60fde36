"""Who runs which W2 tile, and the plan's bounds: kernels/work_list/common.py evaluated with integers of 32 bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kernels.work_list import common
from megamoe_aot.menu import MENU, specs_of
from megamoe_aot.spec import ENGINES, KernelSpec
from megamoe_aot.work_list import (
    ACC_BUFFERS,
    FLIGHTS,
    MAX_RING,
    POOL_STAGES,
    RUN_SLOTS,
    SCALE_SLOTS,
    ListPlan,
)

LISTS = [spec for shape in MENU for spec in specs_of(shape) if spec.structure == "list"]


SHAPES = {
    # hidden, inter: hidden warps, Hopper's tile groups with 8 and with 16 columns
    (4096, 512): (4, 2, 2),
    (2048, 512): (4, 2, 2),
    (7168, 256): (4, 2, 1),
    (2048, 768): (8, 1, 1),
    (4096, 1536): (8, 1, 1),
}
"""Six and twelve K blocks keep eight hidden warps busy; where there are two or four, Hopper pairs tiles if the ring allows. With 16 columns
of 7168, five stages fit beside the tokens, and up to four are in flight."""


class Word(int):
    """A Uint32: sums, differences and products wrap."""

    def __add__(self, other: int) -> Word:
        return Word(int(self) + int(other) & 0xFFFFFFFF)

    def __sub__(self, other: int) -> Word:
        return Word(int(self) - int(other) & 0xFFFFFFFF)

    def __mul__(self, other: int) -> Word:
        return Word(int(self) * int(other) & 0xFFFFFFFF)

    def __floordiv__(self, other: int) -> Word:
        return Word(int(self) // int(other))


@pytest.fixture(scope="module", autouse=True)
def words() -> Iterator[None]:
    """DSL values become :class:`Word`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "ptx", SimpleNamespace(select=lambda condition, a, b: a if condition else b))
        patch.setattr(common, "Uint32", Word)
        yield


def cta(spec: KernelSpec, index: int, launched: int, tokens: int) -> common.Cta:
    grid = common.active_ctas(spec, Word(launched), Word(tokens))
    return common.Cta(base=Word(0), lane=Word(0), warp=Word(0), cta=Word(index), grid=grid, tokens=Word(tokens))


@st.composite
def specs(draw: st.DrawFn) -> KernelSpec:
    """Any shape and width that the list structure has a plan for."""
    experts = 32 * draw(st.integers(1, 16))
    spec = KernelSpec(
        hidden=1024 * draw(st.integers(1, 8)),
        inter=128 * draw(st.integers(1, 16)),
        experts=experts,
        top_k=draw(st.integers(1, min(32, experts))),
        arch=draw(st.sampled_from(sorted(ENGINES))),
        structure="list",
        columns=(columns := draw(st.sampled_from([8, 16]))),
        tokens=columns,
    )
    assume(ListPlan.of(spec) is not None)
    return spec


@st.composite
def calls(draw: st.DrawFn) -> tuple[KernelSpec, int, int, int]:
    """A list entry of the menu or any other, M, how many unique experts, CTAs."""
    spec = draw(st.sampled_from(LISTS) | specs())
    tokens = draw(st.integers(1, spec.columns))
    experts = draw(st.integers(spec.top_k, min(spec.experts, tokens * spec.top_k)))
    return spec, tokens, Word(experts), draw(st.integers(tokens, 160))


def some_idle(hidden: int) -> tuple[KernelSpec, int, int, int]:
    """One token on an H200, where four of 132 CTAs are idle: see :func:`test_a_few_ctas_are_idle`. Random calls hardly ever have any."""
    spec = next(spec for spec in LISTS if spec.hidden == hidden)
    return spec, 1, Word(spec.top_k), 132


ONE_UNIT_EACH, THREE_UNITS_EACH = some_idle(7168), some_idle(2048)


@given(calls())
@example(ONE_UNIT_EACH)
@example(THREE_UNITS_EACH)
def test_every_tile_is_run_once(call: tuple[KernelSpec, int, int, int]) -> None:
    """By its CTA or out of the pool, whose chunks stay within an expert; the first run of a rest is never longer than its expert."""
    spec, tokens, experts, launched = call
    plan: Any = spec.work_list
    tiles = experts * plan.tiles
    taken = [0] * tiles
    for index in range(launched):
        at = cta(spec, index, launched, tokens)
        begin, end = common.w2_range(spec, at, experts)
        while begin < end:
            run = common.first_run(plan, begin, end)
            assert run.count >= 1 and run.begin // plan.tiles == (run.begin + run.count - 1) // plan.tiles
            begin = run.begin + run.count
            for tile in range(run.begin, begin):
                taken[tile] += 1
    pool = common.pool_begin(spec, cta(spec, 0, launched, tokens), experts)
    for first in range(pool, tiles, plan.pool_chunk):
        assert first // plan.tiles == (min(first + plan.pool_chunk, tiles) - 1) // plan.tiles
        for tile in range(first, min(first + plan.pool_chunk, tiles)):
            taken[tile] += 1
    assert set(taken) == {1}


@given(calls())
@example(ONE_UNIT_EACH)
@example(THREE_UNITS_EACH)
def test_stages_are_even(call: tuple[KernelSpec, int, int, int]) -> None:
    """A CTA that has W2 tiles of its own has an equal share of all stages outside the pool, W1's included, but for a tile's rounding."""
    spec, tokens, experts, launched = call
    plan: Any = spec.work_list
    grid = int(cta(spec, 0, launched, tokens).grid)
    pool = int(common.pool_begin(spec, cta(spec, 0, launched, tokens), experts))
    share = (int(experts) * plan.units * plan.stages1 + pool * plan.stages2) / grid
    for index in range(launched):
        at = cta(spec, index, launched, tokens)
        begin, end = common.w2_range(spec, at, experts)
        if begin < end:
            stages = common.unit_count(spec, at, experts) * plan.stages1 + (end - begin) * plan.stages2
            assert stages <= share + plan.stages2 + 1


@given(calls())
@example(ONE_UNIT_EACH)
@example(THREE_UNITS_EACH)
def test_units_are_dealt_out_once(call: tuple[KernelSpec, int, int, int]) -> None:
    """And counted right: a CTA's W2 stages follow those of its units in the ring. An idle CTA has neither a unit nor a first box."""
    spec, tokens, experts, launched = call
    plan: Any = spec.work_list
    dealt = []
    for index in range(launched):
        at = cta(spec, index, launched, tokens)
        size = common.deal_size(spec, at.tokens)
        mine = list(range(common.first_deal(at), common.deals(spec, at, experts), at.grid))
        assert common.unit_count(spec, at, experts) == len(mine) * size
        assert (common.first_deal(at) * size < spec.top_k * plan.units) == bool(mine and mine[0] * size < spec.top_k * plan.units)
        assert bool(mine) <= (index < at.grid)
        dealt += mine
    assert sorted(dealt) == list(range(experts * plan.units // common.deal_size(spec, Word(tokens))))


@pytest.mark.parametrize("spec", LISTS, ids=lambda spec: spec.name)
def test_a_few_ctas_are_idle(spec: KernelSpec) -> None:
    """With one token, 128 CTAs have an equal number of the menu's W1 units: up to a twentieth of a grid stays idle, no more."""
    for launched, active in ((127, 127), (128, 128), (132, 128), (134, 128), (135, 135), (148, 148)):
        assert common.active_ctas(spec, Word(launched), Word(1)) == active
        counts = [common.unit_count(spec, cta(spec, index, launched, 1), Word(spec.top_k)) for index in range(launched)]
        assert sum(counts) == spec.top_k * spec.work_list.units
        if active == 128:
            assert len(set(counts[:128])) == 1 and not any(counts[128:])
    assert common.active_ctas(spec, Word(132), Word(2)) == 132


@given(calls())
def test_the_pool_is_for_long_launches(call: tuple[KernelSpec, int, int, int]) -> None:
    spec, tokens, experts, launched = call
    plan: Any = spec.work_list
    at = cta(spec, 0, launched, tokens)
    stages = int(experts) * (plan.units * plan.stages1 + plan.tiles * plan.stages2)
    assert (common.pool_begin(spec, at, experts) < experts * plan.tiles) == (stages >= POOL_STAGES * at.grid)
    assert launched * stages < 2**32, "common._w2_bound multiplies them in 32 bits"


@pytest.mark.parametrize("spec", LISTS, ids=lambda spec: spec.name)
def test_bounds_of_the_menu(spec: KernelSpec) -> None:
    check_bounds(spec)


@given(specs())
def test_bounds(spec: KernelSpec) -> None:
    check_bounds(spec)


def check_bounds(spec: KernelSpec) -> None:
    """What the kernels' comments promise of rings, queues and chunks."""
    plan = spec.work_list
    assert isinstance(plan, ListPlan)
    assert plan.tiles % plan.pool_chunk == 0
    assert MAX_RING + ACC_BUFFERS <= SCALE_SLOTS and MAX_RING + 2 + ACC_BUFFERS <= RUN_SLOTS
    assert plan.tile_groups == 1 or plan.ring > max(FLIGHTS["hopper"]) + plan.stages2
    assert plan.tile_groups == 1 or (spec.engine == "hopper" and plan.hidden_warps == 4)
    # A tile in registers: each group has seen all W1 stages before its first one, which lies at most two tiles further on.
    assert not plan.held or (plan.tile_groups == 2 and plan.ring >= 2 * plan.stages2 and 16 * plan.blocks2 <= 64)


@pytest.mark.parametrize("spec", LISTS, ids=lambda spec: spec.name)
def test_warps_and_arrivals_of_the_menu(spec: KernelSpec) -> None:
    """kernels/work_list/program.py's tables: who works in pairs, and how many arrive at each barrier."""
    plan = spec.work_list
    hopper = spec.engine == "hopper"
    hidden_warps, *groups = SHAPES[spec.hidden, spec.inter]
    tile_groups = groups[spec.columns == 16] if hopper else 1
    assert (plan.hidden_warps, plan.tile_groups, plan.warps) == (hidden_warps, tile_groups, 14 if hopper else 15)
    assert spec.block_threads == 32 * plan.warps
    arrivals = {
        "full": (plan.ring, 1),  # the producer's expect_tx
        "empty": (plan.ring, 4 if hopper else 2),  # the MMA warps; a commit and the issuing thread
        "x": (spec.columns, 4),  # the warps that share a token
        "ids": (1, 0),  # one for each token of the launch
        "list": (1, 1),
        "run": (16, 1),
        "begun": (1, 1),
        "hidden": (2, hidden_warps),
        "free": (2, 4 * tile_groups),
        "w1": (1, 4),
    }
    if not hopper:
        arrivals |= {"scales": (16, 1), "acc": (2, 1), "drained": (2, 4)}
    assert plan.barrier_counts == arrivals
    places = sorted(plan.barriers[name] + 8 * i for name, (number, _) in arrivals.items() for i in range(number))
    assert places[-1] + 8 <= plan.total and all(b - a >= 8 for a, b in itertools.pairwise(places))


def test_every_shape_is_known() -> None:
    assert {(spec.hidden, spec.inter) for spec in LISTS} == set(SHAPES)


def test_who_holds_weights_in_registers() -> None:
    """Of the menu only the shape with one tile for each warpgroup at one token: 8 experts of 32 tiles on 128 CTAs."""
    assert {(spec.hidden, spec.inter, spec.engine) for spec in LISTS if spec.work_list.held} == {(2048, 512, "hopper")}
