"""Results as a JSON file (one header, one row a line) and as a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megamoe_aot.files import write_atomically

Row = Mapping[str, Any]


def write_json(path: Path, header: Mapping[str, Any], **tables: Sequence[Row]) -> None:
    """``{"header": ..., <name>: [rows]}``. Not-a-number and infinity become null, so that every JSON reader takes the file."""
    lines = [f'"header": {json.dumps(_finite(header), indent=1)}']
    for name, rows in tables.items():
        body = ",\n  ".join(json.dumps(_finite(row), allow_nan=False) for row in rows)
        lines.append(f'"{name}": [\n  {body}\n]' if rows else f'"{name}": []')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Columns of ``rows`` aligned under their names; a missing value is a dash."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    lines = [list(columns), *cells]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return str(value)
