"""FP8 quantisation of 128-channel blocks by one warp: lane l holds channels 4l .. 4l+3.

A K block's bytes go to row b % 8 of its 1 KiB row group, 128-byte swizzled: 16-byte chunk c of row r sits at c ^ r. The other
seven rows of a group stay zero, which is what gives every K block its own accumulator column.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from megamoe_aot.abi import FLAG_UE8M0
from megamoe_aot.shared_memory import GROUP_BYTES
from megamoe_aot.spec import KernelSpec

from . import ptx

AMAX_FLOOR = 1e-10
FP8_MAX = 448.0


def block_amax(values: list[Any]) -> Float32:
    """max(1e-10, max|v|) over the warp's 128 values; NaN is ignored. Non-negative floats order like their bits."""
    amax = Float32(AMAX_FLOOR)
    for value in values:
        amax = ptx.max_drop_nan(amax, ptx.absolute(value))
    return ptx.from_bits(ptx.redux_max(ptx.bits(amax)))


def group_address(spec: KernelSpec, base: Any, block: Any) -> Uint32:
    """Shared address of the row group of K block ``block`` (run time); the twin of SharedMap.operand_group."""
    shared = spec.shared
    if shared.zero_group is None:
        return base + Uint32(shared.operand) + block * Uint32(GROUP_BYTES)
    index = (block >> Uint32(4)) * Uint32(8) + (block & Uint32(7))
    low = Uint32(shared.operand)
    high = Uint32(shared.zero_group + GROUP_BYTES)
    return base + ptx.select((block & Uint32(8)) == Uint32(0), low, high) + index * Uint32(GROUP_BYTES)


def store_block(spec: KernelSpec, base: Any, block: Any, lane: Any, word: Any) -> None:
    """Store this lane's four FP8 bytes of K block ``block``."""
    row = block & Uint32(7)
    chunk = (lane >> Uint32(2)) ^ row
    address = group_address(spec, base, block) + row * Uint32(128) + chunk * Uint32(16) + (lane & Uint32(3)) * Uint32(4)
    ptx.store_shared_u32(address, word)


def unpack_bf16(word: Any) -> tuple[Float32, Float32]:
    return ptx.from_bits(word << Uint32(16)), ptx.from_bits(word & Uint32(0xFFFF0000))


def load_token(spec: KernelSpec, x: Any, token: Any, part: Any, warp: Any, lane: Any) -> list[tuple[Any, Any]]:
    """Consumer warp ``warp`` (0..3) asks for blocks warp, warp + 4, ... of this CTA's K part of the token: four BF16 per lane each.

    Rounds beyond the last block ask for block 0 again.
    """
    split = spec.split
    first = token * Uint32(spec.hidden) + part * Uint32(split.unit_blocks * 128) + lane * Uint32(4)
    words = []
    for i in range(-(-split.unit_blocks // 4)):
        block = warp + Uint32(4 * i)
        if 4 * i + 3 >= split.unit_blocks:
            block = ptx.select(block < Uint32(split.unit_blocks), block, Uint32(0))
        words.append(ptx.load_global_b32x2(x + Int64(first + block * Uint32(128)) * Int64(2)))
    return words


@cute.jit
def quantise_token(spec: cutlass.Constexpr[KernelSpec], base: Uint32, words: list[Any], warp: Uint32, lane: Uint32, flags: Uint32) -> None:
    """Quantise what :func:`load_token` asked for; store the rows and their scales."""
    split, shared = spec.split, spec.shared
    for i in cutlass.range_constexpr(-(-split.unit_blocks // 4)):
        block = warp + Uint32(4 * i)
        if block < Uint32(split.unit_blocks):
            values = [*unpack_bf16(words[i][0]), *unpack_bf16(words[i][1])]
            scale = ptx.div(block_amax(values), Float32(FP8_MAX))
            scale = ptx.select((flags & Uint32(FLAG_UE8M0)) != Uint32(0), power_of_two_above(scale), scale)
            inverse = ptx.rcp(scale)
            store_block(spec, base, block, lane, ptx.fp8x4(*[ptx.mul(v, inverse) for v in values]))
            if ptx.per_lane(lane == Uint32(0)):
                ptx.store_shared_f32(base + Uint32(shared.x_scale) + block * Uint32(4), scale)


def power_of_two_above(scale: Any) -> Float32:
    """max(scale, 1e-10) rounded up to a power of two; exact powers and inf stay."""
    word = ptx.bits(ptx.max_drop_nan(scale, Float32(AMAX_FLOOR)))
    return ptx.from_bits((word + Uint32(0x7FFFFF)) & Uint32(0x7F800000))


def clamped_swiglu(gate: Any, up: Any, limit: Any) -> Float32:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); NaN passes through; limit = +inf is no clamp."""
    gate = ptx.min_keep_nan(gate, limit)
    up = ptx.min_keep_nan(ptx.max_keep_nan(up, -limit), limit)
    return ptx.mul(ptx.div(gate, ptx.add(Float32(1.0), cute.math.exp(-gate))), up)


@cute.jit
def quantise_hidden(spec: cutlass.Constexpr[KernelSpec], base: Uint32, warp: Uint32, lane: Uint32, limit: Float32) -> None:
    """From the exchanged GEMM1 sums to the FP8 hidden vector: consumer warp ``warp`` makes blocks warp, warp + 4, ...

    K parts are added in part order. The hidden blocks overwrite the token's rows, so the caller has made sure that all of
    this CTA's GEMM1 MMAs are complete.
    """
    split, shared = spec.split, spec.shared
    for i in cutlass.range_constexpr(-(-split.blocks2 // 4)):
        block = warp + Uint32(4 * i)
        if block < Uint32(split.blocks2):
            up_at = base + Uint32(shared.sums) + block * Uint32(512) + lane * Uint32(16)
            gate_at = up_at + Uint32(split.blocks2 * 512)
            up, gate = list(ptx.load_shared_f32x4(up_at)), list(ptx.load_shared_f32x4(gate_at))
            for part in cutlass.range_constexpr(1, split.parts):
                offset = Uint32(part * split.tiles1 * 512)
                more_up, more_gate = ptx.load_shared_f32x4(up_at + offset), ptx.load_shared_f32x4(gate_at + offset)
                for j in cutlass.range_constexpr(4):
                    up[j] = ptx.add(up[j], more_up[j])
                    gate[j] = ptx.add(gate[j], more_gate[j])
            act = [clamped_swiglu(gate[j], up[j], limit) for j in range(4)]
            scale = ptx.div(block_amax(act), Float32(FP8_MAX))
            store_block(spec, base, block, lane, ptx.fp8x4(*[ptx.div(a, scale) for a in act]))
            if ptx.per_lane(lane == Uint32(0)):
                ptx.store_shared_f32(base + Uint32(shared.hidden_scale) + block * Uint32(4), scale)
