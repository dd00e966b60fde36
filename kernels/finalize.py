"""The finalize kernel: y[t] = bf16(sum of weights[t, k] * out[t * K + k] over k, plus shared[t]). See megamoe_aot/finalize.py.

It is all latency: a few KiB per SM, in L2 since the MoE launch wrote them. So all loads of a thread are in flight before the first is
used, and the addresses do not depend on the dependency wait (in the PTX they stand before it; ptxas moves about ten integer
instructions behind it). The sum has a fixed order: the result does not depend on the grid or on the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32
from cutlass.cute.runtime import make_ptr

from megamoe_aot.abi import FLAG_TRIGGER
from megamoe_aot.finalize import CHANNELS, PARAMETERS, FinalizeSpec

from . import ptx, ptx_packed
from .quantise import unpack_bf16

BF16_BYTES = 2
FP32_BYTES = 4
MIN_CTAS = 2
"""CTAs per SM that the register count must allow. Without such a budget ptxas aims at a full SM: it saves registers by loading rank by
rank, each load waiting for the sum before it (32 registers instead of 56 for K = 8, and several memory latencies instead of one)."""


def unpack(words: Any) -> list[Any]:
    """Four words -> eight BF16 values as FP32, exactly, lowest address first."""
    return [value for word in words for value in unpack_bf16(word)]


def program(spec: FinalizeSpec, out: Any, weights: Any, shared: Any, y: Any, flags: Any) -> None:
    """Traced once. The pointers are global addresses, ``shared`` 0 for none."""
    cta, thread = ptx.special("%ctaid.x"), ptx.special("%tid.x")
    token = cta // Uint32(spec.token_ctas)
    piece = (cta - token * Uint32(spec.token_ctas)) * Uint32(spec.block_threads) + thread
    row_bytes, piece_bytes = spec.hidden * BF16_BYTES, CHANNELS * BF16_BYTES
    rows = out + Int64(token) * Int64(spec.top_k * row_bytes) + Int64(piece) * Int64(piece_bytes)
    factors = weights + Int64(token) * Int64(spec.top_k * FP32_BYTES)
    result_offset = Int64(token) * Int64(row_bytes) + Int64(piece) * Int64(piece_bytes)
    has_shared = shared != Int64(0)
    has_trigger = (flags & Uint32(FLAG_TRIGGER)) != Uint32(0)

    # Before the wait: no CTA ends until the MoE launch has, so a successor that waits for this launch has waited for both.
    ptx.launch_dependents_if(has_trigger)
    ptx.grid_dependency_wait()
    scale = [ptx.load_global_f32(factors + Int64(k * FP32_BYTES)) for k in range(spec.top_k)]
    routes = [ptx_packed.load_global_b32x4(rows + Int64(k * row_bytes)) for k in range(spec.top_k)]
    last = ptx_packed.load_global_bf16x8_if(has_shared, shared + result_offset)

    total: list[Any] = [Float32(0.0)] * CHANNELS  # +0: a first product of -0 becomes +0, as the contract's sum does
    for k in range(spec.top_k):
        total = [ptx.fma(scale[k], value, acc) for value, acc in zip(unpack(routes[k]), total, strict=True)]
    total = [ptx.add(acc, value) for acc, value in zip(total, unpack(last), strict=True)]
    words = [ptx.bf16x2(low, high) for low, high in zip(total[::2], total[1::2], strict=True)]
    ptx_packed.store_global_b32x4(y + result_offset, words)


@cute.kernel
def finalize(
    spec: cutlass.Constexpr[FinalizeSpec], out: cute.Pointer, weights: cute.Pointer, shared: cute.Pointer, y: cute.Pointer, flags: Uint32
) -> None:
    program(spec, out.toint(), weights.toint(), shared.toint(), y.toint(), flags)


@cute.jit
def launch(
    spec: cutlass.Constexpr[FinalizeSpec], out: cute.Pointer, weights: cute.Pointer, shared: cute.Pointer, y: cute.Pointer, flags: Uint32
) -> None:
    """Never run: it only fixes the kernel's parameter types."""
    finalize(spec, out, weights, shared, y, flags).launch(
        grid=[spec.token_ctas, 1, 1],
        block=[spec.block_threads, 1, 1],
        min_blocks_per_mp=MIN_CTAS,
        preferred_smem_carveout=100,  # beside min_blocks_per_mp the DSL would ask a driver for it
    )


def host_function(spec: FinalizeSpec) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The host function and the example arguments for ``cute.compile``; the symbol is ``<spec.code_name>_0``."""
    assert [*inspect.signature(finalize).parameters] == ["spec", *(p.name for p in PARAMETERS)]
    finalize.set_name_prefix(spec.code_name, remove_cutlass_symbol=True, keep_mangled_name=False)
    pointer = make_ptr(cutlass.Uint8, 0x1000, cute.AddressSpace.gmem, assumed_align=4)
    example = {"pointer": pointer, "u32": Uint32(0)}
    return launch, (spec.code, *(example[p.kind] for p in PARAMETERS))
