"""Poll loops: a warp that reads the same global memory again and again parks until somebody writes there.

That hides no schedule. A loop parks only where nothing that it keeps from one round to the next can change: it has no effect but on
registers (:data:`_PURE`), and no register that is live at its load is written in it. Then a round is a function of the memory that it
reads, and rounds between which nobody stores there are all the same. Any other loop spins on and is found by the instruction limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .cfg import successors

if TYPE_CHECKING:
    from .decode import Op
    from .memory import Allocation
    from .scheduler import Scheduler
    from .warp import Fragment

LINE = 7
"""Log2 of the bytes whose stores are counted together."""

_LOADS = ("ld.relaxed.gpu.global", "ld.acquire.gpu.global")
_PURE = frozenset(
    "abs add and bfe bfind bra brev clz cvt div fma lop3 mad max min mov mul neg not or popc prmt redux rem selp setp shfl shl shr "
    "sub vote xor".split()
)
"""First words of instructions that only read and write registers; the loads above and bar.warp.sync count too."""


@dataclasses.dataclass(frozen=True)
class PollSite:
    """A strong load that can follow itself by pure instructions."""

    loop: int
    """Which loop: the lowest instruction index of it."""
    parks: bool
    inputs: tuple[int, ...]
    """Registers that the loop only reads, except addresses: what it compares with."""


@dataclasses.dataclass
class PollRecord:
    """What a fragment has read in one round of a poll loop."""

    loop: int
    start: int
    """Program counter of the load that begins the round."""
    inputs: tuple[int, ...]
    lines: dict[Any, int] = dataclasses.field(default_factory=dict)
    """Line of memory -> how many stores it had seen when it was read."""
    last: tuple[Allocation, int, int, bytes] | None = None
    """(buffer, offset, bytes per lane, value) of the first lane of the last load."""

    def describe(self, fragment: Fragment) -> str:
        """Who polls what, for the deadlock report."""
        if self.last is None:
            return "polls"
        allocation, offset, size, value = self.last
        names = fragment.warp.cta.cluster.program.layout.names
        lane = fragment.lanes.first
        known = ", ".join(f"{names[r]} = {int(fragment.u[r][lane]):#x}" for r in self.inputs)
        words = " ".join(f"{word:#x}" for word in np.frombuffer(value, "<u4"))
        text = f"polls {size} bytes at byte {offset} of buffer {allocation.buffer.name} (lane {lane}), last read {words}"
        return f"{text}; the loop compares with {known}" if known else text


class Watch:
    """Counts stores per line of global memory and wakes whoever waits for one."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, int], int] = {}
        self._waiting: dict[tuple[str, int], list[tuple[Fragment, Any]]] = {}
        self.active = False
        """Some fragment has polled: until then nothing needs to be counted."""

    def read(self, record: PollRecord, allocation: Allocation, offsets: NDArray[np.int64]) -> None:
        """Part of a round: a load at ``offsets``, naturally aligned."""
        self.active = True
        name = allocation.buffer.name
        for line in np.unique(offsets >> LINE).tolist():
            record.lines.setdefault((name, line), self._versions.get((name, line), 0))

    def unchanged(self, record: PollRecord) -> bool:
        """Nothing that the round read has been written since."""
        return all(self._versions.get(line, 0) == version for line, version in record.lines.items())

    def park(self, scheduler: Scheduler, fragment: Fragment, record: PollRecord) -> None:
        """Until one of the round's lines is written."""
        wait = scheduler.park(fragment, "poll", lambda: record.describe(fragment))
        for line in record.lines:
            self._waiting.setdefault(line, []).append((fragment, wait))

    def wrote(self, scheduler: Scheduler, allocation: Allocation, at: NDArray[np.int64]) -> None:
        """Bytes at offsets ``at`` have been written, visibly to all."""
        if not self.active:
            return
        name = allocation.buffer.name
        for line in np.unique(at >> LINE).tolist():
            self._versions[name, line] = self._versions.get((name, line), 0) + 1
            for fragment, wait in self._waiting.pop((name, line), ()):
                scheduler.resume(fragment, wait)


# ---- which loops can park ----


def analyse(ops: Sequence[Op]) -> dict[int, PollSite]:
    """The kernel's poll sites, by instruction index."""
    loads = [i for i, op in enumerate(ops) if op.source.opcode.startswith(_LOADS)]
    if not loads:
        return {}
    following = successors([op.source for op in ops])
    live = _liveness(ops, following)
    pure = [_is_pure(op) for op in ops]
    sites = {}
    for load in loads:
        loop = _loop(load, following, pure)
        if not loop:
            continue
        written = {r for i in loop for r in ops[i].writes}
        read = {r for i in loop for r in ops[i].reads}
        addresses = {ops[i].reads[-1] for i in loop if i in loads and ops[i].reads}
        carried = any(live[load] >> r & 1 for r in written)
        sites[load] = PollSite(min(loop), not carried, tuple(sorted(read - written - addresses)))
    return sites


def spins(ops: Sequence[Op], sites: Mapping[int, PollSite]) -> bool:
    """May a warp run on and on while it waits? In a poll loop that cannot park, or in a loop around an atomic or a test_wait."""
    if not all(site.parks for site in sites.values()):
        return True
    following = successors([op.source for op in ops])
    every = [True] * len(ops)
    return any(op.source.opcode.startswith(("atom.", "mbarrier.test_wait")) and _loop(i, following, every) for i, op in enumerate(ops))


def _is_pure(op: Op) -> bool:
    name = op.source.opcode
    return name.split(".")[0] in _PURE or name.startswith((*_LOADS, "bar.warp.sync", "ld.param"))


def impure(op: Op) -> bool:
    """Ends a round of polling."""
    return not _is_pure(op)


def _loop(start: int, following: Sequence[Sequence[int]], allowed: Sequence[bool]) -> set[int]:
    """Instructions on cycles through ``start`` that consist of allowed instructions only."""
    end = len(allowed)
    ahead = _reach(start, lambda i: (n for n in following[i] if n < end and allowed[n]))
    if start not in ahead:
        return set()
    before: dict[int, list[int]] = {}
    for i in ahead:
        for n in following[i]:
            before.setdefault(n, []).append(i)
    return ahead & _reach(start, lambda i: iter(before.get(i, ())))


def _reach(start: int, steps: Any) -> set[int]:
    """Everything that one or more steps lead to."""
    seen: set[int] = set()
    todo: list[Iterator[int]] = [steps(start)]
    while todo:
        for i in todo.pop():
            if i not in seen:
                seen.add(i)
                todo.append(steps(i))
    return seen


def _liveness(ops: Sequence[Op], following: Sequence[Sequence[int]]) -> list[int]:
    """Per instruction, a bit set of the registers whose values before it may still be read."""
    use = [_bits(op.reads) for op in ops]
    kill = [0 if op.guard >= 0 else _bits(op.writes) for op in ops]
    live = [0] * (len(ops) + 1)
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(ops))):
            after = 0
            for n in following[i]:
                after |= live[n]
            before = use[i] | (after & ~kill[i])
            if before != live[i]:
                live[i] = before
                changed = True
    return live


def _bits(registers: Sequence[int]) -> int:
    bits = 0
    for register in registers:
        bits |= 1 << register
    return bits
