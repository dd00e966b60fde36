"""The public entry: run a PTX kernel on the CPU and say what it did and what was wrong with it."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterable, Sequence

import numpy as np

from .config import OFF, POLICIES, Arithmetic, Buffer, Checks, Launch, Limits, Parameter
from .decode import Program, decode
from .findings import Finding, Findings, Where
from .memory import GlobalMemory, ParameterBlock
from .parser import parse
from .report import Counts, Timeline
from .wave import Wave

__all__ = ["OFF", "Result", "emulate"]


@dataclasses.dataclass
class Result:
    """What a launch did. Output buffers have been written in place."""

    findings: list[Finding]
    """Errors first, then assumptions and remarks."""
    counts: Counts
    timelines: dict[int, Timeline]
    """Cluster index -> its timeline."""
    steps: int
    """Scheduler steps, over all clusters (of a co-resident grid they have one scheduler)."""

    @property
    def errors(self) -> list[Finding]:
        """Findings of severity "error"."""
        return [f for f in self.findings if f.severity == "error"]

    @property
    def ok(self) -> bool:
        """No errors; assumptions and remarks do not count."""
        return not self.errors

    def ids(self) -> set[str]:
        """Ids of all findings."""
        return {f.id for f in self.findings}

    def report(self) -> str:
        """All findings as text."""
        return "\n".join(str(f) for f in self.findings) or "no findings"


@dataclasses.dataclass
class _Job:
    """One launch, decoded; what a worker process needs."""

    program: Program
    launch: Launch
    memory: GlobalMemory
    parameters: ParameterBlock
    arithmetic: Arithmetic
    checks: Checks | None
    limits: Limits
    policy: str
    seed: int

    def run(self, indices: Sequence[int]) -> _Outcome:
        """Execute clusters that are alive at once."""
        wave = Wave(
            self.program,
            self.launch,
            indices,
            self.memory,
            self.parameters,
            self.arithmetic,
            self.checks,
            self.limits,
            self.policy,
            self.seed,
        )
        wave.run()
        timelines = {cluster.index: cluster.timeline for cluster in wave.clusters}
        return _Outcome(wave.findings.list(), wave.counts(), timelines, wave.scheduler.step)


@dataclasses.dataclass
class _Outcome:
    """What one wave did."""

    findings: list[Finding]
    counts: Counts
    timelines: dict[int, Timeline]
    steps: int


def emulate(
    ptx: str,
    launch: Launch,
    buffers: Sequence[Buffer],
    parameters: Sequence[Parameter],
    *,
    kernel: str | None = None,
    seed: int = 0,
    policy: str = "random",
    checks: Checks | None = Checks(),  # noqa: B008  (frozen)
    arithmetic: Arithmetic = Arithmetic(),  # noqa: B008
    limits: Limits = Limits(),  # noqa: B008
    clusters: Iterable[int] | None = None,
    jobs: int = 1,
) -> Result:
    """Run ``kernel`` (the only one of the module by default) and return what happened.

    ``parameters`` follow the kernel's parameter list. ``seed`` and ``policy`` (one of ``POLICIES``) fix the schedule, the order in
    which asynchronous operations complete, and everything that PTX leaves to chance; the same seed gives the same run
    whatever ``jobs`` is. ``checks=OFF`` runs without the sanitizer. ``clusters`` picks clusters of the grid (all by default);
    they run one after another, each in fresh shared memory, in ``jobs`` processes. A co-resident grid runs whole, in one process.

    Raises PtxError for PTX that is not understood (any unknown instruction, before anything runs) and ValueError for
    arguments that do not fit the kernel. What the kernel does wrong is not an exception but a finding.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {POLICIES}; got {policy!r}")
    module = parse(ptx)
    entry = module.kernel(kernel)
    program = decode(module, entry, launch, arithmetic, seed)
    memory = GlobalMemory(buffers)
    job = _Job(program, launch, memory, ParameterBlock(entry, parameters, memory), arithmetic, checks, limits, policy, seed)
    indices = list(range(launch.clusters) if clusters is None else clusters)
    if bad := [i for i in indices if not 0 <= i < launch.clusters]:
        raise ValueError(f"clusters {bad} are outside the grid of {launch.clusters} clusters")
    if launch.co_resident and clusters is not None:
        raise ValueError("the clusters of a co-resident grid wait for each other: it runs whole, without a choice of clusters")
    waves = [indices] if launch.co_resident else [[index] for index in indices]
    findings = Findings(limit=1 << 30)
    result = Result([], Counts(), {}, 0)
    for outcome in map(job.run, waves) if jobs <= 1 or len(waves) < 2 else _in_processes(job, indices, jobs, findings):
        findings.merge(outcome.findings)
        result.counts.merge(outcome.counts)
        result.timelines |= outcome.timelines
        result.steps += outcome.steps
    result.findings = findings.list()
    return result


# ---- several processes ----

_job: _Job | None = None
"""The job of this process's children: inherited through fork, so that buffers need not be copied or pickled."""

Written = dict[str, tuple[np.ndarray, np.ndarray]]
"""Buffer name -> (byte offsets, bytes) that a cluster wrote."""


def _in_processes(job: _Job, indices: list[int], jobs: int, findings: Findings) -> list[_Outcome]:
    """Run the clusters in forked processes and write their outputs into this process's buffers."""
    global _job
    _job = job
    outcomes = []
    try:
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            for index, (outcome, written) in zip(indices, pool.imap(_run_in_child, indices), strict=True):
                _collect(job.memory, written, index, findings)
                outcomes.append(outcome)
    finally:
        _job = None
    return outcomes


def _run_in_child(index: int) -> tuple[_Outcome, Written]:
    assert _job is not None
    for allocation in _job.memory.allocations:
        if allocation.dirty is not None:
            allocation.dirty[:] = False
    outcome = _job.run([index])
    written: Written = {}
    for allocation in _job.memory.allocations:
        data = allocation.buffer.data
        if allocation.dirty is not None and isinstance(data, np.ndarray):
            offsets = np.flatnonzero(allocation.dirty)
            written[allocation.buffer.name] = offsets, data[offsets]
    return outcome, written


def _collect(memory: GlobalMemory, written: Written, index: int, findings: Findings) -> None:
    for name, (offsets, values) in written.items():
        allocation = memory.named(name)
        assert allocation.dirty is not None and isinstance(allocation.buffer.data, np.ndarray)
        if allocation.dirty[offsets].any():
            findings.add("E-RACE", f"two clusters store to the same bytes of {name}; clusters are not ordered", Where(index))
        allocation.dirty[offsets] = True
        allocation.buffer.data[offsets] = values
