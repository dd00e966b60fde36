"""Instruction semantics: whole kernels against Python integers and struct."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator import PtxError
from tests.emulator.tiny import run, store

word = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
words = st.lists(word, min_size=64, max_size=64)
MASK = 0xFFFFFFFF


def signed(x: int) -> int:
    return x - (1 << 32) if x & 0x80000000 else x


BINARY: dict[str, Callable[[int, int], int]] = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda a, b: min(a, b, key=signed),
    "max.s32": lambda a, b: max(a, b, key=signed),
}


@given(words)
@settings(max_examples=10)
def test_binary_integer_instructions(values: list[int]) -> None:
    data = np.array(values, np.uint32)
    a, b = values[:32], values[32:]
    stores = []
    for i, name in enumerate(BINARY):
        stores.append(f"{name} %r{20 + i}, %r10, %r11; st.global.b32 [%rd3+{128 * i}], %r{20 + i};")
    body = f"ld.global.b32 %r10, [%rd4]; ld.global.b32 %r11, [%rd4+128]; griddepcontrol.wait; {' '.join(stores)}"
    result = run(body, data=data, words=32 * len(BINARY))
    assert result.result.ok, result.result.report()
    for i, (name, function) in enumerate(BINARY.items()):
        wanted = [function(x, y) & MASK for x, y in zip(a, b, strict=True)]
        assert result.out[32 * i : 32 * i + 32].tolist() == wanted, name


@given(words)
@settings(max_examples=5)
def test_unary_wide_and_select(values: list[int]) -> None:
    body = """
    ld.global.b32 %r10, [%rd4]; ld.global.b32 %r11, [%rd4+128];
    neg.s32 %r20, %r10;
    not.b32 %r21, %r10;
    mul.wide.u32 %rd10, %r10, %r11; mov.b64 {%r22, %r23}, %rd10;
    mul.wide.s32 %rd11, %r10, %r11; shr.u64 %rd12, %rd11, 32; cvt.u32.u64 %r24, %rd12;
    setp.lt.s32 %p1, %r10, %r11; selp.b32 %r25, %r10, %r11, %p1;
    mad.lo.s32 %r26, %r10, %r11, 7;
    mov.b64 %rd13, {%r10, %r11}; shr.u64 %rd14, %rd13, 16; cvt.u32.u64 %r27, %rd14;
    griddepcontrol.wait;
    """ + " ".join(f"st.global.b32 [%rd3+{128 * i}], %r{20 + i};" for i in range(8))
    result = run(body, data=np.array(values, np.uint32), words=256)
    assert result.result.ok, result.result.report()
    for lane, (a, b) in enumerate(zip(values[:32], values[32:], strict=True)):
        got = result.out.reshape(8, 32)[:, lane].tolist()
        wide, swide = a * b, signed(a) * signed(b)
        low = a if signed(a) < signed(b) else b
        wanted = [-a, ~a, wide, wide >> 32, swide >> 32, low, a * b + 7, (b << 32 | a) >> 16]
        assert got == [w & MASK for w in wanted]


def byte_of(a: int, b: int, nibble: int) -> int:
    byte = (b << 32 | a) >> 8 * (nibble & 7) & 255
    return (255 if byte & 128 else 0) if nibble & 8 else byte


def field(word: int, start: int, length: int, sign: bool) -> int:
    """bfe as the PTX manual spells it, bit by bit."""
    start, length = start & 255, length & 255
    fill = (word >> min(start + length - 1, 31) & 1) if sign and length else 0
    bits = [word >> i & 1 if i < 32 else fill for i in range(start, start + min(length, 32))]
    bits += [fill] * (32 - len(bits))
    return sum(bit << i for i, bit in enumerate(bits[:32]))


BITS: dict[str, Callable[[int, int], int]] = {
    "popc.b32 {d}, %r10": lambda a, b: a.bit_count(),
    "clz.b32 {d}, %r10": lambda a, b: 32 - a.bit_length(),
    "bfind.u32 {d}, %r10": lambda a, b: a.bit_length() - 1,
    "bfind.s32 {d}, %r10": lambda a, b: (a ^ -(a >> 31) & MASK).bit_length() - 1,
    "bfind.shiftamt.u32 {d}, %r10": lambda a, b: 32 - a.bit_length() if a else -1,
    "bfind.shiftamt.s32 {d}, %r10": lambda a, b: 32 - (a ^ -(a >> 31) & MASK).bit_length() if a not in (0, MASK) else -1,
    "brev.b32 {d}, %r10": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "prmt.b32 {d}, %r10, %r11, 0x7192": lambda a, b: sum(byte_of(a, b, n) << 8 * i for i, n in enumerate((2, 9, 1, 7))),
    "lop3.b32 {d}, %r10, %r11, %r11, 0xE8": lambda a, b: a & b | b & b | a & b,
    "lop3.b32 {d}, %r10, %r11, %r10, 0x96": lambda a, b: b,
    "lop3.b32 {d}, %r10, %r11, 5, 0x35": lambda a, b: sum(
        (0x35 >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (5 >> i & 1)) & 1) << i for i in range(32)
    ),
    "bfe.u32 {d}, %r10, %r11, 7": lambda a, b: field(a, b, 7, False),
    "bfe.s32 {d}, %r10, %r11, 7": lambda a, b: field(a, b, 7, True),
    "bfe.s32 {d}, %r10, 9, %r11": lambda a, b: field(a, 9, b, True),
    "bfe.u32 {d}, %r10, 9, %r11": lambda a, b: field(a, 9, b, False),
    "div.u32 {d}, %r10, %r11": lambda a, b: a // b if b else MASK,
    "rem.u32 {d}, %r10, %r11": lambda a, b: a % b if b else MASK,
}


@given(words, st.booleans())
@settings(max_examples=15)
def test_bit_instructions(values: list[int], small: bool) -> None:
    if small:  # field positions and lengths that matter
        values = values[:32] + [v % 48 for v in values[32:]]
    body = "ld.global.b32 %r10, [%rd4]; ld.global.b32 %r11, [%rd4+128]; griddepcontrol.wait;"
    for i, form in enumerate(BITS):
        body += f"{form.format(d='%r20')}; st.global.b32 [%rd3+{128 * i}], %r20;"
    result = run(body, data=np.array(values, np.uint32), words=32 * len(BITS))
    for i, (form, function) in enumerate(BITS.items()):
        wanted = [function(a, b) & MASK for a, b in zip(values[:32], values[32:], strict=True)]
        assert result.out[32 * i : 32 * i + 32].tolist() == wanted, form


def test_products_of_halves() -> None:
    body = """ld.global.b32 %r10, [%rd4]; mov.b32 {%h1, %h2}, %r10; mul.wide.u16 %r11, %h1, %h2; mul.wide.s16 %r12, %h1, %h2;
    mad.wide.u32 %rd10, %r10, %r10, %rd1; sub.s64 %rd10, %rd10, %rd1; cvt.u32.u64 %r13, %rd10;
    mul.hi.u16 %h3, %h1, %h2; mul.hi.s16 %h4, %h1, %h2; mov.b32 %r14, {%h3, %h4}; mul.hi.u16 %h3, %h1, -21845; mov.b32 %r15, {%h3, %h3};
    griddepcontrol.wait;""" + " ".join(f"st.global.b32 [%rd3+{128 * i}], %r{11 + i};" for i in range(5))
    data = np.random.default_rng(3).integers(0, 2**32, 32, dtype=np.uint32)
    done = run(body, data=data, words=160)
    assert done.result.ok, done.result.report()
    for word, got in zip(data.tolist(), done.out.reshape(5, 32).T.tolist(), strict=True):
        low, high = word & 0xFFFF, word >> 16
        signed_product = ((low ^ 0x8000) - 0x8000) * ((high ^ 0x8000) - 0x8000)
        halves = low * high >> 16 | (signed_product >> 16 & 0xFFFF) << 16
        third = low * 0xAAAB >> 16
        assert got == [low * high, signed_product & MASK, word * word & MASK, halves, third << 16 | third]


COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq.b32": lambda a, b: a == b,
    "ne.s32": lambda a, b: a != b,
    "lt.u32": lambda a, b: a < b,
    "ge.u32": lambda a, b: a >= b,
    "gt.s32": lambda a, b: signed(a) > signed(b),
    "le.s32": lambda a, b: signed(a) <= signed(b),
}


@given(words)
@settings(max_examples=5)
def test_comparisons_and_predicated_execution(values: list[int]) -> None:
    body = "ld.global.b32 %r10, [%rd4]; ld.global.b32 %r11, [%rd4+128]; griddepcontrol.wait;"
    for i, name in enumerate(COMPARE):
        body += f"setp.{name} %p1, %r10, %r11; mov.b32 %r12, 0; @%p1 mov.b32 %r12, 1; @!%p1 add.s32 %r12, %r12, 2;"
        body += f"st.global.b32 [%rd3+{128 * i}], %r12;"
    result = run(body, data=np.array(values, np.uint32), words=32 * len(COMPARE))
    for i, (name, function) in enumerate(COMPARE.items()):
        wanted = [1 if function(a, b) else 2 for a, b in zip(values[:32], values[32:], strict=True)]
        assert result.out[32 * i : 32 * i + 32].tolist() == wanted, name


def test_float_comparisons_are_ordered() -> None:
    data = np.array([1.0, np.nan] * 16 + [2.0, 1.0] * 16, np.float32)
    body = "ld.global.f32 %r10, [%rd4]; ld.global.f32 %r11, [%rd4+128]; mov.b32 %r12, 0;"
    for i, name in enumerate(("lt", "eq", "gt", "neu")):
        body += f"setp.{name}.f32 %p1, %r10, %r11; @%p1 or.b32 %r12, %r12, {1 << i};"
    assert run(body + store("%r12"), data=data).out.tolist() == [1 | 8, 8] * 16


def test_divergence_and_reconvergence() -> None:
    """A loop whose trip count is the lane, then a nested branch: every lane gets its own result and all meet again for a shuffle."""
    body = """
    mov.b32 %r10, 0; mov.b32 %r11, 0;
    L0: setp.ge.u32 %p1, %r11, %r4; @%p1 bra L1;
    add.s32 %r11, %r11, 1;
    and.b32 %r12, %r11, 1; setp.eq.b32 %p2, %r12, 0; @%p2 bra L2;
    add.s32 %r10, %r10, %r11; bra L0;
    L2: sub.s32 %r10, %r10, 1; bra L0;
    L1: shfl.sync.idx.b32 %r13, %r10, 5, 31, -1; add.s32 %r10, %r10, %r13;
    """

    def value(lane: int) -> int:
        return sum(i if i % 2 else -1 for i in range(1, lane + 1))

    result = run(body + store())
    assert result.result.ok, result.result.report()
    assert result.out.tolist() == [value(lane) + value(5) & MASK for lane in range(32)]


def test_lanes_that_exit_early_are_not_waited_for() -> None:
    body = "setp.gt.u32 %p1, %r4, 9; @%p1 ret; " + store("%r4")
    assert run(body).out.tolist() == [*range(10), *[MASK] * 22]


SHUFFLES: dict[str, Callable[[int], int]] = {
    "idx.b32 %r10, %r4, 7, 31": lambda lane: 7,
    "bfly.b32 %r10, %r4, 5, 31": lambda lane: lane ^ 5,
    "down.b32 %r10, %r4, 3, 31": lambda lane: lane + 3 if lane + 3 < 32 else lane,
    "up.b32 %r10, %r4, 2, 0": lambda lane: lane - 2 if lane >= 2 else lane,
    "idx.b32 %r10, %r4, 1, 0x1807": lambda lane: (lane & 24) | 1,  # four segments of eight lanes
}


@pytest.mark.parametrize("form", SHUFFLES)
def test_shuffles(form: str) -> None:
    assert run(f"shfl.sync.{form}, -1;" + store()).out.tolist() == [SHUFFLES[form](lane) for lane in range(32)]


def test_reductions_and_votes() -> None:
    data = np.random.default_rng(0).integers(0, 2**32, 32, dtype=np.uint32)
    body = """ld.global.b32 %r10, [%rd4];
    redux.sync.max.u32 %r20, %r10, -1; redux.sync.min.s32 %r21, %r10, -1;
    redux.sync.add.u32 %r22, %r10, -1; redux.sync.xor.b32 %r23, %r10, -1;
    setp.gt.s32 %p1, %r10, 0; vote.sync.ballot.b32 %r24, %p1, -1;
    griddepcontrol.wait;""" + " ".join(f"st.global.b32 [%rd3+{128 * i}], %r{20 + i};" for i in range(5))
    out = run(body, data=data, words=160).out.reshape(5, 32)
    values = data.tolist()
    ballot = sum(1 << i for i, v in enumerate(values) if signed(v) > 0)
    wanted = [max(values), min(map(signed, values)) & MASK, sum(values) & MASK, int(np.bitwise_xor.reduce(data)), ballot]
    assert out.tolist() == [[w] * 32 for w in wanted]


def test_elect_gives_one_leader_the_same_each_time() -> None:
    body = "elect.sync %r10|%p1, -1; elect.sync %r11|%p2, -1; selp.b32 %r12, 1, 0, %p1; @%p2 add.s32 %r12, %r12, 1;" + store("%r12")
    leaders = set()
    for seed in range(6):
        out = run(body, seed=seed).out.tolist()
        assert sorted(out) == [0] * 31 + [2]
        leaders.add(out.index(2))
    assert len(leaders) > 1, "which lane leads is unspecified: the seed decides"


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=128, max_size=128))
@settings(max_examples=5)
def test_float_instructions_use_their_operands_in_order(values: list[float]) -> None:
    data = np.array(values, np.float32)
    a, b, c = data[:32], data[32:64], data[64:96]
    body = """ld.global.f32 %f1, [%rd4]; ld.global.f32 %f2, [%rd4+128]; ld.global.f32 %f3, [%rd4+256];
    add.rn.f32 %r20, %f1, %f2; sub.rn.f32 %r21, %f1, %f2; mul.rn.f32 %r22, %f1, %f2; div.rn.f32 %r23, %f1, %f2; rcp.rn.f32 %r24, %f1;
    fma.rn.f32 %r25, %f1, %f2, %f3; abs.f32 %r26, %f1; neg.f32 %r27, %f1;
    griddepcontrol.wait;""" + " ".join(f"st.global.b32 [%rd3+{128 * i}], %r{20 + i};" for i in range(8))
    got = run(body, data=data, words=256).out.view(np.float32).reshape(8, 32)
    with np.errstate(all="ignore"):
        fused = (a.astype(np.float64) * b + c).astype(np.float32)
        wanted = [a + b, a - b, a * b, a / b, np.float32(1) / a, fused, np.abs(a), -a]
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-7)
    np.testing.assert_array_equal(got[:3], np.array(wanted[:3]))


def test_conversions_pack_the_first_source_high() -> None:
    data = np.array([1.0] * 32 + [-2.0] * 32, np.float32)
    body = """ld.global.f32 %f1, [%rd4]; ld.global.f32 %f2, [%rd4+128];
    cvt.rn.bf16x2.f32 %r10, %f1, %f2;
    { .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %f1, %f2; cvt.rn.satfinite.e4m3x2.f32 hi, %f2, %f1; mov.b32 %r11, {lo, hi}; }
    griddepcontrol.wait; st.global.b32 [%rd3], %r10; st.global.b32 [%rd3+128], %r11;"""
    out = run(body, data=data, words=64).out
    assert set(out[:32].tolist()) == {0x3F80C000}
    assert set(out[32:].tolist()) == {0xC03838C0}


def test_vector_and_narrow_memory_accesses() -> None:
    body = """shl.b32 %r10, %r4, 4; add.s32 %r11, %r3, %r10; add.s32 %r12, %r4, 100;
    st.shared.v4.b32 [%r11], {%r4, %r12, %r4, %r12};
    { .reg .b16 h; ld.shared.b16 h, [%r11+4]; mov.b32 %r13, {h, h}; }
    ld.shared.v2.b32 {%r14, %r15}, [%r11+8];
    griddepcontrol.wait; st.global.b32 [%rd3], %r13; st.global.b32 [%rd3+128], %r15;"""
    out = run(body, words=64).out.tolist()
    assert out == [(lane + 100) * 0x10001 for lane in range(32)] + [lane + 100 for lane in range(32)]


def test_loads_extend_and_stores_truncate() -> None:
    data = np.arange(128, dtype=np.uint8) * 2
    body = """cvt.u64.u32 %rd10, %r4; add.s64 %rd11, %rd1, %rd10; add.s64 %rd12, %rd2, %rd10;
    ld.global.u8 %r10, [%rd11]; ld.global.s8 %r11, [%rd11+96]; { .reg .b16 h; ld.global.b8 h, [%rd11+1]; mov.b32 %r12, {h, h}; }
    griddepcontrol.wait; st.global.b32 [%rd3], %r10; st.global.b32 [%rd3+128], %r11; st.global.b32 [%rd3+256], %r12;
    or.b32 %r13, %r10, 0xABCD00; st.global.b8 [%rd12+384], %r13;"""
    out = run(body, data=data, words=104).out
    values = [int(x) for x in data]
    assert out[:32].tolist() == values[:32]
    assert out[32:64].tolist() == [(v ^ 128) - 128 & MASK for v in values[96:128]]
    assert out[64:96].tolist() == [v * 0x10001 for v in values[1:33]]
    assert out[96:].view(np.uint8).tolist() == values[:32]


def test_special_registers() -> None:
    body = "mov.u32 %r10, %clusterid.x; mov.u32 %r11, %cluster_ctarank; mov.u32 %r12, %nctaid.x; mad.lo.s32 %r13, %r10, 100, %r11;"
    body += "mad.lo.s32 %r14, %r12, 1000, %r13;"
    out = run(body + store("%r14"), ctas=2, clusters=3).out.reshape(6, 32)
    assert out[:, 0].tolist() == [6000 + 100 * (i // 2) + i % 2 for i in range(6)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction frobnicate"),
        ("add.cc.s32 %r1, %r2, %r3;", "unknown instruction add.cc.s32"),
        ("ld.shared.v8.b32 %r1, [%r3];", "unknown instruction"),
        ("add.s32 %r1, %r2;", "3 operands expected"),
        ("add.s32 %r1, %r2, %rd1;", "64 bits; 32 expected"),
        ("add.s32 %r1, %r2, %nosuch;", "not a declared register"),
        ("bra NOWHERE;", "unknown name 'NOWHERE'"),
        ("mov.b32 %r1, 0f3F8;", "wrong number of digits"),
        (".pragmatic 1;", "unknown directive"),
        ("{ .reg .b32 x; mov.b32 x, 1; } mov.b32 %r1, x;", "unknown name 'x'"),
        ("mov.b32 %r1, 1; L: mov.b32 %r2, 1; L: ret;", "defined twice"),
    ],
)
def test_unknown_syntax_is_an_error(body: str, why: str) -> None:
    with pytest.raises(PtxError, match=why):
        run(body)


def test_errors_name_the_line() -> None:
    with pytest.raises(PtxError, match=r"line \d+: unknown instruction sin.approx.f32: 'sin.approx.f32 %f1, %f2'"):
        run("sin.approx.f32 %f1, %f2;")
