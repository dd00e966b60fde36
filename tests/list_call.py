"""A call of a list structure kernel as the emulator takes it: a grid of co-resident CTAs, and scratch memory that outlives launches."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import LOGITS_DTYPES
from emulator import Buffer, Launch, Pointer, Result, SparseBuffer, TensorMap, emulate
from emulator.config import Bytes, Parameter
from kernels.build.compile import ROOT, clean_environment
from megamoe_aot import tensor_map
from megamoe_aot.abi import FLAG_GATE_FIRST, FLAG_UE8M0
from megamoe_aot.agreement import Report, compare
from megamoe_aot.reference import MoeResult
from megamoe_aot.spec import KernelSpec
from megamoe_aot.weights import Packed, allocate, pack_expert
from megamoe_aot.work_list import STAGE_BYTES
from tests.data import Problem

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
        run = subprocess.run(
            [sys.executable, "-c", _COMPILE, folder],
            input=json.dumps([spec.code.to_dict() for spec in specs]),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=clean_environment(os.environ),
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        return [(Path(folder) / str(number) / "kernel.ptx").read_text() for number in range(len(specs))]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one launch stored, and how it went."""

    out: torch.Tensor
    """BF16 [M*K, H]."""
    ids: torch.Tensor
    """INT32 [M, K]."""
    weights: torch.Tensor
    """FP32 [M, K]."""
    result: Result

    @property
    def objections(self) -> list[str]:
        """Errors, and places where the kernel relies on something that PTX does not promise."""
        return [str(finding) for finding in self.result.findings if finding.severity != "info"]


class ListCall:
    """One call of a spec; made once, launched as often as needed. All its launches share ``scratch``."""

    def __init__(self, spec: KernelSpec, tokens: int, processors: int, *, seed: int = 0, case: str = "") -> None:
        """``processors``: CTAs of the grid, at least ``tokens``. ``seed`` and ``case`` are those of :class:`tests.data.Problem`."""
        assert processors >= tokens, "CTA t writes token t's ids"
        self.spec, self.tokens, self.processors = spec, tokens, processors
        plan = spec.work_list
        engine = {"arithmetic": "hopper" if spec.engine == "hopper" else "exact", "order": "ascending", "parts": plan.parts}
        problem = Problem.of(spec, tokens, seed=seed, case=case)
        self.problem = problem.replace(options=dict(problem.options) | engine)
        self.logits_dtype = LOGITS_DTYPES[spec.logits_dtype]
        self.scratch = np.zeros(spec.scratch_bytes, np.uint8)
        self._packed = functools.cache(self._pack)

    @functools.cached_property
    def reference(self) -> MoeResult:
        """With the engine's own arithmetic and order of summation."""
        return self.problem.reference(logits_dtype=self.logits_dtype)

    def launch(self) -> Launch:
        """Grid, block, shared memory and the names of its regions."""
        spec = self.spec
        return Launch(
            grid=(spec.grid(self.tokens, self.processors), 1, 1),
            block=(spec.block_threads, 1, 1),
            dynamic_shared=spec.shared_bytes,
            labels=shared_labels(spec),
            columnwise=columnwise(spec),
            co_resident=True,
        )

    def buffers(self) -> list[Buffer]:
        """Every device allocation, as badly aligned as the ABI allows; only the chosen experts exist; the outputs are poisoned."""
        spec, problem = self.spec, self.problem
        routes = self.tokens * spec.top_k
        logits, bias = problem.logits(self.logits_dtype), problem.bias()
        buffers = [
            Buffer("x", _bytes(problem.x()), predecessor=True),
            Buffer("logits", _bytes(logits), predecessor=True, align=logits.element_size()),
            Buffer("w13", self._sparse("w13")),
            Buffer("w13_scale", self._sparse("w13_scale"), align=16),
            Buffer("w2", self._sparse("w2")),
            Buffer("w2_scale", self._sparse("w2_scale"), align=16),
            Buffer("out", np.full(routes * spec.hidden * 2, 0xFF, np.uint8), "output"),
            Buffer("ids", np.full(routes * 4, 0xFF, np.uint8), "output", align=4),
            Buffer("weights", np.full(routes * 4, 0xFF, np.uint8), "output", align=4),
            Buffer("scratch", self.scratch, "inout", align=128),
        ]
        if bias is not None:
            buffers.append(Buffer("bias", _bytes(bias), align=4))
        return buffers

    def parameters(self) -> list[Parameter]:
        """In the order of the spec's ABI."""
        spec = self.spec
        special: dict[str, Parameter] = {
            "w13_map": TensorMap(tensor_map.w13_map(spec), "w13"),
            "w2_map": TensorMap(tensor_map.w2_map(spec), "w2"),
            "scale": float(spec.scale),
            "limit": math.inf if spec.limit is None else float(spec.limit),
            "flags": FLAG_UE8M0 * spec.ue8m0 | FLAG_GATE_FIRST * (spec.w13_order == "gate_up"),
            "tokens": self.tokens,
        }
        if self.problem.bias() is None:
            special["bias"] = Pointer(None)
        return [special.get(parameter.name, Pointer(parameter.name)) for parameter in spec.parameters]

    def emulate(self, ptx: str, **options: Any) -> Outcome:
        """One launch of ``ptx``; ``options`` are for :func:`emulator.emulate`."""
        buffers = self.buffers()
        result = emulate(ptx, self.launch(), buffers, self.parameters(), **options)
        named = {buffer.name: buffer.data for buffer in buffers}

        def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
            data = named[name]
            assert isinstance(data, np.ndarray)
            return torch.from_numpy(data).view(dtype)

        shape = (self.tokens, self.spec.top_k)
        return Outcome(
            out=tensor("out", torch.bfloat16).view(-1, self.spec.hidden),
            ids=tensor("ids", torch.int32).view(shape),
            weights=tensor("weights", torch.float32).view(shape),
            result=result,
        )

    def judge(self, outcome: Outcome) -> tuple[Report, float]:
        """(the contract's judgement, the share of ``out`` elements with the reference's bits; a NaN equals a NaN)."""
        want = self.reference.out
        equal = (outcome.out.view(torch.int16) == want.view(torch.int16)) | (outcome.out.isnan() & want.isnan())
        return compare(self.reference, outcome.out, outcome.ids, outcome.weights), float(equal.double().mean())

    def _pack(self, expert: int) -> Packed:
        """One expert in the spec's layout (E = 1)."""
        spec = self.spec
        packed = allocate(1, spec.hidden, spec.inter, layout=spec.layout)
        pack_expert(packed, 0, self.problem.expert(expert), layout=spec.layout, w13_order=spec.w13_order)
        return packed

    def _sparse(self, name: str) -> SparseBuffer:
        """A packed tensor [E, ...] with one page per chosen expert."""
        chosen = sorted(set(self.reference.ids.flatten().tolist()))
        pages = {expert: _bytes(getattr(self._packed(expert), name)) for expert in chosen}
        size = len(next(iter(pages.values())))
        return SparseBuffer(self.spec.experts * size, size, pages)


def columnwise(spec: KernelSpec) -> tuple[range, ...]:
    """The quantised tokens and their scales: the MMAs start when the tokens of their expert are there, others may be in the making."""
    plan = spec.work_list
    return range(plan.x_tile, plan.hidden), range(plan.x_scale, plan.hidden_scale)


def shared_labels(spec: KernelSpec) -> dict[int, str]:
    """Byte offset in dynamic shared memory -> name, for the emulator's reports."""
    plan = spec.work_list
    labels = {stage * STAGE_BYTES: f"stage[{stage}]" for stage in range(plan.ring)}
    for name in ("x_tile", "hidden", "x_scale", "hidden_scale", "ids", "first", "expert", "mask", "route", "count", "routing", "tmem"):
        labels[getattr(plan, name)] = name
    labels |= {plan.slots + slot * plan.slot_bytes: f"slot[{slot}]" for slot in range((plan.x_scale - plan.slots) // plan.slot_bytes)}
    for name, (number, _) in plan.barrier_counts.items():
        labels |= {plan.barriers[name] + 8 * i: f"{name}[{i}]" for i in range(number)}
    return labels


def _bytes(tensor: torch.Tensor) -> Bytes:
    return tensor.contiguous().view(torch.uint8).flatten().numpy()
