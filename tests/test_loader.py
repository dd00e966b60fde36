"""Selection, the architecture rule, loading: every refusal by name, everything done once per device, the context restored."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.bindings
import pytest
from cuda.bindings import driver as real
from hypothesis import given
from hypothesis import strategies as st

import megamoe_aot as mm
from megamoe_aot import arch, driver
from megamoe_aot.manifest import Manifest
from megamoe_aot.menu import LEAD, QWEN3_30B
from megamoe_aot.selection import Query, select
from tests.fake_driver import B200, B300, H200, RTX, FakeDriver, fake_artifacts, install

pytestmark = pytest.mark.usefixtures("nothing_measured")

GLM: dict[str, Any] = {"hidden": 4096, "inter": 512, "experts": 288, "top_k": 8}
QWEN: dict[str, Any] = {"hidden": 2048, "inter": 768, "experts": 128, "top_k": 8}

Machine = Callable[..., FakeDriver]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """machine(*gpus, version=..., clusters=...) installs a fake driver and the whole menu with fake cubins."""

    def make(*gpus: Any, record: dict[str, Any] | None = None, **options: Any) -> FakeDriver:
        fake = FakeDriver(*gpus, **options)
        install(monkeypatch, fake, fake_artifacts(tmp_path, **(record or {})))
        return fake

    return make


# The architecture rule -----------------------------------------------------------------------------------------------

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)]


@pytest.mark.parametrize(
    ("target", "served"),
    [
        ("sm_90a", [(9, 0)]),
        ("sm_100a", [(10, 0)]),
        ("sm_103a", [(10, 3)]),
        ("sm_100f", [(10, 0), (10, 3)]),  # not 10.1: Thor before its renaming to 11.0, a family of its own
        ("sm_103f", [(10, 3)]),
        ("sm_110f", [(11, 0)]),
        ("sm_120f", [(12, 0), (12, 1)]),
    ],
)
def test_which_target_runs_on_which_gpu(target: str, served: list[tuple[int, int]]) -> None:
    assert [capability for capability in CAPABILITIES if arch.runs_on(target, capability)] == served


def test_the_most_specific_target_wins_and_nonsense_is_refused() -> None:
    targets = ["sm_90a", "sm_100f", "sm_103a", "sm_103f"]
    assert [arch.best(targets, capability) for capability in [(9, 0), (10, 0), (10, 3), (12, 0)]] == ["sm_90a", "sm_100f", "sm_103a", None]
    for wrong in ("sm_90", "compute_100f", "sm_100fa", ""):
        with pytest.raises(ValueError, match="not a target"):
            arch.runs_on(wrong, (9, 0))


# Selection -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", range(17))
def test_every_token_count_of_the_menu_is_answered_without_a_driver(machine: Machine, tokens: int) -> None:
    fake = machine()
    assert mm.has_kernel(**GLM, tokens=tokens)
    assert mm.has_kernel(**QWEN, tokens=tokens, logits_dtype="fp32", arch="sm_100f")
    assert fake.calls == []


def test_seventeen_tokens_are_refused_with_the_limit(machine: Machine) -> None:
    machine()
    assert not mm.has_kernel(**GLM, tokens=17)
    reason = mm.why_not(**GLM, tokens=17)
    assert reason is not None and "tokens 0 to 16 (asked: 17)" in reason and "GLM-5.3-Flash TP4" in reason


def test_an_unknown_shape_names_the_nearest_entry_and_the_differing_field(machine: Machine) -> None:
    machine(H200)
    with pytest.raises(mm.ShapeNotInMenuError) as caught:
        mm.load_kernel(hidden=4096, inter=1024, experts=288, top_k=8, tokens=1)
    first = str(caught.value).splitlines()[2]
    assert first == "  GLM-5.3-Flash TP4: inter 512 (asked: 1024)"
    with pytest.raises(mm.ShapeNotInMenuError, match=r"Qwen3-30B-A3B TP1: experts 128 \(asked: 160\)"):
        mm.load_kernel(hidden=2048, inter=768, experts=160, top_k=8, tokens=1)


def test_an_inter_that_is_no_multiple_of_128_names_the_padded_entry(machine: Machine) -> None:
    machine()
    fits = mm.why_not(hidden=2048, inter=700, experts=128, top_k=8, tokens=1)
    assert fits is not None and "zero-pad the weights to inter=768, which this build has" in fits
    missing = mm.why_not(hidden=3072, inter=192, experts=256, top_k=8, tokens=1)
    assert missing is not None and "zero-pad the weights to inter=256, which this build does not have either" in missing


def test_row_major_must_name_its_row_order(machine: Machine) -> None:
    machine(H200)
    with pytest.raises(mm.AmbiguousKernelError) as caught:
        mm.load_kernel(**GLM, tokens=1, layout="row_major")
    assert "w13_order = 'gate_up' or 'up_gate'" in str(caught.value)
    assert mm.why_not(**GLM, tokens=1, layout="row_major") == str(caught.value)
    for order in ("gate_up", "up_gate"):
        assert mm.load_kernel(**GLM, tokens=1, layout="row_major", w13_order=order).spec.w13_order == order


def test_any_logits_dtype_is_ambiguous_and_a_wrong_option_is_not_in_the_menu(machine: Machine) -> None:
    machine()
    reason = mm.why_not(**GLM, tokens=1, logits_dtype=None)
    assert reason is not None and "logits_dtype = 'bf16' or 'fp32'" in reason
    reason = mm.why_not(**GLM, tokens=1, scoring="softmax")
    assert reason is not None and "scoring 'sigmoid_bias' (asked: 'softmax')" in reason
    with pytest.raises(TypeError, match="colour"):
        mm.has_kernel(**GLM, tokens=1, colour="red")


@given(
    shape=st.sampled_from([LEAD, QWEN3_30B]),
    layout=st.sampled_from(["trtllm_gen", "row_major"]),
    logits_dtype=st.sampled_from(["bf16", "fp32"]),
    order=st.sampled_from(["up_gate", "gate_up", None]),
)
def test_selection_returns_exactly_what_was_asked_or_refuses(shape: Any, layout: str, logits_dtype: str, order: str | None) -> None:
    query = Query(shape.hidden, shape.inter, shape.experts, shape.top_k, 16, layout, logits_dtype, order, scale=3.5, limit=None)
    manifest = _menu_manifest()
    if layout == "trtllm_gen" and order == "gate_up":
        with pytest.raises(mm.ShapeNotInMenuError):
            select(manifest, query)
    elif layout == "row_major" and order is None:
        with pytest.raises(mm.AmbiguousKernelError):
            select(manifest, query)
    else:
        chosen = select(manifest, query)
        assert set(chosen) == {"sm_90a", "sm_100f"}
        for target, group in chosen.items():
            assert {(c.spec.structure, c.spec.tokens) for c in group} == {("cluster", 16), ("list", 8), ("list", 16)}, target
        for target, (entry, spec) in ((target, choice) for target, group in chosen.items() for choice in group):
            assert (spec.arch, spec.layout, spec.logits_dtype, spec.w13_order) == (target, layout, logits_dtype, order or "up_gate")
            assert (spec.hidden, spec.scale, spec.limit, entry.spec.scale) == (shape.hidden, 3.5, None, shape.scale)


_MANIFESTS: list[Manifest] = []


def _menu_manifest() -> Manifest:
    if not _MANIFESTS:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _MANIFESTS.append(fake_artifacts(Path(folder)))
    return _MANIFESTS[0]


def test_two_models_of_one_shape_are_told_apart_by_their_launch_arguments(machine: Machine) -> None:
    machine()
    manifest = _menu_manifest()
    twin = [
        dataclasses.replace(entry, model="Twin", spec=dataclasses.replace(entry.spec, scale=1.0))
        for entry in manifest.entries
        if entry.spec.hidden == 4096
    ]
    both = dataclasses.replace(manifest, entries=(*manifest.entries, *twin))
    query = Query(**GLM, tokens=1)
    with pytest.raises(mm.AmbiguousKernelError, match=r"scale = 1.0 or 2.5"):
        select(both, query)
    assert {choice.spec.scale for choice in select(both, dataclasses.replace(query, scale=1.0))["sm_90a"]} == {1.0}


# Devices and drivers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "target"), [(H200, "sm_90a"), (B200, "sm_100f"), (B300, "sm_100f")])
def test_the_device_decides_which_cubin_is_loaded(machine: Machine, gpu: Any, target: str) -> None:
    fake = machine(gpu)
    kernel = mm.load_kernel(**GLM, tokens=8)
    assert (kernel.arch, kernel.spec.arch, kernel.record.arch) == (target, target, target)
    names = [f"moe_h4096_i512_e288_k8_sigmoid_bias_trtllm_gen_bf16_{target}_0", f"finalize_h4096_k8_{target}_0"]
    assert [list(kernels) for kernels in fake.libraries.values()] == [[name] for name in names]
    assert mm.has_kernel(**GLM, tokens=8, device=0)
    assert kernel.active_clusters == 14


def test_a_gpu_without_a_cubin_is_named_with_its_capability_and_what_there_is(machine: Machine) -> None:
    fake = machine(RTX)
    with pytest.raises(mm.UnsupportedDeviceError, match=r"NVIDIA RTX PRO 6000.*12\.0.*sm_100f, sm_90a"):
        mm.load_kernel(**GLM, tokens=1)
    assert "cuLibraryLoadData" not in fake.calls
    assert not mm.has_kernel(**GLM, tokens=1, device=0)
    assert mm.has_kernel(**GLM, tokens=1), "without a device the answer is for any GPU"


def test_an_arch_that_the_wheel_lacks_is_refused_without_a_driver(machine: Machine) -> None:
    machine()
    assert mm.why_not(**GLM, tokens=1, arch="sm_120a") == "this wheel has the kernel for ['sm_100f', 'sm_90a'], not for sm_120a"


def test_no_gpu_and_no_driver_have_their_own_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    with pytest.raises(mm.NoDriverError, match=r"no usable GPU.*CUDA_ERROR_NO_DEVICE \(100\)"):
        mm.load_kernel(**GLM, tokens=1)
    reason = mm.why_not(**GLM, tokens=1, device=0)
    assert reason is not None and "CUDA_ERROR_NO_DEVICE" in reason

    def no_library(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(cuda.bindings, "driver", SimpleNamespace(cuInit=no_library))
    with pytest.raises(mm.NoDriverError, match=r"no CUDA driver on this machine \(Failed to dlopen libcuda\.so\.1\)\. menu\(\)"):
        mm.load_kernel(**GLM, tokens=1)
    monkeypatch.delattr(cuda.bindings, "driver")
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(mm.NoDriverError, match=r"pip install cuda-python"):
        mm.load_kernel(**GLM, tokens=1)


def test_a_device_that_is_not_there_is_refused_with_the_count(machine: Machine) -> None:
    machine(H200)
    with pytest.raises(mm.NoDriverError, match="device 3 was asked for, this process sees 1 GPUs"):
        mm.load_kernel(**GLM, tokens=1, device=3)


def test_an_old_driver_is_found_before_anything_is_loaded(machine: Machine) -> None:
    fake = machine(H200, version=12040)
    with pytest.raises(mm.DriverTooOldError, match=r"12\.4 \(12040\).*13\.0 \(13000\)"):
        mm.load_kernel(**GLM, tokens=1)
    assert "cuLibraryLoadData" not in fake.calls


def test_a_cluster_that_does_not_fit_is_explained_and_the_library_given_back(machine: Machine) -> None:
    fake = machine(H200, clusters=0)
    with pytest.raises(mm.ClusterUnavailableError, match=r"16 CTAs.*MIG.*MPS"):
        mm.load_kernel(**GLM, tokens=1)
    assert fake.libraries == {} and fake.stack == []
    fake.clusters, fake.fail["cuOccupancyMaxActiveClusters"] = 14, real.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE
    with pytest.raises(mm.ClusterUnavailableError):
        mm.load_kernel(**GLM, tokens=1)
    fake.fail.clear()
    assert mm.load_kernel(**GLM, tokens=1).active_clusters == 14


def test_a_driver_failure_without_a_class_of_its_own_names_call_and_code(machine: Machine) -> None:
    fake = machine(H200)
    fake.fail["cuLibraryLoadData"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(
        mm.DriverCallError, match=r"cuLibraryLoadData failed: CUDA_ERROR_OUT_OF_MEMORY \(2\), the fake driver says so"
    ) as caught:
        mm.load_kernel(**GLM, tokens=1)
    assert caught.value.code == 2
    assert fake.stack == []


# Artifacts -----------------------------------------------------------------------------------------------------------


def damage(tmp_path: Path, edit: Callable[[bytes], bytes]) -> None:
    for path in tmp_path.glob("*.cubin"):
        path.write_bytes(edit(path.read_bytes()))


@pytest.mark.parametrize(
    ("edit", "message"),
    [(lambda image: image[:-1], "bytes, the manifest says"), (lambda image: image.replace(b"moe_", b"moa_", 1), "sha256")],
    ids=["truncated", "flipped"],
)
def test_a_damaged_cubin_never_reaches_the_driver(machine: Machine, tmp_path: Path, edit: Any, message: str) -> None:
    fake = machine(H200)
    damage(tmp_path, edit)
    with pytest.raises(mm.DamagedArtifactError, match=message):
        mm.load_kernel(**GLM, tokens=1)
    assert "cuLibraryLoadData" not in fake.calls


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"symbol": "another"}, "no kernel another"),
        ({"block": 96}, "this version expects"),
        ({"parameters": ()}, "this version expects"),
    ],
)
def test_artifacts_of_another_build_are_refused(machine: Machine, record: dict[str, Any], message: str) -> None:
    fake = machine(H200, record=record)
    with pytest.raises(mm.ManifestError, match=message):
        mm.load_kernel(**GLM, tokens=1)
    assert fake.libraries == {}


def test_a_cubin_whose_parameters_differ_from_the_abi_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = machine(H200)
    monkeypatch.setattr(
        fake, "cuKernelGetParamInfo", lambda kernel, index: (fake.CUresult(0), 8 * index, 8) if index < 13 else (fake.CUresult(1), 0, 0)
    )
    with pytest.raises(
        mm.ManifestError, match=r"\[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8\] bytes, this version passes \[8, 8, .*128, 128, 4, 4, 4\]"
    ):
        mm.load_kernel(**GLM, tokens=1)
    assert fake.libraries == {}


def test_a_cubin_that_the_driver_finds_no_code_in_is_an_unsupported_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver loads a cubin of another GPU without complaint and says 209 only when asked for the kernel."""
    fake = machine(H200)
    monkeypatch.setattr(fake, "_runs", lambda target: False)
    with pytest.raises(mm.UnsupportedDeviceError, match=r"refuses the sm_90a cubin.*NVIDIA H200, 9\.0"):
        mm.load_kernel(**GLM, tokens=1)
    assert fake.libraries == {}


# Once per device, any thread, the caller's context ---------------------------------------------------------------------


def test_attributes_are_set_once_per_device_to_what_the_spec_derives(machine: Machine) -> None:
    fake = machine(H200, H200)
    kernels = [mm.load_kernel(**GLM, tokens=tokens, device=device, finalize=False) for device in (0, 1) for tokens in (1, 8)]
    assert [kernel.device for kernel in kernels] == [0, 0, 1, 1]
    assert fake.calls.count("cuLibraryLoadData") == 2
    assert fake.calls.count("cuKernelGetFunction") == 2, "lazy loading would otherwise wait for the first launch"
    assert fake.calls.count("cuKernelSetAttribute") == 6
    wanted = {
        "MAX_DYNAMIC_SHARED_SIZE_BYTES": kernels[0].spec.shared.total,
        "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 1,
        "PREFERRED_SHARED_MEMORY_CARVEOUT": 100,
    }
    for device, kernel in enumerate(fake.kernels.values()):
        assert kernel.attributes == {(device, name): value for name, value in wanted.items()}


def test_entries_that_differ_in_launch_arguments_share_one_library(machine: Machine) -> None:
    fake = machine(H200)
    for order in ("up_gate", "gate_up"):
        mm.load_kernel(**GLM, tokens=1, layout="row_major", w13_order=order, scale=1.5)
    assert fake.calls.count("cuLibraryLoadData") == 2, "and the finalize kernel"


def test_eight_threads_load_one_library(machine: Machine) -> None:
    fake = machine(H200)
    barrier, kernels = threading.Barrier(8), []

    def load() -> None:
        barrier.wait()
        kernels.append(mm.load_kernel(**GLM, tokens=1))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8
    assert fake.calls.count("cuLibraryLoadData") == 2 and fake.calls.count("cuDevicePrimaryCtxRetain") == 1


def test_loading_uses_the_primary_context_and_restores_the_callers(machine: Machine) -> None:
    fake = machine(H200, H200)
    fake.stack.append(fake.primary(1))
    kernel = mm.load_kernel(**GLM, tokens=1, device=0)
    assert fake.stack == [fake.primary(1)]
    assert {device for kernel_ in fake.kernels.values() for device, _ in kernel_.attributes} == {0}
    assert kernel.device == 0


def test_the_default_device_is_torchs_then_the_current_contexts_then_zero(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    fake = machine(H200, H200, H200)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert mm.load_kernel(**GLM, tokens=1).device == 0
    fake.stack.append(fake.primary(1))
    assert mm.load_kernel(**GLM, tokens=1).device == 1
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert mm.load_kernel(**GLM, tokens=1).device == 2
    assert mm.load_kernel(**GLM, tokens=1, device=torch.device("cuda")).device == 2
    assert mm.load_kernel(**GLM, tokens=1, device=torch.device("cuda:0")).device == 0
    for wrong in (torch.device("cpu"), "cuda:0"):
        with pytest.raises(mm.UnsupportedDeviceError, match="device must be"):
            mm.load_kernel(**GLM, tokens=1, device=wrong)


def test_unload_frees_once_and_a_later_load_loads_again(machine: Machine) -> None:
    fake = machine(H200)
    kernel = mm.load_kernel(**GLM, tokens=1)
    kernel.unload()
    kernel.unload()
    assert fake.calls.count("cuLibraryUnload") == 2 and fake.libraries == {}
    with pytest.raises(mm.MegaMoeError, match="was unloaded"):
        kernel.bind(None, None, None, None)
    assert mm.load_kernel(**GLM, tokens=1).active_clusters == 14
    assert fake.calls.count("cuLibraryLoadData") == 4


# Nothing hidden at run time ------------------------------------------------------------------------------------------

CLEAN_IMPORT = """
import builtins, os, socket, subprocess, sys
def refuse(*arguments, **keywords):
    raise AssertionError(f"not at run time: {arguments}")
subprocess.Popen.__init__ = socket.socket.connect = os.system = refuse
plain_open = builtins.open
def read_only(file, mode="r", *rest, **keywords):
    return plain_open(file, mode, *rest, **keywords) if set(mode) <= set("rbt") else refuse(file, mode)
builtins.open = read_only
from pathlib import Path
import megamoe_aot as mm
from megamoe_aot import loader
from megamoe_aot.menu import MENU  # must not hide the function mm.menu
loader.use_artifacts(Path(sys.argv[1]))
assert len(MENU) == 5 and len(mm.menu()) == int(sys.argv[2])
assert mm.has_kernel(hidden=4096, inter=512, experts=288, top_k=8, tokens=1)
assert not mm.has_kernel(hidden=4096, inter=640, experts=288, top_k=8, tokens=1)
heavy = {"cutlass", "torch", "triton", "numpy", "cuda", "cuda.bindings"} & set(sys.modules)
assert not heavy, heavy
assert "libcuda" not in plain_open("/proc/self/maps").read()
print("clean")
"""


def test_import_menu_and_has_kernel_import_nothing_heavy_and_map_no_driver(tmp_path: Path) -> None:
    entries = len(fake_artifacts(tmp_path).entries)
    command = [sys.executable, "-c", CLEAN_IMPORT, str(tmp_path), str(entries)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).resolve().parents[1], check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), done.stderr


def test_the_real_driver_wrapper_reports_this_machine_truthfully() -> None:
    """With a GPU the calls work; without one the error is NoDriverError and nothing else."""
    try:
        version = driver.version()
    except mm.NoDriverError as error:
        assert "driver" in str(error)
    else:
        assert version >= 12000
