"""The digest of everything in this repository that decides a cubin's bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from .compile import ROOT

SPEC_MODULES = ("spec", "split", "shared_memory", "work_list", "abi", "finalize")
OPTIONS_FILE = "kernels/build/compile.py"


def source_files(root: Path = ROOT) -> Iterator[Path]:
    """The kernel sources, the option string's file and the spec modules, in a fixed order.

    The rest of ``kernels/build`` reads and checks; the menu decides which specs are built, and entries record those.
    """
    kernels = (root / "kernels").rglob("*.py")
    build = root / "kernels" / "build"
    yield from sorted(path for path in kernels if build not in path.parents)
    yield root / OPTIONS_FILE
    yield from (root / "megamoe_aot" / f"{name}.py" for name in SPEC_MODULES)


def source_digest(root: Path = ROOT) -> str:
    """sha256 over names and contents of :func:`source_files`."""
    digest = hashlib.sha256()
    for path in source_files(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
