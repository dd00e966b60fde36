"""The mbarrier state machine. State is kept outside shared memory: the 64-bit object is opaque."""

from __future__ import annotations

import dataclasses
from typing import Any

MAX_COUNT = (1 << 20) - 1
"""Largest arrival count, and largest magnitude of the transaction count."""


@dataclasses.dataclass(eq=False)
class Mbarrier:
    """One live mbarrier object. A phase completes when no arrival and no transaction byte is outstanding."""

    cta: int
    offset: int
    name: str
    expected: int
    pending: int
    tx: int = 0
    phase: int = 0
    """Number of completed phases; the current phase has parity ``phase & 1``."""
    waiters: list[Any] = dataclasses.field(default_factory=list)
    """(parked fragment, its wait)."""
    observed: int = -1
    """Latest phase of which somebody saw the completion."""
    landed: int = -1
    """Latest phase in which bytes of a bulk copy arrived."""
    commits: int = 0
    """tcgen05.commits that have been issued and have not arrived."""
    committed: int = -1
    """Latest phase in which one arrived."""
    clock: Any = None
    """What the sanitizer keeps about it."""

    def done(self, parity: int) -> bool:
        """try_wait.parity: has the phase of this parity completed? True at once for parity 1 of a fresh barrier."""
        return (self.phase & 1) != (parity & 1)

    def arrive(self, count: int) -> str | None:
        """Count arrivals; returns what is wrong, if anything."""
        if count > self.pending:
            self.pending = 0
            return f"{count} more arrivals on {self.name} than phase {self.phase} expects ({self.expected})"
        self.pending -= count
        return None

    def expect(self, byte_count: int) -> str | None:
        """Add to the transaction bytes of the phase."""
        self.tx += byte_count
        return None if abs(self.tx) <= MAX_COUNT else f"transaction count of {self.name} is {self.tx}, beyond {MAX_COUNT}"

    def try_complete(self) -> bool:
        """Go on to the next phase if nothing is outstanding."""
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.expected
        return True

    def __str__(self) -> str:
        return f"{self.name} of CTA {self.cta} (phase {self.phase}, {self.pending} of {self.expected} arrivals and {self.tx} bytes pending)"
