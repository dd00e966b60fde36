"""megamoe_aot: mixture-of-experts decode kernels, compiled ahead of time.

    import megamoe_aot as mm

    kernel = mm.load_kernel(hidden=4096, inter=512, experts=288, top_k=8, tokens=8)
    layer = kernel.bind(w13, w13_scale, w2, w2_scale)
    y = layer.forward(x, logits, bias)              # the token's routes, weighted and summed
    out, ids, weights = layer(x, logits, bias)      # or one row per route, unweighted

Importing this package, :func:`menu`, :func:`has_kernel` and :func:`why_not` need neither a GPU nor a driver.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import menu as _shapes  # noqa: F401  imported first: a later import of this submodule would hide the function menu()
from .errors import (
    AmbiguousKernelError,
    CaptureError,
    ClusterUnavailableError,
    DamagedArtifactError,
    DriverCallError,
    DriverTooOldError,
    FinalizeNotLoadedError,
    ManifestError,
    MegaMoeError,
    NoDriverError,
    ResidencyError,
    ShapeNotInMenuError,
    TensorError,
    TriggerError,
    UnsupportedDeviceError,
)
from .kernel import Kernel
from .layer import Layer
from .loader import has_kernel, load_kernel, menu, why_not
from .spec import KernelSpec, SpecError

__version__ = "0.1.0"

__all__ = [
    "AmbiguousKernelError",
    "CaptureError",
    "ClusterUnavailableError",
    "DamagedArtifactError",
    "DriverCallError",
    "DriverTooOldError",
    "FinalizeNotLoadedError",
    "Kernel",
    "KernelSpec",
    "Layer",
    "ManifestError",
    "MegaMoeError",
    "NoDriverError",
    "ResidencyError",
    "ShapeNotInMenuError",
    "SpecError",
    "TensorError",
    "TriggerError",
    "UnsupportedDeviceError",
    "has_kernel",
    "load_kernel",
    "menu",
    "why_not",
]


def __getattr__(name: str) -> Any:
    """``megamoe_aot.torch`` is imported on first use, since it imports torch."""
    if name == "torch":
        return importlib.import_module(f"{__name__}.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
