"""Address spaces: the cluster's shared memory, global memory with bounds per buffer, and the parameter block.

Addresses are made up. Shared: 32 bits, the CTA's rank (or a scrambled code for it) from bit 24 up, byte offset below; user
memory begins at 0x400, after what the system reserves. Global buffers lie apart with unmapped gaps between them. Parameters
live in a generic window of their own. Mixed-up spaces therefore fault.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import Buffer, Bytes, Parameter, Pointer, SparseBuffer, TensorMap
from .parser import Kernel, PtxError

POISON = 0xFF
"""Fill of memory that nobody wrote: NaN in e4m3, BF16 and FP32."""

SHARED_START = 0x400
"""Offset of user shared memory; the first KiB belongs to the system (%reserved_smem_offset_end on cc 9.0)."""
CODE_SHIFT = 24
"""Bits below hold the byte offset. PTX does not document the format; nothing may depend on it."""

PARAMETER_WINDOW = 0x6000_0000_0000
GLOBAL_START = 0x7F00_0000_0000
GAP = 1 << 20


class SharedMemory:
    """Shared memory of all CTAs of a cluster; a *flat* index is rank * span + offset."""

    def __init__(self, ctas: int, size: int, scramble: bool) -> None:
        self.ctas = ctas
        self.end = SHARED_START + size
        self.span = -(-self.end // 1024) * 1024
        self.data: Bytes = np.full(ctas * self.span, POISON, np.uint8)
        self.views: dict[int, Any] = {
            8: self.data, 16: self.data.view(np.uint16), 32: self.data.view(np.uint32), 64: self.data.view(np.uint64)
        }  # fmt: skip
        self.codes = [(rank * 37 + 11) % 251 if scramble else rank for rank in range(ctas)]
        self._rank = np.full(1 << (32 - CODE_SHIFT), -1, np.int64)
        self._rank[self.codes] = np.arange(ctas)

    def address(self, rank: int, offset: int) -> int:
        """32-bit shared::cluster address of byte ``offset`` of CTA ``rank``."""
        return self.codes[rank] << CODE_SHIFT | offset

    def locate(self, addresses: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(rank or -1, offset) of each address."""
        return self._rank[addresses >> CODE_SHIFT], (addresses & ((1 << CODE_SHIFT) - 1)).astype(np.int64)

    def map_to(self, addresses: NDArray[np.uint32], ranks: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """``mapa``: the same offsets in other CTAs; a rank that does not exist gives a window that does not exist either."""
        codes = np.array([*self.codes, 255], np.uint32)[np.minimum(ranks, self.ctas)]
        mapped: NDArray[np.uint32] = (addresses & np.uint32((1 << CODE_SHIFT) - 1)) | codes << np.uint32(CODE_SHIFT)
        return mapped

    def problem(self, rank: int, offset: int, size: int, align: int) -> str | None:
        """Why the ``size`` bytes at (rank, offset) may not be accessed; None where they may."""
        if rank < 0:
            return "the address lies in the window of no CTA of this cluster"
        if offset < SHARED_START or offset + size > self.end:
            return f"{size} bytes at offset {offset - SHARED_START} of {self.end - SHARED_START} bytes of shared memory"
        if offset % align:
            return f"offset {offset - SHARED_START} is not {align}-byte aligned"
        return None


@dataclasses.dataclass
class Allocation:
    """A buffer at its address."""

    buffer: Buffer
    address: int
    dirty: NDArray[np.bool_] | None
    """Bytes that the kernel wrote; None for inputs."""

    def write(self, at: NDArray[np.int64], values: Bytes) -> bool:
        """Store bytes [n] at byte offsets [n]; False where different values went to the same byte. Not for inputs."""
        data, initialised = self.buffer.data, self.buffer.initialised
        assert self.dirty is not None and isinstance(data, np.ndarray)
        self.dirty[at] = True
        if initialised is not None:
            initialised[at] = True
        data[at] = values
        return bool((data[at] == values).all())

    def undefined(self, at: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which of the bytes hold nothing; None where all of the buffer held something from the start."""
        if self.buffer.role == "output":
            assert self.dirty is not None
            return ~self.dirty[at]
        return None if self.buffer.initialised is None else ~self.buffer.initialised[at]


class GlobalMemory:
    """All buffers of a launch."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.allocations: list[Allocation] = []
        at = GLOBAL_START
        for buffer in buffers:
            align = buffer.align
            at = -(-at // (2 * align)) * 2 * align + align
            dirty = None if buffer.role == "input" else np.zeros(buffer.size, bool)
            self.allocations.append(Allocation(buffer, at, dirty))
            at += buffer.size + GAP
        self._starts = [a.address for a in self.allocations]
        self._named = {a.buffer.name: a for a in self.allocations}
        if len(self._named) != len(buffers):
            raise ValueError(f"buffer names must differ; got {[b.name for b in buffers]}")

    def named(self, name: str) -> Allocation:
        if name not in self._named:
            raise ValueError(f"no buffer is called {name!r}; buffers: {sorted(self._named)}")
        return self._named[name]

    def find(self, address: int, size: int) -> Allocation | None:
        """The allocation that holds all of [address, address + size)."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        found = self.allocations[index]
        return found if address + size <= found.address + found.buffer.size else None

    def describe(self, address: int) -> str:
        """The address in terms of the nearest buffer."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return f"address {address:#x}, below every buffer"
        near = self.allocations[index]
        return f"byte {address - near.address} of buffer {near.buffer.name} ({near.buffer.size} bytes)"


def read_span(buffer: Buffer, offset: int, size: int) -> Bytes | None:
    """``size`` bytes at ``offset`` (in bounds); None where a sparse buffer has a hole."""
    data = buffer.data
    if not isinstance(data, SparseBuffer):
        return data[offset : offset + size]
    first, last = offset // data.page_bytes, (offset + size - 1) // data.page_bytes
    pages = [data.page(i) for i in range(first, last + 1)]
    if any(page is None for page in pages):
        return None
    joined = pages[0] if len(pages) == 1 else np.concatenate([p for p in pages if p is not None])
    assert joined is not None
    start = offset - first * data.page_bytes
    return joined[start : start + size]


_MAP_MAGIC = b"emulated tensor map"


class ParameterBlock:
    """The kernel's parameters as bytes, and the tensor maps among them.

    A tensor map is 128 bytes that hold a magic word and a number: its real bit format is not documented, and nothing but
    TMA may look inside.
    """

    def __init__(self, kernel: Kernel, values: Sequence[Parameter], memory: GlobalMemory) -> None:
        if len(values) != len(kernel.parameters):
            raise ValueError(f"{kernel.name} takes {len(kernel.parameters)} parameters; got {len(values)}")
        size = max((p.offset + p.size for p in kernel.parameters), default=0)
        self.data = np.zeros(size, np.uint8)
        self.maps: list[TensorMap] = []
        for parameter, value in zip(kernel.parameters, values, strict=True):
            raw = self._encode(parameter.size, value, memory)
            if len(raw) != parameter.size:
                raise ValueError(f"parameter {parameter.name} has {parameter.size} bytes; {value!r} does not fit")
            self.data[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(raw, np.uint8)
        self._offsets = {p.name: p.offset for p in kernel.parameters}

    def _encode(self, size: int, value: Parameter, memory: GlobalMemory) -> bytes:
        if isinstance(value, TensorMap):
            memory.named(value.buffer)
            self.maps.append(value)
            return (_MAP_MAGIC + bytes([len(self.maps) - 1])).ljust(128, b"\0")
        if isinstance(value, Pointer):
            address = 0 if value.buffer is None else memory.named(value.buffer).address + value.offset
            return address.to_bytes(8, "little")
        if isinstance(value, float):
            return (np.float32(value) if size == 4 else np.float64(value)).tobytes()
        return int(value).to_bytes(size, "little", signed=value < 0)

    def offset(self, name: str) -> int:
        if name not in self._offsets:
            raise PtxError(f"{name} is not a parameter")
        return self._offsets[name]

    def tensor_map(self, address: int) -> tuple[TensorMap | None, str]:
        """The map at a generic address, or None and the reason."""
        offset = address - PARAMETER_WINDOW
        if not 0 <= offset <= len(self.data) - 128:
            return None, f"{address:#x} is not the generic address of a parameter (tensor maps in global memory: not supported)"
        if address % 64:
            return None, f"the tensor map's address {address:#x} is not 64-byte aligned"
        raw = self.data[offset : offset + 128].tobytes()
        if not raw.startswith(_MAP_MAGIC):
            return None, f"the 128 bytes at parameter offset {offset} are no tensor map"
        return self.maps[raw[len(_MAP_MAGIC)]], ""
