"""Programmatic dependent launch, judged on the PTX: nothing that the kernel before us may still write is touched early.

Before ``griddepcontrol.wait`` the predecessor may be running: it may still write our inputs, and still read the buffers
that we write. So no thread may read x, logits or routing results, and none may write global memory, unless it passed the
wait itself. The check follows every path of the control-flow graph and every register that may hold such a pointer; it
errs towards an error.

A kernel lets its successor start early (griddepcontrol.launch_dependents) only where its caller may ask for that (the list structure's
kernels and the finalize kernels), and then only on request: some path must go round it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megamoe_aot.finalize import CodeSpec, FinalizeSpec

from .ptx import Entry, Statement, names

PROTECTED = ("x", "logits", "ids", "weights", "scratch")
"""A MoE kernel's parameters whose memory the predecessor writes: the token inputs, the routing results where these are inputs, and
the scratch of the list structure, which the layer's launches hand on from one to the next."""
FINALIZE_PROTECTED = ("out", "weights", "shared")
"""The same of a finalize kernel: all that it reads."""

_TRIGGER = "griddepcontrol.launch_dependents"
_WAIT = "griddepcontrol.wait"

_WRITERS = ("st", "red", "atom", "cp", "multimem", "tensormap", "sust")
_RESULT_IS_DATA = ("ld", "ldu", "atom", "ldmatrix", "tcgen05.ld", "mbarrier")
"""Instructions whose result is no address derived from their operands."""


def protected_parameters(spec: CodeSpec, entry: Entry) -> dict[str, str]:
    """PTX parameter name -> the ABI's name, for the parameters of ``spec``'s kernel whose memory the predecessor may write."""
    names = FINALIZE_PROTECTED if isinstance(spec, FinalizeSpec) else PROTECTED
    pairs = zip(entry.parameters, spec.parameters, strict=True)
    return {parameter.name: p.name for parameter, p in pairs if p.name in names}


def pdl_problems(entry: Entry, protected: Mapping[str, str], may_trigger: bool = False) -> list[str]:
    """Every breach of the rule, as sentences with PTX lines; empty for a good kernel.

    Args:
        protected: PTX parameter name -> the name to report, see :func:`protected_parameters`.
        may_trigger: the kernel has a launch argument that lets its successor start early.
    """
    if not entry.find(_WAIT):
        return ["the kernel has no griddepcontrol.wait"]
    derived = derivations(entry, protected)
    early = reachable_without(entry, _WAIT)
    problems = []
    if may_trigger and not any(entry.ends(index) for index in reachable_without(entry, _TRIGGER)):
        problems.append(f"every path runs into {_TRIGGER}: the launch argument cannot turn it off")
    for s in entry.statements:
        if s.matches(_TRIGGER) and not may_trigger:
            problems.append(f"{s}: this kernel must not let its successor start early")
        if s.matches("call"):
            problems.append(f"{s}: the check sees one entry only and cannot judge a call")
        if escaped := _escaping(s, derived):
            problems.append(f"{s}: stores a pointer derived from {_listed(escaped)}, whose use can then not be followed")
        if s.index in early:
            if touched := _touched(s, derived):
                problems.append(f"{s}: accesses memory of {_listed(touched)} and can be reached without griddepcontrol.wait")
            elif writes_global(s):
                problems.append(f"{s}: writes global memory and can be reached without griddepcontrol.wait")
    return problems


def reachable_without(entry: Entry, opcode: str) -> set[int]:
    """Statements that some path from the entry reaches before an unconditional ``opcode``."""
    early: set[int] = set()
    pending = [0]
    while pending:
        index = pending.pop()
        statement = entry.statements[index]
        if index in early or (statement.matches(opcode) and statement.guard is None):
            continue
        early.add(index)
        pending += entry.successors(index)
    return early


def derivations(entry: Entry, protected: Mapping[str, str]) -> dict[str, set[str]]:
    """Register -> protected parameters that its value may be computed from, as a pointer.

    Flow-insensitive: once a register may hold such a pointer it counts as one everywhere.
    """
    derived: dict[str, set[str]] = {name: {title} for name, title in protected.items()}
    changed = True
    while changed:
        changed = False
        for s in entry.statements:
            if any(s.matches(opcode) for opcode in _RESULT_IS_DATA) and s.space != "param":
                continue
            origins = _origins(s.sources, derived)
            for register in s.written:
                known = derived.setdefault(register, set())
                changed |= not origins <= known
                known |= origins
    return derived


def writes_global(s: Statement) -> bool:
    """True where the instruction may write global memory; a generic address may be global."""
    if s.parts[0] not in _WRITERS:
        return False
    if s.parts[0] == "cp":
        return s.space == "global" and not s.matches("cp.async.bulk.prefetch")
    return s.space in (None, "global")


def _origins(operands: Collection[str], derived: Mapping[str, set[str]]) -> set[str]:
    return {origin for operand in operands for name in names(operand) for origin in derived.get(name, ())}


def _touched(s: Statement, derived: Mapping[str, set[str]]) -> set[str]:
    """Protected memory that the instruction addresses; reading a parameter itself is no access to what it points to."""
    if s.space == "param":
        return set()
    return _origins([operand for operand in s.operands if operand.startswith("[")], derived)


def _escaping(s: Statement, derived: Mapping[str, set[str]]) -> set[str]:
    if s.parts[0] not in ("st", "red", "atom"):
        return set()
    return _origins([source for source in s.sources if not source.startswith("[")], derived)


def _listed(origins: set[str]) -> str:
    return " and ".join(sorted(origins))
