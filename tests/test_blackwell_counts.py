"""The counting script: what it derives from specs and from an emulated launch's events."""

from __future__ import annotations

from benchmarks import blackwell_counts
from emulator import Result
from emulator.report import Counts, Timeline
from megamoe_aot.menu import menu_specs
from megamoe_aot.spec import ARCHS
from verification import run


def test_chains_and_roles_fit_every_kernel() -> None:
    """Chains name barriers that exist (asserted inside); every warp has one role."""
    for _, spec in menu_specs():
        assert blackwell_counts.chain_of(spec)
        warps = [warp for role in run.ROLES[spec.structure, spec.arch].values() for warp in role]
        assert sorted(warps) == list(range(spec.block_threads // 32))


def test_one_kernel_of_each_structure_and_arch() -> None:
    found = [(spec.arch, spec.structure, spec.columns) for spec in blackwell_counts.specs(ARCHS)]
    assert sorted(found) == sorted((arch, *rest) for arch in ARCHS for rest in (("cluster", 0), ("list", 8)))


def test_boxes_in_flight() -> None:
    """The most at a time in any one CTA: loads that end where others begin are not together; scales and MMAs are no boxes."""
    first, second = Timeline(), Timeline()
    for cta, start, end in ((0, 0, 5), (0, 1, 3), (0, 3, 8), (1, 0, 9), (1, 1, 9)):
        first.add("load", cta, "load", start, end, f"stage[{start}] (offset 0)")
    first.add("load", 0, "load", 0, 9, "slot[0] (offset 8)")
    first.add("mma", 0, "mma", 0, 9, "stage[0]")
    second.add("load", 1, "load", 2, 4, "stage[0] (offset 0)")
    assert blackwell_counts.most_boxes(Result([], Counts(), {0: first, 1: second}, 0)) == 2
    second.add("load", 1, "load", 3, 4, "stage[1] (offset 16384)")
    second.add("load", 1, "load", 3, 5, "stage[2] (offset 32768)")
    assert blackwell_counts.most_boxes(Result([], Counts(), {0: first, 1: second}, 0)) == 3
