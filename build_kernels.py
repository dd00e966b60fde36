"""Compile menu entries into artifacts/: no GPU and no driver needed.

    python build_kernels.py --all                      build everything, write cubins and manifest.json
    python build_kernels.py --entry h4096_i512         build the entries whose name contains this
    python build_kernels.py --all --check              rebuild, write nothing, compare with the lock in git
    python build_kernels.py --record-validation FILE   note in the lock which GPU passed benchmarks/h200_correctness.py

Exit status: 0 done, 1 a build or the check failed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kernels.build import jobs
from kernels.build.artifacts import write_artifacts
from kernels.build.compile import ROOT
from kernels.build.errors import BuildError
from kernels.build.lock import FILE_NAME as LOCK_NAME
from kernels.build.lock import Lock, differences
from kernels.build.sources import source_digest
from kernels.build.validation import validated
from megamoe_aot.errors import ManifestError
from megamoe_aot.finalize import CodeSpec
from megamoe_aot.manifest import Manifest
from megamoe_aot.menu import menu_specs
from megamoe_aot.spec import ARCHS

ARTIFACTS = ROOT / "artifacts"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every menu entry (of the chosen archs)")
    parser.add_argument("--entry", action="append", default=[], metavar="SUBSTRING", help="entries whose name contains this; repeatable")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="only this target; repeatable")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compiler processes at a time (default: cores)")
    parser.add_argument("--check", action="store_true", help="rebuild and compare with the lock; write nothing")
    parser.add_argument("--update-lock", action="store_true", help="write the lock from this build (needs --all, every arch)")
    parser.add_argument("--out", type=Path, default=ARTIFACTS, help="folder for cubins and manifest.json (default: artifacts)")
    parser.add_argument("--lock", type=Path, default=ARTIFACTS / LOCK_NAME, help="lock file (default: artifacts/manifest.lock.json)")
    parser.add_argument("--record-validation", type=Path, metavar="FILE", help="results of a correctness run of this very build")
    parser.add_argument("--list", action="store_true", help="list the chosen entries (default: all) and build nothing")
    options = parser.parse_args(argv)
    options.whole_menu = options.all and not options.entry and not options.arch
    if not (options.all or options.entry or options.list or options.record_validation):
        parser.error("choose --all or --entry SUBSTRING; --list shows the entries")
    if options.all and options.entry:
        parser.error("--all and --entry exclude each other")
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    if options.check and options.update_lock:
        parser.error("--check compares with the lock, --update-lock replaces it: choose one")
    if options.update_lock and not options.whole_menu:
        parser.error("--update-lock needs --all and every arch: the lock has one source digest for all its codes")
    options.selection = [
        (shape, spec)
        for shape, spec in menu_specs(options.arch or ARCHS)
        if not options.entry or any(part in spec.name for part in options.entry)
    ]
    if not options.selection:
        parser.error(f"no entry name contains {' or '.join(map(repr, options.entry))}; --list shows the entries")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (None: of this process); returns the exit status."""
    options = parse_arguments(argv)
    out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    if options.list:
        for line in entry_lines(options.selection):
            out.print(line, highlight=False, markup=False)
        return 0
    try:
        lock = Lock.load(options.lock)
    except ValueError as error:
        if not options.update_lock:
            err.print(f"error: {error}", markup=False)
            return 1
        lock = None
    if options.record_validation:
        return record_validation(lock, options, out, err)
    digest = source_digest()
    built, failures = build_with_progress(options.selection, options.jobs, out)
    if failures:
        for failure in failures:
            err.print(f"failed: {failure}", markup=False)
        err.print(f"{len(failures)} of {len(built) + len(failures)} codes failed; nothing was written")
        return 1
    if source_digest() != digest:
        err.print("error: the sources changed while the build ran, so its cubins may differ in origin; nothing was written, run it again")
        return 1
    ours = jobs.lock_of(built, digest).keeping_validation_of(lock)
    if options.check:
        return report_check(differences(lock, ours, options.whole_menu), len(built), out, err)
    removed = write_artifacts(options.out, jobs.manifest_of(options.selection, built, ours), jobs.files_of(built))
    size = sum(len(b.compiled.cubin) for b in built.values())
    what = f"{len(options.selection)} entries, {len(built)} cubins of {size / 1e6:.1f} MB"
    out.print(f"wrote {what} to {options.out}; removed {len(removed)} stale files")
    if options.update_lock:
        ours.save(options.lock)
        out.print(f"wrote {options.lock}")
    else:
        for difference in differences(lock, ours, options.whole_menu):
            err.print(f"warning: differs from the lock: {difference}", markup=False)
    return 0


def record_validation(lock: Lock | None, options: argparse.Namespace, out: Console, err: Console) -> int:
    """Add the GPU of a correctness run to the lock; the exit status."""
    try:
        if lock is None:
            raise ValueError("there is no lock; make one with --all --update-lock")
        manifest = Manifest.load(options.out)
        validated(lock, manifest, options.record_validation).save(options.lock)
    except (OSError, KeyError, ValueError, ManifestError) as error:
        err.print(f"error: {error}", markup=False)
        return 1
    out.print(f"wrote {options.lock}; build again to carry it into the manifest")
    return 0


def build_with_progress(selection: jobs.Selection, job_count: int, console: Console) -> tuple[dict[str, jobs.Built], list[BuildError]]:
    """Build the distinct codes of the selection with a progress bar, and one line for each that is done."""
    codes = jobs.codes_of(selection)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=len(codes))

        def on_done(spec: CodeSpec, result: jobs.Built | BuildError) -> None:
            progress.advance(task)
            if isinstance(result, BuildError):
                progress.console.print(f"[red]failed[/]  {spec.code_name}")
            else:
                progress.console.print(f"[green]built[/]   {spec.code_name}: {summary(spec, result)}")

        return jobs.build_codes(codes.values(), job_count, on_done)


def summary(spec: CodeSpec, built: jobs.Built) -> str:
    """The figures of one result that a reader looks at first."""
    record = built.record
    return f"{record.registers} registers, {spec.shared_bytes} B shared, {record.resident_ctas} CTAs per SM, {built.sha256[:12]}"


def report_check(found: Sequence[str], count: int, out: Console, err: Console) -> int:
    """Print the outcome of --check and give the exit status."""
    for difference in found:
        err.print(f"differs from the lock: {difference}", markup=False)
    if not found:
        out.print(f"{count} codes give the hashes of the lock")
    return 1 if found else 0


def entry_lines(selection: jobs.Selection) -> Iterator[str]:
    """One line per entry: model, parallel degree, name, and the entry whose cubin it shares."""
    owners: dict[str, str] = {}
    for shape, spec in selection:
        owner = owners.setdefault(spec.code_name, spec.name)
        shares = "" if owner == spec.name else f"  (cubin of {owner})"
        yield f"{shape.model:<16} {shape.parallel:<5} {spec.name}{shares}"


if __name__ == "__main__":
    sys.exit(main())
