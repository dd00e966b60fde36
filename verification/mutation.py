"""Break the shipped Blackwell PTX in every mechanical way, one edit at a time, and see that the emulator notices.

    python -m verification mutation [--per-category N] [--extra N] [--seed S] [--jobs N] [--fresh] [--out FILE]

Every mutant of each subject (:mod:`verification.mutants`) is run, or with ``--extra N`` a seeded sample: ``--per-category`` of every
category (all of a smaller one) and N of the rest. A mutant meets the subject's scenarios, one route each, until something shows:
another result than the unbroken kernel's (out, ids or weights, also bytes that the route does not own), a sanitizer finding that the
unbroken kernel does not have, a deadlock, or PTX that cannot be. What survives every scenario must be listed in
``equivalent_mutants.json`` with the reason why nothing could tell it from the original. The reasons are about one kernel: with another
one in its place none of them counts.

Work done is kept in ``build/mutation/``, so that an interrupted run goes on; it counts only for the same PTX and the same emulator. Exit
status 1 where less than 95 % of the sample is caught, a survivor has no reason, or a reason is given for a mutant that is caught.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.expected import Call
from benchmarks.report import write_json
from emulator import Limits, PtxError
from kernels.build.ptx import read_entry
from megamoe_aot.abi import FLAG_GATE_FIRST
from megamoe_aot.manifest import Manifest
from megamoe_aot.spec import KernelSpec

from . import results
from .mutants import Mutant, enumerate_mutants
from .problem import EmulatedCall, Outcome
from .run import console_for_tables, ptx_of

OUT = results.FOLDER / "mutation.json"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
PROGRESS = results.ROOT / "build" / "mutation"
CAUGHT_SHARE = 0.95
PER_CATEGORY = 3
PATIENCE = 4
"""A mutant may execute this many times the unbroken kernel's instructions before it counts as a livelock."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A call of which one route is run, and how it is scheduled."""

    call: Call
    route: int
    policy: str = "random"
    seed: int = 0
    flags: int = 0
    """Flag bits beside the entry's own. What the unbroken kernel makes of them is what a mutant must make of them."""


SCENARIOS = (
    Scenario(Call(2, 0), 11),
    Scenario(Call(1, 0, "all_ties"), 0),
    Scenario(Call(2, 1, changes=(("limit", 0.5), ("scale", 0.3), ("ue8m0", True))), 6),
    Scenario(Call(1, 0, "some_nan_logits"), 7),
    Scenario(Call(1, 0, "nan_token"), 2),
    Scenario(Call(1, 0, "underflow"), 1),
    Scenario(Call(1, 2), 4, flags=FLAG_GATE_FIRST),
    Scenario(Call(1, 3), 5),
    Scenario(Call(1, 4), 6),
    Scenario(Call(2, 0), 12, "async-last", 1),
    Scenario(Call(2, 0), 3, "starve-cta", 2),
    Scenario(Call(2, 0), 8, "async-first", 3),
    Scenario(Call(2, 0), 15, "starve-warp", 4),
    Scenario(Call(1, 41, changes=(("w13_order", "up_gate"),)), 2),
    Scenario(Call(1, 559, "some_nan_logits"), 4),
    Scenario(Call(1, 7, "inf_logits"), 3),
)
"""In the order in which a mutant meets them: an ordinary route, every branch of the kernel, more tokens to route, other schedules.

The last three are for single survivors of the others: best experts in lanes 16 to 19 of the routing warp, and no FLAG_GATE_FIRST;
15 candidates, of which some beyond the twelfth are chosen; the serial rounds with unequal keys.
"""

SUBJECTS = (
    "moe_h4096_i512_e288_k8_sigmoid_bias_trtllm_gen_bf16_sm_100f",
    "moe_h2048_i768_e128_k8_softmax_row_major_fp32_sm_100f_gate_up",
)
"""Entries that are mutated: the lead, and one whose layout, row order, scoring, logits and work split (K parts, units, tiles) differ."""


# ------------------------------------------------------------------------------------------------------------------ One mutant


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What the unbroken kernel does in a scenario."""

    scenario: Scenario
    call: EmulatedCall
    outcome: Outcome
    findings: frozenset[str]
    """Ids of its findings, which should be none."""
    limit: int
    """Instructions that a mutant may execute."""


class Subject:
    """One entry's PTX with its baselines. Baselines are made when first asked for; do that before forking."""

    def __init__(self, spec: KernelSpec, ptx: str, scenarios: Sequence[Scenario] = SCENARIOS) -> None:
        self.spec, self.ptx = spec, ptx
        self.scenarios = scenarios
        self._calls: dict[Call, EmulatedCall] = {}
        self._baselines: dict[Scenario, Baseline] = {}

    def baseline(self, scenario: Scenario) -> Baseline:
        """Raises RuntimeError where the unbroken kernel has errors."""
        if scenario not in self._baselines:
            call = self._calls.setdefault(scenario.call, EmulatedCall(self.spec, scenario.call))
            outcome = _emulate(call, self.ptx, scenario, Limits())
            if not outcome.result.ok:
                raise RuntimeError(f"{self.spec.name} has errors without any mutation:\n{outcome.result.report()}")
            executed = sum(counter.total() for counter in outcome.result.counts.instructions.values())
            self._baselines[scenario] = Baseline(scenario, call, outcome, finding_ids(outcome), PATIENCE * executed)
        return self._baselines[scenario]

    def catch(self, mutant: Mutant) -> tuple[list[str], Scenario | None]:
        """(what gave the mutant away, in which scenario); nothing and None for a survivor."""
        ptx = mutant.apply(self.ptx)
        for scenario in self.scenarios:
            baseline = self.baseline(scenario)
            try:
                outcome = _emulate(baseline.call, ptx, scenario, Limits(instructions=baseline.limit))
            except PtxError as error:
                return [f"decode error: {error}"], scenario
            caught = sorted(finding_ids(outcome) - baseline.findings)
            if not same_outputs(outcome, baseline.outcome):
                caught.append("wrong result")
            if caught:
                return caught, scenario
        return [], None


def _emulate(call: EmulatedCall, ptx: str, scenario: Scenario, limits: Limits) -> Outcome:
    return call.emulate(ptx, [scenario.route], seed=scenario.seed, policy=scenario.policy, flags=scenario.flags, limits=limits)


def finding_ids(outcome: Outcome) -> frozenset[str]:
    """What ``verification run`` would fail on."""
    return frozenset(finding.id for finding in outcome.objections)


def same_outputs(left: Outcome, right: Outcome) -> bool:
    """Whether both hold the same bytes everywhere, also where no route wrote."""
    pairs = ((left.out, right.out), (left.ids, right.ids), (left.weights, right.weights))
    return all(np.array_equal(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy()) for a, b in pairs)


# ---------------------------------------------------------------------------------------------------------------- Survivors


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a surviving mutant is equivalent to the original."""

    subject: str
    kernel: str
    """:func:`kernel_hash` of the kernel that the reason is about: it says nothing about another one, even where the statement is there."""
    id: str
    before: str
    """The statement that the mutant edits."""
    change: str
    check: str
    """What the tests evaluate of it, a kind and its operands (see tests/verification/test_mutation.py); empty: it rests on reading."""
    why: str


def kernel_hash(ptx: str) -> str:
    """Of the one kernel of a PTX text, without its name, comments and line numbers."""
    entry = read_entry(ptx)
    lines = [f"{entry.block} {entry.min_ctas}"]
    lines += [f"{' '.join(s.labels)} {s.guard} {s.opcode} {', '.join(s.operands)}" for s in entry.statements]
    return hashlib.sha256("\n".join(lines).replace(entry.name, "kernel").encode()).hexdigest()


def read_reasons(path: Path = EQUIVALENT) -> dict[tuple[str, str], Reason]:
    """(subject, mutant id) -> reason. The file groups them: a list of {subject, kernel, reasons: a list of the other fields}."""
    reasons = [
        Reason(subject=group["subject"], kernel=group["kernel"], **fields)
        for group in json.loads(path.read_text())
        for fields in group["reasons"]
    ]
    found = {(reason.subject, reason.id): reason for reason in reasons}
    if len(found) != len(reasons):
        raise ValueError(f"{path.name} has two reasons for one mutant")
    return found


def reason_for(subject: str, kernel: str, mutant: Mutant, reasons: dict[tuple[str, str], Reason]) -> Reason | None:
    """The reason for a survivor, if there is one and it is about this very edit of this very kernel."""
    reason = reasons.get((subject, mutant.id))
    if reason and (reason.kernel, reason.before, reason.change) == (kernel, mutant.before, mutant.change):
        return reason
    return None


# ------------------------------------------------------------------------------------------------------------------- The sample


def sample(mutants: Sequence[Mutant], per_category: int, extra: int | None, seed: int) -> list[Mutant]:
    """``per_category`` mutants of every category, all of a smaller one, and ``extra`` of the rest (None: all)."""
    if extra is None:
        return list(mutants)
    rng = random.Random(seed)
    by_category: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_category.setdefault(mutant.category, []).append(mutant)
    chosen = {m.id for of_one in by_category.values() for m in rng.sample(of_one, min(per_category, len(of_one)))}
    rest = [m for m in mutants if m.id not in chosen]
    chosen |= {m.id for m in rng.sample(rest, min(extra, len(rest)))}
    return [m for m in mutants if m.id in chosen]


def work_key(ptx: str) -> str:
    """Names the work that may be kept: a hash of the PTX, the emulator and the mutation rules."""
    hasher = hashlib.sha256(ptx.encode())
    for path in sorted([*(results.ROOT / "emulator").rglob("*.py"), Path(__file__), Path(__file__).with_name("mutants.py")]):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:16]


_subject: Subject | None = None
"""Of the worker processes: inherited through fork."""


def _run(mutant: Mutant) -> dict[str, Any]:
    assert _subject is not None
    start = time.perf_counter()
    try:
        caught, scenario = _subject.catch(mutant)
        crash = None
    except Exception as error:  # a crash of the emulator is not a catch, and must not end the run
        caught, scenario, crash = [], None, f"{type(error).__name__}: {error}"
    return {
        "subject": _subject.spec.name,
        "id": mutant.id,
        "category": mutant.category,
        "line": mutant.line,
        "statement": mutant.before,
        "change": mutant.change,
        "caught_by": caught,
        "scenario": None if scenario is None else dataclasses.asdict(scenario),
        "emulator_crash": crash,
        "seconds": round(time.perf_counter() - start, 2),
    }


def run_subject(subject: Subject, mutants: Iterable[Mutant], jobs: int, kept: Path | None) -> Iterator[dict[str, Any]]:
    """Rows of all mutants, those of an earlier run first. ``kept``: file of finished rows, one JSON object a line."""
    global _subject
    done: dict[str, dict[str, Any]] = {}
    if kept and kept.exists():
        done = {row["id"]: row for row in map(json.loads, kept.read_text().splitlines())}
    mutants = list(mutants)
    yield from (done[m.id] for m in mutants if m.id in done)
    left = [m for m in mutants if m.id not in done]
    if not left:
        return
    for scenario in subject.scenarios:
        subject.baseline(scenario)
    _subject = subject
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for row in pool.imap_unordered(_run, left):
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            yield row


# ----------------------------------------------------------------------------------------------------------------------- Output


def verdict(row: dict[str, Any]) -> str:
    """``caught``, ``equivalent`` or ``MISSED``."""
    return "caught" if row["caught_by"] else "equivalent" if row["equivalent"] else "MISSED"


def only_assumed(row: dict[str, Any]) -> bool:
    """Caught by nothing but assumptions: orders that PTX does not promise although no GPU is known to break them."""
    return bool(row["caught_by"]) and all(what.startswith("A-") for what in row["caught_by"])


def summary(rows: Sequence[dict[str, Any]], counts: dict[str, int]) -> Table:
    """Per category: how many mutants there are, how many ran, and what became of them."""
    table = Table("category", "mutants", "sampled", "caught", "equivalent", "missed", "caught by", title="Mutation")
    for category in sorted(counts):
        mine = [row for row in rows if row["category"] == category]
        verdicts = [verdict(row) for row in mine]
        by: dict[str, int] = {}
        for row in mine:
            for what in row["caught_by"]:
                by[what.split(":")[0]] = by.get(what.split(":")[0], 0) + 1
        numbers = (counts[category], len(mine), *(verdicts.count(v) for v in ("caught", "equivalent", "MISSED")))
        table.add_row(
            category, *map(str, numbers), " ".join(f"{what} {n}" for what, n in sorted(by.items(), key=lambda item: -item[1])[:4])
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m verification mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-category", type=int, default=PER_CATEGORY)
    parser.add_argument("--extra", type=int, help="take a sample: this many beyond those, from all categories (default: all mutants)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--fresh", action="store_true", help="forget earlier work")
    parser.add_argument("--out", type=Path, default=OUT, help="results file")
    chosen = parser.parse_args(arguments)
    manifest, console = Manifest.load(), console_for_tables()
    rows: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    kernels: dict[str, str] = {}
    wrong: list[Reason] = []
    reasons = read_reasons()
    for name in SUBJECTS:
        entry = next(entry for entry in manifest.entries if entry.spec.name == name)
        subject = Subject(entry.spec, ptx_of(manifest, entry))
        kernel = kernels[name] = kernel_hash(subject.ptx)
        mutants = enumerate_mutants(subject.ptx, entry.spec)
        for mutant in mutants:
            counts[mutant.category] = counts.get(mutant.category, 0) + 1
        chosen_mutants = {m.id: m for m in sample(mutants, chosen.per_category, chosen.extra, chosen.seed)}
        kept = PROGRESS / f"{work_key(subject.ptx)}.jsonl"
        if chosen.fresh:
            kept.unlink(missing_ok=True)
        console.print(f"{name}: {len(mutants)} mutants, {len(chosen_mutants)} in the sample")
        if stale := [reason for reason in reasons.values() if reason.subject == name and reason.kernel != kernel]:
            console.print(f"{len(stale)} reasons are about another kernel and do not count")
        for row in run_subject(subject, chosen_mutants.values(), chosen.jobs, kept):
            reason = reason_for(name, kernel, chosen_mutants[row["id"]], reasons)
            if reason and row["caught_by"]:
                wrong.append(reason)
                reason = None
            row["equivalent"] = reason.why if reason else None
            row["checked"] = bool(reason and reason.check)
            rows.append(row)
            console.print(_line(row), highlight=False, soft_wrap=True, markup=False)
    rows.sort(key=lambda row: (SUBJECTS.index(row["subject"]), row["category"], row["line"]))
    return report(rows, counts, kernels, wrong, manifest, chosen, console)


def _line(row: dict[str, Any]) -> str:
    what = ", ".join(row["caught_by"]) or row["emulator_crash"] or row["equivalent"] or ""
    return f"{verdict(row):10} {row['id']:26} {row['seconds']:5.1f} s  {what[:70]:70}  {row['change']}: {row['statement'][:100]}"


def report(
    rows: list[dict[str, Any]],
    counts: dict[str, int],
    kernels: dict[str, str],
    wrong: Sequence[Reason],
    manifest: Manifest,
    chosen: argparse.Namespace,
    console: Console,
) -> int:
    """Write the results, print the summary; the exit status. ``wrong``: reasons for mutants that are caught."""
    verdicts = [verdict(row) for row in rows]
    totals = {
        "mutants": sum(counts.values()),
        "sampled": len(rows),
        "caught": verdicts.count("caught"),
        "caught_by_assumptions_only": sum(map(only_assumed, rows)),
        "equivalent": verdicts.count("equivalent"),
        "equivalent_checked": sum(row["checked"] for row in rows),
        "missed": verdicts.count("MISSED"),
        "score": verdicts.count("caught") / len(rows),
    }
    header = results.header(manifest) | {
        "sample": {"seed": chosen.seed, "per_category": chosen.per_category, "extra": chosen.extra},
        "kernels": kernels,
        "categories": dict(sorted(counts.items())),
        "scenarios": [dataclasses.asdict(scenario) for scenario in SCENARIOS],
        **totals,
    }
    write_json(chosen.out, header, rows=rows)
    console.print(summary(rows, counts))
    console.print(
        f"{totals['caught']} of {totals['sampled']} caught ({totals['score']:.1%}; {totals['caught_by_assumptions_only']} by assumptions"
        f" only), {totals['equivalent']} equivalent ({totals['equivalent_checked']} checked by the tests), {totals['missed']} missed",
        soft_wrap=True,
    )
    for reason in wrong:
        console.print(f"caught, although there is a reason why it is equivalent: {reason.id} of {reason.subject}", soft_wrap=True)
    return 0 if totals["score"] >= CAUGHT_SHARE and not totals["missed"] and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
