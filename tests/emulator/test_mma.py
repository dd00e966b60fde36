"""Descriptors field by field, operand addresses against TMA's placement, and the arithmetic models against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator import TCGEN05, WGMMA, Dot, mma
from emulator.isa.copies import swizzle
from emulator.isa.wgmma import fragment_positions
from tests.emulator.exact import f32_bits, round_to
from tests.emulator.test_numerics import e4m3_value

SW128 = (2 << 61) | (1 << 46) | (1 << 16)
"""Constant part of a tcgen05 descriptor: K-major, 128-byte swizzle, leading dimension 1."""


def tcgen05(start: int, stride: int = 1024, rest: int = SW128) -> int:
    return rest | start >> 4 | stride >> 4 << 32


# ---- descriptors ----


def test_documented_descriptor_words() -> None:
    assert SW128 | 1024 >> 4 << 32 == 0x4000404000010000
    assert mma.tcgen05_operand(0x4000404000010000 | 0x8400 >> 4) == mma.Operand(0x8400, 16, 1024, 128)
    assert mma.wgmma_operand(1 << 62 | 64 << 32 | 1 << 16 | 0x8440 >> 4) == mma.Operand(0x8440, 16, 1024, 128)


@pytest.mark.parametrize(
    ("word", "m", "n"),
    [(0x08020010, 128, 8), (0x08040010, 128, 16), (0x08100010, 128, 64), (0x08400010, 128, 256), (0x04020010, 64, 8), (0x04040010, 64, 16)],
)
def test_documented_instruction_words(word: int, m: int, n: int) -> None:
    assert mma.tcgen05_instruction(word) == mma.Shape(m, n)


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 47, 48, 52, 53, 60, 61, 63, 49])
def test_every_wrong_bit_of_a_tcgen05_descriptor_is_refused(bit: int) -> None:
    with pytest.raises(mma.DescriptorError):
        mma.tcgen05_operand(tcgen05(0x8400) ^ 1 << bit)


@pytest.mark.parametrize("start", [0x8480, 0x8500, 0x8600])
def test_start_off_the_swizzle_pattern_is_refused(start: int) -> None:
    with pytest.raises(mma.DescriptorError, match="1024-byte pattern"):
        mma.tcgen05_operand(tcgen05(start))


def test_stride_must_keep_the_pattern() -> None:
    with pytest.raises(mma.DescriptorError, match="stride 512"):
        mma.tcgen05_operand(tcgen05(0x8400, 512))


@pytest.mark.parametrize("bit", [0, 2, 3, 4, 5, 6, 7, 10, 13, 14, 15, 16, 23, 25, 27, 29, 30])
def test_every_wrong_bit_of_an_instruction_descriptor_is_refused(bit: int) -> None:
    with pytest.raises(mma.DescriptorError):
        mma.tcgen05_instruction(0x08040010 ^ 1 << bit)


@pytest.mark.parametrize("base", [0x400, 0x8400])
@pytest.mark.parametrize("rows", [8, 64, 128])
def test_operand_walk_finds_what_tma_placed(base: int, rows: int) -> None:
    """A box of ``rows`` x 128 bytes lands swizzled; K step s reads bytes 32 s .. 32 s + 31 of each row."""
    memory = np.zeros(base + rows * 128, np.int64)
    source = np.arange(rows * 128)
    memory[swizzle(base + source, 128)] = source
    for step in range(4):
        chunks = mma.operand_chunks(mma.tcgen05_operand(tcgen05(base + 32 * step)), 0, rows)
        got = memory[(chunks[:, :, None] + np.arange(16)).reshape(rows, 32)]
        assert (got == np.arange(rows)[:, None] * 128 + 32 * step + np.arange(32)).all()


def test_zero_group_shared_through_the_stride() -> None:
    """Rows 8 to 15 may come from any later group: the stride is the distance."""
    chunks = mma.operand_chunks(mma.tcgen05_operand(tcgen05(0x2000, 0x5000)), 0, 16)
    assert chunks.min(axis=1).tolist() == [0x2000 + 128 * r + (0 if r < 2 else 16 * (r & 6)) for r in range(8)] + [
        0x7000 + 128 * r + (0 if r < 2 else 16 * (r & 6)) for r in range(8)
    ]


def test_wgmma_fragmentfragment_positions() -> None:
    """Element e of lane l: row l // 4 + 8 (e >> 1), column 2 (l % 4) + (e & 1): every cell of 16 x 8 once."""
    cells = {(int(row[lane]), int(column[lane])) for row, column in fragment_positions(4) for lane in range(32)}
    assert cells == {(r, c) for r in range(16) for c in range(8)}
    row, column = fragment_positions(4)[3]
    assert (int(row[6]), int(column[6])) == (9, 5)


# ---- arithmetic ----


def term_exponent(a: int, b: int) -> int:
    """Sum of the operands' exponents, subnormals -6; a zero product is far below everything."""
    if e4m3_value(a) == 0 or e4m3_value(b) == 0:
        return -133
    return sum(max((code >> 3 & 15) - 7, -6) for code in (a, b))


def exponent_of(x: Fraction) -> int:
    if x == 0:
        return -133
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    if Fraction(2) ** exponent > abs(x):
        exponent -= 1
    return max(exponent, -126)


def fused(a: list[int], b: list[int], c: float, model: Dot) -> float:
    """The published model in exact arithmetic: align to the largest exponent, truncate each term, add, truncate the sum."""
    products = [e4m3_value(x) * e4m3_value(y) for x, y in zip(a, b, strict=True)]
    largest = max([*(term_exponent(x, y) for x, y in zip(a, b, strict=True)), exponent_of(Fraction(c)), -133])
    unit = Fraction(2) ** (largest - model.alignment_bits)
    total = unit * sum(int(t / unit) for t in [*products, Fraction(c)])
    return round_to(total, "zero", fraction_bits=model.result_bits)


code = st.integers(0, 255).filter(lambda c: c & 0x7F != 0x7F)
codes = st.lists(code | st.sampled_from([0, 0x80, 1, 0x7E, 0xFE]), min_size=32, max_size=32)


@given(codes, codes, st.floats(-1e6, 1e6, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32), st.sampled_from([TCGEN05, WGMMA]))
@settings(max_examples=150)
def test_dot_follows_the_bit_model(a: list[int], b: list[int], c: float, model: Dot) -> None:
    got = mma.dot(np.array([a], np.uint8), np.array([b], np.uint8), np.array([[c]], np.float32), model)
    assert float(got[0, 0]) == fused(a, b, c, model)


@given(codes, codes, st.floats(-1e6, 1e6, width=32))
@settings(max_examples=50)
def test_exact_dot_is_rounded_once(a: list[int], b: list[int], c: float) -> None:
    got = mma.dot(np.array([a], np.uint8), np.array([b], np.uint8), np.array([[c]], np.float32), None)
    exact = sum((e4m3_value(x) * e4m3_value(y) for x, y in zip(a, b, strict=True)), Fraction(c))
    assert abs(Fraction(float(got[0, 0])) - exact) <= Fraction(2) ** (exponent_of(exact) - 23)


@pytest.mark.parametrize("model", [TCGEN05, WGMMA, None])
def test_nan_in_a_reaches_columns_of_zeros(model: Dot | None) -> None:
    """0 * NaN = NaN, so a zero B row must not be skipped for that row of A; other rows keep C."""
    a = np.full((4, 32), 0x38, np.uint8)
    a[2, 17] = 0x7F
    got = mma.dot(a, np.zeros((2, 32), np.uint8), np.full((4, 2), 3.0, np.float32), model)
    assert got[[0, 1, 3]].tolist() == [[3.0, 3.0]] * 3
    assert (got[2].view(np.uint32) == 0x7FFFFFFF).all()


def test_zero_columns_still_truncate_the_accumulator() -> None:
    """wgmma keeps 13 fraction bits of C even where all products are zero; -0 becomes +0."""
    c = np.array([[1 + 2.0**-20, -0.0]], np.float32)
    zeros = np.zeros((1, 32), np.uint8), np.zeros((2, 32), np.uint8)
    assert [f32_bits(float(x)) for x in mma.dot(*zeros, c, WGMMA)[0]] == [f32_bits(1.0), 0]
    assert [f32_bits(float(x)) for x in mma.dot(*zeros, c, TCGEN05)[0]] == [f32_bits(1 + 2.0**-20), 0]


def test_infinite_accumulator() -> None:
    ones = np.full((1, 32), 0x38, np.uint8)
    for model in (TCGEN05, WGMMA, None):
        assert mma.dot(ones, ones, np.array([[np.inf]], np.float32), model)[0, 0] == np.inf
        assert np.isnan(mma.dot(ones, ones, np.array([[np.nan]], np.float32), model)[0, 0])
