"""The list structure's kernels of both engines: emulated calls against the reference, and what the sanitizer says of them."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import pytest
import torch

from emulator import OFF
from megamoe_aot.spec import ENGINES, KernelSpec
from megamoe_aot.work_list import POOL_COUNTERS
from tests.list_call import ListCall, compile_kernels
from verification.problem import Outcome

SAME_BITS = 0.999
"""Share of ``out`` with the reference's bits. Not all: exp's last bit, and on Blackwell the tensor core's, are not the reference's."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A small spec, a call of it, a schedule."""

    name: str
    tokens: int
    processors: int
    changes: dict[str, Any]
    """Of :data:`SMALL`."""
    policy: str = "random"

    def spec(self, arch: str) -> KernelSpec:
        fields = {"columns": 8} | SMALL | self.changes
        return KernelSpec(arch=arch, structure="list", tokens=fields["columns"], **fields)


SMALL = {"hidden": 1024, "inter": 128, "experts": 32, "top_k": 2}
"""Two K parts of 4 K blocks in GEMM1, one K block in GEMM2: a W2 stage holds a single block."""
ONE = Case("one token", 1, 4, {})
EIGHT = Case("eight tokens", 8, 8, {"layout": "row_major"}, "async-last")
POOL = Case("one part, a pool", 1, 6, {"inter": 512, "top_k": 8})
IDLE = Case("idle CTA", 1, 73, {"inter": 384, "top_k": 6})
"""144 W1 units, two for each of 72 CTAs. Unlike :data:`CASES` emulated without the sanitizer."""
HOPPER_CASES = (
    Case("nothing held, two warpgroups", 1, 5, {"hidden": 3072, "top_k": 6, "inter": 384}, "starve-warp"),
    Case("five blocks, one warpgroup", 2, 4, {"inter": 640}),
    Case("seven blocks, one after another", 1, 5, {"inter": 896}, "async-last"),
)
"""How Hopper's MMA warps run W2 tiles, beside those of :data:`CASES`, which hold them: see ``ListPlan.held`` and ``AHEAD_STAGES``."""
CASES = (
    ONE,
    EIGHT,
    Case(
        "groups, gate first, fp32 logits",
        2,
        4,
        {
            "experts": 128,
            "scoring": "sigmoid_bias_grouped",
            "groups": 4,
            "top_groups": 2,
            "layout": "row_major",
            "w13_order": "gate_up",
            "logits_dtype": "fp32",
        },
        "starve-warp",
    ),
    Case(
        "16 columns, three blocks, softmax, clamp, power-of-two scales",
        2,
        4,
        {"inter": 384, "columns": 16, "scoring": "softmax", "limit": 2.0, "ue8m0": True},
        "starve-cta",
    ),
    POOL,
)
"""Each kernel takes seconds to compile and to emulate, so a case shows several things; ``verification run`` has menu entries."""


@functools.cache
def codes() -> dict[KernelSpec, str]:
    """The PTX of every case."""
    wanted = list(dict.fromkeys(case.spec(arch).code for arch in ENGINES for case in CASES))
    wanted += [case.spec("sm_90a").code for case in (*HOPPER_CASES, IDLE)]
    return dict(zip(wanted, compile_kernels(wanted), strict=True))


def ptx_of(case: Case, arch: str) -> str:
    return codes()[case.spec(arch).code]


@functools.cache
def emulated(name: str, arch: str) -> tuple[ListCall, Outcome]:
    """The first launch of a case's call."""
    case = next(case for case in (*CASES, *HOPPER_CASES) if case.name == name)
    call = ListCall(case.spec(arch), case.tokens, case.processors)
    return call, call.emulate(ptx_of(case, arch), policy=case.policy)


def epochs(call: ListCall) -> tuple[int, int]:
    """(tickets, epoch) of the scratch memory's header."""
    tickets, epoch = call.scratch[:8].view(np.uint32).tolist()
    return tickets, epoch


def check(call: ListCall, outcome: Outcome) -> None:
    """The contract, the bits, and no objection of the sanitizer."""
    assert not outcome.objections, "\n".join(map(str, outcome.objections))
    report, share = call.judge(outcome)
    assert report.ok, report.reason
    assert report.ids_equal
    assert share >= SAME_BITS


@pytest.mark.parametrize("arch", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_reference(case: Case, arch: str) -> None:
    call, outcome = emulated(case.name, arch)
    check(call, outcome)
    assert epochs(call) == (0, 1)


@pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda case: case.name)
def test_hoppers_ways_to_run_a_tile(case: Case) -> None:
    check(*emulated(case.name, "sm_90a"))


@pytest.mark.parametrize("arch", ENGINES)
def test_launches_on_one_scratch(arch: str) -> None:
    """Other inputs each time, and the epoch passes its end; 0 is nobody's epoch, and even and odd ones take turns."""
    calls = [ListCall(ONE.spec(arch), 1, 4, seed=seed) for seed in (0, 1, 0)]
    assert not torch.equal(calls[0].routing.ids, calls[1].routing.ids)
    scratch = calls[0].scratch
    scratch[4:8].view(np.uint32)[0] = 0xFFFFFFFE
    for number, (call, epoch) in enumerate(zip(calls, (0xFFFFFFFF, 2, 3), strict=True)):
        call.scratch = scratch
        check(call, call.emulate(ptx_of(ONE, arch), seed=number))
        assert epochs(call) == (0, epoch)


def taken(call: ListCall) -> list[int]:
    """What launches of even and of odd epoch have taken from the pool, in chunks."""
    return call.scratch[POOL_COUNTERS : POOL_COUNTERS + 8].view(np.uint32).tolist()


@pytest.mark.parametrize("arch", ENGINES)
def test_the_pool_is_used_and_its_next_counter_is_zero(arch: str) -> None:
    """768 stages, of which the pool holds a fifth: 76 tiles in chunks of two. Each of the six CTAs also asks once in vain."""
    call, _ = emulated(POOL.name, arch)
    assert epochs(call) == (0, 1)
    assert taken(call) == [0, 38 + 6]


@pytest.mark.parametrize("arch", ENGINES)
def test_the_pools_counters_take_turns_also_where_epochs_wrap(arch: str) -> None:
    calls = [ListCall(POOL.spec(arch), 1, 6, seed=seed) for seed in (0, 1)]
    scratch = calls[0].scratch
    scratch[4:8].view(np.uint32)[0] = 0xFFFFFFFE
    for call, epoch, counters in zip(calls, (0xFFFFFFFF, 2), ([0, 44], [44, 0]), strict=True):
        call.scratch = scratch
        check(call, call.emulate(ptx_of(POOL, arch)))
        assert epochs(call) == (0, epoch) and taken(call) == counters


def test_an_idle_cta_asks_for_no_weights() -> None:
    """Nobody would wait for its boxes, and its shared memory is another CTA's when they land. It stands where a unit's number would.

    With the default schedule: boxes that nobody waits for must land to be seen.
    """
    call = ListCall(IDLE.spec("sm_90a"), 1, IDLE.processors)
    outcome = call.emulate(ptx_of(IDLE, "sm_90a"), checks=OFF)
    report, _ = call.judge(outcome)
    assert report.ok, report.reason
    asked = set()
    for cta, timeline in outcome.result.timelines.items():
        if any(event.kind == "load" and event.label.startswith("stage") for event in timeline.events):
            asked.add(cta)
    assert asked == set(range(72))


@pytest.mark.parametrize("arch", ENGINES)
def test_rows_do_not_depend_on_the_other_tokens(arch: str) -> None:
    """Bit for bit, nor on the number of CTAs."""
    spec = EIGHT.spec(arch)
    alone = ListCall(spec, 1, 5).emulate(ptx_of(EIGHT, arch))
    _, together = emulated(EIGHT.name, arch)
    assert torch.equal(alone.out.view(torch.int16), together.out[: spec.top_k].view(torch.int16))


def without(pattern: str, ptx: str) -> str:
    """``ptx`` without the instructions that match."""
    changed, number = re.subn(pattern, "", ptx)
    assert number, f"no {pattern}"
    return changed


DAMAGES = [
    (r"fence\.proxy\.async\.shared::cta;", "sm_90a", "E-PROXY"),
    (r"fence\.proxy\.async\.shared::cta;", "sm_100f", "E-PROXY"),
    (r"fence\.mbarrier_init\.release\.cluster;", "sm_100f", "E-MBAR-INITFENCE"),
    (r"tcgen05\.fence::after_thread_sync;", "sm_100f", "E-T5-ORDER"),
    (r"tcgen05\.fence::before_thread_sync;", "sm_100f", "E-T5-ORDER"),
    (r"tcgen05\.wait::ld\.sync\.aligned;", "sm_100f", "E-T5-ORDER"),
    (r"tcgen05\.dealloc[^;]*;", "sm_100f", "E-T5-ALLOC"),
]


@pytest.mark.parametrize(("pattern", "arch", "finding"), DAMAGES)
def test_damage_is_found(pattern: str, arch: str, finding: str) -> None:
    """The sanitizer sees this program: what it says nothing about above is not out of its reach."""
    call = ListCall(ONE.spec(arch), 1, 4)
    outcome = call.emulate(without(pattern, ptx_of(ONE, arch)))
    assert any(found.id == finding for found in outcome.objections), outcome.result.report()


@pytest.mark.parametrize("inter", range(128, 2177, 128))
def test_w2_scales_are_fetched_in_whole_units_and_no_more(inter: int) -> None:
    """Whichever tile: the 16-byte units from the one in which its scales begin to the one in which they end. The last ends the tensor."""
    from kernels.work_list import producer

    spec = KernelSpec(1024, inter, 32, 2, "sm_100f", structure="list", columns=8, tokens=8)
    plan = spec.work_list
    for row in range(spec.experts * plan.blocks1):
        begin, end = 4 * row * plan.blocks2, 4 * (row + 1) * plan.blocks2
        fetched = producer.w2_scale_bytes(plan)
        if plan.blocks2 % 4 == 3 and begin % 16 >= 8:  # producer.load_tile
            fetched += 16
        assert begin // 16 * 16 + fetched == -(-end // 16) * 16 <= 4 * spec.experts * plan.blocks1 * plan.blocks2
        assert begin % 16 + end - begin <= plan.slot_bytes


@pytest.mark.parametrize("columns", range(8, 65, 8))
def test_accumulator_columns_are_read_once(columns: int) -> None:
    """In loads of 8, 16, 32 or 64 columns: tcgen05.ld takes powers of two."""
    from kernels.work_list import blackwell

    loads = blackwell.column_loads(columns)
    assert [column for first, count in loads for column in range(first, first + count)] == list(range(columns))
    assert all(count in (8, 16, 32, 64) for _, count in loads)
