"""The adversary: decides which fragment of a warp runs next, for how long, and when asynchronous operations complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from .decode import NONE, Signal
from .findings import Where
from .sanitizer import taint
from .warp import Fragment, lanes_of, pack

if TYPE_CHECKING:
    from .wave import Wave

LONGEST_TURN = 64
"""Instructions that a fragment runs at most before another one may."""

PATIENCE = 64
"""Where a warp may spin without parking, a policy that starves somebody gives everybody a chance after this many steps."""


@dataclasses.dataclass(eq=False)
class AsyncOp:
    """Something that has been issued and happens later."""

    what: str
    cta: int
    """Number in the wave of the CTA that it belongs to."""
    where: Where
    run: Callable[[], None]


@dataclasses.dataclass(eq=False)
class Wait:
    """What a parked fragment waits for; ``describe`` is called for the deadlock report."""

    describe: Callable[[], str]
    label: str
    since: int


class Scheduler:
    """Runs one wave to its end, to a deadlock, or to the instruction limit."""

    def __init__(self, wave: Wave, policy: str) -> None:
        self.wave = wave
        self.policy = policy
        self.random = wave.rng
        self._ctas = [cta for cluster in wave.clusters for cta in cluster.ctas]
        self.ready: list[Fragment] = []
        self.pending: list[AsyncOp] = []
        self.step = 0
        """Logical time: scheduling decisions so far."""
        self.budget = wave.limits.instructions * len(wave.clusters)
        self._spins = wave.program.spins
        self._cursor = 0
        self._victim = self.random.randrange(1 << 16)

    # ---- what execution calls ----

    def wake(self, fragment: Fragment) -> None:
        """The fragment can run."""
        if fragment.waiting is not None:
            wait: Wait = fragment.waiting
            if self.step > wait.since:
                warp = fragment.warp
                warp.cta.cluster.timeline.add("wait", warp.cta.rank, f"warp {warp.index}", wait.since, self.step, wait.label)
            fragment.waiting = None
        if not fragment.queued:
            fragment.queued = True
            self.ready.append(fragment)

    def park(self, fragment: Fragment, label: str, describe: Callable[[], str]) -> Wait:
        """The fragment waits until somebody wakes it."""
        fragment.waiting = Wait(describe, label, self.step)
        return fragment.waiting

    def resume(self, fragment: Fragment, wait: Wait) -> None:
        """Wake the fragment if it is still in that wait: it may have waited for several things, or gone on."""
        if fragment.waiting is wait:
            self.wake(fragment)

    def submit(self, op: AsyncOp) -> None:
        """The operation happens at some later time."""
        self.pending.append(op)

    # ---- the loop ----

    def run(self) -> None:
        """Until every warp has exited and every operation has completed."""
        while self.ready or self.pending:
            self.step += 1
            chosen = self._choose()
            if isinstance(chosen, AsyncOp):
                self.wave.current = chosen
                chosen.run()
                continue
            if chosen.waiting is None:
                self.wave.current = chosen
                self._turn(chosen)
            if self.budget <= 0:
                self._give_up(f"no end after {self.wave.limits.instructions * len(self.wave.clusters)} instructions")
                return
        if any(warp.live for cta in self._ctas for warp in cta.warps):
            self._give_up("nothing can run")

    def _give_up(self, why: str) -> None:
        self.wave.current = None
        clusters = self.wave.clusters
        lines = []
        for cta in self._ctas:
            for warp in cta.warps:
                for fragment in warp.fragments:
                    spins = f"running; {fragment.poll.describe(fragment)}" if fragment.poll else "running"
                    state = fragment.waiting.describe() if fragment.waiting else spins
                    place = f"cluster {cta.cluster.index} " if len(clusters) > 1 else ""
                    lines.append(f"{place}CTA {cta.rank} warp {warp.index} lanes {fragment.lanes.bits:#010x}: {state}")
        where = Where(clusters[0].index if len(clusters) == 1 else -1)
        self.wave.findings.add("E-DEADLOCK", f"{why}:\n      " + "\n      ".join(lines), where)

    def _choose(self) -> Fragment | AsyncOp:
        policy = self.policy
        if policy == "random" or (self._spins and self.step % PATIENCE == 0):
            index = self.random.randrange(len(self.ready) + len(self.pending))
            return self._take(index) if index < len(self.ready) else self._take_pending(index - len(self.ready))
        if policy == "round-robin":
            return self._choose_in_turn()
        if policy == "async-first" and self.pending:
            return self._take_pending(self.random.randrange(len(self.pending)))
        if policy in ("starve-warp", "starve-cta"):
            return self._choose_but_victim()
        if self.ready:
            return self._take(self.random.randrange(len(self.ready)))
        return self._take_pending(self.random.randrange(len(self.pending)))

    def _take(self, index: int) -> Fragment:
        fragment = self.ready[index]
        self.ready[index] = self.ready[-1]
        self.ready.pop()
        fragment.queued = False
        return fragment

    def _take_pending(self, index: int) -> AsyncOp:
        op = self.pending[index]
        self.pending[index] = self.pending[-1]
        self.pending.pop()
        return op

    def _choose_in_turn(self) -> Fragment | AsyncOp:
        later = [f for f in self.ready if f.warp.number > self._cursor]
        if later:
            fragment = min(later, key=lambda f: f.warp.number)
            self._cursor = fragment.warp.number
            return self._take(self.ready.index(fragment))
        self._cursor = -1
        if self.pending:
            return self.pending.pop(0)
        return self._choose_in_turn()

    def _choose_but_victim(self) -> Fragment | AsyncOp:
        def starved(cta: int, warp: int) -> bool:
            if self.policy == "starve-cta":
                return cta == self._victim % len(self._ctas)
            return warp == self._victim % self._ctas[0].warp_count

        free = [i for i, f in enumerate(self.ready) if not starved(f.warp.cta.number, f.warp.index)]
        ops = [i for i, op in enumerate(self.pending) if self.policy == "starve-warp" or not starved(op.cta, -1)]
        if not free and not ops:
            free, ops = list(range(len(self.ready))), list(range(len(self.pending)))
        index = self.random.randrange(len(free) + len(ops))
        return self._take(free[index]) if index < len(free) else self._take_pending(ops[index - len(free)])

    # ---- the interpreter ----

    def _turn(self, fragment: Fragment) -> None:
        """Run the fragment until it waits, ends, or its turn is over."""
        warp = fragment.warp
        ops = self.wave.program.ops
        defined, held, values, executed, tainted = warp.defined, warp.held, warp.u, warp.executed, warp.tainted
        turn = self.random.randint(1, LONGEST_TURN)
        self.budget -= turn
        for _ in range(turn):
            pc = fragment.pc
            if pc == fragment.join_pc:
                self._wake_all(warp.arrive(fragment))
                return
            op = ops[pc]
            lanes = fragment.lanes
            if op.guard != NONE:
                active = lanes.bits & (~pack(values[op.guard]) if op.negated else pack(values[op.guard]))
                if not active:
                    fragment.pc = pc + 1
                    continue
                lanes = lanes_of(active)
            bits = lanes.bits
            for register in op.reads:
                if bits & ~defined[register]:
                    self._undefined(fragment, register, bits)
            if held:
                self._held(fragment, op.reads + op.writes, bits)
            if tainted:
                taint.propagate(fragment, op, bits)
            fragment.pc = pc + 1
            signal = op.execute(fragment, lanes)
            if signal is None:
                executed[pc] += 1
                for register in op.writes:
                    defined[register] |= bits
                continue
            if signal is Signal.RETRY:
                fragment.pc = pc
            else:
                executed[pc] += 1
            return
        self.wake(fragment)

    def _wake_all(self, fragments: list[Fragment]) -> None:
        for fragment in fragments:
            self.wake(fragment)

    def _undefined(self, fragment: Fragment, register: int, bits: int) -> None:
        if register in fragment.warp.held:
            return  # the reason is reported by _held
        name = self.wave.program.layout.names[register]
        fragment.warp.cta.cluster.report_next("E-UNINIT", f"register {name} is read before it is written")
        fragment.warp.defined[register] |= bits

    def _held(self, fragment: Fragment, registers: tuple[int, ...], bits: int) -> None:
        for register in registers:
            wait = fragment.warp.held.get(register)
            if wait and wait.bits & bits:
                name = self.wave.program.layout.names[register]
                fragment.warp.cta.cluster.report_next(wait.check, f"register {name} is used while {wait.what} is not known to be complete")
