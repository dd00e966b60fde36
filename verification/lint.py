"""The compiler's own linter, ``CUTE_DSL_COMPILER_OPT="warnings{nvvm}"``, on the kernels that we ship.

    python -m verification.lint [--entry SUBSTRING]

It looks for mbarrier counts that do not fit, tcgen05 loads without a wait or an order before the TMEM is freed, commits and
arrivals outside an elected lane. It sees only the DSL's wrapper operations, and our kernels are written as inline PTX, which
is opaque to it: its silence says little about them. It is kept because it costs two seconds and would speak up about a
wrapper operation that somebody adds.

The option string is stamped into the cubin, so this compile is never shipped. Its PTX must be the shipped one, byte for byte:
that is what makes the linter's verdict one on the shipped kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kernels.build.compile import ROOT, clean_environment
from megamoe_aot.manifest import Manifest
from megamoe_aot.spec import KernelSpec

ENVIRONMENT = {"CUTE_DSL_COMPILER_OPT": "warnings{nvvm}"}

EXPLAINED: dict[str, str] = {}
"""Warning code, such as W0014 -> why it is no fault here. Empty: no warning is expected."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_WARNING = re.compile(r"(?:warning|error)\[(\w+)\]:\s*(.*)")


class LintError(RuntimeError):
    """The lint compile itself failed."""


@dataclasses.dataclass(frozen=True)
class Lint:
    """The linter's words on one code."""

    code: str
    ptx_sha256: str
    warnings: tuple[str, ...]
    """``W0014: text``, in the order of the log; explained ones too."""

    @property
    def unexplained(self) -> list[str]:
        """Warnings whose code is not in EXPLAINED."""
        return [w for w in self.warnings if w.partition(":")[0] not in EXPLAINED]


def lint(spec: KernelSpec) -> Lint:
    """Compile ``spec.code`` once more, with the linter on, in a process of its own. Raises LintError."""
    with tempfile.TemporaryDirectory(prefix="megamoe_lint_") as folder:
        asked = json.dumps({"kind": type(spec).__name__, "fields": spec.code.to_dict()})
        log = run_linted([sys.executable, "-m", "kernels.build.compile", folder], asked)
        ptx = (Path(folder) / "kernel.ptx").read_bytes()
    return Lint(spec.code_name, hashlib.sha256(ptx).hexdigest(), read_warnings(log))


def run_linted(command: Sequence[str], stdin: str = "") -> str:
    """Run a command that compiles with the DSL, linter on; returns its output. Raises LintError where it fails."""
    run = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean_environment(os.environ) | ENVIRONMENT,
        timeout=600,
        check=False,
    )
    log = run.stdout + run.stderr
    if run.returncode != 0:
        raise LintError(f"{' '.join(command)} ended with status {run.returncode}:\n{log[-3000:]}")
    return log


def read_warnings(log: str) -> tuple[str, ...]:
    """Numbered diagnostics in the DSL's log: ``W0014: text``."""
    return tuple(f"{code}: {text}" for code, text in _WARNING.findall(_COLOUR.sub("", log)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: the same PTX as shipped, and no unexplained warning."""
    parser = argparse.ArgumentParser(prog="verification.lint", description="Run the DSL's linter on the kernels of a build.")
    parser.add_argument("--entry", default="", help="only codes whose name contains this")
    parser.add_argument("--artifacts", type=Path, help="artifacts folder (default: this checkout's)")
    options = parser.parse_args(arguments)
    manifest = Manifest.load(options.artifacts)
    specs = {entry.cubin: entry.spec for entry in manifest.entries if options.entry in entry.spec.code_name}
    failed = not specs
    for cubin, spec in specs.items():
        result = lint(spec)
        same = result.ptx_sha256 == manifest.cubins[cubin].ptx_sha256
        failed |= not same or bool(result.unexplained)
        print(f"{result.code}: {len(result.warnings)} warnings, {'the' if same else 'NOT the'} shipped PTX")
        for warning in result.warnings:
            print(f"  {warning}  [{EXPLAINED.get(warning.partition(':')[0], 'UNEXPLAINED')}]")
    if finalize := sum(options.entry in entry.spec.code_name for entry in manifest.finalize):
        print(f"{finalize} finalize kernels are not linted: kernels.build.compile is given the specs of entries here")
    if not specs:
        print(f"no entry's name contains {options.entry!r}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
