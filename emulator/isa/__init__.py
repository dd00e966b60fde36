"""Instruction semantics, one file per family. Importing this package fills ``decode.OPCODES``."""

from . import arithmetic, barriers, control, copies, integer, loads, strong, tcgen05, warp, wgmma

__all__ = ["arithmetic", "barriers", "control", "copies", "integer", "loads", "strong", "tcgen05", "warp", "wgmma"]
