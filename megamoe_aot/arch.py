"""Which cubin target runs on which GPU: a pure rule, decided before the driver is asked to load anything."""

from __future__ import annotations

import re
from collections.abc import Iterable

Capability = tuple[int, int]
"""Compute capability (major, minor)."""

_TARGET = re.compile(r"sm_(\d+)(\d)([af])")

THOR_BEFORE_RENAME: Capability = (10, 1)
"""Thor's capability under drivers that predate its renaming to 11.0: major 10, but not of the sm_100f family."""


def runs_on(arch: str, capability: Capability) -> bool:
    """Whether a cubin for ``arch`` runs on a GPU of ``capability``.

    A target ending in ``a`` runs on exactly its own capability; one ending in ``f`` (family) also on a later minor of the
    same major, except where NVIDIA made that minor a family of its own.

    Raises:
        ValueError: ``arch`` is no target of these two kinds.
    """
    major, minor, kind = parse(arch)
    if kind == "a" or capability == THOR_BEFORE_RENAME:
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def best(archs: Iterable[str], capability: Capability) -> str | None:
    """The most specific of ``archs`` that runs on ``capability``: highest minor, then exact before family; None if none does."""
    return max((arch for arch in archs if runs_on(arch, capability)), key=lambda arch: (parse(arch)[1], arch.endswith("a")), default=None)


def parse(arch: str) -> tuple[int, int, str]:
    """``"sm_100f"`` -> (10, 0, "f")."""
    if not (match := _TARGET.fullmatch(arch)):
        raise ValueError(f"{arch!r} is not a target of the form sm_90a or sm_100f")
    return int(match[1]), int(match[2]), match[3]
