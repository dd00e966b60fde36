"""Compiling in a process of its own: the DSL needs source files, keeps state, and is steered by the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kernels.build.compile import clean_environment

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments: str, stdin: str = "") -> str:
    """Run this Python with ``arguments`` from the repository root, in the build's environment; returns its output. It must succeed."""
    run = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean_environment(os.environ),
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout + run.stderr
