"""A kernel bound to one layer's weights: checks the activations and launches."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from . import driver
from .abi import FLAG_TRIGGER
from .errors import FinalizeNotLoadedError, TensorError, TriggerError
from .finalize import FinalizeSpec
from .launch import Arguments, Call, FinalizeArguments
from .library import LoadedCode
from .scratch import Scratch
from .spec import KernelSpec
from .tensors import Requirement, empty_like, is_torch, record_use, shape_of, stream_handle

_LOGITS = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}

_X = Requirement("x", ("bfloat16",), 16, "[M, H]")
_BIAS = Requirement("bias", ("float32",), 4, "[E]")
_OUT = Requirement("out", ("bfloat16",), 16, "[M*K, H]")
_IDS = Requirement("ids", ("int32",), 4, "[M, K]")
_WEIGHTS = Requirement("weights", ("float32",), 4, "[M, K]")
_SHARED = Requirement("shared", ("bfloat16",), 16, "[M, H]")
_Y = Requirement("y", ("bfloat16",), 16, "[M, H]")


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """One loaded MoE kernel with one layer's weights."""

    spec: KernelSpec
    """With the launch arguments that the layer passes."""
    code: LoadedCode
    constants: Arguments
    scratch: Scratch | None
    """Of the list structure."""


@dataclasses.dataclass(frozen=True, eq=False)
class BoundFinalize:
    """The loaded finalize kernel of a layer."""

    spec: FinalizeSpec
    code: LoadedCode
    constants: FinalizeArguments = dataclasses.field(default_factory=FinalizeArguments)


class Layer:
    """Made by :meth:`Kernel.bind`. Safe to call from several threads: each has its own argument memory.

    List launches use scratch memory that belongs to this layer and the stream; it is allocated at the first such launch on a stream,
    or by :meth:`prepare`. scratch.py says what that means for graphs: in short, prepare the stream before its capture, and do not
    run two graphs captured on one stream at the same time.
    """

    def __init__(self, variants: tuple[Bound, ...], finalize: BoundFinalize | None, weights: tuple[Any, ...]) -> None:
        """``variants``: [M] -> what serves M tokens."""
        self.spec = spec = variants[-1].spec
        """The spec of the variant for the largest M, with the launch arguments that this layer passes."""
        self._variants = variants
        self._finalize = finalize
        self._device, self._context = variants[-1].code.device, variants[-1].code.context
        self._weights = weights  # keeps the memory behind the tensor maps and scale pointers alive
        dtype, size = _LOGITS[spec.logits_dtype]
        self._logits = Requirement("logits", (dtype,), size, "[M, E]")
        self._local = threading.local()

    @property
    def tokens(self) -> int:
        """The largest M of a launch: what the kernel was loaded for."""
        return len(self._variants) - 1

    def structure(self, tokens: int) -> str:
        """The structure of the kernel that serves ``tokens`` tokens: "cluster" or "list"."""
        return self._variants[tokens].spec.structure

    def prepare(self, stream: Any = None) -> None:
        """Allocate what launches on ``stream`` need, so that they can be captured in a CUDA graph; nothing for the cluster structure.

        Args:
            stream: as in a call; None for torch's current stream. For a graph: the stream that will be captured. The default stream
                and CU_STREAM_PER_THREAD are prepared for the calling thread only.

        Raises:
            CaptureError: the stream is capturing already.
            TensorError: None, but the weights are not torch's; or an object that is no stream.
        """
        handle = stream_handle(stream, self._weights[0], self._device)
        with driver.active(self._context):
            for bound in dict.fromkeys(self._variants):
                if bound.scratch is not None:
                    bound.scratch.address(handle)

    def __call__(
        self,
        x: Any,
        logits: Any,
        bias: Any = None,
        stream: Any = None,
        out: Any = None,
        ids: Any = None,
        weights: Any = None,
        pdl: bool = True,
        *,
        trigger: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Route M tokens and compute their K experts each, in one launch; returns at once, ``(out, ids, weights)``.

        Args:
            x: BF16 [M, H], contiguous, 16-byte aligned; M from 0 to ``tokens``. M = 0 launches nothing.
            logits: [M, E] of ``spec.logits_dtype``, contiguous.
            bias: FP32 [E] for sigmoid_bias scorings; None for softmax.
            stream: None for torch's current stream of the layer's device; else a CUstream address, or an object with
                ``__cuda_stream__`` or ``cuda_stream``.
            out: BF16 [M*K, H], one unweighted row per route token*K + rank; 16-byte aligned.
            ids: INT32 [M, K], experts in rank order.
            weights: FP32 [M, K], routing weights. An output that is None is allocated if ``x`` is a torch tensor.
            pdl: programmatic dependent launch: the prologue may overlap the preceding kernel of the stream.
            trigger: let the stream's next kernel start while this one runs. Only safe if that kernel is launched with programmatic
                stream serialization and waits (griddepcontrol.wait) before it touches anything that this launch reads or writes,
                and only possible where :meth:`structure` says "list".

        Raises:
            TensorError: an argument does not fit.
            TriggerError: ``trigger`` for a token count that the cluster structure serves.
            CaptureError: the stream is capturing and was not prepared.
            ResidencyError: the stream's share of the GPU does not hold a list launch.
                In all these cases nothing was launched.
            DriverCallError: the launch failed.
        """
        tokens, bound = self._serving(x)
        if trigger and bound.scratch is None:
            raise TriggerError(
                f"trigger: {tokens} tokens are served by the cluster structure, which cannot let its successor start early; "
                'ask layer.structure(M), or load with structure="list"'
            )
        stream = stream_handle(stream, x, self._device)
        out = self._output(out, x, _OUT, (tokens * bound.spec.top_k, bound.spec.hidden))
        ids = self._output(ids, x, _IDS, (tokens, bound.spec.top_k))
        weights = self._output(weights, x, _WEIGHTS, (tokens, bound.spec.top_k))
        call = self._moe(bound, tokens, x, logits, bias, out, ids, weights, trigger)
        if tokens == 0:
            return out, ids, weights
        self._launch(bound, call, tokens, stream, pdl)
        return out, ids, weights

    def forward(
        self,
        x: Any,
        logits: Any,
        bias: Any = None,
        shared: Any = None,
        stream: Any = None,
        y: Any = None,
        out: Any = None,
        ids: Any = None,
        weights: Any = None,
        pdl: bool = True,
        *,
        trigger: bool = False,
    ) -> Any:
        """The whole MoE layer, in two launches chained by programmatic dependent launch; returns ``y`` at once.

        y[t] = bf16(sum over rank k of weights[t, k] * out[t * K + k] + shared[t]), summed in FP32 in rank order: the same inputs give
        the same bits.

        Args:
            shared: BF16 [M, H], 16-byte aligned, added at the end: the shared expert's output; None for none.
            y: BF16 [M, H], 16-byte aligned; must not overlap out, weights or shared. Allocated if None and ``x`` is a torch tensor.
            out, ids, weights: as in a call, for a caller that wants them or allocates them itself; else they are temporary.
            x, logits, bias, stream: as in a call.
            pdl: off, no launch starts before its predecessor in the stream has ended.
            trigger: let the stream's next kernel start while these launches run. Safe under the same condition as in a call; possible with
                both structures.

        Raises:
            FinalizeNotLoadedError: the kernel was loaded with ``finalize=False``.
            TensorError, CaptureError, ResidencyError, DriverCallError: as a call.
        """
        finalize = self._finalize
        if finalize is None:
            raise FinalizeNotLoadedError("forward needs the finalize kernel: load with finalize=True, or call the layer itself")
        tokens, bound = self._serving(x)
        finalize.code.handle()
        hidden, chosen = bound.spec.hidden, (tokens, bound.spec.top_k)
        stream = stream_handle(stream, x, self._device)
        out = self._temporary(out, x, _OUT, (tokens * bound.spec.top_k, hidden), stream)
        ids = self._temporary(ids, x, _IDS, chosen, stream)
        weights = self._temporary(weights, x, _WEIGHTS, chosen, stream)
        y = self._output(y, x, _Y, (tokens, hidden))
        # The finalize kernel waits for its predecessor before it reads anything, so that one may let it start early.
        call = self._moe(bound, tokens, x, logits, bias, out, ids, weights, trigger=pdl and bound.scratch is not None)
        sum_ = self._call(finalize)
        sum_.arguments.out, sum_.arguments.weights = call.arguments.out, call.arguments.weights
        sum_.arguments.shared = 0 if shared is None else _SHARED.pointer(shared, (tokens, hidden), self._device)
        sum_.arguments.y = _Y.pointer(y, (tokens, hidden), self._device)
        sum_.arguments.flags = FLAG_TRIGGER if trigger else 0
        _check_apart(finalize.spec, tokens, sum_.arguments)
        if tokens == 0:
            return y
        self._launch(bound, call, tokens, stream, pdl, sum_)
        return y

    def _serving(self, x: Any) -> tuple[int, Bound]:
        """M of ``x``, and the kernel for it."""
        shape = shape_of("x", x)
        if len(shape) != 2:
            raise TensorError(f"x: shape is {list(shape)}, expected [M, {self.spec.hidden}]")
        if shape[0] >= len(self._variants):
            raise TensorError(
                f"x: {shape[0]} tokens, this kernel serves at most {self.tokens} in one launch: load it for more tokens, or split the batch"
            )
        bound = self._variants[shape[0]]
        bound.code.handle()
        return shape[0], bound

    def _moe(self, bound: Bound, tokens: int, x: Any, logits: Any, bias: Any, out: Any, ids: Any, weights: Any, trigger: bool) -> Call:
        """This thread's launch of ``bound`` with checked arguments, all but the scratch."""
        spec, device = bound.spec, self._device
        call = self._call(bound)
        arguments = call.arguments
        arguments.x = _X.pointer(x, (tokens, spec.hidden), device)
        arguments.logits = self._logits.pointer(logits, (tokens, spec.experts), device)
        arguments.bias = self._bias(bias)
        arguments.out = _OUT.pointer(out, (tokens * spec.top_k, spec.hidden), device)
        arguments.ids = _IDS.pointer(ids, (tokens, spec.top_k), device)
        arguments.weights = _WEIGHTS.pointer(weights, (tokens, spec.top_k), device)
        arguments.flags = bound.constants.flags | (FLAG_TRIGGER if trigger else 0)
        return call

    def _launch(self, bound: Bound, call: Call, tokens: int, stream: int, pdl: bool, sum_: Call | None = None) -> None:
        """Launch ``call``, and behind it the finalize launch ``sum_`` if there is one."""
        if driver.current_context() != self._context:
            with driver.active(self._context):
                self._launch(bound, call, tokens, stream, pdl, sum_)
            return
        if bound.scratch is not None:
            call.arguments.scratch = bound.scratch.address(stream)
            call.arguments.tokens = tokens
        call.launch(bound.code.handle(), bound.spec.grid(tokens, bound.code.processors), stream, pdl)
        if sum_ is not None and self._finalize is not None:
            sum_.launch(self._finalize.code.handle(), self._finalize.spec.grid(tokens), stream, pdl)

    def _bias(self, bias: Any) -> int:
        if self.spec.scoring == "softmax":
            if bias is not None:
                raise TensorError("bias: softmax scoring has none; pass None")
            return 0
        if bias is None:
            raise TensorError(f"bias: None, expected float32 [{self.spec.experts}] for {self.spec.scoring} scoring")
        return _BIAS.pointer(bias, (self.spec.experts,), self._device)

    @staticmethod
    def _output(given: Any, x: Any, requirement: Requirement, shape: tuple[int, ...]) -> Any:
        if given is not None:
            return given
        if not is_torch(x):
            raise TensorError(f"{requirement.name}: None, but only torch tensors are allocated here and x is none; pass {requirement.axes}")
        return empty_like(x, shape, requirement.dtypes[0])

    def _temporary(self, given: Any, x: Any, requirement: Requirement, shape: tuple[int, ...], stream: int) -> Any:
        """As :meth:`_output`, of a tensor that is dropped while ``stream`` still uses it."""
        made = self._output(given, x, requirement, shape)
        if given is None:
            record_use(made, stream, self._device)
        return made

    def _call(self, kernel: Bound | BoundFinalize) -> Call:
        """This thread's launch buffers of one kernel, made at its first launch."""
        try:
            calls: dict[Any, Call] = self._local.calls
        except AttributeError:
            calls = self._local.calls = {}
        call = calls.get(kernel)
        if call is None:
            call = calls[kernel] = Call(kernel.spec, kernel.constants)
        return call


def _check_apart(spec: FinalizeSpec, tokens: int, arguments: Any) -> None:
    """The finalize kernel's output must not overlap its inputs. Raises TensorError."""
    row = 2 * spec.hidden
    y_end = arguments.y + tokens * row
    sizes = {"out": tokens * spec.top_k * row, "weights": 4 * tokens * spec.top_k, "shared": tokens * row if arguments.shared else 0}
    for name, size in sizes.items():
        start = getattr(arguments, name)
        if start < y_end and arguments.y < start + size:
            raise TensorError(f"y: it overlaps {name}, which is read while y is written")
