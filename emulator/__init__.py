"""A functional emulator for PTX kernels of sm_90a and sm_100f, with a sanitizer. See emulator/README.md."""

from .config import (
    OFF,
    POLICIES,
    TCGEN05,
    WGMMA,
    Arithmetic,
    Buffer,
    Checks,
    Dot,
    Launch,
    Limits,
    Pointer,
    SparseBuffer,
    TensorMap,
)
from .findings import CATALOGUE, Finding
from .launch import Result, emulate
from .parser import PtxError

__all__ = [
    "CATALOGUE",
    "OFF",
    "POLICIES",
    "TCGEN05",
    "WGMMA",
    "Arithmetic",
    "Buffer",
    "Checks",
    "Dot",
    "Finding",
    "Launch",
    "Limits",
    "Pointer",
    "PtxError",
    "Result",
    "SparseBuffer",
    "TensorMap",
    "emulate",
]
