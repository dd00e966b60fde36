"""Loads and stores: shared and global memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..decode import DTYPES, NONE, Decoder, Execute, opcode
from ..memory import POISON, SHARED_START, Allocation, read_span
from ..parser import Instruction
from ..sanitizer import taint
from ..warp import FULL, Fragment, Lanes, lanes_of
from .common import TYPE_WIDTH
from .warp import whole_warp

Index = NDArray[np.int64]

_TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
_VECTORS = {"": 1, ".v2": 2, ".v4": 4}


def names(head: str) -> list[str]:
    """All vector and type variants, up to 16 bytes."""
    found = []
    for vector, count in _VECTORS.items():
        found += [f"{head}{vector}.{kind}" for kind in _TYPES if TYPE_WIDTH[kind] * count <= 128]
    return found


@dataclasses.dataclass(frozen=True)
class Access:
    """The operands of a load or store."""

    base: int
    offset: int
    registers: tuple[int, ...]
    """One per element; NONE where a load discards it."""
    width: int
    """Bits of an element; a register may be wider."""
    signed: bool

    @property
    def size(self) -> int:
        """Bytes per lane, which is also the alignment."""
        return self.width // 8 * len(self.registers)

    def addresses(self, fragment: Fragment) -> Any:
        """uint32 or uint64 [32]."""
        base = fragment.u[self.base]
        return base + base.dtype.type(self.offset & int(np.iinfo(base.dtype).max))

    def write(self, fragment: Fragment, lanes: Index, values: Any) -> None:
        """Put elements [lanes, count] (unsigned) into the registers, extended to their width."""
        values = values.view(values.dtype.str.replace("u", "i")) if self.signed else values
        for i, register in enumerate(self.registers):
            if register != NONE:
                (fragment.s if self.signed else fragment.u)[register][lanes] = values[:, i]

    def poison(self, fragment: Fragment, lanes: Lanes) -> None:
        """What a load leaves where nothing could be read."""
        self.write(fragment, lanes.index, np.full((lanes.count, len(self.registers)), -1).astype(DTYPES[self.width]))

    def read(self, fragment: Fragment, lanes: Index) -> Any:
        """Elements [lanes, count] (unsigned) of a store: the low bits of the registers."""
        return np.stack([fragment.u[r][lanes].astype(DTYPES[self.width]) for r in self.registers], axis=1)


def access_of(decoder: Decoder, instruction: Instruction, address_width: int) -> Access:
    parts = instruction.opcode.split(".")
    width, count = TYPE_WIDTH[parts[-1]], int(parts[-2][1:]) if parts[-2] in ("v2", "v4") else 1
    load = parts[0] == "ld"
    hinted = "L2::cache_hint" in parts
    first, second, *policy = decoder.expect(3 if hinted else 2)
    value, address = (first, second) if load else (second, first)
    if hinted:
        decoder.source(policy[0], 64)  # says what L2 should keep: nothing that a program could tell
    base, offset = decoder.address(address, address_width)
    find = decoder.result if load else decoder.source
    registers = tuple(find(item, width, wider=True) for item in decoder.vector(value, count))
    return Access(base, offset, registers, width, load and parts[-1][0] == "s")


CLASH = "lanes of one store write different values to the same bytes: which one stays is undefined"


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


@opcode(*names("ld.shared"), *names("ld.shared::cta"))
def _ld_shared(decoder: Decoder, instruction: Instruction) -> Execute:
    access = access_of(decoder, instruction, 32)
    size, width = access.size, access.width
    decoder.granule = min(decoder.granule, width // 8)
    each = np.arange(len(access.registers))

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cluster = fragment.warp.cta.cluster
        found = own_shared(fragment, lanes, access.addresses(fragment), size, "load")
        if found is None or found[1] is not lanes:
            access.poison(fragment, lanes)
        if found is None:
            return
        flat, readers = found
        cluster.counts.bytes["shared load"] += size * readers.count
        if cluster.sanitizer:
            at, lane_of = granules(cluster, flat, size, readers.index)
            for granule, lane in cluster.sanitizer.shared.generic_read(fragment.warp.clock, readers, at, lane_of):
                first = int(flat[np.searchsorted(readers.index, lane)])
                register = access.registers[(granule * cluster.program.granule - first) * 8 // width]
                taint.mark(fragment.warp, register, 1 << lane, taint.RACE)
        access.write(fragment, readers.index, cluster.shared.views[width][flat[:, None] * 8 // width + each])

    return execute


@opcode("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16")
def _ldmatrix(decoder: Decoder, instruction: Instruction) -> Execute:
    """Register i of lane l: bytes 4 (l % 4) .. + 3 of the row that lane 8 i + l / 4 points to."""
    value, address = decoder.expect(2)
    base, offset = decoder.address(address, 32)
    registers = [decoder.result(item, 32) for item in decoder.vector(value, 4)]
    lane = np.arange(32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        whole_warp(fragment, lanes, aligned=True)
        addresses = fragment.u[base] + np.uint32(offset & 0xFFFFFFFF)
        found = own_shared(fragment, lanes, addresses, 16, "ldmatrix")
        if found is None or found[1] is not lanes or lanes.bits != FULL:
            for register in registers:
                fragment.u[register][:] = 0xFFFFFFFF
            return
        rows, _ = found
        cluster.counts.bytes["shared load"] += 512
        for i, register in enumerate(registers):
            flat = rows[8 * i + lane // 4] + 4 * (lane % 4)
            if cluster.sanitizer:
                at, lane_of = granules(cluster, flat, 4, lane)
                for _, reader in cluster.sanitizer.shared.generic_read(warp.clock, lanes, at, lane_of):
                    taint.mark(warp, register, 1 << reader, taint.RACE)
            fragment.u[register][:] = cluster.shared.views[32][flat // 4]

    return execute


@opcode(*names("st.shared"), *names("st.shared::cta"))
def _st_shared(decoder: Decoder, instruction: Instruction) -> Execute:
    access = access_of(decoder, instruction, 32)
    size, width = access.size, access.width
    decoder.granule = min(decoder.granule, width // 8)
    each = np.arange(len(access.registers))

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cluster = fragment.warp.cta.cluster
        found = own_shared(fragment, lanes, access.addresses(fragment), size, "store")
        if found is None:
            return
        flat, writers = found
        cluster.counts.bytes["shared store"] += size * writers.count
        if cluster.sanitizer:
            at, lane_of = granules(cluster, flat, size, writers.index)
            cluster.sanitizer.shared.generic_write(fragment.warp.clock, writers, at, lane_of)
        view, places = cluster.shared.views[width], flat[:, None] * 8 // width + each
        values = access.read(fragment, writers.index)
        view[places] = values
        if (view[places] != values).any():
            cluster.report("E-RACE", CLASH)

    return execute


# ---- global memory ----


def split(cluster: Cluster, addresses: Any, lanes: Lanes, size: int, what: str) -> list[tuple[Allocation, Index, Index]]:
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


def bytes_of(cluster: Cluster, allocation: Allocation, offsets: Index, size: int) -> Any:
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


@opcode(*names("ld.global"), *names("ld.global.nc"))
def _ld_global(decoder: Decoder, instruction: Instruction) -> Execute:
    access = access_of(decoder, instruction, 64)
    size = access.size
    read_only = ".nc" in instruction.opcode

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        parts = split(cluster, access.addresses(fragment), lanes, size, "load")
        access.poison(fragment, lanes)
        for allocation, offsets, by in parts:
            cluster.counts.bytes["global load"] += size * len(by)
            at = (offsets[:, None] + np.arange(size)).ravel()
            cluster.wave.stores.settle(allocation, offsets, size, cluster)
            if cluster.sanitizer:
                cluster.sanitizer.globals.load(warp.clock, lanes, allocation, at, np.repeat(by, size))
            if read_only and allocation.dirty is not None and allocation.dirty[at].any():
                cluster.report("E-GLOBAL", f"ld.global.nc of bytes of {allocation.buffer.name} that this kernel writes")
            if allocation.buffer.predecessor and not cluster.wave.dependency_done:
                continue  # not there yet: the lanes keep the poison
            access.write(fragment, by, bytes_of(cluster, allocation, offsets, size).view(DTYPES[access.width]))

    return execute


@opcode(*names("st.global"), *names("st.global.L2::cache_hint"))
def _st_global(decoder: Decoder, instruction: Instruction) -> Execute:
    access = access_of(decoder, instruction, 64)
    size = access.size

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        for allocation, offsets, by in split(cluster, access.addresses(fragment), lanes, size, "store"):
            cluster.counts.bytes["global store"] += size * len(by)
            at = (offsets[:, None] + np.arange(size)).ravel()
            cluster.wave.stores.settle(allocation, offsets, size)
            if cluster.sanitizer:
                cluster.sanitizer.globals.store(warp.clock, lanes, allocation, at, np.repeat(by, size))
            if allocation.dirty is None:
                cluster.report("E-GLOBAL", f"store to {allocation.buffer.name}, which is an input")
                continue
            if not allocation.write(at, access.read(fragment, by).view(np.uint8).ravel()):
                cluster.report("E-RACE", CLASH)
            if cluster.sanitizer:
                cluster.sanitizer.globals.overwritten(allocation, offsets)
            cluster.wave.watch.wrote(cluster.scheduler, allocation, at)

    return execute
