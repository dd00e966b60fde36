"""Checks of one entry against the reference and against itself, on whatever device its tensors lie.

Each check lists what is wrong, in words; an empty list is a pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from megamoe_aot.agreement import HELPED_SHARE, MODEL_BOUND, Report, compare, compare_engines, model_error, relative_error
from megamoe_aot.spec import KernelSpec
from megamoe_aot.weights import Packed, pack_expert
from tests.data import BAD_EXPERT, BAD_ROW, BAD_TOKEN, HARD_INPUTS

from .expected import Call, Oracle
from .harness import BoundLayer, Inputs, Outputs, bits, run, same, same_token

Problems = list[str]

HARD_TOKENS = 3
"""Tokens of a hard-input call: the damaged one and two that must not notice."""

OPTION_CHANGES: tuple[dict[str, Any], ...] = (
    {"ue8m0": True},
    {"ue8m0": False},
    {"limit": None},
    {"limit": 10.0},
    {"limit": 0.5},
    {"scale": 1.0},
    {"scale": 2.5},
    {"ue8m0": True, "limit": 0.5, "scale": 0.3},
)
"""Launch arguments that are tried on every entry, whatever its own are."""


class BindableKernel(Protocol):
    """What :class:`megamoe_aot.Kernel` is to the checks."""

    spec: KernelSpec

    @property
    def bind(self) -> Callable[..., BoundLayer]:
        """(w13, w13_scale, w2, w2_scale, **launch arguments) -> layer."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """One entry under test: its kernel, the weights on the device in the entry's layout, and the oracle."""

    kernel: BindableKernel
    packed: Packed
    oracle: Oracle
    layer: BoundLayer
    """Bound with the entry's own launch arguments."""

    @property
    def spec(self) -> KernelSpec:
        """The entry's spec."""
        return self.kernel.spec

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.packed.w13.device

    def inputs(self, call: Call) -> Inputs:
        """The call's activations on the device."""
        return self.oracle.inputs(call).to(self.device)


# ----------------------------------------------------------------------------------------------- Agreement with the reference


def agreement_calls(tokens: int, seeds: Sequence[int]) -> list[Call]:
    """The calls of :func:`agreement`, for the oracle to start early."""
    return [Call(tokens, seed) for seed in seeds]


def agreement(subject: Subject, tokens: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Fresh inputs per seed against the engine's own arithmetic, exact arithmetic and the FP64 model: one row of figures.

    ``relative_error`` is the median route's (the median over the seeds), ``worst_route`` the largest after explained re-rounding.
    """
    reports: list[Report] = []
    engines: list[Report] = []
    model: list[float] = []
    problems: Problems = []
    for call in agreement_calls(tokens, seeds):
        outputs = run(subject.layer, subject.inputs(call))
        got = outputs.cpu()
        expected = subject.oracle.expect(call, everything=True)
        assert expected.exact is not None and expected.model is not None
        report = compare(expected.result, *got)
        reports.append(report)
        found = [report.reason] if not report.ok else []
        if not outputs.guards_intact():
            found.append("bytes outside the outputs were written")
        if subject.spec.engine == "hopper":
            engines.append(compare_engines(expected.exact, got[0], got[1]))
            found += [f"against exact arithmetic: {engines[-1].reason}"] * (not engines[-1].ok)
        if report.ids_equal:  # else a tie, judged by compare(): the model's rows belong to other experts
            model.append(model_error(got[0], expected.model))
            found += [f"{model[-1]:.3g} from the FP64 model, at most {MODEL_BOUND} is correct"] * (not model[-1] <= MODEL_BOUND)
        problems += [f"seed {call.seed}: {problem}" for problem in found]
    return {
        "relative_error": statistics.median(report.median for report in reports),
        "worst_route": max(report.worst_error for report in reports),
        "routes": sum(report.routes for report in reports),
        "helped_routes": sum(report.helped for report in reports),
        "hidden_flips": sum(report.flips for report in reports),
        "exact_median": max((report.median for report in engines), default=None),
        "exact_worst": max((report.worst_error for report in engines), default=None),
        "model_error": max(model, default=None),
        "ids_equal": all(report.ids_equal for report in reports),
        "agrees": not problems,
        "problems": problems,
    }


def unaided_share(rows: Sequence[dict[str, Any]]) -> Problems:
    """The contract's share of routes that need no re-rounded hidden value, judged over all of an entry's rows."""
    routes, helped = (sum(row[name] for row in rows) for name in ("routes", "helped_routes"))
    if helped * HELPED_SHARE > routes:
        return [f"{helped} of {routes} routes need a hidden value re-rounded; at most 1 in {HELPED_SHARE} may"]
    return []


# ------------------------------------------------------------------------------------------------------ Agreement with itself


def repeats(layer: BoundLayer, inputs: Inputs, count: int) -> Problems:
    """``count`` launches of the same inputs give the same bits, with and without PDL, into buffers full of NaN."""
    first = run(layer, inputs)
    for repeat in range(1, count):
        if not same(first, run(layer, inputs, pdl=repeat % 2 == 0)):
            return [f"launch {repeat} of {count} differs from launch 0"]
    return []


def batch_invariance(layer: BoundLayer, inputs: Inputs) -> Problems:
    """A token's bits do not depend on its position or on the other tokens: alone, in a reversed batch, in every shorter batch."""
    whole, problems = run(layer, inputs), []
    order = list(reversed(range(inputs.tokens)))
    reversed_ = run(layer, inputs.rows(order))
    for position, token in enumerate(order):
        alone = run(layer, inputs.rows([token]))
        if not same_token(whole, token, alone, 0):
            problems.append(f"token {token} differs from the same token alone")
        if not same_token(whole, token, reversed_, position):
            problems.append(f"token {token} differs from itself at position {position}")
    for tokens in range(2, inputs.tokens):
        prefix = run(layer, inputs.rows(list(range(tokens))))
        problems += [f"token {t} differs in a batch of {tokens}" for t in range(tokens) if not same_token(whole, t, prefix, t)]
    return problems


def empty_batch(layer: BoundLayer, inputs: Inputs) -> Problems:
    """M = 0 gives empty outputs of the right shapes, and touches nothing."""
    none, spec = inputs.rows([]), layer.spec
    shapes = [tuple(t.shape) for t in layer(none.x, none.logits, none.bias)]
    problems = [] if shapes == [(0, spec.hidden), (0, spec.top_k), (0, spec.top_k)] else [f"M = 0 returned shapes {shapes}"]
    outputs = run(layer, none)
    return problems + ["M = 0 wrote something"] * (not outputs.untouched())


def view_of_a_batch(layer: BoundLayer, inputs: Inputs) -> Problems:
    """``x[1:]``, a contiguous view that starts inside a buffer, is taken as it is."""
    whole = run(layer, inputs)
    rest = run(layer, Inputs(inputs.x[1:], inputs.logits[1:], inputs.bias))
    return [f"token {t} differs when given as a view" for t in range(1, inputs.tokens) if not same_token(whole, t, rest, t - 1)]


# ------------------------------------------------------------------------------------------------------------ Launch arguments


def option_call(changes: dict[str, Any]) -> Call:
    """The call that one member of OPTION_CHANGES is tried on."""
    return Call(tokens=2, seed=0, changes=tuple(sorted(changes.items())))


def options(subject: Subject, changes: dict[str, Any]) -> Problems:
    """One binding with other launch arguments agrees with the reference of those arguments."""
    call = option_call(changes)
    outputs = run(subject.kernel.bind(*subject.packed, **changes), subject.inputs(call))
    report = compare(subject.oracle.expect(call).result, *outputs.cpu())
    return [] if report.ok else [report.reason]


def options_matter(subject: Subject) -> Problems:
    """Scale multiplies the weights alone, once; clamp and ue8m0 change the output of these inputs."""
    inputs = subject.inputs(Call(tokens=2, seed=0))

    def with_(**changes: Any) -> Outputs:
        return run(subject.kernel.bind(*subject.packed, **changes), inputs)

    one, scaled = with_(scale=1.0), with_(scale=2.5)
    problems = []
    if not torch.equal(scaled.weights, one.weights * 2.5) or not torch.equal(bits(scaled.out), bits(one.out)):
        problems.append("scale 2.5 is not 2.5 times the weights of scale 1 with the same out")
    for name, low, high in (("limit", with_(limit=0.5), with_(limit=None)), ("ue8m0", with_(ue8m0=True), with_(ue8m0=False))):
        if torch.equal(bits(low.out), bits(high.out)):
            problems.append(f"{name} makes no difference: it is not passed on, or these inputs cannot show it")
    return problems


def wrong_order_shows(subject: Subject, other: BindableKernel) -> Problems:
    """The same bytes read in the other row order of w13 give something else: the check on the order has teeth."""
    call = Call(tokens=2, seed=0)
    inputs = subject.inputs(call)
    right, wrong = run(subject.layer, inputs), run(other.bind(*subject.packed), inputs)
    error = relative_error(wrong.out.cpu(), right.out.cpu())
    return [] if error > 0.3 else [f"w13 read as {other.spec.w13_order} differs by only {error:.3g} from {subject.spec.w13_order}"]


# ---------------------------------------------------------------------------------------------------------------- Hard inputs

TOUCHES_ALL_TOKENS = ("disabled_experts", "underflow", "all_ties")


def hard_cases(spec: KernelSpec) -> list[str]:
    """The cases of the contract's table that an entry can meet: softmax has no bias to damage."""
    return [name for name, case in HARD_INPUTS.items() if not (spec.scoring == "softmax" and case.bias and not case.logits)]


def hard_call(case: str) -> Call:
    """The call that a hard input is tried on."""
    return Call(HARD_TOKENS, seed=0, case=case)


def hard_input(subject: Subject, case: str) -> Problems:
    """One case: the reference's values, the contract's requirement, determinism, and nobody else harmed."""
    hard, spec = HARD_INPUTS[case], subject.spec
    inputs = subject.inputs(hard_call(case))
    clean = run(subject.layer, inputs if hard.expert else subject.inputs(Call(HARD_TOKENS, seed=0)))
    with damaged_expert(subject, case):
        outputs, again = run(subject.layer, inputs), run(subject.layer, inputs)
        report = compare(subject.oracle.expect(hard_call(case)).result, *outputs.cpu())
    problems = [report.reason] if not report.ok else []
    problems += ["two launches differ"] * (not same(outputs, again))
    problems += ["bytes outside the outputs were written"] * (not outputs.guards_intact())
    if case not in TOUCHES_ALL_TOKENS:
        harmed = [t for t in range(HARD_TOKENS) if t != BAD_TOKEN and not same_token(outputs, t, clean, t)]
        problems += [f"token {token}, which is not damaged, changed" for token in harmed]
    if hard.expert:
        problems += only_one_route_differs(outputs, clean)
    if case in REQUIREMENTS:
        problems += REQUIREMENTS[case](spec, outputs, clean)
    return problems


@contextlib.contextmanager
def damaged_expert(subject: Subject, case: str) -> Iterator[None]:
    """The case's damage to BAD_EXPERT, in place in the bound weights, for the length of the block."""
    if HARD_INPUTS[case].expert is None:
        yield
        return
    write = {"layout": subject.spec.layout, "w13_order": subject.spec.w13_order}
    pack_expert(subject.packed, BAD_EXPERT, subject.oracle.weights_problem(case).expert(BAD_EXPERT, subject.device), **write)
    try:
        yield
    finally:
        pack_expert(subject.packed, BAD_EXPERT, subject.oracle.weights_problem().expert(BAD_EXPERT, subject.device), **write)


def only_one_route_differs(outputs: Outputs, clean: Outputs) -> Problems:
    """A damaged expert may change the one route that uses it: BAD_TOKEN's first."""
    out, ids, _ = outputs.token(BAD_TOKEN)
    if int(ids[0]) != BAD_EXPERT:
        return [f"the damaged expert {BAD_EXPERT} was not chosen first: ids {ids.tolist()}"]
    same_rows = [torch.equal(bits(got), bits(want)) for got, want in zip(out, clean.token(BAD_TOKEN)[0], strict=True)]
    return [f"rank {rank}, another expert's route, changed" for rank, equal in enumerate(same_rows) if rank and not equal]


Requirement = Callable[[KernelSpec, Outputs, Outputs], Problems]


def _zero_rows(spec: KernelSpec, outputs: Outputs, clean: Outputs) -> Problems:
    return [] if bool((outputs.token(BAD_TOKEN)[0] == 0).all()) else ["the out rows of a zero token are not exact zeros"]


def _distinct_ids(spec: KernelSpec, outputs: Outputs, clean: Outputs) -> Problems:
    ids = outputs.token(BAD_TOKEN)[1].tolist()
    good = len(set(ids)) == len(ids) and all(0 <= expert < spec.experts for expert in ids)
    return [] if good else [f"ids {ids} are not distinct members of 0..{spec.experts - 1}"]


def _odd_experts_only(spec: KernelSpec, outputs: Outputs, clean: Outputs) -> Problems:
    disabled = [expert for expert in outputs.ids.flatten().tolist() if expert % 2 == 0]
    return [f"experts {disabled} were chosen although their bias is -inf"] if disabled else []


def _equal_weights(spec: KernelSpec, outputs: Outputs, clean: Outputs) -> Problems:
    wrong = [w for w in outputs.weights.flatten().tolist() if not math.isclose(w, spec.scale / spec.top_k, rel_tol=1e-6)]
    return [f"weights {wrong[:4]} where every score is the same, expected {spec.scale / spec.top_k}"] if wrong else []


def _first_experts(spec: KernelSpec, outputs: Outputs, clean: Outputs) -> Problems:
    wrong = [ids for ids in outputs.ids.tolist() if ids != list(range(spec.top_k))]
    return [f"ids {wrong[0]} where everything ties, expected 0..{spec.top_k - 1}"] if wrong else []


def _finite_weights(spec: KernelSpec, outputs: Outputs, clean: Outputs) -> Problems:
    return [] if bool(outputs.weights.isfinite().all()) else ["weights are not finite"]


def _route_is_nan(spec: KernelSpec, outputs: Outputs, clean: Outputs) -> Problems:
    return [] if bool(outputs.token(BAD_TOKEN)[0][0].isnan().all()) else ["a NaN byte in w13 must make its whole route NaN"]


def _only_rows(rows: slice) -> Requirement:
    def check(spec: KernelSpec, outputs: Outputs, clean: Outputs) -> Problems:
        got, want = outputs.token(BAD_TOKEN)[0][0], clean.token(BAD_TOKEN)[0][0]
        inside = torch.zeros(spec.hidden, dtype=torch.bool, device=got.device)
        inside[rows] = True
        unharmed = torch.equal(bits(got[~inside]), bits(want[~inside]))
        return [] if unharmed else [f"output rows outside {rows.start}..{rows.stop - 1} changed"]

    return check


_BLOCK_START = BAD_ROW // 128 * 128

REQUIREMENTS: dict[str, Requirement] = {
    "zero_token": _zero_rows,
    "nan_logits": _distinct_ids,
    "some_nan_logits": _distinct_ids,
    "inf_logits": _finite_weights,
    "disabled_experts": _odd_experts_only,
    "underflow": _equal_weights,
    "all_ties": _first_experts,
    "nan_w13": _route_is_nan,
    "nan_w2": _only_rows(slice(BAD_ROW, BAD_ROW + 1)),
    "huge_w2_scale": _only_rows(slice(_BLOCK_START, _BLOCK_START + 128)),
}
"""What a case must show beyond agreement with the reference. A clamp bounds what a huge w13 scale does, so that case has none."""
