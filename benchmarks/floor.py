"""The cold-stream floor of a set of picks: the time to read the unique experts' weights once, and nothing else.

The stream kernels of floor.cu are compiled here for the device at hand; the floor is the best of :data:`VARIANTS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from .cuda_source import allow_shared_memory, architecture, compile_cuda, launch_cuda

if TYPE_CHECKING:
    from cuda.core import Kernel

STAGE_BYTES = 16384
"""Bytes of one bulk copy; the same constant as in floor.cu."""

Chunks = npt.NDArray[np.int64]
"""[n, 2]: device address and bytes, as floor.cu's struct Chunk."""

Region = tuple[int, int]
"""(device address, bytes) of memory that one launch reads: one matrix of one expert."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to stream: a kernel of floor.cu and its launch shape.

    ``ctas_per_expert`` for plain loads (every region is cut in that many equal pieces), ``ctas_per_sm`` and ``stages`` for
    the ring of bulk copies (every region is cut in STAGE_BYTES).
    """

    kernel: str
    threads: int
    ctas_per_expert: int = 0
    ctas_per_sm: int = 0
    stages: int = 0
    evict_first: bool = True

    @property
    def name(self) -> str:
        """For the results file."""
        hint = "" if self.evict_first else "_keep"
        if self.ctas_per_expert:
            return f"{self.kernel}_{self.ctas_per_expert}{hint}"
        return f"{self.kernel}_{self.ctas_per_sm}x{self.stages}{hint}"


VARIANTS = (
    Variant("plain_512x4", 512, ctas_per_expert=16),
    Variant("plain_512x4", 512, ctas_per_expert=16, evict_first=False),
    Variant("plain_512x8", 512, ctas_per_expert=16),
    Variant("plain_512x8", 512, ctas_per_expert=32),
    Variant("plain_256x8", 256, ctas_per_expert=32),
    Variant("plain_256x8", 256, ctas_per_expert=64),
    Variant("plain_256x8", 256, ctas_per_expert=64, evict_first=False),
    Variant("bulk_ring", 128, ctas_per_sm=1, stages=4),
    Variant("bulk_ring", 128, ctas_per_sm=1, stages=6),
    Variant("bulk_ring", 128, ctas_per_sm=1, stages=12),
    Variant("bulk_ring", 128, ctas_per_sm=1, stages=12, evict_first=False),
    Variant("bulk_ring", 128, ctas_per_sm=2, stages=3),
    Variant("bulk_ring", 128, ctas_per_sm=2, stages=6),
)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A launch of one variant: its chunks, of which CTA b takes b, b + grid, ..., and its configuration."""

    variant: Variant
    chunks: Chunks
    grid: int
    shared_bytes: int


def cut(region: Region, piece: int) -> Chunks:
    """``region`` in pieces of ``piece`` bytes, the last one possibly shorter. 16-byte multiples only: ValueError."""
    address, size = region
    if address % 16 or size % 16 or piece % 16 or piece <= 0:
        raise ValueError(f"a 16-byte load needs multiples of 16: region {address:#x} + {size} in pieces of {piece}")
    starts = np.arange(0, size, piece, dtype=np.int64)
    return np.stack([address + starts, np.minimum(piece, size - starts)], axis=1)


def plan(variant: Variant, experts: Sequence[tuple[Region, Region]], processors: int) -> Stream:
    """How ``variant`` reads each expert's (w13, w2) regions once on a GPU with ``processors`` SMs."""
    if variant.ctas_per_expert:
        # A CTA's chunks are piece p of an expert's w13, then piece p of its w2; pieces are whole cache lines.
        halves = ([expert[half] for expert in experts] for half in (0, 1))
        chunks = np.concatenate([cut(region, _lines(region[1], variant.ctas_per_expert)) for half in halves for region in half])
        return Stream(variant, chunks, grid=min(len(chunks), len(experts) * variant.ctas_per_expert), shared_bytes=0)
    chunks = np.concatenate([cut(region, STAGE_BYTES) for expert in experts for region in expert])
    grid = min(len(chunks), processors * variant.ctas_per_sm)
    list_bytes = 16 * -(-len(chunks) // grid)
    return Stream(variant, chunks, grid, shared_bytes=variant.stages * STAGE_BYTES + list_bytes)


def _lines(size: int, pieces: int) -> int:
    """Bytes of the fewest whole 128-byte lines of which ``pieces`` cover ``size`` bytes."""
    return -(-size // (128 * pieces)) * 128


class FloorKernels:
    """The kernels of floor.cu on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.sum = torch.zeros(1, dtype=torch.int32, device=device)
        self._code = compile_cuda("floor.cu", architecture(device))
        self._kernels = {name: self._code.get_kernel(name) for name in {variant.kernel for variant in VARIANTS}}
        self._shared_bytes = 48 * 1024  # what a kernel may use without asking

    def prepare(self, variant: Variant, experts: Sequence[tuple[Region, Region]]) -> Launch:
        """One launch of ``variant`` over the experts' (w13, w2) regions, its chunk list on the device."""
        stream = plan(variant, experts, self.processors)
        kernel = self._kernels[variant.kernel]
        if stream.shared_bytes > self._shared_bytes:
            allow_shared_memory(kernel, stream.shared_bytes, self.device)
            self._shared_bytes = stream.shared_bytes
        chunks = torch.from_numpy(stream.chunks).to(self.device)
        return Launch(kernel, stream, chunks, self.sum)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One stream launch, ready to be enqueued any number of times."""

    kernel: Kernel
    stream: Stream
    chunks: torch.Tensor
    """INT64 [chunks, 2] on the device: address and bytes."""
    sum: torch.Tensor

    def enqueue(self, check: bool = False) -> None:
        """Put the launch on torch's current stream. ``check`` adds the 32-bit sum of all words read to ``sum``."""
        variant = self.stream.variant
        launch_cuda(
            self.kernel,
            self.stream.grid,
            variant.threads,
            self.chunks.data_ptr(),
            np.uint32(len(self.stream.chunks)),
            np.uint32(variant.stages),
            np.uint32(variant.evict_first),
            np.uint32(check),
            self.sum.data_ptr(),
            shared_bytes=self.stream.shared_bytes,
        )

    def words_sum(self) -> int:
        """32-bit sum of the words that this launch reads, as the kernel found it."""
        self.sum.zero_()
        self.enqueue(check=True)
        return int(self.sum.item()) & 0xFFFFFFFF


def words_sum(tensors: Sequence[torch.Tensor]) -> int:
    """32-bit sum of the tensors' bytes taken as words: what :meth:`Launch.words_sum` must find."""
    return sum(int(t.reshape(-1).view(torch.int32).sum(dtype=torch.int64).item()) for t in tensors) & 0xFFFFFFFF
