"""What a measurement ran on: the header of every results file."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from typing import Any

import torch

from megamoe_aot.manifest import Manifest

PACKAGES = ("torch", "cuda-python", "cuda-bindings", "cuda-core", "numpy", "nvidia-cuda-nvrtc", "megamoe-aot")

NVIDIA_SMI_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem")


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed version of each distribution, None where it is not installed (a checkout on the path, for example)."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in names}


def nvidia_smi(device: int) -> dict[str, str]:
    """Name, driver version and the clocks at this moment, as nvidia-smi prints them.

    Raises:
        FileNotFoundError, subprocess.CalledProcessError: no nvidia-smi, or it does not know the device.
    """
    query = ["nvidia-smi", f"--id={device}", f"--query-gpu={','.join(NVIDIA_SMI_FIELDS)}", "--format=csv,noheader"]
    line = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout
    return parse_nvidia_smi(line)


def parse_nvidia_smi(line: str) -> dict[str, str]:
    """One line of ``--format=csv,noheader`` -> {field: value}."""
    values = [value.strip() for value in line.strip().split(",")]
    if len(values) != len(NVIDIA_SMI_FIELDS):
        raise ValueError(f"nvidia-smi printed {line!r}, expected the fields {NVIDIA_SMI_FIELDS}")
    return dict(zip(NVIDIA_SMI_FIELDS, values, strict=True))


def cuda_driver_version() -> int:
    """CUDA version of the driver, for example 13000."""
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuDriverGetVersion failed: {error}")
    return int(version)


def header(device: torch.device, manifest: Manifest, commit: str | None) -> dict[str, Any]:
    """Date (UTC), commit, GPU, driver, package and compiler versions, as plain JSON types."""
    properties = torch.cuda.get_device_properties(device)
    smi = nvidia_smi(device.index)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "gpu": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": smi["driver_version"],
        "driver_cuda": cuda_driver_version(),
        "clocks": {"sm": smi["clocks.sm"], "memory": smi["clocks.mem"]},
        "python": platform.python_version(),
        "torch_cuda": torch.version.cuda,
        "packages": package_versions(),
        "compiler": dict(manifest.compiler),
        "build_id": manifest.build_id,
        "source_digest": manifest.source_digest,
    }
