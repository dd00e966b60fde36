"""Calls of a layer as the checks make them: outputs poisoned and guarded, results compared bit by bit.

Nothing here needs a GPU: the checks' own tests run on the CPU with a stand-in for the layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch

from megamoe_aot.spec import KernelSpec

GUARD_ROWS = 2
"""Rows before and after each output that no launch may touch."""

LOGITS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class BoundLayer(Protocol):
    """What :class:`megamoe_aot.Layer` is to the checks."""

    spec: KernelSpec

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
    ) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Activations of one call: x BF16 [M, H], logits [M, E], bias FP32 [E] or None."""

    x: torch.Tensor
    logits: torch.Tensor
    bias: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """M."""
        return len(self.x)

    def to(self, device: torch.device) -> Inputs:
        """Copies on ``device``."""
        return Inputs(self.x.to(device), self.logits.to(device), None if self.bias is None else self.bias.to(device))

    def rows(self, tokens: list[int]) -> Inputs:
        """A batch of these tokens, in this order."""
        return Inputs(self.x[tokens].contiguous(), self.logits[tokens].contiguous(), self.bias)

    def clone(self) -> Inputs:
        """Copies that may be changed in place."""
        return Inputs(self.x.clone(), self.logits.clone(), None if self.bias is None else self.bias.clone())

    def copy_(self, other: Inputs) -> None:
        """Overwrite x and logits, as a decode loop does with the static buffers of a captured graph."""
        self.x.copy_(other.x)
        self.logits.copy_(other.logits)


class Outputs:
    """out BF16 [M*K, H], ids INT32 [M, K], weights FP32 [M, K], each between guard rows; every byte starts as 0xFF.

    0xFF... is NaN in BF16 and FP32 and -1 in INT32: what a launch leaves unwritten, or reads of it, shows.
    """

    def __init__(self, spec: KernelSpec, tokens: int, device: torch.device) -> None:
        routes = tokens * spec.top_k
        shapes = ((routes, spec.hidden, torch.bfloat16), (tokens, spec.top_k, torch.int32), (tokens, spec.top_k, torch.float32))
        self._whole = [torch.empty(rows + 2 * GUARD_ROWS, columns, dtype=dtype, device=device) for rows, columns, dtype in shapes]
        self.out, self.ids, self.weights = (whole[GUARD_ROWS : len(whole) - GUARD_ROWS] for whole in self._whole)
        self.top_k = spec.top_k
        self.poison()

    def poison(self) -> None:
        """Set every byte to 0xFF, guards included."""
        for whole in self._whole:
            whole.view(torch.uint8).fill_(0xFF)

    def guards_intact(self) -> bool:
        """Whether nothing was written outside the outputs."""
        edges = [edge for whole in self._whole for edge in (whole[:GUARD_ROWS], whole[len(whole) - GUARD_ROWS :])]
        return all(bool((edge.view(torch.uint8) == 0xFF).all()) for edge in edges)

    def untouched(self) -> bool:
        """Whether nothing was written at all."""
        return all(bool((whole.view(torch.uint8) == 0xFF).all()) for whole in self._whole)

    def token(self, token: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of one token: out [K, H], ids [K], weights [K]."""
        first = token * self.top_k
        return self.out[first : first + self.top_k], self.ids[token], self.weights[token]

    def cpu(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """out, ids, weights on the CPU; waits for the device."""
        return self.out.cpu(), self.ids.cpu(), self.weights.cpu()


def enqueue(layer: BoundLayer, inputs: Inputs, outputs: Outputs, **options: Any) -> None:
    """Launch into ``outputs`` as they stand."""
    layer(inputs.x, inputs.logits, inputs.bias, out=outputs.out, ids=outputs.ids, weights=outputs.weights, **options)


def run(layer: BoundLayer, inputs: Inputs, **options: Any) -> Outputs:
    """Launch into fresh poisoned outputs; does not wait."""
    outputs = Outputs(layer.spec, inputs.tokens, inputs.x.device)
    enqueue(layer, inputs, outputs, **options)
    return outputs


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN equals NaN and -0 differs from +0."""
    return tensor.contiguous().view(torch.uint8)


def equal_bits(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """Whether two groups of tensors are equal bit by bit."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(left, right, strict=True))


def same(left: Outputs, right: Outputs) -> bool:
    """Whether two calls gave the same bits."""
    return equal_bits((left.out, left.ids, left.weights), (right.out, right.ids, right.weights))


def same_token(left: Outputs, i: int, right: Outputs, j: int) -> bool:
    """Whether token ``i`` of one call and token ``j`` of another have the same bits."""
    return equal_bits(left.token(i), right.token(j))
