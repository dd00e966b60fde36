"""One cubin loaded on one device: everything that happens once, so that no launch does hidden work."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

from . import driver
from .errors import ClusterUnavailableError, DriverCallError, ManifestError, MegaMoeError, ResidencyError, UnsupportedDeviceError
from .finalize import CodeSpec, FinalizeSpec
from .launch import configuration
from .manifest import CubinRecord
from .spec import KernelSpec

_NO_BINARY_FOR_GPU = 209
_NOT_FOUND = 500
_INVALID_CLUSTER_SIZE = 912

_REBUILD = "rebuild the artifacts"


@dataclasses.dataclass
class LoadedCode:
    """A loaded kernel. The handle is a context-independent CUkernel, which the driver takes wherever it wants a CUfunction."""

    device: int
    context: int
    """Primary context of the device."""
    library: Any
    function: Any
    """None once unloaded."""
    active_clusters: int = 0
    """Clusters that the device, or this process's share of it, holds at once; 0 for code that is not of the cluster structure."""
    processors: int = 0
    """CTAs of a list launch: one on each SM of this process's share; 0 for code that is not of the list structure."""

    def handle(self) -> Any:
        """The launchable handle. Raises MegaMoeError after :meth:`unload`."""
        if self.function is None:
            raise MegaMoeError("this kernel was unloaded; call load_kernel and bind again")
        return self.function

    def unload(self) -> None:
        """Give the code's device memory back. No launch of it may still run; a second call does nothing."""
        if self.function is not None:
            self.function = None
            with driver.active(self.context):
                driver.call("cuLibraryUnload", self.library)


def load(image: bytes, record: CubinRecord, spec: CodeSpec, device: int) -> LoadedCode:
    """Load ``image``, set the function attributes and check that a cluster, or a whole list launch, fits; restores the caller's context.

    Raises:
        UnsupportedDeviceError, ManifestError, ClusterUnavailableError, ResidencyError, DriverCallError.
    """
    context = driver.primary_context(device)
    with driver.active(context), contextlib.ExitStack() as undo:
        library = driver.call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
        undo.callback(driver.call, "cuLibraryUnload", library)
        kernel = _kernel(library, record, device)
        _check_parameters(kernel, record, spec)
        _set_attributes(kernel, spec, device)
        driver.call("cuKernelGetFunction", kernel)  # loads the code now, where lazy loading would wait for the first launch
        function = driver.bindings().CUfunction(int(kernel))
        code = LoadedCode(device, context, library, function)
        if isinstance(spec, KernelSpec) and spec.structure == "list":
            code.processors = _list_processors(function, spec, device, context)
        elif isinstance(spec, KernelSpec):
            code.active_clusters = _active_clusters(function, spec, device)
        undo.pop_all()
    return code


def _kernel(library: Any, record: CubinRecord, device: int) -> Any:
    try:
        return driver.call("cuLibraryGetKernel", library, record.symbol.encode())
    except DriverCallError as error:
        # A cubin for another GPU loads "successfully", with no kernels in it; the driver only complains here.
        if error.code == _NO_BINARY_FOR_GPU:
            major, minor = driver.capability(device)
            raise UnsupportedDeviceError(
                f"the driver refuses the {record.arch} cubin on device {device} ({driver.device_name(device)}, {major}.{minor}), "
                "although their architectures match; please report this"
            ) from error
        if error.code == _NOT_FOUND:
            raise ManifestError(f"the cubin has no kernel {record.symbol}, the manifest is of another build; {_REBUILD}") from error
        raise


def _check_parameters(kernel: Any, record: CubinRecord, spec: CodeSpec) -> None:
    """The driver's view of the parameter list must be the one that launch.py passes."""
    sizes: list[int] = []
    with contextlib.suppress(DriverCallError):  # the call fails for an index that is no parameter
        for index in range(len(spec.parameters)):
            sizes.append(int(driver.call("cuKernelGetParamInfo", kernel, index)[1]))
    if sizes != (expected := [parameter.size for parameter in spec.parameters]):
        raise ManifestError(f"{record.symbol} takes parameters of {sizes} bytes, this version passes {expected}; {_REBUILD}")


def _set_attributes(kernel: Any, spec: CodeSpec, device: int) -> None:
    api = driver.bindings()
    handle = driver.handle(device)
    # The same carveout for all, the finalize kernel included: an SM must be empty to change it, which would part chained launches.
    attributes = {"PREFERRED_SHARED_MEMORY_CARVEOUT": 100}
    if not isinstance(spec, FinalizeSpec):
        attributes["MAX_DYNAMIC_SHARED_SIZE_BYTES"] = spec.shared_bytes
        if spec.structure == "cluster":
            attributes["NON_PORTABLE_CLUSTER_SIZE_ALLOWED"] = 1
    for name, value in attributes.items():
        driver.call("cuKernelSetAttribute", getattr(api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}"), value, kernel, handle)


def _active_clusters(function: Any, spec: KernelSpec, device: int) -> int:
    try:
        clusters = int(driver.call("cuOccupancyMaxActiveClusters", function, configuration(spec, pdl=False)))
    except DriverCallError as error:
        if error.code != _INVALID_CLUSTER_SIZE:
            raise
        clusters = 0
    if clusters == 0:
        multiprocessors = driver.attribute(device, "MULTIPROCESSOR_COUNT")
        raise ClusterUnavailableError(
            f"device {device} ({driver.device_name(device)}, {multiprocessors} SMs) cannot hold one cluster of {spec.cluster} CTAs with "
            f"{spec.shared_bytes} bytes of shared memory each, which takes {spec.cluster // 2} free SMs of one GPC: look for a MIG slice, "
            f"a green context, or an MPS limit (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {_mps_limit()})"
        )
    return clusters


def _list_processors(function: Any, spec: KernelSpec, device: int, context: int) -> int:
    """The grid of a list launch: one CTA per SM, all resident together. Raises ResidencyError where that cannot be."""
    processors = driver.processors(device, context)
    resident = int(driver.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, spec.block_threads, spec.shared_bytes))
    cooperative = driver.attribute(device, "COOPERATIVE_LAUNCH")
    if not cooperative or resident < 1 or processors < spec.columns:
        raise ResidencyError(
            f"device {device} ({driver.device_name(device)}) cannot run {spec.code_name}, whose CTAs must all run at once. It needs "
            f"cooperative launches ({'there' if cooperative else 'not there'}), room on each SM for a CTA of {spec.block_threads} "
            f"threads and {spec.shared_bytes} bytes of shared memory (there is room for {resident}) and at least {spec.columns} SMs "
            f"(this process has {processors}): look for a MIG slice or an MPS limit (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is "
            f'{_mps_limit()}). structure="cluster" needs none of this'
        )
    return processors


def _mps_limit() -> str:
    return os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "not set")
