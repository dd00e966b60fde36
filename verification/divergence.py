"""Static check of the PTX: no instruction that needs the whole warp stands where lanes of a warp may have parted.

    python -m verification.divergence [--entry SUBSTRING]

bar.sync, ``.aligned`` forms (cluster barrier, tcgen05, wgmma) and shuffles, reductions and votes of a full mask are undefined
unless all lanes execute the same instruction together. A source that respects this is not enough: LLVM unswitches loops and
duplicates tails behind a branch on the lane, and then each side of the branch has a copy of the instruction.

A register *varies* at a point of the program where it may differ between lanes of a warp; a branch on a varying register parts
the lanes until its immediate post-dominator. The analysis errs on the safe side: what is written between the two varies.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from emulator.cfg import post_dominators, successors
from emulator.parser import Address, Instruction, Kernel, Operand, Pair, Reg, Vector, parse
from megamoe_aot.manifest import Manifest

from .artifacts import read_ptx

SAME_IN_A_WARP = frozenset(
    "%ctaid.x %ctaid.y %ctaid.z %nctaid.x %ntid.x %clusterid.x %nclusterid.x %cluster_ctarank %cluster_nctarank".split()
)
"""Special registers that do not vary; any other one does."""

AGREED = ("redux.sync", "vote.sync")
"""Opcodes that give every lane the same result."""
VARYING = ("mbarrier.try_wait", "mbarrier.test_wait", "tcgen05.ld", "wgmma.mma_async", "atom", "elect.sync")
"""Opcodes whose result varies whatever their operands are."""
TOGETHER = ("bar.sync", "bar.arrive", "bar.red", "shfl.sync", "redux.sync", "vote.sync", "match.sync", "elect.sync")
"""Opcodes that need the whole warp although their name does not say ``.aligned``. bar.warp.sync is none of them: lanes may
meet in two copies of it."""


@dataclasses.dataclass(frozen=True)
class Parted:
    """An instruction for the whole warp, and the branch behind which lanes may have parted."""

    instruction: Instruction
    branch: Instruction

    def __str__(self) -> str:
        return f"line {self.instruction.line}: {self.instruction.text} may run without some lanes: they part in line {self.branch.line}"


def check(kernel: Kernel) -> list[Parted]:
    """Every instruction that breaks the rule, with a branch that parts its lanes."""
    code = kernel.instructions
    regions = _Regions(code)
    parted: dict[int, int] = {}
    while True:
        varying = _varying_before(code, parted)
        more = regions.after([b for b in regions.branches if (guard := code[b].guard) and guard[0] in varying[b]])
        if more.keys() <= parted.keys():
            return [Parted(code[index], code[parted[index]]) for index in sorted(parted) if needs_whole_warp(code[index])]
        parted = more


def _varying_before(code: Sequence[Instruction], parted: Mapping[int, int]) -> list[set[str]]:
    """For each instruction the registers that may vary when it begins, given the instructions that lanes reach apart."""
    following = successors(code)
    before: list[set[str]] = [set() for _ in code]
    waiting = list(reversed(range(len(code))))
    while waiting:
        index = waiting.pop()
        i, known = code[index], before[index]
        after = known | set(written(i)) if index in parted or _varies(i, known) else known - set(written(i))
        if i.guard:
            after |= known  # lanes whose guard is false keep the old value
        for successor in following[index]:
            if successor < len(code) and not after <= before[successor]:
                before[successor] |= after
                waiting.append(successor)
    return before


class _Regions:
    """For each conditional branch, the instructions up to where its two ways have met again."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        self.branches = [index for index, i in enumerate(code) if i.opcode.split(".")[0] == "bra" and i.guard]
        self._following = successors(code)
        self._meeting = post_dominators(code)
        self._cache: dict[int, set[int]] = {}

    def after(self, branches: Sequence[int]) -> dict[int, int]:
        """Instruction index -> the first of these branches in whose region it lies."""
        found: dict[int, int] = {}
        for branch in branches:
            for index in self._region(branch):
                found.setdefault(index, branch)
        return found

    def _region(self, branch: int) -> set[int]:
        if branch not in self._cache:
            stop, seen, stack = self._meeting[branch], set[int](), [*self._following[branch]]
            while stack:
                index = stack.pop()
                if index not in seen and index != stop and index < len(self._following):
                    seen.add(index)
                    stack.extend(self._following[index])
            self._cache[branch] = seen
        return self._cache[branch]


def needs_whole_warp(i: Instruction) -> bool:
    """True for instructions that all lanes of a warp must execute together."""
    return "aligned" in i.opcode.split(".") or any(_is(i, opcode) for opcode in TOGETHER)


def written(i: Instruction) -> list[str]:
    """Registers that the instruction may set: those of its first operand, unless that is an address."""
    return [] if not i.operands or isinstance(i.operands[0], Address) else [*_registers(i.operands[0])]


def _varies(i: Instruction, varying: set[str]) -> bool:
    """Whether the result may differ between lanes that execute the instruction together."""
    if any(_is(i, opcode) for opcode in AGREED):
        return False
    if any(_is(i, opcode) for opcode in VARYING):
        return True
    sources = [name for operand in i.operands[1:] for name in _registers(operand)]
    if i.guard:
        sources.append(i.guard[0])
    if _is(i, "shfl.sync.idx"):  # one lane's value for all, where all name the same lane
        sources = [*_registers(i.operands[2])]
    return any(name in varying or (name not in SAME_IN_A_WARP and _is_special(name)) for name in sources)


def _is(i: Instruction, opcode: str) -> bool:
    return i.opcode == opcode or i.opcode.startswith(f"{opcode}.")


def _is_special(name: str) -> bool:
    """Declared registers end in a number or a scope; special ones are words."""
    return name.startswith("%") and not name.rstrip("0123456789").endswith(("%r", "%rd", "%rs", "%p", "%f", "%fd"))


def _registers(operand: Operand) -> Iterator[str]:
    match operand:
        case Reg(name):
            yield name
        case Vector(items):
            for item in items:
                yield from _registers(item)
        case Pair(first, second):
            yield from _registers(first)
            yield from _registers(second)
        case Address(base, _, coordinates):
            yield from _registers(base)
            if coordinates is not None:
                yield from _registers(coordinates)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: every artifact obeys the rule; 1: one does not."""
    parser = argparse.ArgumentParser(
        prog="verification.divergence", description="Find instructions for a whole warp behind branches on the lane."
    )
    parser.add_argument("--entry", default="", help="only codes whose name contains this")
    parser.add_argument("--artifacts", type=Path, help="artifacts folder (default: this checkout's)")
    options = parser.parse_args(arguments)
    manifest = Manifest.load(options.artifacts)
    failed, checked = False, 0
    for sha, record in sorted(manifest.cubins.items(), key=lambda item: item[1].code):
        if options.entry in record.code:
            checked += 1
            for parted in check(parse(read_ptx(manifest, sha)).kernel()):
                failed = True
                print(f"{record.code}: {parted}")
    print(f"{checked} artifacts checked" if checked else f"no artifact's name contains {options.entry!r}")
    return 1 if failed or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
