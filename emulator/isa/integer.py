"""Integer, bit, predicate, move and select instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import OPCODES, Decoder, Execute, opcode
from ..memory import PARAMETER_WINDOW
from ..parser import Address, Imm, Instruction, Symbol, Vector
from ..warp import LANES, Fragment, Lanes
from .common import TYPE_WIDTH, assign


def _binary(name: str, ufunc: Any, signed: bool = False, shift: bool = False) -> None:
    """``d = ufunc(a, b)``; of a shift the amount is 32 bits wide."""
    width = TYPE_WIDTH[name.split(".")[-1]] if not name.endswith("pred") else 1

    @opcode(name)
    def build(decoder: Decoder, instruction: Instruction) -> Execute:
        d, a, b = decoder.expect(3)
        left, right = decoder.source(a, width), decoder.source(b, 32 if shift else width)
        target = decoder.result(d, width)

        def execute(fragment: Fragment, lanes: Lanes) -> None:
            r = fragment.s if signed else fragment.u
            amount = fragment.u[right] if shift else r[right]
            if shift:
                amount = np.minimum(amount, width).astype(r[left].dtype)
            ufunc(r[left], amount, out=r[target], where=lanes.where)

        return execute


for _type in ("u32", "s32", "u64", "s64", "u16", "s16"):
    _signed = _type[0] == "s"
    _binary(f"add.{_type}", np.add)
    _binary(f"sub.{_type}", np.subtract)
    _binary(f"mul.lo.{_type}", np.multiply)
    _binary(f"min.{_type}", np.minimum, _signed)
    _binary(f"max.{_type}", np.maximum, _signed)
for _type in ("b16", "b32", "b64", "pred"):
    _binary(f"and.{_type}", np.logical_and if _type == "pred" else np.bitwise_and)
    _binary(f"or.{_type}", np.logical_or if _type == "pred" else np.bitwise_or)
    _binary(f"xor.{_type}", np.logical_xor if _type == "pred" else np.bitwise_xor)


def _shift_right_signed(a: Any, amount: Any, out: Any, where: Any) -> None:
    np.right_shift(a, np.minimum(amount, a.dtype.itemsize * 8 - 1), out=out, where=where)


def _shift_left(a: Any, amount: Any, out: Any, where: Any) -> None:
    bits = a.dtype.itemsize * 8
    shifted = np.left_shift(a, np.minimum(amount, bits - 1))
    np.copyto(out, np.where(amount >= bits, a.dtype.type(0), shifted), where=where)


def _shift_right(a: Any, amount: Any, out: Any, where: Any) -> None:
    bits = a.dtype.itemsize * 8
    shifted = np.right_shift(a, np.minimum(amount, bits - 1))
    np.copyto(out, np.where(amount >= bits, a.dtype.type(0), shifted), where=where)


for _width in ("16", "32", "64"):
    _binary(f"shl.b{_width}", _shift_left, shift=True)
    _binary(f"shr.u{_width}", _shift_right, shift=True)
    _binary(f"shr.b{_width}", _shift_right, shift=True)
    _binary(f"shr.s{_width}", _shift_right_signed, signed=True, shift=True)


def _unary(name: str, function: Any, signed: bool = False) -> None:
    width = 1 if name.endswith("pred") else TYPE_WIDTH[name.split(".")[-1]]

    @opcode(name)
    def build(decoder: Decoder, instruction: Instruction) -> Execute:
        d, a = decoder.expect(2)
        source, target = decoder.source(a, width), decoder.result(d, width)

        def execute(fragment: Fragment, lanes: Lanes) -> None:
            r = fragment.s if signed else fragment.u
            function(r[source], out=r[target], where=lanes.where)

        return execute


for _type in ("s32", "s64"):
    _unary(f"neg.{_type}", np.negative, signed=True)
    _unary(f"abs.{_type}", np.absolute, signed=True)
for _type in ("b16", "b32", "b64"):
    _unary(f"not.{_type}", np.bitwise_not)
_unary("not.pred", np.logical_not)


@opcode("mul.wide.u32", "mul.wide.s32", "mul.hi.u32", "mul.hi.s32")
def _wide(decoder: Decoder, instruction: Instruction) -> Execute:
    d, a, b = decoder.expect(3)
    left, right = decoder.source(a, 32), decoder.source(b, 32)
    high = ".hi." in instruction.opcode
    signed = instruction.opcode.endswith("s32")
    target = decoder.result(d, 32 if high else 64)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        r = fragment.s if signed else fragment.u
        product = r[left].astype(np.int64 if signed else np.uint64) * r[right]
        assign(r[target], product >> 32 if high else product, lanes)

    return execute


@opcode("mad.lo.s32", "mad.lo.u32", "mad.lo.s64", "mad.lo.u64")
def _mad(decoder: Decoder, instruction: Instruction) -> Execute:
    width = TYPE_WIDTH[instruction.opcode.split(".")[-1]]
    d, *abc = decoder.expect(4)
    a, b, c = (decoder.source(o, width) for o in abc)
    target = decoder.result(d, width)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        u = fragment.u
        np.add(u[a] * u[b], u[c], out=u[target], where=lanes.where)

    return execute


_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def _setp(name: str, compare: Any, kind: str) -> None:
    width = TYPE_WIDTH[kind]

    @opcode(name)
    def build(decoder: Decoder, instruction: Instruction) -> Execute:
        d, a, b = decoder.expect(3)
        left, right, target = decoder.source(a, width), decoder.source(b, width), decoder.result(d, 1)

        def execute(fragment: Fragment, lanes: Lanes) -> None:
            r = {"s": fragment.s, "f": fragment.f}.get(kind[0], fragment.u)
            compare(r[left], r[right], out=fragment.u[target], where=lanes.where)

        return execute


for _name, _ufunc in _COMPARE.items():
    for _type in ("u32", "s32", "u64", "s64", "f32"):
        if not (_type == "f32" and _name == "ne"):  # the ordered f32 form of ne is false for NaN, numpy's is true
            _setp(f"setp.{_name}.{_type}", _ufunc, _type)
    if _name in ("eq", "ne"):
        for _type in ("b16", "b32", "b64"):
            _setp(f"setp.{_name}.{_type}", _ufunc, _type)
_setp("setp.neu.f32", np.not_equal, "f32")


@opcode("selp.b16", "selp.b32", "selp.b64", "selp.f32", "selp.u32", "selp.s32", "selp.u64", "selp.s64")
def _selp(decoder: Decoder, instruction: Instruction) -> Execute:
    width = TYPE_WIDTH[instruction.opcode.split(".")[-1]]
    d, a, b, p = decoder.expect(4)
    yes, no, condition = decoder.source(a, width), decoder.source(b, width), decoder.source(p, 1)
    target = decoder.result(d, width)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        u = fragment.u
        assign(u[target], np.where(u[condition], u[yes], u[no]), lanes)

    return execute


@opcode("mov.pred", "mov.b16", "mov.u16", "mov.b32", "mov.u32", "mov.s32", "mov.f32", "mov.b64", "mov.u64", "mov.s64")
def _mov(decoder: Decoder, instruction: Instruction) -> Execute:
    kind = instruction.opcode.split(".")[-1]
    width = 1 if kind == "pred" else TYPE_WIDTH[kind]
    d, a = decoder.expect(2)
    if isinstance(d, Vector):
        return _unpack(decoder, d, a, width)
    if isinstance(a, Vector):
        return _pack(decoder, d, a, width)
    if isinstance(a, Symbol) and any(a.name == p.name for p in decoder.kernel.parameters):
        offset = next(p.offset for p in decoder.kernel.parameters if p.name == a.name)
        a = Imm(offset)  # an address in parameter space is the offset in the parameter block
    source, target = decoder.source(a, width), decoder.result(d, width)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        assign(fragment.u[target], fragment.u[source], lanes)

    return execute


def _pack(decoder: Decoder, d: Any, a: Vector, width: int) -> Execute:
    """``mov.b64 d, {lo, hi}``: the first item is the lowest."""
    part = width // len(a.items)
    sources = [decoder.source(item, part) for item in a.items]
    target = decoder.result(d, width)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        u = fragment.u
        value = u[sources[0]].astype(u[target].dtype)
        for i, source in enumerate(sources[1:], 1):
            value |= u[source].astype(value.dtype) << value.dtype.type(part * i)
        assign(u[target], value, lanes)

    return execute


def _unpack(decoder: Decoder, d: Vector, a: Any, width: int) -> Execute:
    part = width // len(d.items)
    source = decoder.source(a, width)
    targets = [decoder.result(item, part) for item in d.items]

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        u = fragment.u
        for i, target in enumerate(targets):
            if target >= 0:
                assign(u[target], u[source] >> u[source].dtype.type(part * i), lanes)

    return execute


@opcode("cvt.u64.u32", "cvt.s64.s32", "cvt.u32.u64", "cvt.u32.u16", "cvt.u16.u32", "cvt.u64.u16")
def _cvt(decoder: Decoder, instruction: Instruction) -> Execute:
    _, to, origin = instruction.opcode.split(".")
    d, a = decoder.expect(2)
    source, target = decoder.source(a, TYPE_WIDTH[origin]), decoder.result(d, TYPE_WIDTH[to])
    signed = to[0] == "s"

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        r = fragment.s if signed else fragment.u
        assign(r[target], r[source].astype(r[target].dtype), lanes)

    return execute


@opcode("cvta.param.u64")
def _cvta_param(decoder: Decoder, instruction: Instruction) -> Execute:
    """Parameter-space address -> generic address."""
    d, a = decoder.expect(2)
    source, target = decoder.source(a, 64), decoder.result(d, 64)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        assign(fragment.u[target], fragment.u[source] + np.uint64(PARAMETER_WINDOW), lanes)

    return execute


@opcode("ld.param.b32", "ld.param.b64", "ld.param.u32", "ld.param.u64", "ld.param.f32")
def _ld_param(decoder: Decoder, instruction: Instruction) -> Execute:
    width = TYPE_WIDTH[instruction.opcode.split(".")[-1]]
    d, a = decoder.expect(2)
    if not isinstance(a, Address) or not isinstance(a.base, Symbol):
        decoder.fail("only parameters by name are supported")
    assert isinstance(a, Address) and isinstance(a.base, Symbol)
    name = a.base.name
    parameter = next((p for p in decoder.kernel.parameters if p.name == name), None)
    if parameter is None or not 0 <= a.offset <= parameter.size - width // 8:
        decoder.fail("no such bytes in the parameter block")
    assert parameter is not None
    at, size, target = parameter.offset + a.offset, width // 8, decoder.result(d, width)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        raw = fragment.warp.cta.cluster.parameters.data[at : at + size]
        value = int.from_bytes(raw.tobytes(), "little")
        assign(fragment.u[target], np.full(LANES, value, fragment.u[target].dtype), lanes)

    return execute


assert "add.s32" in OPCODES
