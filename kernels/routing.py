"""Top-k routing of one token by one warp, and the weights of its routes.

Lane l holds experts l + 32 j, so that loads coalesce. Scores become monotone integer keys: a larger key is a better expert,
equal keys go to the lower index.

Key order: taken (0) < NaN score, which only a NaN bias can make (1) < -inf (a disabled expert) < finite < +inf.
A NaN logit counts as -inf, so ids are distinct and in range whatever the logits hold. The key puts +0.0 above -0.0.

Groups (sigmoid_bias_grouped) are runs of consecutive experts, so each holds whole registers: group g of experts 32 s g .. 32 s (g + 1) - 1
is registers s g .. s (g + 1) - 1 of all lanes. Group scores are ordered by the same keys: a sum that is NaN (a NaN bias, or +inf and -inf
together) ranks below -inf, and the lower group wins a tie. The experts of dropped groups become taken.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, const_expr

from megamoe_aot.spec import KernelSpec

from . import ptx
from .division import sigmoid_all

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
    """Whole warp: monotone keys of what the scoring selects by, sigmoid + bias, or the logit itself for softmax."""
    scores: list[Any] = [None] * len(logits)
    if spec.structure == "list" and spec.scoring != "softmax":
        scores = sigmoid_all([without_nan(logit) for logit in logits])  # side by side: no cubin of the cluster structure may change for it
    if spec.groups > spec.top_groups:
        return keys_of_best_groups(spec, logits, bias, scores)
    return [selection_key(spec, logit, bias[j] if bias else None, scores[j]) for j, logit in enumerate(logits)]


def selection_key(spec: KernelSpec, logit: Any, bias: Any, score: Any = None) -> Uint32:
    """``score``: the logit's sigmoid where it is known."""
    value = without_nan(logit) if score is None else score
    if spec.scoring != "softmax":
        value = ptx.add(sigmoid(value) if score is None else value, bias)
    return monotone_key(value)


def monotone_key(value: Any) -> Uint32:
    word = ptx.bits(value)
    negative = Uint32(0) - (word >> Uint32(31))
    key = word ^ (negative | Uint32(0x80000000))
    return ptx.select(ptx.is_nan(value), Uint32(1), key)


def value_of(key: Any) -> Float32:
    """The value of a monotone key; a NaN for the keys 0 and 1."""
    negative = (key >> Uint32(31)) - Uint32(1)
    return ptx.from_bits(key ^ (negative | Uint32(0x80000000)))


def keys_of_best_groups(spec: KernelSpec, logits: list[Any], bias: list[Any], scores: list[Any]) -> list[Any]:
    """Whole warp: the selection keys, 0 for the experts outside the top_groups best groups.

    A group's second best is looked for only after the next group's best has been asked for. The machine code divides in a block
    of its own per score and moves nothing across, so in this order both reductions are under way while later scores are computed.
    """
    registers = spec.experts // spec.groups // 32
    lanes = 1 << (spec.groups - 1).bit_length()  # lanes g, g + lanes, ... all rank group g
    group = ptx.special("%laneid") & Uint32(lanes - 1)
    best = second = holders = Uint32(0)  # of this lane's group; holders: the lanes that have the best, second: the best elsewhere
    keys: list[Any] = []

    def look_for_second(g: int, top: Any, high: Any, low: Any) -> None:
        nonlocal best, second, holders
        votes = ptx.ballot(high == top)
        rest = ptx.redux_max(ptx.select(high == top, low, high))
        mine = group == Uint32(g)
        best, second, holders = ptx.select(mine, top, best), ptx.select(mine, rest, second), ptx.select(mine, votes, holders)

    pending: tuple[Any, ...] = ()
    for g in range(spec.groups):
        keys += [selection_key(spec, logits[j], bias[j], scores[j]) for j in range(registers * g, registers * (g + 1))]
        high, low = two_best(keys[registers * g :])
        top = ptx.redux_max(high)
        if pending:
            look_for_second(*pending)
        pending = g, top, high, low
    look_for_second(*pending)
    twice = (holders & (holders - Uint32(1))) != Uint32(0)
    score = monotone_key(ptx.add(value_of(best), value_of(ptx.select(twice, best, second))))
    kept = best_groups(spec, score, group, lanes)
    return [keep_if(kept, 1 << j // registers, key) for j, key in enumerate(keys)]


def two_best(keys: list[Any]) -> tuple[Any, Any]:
    """This lane's two best of one or more keys; the second of one is 0."""
    high, low = keys[0], Uint32(0)
    for key in keys[1:]:
        high, low = ptx.max_u32(high, key), ptx.max_u32(low, ptx.min_u32(high, key))
    return high, low


def best_groups(spec: KernelSpec, score: Any, group: Any, lanes: int) -> Uint32:
    """Whole warp: a mask of the top_groups best groups. ``score``: the key (at least 1) of ``group``, which is the lane modulo ``lanes``.

    Each of a group's lanes compares it with ``each`` of the groups; the ballots' bits lanes * s + group add up to its rank.
    """
    each = max(1, lanes * lanes // 32)
    sharing = lanes // each  # lanes per group that have groups to compare with
    bits_of_group = Uint32(sum(1 << lanes * s for s in range(sharing))) << group
    first = ptx.special("%laneid") // Uint32(lanes) * Uint32(each)
    rank = Uint32(0)
    for i in range(each):
        other = first + Uint32(i)
        before = ptx.select(other < group, Uint32(1), Uint32(0))  # an equal score of a lower group is better
        rank = rank + ptx.population(ptx.ballot(ptx.shuffle(score, other) > score - before) & bits_of_group)
    return ptx.ballot(rank < Uint32(spec.top_groups))


def keep_if(mask: Any, bit: int, key: Any) -> Uint32:
    """``mask & bit ? key : 0``. (LLVM would shift the mask first.)"""
    text = f"{{ .reg .pred p; .reg .b32 m; and.b32 m, $1, {bit}; setp.ne.b32 p, m, 0; selp.b32 $0, $2, 0, p; }}"
    return ptx.asm(text, "=r,r,r", [mask, key], [Uint32], side=False)


SCRATCH_BYTES = 512
"""Shared memory that one routing warp needs: four arrays of 32 words."""
_MANY = 16


@cute.jit
def choose(spec: cutlass.Constexpr[KernelSpec], keys: list[Any], lane: Uint32, scratch: Uint32) -> Any:
    """The expert of rank ``lane`` (meaningful in lanes below top_k), by threshold and count; whole warp.

    The top_k-th largest of the 32 lane maxima bounds the top_k-th key from below. The few keys at or above it (as a rule
    8 to 12) are compacted in expert order by ballots and ranked by counting the larger ones, all ranks at once. Where more
    than 16 pass, because many keys are equal, the serial rounds decide. At least top_k keys are not taken, and no lane has taken keys
    only (a kept group has experts in every lane): the threshold is never 0.

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
