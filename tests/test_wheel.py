"""The wheel: what is in it, and that it works in an environment that holds nothing else but cuda-python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from megamoe_aot import __version__
from tests.fake_driver import fake_artifacts

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow

IN_A_CLEAN_ENVIRONMENT = """
import sys
import megamoe_aot as mm

assert "site-packages" in mm.__file__, mm.__file__
shapes = {(entry.spec.hidden, entry.spec.inter, entry.spec.experts, entry.spec.top_k) for entry in mm.menu()}
assert shapes == {(4096, 512, 288, 8), (2048, 768, 128, 8), (7168, 256, 256, 8), (4096, 1536, 128, 8), (2048, 512, 256, 8)}, shapes
assert {entry.spec.arch for entry in mm.menu()} == {"sm_90a", "sm_100f"}
assert mm.has_kernel(hidden=4096, inter=512, experts=288, top_k=8, tokens=1)
assert not mm.has_kernel(hidden=4096, inter=512, experts=288, top_k=8, tokens=17)
assert "nearest" in mm.why_not(hidden=4096, inter=256, experts=288, top_k=8, tokens=1).lower()
for sha256 in mm.loader.manifest().cubins:
    mm.loader.manifest().read_cubin(sha256)
for module in ("cutlass", "torch", "triton", "numpy", "cuda.bindings"):
    assert module not in sys.modules, module
assert "libcuda" not in open("/proc/self/maps").read()

# The launch configuration with this version of cuda-bindings; it needs no driver.
from cuda.bindings import driver
from megamoe_aot import finalize, launch
launch.driver.bindings = lambda: driver
assert all(mm.loader.manifest().finalize_for(entry.spec) for entry in mm.menu())
spec = mm.menu()[0].spec
config = launch.configuration(spec, pdl=True, tokens=3)
cluster, serialization = config.attrs
assert (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (16 * 3 * 8, 160, spec.shared.total)
assert (cluster.value.clusterDim.x, serialization.value.programmaticStreamSerializationAllowed) == (16, 1)
spec = next(entry.spec for entry in mm.menu() if entry.spec.structure == "list")
config = launch.configuration(spec, pdl=True, tokens=3, processors=132)
cooperative, serialization = config.attrs
assert (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (132, spec.block_threads, spec.work_list.total)
assert (cooperative.value.cooperative, serialization.value.programmaticStreamSerializationAllowed) == (1, 1)
config = launch.configuration(finalize.FinalizeSpec.of(spec), pdl=False, tokens=3)
assert (config.gridDimX, config.blockDimX, config.sharedMemBytes, len(config.attrs)) == (3 * 8, 64, 0, 1)
for name in (
    "cuLibraryLoadData", "cuKernelGetParamInfo", "cuKernelSetAttribute", "cuOccupancyMaxActiveClusters", "cuLaunchKernelEx",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuCtxGetDevResource", "cuMemAlloc", "cuMemFree", "cuMemsetD8Async",
    "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode",
):
    assert callable(getattr(driver, name))
assert driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM and driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
try:
    import torch
except ImportError:
    print("clean")
"""


def run(*command: str | Path, cwd: Path, timeout: int = 300) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is made of, with the artifacts of this checkout, or fake ones where none are built."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", "build_kernels.py"):
        shutil.copy(ROOT / name, copy)
    for name in ("megamoe_aot", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "artifacts", copy / "artifacts")
    if not (copy / "artifacts" / "manifest.json").exists():
        fake_artifacts(copy / "artifacts")
    (copy / "artifacts" / f"{'0' * 64}.ptx").write_text("for verification only")
    (copy / "artifacts" / "manifest.lock.json").write_text("{}")
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", ".", cwd=checkout)
    (built,) = (checkout / "dist").iterdir()
    return built


def test_the_wheel_is_pure_and_holds_the_package_and_its_cubins_only(checkout: Path, wheel: Path) -> None:
    assert wheel.name == f"megamoe_aot-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    package = {f"megamoe_aot/{path.name}" for path in (checkout / "megamoe_aot").iterdir() if path.suffix == ".py"}
    cubins = {f"megamoe_aot/artifacts/{path.name}" for path in (checkout / "artifacts").glob("*.cubin")}
    assert names == package | cubins | {"megamoe_aot/py.typed", "megamoe_aot/artifacts/manifest.json"}
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required == ["Requires-Dist: cuda-python<14,>=12.8"]


@pytest.mark.parametrize("cuda_python", ["cuda-python<14", "cuda-python==12.8.*"])
def test_a_clean_environment_needs_only_the_wheel_and_cuda_python(wheel: Path, tmp_path: Path, cuda_python: str) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--disable-pip-version-check", wheel, cuda_python, cwd=tmp_path)
    assert run(python, "-c", IN_A_CLEAN_ENVIRONMENT, cwd=tmp_path).strip() == "clean"
