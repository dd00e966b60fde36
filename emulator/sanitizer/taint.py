"""Registers whose values prove nothing, followed until somebody relies on them.

PACKET: 4 bytes that another thread stored and that nothing ordered before the load. A relaxed load may see such a store, or not, whatever
other loads have seen. Comparing the value (a flag, a counter, the epoch beside it) is fine. Computing with it is not, unless it carries its
own validity: an 8-byte {value, epoch} packet does, its two halves apart do not.

RACE: computed from bytes of ``Launch.columnwise`` that another thread may have been writing. It may be computed with as long as nobody
stores it, follows it or decides by it: the column is not one that counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..warp import FULL

if TYPE_CHECKING:
    from ..decode import Op
    from ..warp import Fragment, Warp

PACKET, RACE = 0, 1

_STORES = tuple("st. ld. atom. red. cp. tcgen05. mbarrier.".split())
_ARITHMETIC = tuple("add.f add.rn sub.f sub.rn mul.f mul.rn fma. div.rn".split())
_SINKS = {PACKET: _STORES + _ARITHMETIC, RACE: (*_STORES, "setp.")}
"""Beginnings of opcodes that must not use a value of the kind."""
_FINDINGS = {
    PACKET: ("A-PACKET", "a value of a relaxed load of 4 bytes is used, and nothing orders that load after the store of another thread"),
    RACE: ("E-RACE", "a value is used that comes from shared memory which another thread may still have been writing"),
}
_ACROSS = ("shfl.", "redux.")
"""Opcodes whose result depends on other lanes."""

Lanes = tuple[int, int]
"""Lanes that hold a value of each kind."""


def mark(warp: Warp, register: int, lanes: int, kind: int) -> None:
    """The register holds a value of the kind in ``lanes`` too."""
    if lanes:
        old = warp.tainted.get(register, (0, 0))
        warp.tainted[register] = (old[0] | lanes, old[1]) if kind == PACKET else (old[0], old[1] | lanes)


def clear(warp: Warp, register: int) -> None:
    """The register gets a new value in all lanes."""
    warp.tainted.pop(register, None)


def propagate(fragment: Fragment, op: Op, lanes: int) -> None:
    """``op`` is about to run in ``lanes``."""
    warp = fragment.warp
    tainted = warp.tainted
    name = op.source.opcode
    hit = [0, 0]
    for register in op.reads:
        if register in tainted:
            for kind, holds in enumerate(tainted[register]):
                hit[kind] |= holds & lanes
    for kind, (check, text) in _FINDINGS.items():
        if hit[kind] and name.startswith(_SINKS[kind]):
            warp.cta.cluster.report_next(check, text)
        if hit[kind] and name.startswith(_ACROSS):
            hit[kind] = FULL
    widths = warp.cta.cluster.program.layout.widths
    for register in op.writes:
        old = tainted.pop(register, (0, 0))
        new = [o & ~lanes | (h & lanes if widths[register] > 1 else 0) for o, h in zip(old, hit, strict=True)]  # a predicate is an answer
        if any(new):
            tainted[register] = (new[0], new[1])
