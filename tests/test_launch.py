"""Binding and launching on a fake driver: what reaches cuLaunchKernelEx, and what never does."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real
from hypothesis import given
from hypothesis import strategies as st

import megamoe_aot as mm
from megamoe_aot import KernelSpec, Layer, layer, tensor_map
from megamoe_aot.abi import FLAG_GATE_FIRST, FLAG_UE8M0
from megamoe_aot.kernel import weight_shapes
from megamoe_aot.menu import menu_specs
from tests.fake_driver import B200, H200, FakeDriver, fake_artifacts, install
from tests.fake_tensors import DLPack
from tests.test_tensors import OnGpu, on_gpu

pytestmark = pytest.mark.usefixtures("nothing_measured")

GLM: dict[str, Any] = {"hidden": 4096, "inter": 512, "experts": 288, "top_k": 8}
QWEN: dict[str, Any] = {"hidden": 2048, "inter": 768, "experts": 128, "top_k": 8}
STREAM = 0xABC0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    machine = FakeDriver(H200, B200)
    install(monkeypatch, machine, fake_artifacts(tmp_path))
    return machine


def weights_of(spec: KernelSpec, device: int = 0, dtype: str = "float8_e4m3fn") -> list[DLPack]:
    shapes = weight_shapes(spec)
    dtypes = {"w13": dtype, "w13_scale": "float32", "w2": dtype, "w2_scale": "float32"}
    return [DLPack(shapes[name], dtypes[name], device=device) for name in dtypes]


def bound(shape: dict[str, Any], *, device: int = 0, bind: dict[str, Any] | None = None, **options: Any) -> tuple[Layer, list[DLPack]]:
    kernel = mm.load_kernel(**shape, tokens=16, device=device, **options)
    tensors = weights_of(kernel.spec, device)
    return kernel.bind(*tensors, **(bind or {})), tensors


def activations(spec: KernelSpec, tokens: int, device: int = 0) -> dict[str, Any]:
    """All arguments of one call; bias included."""
    logits = {"bf16": "bfloat16", "fp32": "float32"}[spec.logits_dtype]
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "x": ((tokens, spec.hidden), "bfloat16"),
        "logits": ((tokens, spec.experts), logits),
        "bias": ((spec.experts,), "float32"),
        "out": ((tokens * spec.top_k, spec.hidden), "bfloat16"),
        "ids": ((tokens, spec.top_k), "int32"),
        "weights": ((tokens, spec.top_k), "float32"),
    }
    return {name: DLPack(shape, dtype, device=device) for name, (shape, dtype) in shapes.items()}


def test_weight_shapes_are_those_of_the_layouts_document(fake: FakeDriver) -> None:
    assert weight_shapes(mm.load_kernel(**GLM, tokens=1).spec) == {
        "w13": (288, 32, 1024, 128),
        "w13_scale": (288, 8, 32),
        "w2": (288, 4, 4096, 128),
        "w2_scale": (288, 32, 4),
    }
    row_major = weight_shapes(mm.load_kernel(**QWEN, tokens=1, layout="row_major", w13_order="gate_up").spec)
    assert (row_major["w13"], row_major["w2"]) == ((128, 1536, 2048), (128, 2048, 768))


# Tensor maps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "layout", "w13", "w2"),
    [
        # (dims, strides in bytes, box): GLM has 2I = 1024 rows and 32 K blocks in w13, 4096 rows and 4 K blocks in w2.
        (GLM, "trtllm_gen", ([128, 1024, 288 * 32], [128, 131072], [128, 128, 1]), ([128, 4096, 288 * 4], [128, 524288], [128, 128, 1])),
        (GLM, "row_major", ([4096, 1024, 288], [4096, 4194304], [128, 128, 1]), ([512, 4096, 288], [512, 2097152], [128, 128, 1])),
        (QWEN, "trtllm_gen", ([128, 1536, 128 * 16], [128, 196608], [128, 128, 1]), ([128, 2048, 128 * 6], [128, 262144], [128, 128, 1])),
        (QWEN, "row_major", ([2048, 1536, 128], [2048, 3145728], [128, 128, 1]), ([768, 2048, 128], [768, 1572864], [128, 128, 1])),
    ],
)
def test_tensor_maps_reach_the_driver_as_the_layout_says(fake: FakeDriver, shape: dict[str, int], layout: str, w13: Any, w2: Any) -> None:
    layer_, tensors = bound(shape, layout=layout, w13_order="up_gate")
    call = activations(layer_.spec, 1) | ({"bias": None} if shape is QWEN else {})
    layer_(**call, stream=STREAM)
    arguments = fake.launches[0].arguments
    for name, tensor, (dims, strides, box) in (("w13_map", tensors[0], w13), ("w2_map", tensors[2], w2)):
        assert fake.maps[arguments[name]] == {
            "dtype": "CU_TENSOR_MAP_DATA_TYPE_UINT8",
            "rank": 3,
            "address": tensor.address,
            "dims": dims,
            "strides": strides,
            "box": box,
            "steps": [1, 1, 1],
            "interleave": "CU_TENSOR_MAP_INTERLEAVE_NONE",
            "swizzle": "CU_TENSOR_MAP_SWIZZLE_128B",
            "promotion": "CU_TENSOR_MAP_L2_PROMOTION_NONE",
            "fill": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
        }


@given(
    hidden=st.integers(1, 8).map(lambda n: 1024 * n),
    inter=st.integers(1, 8).map(lambda n: 128 * n),
    layout=st.sampled_from(["trtllm_gen", "row_major"]),
    data=st.data(),
)
def test_a_maps_coordinates_find_the_bytes_of_every_tile(hidden: int, inter: int, layout: str, data: st.DataObject) -> None:
    """Box (k, row, expert) -> byte offset through the map's strides, against the layout's own indexing of the weight tensor."""
    try:
        spec = KernelSpec(hidden, inter, experts=64, top_k=4, arch="sm_100f", layout=layout)
        boxes = {1: tensor_map.w13_map(spec), 2: tensor_map.w2_map(spec)}
    except mm.SpecError:  # no work split fits two CTAs per SM
        return
    cta = data.draw(st.integers(0, 15))
    gemm, row, rows, block = data.draw(st.sampled_from(list(spec.split.stages(cta))))
    expert = data.draw(st.integers(0, 63))
    box = boxes[gemm]
    depth = hidden if gemm == 1 else inter
    height = 2 * inter if gemm == 1 else hidden
    assert box.box == (128, rows, 1) and box.bytes == 64 * height * depth
    if layout == "trtllm_gen":
        coordinates = (0, row, expert * (depth // 128) + block)
        expected = ((expert * (depth // 128) + block) * height + row) * 128  # [E, K/128, rows, 128]
    else:
        coordinates = (block * 128, row, expert)
        expected = (expert * height + row) * depth + block * 128  # [E, rows, K]
    assert all(at >= 0 and at + size <= dim for at, size, dim in zip(coordinates, box.box, box.dims, strict=True))
    assert coordinates[0] + coordinates[1] * box.strides[0] + coordinates[2] * box.strides[1] == expected


# Launches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 16])
@pytest.mark.parametrize(("shape", "device", "block"), [(GLM, 0, 160), (GLM, 1, 192), (QWEN, 0, 160), (QWEN, 1, 192)])
def test_the_launch_is_what_the_spec_says(fake: FakeDriver, shape: dict[str, int], device: int, block: int, tokens: int) -> None:
    layer_, tensors = bound(shape, device=device, logits_dtype="fp32")
    call = activations(layer_.spec, tokens, device)
    bias = call["bias"].address if shape is GLM else 0
    result = layer_(**call | ({} if shape is GLM else {"bias": None}), stream=STREAM)
    assert result == (call["out"], call["ids"], call["weights"])
    (launch,) = fake.launches
    assert launch.grid == (16 * tokens * 8, 1, 1)
    assert (launch.block, launch.cluster, launch.pdl, launch.stream) == ((block, 1, 1), (16, 1, 1), True, STREAM)
    assert not launch.cooperative
    assert launch.shared == layer_.spec.shared.total <= 115_712
    assert launch.context == fake.primary(device) and fake.stack == []
    arguments = launch.arguments
    assert {name: arguments[name] for name in ("x", "logits", "out", "ids", "weights")} == {
        name: call[name].address for name in ("x", "logits", "out", "ids", "weights")
    }
    assert (arguments["bias"], arguments["w13_scale"], arguments["w2_scale"]) == (bias, tensors[1].address, tensors[3].address)
    assert (arguments["scale"], arguments["limit"]) == ((2.5, 10.0) if shape is GLM else (1.0, math.inf))
    assert arguments["flags"] == 0


@pytest.mark.parametrize(
    ("options", "bind", "expected"),
    [
        ({}, {"scale": 1.25}, (1.25, 10.0, 0)),
        ({}, {"limit": None}, (2.5, math.inf, 0)),
        ({"limit": 7.0, "ue8m0": True}, {}, (2.5, 7.0, 1)),
        ({"limit": 7.0, "ue8m0": True}, {"limit": 3.0, "ue8m0": False}, (2.5, 3.0, 0)),
        ({"layout": "row_major", "w13_order": "gate_up"}, {}, (2.5, 10.0, 2)),
        ({"layout": "row_major", "w13_order": "gate_up"}, {"ue8m0": True}, (2.5, 10.0, 3)),
        ({"layout": "row_major", "w13_order": "up_gate"}, {}, (2.5, 10.0, 0)),
    ],
)
def test_scale_limit_and_flags(fake: FakeDriver, options: dict[str, Any], bind: dict[str, Any], expected: tuple[float, float, int]) -> None:
    layer_, _ = bound(GLM, bind=bind, **options)
    layer_(**activations(layer_.spec, 1), stream=STREAM)
    arguments = fake.launches[0].arguments
    assert (arguments["scale"], arguments["limit"], arguments["flags"]) == expected
    assert (layer_.spec.scale, layer_.spec.limit or math.inf, layer_.spec.ue8m0) == (*expected[:2], bool(expected[2] & 1))


@pytest.mark.parametrize("bind", [{"scale": math.nan}, {"limit": -1.0}])
def test_senseless_launch_arguments_are_refused_at_bind(fake: FakeDriver, bind: dict[str, float]) -> None:
    with pytest.raises(mm.SpecError):
        bound(GLM, bind=bind)


def test_nothing_is_left_over_from_one_launch_to_the_next(fake: FakeDriver) -> None:
    """Buffers are reused: stream, PDL, grid and all pointers must follow each call's arguments."""
    layer_, _ = bound(GLM)
    expected = []
    for tokens, stream, pdl in [(4, 1, True), (1, 2, False), (16, 3, True), (1, 0, False)]:
        call = activations(layer_.spec, tokens)
        layer_(**call, stream=stream, pdl=pdl)
        expected.append((stream, pdl, 128 * tokens, call["x"].address, call["out"].address, call["bias"].address))
    seen = [(it.stream, it.pdl, it.grid[0], it.arguments["x"], it.arguments["out"], it.arguments["bias"]) for it in fake.launches]
    assert seen == expected


def test_a_launch_makes_two_driver_calls_and_sets_no_attribute(fake: FakeDriver) -> None:
    layer_, _ = bound(GLM)
    call = activations(layer_.spec, 1)
    layer_(**call, stream=STREAM)
    fake.stack.append(fake.primary(0))
    fake.calls.clear()
    layer_(**call, stream=STREAM)
    assert fake.calls == ["cuCtxGetCurrent", "cuLaunchKernelEx"]


def test_no_tokens_means_empty_outputs_and_no_launch(fake: FakeDriver) -> None:
    layer_, _ = bound(GLM)
    call = activations(layer_.spec, 0)
    assert layer_(**call, stream=STREAM) == (call["out"], call["ids"], call["weights"])
    assert fake.launches == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": DLPack((17, 4096), "bfloat16")}, "x: 17 tokens, this kernel serves at most 16"),
        ({"x": DLPack((4096,), "bfloat16")}, r"x: shape is \[4096\], expected \[M, 4096\]"),
        ({"x": DLPack((2, 2048), "bfloat16")}, r"x: shape is \[2, 2048\], expected \[2, 4096\]"),
        ({"x": DLPack((2, 4096), "float16")}, "x: dtype is float16, expected bfloat16"),
        ({"x": DLPack((2, 4096), "bfloat16", strides=(4104, 1))}, "x: strides"),
        ({"x": DLPack((2, 4096), "bfloat16", strides=(1, 2))}, "x: strides"),
        ({"x": DLPack((2, 4096), "bfloat16", offset=2)}, "x: address"),
        ({"x": DLPack((2, 4096), "bfloat16", device=1)}, "x: device is cuda:1"),
        ({"logits": DLPack((2, 288), "float32")}, "logits: dtype is float32, expected bfloat16"),
        ({"logits": DLPack((1, 288), "bfloat16")}, "logits: shape"),
        ({"bias": DLPack((288,), "bfloat16")}, r"bias: dtype is bfloat16, expected float32; convert it once with \.float\(\)"),
        ({"bias": DLPack((288,), "float64")}, r"\.float\(\)"),
        ({"bias": DLPack((287,), "float32")}, r"bias: shape is \[287\]"),
        ({"bias": DLPack((288,), "float32", device=1)}, "bias: device"),
        ({"bias": None}, r"bias: None, expected float32 \[288\] for sigmoid_bias"),
        ({"out": DLPack((2, 4096), "bfloat16")}, r"out: shape is \[2, 4096\], expected \[16, 4096\], that is \[M\*K, H\]"),
        ({"out": DLPack((16, 4096), "bfloat16", offset=8)}, "out: address"),
        ({"out": None}, "out: None, but only torch tensors"),
        ({"ids": DLPack((2, 8), "int64")}, "ids: dtype is int64, expected int32"),
        ({"weights": DLPack((2, 8), "bfloat16")}, "weights: dtype"),
        ({"stream": None}, "stream: None"),
    ],
)
def test_bad_activations_are_refused_before_the_launch(fake: FakeDriver, change: dict[str, Any], message: str) -> None:
    layer_, _ = bound(GLM)
    call: dict[str, Any] = {**activations(layer_.spec, 2), "stream": STREAM}
    with pytest.raises(mm.TensorError, match=message):
        layer_(**(call | change))
    assert fake.launches == []
    layer_(**call)
    assert len(fake.launches) == 1, "the layer still works"


def test_softmax_takes_no_bias(fake: FakeDriver) -> None:
    layer_, _ = bound(QWEN)
    with pytest.raises(mm.TensorError, match="bias: softmax scoring has none"):
        layer_(**activations(layer_.spec, 1), stream=STREAM)


@pytest.mark.parametrize("name", ["w13", "w13_scale", "w2", "w2_scale"])
@pytest.mark.parametrize("fault", ["shape", "dtype", "device", "address", "strides"])
def test_bad_weights_are_refused_at_bind(fake: FakeDriver, name: str, fault: str) -> None:
    kernel = mm.load_kernel(**GLM, tokens=1, device=0)
    tensors = dict(zip(["w13", "w13_scale", "w2", "w2_scale"], weights_of(kernel.spec), strict=True))
    good = tensors[name]
    shape = good.shape
    tensors[name] = {
        "shape": DLPack((*shape[:-1], shape[-1] // 2), good.dtype),
        "dtype": DLPack(shape, "float16"),
        "device": DLPack(shape, good.dtype, device=1),
        "address": DLPack(shape, good.dtype, offset=8 if "scale" not in name else 2),
        "strides": DLPack(shape, good.dtype, strides=(*(2 * math.prod(shape[axis + 1 :]) for axis in range(len(shape) - 1)), 1)),
    }[fault]
    with pytest.raises(mm.TensorError, match=f"{name}: {fault} is"):
        kernel.bind(*tensors.values())
    assert fake.maps == {}


def test_uint8_weights_are_taken_as_fp8_bytes(fake: FakeDriver) -> None:
    kernel = mm.load_kernel(**GLM, tokens=1, device=0)
    kernel.bind(*weights_of(kernel.spec, dtype="uint8"))
    assert len(fake.maps) == 2


def test_a_layer_keeps_its_weights_alive(fake: FakeDriver) -> None:
    layer_, tensors = bound(GLM)
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert all(reference() is not None for reference in alive)
    del layer_
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_the_callers_context_is_restored_even_when_the_launch_fails(fake: FakeDriver) -> None:
    layer_, _ = bound(GLM, device=0)
    fake.stack.append(fake.primary(1))
    layer_(**activations(layer_.spec, 1), stream=STREAM)
    assert fake.launches[0].context == fake.primary(0) and fake.stack == [fake.primary(1)]
    fake.fail["cuLaunchKernelEx"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(mm.DriverCallError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        layer_(**activations(layer_.spec, 1), stream=STREAM)
    assert fake.stack == [fake.primary(1)]


def test_a_layer_of_an_unloaded_kernel_says_so(fake: FakeDriver) -> None:
    kernel = mm.load_kernel(**GLM, tokens=1, device=0)
    layer_ = kernel.bind(*weights_of(kernel.spec))
    kernel.unload()
    with pytest.raises(mm.MegaMoeError, match="unloaded"):
        layer_(**activations(layer_.spec, 1), stream=STREAM)


def test_threads_do_not_share_argument_memory(fake: FakeDriver) -> None:
    """Each thread's launches must carry that thread's own pointers, whatever the interleaving."""
    layer_, _ = bound(GLM)
    calls = [activations(layer_.spec, tokens) for tokens in (1, 2, 3, 4)]
    barrier = threading.Barrier(len(calls))

    def run(index: int) -> None:
        barrier.wait()
        for _ in range(50):
            layer_(**calls[index], stream=index + 1)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launches) == 200
    for launch in fake.launches:
        call = calls[launch.stream - 1]
        assert launch.grid[0] == 128 * launch.stream
        assert all(launch.arguments[name] == call[name].address for name in call)


# torch ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tensors that say they are on cuda:0, and outputs allocated likewise."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0x700 + device, device_index=device))
    monkeypatch.setattr(OnGpu, "device", torch.device("cuda:0"), raising=False)
    monkeypatch.setattr(layer, "empty_like", lambda tensor, shape, dtype: on_gpu(torch.empty(shape, dtype=getattr(torch, dtype))))


def experts_of(layout: str, **options: Any) -> Any:
    spec = next(spec for shape, spec in menu_specs(["sm_90a"]) if shape.hidden == 2048 and spec.layout == layout)
    shapes = weight_shapes(spec)
    tensors = [on_gpu(torch.empty(shapes[name], dtype=torch.float32 if "scale" in name else torch.uint8)) for name in shapes]
    return mm.torch.MegaExperts(*tensors, top_k=8, limit=7.0, scale=1.5, ue8m0=True, **options)


def torch_inputs(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return on_gpu(torch.zeros(tokens, 2048, dtype=torch.bfloat16)), on_gpu(torch.zeros(tokens, 128, dtype=dtype))


@pytest.mark.usefixtures("torch_on_gpu")
@pytest.mark.parametrize(("dtype", "suffix"), [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
def test_mega_experts_loads_at_prepare_and_launches_on_torchs_stream(fake: FakeDriver, dtype: torch.dtype, suffix: str) -> None:
    experts = experts_of("trtllm_gen")
    experts.prepare(4, dtype)
    loads = fake.calls.count("cuLibraryLoadData")
    x, logits = torch_inputs(3, dtype)
    out, ids, weights = experts(x, logits, None)
    assert (loads, fake.calls.count("cuLibraryLoadData")) == (2, 2), "the MoE kernel and the finalize kernel"
    assert (out.shape, out.dtype, ids.shape, ids.dtype, weights.shape, weights.dtype) == (
        (24, 2048), torch.bfloat16, (3, 8), torch.int32, (3, 8), torch.float32,
    )  # fmt: skip
    (launch,) = fake.launches
    assert launch.symbol == f"moe_h2048_i768_e128_k8_softmax_trtllm_gen_{suffix}_sm_90a_0"
    assert (launch.stream, launch.arguments["x"], launch.arguments["ids"]) == (0x700, x.data_ptr(), ids.data_ptr())
    assert {name: launch.arguments[name] for name in ("limit", "scale", "flags")} == {"limit": 7.0, "scale": 1.5, "flags": FLAG_UE8M0}


@pytest.mark.usefixtures("torch_on_gpu")
def test_mega_experts_must_be_told_the_row_order_and_gets_it_through(fake: FakeDriver) -> None:
    with pytest.raises(mm.AmbiguousKernelError, match="w13_order"):
        experts_of("row_major").prepare(1, torch.float32)
    experts = experts_of("row_major", w13_order="gate_up", scoring="softmax")
    experts(*torch_inputs(2, torch.float32), None)
    assert fake.launches[0].arguments["flags"] == FLAG_GATE_FIRST | FLAG_UE8M0


@pytest.mark.usefixtures("torch_on_gpu")
def test_mega_experts_refuses_to_load_inside_a_graph_capture(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnGpu, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    experts = experts_of("trtllm_gen")
    x, logits = torch_inputs(2, torch.bfloat16)
    with pytest.raises(mm.MegaMoeError, match=r"call prepare\(tokens, torch.bfloat16\) for at least 2 tokens before"):
        experts(x, logits, None)
    assert fake.calls == []
    experts.prepare(2, "bf16")
    experts(x, logits, None)
    assert len(fake.launches) == 1


@pytest.mark.usefixtures("torch_on_gpu")
def test_mega_experts_refuses_other_logits_and_other_ranks(fake: FakeDriver) -> None:
    with pytest.raises(mm.TensorError, match=r"logits: dtype is torch\.float16"):
        experts_of("trtllm_gen").prepare(1, torch.float16)
    with pytest.raises(mm.TensorError, match=r"w13: shape is \[4, 4\]"):
        mm.torch.MegaExperts(*[torch.zeros(4, 4)] * 4, 8, None, 1.0, False)
