"""The finalize kernel's specification and parameter list: it sums a token's routes behind the MoE launch.

    y[t] = bf16(sum over rank k, ascending, of weights[t, k] * out[t * K + k], then + shared[t] if there is one)

FP32, one fused multiply-add per rank from +0 on, one rounding to BF16 at the end. Every route takes part, also one whose weight is
exactly 0: an infinity or NaN in its row makes that channel NaN. A NaN is stored as 0x7fff.

One thread computes eight consecutive channels of one token: 16 bytes of each row. The M of a launch is its grid. The launch needs no
cluster and no dynamic shared memory; nothing that a preceding kernel may write is touched before griddepcontrol.wait.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .abi import Parameter
from .spec import ARCHS, KernelSpec, SpecError

CHANNELS = 8
"""Channels per thread: one 16-byte access of a BF16 row."""
BLOCK_THREADS = 64
"""Small, so that one token's rows come in through several SMs: H = 4096 is eight CTAs."""

PARAMETERS = (
    Parameter("out", "pointer", "BF16 [M*K, H], 16-byte aligned; what the MoE launch wrote"),
    Parameter("weights", "pointer", "FP32 [M, K], 4-byte aligned"),
    Parameter("shared", "pointer", "BF16 [M, H], 16-byte aligned: the shared expert's output; 0 for none"),
    Parameter("y", "pointer", "BF16 [M, H], 16-byte aligned, written; overlaps no input"),
    Parameter("flags", "u32", "FLAG_TRIGGER or 0"),
)
"""The kernel's parameters, in order."""


@dataclasses.dataclass(frozen=True)
class FinalizeSpec:
    """One finalize kernel: all of it is compiled into the cubin."""

    hidden: int
    """H, model width; a multiple of 1024."""
    top_k: int
    """K, routes per token; 1 to 32."""
    arch: str
    """Target stamped into the cubin: ``sm_90a`` or ``sm_100f``."""

    def __post_init__(self) -> None:
        def need(ok: bool, why: str) -> None:
            if not ok:
                raise SpecError(f"{why}; got {self}")

        need(self.arch in ARCHS, f"arch must be one of {ARCHS}")
        need(self.hidden > 0 and self.hidden % 1024 == 0, "hidden must be a positive multiple of 1024")
        need(1 <= self.top_k <= 32, "top_k must be 1 to 32")

    @classmethod
    def of(cls, spec: KernelSpec) -> FinalizeSpec:
        """The kernel that sums what ``spec``'s kernel writes; many entries share it."""
        return cls(spec.hidden, spec.top_k, spec.arch)

    @property
    def code(self) -> FinalizeSpec:
        """This spec: it has no launch arguments (the twin of :attr:`KernelSpec.code`)."""
        return self

    @property
    def code_name(self) -> str:
        """Readable name of the compiled code; also the kernel symbol's prefix."""
        return f"finalize_h{self.hidden}_k{self.top_k}_{self.arch}"

    @property
    def block_threads(self) -> int:
        """Threads per CTA."""
        return BLOCK_THREADS

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The kernel's parameter list."""
        return PARAMETERS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        return 0

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that must fit an SM: the register budget of kernels/finalize.py."""
        return 2

    @property
    def token_ctas(self) -> int:
        """CTAs that share one token."""
        return self.hidden // (BLOCK_THREADS * CHANNELS)

    def grid(self, tokens: int) -> int:
        """CTAs of a launch for ``tokens`` tokens; the grid is 1-D."""
        return tokens * self.token_ctas

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in field order."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> FinalizeSpec:
        """Inverse of :meth:`to_dict`; an unknown or missing field is a SpecError."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise SpecError(f"unknown finalize spec fields {unknown}")
        try:
            return cls(**fields)
        except TypeError as error:
            raise SpecError(str(error)) from error


CodeSpec = KernelSpec | FinalizeSpec
"""What one cubin is compiled from."""
