"""A CUDA driver without a GPU: it obeys the documented rules of the calls that megamoe_aot makes, and records them.

It stands in for the module ``cuda.bindings.driver``: classes and enums are the real ones, functions are the methods below. A fake
cubin is JSON naming its arch, symbol and parameters. Launches run at once: a list launch counts its scratch's epoch up.
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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.bindings
import pytest
from cuda.bindings import driver as real

from megamoe_aot import driver, loader
from megamoe_aot.finalize import CodeSpec, FinalizeSpec
from megamoe_aot.manifest import CubinRecord, Entry, FinalizeEntry, Manifest, ParameterRecord
from megamoe_aot.menu import menu_specs
from megamoe_aot.spec import KernelSpec

H200 = ("NVIDIA H200", (9, 0))
B200 = ("NVIDIA B200", (10, 0))
B300 = ("NVIDIA B300", (10, 3))
RTX = ("NVIDIA RTX PRO 6000", (12, 0))

SUCCESS = real.CUresult.CUDA_SUCCESS
INVALID_VALUE = real.CUresult.CUDA_ERROR_INVALID_VALUE
CAPTURE_UNSUPPORTED = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
WITHOUT_RESULT = (
    "cuInit",
    "cuCtxPushCurrent",
    "cuLibraryUnload",
    "cuKernelSetAttribute",
    "cuLaunchKernelEx",
    "cuMemFree",
    "cuMemsetD8Async",
)
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
    cluster: tuple[int, int, int] | None
    cooperative: bool
    pdl: bool
    arguments: dict[str, Any]
    thread: int


@dataclasses.dataclass
class _Kernel:
    symbol: str
    parameters: list[tuple[str, str]]
    """(name, kind)."""
    attributes: dict[tuple[int, str], int] = dataclasses.field(default_factory=dict)


class FakeDriver:
    """One machine. ``fail[call] = CUresult`` makes a call fail; ``calls`` lists every call's name in order."""

    def __init__(self, *gpus: tuple[str, tuple[int, int]], version: int = 13000, clusters: int = 14) -> None:
        self.gpus = gpus
        self.version = version
        self.clusters = clusters
        self.processors = 132
        """SMs of each device."""
        self.context_processors: int | None = None
        """What cuCtxGetDevResource says; None: the same."""
        self.stream_processors: dict[int, int] = {}
        """Stream -> SMs of its green context."""
        self.resident = 1
        """CTAs of any list kernel that fit an SM."""
        self.cooperative = True
        self.capturing: set[int] = set()
        """Streams that are capturing a graph, in global mode."""
        self.invalidated = False
        """Some call broke a capture."""
        self.blocks: dict[int, bytearray] = {}
        """Device memory from cuMemAlloc: address -> contents."""
        self.memsets: list[tuple[int, int]] = []
        """(address, stream) of every cuMemsetD8Async."""
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
        values = {
            "COMPUTE_CAPABILITY_MAJOR": major,
            "COMPUTE_CAPABILITY_MINOR": minor,
            "MULTIPROCESSOR_COUNT": self.processors,
            "COOPERATIVE_LAUNCH": int(self.cooperative),
        }
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

    def cuCtxGetDevResource(self, context: Any, kind: Any) -> Any:
        assert kind.name == "CU_DEV_RESOURCE_TYPE_SM" and int(context) == self.stack[-1]
        count = self.processors if self.context_processors is None else self.context_processors
        return SUCCESS, SimpleNamespace(sm=SimpleNamespace(smCount=count))

    # memory and capture --------------------------------------------------------------------------------------------

    def cuStreamIsCapturing(self, stream: int) -> Any:
        return SUCCESS, real.CUstreamCaptureStatus(int(stream in self.capturing))

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before = getattr(self._local, "mode", real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        self._local.mode = mode
        return SUCCESS, before

    @property
    def mode(self) -> str:
        """The calling thread's capture mode."""
        return str(getattr(self._local, "mode", real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL).name.rsplit("_", 1)[1])

    def _unsafe(self) -> bool:
        """A call that no capture may see: it fails and breaks the capture, unless the thread is in relaxed mode."""
        broken = bool(self.capturing) and self.mode != "RELAXED"
        self.invalidated |= broken
        return broken

    def cuMemAlloc(self, size: int) -> Any:
        if self._unsafe():
            return CAPTURE_UNSUPPORTED, None
        assert self.stack and size > 0
        address = 0x7E00_0000_0000 + (next(self._handles) << 28)
        self.blocks[address] = bytearray(b"\xaa" * size)
        return SUCCESS, real.CUdeviceptr(address)

    def cuMemFree(self, address: int) -> Any:
        if self._unsafe():
            return (CAPTURE_UNSUPPORTED,)
        assert self.stack
        del self.blocks[int(address)]
        return (SUCCESS,)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> Any:
        assert stream not in self.capturing, "the zeros would become a node of the graph"
        self.blocks[int(address)][:size] = bytes([value]) * size
        self.memsets.append((int(address), stream))
        return (SUCCESS,)

    def epoch(self, address: int) -> int:
        """The epoch in a scratch block."""
        return int.from_bytes(self.blocks[address][4:8], "little")

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
        self.libraries[handle] = (
            {content["symbol"]: _Kernel(content["symbol"], [(name, kind) for name, kind in content["parameters"]])} if runs else {}
        )
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
        sizes = [struct.calcsize(KIND_SIZES[kind]) for _, kind in self.kernels[int(kernel)].parameters]
        return (SUCCESS, sum(sizes[:index]), sizes[index]) if index < len(sizes) else (INVALID_VALUE, None, None)

    def cuKernelSetAttribute(self, attribute: Any, value: int, kernel: Any, device: Any) -> Any:
        self.kernels[int(kernel)].attributes[int(device), attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_")] = value
        return (SUCCESS,)

    # launches ------------------------------------------------------------------------------------------------------

    def cuOccupancyMaxActiveClusters(self, function: Any, config: Any) -> Any:
        return self._refused(function, config) or SUCCESS, self.clusters

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: Any, threads: int, shared: int) -> Any:
        fits = shared <= self._set_attributes(function).get("MAX_DYNAMIC_SHARED_SIZE_BYTES", 49152)
        return SUCCESS, self.resident if fits else 0

    def _set_attributes(self, function: Any) -> dict[str, int]:
        return {
            name: value
            for (device, name), value in self.kernels[int(function)].attributes.items()
            if self.primary(device) == self.stack[-1]
        }

    def _refused(self, function: Any, config: Any) -> Any:
        """What the driver checks of a launch, given the attributes that were set."""
        set_, attributes = self._set_attributes(function), _attributes(config)
        if "COOPERATIVE" in attributes:
            assert attributes["COOPERATIVE"].cooperative == 1
            room = self.resident * self.stream_processors.get(int(config.hStream), self.processors)
            if config.gridDimX > room:
                return real.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        cluster = attributes["CLUSTER_DIMENSION"].clusterDim.x if "CLUSTER_DIMENSION" in attributes else 1
        if (cluster > 8 and not set_.get("NON_PORTABLE_CLUSTER_SIZE_ALLOWED")) or config.gridDimX % cluster:
            return real.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE
        return INVALID_VALUE if config.sharedMemBytes > set_.get("MAX_DYNAMIC_SHARED_SIZE_BYTES", 49152) else None

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: int, extra: int) -> Any:
        if not self.stack:
            return (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if refusal := self._refused(function, config):
            return (refusal,)
        attributes = _attributes(config)
        cluster = attributes["CLUSTER_DIMENSION"].clusterDim if "CLUSTER_DIMENSION" in attributes else None
        kernel = self.kernels[int(function)]
        arguments = _read_arguments(pointers, kernel.parameters)
        stream = int(config.hStream)
        if scratch := arguments.get("scratch"):
            block = self.blocks[scratch]
            assert block[:4] + block[8:] == bytes(len(block) - 4), "scratch must be zeroed before its first launch"
            if stream not in self.capturing:
                block[4:8] = (self.epoch(scratch) + 1).to_bytes(4, "little")
        self.launches.append(
            Launch(
                context=self.stack[-1],
                stream=stream,
                symbol=kernel.symbol,
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                shared=config.sharedMemBytes,
                cluster=(cluster.x, cluster.y, cluster.z) if cluster is not None else None,
                cooperative="COOPERATIVE" in attributes,
                pdl=bool(attributes["PROGRAMMATIC_STREAM_SERIALIZATION"].programmaticStreamSerializationAllowed),
                arguments=arguments,
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


def _read_arguments(pointers: int, parameters: list[tuple[str, str]]) -> dict[str, Any]:
    addresses = (ctypes.c_void_p * len(parameters)).from_address(pointers)
    values = {}
    for (name, kind), address in zip(parameters, addresses, strict=True):
        assert address is not None
        form = KIND_SIZES[kind]
        (values[name],) = struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))
    return values


def fake_artifacts(folder: Path, only: Callable[[KernelSpec], bool] = lambda spec: True, **changes: Any) -> Manifest:
    """Write the menu's entries that ``only`` admits, with fake cubins, to ``folder``. ``changes`` override fields of every cubin record."""
    cubins: dict[str, CubinRecord] = {}

    def cubin_of(spec: CodeSpec) -> str:
        symbol = f"{spec.code_name}_0"
        image = json.dumps({"arch": spec.arch, "symbol": symbol, "parameters": [(p.name, p.kind) for p in spec.parameters]}).encode()
        sha256 = hashlib.sha256(image).hexdigest()
        if sha256 in cubins:
            return sha256
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
            parameters=tuple(ParameterRecord(p.name, 0, p.size) for p in spec.parameters),
            block=spec.block_threads,
            resident_ctas=2,
        )
        cubins[sha256] = dataclasses.replace(record, **changes)
        return sha256

    chosen = [(shape, spec) for shape, spec in menu_specs() if only(spec)]
    entries = [Entry(shape.model, shape.parallel, s, cubin_of(s), s.shared_bytes, s.cluster_ctas) for shape, s in chosen]
    finalize = [FinalizeEntry(spec, cubin_of(spec)) for spec in dict.fromkeys(FinalizeSpec.of(spec) for _, spec in chosen)]
    manifest = Manifest("0" * 64, {"ptxas": "13.4.59"}, cubins, tuple(entries), folder, tuple(finalize))
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
