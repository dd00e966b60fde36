"""Reading device tensors through every protocol, and the checks that stand before a launch."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from megamoe_aot import TensorError
from megamoe_aot.tensors import CPU, Requirement, View, stream_handle, view
from tests.fake_driver import H200, FakeDriver, fake_artifacts, install
from tests.fake_tensors import HOST, CudaArray, DLPack

FP32 = Requirement("logits", ("float32",), 4, "[M, E]")
BF16 = Requirement("x", ("bfloat16",), 16, "[M, H]")
BYTES = Requirement("w13", ("float8_e4m3fn", "uint8"), 16, "[E, 2I, H]")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    machine = FakeDriver(H200, H200)
    install(monkeypatch, machine, fake_artifacts(tmp_path))
    return machine


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "int32", "uint8", "float8_e4m3fn"])
def test_dlpack_gives_address_shape_strides_dtype_and_device(dtype: str) -> None:
    tensor = DLPack((3, 5), dtype, device=1, strides=(8, 1), offset=48)
    assert view("x", tensor) == View(tensor.base + 48, (3, 5), (8, 1), dtype, 1)
    assert tensor.streams == [-1], "the producer must not be asked to order streams"
    assert view("x", DLPack((3, 5), dtype)).strides is None


def test_dlpack_of_host_memory_is_told_apart() -> None:
    assert view("x", DLPack((3,), "float32", kind=HOST)).device == CPU
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert view("x", array.T) == View(array.ctypes.data, (4, 3), (1, 4), "float32", CPU)


def test_a_dlpack_capsule_is_read_without_consuming_or_leaking_it() -> None:
    """A real producer: numpy's array stays usable, and its memory is freed when the array goes."""
    array = np.zeros(1024, np.float32)
    freed: list[int] = []
    holder = _Freed(array, freed)
    for _ in range(100):
        view("x", holder.array)
    assert array.sum() == 0
    del array, holder
    gc.collect()
    assert freed == [1]


class _Freed:
    def __init__(self, array: Any, freed: list[int]) -> None:
        import weakref

        self.array = array
        weakref.finalize(array, freed.append, 1)


def test_cuda_array_interface_gives_strides_in_elements_and_asks_the_driver_for_the_device(fake: FakeDriver) -> None:
    tensor = CudaArray((3, 5), "<f4", strides=(32, 4))
    fake.memory[tensor.address] = 1
    assert view("x", tensor) == View(tensor.address, (3, 5), (8, 1), "float32", 1)
    assert view("x", CudaArray((2,), "|u1")).device == CPU, "the driver does not know this address"
    assert view("x", CudaArray((0, 4), "<i4")).shape == (0, 4)


@pytest.mark.parametrize("tensor", [CudaArray((3,), ">f4"), CudaArray((3,), "<f4", mask=object())])
def test_masked_and_big_endian_arrays_are_refused(tensor: Any) -> None:
    with pytest.raises(TensorError, match="masked or big-endian"):
        view("x", tensor)


def test_vector_elements_and_things_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(TensorError, match="lanes 4"):
        view("x", DLPack((3,), "float32", lanes=4))
    with pytest.raises(TensorError, match="x: got list, expected a torch tensor"):
        view("x", [1, 2, 3])


def test_a_torch_tensor_is_read_directly() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)[:, 1:]
    assert view("x", tensor) == View(tensor.data_ptr(), (4, 5), (6, 1), "bfloat16", CPU)


# Contiguity: against numpy -------------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    strides=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    natural=st.booleans(),
)
def test_contiguous_means_what_numpy_means(shape: list[int], strides: list[int], natural: bool) -> None:
    store = np.zeros(1000, np.uint8)
    array = np.zeros(shape, np.uint8) if natural else as_strided(store, shape, strides[: len(shape)])
    assert View(0, array.shape, array.strides, "uint8", 0).contiguous == array.flags.c_contiguous


# Refusals: each names the tensor, what it has and what is expected -----------------------------------------------------


@pytest.mark.parametrize(
    ("requirement", "tensor", "message"),
    [
        (FP32, DLPack((2, 8), "bfloat16"), r"logits: dtype is bfloat16, expected float32; convert it once with \.float\(\)"),
        (FP32, DLPack((2, 8), "float64"), r"dtype is float64, expected float32; convert it once with \.float\(\)"),
        (FP32, DLPack((2, 8), "int32"), r"dtype is int32, expected float32$"),
        (BYTES, DLPack((2, 8), "int8"), "w13: dtype is int8, expected float8_e4m3fn or uint8"),
        (FP32, DLPack((8, 2), "float32"), r"logits: shape is \[8, 2\], expected \[2, 8\], that is \[M, E\]"),
        (FP32, DLPack((2, 8, 1), "float32"), r"shape is \[2, 8, 1\], expected \[2, 8\]"),
        (FP32, DLPack((2, 8), "float32", device=1), "logits: device is cuda:1, expected cuda:0"),
        (FP32, DLPack((2, 8), "float32", kind=HOST), "logits: device is cpu, expected cuda:0"),
        (FP32, DLPack((2, 8), "float32", strides=(1, 2)), r"strides is \(1, 2\), expected a contiguous tensor"),
        (FP32, DLPack((2, 8), "float32", strides=(16, 1)), r"strides is \(16, 1\)"),
        (FP32, DLPack((2, 8), "float32", offset=2), "logits: address is 0x[0-9a-f]+, expected a multiple of 4 bytes"),
        (BF16, DLPack((2, 8), "bfloat16", offset=8), "x: address is 0x[0-9a-f]+, expected a multiple of 16 bytes"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(requirement: Requirement, tensor: Any, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        requirement.pointer(tensor, (2, 8), 0)


def test_aligned_contiguous_views_and_empty_tensors_are_accepted() -> None:
    later_row = DLPack((2, 8), "bfloat16", offset=16)
    assert BF16.pointer(later_row, (2, 8), 0) == later_row.address
    one_row = DLPack((1, 8), "bfloat16", strides=(999, 1))
    assert BF16.pointer(one_row, (1, 8), 0) == one_row.address
    assert BYTES.pointer(DLPack((2, 8), "uint8"), (2, 8), 0) and BYTES.pointer(DLPack((2, 8), "float8_e4m3fn"), (2, 8), 0)
    BF16.pointer(DLPack((0, 8), "bfloat16", offset=2), (0, 8), 0)


class OnGpu(torch.Tensor):
    """A torch tensor that says it lies on cuda:0."""

    def get_device(self) -> int:
        return 0


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnGpu)


def test_the_torch_path_checks_as_much_as_the_general_one() -> None:
    base = torch.zeros(3 * 16 + 8, dtype=torch.bfloat16)
    good = on_gpu(base[:32].view(2, 16))
    assert good.data_ptr() % 16 == 0
    assert BF16.pointer(good, (2, 16), 0) == base.data_ptr()
    assert BF16.pointer(on_gpu(base[16:48].view(2, 16)), (2, 16), 0) == base.data_ptr() + 32
    for bad, message in [
        (base[:32].view(2, 16), "device is cpu"),
        (on_gpu(base[1:33].view(2, 16)), "multiple of 16"),
        (on_gpu(base[:48].view(3, 16)), "shape"),
        (on_gpu(base[:32].view(16, 2).T), "strides"),
        (on_gpu(base[:32].view(2, 16).half()), "dtype is float16"),
    ]:
        with pytest.raises(TensorError, match=message):
            BF16.pointer(bad, (2, 16), 0)


# Streams -------------------------------------------------------------------------------------------------------------


def test_streams_of_every_kind() -> None:
    class CudaCore:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    assert stream_handle(55, None, 0) == 55
    assert stream_handle(CudaCore(), None, 0) == 77
    assert stream_handle(SimpleNamespace(__cuda_stream__=(0, 78)), None, 0) == 78
    assert stream_handle(SimpleNamespace(cuda_stream=66, device_index=0), None, 0) == 66
    with pytest.raises(TensorError, match="belongs to cuda:1, expected cuda:0"):
        stream_handle(SimpleNamespace(cuda_stream=66, device_index=1), None, 0)
    with pytest.raises(TensorError, match="stream: str is neither"):
        stream_handle("default", None, 0)


def test_no_stream_means_torchs_current_one_of_that_device_and_needs_torch_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0x100 + device, device_index=device))
    assert stream_handle(None, torch.zeros(1), 1) == 0x101
    with pytest.raises(TensorError, match="stream: None stands for torch's current stream"):
        stream_handle(None, DLPack((1,), "float32"), 0)
