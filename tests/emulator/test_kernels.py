"""The shipped lead kernels, one route: right, clean under every check, and damaged copies of them that are found out."""

from __future__ import annotations

import re

import numpy as np
import pytest

from emulator import Checks, Limits, Result, emulate
from megamoe_aot.spec import ARCHS
from tests.built import lead, lead_spec
from tests.emulator.route import Problem

STRICT = Checks(scramble_addresses=True)


def run(problem: Problem, ptx: str, **options: object) -> Result:
    arguments: dict[str, object] = {"clusters": [0], "checks": STRICT, "limits": Limits(instructions=400_000)} | options
    return emulate(ptx, problem.launch(), problem.buffers(), problem.parameters(), **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_one_route(arch: str) -> None:
    problem = Problem(lead_spec(arch))
    result = run(problem, lead(arch).compiled.ptx)
    assert result.findings == [], result.report()
    row = problem.out.view(np.uint16)[: problem.spec.hidden]
    np.testing.assert_array_equal(row, problem.reference())
    assert problem.stored_ids.view(np.int32)[0] == problem.ids[0]
    np.testing.assert_allclose(problem.stored_weights.view(np.float32)[0], problem.weights[0], rtol=1e-6)
    assert (problem.out.view(np.uint16)[problem.spec.hidden :] == 0xFFFF).all(), "the other routes are other clusters' work"
    # what was moved is what the work split implies
    split, cluster = problem.spec.split, problem.spec.cluster
    weights = (split.stages1 * 128 + split.stages2 * split.tile2_rows) * 128 * cluster
    assert result.counts.bytes["TMA"] == weights
    assert result.counts.bytes["st.async"] == cluster * split.parts * split.tiles1 * 512


EDITS = {
    "a proxy fence dropped": (r"fence\.proxy\.async\.shared::cta;", "", {"E-PROXY"}),
    "the init fence dropped": (r"fence\.mbarrier_init\.release\.cluster;", "", {"E-MBAR-INITFENCE"}),
    "cluster scope narrowed": (r"acquire\.cluster\.shared", "acquire.cta.shared", {"E-SCOPE"}),
    "dependency wait dropped": (r"griddepcontrol\.wait;", "", {"E-PDL"}),
    "bytes of the exchange miscounted": (r"(arrive\.expect_tx[^;]*, )8192;", r"\g<1>8208;", {"E-DEADLOCK"}),
    "a descriptor bit flipped": (str(4611756662049538048), str(4611756662049538048 ^ 1 << 61), {"E-DESC"}),
    "a store moved by a word": (r"st\.shared\.v4\.b32 \[(%r\d+)\]", r"st.shared.v4.b32 [\1+4]", {"E-SMEM"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_damaged_blackwell_kernel(name: str) -> None:
    pattern, replacement, wanted = EDITS[name]
    ptx, count = re.subn(pattern, replacement, lead("sm_100f").compiled.ptx, count=1)
    assert count == 1, "the kernel has changed: choose another edit"
    result = run(Problem(lead_spec("sm_100f")), ptx)
    assert wanted <= result.ids(), result.report()
