"""Checked CUDA driver calls. ``cuda.bindings`` is imported by the first call, so that importing the package maps no libcuda."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from .arch import Capability
from .errors import DriverCallError, NoDriverError


@functools.cache
def bindings() -> Any:
    """``cuda.bindings.driver`` after a successful ``cuInit``. Raises NoDriverError."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoDriverError(f"cuda-python 12.8 or newer is needed to launch kernels (pip install cuda-python): {error}") from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # how cuda.bindings reports a libcuda that it cannot open
        said = str(error).rstrip(".")
        raise NoDriverError(f"no CUDA driver on this machine ({said}). menu() and has_kernel() work without one") from error
    if int(status) != 0:
        raise NoDriverError(f"the CUDA driver is installed but reports no usable GPU: cuInit gave {status.name} ({int(status)})")
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call ``cuda.bindings.driver.<name>``; return its one result, None, or a tuple. Raises DriverCallError."""
    status, *results = getattr(bindings(), name)(*arguments)
    check(name, status)
    return results[0] if len(results) == 1 else tuple(results) or None


def check(name: str, status: Any) -> None:
    """Raise DriverCallError unless ``status``, a CUresult that ``name`` returned, is success."""
    if int(status) != 0:
        _, text = bindings().cuGetErrorString(status)
        raise DriverCallError(name, int(status), status.name, text.decode() if isinstance(text, bytes) else "no description")


def version() -> int:
    """``cuDriverGetVersion``: 13000 for a driver that supports CUDA 13.0."""
    return int(call("cuDriverGetVersion"))


def attribute(device: int, name: str) -> int:
    """``CU_DEVICE_ATTRIBUTE_<name>`` of ``device``."""
    code = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", code, handle(device)))


def processors(device: int, context: int) -> int:
    """SMs that launches in ``context`` may use: the least that any of the driver's answers grants.

    The device attribute follows a MIG slice and, under MPS, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE; the context's SM resource follows
    what the context was created with. Green contexts are not counted: they belong to streams, which are not known here.
    """
    count = attribute(device, "MULTIPROCESSOR_COUNT")
    with contextlib.suppress(DriverCallError):  # a driver or a kind of context that cannot say
        kind = bindings().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        count = min(count, int(call("cuCtxGetDevResource", context, kind).sm.smCount))
    return count


def capability(device: int) -> Capability:
    """Compute capability of ``device``."""
    return attribute(device, "COMPUTE_CAPABILITY_MAJOR"), attribute(device, "COMPUTE_CAPABILITY_MINOR")


def device_name(device: int) -> str:
    """The GPU's product name."""
    text: bytes = call("cuDeviceGetName", 256, handle(device))
    return text.split(b"\0")[0].decode()


def handle(device: int) -> Any:
    """CUdevice of an ordinal. Raises NoDriverError if this process does not see so many GPUs."""
    count = int(call("cuDeviceGetCount"))
    if not 0 <= device < count:
        raise NoDriverError(f"device {device} was asked for, this process sees {count} GPUs; look at CUDA_VISIBLE_DEVICES")
    return call("cuDeviceGet", device)


def current_context() -> int:
    """Address of the calling thread's current context, 0 if it has none."""
    return int(call("cuCtxGetCurrent"))


def current_device() -> int | None:
    """Ordinal of the current context's device, None without a current context."""
    return int(call("cuCtxGetDevice")) if current_context() else None


_primary: dict[int, int] = {}
_primary_lock = threading.Lock()


def primary_context(device: int) -> int:
    """Address of the primary context of ``device``, the one that torch and the CUDA runtime use.

    It is retained once per device and kept until the process ends: loaded kernels live in it.
    """
    with _primary_lock:
        if device not in _primary:
            _primary[device] = int(call("cuDevicePrimaryCtxRetain", handle(device)))
        return _primary[device]


@contextlib.contextmanager
def active(context: int) -> Iterator[None]:
    """Make ``context`` current inside the block and restore the caller's afterwards."""
    if current_context() == context:
        yield
        return
    call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def pointer_device(pointer: int) -> int:
    """Ordinal of the device whose memory ``pointer`` lies in. Raises DriverCallError for memory the driver does not know."""
    code = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call("cuPointerGetAttribute", code, pointer))
