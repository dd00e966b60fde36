"""Launches of the list structure on a fake driver: scratch memory, captures, refusals, the trigger flag; and ``forward``."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real

import megamoe_aot as mm
from megamoe_aot import Layer, layer, structures
from megamoe_aot.abi import FLAG_GATE_FIRST, FLAG_TRIGGER
from megamoe_aot.structures import Choices, Shape
from tests.fake_driver import H200, FakeDriver, fake_artifacts, install
from tests.fake_tensors import DLPack
from tests.test_launch import GLM, STREAM, activations, experts_of, torch_inputs, weights_of
from tests.test_tensors import OnGpu, on_gpu

PER_THREAD = 2
"""CU_STREAM_PER_THREAD."""
LIST_TO_8: Choices = {Shape(4096, 512, 288, 8, "sigmoid_bias", "trtllm_gen", "sm_90a"): {8: "list", 16: "cluster"}}
PACKETS = 8 * 8 * 2 * 512
"""Packets of list8 at the lead shape: columns * K * 2I, one K part."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    machine = FakeDriver(H200, H200)
    install(monkeypatch, machine, fake_artifacts(tmp_path))
    return machine


def bound(tokens: int = 8, structure: str | None = "list", device: int = 0, **options: Any) -> Layer:
    kernel = mm.load_kernel(**GLM, tokens=tokens, device=device, structure=structure, **options)
    return kernel.bind(*weights_of(kernel.spec, device))


def launch(layer_: Layer, tokens: int = 1, stream: int = STREAM, **options: Any) -> None:
    layer_(**activations(layer_.spec, tokens, layer_._device), stream=stream, **options)


def scratch_of(fake: FakeDriver, stream: int) -> list[int]:
    """Scratch addresses of the launches on a stream, in order."""
    return [it.arguments["scratch"] for it in fake.launches if it.stream == stream]


# One launch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16])
def test_the_launch_is_what_the_spec_says(fake: FakeDriver, tokens: int) -> None:
    layer_ = bound(16)
    call = activations(layer_.spec, tokens)
    assert layer_(**call, stream=STREAM) == (call["out"], call["ids"], call["weights"])
    (it,) = fake.launches
    columns = 8 if tokens <= 8 else 16
    assert it.symbol == f"moe_h4096_i512_e288_k8_sigmoid_bias_trtllm_gen_bf16_list{columns}_sm_90a_0"
    assert (it.grid, it.block, it.cluster, it.cooperative, it.pdl) == ((132, 1, 1), (layer_.spec.block_threads, 1, 1), None, True, True)
    assert 200_000 < it.shared <= 232_448
    names = ("x", "logits", "bias", "out", "ids", "weights")
    assert {name: it.arguments[name] for name in names} == {name: call[name].address for name in names}
    assert (it.arguments["tokens"], it.arguments["flags"], it.arguments["scale"], it.arguments["limit"]) == (tokens, 0, 2.5, 10.0)
    assert it.arguments["scratch"] % 128 == 0
    assert len(fake.blocks[it.arguments["scratch"]]) == 128 + 8 * PACKETS * columns // 8


def test_the_weights_come_in_boxes_of_64_rows_and_two_k_blocks(fake: FakeDriver) -> None:
    for layout, blocks in (("trtllm_gen", 2), ("row_major", 1)):
        launch(bound(layout=layout, w13_order="up_gate"))
        maps = [fake.maps[fake.launches[-1].arguments[name]] for name in ("w13_map", "w2_map")]
        assert [it["box"] for it in maps] == [[128, 64, blocks]] * 2
    assert maps[0]["dims"] == [4096, 1024, 288] and maps[1]["strides"] == [512, 512 * 4096]


def test_each_m_goes_to_its_variant(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "shipped", lambda: LIST_TO_8)
    layer_ = bound(16, None)
    assert [layer_.structure(tokens) for tokens in range(17)] == ["list"] * 9 + ["cluster"] * 8
    for tokens in (8, 9, 1, 16):
        launch(layer_, tokens)
    assert [(it.cooperative, it.grid[0], it.cluster) for it in fake.launches] == [
        (True, 132, None),
        (False, 16 * 9 * 8, (16, 1, 1)),
        (True, 132, None),
        (False, 16 * 16 * 8, (16, 1, 1)),
    ]
    assert [it.arguments.get("tokens") for it in fake.launches] == [8, None, 1, None]
    with pytest.raises(mm.TensorError, match="17 tokens, this kernel serves at most 16"):
        launch(layer_, 17)


def test_a_layer_serves_what_its_kernel_was_loaded_for(fake: FakeDriver) -> None:
    layer_ = bound(4, "cluster")
    assert layer_.tokens == 4
    launch(layer_, 4)
    with pytest.raises(mm.TensorError, match="x: 5 tokens, this kernel serves at most 4 in one launch: load it for more"):
        launch(layer_, 5)


def test_a_launch_after_the_first_allocates_nothing(fake: FakeDriver) -> None:
    layer_ = bound()
    call = activations(layer_.spec, 1)
    layer_(**call, stream=STREAM)
    fake.stack.append(fake.primary(0))
    fake.calls.clear()
    layer_(**call, stream=STREAM)
    assert fake.calls == ["cuCtxGetCurrent", "cuLaunchKernelEx"]


def test_no_tokens_take_no_scratch(fake: FakeDriver) -> None:
    layer_ = bound()
    launch(layer_, 0)
    assert fake.launches == [] and fake.blocks == {}


# The trigger ---------------------------------------------------------------------------------------------------------


def test_the_trigger_is_a_flag_of_one_launch(fake: FakeDriver) -> None:
    kernel = mm.load_kernel(**GLM, tokens=8, structure="list", layout="row_major", w13_order="gate_up")
    layer_ = kernel.bind(*weights_of(kernel.spec))
    for trigger in (False, True, False):
        launch(layer_, trigger=trigger)
    assert [it.arguments["flags"] for it in fake.launches] == [FLAG_GATE_FIRST, FLAG_GATE_FIRST | FLAG_TRIGGER, FLAG_GATE_FIRST]


def test_a_cluster_refuses_the_trigger(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "shipped", lambda: LIST_TO_8)
    layer_ = bound(16, None)
    launch(layer_, 8, trigger=True)
    with pytest.raises(mm.TriggerError, match=r"9 tokens are served by the cluster structure.*layer\.structure"):
        launch(layer_, 9, trigger=True)
    assert len(fake.launches) == 1


# Scratch -------------------------------------------------------------------------------------------------------------


def test_two_streams_never_share_a_scratch(fake: FakeDriver) -> None:
    layer_ = bound()
    for stream in (STREAM, STREAM + 8, 1, STREAM):
        launch(layer_, stream=stream)
    addresses = {stream: set(scratch_of(fake, stream)) for stream in (STREAM, STREAM + 8, 1)}
    assert all(len(found) == 1 for found in addresses.values())
    assert len(set.union(*addresses.values())) == 3
    assert [stream for _, stream in fake.memsets] == [STREAM, STREAM + 8, 1], "zeroed once, on the stream that uses it"
    assert fake.epoch(scratch_of(fake, STREAM)[0]) == 2


def test_layers_variants_and_devices_have_scratch_of_their_own(fake: FakeDriver) -> None:
    layers = [bound(16), bound(16), bound(16, device=1)]
    for layer_ in layers:
        for tokens in (8, 16, 1):
            launch(layer_, tokens)
    sizes = [len(fake.blocks[address]) for address in dict.fromkeys(scratch_of(fake, STREAM))]
    assert sizes == [128 + 8 * PACKETS, 128 + 16 * PACKETS] * 3
    assert {it.context for it in fake.launches} == {fake.primary(0), fake.primary(1)}


@pytest.mark.parametrize("stream", [0, PER_THREAD])
def test_default_streams_are_told_apart_by_thread(fake: FakeDriver, stream: int) -> None:
    layer_ = bound()
    alive = threading.Barrier(3)

    def run() -> None:
        alive.wait()
        launch(layer_, stream=stream)
        launch(layer_, stream=stream)
        alive.wait()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {(it.thread, it.arguments["scratch"]) for it in fake.launches}
    assert len(fake.launches) == 6 and len(found) == 3
    assert len({thread for thread, _ in found}) == len({address for _, address in found}) == 3


def test_a_new_thread_does_not_inherit_a_dead_threads_scratch(fake: FakeDriver) -> None:
    """Thread identifiers are used again; the per-thread stream of the dead thread may still be working."""
    layer_ = bound()
    for _ in range(3):
        thread = threading.Thread(target=launch, args=(layer_,), kwargs={"stream": PER_THREAD})
        thread.start()
        thread.join()
    assert len(set(scratch_of(fake, PER_THREAD))) == 3


def test_threads_on_one_stream_share_its_scratch_and_allocate_once(fake: FakeDriver) -> None:
    layer_ = bound()
    barrier = threading.Barrier(4)

    def run() -> None:
        barrier.wait()
        for _ in range(20):
            launch(layer_)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launches) == 80 and len(set(scratch_of(fake, STREAM))) == 1 and len(fake.blocks) == 1


def test_scratch_goes_with_its_layer(fake: FakeDriver) -> None:
    first, second = bound(), bound()
    launch(first)
    launch(first, stream=STREAM + 8)
    launch(second)
    kept = fake.launches[-1].arguments["scratch"]
    del first
    gc.collect()
    assert list(fake.blocks) == [kept] and fake.stack == []
    fake.fail["cuMemFree"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    del second
    gc.collect()  # a dead context: nothing to free, nothing raised
    assert list(fake.blocks) == [kept]


def test_nothing_is_freed_at_exit() -> None:
    """The driver may be gone by then; it takes all memory back anyway."""
    code = """
import weakref
from megamoe_aot import scratch
scratch._free = lambda *_: print("freed")
kept = scratch.Scratch(1, 128)
dropped = scratch.Scratch(1, 128)
del dropped
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["freed"] and done.stderr == ""


def test_memory_that_runs_out_or_cannot_be_zeroed_is_not_kept(fake: FakeDriver) -> None:
    layer_ = bound()
    fake.fail["cuMemAlloc"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(mm.DriverCallError, match="cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY"):
        launch(layer_)
    fake.fail = {"cuMemsetD8Async": real.CUresult.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(mm.DriverCallError, match="cuMemsetD8Async"):
        launch(layer_)
    assert fake.blocks == {} and fake.launches == [] and fake.mode == "GLOBAL"
    fake.fail = {}
    launch(layer_)
    assert len(fake.blocks) == 1


# Captures ------------------------------------------------------------------------------------------------------------


def test_a_capture_without_scratch_is_refused_and_left_whole(fake: FakeDriver) -> None:
    layer_ = bound()
    fake.capturing = {STREAM}
    with pytest.raises(mm.CaptureError, match=r"stream 0xabc0 is capturing.*call layer\.prepare\(stream\) before the capture"):
        launch(layer_)
    with pytest.raises(mm.CaptureError):
        layer_.prepare(STREAM)
    with pytest.raises(mm.CaptureError):
        layer_.forward(**forward_arguments(layer_, 1), stream=STREAM)
    assert fake.launches == [] and fake.blocks == {} and not fake.invalidated


@pytest.mark.parametrize("how", ["prepare", "an eager launch"])
def test_a_prepared_stream_is_captured_with_its_scratch(fake: FakeDriver, how: str) -> None:
    layer_ = bound(16)
    if how == "prepare":
        layer_.prepare(STREAM)
    else:
        launch(layer_, 8)
        launch(layer_, 16)
    blocks = list(fake.blocks)
    assert len(blocks) == 2, "both variants"
    fake.capturing = {STREAM}
    fake.launches.clear()
    fake.calls.clear()
    launch(layer_, 8)
    launch(layer_, 16)
    layer_.prepare(STREAM)  # there is nothing left to do
    assert scratch_of(fake, STREAM) == blocks and list(fake.blocks) == blocks
    assert not {name for name in fake.calls if "Mem" in name} and not fake.invalidated


def test_an_allocation_beside_a_capture_does_not_break_it(fake: FakeDriver) -> None:
    """Another stream's capture in global mode forbids cuMemAlloc and cuMemFree in every thread, unless that thread is in relaxed mode."""
    layer_ = bound()
    fake.capturing = {STREAM + 8}
    launch(layer_)
    assert len(fake.blocks) == 1 and fake.mode == "GLOBAL"
    del layer_
    gc.collect()
    assert fake.blocks == {} and not fake.invalidated and fake.mode == "GLOBAL"


def test_prepare_is_for_the_stream_that_it_is_given(fake: FakeDriver) -> None:
    layer_ = bound()
    layer_.prepare(STREAM)
    layer_.prepare(STREAM)
    assert [stream for _, stream in fake.memsets] == [STREAM] and fake.stack == []
    fake.capturing = {STREAM + 8}
    with pytest.raises(mm.CaptureError):
        launch(layer_, stream=STREAM + 8)
    with pytest.raises(mm.TensorError, match="stream: None"):
        layer_.prepare()


def test_a_cluster_layer_has_nothing_to_prepare(fake: FakeDriver) -> None:
    layer_ = bound(16, "cluster")
    fake.capturing = {STREAM}
    layer_.prepare(STREAM)
    launch(layer_, 16)
    assert fake.blocks == {} and len(fake.launches) == 1


# Refused launches ----------------------------------------------------------------------------------------------------


def test_a_refused_launch_leaves_the_scratch_as_it_was(fake: FakeDriver) -> None:
    layer_ = bound()
    launch(layer_)
    (block,) = fake.blocks
    before = bytes(fake.blocks[block])
    fake.stream_processors[STREAM] = 64
    with pytest.raises(mm.ResidencyError, match=r'132 CTAs.*stream 0xabc0.*green context.*structure="cluster"'):
        launch(layer_)
    with pytest.raises(mm.ResidencyError):
        layer_.forward(**forward_arguments(layer_, 1), stream=STREAM)
    assert bytes(fake.blocks[block]) == before and len(fake.launches) == 1 and fake.stack == []
    fake.stream_processors.clear()
    launch(layer_)
    assert scratch_of(fake, STREAM) == [block, block] and fake.epoch(block) == 2


def test_another_failure_keeps_its_name(fake: FakeDriver) -> None:
    layer_ = bound()
    fake.fail["cuLaunchKernelEx"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(mm.DriverCallError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        launch(layer_)


# forward -------------------------------------------------------------------------------------------------------------


def forward_arguments(layer_: Layer, tokens: int, shared: bool = True) -> dict[str, Any]:
    hidden = ((tokens, layer_.spec.hidden), "bfloat16")
    call = activations(layer_.spec, tokens, layer_._device) | {"y": DLPack(*hidden, device=layer_._device)}
    return call | {"shared": DLPack(*hidden, device=layer_._device) if shared else None}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize(("structure", "tokens"), [("list", 3), ("cluster", 3), ("cluster", 16)])
def test_forward_is_two_chained_launches(fake: FakeDriver, structure: str, tokens: int, pdl: bool, shared: bool) -> None:
    layer_ = bound(16, structure)
    call = forward_arguments(layer_, tokens, shared)
    assert layer_.forward(**call, stream=STREAM, pdl=pdl) is call["y"]
    moe, last = fake.launches
    assert (moe.pdl, last.pdl, moe.stream, last.stream) == (pdl, pdl, STREAM, STREAM)
    assert (moe.cooperative, moe.arguments["flags"]) == (structure == "list", FLAG_TRIGGER if structure == "list" and pdl else 0)
    assert last.symbol == "finalize_h4096_k8_sm_90a_0"
    assert (last.grid, last.block, last.shared, last.cluster, last.cooperative) == ((tokens * 8, 1, 1), (64, 1, 1), 0, None, False)
    assert last.arguments == {
        "out": call["out"].address,
        "weights": call["weights"].address,
        "shared": call["shared"].address if shared else 0,
        "y": call["y"].address,
        "flags": 0,
    }
    assert {name: moe.arguments[name] for name in ("x", "logits", "bias", "out", "ids", "weights")} == {
        name: call[name].address for name in ("x", "logits", "bias", "out", "ids", "weights")
    }
    assert fake.stack == []


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("structure", ["list", "cluster"])
def test_forwards_trigger_is_a_flag_of_one_finalize_launch(fake: FakeDriver, structure: str, pdl: bool) -> None:
    """With either structure, with PDL or without; the MoE launch's own trigger does not follow it."""
    layer_ = bound(16, structure)
    call = forward_arguments(layer_, 3)
    for trigger in (False, True, False):
        layer_.forward(**call, stream=STREAM, pdl=pdl, trigger=trigger)
    assert [it.arguments["flags"] for it in fake.launches[1::2]] == [0, FLAG_TRIGGER, 0]
    assert [it.arguments["flags"] for it in fake.launches[::2]] == [FLAG_TRIGGER if structure == "list" and pdl else 0] * 3
    assert [it.pdl for it in fake.launches] == [pdl] * 6


def test_the_call_without_finalize_stays(fake: FakeDriver) -> None:
    layer_ = bound()
    layer_.forward(**forward_arguments(layer_, 2), stream=STREAM)
    launch(layer_, 2)
    assert [it.symbol.startswith("finalize") for it in fake.launches] == [False, True, False]
    assert fake.launches[2].arguments["flags"] == 0, "the trigger does not stick"


def test_forward_on_an_idle_context_makes_three_driver_calls(fake: FakeDriver) -> None:
    layer_ = bound()
    call = forward_arguments(layer_, 1)
    layer_.forward(**call, stream=STREAM)
    fake.stack.append(fake.primary(0))
    fake.calls.clear()
    layer_.forward(**call, stream=STREAM)
    assert fake.calls == ["cuCtxGetCurrent", "cuLaunchKernelEx", "cuLaunchKernelEx"]


def test_forward_of_no_tokens_launches_nothing(fake: FakeDriver) -> None:
    layer_ = bound()
    call = forward_arguments(layer_, 0)
    assert layer_.forward(**call, stream=STREAM) is call["y"]
    assert fake.launches == []


def test_forward_without_its_kernel_says_how_to_get_it(fake: FakeDriver) -> None:
    layer_ = bound(finalize=False)
    launch(layer_)
    with pytest.raises(mm.FinalizeNotLoadedError, match="load with finalize=True"):
        layer_.forward(**forward_arguments(layer_, 1), stream=STREAM)
    assert len(fake.launches) == 1


ROWS = 2 * 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared": DLPack((2, 4096), "float32")}, "shared: dtype is float32, expected bfloat16"),
        ({"shared": DLPack((16, 4096), "bfloat16")}, r"shared: shape is \[16, 4096\], expected \[2, 4096\], that is \[M, H\]"),
        ({"shared": DLPack((2, 4096), "bfloat16", offset=8)}, "shared: address"),
        ({"shared": DLPack((2, 4096), "bfloat16", device=1)}, "shared: device"),
        ({"y": DLPack((2, 4096), "float32")}, "y: dtype"),
        ({"y": DLPack((16, 4096), "bfloat16")}, "y: shape"),
        ({"y": DLPack((2, 4096), "bfloat16", offset=2)}, "y: address"),
        ({"y": None}, "y: None, but only torch tensors"),
        ({"out": None}, "out: None, but only torch tensors"),
        ({"logits": DLPack((1, 288), "bfloat16")}, "logits: shape"),
        ({"bias": None}, "bias: None"),
    ],
)
def test_bad_arguments_are_refused_before_either_launch(fake: FakeDriver, change: dict[str, Any], message: str) -> None:
    layer_ = bound()
    call = forward_arguments(layer_, 2)
    with pytest.raises(mm.TensorError, match=message):
        layer_.forward(**(call | change), stream=STREAM)
    assert fake.launches == []
    layer_.forward(**call, stream=STREAM)
    assert len(fake.launches) == 2


def placed(tensor: DLPack, address: int) -> DLPack:
    tensor.base = address
    return tensor


@pytest.mark.parametrize(
    ("name", "offset", "overlaps"),
    [
        ("out", 0, True),
        ("out", 16 * ROWS - 16, True),
        ("out", 16 * ROWS, False),
        ("out", -2 * ROWS + 16, True),
        ("out", -2 * ROWS, False),
        ("shared", 0, True),
        ("shared", 2 * ROWS, False),
        ("weights", -16, True),
        ("weights", 64, False),
        ("x", 0, False),
    ],
)
def test_y_must_not_overlap_what_is_read_meanwhile(fake: FakeDriver, name: str, offset: int, overlaps: bool) -> None:
    """Two tokens: y and shared are two rows of ROWS bytes, out 16, weights 64 bytes. x has been read by then."""
    layer_ = bound()
    call = forward_arguments(layer_, 2)
    call["y"] = placed(call["y"], call[name].address + offset)
    if overlaps:
        with pytest.raises(mm.TensorError, match=f"y: it overlaps {name}"):
            layer_.forward(**call, stream=STREAM)
        assert fake.launches == []
    else:
        layer_.forward(**call, stream=STREAM)
        assert len(fake.launches) == 2


def test_unloaded_code_says_so(fake: FakeDriver) -> None:
    kernel = mm.load_kernel(**GLM, tokens=8, structure="list")
    layer_ = kernel.bind(*weights_of(kernel.spec))
    kernel.unload()
    assert fake.libraries == {}
    with pytest.raises(mm.MegaMoeError, match="unloaded"):
        layer_.forward(**forward_arguments(layer_, 1), stream=STREAM)


# torch ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch_on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, int]]:
    """torch tensors that say they are on cuda:0; the list collects record_stream's (tensor, stream)."""
    recorded: list[tuple[torch.Tensor, int]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0x700 + device, device_index=device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, device))
    monkeypatch.setattr(OnGpu, "device", torch.device("cuda:0"), raising=False)
    monkeypatch.setattr(OnGpu, "record_stream", lambda tensor, stream: recorded.append((tensor, stream[0])), raising=False)
    monkeypatch.setattr(layer, "empty_like", lambda tensor, shape, dtype: on_gpu(torch.empty(shape, dtype=getattr(torch, dtype))))
    return recorded


def test_mega_experts_forward_allocates_everything(fake: FakeDriver, torch_on_gpu: list[Any]) -> None:
    experts = experts_of("trtllm_gen", structure="list")
    x, logits = torch_inputs(3, torch.bfloat16)
    shared = on_gpu(torch.zeros(3, 2048, dtype=torch.bfloat16))
    y = experts.forward(x, logits, None, shared)
    assert (y.shape, y.dtype) == ((3, 2048), torch.bfloat16)
    moe, last = fake.launches
    assert (moe.stream, last.stream, moe.arguments["tokens"]) == (0x700, 0x700, 3)
    assert last.arguments["y"] == y.data_ptr() and last.arguments["shared"] == shared.data_ptr()
    assert last.arguments["out"] == moe.arguments["out"] != 0
    assert torch_on_gpu == [], "torch's own stream orders the reuse of temporaries"
    experts.forward(x, logits, None, shared, trigger=True)
    assert [it.arguments["flags"] for it in fake.launches if it.symbol.startswith("finalize")] == [0, FLAG_TRIGGER]


def test_temporaries_on_another_stream_are_recorded(fake: FakeDriver, torch_on_gpu: list[Any]) -> None:
    kernel = mm.load_kernel(**GLM, tokens=8, structure="list")
    layer_ = kernel.bind(*weights_of(kernel.spec))
    x = on_gpu(torch.zeros(2, 4096, dtype=torch.bfloat16))
    logits, bias = on_gpu(torch.zeros(2, 288, dtype=torch.bfloat16)), on_gpu(torch.zeros(288))
    ids = on_gpu(torch.zeros(2, 8, dtype=torch.int32))
    layer_.forward(x, logits, bias, stream=STREAM, ids=ids)
    assert [(tuple(tensor.shape), stream) for tensor, stream in torch_on_gpu] == [((16, 4096), STREAM), ((2, 8), STREAM)]
    assert fake.launches[0].arguments["ids"] == ids.data_ptr(), "given by the caller, who keeps it"


@pytest.mark.usefixtures("torch_on_gpu")
def test_mega_experts_prepares_its_stream_and_keeps_what_graphs_use(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnGpu, "is_cuda", True, raising=False)
    capturing = itertools.chain([True, False], itertools.repeat(True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    experts = experts_of("trtllm_gen", structure="list")
    experts.prepare(4, torch.bfloat16, SimpleNamespace(cuda_stream=STREAM, device_index=0))
    (block,) = fake.blocks
    assert fake.memsets == [(block, STREAM)]
    with pytest.raises(mm.CaptureError, match="for at least 5 tokens"):
        experts(*torch_inputs(5, torch.bfloat16), None)
    experts(*torch_inputs(5, torch.bfloat16), None)
    gc.collect()
    assert block in fake.blocks and len(fake.blocks) == 2
    experts.prepare(2, torch.bfloat16)
    experts(*torch_inputs(5, torch.bfloat16), None)
    assert len(fake.blocks) == 2, "a smaller count asks for nothing new"
