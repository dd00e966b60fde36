"""Run menu entries in the emulator and compare them with the CPU reference.

    python -m verification run [--entry SUBSTRING] [--arch ARCH] [--tokens M] [--routes 0,3 | --ctas N] [--seeds N] [--policy POLICY]
                               [--hard CASE] [--checks IDS | --no-checks] [--jobs N] [--timeline FILE] [--json FILE]
    python -m verification run --full        # what the project claims; writes benchmarks/results/emulator_runs.json

A cluster entry runs the clusters of some routes. A list entry runs a whole launch on a small grid (--ctas) of co-resident CTAs.

What runs is the PTX beside each cubin, after its sha256 has been found to be the one that the manifest ties to the cubin. The
reference has the engine's own arithmetic: wgmma's 13 bits on Hopper; exact dots on Blackwell, from which the contract's bounds do not
tell tcgen05's 25-bit alignment apart. Exit status 1 if a result is outside these bounds, or if the sanitizer found an error or a place
where the kernel relies on something that PTX does not promise.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.checks import hard_cases
from benchmarks.expected import Call
from benchmarks.report import write_json
from emulator import CATALOGUE, OFF, POLICIES, Checks, Finding
from megamoe_aot import loader
from megamoe_aot.abi import FLAG_TRIGGER
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.menu import LEAD, QWEN3_30B, QWEN35_35B
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import HELPER_WARP, ISSUE_WARP, LIST_WARP, PRODUCER_WARP
from tests.data import BAD_TOKEN

from . import results
from .artifacts import read_ptx
from .list_call import ListCall
from .problem import EmulatedCall, Outcome

_LIST_ROLES = {
    "MMA": (0, 1, 2, 3),
    "hidden": (4, 5, 6, 7),
    "helpers": tuple(range(HELPER_WARP, HELPER_WARP + 4)),
    "producer": (PRODUCER_WARP,),
    "list": (LIST_WARP,),
}
ROLES = {
    ("cluster", "sm_90a"): {"consumers": (0, 1, 2, 3), "producer": (4,)},
    ("cluster", "sm_100f"): {"producer": (0,), "MMA": (1,), "consumers": (2, 3, 4, 5)},
    ("list", "sm_90a"): _LIST_ROLES,
    ("list", "sm_100f"): {**_LIST_ROLES, "issuer": (ISSUE_WARP,)},
}
"""Warp indices of each role, by (structure, arch)."""

CTAS = 6
"""Of a list launch, unless more tokens need more."""

HALF_TILE = "tcgen05.ld reads TMEM cells that nobody wrote"
"""What the sanitizer says (E-UNINIT) of a cluster entry whose W2 tiles have 64 rows, see :func:`tolerated`."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the emulator schedules, and what it checks."""

    policy: str = "random"
    seed: int = 0
    checks: Checks | None = Checks()  # noqa: RUF009  (frozen)
    jobs: int = 1
    flags: int = 0
    """Launch flags beside the entry's own."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One emulated call against the reference."""

    row: dict[str, Any]
    """Plain JSON types; ``ok`` and ``problems`` sum it up."""
    outcome: Outcome


def ptx_of(manifest: Manifest, entry: Entry) -> str:
    """The PTX that the entry's cubin was assembled from, both verified. Raises DamagedArtifactError, ManifestError."""
    loader.check_record(entry, manifest.record(entry))
    manifest.read_cubin(entry.cubin)
    return read_ptx(manifest, entry.cubin)


def verify(call: EmulatedCall, ptx: str, routes: Sequence[int] | None, schedule: Schedule) -> Verdict:
    """Emulate some routes of a call (None: all) and judge them by the contract."""
    start = time.perf_counter()
    outcome = call.emulate(
        ptx, routes, flags=schedule.flags, seed=schedule.seed, policy=schedule.policy, checks=schedule.checks, jobs=schedule.jobs
    )
    seconds = time.perf_counter() - start
    report, share = call.compare(outcome, routes)
    objections = [finding for finding in outcome.objections if not tolerated(call.spec, finding)]
    problems = [report.reason] * (not report.ok) + [str(finding) for finding in objections]
    row = {
        "entry": call.spec.name,
        "tokens": call.call.tokens,
        "input_seed": call.call.seed,
        "case": call.call.case,
        "routes": list(range(call.routes) if routes is None else routes),
        "ctas": call.launch().grid[0],
        "flags": schedule.flags,
        "policy": schedule.policy,
        "schedule_seed": schedule.seed,
        "checks": schedule.checks is not None,
        "ids_equal": report.ids_equal,
        "weights_error": call.weights_error(outcome, routes),
        "relative_error": report.worst_error,
        "helped_routes": report.helped,
        "bits_equal": share,
        "findings": sorted(outcome.result.ids()),
        "tolerated": sorted({finding.id for finding in outcome.objections} - {finding.id for finding in objections}),
        "seconds": round(seconds, 2),
        "ok": not problems,
        "problems": problems,
    }
    return Verdict(row, outcome)


def tolerated(spec: KernelSpec, finding: Finding) -> bool:
    """True for the one finding that is no fault: lanes of TMEM that a Blackwell cluster entry with 64-row W2 tiles reads and ignores.

    An MMA with M = 64 writes 16 of every 32 lanes, a tcgen05.ld of 32 lanes reads them all. That nothing comes of the others is not
    assumed: the emulator fills unwritten TMEM with NaN, and a NaN in ``out`` fails the comparison.
    """
    half_tiles = spec.structure == "cluster" and spec.engine == "blackwell" and spec.split.tile2_rows == 64
    return half_tiles and finding.id == "E-UNINIT" and finding.message == HALF_TILE


def call_of(spec: KernelSpec, call: Call, ctas: int = CTAS) -> EmulatedCall:
    """The call of an entry of either structure; ``ctas``: of a list launch, which has at least as many as tokens."""
    return ListCall(spec, call, max(ctas, call.tokens)) if spec.structure == "list" else EmulatedCall(spec, call)


# ------------------------------------------------------------------------------------------------------------------------ Plans

Job = tuple[Entry, Call, Sequence[int] | None, Schedule]


LIST_MODELS = (LEAD.model, QWEN3_30B.model, QWEN35_35B.model)
"""Of the list entries in the full plan: small shapes, both numbers of K parts, W2 stages of one and of two K blocks."""


def full_plan(manifest: Manifest, jobs: int) -> Iterator[Job]:
    """What the project claims.

    Cluster: every entry on a route of two tokens, those of two models on three; the lead model's first cubin of each arch, whole, under
    five schedules, and on hard inputs. List: the first 8-column entry of three models and each arch, one token, whole; of one model on
    Blackwell also three tokens, with the dependents launched early.
    """
    clusters = [entry for entry in manifest.entries if entry.spec.structure == "cluster"]
    for entry in clusters:
        routes = (0, 5, 15) if entry.model in (LEAD.model, QWEN3_30B.model) else (5,)
        yield entry, Call(2, 0), routes, Schedule(jobs=jobs)
    lead = {e.spec.arch: e for e in reversed(clusters) if e.model == LEAD.model and e.spec.layout == "trtllm_gen"}
    for entry in lead.values():
        for seed, policy in enumerate(("random", "starve-warp", "starve-cta", "async-first", "async-last")):
            yield entry, Call(1, 0), None, Schedule(policy, seed, jobs=jobs)
    for entry in lead.values():
        for case in hard_cases(entry.spec):
            yield entry, Call(2, 0, case), (BAD_TOKEN * entry.spec.top_k, entry.spec.top_k), Schedule(jobs=jobs)
    lists = {(e.model, e.spec.arch): e for e in reversed(manifest.entries) if e.model in LIST_MODELS and e.spec.columns == 8}
    early = Schedule(checks=Checks(dependents_wait=True), flags=FLAG_TRIGGER)
    yield lists[QWEN3_30B.model, "sm_100f"], Call(3, 0), None, early  # the longest first
    for _, entry in sorted(lists.items()):
        yield entry, Call(1, 0), None, Schedule()


def chosen_plan(manifest: Manifest, arguments: argparse.Namespace) -> Iterator[Job]:
    """What the command line asks for; of the list entries those with enough columns."""
    checks = OFF if arguments.no_checks else Checks(frozenset(CATALOGUE) - frozenset(arguments.checks or CATALOGUE))
    routes = None if arguments.routes is None else tuple(arguments.routes)
    for entry in manifest.entries:
        if arguments.entry not in entry.spec.name or arguments.arch not in (None, entry.spec.arch):
            continue
        if entry.spec.structure == "list" and (arguments.tokens > entry.spec.tokens or routes is not None):
            continue
        known = hard_cases(entry.spec)
        cases = known if arguments.hard == "all" else [arguments.hard] if arguments.hard in known else []
        for case in cases if arguments.hard else [""]:
            for seed in range(arguments.seeds):
                yield (
                    entry,
                    Call(arguments.tokens, arguments.input_seed, case),
                    routes,
                    Schedule(arguments.policy, seed, checks, arguments.jobs),
                )


def without_routes(manifest: Manifest, arguments: argparse.Namespace) -> int:
    """How many list entries the command line names but leaves out, because it chooses routes."""
    fits = [e for e in manifest.entries if arguments.entry in e.spec.name and arguments.arch in (None, e.spec.arch)]
    return sum(e.spec.structure == "list" for e in fits) if arguments.routes is not None else 0


def carry_out(manifest: Manifest, plan: Sequence[Job], console: Console, ctas: int = CTAS, jobs: int = 1) -> Iterator[Verdict]:
    """Run a plan, line by line. What cannot be split, a list launch or a single route, comes last: ``jobs`` such runs at a time."""
    whole = [job for job in plan if jobs > 1 and (job[0].spec.structure == "list" or (job[2] is not None and len(job[2]) == 1))]
    if len(whole) < 2:
        whole = []
    last: EmulatedCall | None = None
    for entry, call, routes, schedule in (job for job in plan if job not in whole):
        if last is None or (last.entry_spec, last.call) != (entry.spec, call):  # entries keep their call's data from job to job
            last = call_of(entry.spec, call, ctas)
        verdict = verify(last, ptx_of(manifest, entry), routes, schedule)
        console.print(_line(verdict.row), highlight=False, soft_wrap=True)
        yield verdict
    if whole:
        spawn = multiprocessing.get_context("spawn")  # a forked process must not enter torch's thread pool
        with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for verdict in pool.map(functools.partial(_alone, manifest.folder, ctas), whole):
                console.print(_line(verdict.row), highlight=False, soft_wrap=True)
                yield verdict


def _alone(folder: Path, ctas: int, job: Job) -> Verdict:
    """One job, in a process of a pool."""
    entry, call, routes, schedule = job
    ptx = ptx_of(Manifest.load(folder), entry)
    return verify(call_of(entry.spec, call, ctas), ptx, routes, dataclasses.replace(schedule, jobs=1))


def _line(row: dict[str, Any]) -> str:
    what = f"{row['entry']} M={row['tokens']} {row['case']} {row['policy']}/{row['schedule_seed']}"
    return f"{'ok    ' if row['ok'] else 'FAILED'} {what}: {row['seconds']} s"


# ----------------------------------------------------------------------------------------------------------------------- Output

_COLUMNS = ("entry", "case", "schedule", "routes", "ids equal", "weights", "worst route", "same bits", "findings", "s", "ok")


def console_for_tables() -> Console:
    """The terminal, or 160 columns where the output goes elsewhere."""
    return Console(width=None if sys.stdout.isatty() else 160)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people. ``weights`` and ``worst route`` are relative errors."""
    shown = Table(title="Emulator against the reference")
    for column in _COLUMNS:
        shown.add_column(column, overflow="fold", min_width=36 if column == "entry" else None)
    for row in rows:
        shown.add_row(
            row["entry"],
            row["case"],
            f"{row['policy']}/{row['schedule_seed']}" + ("" if row["checks"] else " unchecked"),
            str(len(row["routes"])),
            "yes" if row["ids_equal"] else "NO",
            f"{row['weights_error']:.1e}",
            f"{row['relative_error']:.1e}",
            f"{row['bits_equal']:.2%}",
            " ".join(f"({name})" if name in row["tolerated"] else name for name in row["findings"]) or "none",
            f"{row['seconds']:.1f}",
            "ok" if row["ok"] else "FAILED",
        )
    return shown


def report(rows: Sequence[dict[str, Any]], console: Console) -> int:
    """Print failures and the table; the exit status."""
    failed = [row for row in rows if not row["ok"]]
    for row in failed:
        console.print(f"FAILED {_line(row)}", *row["problems"][:8], sep="\n    ", highlight=False, soft_wrap=True)
    console.print(table(rows))
    console.print(f"{len(rows)} runs, {sum(len(row['routes']) for row in rows)} routes: {len(failed)} failed")
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("python -m verification run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--full", action="store_true", help="the whole plan; the options that choose a run do not apply")
    made.add_argument("--entry", default="", help="entries whose name contains this")
    made.add_argument("--arch", choices=("sm_90a", "sm_100f"))
    made.add_argument("--tokens", type=int, default=1, help="M (default 1)")
    made.add_argument(
        "--routes", type=_numbers, help="clusters to run: token * K + rank, separated by commas (default: all); list entries have none"
    )
    made.add_argument("--ctas", type=int, default=CTAS, help=f"grid of a list entry's launch, at least M (default {CTAS})")
    made.add_argument("--input-seed", type=int, default=0)
    made.add_argument("--seeds", type=int, default=1, help="how many scheduler seeds")
    made.add_argument("--policy", choices=POLICIES, default="random")
    made.add_argument("--hard", metavar="CASE", default="", help="a name in tests.data.HARD_INPUTS, or all")
    checks = made.add_mutually_exclusive_group()
    checks.add_argument("--checks", type=lambda text: text.split(","), metavar="IDS", help="only these sanitizer checks (default: all)")
    checks.add_argument("--no-checks", action="store_true", help="without the sanitizer: faster")
    made.add_argument("--jobs", type=int, default=1, help="processes")
    made.add_argument("--timeline", type=Path, metavar="FILE.svg", help="picture of the first cluster of the first run")
    made.add_argument("--json", type=Path, metavar="FILE", help="results file")
    made.add_argument("--artifacts", type=Path, metavar="FOLDER", help="default: the installed or the checkout's")
    return made


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    made = parser()
    chosen = made.parse_args(arguments)
    manifest, console = Manifest.load(chosen.artifacts), console_for_tables()
    if chosen.checks and (unknown := sorted(set(chosen.checks) - CATALOGUE.keys())):
        made.error(f"unknown checks {unknown}; known: {' '.join(CATALOGUE)}")
    if chosen.ctas < 1:
        made.error("--ctas must be at least 1")
    if not chosen.full and (left_out := without_routes(manifest, chosen)):
        console.print(f"{left_out} list entries are left out: --routes does not apply to them, their launches run whole", highlight=False)
    plan = list(full_plan(manifest, chosen.jobs) if chosen.full else chosen_plan(manifest, chosen))
    if not plan:
        made.error(f"no entry fits --entry {chosen.entry!r} --arch {chosen.arch} --hard {chosen.hard!r} --tokens {chosen.tokens}")
    path = chosen.json or (results.FOLDER / "emulator_runs.json" if chosen.full else None)
    header = results.header(manifest)
    rows: list[dict[str, Any]] = []
    for verdict in carry_out(manifest, plan, console, chosen.ctas, chosen.jobs):
        if chosen.timeline and not rows:
            next(iter(verdict.outcome.result.timelines.values())).save_svg(chosen.timeline)
            console.print(f"timeline of the first cluster: {chosen.timeline}")
        rows.append(verdict.row)
        if path:
            write_json(path, header, rows=rows)
    if len(plan) == 1:
        console.print(verdict.outcome.result.counts.table(dict(ROLES[plan[0][0].spec.structure, plan[0][0].spec.arch])), highlight=False)
    return report(rows, console)


if __name__ == "__main__":
    sys.exit(main())
