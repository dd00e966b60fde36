"""What the sanitizer can say: the catalogue of check ids, one finding, and the list that collects them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

Severity = Literal["error", "assumption", "info"]

CATALOGUE: dict[str, tuple[Severity, str]] = {
    # memory
    "E-UNINIT": ("error", "read of shared memory, TMEM, a register or an output buffer that nobody wrote"),
    "E-RACE": ("error", "conflicting accesses that no synchronisation orders"),
    "A-PACKET": ("assumption", "a 4-byte value that an unordered relaxed load saw of another thread is used: it may be an old one"),
    "E-SCOPE": ("error", "data of another CTA consumed through a CTA-scope acquire"),
    "E-PROXY": ("error", "written by ordinary stores, then accessed by TMA or MMA without fence.proxy.async in between"),
    "A-STASYNC": ("assumption", "bytes that st.async wrote are accessed by TMA or MMA without fence.proxy.async"),
    "W-PROXY-WAR": ("info", "read by ordinary loads, then overwritten by TMA, ordered but without a proxy fence"),
    "E-SMEM": ("error", "shared memory access out of bounds, misaligned, or in the wrong window"),
    "E-GLOBAL": ("error", "global access out of bounds, misaligned, to a hole of a sparse buffer, or a store to an input"),
    "E-DSMEM-LIFE": ("error", "access to another CTA's shared memory before it has started or after it may have exited"),
    "E-PDL": ("error", "access before griddepcontrol.wait that must come after it, or a store after launch_dependents"),
    # mbarriers
    "E-MBAR-UNINIT": ("error", "operation on an mbarrier that is not initialised, or whose init does not happen before it"),
    "E-MBAR-REINIT": ("error", "init of a live mbarrier"),
    "E-MBAR-RANGE": ("error", "arrival count or transaction count out of range, or a misaligned mbarrier"),
    "E-MBAR-UNDERFLOW": ("error", "more arrivals than the phase expects"),
    "E-MBAR-OVERLAP": ("error", "data access to the bytes of a live mbarrier"),
    "E-MBAR-REMOTE": ("error", "an operation that is only allowed on the own CTA's mbarrier"),
    "E-MBAR-LAP": ("error", "the barrier ran ahead of a waiter, or a phase went on before anybody observed the previous one"),
    "E-MBAR-INITFENCE": ("error", "remote or asynchronous use of an mbarrier whose init was not fenced (fence.mbarrier_init)"),
    "E-TX": ("error", "transaction bytes outstanding at exit: expect_tx and delivered bytes differ"),
    "E-COPY-EXIT": ("error", "a CTA exits although nobody waited for bulk copies into its shared memory: they may land after it"),
    "E-MBAR-PARTIAL": ("error", "a phase has some of its arrivals at exit, so nobody can have waited for it"),
    # execution
    "E-DEADLOCK": ("error", "nothing can run, or the instruction limit is reached"),
    "E-SYNC": ("error", "a warp-collective instruction with lanes missing, or a barrier used with different counts"),
    "A-CONVERGE": (
        "assumption",
        "an .aligned instruction after a divergent branch without bar.warp.sync: PTX does not promise that lanes meet",
    ),
    "A-CLUSTER-WAIT": ("assumption", "a thread exits that arrived on the cluster barrier and never waited for it"),
    "E-CONTRACT": ("error", "mul.f32 without .rn feeding an add without .rn: ptxas may fuse them"),
    # tensor cores
    "E-DESC": ("error", "an operand descriptor or instruction descriptor that the hardware does not define"),
    "E-T5-ALLOC": ("error", "TMEM allocation rules broken: size, growth, permit, missing or double dealloc, access outside"),
    "E-T5-ORDER": ("error", "tcgen05 accesses without the commit, wait::ld or tcgen05.fence that orders them"),
    "A-T5-ALLOC-FENCE": ("assumption", "TMEM used by another warp than the allocating one without tcgen05 fences since the alloc"),
    "A-T5-PERMIT": (
        "assumption",
        "a CTA waits for another one while it holds the right to allocate TMEM: a CTA beside it on the SM may wait for that right",
    ),
    "A-COMMIT-EXIT": ("assumption", "a CTA exits although nobody waited for the last arrivals of tcgen05.commit on one of its mbarriers"),
    "E-T5-LANE": ("error", "tcgen05.ld outside the warp's lane quarter, or with a non-uniform address"),
    "E-T5-ISSUE": ("error", "MMA or commit from several lanes, or a commit by a thread that issued no MMA while others did"),
    "E-WGMMA": ("error", "wgmma registers used before wait_group, missing wgmma.fence, or warps of a group disagree"),
    "E-TMA": ("error", "TMA with a bad tensor map, coordinates, alignment, or a barrier in another CTA"),
}


@dataclasses.dataclass(frozen=True)
class Where:
    """The instruction that a finding is about: indices as in the launch, ``line`` of the PTX text (1-based)."""

    cluster: int = -1
    cta: int = -1
    warp: int = -1
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        place = ", ".join(f"{n} {v}" for n, v in (("cluster", self.cluster), ("CTA", self.cta), ("warp", self.warp)) if v >= 0)
        return f"{place}, line {self.line}: {self.text}" if self.line else place


@dataclasses.dataclass
class Finding:
    """One kind of event at one instruction."""

    id: str
    message: str
    where: Where
    count: int = 1
    """How often it happened; message and place are those of the first time."""

    @property
    def severity(self) -> Severity:
        return CATALOGUE[self.id][0]

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.id} [{self.severity}] {self.message}{times}\n    at {self.where}"


class Findings:
    """Collects findings; equal ids at one instruction count as one finding."""

    def __init__(self, disabled: Iterable[str] = (), limit: int = 200) -> None:
        self._disabled = frozenset(disabled)
        if unknown := sorted(self._disabled - CATALOGUE.keys()):
            raise ValueError(f"unknown check ids {unknown}; known: {sorted(CATALOGUE)}")
        self._limit = limit
        self._found: dict[tuple[str, int, str], Finding] = {}
        self.dropped = 0

    def add(self, id: str, message: str, where: Where) -> None:
        """Report ``id`` unless it is disabled."""
        assert id in CATALOGUE, id
        if id in self._disabled:
            return
        # without an instruction the message tells findings apart
        key = (id, where.line, "" if where.line else message)
        if key in self._found:
            self._found[key].count += 1
        elif len(self._found) >= self._limit:
            self.dropped += 1
        else:
            self._found[key] = Finding(id, message, where)

    def merge(self, others: Iterable[Finding]) -> None:
        """Add the findings of another cluster."""
        for other in others:
            key = (other.id, other.where.line, "" if other.where.line else other.message)
            if key in self._found:
                self._found[key].count += other.count
            else:
                self._found[key] = dataclasses.replace(other)

    def list(self) -> list[Finding]:
        """All findings, errors first, each group in the order of first occurrence."""
        order = {"error": 0, "assumption": 1, "info": 2}
        return sorted(self._found.values(), key=lambda f: order[f.severity])
