"""PTX instructions that only the list structure needs; see kernels/ptx.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int64, Uint32

from kernels.ptx import EVICT_LAST, asm


def wgmma_fresh(columns: int, blocks: int, a: Any, b: Any) -> tuple[Float32, ...]:
    """``blocks`` 128-deep K blocks of 64 rows, each into its own fresh fragment of columns / 2 registers; committed.

    ``a``: a descriptor, A's blocks lie 8192 bytes apart; or A in registers, of each block four times what :func:`load_matrices` gives, K
    ascending. ``b``: a descriptor, B's blocks are ``columns`` rows of 128 bytes.
    """
    each = columns // 2
    held = list(a) if isinstance(a, Sequence) else []
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
    first = each * blocks
    db = first + (len(held) or 1)
    text = "{ .reg .b64 a, b; wgmma.fence.sync.aligned; "
    for block in range(blocks):
        d = ", ".join(f"${each * block + i}" for i in range(each))
        for step in range(4):
            rows = "a"
            if held:
                rows = "{" + ", ".join(f"${first + 16 * block + 4 * step + i}" for i in range(4)) + "}"
            else:
                text += f"add.s64 a, ${first}, {512 * block + 2 * step}; "
            text += f"add.s64 b, ${db}, {columns * 8 * block + 2 * step}; {shape} {{{d}}}, {rows}, b, {int(step > 0)}, 1, 1; "
    text += "wgmma.commit_group.sync.aligned; }"
    constraints = ",".join(["=&f"] * each * blocks + (["r"] * len(held) or ["l"]) + ["l"])
    return asm(text, constraints, [*(held or [a]), b], [Float32] * (each * blocks))


def load_matrices(address: Any) -> tuple[Uint32, ...]:
    """Whole warp: four matrices of 8 rows of 16 bytes; lane l's ``address``, 16-byte aligned, is that of row l % 8 of matrix l / 8.

    Result i is of matrix i: in lane l bytes 4 (l % 4) to 4 (l % 4) + 3 of row l / 4.
    """
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return asm(text, "=r,=r,=r,=r,r", [address], [Uint32] * 4)


def store_packet_if(condition: Any, address: Any, value: Any, epoch: Any) -> None:
    text = "{ .reg .b64 w; mov.b64 w, {$2, $3}; @$0 st.relaxed.gpu.global.b64 [$1], w; }"
    asm(text, "b,l,f,r", [condition, address, value, epoch])


def store_packets_if(condition: Any, address: Any, low: Any, high: Any, epoch: Any) -> None:
    text = "{ .reg .b64 v, w; mov.b64 v, {$2, $4}; mov.b64 w, {$3, $4}; @$0 st.relaxed.gpu.global.v2.b64 [$1], {v, w}; }"
    asm(text, "b,l,f,f,r", [condition, address, low, high, epoch])


def poll_packets(addresses: Sequence[Any], epoch: Any) -> tuple[Float32, ...]:
    """Four values at each of ``addresses`` (32 bytes of packets each), once all of them carry ``epoch``."""
    number = len(addresses)
    text = "{ .reg .pred p; .reg .b32 e, f; "
    text += "".join(f".reg .b64 w{i}; " for i in range(4 * number)) + "AGAIN: "
    for i in range(number):
        at = f"${4 * number + i}"
        text += f"ld.relaxed.gpu.global.v2.b64 {{w{4 * i}, w{4 * i + 1}}}, [{at}]; "
        text += f"ld.relaxed.gpu.global.v2.b64 {{w{4 * i + 2}, w{4 * i + 3}}}, [{at}+16]; "
    for i in range(4 * number):
        text += f"mov.b64 {{${i}, {'e' if i == 0 else 'f'}}}, w{i}; "
        text += f"xor.b32 e, e, ${5 * number}; " if i == 0 else f"xor.b32 f, f, ${5 * number}; or.b32 e, e, f; "
    text += "setp.ne.b32 p, e, 0; @p bra AGAIN; }"
    constraints = ",".join(["=&f"] * (4 * number) + ["l"] * number + ["r"])
    return asm(text, constraints, [*addresses, epoch], [Float32] * (4 * number))


def take_ticket(address: Any) -> tuple[Uint32, Uint32]:
    """Add 1 to the 64-bit word at ``address``; its low and high half before that."""
    text = "{ .reg .b64 w; atom.relaxed.gpu.global.add.u64 w, [$2], 1; mov.b64 {$0, $1}, w; }"
    low, high = asm(text, "=r,=r,l", [address], [Uint32, Uint32])
    return low, high


def store_relaxed_u32x2(address: Any, low: Any, high: Any) -> None:
    """One 64-bit access."""
    asm("{ .reg .b64 w; mov.b64 w, {$1, $2}; st.relaxed.gpu.global.b64 [$0], w; }", "l,r,r", [address, low, high])


def store_relaxed_u32(address: Any, value: Any) -> None:
    asm("st.relaxed.gpu.global.b32 [$0], $1;", "l,r", [address, value])


def take_pool_ticket(address: Any) -> Uint32:
    """Add 1 to the word at ``address``; what it was before."""
    return asm("atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", "=r,l", [address], [Uint32])


def load_shared_u32x2(address: Any) -> tuple[Uint32, Uint32]:
    low, high = asm("ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [address], [Uint32, Uint32])
    return low, high


def store_shared_u32x2(address: Any, low: Any, high: Any) -> None:
    asm("st.shared.v2.b32 [$0], {$1, $2};", "r,r,r", [address, low, high])


def reduce_shared_min(address: Any, value: Any) -> None:
    asm("red.relaxed.cta.shared::cta.min.u32 [$0], $1;", "r,r", [address, value])


def reduce_shared_or(address: Any, value: Any) -> None:
    asm("red.relaxed.cta.shared::cta.or.b32 [$0], $1;", "r,r", [address, value])


def load_shared_u16(address: Any) -> Uint32:
    return asm("{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h; }", "=r,r", [address], [Uint32])


def store_shared_u16(address: Any, value: Any) -> None:
    asm("{ .reg .b16 h; cvt.u16.u32 h, $1; st.shared.b16 [$0], h; }", "r,r", [address, value])


def lowest_bit(x: Any) -> Uint32:
    """Index of the lowest set bit."""
    return asm("{ .reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 $0, t; }", "=r,r", [x], [Uint32], side=False)


def bulk_load(destination: Any, source: Any, byte_count: int, barrier: Any) -> None:
    """``byte_count`` bytes of global memory, both sides 16-byte aligned; they complete on ``barrier``."""
    asm(
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {byte_count}, [$2];",
        "r,l,r",
        [destination, source, barrier],
    )


def store_kept_b32_if(condition: Any, address: Any, value: Any) -> None:
    """Into global memory, to stay in L2."""
    asm("@$0 st.global.L2::cache_hint.b32 [$1], $2, $3;", "b,l,r,l", [condition, address, value, Int64(EVICT_LAST)])


def store_kept_b16_if(condition: Any, address: Any, value: Any) -> None:
    """The low half of ``value``, as :func:`store_kept_b32_if`."""
    text = "{ .reg .b16 h; cvt.u16.u32 h, $2; @$0 st.global.L2::cache_hint.b16 [$1], h, $3; }"
    asm(text, "b,l,r,l", [condition, address, value, Int64(EVICT_LAST)])


def mbarrier_init(barrier: Any, arrivals: Any) -> None:
    """With a run-time count."""
    asm("mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", [barrier, arrivals])


def mbarrier_expect(barrier: Any, byte_count: Any) -> None:
    """With a run-time count."""
    asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", [barrier, byte_count])


def cta_barrier_arrive(number: int, threads: int) -> None:
    """Arrive on a named barrier without waiting for it."""
    asm(f"bar.arrive {number}, {threads};", "")
