"""The oracle against independent arithmetic: exact fractions, plain Python, hand-computed values and an FP64 model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megamoe_aot import reference as R
from megamoe_aot.agreement import MODEL_BOUND, compare, compare_engines, model_error, near_edges, relative_error
from megamoe_aot.menu import LEAD, QWEN3_30B, ModelShape, menu_specs
from megamoe_aot.spec import KernelSpec
from tests.data import (
    BAD_EXPERT,
    BAD_ROW,
    BAD_TOKEN,
    CLAMP_LIMIT,
    CLAMP_POINTS,
    HARD_INPUTS,
    Problem,
    clamp_expert,
    clamp_readings,
    normal,
    stream_of,
)

SMALL = Problem(hidden=512, inter=256, experts=32, top_k=4, tokens=3, options={"limit": 10.0, "scale": 2.5})
HOPPER = {"arithmetic": "hopper", "order": "quad", "parts": 2}
INF, NAN = math.inf, math.nan


def f32(value: float) -> float:
    return float(np.float32(value))


def bits_of(values: list[float]) -> Tensor:
    return R.encode_fp8(torch.tensor(values, dtype=torch.float32))


# ------------------------------------------------------------------------------------------- Exact arithmetic to compare with


def fp8_parts(code: int) -> tuple[int, int]:
    """A finite code as (signed integer m, exponent e): its value is m * 2**(e - 3)."""
    sign, exponent, mantissa = (-1 if code & 0x80 else 1), code >> 3 & 15, code & 7
    return (sign * mantissa, -6) if exponent == 0 else (sign * (8 + mantissa), exponent - 7)


def fp8_value(code: int) -> Fraction:
    m, e = fp8_parts(code)
    return m * Fraction(2) ** (e - 3)


def floor_log2(value: Fraction) -> int:
    e = abs(value).numerator.bit_length() - value.denominator.bit_length()
    return e if abs(value) >= Fraction(2) ** e else e - 1


def round_f32(value: Fraction) -> Fraction:
    if value == 0:
        return value
    ulp = Fraction(2) ** (max(floor_log2(value), -126) - 23)
    return round(value / ulp) * ulp


def hopper_step(a: list[int], b: list[int], start: Fraction) -> Fraction:
    products = []
    for i, j in zip(a, b, strict=True):
        (mi, ei), (mj, ej) = fp8_parts(i), fp8_parts(j)
        if mi * mj:
            products.append((mi * mj * Fraction(2) ** (ei + ej - 6), ei + ej))
    exponents = [e for _, e in products] + ([floor_log2(start)] if start else [])
    if not exponents:
        return Fraction(0)
    unit = Fraction(2) ** (max(exponents) - 13)
    total = unit * (sum(int(p / unit) for p, _ in products) + int(start / unit))
    if total == 0:
        return total
    ulp = Fraction(2) ** (floor_log2(total) - 13)
    return int(total / ulp) * ulp


def hopper_block(a: list[int], b: list[int]) -> Fraction:
    total = Fraction(0)
    for k in range(0, 128, 32):
        total = hopper_step(a[k : k + 32], b[k : k + 32], total)
    return total


# ------------------------------------------------------------------------------------------------------------------------ FP8


def test_fp8_values() -> None:
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert math.isnan(R.FP8_VALUES[code])
        else:
            assert Fraction(float(R.FP8_VALUES[code])) == fp8_value(code)


def test_fp8_rounds_to_nearest_even_at_every_edge() -> None:
    for code in range(0x7E):
        low, high = float(fp8_value(code)), float(fp8_value(code + 1))
        middle = np.float32((low + high) / 2)
        below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(INF))
        even = code if code % 2 == 0 else code + 1
        want = [code, even, code + 1]
        assert bits_of([float(below), float(middle), float(above)]).tolist() == want
        assert bits_of([-float(below), -float(middle), -float(above)]).tolist() == [c | 0x80 for c in want]


def test_fp8_saturates_and_keeps_nan() -> None:
    got = bits_of([448.0, 464.0, 480.0, 1e9, INF, -INF, -1e9, 2.0**-10, 0.0, -0.0, NAN, -NAN])
    assert got.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0, 0, 0x80, 0x7F, 0x7F]


# --------------------------------------------------------------------------------------------------------------------- Routing


def python_route(logits: list[float], bias: list[float], top_k: int, groups: tuple[int, int] = (1, 1)) -> tuple[list[int], list[float]]:
    """sigmoid_bias(_grouped) with sort() and FP32 scalars."""
    one = np.float32(1)
    with np.errstate(over="ignore"):
        scores = [one / (one + np.float32(np.exp(np.float64(-x)))) if not math.isnan(x) else np.float32(0) for x in logits]
    keys = [s + np.float32(b) for s, b in zip(scores, bias, strict=True)]
    size = len(keys) // groups[0]
    best_two = [sum(sorted(keys[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(groups[0])]
    kept = sorted(range(groups[0]), key=lambda g: (-best_two[g], g))[: groups[1]]
    ids = sorted((e for e in range(len(keys)) if e // size in kept), key=lambda e: (-keys[e], e))[:top_k]
    total = np.float32(0)
    for e in ids:
        total = total + scores[e]
    return ids, [float(scores[e] / total) if total else 1 / top_k for e in ids]


coarse = st.sampled_from([-200.0, -3.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, INF, -INF, NAN])
fine = st.floats(-20, 20, width=32)
some_bias = st.sampled_from([-0.5, -0.25, 0.125, 0.3]) | st.floats(-1, 1, width=32)


@given(st.lists(st.tuples(coarse | fine, some_bias), min_size=8, max_size=8), st.integers(1, 8))
def test_sigmoid_routing_is_a_stable_sort(rows: list[tuple[float, float]], top_k: int) -> None:
    logits, bias = [r[0] for r in rows], [r[1] for r in rows]
    got = R.route(torch.tensor([logits]), torch.tensor(bias), scoring="sigmoid_bias", top_k=top_k, scale=2.0)
    ids, weights = python_route(logits, bias, top_k)
    assert got.ids[0].tolist() == ids
    assert got.weights[0].tolist() == pytest.approx([2 * w for w in weights], rel=1e-6)


@given(st.lists(st.tuples(coarse | fine, some_bias), min_size=12, max_size=12), st.sampled_from([(4, 2), (3, 2), (6, 3), (2, 1)]))
def test_grouped_routing(rows: list[tuple[float, float]], groups: tuple[int, int]) -> None:
    logits, bias = [r[0] for r in rows], [r[1] for r in rows]
    got = R.route(
        torch.tensor([logits]), torch.tensor(bias), scoring="sigmoid_bias_grouped", top_k=4, n_group=groups[0], topk_group=groups[1]
    )
    ids, weights = python_route(logits, bias, 4, groups)
    assert got.ids[0].tolist() == ids
    assert got.weights[0].tolist() == pytest.approx(weights, rel=1e-6)


@given(st.lists(coarse | fine, min_size=8, max_size=8), st.integers(1, 8), st.booleans())
@example([NAN] * 8, 3, True)
@example([INF, 1.0, INF, NAN, -INF, 2.0, 3.0, 4.0], 4, False)
def test_softmax_routing(logits: list[float], top_k: int, renormalise: bool) -> None:
    got = R.route(torch.tensor([logits]), None, scoring="softmax", top_k=top_k, renormalise=renormalise)
    clean = [-INF if math.isnan(x) else f32(x) for x in logits]
    ids = sorted(range(8), key=lambda e: (-clean[e], math.copysign(1, clean[e]) < 0, e))[:top_k]
    top = max(clean)
    powers = [1.0 if x == top else math.exp(f32(x - top)) for x in clean]
    total = math.fsum(powers[e] for e in ids) if renormalise else math.fsum(powers)
    assert got.ids[0].tolist() == ids
    assert got.weights[0].tolist() == pytest.approx([powers[e] / total for e in ids], rel=1e-6, abs=1e-37)


def test_sigmoid_is_within_4_ulp() -> None:
    x = torch.linspace(-88, 90, 20001)
    want = 1 / (1 + np.exp(-x.double().numpy()))
    error = np.abs(R.sigmoid(x).double().numpy() - want) / np.spacing(want.astype(np.float32)).astype(np.float64)
    assert error.max() <= 4


def test_bias_chooses_but_never_weighs() -> None:
    got = R.route(torch.tensor([[0.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, -1.0, 0.125, 0.5]), scoring="sigmoid_bias", top_k=2)
    s = [1 / (1 + math.exp(-x)) for x in (-1.0, 0.0)]  # keys 0.5, -0.27, 0.625, 0.77
    assert got.ids.tolist() == [[3, 2]]
    assert got.weights[0].tolist() == pytest.approx([s[0] / sum(s), s[1] / sum(s)], rel=1e-6)


def test_scale_enters_the_weights_once() -> None:
    one, scaled = SMALL.reference(scale=1.0), SMALL.reference(scale=2.5)
    assert torch.equal(scaled.weights, one.weights * 2.5)
    assert torch.equal(scaled.out, one.out)


def test_precomputed_routing_skips_absent_experts() -> None:
    ids, weights = torch.tensor([[3, -1], [-1, -1], [0, 3]]), torch.tensor([[0.25, 0.5], [0.0, 1.0], [2.0, 3.0]])
    options = R.Options(scoring="precomputed", top_k=2, w13_order="up_gate")
    got = R.evaluate(SMALL.x(), None, None, SMALL.source, options, ids=ids, weights=weights)
    assert torch.equal(got.ids, ids.int()) and torch.equal(got.weights, weights)
    assert not got.out[[1, 2, 3]].any()
    for index, (token, expert) in {0: (0, 3), 4: (2, 0), 5: (2, 3)}.items():
        assert torch.equal(got.out[index], got.layer.route(token, got.layer.expert(expert)).out) and got.out[index].any()


def test_precomputed_ids_out_of_range() -> None:
    logical = (
        torch.zeros(2, 256, 128, dtype=torch.uint8),
        torch.ones(2, 2, 1),
        torch.zeros(2, 128, 128, dtype=torch.uint8),
        torch.ones(2, 1, 1),
    )
    for wrong in (2, -2):
        with pytest.raises(ValueError, match="-1"):
            R.moe_reference(
                torch.zeros(1, 128, dtype=torch.bfloat16),
                None,
                None,
                *logical,
                scoring="precomputed",
                top_k=1,
                w13_order="up_gate",
                ids=torch.tensor([[wrong]]),
                weights=torch.ones(1, 1),
            )


# ---------------------------------------------------------------------------------------------------------------- Quantisation


def test_token_quantisation_by_hand() -> None:
    x = torch.zeros(1, 512)
    x[0, :3] = torch.tensor([448.0 * 3, -84.0, 3.0])  # scale 3: 448, -28, 1
    x[0, 128:131] = torch.tensor([NAN, 7.0, -3.5])  # NaN ignored: scale 1/64: NaN, 448, -224
    x[0, 256:258] = torch.tensor([INF, 1.0])  # scale inf: inf * 0 is NaN, 1 * 0 is 0
    bits, scale = R.quantise_tokens(x.bfloat16())
    assert scale[0].tolist() == [3.0, 1 / 64, INF, f32(np.float32(1e-10) / np.float32(448))]
    assert bits[0, :3].tolist() == bits_of([448.0, -28.0, 1.0]).tolist()
    assert bits[0, 128:131].tolist() == [0x7F, 0x7E, bits_of([-224.0]).item()]
    assert bits[0, 256:258].tolist() == [0x7F, 0]
    assert not bits[0, 384:].any()


def test_tokens_multiply_by_the_reciprocal_and_hidden_values_divide() -> None:
    """Scale 196/448 is exact, so 175/scale is the edge 400 and goes to the even 384; the rounded reciprocal puts 175 just above it."""
    values = torch.zeros(128)
    values[:2] = torch.tensor([196.0, 175.0])
    assert R.quantise_tokens(values[None].bfloat16())[0][0, :2].tolist() == bits_of([448.0, 416.0]).tolist()
    assert R.quantise_hidden(values)[0][:2].tolist() == bits_of([448.0, 384.0]).tolist()


def test_ue8m0_rounds_scales_up() -> None:
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 128], x[0, 256] = 448.0 * 3, 448.0 * 4, 448.0 * 0.375
    bits, scale = R.quantise_tokens(x.bfloat16(), ue8m0=True)
    assert scale[0].tolist() == [4.0, 4.0, 0.5, 2.0**-33]  # the floor 1e-10 lies between 2**-34 and 2**-33
    assert bits[0, [0, 128, 256]].tolist() == bits_of([336.0, 448.0, 336.0]).tolist()


def test_hidden_quantisation_by_hand() -> None:
    act = torch.zeros(384)
    act[:3] = torch.tensor([896.0, -6.0, 1.0])  # scale 2
    act[128:130] = torch.tensor([NAN, 7.0])
    bits, scale = R.quantise_hidden(act)
    assert scale.tolist() == [2.0, 1 / 64, f32(np.float32(1e-10) / np.float32(448))]
    assert bits[:3].tolist() == bits_of([448.0, -3.0, 0.5]).tolist()
    assert bits[128:130].tolist() == [0x7F, 0x7E]
    assert not bits[256:].any()


# ----------------------------------------------------------------------------------------------------------------------- GEMMs

fp8_code = st.integers(0, 255).filter(lambda code: code & 0x7F != 0x7F)
sparse_code = st.sampled_from([0, 0x80]) | fp8_code
block = st.lists(fp8_code, min_size=128, max_size=128) | st.lists(sparse_code, min_size=128, max_size=128)


@given(block, block)
def test_block_dots_against_fractions(a: list[int], b: list[int]) -> None:
    rows, vector = torch.tensor([a], dtype=torch.uint8), torch.tensor(b, dtype=torch.uint8)
    exact = sum(fp8_value(i) * fp8_value(j) for i, j in zip(a, b, strict=True))
    assert Fraction(float(R.block_dots(rows, vector)[0, 0])) == round_f32(Fraction(exact))
    assert Fraction(float(R.block_dots(rows, vector, "hopper")[0, 0])) == hopper_block(a, b)


@pytest.mark.parametrize("spread", [0.02, 2.0, 100.0])
def test_hopper_dots_on_normal_data(spread: float) -> None:
    data = R.encode_fp8((normal(stream_of(1), 6 * 512) * spread).float()).view(6, 512)
    got = R.block_dots(data[:5], data[5], "hopper")
    for row, k in itertools.product(range(5), range(4)):
        part = slice(128 * k, 128 * k + 128)
        assert Fraction(float(got[row, k])) == hopper_block(data[row, part].tolist(), data[5, part].tolist())


def test_hopper_loses_what_falls_below_13_bits() -> None:
    def dot(pairs: dict[int, tuple[float, float]]) -> float:
        a, b = torch.zeros(1, 128), torch.zeros(128)
        for k, (left, right) in pairs.items():
            a[0, k], b[k] = left, right
        return float(R.block_dots(R.encode_fp8(a), R.encode_fp8(b), "hopper")[0, 0])

    # 448 * 448 = 200704 has operand exponents 8 + 8, so terms are cut to multiples of 2**(16 - 13) = 8, the sum to 2**(17 - 13) = 16.
    assert dot({0: (448.0, 448.0)}) == 200704
    assert dot({0: (448.0, 448.0), 1: (2.5, 3.0)}) == 200704  # 7.5 -> 0
    assert dot({0: (448.0, 448.0), 1: (16.0, 1.0)}) == 200720
    assert dot({0: (448.0, 448.0), 1: (15.0, 1.0)}) == 200704  # 8, then the sum's own cut
    assert dot({0: (448.0, 448.0), 1: (-15.0, 1.0)}) == 200688  # -8: 200696, cut to 200688
    assert dot({0: (448.0, 448.0), 40: (2.5, 3.0)}) == 200704  # the second step aligns to the accumulator's exponent 17
    assert dot({0: (1.0, 1.0), 40: (448.0, 448.0)}) == 200704


def test_nan_bytes_reach_only_their_row_and_block() -> None:
    rows, vector = torch.full((3, 256), 0x38, dtype=torch.uint8), torch.full((256,), 0x38, dtype=torch.uint8)
    rows[1, 200] = 0xFF
    for arithmetic in R.ARITHMETICS:
        got = R.block_dots(rows, vector, arithmetic)
        assert got.isnan().nonzero().tolist() == [[1, 1]]
        assert (got[[0, 2]] == 128).all() and got[1, 0] == 128


def fraction_sum(dots: list[Fraction], scales: list[Fraction], parts: int, order: str) -> Fraction:
    def run(indices: list[int]) -> Fraction:
        total = Fraction(0)
        for i in indices:
            total = round_f32(dots[i] * scales[i] + total)
        return total

    size, total = len(dots) // parts, Fraction(0)
    for p in range(parts):
        indices = range(p * size, (p + 1) * size)
        if order == "ascending":
            one = run(list(indices))
        else:
            q = [run([i for i in indices if (i - p * size) % 8 // 2 == lane]) for lane in range(4)]
            one = round_f32(round_f32(q[0] + q[2]) + round_f32(q[1] + q[3]))
        total = one if p == 0 else round_f32(total + one)
    return total


@pytest.mark.parametrize("parts,blocks", [(1, 1), (1, 4), (1, 6), (1, 8), (1, 13), (1, 32), (2, 32), (4, 16), (4, 12), (8, 48)])
def test_summation_orders(parts: int, blocks: int) -> None:
    rows = 24
    dots = (normal(stream_of(2, blocks), rows * blocks) * 1e4).float().view(rows, blocks)
    scales = (10 ** normal(stream_of(3, blocks), rows * blocks)).float().view(rows, blocks)
    got = {order: R.sum_blocks(dots, scales, parts=parts, order=order) for order in R.ORDERS}
    for order, row in itertools.product(R.ORDERS, range(rows)):
        d, s = ([Fraction(v) for v in values[row].tolist()] for values in (dots, scales))
        assert Fraction(float(got[order][row])) == fraction_sum(d, s, parts, order)
    if blocks > 3 * parts:
        assert not torch.equal(got["ascending"], got["quad"])  # else the case tells nothing


def test_uneven_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="6 K blocks cannot be cut in 4"):
        R.sum_blocks(torch.ones(1, 6), torch.ones(1, 6), parts=4)


def test_gemm1_by_hand() -> None:
    """Two row blocks, two K blocks, every scale different."""
    q = torch.zeros(256)
    q[3], q[130] = 2.0, 4.0
    w = torch.zeros(256, 256)
    w[5, 3], w[5, 130], w[200, 3], w[200, 130] = 1.0, 8.0, -0.5, 3.0
    scale, w_scale = torch.tensor([10.0, 0.5]), torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    got = R.gemm1(R.encode_fp8(q), scale, R.encode_fp8(w), w_scale)
    assert got[5] == 2 * 1 * 10 * 1 + 4 * 8 * 0.5 * 3
    assert got[200] == 2 * -0.5 * 10 * 5 + 4 * 3 * 0.5 * 7
    assert got.count_nonzero() == 2


# ---------------------------------------------------------------------------------------------------------------------- SwiGLU


def test_clamp_points_tell_the_readings_apart() -> None:
    readings = clamp_readings()
    for a, b in itertools.combinations(readings.values(), 2):
        assert max(abs(x - y) / max(abs(x), abs(y)) for x, y in zip(a, b, strict=True)) > 0.2  # FP8 rounding is 0.06
    gate, up = torch.tensor(CLAMP_POINTS).T
    assert R.swiglu(gate, up, CLAMP_LIMIT).tolist() == pytest.approx(readings["contract"], rel=1e-6)
    assert R.swiglu(gate, up, None).tolist() == pytest.approx(readings["none"], rel=1e-6)


@pytest.mark.parametrize("limit,reading", [(CLAMP_LIMIT, "contract"), (None, "none")])
def test_clamp_fixture_end_to_end(limit: float | None, reading: str) -> None:
    e = clamp_expert(256, 128)
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    w13, w13_scale = torch.cat((e.up.view(torch.uint8), e.gate.view(torch.uint8))), torch.cat((e.up_scale, e.gate_scale))
    options = R.Options(scoring="softmax", top_k=1, w13_order="up_gate", limit=limit)
    source = R.ExpertWeights(w13, w13_scale, e.down, e.down_scale)
    got = R.evaluate(x, torch.zeros(1, 1), None, lambda _: source, options).out[0].float()
    for n in range(256):
        assert float(got[n]) == pytest.approx(clamp_readings()[reading][n % 128 % 6], rel=0.07)


def test_swiglu_special_values() -> None:
    got = R.swiglu(torch.tensor([NAN, 1.0, -200.0, 0.0]), torch.tensor([1.0, NAN, 2.0, 5.0]), 10.0)
    assert got.isnan().tolist() == [True, True, False, False]
    assert got[2:].tolist() == [0.0, 0.0]
    assert R.swiglu(torch.tensor([INF]), torch.tensor([2.0]), None).item() == INF
    assert R.swiglu(torch.tensor([INF]), torch.tensor([-INF]), 10.0).item() == pytest.approx(-100, rel=1e-4)


# -------------------------------------------------------------------------------------------------------------- The whole call


def fp64_model(problem: Problem, ids: Tensor, limit: float | None) -> Tensor:
    out = []
    for token, row in enumerate(ids.tolist()):
        x = problem.x()[token].double()
        for expert in row:
            e = problem.expert(expert)
            dense = {
                name: getattr(e, name).float().double() * torch.kron(getattr(e, f"{name}_scale").double(), torch.ones(128, 128))
                for name in ("gate", "up", "down")
            }
            gate, up = dense["gate"] @ x, dense["up"] @ x
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
            out.append(dense["down"] @ (gate * torch.sigmoid(gate) * up))
    return torch.stack(out)


@pytest.mark.parametrize("limit", [None, 10.0])
@pytest.mark.parametrize("changes", [{}, {"ue8m0": True}, HOPPER])
def test_call_against_the_fp64_model(limit: float | None, changes: dict[str, Any]) -> None:
    got = SMALL.reference(limit=limit, **changes)
    model = fp64_model(SMALL, got.ids, limit)
    ours = R.dequantised_model(SMALL.x(), got.ids, SMALL.source, w13_order="up_gate", limit=limit)
    assert relative_error(ours, model) < 1e-12
    assert 0.01 < model_error(got.out, model) <= MODEL_BOUND
    assert 0.3 < float(model.norm()) / math.sqrt(model.numel()) < 10  # outputs of order one


def spec_of(shape: ModelShape, arch: str) -> KernelSpec:
    return next(spec for s, spec in menu_specs([arch]) if s is shape and spec.layout == "row_major" and spec.logits_dtype == "bf16")


@pytest.mark.parametrize("shape", [LEAD, QWEN3_30B], ids=lambda shape: shape.model)
def test_full_size_engines(shape: ModelShape) -> None:
    """A token of each menu model: the Hopper engine against exact arithmetic and both against the model, to the contract's bounds."""
    hopper_spec, blackwell_spec = spec_of(shape, "sm_90a"), spec_of(shape, "sm_100f")
    hopper = Problem.of(hopper_spec, 1).reference(logits_dtype=torch.bfloat16)
    problem = Problem.of(blackwell_spec, 1)
    exact = problem.reference(logits_dtype=torch.bfloat16)
    assert compare_engines(exact, hopper.out, hopper.ids).ok
    assert not torch.equal(hopper.out, exact.out)
    model = R.dequantised_model(problem.x(), exact.ids, problem.source, w13_order="up_gate", limit=shape.limit)
    assert model_error(exact.out, model) <= MODEL_BOUND and model_error(hopper.out, model) <= MODEL_BOUND


def test_options_of_a_spec() -> None:
    spec = spec_of(LEAD, "sm_90a")
    got = R.Options.of(spec, w13_order="gate_up")
    assert (got.scoring, got.top_k, got.renormalise, got.scale, got.limit, got.ue8m0) == ("sigmoid_bias", 8, True, 2.5, 10.0, False)
    assert (got.arithmetic, got.order, got.parts, got.w13_order) == ("hopper", "quad", spec.split.parts, "gate_up")
    got = R.Options.of(spec_of(LEAD, "sm_100f"), w13_order="up_gate", limit=None)
    assert (got.arithmetic, got.order, got.limit) == ("exact", "ascending", None)
    with pytest.raises(ValueError, match="arithmetic"):
        R.Options(scoring="softmax", top_k=1, w13_order="up_gate", arithmetic="fp16")


def test_stacked_weights_in_either_order() -> None:
    """moe_reference on stacked tensors equals the expert-wise call, and the wrong order provably disagrees."""
    problem = SMALL.replace(experts=8, top_k=3)
    want = problem.reference()
    inputs = (problem.x(), problem.logits(), problem.bias())
    options: dict[str, Any] = {"scoring": "sigmoid_bias", "top_k": 3, "limit": 10.0, "scale": 2.5}
    for order in ("up_gate", "gate_up"):
        packed = problem.packed(layout="row_major", w13_order=order)
        right = R.moe_reference(*inputs, *packed, w13_order=order, **options)
        assert torch.equal(right.out, want.out) and torch.equal(right.weights, want.weights)
        wrong = R.moe_reference(*inputs, *packed, w13_order="gate_up" if order == "up_gate" else "up_gate", **options)
        assert min(relative_error(a, b) for a, b in zip(wrong.out, want.out, strict=True)) > 0.3


@pytest.mark.parametrize("changes", [{}, HOPPER])
def test_batch_invariance(changes: dict[str, Any]) -> None:
    batch = SMALL.replace(tokens=4).reference(**changes)
    alone = SMALL.replace(tokens=1).reference(**changes)
    assert torch.equal(alone.out, batch.out[:4]) and torch.equal(alone.weights, batch.weights[:1])
    options = batch.layer.options
    problem = SMALL.replace(tokens=4)
    turned = R.evaluate(problem.x().flip(0), problem.logits().flip(0), problem.bias(), problem.source, options)
    assert torch.equal(turned.out.view(4, 4, -1).flip(0), batch.out.view(4, 4, -1))
    assert torch.equal(turned.weights.flip(0), batch.weights)


def test_no_tokens() -> None:
    got = SMALL.replace(tokens=0).reference()
    assert got.out.shape == (0, 512) and got.ids.shape == (0, 4) and got.weights.shape == (0, 4)
    assert compare(got, got.out, got.ids, got.weights).ok


def test_finalize_by_hand() -> None:
    out = torch.tensor([[1.0, 2.0], [4.0, -8.0], [0.5, 1.0], [16.0, 0.0]]).bfloat16()
    weights = torch.tensor([[0.5, 0.25], [2.0, 0.125]])
    assert R.finalize(out, weights).tolist() == [[1.5, -1.0], [3.0, 2.0]]
    shared = torch.tensor([[1.0, 1.0], [-1.0, 0.0]]).bfloat16()
    assert R.finalize(out, weights, shared).tolist() == [[2.5, 0.0], [2.0, 2.0]]


# ----------------------------------------------------------------------------------------------------------------- Hard inputs


def damaged_tokens(bad: R.MoeResult, good: R.MoeResult) -> set[int]:
    """Tokens whose ids, weights or out rows differ (NaN unlike everything)."""
    same_out = (bad.out == good.out).view(len(bad.ids), -1).all(1)
    same = (bad.ids == good.ids).all(1) & (bad.weights == good.weights).all(1) & same_out
    return set((~same).nonzero().flatten().tolist())


@pytest.mark.parametrize("scoring", ["sigmoid_bias", "softmax"])
@pytest.mark.parametrize("case", HARD_INPUTS)
def test_hard_inputs(case: str, scoring: str) -> None:
    problem = SMALL.replace(scoring=scoring, case=case)
    got, k, hard = problem.reference(), SMALL.top_k, HARD_INPUTS[case]
    bad = got.out[BAD_TOKEN * k : (BAD_TOKEN + 1) * k].float()
    for row in got.ids.tolist():
        assert len(set(row)) == k and min(row) >= 0 and max(row) < problem.experts
    assert got.weights.isfinite().all()
    assert not got.out[k * (BAD_TOKEN + 1) :].isnan().any()
    if hard.expert is not None:
        sound = R.evaluate(problem.x(), problem.logits(), problem.bias(), SMALL.source, got.layer.options)
        assert damaged_tokens(got, sound) == {BAD_TOKEN}
    elif hard.bias is None and case != "underflow":
        assert damaged_tokens(got, SMALL.replace(scoring=scoring).reference()) == {BAD_TOKEN}
    if (bias := problem.bias()) is not None:
        assert got.ids.tolist() == [python_route(row, bias.tolist(), k)[0] for row in problem.logits().tolist()]

    if case == "zero_token":
        assert (bad == 0).all()
    elif case in ("inf_token", "minus_inf_token", "nan_token"):
        assert bad.isnan().all()
    elif case in ("nan_w13", "huge_w13_scale"):
        assert got.ids[BAD_TOKEN, 0] == BAD_EXPERT
        assert not bad[0].isfinite().any() and bad[1:].isfinite().all()
    elif case == "nan_w2":
        assert bad.isnan().nonzero().tolist() == [[0, BAD_ROW]]
    elif case == "huge_w2_scale":
        where = (~bad.isfinite()).nonzero()
        assert (where[:, 0] == 0).all() and (where[:, 1] // 128 == BAD_ROW // 128).all() and len(where) > 100
    elif case in ("nan_logits", "all_ties", "underflow") and scoring == "softmax":
        assert got.ids[BAD_TOKEN].tolist() == list(range(k))
        assert got.weights[BAD_TOKEN].tolist() == [2.5 / k] * k
    elif case in ("nan_logits", "underflow"):
        assert got.weights[BAD_TOKEN].tolist() == [2.5 / k] * k
    elif case == "all_ties":
        assert got.ids.tolist() == [list(range(k))] * problem.tokens
    elif case == "some_nan_logits" and scoring == "softmax":
        assert (got.ids[BAD_TOKEN] % 2 == 1).all()
    elif case == "inf_logits" and scoring == "softmax":
        assert got.ids[BAD_TOKEN].tolist() == [3, 7, 11, 15] and got.weights[BAD_TOKEN].tolist() == [2.5 / k] * k
    elif case == "disabled_experts" and scoring == "sigmoid_bias":
        assert (got.ids % 2 == 1).all()


# ------------------------------------------------------------------------------------------------------------------- Agreement


def verdict(want: R.MoeResult, got: R.MoeResult) -> bool:
    return compare(want, got.out, got.ids, got.weights).ok


def changed_expert(change: Callable[[R.ExpertWeights], R.ExpertWeights]) -> R.MoeResult:
    options = SMALL.reference().layer.options
    return R.evaluate(SMALL.x(), SMALL.logits(), SMALL.bias(), lambda e: change(SMALL.source(e)), options)


def swapped(rows: Tensor) -> Tensor:
    return torch.cat(rows.chunk(2)[::-1])


MISREADINGS: dict[str, Callable[[], R.MoeResult]] = {
    "gate for up": lambda: SMALL.reference(w13_order="gate_up"),
    "w13 scales' halves swapped": lambda: changed_expert(lambda w: w._replace(w13_scale=swapped(w.w13_scale))),
    "w13 scales one row block off": lambda: changed_expert(lambda w: w._replace(w13_scale=w.w13_scale.roll(1, 0))),
    "w13 scales one K block off": lambda: changed_expert(lambda w: w._replace(w13_scale=w.w13_scale.roll(1, 1))),
    "w13 scales transposed": lambda: changed_expert(lambda w: w._replace(w13_scale=w.w13_scale.T.contiguous())),
    "w2 scales one row block off": lambda: changed_expert(lambda w: w._replace(w2_scale=w.w2_scale.roll(1, 0))),
    "w2 scales one K block off": lambda: changed_expert(lambda w: w._replace(w2_scale=w.w2_scale.roll(1, 1))),
    "w2 rows shuffled": lambda: changed_expert(
        lambda w: w._replace(w2=w.w2.view(torch.uint8).view(-1, 2, 8, 256).movedim(1, 2).reshape(-1, 256))
    ),
    "no clamp": lambda: SMALL.reference(limit=None),
    "scale dropped": lambda: SMALL.reference(scale=1.0),
    "scale applied twice": lambda: SMALL.reference(scale=6.25),
    "not renormalised": lambda: SMALL.reference(renormalise=False),
    "power-of-two token scales": lambda: SMALL.reference(ue8m0=True),
    "bias ignored": lambda: R.evaluate(SMALL.x(), SMALL.logits(), torch.zeros(32), SMALL.source, SMALL.reference().layer.options),
    "logits one expert off": lambda: R.evaluate(
        SMALL.x(), SMALL.logits().roll(1, 1), SMALL.bias(), SMALL.source, SMALL.reference().layer.options
    ),
}


@pytest.mark.parametrize("name", MISREADINGS)
def test_misreadings_are_refused(name: str) -> None:
    want = SMALL.reference()
    assert verdict(want, want)
    assert not verdict(want, MISREADINGS[name]())


def edge_problem(tokens: int) -> tuple[R.MoeResult, list[Tensor]]:
    """One expert whose hidden values 1 and 2 lie on FP8 rounding edges (17 and 34 in units of the scale), and the outputs with value 1, 2
    or (no edge) 3 re-rounded."""
    w13, w2 = torch.zeros(256, 256), (normal(stream_of(9), 256 * 128) * 2).float().view(256, 128)
    w13[:5, 0] = torch.tensor([448.0, 16.0, 32.0, 20.0, 4.0])  # up
    w13[:3, 1] = torch.tensor([0.0, 1.0, 2.0])
    w13[128:, 0] = 2.0  # gate
    w2[:, 0] /= 64
    source = R.ExpertWeights(R.encode_fp8(w13), torch.ones(2, 2), R.encode_fp8(w2), torch.ones(2, 1))
    x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    x[:, :2] = 1.0
    options = R.Options(scoring="softmax", top_k=1, w13_order="up_gate")
    result = R.evaluate(x, torch.zeros(tokens, 1), None, lambda _: source, options)
    hidden, others = result.hidden[0], []
    values = (result.act[0] / result.hidden_scale[0, 0])[:5].tolist()
    assert values == pytest.approx([448, 17, 34, 20, 4], rel=1e-6)
    for flip, (low, high) in ((1, (16.0, 18.0)), (2, (32.0, 36.0)), (3, (18.0, 20.0))):
        codes = bits_of([low, high]).tolist()
        assert int(hidden[flip]) in codes
        trial = hidden.clone()
        trial[flip] = codes[1 - codes.index(int(hidden[flip]))]
        others.append(result.layer.output(trial, result.hidden_scale[0], source))
    return result, others


def test_a_flip_on_a_rounding_edge_is_explained() -> None:
    result, others = edge_problem(1)
    for flipped in others[:2]:
        report = compare(result, flipped[None], result.ids, result.weights)
        assert (report.ok, report.helped, report.flips, report.worst_error) == (True, 1, 1, 0.0)
        assert report.median > 1.5e-3


def test_a_flip_off_the_edges_is_refused() -> None:
    result, others = edge_problem(1)
    report = compare(result, others[2][None], result.ids, result.weights)
    assert not report.ok and "route 0 (token 0, rank 0, expert 0)" in report.reason and "no rounding edge" in report.reason
    assert report.flips == 0 and report.worst_error == report.median  # flips that do not help are not counted


def test_too_many_flips_are_refused() -> None:
    result, others = edge_problem(20)
    out = result.out.clone()
    out[:2] = others[0]
    assert compare(result, out, result.ids, result.weights).ok
    out[2] = others[1]
    report = compare(result, out, result.ids, result.weights)
    assert not report.ok and report.helped == 3 and "3 of 20 routes" in report.reason


@given(st.integers(0, 0x7E), st.sampled_from([-1, 1]), st.sampled_from([0.0, 0.9e-5, 3e-5]))
def test_near_edges(code: int, direction: int, distance: float) -> None:
    other = code + direction
    if not 0 <= other <= 0x7E:
        return
    edge = (float(fp8_value(code)) + float(fp8_value(other))) / 2
    value = torch.tensor([edge * (1 - direction * distance)])  # on the code's own side
    where, codes = near_edges(value, torch.tensor([code], dtype=torch.uint8), 1e-5)
    assert (where.tolist(), codes.tolist()) == (([0], [other]) if distance < 1e-5 else ([], []))


def tied(gap_ulps: int) -> tuple[R.MoeResult, R.MoeResult]:
    """The same call with two neighbouring experts' keys ``gap_ulps`` apart, in either direction. Ranks 1, 2 and K, K+1 tie."""
    ulp = 2.0**-24  # of keys in [0.5, 1)
    base = torch.full((1, 32), -3.0)
    base[0, [4, 9, 17, 21]] = 1.0
    base[0, 25] = 1.0
    bias = torch.full((32,), -0.1)
    bias[[4, 9]], bias[17], bias[[21, 25]] = -0.01, -0.05, -0.09375
    results = []
    for winner in (4, 9), (9, 4):
        b = bias.clone()
        b[winner[0]] += gap_ulps * ulp
        b[21 if winner[0] == 4 else 25] += gap_ulps * ulp
        options = R.Options(scoring="sigmoid_bias", top_k=4, w13_order="up_gate")
        results.append(R.evaluate(SMALL.x()[:1], base, b, SMALL.source, options))
    return results[0], results[1]


def test_ties_of_4_ulp_may_permute() -> None:
    one, other = tied(3)
    assert (one.ids.tolist(), other.ids.tolist()) == ([[4, 9, 17, 21]], [[9, 4, 17, 25]])
    report = compare(one, other.out, other.ids, other.weights)
    assert report.ok and not report.ids_equal


def test_wider_gaps_may_not() -> None:
    one, other = tied(6)
    report = compare(one, other.out, other.ids, other.weights)
    assert not report.ok and "token 0: experts [9, 4, 17, 25], expected [4, 9, 17, 21]" in report.reason


def test_a_disabled_expert_ties_with_nobody() -> None:
    bias = torch.full((32,), -INF)
    bias[[4, 9, 17, 21]] = 0.0
    options = R.Options(scoring="sigmoid_bias", top_k=4, w13_order="up_gate")
    want = R.evaluate(SMALL.x()[:1], SMALL.logits()[:1], bias, SMALL.source, options)
    ids = want.ids.clone()
    ids[0, 3] = 30
    report = compare(want, want.out, ids, want.weights)
    assert not report.ok and "token 0: experts" in report.reason


def test_equal_inputs_rank_by_index() -> None:
    one, _ = tied(0)
    swap = [1, 0, 2, 3]
    assert one.ids.tolist() == [[4, 9, 17, 21]]
    assert not compare(one, one.out[swap], one.ids[:, swap], one.weights[:, swap]).ok


def test_a_tie_at_the_group_cut_may_go_either_way() -> None:
    logits, bias = torch.full((1, 8), -3.0), torch.zeros(8)
    logits[0, [0, 1, 2, 3, 6, 7]] = 1.0
    bias[[0, 1]] = 0.25
    bias[3] = 2.0**-23  # groups {2, 3} and {6, 7} tie but for two ulp
    options = R.Options(scoring="sigmoid_bias_grouped", top_k=4, w13_order="up_gate", n_group=4, topk_group=2)
    problem = SMALL.replace(experts=8)
    want = R.evaluate(SMALL.x()[:1], logits, bias, problem.source, options)
    assert want.ids.tolist() == [[0, 1, 3, 2]]

    def judge(ids: list[int]) -> bool:
        out = torch.stack([want.layer.route(0, want.layer.expert(e)).out for e in ids])
        assert want.routing.scores is not None
        chosen = torch.tensor([ids], dtype=torch.int32)
        return compare(want, out, chosen, R.weights_of(want.routing.scores, chosen, renormalise=True, scale=1.0)).ok

    assert judge([0, 1, 3, 2]) and judge([0, 1, 2, 3]) and judge([0, 1, 6, 7])
    assert not judge([0, 1, 3, 6])  # three groups
    assert not judge([0, 1, 7, 6])  # equal inputs out of order
    assert not judge([6, 7, 0, 1])


@pytest.mark.parametrize("position,value", [((0, 3), NAN), ((5, 0), INF), ((7, 9), -INF)])
def test_special_values_must_stand_in_the_same_place(position: tuple[int, int], value: float) -> None:
    want = SMALL.reference()
    out = want.out.clone()
    out[position] = value
    report = compare(want, out, want.ids, want.weights)
    assert not report.ok and report.worst_route == position[0] and f"row {position[1]}:" in report.reason
    damaged = SMALL.replace(case="nan_w2").reference()
    assert verdict(damaged, damaged)
    assert not compare(damaged, damaged.out.nan_to_num(0.0), damaged.ids, damaged.weights).ok


def test_bad_result_shapes_are_errors() -> None:
    want = SMALL.reference()
    with pytest.raises(ValueError, match=r"ids must be torch\.int32"):
        compare(want, want.out, want.ids.long(), want.weights)
    with pytest.raises(ValueError, match="out must be"):
        compare(want, want.out[1:], want.ids, want.weights)
