"""Two entries on a real GPU, in short: agreement with the reference, a captured graph, PDL and refusals.

The whole menu, more inputs and the hard ones: ``python -m benchmarks.h200_correctness``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks import checks, cuda_checks
from benchmarks.expected import Call, Oracle
from benchmarks.h200_correctness import same_arithmetic
from megamoe_aot.arch import runs_on
from megamoe_aot.loader import manifest
from megamoe_aot.menu import LEAD, QWEN3_30B, ModelShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CHOSEN = ((LEAD, "trtllm_gen"), (QWEN3_30B, "row_major"))
"""The two models of the menu, each in another layout."""


@pytest.fixture(scope="module", params=CHOSEN, ids=lambda chosen: f"{chosen[0].model}-{chosen[1]}")
def subject(request: pytest.FixtureRequest) -> Iterator[checks.Subject]:
    shape: ModelShape
    shape, layout = request.param
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    entries = (e for e in manifest().entries if (e.model, e.parallel) == (shape.model, shape.parallel) and e.spec.layout == layout)
    spec = next((e.spec for e in entries if runs_on(e.spec.arch, capability)), None)
    if spec is None:
        pytest.skip(f"the artifacts have no {layout} entry of {shape.model} for compute capability {capability[0]}.{capability[1]}")
    with ThreadPoolExecutor(4) as pool, torch.cuda.stream(torch.cuda.Stream(device)):
        oracle = Oracle(same_arithmetic(spec), pool)
        packed = oracle.weights_problem().packed(layout=spec.layout, w13_order=spec.w13_order, device=device)
        kernel = cuda_checks.load(spec, device)
        yield checks.Subject(kernel, packed, oracle, kernel.bind(*packed))


@pytest.mark.parametrize("tokens", [1, 3])
def test_agrees_with_the_reference(subject: checks.Subject, tokens: int) -> None:
    assert checks.agreement(subject, tokens, seeds=(0, 1))["problems"] == []


def test_same_bits_on_every_run_and_in_every_batch(subject: checks.Subject) -> None:
    inputs = subject.inputs(Call(3, 0))
    assert checks.repeats(subject.layer, inputs, 10) + checks.batch_invariance(subject.layer, inputs) == []


def test_same_bits_in_a_captured_graph_with_changed_inputs(subject: checks.Subject) -> None:
    assert cuda_checks.graph(subject.layer, [subject.inputs(Call(3, seed)) for seed in range(3)]) == []


@pytest.mark.parametrize("case", ["zero_token", "nan_token", "nan_logits", "all_ties", "nan_w13"])
def test_hard_inputs(subject: checks.Subject, case: str) -> None:
    assert checks.hard_input(subject, case) == []


def test_waits_for_its_predecessor(subject: checks.Subject) -> None:
    assert cuda_checks.pdl(subject, cuda_checks.SlowPredecessor(subject.device)) == []


def test_no_tokens_launch_nothing(subject: checks.Subject) -> None:
    assert checks.empty_batch(subject.layer, subject.inputs(Call(2, 0))) == []


def test_bad_input_is_refused_and_the_context_lives(subject: checks.Subject) -> None:
    assert cuda_checks.bad_calls(subject) + cuda_checks.bad_queries(subject) == []
    assert cuda_checks.damaged_artifacts(subject, manifest()) == []
