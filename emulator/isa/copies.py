"""Asynchronous copies: TMA tensor loads, bulk copies, st.async. Their data is read and written when they run, not when they are issued."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..config import SparseBuffer, TensorMap
from ..decode import Decoder, Execute, opcode
from ..mbarrier import Mbarrier
from ..memory import POISON, SHARED_START, Allocation, read_span
from ..parser import Address, Instruction
from ..scheduler import AsyncOp
from ..warp import Fragment, Lanes, lanes_of
from . import barriers
from .common import TYPE_WIDTH
from .loads import granules

Index = NDArray[np.int64]

_SWIZZLE_MASK = {0: 0, 32: 1, 64: 3, 128: 7}
"""Swizzle bytes -> which bits of the 128-byte row index enter the 16-byte chunk index."""


def swizzle(address: Any, pattern: int) -> Any:
    """Where a byte of a box goes: bits 4.. of the shared address are XORed with bits 7.. ."""
    return address ^ (((address >> 7) & _SWIZZLE_MASK[pattern]) << 4)


# ---- landing ----


def issue(fragment: Fragment, lane: Lanes, barrier: Mbarrier, start: int, places: Index, produce: Any, what: str) -> None:
    """Submit a copy that completes on ``barrier``.

    ``produce()`` gives uint8 [n] when the copy runs; byte i goes to flat index ``places[i]``. The places are a permutation of
    start .. start + n - 1.
    """
    cluster = fragment.warp.cta.cluster
    where = cluster.where()
    size = len(places)
    name = cluster.label(start % cluster.shared.span - SHARED_START)
    step = cluster.scheduler.step
    granule = cluster.program.granule
    touched = np.arange(start // granule, (start + size) // granule)
    if cluster.sanitizer:
        cluster.sanitizer.barriers.used(barrier, fragment.warp.clock, lane, "asynchronous")
        cluster.sanitizer.shared.tma_write(fragment.warp.clock, lane, touched, barrier.clock.local)

    def land() -> None:
        if not cluster.ctas[barrier.cta].alive:
            cluster.report("E-DSMEM-LIFE", f"a {what} lands in CTA {barrier.cta}, which has exited")
            return
        cluster.shared.data[places] = produce()
        if cluster.sanitizer:
            cluster.sanitizer.shared.landed(touched, barrier.clock.local, barrier.phase + 1)
        cluster.counts.bytes[what] += size
        cluster.timeline.add("load", barrier.cta, "load", step, cluster.scheduler.step, name)
        barrier.landed = barrier.phase
        barriers.expect(cluster, barrier, -size)
        barriers.complete(cluster, barrier)

    cluster.scheduler.submit(AsyncOp(what, cluster.ctas[barrier.cta].number, where, land))


def _destination(fragment: Fragment, address: int, size: int, align: int, what: str, check: str) -> tuple[int, int] | None:
    """(rank, flat index) of a shared::cluster destination."""
    shared = fragment.warp.cta.cluster.shared
    ranks, offsets = shared.locate(np.array([address], np.uint32))
    rank, offset = int(ranks[0]), int(offsets[0])
    if problem := shared.problem(rank, offset, size, align):
        fragment.warp.cta.cluster.report(check, f"{what}: {problem}")
        return None
    return rank, rank * shared.span + offset


# ---- TMA ----


def _tensor_names() -> list[str]:
    head = "cp.async.bulk.tensor.{}d.{}.global{}.mbarrier::complete_tx::bytes{}"
    return [
        head.format(rank, space, tile, hint)
        for rank in range(1, 6)
        for space in ("shared::cluster", "shared::cta")
        for tile in ("", ".tile")
        for hint in ("", ".L2::cache_hint")
    ]


@opcode(*_tensor_names())
def _tensor_load(decoder: Decoder, instruction: Instruction) -> Execute:
    rank = int(instruction.opcode.split(".")[4][0])
    destination, tensor, barrier, *hint = decoder.expect(4 if instruction.opcode.endswith("hint") else 3)
    to, to_offset = decoder.address(destination, 32)
    at, at_offset = decoder.address(barrier, 32)
    if hint:
        decoder.source(hint[0], 64)
    if not isinstance(tensor, Address) or tensor.coordinates is None or tensor.offset:
        decoder.fail("[map, {coordinates}] expected")
    assert isinstance(tensor, Address) and tensor.coordinates is not None
    map_address = decoder.source(tensor.base, 64)
    coordinates = [decoder.source(item, 32) for item in decoder.vector(tensor.coordinates, rank)]

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        u, s = fragment.u, fragment.s
        for lane in lanes.index:
            _load_box(
                fragment,
                lanes_of(1 << int(lane)),
                int(u[to][lane]) + to_offset,
                int(u[at][lane]) + at_offset,
                int(u[map_address][lane]),
                [int(s[c][lane]) for c in coordinates],
            )

    return execute


def _load_box(fragment: Fragment, lane: Lanes, to: int, at: int, map_address: int, coordinates: list[int]) -> None:
    cluster = fragment.warp.cta.cluster
    tensor, problem = cluster.parameters.tensor_map(map_address)
    problems = [problem] if tensor is None else tensor.problems()
    if tensor is not None and len(tensor.spec.dims) != len(coordinates):
        problems.append(f"a rank-{len(coordinates)} load through a rank-{len(tensor.spec.dims)} map")
    if problems or tensor is None:
        cluster.report("E-TMA", "; ".join(problems))
        return
    allocation = cluster.memory.named(tensor.buffer)
    if (allocation.address + tensor.offset) % 16:
        cluster.report("E-TMA", f"the tensor's address in {tensor.buffer} is not 16-byte aligned")
    size = int(np.prod(tensor.spec.box)) * tensor.element_bytes
    align = {0: 128, 32: 256, 64: 512, 128: 1024}[tensor.swizzle]
    destination = _destination(fragment, to, size, align, "destination of TMA", "E-TMA")
    barrier = barriers.find(cluster, at, fragment.warp.cta.rank, True, "TMA")
    if destination is None or barrier is None:
        return
    rank, flat = destination
    if barrier.cta != rank or rank != fragment.warp.cta.rank:
        cluster.report("E-TMA", f"CTA {fragment.warp.cta.rank} loads into CTA {rank} and completes on a barrier of CTA {barrier.cta}")
    _about_to_read(fragment, lane, allocation, lambda: _box_rows(tensor, coordinates)[:2])
    offset = flat - rank * cluster.shared.span  # the swizzle works on the address, which is the offset up to rank bits
    places = rank * cluster.shared.span + swizzle(offset + np.arange(size), tensor.swizzle)
    issue(fragment, lane, barrier, flat, places, partial(read_box, cluster, tensor, allocation, coordinates), "TMA")


def read_box(cluster: Cluster, tensor: TensorMap, allocation: Allocation, coordinates: list[int]) -> NDArray[np.uint8]:
    """The box at ``coordinates``, innermost dimension first and dense; zeros outside the tensor."""
    spec, unit = tensor.spec, tensor.element_bytes
    result = np.zeros((int(np.prod(spec.box[1:], dtype=np.int64)), spec.box[0] * unit), np.uint8)
    starts, width, rows = _box_rows(tensor, coordinates)
    if width:
        first = max(0, -coordinates[0]) * unit
        _read_rows(cluster, allocation, starts, width, result[:, first : first + width], rows)
    return result.ravel()


def _box_rows(tensor: TensorMap, coordinates: list[int]) -> tuple[Index, int, Index]:
    """(where in the buffer each row inside the tensor starts, bytes of each, which rows of the box they are)."""
    spec, unit = tensor.spec, tensor.element_bytes
    low, high = max(0, coordinates[0]), min(spec.dims[0], coordinates[0] + spec.box[0])
    if low >= high:
        return np.zeros(0, np.int64), 0, np.zeros(0, np.int64)
    starts, inside = np.zeros(1, np.int64), np.ones(1, bool)
    for c, box, dim, stride in zip(coordinates[1:], spec.box[1:], spec.dims[1:], spec.strides, strict=True):
        index = c + np.arange(box)
        # the innermost of these dimensions varies fastest
        starts = (index[:, None] * stride + starts[None, :]).ravel()
        inside = (((index >= 0) & (index < dim))[:, None] & inside[None, :]).ravel()
    rows = np.flatnonzero(inside)
    return starts[rows] + tensor.offset + low * unit, (high - low) * unit, rows


def _about_to_read(fragment: Fragment, lane: Lanes, allocation: Allocation, rows: Callable[[], tuple[Index, int]]) -> None:
    """Checks of a copy; ``rows()``: where it reads in the buffer, and how many bytes at each place."""
    cluster = fragment.warp.cta.cluster
    touched = None
    if allocation.dirty is not None:
        starts, width = rows()
        touched = (starts[:, None] + np.arange(width)).ravel()
        touched = touched[(touched >= 0) & (touched < allocation.buffer.size)]
        cluster.wave.stores.settle(allocation, touched, 1, cluster)
    if cluster.sanitizer:
        cluster.sanitizer.globals.bulk_read(fragment.warp.clock, lane, allocation, touched)


def _read_rows(cluster: Cluster, allocation: Allocation, starts: Index, width: int, into: Any, rows: Index) -> None:
    buffer = allocation.buffer
    outside = (starts < 0) | (starts + width > buffer.size)
    if outside.any():
        cluster.report("E-GLOBAL", f"the tensor map reaches outside buffer {buffer.name} (byte {int(starts[outside][0])})")
        into[rows[outside]] = POISON
        starts, rows = starts[~outside], rows[~outside]
    if not isinstance(buffer.data, SparseBuffer):
        into[rows] = buffer.data[starts[:, None] + np.arange(width)]
        return
    if len(starts) > 1 and (np.diff(starts) == width).all():
        piece = read_span(buffer, int(starts[0]), width * len(starts))
        if piece is not None:
            into[rows] = piece.reshape(len(rows), width)
            return
    for row, start in zip(rows, starts, strict=True):
        piece = read_span(buffer, int(start), width)
        if piece is None:
            cluster.report("E-GLOBAL", f"TMA reads a part of {buffer.name} that does not exist (byte {start})")
            into[row] = POISON
        else:
            into[row] = piece


@opcode("prefetch.tensormap")
def _prefetch(decoder: Decoder, instruction: Instruction) -> Execute:
    base, offset = decoder.address(decoder.expect(1)[0], 64)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cluster = fragment.warp.cta.cluster
        tensor, problem = cluster.parameters.tensor_map(int(fragment.u[base][lanes.first]) + offset)
        if tensor is None:
            cluster.report("E-TMA", problem)

    return execute


# ---- bulk copies ----


@opcode(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
)
def _bulk(decoder: Decoder, instruction: Instruction) -> Execute:
    """Global memory to shared memory of the own CTA: 16-byte aligned, a multiple of 16 bytes."""
    destination, source, size, barrier, *hint = decoder.expect(5 if instruction.opcode.endswith("hint") else 4)
    to, to_offset = decoder.address(destination, 32)
    origin, origin_offset = decoder.address(source, 64)
    count = decoder.source(size, 32)
    at, at_offset = decoder.address(barrier, 32)
    if hint:
        decoder.source(hint[0], 64)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cluster = fragment.warp.cta.cluster
        u = fragment.u
        for lane in lanes.index:
            one = lanes_of(1 << int(lane))
            byte_count, address = int(u[count][lane]), int(u[origin][lane]) + origin_offset
            destination = _destination(fragment, int(u[to][lane]) + to_offset, byte_count, 16, "destination of a bulk copy", "E-SMEM")
            found = barriers.find(cluster, int(u[at][lane]) + at_offset, fragment.warp.cta.rank, True, "bulk copy")
            allocation = cluster.memory.find(address, byte_count)
            if byte_count % 16 or address % 16 or allocation is None:
                cluster.report("E-GLOBAL", f"bulk copy of {byte_count} bytes from {cluster.memory.describe(address)}")
                continue
            if destination is None or found is None:
                continue
            _about_to_read(fragment, one, allocation, partial(_span, address - allocation.address, byte_count))
            produce = partial(_read_span, cluster, allocation, address - allocation.address, byte_count)
            issue(fragment, one, found, destination[1], destination[1] + np.arange(byte_count), produce, "bulk copy")

    return execute


def _span(offset: int, byte_count: int) -> tuple[Index, int]:
    return np.array([offset]), byte_count


def _read_span(cluster: Cluster, allocation: Allocation, offset: int, byte_count: int) -> NDArray[np.uint8]:
    into = np.zeros((1, byte_count), np.uint8)
    _read_rows(cluster, allocation, np.array([offset]), byte_count, into, np.array([0]))
    return into[0]


# ---- st.async ----


def _st_async_names() -> list[str]:
    vectors = {"": ("b32", "b64", "u32", "f32", "u64"), ".v2": ("b32", "b64", "u32", "f32", "u64"), ".v4": ("b32", "u32", "f32")}
    head = "st.async{}.shared::cluster.mbarrier::complete_tx::bytes{}.{}"
    return [head.format(weak, v, kind) for weak in ("", ".weak") for v, kinds in vectors.items() for kind in kinds]


@opcode(*_st_async_names())
def _st_async(decoder: Decoder, instruction: Instruction) -> Execute:
    """Store to a CTA of the cluster; the bytes complete on an mbarrier of the same CTA."""
    parts = instruction.opcode.split(".")
    width, elements = TYPE_WIDTH[parts[-1]], int(parts[-2][1:]) if parts[-2] in ("v2", "v4") else 1
    destination, value, barrier = decoder.expect(3)
    to, to_offset = decoder.address(destination, 32)
    at, at_offset = decoder.address(barrier, 32)
    sources = [decoder.source(item, width) for item in decoder.vector(value, elements)]
    size = width // 8 * elements

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        u = fragment.u
        if cluster.launch.ctas == 1:
            cluster.report("E-SMEM", "st.async is undefined in a cluster of one CTA")
        targets, objects = u[to] + np.uint32(to_offset), u[at] + np.uint32(at_offset)
        ranks, offsets = cluster.shared.locate(targets)
        values = np.stack([u[s] for s in sources], axis=1).view(np.uint8)
        payload = cluster.sanitizer.st_async_payload(warp, lanes) if cluster.sanitizer else None
        keys = ranks << 32 | objects.astype(np.int64)
        for key in dict.fromkeys(keys[lanes.index].tolist()):  # one operation per destination CTA and barrier
            group = lanes_of(int(np.bitwise_or.reduce(np.int64(1) << lanes.index[keys[lanes.index] == key])))
            _send(fragment, group, int(ranks[group.first]), offsets, int(objects[group.first]), values, size, payload)

    return execute


def _send(fragment: Fragment, lanes: Lanes, rank: int, offsets: Index, address: int, values: Any, size: int, payload: Any) -> None:
    warp = fragment.warp
    cluster = warp.cta.cluster
    mine = offsets[lanes.index]
    for offset in mine:
        if problem := cluster.shared.problem(rank, int(offset), size, size):
            cluster.report("E-SMEM", f"st.async: {problem}")
            return
    if cluster.sanitizer:
        cluster.sanitizer.remote_access(warp.clock, lanes, np.array([rank]))
    barrier = barriers.find(cluster, address, warp.cta.rank, True, "st.async")
    if not cluster.ctas[rank].alive:
        cluster.report("E-DSMEM-LIFE", f"st.async to CTA {rank}, which has exited")
        return
    if barrier is None:
        return
    if barrier.cta != rank:
        cluster.report("E-SMEM", f"st.async to CTA {rank} with a barrier of CTA {barrier.cta}")
        return
    remote = rank != warp.cta.rank
    flat = rank * cluster.shared.span + mine
    data = values[lanes.index].copy()
    counted = size * lanes.count
    component = 0
    touched, by = granules(cluster, flat, size, lanes.index)
    if cluster.sanitizer:
        component = barrier.clock.remote if remote else barrier.clock.local
        cluster.sanitizer.barriers.used(barrier, warp.clock, lanes, "remote")
        cluster.sanitizer.shared.remote_write(warp.clock, lanes, touched, by, component, remote)
    step, name = cluster.scheduler.step, f"CTA {warp.cta.rank} warp {warp.index}"

    def land() -> None:
        if not cluster.ctas[rank].alive:
            cluster.report("E-DSMEM-LIFE", f"st.async from CTA {warp.cta.rank} lands in CTA {rank}, which has exited")
            return
        cluster.shared.data[flat[:, None] + np.arange(size)] = data
        cluster.counts.bytes["st.async"] += counted
        cluster.timeline.add("exchange", rank, "exchange", step, cluster.scheduler.step, name)
        if cluster.sanitizer:
            cluster.sanitizer.shared.landed(touched, component, barrier.phase + 1)
            cluster.sanitizer.delivered(barrier, payload)
            if remote:
                barrier.clock.remote_landed = barrier.phase + 1
        barriers.expect(cluster, barrier, -counted)
        barriers.complete(cluster, barrier)

    cluster.scheduler.submit(AsyncOp("st.async", cluster.ctas[rank].number, cluster.where(), land))
