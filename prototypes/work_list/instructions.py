"""PTX instructions that the work list needs beyond kernels/ptx.py."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Uint32

from kernels.ptx import asm


def wgmma_fresh(columns: int, blocks: int, a: Any, b: Any) -> tuple[Float32, ...]:
    """``blocks`` 128-deep K blocks of 64 rows, each into its own fresh fragment of columns / 2 registers; committed.

    A's blocks lie 8192 bytes apart, B's ``columns`` rows of 128 bytes.
    """
    each = columns // 2
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
    da, db = each * blocks, each * blocks + 1
    text = "{ .reg .b64 a, b; wgmma.fence.sync.aligned; "
    for block in range(blocks):
        d = ", ".join(f"${each * block + i}" for i in range(each))
        for step in range(4):
            text += f"add.s64 a, ${da}, {512 * block + 2 * step}; add.s64 b, ${db}, {columns * 8 * block + 2 * step}; "
            text += f"{shape} {{{d}}}, a, b, {int(step > 0)}, 1, 1; "
    text += "wgmma.commit_group.sync.aligned; }"
    constraints = ",".join(["=&f"] * each * blocks + ["l", "l"])
    return asm(text, constraints, [a, b], [Float32] * (each * blocks))


def store_packet_if(condition: Any, address: Any, value: Any, epoch: Any) -> None:
    text = "{ .reg .b64 w; mov.b64 w, {$2, $3}; @$0 st.relaxed.gpu.global.b64 [$1], w; }"
    asm(text, "b,l,f,r", [condition, address, value, epoch])


def store_packets_if(condition: Any, address: Any, low: Any, high: Any, epoch: Any) -> None:
    text = "{ .reg .b64 v, w; mov.b64 v, {$2, $4}; mov.b64 w, {$3, $4}; @$0 st.relaxed.gpu.global.v2.b64 [$1], {v, w}; }"
    asm(text, "b,l,f,f,r", [condition, address, low, high, epoch])


def poll_packets(up: Any, gate: Any, epoch: Any) -> tuple[Float32, ...]:
    """Four values at ``up`` and four at ``gate``, once all of them carry ``epoch``."""
    text = "{ .reg .pred p; .reg .b64 w0, w1, w2, w3, w4, w5, w6, w7; .reg .b32 e, f; AGAIN: "
    for i, source in enumerate(("$8", "$8+16", "$9", "$9+16")):
        text += f"ld.relaxed.gpu.global.v2.b64 {{w{2 * i}, w{2 * i + 1}}}, [{source}]; "
    for i in range(8):
        text += f"mov.b64 {{${i}, {'e' if i == 0 else 'f'}}}, w{i}; "
        text += "xor.b32 e, e, $10; " if i == 0 else "xor.b32 f, f, $10; or.b32 e, e, f; "
    text += "setp.ne.b32 p, e, 0; @p bra AGAIN; }"
    return asm(text, ",".join(["=&f"] * 8) + ",l,l,r", [up, gate, epoch], [Float32] * 8)


def load_relaxed_u32(address: Any) -> Uint32:
    return asm("ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [address], [Uint32])


def atomic_add_u32(address: Any, value: Any) -> Uint32:
    return asm("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", "=r,l,r", [address, value], [Uint32])


def store_relaxed_u32(address: Any, value: Any) -> None:
    asm("st.relaxed.gpu.global.b32 [$0], $1;", "l,r", [address, value])


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


def store_global_b32_if(condition: Any, address: Any, value: Any) -> None:
    asm("@$0 st.global.b32 [$1], $2;", "b,l,r", [condition, address, value])


def store_global_b16_if(condition: Any, address: Any, value: Any) -> None:
    """The low half of ``value``."""
    asm("{ .reg .b16 h; cvt.u16.u32 h, $2; @$0 st.global.b16 [$1], h; }", "b,l,r", [condition, address, value])


def mbarrier_init_dynamic(barrier: Any, arrivals: Any) -> None:
    asm("mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", [barrier, arrivals])


def mbarrier_expect_dynamic(barrier: Any, byte_count: Any) -> None:
    asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", [barrier, byte_count])


def cta_barrier_arrive(number: int, threads: int) -> None:
    """Arrive on a named barrier without waiting for it."""
    asm(f"bar.arrive {number}, {threads};", "")
