"""torch interop: :class:`MegaExperts`, the object that inference engines hold per MoE layer."""

from __future__ import annotations

import torch

from .errors import CaptureError, TensorError
from .layer import Layer
from .loader import load_kernel
from .spec import BLOCK

_LOGITS = {torch.bfloat16: "bf16", torch.float32: "fp32", "bf16": "bf16", "fp32": "fp32"}


class MegaExperts:
    """The routed experts of one layer. The weights' shapes give the model's; nothing is copied.

    Args:
        w13: FP8 e4m3 or uint8, [E, H/128, 2I, 128] (trtllm_gen) or [E, 2I, H] (row_major).
        w13_scale: FP32 [E, 2I/128, H/128].
        w2: FP8 e4m3 or uint8, [E, I/128, H, 128] or [E, H, I].
        w2_scale: FP32 [E, H/128, I/128].
        top_k: experts per token.
        limit: SwiGLU clamp, None for no clamp.
        scale: routed scaling factor, applied inside the kernel: do not apply it again.
        ue8m0: round the token's activation scales up to powers of two.
        w13_order: "up_gate" or "gate_up"; required for row_major weights.
        scoring: "sigmoid_bias", "sigmoid_bias_grouped" or "softmax"; required only if the menu has this shape with several.
        structure: "cluster" or "list" for every M; None for what was measured to be faster, see :func:`load_kernel`.
    """

    def __init__(
        self,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        top_k: int,
        limit: float | None,
        scale: float,
        ue8m0: bool,
        *,
        w13_order: str | None = None,
        scoring: str | None = None,
        structure: str | None = None,
    ) -> None:
        if w13.dim() == 4:
            self.layout = "trtllm_gen"
            self.experts, blocks, rows, _ = w13.shape
            self.hidden = blocks * BLOCK
        elif w13.dim() == 3:
            self.layout = "row_major"
            self.experts, rows, self.hidden = w13.shape
        else:
            raise TensorError(f"w13: shape is {list(w13.shape)}, expected [E, H/128, 2I, 128] (trtllm_gen) or [E, 2I, H] (row_major)")
        self.inter = rows // 2
        self.top_k, self.limit, self.scale, self.ue8m0 = top_k, limit, scale, ue8m0
        self.w13_order, self.scoring, self.structure = w13_order, scoring, structure
        self._weights = (w13, w13_scale, w2, w2_scale)
        self._layers: dict[str, Layer] = {}
        self._outgrown: list[Layer] = []  # captured graphs may still use their scratch

    def prepare(self, tokens: int, logits_dtype: torch.dtype | str, stream: torch.cuda.Stream | None = None) -> None:
        """Load and bind the kernel for up to ``tokens`` tokens and prepare a stream; call it before capturing a CUDA graph.

        Args:
            logits_dtype: torch.bfloat16 or torch.float32 ("bf16" or "fp32").
            stream: the stream that will be captured; None for torch's current stream. (torch.cuda.graph captures a stream of its
                own unless it is given one.)

        Raises:
            TensorError: another logits dtype, or weights that do not fit.
            MegaMoeError: what :func:`load_kernel` and :meth:`Layer.prepare` raise.
        """
        if logits_dtype not in _LOGITS:
            raise TensorError(f"logits: dtype is {logits_dtype}, expected torch.bfloat16 or torch.float32")
        layer = self._layers.get(_LOGITS[logits_dtype])
        if layer is None or layer.tokens < tokens:
            if layer is not None:
                self._outgrown.append(layer)
            layer = self._layers[_LOGITS[logits_dtype]] = self._bind(tokens, _LOGITS[logits_dtype])
        layer.prepare(stream)

    def _bind(self, tokens: int, logits_dtype: str) -> Layer:
        kernel = load_kernel(
            self.hidden,
            self.inter,
            self.experts,
            self.top_k,
            tokens,
            device=self._weights[0].device,
            layout=self.layout,
            logits_dtype=logits_dtype,
            w13_order=self.w13_order,
            scoring=self.scoring,
            scale=self.scale,
            limit=self.limit,
            ue8m0=self.ue8m0,
            structure=self.structure,
        )
        return kernel.bind(*self._weights)

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Launch on torch's current stream; see :meth:`Layer.__call__`.

        Args:
            x: BF16 [M, H]. logits: BF16 or FP32 [M, E]. bias: FP32 [E], None for softmax.

        Returns:
            (out BF16 [M*K, H], ids INT32 [M, K], weights FP32 [M, K]).
        """
        return self._layer(x, logits)(x, logits, bias)

    def forward(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        shared: torch.Tensor | None = None,
        *,
        trigger: bool = False,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, on torch's current stream; see :meth:`Layer.forward`.

        Args:
            x, logits, bias: as in a call.
            shared: BF16 [M, H], added: the shared expert's output; None for none.
            trigger: let the stream's next kernel start while these launches run: only if it waits, see :meth:`Layer.forward`.

        Returns:
            BF16 [M, H].
        """
        return self._layer(x, logits).forward(x, logits, bias, shared, trigger=trigger)

    def _layer(self, x: torch.Tensor, logits: torch.Tensor) -> Layer:
        """The bound layer for these inputs, loaded if there is none yet."""
        layer = self._layers.get(_LOGITS.get(logits.dtype, ""))
        if layer is None or layer.tokens < x.shape[0]:
            if logits.is_cuda and torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    f"call prepare(tokens, {logits.dtype}) for at least {x.shape[0]} tokens before a CUDA graph capture begins: "
                    "loading cannot be captured"
                )
            self.prepare(x.shape[0], logits.dtype)
            layer = self._layers[_LOGITS[logits.dtype]]
        return layer
