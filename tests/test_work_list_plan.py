"""Who runs which W2 tile, and the plan's bounds: kernels/work_list/common.py evaluated with plain integers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
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


@pytest.fixture(scope="module", autouse=True)
def integers() -> Iterator[None]:
    """DSL values become integers; nothing wraps here but what the kernels' selects throw away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "ptx", SimpleNamespace(select=lambda condition, a, b: a if condition else b))
        patch.setattr(common, "Uint32", int)
        yield


def cta(spec: KernelSpec, index: int, launched: int, tokens: int) -> common.Cta:
    return common.Cta(base=0, lane=0, warp=0, cta=index, grid=common.active_ctas(spec, launched, tokens), tokens=tokens)


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
    return spec, tokens, experts, draw(st.integers(tokens, 160))


@given(calls())
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
def test_units_are_dealt_out_once(call: tuple[KernelSpec, int, int, int]) -> None:
    """And counted right: a CTA's W2 stages follow those of its units in the ring. An idle CTA has neither a unit nor a first box."""
    spec, tokens, experts, launched = call
    plan: Any = spec.work_list
    dealt = []
    for index in range(launched):
        at = cta(spec, index, launched, tokens)
        size = common.deal_size(spec, tokens)
        mine = list(range(common.first_deal(at), common.deals(spec, at, experts), at.grid))
        assert common.unit_count(spec, at, experts) == len(mine) * size
        assert (common.first_deal(at) * size < spec.top_k * plan.units) == bool(mine and mine[0] * size < spec.top_k * plan.units)
        assert bool(mine) <= (index < at.grid)
        dealt += mine
    assert sorted(dealt) == list(range(experts * plan.units // common.deal_size(spec, tokens)))


@given(calls())
def test_the_pool_is_for_long_launches(call: tuple[KernelSpec, int, int, int]) -> None:
    spec, tokens, experts, launched = call
    plan: Any = spec.work_list
    at = cta(spec, 0, launched, tokens)
    stages = experts * (plan.units * plan.stages1 + plan.tiles * plan.stages2)
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
    assert plan.warps == (14 if spec.engine == "hopper" else 15)
    assert plan.barrier_counts["free"] == (2, 4 * plan.tile_groups) and plan.barrier_counts["hidden"] == (2, plan.hidden_warps)


def test_helpers_of_the_menu() -> None:
    """Six and twelve K blocks keep eight hidden warps busy; where there are two or four, Hopper pairs tiles if the ring allows."""
    found = {(s.inter, s.columns): (s.work_list.hidden_warps, s.work_list.tile_groups) for s in LISTS if s.engine == "hopper"}
    assert found == {
        (512, 8): (4, 2),
        (512, 16): (4, 2),
        (256, 8): (4, 2),
        (256, 16): (4, 1),
        (768, 8): (8, 1),
        (768, 16): (8, 1),
        (1536, 8): (8, 1),
        (1536, 16): (8, 1),
    }
