"""The public functions: what this wheel has, whether a call can be served, and loading a kernel on a device."""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path
from typing import Any

from . import driver
from .abi import PARAMETERS
from .arch import best, runs_on
from .errors import DriverTooOldError, ManifestError, MegaMoeError, UnsupportedDeviceError
from .kernel import Kernel
from .library import LoadedCode, load
from .manifest import CubinRecord, Entry, Manifest
from .selection import ENTRY, OrEntry, Query, select
from .spec import KernelSpec


@functools.cache
def manifest() -> Manifest:
    """The manifest in use, read once. Raises ManifestError."""
    return Manifest.load(_folder)


_folder: Path | None = None


def use_artifacts(folder: Path | None) -> None:
    """Serve from another artifacts folder than the wheel's or checkout's, for a build under test; None goes back."""
    global _folder
    _folder = folder
    manifest.cache_clear()


def menu() -> tuple[Entry, ...]:
    """Every entry of this wheel; ``entry.spec`` holds the shape and options, ``entry.spec.arch`` the GPU target."""
    return manifest().entries


def has_kernel(hidden: int, inter: int, experts: int, top_k: int, tokens: int, **options: Any) -> bool:
    """Whether :func:`why_not` finds nothing that stands against the call."""
    return why_not(hidden, inter, experts, top_k, tokens, **options) is None


def why_not(
    hidden: int, inter: int, experts: int, top_k: int, tokens: int, *, device: Any = None, arch: str | None = None, **options: Any
) -> str | None:
    """Why :func:`load_kernel` would refuse; None if this wheel has the kernel.

    Args:
        device: an ordinal or torch.device: answer for this GPU (needs a driver). None: for any GPU.
        arch: answer for this target, for example "sm_90a", without a driver.
        options: the further keywords of :func:`load_kernel`.

    Raises:
        ManifestError: the installation itself is broken.
    """
    entries = manifest()
    try:
        by_arch = select(entries, Query(hidden, inter, experts, top_k, tokens, **options))
        if arch is not None and arch not in by_arch:
            raise UnsupportedDeviceError(f"this wheel has the kernel for {sorted(by_arch)}, not for {arch}")
        if device is not None:
            _for_device(entries, by_arch, _ordinal(device))
    except ManifestError:
        raise
    except MegaMoeError as error:
        return str(error)
    return None


def load_kernel(
    hidden: int,
    inter: int,
    experts: int,
    top_k: int,
    tokens: int,
    *,
    device: Any = None,
    layout: str | None = "trtllm_gen",
    logits_dtype: str | None = "bf16",
    w13_order: str | None = None,
    scoring: str | None = None,
    renormalise: bool | None = None,
    scale: float | OrEntry = ENTRY,
    limit: float | OrEntry | None = ENTRY,
    ue8m0: bool | OrEntry = ENTRY,
) -> Kernel:
    """Load the kernel for one MoE shape; all device work except the launches themselves happens here.

    Args:
        hidden, inter, experts, top_k: H, I per rank, E, K.
        tokens: the largest M that will be launched.
        device: CUDA ordinal or torch.device; None is torch's current device if torch uses CUDA, else the current
            context's device, else 0.
        layout: "trtllm_gen" or "row_major"; None for any.
        logits_dtype: "bf16" or "fp32"; None for any.
        w13_order: "up_gate" or "gate_up". row_major weights must say it, since no check can tell the two apart.
        scoring: "sigmoid_bias" or "softmax"; None for any.
        renormalise: None for any.
        scale, limit, ue8m0: launch arguments; the entry's values unless given.

    Raises:
        ShapeNotInMenuError, AmbiguousKernelError, NoDriverError, UnsupportedDeviceError, DriverTooOldError,
        DamagedArtifactError, ClusterUnavailableError, ManifestError: see :mod:`megamoe_aot.errors`.
    """
    query = Query(hidden, inter, experts, top_k, tokens, layout, logits_dtype, w13_order, scoring, renormalise, scale, limit, ue8m0)
    entries = manifest()
    by_arch = select(entries, query)
    ordinal = _ordinal(device)
    entry, spec = _for_device(entries, by_arch, ordinal)
    return Kernel(spec, entries.record(entry), _loaded(entries, entry, spec, ordinal))


def _for_device(entries: Manifest, by_arch: dict[str, tuple[Entry, KernelSpec]], device: int) -> tuple[Entry, KernelSpec]:
    """The entry that runs on ``device`` under the installed driver."""
    capability = driver.capability(device)
    arch = best(by_arch, capability)
    if arch is None:
        others = [other for other in entries.archs if runs_on(other, capability)]
        raise UnsupportedDeviceError(
            f"device {device} is {driver.device_name(device)}, compute capability {capability[0]}.{capability[1]}; "
            f"this wheel has the kernel asked for only for {', '.join(sorted(by_arch))}. "
            + (f"Its menu() has other kernels for this GPU ({', '.join(others)})" if others else "It has no kernel at all for this GPU")
        )
    entry, spec = by_arch[arch]
    needed, installed = entries.record(entry).min_driver, driver.version()
    if installed < needed:
        raise DriverTooOldError(
            f"the driver supports CUDA {_release(installed)} ({installed}), the {arch} cubin needs CUDA {_release(needed)} ({needed}) "
            "or newer; update the driver"
        )
    return entry, spec


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


_cache: dict[tuple[int, str], LoadedCode] = {}
_cache_lock = threading.Lock()


def _loaded(entries: Manifest, entry: Entry, spec: KernelSpec, device: int) -> LoadedCode:
    """The entry's cubin on ``device``, loaded at most once per device: entries that differ in launch arguments share it."""
    key = device, entry.cubin
    with _cache_lock:
        code = _cache.get(key)
        if code is None or code.function is None:
            record = entries.record(entry)
            check_record(entry, record)
            code = _cache[key] = load(entries.read_cubin(entry.cubin), record, spec, device)
        return code


def check_record(entry: Entry, record: CubinRecord) -> None:
    """The artifacts must come from the same spec code as this package: both sides derive these numbers from the spec."""
    spec = entry.spec
    built = (entry.dynamic_shared, entry.cluster, record.block, [(p.name, p.size) for p in record.parameters])
    derived = (spec.shared.total, spec.cluster, spec.block_threads, [(p.name, p.size) for p in PARAMETERS])
    if built != derived:
        raise ManifestError(
            f"{spec.name}: the artifacts were built with (dynamic shared memory, cluster, block, parameters) {built}, "
            f"this version expects {derived}; rebuild the artifacts"
        )


def _ordinal(device: Any) -> int:
    """CUDA ordinal of a ``device`` argument."""
    if isinstance(device, int):
        return device
    if device is not None:
        if getattr(device, "type", None) != "cuda":
            raise UnsupportedDeviceError(f"device must be an int, a CUDA torch.device or None, not {device!r}")
        if device.index is not None:
            return int(device.index)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return driver.current_device() or 0
