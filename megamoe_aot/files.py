"""Writing a file so that no reader ever sees half of it."""

from __future__ import annotations

import os
from pathlib import Path

LEFTOVERS = ".*.tmp"
"""Glob pattern of the temporary files that a writer leaves if it dies."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, or leave it as it was; the temporary file is in the same folder, so the rename is one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
