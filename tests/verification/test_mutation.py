"""The mutants cover every synchronising instruction, a fixed sample of them is caught, and reasons are about existing mutants."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

import pytest

from kernels.build.ptx import census, statements
from megamoe_aot.manifest import Entry, Manifest
from verification import mutation
from verification.mutants import Mutant, enumerate_mutants
from verification.mutation import EQUIVALENT, SCENARIOS, SUBJECTS, Reason, Subject, read_reasons, reason_for, sample
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
    ("tcgen05 fence", 10): "E-T5-ORDER",
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


# ------------------------------------------------------------------------------------------------------------------- Survivors


def test_a_reason_is_about_one_edit() -> None:
    mutant = mutants_of(CHEAP)[0]
    reasons = {(CHEAP, mutant.id): Reason(CHEAP, mutant.id, mutant.before, mutant.change, "because")}
    assert reason_for(CHEAP, mutant, reasons) == "because"
    assert reason_for(SUBJECTS[0], mutant, reasons) is None
    assert reason_for(CHEAP, dataclasses.replace(mutant, before="other"), reasons) is None
    assert reason_for(CHEAP, dataclasses.replace(mutant, change="other"), reasons) is None
    row: dict[str, object] = {"caught_by": [], "equivalent": None}
    assert [mutation.verdict(row | more) for more in ({}, {"equivalent": "x"}, {"caught_by": ["E-RACE"]})] == [
        "MISSED",
        "equivalent",
        "caught",
    ]


def test_reasons_are_about_mutants_of_the_artifacts() -> None:
    for (name, id), reason in read_reasons(EQUIVALENT).items():
        mutant = next((m for m in mutants_of(name) if m.id == id), None)
        assert mutant is not None and reason_for(name, mutant, {(name, id): reason}) == reason.why, (
            f"{EQUIVALENT.name} is stale: {name} {id}"
        )
