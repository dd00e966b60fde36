"""The list structure's MMAs on Blackwell: one thread of warp 14 issues them, the four MMA warps read what they made and store.

A stage is 64 weight rows x 2 K blocks. Every K block has its own ``columns`` TMEM columns, which its first MMA overwrites; the MMA
warps add the blocks up with their block scales, K ascending: a row's sum does not depend on which tokens are in the call.
A unit's or tile's K blocks come in *chunks* of at most ACC_COLUMNS columns. Chunks take turns in two accumulator buffers.

A block's columns are 64 rows x tokens. Rows 16 w .. 16 w + 15 lie in the first half of warp w's TMEM quarter; read as 16x256b they
come in the same fragment as Hopper's wgmma gives, so both engines send and store alike.

The issuing thread runs ahead of the MMA warps by two chunks at most (``drained``), and the producer ahead of it by the ring
(``empty``). Every unit has a stage and a chunk of its own, so the block scales of at most ring + ACC_BUFFERS units are in use.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from kernels import ptx
from megamoe_aot.spec import KernelSpec
from megamoe_aot.work_list import ACC_BUFFERS, ACC_COLUMNS, MAX_RING, RUN_SLOTS, SCALE_SLOTS, STAGE_BYTES, UNIT_ROWS

from . import common, hopper
from .common import Cta, Ring, barrier
from .producer import scale_shift

assert MAX_RING + ACC_BUFFERS <= SCALE_SLOTS
assert MAX_RING + 2 + ACC_BUFFERS <= RUN_SLOTS

BARRIERS = ("scales", "acc", "drained")
"""What the issuing warp initialises; but the producer arms scales[0] before it meets any other warp, and initialises it itself."""


@cute.jit
def prepare(spec: cutlass.Constexpr[KernelSpec], at: Cta) -> None:
    """Issuing warp: its barriers and the accumulators' TMEM."""
    if ptx.per_lane(at.lane == Uint32(0)):
        for name in const_expr(BARRIERS):
            number, arrivals = spec.work_list.barrier_counts[name]
            for i in cutlass.range_constexpr(int(name == "scales"), number):
                ptx.mbarrier_init(barrier(spec, at.base, name, i), arrivals)
        ptx.fence_mbarrier_init()
    ptx.sync_warp()
    ptx.tcgen05_alloc(at.base + Uint32(spec.work_list.tmem), ACC_BUFFERS * ACC_COLUMNS)
    ptx.tcgen05_relinquish()
    ptx.tcgen05_fence_before()  # the MMA warps' fence behind acc is the other half


@cute.jit
def issue_warp(spec: cutlass.Constexpr[KernelSpec], at: Cta) -> None:
    """All MMAs of this CTA from one thread (commits must come from the thread that issued), then TMEM is freed."""
    tmem = ptx.load_shared_u32(at.base + Uint32(spec.work_list.tmem))
    if ptx.per_lane(at.lane == Uint32(0)):
        issue(spec, at, tmem)
    ptx.sync_warp()
    ptx.tcgen05_fence_after()
    ptx.tcgen05_dealloc(tmem, ACC_BUFFERS * ACC_COLUMNS)


@cute.jit
def issue(spec: cutlass.Constexpr[KernelSpec], at: Cta, tmem: Uint32) -> None:
    """One thread: this CTA's W1 units, then its W2 tiles; returns when both accumulator buffers have been read."""
    plan = spec.work_list
    ptx.mbarrier_wait(barrier(spec, at.base, "list"), Uint32(0))
    experts = common.expert_count(spec, at.base)
    ring, chunk, ready = Ring(Uint32(0), Uint32(0)), Uint32(0), Uint32(0)
    size = common.deal_size(spec, at.tokens)
    for d in cutlass.range(Int32(common.first_deal(at)), Int32(common.deals(spec, at, experts)), Int32(at.grid), unroll=1):
        place, _, first_part = common.split_unit(plan, Uint32(d) * size)
        ready = hopper.wait_for_tokens(spec, at.base, common.load_table(at.base, plan.mask, place), ready)
        for p in cutlass.range(Int32(size), unroll=1):
            operand = at.base + Uint32(plan.x_tile) + (first_part + Uint32(p)) * Uint32(plan.unit_blocks * plan.columns * 128)
            ring, chunk = issue_gemm(spec, plan.unit_blocks, at.base, tmem, operand, ring, chunk)
    turn = Uint32(0)
    run = common.await_run(spec, at.base, turn)
    while run.count != Uint32(0):
        buffer = turn & Uint32(1)
        ptx.mbarrier_wait(barrier(spec, at.base, "hidden", buffer), (turn >> Uint32(1)) & Uint32(1))
        operand = at.base + Uint32(plan.hidden) + buffer * Uint32(plan.blocks2 * plan.columns * 128)
        for _j in cutlass.range(Int32(run.count), unroll=1):
            ring, chunk = issue_gemm(spec, plan.blocks2, at.base, tmem, operand, ring, chunk)
        turn = turn + Uint32(1)
        run = common.await_run(spec, at.base, turn)
    for i in cutlass.range_constexpr(ACC_BUFFERS):
        wait_until_drained(spec, at.base, chunk + Uint32(i))


def wait_until_drained(spec: KernelSpec, base: Any, chunk: Any) -> None:
    """Until the buffer of chunk number ``chunk`` has been read by its last user; at once for the first two chunks."""
    ptx.mbarrier_wait(barrier(spec, base, "drained", chunk & Uint32(1)), ((chunk >> Uint32(1)) & Uint32(1)) ^ Uint32(1))


def chunk_blocks(spec: KernelSpec) -> int:
    """K blocks that fill an accumulator buffer; even, so that no stage lies in two chunks."""
    return ACC_COLUMNS // spec.work_list.columns


@cute.jit
def issue_gemm(
    spec: cutlass.Constexpr[KernelSpec],
    blocks: cutlass.Constexpr[int],
    base: Uint32,
    tmem: Uint32,
    operand: Uint32,
    ring: Ring,
    chunk: Uint32,
) -> Any:
    """One thread: the MMAs of one unit or tile. ``chunk``: how many chunks came before."""
    full = chunk_blocks(spec)
    for _c in cutlass.range(blocks // full, unroll=1):
        ring, chunk = issue_chunk(spec, full, base, tmem, operand, ring, chunk)
        operand = operand + Uint32(full * spec.work_list.columns * 128)
    if const_expr(blocks % full != 0):
        ring, chunk = issue_chunk(spec, blocks % full, base, tmem, operand, ring, chunk)
    return ring, chunk


@cute.jit
def issue_chunk(
    spec: cutlass.Constexpr[KernelSpec],
    blocks: cutlass.Constexpr[int],
    base: Uint32,
    tmem: Uint32,
    operand: Uint32,
    ring: Ring,
    chunk: Uint32,
) -> Any:
    """One thread: ``blocks`` K blocks into the chunk's buffer."""
    columns = spec.work_list.columns
    buffer = chunk & Uint32(1)
    wait_until_drained(spec, base, chunk)
    ptx.tcgen05_fence_after()
    accumulator = tmem + buffer * Uint32(ACC_COLUMNS)
    for _s in cutlass.range(blocks // 2, unroll=1):
        ring = issue_stage(spec, 2, base, accumulator, operand, ring)
        accumulator = accumulator + Uint32(2 * columns)
        operand = operand + Uint32(2 * columns * 128)
    if const_expr(blocks % 2 == 1):
        ring = issue_stage(spec, 1, base, accumulator, operand, ring)
    ptx.tcgen05_commit(barrier(spec, base, "acc", buffer))
    return ring, chunk + Uint32(1)


@cute.jit
def issue_stage(
    spec: cutlass.Constexpr[KernelSpec], blocks: cutlass.Constexpr[int], base: Uint32, accumulator: Uint32, operand: Uint32, ring: Ring
) -> Any:
    """One thread: the MMAs of one stage.

    ``empty`` takes two arrivals. The commit says that the MMAs have read the stage; it passes nothing else on. The plain arrival
    passes on what this thread knows through ``drained``: which block scales have been read, so that the producer may overwrite them.
    """
    columns = spec.work_list.columns
    ptx.mbarrier_wait(barrier(spec, base, "full", ring.stage), ring.parity)
    for block in cutlass.range_constexpr(blocks):
        a = ptx.tcgen05_descriptor(base + ring.stage * Uint32(STAGE_BYTES) + Uint32(8192 * block), Uint32(1024))
        b = ptx.tcgen05_descriptor(operand + Uint32(columns * 128 * block), Uint32(1024))
        into = accumulator + Uint32(columns * block)
        ptx.tcgen05_block(into, a, b, ptx.tcgen05_instruction(UNIT_ROWS, columns), Uint32(0))
    empty = barrier(spec, base, "empty", ring.stage)
    ptx.tcgen05_commit(empty)
    ptx.mbarrier_arrive(empty)
    return common.after(spec, ring)


@cute.jit
def mma_warps(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
    at: Cta,
    out: Int64,
    scratch: Int64,
    flags: Uint32,
) -> None:
    """The sums of this CTA's W1 units, which go out as packets, then those of its W2 tiles, which are rows of ``out``."""
    plan = spec.work_list
    assert "mma" not in without, "the breakdown is measured on Hopper"
    quarter = ptx.load_shared_u32(at.base + Uint32(plan.tmem)) + (at.warp << Uint32(21))
    ptx.mbarrier_wait(barrier(spec, at.base, "list"), Uint32(0))
    experts = common.expert_count(spec, at.base)
    epoch = common.launch_epoch(spec, at.base)
    chunk, done, ready = Uint32(0), Uint32(0), Uint32(0)
    size = common.deal_size(spec, at.tokens)
    for d in cutlass.range(Int32(common.first_deal(at)), Int32(common.deals(spec, at, experts)), Int32(at.grid), unroll=1):
        place, tile, first_part = common.split_unit(plan, Uint32(d) * size)
        mask = common.load_table(at.base, plan.mask, place)
        ready = hopper.wait_for_tokens(spec, at.base, mask, ready)
        sums = [Float32(0.0)] * (plan.columns // 2)
        for p in cutlass.range(Int32(size), unroll=1):
            w_scale = wait_for_scales(spec, at.base, done)
            x_scale = at.base + Uint32(plan.x_scale) + (first_part + Uint32(p)) * Uint32(plan.unit_blocks * plan.columns * 4)
            acc, chunk = read_gemm(spec, plan.unit_blocks, True, at.base, at.lane, quarter, w_scale, x_scale, chunk)
            done = done + Uint32(1)
            sums = hopper.add_part(Uint32(p), sums, acc)
        row = hopper.logical_row(spec, tile, flags) + at.warp * Uint32(16)
        hopper.send_sums(spec, at, scratch, epoch, place, first_part, row, mask, sums)
    ptx.mbarrier_arrive_if(at.lane == Uint32(0), barrier(spec, at.base, "w1"))
    turn = Uint32(0)
    run = common.await_run(spec, at.base, turn)
    while run.count != Uint32(0):
        place = run.begin // Uint32(plan.tiles)
        buffer = turn & Uint32(1)
        mask = common.load_table(at.base, plan.mask, place)
        expert = common.load_table(at.base, plan.expert, place)
        ptx.mbarrier_wait(barrier(spec, at.base, "hidden", buffer), (turn >> Uint32(1)) & Uint32(1))
        x_scale = at.base + Uint32(plan.hidden_scale) + buffer * Uint32(4 * plan.blocks2 * plan.columns)
        for j in cutlass.range(Int32(run.count), unroll=1):
            tile = run.begin + Uint32(j) - place * Uint32(plan.tiles)
            w_scale = wait_for_scales(spec, at.base, done)
            if const_expr(plan.blocks2 % 4 != 0):
                w_scale = w_scale + scale_shift(plan, expert, tile)
            acc, chunk = read_gemm(spec, plan.blocks2, plan.blocks2 % 4 == 0, at.base, at.lane, quarter, w_scale, x_scale, chunk)
            done = done + Uint32(1)
            if const_expr("store" not in without):
                hopper.store_rows(spec, at, out, place, tile * Uint32(UNIT_ROWS) + at.warp * Uint32(16), mask, acc)
        ptx.mbarrier_arrive_if(at.lane == Uint32(0), barrier(spec, at.base, "free", buffer))
        turn = turn + Uint32(1)
        run = common.await_run(spec, at.base, turn)


def wait_for_scales(spec: KernelSpec, base: Any, done: Any) -> Any:
    """Shared address of the block scales of this CTA's unit or tile number ``done``, once they are there."""
    ptx.mbarrier_wait(barrier(spec, base, "scales", done & Uint32(SCALE_SLOTS - 1)), (done // Uint32(SCALE_SLOTS)) & Uint32(1))
    return hopper.scale_slot(spec, base, done)


@cute.jit
def read_gemm(
    spec: cutlass.Constexpr[KernelSpec],
    blocks: cutlass.Constexpr[int],
    aligned: cutlass.Constexpr[bool],
    base: Uint32,
    lane: Uint32,
    quarter: Uint32,
    w_scale: Uint32,
    x_scale: Uint32,
    chunk: Uint32,
) -> Any:
    """The sums of one unit or tile, 64 rows x all tokens, in the fragment of hopper.gemm.

    ``aligned``: the block scales begin at a 16-byte boundary. ``quarter``: TMEM address of this warp's lanes.
    """
    columns, full = spec.work_list.columns, chunk_blocks(spec)
    acc = [Float32(0.0) for _ in range(columns // 2)]
    for _c in cutlass.range(blocks // full, unroll=1):
        acc, chunk = read_chunk(spec, full, aligned, base, lane, quarter, w_scale, x_scale, acc, chunk)
        w_scale = w_scale + Uint32(4 * full)
        x_scale = x_scale + Uint32(4 * full * columns)
    if const_expr(blocks % full != 0):
        acc, chunk = read_chunk(spec, blocks % full, aligned, base, lane, quarter, w_scale, x_scale, acc, chunk)
    return acc, chunk


@cute.jit
def read_chunk(
    spec: cutlass.Constexpr[KernelSpec],
    blocks: cutlass.Constexpr[int],
    aligned: cutlass.Constexpr[bool],
    base: Uint32,
    lane: Uint32,
    quarter: Uint32,
    w_scale: Uint32,
    x_scale: Uint32,
    acc: list[Any],
    chunk: Uint32,
) -> Any:
    """Add one chunk's K blocks. All that does not need the MMAs stands before the wait for them."""
    groups = spec.work_list.columns // 8
    scales = chunk_scales(spec, blocks, aligned, lane, w_scale, x_scale)
    buffer = chunk & Uint32(1)
    ptx.mbarrier_wait(barrier(spec, base, "acc", buffer), (chunk >> Uint32(1)) & Uint32(1))
    ptx.tcgen05_fence_after()
    loads = const_expr(column_loads(8 * blocks * groups))
    for first, count in loads:
        values = load_columns(quarter + buffer * Uint32(ACC_COLUMNS) + Uint32(first), count)
        if const_expr((first, count) == loads[-1]):
            ptx.tcgen05_fence_before()
            ptx.sync_warp()  # all lanes have read their scales
            ptx.mbarrier_arrive_if(lane == Uint32(0), barrier(spec, base, "drained", buffer))
        for i in cutlass.range_constexpr(count // 2):
            block, group, at = const_expr(place_of(spec, first // 2 + i))
            acc[at] = ptx.fma(values[i], scales[block][group][i & 1], acc[at])
    return acc, chunk + Uint32(1)


def chunk_scales(spec: KernelSpec, blocks: int, aligned: bool, lane: Any, w_scale: Any, x_scale: Any) -> list[list[Any]]:
    """[block][group of 8 tokens]: the products of the weight's scale with those of this lane's two tokens."""
    columns = spec.work_list.columns
    found = []
    w: list[Any] = []
    for block in range(blocks):
        if aligned and block % 4 == 0:
            w += ptx.load_shared_f32x4(w_scale + Uint32(4 * block))
        elif not aligned:
            w.append(ptx.load_shared_f32(w_scale + Uint32(4 * block)))
        products = []
        for group in range(columns // 8):
            at = x_scale + Uint32(4 * (block * columns + 8 * group)) + (lane & Uint32(3)) * Uint32(8)
            x = ptx.load_shared_f32x2(at)
            products.append((ptx.mul(w[block], x[0]), ptx.mul(w[block], x[1])))
        found.append(products)
    return found


def place_of(spec: KernelSpec, register: int) -> tuple[int, int, int]:
    """(K block, group of 8 tokens, index of the sum) of a chunk's register: see :func:`load_columns`."""
    groups = spec.work_list.columns // 8
    block, rest = divmod(register, 4 * groups)
    return block, rest // 4, rest


def column_loads(columns: int) -> list[tuple[int, int]]:
    """(first column, number of columns) of the loads that together read ``columns``, a multiple of 8: 8 times a power of two each."""
    loads, first = [], 0
    while first < columns:
        count = ACC_COLUMNS
        while count > columns - first:
            count //= 2
        loads.append((first, count))
        first += count
    return loads


def load_columns(address: Any, columns: int) -> tuple[Float32, ...]:
    """Whole warp: 16 rows x ``columns`` columns; waits in the same block.

    Register 4 c + 2 h + i of lane l is row l // 4 + 8 h, column 8 c + 2 (l % 4) + i.
    """
    number = columns // 2
    registers = ", ".join(f"${i}" for i in range(number))
    return ptx.asm(
        f"tcgen05.ld.sync.aligned.16x256b.x{columns // 8}.b32 {{{registers}}}, [${number}]; tcgen05.wait::ld.sync.aligned;",
        ",".join(["=f"] * number) + ",r",
        [address],
        [Float32] * number,
    )
