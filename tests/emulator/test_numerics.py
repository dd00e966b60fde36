"""Floating-point semantics against exact rational arithmetic and hand-computed values."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emulator import numerics
from tests.emulator.exact import f32_bits, f32_of, round_to

f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
near = st.builds(lambda e, m: f32_of(e << 23 | m), st.integers(110, 140), st.integers(0, (1 << 23) - 1))
"""Positive values of similar size: sums that cancel, products that need all bits."""


def one(function: object, *values: float) -> float:
    with np.errstate(all="ignore"):
        return float(function(*(np.array([v], np.float32) for v in values))[0])  # type: ignore[operator]


def same(got: float, wanted: float) -> bool:
    return f32_bits(got) == f32_bits(wanted)


@given(f32 | near, f32 | near, f32 | near)
@example(f32_of(0x3F800001), f32_of(0x3F800001), f32_of(0x33000000))  # a tie that FP64 alone would round twice
@example(1.0 + 2.0**-23, 1.0 - 2.0**-23, -1.0)
def test_fma_is_rounded_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:  # the sign of an exact zero is tested below
        assert same(one(numerics.fma_rn, a, b, c), round_to(exact, "even"))
        assert same(one(numerics.fma_rm, a, b, c), round_to(exact, "down"))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_fma_where_fp64_would_round_twice(sign: float) -> None:
    """a * b = 2^-24 (1 + 2^-36): beside 1 it is just more than half a unit, but FP64 keeps exactly half, and a tie goes to even."""
    a, b = sign * 2.0**-24 * (1 + 2.0**-12), 1 - 2.0**-12 + 2.0**-24
    assert np.float32(np.float64(a) * b + sign) == sign, "the naive way is wrong here"
    assert one(numerics.fma_rn, a, b, sign) == sign * (1 + 2.0**-23)


@given(st.integers(1, 2**24 - 1), st.integers(1, 2**24 - 1), st.integers(30, 60))
def test_fma_near_ties(a: int, b: int, shift: int) -> None:
    """Products beside a much larger addend: the last bits of the product decide ties."""
    c = float(2**shift)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assert same(one(numerics.fma_rn, float(a), float(b), c), round_to(exact, "even"))
    assert same(one(numerics.fma_rm, float(-a), float(b), c), round_to(Fraction(c) - Fraction(a) * b, "down"))


@pytest.mark.parametrize(
    ("a", "b", "c", "nearest", "down"),
    [
        (1.0, 1.0, -1.0, 0x00000000, 0x80000000),
        (0.0, 1.0, 0.0, 0x00000000, 0x00000000),
        (-0.0, 1.0, -0.0, 0x80000000, 0x80000000),
        (-0.0, 1.0, 0.0, 0x00000000, 0x80000000),
        (3e38, 3e38, 0.0, 0x7F800000, 0x7F7FFFFF),
        (-3e38, 3e38, 0.0, 0xFF800000, 0xFF800000),
        (math.inf, 1.0, -math.inf, 0x7FFFFFFF, 0x7FFFFFFF),
        (math.inf, 0.0, 1.0, 0x7FFFFFFF, 0x7FFFFFFF),
        (math.nan, 1.0, 1.0, 0x7FFFFFFF, 0x7FFFFFFF),
        (math.inf, 1.0, 1.0, 0x7F800000, 0x7F800000),
    ],
)
def test_fma_specials(a: float, b: float, c: float, nearest: int, down: int) -> None:
    values = [np.array([v], np.float32) for v in (a, b, c)]
    with np.errstate(all="ignore"):
        assert int(numerics.bits(numerics.fma_rn(*values))[0]) == nearest
        assert int(numerics.bits(numerics.fma_rm(*values))[0]) == down


@given(f32, f32)
def test_min_max(a: float, b: float) -> None:
    assert one(lambda x, y: numerics.maximum(x, y, False), a, b) == max(a, b)
    assert one(lambda x, y: numerics.minimum(x, y, True), a, b) == min(a, b)


def test_min_max_of_nan_and_zeros() -> None:
    nan, zero, minus = (np.array([v], np.float32) for v in (math.nan, 0.0, -0.0))
    one_ = np.ones(1, np.float32)
    assert numerics.maximum(nan, one_, False)[0] == 1.0
    assert int(numerics.bits(numerics.maximum(nan, one_, True))[0]) == 0x7FFFFFFF
    assert int(numerics.bits(numerics.minimum(nan, nan, False))[0]) == 0x7FFFFFFF
    for a, b in ((zero, minus), (minus, zero)):
        assert not np.signbit(numerics.maximum(a, b, False)[0])
        assert np.signbit(numerics.minimum(a, b, False)[0])


@pytest.mark.parametrize(("x", "wanted"), [(-1.0, 0.0), (0.25, 0.25), (7.0, 1.0), (math.nan, 0.0), (-0.0, 0.0), (math.inf, 1.0)])
def test_saturate(x: float, wanted: float) -> None:
    assert same(one(numerics.saturate, x), wanted)


# ---- conversions ----


def e4m3_value(code: int) -> Fraction:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    return -magnitude if code & 0x80 else magnitude


def nearest_e4m3(x: float) -> int:
    """By search over all codes: the nearest, ties to the even code, saturating."""
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x) or abs(x) >= 448:
        return sign | 0x7E
    codes = sorted(range(0x7F), key=lambda c: (abs(e4m3_value(c) - abs(Fraction(x))), c & 1))
    return sign | codes[0]


codes = st.integers(0, 0x7D)
beside = st.sampled_from([0, 2.0**-23, -(2.0**-23)])


@given(st.floats(-500, 500, width=32) | st.builds(lambda code, d: float(e4m3_value(code)) * (1 + d), codes, beside))
def test_e4m3(x: float) -> None:
    x = float(np.float32(x))
    assert int(numerics.to_e4m3(np.array([x], np.float32))[0]) == nearest_e4m3(x)


@pytest.mark.parametrize(
    ("x", "code"),
    [(448, 0x7E), (464, 0x7E), (1e9, 0x7E), (math.inf, 0x7E), (-math.inf, 0xFE), (2.0**-10, 0), (1.5 * 2.0**-10, 1), (1.5 * 2.0**-9, 2),
     (-0.0, 0x80), (math.nan, 0x7F)],
)  # fmt: skip
def test_e4m3_edges(x: float, code: int) -> None:
    assert int(numerics.to_e4m3(np.array([x], np.float32))[0]) == code


def test_e4m3_table() -> None:
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert math.isnan(numerics.E4M3[code])
        else:
            assert Fraction(float(numerics.E4M3[code])) == e4m3_value(code)


@given(f32)
def test_bf16(x: float) -> None:
    wanted = round_to(Fraction(x), "even", fraction_bits=7)
    got = int(numerics.to_bf16(np.array([x], np.float32))[0]) << 16
    assert f32_of(got) == wanted
    assert (got >> 31) == (math.copysign(1.0, x) < 0)


@pytest.mark.parametrize(("bits", "wanted"), [(0x7FC00000, 0x7FFF), (0xFF800001, 0x7FFF), (0x7F7FFFFF, 0x7F80), (0xFF800000, 0xFF80)])
def test_bf16_specials(bits: int, wanted: int) -> None:
    assert int(numerics.to_bf16(np.array([bits], np.uint32).view(np.float32))[0]) == wanted


# ---- approximations ----


@given(st.floats(-150, 130, width=32))
def test_ex2(x: float) -> None:
    got = one(numerics.ex2_ftz, x)
    wanted = round_to(Fraction(2.0**x), "even")  # FP64 is far more precise than half an FP32 unit
    assert got == (wanted if wanted >= 2.0**-126 else 0.0)


@given(st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=20), st.integers(1, 3), st.integers(0, 5))
def test_nudge_moves_by_whole_ulps_and_repeats(values: list[float], ulps: int, seed: int) -> None:
    x = np.array(values, np.float32)
    moved = numerics.nudge(x, x, ulps, seed)
    steps = moved.view(np.int32) - x.view(np.int32)
    assert np.abs(steps).max() <= ulps
    assert (numerics.nudge(x, x, ulps, seed) == moved).all()
    assert (numerics.nudge(x, x, 0, seed) == x).all()


def test_nudge_reaches_both_sides() -> None:
    x = np.linspace(1, 2, 200, dtype=np.float32)
    steps = numerics.nudge(x, x, 1, 0).view(np.int32) - x.view(np.int32)
    assert set(steps.tolist()) == {-1, 0, 1}
