"""One cubin loaded on one device: everything that happens once, so that no launch does hidden work."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

from . import driver
from .abi import PARAMETERS
from .errors import ClusterUnavailableError, DriverCallError, ManifestError, MegaMoeError, UnsupportedDeviceError
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
    active_clusters: int
    """Clusters that the device, or this process's share of it, holds at once."""

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


def load(image: bytes, record: CubinRecord, spec: KernelSpec, device: int) -> LoadedCode:
    """Load ``image``, set the function attributes and check that a cluster fits; restores the caller's context.

    Raises:
        UnsupportedDeviceError, ManifestError, ClusterUnavailableError, DriverCallError.
    """
    context = driver.primary_context(device)
    with driver.active(context), contextlib.ExitStack() as undo:
        library = driver.call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
        undo.callback(driver.call, "cuLibraryUnload", library)
        kernel = _kernel(library, record, device)
        _check_parameters(kernel, record)
        _set_attributes(kernel, spec, device)
        driver.call("cuKernelGetFunction", kernel)  # loads the code now, where lazy loading would wait for the first launch
        function = driver.bindings().CUfunction(int(kernel))
        clusters = _active_clusters(function, spec, device)
        undo.pop_all()
    return LoadedCode(device, context, library, function, clusters)


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


def _check_parameters(kernel: Any, record: CubinRecord) -> None:
    """The driver's view of the parameter list must be the one that launch.py passes."""
    sizes: list[int] = []
    with contextlib.suppress(DriverCallError):  # the call fails for an index that is no parameter
        for index in range(len(PARAMETERS)):
            sizes.append(int(driver.call("cuKernelGetParamInfo", kernel, index)[1]))
    if sizes != (expected := [parameter.size for parameter in PARAMETERS]):
        raise ManifestError(f"{record.symbol} takes parameters of {sizes} bytes, this version passes {expected}; {_REBUILD}")


def _set_attributes(kernel: Any, spec: KernelSpec, device: int) -> None:
    api = driver.bindings()
    handle = driver.handle(device)
    for name, value in (
        ("MAX_DYNAMIC_SHARED_SIZE_BYTES", spec.shared.total),
        ("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1),
        ("PREFERRED_SHARED_MEMORY_CARVEOUT", 100),
    ):
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
        mps = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "not set")
        raise ClusterUnavailableError(
            f"device {device} ({driver.device_name(device)}, {multiprocessors} SMs) cannot hold one cluster of {spec.cluster} CTAs with "
            f"{spec.shared.total} bytes of shared memory each, which takes {spec.cluster // 2} free SMs of one GPC: look for a MIG slice, "
            f"a green context, or an MPS limit (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {mps})"
        )
    return clusters
