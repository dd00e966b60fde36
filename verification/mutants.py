"""Every way in which :mod:`verification.mutation` breaks a kernel's PTX: single edits of single lines, found mechanically.

Two kinds of rules. A :class:`TextRule` edits what a pattern finds: fences, waits, arrives, counts, bytes, whole instructions. A *slice*
follows the operands of an instruction that touches memory or a barrier back through the arithmetic that computes them, and edits every
constant, shift, mask and selection on the way; the instruction at the end says what was hit (a stage index, a TMEM column, a scale
index ...). A statement that serves several of them counts for the first in the order of :data:`SINKS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator

from kernels.build.ptx import Entry, Statement, names, read_entry
from megamoe_aot.abi import PARAMETERS
from megamoe_aot.shared_memory import SharedMap
from megamoe_aot.spec import KernelSpec


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One edit of one line."""

    category: str
    number: int
    """Counts the mutants of the category."""
    line: int
    """1-based."""
    before: str
    """The line, stripped."""
    after: str
    """What stands in its place."""
    change: str
    """The edit, for people."""

    @property
    def id(self) -> str:
        """Stable for one PTX text."""
        return f"{self.category} {self.number}"

    def apply(self, ptx: str) -> str:
        """The mutated PTX."""
        lines = ptx.split("\n")
        if lines[self.line - 1].strip() != self.before:
            raise ValueError(f"{self.id}: line {self.line} is {lines[self.line - 1].strip()!r}, not {self.before!r}")
        lines[self.line - 1] = self.after
        return "\n".join(lines)


Edit = tuple[str, str]
"""(what replaces the matched text, description)."""
Found = tuple[str, int, str, str]
"""(category, line, new line, description)."""


def enumerate_mutants(ptx: str, spec: KernelSpec) -> list[Mutant]:
    """All mutants of a Blackwell kernel, in the order of its lines within each category."""
    lines = ptx.split("\n")
    found = [*_by_text(lines), *_by_slice(ptx, spec)]
    counts: dict[str, int] = {}
    mutants = []
    for category, line, after, change in sorted(dict.fromkeys(found), key=lambda f: (f[0], f[1])):
        counts[category] = counts.get(category, 0) + 1
        mutants.append(Mutant(category, counts[category], line, lines[line - 1].strip(), after, change))
    return mutants


# ------------------------------------------------------------------------------------------------------------------- By pattern


@dataclasses.dataclass(frozen=True)
class TextRule:
    """``edits`` of every place that ``pattern`` matches."""

    category: str
    pattern: str
    edits: Callable[[re.Match[str]], Iterable[Edit]]


def _dropped(match: re.Match[str]) -> Iterator[Edit]:
    yield "", "dropped"


def _number(group: str, *deltas: int) -> Callable[[re.Match[str]], Iterator[Edit]]:
    """The integer in ``group`` changed by each delta, as long as it stays positive."""

    def edits(match: re.Match[str]) -> Iterator[Edit]:
        value = int(match[group])
        for delta in deltas:
            if value + delta > 0:
                yield _with_group(match, group, str(value + delta)), f"{value} -> {value + delta}"

    return edits


def _with_group(match: re.Match[str], group: str, text: str) -> str:
    start, end = match.start(group) - match.start(), match.end(group) - match.start()
    return match[0][:start] + text + match[0][end:]


def _to(new: str) -> Callable[[re.Match[str]], Iterator[Edit]]:
    """Group ``x`` replaced."""

    def edits(match: re.Match[str]) -> Iterator[Edit]:
        yield _with_group(match, "x", new), f"{match['x']} -> {new}"

    return edits


def _flip_parity(match: re.Match[str]) -> Iterator[Edit]:
    flipped = "{ .reg .b32 other; xor.b32 other, " + match["parity"] + ", 1; .reg .pred done; " + match["middle"] + "other; "
    yield flipped, "waits for the other parity"


def _flip_bits(*fields: tuple[str, int]) -> Callable[[re.Match[str]], Iterator[Edit]]:
    """Single bits of the constant in group ``x``."""

    def edits(match: re.Match[str]) -> Iterator[Edit]:
        value = int(match["x"])
        for name, bit in fields:
            yield _with_group(match, "x", str(value ^ 1 << bit)), f"bit {bit} ({name}) flipped"

    return edits


def _swap(first: str, second: str) -> Callable[[re.Match[str]], Iterator[Edit]]:
    """Two groups exchanged; ``first`` stands before ``second``."""

    def edits(match: re.Match[str]) -> Iterator[Edit]:
        a, b = match[first], match[second]
        if a != b:
            text = _with_group(match, second, a)  # from behind, so that positions stay
            start, end = match.start(first) - match.start(), match.end(first) - match.start()
            yield text[:start] + b + text[end:], f"{a} and {b} exchanged"

    return edits


def _launch_dependents(match: re.Match[str]) -> Iterator[Edit]:
    yield "griddepcontrol.launch_dependents; " + match[0], "griddepcontrol.launch_dependents inserted before it"


_DESCRIPTOR_FIELDS = (
    ("reserved", 14),
    ("leading byte offset", 16),
    ("reserved", 30),
    ("stride byte offset", 37),
    ("version", 46),
    ("base offset", 49),
    ("leading mode", 52),
    ("reserved", 53),
    ("swizzle", 61),
    ("swizzle", 62),
    ("swizzle", 63),
)
_INSTRUCTION_FIELDS = (
    ("sparse", 2),
    ("D type", 4),
    ("A type", 7),
    ("B type", 10),
    ("negate A", 13),
    ("negate B", 14),
    ("transpose A", 15),
    ("transpose B", 16),
    ("N", 18),
    ("N", 19),
    ("reserved", 23),
    ("M", 26),
    ("M", 27),
    ("reserved", 29),
)
_COMMIT = r"tcgen05\.commit\.\S+ \[%\w+\];"
_ARRIVE = r"mbarrier\.arrive\.shared::cta\.b64 _, \[%\w+\];"
_EXPECT = r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%\w+\], (?P<bytes>\d+);"
_WAIT = r"\{ \.reg \.pred done; (?P<middle>WAIT: mbarrier\.try_wait\S+ done, \[%\w+\], )(?P<parity>%\w+); "
_MMA = r"tcgen05\.mma\.\S+ \[%\w+\], a, b, %\w+, (?P<x>acc|1);"
_TMA = r"cp\.async\.bulk\.tensor\.3d\.\S+ \[%\w+\], \[(?P<map>%\w+), \{(?P<c0>%\w+), (?P<c1>%\w+), (?P<c2>%\w+)\}\], \[%\w+\], %\w+;"
_ST_ASYNC = r"st\.async\.\S+ \[%\w+\], \{(?P<v0>%\w+), (?P<v1>%\w+), %\w+, (?P<v3>%\w+)\}, \[%\w+\];"

TEXT_RULES = (
    TextRule("proxy fence", r"fence\.proxy\.async\.shared::cta;", _dropped),
    TextRule("barrier-init fence", r"fence\.mbarrier_init\.release\.cluster;", _dropped),
    TextRule("tcgen05 fence", r"tcgen05\.fence::\w+;", _dropped),
    TextRule("wait::ld", r"tcgen05\.wait::ld\.sync\.aligned;", _dropped),
    TextRule("commit", _COMMIT, _dropped),
    TextRule("MMA", _MMA, _dropped),
    TextRule("accumulate", _MMA, lambda m: _to("1" if m["x"] == "acc" else "acc")(m)),
    TextRule("accumulate", r"(?P<x>setp\.ne)\.b32 acc,", _to("setp.eq")),
    TextRule("K step", r"add\.s64 [ab], %\w+, (?P<x>[246]);", _number("x", 2)),
    TextRule("wait", r"\{ \.reg \.pred done; WAIT: mbarrier\.try_wait.*?DONE: \}", _dropped),
    TextRule("wait scope", r"mbarrier\.try_wait\.parity\.acquire\.(?P<x>cluster)\.", _to("cta")),
    TextRule("parity", _WAIT, _flip_parity),
    TextRule("arrive", _ARRIVE, _dropped),
    TextRule("arrive", _ARRIVE, lambda m: [(m[0] + " " + m[0], "done twice")]),
    TextRule("expect_tx", _EXPECT, _dropped),
    TextRule("expect_tx bytes", _EXPECT, _number("bytes", 16, -16)),
    TextRule("barrier count", r"mbarrier\.init\.shared::cta\.b64 \[%\w+\], (?P<x>\d+);", _number("x", 1, -1)),
    TextRule("barrier init", r"mbarrier\.init\.shared::cta\.b64 \[%\w+\], \d+;", _dropped),
    TextRule("named barrier", r"bar\.sync \d+, \d+;", _dropped),
    TextRule("named barrier count", r"bar\.sync \d+, (?P<x>\d+);", _number("x", 32, -32)),
    TextRule("named barrier number", r"bar\.sync (?P<x>\d+), \d+;", _number("x", 1, -1)),
    TextRule("warp barrier", r"bar\.warp\.sync 0xffffffff;", _dropped),
    TextRule("cluster arrive", r"barrier\.cluster\.arrive\.relaxed\.aligned;", _dropped),
    TextRule("cluster wait", r"barrier\.cluster\.wait\.acquire\.aligned;", _dropped),
    TextRule("dependency wait", r"griddepcontrol\.wait;", _dropped),
    TextRule("early dependents", r"griddepcontrol\.wait;|bar\.sync \d.*|barrier\.cluster\..*|(@%\w+ )?st\.global\..*", _launch_dependents),
    TextRule("TMEM allocation", r"tcgen05\.(?:alloc|dealloc)\.\S+ \S+, (?P<x>\d+);", _number("x", -32, 1, 192)),
    TextRule("TMEM allocation", r"tcgen05\.(?:alloc|dealloc|relinquish_alloc_permit)\.[^;]*;", _dropped),
    TextRule("TMA load", _TMA, _dropped),
    TextRule("TMA load", _TMA, _swap("c0", "c1")),
    TextRule("TMA load", _TMA, _swap("c1", "c2")),
    TextRule("exchange", _ST_ASYNC, _dropped),
    TextRule("exchange", _ST_ASYNC, _swap("v0", "v1")),
    TextRule("exchange", _ST_ASYNC, _swap("v0", "v3")),
    TextRule("descriptor field", r"or\.b64 \t?%\w+, %\w+, (?P<x>46\d{17});", _flip_bits(*_DESCRIPTOR_FIELDS)),
    TextRule("instruction descriptor", r"mov\.b32 \t?%\w+, (?P<x>134\d{6});", _flip_bits(*_INSTRUCTION_FIELDS)),
    TextRule("warp operation", r"redux\.sync\.(?P<x>max)\.", _to("min")),
    TextRule("warp operation", r"redux\.sync\.(?P<x>min)\.", _to("max")),
    TextRule("warp operation", r"shfl\.sync\.(?P<x>idx)\.b32 %\w+, %\w+, %r\w+, 0x1f", _to("up")),
    TextRule("predicated access", r"@(?P<x>%p\d+) (?:st|ld)\.\w+\.\S+ [^;]*;", lambda m: [(m[0].split(" ", 1)[1], "done by every lane")]),
    TextRule("predicated access", r"@(?P<x>%p\d+) (?:st|ld)\.\w+\.\S+ [^;]*;", lambda m: [("@!" + m[0][1:], "done by the other lanes")]),
)


def _by_text(lines: list[str]) -> Iterator[Found]:
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("//"):
            continue
        for rule in TEXT_RULES:
            for match in re.finditer(rule.pattern, line):
                for text, change in rule.edits(match):
                    yield rule.category, number, line[: match.start()] + text + line[match.end() :], change


# --------------------------------------------------------------------------------------------------------------------- By slice

SINKS = (
    "parity",
    "TMEM column",
    "descriptor address",
    "stage index",
    "barrier address",
    "TMA coordinate",
    "row order",
    "operand swizzle",
    "scale index",
    "sums address",
    "ids address",
    "exchange address",
    "output address",
    "input address",
)
"""What a slice ends in. ``row order``: where an accumulator row goes in staging memory; ``operand swizzle``: where FP8 bytes go."""

_FOLLOWED = ("add", "sub", "shl", "shr", "and", "or", "xor", "mad", "mul", "selp", "setp", "mov", "cvt", "neg", "not", "mapa")
_INTEGER = re.compile(r"-?\d+\Z")


def regions(shared: SharedMap) -> dict[range, str]:
    """Byte ranges of dynamic shared memory, from the operand groups up, by the slice category of accesses to them."""
    ends = [
        (shared.operand, "operand swizzle"),
        (shared.sums, "sums address"),
        (shared.staging, "row order"),
        (shared.w13_scale, "scale index"),
        (shared.ids, "ids address"),
        (shared.tmem, "TMEM column"),
        (min(shared.barriers.values()), "barrier address"),
        (shared.total, ""),
    ]
    return {range(start, end): name for (start, name), (end, _) in itertools.pairwise(ends)}


class _Slices:
    """Backward slices of one kernel."""

    def __init__(self, entry: Entry, spec: KernelSpec) -> None:
        self.entry = entry
        self.regions = regions(spec.shared)
        per_line: dict[int, int] = {}
        for s in entry.statements:
            per_line[s.line] = per_line.get(s.line, 0) + 1
        self.alone = {s.index for s in entry.statements if per_line[s.line] == 1}
        """Statements that have their line to themselves: the others are left to the text rules."""

    def back(self, registers: Iterable[str]) -> list[Statement]:
        """Everything that computes these registers, up to loads and special registers."""
        found: dict[int, Statement] = {}
        todo = list(registers)
        while todo:
            for s in self.entry.definitions.get(todo.pop(), []):
                if s.index not in found and s.parts[0] in (*_FOLLOWED, "ld"):
                    found[s.index] = s
                    if s.parts[0] != "ld":
                        todo += [name for operand in self.live_sources(s) for name in names(operand)]
        return list(found.values())

    def live_sources(self, s: Statement) -> tuple[str, ...]:
        """The operands that the result depends on: of a selection by a constant only the selected one."""
        if s.parts[0] == "selp":
            of_predicate = self.entry.definitions.get(s.operands[3], [])
            if len(of_predicate) == 1 and of_predicate[0].opcode == "mov.pred" and _INTEGER.match(of_predicate[0].operands[1]):
                return (s.operands[1 if int(of_predicate[0].operands[1]) else 2],)
        return s.sources

    def category(self, slice_: Iterable[Statement], fallback: str) -> str:
        """The slice category of an access to shared memory, by the region that the constants of its address lie in."""
        for s in slice_:
            for operand in s.sources:
                if _INTEGER.match(operand):
                    for span, name in self.regions.items():
                        if int(operand) in span:
                            return name
        return fallback

    def buffer(self, slice_: Iterable[Statement]) -> str:
        """Which parameter a global address comes from."""
        for s in slice_:
            if s.matches("ld.param") and (match := re.search(r"_param_(\d+)", s.operands[1])):
                return PARAMETERS[int(match[1])].name
        return ""

    def sinks(self) -> Iterator[tuple[str, list[Statement]]]:
        """(category, slice) of every instruction that touches memory, a barrier or the tensor core."""
        for s in self.entry.statements:
            operands = [names(operand) for operand in s.operands]
            if s.matches("mbarrier.try_wait"):
                yield "parity", self.back(operands[2])
                yield "barrier address", self.back(operands[1])
            elif s.matches("mbarrier.arrive"):
                yield "barrier address", self.back(operands[1])
            elif s.matches("mbarrier.init") or s.matches("tcgen05.commit"):
                yield "barrier address", self.back(operands[0])
            elif s.matches("tcgen05.mma"):
                yield "TMEM column", self.back(operands[0])
                yield "descriptor address", self.back(operands[1] + operands[2])
            elif s.matches("tcgen05.ld"):
                yield "TMEM column", self.back(operands[1])
            elif s.matches("cp.async.bulk.tensor"):
                yield "stage index", self.back(operands[0])
                yield "TMA coordinate", self.back(operands[1])
                yield "barrier address", self.back(operands[2])
            elif s.matches("st.async"):
                yield "exchange address", self.back(operands[0] + operands[2])
            elif s.matches("st.shared") or s.matches("ld.shared"):
                found = self.back(operands[0 if s.matches("st") else 1])
                yield self.category(found, "row order"), found
            elif s.matches("ld.global"):
                found = self.back(operands[1])
                yield "scale index" if self.buffer(found) in ("w13_scale", "w2_scale") else "input address", found
            elif s.matches("st.global"):
                yield "output address", self.back(operands[0])


def _by_slice(ptx: str, spec: KernelSpec) -> Iterator[Found]:
    slices = _Slices(read_entry(ptx), spec)
    owner: dict[int, str] = {}
    for category, statements in sorted(slices.sinks(), key=lambda sink: SINKS.index(sink[0])):
        for s in statements:
            if s.index in slices.alone:
                owner.setdefault(s.index, category)
    for index, category in owner.items():
        s = slices.entry.statements[index]
        for text, change in _arithmetic_edits(s, category):
            yield category, s.line, f"\t{text};", change


def _arithmetic_edits(s: Statement, category: str) -> Iterator[Edit]:
    """Each constant of the statement changed, a selection or comparison turned round, an exclusive or made an inclusive one."""
    operation = s.parts[0]
    for at, operand in enumerate(s.operands):
        if at and _INTEGER.match(operand):
            value = int(operand)
            if operation == "setp" and s.parts[1] in _REVERSED:
                yield _text(s.opcode.replace(s.parts[1], _REVERSED[s.parts[1]], 1), s.operands), "comparison turned round"
            elif (new := _other_constant(s, value, category)) != value:
                operands = [*s.operands[:at], str(new), *s.operands[at + 1 :]]
                yield _text(s.opcode, operands), f"{value} -> {new}"
    if operation == "selp" and s.operands[1] != s.operands[2]:
        yield _text(s.opcode, [s.operands[0], s.operands[2], s.operands[1], s.operands[3]]), "selection turned round"
    if operation == "xor" and not _INTEGER.match(s.operands[2]):
        yield _text(s.opcode.replace("xor", "or"), s.operands), "xor -> or"


def _text(opcode: str, operands: Iterable[str]) -> str:
    return f"{opcode} \t{', '.join(operands)}"


_REVERSED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
"""Comparisons whose constant often has slack: rows and blocks come in multiples."""


def _other_constant(s: Statement, value: int, category: str) -> int:
    """A neighbour of ``value`` that fits its use: the next aligned offset, one shift more, a mask with a hole or none."""
    operation = s.parts[0]
    if category == "parity" and operation in ("mov", "xor"):
        return value ^ 1
    if operation in ("add", "sub", "mov", "setp", "mad"):
        if operation == "setp" or abs(value) < 4 or value % 4:
            return value + 1
        return value + (8 if category == "barrier address" else 16 if value % 16 == 0 else 4)
    if operation in ("shl", "shr"):
        return value + 1
    if operation == "and" and s.parts[1] == "b64":
        return 0
    if operation == "and":
        bits = [bit for bit in range(20) if value >> bit & 1]
        return -1 if value < 0 or value >> 20 else value ^ 1 << bits[len(bits) // 2]
    if operation == "mul" and s.parts[1] == "hi":
        return (value & 0xFFFFFFFF) // 2
    if operation in ("or", "mul"):
        return value * 2
    if operation == "xor":
        return 0
    return value
