"""Sixteen bytes of global memory (eight BF16 values) as four words: one vector access per thread. See ptx.py for the conventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Uint32

from .ptx import asm

_NEGATIVE_ZEROS = 0x80008000


def load_global_b32x4(address: Any) -> tuple[Uint32, ...]:
    return asm("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [address], [Uint32] * 4)


def load_global_bf16x8_if(condition: Any, address: Any) -> tuple[Uint32, ...]:
    """Eight BF16 values, or -0 eight times: x + -0 has the bits of x for every x, +0 and -0 included."""
    default = " ".join(f"mov.b32 ${i}, {_NEGATIVE_ZEROS};" for i in range(4))
    text = f"{default} @$5 ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4];"
    return asm(text, "=&r,=&r,=&r,=&r,l,b", [address, condition], [Uint32] * 4)


def store_global_b32x4(address: Any, words: Sequence[Any]) -> None:
    asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", [address, *words])
