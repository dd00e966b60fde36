"""The list structure and ``forward`` on a real GPU: agreement, streams, graphs, epochs that wrap around, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import megamoe_aot as mm
from benchmarks.harness import Inputs, Outputs, bits, enqueue, run, same
from megamoe_aot import driver, reference
from megamoe_aot.agreement import compare
from megamoe_aot.arch import runs_on
from megamoe_aot.loader import manifest
from megamoe_aot.menu import LEAD, QWEN3_30B, ModelShape, specs_of
from megamoe_aot.spec import KernelSpec
from megamoe_aot.weights import Packed
from tests.data import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CHOSEN = ((LEAD, "trtllm_gen"), (QWEN3_30B, "row_major"))
"""One shape whose units are all of K, one with two K parts; each in another layout."""
MOST = 16
EPOCH_AT = 4
"""Offset of the u32 epoch in a scratch block."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """Both structures of one entry, bound to the same weights."""

    spec: KernelSpec
    """Of the cluster entry."""
    packed: Packed
    list: mm.Layer
    cluster: mm.Layer

    @property
    def device(self) -> torch.device:
        return self.packed.w13.device

    def problem(self, tokens: int, seed: int = 0) -> Problem:
        return Problem.of(self.spec, tokens, seed=seed)

    def inputs(self, tokens: int, seed: int = 0) -> Inputs:
        problem = self.problem(tokens, seed)
        return Inputs(problem.x(), problem.logits(torch.bfloat16), problem.bias()).to(self.device)

    def bind(self, structure: str = "list") -> mm.Layer:
        """A new layer: its scratch is its own."""
        return load(self.spec, self.device, structure).bind(*self.packed)


def load(spec: KernelSpec, device: torch.device, structure: str, tokens: int = MOST) -> mm.Kernel:
    options = {name: getattr(spec, name) for name in ("layout", "logits_dtype", "w13_order", "scoring")}
    return mm.load_kernel(spec.hidden, spec.inter, spec.experts, spec.top_k, tokens, device=device, structure=structure, **options)


@pytest.fixture(scope="module", params=CHOSEN, ids=lambda chosen: f"{chosen[0].model}-{chosen[1]}")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    shape: ModelShape
    shape, layout = request.param
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    built = {entry.spec for entry in manifest().entries}
    specs = [s for s in specs_of(shape) if s in built and runs_on(s.arch, capability) and (s.layout, s.logits_dtype) == (layout, "bf16")]
    if {s.columns for s in specs} != {0, 8, 16}:
        pytest.skip(f"the artifacts lack cluster or list entries of {shape.model}, {layout}, for compute capability {capability}")
    spec = next(s for s in specs if s.structure == "cluster")
    packed = Problem.of(spec, 0).packed(layout=layout, w13_order=spec.w13_order, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield Subject(spec, packed, *(load(spec, device, structure).bind(*packed) for structure in ("list", "cluster")))


def capture(stream: torch.cuda.Stream, layer: mm.Layer, inputs: Inputs, outputs: Outputs) -> torch.cuda.CUDAGraph:
    """A graph of one launch, captured on ``stream`` after it was prepared."""
    layer.prepare(stream)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        enqueue(layer, inputs, outputs)
    return graph


def variant(layer: mm.Layer, tokens: int) -> KernelSpec:
    return layer._variants[tokens].spec


# Agreement -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 8, 16])
def test_agrees_with_the_reference(subject: Subject, tokens: int) -> None:
    """Tokens are MMA columns, K blocks ascend; the K parts are the plan's."""
    plan = variant(subject.list, tokens).work_list
    assert plan.columns == (8 if tokens <= 8 else 16)
    outputs = run(subject.list, subject.inputs(tokens))
    arithmetic = "hopper" if subject.spec.engine == "hopper" else "exact"
    options: dict[str, Any] = {"arithmetic": arithmetic, "order": "ascending", "parts": plan.parts}
    report = compare(subject.problem(tokens).reference(logits_dtype=torch.bfloat16, **options), *outputs.cpu())
    assert report.ok and outputs.guards_intact(), report.reason


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_both_structures_agree_within_the_contracts_bounds(subject: Subject, tokens: int) -> None:
    """They add in different orders: the list kernel against the cluster's reference. Routing is the same bit by bit."""
    inputs = subject.inputs(tokens)
    ours, theirs = run(subject.list, inputs), run(subject.cluster, inputs)
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(bits(ours.weights), bits(theirs.weights))
    report = compare(subject.problem(tokens).reference(logits_dtype=torch.bfloat16), *ours.cpu())
    assert report.ok, report.reason


def test_same_bits_on_every_run_alone_and_in_every_batch(subject: Subject) -> None:
    """Also across the two list kernels: 8 columns up to M = 8, 16 above."""
    inputs = subject.inputs(MOST)
    whole = run(subject.list, inputs)
    for repeat in range(20):
        assert same(whole, run(subject.list, inputs, pdl=repeat % 2 == 0)), repeat
    for tokens in (1, 2, 8, 9):
        part = run(subject.list, inputs.rows(list(range(tokens))))
        for token in range(tokens):
            pairs = zip(whole.token(token), part.token(token), strict=True)
            assert all(torch.equal(bits(a), bits(b)) for a, b in pairs), (tokens, token)


def test_the_trigger_changes_no_bit(subject: Subject) -> None:
    """What follows is another kernel of ours, which waits."""
    inputs = subject.inputs(3)
    want = run(subject.list, inputs)
    results = [run(subject.list, inputs, trigger=True) for _ in range(50)]
    torch.cuda.synchronize()
    assert all(same(want, got) for got in results)


# Streams and graphs --------------------------------------------------------------------------------------------------


def test_two_streams_at_once(subject: Subject) -> None:
    batches = [subject.inputs(4, seed) for seed in (0, 1)]
    want = [run(subject.list, batch) for batch in batches]
    streams = [torch.cuda.Stream(subject.device) for _ in batches]
    results: list[list[Outputs]] = [[Outputs(subject.spec, 4, subject.device) for _ in range(100)] for _ in batches]
    torch.cuda.synchronize()
    for number in range(100):
        for stream, batch, into in zip(streams, batches, results, strict=True):
            enqueue(subject.list, batch, into[number], stream=stream)
    torch.cuda.synchronize()
    for expected, into in zip(want, results, strict=True):
        assert all(same(expected, got) for got in into)


def test_a_thousand_replays_with_changed_inputs(subject: Subject) -> None:
    batches = [subject.inputs(4, seed) for seed in range(4)]
    stream = torch.cuda.Stream(subject.device)
    static, outputs = batches[0].clone(), Outputs(subject.spec, 4, subject.device)
    want = [run(subject.list, Inputs(batch.x, batch.logits, static.bias)) for batch in batches]
    torch.cuda.synchronize()
    graph = capture(stream, subject.list, static, outputs)
    differing = torch.zeros((), dtype=torch.int64, device=subject.device)
    for replay in range(1000):
        static.copy_(batches[replay % 4])
        outputs.poison()
        graph.replay()
        expected = want[replay % 4]
        for a, b in ((outputs.out, expected.out), (outputs.ids, expected.ids), (outputs.weights, expected.weights)):
            differing += (bits(a) != bits(b)).sum()
    assert int(differing) == 0 and outputs.guards_intact()


def test_graphs_captured_on_two_streams_replay_at_once(subject: Subject) -> None:
    batches = [subject.inputs(2, seed) for seed in (0, 1)]
    want = [run(subject.list, batch) for batch in batches]
    outputs = [Outputs(subject.spec, 2, subject.device) for _ in batches]
    streams = [torch.cuda.Stream(subject.device) for _ in batches]
    torch.cuda.synchronize()
    graphs = [capture(s, subject.list, b, o) for s, b, o in zip(streams, batches, outputs, strict=True)]
    for _ in range(200):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(same(a, b) for a, b in zip(want, outputs, strict=True))


def test_a_capture_without_prepare_is_refused(subject: Subject) -> None:
    layer, stream = subject.bind(), torch.cuda.Stream(subject.device)
    inputs, outputs = subject.inputs(2), Outputs(subject.spec, 2, subject.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), pytest.raises(mm.CaptureError, match=r"call layer\.prepare"):
        enqueue(layer, inputs, outputs)
    captured = capture(stream, layer, inputs, outputs)
    captured.replay()
    assert same(outputs, run(subject.list, inputs)), "the refused capture did no harm"


def test_scratch_is_allocated_beside_another_streams_capture(subject: Subject) -> None:
    layer, stream = subject.bind(), torch.cuda.Stream(subject.device)
    inputs, outputs = subject.inputs(2), Outputs(subject.spec, 2, subject.device)
    subject.list.prepare(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        enqueue(subject.list, inputs, outputs)
        layer.prepare(torch.cuda.Stream(subject.device))
    graph.replay()
    assert same(outputs, run(subject.list, inputs))


# Epochs --------------------------------------------------------------------------------------------------------------


def scratch_address(layer: mm.Layer, tokens: int) -> int:
    """The block of torch's current stream."""
    scratch = layer._variants[tokens].scratch
    assert scratch is not None
    with driver.active(layer._context):
        return scratch.address(torch.cuda.current_stream().cuda_stream)


def read_epoch(layer: mm.Layer, tokens: int) -> int:
    torch.cuda.synchronize()
    buffer = bytearray(4)
    with driver.active(layer._context):
        driver.call("cuMemcpyDtoH", buffer, scratch_address(layer, tokens) + EPOCH_AT, 4)
    return int.from_bytes(buffer, "little")


def set_epoch(layer: mm.Layer, tokens: int, epoch: int) -> None:
    torch.cuda.synchronize()
    with driver.active(layer._context):
        driver.call("cuMemcpyHtoD", scratch_address(layer, tokens) + EPOCH_AT, epoch.to_bytes(4, "little"), 4)


@pytest.mark.parametrize("tokens", [3, 12])
def test_epochs_count_launches_and_wrap_around_zero(subject: Subject, tokens: int) -> None:
    """0 is the epoch of memory that was never written: no launch may have it. Even and odd ones take turns."""
    layer = subject.bind()
    inputs = subject.inputs(tokens)
    want = run(subject.list, inputs)
    layer.prepare()
    assert read_epoch(layer, tokens) == 0
    assert same(want, run(layer, inputs)) and read_epoch(layer, tokens) == 1
    set_epoch(layer, tokens, 0xFFFFFFFD)
    for expected in (0xFFFFFFFE, 0xFFFFFFFF, 2, 3, 4):
        batch = subject.inputs(tokens, seed=expected % 3)
        assert same(run(subject.list, batch), run(layer, batch))
        assert read_epoch(layer, tokens) == expected


# forward -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["list", "cluster"])
@pytest.mark.parametrize("with_shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_forward_has_the_bits_of_the_reference_sum(subject: Subject, tokens: int, with_shared: bool, structure: str) -> None:
    layer = getattr(subject, structure)
    inputs = subject.inputs(tokens)
    shared = torch.randn(tokens, subject.spec.hidden, device=subject.device).bfloat16() if with_shared else None
    got = run(layer, inputs)
    want = reference.finalize(got.out.cpu(), got.weights.cpu(), None if shared is None else shared.cpu())
    for pdl, trigger in ((True, False), (False, False), (True, True), (False, True), (True, False)):
        y = layer.forward(inputs.x, inputs.logits, inputs.bias, shared, pdl=pdl, trigger=trigger)
        assert torch.equal(bits(y.cpu()), bits(want))


@pytest.mark.parametrize("trigger", [False, True], ids=["", "trigger"])
def test_forward_back_to_back(subject: Subject, trigger: bool) -> None:
    """Each launch may start while the one before it runs; temporaries go from hand to hand."""
    batches = [subject.inputs(4, seed) for seed in range(4)]
    want = [subject.list.forward(b.x, b.logits, b.bias, pdl=False).clone() for b in batches]
    torch.cuda.synchronize()
    got = [subject.list.forward(b.x, b.logits, b.bias, trigger=trigger) for _ in range(50) for b in batches]
    torch.cuda.synchronize()
    assert all(torch.equal(bits(y), bits(want[number % 4])) for number, y in enumerate(got))


def test_forward_in_a_graph_and_on_a_foreign_stream(subject: Subject) -> None:
    inputs, stream = subject.inputs(3), torch.cuda.Stream(subject.device)
    want = subject.list.forward(inputs.x, inputs.logits, inputs.bias)
    subject.list.prepare(stream)
    torch.cuda.synchronize()
    for _ in range(20):
        y = subject.list.forward(inputs.x, inputs.logits, inputs.bias, stream=stream)
        stream.synchronize()
        assert torch.equal(bits(y), bits(want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = subject.list.forward(inputs.x, inputs.logits, inputs.bias)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(bits(y), bits(want))


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_grid_that_cannot_be_resident_is_refused_and_harms_nothing(subject: Subject) -> None:
    """One CTA more than there are SMs: the driver must refuse, not start a launch that waits for itself."""
    layer, inputs = subject.bind(), subject.inputs(3)
    want = run(subject.list, inputs)
    assert same(want, run(layer, inputs))
    bound = layer._variants[3]
    too_many = dataclasses.replace(bound.code, processors=bound.code.processors + 1)
    with mock.patch.object(layer, "_variants", (dataclasses.replace(bound, code=too_many),) * len(layer._variants)):
        with pytest.raises(mm.ResidencyError, match="was not started"):
            run(layer, inputs)
        assert read_epoch(layer, 3) == 1
    assert same(want, run(layer, inputs)) and read_epoch(layer, 3) == 2


def test_the_grid_is_the_devices_sms(subject: Subject) -> None:
    kernel = load(subject.spec, subject.device, "list")
    assert kernel.processors == driver.processors(kernel.device, driver.primary_context(kernel.device))
    assert MOST <= kernel.processors <= torch.cuda.get_device_properties(subject.device).multi_processor_count


def test_too_few_sms_are_refused_at_load(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "processors", lambda device, context: MOST - 1)
    monkeypatch.setattr(mm.loader, "_cache", {})
    with pytest.raises(mm.ResidencyError, match=f"at least {MOST} SMs"):
        load(subject.spec, subject.device, "list")


def test_a_green_contexts_stream_is_refused_or_served(subject: Subject) -> None:
    """A stream that owns 16 SMs cannot hold the grid. The launch must fail with our error; where the driver has no green
    contexts there is nothing to test."""
    api = driver.bindings()
    device = driver.handle(subject.list._device)
    with contextlib.ExitStack() as stack:
        try:
            whole = driver.call("cuDeviceGetDevResource", device, api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
            parts, _, _ = driver.call("cuDevSmResourceSplitByCount", 1, whole, 0, MOST)
            described = driver.call("cuDevResourceGenerateDesc", parts, 1)
            green = driver.call("cuGreenCtxCreate", described, device, api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
            stack.callback(driver.call, "cuGreenCtxDestroy", green)
            stream = int(driver.call("cuGreenCtxStreamCreate", green, api.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        except mm.DriverCallError as error:
            pytest.skip(f"no green context here: {error}")
        inputs, outputs = subject.inputs(2), Outputs(subject.spec, 2, subject.device)
        torch.cuda.synchronize()
        with pytest.raises(mm.ResidencyError, match="was not started"):
            enqueue(subject.bind(), inputs, outputs, stream=stream)
        torch.cuda.synchronize()
        assert outputs.untouched()
        assert same(run(subject.list, inputs), run(subject.list, inputs)), "the context lives"
