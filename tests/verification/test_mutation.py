"""The mutants cover every synchronising instruction, a fixed sample of them is caught, and the reasons for the others hold."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.build import ptx as reader
from kernels.build.ptx import Statement, census, names, read_entry, statements
from megamoe_aot.abi import PARAMETERS
from megamoe_aot.manifest import Entry, Manifest
from verification import mutation
from verification.mutants import Mutant, enumerate_mutants
from verification.mutation import EQUIVALENT, SCENARIOS, SUBJECTS, Reason, Subject, kernel_hash, read_reasons, reason_for, sample
from verification.run import ptx_of

CHEAP = SUBJECTS[1]


@functools.cache
def entry_of(name: str) -> tuple[Entry, str]:
    """The entry and its PTX."""
    manifest = Manifest.load()
    entry = next(entry for entry in manifest.entries if entry.spec.name == name)
    return entry, ptx_of(manifest, entry)


@functools.cache
def mutants_of(name: str) -> list[Mutant]:
    entry, ptx = entry_of(name)
    return enumerate_mutants(ptx, entry.spec)


@functools.cache
def subject() -> Subject:
    """One scenario: an ordinary route."""
    entry, ptx = entry_of(CHEAP)
    return Subject(entry.spec, ptx, SCENARIOS[:1])


# ------------------------------------------------------------------------------------------------------------- Enumeration

ONE_EACH = {
    "proxy fence": "fence.proxy.async",
    "barrier-init fence": "fence.mbarrier_init",
    "tcgen05 fence": "tcgen05.fence",
    "wait::ld": "tcgen05.wait::ld",
    "commit": "tcgen05.commit",
    "MMA": "tcgen05.mma",
    "wait": "mbarrier.try_wait",
    "expect_tx": "mbarrier.arrive.expect_tx",
    "barrier init": "mbarrier.init",
    "named barrier": "bar.sync",
    "warp barrier": "bar.warp.sync",
    "cluster arrive": "barrier.cluster.arrive",
    "cluster wait": "barrier.cluster.wait",
    "dependency wait": "griddepcontrol.wait",
}
"""Category -> the instruction of which each one must be dropped once."""


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_instruction_that_synchronises_is_dropped_once(name: str) -> None:
    _, ptx = entry_of(name)
    found = census(ptx)
    mutants = collections.Counter(mutant.category for mutant in mutants_of(name))
    for category, opcode in ONE_EACH.items():
        assert mutants[category] == sum(count for full, count in found.items() if re.match(rf"{re.escape(opcode)}(\.|::|$)", full)) > 0, (
            opcode
        )
    waits, inits, expects = (mutants[c] for c in ("wait", "barrier init", "expect_tx"))
    assert mutants["parity"] >= waits and mutants["barrier count"] >= inits and mutants["expect_tx bytes"] == 2 * expects
    assert mutants["descriptor field"] == 4 * 11 and mutants["instruction descriptor"] == 2 * 14
    for category in ("stage index", "TMEM column", "scale index", "row order", "operand swizzle", "barrier address", "early dependents"):
        assert mutants[category] >= 3, category


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_mutant_is_another_program(name: str) -> None:
    _, ptx = entry_of(name)
    lines = ptx.split("\n")
    mutants = mutants_of(name)
    assert len({mutant.id for mutant in mutants}) == len(mutants) == len({(mutant.line, mutant.after) for mutant in mutants})
    for mutant in mutants:
        changed = mutant.apply(ptx).split("\n")
        assert [i for i, (a, b) in enumerate(zip(lines, changed, strict=True), 1) if a != b] == [mutant.line]
        assert " ".join(mutant.after.split()) != " ".join(mutant.before.split())
    for mutant in sample(mutants, 1, 0, seed=1):
        assert statements(mutant.apply(ptx)) != statements(ptx)
    with pytest.raises(ValueError, match=f"line {mutants[0].line} is"):
        dataclasses.replace(mutants[0], before="nop;").apply(ptx)


def test_the_sample_is_seeded_and_covers_every_category() -> None:
    mutants = mutants_of(CHEAP)
    chosen = sample(mutants, 3, 0, seed=0)
    sizes = collections.Counter(mutant.category for mutant in mutants)
    assert collections.Counter(mutant.category for mutant in chosen) == {category: min(3, size) for category, size in sizes.items()}
    assert chosen == sample(mutants, 3, 0, seed=0) != sample(mutants, 3, 0, seed=1) and len(chosen) >= 80
    assert set(chosen) < set(sample(mutants, 3, 25, seed=0)) and len(sample(mutants, 3, 25, seed=0)) == len(chosen) + 25


# ---------------------------------------------------------------------------------------------------------- A sample of mutants

CAUGHT = {
    ("proxy fence", 1): "E-PROXY",
    ("barrier-init fence", 1): "E-MBAR-INITFENCE",
    ("commit", 2): "E-DEADLOCK",
    ("expect_tx bytes", 1): "E-DEADLOCK",
    ("tcgen05 fence", 6): "E-T5-ORDER",
    ("descriptor field", 10): "wrong result",
    ("scale index", 20): "wrong result",
    ("TMEM allocation", 9): "E-T5-ALLOC",
}
"""(category, which of its mutants) -> what gives it away."""


@pytest.mark.parametrize(("category", "number"), CAUGHT, ids=lambda part: str(part))
def test_a_broken_kernel_is_caught(category: str, number: int) -> None:
    mutant = next(m for m in mutants_of(CHEAP) if (m.category, m.number) == (category, number))
    caught, scenario = subject().catch(mutant)
    assert CAUGHT[category, number] in caught and scenario == SCENARIOS[0]


def test_the_unbroken_kernel_is_not_caught() -> None:
    _, ptx = entry_of(CHEAP)
    line = ptx.split("\n").index("}")
    harmless = Mutant("none", 1, line + 1, "}", "} // the end", "a comment")
    assert subject().catch(harmless) == ([], None)


LATE = {
    (SUBJECTS[0], "row order 9"): 13,
    (SUBJECTS[1], "TMA coordinate 32"): 13,
    (SUBJECTS[1], "row order 26"): 14,
    (SUBJECTS[0], "warp operation 2"): 15,
}
"""(subject, mutant) -> the scenario that is there for it: no earlier one catches it."""


@pytest.mark.parametrize(("name", "id"), LATE, ids=lambda part: part.split("_")[1] if "_" in part else part)
def test_a_survivor_of_the_ordinary_scenarios_is_caught(name: str, id: str) -> None:
    entry, ptx = entry_of(name)
    mutant = next(m for m in mutants_of(name) if m.id == id)
    caught, _ = Subject(entry.spec, ptx, [SCENARIOS[LATE[name, id]]]).catch(mutant)
    assert "wrong result" in caught


# ------------------------------------------------------------------------------------------------------------------- Survivors


def test_a_reason_is_about_one_edit_of_one_kernel() -> None:
    mutant = mutants_of(CHEAP)[0]
    reason = Reason(CHEAP, "a hash", mutant.id, mutant.before, mutant.change, "", "because")
    reasons = {(CHEAP, mutant.id): reason}
    assert reason_for(CHEAP, "a hash", mutant, reasons) is reason
    assert reason_for(SUBJECTS[0], "a hash", mutant, reasons) is None
    assert reason_for(CHEAP, "another hash", mutant, reasons) is None
    assert reason_for(CHEAP, "a hash", dataclasses.replace(mutant, before="other"), reasons) is None
    assert reason_for(CHEAP, "a hash", dataclasses.replace(mutant, change="other"), reasons) is None


def test_verdicts() -> None:
    row: dict[str, object] = {"caught_by": [], "equivalent": None}
    rows = [row | more for more in ({}, {"equivalent": "x"}, {"caught_by": ["E-RACE"]}, {"caught_by": ["A-CONVERGE"]})]
    assert [mutation.verdict(row) for row in rows] == ["MISSED", "equivalent", "caught", "caught"]
    assert [mutation.only_assumed(row) for row in rows] == [False, False, False, True]
    assert not mutation.only_assumed({"caught_by": ["A-CONVERGE", "wrong result"]})


def test_the_hash_is_of_the_code_alone() -> None:
    _, ptx = entry_of(CHEAP)
    same = "// a comment\n" + ptx.replace(read_entry(ptx).name, "renamed")
    assert kernel_hash(same) == kernel_hash(ptx)
    for mutant in sample(mutants_of(CHEAP), 1, 0, seed=2):
        assert kernel_hash(mutant.apply(ptx)) != kernel_hash(ptx)


def test_two_reasons_for_one_mutant_are_refused(tmp_path: Path) -> None:
    fields = {"id": "wait 1", "before": "", "change": "", "check": "", "why": "because"}
    path = tmp_path / "reasons.json"
    path.write_text(json.dumps([{"subject": CHEAP, "kernel": "", "reasons": [fields, fields]}]))
    with pytest.raises(ValueError, match="two reasons"):
        read_reasons(path)


def test_a_reason_for_a_caught_mutant_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _, ptx = entry_of(CHEAP)
    mutants = [next(m for m in mutants_of(CHEAP) if m.id == id) for id in ("MMA 1", "wait 1")]
    reasons = {(CHEAP, m.id): Reason(CHEAP, kernel_hash(ptx), m.id, m.before, m.change, "", "because") for m in mutants}
    monkeypatch.setattr(mutation, "SUBJECTS", (CHEAP,))
    monkeypatch.setattr(mutation, "CAUGHT_SHARE", 0.5)
    monkeypatch.setattr(mutation, "enumerate_mutants", lambda ptx, spec: mutants)
    monkeypatch.setattr(mutation, "work_key", lambda ptx: "work")
    monkeypatch.setattr(mutation, "PROGRESS", tmp_path)
    rows = [
        {"subject": CHEAP, "id": m.id, "category": m.category, "line": m.line, "statement": m.before, "change": m.change, "scenario": None}
        | {"caught_by": caught, "emulator_crash": None, "seconds": 1.0}
        for m, caught in zip(mutants, (["wrong result"], []), strict=True)
    ]
    (tmp_path / "work.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = ["--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(mutation, "read_reasons", lambda: {(CHEAP, "wait 1"): reasons[CHEAP, "wait 1"]})
    assert mutation.main(out) == 0
    monkeypatch.setattr(mutation, "read_reasons", lambda: reasons)
    assert mutation.main(out) == 1 and "caught, although there is a reason why it is equivalent: MMA 1" in capsys.readouterr().out
    monkeypatch.setattr(mutation, "read_reasons", dict)
    assert mutation.main(out) == 1


def reasons_of(name: str) -> list[tuple[Reason, Mutant]]:
    """The reasons for mutants of a subject, each with its mutant."""
    _, ptx = entry_of(name)
    found = []
    for reason in read_reasons(EQUIVALENT).values():
        if reason.subject == name:
            mutant = next((m for m in mutants_of(name) if m.id == reason.id), None)
            about = None if mutant is None else reason_for(name, kernel_hash(ptx), mutant, {(name, reason.id): reason})
            assert mutant is not None and about is reason, f"{EQUIVALENT.name} is stale: {name} {reason.id}"
            found.append((reason, mutant))
    return found


@pytest.mark.parametrize("name", SUBJECTS)
def test_reasons_are_about_mutants_of_the_artifacts(name: str) -> None:
    for reason, _ in reasons_of(name):
        assert len(reason.why) > 40, f"{reason.id}: no reason is given"
    assert {reason.subject for reason in read_reasons(EQUIVALENT).values()} <= set(SUBJECTS)


def test_no_reason_is_for_a_mutant_that_was_caught() -> None:
    header = json.loads(mutation.OUT.read_text())["header"]
    rows = {(row["subject"], row["id"]): row for row in json.loads(mutation.OUT.read_text())["rows"]}
    reasons = [r for r in read_reasons(EQUIVALENT).values() if header.get("kernels", {}).get(r.subject) == r.kernel]
    if not reasons:
        pytest.skip(f"{mutation.OUT.name} is about other kernels")
    for reason in reasons:
        assert mutation.verdict(rows[reason.subject, reason.id]) == "equivalent", f"{reason.subject} {reason.id}"


# ----------------------------------------------------------------------------------------------- Reasons that can be evaluated

Numbers = NDArray[np.uint64]
FLAGS = (0, 1, 2, 3, 0xFFFFFFFF)
ANYTHING = (0, 1, 287)
"""Stands for what a load or a shuffle gives: an expert, in the statements that the checks are about."""
ROUTES = (0, 13, 127)
SHAPE = (len(FLAGS), len(ANYTHING), len(ROUTES), 16, 192)
"""flags, anything, route, CTA, thread: whatever the integer statements of a kernel depend on."""
_ARITHMETIC = ("mov", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "not", "neg", "selp", "setp", "cvt", "cvta")
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def axis(values: Iterable[int], at: int) -> Numbers:
    """The values along one axis of SHAPE."""
    column = np.array(list(values), np.uint64)
    return np.broadcast_to(column.reshape([-1 if i == at else 1 for i in range(len(SHAPE))]), SHAPE)


class Values:
    """The integer registers of a kernel, for all its threads at once.

    A register that several statements set has an arbitrary value, another one if it is ``affected``.
    """

    def __init__(self, entry: reader.Entry, affected: Iterable[str] = ()) -> None:
        self.entry, self.affected = entry, frozenset(affected)
        self.known: dict[str, Numbers] = {
            "%tid.x": axis(range(192), 4),
            "%cluster_ctarank": axis(range(16), 3),
            "%clusterid.x": axis(ROUTES, 2),
            "__dynamic_shmem__0": axis([1024], 4),
        }

    def __getitem__(self, operand: str) -> Numbers:
        if re.fullmatch(r"-?\d+", operand):
            return axis([int(operand) % 2**64], 4)
        if operand not in self.known:
            definitions = self.entry.definitions[operand]
            if len(definitions) > 1:
                self.known[operand] = axis([zlib.crc32(f"{operand} {operand in self.affected}".encode())], 4)
            else:
                self.known[operand] = np.broadcast_to(self._result(definitions[0]), SHAPE)
        return self.known[operand]

    def _result(self, s: Statement) -> Numbers:
        assert s.guard is None, s
        if s.matches("ld.param"):
            number = int(re.search(r"_param_(\d+)", s.operands[1])[1])  # type: ignore[index]
            return axis(FLAGS if PARAMETERS[number].name == "flags" else [0], 0)
        if s.matches("shfl.sync.idx") and s.operands[2] == "0":
            return np.repeat(self[s.operands[1]][..., ::32], 32, axis=-1)
        if s.parts[0] not in _ARITHMETIC:
            return axis(ANYTHING, 1)
        result = self._arithmetic(s, *(self[operand] for operand in s.operands[1:]))
        kind = s.parts[1] if s.parts[0] == "cvt" else s.parts[-1]
        width = 1 if "setp" in s.parts or kind == "pred" else int(kind[1:]) * (2 if "wide" in s.parts else 1)
        return result & np.uint64(2**width - 1)

    def _arithmetic(self, s: Statement, a: Numbers, b: Any = None, c: Any = None) -> Numbers:
        low = np.uint64(2 ** int(s.parts[-1][1:]) - 1) if s.parts[-1][1:].isdigit() else np.uint64(1)
        match s.parts[0]:
            case "mov" | "cvt" | "cvta":
                return a & low
            case "add":
                return a + b
            case "sub":
                return a - b
            case "neg":
                return np.uint64(0) - a
            case "mul" | "mad":
                product = (a & low) * (b & low)
                return product >> np.uint64(32) if "hi" in s.parts else product if c is None else product + c
            case "shl":
                return a << b
            case "shr" if not s.parts[1].startswith("s"):
                return (a & low) >> b
            case "and":
                return a & b
            case "or":
                return a | b
            case "xor":
                return a ^ b
            case "not":
                return ~a
            case "selp":
                return np.where(c.astype(bool), a, b)
            case "setp" if s.parts[2][0] in "bu":
                return _COMPARE[s.parts[1]](a & low, b & low).astype(np.uint64)
        raise NotImplementedError(str(s))


def uses(entry: reader.Entry, s: Statement) -> list[Statement]:
    """The statements that may read what ``s`` writes."""
    (register,) = s.written
    found, seen, todo = [], set(), entry.successors(s.index)
    while todo:
        index = todo.pop()
        if index in seen:
            continue
        seen.add(index)
        user = entry.statements[index]
        if (user.guard or "").lstrip("!") == register or any(register in names(o) for o in user.operands if o not in user.written):
            found.append(user)
        if register not in user.written or user.guard:
            todo += entry.successors(index)
    return found


def affected(entry: reader.Entry, edited: Statement, until: Iterable[str]) -> tuple[set[str], list[Statement]]:
    """(registers that an edit of ``edited`` can change, ``until`` left out; what else than arithmetic reads them)."""
    registers: set[str] = set()
    others: list[Statement] = []
    done: set[int] = set()
    todo = [edited]
    while todo:
        s = todo.pop()
        if s.index in done or set(s.written) <= set(until):
            continue
        done.add(s.index)
        registers |= set(s.written)
        for user in uses(entry, s):
            if user.parts[0] in _ARITHMETIC and user.guard is None and len(user.written) == 1:
                todo.append(user)
            else:
                others.append(user)
    return registers, others


def edited_statement(entry: reader.Entry, mutant: Mutant) -> Statement:
    (found,) = (s for s in entry.statements if s.line == mutant.line)
    return found


def both(name: str, mutant: Mutant, registers: Iterable[str] = ()) -> tuple[Values, Values]:
    """Values before and after the edit."""
    _, ptx = entry_of(name)
    return Values(read_entry(ptx)), Values(read_entry(mutant.apply(ptx)), registers)


def check_same(name: str, mutant: Mutant, *registers: str) -> None:
    """These registers have the same values with and without the edit, and it has no effect but through them."""
    entry = read_entry(entry_of(name)[1])
    touched, others = affected(entry, edited_statement(entry, mutant), registers)
    assert not others, f"the edit also reaches {others[0]}"
    before, after = both(name, mutant, touched)
    for register in registers:
        np.testing.assert_array_equal(before[register], after[register], register)


def check_lanes(name: str, mutant: Mutant, *registers: str) -> None:
    """Lanes whose numbers are equal modulo 8 hold the same in these registers, and the predicate chooses lanes 0 to 7."""
    entry = read_entry(entry_of(name)[1])
    values = Values(entry)
    for register in registers:
        eights = values[register].reshape(*SHAPE[:-1], 6, 4, 8)
        assert (eights == eights[..., :1, :]).all(), register
    (store,) = (s for s in entry.statements if s.line == mutant.line)
    assert store.guard and (values[store.guard] == (axis(range(192), 4) % 32 < 8)).all()


def check_unread(name: str, mutant: Mutant, load: str, first: str) -> None:
    """Of the tcgen05.ld with this number, no register from column ``first`` on is read."""
    entry = read_entry(entry_of(name)[1])
    columns = names(entry.find("tcgen05.ld")[int(load)].operands[0])
    assert len(columns) == 16 and mutant.category == "descriptor address"
    unread = set(columns[int(first) :])
    read = {name for s in entry.statements for operand in s.sources for name in names(operand)}
    assert unread and not unread & read and read >= set(columns[:4])


def check_discarded(name: str, mutant: Mutant, *pairs: str) -> None:
    """register, predicate, ...: where the edit changes the register, the predicate (of the only store of what depends on it) is false."""
    before, after = both(name, mutant)
    for register, predicate in zip(pairs[::2], pairs[1::2], strict=True):
        changed = before[register] != after[register]
        assert changed.any() and not before[predicate][changed].any(), register
        assert set(np.unique(after[register][changed])) == {1}


CHECKS: dict[str, Callable[..., None]] = {"same": check_same, "lanes": check_lanes, "unread": check_unread, "discarded": check_discarded}
CHECKED = [(reason.subject, reason.id) for reason in read_reasons(EQUIVALENT).values() if reason.check]


@pytest.mark.parametrize(("name", "id"), CHECKED, ids=lambda part: part.split("_")[1] if "_" in part else part)
def test_what_a_reason_says_can_be_evaluated(name: str, id: str) -> None:
    reason, mutant = next((reason, mutant) for reason, mutant in reasons_of(name) if reason.id == id)
    kind, *operands = reason.check.split()
    CHECKS[kind](name, mutant, *operands)


def test_the_checks_can_fail() -> None:
    name = SUBJECTS[0]
    by_id = {mutant.id: mutant for mutant in mutants_of(name)}
    shifted = next(mutant for mutant in mutants_of(name) if mutant.before.startswith("shr.u32 \t%r783"))
    with pytest.raises(AssertionError, match="%r784"):  # a mutant that is caught
        check_same(name, shifted, "%r784")
    with pytest.raises(AssertionError, match="also reaches line"):
        check_same(name, by_id["scale index 20"], "%r794")
    with pytest.raises(AssertionError, match="%r2"):  # the lane's number
        check_lanes(name, by_id["predicated access 43"], "%r2")
    with pytest.raises(AssertionError):  # GEMM1 has 16 K blocks: all its columns are read
        check_unread(name, by_id["descriptor address 34"], "0", "8")
    with pytest.raises(AssertionError, match="%r720"):  # lane < 8
        check_discarded(name, by_id["scale index 3"], "%r720", "%p109")
