"""Programmatic dependent launch, judged on the PTX: nothing that the kernel before us may still write is touched early.

Before ``griddepcontrol.wait`` the predecessor may be running: it may still write our inputs, and still read the buffers
that we write. So no thread may read x, logits or routing results, and none may write global memory, unless it passed the
wait itself. The check follows every path of the control-flow graph and every register that may hold such a pointer; it
errs towards an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megamoe_aot.abi import PARAMETERS

from .ptx import Entry, Statement, names

PROTECTED = ("x", "logits", "ids", "weights")
"""Parameters whose memory the predecessor writes: the token inputs, and the routing results where these are inputs."""

_WRITERS = ("st", "red", "atom", "cp", "multimem", "tensormap", "sust")
_RESULT_IS_DATA = ("ld", "ldu", "atom", "ldmatrix", "tcgen05.ld", "mbarrier")
"""Instructions whose result is no address derived from their operands."""


def pdl_problems(entry: Entry, protected: Mapping[str, str] | None = None) -> list[str]:
    """Every breach of the rule, as sentences with PTX lines; empty for a good kernel.

    ``protected``: PTX parameter name -> the name to report; by default the :data:`PROTECTED` parameters of the ABI.
    """
    if protected is None:
        pairs = zip(entry.parameters, PARAMETERS, strict=True)
        protected = {parameter.name: p.name for parameter, p in pairs if p.name in PROTECTED}
    if not entry.find("griddepcontrol.wait"):
        return ["the kernel has no griddepcontrol.wait"]
    derived = derivations(entry, protected)
    early = reachable_without_wait(entry)
    problems = []
    for s in entry.statements:
        if s.matches("griddepcontrol.launch_dependents"):
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


def reachable_without_wait(entry: Entry) -> set[int]:
    """Statements that some path from the entry reaches before an unconditional ``griddepcontrol.wait``."""
    early: set[int] = set()
    pending = [0]
    while pending:
        index = pending.pop()
        statement = entry.statements[index]
        if index in early or (statement.matches("griddepcontrol.wait") and statement.guard is None):
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
