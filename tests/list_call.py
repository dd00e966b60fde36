"""Calls of list structure kernels that no build has: compiled here, emulated by :mod:`verification.list_call`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import verification.list_call
from benchmarks.expected import Call
from megamoe_aot.agreement import Report
from megamoe_aot.spec import KernelSpec
from tests.child import run_python
from verification.problem import Outcome

_COMPILE = """
import json, sys
from pathlib import Path
from cutlass import cute
from kernels.build.compile import options
from kernels.entry import host_function
from megamoe_aot.spec import KernelSpec

for number, fields in enumerate(json.load(sys.stdin)):
    spec = KernelSpec.from_dict(fields)
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    function, arguments = host_function(spec)
    compiled = cute.compile(function, *arguments, options=options(spec.arch, folder))
    (folder / "kernel.ptx").write_text(compiled.artifacts.PTX)
"""


def compile_kernels(specs: Sequence[KernelSpec]) -> list[str]:
    """The PTX of each spec's code, compiled in one process with the build's options and environment."""
    with tempfile.TemporaryDirectory() as folder:
        run_python("-c", _COMPILE, folder, stdin=json.dumps([spec.code.to_dict() for spec in specs]))
        return [(Path(folder) / str(number) / "kernel.ptx").read_text() for number in range(len(specs))]


class ListCall(verification.list_call.ListCall):
    """A list call with the tests' way of naming it."""

    def __init__(self, spec: KernelSpec, tokens: int, processors: int, *, seed: int = 0, case: str = "") -> None:
        """``processors``: CTAs of the grid, at least ``tokens``. ``seed``: of the activations; ``case``: of :class:`tests.data.Problem`."""
        super().__init__(spec, Call(tokens, seed, case), processors)

    def judge(self, outcome: Outcome) -> tuple[Report, float]:
        """(the contract's judgement, the share of ``out`` elements with the reference's bits; a NaN equals a NaN)."""
        return self.compare(outcome)
