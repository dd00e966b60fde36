"""A CUDA driver without a GPU: it obeys the documented rules of the calls that megamoe_aot makes, and records them.

It stands in for the module ``cuda.bindings.driver``: classes and enums are the real ones, functions are the methods below. A fake
cubin is JSON naming its arch, symbol and parameter sizes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import itertools
import json
import struct
import threading
from pathlib import Path
from typing import Any

import cuda.bindings
import pytest
from cuda.bindings import driver as real

from megamoe_aot import driver, loader
from megamoe_aot.abi import PARAMETERS
from megamoe_aot.manifest import CubinRecord, Entry, Manifest, ParameterRecord
from megamoe_aot.menu import menu_specs

H200 = ("NVIDIA H200", (9, 0))
B200 = ("NVIDIA B200", (10, 0))
B300 = ("NVIDIA B300", (10, 3))
RTX = ("NVIDIA RTX PRO 6000", (12, 0))

SUCCESS = real.CUresult.CUDA_SUCCESS
INVALID_VALUE = real.CUresult.CUDA_ERROR_INVALID_VALUE
WITHOUT_RESULT = ("cuInit", "cuCtxPushCurrent", "cuLibraryUnload", "cuKernelSetAttribute", "cuLaunchKernelEx")
KIND_SIZES = {"pointer": "<Q", "f32": "<f", "u32": "<I", "tensor_map": "128s"}


@dataclasses.dataclass
class Launch:
    """What one cuLaunchKernelEx was given, read from memory during the call, as the driver does."""

    context: int
    stream: int
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    cluster: tuple[int, int, int]
    pdl: bool
    arguments: dict[str, Any]
    thread: int


@dataclasses.dataclass
class _Kernel:
    symbol: str
    parameters: list[int]
    attributes: dict[tuple[int, str], int] = dataclasses.field(default_factory=dict)


class FakeDriver:
    """One machine. ``fail[call] = CUresult`` makes a call fail; ``calls`` lists every call's name in order."""

    def __init__(self, *gpus: tuple[str, tuple[int, int]], version: int = 13000, clusters: int = 14) -> None:
        self.gpus = gpus
        self.version = version
        self.clusters = clusters
        self.fail: dict[str, Any] = {}
        self.calls: list[str] = []
        self.launches: list[Launch] = []
        self.maps: dict[bytes, dict[str, Any]] = {}
        """Encoded tensor map -> its arguments."""
        self.memory: dict[int, int] = {}
        """Address -> device, for cuPointerGetAttribute."""
        self.libraries: dict[int, dict[str, _Kernel]] = {}
        self.kernels: dict[int, _Kernel] = {}
        self._handles = itertools.count(0x5000)
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        """Types and enums of the real module; an unknown function is a missing piece of this fake."""
        if name.startswith("cu") and not name.startswith("cuuint"):
            raise AttributeError(f"the fake driver has no {name}")
        return getattr(real, name)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return value

        def recorded(*arguments: Any) -> Any:
            self.calls.append(name)
            failure = self.fail.get(name)
            if failure is not None:
                return (failure,) if name in WITHOUT_RESULT else (failure, None)
            return value(*arguments)

        return recorded

    # devices and contexts ------------------------------------------------------------------------------------------

    def cuInit(self, flags: int) -> Any:
        return (SUCCESS,) if self.gpus else (real.CUresult.CUDA_ERROR_NO_DEVICE,)

    def cuGetErrorString(self, status: Any) -> Any:
        return SUCCESS, b"the fake driver says so"

    def cuDriverGetVersion(self) -> Any:
        return SUCCESS, self.version

    def cuDeviceGetCount(self) -> Any:
        return SUCCESS, len(self.gpus)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return SUCCESS, real.CUdevice(ordinal)

    def cuDeviceGetName(self, size: int, device: Any) -> Any:
        return SUCCESS, self.gpus[int(device)][0].encode().ljust(size, b"\0")

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> Any:
        major, minor = self.gpus[int(device)][1]
        values = {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor, "MULTIPROCESSOR_COUNT": 132}
        return SUCCESS, values[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    @staticmethod
    def primary(device: int) -> int:
        """Address of the primary context of ``device``."""
        return 0x1000 * (device + 1)

    @property
    def stack(self) -> list[int]:
        """The calling thread's context stack."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return SUCCESS, real.CUcontext(self.primary(int(device)))

    def cuCtxGetCurrent(self) -> Any:
        return SUCCESS, real.CUcontext(self.stack[-1] if self.stack else 0)

    def cuCtxGetDevice(self) -> Any:
        return SUCCESS, real.CUdevice(self.stack[-1] // 0x1000 - 1)

    def cuCtxPushCurrent(self, context: Any) -> Any:
        self.stack.append(int(context))
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        return SUCCESS, real.CUcontext(self.stack.pop())

    def cuPointerGetAttribute(self, attribute: Any, pointer: int) -> Any:
        assert attribute.name == "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"
        return (SUCCESS, self.memory[pointer]) if pointer in self.memory else (INVALID_VALUE, None)

    # libraries -----------------------------------------------------------------------------------------------------

    def cuLibraryLoadData(self, image: bytes, *options: Any) -> Any:
        assert self.stack, "lazy loading needs a context to load into"
        assert options == ([], [], 0, [], [], 0)
        content = json.loads(image)
        handle = next(self._handles)
        runs = self._runs(content["arch"])
        self.libraries[handle] = {content["symbol"]: _Kernel(content["symbol"], content["parameters"])} if runs else {}
        return SUCCESS, real.CUlibrary(handle)

    def _runs(self, arch: str) -> bool:
        device = self.stack[-1] // 0x1000 - 1
        return self.gpus[device][1] in {"sm_90a": [(9, 0)], "sm_100f": [(10, 0), (10, 3)]}[arch]

    def cuLibraryUnload(self, library: Any) -> Any:
        del self.libraries[int(library)]
        return (SUCCESS,)

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> Any:
        kernels = self.libraries[int(library)]
        if not kernels:
            return real.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None
        if name.decode() not in kernels:
            return real.CUresult.CUDA_ERROR_NOT_FOUND, None
        handle = next(self._handles)
        self.kernels[handle] = kernels[name.decode()]
        return SUCCESS, real.CUkernel(handle)

    def cuKernelGetFunction(self, kernel: Any) -> Any:
        return SUCCESS, real.CUfunction(int(kernel) + 0x100000)

    def cuKernelGetParamInfo(self, kernel: Any, index: int) -> Any:
        sizes = self.kernels[int(kernel)].parameters
        return (SUCCESS, sum(sizes[:index]), sizes[index]) if index < len(sizes) else (INVALID_VALUE, None, None)

    def cuKernelSetAttribute(self, attribute: Any, value: int, kernel: Any, device: Any) -> Any:
        self.kernels[int(kernel)].attributes[int(device), attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_")] = value
        return (SUCCESS,)

    # launches ------------------------------------------------------------------------------------------------------

    def cuOccupancyMaxActiveClusters(self, function: Any, config: Any) -> Any:
        return self._refused(function, config) or SUCCESS, self.clusters

    def _refused(self, function: Any, config: Any) -> Any:
        """What the driver checks of a launch, given the attributes that were set."""
        set_ = {
            name: value
            for (device, name), value in self.kernels[int(function)].attributes.items()
            if self.primary(device) == self.stack[-1]
        }
        cluster = _attributes(config)["CLUSTER_DIMENSION"].clusterDim.x
        if (cluster > 8 and not set_.get("NON_PORTABLE_CLUSTER_SIZE_ALLOWED")) or config.gridDimX % cluster:
            return real.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE
        return INVALID_VALUE if config.sharedMemBytes > set_.get("MAX_DYNAMIC_SHARED_SIZE_BYTES", 49152) else None

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: int, extra: int) -> Any:
        if not self.stack:
            return (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if refusal := self._refused(function, config):
            return (refusal,)
        attributes = _attributes(config)
        cluster = attributes["CLUSTER_DIMENSION"].clusterDim
        self.launches.append(
            Launch(
                context=self.stack[-1],
                stream=int(config.hStream),
                symbol=self.kernels[int(function)].symbol,
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                shared=config.sharedMemBytes,
                cluster=(cluster.x, cluster.y, cluster.z),
                pdl=bool(attributes["PROGRAMMATIC_STREAM_SERIALIZATION"].programmaticStreamSerializationAllowed),
                arguments=_read_arguments(pointers),
                thread=threading.get_ident(),
            )
        )
        return (SUCCESS,)

    def cuTensorMapEncodeTiled(self, dtype: Any, rank: int, address: int, *rest: Any) -> Any:
        dims, strides, box, steps, interleave, swizzle, promotion, fill = rest
        fields: dict[str, Any] = {"dtype": dtype.name, "rank": rank, "address": address}
        fields |= {
            name: [int(v) for v in values] for name, values in [("dims", dims), ("strides", strides), ("box", box), ("steps", steps)]
        }
        fields |= {"interleave": interleave.name, "swizzle": swizzle.name, "promotion": promotion.name, "fill": fill.name}
        encoded = hashlib.sha512(json.dumps(fields).encode()).digest() * 2
        self.maps[encoded] = fields
        buffer = ctypes.create_string_buffer(encoded, 128)

        class Encoded:
            def getPtr(self) -> int:
                return ctypes.addressof(buffer)

        return SUCCESS, Encoded()


def _attributes(config: Any) -> dict[str, Any]:
    return {attribute.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_"): attribute.value for attribute in config.attrs[: config.numAttrs]}


def _read_arguments(pointers: int) -> dict[str, Any]:
    addresses = (ctypes.c_void_p * len(PARAMETERS)).from_address(pointers)
    values = {}
    for parameter, address in zip(PARAMETERS, addresses, strict=True):
        assert address is not None
        (values[parameter.name],) = struct.unpack(KIND_SIZES[parameter.kind], ctypes.string_at(address, parameter.size))
    return values


def fake_artifacts(folder: Path, **changes: Any) -> Manifest:
    """Write the whole menu with fake cubins to ``folder``. ``changes`` override fields of every cubin record."""
    cubins, entries = {}, []
    for shape, spec in menu_specs():
        symbol = f"{spec.code_name}_0"
        image = json.dumps({"arch": spec.arch, "symbol": symbol, "parameters": [p.size for p in PARAMETERS]}).encode()
        sha256 = hashlib.sha256(image).hexdigest()
        (folder / f"{sha256}.cubin").write_bytes(image)
        record = CubinRecord(
            code=spec.code_name,
            bytes=len(image),
            ptx_sha256="0" * 64,
            symbol=symbol,
            arch=spec.arch,
            min_driver=13000,
            registers=90,
            spill_bytes=0,
            stack_bytes=0,
            static_shared=0,
            parameters=tuple(ParameterRecord(p.name, 0, p.size) for p in PARAMETERS),
            block=spec.block_threads,
            resident_ctas=2,
        )
        cubins[sha256] = dataclasses.replace(record, **changes)
        entries.append(Entry(shape.model, shape.parallel, spec, sha256, spec.shared.total, spec.cluster))
    manifest = Manifest("0" * 64, {"ptxas": "13.4.59"}, cubins, tuple(entries), folder)
    manifest.save(folder)
    return manifest


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, manifest: Manifest) -> None:
    """Make ``fake`` the machine's driver and ``manifest`` the wheel's for the length of one test."""
    monkeypatch.setattr(cuda.bindings, "driver", fake)
    monkeypatch.setattr(driver, "bindings", _fresh(driver.bindings))
    monkeypatch.setattr(driver, "_primary", {})
    monkeypatch.setattr(loader, "_cache", {})
    monkeypatch.setattr(loader, "manifest", lambda: manifest)


def _fresh(cached: Any) -> Any:
    """The function under functools.cache, with an empty cache of its own."""
    return functools.cache(cached.__wrapped__)
