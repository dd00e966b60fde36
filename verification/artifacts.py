"""The PTX beside a cubin, verified: what every proof here is about."""

from __future__ import annotations

import hashlib

from megamoe_aot.errors import DamagedArtifactError
from megamoe_aot.manifest import Manifest


def read_ptx(manifest: Manifest, cubin: str) -> str:
    """The PTX from which the cubin with this sha256 was assembled. Raises DamagedArtifactError where it is missing or another one."""
    path = manifest.folder / f"{cubin}.ptx"
    try:
        image = path.read_bytes()
    except OSError as error:
        raise DamagedArtifactError(
            f"cannot read {path}: {error.strerror}; PTX is not in the wheel: python build_kernels.py --all"
        ) from error
    expected = manifest.cubins[cubin].ptx_sha256
    if (found := hashlib.sha256(image).hexdigest()) != expected:
        raise DamagedArtifactError(f"{path} has sha256 {found}, the manifest says {expected}; rebuild: python build_kernels.py --all")
    return image.decode()
