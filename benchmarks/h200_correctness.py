"""Every entry of the menu that this GPU can run, against the reference and against itself.

    python -m benchmarks.h200_correctness [--quick] [--out FOLDER] [--commit HASH] [--entry REGEX]

Run it from the repository root. Writes ``h200_correctness.json``, prints a table, exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import functools
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch

from megamoe_aot.arch import runs_on
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.menu import TOKEN_COUNTS
from megamoe_aot.spec import KernelSpec
from megamoe_aot.weights import Packed

from . import checks, cuda_checks, environment, report
from .checks import Problems, Subject
from .expected import Call, Oracle, reference_pool

FILE_NAME = "h200_correctness.json"
ROW_COLUMNS = ("entry", "tokens", "relative_error", "worst_route", "ids_equal", "repeats_equal", "graph_equal", "batch_invariant", "ok")
GRAPH_SEEDS = (0, 1, 2)
HANG_SECONDS = 540
"""A kernel that never ends must not cost the results so far: they are on disk after every entry."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is tried."""

    tokens: Sequence[int]
    seeds: Sequence[int]
    repeats: int


FULL = Plan(TOKEN_COUNTS, seeds=(0, 1, 2), repeats=50)
QUICK = Plan((1, 4, 16), seeds=(0,), repeats=10)


class ContextLost(RuntimeError):
    """A kernel has broken the CUDA context: nothing more can run in this process."""


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help=f"folder for {FILE_NAME}")
    parser.add_argument("--commit", help="the commit that is measured, for the header")
    parser.add_argument("--entry", default="", help="only entries in whose name this regular expression is found")
    parser.add_argument("--quick", action="store_true", help="about a minute: one seed, three token counts, ten repeats")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this script launches kernels. The checks themselves are tested without one by tests/test_benchmarks.py")
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)

    manifest = Manifest.load()
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    entries = [e for e in manifest.entries if runs_on(e.spec.arch, capability) and re.search(arguments.entry, e.spec.name)]
    if not entries:
        sys.exit(f"no entry of {manifest.folder} runs on capability {capability} with {arguments.entry!r} in its name")
    plan = QUICK if arguments.quick else FULL
    header = environment.header(device, manifest, arguments.commit) | {"quick": arguments.quick}
    rows: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    pool = reference_pool()
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for entry, subject in subjects(entries, device, pool, plan):
                start = time.perf_counter()
                examine(entry, subject, manifest, plan, rows, others)
                report.write_json(arguments.out / FILE_NAME, header, rows=rows, checks=others)
                print(f"{entry.spec.name}: {time.perf_counter() - start:.1f} s", flush=True)
    except ContextLost as error:
        print(f"stopped: {error}")
    finally:
        pool.shutdown(cancel_futures=True)
        report.write_json(arguments.out / FILE_NAME, header, rows=rows, checks=others)
    finished = {row["entry"] for row in others}
    missing = [entry.spec.name for entry in entries if entry.spec.name not in finished]
    return summarise(rows, others, missing)


def subjects(entries: Sequence[Entry], device: torch.device, pool: Executor, plan: Plan) -> Iterator[tuple[Entry, Subject]]:
    """Each entry loaded and bound, its references under way. Entries of one layout share the weights on the device."""
    oracles: dict[KernelSpec, Oracle] = {}
    for entry in entries:
        if (key := same_arithmetic(entry.spec)) not in oracles:
            oracle = oracles[key] = Oracle(key, pool)
            for call, everything in reference_calls(key, plan):
                oracle.ask(call, everything)

    @functools.lru_cache(maxsize=1)
    def packed(shape: KernelSpec, layout: str, w13_order: str) -> Packed:
        return oracles[shape].weights_problem().packed(layout=layout, w13_order=w13_order, device=device)

    for entry in entries:
        spec = entry.spec
        kernel = cuda_checks.load(spec, device)
        # Both logits dtypes have the same weights: name them by one of the two.
        shape = next(key for key in oracles if key == dataclasses.replace(same_arithmetic(spec), logits_dtype=key.logits_dtype))
        weights = packed(shape, spec.layout, spec.w13_order)
        yield entry, Subject(kernel, weights, oracles[same_arithmetic(spec)], kernel.bind(*weights))


def same_arithmetic(spec: KernelSpec) -> KernelSpec:
    """A spec that stands for all that compute the same: layout and row order say where the weights lie, columns how many tokens fit."""
    same = dataclasses.replace(spec, layout="row_major", w13_order="up_gate")
    return dataclasses.replace(same, columns=16, tokens=16) if spec.structure == "list" else same


def reference_calls(spec: KernelSpec, plan: Plan) -> Iterator[tuple[Call, bool]]:
    """Every call whose reference an entry needs, and whether exact arithmetic and the FP64 model are needed too."""
    for tokens in plan.tokens:
        yield from ((call, True) for call in checks.agreement_calls(tokens, plan.seeds))
    yield from ((checks.option_call(changes), False) for changes in checks.OPTION_CHANGES)
    yield from ((checks.hard_call(case), False) for case in checks.hard_cases(spec))


# ------------------------------------------------------------------------------------------------------------------- One entry


def examine(
    entry: Entry, subject: Subject, manifest: Manifest, plan: Plan, rows: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    """Append the entry's rows and further checks. Raises ContextLost."""
    mine = []
    for tokens in (count for count in plan.tokens if count <= entry.spec.tokens):
        mine.append(row(entry, subject, tokens, plan))
        rows.append(mine[-1])
    for name, check in further_checks(subject, manifest, mine).items():
        problems = attempt(check)
        others.append({"entry": entry.spec.name, "check": name, "ok": not problems, "problems": problems})


def row(entry: Entry, subject: Subject, tokens: int, plan: Plan) -> dict[str, Any]:
    """One line of the results: an entry at one token count."""
    spec = entry.spec
    figures: dict[str, Any] = {}

    def agree() -> Problems:
        figures.update(checks.agreement(subject, tokens, plan.seeds))
        return figures.pop("problems")

    problems = attempt(agree)
    inputs = subject.inputs(Call(tokens, 0))
    equal = {
        "repeats_equal": attempt(lambda: checks.repeats(subject.layer, inputs, plan.repeats)),
        "graph_equal": attempt(lambda: cuda_checks.graph(subject.layer, [subject.inputs(Call(tokens, seed)) for seed in GRAPH_SEEDS])),
        "batch_invariant": attempt(lambda: checks.batch_invariance(subject.layer, inputs)),
    }
    problems += [problem for found in equal.values() for problem in found]
    return {
        "entry": spec.name,
        "model": f"{entry.model} {entry.parallel}",
        "arch": spec.arch,
        "layout": spec.layout,
        "w13_order": spec.w13_order,
        "logits_dtype": spec.logits_dtype,
        "tokens": tokens,
        "seeds": list(plan.seeds),
        "repeats": plan.repeats,
        **figures,
        **{name: not found for name, found in equal.items()},
        "ok": not problems,
        "problems": problems,
    }


def further_checks(subject: Subject, manifest: Manifest, rows: Sequence[dict[str, Any]]) -> dict[str, Callable[[], Problems]]:
    """Name -> check, in the order in which they run: what may break the context comes last."""
    spec, layer = subject.spec, subject.layer
    three = subject.inputs(Call(3, 0))
    named: dict[str, Callable[[], Problems]] = {
        "unaided share": lambda: checks.unaided_share([row for row in rows if "routes" in row]),
        "empty batch": lambda: checks.empty_batch(layer, three),
        "view of a batch": lambda: checks.view_of_a_batch(layer, three),
        "launch arguments matter": lambda: checks.options_matter(subject),
        "DLPack": lambda: cuda_checks.dlpack(subject),
        "MegaExperts": lambda: cuda_checks.mega_experts(subject),
        "finalize": lambda: cuda_checks.finalize(subject),
    }
    if spec.structure == "list":
        named["early trigger"] = lambda: cuda_checks.early_trigger(subject)
    for changes in checks.OPTION_CHANGES:
        text = ", ".join(f"{name} {value}" for name, value in changes.items())
        named[f"launch arguments: {text}"] = functools.partial(checks.options, subject, changes)
    for other in (e.spec for e in manifest.entries if spec.layout == "row_major" and is_other_order(e.spec, spec)):
        named["wrong w13 order shows"] = functools.partial(wrong_order_shows, subject, other)
    for case in checks.hard_cases(spec):
        named[f"hard input: {case}"] = functools.partial(checks.hard_input, subject, case)
    return named | {
        "PDL": lambda: cuda_checks.pdl(subject, slow_predecessor(subject.device)),
        "two streams": lambda: cuda_checks.streams(subject),
        "two threads": lambda: cuda_checks.threads(subject),
        "bad calls": lambda: cuda_checks.bad_calls(subject),
        "bad weights": lambda: cuda_checks.bad_weights(subject),
        "bad queries": lambda: cuda_checks.bad_queries(subject),
        "damaged artifacts": lambda: cuda_checks.damaged_artifacts(subject, manifest),
    }


def is_other_order(left: KernelSpec, right: KernelSpec) -> bool:
    """Whether two entries differ in the row order of w13 and nothing else."""
    return left != right and left == dataclasses.replace(right, w13_order=left.w13_order)


def wrong_order_shows(subject: Subject, other: KernelSpec) -> Problems:
    """Bind the weights to the entry of the other order."""
    return checks.wrong_order_shows(subject, cuda_checks.load(other, subject.device))


slow_predecessor = functools.cache(cuda_checks.SlowPredecessor)


def attempt(check: Callable[[], Problems]) -> Problems:
    """The check's problems; an exception is one too. Raises ContextLost where no CUDA call works any more."""
    try:
        return check()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise ContextLost(f"the CUDA context does not survive: {error}\nfirst seen as {problem}") from error
    return [problem]


# --------------------------------------------------------------------------------------------------------------------- Summary


def summarise(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], missing: Sequence[str]) -> int:
    """Print failures, then the tables; the exit status."""
    failed = [line for line in [*rows, *others] if not line["ok"]]
    for line in failed:
        what = line.get("check", f"M = {line.get('tokens')}")
        print(f"FAILED {line['entry']}, {what}:", *line["problems"][:4], sep="\n    ")
    by_check: dict[str, list[bool]] = {}
    for line in others:
        by_check.setdefault(line["check"], []).append(line["ok"])
    table = [{"check": name, "entries": len(oks), "passed": sum(oks), "ok": all(oks)} for name, oks in by_check.items()]
    print(report.table(table, ("check", "entries", "passed", "ok")))
    print(report.table(rows, ROW_COLUMNS))
    for name in missing:
        print(f"NOT FINISHED {name}")
    print(f"{len(rows)} rows, {len(others)} further checks: {len(failed)} failed, {len(missing)} entries not finished")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
