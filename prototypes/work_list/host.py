"""Just enough of a loader to measure the prototype: same call as megamoe_aot.Layer, scratch owned by the bound layer."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import torch

from megamoe_aot import driver
from megamoe_aot.spec import KernelSpec
from megamoe_aot.tensor_map import TensorMapSpec, encode

from .build import OUT
from .plan import THREADS, ListPlan, name_of


def weight_map(spec: KernelSpec, rows: int, depth: int) -> TensorMapSpec:
    """64 rows a box; two K blocks at once where the layout puts them in one box."""
    plain = TensorMapSpec.of(spec.layout, spec.experts, rows, depth, 64)
    pair = spec.layout == "trtllm_gen" and depth // 128 % 2 == 0
    return TensorMapSpec(plain.dims, plain.strides, (128, 64, 2 if pair else 1))


class ListKernel:
    """The loaded prototype of one spec on torch's current device."""

    active_clusters = 0

    def __init__(self, spec: KernelSpec, device: torch.device, folder: Path = OUT) -> None:
        self.spec = spec
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        api = driver.bindings()
        image = (folder / f"{name_of(spec)}.cubin").read_bytes()
        self.library = driver.call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
        kernel = driver.call("cuLibraryGetKernel", self.library, f"{name_of(spec)}_0".encode())
        self.function = driver.call("cuKernelGetFunction", kernel)
        attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.call("cuFuncSetAttribute", self.function, attribute, ListPlan.of(spec).total)

    def bind(self, *weights: torch.Tensor) -> ListLayer:
        return ListLayer(self, weights)


class ListLayer:
    """One layer's weights and its scratch: one launch at a time."""

    def __init__(self, kernel: ListKernel, weights: tuple[torch.Tensor, ...]) -> None:
        self.spec = spec = kernel.spec
        self.kernel, self.weights = kernel, weights
        w13, w13_scale, w2, w2_scale = weights
        self.scratch = torch.zeros(128 + 16 * spec.top_k * 2 * spec.inter * 8, dtype=torch.uint8, device=w13.device)
        maps = (
            encode(weight_map(spec, 2 * spec.inter, spec.hidden), w13.data_ptr()),
            encode(weight_map(spec, spec.hidden, spec.inter), w2.data_ptr()),
        )
        pointers = [ctypes.c_void_p(0) for _ in range(8)]
        pointers[3].value, pointers[4].value = w13_scale.data_ptr(), w2_scale.data_ptr()
        limit = math.inf if spec.limit is None else spec.limit
        self.tokens = ctypes.c_uint32(0)
        self.pointers = pointers
        scalars = [ctypes.c_float(spec.scale), ctypes.c_float(limit), ctypes.c_uint32(2 * (spec.w13_order == "gate_up"))]
        values: list[Any] = [*pointers, *(ctypes.create_string_buffer(m, len(m)) for m in maps), *scalars]
        values += [ctypes.c_void_p(self.scratch.data_ptr()), self.tokens]
        self.values = values
        self.arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

    def __call__(
        self,
        x: Any,
        logits: Any,
        bias: Any = None,
        stream: Any = None,
        out: Any = None,
        ids: Any = None,
        weights: Any = None,
        pdl: bool = True,
    ) -> Any:
        """As megamoe_aot.Layer, outputs given."""
        for slot, tensor in ((0, x), (1, logits), (2, bias), (5, out), (6, ids), (7, weights)):
            self.pointers[slot].value = 0 if tensor is None else tensor.data_ptr()
        self.tokens.value = len(x)
        api = driver.bindings()
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.kernel.processors, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
        config.sharedMemBytes = ListPlan.of(self.spec).total
        config.hStream = torch.cuda.current_stream().cuda_stream
        cooperative, serialization = api.CUlaunchAttribute(), api.CUlaunchAttribute()
        cooperative.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE  # all CTAs resident: they wait for each other
        cooperative.value.cooperative = 1
        serialization.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        serialization.value.programmaticStreamSerializationAllowed = int(pdl)
        config.attrs, config.numAttrs = [cooperative, serialization], 2
        driver.call("cuLaunchKernelEx", config, self.kernel.function, ctypes.addressof(self.arguments), 0)
        return out, ids, weights
