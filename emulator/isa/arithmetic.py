"""Floating-point arithmetic and conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import numerics
from ..decode import Decoder, Execute, opcode
from ..parser import Instruction
from ..warp import Fragment, Lanes
from .common import assign


def _function(name: str, arity: int, function: Callable[..., Any]) -> None:
    """``d = function(a, ...)`` on FP32 registers."""

    @opcode(name)
    def build(decoder: Decoder, instruction: Instruction) -> Execute:
        d, *operands = decoder.expect(arity + 1)
        sources = [decoder.source(o, 32) for o in operands]
        target = decoder.result(d, 32)

        def execute(fragment: Fragment, lanes: Lanes) -> None:
            f = fragment.f
            # as bits: NaN payloads must survive the copy
            result = function(*(f[s] for s in sources))
            assign(fragment.u[target], result.view(np.uint32), lanes)

        return execute


_F32 = np.float32

for _rounding in ("", ".rn"):
    _function(f"add{_rounding}.f32", 2, lambda a, b: numerics.canonical(a + b))
    _function(f"sub{_rounding}.f32", 2, lambda a, b: numerics.canonical(a - b))
    _function(f"mul{_rounding}.f32", 2, lambda a, b: numerics.canonical(a * b))
_function("div.rn.f32", 2, lambda a, b: numerics.canonical(a / b))
_function("rcp.rn.f32", 1, numerics.rcp)
_function("sqrt.rn.f32", 1, lambda a: numerics.canonical(np.sqrt(a)))
_function("fma.rn.f32", 3, numerics.fma_rn)
_function("fma.rm.f32", 3, numerics.fma_rm)
_function("max.f32", 2, lambda a, b: numerics.maximum(a, b, keep_nan=False))
_function("min.f32", 2, lambda a, b: numerics.minimum(a, b, keep_nan=False))
_function("max.NaN.f32", 2, lambda a, b: numerics.maximum(a, b, keep_nan=True))
_function("min.NaN.f32", 2, lambda a, b: numerics.minimum(a, b, keep_nan=True))
_function("abs.f32", 1, lambda a: numerics.from_bits(numerics.bits(a) & np.uint32(0x7FFFFFFF)))
_function("neg.f32", 1, lambda a: numerics.from_bits(numerics.bits(a) ^ np.uint32(0x80000000)))
_function("cvt.sat.f32.f32", 1, numerics.saturate)


def _approximation(name: str, function: Callable[[Any], Any]) -> None:
    """An instruction whose bits PTX leaves open: correctly rounded, plus the error that ``Arithmetic.approx_ulps`` asks for."""

    @opcode(name)
    def build(decoder: Decoder, instruction: Instruction) -> Execute:
        d, a = decoder.expect(2)
        source, target = decoder.source(a, 32), decoder.result(d, 32)
        ulps, seed = decoder.arithmetic.approx_ulps, decoder.seed

        def execute(fragment: Fragment, lanes: Lanes) -> None:
            x = fragment.f[source]
            assign(fragment.u[target], numerics.nudge(function(x), x, ulps, seed).view(np.uint32), lanes)

        return execute


_approximation("ex2.approx.ftz.f32", numerics.ex2_ftz)
_approximation("rcp.approx.ftz.f32", lambda x: numerics.canonical(numerics.flush(numerics.rcp(numerics.flush(x)))))


@opcode("cvt.rn.bf16x2.f32")
def _bf16x2(decoder: Decoder, instruction: Instruction) -> Execute:
    """The first source goes to the upper half."""
    d, a, b = decoder.expect(3)
    high, low, target = decoder.source(a, 32), decoder.source(b, 32), decoder.result(d, 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        upper = numerics.to_bf16(fragment.f[high]).astype(np.uint32) << np.uint32(16)
        assign(fragment.u[target], upper | numerics.to_bf16(fragment.f[low]), lanes)

    return execute


@opcode("cvt.rn.bf16.f32")
def _bf16(decoder: Decoder, instruction: Instruction) -> Execute:
    d, a = decoder.expect(2)
    source, target = decoder.source(a, 32), decoder.result(d, 16)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        assign(fragment.u[target], numerics.to_bf16(fragment.f[source]), lanes)

    return execute


@opcode("cvt.f32.bf16")
def _from_bf16(decoder: Decoder, instruction: Instruction) -> Execute:
    d, a = decoder.expect(2)
    source, target = decoder.source(a, 16), decoder.result(d, 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        assign(fragment.u[target], fragment.u[source].astype(np.uint32) << np.uint32(16), lanes)

    return execute


@opcode("cvt.rn.satfinite.e4m3x2.f32")
def _e4m3x2(decoder: Decoder, instruction: Instruction) -> Execute:
    """The first source goes to the upper byte."""
    d, a, b = decoder.expect(3)
    high, low, target = decoder.source(a, 32), decoder.source(b, 32), decoder.result(d, 16)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        upper = numerics.to_e4m3(fragment.f[high]).astype(np.uint16) << np.uint16(8)
        assign(fragment.u[target], upper | numerics.to_e4m3(fragment.f[low]), lanes)

    return execute
