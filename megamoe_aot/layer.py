"""A kernel bound to one layer's weights: checks the activations and launches."""

from __future__ import annotations

import threading
from typing import Any

from . import driver
from .errors import TensorError
from .launch import Arguments, Call
from .library import LoadedCode
from .spec import KernelSpec
from .tensors import Requirement, empty_like, is_torch, shape_of, stream_handle

_LOGITS = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}

_X = Requirement("x", ("bfloat16",), 16, "[M, H]")
_BIAS = Requirement("bias", ("float32",), 4, "[E]")
_OUT = Requirement("out", ("bfloat16",), 16, "[M*K, H]")
_IDS = Requirement("ids", ("int32",), 4, "[M, K]")
_WEIGHTS = Requirement("weights", ("float32",), 4, "[M, K]")


class Layer:
    """Made by :meth:`Kernel.bind`. Safe to call from several threads: each has its own argument memory."""

    def __init__(self, code: LoadedCode, spec: KernelSpec, constants: Arguments, weights: tuple[Any, ...]) -> None:
        self.spec = spec
        """The entry's spec with the launch arguments that this layer passes."""
        self._code = code
        self._constants = constants
        self._weights = weights  # keeps the memory behind the tensor maps and scale pointers alive
        dtype, size = _LOGITS[spec.logits_dtype]
        self._logits = Requirement("logits", (dtype,), size, "[M, E]")
        self._local = threading.local()

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
    ) -> tuple[Any, Any, Any]:
        """Route M tokens and compute their K experts each, in one launch; returns at once, ``(out, ids, weights)``.

        Args:
            x: BF16 [M, H], contiguous, 16-byte aligned; M from 0 to ``spec.tokens``. M = 0 launches nothing.
            logits: [M, E] of ``spec.logits_dtype``, contiguous.
            bias: FP32 [E] for sigmoid_bias scoring; None for softmax.
            stream: None for torch's current stream of the layer's device; else a CUstream address, or an object with
                ``__cuda_stream__`` or ``cuda_stream``.
            out: BF16 [M*K, H], one unweighted row per route token*K + rank; 16-byte aligned.
            ids: INT32 [M, K], experts in rank order.
            weights: FP32 [M, K], routing weights. An output that is None is allocated if ``x`` is a torch tensor.
            pdl: programmatic dependent launch: the prologue may overlap the preceding kernel of the stream.

        Raises:
            TensorError: an argument does not fit; nothing was launched.
            DriverCallError: the launch failed.
        """
        spec, device = self.spec, self._code.device
        function = self._code.handle()
        tokens = self._tokens(x)
        routes, chosen = (tokens * spec.top_k, spec.hidden), (tokens, spec.top_k)
        call = self._call()
        arguments = call.arguments
        arguments.x = _X.pointer(x, (tokens, spec.hidden), device)
        arguments.logits = self._logits.pointer(logits, (tokens, spec.experts), device)
        arguments.bias = self._bias(bias)
        stream = stream_handle(stream, x, device)
        out = self._output(out, x, _OUT, routes)
        ids = self._output(ids, x, _IDS, chosen)
        weights = self._output(weights, x, _WEIGHTS, chosen)
        arguments.out = _OUT.pointer(out, routes, device)
        arguments.ids = _IDS.pointer(ids, chosen, device)
        arguments.weights = _WEIGHTS.pointer(weights, chosen, device)
        if tokens == 0:
            return out, ids, weights
        if driver.current_context() == self._code.context:
            call.launch(function, spec.grid(tokens), stream, pdl)
        else:
            with driver.active(self._code.context):
                call.launch(function, spec.grid(tokens), stream, pdl)
        return out, ids, weights

    def _tokens(self, x: Any) -> int:
        shape = shape_of("x", x)
        if len(shape) != 2:
            raise TensorError(f"x: shape is {list(shape)}, expected [M, {self.spec.hidden}]")
        if shape[0] > self.spec.tokens:
            raise TensorError(f"x: {shape[0]} tokens, this kernel serves at most {self.spec.tokens} in one launch; split the batch")
        return shape[0]

    def _bias(self, bias: Any) -> int:
        if self.spec.scoring == "softmax":
            if bias is not None:
                raise TensorError("bias: softmax scoring has none; pass None")
            return 0
        if bias is None:
            raise TensorError(f"bias: None, expected float32 [{self.spec.experts}] for {self.spec.scoring} scoring")
        return _BIAS.pointer(bias, (self.spec.experts,), self._code.device)

    @staticmethod
    def _output(given: Any, x: Any, requirement: Requirement, shape: tuple[int, ...]) -> Any:
        if given is not None:
            return given
        if not is_torch(x):
            raise TensorError(f"{requirement.name}: None, but only torch tensors are allocated here and x is none; pass {requirement.axes}")
        return empty_like(x, shape, requirement.dtypes[0])

    def _call(self) -> Call:
        """This thread's launch buffers, made at its first launch."""
        try:
            return self._local.call
        except AttributeError:
            self._local.call = Call(self.spec, self._constants)
            return self._local.call
