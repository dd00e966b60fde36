"""One route of a shipped kernel on small random data, and a plain numpy evaluation of it.

The evaluation follows the numeric contract with the engine's order of summation. It takes only the block dot and the FP32
fma from the emulator: those have tests of their own.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from emulator import TCGEN05, WGMMA, Buffer, Launch, Pointer, SparseBuffer, TensorMap, mma, numerics
from emulator.config import Bytes, Parameter
from megamoe_aot.spec import KernelSpec
from megamoe_aot.tensor_map import w2_map, w13_map

F32 = NDArray[np.float32]

PHYSICAL = np.array([0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15])
"""Where logical row o of 16 lies in the trtllm_gen layout."""


def widen(bf16: NDArray[np.uint16]) -> F32:
    return (bf16.astype(np.uint32) << 16).view(np.float32)


class Problem:
    """Inputs of one token of a sigmoid-routed entry with BF16 logits; only the chosen experts' weights exist."""

    def __init__(self, spec: KernelSpec, seed: int = 0) -> None:
        assert spec.scoring == "sigmoid_bias" and spec.logits_dtype == "bf16" and spec.limit is not None
        self.spec = spec
        rng = np.random.default_rng(seed)
        self.x = numerics.to_bf16(rng.standard_normal(spec.hidden).astype(np.float32))
        self.logits = numerics.to_bf16(2 * rng.standard_normal(spec.experts).astype(np.float32))
        self.bias = (0.3 * rng.standard_normal(spec.experts)).astype(np.float32)
        blocks, inner = spec.hidden // 128, spec.inter // 128
        self.w13_scale = np.exp(rng.uniform(-7, -2, (spec.experts, 2 * inner, blocks))).astype(np.float32)
        self.w2_scale = np.exp(rng.uniform(-7, -2, (spec.experts, blocks, inner))).astype(np.float32)
        scores = (1 / (1 + np.exp(-widen(self.logits).astype(np.float64)))).astype(np.float32)
        self.ids = np.argsort(-(scores + self.bias), kind="stable")[: spec.top_k]
        chosen = scores[self.ids]
        total = functools.reduce(lambda a, b: np.float32(a + b), chosen)
        self.weights = chosen / total * np.float32(spec.scale)
        self.out = np.full(2 * spec.top_k * spec.hidden, 0xFF, np.uint8)
        self.stored_ids = np.full(4 * spec.top_k, 0xFF, np.uint8)
        self.stored_weights = np.full(4 * spec.top_k, 0xFF, np.uint8)

    def expert(self, e: int) -> tuple[Bytes, Bytes]:
        """w13 [2I, H], up rows first, and w2 [H, I] of one expert: e4m3 bits of moderate size."""
        rng = np.random.default_rng(1000 + e)
        shapes = ((2 * self.spec.inter, self.spec.hidden), (self.spec.hidden, self.spec.inter))
        first, second = (rng.integers(0, 256, shape, np.uint8) for shape in shapes)
        return first & np.uint8(0x8F) | np.uint8(0x30), second & np.uint8(0x8F) | np.uint8(0x30)

    # ---- for the emulator ----

    def _packed(self, weights: Bytes) -> Bytes:
        if self.spec.layout == "row_major":
            return weights.ravel()
        rows = np.arange(len(weights))
        shuffled = np.empty_like(weights)
        shuffled[rows // 16 * 16 + PHYSICAL[rows % 16]] = weights
        return np.ascontiguousarray(shuffled.reshape(len(weights), -1, 128).transpose(1, 0, 2)).ravel()

    def _pages(self, which: int) -> SparseBuffer:
        sizes = 2 * self.spec.inter * self.spec.hidden, self.spec.inter * self.spec.hidden
        pages = {int(e): self._packed(self.expert(int(e))[which]) for e in self.ids[:1]}
        return SparseBuffer(self.spec.experts * sizes[which], sizes[which], pages)

    def buffers(self) -> list[Buffer]:
        def raw(array: np.ndarray) -> Bytes:
            return array.view(np.uint8).ravel()

        return [
            Buffer("x", raw(self.x), predecessor=True),
            Buffer("logits", raw(self.logits), predecessor=True, align=2),
            Buffer("bias", raw(self.bias), align=4),
            Buffer("w13_scale", raw(self.w13_scale), align=4),
            Buffer("w2_scale", raw(self.w2_scale), align=4),
            Buffer("out", self.out, "output"),
            Buffer("ids", self.stored_ids, "output", align=4),
            Buffer("weights", self.stored_weights, "output", align=4),
            Buffer("w13", self._pages(0)),
            Buffer("w2", self._pages(1)),
        ]

    def parameters(self) -> list[Parameter]:
        pointers = ("x", "logits", "bias", "w13_scale", "w2_scale", "out", "ids", "weights")
        maps = [TensorMap(w13_map(self.spec), "w13"), TensorMap(w2_map(self.spec), "w2")]
        assert self.spec.limit is not None
        return [*(Pointer(name) for name in pointers), *maps, float(self.spec.scale), float(self.spec.limit), 0]

    def launch(self) -> Launch:
        shared = self.spec.shared
        names = {offset + 8 * i: f"{name}[{i}]" for name, offset in shared.barriers.items() for i in range(shared.barrier_counts[name][0])}
        return Launch((self.spec.grid(1), 1, 1), (self.spec.block_threads, 1, 1), (self.spec.cluster, 1, 1), shared.total, names)

    # ---- the evaluation ----

    def reference(self) -> NDArray[np.uint16]:
        """BF16 bits of output row 0."""
        expert = int(self.ids[0])
        w13, w2 = self.expert(expert)
        bits, scales = _quantise(widen(self.x), reciprocal=True)
        sums = self._gemm(bits, scales, w13, self.w13_scale[expert], self.spec.split.parts)
        limit = np.float32(self.spec.limit)
        up, gate = np.split(sums, 2)
        up, gate = np.clip(up, -limit, limit), np.minimum(gate, limit)
        act = gate / (np.float32(1) + np.exp(-gate.astype(np.float64)).astype(np.float32)) * up
        bits, scales = _quantise(act, reciprocal=False)
        return numerics.to_bf16(self._gemm(bits, scales, w2, self.w2_scale[expert], 1))

    def _gemm(self, bits: Bytes, scales: F32, weights: Bytes, weight_scales: F32, parts: int) -> F32:
        """Sums of the rows: block dots, scaled and added in the engine's order, parts added in order."""
        blocks = len(bits) // 128
        dots = [self._dot(bits[128 * b : 128 * b + 128], weights[:, 128 * b : 128 * b + 128]) for b in range(blocks)]
        factors = [np.repeat(weight_scales[:, b] * scales[b], 128) for b in range(blocks)]

        def chain(indices: list[int]) -> F32:
            return functools.reduce(lambda acc, b: numerics.fma_rn(dots[b], factors[b], acc), indices, np.zeros(len(weights), np.float32))

        each = blocks // parts
        sums = []
        for part in range(parts):
            first = part * each
            if self.spec.engine == "blackwell":
                sums.append(chain(list(range(first, first + each))))
                continue
            lanes = [chain([first + b for b in range(each) if b % 8 // 2 == quad]) for quad in range(4)]
            sums.append((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]))
        return functools.reduce(np.add, sums)

    def _dot(self, operand: Bytes, weights: Bytes) -> F32:
        acc = None
        for k in range(0, 128, 32):
            model = WGMMA if self.spec.engine == "hopper" else TCGEN05
            acc = mma.dot(weights[:, k : k + 32], operand[None, k : k + 32], acc, model)
        assert acc is not None
        return acc[:, 0]


def _quantise(values: F32, reciprocal: bool) -> tuple[Bytes, F32]:
    """e4m3 bits and one scale per 128 values."""
    rows = values.reshape(-1, 128)
    scales = np.maximum(np.abs(rows).max(axis=1), np.float32(1e-10)) / np.float32(448)
    scaled = rows * (np.float32(1) / scales)[:, None] if reciprocal else rows / scales[:, None]
    return numerics.to_e4m3(scaled).ravel(), scales
