"""Strong accesses to global memory at gpu scope (relaxed, acquire, release), and atomics on global and on the CTA's shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..decode import DTYPES, NONE, Decoder, Execute, Signal, opcode
from ..memory import Allocation
from ..parser import Instruction
from ..polling import PollRecord, PollSite
from ..sanitizer import taint
from ..warp import Fragment, Lanes, lanes_of
from .common import TYPE_WIDTH
from .loads import CLASH, Access, Index, access_of, bytes_of, granules, own_shared, split

_TYPES = ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")


def _names(head: str) -> list[str]:
    """Vector variants up to 16 bytes: an element is an access of its own, whose order among the others is open."""
    counts = {"": 1, ".v2": 2, ".v4": 4}
    return [f"{head}{v}.{kind}" for v, count in counts.items() for kind in _TYPES if TYPE_WIDTH[kind] * count <= 128]


# ---- loads ----


@opcode(*_names("ld.relaxed.gpu.global"), *_names("ld.acquire.gpu.global"))
def _load(decoder: Decoder, instruction: Instruction) -> Execute:
    """A load of a poll loop parks where a further round could read nothing new."""
    access = access_of(decoder, instruction, 64)
    here, acquires = decoder.here, ".acquire" in instruction.opcode

    def execute(fragment: Fragment, lanes: Lanes) -> Signal | None:
        cluster = fragment.warp.cta.cluster
        site = cluster.program.polls.get(here)
        if site is not None and _same_again(fragment, site, here):
            assert fragment.poll is not None
            cluster.wave.watch.park(cluster.scheduler, fragment, fragment.poll)
            return Signal.RETRY
        parts = split(cluster, access.addresses(fragment), lanes, access.size, "load")
        access.poison(fragment, lanes)
        for allocation, offsets, by in parts:
            _read(fragment, lanes, access, allocation, offsets, by, acquires)
        return None

    return execute


def _same_again(fragment: Fragment, site: PollSite, here: int) -> bool:
    """The fragment has come round a poll loop, and nothing that it read has changed. Else a new round may begin here."""
    record = fragment.poll
    if record is not None and record.loop == site.loop:
        if record.start != here and (record.start != NONE or not site.parks):
            return False  # in the middle of a round
        if record.start == here and fragment.warp.cta.cluster.wave.watch.unchanged(record):
            return True
    fragment.poll = PollRecord(site.loop, here if site.parks else NONE, site.inputs)
    return False


def _read(fragment: Fragment, lanes: Lanes, access: Access, allocation: Allocation, offsets: Index, by: Index, acquires: bool) -> None:
    warp = fragment.warp
    cluster, size = warp.cta.cluster, access.size
    cluster.counts.bytes["strong load"] += size * len(by)
    cluster.wave.stores.settle(allocation, offsets, size, cluster)
    if allocation.buffer.predecessor and not cluster.wave.dependency_done:
        fragment.poll = None  # not there yet: the lanes keep the poison, and it will come without a store
    elif fragment.poll is not None and fragment.poll.start != NONE:
        cluster.wave.watch.read(fragment.poll, allocation, offsets)
    late = None
    if cluster.sanitizer:
        at = (offsets[:, None] + np.arange(size)).ravel()
        late = cluster.sanitizer.globals.load(warp.clock, lanes, allocation, at, np.repeat(by, size), access.width // 8)
        if acquires:
            for lane, offset in zip(by.tolist(), offsets.tolist(), strict=True):
                for i in range(len(access.registers)):
                    cluster.sanitizer.globals.acquire(warp.clock, lanes_of(1 << lane), allocation, offset + i * access.width // 8)
    if allocation.buffer.predecessor and not cluster.wave.dependency_done:
        return
    raw = bytes_of(cluster, allocation, offsets, size)
    if fragment.poll is not None:
        fragment.poll.last = (allocation, int(offsets[0]), size, raw[0].tobytes())
    access.write(fragment, by, raw.view(DTYPES[access.width]))
    if late is not None and not acquires and access.width < 64:
        _mark(fragment, access, by, late)


def _mark(fragment: Fragment, access: Access, by: Index, late: Index) -> None:
    """Note which registers hold values that nothing vouches for; ``late``: byte indices in [lane, element, byte]."""
    each = access.width // 8
    for i, register in enumerate(access.registers):
        lanes = by[np.unique(late[late // each % len(access.registers) == i] // access.size)]
        if register != NONE:
            taint.mark(fragment.warp, register, sum(1 << lane for lane in lanes.tolist()), taint.PACKET)


# ---- stores ----


@opcode(*_names("st.relaxed.gpu.global"), *_names("st.release.gpu.global"))
def _store(decoder: Decoder, instruction: Instruction) -> Execute:
    """Relaxed: other clusters see it later, see :mod:`emulator.stores`."""
    access = access_of(decoder, instruction, 64)
    size, element = access.size, access.width // 8
    releases = ".release" in instruction.opcode

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        for allocation, offsets, by in split(cluster, access.addresses(fragment), lanes, size, "store"):
            cluster.counts.bytes["strong store"] += size * len(by)
            if cluster.sanitizer:
                at = (offsets[:, None] + np.arange(size)).ravel()
                cluster.sanitizer.globals.store(warp.clock, lanes, allocation, at, np.repeat(by, size), element)
            if allocation.dirty is None:
                cluster.report("E-GLOBAL", f"store to {allocation.buffer.name}, which is an input")
                continue
            places = (offsets[:, None] + np.arange(0, size, element)).ravel()
            values = access.read(fragment, by).view(np.uint8).reshape(-1, element)
            if _clash(places, values):
                cluster.report("E-RACE", CLASH)
            if releases:
                cluster.wave.stores.flush(cluster)
            cluster.wave.stores.issue(warp.cta, allocation, places, values, partial(_landed, cluster, allocation), at_once=releases)
            if releases and cluster.sanitizer:
                for lane, offset in zip(np.repeat(by, len(access.registers)).tolist(), places.tolist(), strict=True):
                    cluster.sanitizer.globals.release(warp.clock, lanes_of(1 << lane), allocation, offset, follows=False)

    return execute


def _clash(places: Index, values: Any) -> bool:
    """Do elements with different values go to one place?"""
    order = np.argsort(places, kind="stable")
    same = places[order][1:] == places[order][:-1]
    return bool(same.any() and (values[order][1:] != values[order][:-1])[same].any())


def _landed(cluster: Cluster, allocation: Allocation, places: Index) -> None:
    if cluster.sanitizer:
        cluster.sanitizer.globals.overwritten(allocation, places)
    cluster.wave.watch.wrote(cluster.scheduler, allocation, places)


# ---- atomics ----


@dataclasses.dataclass(frozen=True)
class _Operation:
    """``function(old, b, c)`` on Python integers gives the new value, of which the low bits count."""

    width: int
    signed: bool
    operands: int
    function: Callable[[int, int, int], int]


def _operations() -> dict[str, _Operation]:
    found = {}
    for width in (32, 64):
        for kind, signed in (("u", False), ("s", True)):
            found[f"min.{kind}{width}"] = _Operation(width, signed, 1, lambda old, b, _: min(old, b))
            found[f"max.{kind}{width}"] = _Operation(width, signed, 1, lambda old, b, _: max(old, b))
            found[f"add.{kind}{width}"] = _Operation(width, signed, 1, lambda old, b, _: old + b)
        found[f"and.b{width}"] = _Operation(width, False, 1, lambda old, b, _: old & b)
        found[f"or.b{width}"] = _Operation(width, False, 1, lambda old, b, _: old | b)
        found[f"xor.b{width}"] = _Operation(width, False, 1, lambda old, b, _: old ^ b)
        found[f"exch.b{width}"] = _Operation(width, False, 1, lambda old, b, _: b)
        found[f"cas.b{width}"] = _Operation(width, False, 2, lambda old, b, c: c if old == b else old)
    del found["add.s64"]  # PTX has no such atomic
    return found


_OPERATIONS = _operations()
_REDUCTIONS = [name for name in _OPERATIONS if name.split(".")[0] not in ("exch", "cas")]


@dataclasses.dataclass(frozen=True)
class _Atomic:
    """The operands of an atomic."""

    operation: _Operation
    target: int
    base: int
    offset: int
    values: tuple[int, ...]

    @classmethod
    def of(cls, decoder: Decoder, instruction: Instruction, address_width: int) -> _Atomic:
        operation = _OPERATIONS[".".join(instruction.opcode.split(".")[-2:])]
        returns = instruction.opcode.startswith("atom")
        operands = list(decoder.expect(1 + operation.operands + returns))
        result = operands.pop(0) if returns else None
        base, offset = decoder.address(operands.pop(0), address_width)
        values = tuple(decoder.source(o, operation.width) for o in operands)
        target = decoder.result(result, operation.width) if result is not None else NONE
        return cls(operation, target, base, offset, values)

    def addresses(self, fragment: Fragment) -> Any:
        base = fragment.u[self.base]
        return base + base.dtype.type(self.offset & int(np.iinfo(base.dtype).max))

    def apply(self, fragment: Fragment, lane: int, old: Any) -> Any:
        """The new value, as the unsigned type of ``old``; the lane's result register gets the old one."""
        values = fragment.s if self.operation.signed else fragment.u
        b, *c = (int(values[v][lane]) for v in self.values)
        before = int(old.astype(old.dtype.str.replace("u", "i"))) if self.operation.signed else int(old)
        if self.target != NONE:
            fragment.u[self.target][lane] = old
        return old.dtype.type(self.operation.function(before, b, c[0] if c else 0) & ((1 << self.operation.width) - 1))


def _in_some_order(cluster: Cluster, lanes: Lanes) -> list[int]:
    """The lanes' operations happen one after another; in which order is open."""
    order = lanes.index.tolist()
    cluster.rng.shuffle(order)
    return order


@opcode(
    *[f"atom.{s}.gpu.global.{name}" for s in ("relaxed", "acquire", "release", "acq_rel") for name in _OPERATIONS],
    *[f"red.{s}.gpu.global.{name}" for s in ("relaxed", "release") for name in _REDUCTIONS],
)
def _atomic(decoder: Decoder, instruction: Instruction) -> Execute:
    atomic = _Atomic.of(decoder, instruction, 64)
    order = instruction.opcode.split(".")[1]
    acquires, releases = order in ("acquire", "acq_rel"), order in ("release", "acq_rel")

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cluster = fragment.warp.cta.cluster
        addresses = atomic.addresses(fragment)
        if releases:
            cluster.wave.stores.flush(cluster)
        for lane in _in_some_order(cluster, lanes):
            one = lanes_of(1 << lane)
            for allocation, offsets, _ in split(cluster, addresses, one, atomic.operation.width // 8, "atomic"):
                _modify(fragment, one, atomic, allocation, offsets, acquires, releases)

    return execute


def _modify(
    fragment: Fragment, lane: Lanes, atomic: _Atomic, allocation: Allocation, offsets: Index, acquires: bool, releases: bool
) -> None:
    """One lane's read-modify-write of global memory."""
    warp = fragment.warp
    cluster, size = warp.cta.cluster, atomic.operation.width // 8
    if allocation.dirty is None:
        cluster.report("E-GLOBAL", f"atomic on {allocation.buffer.name}, which is an input")
        return
    cluster.counts.bytes["atomic"] += size
    cluster.wave.stores.settle(allocation, offsets, size)
    at = offsets[0] + np.arange(size)
    if cluster.sanitizer:
        shadow, by = cluster.sanitizer.globals, np.repeat(lane.index, size)
        shadow.load(warp.clock, lane, allocation, at, by, size)
        shadow.store(warp.clock, lane, allocation, at, by, size)
        if acquires:
            shadow.acquire(warp.clock, lane, allocation, int(offsets[0]))
        if releases:
            shadow.release(warp.clock, lane, allocation, int(offsets[0]), follows=True)
    old = bytes_of(cluster, allocation, offsets, size).view(DTYPES[8 * size])[0, 0]
    allocation.write(at, np.array([atomic.apply(fragment, lane.first, old)]).view(np.uint8))
    cluster.wave.watch.wrote(cluster.scheduler, allocation, at)


@opcode(
    *[f"atom.relaxed.cta.shared::cta.{name}" for name in _OPERATIONS],
    *[f"red.relaxed.cta.shared::cta.{name}" for name in _REDUCTIONS],
)
def _shared_atomic(decoder: Decoder, instruction: Instruction) -> Execute:
    atomic = _Atomic.of(decoder, instruction, 32)
    width = atomic.operation.width

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        found = own_shared(fragment, lanes, atomic.addresses(fragment), width // 8, "atomic")
        if found is None:
            return
        flat, lanes = found
        if cluster.sanitizer:
            at, lane_of = granules(cluster, flat, width // 8, lanes.index)
            cluster.sanitizer.shared.atomic(warp.clock, lanes, at, lane_of)
        place = dict(zip(lanes.index.tolist(), (flat * 8 // width).tolist(), strict=True))
        view = cluster.shared.views[width]
        for lane in _in_some_order(cluster, lanes):
            view[place[lane]] = atomic.apply(fragment, lane, view[place[lane]])

    return execute
