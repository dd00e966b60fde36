"""GEMM1's sums on their way between CTAs: 8-byte {FP32 value, epoch} packets in global scratch memory.

A packet is written and read whole, by relaxed accesses, so its epoch says whether its value is this launch's. The scratch of a
launch:

| bytes | what |
|---|---|
| 0 | u32 tickets taken in this launch |
| 4 | u32 epoch of the last launch |
| 64, 68 | u32 chunks taken from the pool by a launch of even, of odd epoch |
| 128 + 8 * ((route * parts + part) * 2I + logical row) | packet |

No launch has epoch 0, the packets' initial one; behind the last epoch comes 2, so that even and odd ones take turns. A packet that is
out of use must not keep an epoch until it comes round again after 2^32 launches, hence :func:`sweep`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from kernels import ptx
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import PACKET_BYTES, POOL_COUNTERS, SCRATCH_HEADER

from . import instructions


@cute.jit
def next_epoch(scratch: Int64, launched: Uint32) -> Any:
    """One thread per CTA: this launch's epoch. The last CTA to ask leaves the header ready for the next launch.

    Ticket and epoch are one 64-bit word, read and advanced by one atomic: no order of two accesses to rely on. The pool's counter
    of the next launch is nobody's in this one.
    """
    tickets, before = instructions.take_ticket(scratch)
    epoch = before + Uint32(1)
    epoch = ptx.select(epoch == Uint32(0), Uint32(2), epoch)
    if tickets == launched - Uint32(1):
        instructions.store_relaxed_u32x2(scratch, Uint32(0), epoch)
        instructions.store_relaxed_u32(pool_counter(scratch, epoch + Uint32(1)), Uint32(0))
    return epoch


def pool_counter(scratch: Any, epoch: Any) -> Any:
    """Global address of what the launch of ``epoch`` has taken from the pool, in chunks."""
    return scratch + Int64(Uint32(POOL_COUNTERS) + (epoch & Uint32(1)) * Uint32(4))


@cute.jit
def sweep(spec: cutlass.Constexpr[KernelSpec], scratch: Int64, epoch: Uint32, cta: Uint32, launched: Uint32, tokens: Uint32) -> None:
    """One thread per CTA: take the epoch out of one packet that this launch does not use; the launches walk over all packets."""
    plan = spec.work_list
    per_route = plan.parts * 2 * spec.inter
    index = (epoch * launched + cta) % Uint32(plan.columns * spec.top_k * per_route)
    unused = index >= tokens * Uint32(spec.top_k * per_route)
    at = scratch + Int64(SCRATCH_HEADER) + Int64(index) * Int64(PACKET_BYTES)
    instructions.store_packet_if(unused, at, Float32(0.0), Uint32(0))


def packet_address(spec: KernelSpec, scratch: Any, route: Any, part: Any, row: Any) -> Any:
    """Global address of the packet of a route's logical row (up rows first)."""
    line = route if spec.work_list.parts == 1 else route * Uint32(spec.work_list.parts) + part
    return scratch + Int64(SCRATCH_HEADER) + Int64(line * Uint32(2 * spec.inter) + row) * Int64(PACKET_BYTES)
