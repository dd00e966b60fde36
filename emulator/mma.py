"""Matrix multiply: operand descriptors, the instruction descriptor, operand addresses, and the arithmetic of one K=32 step.

Only what kind::f8f6f4 with e4m3 operands and FP32 accumulation needs, both operands K-major in shared memory, 128-byte
swizzle or none. Everything else that a descriptor can say is an error that says so.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import Bytes, Dot
from .numerics import CANONICAL_NAN, E4M3

STEP = 32
"""Bytes of K, which are FP8 elements, per MMA instruction."""


class DescriptorError(ValueError):
    """A descriptor that the hardware does not define, or that this emulator does not cover; the message says which field."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """A K-major operand in shared memory, all in bytes; ``start`` is an offset in the CTA's 256 KiB window."""

    start: int
    leading: int
    stride: int
    swizzle: int
    """0 or 128."""


def _field(word: int, low: int, high: int) -> int:
    return word >> low & ((1 << (high - low + 1)) - 1)


def _operand(word: int, swizzle: int | None, reserved: tuple[tuple[int, int], ...]) -> Operand:
    for low, high in reserved:
        if _field(word, low, high):
            raise DescriptorError(f"reserved bits {low}-{high} of descriptor {word:#x} are {_field(word, low, high):#x}")
    start, leading, stride = _field(word, 0, 13) << 4, _field(word, 16, 29) << 4, _field(word, 32, 45) << 4
    base_offset = _field(word, 49, 51)
    if swizzle is None:
        raise DescriptorError(f"descriptor {word:#x} has an undefined or unsupported swizzle mode")
    if swizzle == 128:
        # the pattern must begin on its natural boundary; K steps move the start by 32 bytes inside the first row
        if base_offset or start % 1024 >= 128:
            raise DescriptorError(
                f"128-byte swizzle: start {start:#x} is not within the first row of a 1024-byte pattern (base offset {base_offset})"
            )
        if stride % 1024:
            raise DescriptorError(f"128-byte swizzle: stride {stride} between 8-row groups is no multiple of 1024")
    elif base_offset:
        raise DescriptorError(f"base offset {base_offset} without a swizzle")
    return Operand(start, leading, stride, swizzle)


@lru_cache(maxsize=4096)
def tcgen05_operand(word: int) -> Operand:
    """Decode a tcgen05 shared-memory matrix descriptor. Raises DescriptorError."""
    if _field(word, 46, 48) != 1:
        raise DescriptorError(f"bits 46-48 of descriptor {word:#x} are {_field(word, 46, 48)}, not 1")
    if _field(word, 52, 52):
        raise DescriptorError(f"descriptor {word:#x} asks for an absolute leading-dimension address (sm_103a only)")
    return _operand(word, {0: 0, 2: 128}.get(_field(word, 61, 63)), ((14, 15), (30, 31), (53, 60)))


@lru_cache(maxsize=4096)
def wgmma_operand(word: int) -> Operand:
    """Decode a wgmma matrix descriptor. Raises DescriptorError."""
    return _operand(word, {0: 0, 1: 128}.get(_field(word, 62, 63)), ((14, 15), (30, 31), (46, 48), (52, 61)))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows of A and of B of one instruction."""

    m: int
    n: int


@lru_cache(maxsize=64)
def tcgen05_instruction(word: int) -> Shape:
    """Decode the 32-bit instruction descriptor of kind::f8f6f4, cta_group::1. Raises DescriptorError."""
    fields = {
        "sparsity selector": (_field(word, 0, 1), 0),
        "sparse": (_field(word, 2, 2), 0),
        "integer saturate": (_field(word, 3, 3), 0),
        "D type (1 = f32)": (_field(word, 4, 5), 1),
        "reserved bit 6": (_field(word, 6, 6), 0),
        "A type (0 = e4m3)": (_field(word, 7, 9), 0),
        "B type (0 = e4m3)": (_field(word, 10, 12), 0),
        "negate A": (_field(word, 13, 13), 0),
        "negate B": (_field(word, 14, 14), 0),
        "transpose A": (_field(word, 15, 15), 0),
        "transpose B": (_field(word, 16, 16), 0),
        "reserved bit 23": (_field(word, 23, 23), 0),
        "reserved bit 29": (_field(word, 29, 29), 0),
        "max shift": (_field(word, 30, 31), 0),
    }
    if wrong := [f"{name} is {got}, supported {want}" for name, (got, want) in fields.items() if got != want]:
        raise DescriptorError(f"instruction descriptor {word:#010x}: {'; '.join(wrong)}")
    shape = Shape(_field(word, 24, 28) << 4, _field(word, 17, 22) << 3)
    if shape.m not in (64, 128) or not 8 <= shape.n <= 256:
        raise DescriptorError(f"instruction descriptor {word:#010x}: M = {shape.m}, N = {shape.n} is no shape of kind::f8f6f4")
    return shape


@lru_cache(maxsize=4096)
def operand_chunks(operand: Operand, first: int, rows: int) -> NDArray[np.int64]:
    """Offsets [rows, 2] of the 16-byte chunks of rows first .. first+rows-1 for one K step of 32 bytes."""
    row = first + np.arange(rows)[:, None]
    chunk = np.arange(2)[None, :]
    if operand.swizzle == 128:
        linear = operand.start + row // 8 * operand.stride + row % 8 * 128 + chunk * 16
        return linear ^ (((linear >> 7) & 7) << 4)
    return operand.start + row // 8 * operand.stride + row % 8 * 16 + chunk * operand.leading


@lru_cache(maxsize=4096)
def operand_granules(parts: tuple[tuple[Operand, int, int], ...], granule: int) -> NDArray[np.int64]:
    """Granules (``granule`` bytes each) of one CTA that a K step reads; a part is what :func:`operand_chunks` takes."""
    chunks = np.concatenate([operand_chunks(*part).ravel() for part in parts])
    return (chunks[:, None] // granule + np.arange(16 // granule)).ravel()


# ---- arithmetic ----

_SMALLEST = -133
"""Exponent of a term that is zero: below every product."""
_PRODUCT_EXPONENT = np.where(E4M3 == 0, -1000, np.maximum(np.frexp(np.where(np.isnan(E4M3), 1.0, E4M3))[1] - 1, -6)).astype(np.int32)
"""int32 [256]: unbiased exponent of each e4m3 code (subnormals -6); far below for zero."""
_IS_NAN = np.isnan(E4M3)


def dot(a: Bytes, b: Bytes, c: NDArray[np.float32] | None, model: Dot | None) -> NDArray[np.float32]:
    """One fused K step: uint8 A [M, K], B [N, K] (e4m3 bits), C FP32 [M, N] or None for zero -> FP32 [M, N].

    Columns whose B row is all zeros only pass C on, except that NaN in A still gives NaN (0 * NaN).
    """
    c = np.zeros((len(a), len(b)), np.float32) if c is None else c
    used = np.flatnonzero((b & 0x7F).any(axis=1))
    result = _truncate_sum(c.astype(np.float64), model)
    if len(used):
        result[:, used] = _columns(a, b[used], c[:, used].astype(np.float64), model)
    if (nan_rows := _IS_NAN[a].any(axis=1)).any():
        result[nan_rows] = np.nan
    with np.errstate(over="ignore"):
        narrowed = (result + 0.0).astype(np.float32)  # + 0.0: a zero result is +0
    nan = narrowed != narrowed
    if nan.any():
        narrowed.view(np.uint32)[nan] = CANONICAL_NAN
    return narrowed


def _columns(a: Bytes, b: Bytes, c: NDArray[np.float64], model: Dot | None) -> NDArray[np.float64]:
    products = E4M3[a][:, None, :] * E4M3[b][None]
    if model is None:
        return products.sum(-1) + c
    exponents = (_PRODUCT_EXPONENT[a][:, None, :] + _PRODUCT_EXPONENT[b][None]).max(-1)
    largest = np.maximum(np.maximum(exponents, _exponent(c)), _SMALLEST)
    scale = model.alignment_bits - largest
    up = np.ldexp(1.0, scale)
    total = np.trunc(products * up[..., None]).sum(-1) + np.trunc(c * up)
    return _truncate_sum(np.ldexp(total, -scale), model)


def _exponent(c: NDArray[np.float64]) -> NDArray[np.int32]:
    """Unbiased FP32 exponent; a very low one for zero, 0 for non-finite values (which swamp the sum anyway)."""
    exponents = np.maximum(np.frexp(np.where(np.isfinite(c), c, 1.0))[1] - 1, -126)
    return np.where(c == 0, _SMALLEST, exponents).astype(np.int32)


def _truncate_sum(total: NDArray[np.float64], model: Dot | None) -> NDArray[np.float64]:
    """Round a sum to the result format: toward zero, R fraction bits, FP32's exponent range (nearest for the exact model)."""
    if model is None:
        return total
    unit = _exponent(total) - model.result_bits
    truncated = np.ldexp(np.trunc(np.ldexp(total, -unit)), unit)
    return np.where(np.isfinite(total), truncated, total)


def gather(view: Any, chunks: NDArray[np.int64]) -> Bytes:
    """Bytes [rows, 32] from uint8 memory viewed as [*, 16] and chunk offsets [rows, 2]."""
    return view[chunks >> 4].reshape(len(chunks), STEP)
