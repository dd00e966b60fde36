"""PTX instructions as one-line functions, for use inside CuTe DSL kernels.

Trap: LLVM does not know that inline PTX may be convergent. It copies code into both arms of a branch on the lane: two ``if lane
== 0`` one after the other are threaded into one, a loop with such an ``if`` is unswitched into two loops, and a warp-aligned
instruction in between (bar.sync, wgmma, tcgen05.ld, a cluster barrier) then stands in both copies and runs divergently:
a hang, seen on an H200. So every branch condition that differs between the lanes of a warp goes through :func:`per_lane`,
which LLVM cannot see through, or into the instruction (the ``*_if`` functions).

Shared-memory addresses are u32 (the ``.shared::cta`` window), global addresses are i64. Everything that touches memory or
has an effect is ``side=True`` and clobbers memory, so that the compiler keeps its order; pure arithmetic is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm

_MEMORY = "~{memory}"
EVICT_FIRST = 0x12F0000000000000
"""The L2 policy word that createpolicy.fractional.L2::evict_first makes: weights are read once."""
EVICT_LAST = 0x14F0000000000000
"""The same of evict_last: for what the next kernel reads, beside a stream of weights."""


def asm(text: str, constraints: str, ins: Sequence[Any] = (), outs: Sequence[Any] = (), side: bool = True) -> Any:
    """Emit inline PTX. Results come back as one value or a tuple, of the types in ``outs``."""
    values = [v.ir_value() if hasattr(v, "ir_value") else v for v in ins]
    result = None
    if len(outs) == 1:
        result = outs[0].mlir_type
    elif outs:
        result = llvm.StructType.get_literal([t.mlir_type for t in outs])
    if side:
        constraints = f"{constraints},{_MEMORY}" if constraints else _MEMORY
    op = llvm.inline_asm(result, values, text, constraints, has_side_effects=side, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT)
    if not outs:
        return None
    if len(outs) == 1:
        return outs[0](op)
    return tuple(t(llvm.extractvalue(t.mlir_type, op, [i])) for i, t in enumerate(outs))


# ---- identity ----


def special(register: str) -> Uint32:
    """A special register such as ``%cluster_ctarank``."""
    return asm(f"mov.u32 $0, {register};", "=r", [], [Uint32], side=False)


def per_lane(condition: Any) -> Boolean:
    """The same condition, opaque to LLVM: for every ``if`` whose outcome differs between the lanes of a warp."""
    return asm("mov.pred $0, $1;", "=b,b", [condition], [Boolean])


# ---- arithmetic with a fixed rounding: the numerics contract names every one of them ----


def bits(x: Any) -> Uint32:
    return asm("mov.b32 $0, $1;", "=r,f", [x], [Uint32], side=False)


def from_bits(x: Any) -> Float32:
    return asm("mov.b32 $0, $1;", "=f,r", [x], [Float32], side=False)


def fma(a: Any, b: Any, c: Any) -> Float32:
    return asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], [Float32], side=False)


def add(a: Any, b: Any) -> Float32:
    return asm("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], [Float32], side=False)


def sub(a: Any, b: Any) -> Float32:
    return asm("sub.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], [Float32], side=False)


def mul(a: Any, b: Any) -> Float32:
    return asm("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], [Float32], side=False)


def div(a: Any, b: Any) -> Float32:
    return asm("div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], [Float32], side=False)


def rcp(a: Any) -> Float32:
    return asm("rcp.rn.f32 $0, $1;", "=f,f", [a], [Float32], side=False)


def max_drop_nan(a: Any, b: Any) -> Float32:
    return asm("max.f32 $0, $1, $2;", "=f,f,f", [a, b], [Float32], side=False)


def max_keep_nan(a: Any, b: Any) -> Float32:
    return asm("max.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], [Float32], side=False)


def min_keep_nan(a: Any, b: Any) -> Float32:
    return asm("min.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], [Float32], side=False)


def absolute(a: Any) -> Float32:
    return asm("abs.f32 $0, $1;", "=f,f", [a], [Float32], side=False)


def max_u32(a: Any, b: Any) -> Uint32:
    return asm("max.u32 $0, $1, $2;", "=r,r,r", [a, b], [Uint32], side=False)


def min_u32(a: Any, b: Any) -> Uint32:
    return asm("min.u32 $0, $1, $2;", "=r,r,r", [a, b], [Uint32], side=False)


def select(condition: Any, a: Any, b: Any) -> Any:
    """``condition ? a : b`` for two u32 or two f32."""
    kind, kinds = ("f32", "f") if isinstance(a, Float32) else ("b32", "r")
    out = Float32 if kinds == "f" else Uint32
    return asm(f"selp.{kind} $0, $1, $2, $3;", f"={kinds},{kinds},{kinds},b", [a, b, condition], [out], side=False)


def fp8x4(a: Any, b: Any, c: Any, d: Any) -> Uint32:
    """Four e4m3 bytes, ``a`` lowest; saturating, round to nearest even, NaN -> 0x7f."""
    text = "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }"
    return asm(text, "=r,f,f,f,f", [a, b, c, d], [Uint32], side=False)


def bf16x2(low: Any, high: Any) -> Uint32:
    return asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], [Uint32], side=False)


# ---- warp ----


def redux_max(x: Any) -> Uint32:
    return asm("redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", [x], [Uint32])


def redux_min(x: Any) -> Uint32:
    return asm("redux.sync.min.u32 $0, $1, 0xffffffff;", "=r,r", [x], [Uint32])


def ballot(condition: Any) -> Uint32:
    return asm("vote.sync.ballot.b32 $0, $1, 0xffffffff;", "=r,b", [condition], [Uint32])


def population(x: Any) -> Uint32:
    return asm("popc.b32 $0, $1;", "=r,r", [x], [Uint32], side=False)


def count_greater(count: Any, a: Any, b: Any) -> Uint32:
    """count + (a > b), as one compare and one predicated add."""
    text = "{ .reg .pred p; setp.gt.u32 p, $2, $3; mov.b32 $0, $1; @p add.u32 $0, $0, 1; }"
    return asm(text, "=&r,r,r,r", [count, a, b], [Uint32], side=False)


def shuffle_xor(x: Any, mask: int) -> Float32:
    return asm(f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;", "=f,f", [x], [Float32])


def shuffle(x: Any, lane: Any) -> Uint32:
    """The value of ``x`` in lane ``lane``."""
    return asm("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, lane], [Uint32])


def shuffle_f32(x: Any, lane: Any) -> Float32:
    return asm("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, lane], [Float32])


def sync_warp() -> None:
    asm("bar.warp.sync 0xffffffff;", "")


# ---- memory ----


def load_shared_f32(address: Any) -> Float32:
    return asm("ld.shared.f32 $0, [$1];", "=f,r", [address], [Float32])


def load_shared_u32(address: Any) -> Uint32:
    return asm("ld.shared.b32 $0, [$1];", "=r,r", [address], [Uint32])


def load_shared_u32x4(address: Any) -> tuple[Uint32, ...]:
    return asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address], [Uint32] * 4)


def load_shared_f32x2(address: Any) -> tuple[Float32, Float32]:
    return asm("ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", [address], [Float32] * 2)


def load_shared_f32x4(address: Any) -> tuple[Float32, ...]:
    return asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [address], [Float32] * 4)


def store_shared_f32(address: Any, value: Any) -> None:
    asm("st.shared.f32 [$0], $1;", "r,f", [address, value])


def store_shared_f32_if(condition: Any, address: Any, value: Any) -> None:
    asm("@$0 st.shared.f32 [$1], $2;", "b,r,f", [condition, address, value])


def store_shared_u32(address: Any, value: Any) -> None:
    asm("st.shared.b32 [$0], $1;", "r,r", [address, value])


def store_shared_u32_if(condition: Any, address: Any, value: Any) -> None:
    asm("@$0 st.shared.b32 [$1], $2;", "b,r,r", [condition, address, value])


def store_shared_zero16(address: Any) -> None:
    """Sixteen zero bytes."""
    asm("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", "r,r", [address, Uint32(0)])


def load_global_f32(address: Any) -> Float32:
    return asm("ld.global.f32 $0, [$1];", "=f,l", [address], [Float32])


def load_global_bf16(address: Any) -> Float32:
    """One BF16 value, widened exactly."""
    text = "{ .reg .b16 h, z; mov.b16 z, 0; ld.global.b16 h, [$1]; mov.b32 $0, {z, h}; }"
    return asm(text, "=f,l", [address], [Float32])


def load_global_b32x2(address: Any) -> tuple[Uint32, Uint32]:
    return asm("ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [address], [Uint32] * 2)


def store_global_u32(address: Any, value: Any) -> None:
    asm("st.global.b32 [$0], $1;", "l,r", [address, value])


def store_global_f32(address: Any, value: Any) -> None:
    asm("st.global.f32 [$0], $1;", "l,f", [address, value])


def store_global_b32x2_if(condition: Any, address: Any, low: Any, high: Any) -> None:
    asm("@$0 st.global.v2.b32 [$1], {$2, $3};", "b,l,r,r", [condition, address, low, high])


# ---- barriers and fences ----


def mbarrier_init(barrier: Any, arrivals: int) -> None:
    asm(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", "r", [barrier])


def mbarrier_expect(barrier: Any, byte_count: int) -> None:
    """Arrive once and expect ``byte_count`` bytes in this phase."""
    asm(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {byte_count};", "r", [barrier])


def mbarrier_arrive(barrier: Any) -> None:
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", [barrier])


def mbarrier_arrive_if(condition: Any, barrier: Any) -> None:
    asm("@$0 mbarrier.arrive.shared::cta.b64 _, [$1];", "b,r", [condition, barrier])


def mbarrier_wait(barrier: Any, parity: Any, scope: str = "cta") -> None:
    """Block until the phase of this parity has completed; ``scope`` "cluster" where remote CTAs complete it."""
    text = (
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.acquire."
        + scope
        + ".shared::cta.b64 done, [$0], $1; @done bra DONE; bra WAIT; DONE: }"
    )
    asm(text, "r,r", [barrier, parity])


def fence_mbarrier_init() -> None:
    """Make this thread's mbarrier inits visible to the cluster and the async proxy."""
    asm("fence.mbarrier_init.release.cluster;", "")


def fence_proxy_async() -> None:
    """Order this thread's shared-memory writes before later async-proxy (MMA, TMA) accesses."""
    asm("fence.proxy.async.shared::cta;", "")


def cta_barrier(number: int, threads: int) -> None:
    asm(f"bar.sync {number}, {threads};", "")


def cluster_arrive_relaxed() -> None:
    """Arrive without the release fence (a GPU-wide fence, 360 clocks against 90): publishes nothing but mbarrier inits."""
    asm("barrier.cluster.arrive.relaxed.aligned;", "")


def cluster_wait() -> None:
    asm("barrier.cluster.wait.acquire.aligned;", "")


def grid_dependency_wait() -> None:
    asm("griddepcontrol.wait;", "")


def launch_dependents() -> None:
    """Let the next kernel start, once every CTA of this grid has said so or ended."""
    asm("griddepcontrol.launch_dependents;", "")


def launch_dependents_if(condition: Any) -> None:
    """For straight-line code: a branch would let LLVM move code from before it behind it."""
    asm("@$0 griddepcontrol.launch_dependents;", "b", [condition])


# ---- asynchronous copies ----


def prefetch_tensor_map(address: Any) -> None:
    asm("prefetch.tensormap [$0];", "l", [address])


def tma_load_3d(destination: Any, tensor_map: Any, c0: Any, c1: Any, c2: Any, barrier: Any) -> None:
    """Load one box; coordinates innermost first; its bytes complete on ``barrier``."""
    asm(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0], [$1, {$2, $3, $4}], [$5], $6;",
        "r,l,r,r,r,r,l",
        [destination, tensor_map, c0, c1, c2, barrier, Int64(EVICT_FIRST)],
    )


def map_to_cta(address: Any, cta: Any) -> Uint32:
    """The address in CTA ``cta`` of the cluster that corresponds to this CTA's ``address``."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [address, cta], [Uint32], side=False)


def store_async_f32x4(destination: Any, values: Sequence[Any], barrier: Any) -> None:
    """Sixteen bytes to a CTA of the cluster; they complete on ``barrier`` of the same CTA."""
    asm(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];",
        "r,f,f,f,f,r",
        [destination, *values, barrier],
    )


# ---- wgmma (Hopper) ----

_WGMMA = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"


def wgmma_descriptor(address: Any) -> Int64:
    """K-major, 128-byte swizzle, 1024-aligned start, 8-row groups 1024 bytes apart."""
    return Int64((Int32(address) & 0x3FFFF) >> 4) | Int64((1 << 16) | (64 << 32) | (1 << 62))


def wgmma_block(accumulator: Sequence[Any], a: Any, b: Any, accumulate: Any) -> tuple[Float32, ...]:
    """One 128-deep K block: A of 64 rows per four accumulator registers, times B of 8 rows; committed, not waited for.

    ``accumulate`` is a run-time predicate: false discards the old accumulator.
    """
    halves = len(accumulator) // 4
    registers = len(accumulator)
    da, db = 2 * registers, 2 * registers + 1  # the tied inputs take the numbers before these
    text = f"{{ .reg .pred acc; .reg .b64 a, b; setp.ne.b32 acc, ${2 * registers + 2}, 0; wgmma.fence.sync.aligned; "
    for half in range(halves):
        d = ", ".join(f"${4 * half + i}" for i in range(4))
        for step in range(4):
            text += f"add.s64 a, ${da}, {512 * half + 2 * step}; add.s64 b, ${db}, {2 * step}; "
            text += f"{_WGMMA} {{{d}}}, a, b, {'acc' if step == 0 else '1'}, 1, 1; "
    text += "wgmma.commit_group.sync.aligned; }"
    constraints = ",".join(["=f"] * registers + [str(i) for i in range(registers)] + ["l", "l", "r"])
    return asm(text, constraints, [*accumulator, a, b, accumulate], [Float32] * registers)


def wgmma_wait(accumulator: Sequence[Any], later: int = 0) -> tuple[Float32, ...]:
    """Wait for all committed MMAs but the last ``later`` groups; the registers are tied so that no reader moves above the wait."""
    registers = len(accumulator)
    constraints = ",".join(["=f"] * registers + [str(i) for i in range(registers)])
    return asm(f"wgmma.wait_group.sync.aligned {later};", constraints, accumulator, [Float32] * registers)


# ---- tcgen05 (Blackwell) ----


def tcgen05_alloc(shared_address: Any, columns: int) -> None:
    """Whole warp: allocate TMEM columns; the base address is written to shared memory."""
    asm(f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], {columns};", "r", [shared_address])


def tcgen05_relinquish() -> None:
    asm("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", "")


def tcgen05_dealloc(tmem: Any, columns: int) -> None:
    asm(f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, {columns};", "r", [tmem])


def tcgen05_fence_before() -> None:
    asm("tcgen05.fence::before_thread_sync;", "")


def tcgen05_fence_after() -> None:
    asm("tcgen05.fence::after_thread_sync;", "")


def tcgen05_descriptor(start: Any, stride: Any) -> Int64:
    """K-major, 128-byte swizzle; ``stride``: bytes between the 8-row groups (may be a run-time value)."""
    low = Int64((Int32(start) & 0x3FFFF) >> 4)
    high = Int64((Int32(stride) & 0x3FFFF) >> 4) << 32
    return low | high | Int64((1 << 16) | (1 << 46) | (2 << 61))


def tcgen05_instruction(rows: int, columns: int) -> int:
    """Instruction descriptor of kind::f8f6f4, E4M3 x E4M3 -> FP32, both operands K-major."""
    return (1 << 4) | ((columns >> 3) << 17) | ((rows >> 4) << 24)


def tcgen05_block(d: Any, a: Any, b: Any, instruction: int, accumulate: Any) -> None:
    """One thread: four k32 steps of one 128-deep K block into the accumulator at TMEM address ``d``."""
    text = "{ .reg .pred acc; .reg .b64 a, b; setp.ne.b32 acc, $4, 0; "
    for step in range(4):
        text += f"add.s64 a, $1, {2 * step}; add.s64 b, $2, {2 * step}; "
        text += f"tcgen05.mma.cta_group::1.kind::f8f6f4 [$0], a, b, $3, {'acc' if step == 0 else '1'}; "
    asm(text + "}", "r,l,l,r,r", [d, a, b, Int32(instruction), accumulate])


def tcgen05_commit(barrier: Any) -> None:
    """Arrive on ``barrier`` once all earlier MMAs of this thread are complete."""
    asm("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];", "r", [barrier])


def tcgen05_load(address: Any, columns: int) -> tuple[Float32, ...]:
    """Whole warp: lane l gets row l of its quarter, ``columns`` columns from ``address``; waits in the same block."""
    registers = ", ".join(f"${i}" for i in range(columns))
    return asm(
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{registers}}}, [${columns}]; tcgen05.wait::ld.sync.aligned;",
        ",".join(["=f"] * columns) + ",r",
        [address],
        [Float32] * columns,
    )


def is_nan(x: Any) -> Boolean:
    return (bits(x) & Uint32(0x7FFFFFFF)) > Uint32(0x7F800000)
