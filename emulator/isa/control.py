"""Branches, exits, and instructions about the grid."""

from __future__ import annotations

from ..decode import Decoder, Execute, Signal, opcode
from ..parser import Instruction, Reg
from ..warp import Fragment, Lanes, pack


@opcode("bra", "bra.uni")
def _bra(decoder: Decoder, instruction: Instruction) -> Execute:
    target = decoder.label(decoder.expect(1)[0])
    meeting = decoder.meeting[decoder.here]
    if instruction.guard is None:

        def jump(fragment: Fragment, lanes: Lanes) -> None:
            fragment.pc = target

        return jump
    guard, negated = decoder.source(Reg(instruction.guard[0]), 1), instruction.guard[1]

    def branch(fragment: Fragment, lanes: Lanes) -> Signal | None:
        values = pack(fragment.u[guard])
        taken = lanes.bits & (~values if negated else values)
        if taken == lanes.bits:
            fragment.pc = target
            return None
        if not taken:
            return None
        scheduler = fragment.warp.cta.cluster.scheduler
        for runnable in fragment.warp.diverge(fragment, taken, target, meeting):
            scheduler.wake(runnable)
        return Signal.GONE

    return branch


@opcode("ret", "exit")
def _exit(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> Signal:
        fragment.warp.cta.cluster.exit(fragment, lanes)
        return Signal.GONE

    return execute


@opcode("griddepcontrol.wait")
def _wait(decoder: Decoder, instruction: Instruction) -> Execute:
    """Blocks until the preceding grid has completed, which the scheduler lets happen at some time."""
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> Signal | None:
        cluster = fragment.warp.cta.cluster
        if not cluster.wave.dependency_done:
            cluster.wave.dependency_waiters.append(fragment)
            cluster.scheduler.park(fragment, "preceding grid", lambda: "waits for the preceding grid")
            return Signal.RETRY
        if cluster.sanitizer:
            fragment.warp.clock.learn(lanes, cluster.sanitizer.clocks.dependency, 1)
        return None

    return execute


@opcode("griddepcontrol.launch_dependents")
def _launch_dependents(decoder: Decoder, instruction: Instruction) -> Execute:
    decoder.expect(0)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        cta = fragment.warp.cta
        if cta.cluster.sanitizer:
            cta.cluster.sanitizer.globals.triggered[cta.number] = True

    return execute
