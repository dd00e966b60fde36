"""PTX text -> :class:`Module`: kernels with parameters, registers, and instructions whose names are resolved.

Scopes (``{ }``) are flattened: every register and label declared in a scope gets a name of its own, so that the same inline
assembly may occur many times. Whatever the parser does not know is a :class:`PtxError` that names the line.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterator
from typing import NoReturn

WIDTHS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "b32": 32, "u32": 32, "s32": 32}
WIDTHS |= {"f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64}
"""Bits of every type that may be declared; a predicate counts as 1."""


class PtxError(ValueError):
    """PTX that the parser or decoder does not understand; the message names line and text."""


@dataclasses.dataclass(frozen=True)
class Reg:
    """A register, by its unique name; special registers begin with ``%`` too and are not declared."""

    name: str


@dataclasses.dataclass(frozen=True)
class Imm:
    """An integer literal, or the bits of a floating-point literal (``0f...``, ``0d...``), then ``float_width`` is set."""

    value: int
    float_width: int = 0


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A parameter or shared-memory variable."""

    name: str


@dataclasses.dataclass(frozen=True)
class Label:
    """A branch target: index of an instruction (the number of instructions means the end)."""

    target: int


@dataclasses.dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True)
class Address:
    """``[base + offset]``; a tensor operand also has coordinates: ``[base, {c0, c1, c2}]``."""

    base: Operand
    offset: int = 0
    coordinates: Vector | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """``d|p``: a result and a predicate."""

    first: Operand
    second: Operand


@dataclasses.dataclass(frozen=True)
class Discard:
    """``_``."""


Operand = Reg | Imm | Symbol | Label | Vector | Address | Pair | Discard


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. ``opcode`` holds all modifiers; ``guard`` is (predicate register, negated)."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None
    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A kernel parameter at a byte offset of the parameter block."""

    name: str
    size: int
    align: int
    offset: int


@dataclasses.dataclass(frozen=True)
class SharedVariable:
    """A shared variable; ``size`` None means dynamic shared memory."""

    name: str
    size: int | None
    align: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One ``.entry``."""

    name: str
    parameters: tuple[Parameter, ...]
    directives: dict[str, tuple[int, ...]]
    """Performance directives: ``reqntid``, ``minnctapersm``, ..."""
    registers: dict[str, int]
    """Declared register -> width in bits."""
    instructions: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Module:
    """One PTX file."""

    version: str
    target: str
    shared: tuple[SharedVariable, ...]
    kernels: tuple[Kernel, ...]

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of that name; without a name the only one."""
        found = [k for k in self.kernels if name is None or k.name == name]
        if len(found) != 1:
            raise PtxError(f"asked for kernel {name or '(the only one)'}; the module has {[k.name for k in self.kernels]}")
        return found[0]


def parse(text: str) -> Module:
    """Parse a whole PTX file. Raises PtxError."""
    return _Parser(text).module()


_SPACE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)+", re.S)
_LABEL = re.compile(r"([$%A-Za-z_][\w$%.]*)\s*:(?!:)")
_GUARD = re.compile(r"@(!?)\s*([%$\w.]+)\s+")
_OPCODE = re.compile(r"[a-z]\w*(?:\.[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*)*")
_NAME = re.compile(r"[%$A-Za-z_][\w$%.]*")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_RANGE = re.compile(r"([%$\w]+)<(\d+)>")
_VARIABLE = re.compile(r"(?:\.(?:extern|visible)\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([%$\w]+)\s*(?:\[(\d*)\])?")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?([%$\w]+)\s*(?:\[(\d+)\])?"
)
_ENTRY = re.compile(r"(?:\.(?:visible|extern|weak)\s+)?\.entry\s+([%$\w]+)\s*\((.*?)\)", re.S)
_DIRECTIVE = re.compile(r"\.(reqntid|maxntid|minnctapersm|maxnreg|reqnctapercluster|explicitcluster|maxclusterrank)\b([\d\s,]*)")
_INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)U?\Z")
_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)\Z")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.shared: list[SharedVariable] = []

    # ---- positions and errors ----

    def line(self, at: int) -> int:
        return bisect.bisect_right(self._starts, at)

    def fail(self, why: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        number = self.line(at)
        end = self.text.find("\n", at)
        raise PtxError(f"line {number}: {why}: {self.text[at : end if end >= 0 else None][:120].strip()!r}")

    def skip_space(self) -> None:
        if match := _SPACE.match(self.text, self.at):
            self.at = match.end()

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def statement(self) -> tuple[str, int]:
        """Text up to the next semicolon, without comments, and where it starts."""
        start = self.at
        end = self.text.find(";", start)
        if end < 0:
            self.fail("statement without a semicolon")
        self.at = end + 1
        return _SPACE.sub(" ", self.text[start:end]).strip(), start

    # ---- the module ----

    def module(self) -> Module:
        header: dict[str, str] = {}
        kernels: list[Kernel] = []
        while True:
            self.skip_space()
            if self.at >= len(self.text):
                break
            if match := self.take(re.compile(r"\.(version|target|address_size)[ \t]+([^\n]*)")):
                header[match[1]] = match[2].strip()
            elif match := self.take(_ENTRY):
                kernels.append(self.kernel(match))
            elif _VARIABLE.match(self.text, self.at):
                self.shared_variable()
            else:
                self.fail("unknown directive")
        if header.get("address_size") != "64":
            raise PtxError(f".address_size must be 64; got {header.get('address_size')}")
        return Module(header.get("version", ""), header.get("target", ""), tuple(self.shared), tuple(kernels))

    def shared_variable(self) -> None:
        text, start = self.statement()
        match = _VARIABLE.fullmatch(text)
        if not match or match[2] not in WIDTHS:
            self.fail("unknown shared variable", start)
        unit = WIDTHS[match[2]] // 8
        size = None if match[4] == "" else unit * int(match[4] or 1)
        self.shared.append(SharedVariable(match[3], size, int(match[1] or unit)))

    def kernel(self, entry: re.Match[str]) -> Kernel:
        parameters: list[Parameter] = []
        offset = 0
        for piece in filter(None, (p.strip() for p in _SPACE.sub(" ", entry[2]).split(","))):
            match = _PARAMETER.fullmatch(piece)
            if not match or match[2] not in WIDTHS:
                self.fail(f"unknown parameter {piece!r}", entry.start())
            unit = WIDTHS[match[2]] // 8
            size, align = unit * int(match[4] or 1), int(match[1] or unit)
            offset = -(-offset // align) * align
            parameters.append(Parameter(match[3], size, align, offset))
            offset += size
        directives: dict[str, tuple[int, ...]] = {}
        self.skip_space()
        while directive := self.take(_DIRECTIVE):
            directives[directive[1]] = tuple(int(n) for n in directive[2].replace(",", " ").split())
            self.skip_space()
        if self.text[self.at] != "{":
            self.fail("expected the kernel body")
        body = _Body(self, {p.name for p in parameters})
        return Kernel(entry[1], tuple(parameters), directives, body.registers, body.read())


@dataclasses.dataclass(frozen=True)
class _Raw:
    """An instruction before its names are resolved; ``scope`` is the chain of scope ids, innermost first."""

    text: str
    at: int
    scope: tuple[int, ...]


class _Body:
    """The body of one kernel: pass one collects declarations, labels and raw instructions, pass two resolves names."""

    def __init__(self, parser: _Parser, parameters: set[str]) -> None:
        self.parser = parser
        self.parameters = parameters
        self.registers: dict[str, int] = {}
        self._names: dict[tuple[int, str], str] = {}
        self._labels: dict[tuple[int, str], int] = {}
        self._raw: list[_Raw] = []

    def read(self) -> tuple[Instruction, ...]:
        self._collect()
        return tuple(self._resolve(raw) for raw in self._raw)

    def _collect(self) -> None:
        parser = self.parser
        scopes: list[int] = []
        opened = 0
        while True:
            parser.skip_space()
            if parser.at >= len(parser.text):
                parser.fail("kernel body without a closing brace")
            char = parser.text[parser.at]
            if char == "{":
                scopes.append(opened)
                opened += 1
                parser.at += 1
            elif char == "}":
                scopes.pop()
                parser.at += 1
                if not scopes:
                    return
            elif match := parser.take(_LABEL):
                if self._labels.setdefault((scopes[-1], match[1]), len(self._raw)) != len(self._raw):
                    parser.fail(f"label {match[1]} defined twice", match.start())
            elif char == ".":
                self._directive(scopes[-1])
            else:
                text, start = parser.statement()
                self._raw.append(_Raw(text, start, tuple(reversed(scopes))))

    def _directive(self, scope: int) -> None:
        parser = self.parser
        if _VARIABLE.match(parser.text, parser.at):
            parser.shared_variable()
            return
        text, start = parser.statement()
        if text.startswith('.pragma "'):
            return
        match = _REGISTERS.fullmatch(text)
        if not match or match[1] not in WIDTHS:
            parser.fail("unknown directive", start)
        for piece in match[2].split(","):
            name = piece.strip()
            names = [name]
            if ranged := _RANGE.fullmatch(name):
                names = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))]
            for declared in names:
                unique = declared if scope == 0 else f"{declared}@{scope}"
                if unique in self.registers:
                    parser.fail(f"register {declared} declared twice", start)
                self.registers[unique] = WIDTHS[match[1]]
                self._names[scope, declared] = unique

    # ---- pass two ----

    def _resolve(self, raw: _Raw) -> Instruction:
        text, guard = raw.text, None
        if match := _GUARD.match(text):
            operand = self._name(match[2], raw)
            if not isinstance(operand, Reg):
                self.parser.fail(f"guard {match[2]} is not a register", raw.at)
            guard = (operand.name, match[1] == "!")
            text = text[match.end() :]
        opcode = _OPCODE.match(text)
        if not opcode:
            self.parser.fail("unknown syntax", raw.at)
        rest = text[opcode.end() :].strip()
        operands = tuple(self._operand(piece, raw) for piece in _split(rest)) if rest else ()
        return Instruction(opcode[0], operands, guard, self.parser.line(raw.at), raw.text)

    def _operand(self, text: str, raw: _Raw) -> Operand:
        if text == "_":
            return Discard()
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self._operand(piece, raw) for piece in _split(text[1:-1])))
        if text.startswith("[") and text.endswith("]"):
            return self._address(text[1:-1], raw)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), raw), self._operand(second.strip(), raw))
        if _INTEGER.match(text):
            return Imm(int(text.removesuffix("U"), 0))
        if match := _FLOAT.match(text):
            width = 32 if match[1] in "fF" else 64
            if len(match[2]) != width // 4:
                self.parser.fail(f"floating-point literal {text} has the wrong number of digits", raw.at)
            return Imm(int(match[2], 16), width)
        if _NAME.fullmatch(text):
            return self._name(text, raw)
        self.parser.fail(f"unknown operand {text!r}", raw.at)

    def _address(self, text: str, raw: _Raw) -> Address:
        pieces = _split(text)
        coordinates = None
        if len(pieces) == 2:
            vector = self._operand(pieces[1], raw)
            if not isinstance(vector, Vector):
                self.parser.fail(f"coordinates must be a vector: {pieces[1]!r}", raw.at)
            coordinates = vector
        base, plus, offset = pieces[0].partition("+")
        if len(pieces) > 2 or (plus and not _INTEGER.match(offset.strip())):
            self.parser.fail(f"unknown address {text!r}", raw.at)
        return Address(self._operand(base.strip(), raw), int(offset, 0) if plus else 0, coordinates)

    def _name(self, name: str, raw: _Raw) -> Operand:
        for scope in raw.scope:
            if (scope, name) in self._names:
                return Reg(self._names[scope, name])
            if (scope, name) in self._labels:
                return Label(self._labels[scope, name])
        if name in self.parameters or any(v.name == name for v in self.parser.shared):
            return Symbol(name)
        if name.startswith("%"):
            return Reg(name)
        self.parser.fail(f"unknown name {name!r}", raw.at)


def _split(text: str) -> list[str]:
    """Split at the commas that stand outside brackets and braces."""
    return list(_pieces(text))


def _pieces(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for at, char in enumerate(text):
        if char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()
