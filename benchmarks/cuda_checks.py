"""Checks that need a GPU: graphs, programmatic dependent launch, streams, threads, foreign tensors and refusals."""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import megamoe_aot as mm
from megamoe_aot import loader
from megamoe_aot.loader import load_entry
from megamoe_aot.manifest import FILE_NAME, Manifest
from megamoe_aot.menu import TOKEN_COUNTS
from megamoe_aot.reference import finalize as reference_finalize

from .checks import Problems, Subject
from .cuda_source import architecture, compile_cuda, launch_cuda
from .expected import Call
from .harness import BoundLayer, Inputs, Outputs, bits, enqueue, run, same
from .timing import capture

GRAPH_TOKENS = 4
DELAY_NANOSECONDS = 2_000_000
"""How long the slow predecessor idles: far longer than the host needs to enqueue what follows it."""


# --------------------------------------------------------------------------------------------------------------------- Graphs


def graph(layer: BoundLayer, batches: list[Inputs]) -> Problems:
    """A captured launch, replayed with other inputs copied into its static buffers, gives the bits of an eager launch.

    The bias is a weight: it stays the first batch's.
    """
    static = batches[0].clone()
    outputs = Outputs(layer.spec, static.tokens, static.x.device)
    enqueue(layer, static, outputs)
    captured = capture(lambda: enqueue(layer, static, outputs))
    problems = []
    for number, batch in enumerate([*batches[1:], batches[0]]):
        static.copy_(batch)
        outputs.poison()
        captured.replay()
        if not same(outputs, run(layer, Inputs(batch.x, batch.logits, static.bias))):
            problems.append(f"replay {number} differs from an eager launch of the same inputs")
        if not outputs.guards_intact():
            problems.append(f"replay {number} wrote outside the outputs")
    return problems


# ----------------------------------------------------------------------------------------- Programmatic dependent launch


class SlowPredecessor:
    """The kernels of pdl.cu: a predecessor that triggers its dependents at once and writes late, and a reader that does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._code = compile_cuda("pdl.cu", architecture(device))
        self._late, self._early = (self._code.get_kernel(name) for name in ("late_copy", "early_copy"))
        scratch = torch.zeros(16, dtype=torch.uint8, device=device)
        self.late_copy(scratch, scratch, 0)  # load both now, outside the measurements
        self.early_copy(scratch, scratch)
        torch.cuda.synchronize()

    def late_copy(self, to: torch.Tensor, source: torch.Tensor, delay: int = DELAY_NANOSECONDS) -> None:
        """Trigger, wait ``delay`` nanoseconds, copy ``source`` to ``to``; bytes a multiple of 16."""
        launch_cuda(self._late, 1, 256, to.data_ptr(), source.data_ptr(), np.uint32(_words(to)), np.uint32(delay))

    def early_copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once, launched with the PDL attribute and without griddepcontrol.wait."""
        launch_cuda(self._early, 1, 256, to.data_ptr(), source.data_ptr(), np.uint32(_words(to)), pdl=True)


def _words(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    assert size % 16 == 0
    return size // 16


def pdl(subject: Subject, predecessor: SlowPredecessor) -> Problems:
    """Behind a predecessor that has triggered but not written yet, the kernel reads the new x and logits and writes nothing early.

    The control is a reader without the wait: it must see the old bytes, or the check could not fail at all.
    """
    new, old = (subject.inputs(Call(GRAPH_TOKENS, seed)) for seed in (0, 1))
    buffer, fresh, stale = (_joined(inputs) for inputs in (new, new, old))
    want = run(subject.layer, new)
    static = _split(buffer, new)
    problems = []

    seen = torch.empty_like(buffer)
    buffer.copy_(stale)
    torch.cuda.synchronize()
    predecessor.late_copy(buffer, fresh)
    predecessor.early_copy(seen, buffer)
    if not torch.equal(seen, stale):
        problems.append("inconclusive: a kernel without griddepcontrol.wait did not overlap the slow predecessor")
    for repeat in range(3):
        outputs = Outputs(subject.spec, GRAPH_TOKENS, subject.device)
        buffer.copy_(stale)
        torch.cuda.synchronize()
        predecessor.late_copy(buffer, fresh)
        enqueue(subject.layer, static, outputs, pdl=True)
        if not same(outputs, want):
            problems.append(f"launch {repeat} did not wait for x and logits")
    return problems + _outputs_are_written_late(subject, predecessor, new)


def _outputs_are_written_late(subject: Subject, predecessor: SlowPredecessor, inputs: Inputs) -> Problems:
    """A predecessor that still reads the output buffers finds them as they were."""
    problems = []
    for name in ("out", "ids", "weights"):
        outputs = Outputs(subject.spec, GRAPH_TOKENS, subject.device)
        written = getattr(outputs, name)
        saved = torch.zeros_like(written)
        torch.cuda.synchronize()
        predecessor.late_copy(saved, written)
        enqueue(subject.layer, inputs, outputs, pdl=True)
        if not bool((bits(saved) == 0xFF).all()):
            problems.append(f"{name} was written while the predecessor still ran")
    return problems


def _joined(inputs: Inputs) -> torch.Tensor:
    """x and logits as the bytes of one buffer, so that one copy writes both."""
    return torch.cat([bits(inputs.x).flatten(), bits(inputs.logits).flatten()])


def _split(buffer: torch.Tensor, like: Inputs) -> Inputs:
    size = like.x.numel() * like.x.element_size()
    x, logits = buffer[:size].view(like.x.dtype), buffer[size:].view(like.logits.dtype)
    return Inputs(x.view(like.x.shape), logits.view(like.logits.shape), like.bias)


# --------------------------------------------------------------------------------------------------------- Streams and threads


def streams(subject: Subject, launches: int = 40) -> Problems:
    """Launches on two streams at the same time, the stream given explicitly, have the bits of launches one after another."""
    batches = [subject.inputs(Call(GRAPH_TOKENS, seed)) for seed in (0, 1)]
    want = [run(subject.layer, batch) for batch in batches]
    outputs = [[Outputs(subject.spec, GRAPH_TOKENS, subject.device) for _ in range(launches)] for _ in batches]
    lanes = [torch.cuda.Stream(subject.device) for _ in batches]
    torch.cuda.synchronize()
    for number in range(launches):
        for lane, batch, into in zip(lanes, batches, outputs, strict=True):
            enqueue(subject.layer, batch, into[number], stream=lane)
    torch.cuda.synchronize()
    return [
        f"stream {lane}, launch {number} differs"
        for lane, into in enumerate(outputs)
        for number, got in enumerate(into)
        if not same(got, want[lane])
    ]


def threads(subject: Subject, launches: int = 40) -> Problems:
    """Two threads share one layer, each on its own current stream."""
    batches = [subject.inputs(Call(GRAPH_TOKENS, seed)) for seed in (0, 1)]
    want = [run(subject.layer, batch) for batch in batches]
    torch.cuda.synchronize()
    problems: Problems = []

    def work(lane: int) -> None:
        try:
            torch.cuda.set_device(subject.device)
            with torch.cuda.stream(torch.cuda.Stream(subject.device)):
                got = [run(subject.layer, batches[lane]) for _ in range(launches)]
                torch.cuda.current_stream().synchronize()
                problems.extend(f"thread {lane}, launch {n} differs" for n, outputs in enumerate(got) if not same(outputs, want[lane]))
        except Exception as error:
            problems.append(f"thread {lane}: {type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(lane,)) for lane in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return problems


# ------------------------------------------------------------------------------------------------------------ Other callers


class Foreign:
    """A tensor of "another library": nothing but the DLPack protocol."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def dlpack(subject: Subject) -> Problems:
    """Weights and activations that only speak DLPack, with an explicit stream, give the same bits."""
    inputs = subject.inputs(Call(GRAPH_TOKENS, 0))
    outputs = Outputs(subject.spec, GRAPH_TOKENS, subject.device)
    weights = [Foreign(bits(w).view(w.shape)) if w.element_size() == 1 else Foreign(w) for w in subject.packed]
    layer = subject.kernel.bind(*weights)
    layer(
        Foreign(inputs.x),
        Foreign(inputs.logits),
        None if inputs.bias is None else Foreign(inputs.bias),
        stream=torch.cuda.current_stream().cuda_stream,
        out=Foreign(outputs.out),
        ids=Foreign(outputs.ids),
        weights=Foreign(outputs.weights),
    )
    return [] if same(outputs, run(subject.layer, inputs)) else ["DLPack tensors give other bits than torch tensors"]


def mega_experts(subject: Subject) -> Problems:
    """The engine-facing object, with its outputs allocated inside, gives the layer's bits."""
    spec, inputs = subject.spec, subject.inputs(Call(GRAPH_TOKENS, 0))
    order = None if spec.layout == "trtllm_gen" else spec.w13_order
    arguments = spec.top_k, spec.limit, spec.scale, spec.ue8m0
    experts = mm.torch.MegaExperts(*subject.packed, *arguments, w13_order=order, scoring=spec.scoring, structure=spec.structure)
    experts.prepare(spec.tokens, inputs.logits.dtype)
    got, want = experts(inputs.x, inputs.logits, inputs.bias), run(subject.layer, inputs)
    equal = all(torch.equal(bits(a), bits(b)) for a, b in zip(got, (want.out, want.ids, want.weights), strict=True))
    return [] if equal else ["MegaExperts gives other bits than the layer"]


def finalize(subject: Subject) -> Problems:
    """``forward`` gives, bit for bit, the contract's sum of the rows and weights that the MoE launch stores."""
    problems = []
    for tokens in (1, GRAPH_TOKENS):
        inputs = subject.inputs(Call(tokens, 0))
        rows = run(subject.layer, inputs)
        shared = torch.randn_like(inputs.x)
        for added in (None, shared):
            y = subject.layer.forward(inputs.x, inputs.logits, inputs.bias, added)  # type: ignore[attr-defined]
            want = reference_finalize(rows.out.cpu(), rows.weights.cpu(), None if added is None else added.cpu())
            if not torch.equal(bits(y.cpu()), bits(want)):
                problems.append(f"{tokens} tokens, {'no ' * (added is None)}shared expert: other bits than the reference")
    return problems


def early_trigger(subject: Subject, launches: int = 40) -> Problems:
    """A chain of launches, each of which lets the next one start early, gives the bits of launches one after another."""
    batches = [subject.inputs(Call(GRAPH_TOKENS, seed)) for seed in (0, 1)]
    want = [run(subject.layer, batch) for batch in batches]
    outputs = [Outputs(subject.spec, GRAPH_TOKENS, subject.device) for _ in range(launches)]
    torch.cuda.synchronize()
    for number, into in enumerate(outputs):
        batch = batches[number % 2]
        layer: Any = subject.layer
        layer(batch.x, batch.logits, batch.bias, out=into.out, ids=into.ids, weights=into.weights, trigger=True)
    torch.cuda.synchronize()
    return [f"launch {number} differs" for number, got in enumerate(outputs) if not same(got, want[number % 2])]


# ----------------------------------------------------------------------------------------------------------------- Refusals


def bad_calls(subject: Subject) -> Problems:
    """Every wrong argument is a TensorError, launches nothing and leaves the context alive."""
    good = subject.inputs(Call(2, 0))
    want = run(subject.layer, good)
    problems = []
    for name, changes in wrong_arguments(subject, good).items():
        outputs = Outputs(subject.spec, 2, subject.device)
        arguments: dict[str, Any] = {"x": good.x, "logits": good.logits, "bias": good.bias}
        arguments |= {"out": outputs.out, "ids": outputs.ids, "weights": outputs.weights}
        problems += _refused(name, functools.partial(subject.layer, **(arguments | changes)), mm.TensorError)
        torch.cuda.synchronize()
        if not outputs.untouched():
            problems.append(f"{name}: something was launched")
    if not same(want, run(subject.layer, good)):
        problems.append("a good launch after the refusals differs")
    return problems


def wrong_arguments(subject: Subject, good: Inputs) -> dict[str, dict[str, Any]]:
    """Name -> arguments to replace, one mistake each. The good call has two tokens."""
    spec, device = subject.spec, subject.device
    other_logits = torch.float32 if spec.logits_dtype == "bf16" else torch.bfloat16

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def misaligned(rows: int) -> torch.Tensor:
        return zeros(rows * spec.hidden + 1)[1:].view(rows, spec.hidden)

    logits = good.logits
    many = spec.tokens + 1
    wrong: dict[str, dict[str, Any]] = {
        "x in fp16": {"x": good.x.half()},
        "x in fp32": {"x": good.x.float()},
        "x strided": {"x": zeros(2, spec.hidden + 8)[:, 8:]},
        "x transposed": {"x": zeros(spec.hidden, 2).t()},
        "x at an odd address": {"x": misaligned(2)},
        "x with another width": {"x": zeros(2, spec.hidden - 128)},
        "x of rank 1": {"x": zeros(spec.hidden)},
        "x on the CPU": {"x": good.x.cpu()},
        "x is no tensor": {"x": good.x.tolist()},
        "too many tokens": {"x": zeros(many, spec.hidden), "logits": zeros(many, spec.experts, dtype=logits.dtype)},
        "logits of another dtype": {"logits": logits.to(other_logits)},
        "logits of another width": {"logits": logits[:, :-32].contiguous()},
        "logits of one token": {"logits": logits[:1]},
        "logits strided": {"logits": zeros(2, 2 * spec.experts, dtype=logits.dtype)[:, ::2]},
        "logits on the CPU": {"logits": logits.cpu()},
        "out in fp32": {"out": zeros(2 * spec.top_k, spec.hidden, dtype=torch.float32)},
        "out too small": {"out": zeros(2 * spec.top_k - 1, spec.hidden)},
        "out at an odd address": {"out": misaligned(2 * spec.top_k)},
        "out on the CPU": {"out": torch.zeros(2 * spec.top_k, spec.hidden, dtype=torch.bfloat16)},
        "ids in int64": {"ids": zeros(2, spec.top_k, dtype=torch.int64)},
        "weights in bf16": {"weights": zeros(2, spec.top_k)},
    }
    if good.bias is None:
        return wrong | {"a bias for softmax": {"bias": zeros(spec.experts, dtype=torch.float32)}}
    return wrong | {
        "no bias": {"bias": None},
        "bias in bf16": {"bias": good.bias.bfloat16()},
        "bias in fp64": {"bias": good.bias.double()},
        "bias too short": {"bias": good.bias[:-1]},
        "bias on the CPU": {"bias": good.bias.cpu()},
    }


def bad_weights(subject: Subject) -> Problems:
    """bind() refuses weights of another dtype, shape, stride, alignment or device."""
    w13, w13_scale, w2, w2_scale = subject.packed
    odd = torch.empty(w13.numel() + 16, dtype=torch.uint8, device=subject.device)[1 : w13.numel() + 1].view(w13.shape)
    wrong = {
        "w13 in int8": (bits(w13).view(w13.shape).view(torch.int8), w13_scale, w2, w2_scale),
        "w13 short of an expert": (w13[:-1], w13_scale, w2, w2_scale),
        "w13 expanded": (w13[:1].expand(w13.shape), w13_scale, w2, w2_scale),
        "w13 at an odd address": (odd, w13_scale, w2, w2_scale),
        "w13 and w2 exchanged": (w2, w13_scale, w13, w2_scale),
        "w13_scale in UE8M0 bytes": (w13, w13_scale.to(torch.uint8), w2, w2_scale),
        "w13_scale in bf16": (w13, w13_scale.bfloat16(), w2, w2_scale),
        "w2_scale transposed": (w13, w13_scale, w2, w2_scale.transpose(1, 2)),
        "w2_scale on the CPU": (w13, w13_scale, w2, w2_scale.cpu()),
    }
    problems = []
    for name, weights in wrong.items():
        problems += _refused(name, functools.partial(subject.kernel.bind, *weights), mm.TensorError)
    return problems


def bad_queries(subject: Subject) -> Problems:
    """load_kernel names what it has instead of what it was asked for."""
    spec = subject.spec
    shape: dict[str, Any] = {name: getattr(spec, name) for name in ("hidden", "inter", "experts", "top_k", "tokens")}
    options: dict[str, Any] = {"layout": spec.layout, "logits_dtype": spec.logits_dtype, "w13_order": spec.w13_order}
    asked: dict[str, tuple[dict[str, Any], type[mm.MegaMoeError]]] = {
        "an unknown width": ({"hidden": spec.hidden + 1024}, mm.ShapeNotInMenuError),
        "a rank's width that is no multiple of 128": ({"inter": spec.inter - 64}, mm.ShapeNotInMenuError),
        "too many tokens": ({"tokens": max(TOKEN_COUNTS) + 1}, mm.ShapeNotInMenuError),
        "row_major of either order": ({"layout": "row_major", "w13_order": None}, mm.AmbiguousKernelError),
    }
    problems = []
    for name, (changes, error) in asked.items():
        problems += _refused(name, functools.partial(mm.load_kernel, **(shape | options | changes)), error)
    return problems


def damaged_artifacts(subject: Subject, manifest: Manifest) -> Problems:
    """A flipped, truncated or missing cubin is refused before the driver sees it, and the context lives on."""
    spec = subject.spec
    entry = next(entry for entry in manifest.entries if entry.spec == spec)
    image = (manifest.folder / f"{entry.cubin}.cubin").read_bytes()
    middle = len(image) // 2
    damaged = {
        "one flipped bit": image[:middle] + bytes([image[middle] ^ 1]) + image[middle + 1 :],
        "a truncated file": image[:-1],
        "an empty file": b"",
        "a missing file": None,
    }
    want = run(subject.layer, subject.inputs(Call(2, 0)))
    problems = []
    for name, content in damaged.items():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(manifest.folder / FILE_NAME, folder)
            if content is not None:
                (Path(folder) / f"{entry.cubin}.cubin").write_bytes(content)
            there = Manifest.load(Path(folder))
            with mock.patch.multiple(loader, manifest=functools.partial(_given, there), _cache={}):
                call = functools.partial(load_entry, entry, subject.device, finalize=False)
                problems += _refused(name, call, mm.DamagedArtifactError)
    if not same(want, run(subject.layer, subject.inputs(Call(2, 0)))):
        problems.append("a good launch after the refusals differs")
    return problems


def _given(manifest: Manifest) -> Manifest:
    return manifest


def _refused(name: str, call: Callable[[], Any], error: type[Exception]) -> Problems:
    """``call`` must raise exactly ``error``, with a message."""
    try:
        call()
    except Exception as raised:
        if type(raised) is error and str(raised):
            return []
        return [f"{name}: {type(raised).__name__} instead of {error.__name__}: {raised}"]
    return [f"{name}: accepted, expected {error.__name__}"]


def load(spec: mm.KernelSpec, device: torch.device) -> mm.Kernel:
    """The kernel of exactly this entry."""
    return load_entry(next(entry for entry in mm.menu() if entry.spec == spec), device)
