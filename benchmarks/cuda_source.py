"""Compile a CUDA C++ file of this folder for the device at hand, and launch its kernels on torch's streams."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cuda.core import Kernel, ObjectCode


def architecture(device: torch.device) -> str:
    """NVRTC's name for the device's own instruction set, e.g. ``sm_90a``."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def compile_cuda(file: str, arch: str) -> ObjectCode:
    """The cubin of ``file`` (in this folder) for ``arch``, made by NVRTC (``pip install nvidia-cuda-nvrtc``); no GPU needed."""
    from cuda.core import Program, ProgramOptions

    source = (Path(__file__).parent / file).read_text()
    return Program(source, "c++", ProgramOptions(name=file, std="c++17", arch=arch)).compile("cubin")


def allow_shared_memory(kernel: Kernel, size: int, device: torch.device) -> None:
    """Let launches of ``kernel`` on ``device`` ask for up to ``size`` bytes of dynamic shared memory."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(attribute, size, driver.CUkernel(int(kernel.handle)), driver.CUdevice(device.index))
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuKernelSetAttribute({size} bytes of dynamic shared memory) failed: {error}")


def launch_cuda(kernel: Kernel, grid: int, block: int, *arguments: object, shared_bytes: int = 0, pdl: bool = False) -> None:
    """Enqueue ``kernel`` on torch's current stream.

    Arguments: a plain int is a pointer (8 bytes), a NumPy scalar has its own size. ``pdl`` sets the programmatic stream
    serialization attribute: the kernel may start once its predecessor has triggered.
    """
    from cuda.core import LaunchConfig, Stream, launch

    config = LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes, programmatic_stream_serialization=pdl)
    launch(Stream.from_handle(torch.cuda.current_stream().cuda_stream), config, kernel, *arguments)
