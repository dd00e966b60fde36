"""A reader for compiled PTX: one kernel entry as a list of statements with labels, scopes and control flow.

It reads what the DSL emits (scalar code, inline assembly with ``{ }`` scopes) and refuses what the static checks could
not judge: indirect branches and unknown directives are errors. Nothing is skipped in silence.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

STATE_SPACES = ("global", "shared", "local", "const", "param")

_NAME = re.compile(r"(?<![\w$%@.])[%$A-Za-z_][\w$@]*(?:\.[xyzw]\b)?")
_LABEL = re.compile(r"([$A-Za-z_][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"@(!?\s*[%$A-Za-z_][\w$]*)\s*")
_ENTRY = re.compile(r"\.entry\s+([$A-Za-z_][\w$]*)\s*\(([^)]*)\)([^{;]*)\{")
_PARAMETER = re.compile(r"\.param\b(?:\s*\.align\s+\d+)?\s*\.(\w+)(?:\s*\.ptr\b(?:\s*\.\w+)*(?:\s+\d+)?)?\s+([$\w]+)\s*(?:\[(\d+)\])?")
_REGISTERS = re.compile(r"([%$A-Za-z_][\w$]*)\s*(?:<(\d+)>)?")
_ALIGNED_SHARED = re.compile(r"\.extern\s+\.shared\s+\.align\s+(\d+)")
_WITHOUT_RESULT = ("bra", "bar", "barrier", "call", "cp", "nanosleep", "setmaxnreg", "tcgen05.dealloc", "wgmma.wait_group")
_ENDS = ("ret", "exit", "trap")
_IGNORED_DIRECTIVES = (".pragma", ".shared", ".local")


class PtxError(ValueError):
    """The PTX holds something that this reader does not know; the message has the line and the text."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One entry parameter; size in bytes."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class Statement:
    """One instruction. Names declared in an inner ``{ }`` scope carry ``@<scope number>``, so they are unique in the entry."""

    index: int
    line: int
    """1-based line of the PTX text."""
    labels: tuple[str, ...]
    guard: str | None
    """Predicate register, with a leading ``!`` where negated."""
    opcode: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"line {self.line}: {guard}{self.opcode} {', '.join(self.operands)}".rstrip()

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode cut at its dots: ``ld.global.v4.b32`` -> (ld, global, v4, b32)."""
        return tuple(self.opcode.split("."))

    def matches(self, opcode: str, *modifiers: str) -> bool:
        """True where the opcode is, or continues, ``opcode`` and has all the given modifiers."""
        return (self.opcode == opcode or self.opcode.startswith(opcode + ".")) and all(m in self.parts for m in modifiers)

    @property
    def space(self) -> str | None:
        """First state space that the opcode names (for a copy: the destination's), without ``::cta``; None if generic."""
        named = (part.split("::")[0] for part in self.parts[1:])
        return next((space for space in named if space in STATE_SPACES), None)

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Registers that the instruction sets: its first operand, unless that is an address."""
        without = any(self.matches(opcode) for opcode in _WITHOUT_RESULT) and "red" not in self.parts
        if without or not self.operands or self.operands[0].startswith("["):
            return ()
        return tuple(name for name in names(self.operands[0]) if name != "_")

    @property
    def sources(self) -> tuple[str, ...]:
        """The operands that are not the result."""
        return self.operands[1:] if self.written else self.operands


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kernel of a PTX module."""

    name: str
    parameters: tuple[Parameter, ...]
    block: tuple[int, int, int] | None
    """``.reqntid``."""
    min_ctas: int | None
    """``.minnctapersm``."""
    shared_align: int | None
    """Alignment in bytes of the module's dynamic shared memory."""
    statements: tuple[Statement, ...]

    @cached_property
    def labels(self) -> dict[str, int]:
        """Label -> index of the statement that it names."""
        return {label: s.index for s in self.statements for label in s.labels}

    def find(self, opcode: str, *modifiers: str) -> list[Statement]:
        """Every statement that :meth:`Statement.matches`."""
        return [s for s in self.statements if s.matches(opcode, *modifiers)]

    def ends(self, index: int) -> bool:
        """True where a thread may end at statement ``index``."""
        statement = self.statements[index]
        return statement.opcode in _ENDS or (index + 1 == len(self.statements) and not statement.matches("bra"))

    def successors(self, index: int) -> list[int]:
        """Indices of the statements that may run after statement ``index``."""
        statement = self.statements[index]
        after: list[int] = []
        if statement.matches("bra"):
            after.append(self.labels[statement.operands[0]])
        leaves = statement.matches("bra") or statement.opcode in _ENDS
        if not leaves or statement.guard is not None:
            after.append(index + 1)
        return [i for i in after if i < len(self.statements)]

    @cached_property
    def definitions(self) -> dict[str, list[Statement]]:
        """Register -> the statements that set it."""
        found: dict[str, list[Statement]] = {}
        for statement in self.statements:
            for register in statement.written:
                found.setdefault(register, []).append(statement)
        return found


def names(operand: str) -> list[str]:
    """Registers, symbols and labels inside one operand: ``[%rd1+4]`` -> [%rd1]."""
    return _NAME.findall(operand)


def read_entry(ptx: str, name: str | None = None) -> Entry:
    """The entry called ``name``, or the only one. Raises PtxError."""
    text = _without_comments(ptx)
    entries = {match.group(1): match for match in _ENTRY.finditer(text)}
    if name is None and len(entries) == 1:
        (name,) = entries
    if name is None or name not in entries:
        raise PtxError(f"no entry {name!r}; this PTX has {sorted(entries)}")
    match = entries[name]
    aligned = _ALIGNED_SHARED.search(text)
    return Entry(
        name=name,
        parameters=tuple(_parameters(match.group(2))),
        block=_block(match.group(3)),
        min_ctas=next(iter(_directive(match.group(3), "minnctapersm")), None),
        shared_align=int(aligned.group(1)) if aligned else None,
        statements=_Body(text, match.end()).statements,
    )


def statements(ptx: str, name: str | None = None) -> tuple[Statement, ...]:
    """The statements of the entry called ``name``, or of the only one."""
    return read_entry(ptx, name).statements


def census(ptx: str, name: str | None = None) -> Counter[str]:
    """How often each full opcode (``tcgen05.mma.cta_group::1.kind::f8f6f4``) stands in the entry."""
    return Counter(s.opcode for s in statements(ptx, name))


def _without_comments(ptx: str) -> str:
    """The text with comments blanked; line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match.group().count("\n")

    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, ptx, flags=re.DOTALL)


def _parameters(text: str) -> Iterator[Parameter]:
    for declaration in filter(None, map(str.strip, text.split(","))):
        match = _PARAMETER.fullmatch(declaration)
        if match is None:
            raise PtxError(f"parameter declaration {declaration!r}")
        kind, name, count = match.groups()
        yield Parameter(name, int(kind[1:]) // 8 * int(count or 1))


def _directive(text: str, name: str) -> list[int]:
    match = re.search(rf"\.{name}\s+([\d,\s]+)", text)
    return [int(number) for number in match.group(1).split(",")] if match else []


def _block(text: str) -> tuple[int, int, int] | None:
    threads = _directive(text, "reqntid")
    if not threads:
        return None
    x, y, z = [*threads, 1, 1][:3]
    return x, y, z


def _split(text: str) -> tuple[str, ...]:
    """Cut at the commas that stand outside brackets."""
    operands, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            operands.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return (*operands, last) if last else tuple(operands)


@dataclasses.dataclass(frozen=True)
class _Raw:
    """A statement before its names are resolved: an inner label may be used before it is declared."""

    line: int
    labels: tuple[str, ...]
    text: str
    scope: int


class _Body:
    """Scans one entry's body. Scope 0 is the entry's own; its names stay as they are."""

    def __init__(self, text: str, start: int) -> None:
        self.text, self.at = text, start
        self.line, self.line_at = text.count("\n", 0, start) + 1, start
        self.parents: list[int | None] = [None]
        self.declared: list[set[str]] = [set()]
        raws = list(self._scan())
        self.statements = tuple(self._statement(index, raw) for index, raw in enumerate(raws))
        self._check_targets()

    def _scan(self) -> Iterator[_Raw]:
        scope: int | None = 0
        labels: list[str] = []
        while scope is not None:
            character = self._next_character()
            if character == "{":
                self.parents.append(scope)
                self.declared.append(set())
                scope = len(self.parents) - 1
                self.at += 1
            elif character == "}":
                scope = self.parents[scope]
                self.at += 1
            elif label := _LABEL.match(self.text, self.at):
                self.declared[scope].add(label.group(1))
                labels.append(self._unique(label.group(1), scope))
                self.at = label.end()
            elif self.text.startswith(".loc", self.at):
                self.at = self.text.index("\n", self.at)
            else:
                line, text = self.line, self._until_semicolon()
                if text.startswith("."):
                    self._declare(line, text, scope)
                else:
                    yield _Raw(line, tuple(labels), text, scope)
                    labels = []
        if labels:
            raise PtxError(f"labels {labels} stand at the end of the entry and name no statement")

    def _next_character(self) -> str:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        if self.at >= len(self.text):
            raise PtxError("the entry's body does not end")
        self.line += self.text.count("\n", self.line_at, self.at)
        self.line_at = self.at
        return self.text[self.at]

    def _until_semicolon(self) -> str:
        end = self.text.find(";", self.at)
        if end < 0:
            raise PtxError(f"line {self.line}: statement does not end")
        text, self.at = " ".join(self.text[self.at : end].split()), end + 1
        return text

    def _declare(self, line: int, text: str, scope: int) -> None:
        directive, _, rest = text.partition(" ")
        if directive == ".reg":
            for declaration in rest.split(None, 1)[1].split(","):
                match = _REGISTERS.fullmatch(declaration.strip())
                if match is None:
                    raise PtxError(f"line {line}: {text}")
                name, count = match.groups()
                self.declared[scope].update([name] if count is None else (f"{name}{i}" for i in range(int(count))))
        elif directive not in _IGNORED_DIRECTIVES:
            raise PtxError(f"line {line}: directive {text!r} is not one that the static checks understand")

    def _unique(self, name: str, scope: int) -> str:
        """The name as the innermost scope that declares it spells it."""
        at: int | None = scope
        while at:
            if name in self.declared[at]:
                return f"{name}@{at}"
            at = self.parents[at]
        return name

    def _statement(self, index: int, raw: _Raw) -> Statement:
        text = raw.text
        guard = None
        if match := _GUARD.match(text):
            negated, register = match.group(1).startswith("!"), match.group(1).lstrip("! ")
            guard = "!" * negated + self._unique(register, raw.scope)
            text = text[match.end() :]
        opcode, _, rest = text.partition(" ")
        if opcode.startswith("brx"):
            raise PtxError(f"line {raw.line}: {text}: the static checks cannot follow an indirect branch")
        operands = tuple(_NAME.sub(lambda m: self._unique(m.group(), raw.scope), operand) for operand in _split(rest))
        return Statement(index, raw.line, raw.labels, guard, opcode, operands)

    def _check_targets(self) -> None:
        known = {label for s in self.statements for label in s.labels}
        for s in self.statements:
            if s.matches("bra") and s.operands[0] not in known:
                raise PtxError(f"{s}: no such label")
