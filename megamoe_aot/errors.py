"""Every exception that the run time raises on purpose, one class per cause.

All are :class:`MegaMoeError`; each message says what was asked, what this machine or wheel has, and what to do.
"""

from __future__ import annotations


class MegaMoeError(Exception):
    """Base class: catch this to fall back to another MoE implementation."""


class ManifestError(MegaMoeError):
    """There is no manifest, or it is not one that this version can read."""


class DamagedArtifactError(MegaMoeError):
    """A cubin is missing, truncated, or its bytes are not those that the manifest names."""


class ShapeNotInMenuError(MegaMoeError):
    """No entry has the shape and options asked for; the message names the nearest ones."""


class AmbiguousKernelError(MegaMoeError):
    """Several entries fit; the message lists them and the keyword that tells them apart."""


class NoDriverError(MegaMoeError):
    """No usable CUDA driver or no GPU: the library, cuInit or the device enumeration failed."""


class UnsupportedDeviceError(MegaMoeError):
    """The wheel has the shape, but no cubin that this GPU can run."""


class DriverTooOldError(MegaMoeError):
    """The installed driver is older than the toolkit that made the cubin."""


class ClusterUnavailableError(MegaMoeError):
    """The GPU, or the slice of it that this process may use, cannot hold one cluster of the kernel."""


class ResidencyError(MegaMoeError):
    """The GPU, or the share of it that this process or stream may use, cannot hold all CTAs of a list launch at once.

    They wait for each other, so such a launch is refused, never started: load with ``structure="cluster"``, which needs none of this.
    """


class CaptureError(MegaMoeError):
    """A list launch met a capturing stream for which its layer has no scratch memory: call ``layer.prepare(stream)`` before the capture."""


class TriggerError(MegaMoeError):
    """``trigger=True`` for a token count that the cluster structure serves, which cannot let its successor start early."""


class FinalizeNotLoadedError(MegaMoeError):
    """``forward`` of a layer whose kernel was loaded with ``finalize=False``."""


class TensorError(MegaMoeError, ValueError):
    """An argument has the wrong dtype, shape, strides, alignment or device; nothing was launched."""


class DriverCallError(MegaMoeError):
    """A CUDA driver call failed for a reason that has no class of its own."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call} failed: {name} ({code}), {text}")
        self.call = call
        self.code = code
