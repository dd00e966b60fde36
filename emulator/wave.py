"""The clusters that are alive at the same time: one, or with ``Launch.co_resident`` the whole grid. They share one scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from .cluster import Cluster
from .config import Arithmetic, Checks, Launch, Limits
from .decode import Program
from .findings import Findings, Where
from .memory import GlobalMemory, ParameterBlock
from .polling import Watch
from .report import Counts
from .sanitizer import Clocks, GlobalShadow
from .scheduler import AsyncOp, Scheduler
from .stores import StoreBuffer
from .warp import Fragment


class Wave:
    """What the running clusters have in common; a cluster's *slot* is its position in ``clusters``."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        indices: Sequence[int],
        memory: GlobalMemory,
        parameters: ParameterBlock,
        arithmetic: Arithmetic,
        checks: Checks | None,
        limits: Limits,
        policy: str,
        seed: int,
    ) -> None:
        self.program, self.launch = program, launch
        self.memory, self.parameters, self.arithmetic, self.limits = memory, parameters, arithmetic, limits
        self.checks = checks or Checks()
        self.rng = random.Random(f"{seed}/{indices[0]}")
        self.numpy_rng = np.random.default_rng(self.rng.getrandbits(64))
        self.findings = Findings(self.checks.disabled, limits.findings)
        self.current: Fragment | AsyncOp | None = None
        """What runs now."""
        self.dependency_done = False
        """The preceding grid has completed."""
        self.dependency_waiters: list[Fragment] = []
        self.globals = GlobalShadow(self) if checks is not None else None
        self.watch = Watch()
        self.stores = StoreBuffer(self)
        self.clusters = [Cluster(self, index, slot) for slot, index in enumerate(indices)]
        self.scheduler = Scheduler(self, policy)
        for cluster in self.clusters:
            cluster.scheduler = self.scheduler

    def run(self) -> None:
        """Execute to the end. What went wrong is in ``findings``."""
        first = Where(self.clusters[0].index)
        for product, total in self.program.contracted:
            where = Where(first.cluster, line=total.line, text=total.text)
            self.findings.add("E-CONTRACT", f"the product of line {product.line} may be fused into this sum", where)
        self.scheduler.submit(AsyncOp("the preceding grid completes", 0, first, self._dependency))
        for cluster in self.clusters:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    if cluster.sanitizer:
                        warp.clock = cluster.sanitizer.start(warp)
                    self.scheduler.wake(warp.fragments[0])
        with np.errstate(all="ignore"):
            self.scheduler.run()
        self.current = None

    def clocks(self, slot: int) -> Clocks:
        """Of the cluster, under the sanitizer."""
        sanitizer = self.clusters[slot].sanitizer
        assert sanitizer is not None
        return sanitizer.clocks

    def _dependency(self) -> None:
        self.dependency_done = True
        for fragment in self.dependency_waiters:
            self.scheduler.wake(fragment)

    def counts(self) -> Counts:
        """Totals over the clusters."""
        total = Counts()
        for cluster in self.clusters:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    cluster.counts.add_instructions(warp.index, warp.executed, self.program)
            total.merge(cluster.counts)
        return total
