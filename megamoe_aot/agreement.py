"""How far a call may be from the reference: the contract's rules of agreement, with a report that names the place.

Three judgements: :func:`compare` (an engine against the reference with its own arithmetic: tight, every exception explained),
:func:`compare_engines` (the Hopper engine against exact arithmetic) and :func:`model_error` (against the FP64 model: the price of FP8).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from .reference import BLOCK, FP8_VALUES, Layer, MoeResult, Options, Route, Routing, choose, decode_fp8, monotone_key, weights_of

ROUTE_BOUND = 1.5e-3
"""Largest relative Frobenius error of a route against the reference with the engine's own arithmetic."""
EDGE = 1e-5
"""A hidden value this close (relative) to an FP8 rounding edge may be rounded to either side."""
HELPED_SHARE = 10
"""At most one route in this many may need a hidden value re-rounded."""
WEIGHT_BOUND = 1e-6
TIE_ULPS = 4
MODEL_BOUND = 7e-2
ENGINE_MEDIAN_BOUND = 5e-3
ENGINE_ROUTE_BOUND = 5e-2

_FP8_EDGES = ((FP8_VALUES[:0x7E] + FP8_VALUES[1:0x7F]) / 2).double()
"""FP64 [126]: edge c separates the values that round to code c from those that round to code c + 1."""


@dataclasses.dataclass(frozen=True)
class Report:
    """How far a call is from the reference. Errors are relative Frobenius norms per route."""

    ok: bool
    reason: str
    """Every broken rule, with its place; empty where ok."""
    ids_equal: bool
    """Bitwise equal ids; a permutation inside a tie is ok without being equal."""
    routes: int
    worst_route: int
    worst_error: float
    """After hidden values on a rounding edge were re-rounded where that helped."""
    median: float
    """Before any help."""
    helped: int
    """Routes that needed a hidden value re-rounded."""
    flips: int
    """Hidden values re-rounded, over all routes."""


def compare(result: MoeResult, out: Tensor, ids: Tensor, weights: Tensor, *, bound: float = ROUTE_BOUND, edge: float = EDGE) -> Report:
    """Judge an engine's out BF16 [M*K, H], ids INT32 [M, K] and weights FP32 [M, K] against the reference with its own arithmetic.

    The contract asks that 90 % of the routes need no re-rounding. Calls have as few as K routes, so one helped route is always
    allowed here; sum ``helped`` and ``routes`` over the calls to judge the share over many.
    """
    out, ids, weights = out.cpu(), ids.cpu(), weights.cpu()
    for name, got, want in (("out", out, result.out), ("ids", ids, result.ids), ("weights", weights, result.weights)):
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(f"{name} must be {want.dtype} {list(want.shape)}; got {got.dtype} {list(got.shape)}")
    problems = check_ids(result.routing, ids, result.layer.options)
    raw, final, flips = [0.0], [0.0], [0]
    if not problems and len(out):
        problems = check_weights(result, ids, weights)
        raw, final, flips = _compare_routes(result, out, ids, bound, edge)
        for index, error in enumerate(final):
            if not error <= bound:
                problems.append(_describe(result, out, ids, index, error, bound))
    helped = sum(count > 0 for count in flips)
    if helped > max(1, len(out) // HELPED_SHARE):
        problems.append(f"{helped} of {len(out)} routes need a hidden value re-rounded; at most 1 in {HELPED_SHARE} may")
    worst = max(range(len(final)), key=final.__getitem__)
    return Report(
        ok=not problems,
        reason="\n".join(problems),
        ids_equal=bool(torch.equal(ids, result.ids)),
        routes=len(out),
        worst_route=worst,
        worst_error=final[worst],
        median=sorted(raw)[len(raw) // 2],
        helped=helped,
        flips=sum(flips),
    )


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius norm of the difference over the finite values; inf where NaN, +inf or -inf stand in different places."""
    got, want = got.double(), want.double()
    finite = want.isfinite()
    if not torch.equal(got.nan_to_num(nan=1e300)[~finite], want.nan_to_num(nan=1e300)[~finite]) or not got[finite].isfinite().all():
        return float("inf")
    difference, norm = float((got - want)[finite].norm()), float(want[finite].norm())
    return difference / norm if norm else (float("inf") if difference else 0.0)


def check_ids(routing: Routing, ids: Tensor, options: Options) -> list[str]:
    """Broken rules of ids INT32 [M, K]: equal to the reference, or a permutation inside ties of at most 4 ulp.

    Softmax compares the logits themselves, so nothing there is a rounding tie. Experts with bitwise the same inputs always rank by index.
    """
    problems = []
    for token, (got, want) in enumerate(zip(ids.tolist(), routing.ids.tolist(), strict=True)):
        if got == want:
            continue
        ok = options.scoring.startswith("sigmoid") and _is_tie(routing, token, got, options)
        if not ok:
            problems.append(f"token {token}: experts {got}, expected {want}")
    return problems


def _is_tie(routing: Routing, token: int, got: list[int], options: Options) -> bool:
    assert routing.keys is not None and routing.scores is not None and routing.logits is not None and routing.bias is not None
    keys, scores, logits, bias = routing.keys[token], routing.scores[token], routing.logits[token], routing.bias
    if len(set(got)) < len(got) or min(got) < 0 or max(got) >= len(keys):
        return False
    twins = [(logits == logits[expert]) & (bias == bias[expert]) for expert in got]
    return any(
        _ranks_within_ties(keys, scores, allowed, got) and _twins_in_order(twins, allowed, got)
        for allowed in _group_choices(routing, token, options)
    )


def _twins_in_order(twins: list[Tensor], allowed: Tensor, got: list[int]) -> bool:
    """Whether every allowed expert with the same inputs as a chosen one, and a lower index, stands before it."""
    return all(
        set((same & allowed)[:expert].nonzero().flatten().tolist()) <= set(got[:rank])
        for rank, (expert, same) in enumerate(zip(got, twins, strict=True))
    )


def _ranks_within_ties(keys: Tensor, scores: Tensor, allowed: Tensor, got: list[int]) -> bool:
    """Whether each rank of ``got`` holds an expert of the same tie as the sorted keys' expert of that rank."""
    if not allowed[got].all():
        return False
    order = choose(torch.where(allowed, monotone_key(keys), -1)[None], int(allowed.sum()))[0]
    size = torch.maximum(keys.abs(), scores)[order].nan_to_num(posinf=0.0)
    gap = (keys[order][:-1].double() - keys[order][1:].double()).nan_to_num(nan=0.0)
    tie = torch.zeros(len(keys), dtype=torch.long)
    tie[order[1:]] = (gap > TIE_ULPS * _ulp(torch.maximum(size[:-1], size[1:]))).long().cumsum(0)
    return bool(torch.equal(tie[got], tie[order[: len(got)]]))


def _ulp(values: Tensor) -> Tensor:
    """FP64 spacing of FP32 at the given magnitudes."""
    return (torch.nextafter(values, torch.tensor(torch.inf)) - values).double()


def _group_choices(routing: Routing, token: int, options: Options) -> Iterator[Tensor]:
    """bool [E] for every choice of groups that a tie at the cut permits."""
    assert routing.keys is not None
    experts = routing.keys.shape[1]
    if routing.groups is None:
        yield torch.ones(experts, dtype=torch.bool)
        return
    scores = routing.groups[token]
    cut = scores.sort(descending=True).values[options.topk_group - 1]
    tolerance = TIE_ULPS * _ulp(scores.abs().max())
    gap = scores.double() - cut.double()
    sure, tied = (gap > tolerance).nonzero().flatten().tolist(), (gap.abs() <= tolerance).nonzero().flatten().tolist()
    for extra in itertools.combinations(tied, options.topk_group - len(sure)):
        allowed = torch.zeros(options.n_group, dtype=torch.bool)
        allowed[[*sure, *extra]] = True
        yield allowed.repeat_interleave(experts // options.n_group)


def check_weights(result: MoeResult, ids: Tensor, weights: Tensor) -> list[str]:
    """Weights FP32 [M, K] further than 1e-6 (relative) from those of the given ids."""
    routing, o = result.routing, result.layer.options
    want = routing.weights
    if routing.scores is not None:
        want = weights_of(routing.scores, ids, renormalise=o.renormalise, scale=o.scale)
    wrong = ~((weights - want).abs() <= WEIGHT_BOUND * want.abs()) & ~(weights.isnan() & want.isnan())
    return [
        f"token {token} rank {rank}: weight {float(weights[token, rank])!r}, expected {float(want[token, rank])!r}"
        for token, rank in wrong.nonzero().tolist()
    ]


def _compare_routes(result: MoeResult, out: Tensor, ids: Tensor, bound: float, edge: float) -> tuple[list[float], list[float], list[int]]:
    """Per route: the error, the error after re-rounding, the hidden values re-rounded."""
    raw, final, flips = [], [], []
    for index, expert in enumerate(ids.flatten().tolist()):
        route_ = route_of(result, index, expert)
        error = relative_error(out[index], route_.out)
        raw.append(error)
        count = 0
        if bound < error < float("inf"):
            error, count = _re_round(result.layer, expert, route_, out[index], error, bound, edge)
        final.append(error)
        flips.append(count)
    return raw, final, flips


def route_of(result: MoeResult, index: int, expert: int) -> Route:
    """Route ``index`` through ``expert``: computed already, unless a tie brought in an expert that the reference did not choose."""
    options = result.layer.options
    token = index // options.top_k
    chosen = result.ids[token].tolist()
    if expert not in chosen:
        return result.layer.route(token, result.layer.expert(expert))
    at = index if chosen[index % options.top_k] == expert else token * options.top_k + chosen.index(expert)
    return Route(result.sums[at], result.act[at], result.hidden[at], result.hidden_scale[at], result.out[at])


def _re_round(layer: Layer, expert: int, route_: Route, got: Tensor, error: float, bound: float, edge: float) -> tuple[float, int]:
    """The error, and the number of flips, once hidden values on a rounding edge are moved to their other neighbour.

    Greedy: the flip that, by its linear effect on the output, explains most of what is left; judged by the real GEMM2.
    """
    where, other = near_edges(route_.act / route_.hidden_scale.repeat_interleave(BLOCK), route_.hidden, edge)
    weights = layer.expert(expert)
    step = (decode_fp8(other) - decode_fp8(route_.hidden[where])) * route_.hidden_scale[where // BLOCK]
    effects = decode_fp8(weights.w2[:, where]) * weights.w2_scale.repeat_interleave(BLOCK, 0)[:, where // BLOCK] * step
    hidden, count = route_.hidden.clone(), 0
    left = got.double() - route_.out.double()
    open_ = list(range(len(where)))
    while open_ and error > bound:
        best = min(open_, key=lambda i: float((left - effects[:, i].double()).nan_to_num().norm()))
        open_.remove(best)
        trial = hidden.clone()
        trial[where[best]] = other[best]
        output = layer.output(trial, route_.hidden_scale, weights)
        if (lower := relative_error(got, output)) < error:
            error, hidden, count = lower, trial, count + 1
            left = got.double() - output.double()
    return error, count


def near_edges(values: Tensor, codes: Tensor, edge: float) -> tuple[Tensor, Tensor]:
    """FP32 [I] before rounding and their FP8 bits [I] -> (indices int64 [n], the other neighbour's bits uint8 [n]) for values within
    ``edge`` (relative) of the edge between two codes."""
    magnitude = codes.long() & 0x7F
    size = values.double().abs()
    found, other = [], []
    for direction in (-1, 1):
        at = magnitude + min(direction, 0)
        exists = (at >= 0) & (at < len(_FP8_EDGES)) & size.isfinite()
        border = _FP8_EDGES[at.clamp(0, len(_FP8_EDGES) - 1)]
        where = (exists & ((size - border).abs() <= edge * border)).nonzero().flatten()
        found.append(where)
        other.append(codes[where] + direction)
    return torch.cat(found), torch.cat(other).to(torch.uint8)


def _describe(result: MoeResult, out: Tensor, ids: Tensor, index: int, error: float, bound: float) -> str:
    """One failing route with its worst element."""
    token, rank = divmod(index, result.layer.options.top_k)
    expert = int(ids[token, rank])
    want = route_of(result, index, expert).out.double()
    difference = (out[index].double() - want).abs()
    same = (out[index].double() == want) | (out[index].isnan() & want.isnan())
    row = int(torch.where(same, -1.0, difference.nan_to_num(nan=torch.inf)).argmax())
    return (
        f"route {index} (token {token}, rank {rank}, expert {expert}): relative error {error:.3g} > {bound:.3g}, "
        f"which no rounding edge explains; worst at row {row}: {float(out[index, row])!r}, expected {float(want[row])!r}; "
        f"{int((~same).sum())} of {len(want)} rows differ"
    )


def compare_engines(exact: MoeResult, out: Tensor, ids: Tensor) -> Report:
    """Judge the Hopper engine's out BF16 [M*K, H] and ids INT32 [M, K] against the reference with ``exact`` arithmetic."""
    out, ids = out.cpu(), ids.cpu()
    problems, errors = check_ids(exact.routing, ids, exact.layer.options), [0.0]
    if not problems and len(out):
        errors = [relative_error(out[i], route_of(exact, i, expert).out) for i, expert in enumerate(ids.flatten().tolist())]
    worst, median = max(range(len(errors)), key=errors.__getitem__), sorted(errors)[len(errors) // 2]
    if not median <= ENGINE_MEDIAN_BOUND:
        problems.append(f"median route error {median:.3g} > {ENGINE_MEDIAN_BOUND:.3g}")
    if not errors[worst] <= ENGINE_ROUTE_BOUND:
        problems.append(_describe(exact, out, ids, worst, errors[worst], ENGINE_ROUTE_BOUND))
    return Report(
        ok=not problems,
        reason="\n".join(problems),
        ids_equal=bool(torch.equal(ids, exact.ids)),
        routes=len(out),
        worst_route=worst,
        worst_error=errors[worst],
        median=median,
        helped=0,
        flips=0,
    )


def model_error(out: Tensor, model: Tensor) -> float:
    """Relative Frobenius error of the whole call against :func:`dequantised_model`; at most MODEL_BOUND is correct."""
    return relative_error(out.cpu(), model)
