"""What happened: instruction counts, bytes moved, and a timeline that can be drawn."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from .decode import Program


@dataclasses.dataclass
class Counts:
    """Totals over CTAs and clusters."""

    instructions: dict[int, Counter[str]] = dataclasses.field(default_factory=dict)
    """Warp index in the CTA -> opcode -> warp instructions executed."""
    bytes: Counter[str] = dataclasses.field(default_factory=Counter)
    """Bytes moved: "TMA", "st.async", "shared load", "shared store", "global load", "global store", "bulk copy"."""
    mmas: int = 0
    """MMA instructions (wgmma: one per warp)."""

    def add_instructions(self, warp: int, executed: Iterable[int], program: Program) -> None:
        counter = self.instructions.setdefault(warp, Counter())
        for count, op in zip(executed, program.ops, strict=True):
            if count:
                counter[op.source.opcode] += count

    def merge(self, other: Counts) -> None:
        for warp, counter in other.instructions.items():
            self.instructions.setdefault(warp, Counter()).update(counter)
        self.bytes.update(other.bytes)
        self.mmas += other.mmas

    def table(self, roles: dict[str, Iterable[int]] | None = None) -> str:
        """Text: instructions per warp, or per role where ``roles`` names groups of warps; then bytes."""
        groups = roles or {f"warp {warp}": (warp,) for warp in sorted(self.instructions)}
        lines = []
        for name, warps in groups.items():
            total: Counter[str] = sum((self.instructions.get(w, Counter()) for w in warps), Counter())
            top = ", ".join(f"{opcode} {count}" for opcode, count in total.most_common(6))
            lines.append(f"{name:12} {total.total():9}  {top}")
        lines += [f"{name:12} {count:9} bytes" for name, count in sorted(self.bytes.items())]
        return "\n".join([*lines, f"{'MMA':12} {self.mmas:9} instructions"])


@dataclasses.dataclass(frozen=True)
class Event:
    """Something with a beginning and an end, in scheduler steps of its cluster."""

    kind: str
    """``load`` (issue to landing), ``mma`` (issue to completion), ``exchange`` (st.async), ``wait`` (a parked warp), ``phase``."""
    cta: int
    lane: str
    start: int
    end: int
    label: str


class Timeline:
    """Events of one cluster, in the order in which they ended."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, kind: str, cta: int, lane: str, start: int, end: int, label: str) -> None:
        self.events.append(Event(kind, cta, lane, start, end, label))

    def svg(self, ctas: Iterable[int] | None = None, width: int = 1600) -> str:
        """A picture: per CTA one lane for loads, one for MMAs, one for the exchange, and one per warp that shows its waits.

        Time is logical (scheduler steps), so lengths say what overlapped and who waited for what, not how long it takes. The
        policy "round-robin" gives the most regular picture.
        Every bar has a tooltip with its label.
        """
        chosen = None if ctas is None else set(ctas)
        events = [e for e in self.events if e.kind != "phase" and (chosen is None or e.cta in chosen)]
        if not events:
            raise ValueError("the timeline has no events for these CTAs")
        rows = sorted({(e.cta, _KINDS.index(e.kind), e.lane) for e in events})
        row_of = {(cta, lane): i for i, (cta, _, lane) in enumerate(rows)}
        last = max(e.end for e in events)
        scale = (width - _MARGIN - 10) / max(1, last)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_ROW * (len(rows) + 3)}" '
            f'font-family="sans-serif" font-size="10">'
        ]
        for i, (colour, meaning) in enumerate(_STYLES.values()):
            parts.append(f'<rect x="{_MARGIN + 120 * i}" y="4" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{_MARGIN + 120 * i + 14}" y="13">{meaning}</text>')
        for (cta, lane), row in row_of.items():
            y = _ROW * (row + 2)
            parts.append(f'<text x="4" y="{y + 9}">CTA {cta} {escape(lane)}</text>')
            parts.append(f'<line x1="{_MARGIN}" x2="{width}" y1="{y + _ROW - 1}" y2="{y + _ROW - 1}" stroke="#ddd"/>')
        for event in events:
            x, y = _MARGIN + event.start * scale, _ROW * (row_of[event.cta, event.lane] + 2)
            length = max(1.0, (event.end - event.start) * scale)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{_ROW - 3}" fill="{_STYLES[event.kind][0]}" fill-opacity="0.6">'
                f"<title>{escape(event.label)}: steps {event.start} to {event.end}</title></rect>"
            )
        parts.append(f'<text x="{_MARGIN}" y="{_ROW * (len(rows) + 2) + 12}">scheduler steps 0 to {last}</text></svg>')
        return "\n".join(parts)

    def save_svg(self, path: Path | str, ctas: Iterable[int] | None = None) -> None:
        """Write :meth:`svg` to a file."""
        Path(path).write_text(self.svg(ctas))


_ROW, _MARGIN = 14, 130
_STYLES = {
    "load": ("#1f77b4", "TMA in flight"),
    "mma": ("#d62728", "MMA in flight"),
    "exchange": ("#9467bd", "st.async in flight"),
    "wait": ("#999999", "warp waits"),
}
"""Kind of event -> (colour, meaning), in the order of a CTA's lanes."""
_KINDS = list(_STYLES)
