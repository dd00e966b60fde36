"""A call of an entry of the list structure as the emulator takes it: a grid of co-resident CTAs, and scratch that outlives launches.

The CTAs wait for each other, so a launch runs whole: there is no choice of routes. Any grid of at least M CTAs computes the same
values; a small one is the same program with more units per CTA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.expected import Call
from emulator import Buffer, Launch
from emulator.config import Parameter
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import STAGE_BYTES

from .problem import EmulatedCall, Outcome


class ListCall(EmulatedCall):
    """One call of one list entry; made once, launched as often as needed. All its launches share ``scratch``."""

    def __init__(self, spec: KernelSpec, call: Call, processors: int) -> None:
        """``processors``: CTAs of the grid. Raises ValueError for fewer than tokens, and for more tokens than the entry has columns."""
        if not call.tokens <= processors:
            raise ValueError(f"a grid of {processors} CTAs is too small: CTA t writes the ids of token t, and there are {call.tokens}")
        if call.tokens > spec.tokens:
            raise ValueError(f"{spec.name} takes up to {spec.tokens} tokens; got {call.tokens}")
        super().__init__(spec, call)
        self.processors = processors
        self.scratch = np.zeros(spec.scratch_bytes, np.uint8)
        """As a bound layer's: zeroed once."""

    def launch(self) -> Launch:
        """Grid, block, shared memory, the names of its regions, and those of them that only the MMA's columns make one."""
        spec = self.spec
        return Launch(
            grid=(spec.grid(self.call.tokens, self.processors), 1, 1),
            block=(spec.block_threads, 1, 1),
            dynamic_shared=spec.shared_bytes,
            labels=shared_labels(spec),
            columnwise=columnwise(spec),
            co_resident=True,
        )

    def buffers(self, routes: Iterable[int] | None = None) -> list[Buffer]:
        """Those of a cluster call, with block scales aligned for bulk copies, and the scratch memory."""
        aligned = [dataclasses.replace(b, align=16) if b.name in ("w13_scale", "w2_scale") else b for b in super().buffers(routes)]
        return [*aligned, Buffer("scratch", self.scratch, "inout", align=128)]

    def parameters(self, flags: int = 0) -> list[Parameter]:
        """In the order of the spec's ABI. ``flags``: set beside the entry's own."""
        special: dict[str, Parameter] = {"tokens": self.call.tokens}
        named = zip(self.spec.parameters, super().parameters(flags), strict=True)
        return [special.get(parameter.name, value) for parameter, value in named]

    def emulate(self, ptx: str, routes: Sequence[int] | None = None, *, flags: int = 0, **options: Any) -> Outcome:
        """One launch of ``ptx``. ``options`` are for :func:`emulator.emulate`; ValueError for a choice of routes."""
        if routes is not None:
            raise ValueError("the CTAs of a list launch wait for each other: it runs whole, without a choice of routes")
        return super().emulate(ptx, flags=flags, **options)


def columnwise(spec: KernelSpec) -> tuple[range, ...]:
    """The quantised tokens and their scales: the MMAs start when the tokens of their expert are there, others may be in the making."""
    plan = spec.work_list
    return range(plan.x_tile, plan.hidden), range(plan.x_scale, plan.hidden_scale)


def shared_labels(spec: KernelSpec) -> dict[int, str]:
    """Byte offset in dynamic shared memory -> name, for the emulator's reports."""
    plan = spec.work_list
    labels = {stage * STAGE_BYTES: f"stage[{stage}]" for stage in range(plan.ring)}
    tables = ("ids", "first", "expert", "mask", "route", "count", "runs", "routing", "tmem")
    for name in ("x_tile", "hidden", "x_scale", "hidden_scale", *tables):
        labels[getattr(plan, name)] = name
    labels |= {plan.slots + slot * plan.slot_bytes: f"slot[{slot}]" for slot in range((plan.x_scale - plan.slots) // plan.slot_bytes)}
    for name, (number, _) in plan.barrier_counts.items():
        labels |= {plan.barriers[name] + 8 * i: f"{name}[{i}]" for i in range(number)}
    return labels
