"""Hand-written PTX kernels for the emulator's tests.

A body finds: %rd1 the input, %rd2 the output, %rd3 this thread's output word, %rd4 its input word (4 bytes per thread of the
launch), %r1 the thread index, %r2 the CTA's rank in its cluster, %r3 the base of dynamic shared memory, %r4 the lane.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from emulator import Arithmetic, Buffer, Checks, Launch, Limits, Pointer, Result, emulate
from emulator.config import Parameter, Role

NAME = "k"


def module(body: str, maps: int = 0, prologue: bool = True) -> str:
    """A PTX module with one kernel of two pointer parameters and ``maps`` tensor maps."""
    parameters = [".param .u64 .ptr .global .align 4 k_in", ".param .u64 .ptr .global .align 4 k_out"]
    parameters += [f".param .align 64 .b8 k_map{i}[128]" for i in range(maps)]
    start = """
    ld.param.b64 %rd1, [k_in];
    ld.param.b64 %rd2, [k_out];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    mov.b32 %r3, shared;
    and.b32 %r4, %r1, 31;
    mov.u32 %r5, %ntid.x;
    mov.u32 %r6, %ctaid.x;
    mad.lo.s32 %r6, %r6, %r5, %r1;
    mul.wide.u32 %rd5, %r6, 4;
    add.s64 %rd3, %rd2, %rd5;
    add.s64 %rd4, %rd1, %rd5;
    """
    return f"""
.version 9.4
.target sm_100f
.address_size 64
.extern .shared .align 1024 .b8 shared[];
.visible .entry {NAME}(
    {", ".join(parameters)}
)
{{
    .reg .pred %p<32>;
    .reg .b16 %h<32>;
    .reg .b32 %r<200>;
    .reg .b32 %f<64>;
    .reg .b64 %rd<64>;
    {start if prologue else ""}
    {body}
    ret;
}}
"""


@dataclasses.dataclass
class Run:
    """What a tiny kernel did."""

    result: Result
    out: np.ndarray
    """uint32 [threads of the launch], or as many words as asked for."""

    @property
    def ids(self) -> set[str]:
        return self.result.ids()


def run(
    body: str,
    *,
    threads: int = 32,
    ctas: int = 1,
    clusters: int = 1,
    data: Any = None,
    words: int | None = None,
    shared: int = 8192,
    maps: tuple[Parameter, ...] = (),
    in_role: Role = "input",
    predecessor: bool = False,
    buffers: tuple[Buffer, ...] = (),
    seed: int = 0,
    policy: str = "random",
    checks: Checks | None = Checks(),  # noqa: B008
    arithmetic: Arithmetic = Arithmetic(),  # noqa: B008
    limits: Limits = Limits(instructions=50_000),  # noqa: B008
    jobs: int = 1,
    co_resident: bool = False,
    columnwise: tuple[range, ...] = (),
) -> Run:
    """Run ``body``; ``data``: the input words (uint32 or float32), default 0, 1, 2, ..."""
    total = threads * ctas * clusters
    source = np.arange(total, dtype=np.uint32) if data is None else np.ascontiguousarray(data)
    out = np.full(4 * (words or total), 0xFF, np.uint8)
    result = emulate(
        module(body, len(maps)),
        Launch((ctas * clusters, 1, 1), (threads, 1, 1), (ctas, 1, 1), shared, columnwise=columnwise, co_resident=co_resident),
        [
            Buffer("in", source.view(np.uint8).ravel(), in_role, predecessor=predecessor),
            Buffer("out", out, "output"),
            *buffers,
        ],
        [Pointer("in"), Pointer("out"), *maps],
        seed=seed,
        policy=policy,
        checks=checks,
        arithmetic=arithmetic,
        limits=limits,
        jobs=jobs,
    )
    return Run(result, out.view(np.uint32))


WAIT = "griddepcontrol.wait;"
"""Stores to global memory come after it, else they are a finding."""


def store(value: str = "%r10") -> str:
    """Store a 32-bit register to this thread's output word."""
    return f"{WAIT} st.global.b32 [%rd3], {value};"


def wait(address: str, parity: str = "0", scope: str = "cta") -> str:
    """The spin loop of an mbarrier wait."""
    return (
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.acquire."
        f"{scope}.shared::cta.b64 done, [{address}], {parity}; @done bra DONE; bra WAIT; DONE: }}"
    )
