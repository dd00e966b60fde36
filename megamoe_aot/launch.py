"""One thread's reusable launch: argument memory laid out by the ABI, and the launch configuration derived from the spec."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any, ClassVar

from . import driver, finalize
from .abi import FLAG_GATE_FIRST, FLAG_UE8M0, LIST_PARAMETERS, PARAMETERS, TENSOR_MAP_BYTES, Parameter
from .errors import DriverCallError, ResidencyError
from .finalize import CodeSpec, FinalizeSpec
from .spec import KernelSpec

_CTYPES: dict[str, Any] = {
    "pointer": ctypes.c_uint64,
    "tensor_map": ctypes.c_ubyte * TENSOR_MAP_BYTES,
    "f32": ctypes.c_float,
    "u32": ctypes.c_uint32,
}

_COOPERATIVE_LAUNCH_TOO_LARGE = 720


def _fields(parameters: Iterable[Parameter]) -> list[tuple[str, Any]]:
    return [(parameter.name, _CTYPES[parameter.kind]) for parameter in parameters]


class Arguments(ctypes.Structure):
    """Host copies of all kernel parameters. The driver is given a pointer to each, so this layout need not be the kernel's."""

    _fields_ = _fields(PARAMETERS)
    parameters: ClassVar[tuple[Parameter, ...]] = PARAMETERS

    @classmethod
    def of(cls, spec: KernelSpec, w13_scale: int, w2_scale: int, w13_map: bytes, w2_map: bytes) -> Arguments:
        """Everything that stays the same from launch to launch of one bound layer; the other pointers are 0."""
        kind = ListArguments if spec.structure == "list" else Arguments
        arguments = kind(w13_scale=w13_scale, w2_scale=w2_scale, scale=spec.scale)
        arguments.w13_map[:] = w13_map
        arguments.w2_map[:] = w2_map
        arguments.limit = math.inf if spec.limit is None else spec.limit
        arguments.flags = (FLAG_UE8M0 if spec.ue8m0 else 0) | (FLAG_GATE_FIRST if spec.w13_order == "gate_up" else 0)
        return arguments


class ListArguments(Arguments):
    """What the list structure's kernels take."""

    _fields_ = _fields(LIST_PARAMETERS)
    parameters: ClassVar[tuple[Parameter, ...]] = PARAMETERS + LIST_PARAMETERS


class FinalizeArguments(ctypes.Structure):
    """What the finalize kernels take."""

    _fields_ = _fields(finalize.PARAMETERS)
    parameters: ClassVar[tuple[Parameter, ...]] = finalize.PARAMETERS


def configuration(spec: CodeSpec, pdl: bool, tokens: int = 1, processors: int = 0) -> Any:
    """CUlaunchConfig of a launch for ``tokens`` tokens on stream 0.

    A list launch carries the cooperative attribute: the driver starts all its CTAs together or refuses it.

    Args:
        pdl: let the launch start before its predecessor ends.
        processors: list structure: CTAs, one per SM.
    """
    api = driver.bindings()
    attributes = [] if isinstance(spec, FinalizeSpec) else [_cooperative(api) if spec.structure == "list" else _cluster(api, spec)]
    serialization = api.CUlaunchAttribute()
    serialization.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    serialization.value.programmaticStreamSerializationAllowed = int(pdl)
    config = api.CUlaunchConfig()
    config.gridDimX = spec.grid(tokens) if isinstance(spec, FinalizeSpec) else spec.grid(tokens, processors)
    config.gridDimY = config.gridDimZ = 1
    config.blockDimX = spec.block_threads
    config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = spec.shared_bytes
    config.attrs = [*attributes, serialization]
    config.numAttrs = len(attributes) + 1
    return config


def _cluster(api: Any, spec: KernelSpec) -> Any:
    cluster = api.CUlaunchAttribute()
    cluster.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = spec.cluster
    cluster.value.clusterDim.y = 1
    cluster.value.clusterDim.z = 1
    return cluster


def _cooperative(api: Any) -> Any:
    cooperative = api.CUlaunchAttribute()
    cooperative.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    cooperative.value.cooperative = 1
    return cooperative


class Call:
    """Argument memory and configurations that one thread rewrites for each launch of one kernel of one bound layer.

    The driver copies the arguments before cuLaunchKernelEx returns, so one set per thread is enough; two threads must
    not share one.
    """

    def __init__(self, spec: CodeSpec, constants: Arguments | FinalizeArguments) -> None:
        kind = type(constants)
        self.arguments: Any = kind.from_buffer_copy(constants)
        base = ctypes.addressof(self.arguments)
        addresses = [base + getattr(kind, parameter.name).offset for parameter in kind.parameters]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._address = ctypes.addressof(self._pointers)
        self._configs = configuration(spec, pdl=False), configuration(spec, pdl=True)
        self._enqueue = driver.bindings().cuLaunchKernelEx

    def launch(self, function: Any, grid: int, stream: int, pdl: bool) -> None:
        """cuLaunchKernelEx with the arguments as they stand; the kernel's context must be current.

        Raises:
            ResidencyError: list structure: the stream's share of the GPU does not hold the whole grid.
            DriverCallError: any other failure.
        """
        config = self._configs[pdl]
        config.gridDimX = grid
        config.hStream = stream
        (status,) = self._enqueue(config, function, self._address, 0)
        try:
            driver.check("cuLaunchKernelEx", status)
        except DriverCallError as error:
            if error.code != _COOPERATIVE_LAUNCH_TOO_LARGE:
                raise
            raise ResidencyError(
                f"the driver refuses a list launch of {grid} CTAs, which must all run at once, on stream {stream:#x}: when the kernel was "
                f"loaded there were {grid} SMs, this stream has fewer (a green context?); it was not started. "
                'Load with structure="cluster" for such streams'
            ) from error
