"""What ptxas kept: instruction counts of the PTX that we verify against the SASS of the cubin that we ship.

    python -m verification.census [--entry SUBSTRING] [--json FILE]

Every count on the SASS side must follow from counts on the PTX side by the terms of :data:`LINES`. A term that is not plainly
one-to-one names the rule of :data:`RULES` that explains it. Both sides are covered whole: an opcode that no line, no
counter and no list of plain opcodes knows is a problem too, so a new compiler cannot bring in an instruction unseen.

Kernels of the list structure are held to the same table, but for the lines in :data:`UNDERIVED`: those are shown, counted and not judged.

The rules were found by deleting the PTX instruction in question, assembling again and comparing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kernels.build.constants import immediate
from kernels.build.ptx import Entry, Statement, read_entry
from megamoe_aot.manifest import Manifest
from megamoe_aot.spec import KernelSpec

from .artifacts import read_ptx
from .disassembly import SassInstruction, disassemble

RULES = {
    "retry copy": "the first attempt of a wait stays in line, the retry loop is a second copy after the kernel's end",
    "peeled round": "the first round of the loop over ranks stands in front of the loop, as a copy",
    "no cluster": "barrier.cluster becomes bar.sync 0 on a second path, for a launch without clusters",
    "cluster acquire": "acquire at cluster scope invalidates the L1 after the wait (CCTL.IVALL)",
    "init run": "one fence orders a run of mbarrier.init before the barriers' use by the async proxy; fence.mbarrier_init adds nothing",
    "one lane": "an instruction of the uniform datapath with operands from vector registers runs in a loop over elected lanes",
    "tmem bookkeeping": "alloc, dealloc and relinquish are short sequences on a bitmap in the reserved shared memory: an elected lane, "
    "find-and-set with one sleeping retry, two guards that trap",
    "constant divisor": "division by a constant multiplies by its reciprocal, computed by ptxas, and keeps the FCHK guard",
    "cluster id": "%clusterid is %ctaid divided by the cluster's size, by a reciprocal",
    "slow path": "div.rn and rcp.rn call a routine for denormal and huge operands",
    "warp index": "shfl of %tid.x / 32 from lane 0 returns its own operand: ptxas drops it",
    "dead components": "a vector load of which not all components are used becomes narrower",
    "converged": "where ptxas proves that the warp is converged, a warp barrier costs no instruction; the order of memory accesses stays",
    "scoreboard": "waited for by the scoreboard bits of the next instruction that needs it",
    "address arithmetic": "computed with ordinary integer instructions",
    "aligned": "an .aligned instruction after code that may diverge gets a WARPSYNC.ALL before it",
    "one reduction": "one reduction over the warp may serve both guards of dealloc",
    "group end": "the group ends with its last MMA: a flag (gsb0) on QGMMA",
}

CHOICES = ("retry copy", "peeled round")
"""Rules that ptxas applies to a whole kernel or not at all: the census finds out which, and every line must agree."""

Predicate = Callable[[Entry, Statement], bool]


def _is(opcode: str, *modifiers: str) -> Predicate:
    return lambda entry, s: s.matches(opcode, *modifiers)


def _access(kind: str, space: str, width: int | None = None) -> Predicate:
    """A load or store of ``width`` bytes (None: any) in a state space."""
    return lambda entry, s: s.parts[:2] == (kind, space) and width in (None, access_bytes(s))


def _relaxed(kind: str, width: int) -> Predicate:
    """A relaxed load or store of ``width`` bytes in global memory, GPU scope."""
    return lambda entry, s: s.parts[:4] == (kind, "relaxed", "gpu", "global") and access_bytes(s) == width


def access_bytes(s: Statement) -> int:
    """Bytes that a load or store moves: its type's width times its vector length."""
    lanes = next((int(part[1:]) for part in s.parts if re.fullmatch(r"v[248]", part)), 1)
    return int(s.parts[-1][1:]) // 8 * lanes


def _first_of_run(entry: Entry, s: Statement) -> bool:
    """An mbarrier.init with anything but register arithmetic and other inits since the last one."""
    if not s.matches("mbarrier.init"):
        return False
    for before in reversed(entry.statements[: s.index]):
        if before.matches("mbarrier.init"):
            return False
        if before.parts[0] not in ("add", "mov") or before.labels:
            return True
    return True


def _in_loop(counted: Predicate) -> Predicate:
    """Those that stand inside a backward branch's range."""

    def within(entry: Entry, s: Statement) -> bool:
        return counted(entry, s) and any(b.index > s.index >= entry.labels[b.operands[0]] for b in entry.find("bra"))

    return within


def _constant_divisor(entry: Entry, s: Statement) -> bool:
    return s.matches("div.rn") and immediate(entry, s.operands[2]) is not None


def _warp_index_shuffle(entry: Entry, s: Statement) -> bool:
    if not s.matches("shfl.sync.idx") or immediate(entry, s.operands[2]) != 0:
        return False
    shifts = entry.definitions.get(s.operands[1], [])
    if len(shifts) != 1 or not shifts[0].matches("shr") or shifts[0].operands[2] != "5":
        return False
    return any(d.operands[1:] == ("%tid.x",) for d in entry.definitions.get(shifts[0].operands[1], []))


COUNTERS: dict[str, Predicate] = {
    "tcgen05.mma": _is("tcgen05.mma"),
    "tcgen05.commit": _is("tcgen05.commit"),
    "tcgen05.ld.x16": _is("tcgen05.ld", "x16"),
    "tcgen05.ld.16x256b.x2": _is("tcgen05.ld", "16x256b", "x2"),
    "tcgen05.ld.16x256b.x4": _is("tcgen05.ld", "16x256b", "x4"),
    "tcgen05.ld.16x256b.x8": _is("tcgen05.ld", "16x256b", "x8"),
    "tcgen05.wait::ld": _is("tcgen05.wait::ld"),
    "tcgen05.fence": lambda entry, s: s.opcode.startswith("tcgen05.fence::"),
    "tcgen05.alloc": _is("tcgen05.alloc"),
    "tcgen05.dealloc": _is("tcgen05.dealloc"),
    "tcgen05.relinquish": _is("tcgen05.relinquish_alloc_permit"),
    "wgmma n8": _is("wgmma.mma_async", "m64n8k32"),
    "wgmma n16": _is("wgmma.mma_async", "m64n16k32"),
    "wgmma.fence": _is("wgmma.fence"),
    "wgmma.commit_group": _is("wgmma.commit_group"),
    "wgmma.wait_group": _is("wgmma.wait_group"),
    "TMA load 3d": _is("cp.async.bulk.tensor", "3d", "global"),
    "bulk copy": lambda entry, s: s.matches("cp.async.bulk", "global") and not s.matches("cp.async.bulk.tensor"),
    "prefetch.tensormap": _is("prefetch.tensormap"),
    "st.async 16 bytes": lambda entry, s: s.matches("st.async") and access_bytes(s) == 16,
    "mapa": _is("mapa"),
    "mbarrier.init": _is("mbarrier.init"),
    "mbarrier.init run": _first_of_run,
    "arrive.expect_tx": _is("mbarrier.arrive.expect_tx"),
    "arrive": lambda entry, s: s.matches("mbarrier.arrive") and not s.matches("mbarrier.arrive.expect_tx"),
    "try_wait": _is("mbarrier.try_wait"),
    "try_wait.cluster": _is("mbarrier.try_wait", "acquire", "cluster"),
    "fence.mbarrier_init": _is("fence.mbarrier_init"),
    "fence.proxy.async": _is("fence.proxy.async"),
    "bar.sync": _is("bar.sync"),
    "bar.arrive": _is("bar.arrive"),
    "bar.warp.sync": _is("bar.warp.sync"),
    "cluster.arrive": _is("barrier.cluster.arrive"),
    "cluster.wait": _is("barrier.cluster.wait"),
    "griddepcontrol.wait": _is("griddepcontrol.wait"),
    "griddepcontrol.launch_dependents": _is("griddepcontrol.launch_dependents"),
    "redux max": _is("redux.sync.max"),
    "redux min": _is("redux.sync.min"),
    "redux max in a loop": _in_loop(_is("redux.sync.max")),
    "redux min in a loop": _in_loop(_is("redux.sync.min")),
    "vote.ballot": _is("vote.sync.ballot"),
    "shfl.idx": _is("shfl.sync.idx"),
    "shfl of warp index": _warp_index_shuffle,
    "shfl.bfly": _is("shfl.sync.bfly"),
    "ld.global 2": _access("ld", "global", 2),
    "ld.global 4": _access("ld", "global", 4),
    "ld.global 8": _access("ld", "global", 8),
    "ld.global 16": _access("ld", "global", 16),
    "st.global 4": _access("st", "global", 4),
    "st.global 8": _access("st", "global", 8),
    "st.global 16": _access("st", "global", 16),
    "ld.relaxed.gpu 16": _relaxed("ld", 16),
    "st.relaxed.gpu 4": _relaxed("st", 4),
    "st.relaxed.gpu 8": _relaxed("st", 8),
    "st.relaxed.gpu 16": _relaxed("st", 16),
    "atom.add.u32": _is("atom.relaxed.gpu", "global", "add", "u32"),
    "atom.add.u64": _is("atom.relaxed.gpu", "global", "add", "u64"),
    "red.shared min": _is("red.relaxed.cta", "min", "u32"),
    "red.shared or": _is("red.relaxed.cta", "or", "b32"),
    "ld.shared": _access("ld", "shared"),
    "ld.shared 2": _access("ld", "shared", 2),
    "ldmatrix": _is("ldmatrix"),
    "st.shared 2": _access("st", "shared", 2),
    "st.shared 4": _access("st", "shared", 4),
    "st.shared 8": _access("st", "shared", 8),
    "st.shared 16": _access("st", "shared", 16),
    "cvt e4m3x2": _is("cvt", "e4m3x2"),
    "cvt bf16x2": _is("cvt", "bf16x2"),
    "ex2.approx": _is("ex2.approx"),
    "div.rn": _is("div.rn"),
    "div.rn by a constant": _constant_divisor,
    "rcp.rn": _is("rcp.rn"),
    "rcp.approx": _is("rcp.approx"),
    "%clusterid": lambda entry, s: s.matches("mov") and "%clusterid.x" in s.operands,
}
"""Counter -> which PTX statements it counts. A statement may count several times."""


@dataclasses.dataclass(frozen=True)
class Term:
    """``factor`` SASS instructions for each PTX statement of a counter; without a rule: the instruction itself."""

    counter: str
    factor: int = 1
    rule: str | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of the table: SASS opcodes that match ``sass``, and how many the PTX explains."""

    what: str
    sass: str
    terms: tuple[Term, ...]
    operands: str = ""
    """Where set, instructions must also have operands that contain this, and another line claims the opcode."""
    at_most: str | None = None
    """Rule by which there may be fewer than the terms say; None: the number is exact."""


_TMEM = "tmem bookkeeping"

LINES = (
    Line("MMA (tcgen05)", r"UTCQMMA", (Term("tcgen05.mma"),)),
    Line("MMA (wgmma)", r"QGMMA\.64x8x32\.F32\.E4M3\.E4M3", (Term("wgmma n8"),)),
    Line("MMA (wgmma), 16 columns", r"QGMMA\.64x16x32\.F32\.E4M3\.E4M3", (Term("wgmma n16"),)),
    Line("matrix load", r"LDSM\.16\.M88\.4", (Term("ldmatrix"),)),
    Line("MMA commit (tcgen05)", r"UTCBAR", (Term("tcgen05.commit"),)),
    Line("MMA group end (wgmma)", r"QGMMA\..*", (Term("wgmma.commit_group", 1, "group end"),), operands="gsb0"),
    Line("MMA register fence (wgmma)", r"WARPGROUP\.ARRIVE", (Term("wgmma.fence"),)),
    Line("MMA wait (wgmma)", r"WARPGROUP\.DEPBAR\.LE", (Term("wgmma.wait_group"),)),
    Line("TMEM load, 16 columns", r"LDTM\.x16", (Term("tcgen05.ld.x16"),)),
    Line("TMEM load, 16x256b, x2", r"LDTM\.16dp256bit\.x2", (Term("tcgen05.ld.16x256b.x2"),)),
    Line("TMEM load, 16x256b, x4", r"LDTM\.16dp256bit\.x4", (Term("tcgen05.ld.16x256b.x4"),)),
    Line("TMEM load, 16x256b, x8", r"LDTM\.16dp256bit\.x8", (Term("tcgen05.ld.16x256b.x8"),)),
    Line("TMEM allocate", r"UTCATOMSWS\.FIND_AND_SET\.ALIGN", (Term("tcgen05.alloc", 2, _TMEM),)),
    Line("TMEM free", r"UTCATOMSWS\.AND", (Term("tcgen05.dealloc"),)),
    Line("TMEM relinquish", r"UVIRTCOUNT\.DEALLOC\.SMPOOL", (Term("tcgen05.relinquish"),)),
    Line("TMEM bitmap, set", r"ATOMS\.OR", (Term("tcgen05.alloc", 2, _TMEM), Term("red.shared or"))),
    Line("TMEM bitmap, clear", r"ATOMS\.AND", (Term("tcgen05.dealloc", 2, _TMEM),)),
    Line("TMEM bitmap, reduce", r"REDUX", (Term("tcgen05.dealloc", 2, _TMEM),), at_most="one reduction"),
    Line("TMEM allocate, wait", r"NANOSLEEP", (Term("tcgen05.alloc", 1, _TMEM),)),
    Line("TMEM allocate, order", r"DEPBAR\.LE", (Term("tcgen05.alloc", 2, _TMEM),)),
    Line("TMA load, 3-D", r"UTMALDG\.3D", (Term("TMA load 3d"),)),
    Line("bulk copy", r"UBLKCP\.S\.G", (Term("bulk copy"),)),
    Line("tensor map prefetch", r"UTMACCTL\.PF", (Term("prefetch.tensormap"),)),
    Line("elected lane", r"ELECT", (
        Term("TMA load 3d", 1, "one lane"),
        Term("bulk copy", 1, "one lane"),
        Term("tcgen05.mma", 1, "one lane"),
        Term("tcgen05.commit", 1, "one lane"),
        Term("tcgen05.alloc", 1, _TMEM),
        Term("tcgen05.relinquish", 1, _TMEM),
    )),
    Line("remote store, 16 bytes", r"STAS\.128", (Term("st.async 16 bytes"),)),
    Line("mbarrier init", r"SYNCS\.EXCH\.64", (Term("mbarrier.init"),)),
    Line("mbarrier arrive", r"SYNCS\.ARRIVE\.TRANS64\.A1T0", (Term("arrive"),)),
    Line("mbarrier arrive + expect_tx", r"SYNCS\.ARRIVE\.TRANS64", (Term("arrive.expect_tx"),)),
    Line("mbarrier try_wait", r"SYNCS\.PHASECHK\.TRANS64\.TRYWAIT", (
        Term("try_wait"),
        Term("try_wait", 1, "retry copy"),
    )),
    Line("L1 invalidation", r"CCTL\.IVALL", (
        Term("cluster.wait", 1, "cluster acquire"),
        Term("try_wait.cluster", 1, "cluster acquire"),
        Term("try_wait.cluster", 1, "retry copy"),
    )),
    Line("CTA memory fence", r"MEMBAR\.ALL\.CTA", (Term("fence.proxy.async"),)),
    Line("proxy fence", r"FENCE\.VIEW\.ASYNC\.S", (Term("fence.proxy.async"), Term("mbarrier.init run", 1, "init run"))),
    Line("named barrier", r"BAR\.SYNC\.DEFER_BLOCKING", (Term("bar.sync"), Term("cluster.wait", 1, "no cluster"))),
    Line("named barrier, arrive", r"BAR\.ARV", (Term("bar.arrive"),)),
    Line("cluster arrive", r"UCGABAR_ARV", (Term("cluster.arrive"),)),
    Line("cluster wait", r"UCGABAR_WAIT", (Term("cluster.wait"),)),
    Line("warp barrier", r"WARPSYNC\.(ALL|COLLECTIVE)", (
        Term("bar.warp.sync"),
        Term("cluster.wait", 1, "aligned"),
        Term("tcgen05.relinquish", 1, "aligned"),
    ), at_most="converged"),
    Line("grid dependency wait", r"ACQBULK", (Term("griddepcontrol.wait"),)),
    Line("grid dependency launch", r"PREEXIT", (Term("griddepcontrol.launch_dependents"),)),
    Line("warp maximum", r"C?REDUX\.MAX", (Term("redux max"), Term("redux max in a loop", 1, "peeled round"))),
    Line("warp minimum", r"C?REDUX\.MIN", (Term("redux min"), Term("redux min in a loop", 1, "peeled round"))),
    Line("warp vote", r"VOTE\.ANY", (Term("vote.ballot"),)),
    Line("shuffle from a lane", r"SHFL\.IDX", (Term("shfl.idx"), Term("shfl of warp index", -1, "warp index"))),
    Line("shuffle butterfly", r"SHFL\.BFLY", (Term("shfl.bfly"),)),
    Line("global load, 2 bytes", r"LDG\.E\.U16", (Term("ld.global 2"),)),
    Line("global load, 4 bytes", r"LDG\.E", (Term("ld.global 4"),)),
    Line("global load, 8 bytes", r"LDG\.E\.64", (Term("ld.global 8"),)),
    Line("global load, 16 bytes", r"LDG\.E\.128", (Term("ld.global 16"),)),
    Line("global store, 4 bytes", r"STG\.E", (Term("st.global 4"),)),
    Line("global store, 8 bytes", r"STG\.E\.64", (Term("st.global 8"),)),
    Line("global store, 16 bytes", r"STG\.E\.128", (Term("st.global 16"),)),
    Line("packet load", r"LDG\.E\.128\.STRONG\.GPU", (Term("ld.relaxed.gpu 16"),)),
    Line("packet store, 16 bytes", r"STG\.E\.128\.STRONG\.GPU", (Term("st.relaxed.gpu 16"),)),
    Line("relaxed store, 8 bytes", r"STG\.E\.64\.STRONG\.GPU", (Term("st.relaxed.gpu 8"),)),
    Line("relaxed store, 4 bytes", r"STG\.E\.STRONG\.GPU", (Term("st.relaxed.gpu 4"),)),
    Line("ticket of the pool", r"ATOMG\.E\.ADD\.STRONG\.GPU", (Term("atom.add.u32"),)),
    Line("ticket", r"ATOMG\.E\.ADD\.64\.STRONG\.GPU", (Term("atom.add.u64"),)),
    Line("shared minimum", r"ATOMS\.MIN", (Term("red.shared min"),)),
    Line("shared load, 2 bytes", r"LDS\.U16", (Term("ld.shared 2"),)),
    Line("shared store, 2 bytes", r"STS\.U16", (Term("st.shared 2"),)),
    Line("shared store, 8 bytes", r"STS\.64", (Term("st.shared 8"),)),
    Line("shared load, any width", r"LDS(\.64|\.128)?", (Term("ld.shared", 1, "dead components"), Term("tcgen05.dealloc", 2, _TMEM))),
    Line("shared store, 4 bytes", r"STS", (Term("st.shared 4"), Term("tcgen05.alloc", 1, _TMEM))),
    Line("shared store, 16 bytes", r"STS\.128", (Term("st.shared 16"),)),
    Line("shared store, 1 byte", r"STS\.U8", (Term("tcgen05.relinquish", 1, _TMEM),)),
    Line("FP8 conversion", r"F2FP\.SATFINITE\.E4M3\.F32\.PACK_AB_MERGE_C", (Term("cvt e4m3x2"),)),
    Line("BF16 conversion", r"F2FP\.BF16\.F32\.PACK_AB", (Term("cvt bf16x2"),)),
    Line("exp2 approximation", r"MUFU\.EX2", (Term("ex2.approx"),)),
    Line("reciprocal approximation", r"MUFU\.RCP", (
        Term("div.rn"),
        Term("div.rn by a constant", -1, "constant divisor"),
        Term("rcp.rn"),
        Term("rcp.approx"),
        Term("%clusterid", 1, "cluster id"),
    )),
    Line("division guard", r"FCHK", (Term("div.rn"),)),
    Line("call of division", r"CALL\.REL\.NOINC", (Term("div.rn", 1, "slow path"),), operands="div_rn_noftz_f32_slowpath"),
    Line("call of reciprocal", r"CALL\.REL\.NOINC", (Term("rcp.rn", 1, "slow path"),), operands="rcp_rn_f32_slowpath"),
    Line("call of TMEM guard", r"CALL\.REL\.NOINC", (Term("tcgen05.dealloc", 2, _TMEM),), operands="tcgen05_guardrail_trap"),
    Line("call", r"CALL\..*", (
        Term("div.rn", 1, "slow path"),
        Term("rcp.rn", 1, "slow path"),
        Term("tcgen05.dealloc", 2, _TMEM),
    )),
    Line("local memory", r"(LDL|STL)(\..*)?", ()),
)  # fmt: skip
"""The table. Local memory has no terms: any is a problem. So is any call beyond those of the slow paths and guards."""

UNDERIVED = {
    "proxy fence": "initialising barriers takes fences that no rule predicts; that the PTX's are there shows in CTA memory fence",
    "reciprocal approximation": "integer divisions by numbers of the launch, and divisions by constants in registers",
    "warp maximum": "copies of the routing's loops",
    "warp minimum": "copies of the routing's loops",
    "shuffle from a lane": "copies of the routing's loops",
    "warp vote": "one fewer in two kernels: a result that is the same in all lanes may go to a uniform register, by an opcode of its own",
    "shared load, any width": "neighbouring loads are joined, and loads of tables repeated",
    "shared store, 4 bytes": "neighbouring stores are joined",
    "shared store, 8 bytes": "neighbouring stores are joined",
}
"""Lines on which list kernels are not judged -> what is thought to be in them, which nobody has derived by deleting PTX. Every MMA, copy,
mbarrier operation, named barrier, atomic, and access to global memory is judged."""

WITHOUT_SASS = {
    "tcgen05.wait::ld": "scoreboard",
    "tcgen05.fence": "scoreboard",
    "mapa": "address arithmetic",
    "fence.mbarrier_init": "init run",
}
"""Counters that matter, but that have no SASS instruction of their own -> rule."""

PLAIN_PTX = frozenset(
    "abs add and bfind bra brev cvt cvta fma ld.param mad max min mov mul neg not or popc ret selp setp shl shr sub xor div.u32".split()
)
"""PTX opcodes without an effect outside registers and the program counter."""

PLAIN_SASS = re.compile(
    r"(FADD|FMUL|FFMA|FMNMX3?|FSEL|FSETP|HFMA2|F2I|I2F|I2FP|BREV|FLO|IABS"
    r"|IADD3|IMAD|ISETP|LEA|LOP3|MOV|POPC|PRMT|SEL|SHF|VIADD|VIADDMNMX|VIMNMX3?|P2R|R2P|PLOP3|CS2R|S2R|S2UR|R2UR"
    r"|UIADD3|UIMAD|UISETP|ULEA|ULOP3|UMOV|UPLOP3|UPOPC|USEL|USHF|UFLO|UPRMT|UBREV"
    r"|VOTEU\.(ALL|ANY)"  # makes a uniform value of a predicate
    r"|LDC|LDCU|ULDC|BRA|BSSY|BSYNC|EXIT|NOP|YIELD|ENDCOLLECTIVE)(\..*)?"
)
"""SASS opcodes without an effect outside registers, constant bank and program counter."""

SLOW_PATHS = re.compile(r"\$__internal_\d+_\$__cuda_sm\w+_(rcp_rn_f32_slowpath|div_rn_noftz_f32_slowpath|tcgen05_guardrail_trap_\w+)")
"""Functions that ptxas may add to a kernel."""
_PLAIN_IN_SLOW_PATH = re.compile(rf"({PLAIN_SASS.pattern})|MUFU\.(RCP|RSQ)|RET\.REL\.NODEC|BPT\.TRAP")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line, counted."""

    what: str
    ptx: dict[str, int]
    """Counter -> statements, of the terms that apply."""
    expected: int
    sass: int
    rules: tuple[str, ...]
    ok: bool
    judged: bool = True
    """False: a line of UNDERIVED, which is ``ok`` whatever its numbers are."""


@dataclasses.dataclass(frozen=True)
class Census:
    """The result for one artifact."""

    code: str
    rows: tuple[Row, ...]
    problems: tuple[str, ...]


def take_census(code: str, symbol: str, ptx: str, sass: Sequence[SassInstruction], underived: Container[str] = ()) -> Census:
    """Compare one kernel's PTX with its SASS, under those of the compiler's CHOICES that leave the fewest lines unexplained.

    ``underived``: lines that are not judged.
    """
    entry = read_entry(ptx, symbol)
    counts = {name: sum(counted(entry, s) for s in entry.statements) for name, counted in COUNTERS.items()}
    body = [i for i in sass if i.function == symbol]
    made = [set(itertools.compress(CHOICES, chosen)) for chosen in itertools.product((False, True), repeat=len(CHOICES))]
    attempts = [_judged(_rows(counts, body, set(CHOICES) - choices), underived) for choices in made]
    rows = min(attempts, key=lambda rows: sum(not row.ok for row in rows))
    problems = [f"{r.what}: the PTX explains {r.expected} SASS instructions, there are {r.sass}" for r in rows if not r.ok]
    problems += _unknown_ptx(entry) + _unknown_sass(symbol, sass)
    return Census(code, rows, tuple(problems))


def _rows(counts: dict[str, int], body: Iterable[SassInstruction], unused: set[str]) -> tuple[Row, ...]:
    """All lines that have anything to count; terms whose rule is unused do not count."""
    rows = (_row(line, [t for t in line.terms if counts[t.counter] and t.rule not in unused], counts, body) for line in LINES)
    return tuple(row for row in rows if row is not None)


def _judged(rows: Iterable[Row], underived: Container[str]) -> tuple[Row, ...]:
    """The rows; those of the underived lines pass."""
    return tuple(dataclasses.replace(row, ok=True, judged=False) if row.what in underived else row for row in rows)


def _row(line: Line, terms: Sequence[Term], counts: dict[str, int], body: Iterable[SassInstruction]) -> Row | None:
    expected = sum(t.factor * counts[t.counter] for t in terms)
    found = sum(re.fullmatch(line.sass, i.opcode) is not None and line.operands in i.operands for i in body)
    if not terms and not found:
        return None
    rules = [t.rule for t in terms if t.rule is not None]
    if line.at_most is not None and found < expected:
        rules.append(line.at_most)
    ok = found == expected or (line.at_most is not None and found < expected)
    return Row(line.what, {t.counter: counts[t.counter] for t in terms}, expected, found, tuple(dict.fromkeys(rules)), ok)


def _unknown_ptx(entry: Entry) -> list[str]:
    def known(s: Statement) -> bool:
        return any(s.matches(plain) for plain in PLAIN_PTX) or any(counted(entry, s) for counted in COUNTERS.values())

    unknown = Counter(s.opcode for s in entry.statements if not known(s))
    return [f"PTX opcode {opcode} ({number}) is neither counted nor known to be plain" for opcode, number in sorted(unknown.items())]


def _unknown_sass(symbol: str, sass: Iterable[SassInstruction]) -> list[str]:
    claimed = re.compile("|".join(f"({line.sass})" for line in LINES if not line.operands))
    unknown: Counter[str] = Counter()
    for i in sass:
        if i.function == symbol:
            known = claimed.fullmatch(i.opcode) or PLAIN_SASS.fullmatch(i.opcode)
        else:
            known = SLOW_PATHS.fullmatch(i.function) and _PLAIN_IN_SLOW_PATH.fullmatch(i.opcode)
        if not known:
            unknown[f"SASS opcode {i.opcode} in {'the kernel' if i.function == symbol else i.function}"] += 1
    return [f"{what} ({number}) is on no line and not known to be plain" for what, number in sorted(unknown.items())]


def census_of(manifest: Manifest, sha256: str) -> Census:
    """The census of one artifact of a build."""
    record = manifest.cubins[sha256]
    sass = disassemble(manifest.read_cubin(sha256))
    spec = manifest.spec_of(sha256)
    underived = UNDERIVED if isinstance(spec, KernelSpec) and spec.structure == "list" else ()
    return take_census(record.code, record.symbol, read_ptx(manifest, sha256), sass, underived)


def table_of(census: Census) -> Table:
    """For people."""
    table = Table(title=census.code, title_justify="left")
    for column, justify in (("instruction", "left"), ("PTX", "left"), ("expected", "right"), ("SASS", "right"), ("rules", "left")):
        table.add_column(column, justify="right" if justify == "right" else "left")
    for row in census.rows:
        counted = ", ".join(f"{number} {name}" for name, number in row.ptx.items())
        table.add_row(
            row.what, counted, str(row.expected), str(row.sass), ", ".join(row.rules) if row.judged else "not judged", style=_style(row)
        )
    return table


def _style(row: Row) -> str | None:
    return "bold red" if not row.ok else None if row.judged else "dim"


def to_dict(censuses: Iterable[Census]) -> dict[str, Any]:
    """Plain JSON types."""
    return {"rules": RULES, "without_sass": WITHOUT_SASS, "underived": UNDERIVED, "artifacts": [dataclasses.asdict(c) for c in censuses]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: everything is explained; 1: it is not."""
    parser = argparse.ArgumentParser(prog="verification.census", description="Compare the PTX of every artifact with its SASS.")
    parser.add_argument("--entry", default="", help="only codes whose name contains this")
    parser.add_argument("--artifacts", type=Path, help="artifacts folder (default: this checkout's)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--quiet", action="store_true", help="no tables")
    options = parser.parse_args(arguments)
    manifest = Manifest.load(options.artifacts)
    chosen = [sha for sha, record in sorted(manifest.cubins.items(), key=lambda item: item[1].code) if options.entry in record.code]
    console = Console(width=None if sys.stdout.isatty() else 150)
    if not chosen:
        console.print(f"no artifact's name contains {options.entry!r}; there are: {sorted(r.code for r in manifest.cubins.values())}")
        return 1
    censuses = [census_of(manifest, sha) for sha in chosen]
    for census in censuses:
        if not options.quiet:
            console.print(table_of(census))
        for problem in census.problems:
            console.print(f"PROBLEM {census.code}: {problem}", style="bold red")
    used = {rule for c in censuses for row in c.rows for rule in row.rules} | set(WITHOUT_SASS.values())
    if not options.quiet:
        for name in sorted(used):
            console.print(f"[bold]{name}[/bold]: {RULES[name]}")
    if options.json:
        options.json.write_text(json.dumps(to_dict(censuses), indent=1) + "\n")
    failed = sum(bool(c.problems) for c in censuses)
    open_rows = [row.what for c in censuses for row in c.rows if not row.judged]
    for what in dict.fromkeys(open_rows):
        console.print(f"not judged in {open_rows.count(what)} list kernels: {what} ({UNDERIVED[what]})", highlight=False)
    counts = sum(len(c.rows) for c in censuses) - len(open_rows)
    console.print(f"{len(censuses)} artifacts, {counts} counts, {len(open_rows)} not judged, {failed} artifacts with problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
