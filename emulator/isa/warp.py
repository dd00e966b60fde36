"""Instructions of a whole warp: shuffles, reductions, votes, election, bar.warp.sync."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import NONE, Decoder, Execute, Signal, opcode
from ..parser import Instruction, Pair
from ..warp import LANES, Fragment, Lanes, lanes_of, pack
from .common import assign

_LANE = np.arange(LANES)


def whole_warp(fragment: Fragment, lanes: Lanes, aligned: bool = False) -> None:
    """A collective instruction needs every live lane of the warp, together; an ``.aligned`` one expects them to be so already."""
    warp = fragment.warp
    if missing := warp.live & ~lanes.bits:
        warp.cta.cluster.report("E-SYNC", f"lanes {missing:#010x} do not take part in a warp-collective instruction")
    elif aligned and warp.merged:
        warp.cta.cluster.report("A-CONVERGE", "an .aligned instruction follows a divergent branch without bar.warp.sync in between")


@opcode("shfl.sync.idx.b32", "shfl.sync.bfly.b32", "shfl.sync.up.b32", "shfl.sync.down.b32")
def _shfl(decoder: Decoder, instruction: Instruction) -> Execute:
    """Source lanes outside the segment give the own value; a lane that does not take part gives poison."""
    d, a, b, c, mask = decoder.expect(5)
    decoder.full_mask(mask)
    mode = instruction.opcode.split(".")[2]
    source, selector, control = decoder.source(a, 32), decoder.source(b, 32), decoder.source(c, 32)
    valid = decoder.result(d.second, 1) if isinstance(d, Pair) else NONE
    target = decoder.result(d.first if isinstance(d, Pair) else d, 32)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        whole_warp(fragment, lanes)
        u = fragment.u
        amount = u[selector].astype(np.int64) & 31
        clamp, segment = u[control].astype(np.int64) & 31, u[control].astype(np.int64) >> 8 & 31
        low = _LANE & segment
        limit = low | (clamp & ~segment)
        if mode == "idx":
            lane = low | (amount & ~segment)
            inside = lane <= limit
        elif mode == "bfly":
            lane = _LANE ^ amount
            inside = lane <= limit
        elif mode == "down":
            lane = _LANE + amount
            inside = lane <= limit
        else:
            lane = _LANE - amount
            inside = lane >= limit
        lane = np.where(inside, lane, _LANE)
        value = np.where(lanes.array[lane], u[source][lane], np.uint32(0xFFFFFFFF))
        assign(u[target], value, lanes)
        if valid != NONE:
            assign(u[valid], inside, lanes)

    return execute


def _reduction(name: str, ufunc: Any, signed: bool = False) -> None:
    @opcode(f"redux.sync.{name}")
    def build(decoder: Decoder, instruction: Instruction) -> Execute:
        d, a, mask = decoder.expect(3)
        decoder.full_mask(mask)
        source, target = decoder.source(a, 32), decoder.result(d, 32)

        def execute(fragment: Fragment, lanes: Lanes) -> None:
            whole_warp(fragment, lanes)
            r = fragment.s if signed else fragment.u
            assign(r[target], ufunc.reduce(r[source][lanes.index]), lanes)

        return execute


_ARITHMETIC: dict[str, Any] = {"min": np.minimum, "max": np.maximum, "add": np.add}
_BITWISE: dict[str, Any] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
for _name, _ufunc in _ARITHMETIC.items():
    _reduction(f"{_name}.u32", _ufunc)
    _reduction(f"{_name}.s32", _ufunc, signed=True)
for _name, _ufunc in _BITWISE.items():
    _reduction(f"{_name}.b32", _ufunc)


@opcode("vote.sync.ballot.b32", "vote.sync.any.pred", "vote.sync.all.pred")
def _vote(decoder: Decoder, instruction: Instruction) -> Execute:
    d, a, mask = decoder.expect(3)
    decoder.full_mask(mask)
    mode = instruction.opcode.split(".")[2]
    source, target = decoder.source(a, 1), decoder.result(d, 32 if mode == "ballot" else 1)

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        whole_warp(fragment, lanes)
        votes = pack(fragment.u[source]) & lanes.bits
        value = {"ballot": votes, "any": votes != 0, "all": votes == lanes.bits}[mode]
        assign(fragment.u[target], np.full(LANES, value, fragment.u[target].dtype), lanes)

    return execute


@opcode("elect.sync")
def _elect(decoder: Decoder, instruction: Instruction) -> Execute:
    """One leader, the same for the whole run; which lane is unspecified, so the seed decides."""
    d, mask = decoder.expect(2)
    decoder.full_mask(mask)
    if not isinstance(d, Pair):
        decoder.fail("elect.sync gives a pair d|p")
    assert isinstance(d, Pair)
    lane, chosen = decoder.result(d.first, 32), decoder.result(d.second, 1)
    seed = decoder.seed

    def execute(fragment: Fragment, lanes: Lanes) -> None:
        whole_warp(fragment, lanes)
        leader = int(lanes.index[seed % lanes.count])
        if lane != NONE:
            assign(fragment.u[lane], np.full(LANES, leader, np.uint32), lanes)
        if chosen != NONE:
            assign(fragment.u[chosen], leader == _LANE, lanes)

    return execute


@opcode("bar.warp.sync")
def _warp_sync(decoder: Decoder, instruction: Instruction) -> Execute:
    """Lanes of the mask meet here, at whichever bar.warp.sync each of them is; orders their memory accesses."""
    decoder.full_mask(decoder.expect(1)[0])

    def execute(fragment: Fragment, lanes: Lanes) -> Signal | None:
        warp = fragment.warp
        cluster = warp.cta.cluster
        arrived = lanes.bits
        for _, bits in warp.sync_wait:
            arrived |= bits
        if warp.live & ~arrived:
            warp.sync_wait.append((fragment, lanes.bits))
            missing = warp.live & ~arrived
            cluster.scheduler.park(fragment, "bar.warp.sync", lambda: f"waits in bar.warp.sync for lanes {missing:#010x}")
            return Signal.PARK
        if cluster.sanitizer:
            warp.clock.sync(lanes_of(arrived))
        warp.merged = False
        waiting, warp.sync_wait = warp.sync_wait, []
        for other, _ in waiting:
            cluster.scheduler.wake(other)
        return None

    return execute
