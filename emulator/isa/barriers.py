"""Synchronisation: mbarriers, named barriers, the cluster barrier, fences, mapa."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cluster import Cluster
from ..cta import NamedBarrier
from ..decode import NONE, Decoder, Execute, Signal, opcode
from ..mbarrier import MAX_COUNT, Mbarrier
from ..memory import SHARED_START
from ..parser import Discard, Instruction
from ..warp import Fragment, Lanes, lanes_of
from .common import assign
from .warp import whole_warp

OBJECT_BYTES = 8


# ---- finding barriers, and what arrivals do ----


def find(cluster: Cluster, address: int, cta: int, remote_allowed: bool, what: str) -> Mbarrier | None:
    """The live mbarrier at a shared address; None, after a report, where there is none."""
    ranks, offsets = cluster.shared.locate(np.array([address], np.uint32))
    rank, offset = int(ranks[0]), int(offsets[0])
    if problem := cluster.shared.problem(rank, offset, OBJECT_BYTES, OBJECT_BYTES):
        cluster.report("E-MBAR-RANGE", f"{what}: mbarrier at a bad address: {problem}")
        return None
    if rank != cta and not remote_allowed:
        cluster.report("E-MBAR-REMOTE", f"{what} on an mbarrier of CTA {rank} by CTA {cta}")
        return None
    if not cluster.ctas[rank].alive:
        cluster.report("E-DSMEM-LIFE", f"{what} on an mbarrier of CTA {rank}, which has exited")
        return None
    barrier = cluster.barriers.get((rank, offset))
    if barrier is None:
        cluster.report("E-MBAR-UNINIT", f"{what}: no mbarrier at {cluster.label(offset - SHARED_START)} of CTA {rank}")
    return barrier


def arrive(cluster: Cluster, barrier: Mbarrier, from_cta: int, count: int) -> None:
    """``count`` arrivals, then the completion test."""
    if cluster.sanitizer:
        cluster.sanitizer.barriers.arriving(barrier, from_cta)
    if problem := barrier.arrive(count):
        cluster.report("E-MBAR-UNDERFLOW", problem)
    complete(cluster, barrier)


def expect(cluster: Cluster, barrier: Mbarrier, byte_count: int) -> None:
    """Expect more bytes in this phase (negative: bytes have come)."""
    if problem := barrier.expect(byte_count):
        cluster.report("E-MBAR-RANGE", problem)


def complete(cluster: Cluster, barrier: Mbarrier) -> None:
    """Go on to the next phase if nothing is outstanding, and wake the waiters."""
    if not barrier.try_complete():
        return
    if cluster.sanitizer:
        cluster.sanitizer.barriers.completed(barrier)
    cluster.timeline.add("phase", barrier.cta, barrier.name, cluster.scheduler.step, cluster.scheduler.step, str(barrier.phase - 1))
    waiters, barrier.waiters = barrier.waiters, []
    for fragment, wait in waiters:
        cluster.scheduler.resume(fragment, wait)


def _addresses(fragment: Fragment, base: int, offset: int) -> Any:
    return fragment.u[base] + np.uint32(offset & 0xFFFFFFFF)


# ---- mbarrier instructions ----


@opcode("mbarrier.init.shared::cta.b64", "mbarrier.init.shared.b64")
def _init(decoder: Decoder, instruction: Instruction) -> Execute:
    a, count = decoder.expect(2)
    base, offset = decoder.address(a, 32)
    number = decoder.source(count, 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cta = fragment.warp.cta
        cluster = cta.cluster
        for lane in lanes.index:
            ranks, offsets = cluster.shared.locate(_addresses(fragment, base, offset)[lane : lane + 1])
            rank, at = int(ranks[0]), int(offsets[0])
            arrivals = int(fragment.u[number][lane])
            problem = cluster.shared.problem(rank, at, OBJECT_BYTES, OBJECT_BYTES)
            if problem or rank != cta.rank:
                cluster.report("E-MBAR-RANGE", f"mbarrier.init at a bad address: {problem or 'another CTA'}")
                continue
            if not 1 <= arrivals <= MAX_COUNT:
                cluster.report("E-MBAR-RANGE", f"mbarrier.init with {arrivals} arrivals")
                continue
            if (rank, at) in cluster.barriers:
                cluster.report("E-MBAR-REINIT", f"mbarrier.init of a live mbarrier: {cluster.barriers[rank, at]}")
            barrier = Mbarrier(rank, at, cluster.label(at - SHARED_START), arrivals, arrivals)
            cluster.barriers[rank, at] = barrier
            if cluster.sanitizer:
                cluster.sanitizer.barriers.initialised(barrier, fragment.warp.clock, lanes_of(1 << int(lane)))
                _mark(cluster, barrier, live=True)

    return execute


def _mark(cluster: Cluster, barrier: Mbarrier, live: bool) -> None:
    assert cluster.sanitizer
    first = (barrier.cta * cluster.shared.span + barrier.offset) // cluster.program.granule
    at = first + np.arange(OBJECT_BYTES // cluster.program.granule)
    cluster.sanitizer.shared.barrier_object(at, barrier.clock.local, live)


@opcode("mbarrier.inval.shared::cta.b64")
def _inval(decoder: Decoder, instruction: Instruction) -> Execute:
    base, offset = decoder.address(decoder.expect(1)[0], 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cluster = fragment.warp.cta.cluster
        address = int(_addresses(fragment, base, offset)[lanes.first])
        if barrier := find(cluster, address, fragment.warp.cta.rank, False, "mbarrier.inval"):
            del cluster.barriers[barrier.cta, barrier.offset]
            if cluster.sanitizer:
                _mark(cluster, barrier, live=False)

    return execute


_SEMANTICS = ("", ".release.cta", ".release.cluster", ".relaxed.cta", ".relaxed.cluster")


def _arrive_names(operation: str) -> list[str]:
    return [f"mbarrier.{operation}{s}.{space}.b64" for s in _SEMANTICS for space in ("shared::cta", "shared::cluster", "shared")]


@opcode(*_arrive_names("arrive"), *_arrive_names("arrive.expect_tx"), *_arrive_names("expect_tx"))
def _arrive(decoder: Decoder, instruction: Instruction) -> Execute:
    """arrive{.expect_tx}: each active lane arrives (once, or ``count`` times), expecting bytes first. The state token is not supported."""
    expects, arrives = "expect_tx" in instruction.opcode, "arrive" in instruction.opcode
    operands = list(instruction.operands)
    if arrives and not isinstance(operands.pop(0), Discard):
        decoder.fail("the state result of mbarrier.arrive is not supported; use _")
    base, offset = decoder.address(operands.pop(0), 32)
    number = decoder.source(operands.pop(0), 32) if operands else NONE
    remote = "shared::cluster" in instruction.opcode
    relaxed = ".relaxed" in instruction.opcode or not arrives
    cluster_scope = ".release.cluster" in instruction.opcode
    if operands:
        decoder.fail("too many operands")

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster, rank = warp.cta.cluster, warp.cta.rank
        addresses = _addresses(fragment, base, offset)
        for lane in lanes.index:
            barrier = find(cluster, int(addresses[lane]), rank, remote, instruction.opcode)
            if barrier is None:
                continue
            amount = int(fragment.u[number][lane]) if number != NONE else 1
            if cluster.sanitizer:
                one = lanes_of(1 << int(lane))
                if barrier.cta != rank:
                    cluster.sanitizer.remote_access(warp.clock, one, np.array([barrier.cta]))
                cluster.sanitizer.barriers.used(barrier, warp.clock, one, "local" if barrier.cta == rank else "remote")
                # a release of CTA scope, which is the default, orders nothing for another CTA
                warp.clock.release(one, barrier.clock.arriving, relaxed or (barrier.cta != rank and not cluster_scope))
            if expects:
                expect(cluster, barrier, amount)
            if arrives:
                arrive(cluster, barrier, rank, 1 if expects else amount)

    return execute


def _wait_names() -> list[str]:
    kinds = ["", ".acquire.cta", ".acquire.cluster", ".relaxed.cta", ".relaxed.cluster"]
    return [f"mbarrier.{w}_wait.parity{k}.{s}.b64" for w in ("try", "test") for k in kinds for s in ("shared::cta", "shared")]


@opcode(*_wait_names())
def _wait(decoder: Decoder, instruction: Instruction) -> Execute:
    """test_wait answers at once. try_wait parks the warp until some lane's answer is True, or answers False early now and then."""
    operands = list(instruction.operands)
    target = decoder.result(operands.pop(0), 1)
    base, offset = decoder.address(operands.pop(0), 32)
    parity = decoder.source(operands.pop(0), 32)
    if operands:  # a time limit in ns, which changes nothing here
        decoder.source(operands.pop(0), 32)
    blocks = ".try_wait" in instruction.opcode
    scope = "cluster" if ".cluster." in instruction.opcode else "cta"
    relaxed = ".relaxed" in instruction.opcode

    def execute(fragment: Fragment, lanes: Lanes) -> Signal | None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        addresses, parities = _addresses(fragment, base, offset)[lanes.index], fragment.u[parity][lanes.index]
        answer = np.zeros(32, bool)
        barriers: list[tuple[Mbarrier, int, Lanes]] = []
        uniform = (addresses == addresses[0]).all() and (parities == parities[0]).all()
        for i in (0,) if uniform else range(lanes.count):
            group = lanes if uniform else lanes_of(1 << int(lanes.index[i]))
            barrier = find(cluster, int(addresses[i]), warp.cta.rank, False, "wait")
            if barrier is None:
                answer[group.index] = True  # there is nothing to wait for: go on, the finding is reported
                continue
            barriers.append((barrier, int(parities[i]), group))
            if cluster.sanitizer:
                cluster.sanitizer.barriers.used(barrier, warp.clock, group, "local")
            if barrier.done(int(parities[i])):
                answer[group.index] = True
                barrier.observed = max(barrier.observed, barrier.phase - 1)
                if cluster.sanitizer:
                    cluster.sanitizer.barriers.observed(barrier, warp.clock, group, scope, relaxed)
        if blocks and not answer.any() and cluster.rng.random() >= cluster.checks.spurious_wait:
            first, wanted = barriers[0][0], barriers[0][1]
            parked = cluster.scheduler.park(fragment, first.name, lambda: f"waits for parity {wanted} of {first}")
            for barrier, _, _ in barriers:
                barrier.waiters.append((fragment, parked))
            return Signal.RETRY
        assign(fragment.u[target], answer, lanes)
        return None

    return execute


# ---- barriers of the CTA and the cluster ----


_BARRIERS = [
    f"{head}.{what}{aligned}" for what in ("sync", "arrive") for head in ("barrier", "barrier.cta") for aligned in ("", ".aligned")
]


@opcode("bar.sync", "bar.cta.sync", "bar.arrive", "bar.cta.arrive", *_BARRIERS)
def _bar(decoder: Decoder, instruction: Instruction) -> Execute:
    """bar.sync a{, b}: b threads (all of the CTA by default) meet; orders their memory accesses. bar.arrive a, b counts without waiting."""
    operands = instruction.operands
    waits = ".sync" in instruction.opcode
    number = decoder.source(operands[0], 32)
    count = decoder.source(operands[1], 32) if len(operands) > 1 else NONE
    if len(operands) > 2 or (not waits and count == NONE):
        decoder.fail("a barrier and a number of threads expected")

    def execute(fragment: Fragment, lanes: Lanes) -> Signal | None:
        warp = fragment.warp
        cta = warp.cta
        cluster = cta.cluster
        whole_warp(fragment, lanes)
        identity = int(fragment.u[number][lanes.first])
        threads = int(fragment.u[count][lanes.first]) if count != NONE else 32 * cta.warp_count
        if threads % 32 or not 0 <= identity < 16:
            cluster.report("E-SYNC", f"barrier {identity} with {threads} threads: ids are 0 to 15, counts multiples of 32")
        state = cta.barriers.setdefault(identity, NamedBarrier(threads))
        if state.count != threads:
            cluster.report("E-SYNC", f"barrier {identity}: {threads} threads here, {state.count} elsewhere")
        state.arrived += 32  # a warp counts whole
        warp.merged = False
        if cluster.sanitizer:
            if state.views is None:
                state.views = cluster.sanitizer.clocks.empty()
            warp.clock.sync(lanes)
            warp.clock.release(lanes, state.views)
        if waits:
            state.waiting.append(fragment)
        if state.arrived < state.count:
            if not waits:
                return None
            cluster.scheduler.park(
                fragment, f"barrier {identity}", lambda: f"waits in barrier {identity}: {state.arrived} of {state.count} threads are there"
            )
            return Signal.PARK
        del cta.barriers[identity]
        for waiting in state.waiting:
            if cluster.sanitizer:
                waiting.warp.clock.acquire(waiting.lanes, state.views)
                waiting.warp.clock.sync(waiting.lanes)
            if waiting is not fragment:
                cluster.scheduler.wake(waiting)
        return None

    return execute


@opcode(*[f"barrier.cluster.arrive{s}{a}" for s in ("", ".release", ".relaxed") for a in ("", ".aligned")])
def _cluster_arrive(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)
    relaxed, aligned = ".relaxed" in instruction.opcode, ".aligned" in instruction.opcode

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        barrier = cluster.barrier
        if aligned:
            whole_warp(fragment, lanes, aligned=True)
        if (barrier.arrived.get(warp.number, 0) | barrier.owed.get(warp.number, 0)) & lanes.bits:
            cluster.report("E-SYNC", "a thread arrives twice on the cluster barrier without waiting in between")
        barrier.arrived[warp.number] = barrier.arrived.get(warp.number, 0) | lanes.bits
        barrier.owed[warp.number] = barrier.owed.get(warp.number, 0) | lanes.bits
        if cluster.sanitizer:
            if barrier.arriving is None:
                barrier.arriving = cluster.sanitizer.clocks.empty()
            warp.clock.release(lanes, barrier.arriving, relaxed)
        cluster.release_cluster_barrier()

    return execute


@opcode(*[f"barrier.cluster.wait{s}{a}" for s in ("", ".acquire") for a in ("", ".aligned")])
def _cluster_wait(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)
    aligned = ".aligned" in instruction.opcode

    def execute(fragment: Fragment, lanes: Lanes) -> Signal | None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        barrier = cluster.barrier
        if aligned:
            whole_warp(fragment, lanes, aligned=True)
        if warp.cta.tmem.allocations and not warp.cta.tmem.relinquished:
            cluster.report("A-T5-PERMIT", f"CTA {warp.cta.rank} waits for its cluster while it holds the right to allocate TMEM")
        if lanes.bits & ~barrier.owed.get(warp.number, 0):
            cluster.report("E-SYNC", "barrier.cluster.wait without a preceding arrive")
            return None
        if barrier.arrived.get(warp.number, 0) & lanes.bits:  # the phase is still open
            barrier.waiting.append(fragment)
            cluster.scheduler.park(fragment, "cluster barrier", lambda: _missing(cluster))
            return Signal.RETRY
        barrier.owed[warp.number] &= ~lanes.bits
        if cluster.sanitizer:
            warp.clock.acquire(lanes, barrier.complete)
        return None

    return execute


def _missing(cluster: Cluster) -> str:
    arrived = cluster.barrier.arrived
    late = [f"CTA {c.rank} warp {w.index}" for c in cluster.ctas for w in c.warps if w.live & ~arrived.get(w.number, 0)]
    return f"waits in the cluster barrier (phase {cluster.barrier.phase}) for {', '.join(late[:4])}{' ...' if len(late) > 4 else ''}"


# ---- fences ----


@opcode("fence.mbarrier_init.release.cluster")
def _fence_init(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        sanitizer = fragment.warp.cta.cluster.sanitizer
        if sanitizer:
            sanitizer.barriers.init_fence(fragment.warp.clock, lanes)

    return execute


@opcode("fence.proxy.async", "fence.proxy.async.shared::cta", "fence.proxy.async.shared::cluster")
def _fence_proxy(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        sanitizer = fragment.warp.cta.cluster.sanitizer
        if sanitizer:
            fragment.warp.clock.fence_proxy(lanes)
            sanitizer.barriers.init_fence(fragment.warp.clock, lanes)

    return execute


# ---- addresses ----


@opcode("mapa.shared::cluster.u32")
def _mapa(decoder: Decoder, instruction: Instruction) -> Execute:
    d, a, cta = decoder.expect(3)
    source, rank, target = decoder.source(a, 32), decoder.source(cta, 32), decoder.result(d, 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        u = fragment.u
        assign(u[target], fragment.warp.cta.cluster.shared.map_to(u[source], u[rank]), lanes)

    return execute
