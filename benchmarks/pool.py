"""Random weights for timing: finite FP8 bytes without zeros in bulk, seen as the layers of any entry."""

from __future__ import annotations

import dataclasses
import math

import torch

from megamoe_aot.kernel import weight_shapes
from megamoe_aot.reference import FP8_VALUES
from megamoe_aot.spec import KernelSpec

FINITE = 0xBF
"""Mask that clears the top exponent bit of e4m3: no NaN, magnitudes below 2, every other bit random."""
FILL_BYTES = 1 << 30

SPREAD = float(FP8_VALUES[torch.arange(256) & FINITE].square().mean().sqrt())
"""Root mean square of a random masked byte's value."""


def random_weights(size: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """uint8 [size] of random finite e4m3 values."""
    pool = torch.empty(size, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for start in range(0, size, FILL_BYTES):
        pool[start : start + FILL_BYTES].random_(0, 256, generator=generator).bitwise_and_(FINITE)
    return pool


def expert_bytes(spec: KernelSpec) -> tuple[int, int]:
    """Bytes of one expert's w13 and w2."""
    return 2 * spec.inter * spec.hidden, spec.hidden * spec.inter


def layer_bytes(spec: KernelSpec) -> int:
    """Bytes of all experts of one layer, scales aside."""
    return spec.experts * sum(expert_bytes(spec))


@dataclasses.dataclass(frozen=True)
class WeightLayer:
    """One layer's weights: the four tensors that ``bind`` takes."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order of ``bind``."""
        return self.w13, self.w13_scale, self.w2, self.w2_scale


def layers_of(pool: torch.Tensor, spec: KernelSpec, most: int) -> list[WeightLayer]:
    """As many layers of ``spec`` as the pool holds, at most ``most``: views of the pool, with scales of their own.

    The bytes are random, so they are as good in one layout as in another. Outputs are of the order of 1 for x ~ N(0, 1).
    """
    size, (w13_bytes, _) = layer_bytes(spec), expert_bytes(spec)
    shapes = weight_shapes(spec)
    layers = []
    for number in range(min(most, pool.numel() // size)):
        whole = pool[number * size : (number + 1) * size]
        split = spec.experts * w13_bytes
        layers.append(
            WeightLayer(
                whole[:split].view(shapes["w13"]),
                _scales(shapes["w13_scale"], spec.hidden, 2 * number, pool.device),
                whole[split:].view(shapes["w2"]),
                _scales(shapes["w2_scale"], spec.inter, 2 * number + 1, pool.device),
            )
        )
    return layers


def _scales(shape: tuple[int, ...], depth: int, seed: int, device: torch.device) -> torch.Tensor:
    """FP32: random, not powers of two, so that a sum over ``depth`` products with N(0, 1) is of the order of 1."""
    random = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return ((0.5 + random) / (SPREAD * math.sqrt(depth))).to(device)
