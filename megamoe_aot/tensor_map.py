"""The two TMA descriptors of a bound layer: plain numbers derived from the spec, and their encoding by the driver."""

from __future__ import annotations

import ctypes
import dataclasses

from . import driver
from .abi import TENSOR_MAP_BYTES
from .spec import BLOCK, KernelSpec
from .work_list import UNIT_ROWS

WEIGHT_ALIGNMENT = 16
"""Bytes; what cuTensorMapEncodeTiled asks of an address."""


@dataclasses.dataclass(frozen=True)
class TensorMapSpec:
    """A rank-3 map over bytes, without the address. Index 0 is the fastest dimension.

    Always UINT8 elements, SWIZZLE_128B, no interleave, no L2 promotion (256 bytes cost 4 % on an H200), zeros out of bounds.

    | layout | dims | one box is |
    |---|---|---|
    | trtllm_gen | (128, rows, E * K/128) | 128 bytes of K x rows of one expert's K block |
    | row_major | (K, rows, E) | the same |
    """

    dims: tuple[int, int, int]
    strides: tuple[int, int]
    """Bytes between neighbours of dimensions 1 and 2."""
    box: tuple[int, int, int]

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return self.dims[2] * self.strides[1]

    @property
    def box_bytes(self) -> int:
        """Bytes that one TMA load of a whole box delivers."""
        return self.box[0] * self.box[1] * self.box[2]

    @classmethod
    def of(cls, layout: str, experts: int, rows: int, depth: int, box_rows: int) -> TensorMapSpec:
        """Map over ``experts`` matrices of ``rows`` x ``depth`` bytes, loaded ``box_rows`` rows x 128 bytes at a time."""
        box = (BLOCK, box_rows, 1)
        if layout == "trtllm_gen":
            return cls((BLOCK, rows, experts * depth // BLOCK), (BLOCK, rows * BLOCK), box)
        return cls((depth, rows, experts), (depth, rows * depth), box)


def w13_map(spec: KernelSpec) -> TensorMapSpec:
    """Map of w13: 2I rows, K = H."""
    if spec.structure == "list":
        return _list_map(spec, 2 * spec.inter, spec.hidden)
    return TensorMapSpec.of(spec.layout, spec.experts, 2 * spec.inter, spec.hidden, BLOCK)


def w2_map(spec: KernelSpec) -> TensorMapSpec:
    """Map of w2: H rows, K = I."""
    if spec.structure == "list":
        return _list_map(spec, spec.hidden, spec.inter)
    return TensorMapSpec.of(spec.layout, spec.experts, spec.hidden, spec.inter, spec.split.tile2_rows)


def _list_map(spec: KernelSpec, rows: int, depth: int) -> TensorMapSpec:
    """64 rows a box; two K blocks at once where the layout puts them beside each other in a box and there is an even number."""
    plain = TensorMapSpec.of(spec.layout, spec.experts, rows, depth, UNIT_ROWS)
    pair = spec.layout == "trtllm_gen" and depth // BLOCK % 2 == 0
    return dataclasses.replace(plain, box=(BLOCK, UNIT_ROWS, 2)) if pair else plain


def encode(spec: TensorMapSpec, address: int) -> bytes:
    """The descriptor's 128 bytes for a tensor at device ``address``. Raises DriverCallError."""
    api = driver.bindings()
    encoded = driver.call(
        "cuTensorMapEncodeTiled",
        api.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        3,
        address,
        [api.cuuint64_t(size) for size in spec.dims],
        [api.cuuint64_t(stride) for stride in spec.strides],
        [api.cuuint32_t(size) for size in spec.box],
        [api.cuuint32_t(1)] * 3,
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)
