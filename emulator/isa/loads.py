"""Loads and stores: shared and global memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..decode import Decoder, Execute, opcode
from ..memory import POISON, SHARED_START, Allocation, read_span
from ..parser import Instruction
from ..warp import Fragment, Lanes
from .common import TYPE_WIDTH

Index = NDArray[np.int64]

_TYPES = ("b8", "u8", "b16", "u16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
_VECTORS = {"": 1, ".v2": 2, ".v4": 4}


def _shape(name: str) -> tuple[int, int]:
    """(bits per element, elements) of a load or store opcode."""
    parts = name.split(".")
    vector = parts[-2] if parts[-2] in ("v2", "v4") else ""
    return TYPE_WIDTH[parts[-1]], int(vector[1:] or 1)


def _names(head: str) -> list[str]:
    """All vector and type variants, up to 16 bytes."""
    found = []
    for vector, count in _VECTORS.items():
        found += [f"{head}{vector}.{kind}" for kind in _TYPES if TYPE_WIDTH[kind] * count <= 128]
    return found


# ---- shared memory ----


def own_shared(fragment: Fragment, lanes: Lanes, addresses: Any, size: int, what: str) -> tuple[Index, Lanes] | None:
    """(flat byte index per active lane, the lanes that may access): shared::cta addresses of ``size`` aligned bytes.

    Lanes with a bad address are reported and left out; None if no lane is left.
    """
    cta = fragment.warp.cta
    shared = cta.cluster.shared
    ranks, offsets = shared.locate(addresses[lanes.index])
    good = (ranks == cta.rank) & (offsets >= SHARED_START) & (offsets + size <= shared.end) & (offsets % size == 0)
    if not good.all():
        first = int(np.flatnonzero(~good)[0])
        problem = shared.problem(int(ranks[first]), int(offsets[first]), size, size)
        cta.cluster.report("E-SMEM", f"{what}: {problem or 'the address belongs to another CTA'}")
        if not good.any():
            return None
        from ..warp import lanes_of

        lanes = lanes_of(int(np.bitwise_or.reduce(np.int64(1) << lanes.index[good])))
        offsets = offsets[good]
    return cta.rank * shared.span + offsets, lanes


def granules(cluster: Cluster, flat: Index, size: int, lane_index: Index) -> tuple[Index, Index]:
    """(granules touched by accesses of ``size`` bytes at ``flat``, the lane of each)."""
    granule = cluster.program.granule
    count = max(1, size // granule)
    if count == 1:
        return flat // granule, lane_index
    return (flat[:, None] // granule + np.arange(count)).ravel(), np.repeat(lane_index, count)


@opcode(*_names("ld.shared"), *_names("ld.shared::cta"))
def _ld_shared(decoder: Decoder, instruction: Instruction) -> Execute:
    width, count = _shape(instruction.opcode)
    d, a = decoder.expect(2)
    base, offset = decoder.address(a, 32)
    targets = [decoder.result(item, width) for item in decoder.vector(d, count)]
    size = width // 8 * count
    decoder.granule = min(decoder.granule, width // 8)
    each = np.arange(count)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cluster = fragment.warp.cta.cluster
        u = fragment.u
        found = own_shared(fragment, lanes, u[base] + np.uint32(offset & 0xFFFFFFFF), size, "load")
        if found is None:
            return
        flat, lanes = found
        cluster.counts.bytes["shared load"] += size * lanes.count
        if cluster.sanitizer:
            at, lane_of = granules(cluster, flat, size, lanes.index)
            cluster.sanitizer.shared.generic_read(fragment.warp.clock, lanes, at, lane_of)
        values = cluster.shared.views[width][flat[:, None] * 8 // width + each]
        for i, target in enumerate(targets):
            if target >= 0:
                u[target][lanes.index] = values[:, i]

    return execute


@opcode(*_names("st.shared"), *_names("st.shared::cta"))
def _st_shared(decoder: Decoder, instruction: Instruction) -> Execute:
    width, count = _shape(instruction.opcode)
    a, v = decoder.expect(2)
    base, offset = decoder.address(a, 32)
    sources = [decoder.source(item, width) for item in decoder.vector(v, count)]
    size = width // 8 * count
    decoder.granule = min(decoder.granule, width // 8)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cluster = fragment.warp.cta.cluster
        u = fragment.u
        found = own_shared(fragment, lanes, u[base] + np.uint32(offset & 0xFFFFFFFF), size, "store")
        if found is None:
            return
        flat, lanes = found
        cluster.counts.bytes["shared store"] += size * lanes.count
        if cluster.sanitizer:
            at, lane_of = granules(cluster, flat, size, lanes.index)
            cluster.sanitizer.shared.generic_write(fragment.warp.clock, lanes, at, lane_of)
        view, first = cluster.shared.views[width], flat * 8 // width
        for i, source in enumerate(sources):
            view[first + i] = u[source][lanes.index]

    return execute


# ---- global memory ----


def _split(cluster: Cluster, addresses: Any, lanes: Lanes, size: int, what: str) -> list[tuple[Allocation, Index, Index]]:
    """Per buffer: (allocation, byte offset per lane, those lanes). Bad addresses are reported and left out."""
    wanted = addresses[lanes.index]
    found: list[tuple[Allocation, Index, Index]] = []
    left = np.ones(lanes.count, bool)
    misaligned = wanted % np.uint64(size) != 0
    if misaligned.any():
        near = cluster.memory.describe(int(wanted[misaligned][0]))
        cluster.report("E-GLOBAL", f"{what} of {size} bytes at {near}: not {size}-byte aligned")
        left &= ~misaligned
    while left.any():
        first = int(wanted[left][0])
        allocation = cluster.memory.find(first, size)
        if allocation is None:
            cluster.report("E-GLOBAL", f"{what} of {size} bytes at {cluster.memory.describe(first)}: out of bounds")
            left &= wanted != np.uint64(first)
            continue
        start = np.uint64(allocation.address)
        inside = left & (wanted >= start) & (wanted - start <= np.uint64(allocation.buffer.size - size))
        found.append((allocation, (wanted[inside] - start).astype(np.int64), lanes.index[inside]))
        left &= ~inside
    return found


def _bytes_of(cluster: Cluster, allocation: Allocation, offsets: Index, size: int) -> Any:
    """uint8 [n, size]."""
    data = allocation.buffer.data
    if isinstance(data, np.ndarray):
        return data[offsets[:, None] + np.arange(size)]
    rows = np.full((len(offsets), size), POISON, np.uint8)
    for i, offset in enumerate(offsets):
        piece = read_span(allocation.buffer, int(offset), size)
        if piece is None:
            cluster.report("E-GLOBAL", f"load from a part of {allocation.buffer.name} that does not exist (byte {offset})")
        else:
            rows[i] = piece
    return rows


@opcode(*_names("ld.global"), *_names("ld.global.nc"))
def _ld_global(decoder: Decoder, instruction: Instruction) -> Execute:
    width, count = _shape(instruction.opcode)
    d, a = decoder.expect(2)
    base, offset = decoder.address(a, 64)
    targets = [decoder.result(item, width) for item in decoder.vector(d, count)]
    size = width // 8 * count
    read_only = ".nc" in instruction.opcode

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        u = fragment.u
        addresses = u[base] + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        for target in targets:
            u[target][lanes.index] = ~u[target].dtype.type(0)
        for allocation, offsets, by in _split(cluster, addresses, lanes, size, "load"):
            cluster.counts.bytes["global load"] += size * len(by)
            if cluster.sanitizer:
                at = (offsets[:, None] + np.arange(size)).ravel()
                cluster.sanitizer.globals.load(warp.clock, lanes, allocation, at, np.repeat(by, size))
            if read_only and allocation.dirty is not None and any(allocation.dirty[o : o + size].any() for o in offsets):
                cluster.report("E-GLOBAL", f"ld.global.nc of bytes of {allocation.buffer.name} that this kernel writes")
            if allocation.buffer.predecessor and not cluster.dependency_done:
                continue  # not there yet: the lanes keep the poison
            values = _bytes_of(cluster, allocation, offsets, size).view(u[targets[0]].dtype)
            for i, target in enumerate(targets):
                u[target][by] = values[:, i]

    return execute


@opcode(*_names("st.global"))
def _st_global(decoder: Decoder, instruction: Instruction) -> Execute:
    width, count = _shape(instruction.opcode)
    a, v = decoder.expect(2)
    base, offset = decoder.address(a, 64)
    sources = [decoder.source(item, width) for item in decoder.vector(v, count)]
    size = width // 8 * count

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        u = fragment.u
        for allocation, offsets, by in _split(cluster, u[base] + np.uint64(offset & 0xFFFFFFFFFFFFFFFF), lanes, size, "store"):
            cluster.counts.bytes["global store"] += size * len(by)
            at = (offsets[:, None] + np.arange(size)).ravel()
            if cluster.sanitizer:
                cluster.sanitizer.globals.store(warp.clock, lanes, allocation, at, np.repeat(by, size))
            data = allocation.buffer.data
            if allocation.dirty is None or not isinstance(data, np.ndarray):
                cluster.report("E-GLOBAL", f"store to {allocation.buffer.name}, which is an input")
                continue
            allocation.dirty[at] = True
            values = np.stack([u[source][by] for source in sources], axis=1)
            data[at] = values.view(np.uint8).ravel()

    return execute
