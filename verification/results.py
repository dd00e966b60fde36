"""Results that need no GPU: their header, and where they go."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.environment import package_versions
from megamoe_aot.manifest import Manifest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results"
PACKAGES = ("numpy", "torch")


def header(manifest: Manifest) -> dict[str, Any]:
    """Date (UTC), commit, versions and build, as plain JSON types."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": package_versions(PACKAGES),
        "compiler": dict(manifest.compiler),
        "build_id": manifest.build_id,
        "source_digest": manifest.source_digest,
    }


def commit() -> str | None:
    """The checkout's commit, with "+changes" where the working tree differs from it; None outside a git checkout."""
    try:
        return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], check=True, capture_output=True, text=True).stdout.strip()
