"""Floating-point operations of PTX on numpy arrays, bit for bit where PTX fixes the bits.

FP32 add, sub, mul and div of numpy round to nearest even with subnormals, which is what the ``.rn`` forms do. What numpy
lacks is here: fused multiply-add, directed rounding, min/max rules, conversions to FP8 and BF16. Results that are NaN become
the canonical NaN 0x7fffffff.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

CANONICAL_NAN = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
_INFINITY_BITS = np.uint32(0x7F800000)


def bits(x: F32) -> U32:
    """The bits of an FP32 array."""
    return x.view(np.uint32)


def from_bits(x: U32) -> F32:
    """FP32 array with the given bits."""
    return x.view(np.float32)


def canonical(x: F32) -> F32:
    """``x`` with every NaN replaced by the canonical one; changes ``x`` in place."""
    nan = x != x
    if nan.any():
        bits(x)[nan] = CANONICAL_NAN
    return x


def flush(x: F32) -> F32:
    """``.ftz``: subnormals become zeros of the same sign (a copy)."""
    words = bits(x)
    tiny = (words & _INFINITY_BITS) == 0
    return from_bits(np.where(tiny, words & _SIGN, words))


def _sum_to_odd(product: F64, c: F64) -> F64:
    """product + c, rounded to odd in FP64: any later rounding to FP32 is then a single rounding.

    The error term of the FP64 addition (two-sum, exact: neither overflow nor underflow is possible for FP32 inputs) tells
    whether the sum was inexact; if so, and the last bit is even, the neighbour on the error's side has an odd last bit.
    """
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    words = total.view(np.int64)
    adjust = (error != 0) & (words & 1 == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(adjust, words + step, words).view(np.float64)


def fma_rn(a: F32, b: F32, c: F32) -> F32:
    """a * b + c with one rounding to nearest even."""
    return canonical(_sum_to_odd(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32))


def fma_rm(a: F32, b: F32, c: F32) -> F32:
    """a * b + c with one rounding toward minus infinity; an exact zero of opposite terms is -0."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    exact = _sum_to_odd(product, addend)
    result = exact.astype(np.float32)
    result = np.where(result > exact, np.nextafter(result, np.float32(-np.inf)), result)
    opposite = (exact == 0) & ~(np.signbit(product) & np.signbit(addend)) & (np.signbit(product) | np.signbit(addend))
    return canonical(np.where(opposite, np.float32(-0.0), result))


def saturate(x: F32) -> F32:
    """``.sat``: clamp to [0, 1]; NaN and -0 become +0."""
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))


def maximum(a: F32, b: F32, keep_nan: bool) -> F32:
    """max.f32 or max.NaN.f32; +0 is larger than -0."""
    return _choose(a, b, np.maximum if keep_nan else np.fmax, np.bitwise_and)


def minimum(a: F32, b: F32, keep_nan: bool) -> F32:
    """min.f32 or min.NaN.f32; -0 is smaller than +0."""
    return _choose(a, b, np.minimum if keep_nan else np.fmin, np.bitwise_or)


def _choose(a: F32, b: F32, pick: Any, of_zeros: Any) -> F32:
    zeros = (a == 0) & (b == 0)
    result = np.where(zeros, from_bits(of_zeros(bits(a), bits(b))), pick(a, b))
    return canonical(result)


# ---- approximations ----


def nudge(x: F32, source: F32, ulps: int, seed: int) -> F32:
    """Move finite non-zero results by -ulps..+ulps, by a hash of the input's bits: the same input gives the same result."""
    if ulps == 0:
        return x
    words = bits(source).astype(np.uint64)
    mixed = (words + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    step = ((mixed >> np.uint64(7)) % np.uint64(2 * ulps + 1)).astype(np.int64) - ulps
    moved = from_bits((bits(x).astype(np.int64) + step).astype(np.uint32))
    usable = np.isfinite(x) & (x != 0) & np.isfinite(moved) & (np.signbit(moved) == np.signbit(x))
    return np.where(usable, moved, x)


def ex2_ftz(x: F32) -> F32:
    """2^x, correctly rounded (through FP64), subnormal inputs and results flushed to zero."""
    return canonical(flush(np.exp2(flush(x).astype(np.float64)).astype(np.float32)))


def rcp(x: F32) -> F32:
    """1 / x, correctly rounded."""
    return canonical(np.float32(1) / x)


# ---- conversions ----


def to_bf16(x: F32) -> U16:
    """Round to nearest even; overflow gives infinity, NaN gives 0x7fff."""
    words = bits(x)
    rounded = ((words.astype(np.uint64) + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(x != x, np.uint16(0x7FFF), rounded)


def _e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 0x80 else magnitude


E4M3 = np.array([_e4m3_value(code) for code in range(256)])
"""FP64 [256]: the value of every e4m3 code."""

_E4M3_MIDPOINTS = (E4M3[1:0x7F] + E4M3[:0x7E]) / 2


def to_e4m3(x: F32) -> U8:
    """``.rn.satfinite``: nearest even, saturating at +-448 (also infinities), NaN becomes 0x7f."""
    magnitude = np.abs(x).astype(np.float64)
    below = np.searchsorted(_E4M3_MIDPOINTS, magnitude, side="left")  # a midpoint counts to the lower code
    tie = (below < len(_E4M3_MIDPOINTS)) & (_E4M3_MIDPOINTS[np.minimum(below, len(_E4M3_MIDPOINTS) - 1)] == magnitude)
    code = below + (tie & (below & 1 == 1))
    code |= np.where(np.signbit(x), 0x80, 0)
    return np.where(x != x, 0x7F, code).astype(np.uint8)
