"""Tensors on GPUs that do not exist: an address, a shape and a dtype, shown through the public protocols. Nobody reads the memory."""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}
CUDA, HOST = 2, 1
_addresses = itertools.count(0x7F00_0000_0000, 1 << 32)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Contiguous strides, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_new_capsule.restype = ctypes.py_object


class DLPack:
    """A tensor seen through DLPack."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        *,
        device: int = 0,
        kind: int = CUDA,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        lanes: int = 1,
    ) -> None:
        self.shape, self.dtype, self.device, self.kind, self.strides, self.offset, self.lanes = (
            shape,
            dtype,
            device,
            kind,
            strides,
            offset,
            lanes,
        )
        self.base = next(_addresses)
        self.streams: list[Any] = []

    @property
    def address(self) -> int:
        return self.base + self.offset

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.device

    def __dlpack__(self, stream: Any = None) -> Any:
        self.streams.append(stream)
        if self.dtype == "float8_e4m3fn":
            code, bits = 10, 8
        else:
            name = self.dtype.rstrip("0123456789")
            code, bits = CODES[name], int(self.dtype.removeprefix(name))
        rank = len(self.shape)
        self._shape = (ctypes.c_int64 * rank)(*self.shape)
        self._strides = (ctypes.c_int64 * rank)(*(self.strides or strides_of(self.shape)))
        strides = ctypes.addressof(self._strides) if self.strides else None
        device = (ctypes.c_int32 * 2)(self.kind, self.device)
        self._tensor = _DLTensor(self.base, device, rank, code, bits, self.lanes, ctypes.addressof(self._shape), strides, self.offset)
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)


class CudaArray:
    """A tensor seen through ``__cuda_array_interface__``; strides in bytes, as the protocol has them."""

    def __init__(
        self, shape: tuple[int, ...], typestr: str, *, strides: tuple[int, ...] | None = None, offset: int = 0, mask: Any = None
    ) -> None:
        self.address = next(_addresses) + offset
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (self.address, False),
            "version": 3,
            "strides": strides,
            "mask": mask,
        }
