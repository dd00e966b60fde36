"""The oracle: what one call computes, stage by stage, on the CPU.

Written from the numeric contract alone; it shares no code with the kernels. Every stage is a pure function of torch CPU
tensors, and :func:`moe_reference` chains them. Rows of GEMM1 are handled in logical order, up rows first. FP8 tensors are
e4m3fn, given as ``torch.float8_e4m3fn`` or as their ``uint8`` bits; the reference itself works on bits.

Staging is FP32. Two FP64 shortcuts stand in for FP32 instructions: ``exp`` is FP64 rounded to FP32 (so that a value does not depend on
its place in a vector), and an FMA is an exact FP64 product plus an FP64 addition rounded to FP32 (double rounding: it can differ
from a fused one in the last bit, about once in 2**29 additions).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .spec import KernelSpec

BLOCK = 128
FP8_MAX = 448.0
FP8_NAN = 0x7F
AMAX_FLOOR = 1e-10

SCORINGS = ("sigmoid_bias", "sigmoid_bias_grouped", "softmax", "precomputed")
ARITHMETICS = ("exact", "hopper")
ORDERS = ("ascending", "quad")


class ExpertWeights(NamedTuple):
    """One expert on the CPU, row_major: w13 FP8 [2I, H], w13_scale FP32 [2I/128, H/128], w2 FP8 [H, I], w2_scale FP32 [H/128, I/128]."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


ExpertSource = Callable[[int], ExpertWeights]


@dataclasses.dataclass(frozen=True)
class Options:
    """The scalars of a call, and the arithmetic and summation order of the engine that is imitated."""

    scoring: str
    top_k: int
    w13_order: str
    """Which half of w13's rows comes first: ``up_gate`` or ``gate_up``. Never guessed."""
    renormalise: bool = True
    scale: float = 1.0
    limit: float | None = None
    ue8m0: bool = False
    arithmetic: str = "exact"
    """``exact``: a 128-deep dot is exact, then rounded to FP32. ``hopper``: wgmma's 13-bit truncating accumulation."""
    parts: int = 1
    """K parts of GEMM1; each is summed on its own, then they add in order."""
    order: str = "ascending"
    """Order of the blocks inside a part, see :func:`sum_blocks`."""
    n_group: int = 1
    topk_group: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (
            ("scoring", SCORINGS),
            ("arithmetic", ARITHMETICS),
            ("order", ORDERS),
            ("w13_order", ("up_gate", "gate_up")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}")

    @classmethod
    def of(cls, spec: KernelSpec, *, w13_order: str, **changes: Any) -> Options:
        """What the spec's engine computes. ``w13_order`` is that of the tensors handed to the reference: ``up_gate`` after to_logical()."""
        hopper, work_list = spec.engine == "hopper", spec.structure == "list"
        fields: dict[str, Any] = {
            "scoring": spec.scoring,
            "top_k": spec.top_k,
            "renormalise": spec.renormalise,
            "scale": spec.scale,
            "limit": spec.limit,
            "ue8m0": spec.ue8m0,
            "arithmetic": "hopper" if hopper else "exact",
            "parts": spec.work_list.parts if work_list else spec.split.parts,
            "order": "quad" if hopper and not work_list else "ascending",
            "n_group": spec.groups or 1,
            "topk_group": spec.top_groups or 1,
        }
        return cls(w13_order=w13_order, **(fields | changes))


# ---------------------------------------------------------------------------------------------------------------- FP8 and FP32


def fp8_bits(values: Tensor) -> Tensor:
    """The uint8 bits of an FP8 tensor (a view)."""
    if values.dtype == torch.uint8:
        return values
    if values.dtype != torch.float8_e4m3fn:
        raise TypeError(f"FP8 weights must be torch.float8_e4m3fn, or uint8 holding its bits; got {values.dtype}")
    return values.view(torch.uint8)


def _fp8_table() -> Tensor:
    def value(code: int) -> float:
        exponent, mantissa = code >> 3 & 15, code & 7
        if code & 0x7F == FP8_NAN:
            return float("nan")
        magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        return -magnitude if code & 0x80 else magnitude

    return torch.tensor([value(code) for code in range(256)], dtype=torch.float32)


FP8_VALUES = _fp8_table()
"""FP32 [256]: the value of every e4m3fn code."""


def decode_fp8(bits: Tensor) -> Tensor:
    """uint8 bits -> FP32 values, same shape."""
    return FP8_VALUES.index_select(0, bits.reshape(-1).int()).view(bits.shape)


def encode_fp8(values: Tensor) -> Tensor:
    """FP32 -> uint8 bits: round to nearest even, saturate to +-448 (also infinities), NaN -> 0x7f."""
    bits = values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), FP8_NAN, bits)


def exp(x: Tensor) -> Tensor:
    """FP32 exponential, correctly rounded but for rare double rounding."""
    return torch.exp(x.double()).float()


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """FP32 a*b + c with one rounding (see the module's note)."""
    return (a.double() * b.double() + c.double()).float()


def monotone_key(x: Tensor) -> Tensor:
    """FP32 -> int64 that orders like the floats: negatives flip all bits, others the sign bit. -0 sorts below +0."""
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, bits ^ 0xFFFFFFFF, bits | 1 << 31)


# --------------------------------------------------------------------------------------------------------------------- Routing


@dataclasses.dataclass(frozen=True)
class Routing:
    """The choice of experts. Per-expert tensors are None where ids and weights were inputs."""

    ids: Tensor
    """INT32 [M, K], best first; -1 means no expert (precomputed only)."""
    weights: Tensor
    """FP32 [M, K]."""
    logits: Tensor | None = None
    """FP32 [M, E], NaN replaced by -inf."""
    bias: Tensor | None = None
    """FP32 [E]; None for softmax too."""
    scores: Tensor | None = None
    """FP32 [M, E]: sigmoid, or softmax over all E."""
    keys: Tensor | None = None
    """FP32 [M, E]: what the choice compares, before groups are dropped."""
    groups: Tensor | None = None
    """FP32 [M, n_group]: the group scores (sigmoid_bias_grouped)."""


def sigmoid(logits: Tensor) -> Tensor:
    """FP32 1 / (1 + exp(-x))."""
    return 1 / (1 + exp(-logits))


def softmax(logits: Tensor) -> Tensor:
    """FP32 softmax of [M, E] with the maximum subtracted; a logit equal to the maximum has difference 0 even where both are infinite."""
    top = logits.amax(-1, keepdim=True)
    powers = exp(torch.where(logits == top, 0.0, logits - top))
    return powers / powers.sum(-1, keepdim=True, dtype=torch.float64).float()


def choose(keys: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest int64 keys of [M, N], best first, the lower index first on equal keys; int64 [M, count]."""
    return torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :count]


def group_scores(keys: Tensor, n_group: int) -> Tensor:
    """FP32 [M, n_group]: the sum of the two best keys of each group of consecutive experts, from keys [M, E]."""
    best = keys.view(len(keys), n_group, keys.shape[1] // n_group).topk(2, dim=-1).values
    return best[..., 0] + best[..., 1]


def drop_groups(keys: Tensor, kept: Tensor, n_group: int) -> Tensor:
    """Integer keys [M, E] with -1, below every real key, for the experts outside the kept groups (int64 [M, topk_group])."""
    allowed = torch.zeros(len(keys), n_group, dtype=torch.bool).scatter_(1, kept, True)
    return torch.where(allowed.repeat_interleave(keys.shape[1] // n_group, 1), keys, -1)


def weights_of(scores: Tensor, ids: Tensor, *, renormalise: bool, scale: float) -> Tensor:
    """FP32 [M, K] routing weights of the chosen experts, from scores [M, E] and ids [M, K].

    The sum runs in rank order. Where all chosen scores are 0 (every sigmoid underflowed) each weight is scale / K.
    """
    chosen = scores.gather(1, ids.long())
    if not renormalise:
        return chosen * scale
    total = torch.zeros(len(ids))
    for k in range(ids.shape[1]):
        total = total + chosen[:, k]
    share = torch.where(total[:, None] == 0, torch.tensor(1 / ids.shape[1]), chosen / total[:, None])
    return share * scale


def route(
    logits: Tensor,
    bias: Tensor | None,
    *,
    scoring: str,
    top_k: int,
    renormalise: bool = True,
    scale: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
) -> Routing:
    """Choose experts: logits BF16 or FP32 [M, E], bias FP32 [E] (None for softmax).

    A NaN logit counts as -inf, so its score is 0.
    """
    experts = logits.shape[1]
    if (bias is None) != (scoring == "softmax"):
        raise ValueError(f"{scoring} {'takes no' if scoring == 'softmax' else 'needs a'} bias")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1 to {experts} (the experts); got {top_k}")
    logits = logits.float()
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    scores = softmax(logits) if bias is None else sigmoid(logits)
    keys = logits if bias is None else scores + bias
    ranks, groups = monotone_key(keys), None
    if scoring == "sigmoid_bias_grouped":
        if experts % n_group or experts // n_group < 2 or topk_group * (experts // n_group) < top_k or topk_group > n_group:
            raise ValueError(f"{n_group} groups, {topk_group} kept, cannot yield {top_k} of {experts} experts")
        groups = group_scores(keys, n_group)
        ranks = drop_groups(ranks, choose(monotone_key(groups), topk_group), n_group)
    ids = choose(ranks, top_k)
    weights = weights_of(scores, ids, renormalise=renormalise, scale=scale)
    return Routing(ids.int(), weights, logits, bias, scores, keys, groups)


# ---------------------------------------------------------------------------------------------------------------- Quantisation


def block_amax(values: Tensor) -> Tensor:
    """FP32 [..., N] -> [..., N/128]: the largest magnitude of each block, NaN ignored."""
    return _blocks(values.abs().nan_to_num(nan=0.0, posinf=torch.inf)).amax(-1)


def _blocks(values: Tensor) -> Tensor:
    """[..., N] -> [..., N/128, 128]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)


def power_of_two_above(scale: Tensor) -> Tensor:
    """Positive FP32 rounded up to a power of two."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def quantise_tokens(x: Tensor, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """BF16 [M, H] -> FP8 bits [M, H] and FP32 scales [M, H/128]: q = fp8(x * (1 / scale))."""
    values = x.float()
    scale = block_amax(values).clamp_min(AMAX_FLOOR) / FP8_MAX
    if ue8m0:
        scale = power_of_two_above(scale.clamp_min(AMAX_FLOOR))
    return encode_fp8(values * (1 / scale).repeat_interleave(BLOCK, -1)), scale


def quantise_hidden(act: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 [I] -> FP8 bits [I] and FP32 scales [I/128]: h = fp8(act / scale), a correctly rounded divide."""
    scale = block_amax(act).clamp_min(AMAX_FLOOR) / FP8_MAX
    return encode_fp8(act / scale.repeat_interleave(BLOCK)), scale


# ----------------------------------------------------------------------------------------------------------------------- GEMMs


def block_dots(weights: Tensor, vector: Tensor, arithmetic: str = "exact") -> Tensor:
    """FP8 bits [N, K] and [K] -> FP32 [N, K/128]: the dot of every row with the vector, per 128-wide block."""
    rows, column = _blocks(decode_fp8(weights)), _blocks(decode_fp8(vector))
    if arithmetic == "hopper":
        return _hopper_dots(rows, column)
    # Products are multiples of 2**-18 below 2**18: FP64 holds every partial sum exactly, whatever the order.
    return torch.einsum("nbk,bk->nb", rows.double(), column.double()).float()


def _hopper_dots(rows: Tensor, column: Tensor) -> Tensor:
    """wgmma e4m3 -> f32: FP32 [N, B, 128] and [B, 128] -> [N, B]; four k32 steps, chained through the accumulator.

    One step aligns its 32 products and the accumulator to the largest exponent among them, keeps 13 fraction bits of each
    (truncating), adds, and truncates the sum to 13 fraction bits. A product's exponent is the sum of its operands' exponents.
    Aligned terms are integers below 2**16, so their FP32 sum is exact in any order.
    """
    row_power, column_power = _operand_power(rows), _operand_power(column)
    total = torch.zeros(rows.shape[:2])
    for k in range(0, BLOCK, 32):
        step = slice(k, k + 32)
        top = (row_power[..., step] * column_power[..., step]).amax(-1)
        unit = torch.maximum(top, _power(total)) * 2.0**-13
        unit = torch.where(unit == 0, 1.0, unit)  # nothing but zeros
        aligned = (rows[..., step] * column[..., step] / unit[..., None]).trunc_().sum(-1) + (total / unit).trunc()
        total = _truncate13(aligned * unit) + 0.0  # -0 becomes +0
    return total


def _power(values: Tensor) -> Tensor:
    """FP32 -> 2**exponent of each normal value, 0 for 0."""
    return (values.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)


def _operand_power(values: Tensor) -> Tensor:
    """The same for decoded e4m3, whose subnormals have exponent -6."""
    return torch.where(values == 0, 0.0, _power(values).clamp_min(2.0**-6))


def _truncate13(values: Tensor) -> Tensor:
    """FP32 without the ten lowest fraction bits; NaN stays NaN."""
    return torch.where(values.isnan(), values, (values.view(torch.int32) & ~0x3FF).view(torch.float32))


def sum_blocks(dots: Tensor, scales: Tensor, *, parts: int = 1, order: str = "ascending") -> Tensor:
    """FP32 [N, B] dots and scales -> [N]: sum of dot * scale. ``parts`` equal runs of blocks are summed apart, then added in order.

    ``ascending``: block by block with FMA. ``quad``: lane q of 4 takes, group of 8 blocks by group, blocks 2q and 2q+1 with FMA;
    then (q0 + q2) + (q1 + q3).
    """
    blocks = dots.shape[1]
    if blocks % parts:
        raise ValueError(f"{blocks} K blocks cannot be cut in {parts} equal parts")
    one_part = _sum_ascending if order == "ascending" else _sum_quad
    sums = [one_part(d, s) for d, s in zip(dots.chunk(parts, 1), scales.chunk(parts, 1), strict=True)]
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return total


def _sum_ascending(dots: Tensor, scales: Tensor) -> Tensor:
    total = torch.zeros(len(dots))
    for block in range(dots.shape[1]):
        total = fma(dots[:, block], scales[:, block], total)
    return total


def _sum_quad(dots: Tensor, scales: Tensor) -> Tensor:
    pad = (0, -dots.shape[1] % 8)
    dots, scales = (torch.nn.functional.pad(values, pad).view(len(values), -1, 4, 2) for values in (dots, scales))
    lanes = torch.zeros(len(dots), 4)
    for group in range(dots.shape[1]):
        for column in range(2):
            lanes = fma(dots[:, group, :, column], scales[:, group, :, column], lanes)
    return (lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3])


def _gemm(bits: Tensor, scale: Tensor, weights: Tensor, weights_scale: Tensor, *, arithmetic: str, parts: int, order: str) -> Tensor:
    """FP8 bits [K] with scales [K/128], weights FP8 [N, K] with scales [N/128, K/128] -> FP32 [N]."""
    dots = block_dots(weights, bits, arithmetic)
    scales = (weights_scale * scale).repeat_interleave(BLOCK, 0)
    return sum_blocks(dots, scales, parts=parts, order=order)


def gemm1(
    bits: Tensor, scale: Tensor, w13: Tensor, w13_scale: Tensor, *, arithmetic: str = "exact", parts: int = 1, order: str = "ascending"
) -> Tensor:
    """Token FP8 bits [H], FP32 [H/128]; w13 FP8 bits [2I, H], FP32 [2I/128, H/128] -> FP32 [2I] in w13's row order."""
    return _gemm(bits, scale, w13, w13_scale, arithmetic=arithmetic, parts=parts, order=order)


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """FP32 [I]: gate clamped from above, up from both sides (NaN passes), then gate / (1 + exp(-gate)) * up."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + exp(-gate)) * up


def gemm2(bits: Tensor, scale: Tensor, w2: Tensor, w2_scale: Tensor, *, arithmetic: str = "exact", order: str = "ascending") -> Tensor:
    """Hidden FP8 bits [I], FP32 [I/128]; w2 FP8 bits [H, I], FP32 [H/128, I/128] -> BF16 [H]."""
    return _gemm(bits, scale, w2, w2_scale, arithmetic=arithmetic, parts=1, order=order).bfloat16()


def finalize(out: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    """out BF16 [M*K, H], weights FP32 [M, K], shared BF16 [M, H] or None -> BF16 [M, H]: weighted sum in rank order, shared last."""
    tokens, top_k = weights.shape
    rows = out.float().view(tokens, top_k, -1)
    total = torch.zeros(tokens, rows.shape[2])
    for k in range(top_k):
        total = fma(weights[:, k, None], rows[:, k], total)
    return (total if shared is None else total + shared.float()).bfloat16()


# -------------------------------------------------------------------------------------------------------------- The whole call


class Route(NamedTuple):
    """The stages of one route (token, expert)."""

    sums: Tensor
    """FP32 [2I]: GEMM1, up rows first."""
    act: Tensor
    """FP32 [I]."""
    hidden: Tensor
    """uint8 [I]: FP8 bits."""
    hidden_scale: Tensor
    """FP32 [I/128]."""
    out: Tensor
    """BF16 [H]."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Quantised tokens and the experts' weights: computes any route on demand."""

    x_q: Tensor
    """uint8 [M, H]: FP8 bits."""
    x_scale: Tensor
    """FP32 [M, H/128]."""
    source: ExpertSource
    options: Options

    def expert(self, expert: int) -> ExpertWeights:
        """One expert as FP8 bits, up rows first."""
        w13, w13_scale, w2, w2_scale = self.source(expert)
        w13 = fp8_bits(w13)
        if self.options.w13_order == "gate_up":
            w13, w13_scale = _swap_halves(w13), _swap_halves(w13_scale)
        return ExpertWeights(w13, w13_scale, fp8_bits(w2), w2_scale)

    def route(self, token: int, weights: ExpertWeights) -> Route:
        """All stages of one token through one expert (as from :meth:`expert`)."""
        o = self.options
        sums = gemm1(
            self.x_q[token],
            self.x_scale[token],
            weights.w13,
            weights.w13_scale,
            arithmetic=o.arithmetic,
            parts=o.parts,
            order=o.order,
        )
        up, gate = sums.chunk(2)
        act = swiglu(gate, up, o.limit)
        hidden, hidden_scale = quantise_hidden(act)
        return Route(sums, act, hidden, hidden_scale, self.output(hidden, hidden_scale, weights))

    def output(self, hidden: Tensor, hidden_scale: Tensor, weights: ExpertWeights) -> Tensor:
        """BF16 [H] of given hidden FP8 bits [I] and scales [I/128]."""
        return gemm2(hidden, hidden_scale, weights.w2, weights.w2_scale, arithmetic=self.options.arithmetic, order=self.options.order)


def _swap_halves(rows: Tensor) -> Tensor:
    first, second = rows.chunk(2)
    return torch.cat((second, first))


@dataclasses.dataclass(frozen=True)
class MoeResult:
    """What a call returns, and its stages. R = M*K routes; a route without an expert (id -1) is zeros throughout."""

    out: Tensor
    """BF16 [R, H], unweighted."""
    routing: Routing
    layer: Layer
    sums: Tensor
    """FP32 [R, 2I]: GEMM1, up rows first."""
    act: Tensor
    """FP32 [R, I]."""
    hidden: Tensor
    """uint8 [R, I]: FP8 bits."""
    hidden_scale: Tensor
    """FP32 [R, I/128]."""

    @property
    def ids(self) -> Tensor:
        """INT32 [M, K]."""
        return self.routing.ids

    @property
    def weights(self) -> Tensor:
        """FP32 [M, K]."""
        return self.routing.weights


def moe_reference(
    x: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    *,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    **options: Any,
) -> MoeResult:
    """The whole call on stacked row_major weights.

    x BF16 [M, H], logits BF16/FP32 [M, E], bias FP32 [E] or None; w13 FP8 [E, 2I, H], w13_scale FP32 [E, 2I/128, H/128],
    w2 FP8 [E, H, I], w2_scale FP32 [E, H/128, I/128]. The tensors may lie on any device: only the chosen experts are copied.
    ``options`` are the fields of :class:`Options`. For ``precomputed`` scoring give ids INT32 [M, K] and weights FP32 [M, K].
    """

    def source(expert: int) -> ExpertWeights:
        return ExpertWeights(*(tensor[expert].cpu() for tensor in (w13, w13_scale, w2, w2_scale)))

    if ids is not None and bool((ids >= len(w13)).any()):
        raise ValueError(f"ids must be -1 to {len(w13) - 1}; got {int(ids.max())}")
    return evaluate(x, logits, bias, source, Options(**options), ids=ids, weights=weights)


def evaluate(
    x: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    source: ExpertSource,
    options: Options,
    *,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> MoeResult:
    """:func:`moe_reference` with weights that are fetched, or generated, one expert at a time."""
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        raise TypeError(f"x must be BF16 [M, H]; got {x.dtype} {list(x.shape)}")
    routing = routing_of(logits, bias, options, ids, weights)
    if len(routing.ids) != len(x):
        raise ValueError(f"x has {len(x)} tokens, the routing {len(routing.ids)}")
    layer = Layer(*quantise_tokens(x.cpu(), ue8m0=options.ue8m0), source, options)
    routes: dict[int, Route] = {}
    for expert, where in _by_expert(routing.ids):
        expert_weights = layer.expert(expert)
        for index in where:
            routes[index] = layer.route(index // options.top_k, expert_weights)
    return _collect(routes, routing, layer)


def routing_of(logits: Tensor | None, bias: Tensor | None, o: Options, ids: Tensor | None = None, weights: Tensor | None = None) -> Routing:
    """A call's routing: :func:`route` with the options' scoring, or the precomputed ids and weights [M, K].

    Raises:
        ValueError: what the scoring needs is missing, or what it does not take is given.
    """
    if o.scoring == "precomputed":
        if ids is None or weights is None or ids.shape != weights.shape or ids.shape[1] != o.top_k or bool((ids < -1).any()):
            raise ValueError(f"precomputed scoring needs ids (-1 or an expert) and weights, both [M, {o.top_k}]")
        return Routing(ids.cpu().int(), weights.cpu().float())
    if logits is None or ids is not None or weights is not None:
        raise ValueError(f"{o.scoring} needs logits, and computes ids and weights itself")
    return route(
        logits.cpu(),
        None if bias is None else bias.cpu(),
        scoring=o.scoring,
        top_k=o.top_k,
        renormalise=o.renormalise,
        scale=o.scale,
        n_group=o.n_group,
        topk_group=o.topk_group,
    )


def _by_expert(ids: Tensor) -> Iterator[tuple[int, list[int]]]:
    """(expert, its routes) for every chosen expert."""
    flat = ids.flatten().tolist()
    for expert in sorted(set(flat) - {-1}):
        yield expert, [index for index, chosen in enumerate(flat) if chosen == expert]


def _collect(routes: dict[int, Route], routing: Routing, layer: Layer) -> MoeResult:
    """Stack the routes; those without an expert become zeros."""
    hidden = layer.x_q.shape[1]
    inter = len(next(iter(routes.values())).act) if routes else layer.source(0).w2_scale.shape[1] * BLOCK
    empty = Route(
        sums=torch.zeros(2 * inter),
        act=torch.zeros(inter),
        hidden=torch.zeros(inter, dtype=torch.uint8),
        hidden_scale=torch.zeros(inter // BLOCK),
        out=torch.zeros(hidden, dtype=torch.bfloat16),
    )
    rows = [routes.get(index, empty) for index in range(routing.ids.numel())]
    stacked = {name: torch.stack([getattr(row, name) for row in rows] or [value])[: len(rows)] for name, value in empty._asdict().items()}
    return MoeResult(routing=routing, layer=layer, **stacked)


# ------------------------------------------------------------------------------------------------------------------- FP64 model


def dequantised_model(x: Tensor, ids: Tensor, source: ExpertSource, *, w13_order: str, limit: float | None) -> Tensor:
    """FP64 [M*K, H]: the experts with dequantised weights and no activation quantisation. x BF16 [M, H], ids INT32 [M, K]."""
    out = torch.zeros(ids.numel(), x.shape[1], dtype=torch.float64)
    for expert, where in _by_expert(ids.cpu()):
        w13, w13_scale, w2, w2_scale = source(expert)
        halves = (_dequantise(w13, w13_scale) @ x.cpu().double().T).chunk(2)
        up, gate = halves if w13_order == "up_gate" else halves[::-1]
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        rows = (_dequantise(w2, w2_scale) @ (gate / (1 + torch.exp(-gate)) * up)).T
        for index in where:
            out[index] = rows[index // ids.shape[1]]
    return out


def _dequantise(weights: Tensor, scale: Tensor) -> Tensor:
    blocks = decode_fp8(fp8_bits(weights)).double()
    return blocks * scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
