"""How many CTAs of a kernel fit into one SM at once (compute capability 9.0 and 10.x)."""

from __future__ import annotations

REGISTERS_PER_PARTITION = 16384
"""An SM has four partitions; a warp's registers lie in one of them."""
PARTITIONS = 4
WARP_REGISTER_UNIT = 256
"""Registers are handed out to warps in multiples of this."""
SHARED_PER_SM = 233_472
SHARED_RESERVED_PER_CTA = 1024
THREADS_PER_SM = 2048


def by_registers(registers: int, threads: int) -> int:
    """CTAs of ``threads`` threads with ``registers`` registers each."""
    per_warp = -(-registers * 32 // WARP_REGISTER_UNIT) * WARP_REGISTER_UNIT
    return REGISTERS_PER_PARTITION // per_warp * PARTITIONS // -(-threads // 32)


def by_shared_memory(dynamic: int, static: int = 0) -> int:
    """CTAs with ``dynamic`` + ``static`` bytes of shared memory each."""
    return SHARED_PER_SM // (dynamic + static + SHARED_RESERVED_PER_CTA)


def resident_ctas(registers: int, threads: int, dynamic: int, static: int = 0) -> int:
    """CTAs per SM that registers, shared memory and threads allow together."""
    return min(by_registers(registers, threads), by_shared_memory(dynamic, static), THREADS_PER_SM // threads)


def most_shared_memory(ctas: int) -> int:
    """Most bytes of shared memory per CTA with which ``ctas`` CTAs share an SM."""
    return SHARED_PER_SM // ctas - SHARED_RESERVED_PER_CTA


def most_registers(threads: int, ctas: int) -> int:
    """Largest register count per thread with which ``ctas`` CTAs share an SM."""
    return max(n for n in range(8, 256) if by_registers(n, threads) >= ctas)
