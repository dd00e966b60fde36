"""Top-k routing of one token by one warp, and the weights of its routes.

Lane l holds experts l + 32 j, so that loads coalesce. Scores become monotone integer keys: a larger key is a better expert,
equal keys go to the lower index.

Key order: taken (0) < NaN score, which only a NaN bias can make (1) < -inf (a disabled expert) < finite < +inf.
A NaN logit counts as -inf, so ids are distinct and in range whatever the logits hold. The key puts +0.0 above -0.0.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, const_expr

from megamoe_aot.spec import KernelSpec

from . import ptx

NEGATIVE_INFINITY = 0xFF800000


def load_bias(spec: KernelSpec, bias: Any, lane: Any) -> list[Any]:
    """This lane's FP32 biases; an empty list where the scoring has none."""
    if spec.scoring == "softmax":
        return []
    return [ptx.load_global_f32(bias + Int64(lane + Uint32(32 * j)) * Int64(4)) for j in range(spec.experts // 32)]


def load_logit(spec: KernelSpec, logits: Any, index: Any) -> Float32:
    """The logit at flat position ``index``, as stored."""
    if spec.logits_dtype == "bf16":
        return ptx.load_global_bf16(logits + Int64(index) * Int64(2))
    return ptx.load_global_f32(logits + Int64(index) * Int64(4))


def load_logits(spec: KernelSpec, logits: Any, token: Any, lane: Any) -> list[Any]:
    """This lane's logits of ``token``: all loads are issued before the first is used."""
    first = token * Uint32(spec.experts) + lane
    return [load_logit(spec, logits, first + Uint32(32 * j)) for j in range(spec.experts // 32)]


def without_nan(logit: Any) -> Float32:
    return ptx.select(ptx.is_nan(logit), ptx.from_bits(Uint32(NEGATIVE_INFINITY)), logit)


def sigmoid(x: Any) -> Float32:
    """1 / (1 + exp(-x)): library exp and a correctly rounded divide, within 4 ulp everywhere."""
    return ptx.div(Float32(1.0), ptx.add(Float32(1.0), cute.math.exp(-x)))


def selection_keys(spec: KernelSpec, logits: list[Any], bias: list[Any]) -> list[Any]:
    """Monotone keys of what the scoring selects by: sigmoid + bias, or the logit itself for softmax."""
    keys = []
    for j, logit in enumerate(logits):
        value = without_nan(logit)
        if spec.scoring == "sigmoid_bias":
            value = ptx.add(sigmoid(value), bias[j])
        word = ptx.bits(value)
        negative = Uint32(0) - (word >> Uint32(31))
        key = word ^ (negative | Uint32(0x80000000))
        keys.append(ptx.select(ptx.is_nan(value), Uint32(1), key))
    return keys


SCRATCH_BYTES = 512
"""Shared memory that one routing warp needs: four arrays of 32 words."""
_MANY = 16


@cute.jit
def choose(spec: cutlass.Constexpr[KernelSpec], keys: list[Any], lane: Uint32, scratch: Uint32) -> Any:
    """The expert of rank ``lane`` (meaningful in lanes below top_k), by threshold and count; whole warp.

    The top_k-th largest of the 32 lane maxima bounds the top_k-th key from below. The few keys at or above it (as a rule
    8 to 12) are compacted in expert order by ballots and ranked by counting the larger ones, all ranks at once. Where more
    than 16 pass, because many keys are equal, the serial rounds decide.

    ``scratch``: 512 bytes of this warp's own: lane maxima | candidate keys | candidate experts | winners.
    """
    tops, candidates, experts, winners = (scratch + Uint32(128 * i) for i in range(4))
    mine_at = lane * Uint32(4)
    best = keys[0]
    for j in cutlass.range_constexpr(1, len(keys)):
        best = ptx.max_u32(best, keys[j])
    ptx.store_shared_u32(tops + mine_at, best)
    ptx.store_shared_u32(candidates + mine_at, Uint32(0))
    ptx.store_shared_u32(winners + mine_at, Uint32(0))
    ptx.sync_warp()
    larger = [Uint32(0)] * 4  # four counters: one would be a chain of 32 dependent additions
    for i in cutlass.range_constexpr(8):
        others = ptx.load_shared_u32x4(tops + Uint32(16 * i))
        for c in cutlass.range_constexpr(4):
            larger[c] = ptx.count_greater(larger[c], others[c], best)
    place = (larger[0] + larger[1]) + (larger[2] + larger[3])
    threshold = ptx.redux_min(ptx.select(place < Uint32(spec.top_k), best, Uint32(0xFFFFFFFF)))
    below = (Uint32(1) << lane) - Uint32(1)
    count = Uint32(0)
    for j in cutlass.range_constexpr(len(keys)):
        passes = keys[j] >= threshold
        votes = ptx.ballot(passes)
        at = count + ptx.population(votes & below)
        kept = passes & (at < Uint32(32))
        ptx.store_shared_u32_if(kept, candidates + at * Uint32(4), keys[j])
        ptx.store_shared_u32_if(kept, experts + at * Uint32(4), lane + Uint32(32 * j))
        count = count + ptx.population(votes)
    ptx.sync_warp()
    mine = Uint32(0)
    if count > Uint32(_MANY):
        mine = choose_in_rounds(spec, keys, lane)
    else:
        key = ptx.load_shared_u32(candidates + mine_at)
        better = [Uint32(0)] * 4
        for i in cutlass.range_constexpr(_MANY // 4):
            others = ptx.load_shared_u32x4(candidates + Uint32(16 * i))
            for c in cutlass.range_constexpr(4):  # an equal key with a lower place, so a lower expert, is better
                equal_counts = ptx.select(Uint32(4 * i + c) < lane, Uint32(1), Uint32(0))
                better[c] = ptx.count_greater(better[c], others[c], key - equal_counts)
        rank = (better[0] + better[1]) + (better[2] + better[3])
        wins = (lane < count) & (rank < Uint32(spec.top_k))
        known = ptx.select(lane < count, lane, Uint32(0))
        ptx.store_shared_u32_if(wins, winners + rank * Uint32(4), ptx.load_shared_u32(experts + known * Uint32(4)))
        ptx.sync_warp()
        mine = ptx.load_shared_u32(winners + mine_at)
    return mine


@cute.jit
def choose_in_rounds(spec: cutlass.Constexpr[KernelSpec], keys: list[Any], lane: Uint32) -> Any:
    """The same by top_k rounds of a warp-wide maximum."""
    mine = Uint32(0)
    for rank in cutlass.range(spec.top_k, unroll=1):
        best = keys[0]
        for j in cutlass.range_constexpr(1, len(keys)):
            best = ptx.max_u32(best, keys[j])
        top = ptx.redux_max(best)
        candidate = Uint32(0xFFFFFFFF)
        for j in cutlass.range_constexpr(len(keys) - 1, -1, -1):
            candidate = ptx.select(keys[j] == top, lane + Uint32(32 * j), candidate)
        expert = ptx.redux_min(candidate)
        for j in cutlass.range_constexpr(len(keys)):
            keys[j] = ptx.select(lane + Uint32(32 * j) == expert, Uint32(0), keys[j])
        mine = ptx.select(lane == Uint32(rank), expert, mine)
    return mine


@cute.jit
def weigh(spec: cutlass.Constexpr[KernelSpec], logits: Int64, token: Uint32, chosen: Uint32, lane: Uint32, scale: Float32) -> Any:
    """Whole warp: the weight of the token's route of rank ``lane``. ``chosen``: that route's expert."""
    row = token * Uint32(spec.experts)
    logit = without_nan(load_logit(spec, logits, row + chosen))
    if const_expr(spec.scoring == "softmax"):
        best = ptx.shuffle_f32(logit, Uint32(0))
        score = shifted_exp(logit, best)
    else:
        best = logit
        score = sigmoid(logit)
    total = Float32(1.0)
    if const_expr(spec.renormalise):
        total = ptx.shuffle_f32(score, Uint32(0))
        for k in cutlass.range_constexpr(1, spec.top_k):
            total = ptx.add(total, ptx.shuffle_f32(score, Uint32(k)))
    elif const_expr(spec.scoring == "softmax"):
        total = softmax_denominator(spec, logits, row, lane, best)
    weight = ptx.mul(ptx.div(score, total), scale)
    if const_expr(spec.renormalise):
        # 0/0: every chosen sigmoid underflowed. The scores say nothing, so the routes share the scale evenly.
        weight = ptx.select(total == Float32(0.0), ptx.div(scale, Float32(float(spec.top_k))), weight)
    return weight


@cute.jit
def store_routing(
    spec: cutlass.Constexpr[KernelSpec],
    logits: Int64,
    ids: Int64,
    weights: Int64,
    token: Uint32,
    rank: Uint32,
    chosen: Uint32,
    lane: Uint32,
    scale: Float32,
) -> None:
    """Write id and weight of the token's route ``rank``. ``chosen``: the expert of rank ``lane``. Whole warp."""
    weight = weigh(spec, logits, token, chosen, lane, scale)
    if ptx.per_lane(lane == rank):
        at = Int64(token * Uint32(spec.top_k) + rank) * Int64(4)
        ptx.store_global_u32(ids + at, chosen)
        ptx.store_global_f32(weights + at, weight)


def shifted_exp(logit: Any, best: Any) -> Float32:
    """exp(logit - best), with inf - inf = 0: equal logits share the probability, also at +-inf."""
    return cute.math.exp(ptx.select(logit == best, Float32(0.0), ptx.sub(logit, best)))


def softmax_denominator(spec: KernelSpec, logits: Any, row: Any, lane: Any, best: Any) -> Float32:
    """Sum over all experts: lane-local in index order, then a butterfly."""
    total = Float32(0.0)
    for j in range(spec.experts // 32):
        logit = without_nan(load_logit(spec, logits, row + lane + Uint32(32 * j)))
        total = ptx.add(total, shifted_exp(logit, best))
    for step in (16, 8, 4, 2, 1):
        total = ptx.add(total, ptx.shuffle_xor(total, step))
    return total
