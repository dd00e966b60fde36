"""What a caller hands to :func:`emulator.emulate`: launch shape, buffers, parameters, arithmetic, checks.

Nothing here knows what the kernel computes. Addresses are invented by the emulator: buffers are named, and a parameter that
is a pointer names its buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Dim3 = tuple[int, int, int]

POLICIES = ("random", "round-robin", "starve-warp", "starve-cta", "async-first", "async-last")
"""How the scheduler chooses what runs next; all but round-robin also depend on the seed.

| policy | next |
|---|---|
| random | any runnable warp fragment or pending asynchronous operation |
| round-robin | each warp in turn, one asynchronous operation (the oldest) after each round |
| starve-warp | one warp index (by seed) of every CTA runs only when nothing else can |
| starve-cta | one CTA (by seed) runs only when nothing else can |
| async-first | asynchronous operations complete as soon as they are issued |
| async-last | asynchronous operations complete only when no warp can run |
"""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Grid and block as for cuLaunchKernelEx; ``grid`` counts CTAs and is a multiple of ``cluster`` in every dimension."""

    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    dynamic_shared: int = 0
    """Bytes of dynamic shared memory per CTA."""
    labels: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Names for byte offsets from the dynamic shared memory base ("full[0]"), used in reports only."""
    columnwise: tuple[range, ...] = ()
    """Byte ranges of dynamic shared memory with one entry per MMA column: rows of an operand B, and what is multiplied with their sums.
    Reading an entry that another thread may be writing spoils that column only. The sanitizer reports such a race not when the entry
    is read but when a value of the column is stored, followed, or decides something."""
    co_resident: bool = False
    """All clusters of the grid are alive at once, as a cooperative launch promises: they may wait for each other through global memory."""

    def __post_init__(self) -> None:
        for name in ("grid", "block", "cluster"):
            dims = getattr(self, name)
            if len(dims) != 3 or any(d < 1 for d in dims):
                raise ValueError(f"{name} must be three positive numbers; got {dims}")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise ValueError(f"grid {self.grid} is not a multiple of the cluster {self.cluster}")

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return int(np.prod(self.block))

    @property
    def ctas(self) -> int:
        """CTAs per cluster."""
        return int(np.prod(self.cluster))

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return int(np.prod(self.grid)) // self.ctas


class SparseBuffer:
    """A large read-only buffer of which only some pages exist: the weights of the experts that are chosen.

    ``pages`` maps a page index to that page's bytes (uint8 [page_bytes]), as a mapping or as a function that raises KeyError.
    Reading a page that does not exist is a finding (E-GLOBAL), so a wrong address does not go unseen.
    """

    def __init__(self, size: int, page_bytes: int, pages: Mapping[int, Bytes] | Callable[[int], Bytes]) -> None:
        if size <= 0 or page_bytes <= 0:
            raise ValueError(f"size and page_bytes must be positive; got {size} and {page_bytes}")
        self.size = size
        self.page_bytes = page_bytes
        self._pages = pages

    def page(self, index: int) -> Bytes | None:
        """The page's bytes, or None where it does not exist."""
        try:
            page = self._pages(index) if callable(self._pages) else self._pages[index]
        except KeyError:
            return None
        expected = min(self.page_bytes, self.size - index * self.page_bytes)
        if page.dtype != np.uint8 or page.shape != (expected,):
            raise ValueError(f"page {index} must be uint8 [{expected}]; got {page.dtype} {page.shape}")
        return page


Role = Literal["input", "output", "inout"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One device allocation.

    ``data``: uint8 [size], contiguous; outputs are written in place. An ``input`` may not be stored to; an ``output`` may not
    be read before it is written.
    """

    name: str
    data: Bytes | SparseBuffer
    role: Role = "input"
    predecessor: bool = False
    """The preceding kernel of the stream may write it: no access before griddepcontrol.wait."""
    align: int = 16
    """The base address gets exactly this alignment and no more."""
    initialised: NDArray[np.bool_] | None = None
    """Of an ``inout`` buffer, bool [size]: bytes that hold something when the kernel starts (None: all). The kernel's stores set it
    in place, so that a further launch on the same memory can get the same array."""

    def __post_init__(self) -> None:
        if isinstance(self.data, SparseBuffer):
            if self.role != "input":
                raise ValueError(f"buffer {self.name}: a sparse buffer can only be an input")
        elif self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise ValueError(f"buffer {self.name}: data must be contiguous uint8 [size]; got {self.data.dtype} {self.data.shape}")
        mask = self.initialised
        if mask is not None and (self.role != "inout" or mask.shape != (self.size,) or mask.dtype != bool):
            raise ValueError(f"buffer {self.name}: initialised must be bool [{self.size}], and the buffer inout")
        if self.align < 1 or self.align & (self.align - 1):
            raise ValueError(f"buffer {self.name}: align must be a power of two; got {self.align}")

    @property
    def size(self) -> int:
        return self.data.size


class MapSpec(Protocol):
    """Numbers of a tiled tensor map; index 0 is the fastest dimension. ``megamoe_aot.tensor_map.TensorMapSpec`` is one."""

    @property
    def dims(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours of dimensions 1, 2, ..."""

    @property
    def box(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A kernel parameter that points into a buffer; None is the null pointer."""

    buffer: str | None
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A kernel parameter that is a 128-byte tensor map over a buffer: no interleave, zeros out of bounds."""

    spec: MapSpec
    buffer: str
    offset: int = 0
    swizzle: int = 128
    """Bytes of the swizzle pattern: 0 (none), 32, 64 or 128."""
    element_bytes: int = 1

    def problems(self) -> list[str]:
        """Limits of cuTensorMapEncodeTiled that the map breaks."""
        dims, strides, box = self.spec.dims, self.spec.strides, self.spec.box
        found = []
        if not (1 <= len(dims) <= 5 and len(strides) == len(dims) - 1 and len(box) == len(dims)):
            return [f"rank mismatch: dims {dims}, strides {strides}, box {box}"]
        if any(not 1 <= d <= 2**32 for d in dims):
            found.append(f"a dimension outside 1..2^32: {dims}")
        if any(s % 16 or not 0 < s < 2**40 for s in strides):
            found.append(f"a stride that is no multiple of 16 below 2^40: {strides}")
        if any(not 1 <= b <= 256 for b in box):
            found.append(f"a box edge outside 1..256: {box}")
        inner = box[0] * self.element_bytes
        if inner % 16:
            found.append(f"inner box of {inner} bytes is no multiple of 16")
        if self.swizzle not in (0, 32, 64, 128):
            found.append(f"swizzle {self.swizzle} is not 0, 32, 64 or 128")
        elif self.swizzle and inner > self.swizzle:
            found.append(f"inner box of {inner} bytes exceeds the {self.swizzle}-byte swizzle")
        return found


Parameter = Pointer | TensorMap | int | float


@dataclasses.dataclass(frozen=True)
class Dot:
    """Bit model of one fused K=32 step of the tensor core: terms are aligned to the largest exponent and truncated.

    The models come from published third-party measurements (H100: bit exact in two of them; Blackwell: one claim, not
    verified here). PTX itself promises no bits.
    """

    alignment_bits: int
    """F: fraction bits kept below the largest exponent."""
    result_bits: int
    """R: fraction bits of the result, truncated."""


TCGEN05 = Dot(25, 23)
WGMMA = Dot(13, 13)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Models of what PTX leaves open. None for a dot: products summed in FP64, rounded once to FP32."""

    tcgen05: Dot | None = TCGEN05
    wgmma: Dot | None = WGMMA
    approx_ulps: int = 0
    """ex2.approx and the like: 0 = correctly rounded; n = off by up to n ulp, by a hash of the input and the seed."""


@dataclasses.dataclass(frozen=True)
class Checks:
    """What the sanitizer reports; see ``findings.CATALOGUE`` for the ids. Everything is on by default.

    The remaining fields choose between readings of points that PTX leaves open (findings of kind "assumption").
    """

    disabled: frozenset[str] = frozenset()
    """Ids that are not reported."""
    st_async_releases: Literal["data", "reads", "all"] = "data"
    """What the waiter of a barrier learns from a st.async that completed on it, beside the stored bytes.

    data: nothing, as for a bulk copy. reads: also that MMAs which the issuing thread knew to be complete have read their
    operands (physically they have if their results went into the stored value; PTX does not say so). all: everything before
    the st.async in program order.
    """
    commit_releases: Literal["operands", "all"] = "operands"
    """What the waiter of a barrier learns from a tcgen05.commit that arrived on it, beside the completion of the MMAs.

    operands: that the asynchronous copies which the issuing thread had waited for are over (the MMAs read their bytes).
    all: whatever the issuing thread had acquired; PTX does not say that a commit releases it.
    """
    dependents_wait: bool = False
    """Every kernel that may start early runs griddepcontrol.wait before it touches anything of this one: stores may follow
    launch_dependents."""
    spurious_wait: float = 1 / 32
    """Probability that a try_wait that has to wait returns False at once, as its time limit allows."""
    scramble_addresses: bool = False
    """Encode the CTA rank in shared addresses in another way than rank << 24: catches code that computes with those bits."""


OFF = None
"""Pass ``checks=OFF`` to run without the sanitizer: no happens-before and no initialisation of memory; what execution itself
notices (bad addresses, descriptors, barrier counts, deadlock ...) is still reported."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Where to give up."""

    instructions: int = 5_000_000
    """Warp instructions per cluster, about; beyond it the run is reported as a livelock."""
    findings: int = 200
    """Different findings of one cluster, or of a co-resident grid; further ones are counted only."""
