"""Reading and checking device tensors of any library: torch, DLPack, ``__cuda_array_interface__``.

torch is never imported here; it is used only where the caller has already imported it. Nothing is copied or converted:
a tensor is used as it lies in memory, or refused.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import sys
from typing import Any

from . import driver
from .errors import DriverCallError, TensorError

CPU = -1
"""Device of a tensor in host memory."""


@dataclasses.dataclass(frozen=True)
class View:
    """One tensor as it lies in memory. Strides are in elements; dtypes carry torch's names ("bfloat16", "float32" ...)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """None: contiguous."""
    dtype: str
    device: int
    """CUDA ordinal, or CPU."""

    @property
    def contiguous(self) -> bool:
        """Row-major without gaps; dimensions of one element may have any stride."""
        if self.strides is None or 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def view(name: str, tensor: Any) -> View:
    """Describe ``tensor``. Raises TensorError if it exposes no device pointer."""
    if is_torch(tensor):
        return View(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), _torch_name(tensor.dtype), tensor.get_device())
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return _from_dlpack(name, tensor)
    if hasattr(tensor, "__cuda_array_interface__"):
        return _from_cuda_array_interface(name, tensor.__cuda_array_interface__)
    kind = type(tensor).__name__
    raise TensorError(f"{name}: got {kind}, expected a torch tensor or an object with __dlpack__ or __cuda_array_interface__")


def is_torch(tensor: Any) -> bool:
    """Whether ``tensor`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


@dataclasses.dataclass(frozen=True)
class Requirement:
    """What one argument must be, whatever its shape."""

    name: str
    dtypes: tuple[str, ...]
    """Accepted dtypes."""
    alignment: int
    """Bytes."""
    axes: str
    """The shape in words, for messages: "[M, H]"."""

    def pointer(self, tensor: Any, shape: tuple[int, ...], device: int) -> int:
        """Address of ``tensor``, which must be contiguous, of ``shape``, on CUDA device ``device``. Raises TensorError."""
        torch = sys.modules.get("torch")
        if (
            torch is not None
            and isinstance(tensor, torch.Tensor)
            and tensor.dtype in self._torch_dtypes
            and tensor.shape == shape
            and tensor.get_device() == device
            and tensor.is_contiguous()
        ):
            address: int = tensor.data_ptr()
            if address % self.alignment == 0:
                return address
        return self.check(view(self.name, tensor), shape, device)

    @functools.cached_property
    def _torch_dtypes(self) -> frozenset[Any]:
        torch = sys.modules["torch"]
        return frozenset(getattr(torch, name) for name in self.dtypes if hasattr(torch, name))

    def check(self, tensor: View, shape: tuple[int, ...], device: int) -> int:
        """As :meth:`pointer`, for a described tensor."""
        if tensor.dtype not in self.dtypes:
            hint = ""
            if self.dtypes == ("float32",) and tensor.dtype.startswith(("float", "bfloat")):
                hint = "; convert it once with .float(), outside the launch path"
            raise self._refusal("dtype", tensor.dtype, " or ".join(self.dtypes) + hint)
        if tensor.shape != shape:
            raise self._refusal("shape", list(tensor.shape), f"{list(shape)}, that is {self.axes}")
        if tensor.device != device:
            where = "cpu" if tensor.device == CPU else f"cuda:{tensor.device}"
            raise self._refusal("device", where, f"cuda:{device}, where the kernel is loaded")
        if not tensor.contiguous:
            raise self._refusal("strides", tensor.strides, "a contiguous tensor; call .contiguous() outside the launch path")
        if tensor.pointer % self.alignment and 0 not in shape:
            raise self._refusal("address", hex(tensor.pointer), f"a multiple of {self.alignment} bytes; copy the view with .clone()")
        return tensor.pointer

    def _refusal(self, what: str, got: Any, expected: str) -> TensorError:
        return TensorError(f"{self.name}: {what} is {got}, expected {expected}")


def shape_of(name: str, tensor: Any) -> tuple[int, ...]:
    """Shape of ``tensor``; its own ``shape`` where it has one."""
    shape = getattr(tensor, "shape", None)
    return view(name, tensor).shape if shape is None else tuple(shape)


def empty_like(tensor: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new torch tensor on the device of the torch tensor ``tensor``."""
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, dtype), device=tensor.device)


def record_use(tensor: Any, stream: int, device: int) -> None:
    """Let torch reuse the memory of ``tensor`` only after the present work of ``stream``, if that is not torch's current stream."""
    cuda = sys.modules["torch"].cuda
    if stream != cuda.current_stream(device).cuda_stream:
        tensor.record_stream(cuda.ExternalStream(stream, device=device))


def stream_handle(stream: Any, tensor: Any, device: int) -> int:
    """CUstream address of ``stream``; None means torch's current stream, and only if ``tensor`` is a torch tensor.

    Raises:
        TensorError: None with tensors of another library, or an object that is no stream.
    """
    if stream is None:
        if not is_torch(tensor):
            raise TensorError("stream: None stands for torch's current stream, but the tensors are not torch's; pass a stream")
        stream = sys.modules["torch"].cuda.current_stream(device)
    if isinstance(stream, int):
        return stream
    if (other := getattr(stream, "device_index", device)) != device:
        raise TensorError(f"stream: it belongs to cuda:{other}, expected cuda:{device}, where the kernel is loaded")
    if hasattr(stream, "__cuda_stream__"):
        method = stream.__cuda_stream__
        return int((method() if callable(method) else method)[1])
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    raise TensorError(f"stream: {type(stream).__name__} is neither an int nor an object with __cuda_stream__ or cuda_stream")


def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# __cuda_array_interface__ --------------------------------------------------------------------------------------------

_KINDS = {"f": "float", "i": "int", "u": "uint"}


def _from_cuda_array_interface(name: str, interface: dict[str, Any]) -> View:
    typestr: str = interface["typestr"]
    order, kind, size = typestr[0], typestr[1], int(typestr[2:])
    if order == ">" or interface.get("mask") is not None:
        raise TensorError(f"{name}: masked or big-endian arrays are not supported (typestr {typestr!r})")
    dtype = f"{_KINDS[kind]}{8 * size}" if kind in _KINDS else typestr  # the interface has no name for bfloat16: DLPack has
    strides = interface.get("strides")
    shape = tuple(interface["shape"])
    pointer = int(interface["data"][0])
    return View(
        pointer=pointer,
        shape=shape,
        strides=None if strides is None else tuple(stride // size for stride in strides),
        dtype=dtype,
        device=_device_of(pointer) if math.prod(shape) else CPU,
    )


def _device_of(pointer: int) -> int:
    """Ordinal of the device that owns ``pointer``; CPU if the driver does not know it."""
    try:
        return driver.pointer_device(pointer)
    except DriverCallError:
        return CPU


# DLPack --------------------------------------------------------------------------------------------------------------

_DLPACK_CUDA = (2, 13)
"""kDLCUDA and kDLCUDAManaged."""
_DLPACK_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_DLPACK_FLOAT8_E4M3FN = 10


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


def _from_dlpack(name: str, tensor: Any) -> View:
    """Read the capsule without consuming it: its own destructor frees it, and ``tensor`` keeps the memory alive."""
    kind, index = tensor.__dlpack_device__()
    on_gpu = int(kind) in _DLPACK_CUDA
    # -1: the producer need not order its stream before ours; the caller passes the stream to launch on.
    capsule = tensor.__dlpack__(stream=-1) if on_gpu else tensor.__dlpack__()
    described = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = tuple(described.shape[: described.ndim])
    if described.lanes != 1:
        raise TensorError(f"{name}: vector element types are not supported (DLPack lanes {described.lanes})")
    if described.code == _DLPACK_FLOAT8_E4M3FN:
        dtype = "float8_e4m3fn"
    else:
        dtype = f"{_DLPACK_CODES.get(described.code, f'dlpack code {described.code} ')}{described.bits}"
    return View(
        pointer=(described.data or 0) + described.byte_offset,
        shape=shape,
        strides=tuple(described.strides[: described.ndim]) if described.strides else None,
        dtype=dtype,
        device=int(index) if on_gpu else CPU,
    )
