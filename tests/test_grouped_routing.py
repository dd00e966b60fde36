"""Grouped top-k routing in the device code: a kernel that only routes, emulated, against the reference."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import emulator
from benchmarks.expected import Call
from emulator import Buffer, Launch, Pointer
from kernels.build.compile import compile_spec
from megamoe_aot import reference
from megamoe_aot.agreement import WEIGHT_BOUND, check_ids
from megamoe_aot.reference import Options
from megamoe_aot.spec import ARCHS, KernelSpec
from tests.child import run_python
from verification.problem import EmulatedCall

INF, NAN = math.inf, math.nan
SCRATCH_BYTES = 512
"""What a routing warp may use, beside other warps' memory."""


def grouped(experts: int, top_k: int, groups: int, top_groups: int, arch: str = "sm_90a", logits_dtype: str = "bf16") -> KernelSpec:
    return KernelSpec(
        1024,
        128,
        experts,
        top_k,
        arch,
        scoring="sigmoid_bias_grouped",
        groups=groups,
        top_groups=top_groups,
        logits_dtype=logits_dtype,
        scale=2.5,
    )


DEEPSEEK = [grouped(256, 8, 8, 4, arch, dtype) for arch in ARCHS for dtype in ("bf16", "fp32")]
"""Eight groups of 32, one register of every lane each."""
OTHERS = [
    grouped(128, 4, 4, 2, logits_dtype="fp32"),
    grouped(256, 8, 4, 2, "sm_100f"),  # groups of 64
    grouped(256, 8, 4, 2, logits_dtype="fp32"),
    grouped(192, 32, 2, 1, logits_dtype="fp32"),  # groups of 96; as many experts as a warp can rank
    grouped(96, 6, 3, 2, logits_dtype="fp32"),  # the number of groups is no power of two
    grouped(160, 1, 5, 1, "sm_100f", "fp32"),
    grouped(64, 8, 2, 2, logits_dtype="fp32"),  # every group is kept
    grouped(512, 8, 16, 5, logits_dtype="fp32"),
    grouped(1024, 16, 32, 7, logits_dtype="fp32"),  # the most groups
]
SPECS = [*DEEPSEEK, *OTHERS]
FP32 = [spec for spec in SPECS if spec.logits_dtype == "fp32"]


def name(spec: KernelSpec) -> str:
    return f"e{spec.experts}_k{spec.top_k}_g{spec.groups}t{spec.top_groups}_{spec.logits_dtype}_{spec.arch}"


@functools.cache
def codes() -> dict[KernelSpec, str]:
    """The PTX of the routing kernel for every spec, compiled in one process with the build's options and environment."""
    with tempfile.TemporaryDirectory() as folder:
        run_python("-m", "tests.routing_kernel", folder, stdin=json.dumps([spec.to_dict() for spec in SPECS]))
        return {spec: (Path(folder) / f"{spec.code_name}.ptx").read_text() for spec in SPECS}


# ---- running and judging ----


def run(spec: KernelSpec, logits: Tensor, bias: Tensor, ptx: str | None = None) -> tuple[Tensor, Tensor]:
    """(ids INT32 [M, K], weights FP32 [M, K]) of the emulated kernel for logits [M, E] and bias FP32 [M, E], a row per token."""
    tokens = len(logits)
    ids, weights = (np.full(4 * tokens * spec.top_k, 0xFF, np.uint8) for _ in range(2))

    def given_bytes(tensor: Tensor) -> np.ndarray:
        return tensor.contiguous().view(torch.uint8).flatten().numpy()

    result = emulator.emulate(
        ptx or codes()[spec],
        Launch((tokens, 1, 1), (32, 1, 1), dynamic_shared=SCRATCH_BYTES),
        [
            Buffer("logits", given_bytes(logits), predecessor=True, align=logits.element_size()),
            Buffer("bias", given_bytes(bias), align=4),
            Buffer("ids", ids, "output", align=4),
            Buffer("weights", weights, "output", align=4),
        ],
        [*(Pointer(n) for n in ("logits", "bias", "ids", "weights")), float(spec.scale)],
    )
    assert not result.findings, result.report()
    shape = tokens, spec.top_k
    return torch.from_numpy(ids).view(torch.int32).view(shape), torch.from_numpy(weights).view(torch.float32).view(shape)


def as_logits(spec: KernelSpec, logits: Tensor) -> Tensor:
    return logits.bfloat16() if spec.logits_dtype == "bf16" else logits.float()


def route(spec: KernelSpec, logits: Tensor, bias: Tensor) -> reference.Routing:
    """The reference's routing for one bias FP32 [E]."""
    return reference.route(
        logits,
        bias,
        scoring=spec.scoring,
        top_k=spec.top_k,
        scale=spec.scale,
        n_group=spec.groups,
        topk_group=spec.top_groups,
    )


def problems(spec: KernelSpec, logits: Tensor, bias: Tensor, ids: Tensor, weights: Tensor, ties: bool) -> list[str]:
    """What is wrong with each token's ids and weights. ``ties``: ids may differ where the contract allows it (scores within 4 ulp)."""
    options = Options.of(spec, w13_order="up_gate")
    wrong = []
    for token in range(len(logits)):
        rows = slice(token, token + 1)
        want = route(spec, logits[rows], bias[token])
        if ties:
            wrong += [f"row {token}: {problem}" for problem in check_ids(want, ids[rows], options)]
        elif not torch.equal(want.ids, ids[rows]):
            wrong.append(f"row {token}: experts {ids[token].tolist()}, expected {want.ids[0].tolist()}")
        assert want.scores is not None
        expected = reference.weights_of(want.scores, ids[rows].clamp(0, spec.experts - 1), renormalise=True, scale=spec.scale)
        if not ((weights[rows] - expected).abs() <= WEIGHT_BOUND * expected.abs()).all():
            wrong.append(f"row {token}: weights {weights[token].tolist()}, expected {expected[0].tolist()}")
    return wrong


def check(spec: KernelSpec, logits: Tensor, bias: Tensor, *, ties: bool = False) -> Tensor:
    """Run and judge; the ids. ``bias``: FP32 [E] or [M, E]."""
    logits, bias = as_logits(spec, logits), bias.float().expand(len(logits), spec.experts)
    ids, weights = run(spec, logits, bias)
    assert problems(spec, logits, bias, ids, weights, ties) == []
    return ids


def normal(spec: KernelSpec, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits [rows, E] and bias FP32 [E] of both signs."""
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(rows, spec.experts, generator=generator), 0.3 * torch.randn(spec.experts, generator=generator)


# ---- ordinary inputs ----


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_random(spec: KernelSpec) -> None:
    check(spec, *normal(spec, 32, seed=1), ties=True)


@pytest.mark.parametrize("spec", DEEPSEEK, ids=name)
def test_many_rows(spec: KernelSpec) -> None:
    logits, bias = normal(spec, 200, seed=2)
    ids = check(spec, logits, bias, ties=True)
    groups = (ids // 32).sort(dim=1).values
    assert bool(((groups.diff(dim=1) > 0).sum(dim=1) < spec.top_groups).all()), "at most top_groups groups"
    plain = reference.route(as_logits(spec, logits), bias, scoring="sigmoid_bias", top_k=spec.top_k).ids
    assert bool((ids != plain).any(dim=1).float().mean() > 0.5), "on these inputs the groups must matter"


@pytest.mark.parametrize("spec", [DEEPSEEK[0], *OTHERS], ids=name)
@pytest.mark.parametrize("level", [11.5, -11.5])
def test_large_biases(spec: KernelSpec, level: float) -> None:
    """DeepSeek's biases have grown large: they swallow most bits of the scores, and ties appear."""
    logits, bias = normal(spec, 16, seed=3)
    check(spec, logits, level + 2 * bias, ties=True)


# ---- exact inputs: logits whose sigmoids are 0, 0.5 and 1 in every implementation, so that nothing is left to tolerance ----

EXACT_LOGITS = (-INF, -1000.0, 0.0, 1000.0, INF, NAN)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
palette = st.lists(
    st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 2.0**-24, 2.0**-25, 11.25, 12.0, -INF])
    | st.floats(-2, 2, width=32)
    | finite,
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("spec", FP32, ids=name)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(EXACT_LOGITS), min_size=1, max_size=4), palette, st.integers(0, 2**31), st.booleans())
def test_exact_scores(spec: KernelSpec, logits: list[float], biases: list[float], seed: int, by_group: bool) -> None:
    """Rows drawn from a few values, so that most keys and many group scores are equal. ``by_group``: each group has one value."""
    draw = np.random.default_rng(seed)
    shape = (2, spec.groups, 1 if by_group else spec.experts // spec.groups)
    rows = torch.tensor(draw.choice(logits, (2, spec.experts)), dtype=torch.float32)
    bias = torch.tensor(draw.choice(biases, shape), dtype=torch.float32).expand(2, spec.groups, spec.experts // spec.groups)
    check(spec, rows, bias.reshape(2, spec.experts))


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_distinct_exact_scores(spec: KernelSpec) -> None:
    """All scores different, so that every group's two best lie anywhere; bias rows are permutations."""
    draw = np.random.default_rng(5)
    bias = torch.tensor(np.stack([draw.permutation(spec.experts) for _ in range(32)]) / 64 - 1.0, dtype=torch.float32)
    check(spec, torch.zeros(32, spec.experts), bias)


# ---- by hand ----


def bias_of(spec: KernelSpec, values: dict[int, float], others: float) -> Tensor:
    """FP32 [1, E]."""
    bias = torch.full((1, spec.experts), others)
    for expert, value in values.items():
        bias[0, expert] = value
    return bias


def chosen(spec: KernelSpec, bias: Tensor, logit: float = 0.0) -> list[int]:
    """The ids of one row whose logits are all the same; checked against the reference too."""
    return check(spec, torch.full((1, spec.experts), logit), bias)[0].tolist()


BOTH = [DEEPSEEK[1], DEEPSEEK[2]]


@pytest.mark.parametrize("spec", BOTH, ids=name)
def test_a_lone_star_is_dropped_with_its_group(spec: KernelSpec) -> None:
    """Expert 40 is the best of all, but four groups have better pairs."""
    pairs = {32 * g + i: 2.0 + 0.125 * g for g in (0, 3, 5, 7) for i in (4, 9)}
    assert chosen(spec, bias_of(spec, pairs | {40: 4.0}, -1.0)) == [228, 233, 164, 169, 100, 105, 4, 9]


@pytest.mark.parametrize("spec", BOTH, ids=name)
def test_only_the_two_best_count(spec: KernelSpec) -> None:
    """Groups 0 to 3 are full of good experts, groups 4 to 7 have two that are a little better and 30 bad ones."""
    bias = bias_of(spec, {32 * g + i: 1.25 for g in (4, 5, 6, 7) for i in (30, 31)}, 1.0)
    bias[0, 128:] = torch.where(bias[0, 128:] == 1.25, 1.25, -3.0)
    assert chosen(spec, bias) == [158, 159, 190, 191, 222, 223, 254, 255]


@pytest.mark.parametrize("spec", BOTH, ids=name)
def test_lower_group_wins_a_tie(spec: KernelSpec) -> None:
    """3 + 1 = 2 + 2 in groups 1 to 7, and group 0 has less: groups 1 to 4 stay."""
    bias = bias_of(spec, {}, -4.0)
    for group in range(1, 8):
        first, second = (3.0, 1.0) if group % 2 else (2.0, 2.0)
        bias[0, 32 * group + 7], bias[0, 32 * group + 20] = first, second
    assert chosen(spec, bias) == [39, 103, 71, 84, 135, 148, 52, 116]


@pytest.mark.parametrize("spec", BOTH, ids=name)
def test_group_scores_are_rounded_sums(spec: KernelSpec) -> None:
    """1 + 2**-25 rounds to 1, the score of every group: the lowest four stay, not those with the larger second."""
    bias = bias_of(spec, {32 * g + 3: 1.0 for g in range(8)} | {32 * g + 5: 2.0**-25 for g in range(4, 8)}, -0.5)
    bias[0, [32 * g + 5 for g in range(4)]] = 0.0
    assert chosen(spec, bias, logit=-1000.0) == [3, 35, 67, 99, 5, 37, 69, 101]


@pytest.mark.parametrize("spec", BOTH, ids=name)
@pytest.mark.parametrize("twins", [(10, 21), (0, 31)])
def test_a_best_score_that_two_experts_share_counts_twice(spec: KernelSpec, twins: tuple[int, int]) -> None:
    """Groups 4 to 7: 2 + 2. Groups 0 to 3: 2 + 1.75."""
    bias = bias_of(spec, {32 * g + i: 2.0 for g in range(4, 8) for i in twins}, -1.0)
    for group in range(4):
        bias[0, 32 * group + twins[0]], bias[0, 32 * group + twins[1]] = 2.0, 1.75
    assert chosen(spec, bias) == sorted(32 * g + i for g in range(4, 8) for i in twins)


@pytest.mark.parametrize("others", [(5, 37), (5, 38), (4, 5)])
def test_two_best_of_a_wide_group(others: tuple[int, int]) -> None:
    """Groups of 64: the two best in one lane (5 and 37), in two lanes, in the same register."""
    spec = OTHERS[2]
    assert spec.experts // spec.groups == 64 and spec.top_groups == 2
    bias = bias_of(spec, {64 * g + i: 2.0 for g in (1, 3) for i in others} | {0: 3.0, 1: 0.875, 128: 3.0, 129: 0.875}, -1.0)
    ids = chosen(spec, bias)
    assert sorted(ids[:4]) == sorted(64 * g + i for g in (1, 3) for i in others)
    assert all(64 <= e < 128 or e >= 192 for e in ids)


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_all_ties(spec: KernelSpec) -> None:
    """Far more equal keys than the fast path takes."""
    assert chosen(spec, bias_of(spec, {}, 0.25), 0.5) == list(range(spec.top_k))


@pytest.mark.parametrize("spec", BOTH, ids=name)
def test_ties_inside_late_groups(spec: KernelSpec) -> None:
    """The serial rounds must pass over the experts of dropped groups."""
    bias = torch.zeros(1, spec.experts)
    bias[0, 128:] = 1.0
    bias[0, 160:192] = -1.0
    bias[0, 40] = 1.0  # as good as the chosen ones, in a group of 1 + 0
    bias[0, :2] = 0.75
    assert chosen(spec, bias) == list(range(128, 136))


# ---- hard inputs ----


@pytest.mark.parametrize("spec", SPECS, ids=name)
@pytest.mark.parametrize("value", [NAN, -INF, INF, -1000.0])
def test_uniform_logits(spec: KernelSpec, value: float) -> None:
    """Every logit NaN, infinite or so low that the sigmoid underflows: the bias decides, the weights are all the same."""
    _, bias = normal(spec, 1, seed=7)
    ids, weights = run(spec, as_logits(spec, torch.full((1, spec.experts), value)), bias[None])
    assert torch.equal(ids, route(spec, torch.full((1, spec.experts), value), bias).ids)
    assert weights[0].tolist() == pytest.approx([spec.scale / spec.top_k] * spec.top_k, rel=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_some_hard_logits(spec: KernelSpec) -> None:
    logits, bias = normal(spec, 8, seed=8)
    draw = torch.rand(logits.shape, generator=torch.Generator().manual_seed(9))
    for i, value in enumerate((NAN, -INF, INF, -100.0, 1e-40)):
        logits[(draw > 0.1 * i) & (draw < 0.1 * i + 0.1)] = value
    check(spec, logits, bias, ties=True)


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_disabled_experts(spec: KernelSpec) -> None:
    """Every other expert has a bias of -inf: all groups still have pairs, and no disabled expert is chosen while the kept ones suffice."""
    logits, bias = normal(spec, 8, seed=10)
    bias[::2] = -INF
    ids = check(spec, logits, bias)
    if spec.experts // spec.groups * spec.top_groups // 2 >= spec.top_k:
        assert bool((ids % 2 == 1).all())


@pytest.mark.parametrize("spec", BOTH, ids=name)
def test_disabled_groups(spec: KernelSpec) -> None:
    """Groups 0 to 4 are off and group 5 has one expert: scores of -inf, of which the lowest group fills up the four."""
    logits, bias = normal(spec, 8, seed=11)
    bias[:192] = -INF
    bias[170] = 5.0
    ids = check(spec, logits, bias)
    assert bool((ids >= 192).all())


@pytest.mark.parametrize("spec", BOTH, ids=name)
def test_too_few_enabled_experts(spec: KernelSpec) -> None:
    """Six enabled experts in three groups; group 0 is the fourth, and its first experts fill the last ranks."""
    bias = bias_of(spec, {70: 0.5, 71: 0.25, 130: 0.75, 131: 0.125, 250: 1.0, 251: 0.0}, -INF)
    assert chosen(spec, bias) == [250, 130, 70, 71, 131, 251, 0, 1]


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_all_disabled(spec: KernelSpec) -> None:
    assert chosen(spec, bias_of(spec, {}, -INF)) == list(range(spec.top_k))


@pytest.mark.parametrize("spec", BOTH, ids=name)
def test_denormal_scores(spec: KernelSpec) -> None:
    """Nothing is flushed to zero: sums of denormals order the groups."""
    bias = bias_of(spec, {32 * g + i: (g + 1) * 2.0**-149 for g in range(8) for i in (6, 8)}, 0.0)
    assert chosen(spec, bias, logit=-INF) == [230, 232, 198, 200, 166, 168, 134, 136]


@pytest.mark.parametrize("spec", BOTH, ids=name)
def test_infinite_biases(spec: KernelSpec) -> None:
    """+inf + +inf is the best score; +inf + -inf is NaN, and ranks below the -inf of a group that is off."""
    bias = bias_of(spec, {32 * g + i: INF for g in (6, 7) for i in (0, 1)} | {32 * g: INF for g in (0, 1, 2, 3)}, -INF)
    ids, _ = run(spec, as_logits(spec, torch.zeros(1, spec.experts)), bias)
    assert ids[0].tolist() == [192, 193, 224, 225, 128, 129, 130, 131]


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_nan_biases(spec: KernelSpec) -> None:
    """A NaN bias is as good as a disabled expert, while enough others exist."""
    logits, bias = normal(spec, 4, seed=12)
    off = torch.arange(spec.experts) % 3 == 1
    logits = as_logits(spec, logits)
    found, expected = (run(spec, logits, torch.where(off, value, bias).expand(4, -1)) for value in (NAN, -INF))
    if spec.experts // spec.groups * spec.top_groups * 2 // 3 > spec.top_k:
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    everything = run(spec, logits, torch.full((4, spec.experts), NAN))
    assert everything[0].tolist() == [list(range(spec.top_k))] * 4


def test_dropped_experts_are_worse_than_nan_biases() -> None:
    """The kept group has two sound experts and must fill 30 ranks with its own NaN ones."""
    spec = OTHERS[3]
    assert (spec.experts, spec.top_k, spec.groups, spec.top_groups) == (192, 32, 2, 1)
    ids, _ = run(spec, torch.zeros(1, 192), bias_of(spec, {150: 1.0, 151: 2.0}, NAN))
    assert ids[0].tolist() == [151, 150, *range(96, 126)]


# ---- whole kernels ----


def test_reference_options_have_the_groups() -> None:
    options = Options.of(DEEPSEEK[0], w13_order="up_gate")
    assert (options.scoring, options.n_group, options.topk_group) == ("sigmoid_bias_grouped", 8, 4)
    plain = Options.of(KernelSpec(1024, 128, 64, 8, "sm_90a"), w13_order="up_gate")
    assert (plain.n_group, plain.topk_group) == (1, 1)


WHOLE = [
    KernelSpec(2048, 128, 128, 4, "sm_90a", scoring="sigmoid_bias_grouped", groups=4, top_groups=2, limit=10.0, scale=2.5),
    KernelSpec(
        2048, 128, 128, 4, "sm_100f", scoring="sigmoid_bias_grouped", groups=2, top_groups=1, layout="row_major", logits_dtype="fp32"
    ),  # groups of 64
]


@pytest.mark.parametrize("case", ["", "nan_logits"])
@pytest.mark.parametrize("spec", WHOLE, ids=name)
def test_cluster_kernel(spec: KernelSpec, case: str) -> None:
    """One token through a whole kernel: ids, weights and rows."""
    call = EmulatedCall(spec, Call(1, seed=0, case=case))
    assert call.inputs.bias is not None
    call.routing = route(spec, call.inputs.logits, call.inputs.bias)
    outcome = call.emulate(compiled(spec))
    assert not outcome.objections, outcome.result.report()
    report, share = call.compare(outcome)
    assert report.ok and report.ids_equal and share > 0.99, report
    if not case:
        plain = reference.route(call.inputs.logits, call.inputs.bias, scoring="sigmoid_bias", top_k=spec.top_k)
        assert not torch.equal(plain.ids, outcome.ids), "on this token the groups must matter"


@functools.cache
def compiled(spec: KernelSpec) -> str:
    return compile_spec(spec).ptx
