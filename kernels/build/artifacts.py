"""Writing the artifacts folder so that no reader ever sees half of it.

Every file appears by rename; the manifest comes last, so it never names a file that is not there; only then do files go
that it does not name. Writers exclude each other by a lock on the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megamoe_aot.files import LEFTOVERS, write_atomically
from megamoe_aot.manifest import Manifest


def write_artifacts(folder: Path, manifest: Manifest, files: Mapping[str, bytes]) -> list[str]:
    """Write ``files`` (name -> content) and the manifest, then remove what the manifest does not name; returns those names."""
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder):
        for name, data in files.items():
            write_atomically(folder / name, data)
        manifest.save(folder)
        return _sweep(folder, {f"{sha}{suffix}" for sha in manifest.cubins for suffix in (".cubin", ".ptx")})


def _sweep(folder: Path, kept: set[str]) -> list[str]:
    stale = {path for pattern in ("*.cubin", "*.ptx") for path in folder.glob(pattern) if path.name not in kept}
    stale |= set(folder.glob(LEFTOVERS))
    for path in stale:
        path.unlink()
    return sorted(path.name for path in stale)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
