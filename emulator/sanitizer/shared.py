"""Shadow of shared memory: who last wrote each granule, who has read it since, and the checks on every access.

A granule is 4 bytes (less where the kernel uses narrower accesses). Asynchronous operations are checked and recorded when they
are issued: from then on their bytes are in flight, whenever they land, so a finding does not depend on the schedule.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..mma import STEP
from ..warp import LANES, Lanes
from .clocks import ASYNC, MEMORY, Clocks, Group, WarpClock

if TYPE_CHECKING:
    from . import Sanitizer

Index = NDArray[np.int64]

IN_FLIGHT = np.iinfo(np.int32).max
"""Time of a write that has been issued and not yet observed to land."""

NOBODY = -1
_NOWHERE = np.zeros(0, np.int64)
CHUNK = 16
"""Bytes of an MMA operand that are read together."""
GENERIC, TMA, ST_ASYNC, BARRIER, ATOMIC = range(5)
_KINDS = ("a store", "TMA bytes", "st.async bytes", "an mbarrier", "an atomic")


@dataclasses.dataclass
class _Atomics:
    """Atomics on one granule since its last ordinary write: they need no order among themselves, everything else does."""

    writer: int
    written: int
    """That ordinary write."""
    times: dict[int, int] = dataclasses.field(default_factory=dict)
    """Thread -> time of its last atomic."""

    def late(self, group: Group, own: int) -> bool:
        """Some atomic does not happen before an access by thread ``own``, which knows what ``group`` knows."""
        return any(component != own and time > group.views[MEMORY, component] for component, time in self.times.items())


class SharedShadow:
    """Granule g of CTA c has index ``(c * span + offset) // granule``."""

    def __init__(self, clocks: Clocks, sanitizer: Sanitizer, bytes_total: int, granule: int, columnwise: NDArray[np.bool_] | None) -> None:
        self.clocks, self.sanitizer, self.granule = clocks, sanitizer, granule
        count = bytes_total // granule
        self.writer = np.full(count, NOBODY, np.int32)
        """Component of the last write."""
        self.written = np.zeros(count, np.int32)
        """Its time."""
        self.kind = np.zeros(count, np.uint8)
        self.read = np.zeros((count, clocks.warps), np.int32)
        """Time of the last generic read by each warp of the CTA since the last write."""
        self.readers = np.zeros((count, clocks.warps), np.uint32)
        """Lanes that took part in it."""
        self.mma_read = np.zeros((bytes_total // CHUNK, clocks.warps), np.int32)
        """[chunk, warp]: number of the last MMA of each warp that reads it."""
        self.columnwise = columnwise
        """Granules of ``Launch.columnwise``; None where there are none."""
        self.atomics: dict[int, _Atomics] = {}
        """Granules whose last write is an atomic (and stale entries)."""

    # ---- accesses by threads ----

    def generic_read(self, clock: WarpClock, lanes: Lanes, granules: Index, lane_of: Index) -> list[tuple[int, int]]:
        """Ordinary load: ``granules`` [n] are read by lanes ``lane_of`` [n].

        Returns (granule, lane) of columnwise entries that may be in the making.
        """
        if (unwritten := self.writer[granules] == NOBODY).any():
            self._report("E-UNINIT", granules[unwritten], "read of shared memory that nobody wrote")
        spoiled: list[tuple[int, int]] = []
        for group, at, by in self._per_group(clock, lanes, granules, lane_of):
            bad = self._unwritten_yet(group, clock, at, by)
            if self.columnwise is not None and (apart := bad & self.columnwise[at]).any():
                spoiled += zip(at[apart].tolist(), by[apart].tolist(), strict=True)
                bad &= ~apart
            if bad.any():
                self._unordered(group, at[bad], "read")
        self._note_read(clock, granules, lane_of)
        return spoiled

    def generic_write(self, clock: WarpClock, lanes: Lanes, granules: Index, lane_of: Index) -> None:
        """Ordinary store."""
        for group, at, by in self._per_group(clock, lanes, granules, lane_of):
            self._after_write(group, clock, at, by, "overwritten")
            if self.columnwise is not None:
                whole = ~self.columnwise[at]
                at, by = at[whole], by[whole]
            self._after_reads(group, clock, at, by)
            self._after_mma_reads(group, at * self.granule // CHUNK)
        self._note_write(granules, (clock.first + lane_of).astype(np.int32), clock.now, GENERIC)

    def atomic(self, clock: WarpClock, lanes: Lanes, granules: Index, lane_of: Index) -> None:
        """Atomic of CTA scope, by threads of the CTA."""
        if (unwritten := self.writer[granules] == NOBODY).any():
            self._report("E-UNINIT", granules[unwritten], "atomic on shared memory that nobody wrote")
        for group, at, by in self._per_group(clock, lanes, granules, lane_of):
            plain = self.kind[at] != ATOMIC
            if plain.any():
                self._after_write(group, clock, at[plain], by[plain], "changed by an atomic")
            self._after_reads(group, clock, at, by)
            self._after_mma_reads(group, at * self.granule // CHUNK)
            for granule, lane in zip(at.tolist(), by.tolist(), strict=True):
                self._join(group, granule, clock.first + lane, clock.now)

    def _join(self, group: Group, granule: int, own: int, now: int) -> None:
        """One thread's atomic, in the list of its granule."""
        if self.kind[granule] != ATOMIC:
            self.atomics[granule] = _Atomics(int(self.writer[granule]), int(self.written[granule]))
        since = self.atomics[granule]
        if since.times and since.writer not in (NOBODY, own) and since.written > group.views[MEMORY, since.writer]:
            self._report("E-RACE", np.array([granule]), "a store changed by an atomic without synchronisation", np.array([since.writer]))
        since.times[own] = now
        self.writer[granule], self.written[granule], self.kind[granule] = own, now, ATOMIC

    # ---- accesses by asynchronous operations; checked against what the issuing lane knows ----

    def mma_read_operand(self, clock: WarpClock, lanes: Lanes, granules: Index, chunks: Index, n: int, number: int) -> list[int]:
        """MMA ``number`` of this warp reads its operand bytes, given in granules and in chunks, the ``n`` rows of B last: async proxy.

        Returns rows of B, so columns of D, that lie in columnwise memory and may be in the making.
        """
        if (unwritten := self.writer[granules] == NOBODY).any():
            self._report("E-UNINIT", granules[unwritten], "an MMA operand holds bytes that nobody wrote")
        spoiled: set[int] = set()
        row = STEP // self.granule
        for group in clock.groups_of(lanes):
            apart = self._after_write_async(group, clock, granules, "read by an MMA", apart=self.columnwise)
            spoiled.update(((apart - (len(granules) - n * row)) // row).tolist())
        self.mma_read[chunks, clock.index] = number
        return sorted(spoiled)

    def tma_write(self, clock: WarpClock, lanes: Lanes, granules: Index, component: int) -> None:
        """A bulk copy was issued that will write these adjacent bytes and complete on the barrier of ``component``."""
        run = slice(int(granules[0]), int(granules[-1]) + 1)  # views instead of copies: this is most of the bytes
        for group in clock.groups_of(lanes):
            self._after_write_async(group, clock, granules, "overwritten by TMA")
            if self.read[run].any():
                self._after_reads(group, clock, granules, None)
                self._reads_fenced(group, granules)
            self._after_mma_reads(group, self._chunks(run))
        self._note_write(run, np.int32(component), IN_FLIGHT, TMA)

    def remote_write(self, clock: WarpClock, lanes: Lanes, granules: Index, lane_of: Index, component: int, remote: bool) -> None:
        """A st.async was issued towards ``granules`` [n] by lanes ``lane_of`` [n]; ``remote``: of another CTA."""
        for group, at, by in self._per_group(clock, lanes, granules, lane_of):
            self._after_write(group, clock, at, by, "overwritten by st.async")
            self._after_reads(group, None if remote else clock, at, by)
            self._after_mma_reads(group, at * self.granule // CHUNK)
        self._note_write(granules, np.int32(component), IN_FLIGHT, ST_ASYNC)

    def landed(self, granules: Index, component: int, phase: int) -> None:
        """Bytes in flight have arrived: whoever has seen ``phase`` phases of their barrier may use them."""
        mine = granules[(self.writer[granules] == component) & (self.written[granules] == IN_FLIGHT)]
        self.written[mine] = phase

    def barrier_object(self, granules: Index, component: int, live: bool) -> None:
        """The bytes become, or stop being, an mbarrier."""
        self.writer[granules] = component if live else NOBODY
        self.written[granules] = IN_FLIGHT if live else 0
        self.kind[granules] = BARRIER if live else GENERIC
        self.read[granules] = 0

    # ---- the checks ----

    def _after_write(self, group: Group, clock: WarpClock, granules: Index, lane_of: Index, what: str) -> None:
        """The last write happens before this generic access."""
        bad = self._unwritten_yet(group, clock, granules, lane_of)
        if bad.any():
            self._unordered(group, granules[bad], what)

    def _unwritten_yet(self, group: Group, clock: WarpClock, granules: Index, lane_of: Index) -> NDArray[np.bool_]:
        """Of which granules the last write does not happen before this generic access."""
        who, when = self.writer[granules], self.written[granules]
        bad = (when > group.views[MEMORY, who]) & (who >= 0) & (who != clock.first + lane_of)
        if self.atomics:
            for i in np.flatnonzero(self.kind[granules] == ATOMIC).tolist():
                bad[i] |= self.atomics[int(granules[i])].late(group, clock.first + int(lane_of[i]))
        return bad

    def _after_write_async(
        self, group: Group, clock: WarpClock, granules: Index, what: str, apart: NDArray[np.bool_] | None = None
    ) -> Index:
        """The last write happens before this async-proxy access, and a generic write through a proxy fence.

        Unordered writes to granules that are ``apart`` are not reported: returns where in ``granules`` they are.
        """
        who, when, kind = self.writer[granules], self.written[granules], self.kind[granules]
        known = who >= 0
        late = known & (when > group.views[MEMORY, who])
        if group.lanes.count == 1:
            late &= who != clock.first + group.lanes.first
        if self.atomics:
            own = clock.first + group.lanes.first if group.lanes.count == 1 else NOBODY
            for i in np.flatnonzero(kind == ATOMIC).tolist():
                late[i] |= self.atomics[int(granules[i])].late(group, own)
        unfenced = known & (kind != TMA) & (when > group.views[ASYNC, who])
        if not (late | unfenced).any():
            return _NOWHERE
        excused = late & apart[granules] if apart is not None else np.zeros_like(late)
        if (bad := late & ~excused).any():
            self._unordered(group, granules[bad], what)
        unfenced &= ~late
        for kind_of, check in ((GENERIC, "E-PROXY"), (ATOMIC, "E-PROXY"), (ST_ASYNC, "A-STASYNC")):
            if (hit := unfenced & (kind == kind_of)).any():
                text = f"{_KINDS[kind_of]} then {what}, without fence.proxy.async between them"
                self._report(check, granules[hit], text, who[hit])
        return np.flatnonzero(excused)

    def _after_reads(self, group: Group, clock: WarpClock | None, granules: Index, lane_of: Index | None) -> None:
        """All reads since the last write happen before this write. ``clock``: the writing warp, where it is of the same CTA."""
        rows = self.read[granules]
        if rows.any():
            cta = int(granules[0]) * self.granule // self.sanitizer.span
            self._after_generic_reads(group, clock, granules, lane_of, cta, rows)

    def _after_mma_reads(self, group: Group, chunks: Index | slice) -> None:
        """All MMAs that read the chunks, which are of one CTA, happen before this write."""
        rows = self.mma_read[chunks]
        if not rows.any():
            return
        first_chunk = chunks.start if isinstance(chunks, slice) else int(chunks[0])
        first = self.clocks.queue(first_chunk * CHUNK // self.sanitizer.span, 0)
        late = (rows > group.views[MEMORY, first : first + self.clocks.warps]).any(axis=1)
        if late.any():
            places = first_chunk + np.flatnonzero(late) if isinstance(chunks, slice) else chunks[late]
            self._report("E-RACE", places * CHUNK // self.granule, "overwritten while an MMA may still read it")

    def _after_generic_reads(
        self, group: Group, clock: WarpClock | None, granules: Index, lane_of: Index | None, cta: int, rows: NDArray[np.int32]
    ) -> None:
        first = self.clocks.thread(cta, 0)
        known = group.views[MEMORY, first : first + self.clocks.warps * LANES].reshape(-1, LANES)
        suspects = np.flatnonzero((rows > known.min(axis=1)).any(axis=1))  # some lane's reads may be unknown: look closer
        if not len(suspects):
            return
        lanes = (self.readers[granules[suspects], :, None] >> np.arange(LANES, dtype=np.uint32)) & 1 == 1
        late = lanes & (rows[suspects][:, :, None] > known[None])
        if clock is not None and lane_of is not None:
            late[np.arange(len(suspects)), clock.index, lane_of[suspects]] = False
        elif clock is not None and group.lanes.count == 1:
            late[:, clock.index, group.lanes.first] = False
        hit = late.any(axis=(1, 2))
        if hit.any():
            self._report("E-RACE", granules[suspects[hit]], "overwritten while another thread may still read it")

    def _reads_fenced(self, group: Group, granules: Index) -> None:
        """Generic reads before a TMA overwrite: PTX asks for a proxy fence, practice relies on the mbarrier alone."""
        rows = self.read[granules]
        if not rows.any():
            return
        cta = int(granules[0]) * self.granule // self.sanitizer.span
        first = self.clocks.thread(cta, 0)
        fenced = group.views[ASYNC, first : first + self.clocks.warps * LANES].reshape(-1, LANES).min(axis=1)
        if (hit := (rows > fenced).any(axis=1)).any():
            self._report("W-PROXY-WAR", granules[hit], "read by loads, then overwritten by TMA without a proxy fence")

    def _unordered(self, group: Group, granules: Index, what: str) -> None:
        who, when, kind = self.writer[granules], self.written[granules], self.kind[granules]
        for kind_of in np.unique(kind):
            at = kind == kind_of
            if kind_of == BARRIER:
                self._report("E-MBAR-OVERLAP", granules[at], f"bytes of a live mbarrier {what}")
                continue
            dropped = group.dropped
            scope = at & (when <= dropped[who]) if dropped is not None else np.zeros_like(at)
            if scope.any():
                text = f"{_KINDS[kind_of]} of another CTA {what}, but the wait had CTA scope"
                self._report("E-SCOPE", granules[scope], text, who[scope])
            if (rest := at & ~scope).any():
                self._report("E-RACE", granules[rest], f"{_KINDS[kind_of]} {what} without synchronisation", who[rest])

    # ---- bookkeeping ----

    def _per_group(self, clock: WarpClock, lanes: Lanes, granules: Index, lane_of: Index) -> list[tuple[Group, Index, Index]]:
        groups = clock.groups_of(lanes)
        if len(groups) == 1:
            return [(groups[0], granules, lane_of)]
        found = []
        for group in groups:
            inside = group.lanes.array[lane_of]
            if inside.any():
                found.append((group, granules[inside], lane_of[inside]))
        return found

    def _note_read(self, clock: WarpClock, granules: Index, lane_of: Index) -> None:
        warp = clock.index
        old = self.read[granules, warp]
        stale = granules[old <= clock.synced]  # those reads happen before this one: only the new readers matter
        self.readers[stale, warp] = 0
        if (len(granules) > 1 and granules[0] == granules[-1]) or len(np.unique(granules)) != len(granules):
            np.bitwise_or.at(self.readers[:, warp], granules, np.uint32(1) << lane_of.astype(np.uint32))
        else:
            self.readers[granules, warp] |= np.uint32(1) << lane_of.astype(np.uint32)
        self.read[granules, warp] = clock.now

    def _note_write(self, granules: Index | slice, component: Any, time: int, kind: int) -> None:
        self.writer[granules] = component
        self.written[granules] = time
        self.kind[granules] = kind
        if self.read[granules].any():  # memory that stays zero costs nothing
            self.read[granules] = 0
        if kind != GENERIC:  # who comes after an ordinary write also comes after the MMAs that it came after
            chunks = granules * self.granule // CHUNK if isinstance(granules, np.ndarray) else self._chunks(granules)
            if self.mma_read[chunks].any():
                self.mma_read[chunks] = 0

    def _chunks(self, granules: slice) -> slice:
        return slice(granules.start * self.granule // CHUNK, granules.stop * self.granule // CHUNK)

    def _report(self, check: str, granules: Index, text: str, who: Any = None) -> None:
        place = self.sanitizer.place(int(granules[0]) * self.granule)
        by = f"; the other access is by {self.clocks.name(int(who[0]))}" if who is not None else ""
        self.sanitizer.report(check, f"{text}: {place} ({len(granules)} x {self.granule} bytes){by}")
