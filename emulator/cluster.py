"""One cluster: fresh shared memory, its CTAs, the cluster barrier, and the services that instructions use."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from .cta import Cta
from .findings import Where
from .mbarrier import Mbarrier
from .memory import SharedMemory
from .report import Counts, Timeline
from .sanitizer import Sanitizer
from .scheduler import AsyncOp, Scheduler
from .warp import Fragment, Lanes

if TYPE_CHECKING:
    from .wave import Wave


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

    scheduler: Scheduler
    """The wave's, which sets it."""

    def __init__(self, wave: Wave, index: int, slot: int) -> None:
        """``index``: in the grid; ``slot``: in the wave."""
        self.wave, self.index, self.slot = wave, index, slot
        self.program, self.launch, self.checks = wave.program, wave.launch, wave.checks
        self.memory, self.parameters, self.arithmetic = wave.memory, wave.parameters, wave.arithmetic
        self.rng, self.numpy_rng, self.findings = wave.rng, wave.numpy_rng, wave.findings
        launch, program = self.launch, self.program
        self.shared = SharedMemory(launch.ctas, program.static_shared + launch.dynamic_shared, self.checks.scramble_addresses)
        self.chunks = self.shared.data.reshape(-1, 16)
        self.barriers: dict[tuple[int, int], Mbarrier] = {}
        self.barrier = ClusterBarrier()
        self.timeline = Timeline()
        self.counts = Counts()
        self.ctas = [Cta(self, rank, program) for rank in range(launch.ctas)]
        self.sanitizer = Sanitizer(self, wave.globals, self.ctas[0].warp_count, program.granule) if wave.globals else None

    # ---- findings ----

    def where(self, ahead: int = 0) -> Where:
        """The instruction that runs now (the interpreter has advanced the program counter past it; ``ahead``: not yet)."""
        current = self.wave.current
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
        if unseen := [b.name for b in own if b.landed > b.observed]:
            text = f"CTA {cta.rank} exits although nobody waited for the bulk copies that complete on {', '.join(unseen)}"
            self.report("E-COPY-EXIT", f"{text}: they might have landed in another CTA's shared memory")
        if late := [b.name for b in own if b.commits or b.committed > b.observed]:
            text = f"CTA {cta.rank} exits although nobody waited for the last arrivals of tcgen05.commit on {', '.join(late)}"
            self.report("A-COMMIT-EXIT", text)
        if half := [f"{n} ({b.arrived} of {b.count} threads)" for n, b in cta.barriers.items()]:
            self.report("E-SYNC", f"CTA {cta.rank} exits with threads arrived at barrier {', '.join(half)}")
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
