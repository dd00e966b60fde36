"""Turn a speed run into the table by which ``load_kernel`` chooses a structure (megamoe_aot/measured.py).

    python -m benchmarks.choose_structures benchmarks/results/h200_speed.json

A run of one GPU; run it once per GPU's results, all files at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megamoe_aot import measured
from megamoe_aot.files import write_atomically
from megamoe_aot.menu import LIST_COLUMNS, menu_specs
from megamoe_aot.structures import Row, Shape, choices

_HEAD = '''"""Measured times of both structures: data for structures.py, written by benchmarks/choose_structures.py and not by hand."""

from __future__ import annotations

# (hidden, inter, experts, top_k, scoring, layout, arch, tokens, structure, microseconds)
'''
_TYPE = "tuple[tuple[int, int, int, int, str, str, str, int, str, float], ...]"


def read(path: Path) -> list[Row]:
    """The times of a run's entries with PDL and without the early trigger, as a caller launches who says nothing else; the mean over
    entries that differ in logits dtype or row order only.

    Raises ValueError for such a row that failed its checks, or whose entry the menu does not have.
    """
    specs = {spec.name: spec for _, spec in menu_specs()}
    times: dict[tuple[Shape, int, str], list[float]] = defaultdict(list)
    for row in json.loads(path.read_text())["rows"]:
        name, tokens = row["entry"], row["tokens"]
        if not row["pdl"] or row.get("trigger", False):
            continue
        if (spec := specs.get(name)) is None:
            raise ValueError(f"{path}: {name} is not in the menu: measure the present build")
        if row.get("structure", spec.structure) != spec.structure:
            raise ValueError(f"{path}: a row of {name} says structure {row['structure']}")
        if not row["ok"]:
            raise ValueError(f"{path}: {name} with {tokens} tokens failed its checks")
        narrowest = min((columns for columns in LIST_COLUMNS if columns >= tokens), default=0)
        if spec.columns in (0, narrowest):
            times[Shape.of(spec), tokens, spec.structure].append(row["ours_us"])
    return [Row(*key, round(statistics.mean(us), 3)) for key, us in sorted(times.items())]


def module(rows: Sequence[Row]) -> str:
    """The text of megamoe_aot/measured.py."""
    if not rows:
        return f"{_HEAD}ROWS: {_TYPE} = ()\n"
    lines = "".join(f"    ({', '.join(_literal(v) for v in (*row.shape, *row[1:]))}),\n" for row in rows)
    return f"{_HEAD}ROWS: {_TYPE} = (\n{lines})\n"


def _literal(value: object) -> str:
    return json.dumps(value)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON of benchmarks/h200_speed.py")
    parser.add_argument("--out", type=Path, default=Path(measured.__file__))
    arguments = parser.parse_args()
    try:
        rows = sorted(row for path in arguments.results for row in read(path))
    except (OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_atomically(arguments.out, module(rows).encode())
    for shape, counts in choices(rows).items():
        print(*shape[:4], shape.scoring, shape.layout, shape.arch, *(f"M={tokens}: {structure}" for tokens, structure in counts.items()))
    print(f"wrote {len(rows)} rows to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
