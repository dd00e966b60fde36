"""``validated_on``: which GPU ran exactly this cubin, taken from the results of benchmarks/h200_correctness.py."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

from megamoe_aot.manifest import Manifest

from .lock import Lock


def validated(lock: Lock, manifest: Manifest, results: Path) -> Lock:
    """``lock`` with the GPU of a correctness run added to every code of which all measured entries passed.

    Raises ValueError where the run was of another build, or anything in it failed.
    """
    data = json.loads(results.read_text())
    header = data["header"]
    if header["build_id"] != manifest.build_id:
        raise ValueError(f"{results} measured build {header['build_id'][:16]}, artifacts/ holds {manifest.build_id[:16]}")
    if failed := sorted({line["entry"] for line in [*data["rows"], *data["checks"]] if not line["ok"]}):
        raise ValueError(f"{results} has failures for {', '.join(failed)}")
    machine = f"{header['gpu']}, driver {header['driver']}, {header['date'][:10]}"
    passed = {row["entry"] for row in data["rows"]}
    entries = defaultdict(list)
    for entry in manifest.entries:
        entries[entry.cubin].append(entry.spec.name)
    complete = {cubin for cubin, names in entries.items() if passed.issuperset(names)}
    codes = {
        name: dataclasses.replace(code, validated_on=(*code.validated_on, machine))
        if code.cubin in complete and machine not in code.validated_on
        else code
        for name, code in lock.codes.items()
    }
    return dataclasses.replace(lock, codes=codes)
