"""Blackwell, where nothing has been timed: what can be counted of both structures' kernels for the lead model, M = 1.

    python -m benchmarks.blackwell_counts [--out FOLDER] [--arch ARCH ...]

From the compiler: registers, spills, shared memory, machine instructions. From an emulated launch (sanitizer off; the list structure on
PROCESSORS CTAs): warp instructions of each role, those before the first weight byte is asked for, weight boxes in flight. Hopper's counts
stand beside them because Hopper's times are known. An emulated schedule is not a GPU's: a role that polls or spins executes more or
fewer instructions there. Writes blackwell_counts.json.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from emulator import OFF, Limits, Result
from emulator.decode import Op, Program, decode
from kernels.build.compile import compile_spec
from kernels.build.ptxas_log import read_log
from megamoe_aot.menu import LEAD, specs_of
from megamoe_aot.shared_memory import STAGE_BYTES
from megamoe_aot.spec import KernelSpec
from tests.list_call import ListCall
from verification import results, run
from verification.disassembly import disassemble
from verification.problem import EmulatedCall

from .environment import package_versions
from .expected import Call
from .report import table, write_json

FILE_NAME = "blackwell_counts.json"
PROCESSORS = {"sm_100f": 148, "sm_90a": 132}
"""SMs of a B200 and of an H200."""
PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cuda-nvdisasm", "numpy")
POLICY = "async-last"
"""Copies land only when no warp can run: as many are in flight as the kernel allows."""

COLUMNS = ("arch", "structure", "registers", "shared_bytes", "sass_instructions", "before_first_box", "bytes_in_flight_per_sm")
"""Of a row, what the printed table shows."""

CHAINS: Mapping[tuple[str, str], Sequence[str]] = {
    ("cluster", "hopper"): ("full", "sums", "full"),
    ("cluster", "blackwell"): ("full", "acc1", "sums", "operand", "acc2"),
    ("list", "hopper"): ("full", "packets", "hidden"),
    ("list", "blackwell"): ("full", "acc", "packets", "hidden", "acc"),
}
"""What one thread waits for another for, from the last byte of w13 to the last output, w2 being there: barriers by their names in the
kernels' tables, "packets" the polled scratch memory. Named barriers are left out."""


def chain_of(spec: KernelSpec) -> list[str]:
    """:data:`CHAINS` of a spec; its names are those of the spec's barriers."""
    chain = list(CHAINS[spec.structure, spec.engine])
    known = spec.work_list.barrier_counts if spec.structure == "list" else spec.shared.barrier_counts
    assert set(chain) <= {*known, "packets"}, f"{chain} against {list(known)}"
    return chain


def specs(archs: Sequence[str]) -> list[KernelSpec]:
    """The lead model's kernels that serve one token, in trtllm_gen layout with BF16 logits."""
    of_format = [s for s in specs_of(LEAD, archs) if (s.layout, s.logits_dtype) == ("trtllm_gen", "bf16")]
    return [s for s in of_format if s.columns in (0, 8)]


# ---- counting ----


class FirstBox:
    """Notes how many instructions a warp has executed when it asks for its first box of weights."""

    def __init__(self) -> None:
        self.executed: dict[tuple[int, int], int] = {}
        """(cluster, CTA) -> warp instructions of the asking warp."""

    def decode(self, *arguments: Any) -> Program:
        """In the place of the emulator's."""
        program = decode(*arguments)
        for op in program.ops:
            if op.source.opcode.startswith("cp.async.bulk.tensor"):
                self._watch(op)
        return program

    def _watch(self, op: Op) -> None:
        execute = op.execute

        def watched(fragment: Any, lanes: Any) -> Any:
            warp = fragment.warp
            self.executed.setdefault((warp.cta.cluster.index, warp.cta.rank), sum(warp.executed))
            return execute(fragment, lanes)

        op.execute = watched


def emulate(spec: KernelSpec, ptx: str) -> tuple[Result, FirstBox]:
    """One launch for one token, whose outputs agree with the reference."""
    first = FirstBox()
    options: dict[str, Any] = {"checks": OFF, "policy": POLICY, "limits": Limits(instructions=100_000_000)}
    with mock.patch("emulator.launch.decode", first.decode):
        if spec.structure == "cluster":
            call = EmulatedCall(spec, Call(1, 0))
            outcome = call.emulate(ptx, **options)
            report, _ = call.compare(outcome)
            result = outcome.result
        else:
            listed = ListCall(spec, 1, PROCESSORS[spec.arch])
            stored = listed.emulate(ptx, **options)
            report, _ = listed.judge(stored)
            result = stored.result
    assert report.ok and result.ok, f"{report.reason}\n{result.report()}"
    return result, first


def most_boxes(result: Result) -> int:
    """Weight boxes in flight in one CTA, at most."""
    most = 0
    for timeline in result.timelines.values():
        boxes = sorted((e for e in timeline.events if e.kind == "load" and e.label.startswith("stage")), key=lambda e: e.cta)
        for _, events in itertools.groupby(boxes, key=lambda e: e.cta):
            steps = [step for e in events for step in ((e.start, 1), (e.end, -1))]
            most = max(most, *itertools.accumulate(change for _, change in sorted(steps)))
    return most


def row_of(spec: KernelSpec) -> dict[str, Any]:
    """Everything that is counted of one kernel."""
    compiled = compile_spec(spec)
    log = read_log(compiled.log, f"{spec.code_name}_0")
    machine = [i for i in disassemble(compiled.cubin) if i.function == f"{spec.code_name}_0"]
    result, first = emulate(spec, compiled.ptx)
    ctas = len(first.executed) if spec.structure == "cluster" else PROCESSORS[spec.arch]
    per_role = {
        role: round(sum(result.counts.instructions[warp].total() for warp in warps) / len(warps) / ctas)
        for role, warps in run.ROLES[spec.structure, spec.arch].items()
    }
    boxes = most_boxes(result)
    return {
        "kernel": spec.code_name,
        "arch": spec.arch,
        "structure": spec.structure,
        "tokens": 1,
        "cubin_sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "registers": log.registers,
        "spill_bytes": log.spill_bytes,
        "block_threads": spec.block_threads,
        "shared_bytes": spec.shared_bytes,
        "ctas": ctas,
        "ctas_per_sm": spec.ctas_per_sm,
        "sass_instructions": len(machine),
        "before_first_box": [min(first.executed.values()), max(first.executed.values())],
        "instructions_per_warp": per_role,
        "boxes_in_flight_per_cta": boxes,
        "bytes_in_flight_per_sm": boxes * STAGE_BYTES * spec.ctas_per_sm,
        "handshakes": chain_of(spec),
    }


def header() -> dict[str, Any]:
    """Date (UTC), commit and versions, as plain JSON types."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": results.commit(),
        "python": platform.python_version(),
        "packages": package_versions(PACKAGES),
        "processors": PROCESSORS,
        "policy": POLICY,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    parser.add_argument("--arch", nargs="*", choices=PROCESSORS, default=list(PROCESSORS))
    arguments = parser.parse_args()
    rows = []
    for spec in specs(arguments.arch):
        rows.append(row_of(spec))
        print(rows[-1], flush=True)
    write_json(arguments.out / FILE_NAME, header(), rows=rows)
    print(table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
