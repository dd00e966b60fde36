"""Seeded test problems whose data make mistakes visible, on any device and one expert at a time.

* every block scale of a problem is unique and they spread over 100x, so a swapped, shifted or transposed scale shows;
* gate and up have different means and spreads, so reading one for the other shows;
* the bias has both signs and no zero.

Weights come from a counter-based integer hash: expert e is the same whether it is made alone or with the others, on a CPU or a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, TypeVar

import torch
from torch import Tensor

from megamoe_aot.reference import ExpertWeights, MoeResult, Options, evaluate
from megamoe_aot.spec import KernelSpec
from megamoe_aot.weights import BLOCK, ExpertTensors, Packed, allocate, pack_expert

_MASK = 0xFFFFFFFF
_FP8 = torch.float8_e4m3fn
T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------------ Hash and samples


def stream_of(*parts: int) -> int:
    """A 32-bit stream number from a few small integers."""
    state = 0x1234567
    for part in parts:
        state = ((state ^ (part & _MASK)) * 0x2C1B3C6D + 0x297A2D39) & _MASK
        state ^= state >> 15
    return state


def hash32(stream: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [count] of 32-bit hashes of 0..count-1. Multipliers stay below 2**31, so no product overflows int64."""
    x = torch.arange(count, dtype=torch.int64, device=device)
    x = (x * 0x3C6EF35F + stream) & _MASK
    for multiplier in (0x45D9F3B5, 0x119DE1F3):
        x ^= x >> 16
        x = (x * multiplier) & _MASK
    return x ^ (x >> 15)


def uniform(stream: int, count: int) -> Tensor:
    """FP64 [count] in (0, 1)."""
    return (hash32(stream, count).double() + 0.5) / 2.0**32


def normal(stream: int, count: int) -> Tensor:
    """FP64 [count], standard normal."""
    return math.sqrt(2) * torch.erfinv(2 * uniform(stream, count) - 1)


def _fp8_quantiles(mean: float, spread: float) -> Tensor:
    """uint8 [256]: byte -> FP8 code, so that uniform bytes become normal FP8 values."""
    values = [mean + spread * NormalDist().inv_cdf((byte + 0.5) / 256) for byte in range(256)]
    return torch.tensor(values).to(_FP8).view(torch.uint8)


GATE_SPREAD, UP_SPREAD, DOWN_SPREAD = 96.0, 64.0, 80.0
_TABLES = {"gate": _fp8_quantiles(8.0, GATE_SPREAD), "up": _fp8_quantiles(-4.0, UP_SPREAD), "down": _fp8_quantiles(0.0, DOWN_SPREAD)}
_KINDS = {"gate": 0, "up": 1, "down": 2}


def fp8_matrix(kind: str, stream: int, rows: int, columns: int, device: torch.device | str = "cpu") -> Tensor:
    """torch.float8_e4m3fn [rows, columns]; one hash makes four values (rows * columns must be a multiple of 4)."""
    words = (hash32(stream, rows * columns // 4, device) - 2**31).to(torch.int32)
    codes = _TABLES[kind].to(device).index_select(0, words.view(torch.uint8).int())
    return codes.view(rows, columns).view(_FP8)


# -------------------------------------------------------------------------------------------------------------------- Problems


@dataclasses.dataclass(frozen=True)
class HardInput:
    """A case of the contract's table of hard inputs: edits of the inputs of an ordinary problem."""

    required: str
    tokens: Callable[[Tensor], None] | None = None
    """Edits x BF16 [M, H] in place."""
    logits: Callable[[Tensor], None] | None = None
    """Edits FP32 logits [M, E] in place."""
    bias: Callable[[Tensor], None] | None = None
    """Edits FP32 bias [E] in place."""
    expert: Callable[[ExpertTensors], None] | None = None
    """Edits the tensors of expert BAD_EXPERT in place."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs and weights of one call; see the module's docstring."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    tokens: int
    scoring: str = "sigmoid_bias"
    seed: int = 0
    case: str = ""
    """Name in HARD_INPUTS, or none."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of reference.Options."""

    @classmethod
    def of(cls, spec: KernelSpec, tokens: int, *, seed: int = 0, case: str = "") -> Problem:
        """The problem of a spec; the reference then imitates the spec's engine."""
        options = dataclasses.asdict(Options.of(spec, w13_order="up_gate"))
        for name in ("scoring", "top_k", "w13_order"):
            del options[name]
        return cls(spec.hidden, spec.inter, spec.experts, spec.top_k, tokens, spec.scoring, seed, case, options)

    def replace(self, **changes: Any) -> Problem:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def _edit(self, part: str, tensor: T) -> T:
        if self.case and (edit := getattr(HARD_INPUTS[self.case], part)) is not None:
            edit(tensor)
        return tensor

    def x(self) -> Tensor:
        """BF16 [M, H]: normal, with block amplitudes of 1/4 to 4. A token's row depends on its index alone."""
        rows = []
        for token in range(self.tokens):
            amplitude = 4 ** (2 * uniform(stream_of(self.seed, 10, token), self.hidden // BLOCK) - 1)
            rows.append(normal(stream_of(self.seed, 11, token), self.hidden) * amplitude.repeat_interleave(BLOCK))
        x = torch.stack(rows).bfloat16() if rows else torch.empty(0, self.hidden, dtype=torch.bfloat16)
        return self._edit("tokens", x)

    def logits(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[M, E]: normal with a spread of 1.5; rounding to BF16 makes exact duplicates, which rank by index."""
        rows = [1.5 * normal(stream_of(self.seed, 12, token), self.experts) for token in range(self.tokens)]
        logits = torch.stack(rows).float() if rows else torch.empty(0, self.experts)
        return self._edit("logits", logits).to(dtype)

    def bias(self) -> Tensor | None:
        """FP32 [E], both signs, magnitudes 0.02 to 0.3; None for softmax."""
        if self.scoring == "softmax":
            return None  # so disabled_experts is an ordinary problem there
        sign = 1 - 2 * (hash32(stream_of(self.seed, 13), self.experts) & 1)
        magnitude = 0.02 + 0.28 * uniform(stream_of(self.seed, 14), self.experts)
        return self._edit("bias", (sign * magnitude).float())

    def _scale(self, first: int, rows: int, columns: int, base: float) -> Tensor:
        """FP32 [rows, columns] of base * 10**(-1.05..1.05), numbered from ``first``: the golden ratio's multiples never repeat,
        and neighbours are far apart."""
        index = torch.arange(first, first + rows * columns, dtype=torch.float64)
        fraction = (index * 0.6180339887498949 + 0.1 * self.seed) % 1
        # The root mean square of 10**(2.1 u - 1.05) over u in (0, 1) is 3.6.
        return (base / 3.6 * 10 ** (2.1 * fraction - 1.05)).float().view(rows, columns)

    def expert(self, expert: int, device: torch.device | str = "cpu") -> ExpertTensors:
        """One expert's logical tensors. Gate sums spread by 4, up sums by 3, outputs by about 1."""
        h, i = self.hidden, self.inter
        hb, ib = h // BLOCK, i // BLOCK
        first = expert * 3 * hb * ib + 1
        weights = [
            fp8_matrix(kind, stream_of(self.seed, 20 + _KINDS[kind], expert), *shape, device)
            for kind, shape in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i)))
        ]
        x_spread = 1.7  # root mean square of the block amplitudes
        scales = (
            self._scale(first, ib, hb, 4 / (GATE_SPREAD * math.sqrt(h) * x_spread)),
            self._scale(first + hb * ib, ib, hb, 3 / (UP_SPREAD * math.sqrt(h) * x_spread)),
            self._scale(first + 2 * hb * ib, hb, ib, 1 / (DOWN_SPREAD * math.sqrt(i) * 8.5)),
        )
        tensors = ExpertTensors(*weights, *(scale.to(device) for scale in scales))
        return self._edit("expert", tensors) if expert == BAD_EXPERT else tensors

    def source(self, expert: int) -> ExpertWeights:
        """One expert as the reference takes it: row_major, up rows first."""
        e = self.expert(expert)
        w13 = torch.cat((e.up.view(torch.uint8), e.gate.view(torch.uint8)))
        return ExpertWeights(w13, torch.cat((e.up_scale, e.gate_scale)), e.down, e.down_scale)

    def packed(self, *, layout: str, w13_order: str, device: torch.device | str = "cpu") -> Packed:
        """All experts in a kernel's layout, made on ``device``."""
        packed = allocate(self.experts, self.hidden, self.inter, layout=layout, device=device)
        for expert in range(self.experts):
            pack_expert(packed, expert, self.expert(expert, device), layout=layout, w13_order=w13_order)
        return packed

    def reference(self, *, logits_dtype: torch.dtype = torch.float32, **changes: Any) -> MoeResult:
        """The reference's result; ``changes`` are fields of reference.Options."""
        fields: dict[str, Any] = {"scoring": self.scoring, "top_k": self.top_k, "w13_order": "up_gate", **self.options, **changes}
        return evaluate(self.x(), self.logits(logits_dtype), self.bias(), self.source, Options(**fields))


# ----------------------------------------------------------------------------------------------------------------- Hard inputs

BAD_TOKEN = 0
"""The token that a hard input damages; the others must not notice."""
BAD_EXPERT = 5
"""The expert whose weights a hard input damages: BAD_TOKEN's first choice, chosen by no other token."""
BAD_ROW = 130
"""w2's damaged row, or a row of its damaged scale block."""


def _set(index: Any, value: float) -> Callable[[Tensor], None]:
    def edit(tensor: Tensor) -> None:
        tensor[index] = value

    return edit


def _only_bad_token_chooses_bad_expert(logits: Tensor) -> None:
    logits[:, BAD_EXPERT] = -12.0
    logits[BAD_TOKEN, BAD_EXPERT] = 12.0


def _set_weight(name: str, index: Any, value: int | float) -> Callable[[ExpertTensors], None]:
    def edit(expert: ExpertTensors) -> None:
        tensor = getattr(expert, name)
        (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor)[index] = value

    return edit


def _bad_weight(required: str, name: str, index: Any, value: int | float) -> HardInput:
    level = _set(slice(None), 0.25)  # equal biases: the logits alone decide who chooses BAD_EXPERT
    return HardInput(required, logits=_only_bad_token_chooses_bad_expert, bias=level, expert=_set_weight(name, index, value))


HARD_INPUTS: dict[str, HardInput] = {
    "zero_token": HardInput("the token's out rows are exact zeros", tokens=_set(BAD_TOKEN, 0.0)),
    "inf_token": HardInput("only the token's rows are damaged", tokens=_set((BAD_TOKEN, 3), math.inf)),
    "minus_inf_token": HardInput("only the token's rows are damaged", tokens=_set((BAD_TOKEN, 200), -math.inf)),
    "nan_token": HardInput("only the token's rows are damaged", tokens=_set((BAD_TOKEN, 5), math.nan)),
    "nan_logits": HardInput("distinct ids in range; other tokens untouched", logits=_set(BAD_TOKEN, math.nan)),
    "some_nan_logits": HardInput("a NaN logit scores 0", logits=_set((BAD_TOKEN, slice(None, None, 2)), math.nan)),
    "inf_logits": HardInput("finite weights; the infinite logits share them", logits=_set((BAD_TOKEN, slice(3, None, 4)), math.inf)),
    "disabled_experts": HardInput("never chosen while K others exist", bias=_set(slice(None, None, 2), -math.inf)),
    "underflow": HardInput("weights are scale / K (sigmoid), finite", logits=_set(slice(None), -1000.0)),
    "all_ties": HardInput("experts 0..K-1", logits=_set(slice(None), 0.5), bias=_set(slice(None), 0.25)),
    "nan_w13": _bad_weight("the whole route is NaN", "gate", (7, 9), 0x7F),
    "nan_w2": _bad_weight("out is NaN in one row of the route", "down", (BAD_ROW, 9), 0xFF),
    "huge_w13_scale": _bad_weight("the whole route is NaN", "gate_scale", (0, 1), 3e38),
    "huge_w2_scale": _bad_weight("out is inf or NaN in one block of the route", "down_scale", (BAD_ROW // BLOCK, 0), 3e38),
}
"""Token and routing cases touch only BAD_TOKEN, except disabled_experts, underflow and all_ties, which touch every token."""


# --------------------------------------------------------------------------------------------------------------- Clamp fixture

CLAMP_LIMIT = 1.0
CLAMP_POINTS = ((3.0, 1.0), (-3.0, 1.0), (0.5, 3.0), (0.5, -3.0), (3.0, -3.0), (-3.0, 3.0))
"""(gate, up) pairs, before the clamp."""


def clamp_readings() -> dict[str, list[float]]:
    """act of each CLAMP_POINTS pair as the contract wants it, and under four misreadings."""

    def silu(gate: float) -> float:
        return gate / (1 + math.exp(-gate))

    def clip(value: float) -> float:
        return min(max(value, -CLAMP_LIMIT), CLAMP_LIMIT)

    return {
        "contract": [silu(min(g, CLAMP_LIMIT)) * clip(u) for g, u in CLAMP_POINTS],
        "none": [silu(g) * u for g, u in CLAMP_POINTS],
        "up_one_sided": [silu(min(g, CLAMP_LIMIT)) * min(u, CLAMP_LIMIT) for g, u in CLAMP_POINTS],
        "gate_two_sided": [silu(clip(g)) * clip(u) for g, u in CLAMP_POINTS],
        "post_silu": [min(silu(g), CLAMP_LIMIT) * clip(u) for g, u in CLAMP_POINTS],
    }


def clamp_expert(hidden: int, inter: int, device: torch.device | str = "cpu") -> ExpertTensors:
    """An expert that turns the token (1, 0, 0, ...) into act[i] = reading[i % 6] and out[n] = act[n % inter], up to FP8 rounding."""
    points = torch.tensor(CLAMP_POINTS).repeat(-(-inter // len(CLAMP_POINTS)), 1)[:inter]
    gate, up, down = torch.zeros(inter, hidden), torch.zeros(inter, hidden), torch.zeros(hidden, inter)
    gate[:, 0], up[:, 0] = points[:, 0], points[:, 1]
    down[torch.arange(hidden), torch.arange(hidden) % inter] = 1.0
    ones = torch.ones(inter // BLOCK, hidden // BLOCK)
    return ExpertTensors(*(w.to(_FP8).to(device) for w in (gate, up, down)), *(s.to(device) for s in (ones, ones, ones.T.contiguous())))
