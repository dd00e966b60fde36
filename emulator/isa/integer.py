"""Integer, bit, predicate, move and select instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import NONE, Decoder, Execute, opcode
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


@opcode(*[f"{name}.{kind}" for name in ("mul.wide", "mad.wide", "mul.hi") for kind in ("u16", "s16", "u32", "s32")])
def _wide(decoder: Decoder, instruction: Instruction) -> Execute:
    kind = instruction.opcode.split(".")[-1]
    width, signed, high = TYPE_WIDTH[kind], kind[0] == "s", ".hi." in instruction.opcode
    d, a, b, *c = decoder.expect(4 if instruction.opcode.startswith("mad") else 3)
    left, right = decoder.source(a, width), decoder.source(b, width)
    addend = decoder.source(c[0], 2 * width) if c else NONE
    target = decoder.result(d, width if high else 2 * width)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        r = fragment.s if signed else fragment.u
        product = r[left].astype(np.int64 if signed else np.uint64) * r[right]
        if addend != NONE:
            product += r[addend].astype(product.dtype)
        assign(r[target], product >> width if high else product, lanes)

    return execute


@opcode("popc.b32", "clz.b32", "brev.b32")
def _bit_count(decoder: Decoder, instruction: Instruction) -> Execute:
    d, a = decoder.expect(2)
    source, target = decoder.source(a, 32), decoder.result(d, 32)
    name = instruction.opcode.split(".")[0]

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        bits = np.unpackbits(fragment.u[source].astype(">u4").view(np.uint8)).reshape(LANES, 32)  # highest bit first
        if name == "popc":
            value = bits.sum(axis=1)
        elif name == "clz":
            value = np.where(bits.any(axis=1), bits.argmax(axis=1), 32)
        else:
            value = np.packbits(bits[:, ::-1]).view(">u4")
        assign(fragment.u[target], value, lanes)

    return execute


@opcode("bfind.u32", "bfind.s32", "bfind.shiftamt.u32", "bfind.shiftamt.s32")
def _bfind(decoder: Decoder, instruction: Instruction) -> Execute:
    """Position of the highest bit that differs from the sign (unsigned: that is set), or how far it lies below bit 31; else all ones."""
    d, a = decoder.expect(2)
    source, target = decoder.source(a, 32), decoder.result(d, 32)
    signed, distance = instruction.opcode.endswith("s32"), ".shiftamt" in instruction.opcode

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        word = fragment.s[source].astype(np.int64) if signed else fragment.u[source].astype(np.int64)
        word = np.where(word < 0, ~word, word)
        position = np.frexp(word.astype(np.float64))[1] - 1  # exact: 32 bits fit in FP64; -1 for 0
        found = 31 - position if distance else position
        assign(fragment.u[target], np.where(word == 0, 0xFFFFFFFF, found).astype(np.uint32), lanes)

    return execute


@opcode("bfe.u32", "bfe.s32")
def _bfe(decoder: Decoder, instruction: Instruction) -> Execute:
    """Extract a bit field; position and length are the low 8 bits of their operands."""
    d, a, b, c = decoder.expect(4)
    source, position, length = decoder.source(a, 32), decoder.source(b, 32), decoder.source(c, 32)
    target = decoder.result(d, 32)
    signed = instruction.opcode.endswith("s32")

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        u = fragment.u
        start, count = u[position].astype(np.int64) & 255, u[length].astype(np.int64) & 255
        word = (fragment.s if signed else u)[source].astype(np.int64)
        kept = np.minimum(count, 32)
        field = (word >> np.minimum(start, 32 if not signed else 31)) & ((np.int64(1) << kept) - 1)
        if signed:  # the sign bit of the field, or of the word where the field reaches beyond it
            top = np.minimum(start + kept - 1, 31)
            negative = (kept > 0) & (word >> np.maximum(top, 0) & 1 == 1)
            filled = np.minimum(np.maximum(32 - start, 0), kept)
            field = np.where(negative, field | ~((np.int64(1) << filled) - 1), field)
        assign(u[target], field & 0xFFFFFFFF, lanes)

    return execute


@opcode("prmt.b32")
def _prmt(decoder: Decoder, instruction: Instruction) -> Execute:
    """Pick four bytes of {b, a}; bit 3 of a selector nibble replicates the sign of the byte instead."""
    d, a, b, c = decoder.expect(4)
    low, high, selector = decoder.source(a, 32), decoder.source(b, 32), decoder.source(c, 32)
    target = decoder.result(d, 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        u = fragment.u
        pool = np.stack([u[low], u[high]], axis=1).astype("<u4").view(np.uint8)
        value = np.zeros(LANES, np.uint32)
        for i in range(4):
            nibble = u[selector].astype(np.int64) >> (4 * i)
            byte = pool[np.arange(LANES), nibble & 7]
            byte = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)
            value |= byte.astype(np.uint32) << np.uint32(8 * i)
        assign(u[target], value, lanes)

    return execute


@opcode("lop3.b32")
def _lop3(decoder: Decoder, instruction: Instruction) -> Execute:
    """Any function of three bits: bit 4 a + 2 b + c of the table."""
    d, *abc, table = decoder.expect(5)
    sources = [decoder.source(o, 32) for o in abc]
    target, look_up = decoder.result(d, 32), decoder.literal(table)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        a, b, c = (fragment.u[s] for s in sources)
        value = np.zeros(LANES, np.uint32)
        for row in range(8):
            if look_up >> row & 1:
                value |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        assign(fragment.u[target], value, lanes)

    return execute


@opcode("div.u32", "rem.u32")
def _div(decoder: Decoder, instruction: Instruction) -> Execute:
    """Unsigned division; by zero the result is unspecified, here all ones."""
    d, a, b = decoder.expect(3)
    left, right, target = decoder.source(a, 32), decoder.source(b, 32), decoder.result(d, 32)
    divide = instruction.opcode.startswith("div")

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        u = fragment.u
        by = np.maximum(u[right], 1)
        value = u[left] // by if divide else u[left] % by
        assign(u[target], np.where(u[right] == 0, np.uint32(0xFFFFFFFF), value), lanes)

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
