"""Helpers that several instruction families share."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..warp import Lanes

TYPE_WIDTH = {kind + str(width): width for kind in "busf" for width in (8, 16, 32, 64)}
"""PTX type -> bits."""


def assign(target: Any, value: Any, lanes: Lanes) -> None:
    """Write ``value`` [32] to the active lanes of a register."""
    if lanes.where is True:
        target[:] = value
    else:
        np.copyto(target, value, where=lanes.where, casting="unsafe")
