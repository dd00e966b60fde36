"""Exact rounding with fractions: the independent oracle for floating-point tests."""

from __future__ import annotations

import math
import struct
from fractions import Fraction


def f32_bits(x: float) -> int:
    """Bits of a Python float that is an FP32 value."""
    return int.from_bytes(struct.pack("<f", x), "little")


def f32_of(bits: int) -> float:
    """The FP32 value with these bits."""
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def round_to(x: Fraction, mode: str, fraction_bits: int = 23, min_exponent: int = -126, max_exponent: int = 127) -> float:
    """Round an exact value to a binary format: ``even`` (nearest), ``down`` (minus infinity) or ``zero``."""
    if x == 0:
        return 0.0
    exponent = max(_floor_log2(abs(x)), min_exponent)
    unit = Fraction(2) ** (exponent - fraction_bits)
    quotient = x / unit
    if mode == "even":
        steps = round(quotient)  # Python rounds halves to even
    elif mode == "down":
        steps = math.floor(quotient)
    else:
        steps = math.trunc(quotient)
    value = steps * unit
    largest = (2 - Fraction(1, 2**fraction_bits)) * Fraction(2) ** max_exponent
    if abs(value) > largest:
        if mode == "zero" or (mode == "down" and value > 0):
            return float(largest) if value > 0 else -float(largest)
        return math.inf if value > 0 else -math.inf
    return float(value)


def _floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1
