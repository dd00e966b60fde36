"""The public functions: what this wheel has, whether a call can be served, and loading a kernel on a device."""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path
from typing import Any

from . import driver
from .arch import best, runs_on
from .errors import DriverTooOldError, ManifestError, MegaMoeError, UnsupportedDeviceError
from .kernel import Kernel, Variant
from .library import LoadedCode, load
from .manifest import CubinRecord, Entry, FinalizeEntry, Manifest
from .selection import ENTRY, Choice, Group, OrEntry, Query, select, variants
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
    hidden: int,
    inter: int,
    experts: int,
    top_k: int,
    tokens: int,
    *,
    device: Any = None,
    arch: str | None = None,
    finalize: bool = True,
    **options: Any,
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
            _check_driver(entries, variants(_for_device(entries, by_arch, _ordinal(device)), tokens))
        if finalize:
            for group in by_arch.values():
                entries.finalize_for(group[0].spec)
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
    structure: str | None = None,
    finalize: bool = True,
) -> Kernel:
    """Load the kernel for one MoE shape; all device work happens here, except the launches and a stream's scratch (see scratch.py).

    Several cubins may serve the token counts up to ``tokens``: a *cluster* kernel runs one cluster of CTAs per route, a *list* kernel one
    CTA per SM over the call's unique experts. Each M belongs to one of the two for good, but they add in different orders: say
    ``structure`` where a token must have the same bits in a small and in a large batch.

    Args:
        hidden, inter, experts, top_k: H, I per rank, E, K.
        tokens: the largest M that will be launched; only what serves M from 0 to this is loaded.
        device: CUDA ordinal or torch.device; None is torch's current device if torch uses CUDA, else the current
            context's device, else 0.
        layout: "trtllm_gen" or "row_major"; None for any.
        logits_dtype: "bf16" or "fp32"; None for any.
        w13_order: "up_gate" or "gate_up". row_major weights must say it, since no check can tell the two apart.
        scoring: "sigmoid_bias", "sigmoid_bias_grouped" or "softmax"; None for any.
        renormalise: None for any.
        scale, limit, ue8m0: launch arguments; the entry's values unless given.
        structure: "cluster" or "list" for every M; None for the one that was measured to be faster at each M, see structures.py.
            A list kernel needs all SMs that this process sees, at once; where it cannot have them, loading it is an error and
            "cluster" is the way out.
        finalize: load the finalize kernel too, which ``layer.forward`` needs.

    Raises:
        ShapeNotInMenuError, AmbiguousKernelError, NoDriverError, UnsupportedDeviceError, DriverTooOldError,
        DamagedArtifactError, ClusterUnavailableError, ResidencyError, ManifestError: see :mod:`megamoe_aot.errors`.
    """
    options = layout, logits_dtype, w13_order, scoring, renormalise, scale, limit, ue8m0, structure
    query = Query(hidden, inter, experts, top_k, tokens, *options)
    entries = manifest()
    by_arch = select(entries, query)
    ordinal = _ordinal(device)
    return _kernel(entries, variants(_for_device(entries, by_arch, ordinal), tokens), ordinal, finalize)


def load_entry(entry: Entry, device: Any = None, finalize: bool = True) -> Kernel:
    """The kernel of exactly this entry of :func:`menu` for every M up to its ``tokens``, whatever :func:`load_kernel` would choose.

    Raises as :func:`load_kernel`.
    """
    entries, ordinal = manifest(), _ordinal(device)
    group = _for_device(entries, {entry.spec.arch: (Choice(entry, entry.spec),)}, ordinal)
    return _kernel(entries, group * (entry.spec.tokens + 1), ordinal, finalize)


def _for_device(entries: Manifest, by_arch: dict[str, Group], device: int) -> Group:
    """The entries that run on ``device``."""
    capability = driver.capability(device)
    arch = best(by_arch, capability)
    if arch is None:
        others = [other for other in entries.archs if runs_on(other, capability)]
        raise UnsupportedDeviceError(
            f"device {device} is {driver.device_name(device)}, compute capability {capability[0]}.{capability[1]}; "
            f"this wheel has the kernel asked for only for {', '.join(sorted(by_arch))}. "
            + (f"Its menu() has other kernels for this GPU ({', '.join(others)})" if others else "It has no kernel at all for this GPU")
        )
    return by_arch[arch]


def _kernel(entries: Manifest, chosen: Group, device: int, finalize: bool) -> Kernel:
    """Load what serves M = 0, 1, ... : ``chosen[M]``."""
    _check_driver(entries, chosen)
    summing = entries.finalize_for(chosen[-1].spec) if finalize else None
    loaded = {
        choice: Variant(choice.spec, entries.record(choice.entry), _loaded(entries, choice.entry, device))
        for choice in dict.fromkeys(chosen)
    }
    return Kernel(
        tuple(loaded[choice] for choice in chosen),
        (summing.spec, _loaded(entries, summing, device)) if summing is not None else None,
    )


def _check_driver(entries: Manifest, chosen: Group) -> None:
    """Raises DriverTooOldError."""
    installed = driver.version()
    for choice in dict.fromkeys(chosen):
        needed = entries.record(choice.entry).min_driver
        if installed < needed:
            raise DriverTooOldError(
                f"the driver supports CUDA {_release(installed)} ({installed}), the {choice.spec.arch} cubin needs "
                f"CUDA {_release(needed)} ({needed}) or newer; update the driver"
            )


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


_cache: dict[tuple[int, str], LoadedCode] = {}
_cache_lock = threading.Lock()


def _loaded(entries: Manifest, entry: Entry | FinalizeEntry, device: int) -> LoadedCode:
    """The entry's cubin on ``device``, loaded at most once per device: entries that differ in launch arguments share it."""
    key = device, entry.cubin
    with _cache_lock:
        code = _cache.get(key)
        if code is None or code.function is None:
            record = entries.record(entry)
            check_record(entry, record)
            code = _cache[key] = load(entries.read_cubin(entry.cubin), record, entry.spec, device)
        return code


def check_record(entry: Entry | FinalizeEntry, record: CubinRecord) -> None:
    """The artifacts must come from the same spec code as this package: both sides derive these numbers from the spec."""
    spec = entry.spec
    built = (*_launch_numbers(entry), record.block, [(p.name, p.size) for p in record.parameters])
    cluster = spec.cluster_ctas if isinstance(spec, KernelSpec) else 1
    derived = (spec.shared_bytes, cluster, spec.block_threads, [(p.name, p.size) for p in spec.parameters])
    if built != derived:
        raise ManifestError(
            f"{spec.code_name}: the artifacts were built with (dynamic shared memory, cluster, block, parameters) {built}, "
            f"this version expects {derived}; rebuild the artifacts"
        )


def _launch_numbers(entry: Entry | FinalizeEntry) -> tuple[int, int]:
    """(dynamic shared memory, CTAs per cluster) that the manifest says; a finalize kernel has none to say."""
    return (entry.dynamic_shared, entry.cluster) if isinstance(entry, Entry) else (0, 1)


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
