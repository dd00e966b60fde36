"""One cluster: fresh shared memory, its CTAs, the cluster barrier, and the services that instructions use."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np

from .config import Arithmetic, Checks, Launch, Limits
from .cta import Cta
from .decode import Program
from .findings import Finding, Findings, Where
from .mbarrier import Mbarrier
from .memory import GlobalMemory, ParameterBlock, SharedMemory
from .report import Counts, Timeline
from .sanitizer import Sanitizer
from .scheduler import AsyncOp, Scheduler
from .warp import Fragment, Lanes


@dataclasses.dataclass
class ClusterBarrier:
    """barrier.cluster: arrive and wait are separate; exited threads are not waited for."""

    phase: int = 0
    arrived: dict[int, int] = dataclasses.field(default_factory=dict)
    """Warp number -> lanes that arrived in this phase."""
    owed: dict[int, int] = dataclasses.field(default_factory=dict)
    """Warp number -> lanes that arrived and have not yet waited."""
    waiting: list[Fragment] = dataclasses.field(default_factory=list)
    arriving: Any = None
    complete: Any = None


class Cluster:
    """Everything that one cluster's instructions act on."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        index: int,
        memory: GlobalMemory,
        parameters: ParameterBlock,
        arithmetic: Arithmetic,
        checks: Checks | None,
        limits: Limits,
        policy: str,
        seed: int,
    ) -> None:
        self.program, self.launch, self.index = program, launch, index
        self.memory, self.parameters, self.arithmetic, self.limits = memory, parameters, arithmetic, limits
        self.checks = checks or Checks()
        self.rng = random.Random(f"{seed}/{index}")
        self.numpy_rng = np.random.default_rng(self.rng.getrandbits(64))
        self.findings = Findings(self.checks.disabled, limits.findings)
        self.shared = SharedMemory(launch.ctas, program.static_shared + launch.dynamic_shared, self.checks.scramble_addresses)
        self.chunks = self.shared.data.reshape(-1, 16)
        self.barriers: dict[tuple[int, int], Mbarrier] = {}
        self.barrier = ClusterBarrier()
        self.timeline = Timeline()
        self.counts = Counts()
        self.current: Fragment | AsyncOp | None = None
        self.dependency_done = False
        self.dependency_waiters: list[Fragment] = []
        self.ctas = [Cta(self, rank, program) for rank in range(launch.ctas)]
        warps = self.ctas[0].warp_count
        self.executed = np.zeros((launch.ctas * warps, len(program.ops)), np.int64).tolist()
        self.sanitizer = Sanitizer(self, warps, program.granule) if checks is not None else None
        self.scheduler = Scheduler(self, policy)

    def run(self) -> None:
        """Execute to the end. What went wrong is in ``findings``."""
        for product, total in self.program.contracted:
            where = Where(self.index, line=total.line, text=total.text)
            self.findings.add("E-CONTRACT", f"the product of line {product.line} may be fused into this sum", where)
        self.scheduler.submit(AsyncOp("the preceding grid completes", 0, Where(self.index), self._dependency))
        for cta in self.ctas:
            for warp in cta.warps:
                if self.sanitizer:
                    warp.clock = self.sanitizer.start(warp)
                self.scheduler.wake(warp.fragments[0])
        with np.errstate(all="ignore"):
            self.scheduler.run()
        self._finish()

    def _dependency(self) -> None:
        self.dependency_done = True
        for fragment in self.dependency_waiters:
            self.scheduler.wake(fragment)

    def _finish(self) -> None:
        self.current = None
        for cta in self.ctas:
            warps = slice(cta.rank * cta.warp_count, (cta.rank + 1) * cta.warp_count)
            for index, executed in enumerate(self.executed[warps]):
                self.counts.add_instructions(index, executed, self.program)

    # ---- findings ----

    def where(self, ahead: int = 0) -> Where:
        """The instruction that runs now (the interpreter has advanced the program counter past it; ``ahead``: not yet)."""
        current = self.current
        if isinstance(current, AsyncOp):
            return current.where
        if current is None:
            return Where(self.index)
        ops = self.program.ops
        source = ops[min(current.pc - 1 + ahead, len(ops) - 1)].source
        return Where(self.index, current.warp.cta.rank, current.warp.index, source.line, source.text)

    def report(self, check: str, text: str) -> None:
        """Report a finding about the instruction that runs now."""
        self.findings.add(check, text, self.where())

    def report_next(self, check: str, text: str) -> None:
        """The same, before the program counter moved."""
        self.findings.add(check, text, self.where(ahead=1))

    def label(self, offset: int) -> str:
        """A byte of dynamic shared memory, by the caller's name for it where there is one."""
        name = self.launch.labels.get(offset - self.program.static_shared)
        return f"{name} (offset {offset})" if name else f"shared memory offset {offset}"

    def found(self) -> list[Finding]:
        return self.findings.list()

    # ---- exits ----

    def exit(self, fragment: Fragment, lanes: Lanes) -> None:
        """Lanes end; with the last thread of a CTA its shared memory dies."""
        warp = fragment.warp
        if self.sanitizer:
            self.sanitizer.exited(warp, lanes)
        if self.barrier.owed.get(warp.number, 0) & lanes.bits:
            self.report("A-CLUSTER-WAIT", "threads exit that arrived on the cluster barrier and never waited for it")
        for runnable in warp.exit(fragment, lanes.bits):
            self.scheduler.wake(runnable)
        self.release_cluster_barrier()
        if not any(w.live for w in warp.cta.warps):
            self._end(warp.cta)

    def _end(self, cta: Cta) -> None:
        cta.alive = False
        own = [b for (rank, _), b in self.barriers.items() if rank == cta.rank]
        if self.sanitizer:
            self.sanitizer.cta_exited(cta.rank, own)
        for barrier in own:
            if barrier.tx:
                text = f"at the exit of CTA {cta.rank}: {barrier.tx} bytes outstanding on {barrier.name}"
                self.report("E-TX", f"{text} in phase {barrier.phase}")
            if barrier.pending != barrier.expected:
                arrived = f"{barrier.expected - barrier.pending} of {barrier.expected} arrivals in phase {barrier.phase}"
                self.report("E-MBAR-PARTIAL", f"at the exit of CTA {cta.rank}: {barrier.name} has {arrived}")
        if late := [b.name for b in own if b.commits or b.committed > b.observed]:
            text = f"CTA {cta.rank} exits although nobody waited for the last arrivals of tcgen05.commit on {', '.join(late)}"
            self.report("A-COMMIT-EXIT", text)
        if running := [w.index for w in cta.warps if w.wgmma and w.wgmma.queue]:
            self.report("E-WGMMA", f"CTA {cta.rank} exits while MMAs of warps {running} are outstanding")
        if cta.tmem.allocations:
            self.report("E-T5-ALLOC", f"CTA {cta.rank} exits without freeing TMEM columns {cta.tmem.allocations}")

    # ---- the cluster barrier ----

    def release_cluster_barrier(self) -> None:
        """Complete the phase if every live thread has arrived."""
        barrier = self.barrier
        if not barrier.arrived:
            return
        for cta in self.ctas:
            for warp in cta.warps:
                if warp.live & ~barrier.arrived.get(warp.number, 0):
                    return
        barrier.phase += 1
        barrier.arrived = {}
        if self.sanitizer and barrier.arriving is not None:
            barrier.complete = barrier.arriving.copy()
        waiting, barrier.waiting = barrier.waiting, []
        for fragment in waiting:
            self.scheduler.wake(fragment)
