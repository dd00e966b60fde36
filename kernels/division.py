"""Several correctly rounded divisions side by side.

``div.rn.f32`` is a dozen instructions and a branch to a slow path for extreme operands, and ptxas moves nothing across a branch: n
divisions follow one another, some fifty cycles each. Here all operands are looked at once; where they are moderate, the same
refinement runs without branches, else ``div.rn`` does it. The bits are those of ``div.rn`` in either case.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Uint32

from . import ptx

LEAST, MOST = 0x22000000, 0x5D000000
"""Bits of 2^-59 and 2^59. Between them no intermediate result of :func:`_refined` overflows or becomes denormal."""


@cute.jit
def divide_all(numerators: list[Any], denominators: list[Any]) -> Any:
    """``numerators[i] / denominators[i]``, rounded to nearest, for this lane; a NaN for a NaN operand."""
    least, most = _range([*numerators, *denominators])
    quotients = [_refined(n, d) for n, d in zip(numerators, denominators, strict=True)]
    if ptx.per_lane((least < Uint32(LEAST)) | (most > Uint32(MOST))):
        quotients = [ptx.div(n, d) for n, d in zip(numerators, denominators, strict=True)]
    return quotients


@cute.jit
def sigmoid_all(values: list[Any]) -> Any:
    """1 / (1 + exp(-x)) for each value, the bits of ``routing.sigmoid``."""
    denominators = [ptx.add(Float32(1.0), cute.math.exp(-x)) for x in values]
    _, most = _range(denominators)  # none is below 1
    quotients = [_refined(Float32(1.0), d) for d in denominators]
    if ptx.per_lane(most > Uint32(MOST)):
        quotients = [ptx.div(Float32(1.0), d) for d in denominators]
    return quotients


def _range(values: list[Any]) -> tuple[Any, Any]:
    """Smallest and largest magnitude, as bits; a NaN is larger than any."""
    words = [ptx.bits(v) & Uint32(0x7FFFFFFF) for v in values]
    least, most = words[0], words[0]
    for word in words[1:]:
        least, most = ptx.min_u32(least, word), ptx.max_u32(most, word)
    return least, most


def _refined(numerator: Any, denominator: Any) -> Float32:
    """Quotient for moderate operands: approximate reciprocal, one Newton step, two corrections by the exact remainder (Markstein)."""
    reciprocal = _approximate_reciprocal(denominator)
    reciprocal = ptx.fma(reciprocal, ptx.fma(-denominator, reciprocal, Float32(1.0)), reciprocal)
    quotient = ptx.mul(numerator, reciprocal)
    for _ in range(2):
        quotient = ptx.fma(ptx.fma(-denominator, quotient, numerator), reciprocal, quotient)
    return quotient


def _approximate_reciprocal(x: Any) -> Float32:
    """Within 1 ulp."""
    return ptx.asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], [Float32], side=False)
