"""The speed run as people read it: docs/performance.svg, and the tables of docs/performance.md between their markers.

    python -m benchmarks.plot [--results FILE]

The same results give the same bytes, with one version of matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megamoe_aot.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200_speed.json"
DOCUMENT = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "performance.svg"

GOALS = {"ratio": (1.20, 1.10), "ratio_with_finalize": (1.25, 1.15)}
"""Time over floor that was aimed at: (one token, more tokens)."""

Row = Mapping[str, Any]


class Line(NamedTuple):
    """One line of the picture or of the table."""

    title: str
    structure: str
    us: str
    ratio: str
    colour: str = ""
    style: str = ""
    trigger: bool = False


LINES = (
    Line("list", "list", "ours_us", "ratio", "#1f77b4", "-"),
    Line("list, with finalize", "list", "with_finalize_us", "ratio_with_finalize", "#1f77b4", ":"),
    Line("cluster", "cluster", "ours_us", "ratio", "#d62728", "-"),
    Line("cluster, with finalize", "cluster", "with_finalize_us", "ratio_with_finalize", "#d62728", ":"),
)
"""Of the picture."""

TABLE_LINES = (
    LINES[0],
    Line("list, with trigger", "list", "ours_us", "ratio", trigger=True),
    LINES[1],
    Line("list, with finalize and trigger", "list", "with_finalize_us", "ratio_with_finalize", trigger=True),
    *LINES[2:],
)
"""Of the table: with the trigger, the next layer's launch starts while the line's last launch runs."""


class Measured:
    """The rows of one speed run in the default format that passed their checks, found by what they are."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.header: Mapping[str, Any] = data["header"]
        rows: list[Row] = [row for row in data["rows"] if (row["layout"], row["logits_dtype"]) == ("trtllm_gen", "bf16")]
        self.rows = [row for row in rows if row["ok"]]
        self.failed = [row for row in rows if not row["ok"]]
        self.shapes: dict[str, str] = dict(sorted({row["shape"]: row["model"] for row in self.rows}.items()))
        """Letter -> model."""
        self.tokens: list[int] = sorted({row["tokens"] for row in self.rows})

    def row(self, shape: str, tokens: int, structure: str, pdl: bool = True, trigger: bool = False) -> Row:
        """One measurement; an empty row where there is none."""
        wanted = (shape, tokens, structure, pdl, trigger)
        names = ("shape", "tokens", "structure", "pdl", "trigger")
        return next((row for row in self.rows if tuple(row[name] for name in names) == wanted), {})


def goal(ratio: str, tokens: int) -> float:
    """The goal for one of GOALS at a token count."""
    return GOALS[ratio][0 if tokens == 1 else 1]


# --------------------------------------------------------------------------------------------------------------------- Tables


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, form: str = ".1f") -> str:
    """A dash for None."""
    return "-" if value is None else format(value, form)


def provenance(measured: Measured) -> str:
    """What was measured where and when, in a sentence."""
    header = measured.header
    clocks = header.get("clocks_under_load") or {}
    replays = {row["replays"] for row in measured.rows}
    return (
        f"{header['gpu']}, {header['date'][:10]}, driver {header['driver']}, SM clock {clocks.get('sm', '-')} and memory clock "
        f"{clocks.get('memory', '-')} under load, commit {(header.get('commit') or '-')[:12]}; medians of "
        f"{' or '.join(map(str, sorted(replays)))} replays."
    )


def times(measured: Measured) -> str:
    """Floor, then TABLE_LINES: microseconds and time over floor, goals that are met in bold."""
    body = []
    for shape, model in measured.shapes.items():
        floors = [measured.row(shape, tokens, "list") or measured.row(shape, tokens, "cluster") for tokens in measured.tokens]
        body.append([f"**{shape}** {model}", "floor", *(number(row.get("floor_us")) for row in floors)])
        body.append(["", "unique experts", *(number(row.get("unique_experts")) for row in floors)])
        for line in TABLE_LINES:
            rows = [(tokens, measured.row(shape, tokens, line.structure, trigger=line.trigger)) for tokens in measured.tokens]
            body.append(["", line.title, *(time_cell(line, tokens, row) for tokens, row in rows)])
    return markdown(["shape", "us (time over floor)", *(f"M = {tokens}" for tokens in measured.tokens)], body)


def time_cell(line: Line, tokens: int, row: Row) -> str:
    """Microseconds and time over floor, in bold where the goal is met; a dash where the run has no such time."""
    us, ratio = row.get(line.us), row.get(line.ratio)
    if us is None or ratio is None:
        return "-"
    text = f"{us:.1f} ({ratio:.2f})"
    return f"**{text}**" if ratio <= goal(line.ratio, tokens) else text


def options(measured: Measured) -> str:
    """What PDL and the early trigger change in the list structure, in microseconds."""
    body = []
    for shape in measured.shapes:
        for title, pdl, trigger in (("PDL off", False, False), ("PDL and trigger", True, True)):
            cells = []
            for tokens in measured.tokens:
                base, other = (
                    measured.row(shape, tokens, "list").get("ours_us"),
                    measured.row(shape, tokens, "list", pdl, trigger).get("ours_us"),
                )
                cells.append("-" if base is None or other is None else f"{other - base:+.2f}")
            body.append([f"**{shape}**", title, *cells])
    return markdown(["shape", "us against PDL alone", *(f"M = {tokens}" for tokens in measured.tokens)], body)


def breakdown(measured: Measured) -> str:
    """Microseconds that leaving stages out of the list kernel saves."""
    found = [
        (shape, tokens, row)
        for shape in measured.shapes
        for tokens in measured.tokens
        if (row := measured.row(shape, tokens, "list")).get("breakdown")
    ]
    names = list(dict.fromkeys(name for _, _, row in found for name in row["breakdown"]))
    body = [
        [f"**{shape}**", str(tokens), number(row["ours_us"], ".2f"), number(row["floor_us"], ".2f")]
        + [number(row["breakdown"].get(name), ".2f") for name in names]
        for shape, tokens, row in found
    ]
    empty = measured.header.get("empty_launch_us") or {}
    launch = (
        f"An empty kernel of the same size in the same graph takes {number(empty.get('pdl'), '.2f')} us per launch with PDL, "
        f"{number(empty.get('no_pdl'), '.2f')} us without."
    )
    table = markdown(["shape", "M", "whole", "floor", *(name.replace("+", " + ") for name in names)], body) if found else "Not measured."
    return f"{table}\n\n{launch}"


SECTIONS = {"provenance": provenance, "times": times, "options": options, "breakdown": breakdown}


def filled(document: str, measured: Measured) -> str:
    """``document`` with every section of SECTIONS between its markers written anew. Raises ValueError where a marker is missing."""
    for name, write in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise ValueError(f"{begin} and {end} must be there once each")
        before, _, rest = document.partition(begin)
        document = f"{before}{begin}\n{write(measured)}\n{end}{rest.partition(end)[2]}"
    return document


# -------------------------------------------------------------------------------------------------------------------- Picture


def series(measured: Measured) -> dict[str, dict[str, list[list[float]]]]:
    """Letter -> line -> [tokens, time over floor]."""
    return {
        shape: {
            line.title: [
                [tokens, ratio]
                for tokens in measured.tokens
                if (ratio := measured.row(shape, tokens, line.structure).get(line.ratio)) is not None
            ]
            for line in LINES
        }
        for shape in measured.shapes
    }


def identity(measured: Measured) -> str:
    """Stands in the picture: which numbers it shows."""
    return hashlib.sha256(json.dumps(series(measured), sort_keys=True).encode()).hexdigest()


def picture(measured: Measured) -> bytes:
    """SVG: time over floor by M, a panel for each shape."""
    data = series(measured)
    with matplotlib.rc_context({"svg.hashsalt": "megamoe_aot", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(2.6 * len(data) + 0.6, 3.4), layout="constrained")
        axes = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
        for panel, (shape, lines) in zip(axes, data.items(), strict=True):
            _panel(panel, f"{shape}  {measured.shapes[shape]}", lines, measured.tokens)
        axes[0].set_ylabel("time over floor")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Identifier": identity(measured)})
    return written.getvalue()


def _panel(panel: Axes, title: str, lines: Mapping[str, Sequence[Sequence[float]]], tokens: Sequence[int]) -> None:
    for line in LINES:
        points = lines[line.title]
        x, y = [point[0] for point in points], [point[1] for point in points]
        panel.plot(x, y, line.style, color=line.colour, marker="o", markersize=3, linewidth=1.2, label=line.title)
    for ratio, style in (("ratio", "-"), ("ratio_with_finalize", ":")):
        heights = [goal(ratio, count) for count in tokens]
        title_ = "goal" if ratio == "ratio" else "goal, with finalize"
        panel.step(tokens, heights, style, where="mid", color="#888888", linewidth=1, label=title_)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(tokens), labels=[str(count) for count in tokens])
    panel.set_title(title, fontsize=8)
    panel.set_xlabel("M")
    panel.grid(axis="y", linewidth=0.3)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    measured = Measured(json.loads(arguments.results.read_text()))
    for row in measured.failed:
        print(f"left out: {row['entry']}, M = {row['tokens']}: {row['problems']}", file=sys.stderr)
    if not measured.rows:
        print("error: there is nothing to show", file=sys.stderr)
        return 1
    write_atomically(arguments.document, filled(arguments.document.read_text(), measured).encode())
    write_atomically(arguments.picture, picture(measured))
    print(f"wrote {arguments.document} and {arguments.picture}")
    return 1 if measured.failed else 0


if __name__ == "__main__":
    sys.exit(main())
