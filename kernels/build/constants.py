"""Compile-time constants in PTX: which immediates an operand can stand for, followed back through the registers.

The compiler puts an immediate in a register first, so ``mbarrier.init [%r5], %r6`` shows neither offset nor count.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable

from .ptx import Entry, Statement, names

_MOST = 256
"""Values beyond which an operand counts as unknown."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """An integer, plus the address of ``symbol`` if that is not None."""

    value: int
    symbol: str | None = None


Constants = frozenset[Constant]

_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "or": operator.or_,
    "and": operator.and_,
    "xor": operator.xor,
    "shl": operator.lshift,
}


def immediates(entry: Entry, operand: str) -> frozenset[int] | None:
    """Every integer that ``operand`` can be, or None where it depends on anything but immediates.

    A register set in several places, or by ``selp``, has several. ``0f`` and ``0d`` literals give their bits.
    """
    found = constants(entry, operand)
    if found is None or any(c.symbol is not None for c in found):
        return None
    return frozenset(c.value for c in found)


def immediate(entry: Entry, operand: str) -> int | None:
    """The one integer that ``operand`` stands for, or None."""
    found = immediates(entry, operand)
    return next(iter(found)) if found is not None and len(found) == 1 else None


def shared_offsets(entry: Entry, operand: str) -> frozenset[int] | None:
    """Offsets from the dynamic shared memory base that the address ``operand`` can have, or None if it is computed at run time."""
    found = constants(entry, operand)
    if found is None or any(c.symbol is None for c in found):
        return None
    return frozenset(c.value for c in found)


def constants(entry: Entry, operand: str) -> Constants | None:
    """Every constant that ``operand`` (an immediate, symbol, register or ``[address]``) can be, or None if unknown."""
    return _operand(entry, operand, frozenset())


def _operand(entry: Entry, operand: str, seen: frozenset[str]) -> Constants | None:
    terms = [_term(entry, term.strip(), seen) for term in operand.strip("[] ").replace("-", "+-").split("+") if term.strip()]
    total: Constants | None = frozenset([Constant(0)])
    for term in terms:
        total = _combine(operator.add, total, term)
    return total


def _term(entry: Entry, term: str, seen: frozenset[str]) -> Constants | None:
    if (number := literal(term)) is not None:
        return frozenset([Constant(number)])
    if names(term) != [term] or term in seen:
        return None
    definitions = entry.definitions.get(term)
    if definitions is None:
        is_symbol = not term.startswith("%")
        return frozenset([Constant(0, term)]) if is_symbol else None
    found: set[Constant] = set()
    for statement in definitions:
        values = _result(entry, statement, seen | {term})
        if values is None or len(found) > _MOST:
            return None
        found |= values
    return frozenset(found)


def _result(entry: Entry, s: Statement, seen: frozenset[str]) -> Constants | None:
    if s.guard is not None or len(s.written) != 1:
        return None
    sources = [_operand(entry, source, seen) for source in s.sources[:2]]
    kind = s.parts[0]
    if kind == "mov" and len(sources) == 1:
        return sources[0]
    if kind == "selp":
        return sources[0] | sources[1] if sources[0] is not None and sources[1] is not None else None
    if kind in _BINARY and len(s.sources) == 2 and not {"f32", "f64"} & set(s.parts):
        return _combine(_BINARY[kind], *sources)
    return None


def _combine(op: Callable[[int, int], int], left: Constants | None, right: Constants | None) -> Constants | None:
    """All pairs; a symbol survives only an addition, or a subtraction from it."""
    if left is None or right is None or len(left) * len(right) > _MOST:
        return None
    found = set()
    for a, b in itertools.product(left, right):
        symbols = [c.symbol for c in (a, b) if c.symbol is not None]
        moved = op is operator.add or (op is operator.sub and b.symbol is None)
        if len(symbols) > 1 or (symbols and not moved):
            return None
        found.add(Constant(op(a.value, b.value), symbols[0] if symbols else None))
    return frozenset(found)


def literal(text: str) -> int | None:
    """The value of a PTX integer literal, the bits of a ``0f``/``0d`` literal, or None for anything else."""
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    digits = digits.rstrip("U") if digits[:2] not in ("0f", "0F", "0d", "0D") else "0x" + digits[2:]
    try:
        return sign * int(digits, 8 if len(digits) > 1 and digits[0] == "0" and digits.isdigit() else 0)
    except ValueError:
        return None
