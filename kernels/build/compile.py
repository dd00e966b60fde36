"""One spec -> cubin, PTX and compiler log, in a process and a folder of its own.

The DSL reads its artifacts back from files whose names do not tell two specs apart, and CUTE_DSL_* variables change the
bytes: hence a fresh folder, a fresh process and a cleaned environment per compile. A compiler crash ends one compile only.
The options are the same for a shipped build and for its check, because they are stamped into the cubin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megamoe_aot.finalize import CodeSpec, FinalizeSpec
from megamoe_aot.spec import KernelSpec

from .errors import BuildError

ROOT = Path(__file__).resolve().parents[2]
COMPILER_VARIABLES = ("CUTE_", "CUTLASS_", "MLIR_", "LLVM_", "NVVM_")
"""Environment variables with these prefixes steer the compiler; a build must not depend on them."""
LOG_TAIL = 30
"""Lines of the compiler's log that an error message shows."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of one spec, before any check."""

    cubin: bytes
    ptx: str
    log: str


def options(arch: str, dump: Path) -> str:
    """The option string. ``remarks{ptx}`` makes ptxas report spills and performance warnings."""
    return f"--gpu-arch={arch} --keep-cubin --keep-ptx --dump-dir={dump} remarks{{ptx}}"


def compile_spec(spec: CodeSpec, timeout: float = 600.0) -> Compiled:
    """Compile ``spec.code`` in a new process. Raises BuildError with the end of the compiler's log."""
    with tempfile.TemporaryDirectory(prefix="megamoe_") as folder:
        try:
            run = subprocess.run(
                [sys.executable, "-m", __name__, folder],
                input=json.dumps({"kind": type(spec).__name__, "fields": spec.code.to_dict()}),
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=clean_environment(os.environ),
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(spec.code_name, [f"the compiler did not finish within {timeout:.0f} s"]) from error
        log = run.stdout + run.stderr
        if run.returncode != 0:
            tail = log.splitlines()[-LOG_TAIL:]
            raise BuildError(spec.code_name, [f"the compiler process ended with status {run.returncode}; its last words:", *tail])
        return Compiled((Path(folder) / "kernel.cubin").read_bytes(), (Path(folder) / "kernel.ptx").read_text(), log)


def clean_environment(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The environment without anything that steers the compiler, and with a fixed hash seed."""
    kept = {name: value for name, value in environment.items() if not name.startswith(COMPILER_VARIABLES)}
    return kept | {"PYTHONHASHSEED": "0"}


def _compile_here(spec: CodeSpec, folder: Path) -> None:
    """Child process: compile and leave ``kernel.cubin`` and ``kernel.ptx`` in ``folder``."""
    from cutlass import cute

    from kernels import entry, finalize

    dump = folder / "dump"
    dump.mkdir()
    function, arguments = finalize.host_function(spec) if isinstance(spec, FinalizeSpec) else entry.host_function(spec)
    compiled = cute.compile(function, *arguments, options=options(spec.arch, dump))
    cubin, ptx = compiled.artifacts.CUBIN, compiled.artifacts.PTX
    if not isinstance(cubin, bytes) or not isinstance(ptx, str):
        raise TypeError(f"the DSL gave {type(cubin).__name__} and {type(ptx).__name__} for cubin and PTX; were the keep options lost?")
    (folder / "kernel.cubin").write_bytes(cubin)
    (folder / "kernel.ptx").write_text(ptx)


def _read_spec(data: dict[str, Any]) -> CodeSpec:
    kinds: dict[str, type[CodeSpec]] = {kind.__name__: kind for kind in (KernelSpec, FinalizeSpec)}
    return kinds[data["kind"]].from_dict(data["fields"])


if __name__ == "__main__":
    _compile_here(_read_spec(json.load(sys.stdin)), Path(sys.argv[1]))
