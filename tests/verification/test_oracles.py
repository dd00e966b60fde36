"""The emulator's parser and MMA arithmetic against other people's: development-only oracles of the extra ``verify``.

| oracle | what it knows | compared with |
|---|---|---|
| pyptx | PTX syntax | emulator.parser, kernels.build.ptx |
| mmasim | bit model of wgmma and of tcgen05.mma kind::f8f6f4 | emulator.mma.dot |
| mmaemu | bit model of the H100's FP8 unit; its parameters are free | emulator.mma.dot |
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from build_kernels import ARTIFACTS
from emulator import mma, parser
from emulator.config import TCGEN05, WGMMA, Dot
from kernels.build import ptx as build_ptx
from megamoe_aot.manifest import Manifest
from tests.verification.one_of_each import one_of_each

K = mma.STEP

PTX_FILES = [ARTIFACTS / f"{sha}.ptx" for sha in one_of_each(Manifest.load(ARTIFACTS))]

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Case = tuple[Codes, Codes, Floats]
"""A [M, 32] and B [N, 32] as e4m3 codes, C [M, N]."""


# ---- MMA arithmetic ----


def mmasim_dot(model: Dot) -> Callable[[Codes, Codes, Floats], Floats]:
    """mmasim's model of the unit that ``model`` describes."""
    pytest.importorskip("mmasim", reason="mmasim is not installed (it states no licence, so no extra names it)")
    import torch
    from mmasim.nv_ptx.sim import WGMMA as Wgmma
    from mmasim.nv_ptx.sim import TCGen05MMA

    unit = {
        WGMMA: lambda: Wgmma("Hopper", "m64n8k32.f32.e4m3.e4m3"),
        TCGEN05: lambda: TCGen05MMA("Blackwell", "m128n16k32.kind::f8f6f4.f32.e4m3.e4m3"),
    }[model]()

    def dot(a: Codes, b: Codes, c: Floats) -> Floats:
        fp8 = torch.float8_e4m3fn
        result = unit(torch.from_numpy(a).view(fp8), torch.from_numpy(b).view(fp8).T, torch.from_numpy(c))
        return np.asarray(result.numpy())

    return dot


def mmaemu_dot(model: Dot) -> Callable[[Codes, Codes, Floats], Floats]:
    """mmaemu's measured Hopper preset; for Blackwell, which it has not measured, its formula with F = 25 and R = 23."""
    pytest.importorskip("mmaemu", reason="mmaemu is not installed (extra: verify)")
    import mmaemu
    import torch

    blackwell = mmaemu.Preset("tcgen05", nfma=K, frac=25, frac_out=23, min_exp=-133, late_c=False, slow_chunk=None)
    preset = {WGMMA: "hopper", TCGEN05: blackwell}[model]

    def dot(a: Codes, b: Codes, c: Floats) -> Floats:
        shape = (len(a), len(b), K)
        left = torch.from_numpy(a).view(torch.float8_e4m3fn)[:, None].expand(shape)
        right = torch.from_numpy(b).view(torch.float8_e4m3fn)[None].expand(shape)
        return np.asarray(mmaemu.model.dot(left, right, torch.from_numpy(c), preset=preset).numpy())

    return dot


ORACLES = {"mmasim": mmasim_dot, "mmaemu": mmaemu_dot}


def finite(random: np.random.Generator, rows: int) -> Codes:
    """Any e4m3 codes but NaN."""
    codes = random.integers(0, 256, (rows, K), dtype=np.uint8)
    return np.where(codes & 0x7F == 0x7F, codes - 1, codes).astype(np.uint8)


def any_floats(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Random FP32 bits: every exponent, infinities and NaN now and then."""
    return random.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)


def cases(seed: int) -> Iterator[tuple[str, Case]]:
    """Named inputs of 64 x 8 dot products each."""
    random = np.random.default_rng(seed)
    m, n = 64, 8
    small = random.standard_normal((m, n)).astype(np.float32)
    yield "any codes, any C", (finite(random, m), finite(random, n), any_floats(random, (m, n)))
    yield "any codes, C near the products", (finite(random, m), finite(random, n), 1000 * small)
    yield "any codes, C = 0", (finite(random, m), finite(random, n), np.zeros((m, n), np.float32))

    low_a, low_b = finite(random, m) & np.uint8(0x87), finite(random, n) & np.uint8(0x87)
    yield "subnormal codes", (low_a, low_b, small * np.float32(1e-4))
    tiny = (any_floats(random, (m, n)).view(np.uint32) & np.uint32(0x80FFFFFF)).view(np.float32)
    yield "subnormal C", (low_a, low_b & np.uint8(0x81), tiny)
    yield "subnormal C, zero products", (finite(random, m), np.zeros((n, K), np.uint8), tiny)

    half = finite(random, m)[:, : K // 2]
    mirrored = finite(random, n)[:, : K // 2]
    cancelling = (np.hstack([half, half ^ 0x80]), np.hstack([mirrored, mirrored]), small * np.float32(2.0**-20))
    yield "products cancel, C remains", cancelling
    a, b, _ = cancelling
    yield "everything cancels", (a, b, np.full((m, n), -0.0, np.float32))
    first = np.where(np.arange(K) == 3, a, 0).astype(np.uint8)
    exact = mma.dot(first, b, None, None)
    yield "C cancels the one product", (first, b, -exact)

    spread_a = finite(random, m) & np.where(random.random((m, K)) < 0.5, 0x87, 0xFF).astype(np.uint8)
    spread_b = finite(random, n) | np.where(random.random((n, K)) < 0.3, 0x78, 0).astype(np.uint8)
    spread_b = np.where(spread_b & 0x7F == 0x7F, spread_b - 1, spread_b).astype(np.uint8)
    yield "large exponent spread", (spread_a, spread_b, np.ldexp(small, random.integers(-40, 40, (m, n))).astype(np.float32))

    one_row = np.zeros((n, K), np.uint8)
    one_row[2] = finite(random, 1)
    yield "one row of B, as in the column trick", (finite(random, m), one_row, small)

    with_nan = finite(random, m)
    with_nan[::5, 7] = 0x7F
    with_nan[1::7, 30] = 0xFF
    yield "NaN in A", (with_nan, one_row, small)
    nan_b = finite(random, n)
    nan_b[3, 0] = 0xFF
    yield "NaN in B", (finite(random, m), nan_b, small)

    special = np.array([np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 1e-45, -0.0, 0.0], np.float32)
    yield "special C", (finite(random, m), finite(random, n), np.tile(special, (m, 1)))
    yield "special C, zero products", (np.zeros((m, K), np.uint8), finite(random, n), np.tile(special, (m, 1)))


def assert_same_bits(ours: Floats, theirs: Floats, what: str) -> None:
    wrong = np.argwhere(ours.view(np.uint32) != theirs.view(np.uint32))
    if len(wrong):
        i, j = wrong[0]
        a, b = ours[i, j], theirs[i, j]
        raise AssertionError(f"{what}: {len(wrong)} of {ours.size} differ, first at {i, j}: {a!r} ({a.view(np.uint32):#x}), oracle {b!r}")


@pytest.mark.parametrize("model", [WGMMA, TCGEN05], ids=["wgmma", "tcgen05"])
@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.filterwarnings("ignore:preset 'tcgen05' is custom")
def test_mma_arithmetic(oracle: str, model: Dot) -> None:
    """Bit for bit on random and special values."""
    dot = ORACLES[oracle](model)
    compared = 0
    for seed in range(4):
        for name, (a, b, c) in cases(seed):
            assert_same_bits(mma.dot(a, b, c, model), dot(a, b, c), f"{name}, seed {seed}")
            compared += c.size
    assert compared > 25_000


@pytest.mark.parametrize("model", [WGMMA, TCGEN05], ids=["wgmma", "tcgen05"])
@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.filterwarnings("ignore:preset 'tcgen05' is custom")
@settings(max_examples=100)
@given(data=st.data())
def test_mma_arithmetic_of_any_bytes(oracle: str, model: Dot, data: st.DataObject) -> None:
    """Hypothesis looks for a single dot product on which the two differ."""
    dot = ORACLES[oracle](model)
    a, b = (np.frombuffer(data.draw(st.binary(min_size=K, max_size=K)), np.uint8)[None].copy() for _ in "ab")
    c = np.array([[data.draw(st.floats(width=32))]], np.float32)
    assert_same_bits(mma.dot(a, b, c, model), dot(a, b, c), f"{a} {b} {c}")


def test_models_differ() -> None:
    """The cases tell the two units' models apart: a comparison that could not fail would prove nothing."""
    differing = {
        name
        for name, (a, b, c) in cases(0)
        if not np.array_equal(mma.dot(a, b, c, WGMMA).view(np.uint32), mma.dot(a, b, c, TCGEN05).view(np.uint32))
    }
    assert differing >= {"any codes, C near the products", "products cancel, C remains", "large exponent spread", "NaN in A"}


# ---- parsers ----


@functools.cache
def pyptx_instructions(path: Path) -> list[tuple[int, str, str, tuple[str, ...]]]:
    """(index, guard, opcode, operands) of every instruction as pyptx reads it, names resolved here.

    A register of an inner scope is ``name@<number of the scope>``, a label is ``-><index of its instruction>``.
    """
    pytest.importorskip("pyptx", reason="pyptx is not installed (extra: verify)")
    from pyptx.ir import nodes
    from pyptx.parser import parse

    (kernel,) = (d for d in parse(path.read_text()).directives if isinstance(d, nodes.Function))
    flat: list[tuple[Any, tuple[int, ...]]] = []
    registers: dict[tuple[int, str], str] = {}
    labels: dict[tuple[int, str], int] = {}
    opened = 0

    def walk(body: Any, scopes: tuple[int, ...]) -> None:
        nonlocal opened
        for statement in body:
            if isinstance(statement, nodes.Block):
                opened += 1
                walk(statement.body, (opened, *scopes))
            elif isinstance(statement, nodes.Label):
                labels[scopes[0], statement.name] = len(flat)
            elif isinstance(statement, nodes.RegDecl) and scopes[0]:
                for register in declared(statement):
                    registers[scopes[0], register] = f"{register}@{scopes[0]}"
            elif isinstance(statement, nodes.Instruction):
                flat.append((statement, scopes))

    walk(kernel.body, (0,))

    def name(text: str, scopes: tuple[int, ...]) -> str:
        for scope in scopes:
            if (scope, text) in registers:
                return registers[scope, text]
            if (scope, text) in labels:
                return f"->{labels[scope, text]}"
        return text

    def operand(node: Any, scopes: tuple[int, ...]) -> str:
        match node:
            case nodes.RegisterOperand() | nodes.LabelOperand():
                return name(node.name, scopes)
            case nodes.ImmediateOperand():
                return immediate(node.text)
            case nodes.VectorOperand():
                return "{" + ", ".join(operand(e, scopes) for e in node.elements) + "}"
            case nodes.PipeOperand():
                return f"{operand(node.left, scopes)}|{operand(node.right, scopes)}"
            case nodes.AddressOperand():
                offset = node.offset or "0"
                coordinates = offset if offset.startswith(",") else ""  # pyptx leaves them as text
                return f"[{name(node.base, scopes)}+{0 if coordinates else int(offset, 0)}{coordinates}]"
        raise AssertionError(f"pyptx gave an operand that this test does not know: {node}")

    read = []
    for index, (i, scopes) in enumerate(flat):
        guard = "" if i.predicate is None else "!" * i.predicate.negated + name(i.predicate.register, scopes)
        read.append((index, guard, i.opcode + "".join(i.modifiers), tuple(operand(o, scopes) for o in i.operands)))
    return read


def declared(declaration: Any) -> list[str]:
    """Names of a ``.reg`` declaration: pyptx keeps the first one and the line's text, which may hold several declarations."""
    lists = [names.replace(" ", "").split(",") for names in re.findall(r"\.reg\s+\.\w+\s+([^;]+);", declaration.formatting.raw_line)]
    return next(names for names in lists if names[0] == declaration.name)


def immediate(text: str) -> str:
    """A literal's value; of a floating-point literal its bits."""
    return str(int(text[2:], 16)) if text[:2] in ("0f", "0F", "0d", "0D") else str(int(text.removesuffix("U"), 0))


def emulator_operand(operand: parser.Operand) -> str:
    """An operand of the emulator's parser, written as :func:`pyptx_instructions` writes it."""
    match operand:
        case parser.Reg(name) | parser.Symbol(name):
            return name
        case parser.Imm(value):
            return str(value)
        case parser.Label(target):
            return f"->{target}"
        case parser.Discard():
            return "_"
        case parser.Vector(items):
            return "{" + ", ".join(map(emulator_operand, items)) + "}"
        case parser.Pair(first, second):
            return f"{emulator_operand(first)}|{emulator_operand(second)}"
        case parser.Address(base, offset, coordinates):
            rest = "" if coordinates is None else f", {emulator_operand(coordinates)}"
            return f"[{emulator_operand(base)}+{offset}{rest}]"


@pytest.mark.parametrize("path", PTX_FILES, ids=lambda p: p.stem[:8])
def test_emulator_parser(path: Path) -> None:
    """Every instruction of every artifact: guard, opcode, operands, branch targets and scopes."""
    theirs = pyptx_instructions(path)
    ours = []
    for index, i in enumerate(parser.parse(path.read_text()).kernel().instructions):
        guard = "" if i.guard is None else "!" * i.guard[1] + i.guard[0]
        ours.append((index, guard, i.opcode, tuple(map(emulator_operand, i.operands))))
    assert len(theirs) > 50  # a finalize kernel is short
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other


@pytest.mark.parametrize("path", PTX_FILES, ids=lambda p: p.stem[:8])
def test_build_reader(path: Path) -> None:
    """The reader of the build's checks and of the census: the same opcodes with the same number of operands."""
    ours = [(s.opcode, len(s.operands)) for s in build_ptx.statements(path.read_text())]
    assert ours == [(opcode, len(operands)) for _, _, opcode, operands in pyptx_instructions(path)]


def test_artifacts_are_there() -> None:
    """Without artifacts the two tests above would pass by running nothing."""
    assert PTX_FILES, "artifacts/ holds no PTX: run python build_kernels.py --all"
