"""One thread's reusable launch: argument memory laid out by :mod:`abi`, and the launch configuration derived from the spec."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from . import driver
from .abi import FLAG_GATE_FIRST, FLAG_UE8M0, PARAMETERS, TENSOR_MAP_BYTES
from .spec import KernelSpec

_CTYPES: dict[str, Any] = {
    "pointer": ctypes.c_uint64,
    "tensor_map": ctypes.c_ubyte * TENSOR_MAP_BYTES,
    "f32": ctypes.c_float,
    "u32": ctypes.c_uint32,
}


class Arguments(ctypes.Structure):
    """Host copies of all kernel parameters. The driver is given a pointer to each, so this layout need not be the kernel's."""

    _fields_ = [(parameter.name, _CTYPES[parameter.kind]) for parameter in PARAMETERS]

    @classmethod
    def of(cls, spec: KernelSpec, w13_scale: int, w2_scale: int, w13_map: bytes, w2_map: bytes) -> Arguments:
        """Everything that stays the same from launch to launch of one bound layer; the other pointers are 0."""
        arguments = cls(w13_scale=w13_scale, w2_scale=w2_scale, scale=spec.scale)
        arguments.w13_map[:] = w13_map
        arguments.w2_map[:] = w2_map
        arguments.limit = math.inf if spec.limit is None else spec.limit
        arguments.flags = (FLAG_UE8M0 if spec.ue8m0 else 0) | (FLAG_GATE_FIRST if spec.w13_order == "gate_up" else 0)
        return arguments


def configuration(spec: KernelSpec, pdl: bool, tokens: int = 1) -> Any:
    """CUlaunchConfig of a launch for ``tokens`` tokens on stream 0; ``pdl`` lets it start before its predecessor ends."""
    api = driver.bindings()
    cluster = api.CUlaunchAttribute()
    cluster.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = spec.cluster
    cluster.value.clusterDim.y = 1
    cluster.value.clusterDim.z = 1
    serialization = api.CUlaunchAttribute()
    serialization.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    serialization.value.programmaticStreamSerializationAllowed = int(pdl)
    config = api.CUlaunchConfig()
    config.gridDimX = spec.grid(tokens)
    config.gridDimY = config.gridDimZ = 1
    config.blockDimX = spec.block_threads
    config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = spec.shared.total
    config.attrs = [cluster, serialization]
    config.numAttrs = 2
    return config


class Call:
    """Argument memory and configurations that one thread rewrites for each launch of one bound layer.

    The driver copies the arguments before cuLaunchKernelEx returns, so one set per thread is enough; two threads must
    not share one.
    """

    def __init__(self, spec: KernelSpec, constants: Arguments) -> None:
        self.arguments = Arguments.from_buffer_copy(constants)
        base = ctypes.addressof(self.arguments)
        addresses = [base + getattr(Arguments, parameter.name).offset for parameter in PARAMETERS]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._address = ctypes.addressof(self._pointers)
        self._configs = configuration(spec, pdl=False), configuration(spec, pdl=True)
        self._enqueue = driver.bindings().cuLaunchKernelEx

    def launch(self, function: Any, grid: int, stream: int, pdl: bool) -> None:
        """cuLaunchKernelEx with the arguments as they stand; the kernel's context must be current. Raises DriverCallError."""
        config = self._configs[pdl]
        config.gridDimX = grid
        config.hStream = stream
        (status,) = self._enqueue(config, function, self._address, 0)
        driver.check("cuLaunchKernelEx", status)
