"""Hold the emulator against an H200: the same inputs, the PTX of the same cubins, bit by bit.

    python -m verification agreement [--entry SUBSTRING] [--jobs N] [--golden FOLDER] [--out FILE]

Per route, ``out`` is compared with the golden file's row or its hash. Elements that differ must be traced to an approximate instruction:
PTX promises ``ex2.approx`` within 2 ulp, the emulator computes it correctly rounded. A difference counts as explained where the GPU's
value lies within what the emulator itself computes when those results are moved by up to that many ulp. Exit status 1 where less than
99.9 % of an entry's elements are equal, a difference is unexplained, ids differ or weights are further off than the approximations allow.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_json
from emulator import OFF, Arithmetic
from kernels.build.ptx import census
from megamoe_aot.manifest import Manifest

from . import results
from .golden import FOLDER, WHOLE, Golden, GoldenCall, out_bits, row_hash
from .problem import EmulatedCall
from .run import console_for_tables, ptx_of

OUT = results.FOLDER / "emulator_agreement.json"
EQUAL_SHARE = 0.999
APPROXIMATE = {"ex2.approx.ftz.f32": 2}
"""Approximate instructions of our kernels -> the error that PTX allows, in ulp."""
WEIGHT_ULPS = 8
"""A weight is a quotient of sums of exponentials: 2 ulp above and 2 below, each up to 2 ulp of the result, are 8."""
TRIALS = 12
"""Runs with moved approximations per ulp, before a difference counts as unexplained."""
SEED = 0
"""Of the emulator's schedule; results do not depend on it."""

EmulateRow = Callable[[int, int], np.ndarray]
"""(ulps, seed) -> uint16 [H], the BF16 bits of one route's ``out`` with approximations moved by up to ``ulps``."""


def approximate_opcodes(ptx: str) -> list[str]:
    """The approximate instructions of a kernel. Raises ValueError for one whose error is not in APPROXIMATE."""
    found = sorted(opcode for opcode in census(ptx) if ".approx" in opcode or ".full" in opcode)
    if unknown := set(found) - APPROXIMATE.keys():
        raise ValueError(f"no documented error for {sorted(unknown)}; add it to APPROXIMATE after reading the PTX manual")
    return found


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 BF16 bits -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def explain(got: np.ndarray, want: np.ndarray, emulate_row: EmulateRow) -> tuple[int, int]:
    """(elements explained, smallest ulp error that explains them all, else the largest tried), for the places where two rows differ.

    ``got``: the GPU's row, ``want``: the emulator's, uint16 [H].
    """
    different = got != want
    value = bf16_values(got)
    low = high = bf16_values(want)
    explained = np.zeros_like(different)
    for ulps in range(1, max(APPROXIMATE.values()) + 1):
        for seed in range(TRIALS):
            moved = bf16_values(emulate_row(ulps, seed))
            low, high = np.fmin(low, moved), np.fmax(high, moved)
            explained = different & (low <= value) & (value <= high)
            if explained.sum() == different.sum():
                return int(explained.sum()), ulps
    return int(explained.sum()), ulps


# ---------------------------------------------------------------------------------------------------------------- One golden call


@dataclasses.dataclass
class Tally:
    """What was compared, over the calls of one entry."""

    calls: int = 0
    routes: int = 0
    elements: int = 0
    equal: int = 0
    explained: int = 0
    unexplained: int = 0
    ids_different: int = 0
    weights: int = 0
    weights_equal: int = 0
    weights_worst_ulps: int = 0
    differences: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """One record per route that differs: where, how many elements, how many explained, by which instruction and how many ulp."""

    @property
    def share(self) -> float:
        """Bitwise equal elements of ``out``."""
        return self.equal / self.elements

    @property
    def problems(self) -> list[str]:
        """Broken rules, in words."""
        found = []
        if self.share < EQUAL_SHARE:
            found.append(f"{self.share:.4%} of the elements are equal, at least {EQUAL_SHARE:.1%} must be")
        if self.unexplained:
            found.append(f"{self.unexplained} elements differ and no approximate instruction explains it")
        if self.ids_different:
            found.append(f"{self.ids_different} expert ids differ")
        if self.weights_worst_ulps > WEIGHT_ULPS:
            found.append(f"a weight is {self.weights_worst_ulps} ulp off, at most {WEIGHT_ULPS} are allowed")
        return found


def compare_call(
    tally: Tally, golden: Golden, recorded: GoldenCall, call: EmulatedCall, ptx: str, routes: Sequence[int], jobs: int = 1
) -> None:
    """Emulate some routes of a call that the GPU ran, and add them to the tally."""
    outcome = call.emulate(ptx, routes, seed=SEED, checks=OFF, jobs=jobs)
    bits = out_bits(outcome.out)
    tally.calls += 1
    for route in routes:
        tally.routes += 1
        tally.ids_different += int(outcome.ids[0, route] != recorded.ids[route])
        _compare_weight(tally, float(outcome.weights[0, route]), float(recorded.weights[route]))
        tally.elements += bits.shape[1]
        if row_hash(bits[route]) == recorded.hashes[route]:
            tally.equal += bits.shape[1]
        else:
            _compare_row(tally, golden.out(recorded, route), bits[route], recorded, call, ptx, route)


def _compare_weight(tally: Tally, got: float, want: float) -> None:
    both = np.array([got, want], np.float32)
    tally.weights += 1
    if both[:1].tobytes() == both[1:].tobytes():
        tally.weights_equal += 1
        return
    apart = np.diff(both.view(np.int32).astype(np.int64))
    tally.weights_worst_ulps = max(tally.weights_worst_ulps, int(abs(apart[0])))


def _compare_row(
    tally: Tally, want: np.ndarray | None, row: np.ndarray, recorded: GoldenCall, call: EmulatedCall, ptx: str, route: int
) -> None:
    """A row whose hash differs; without the GPU's values every element of it counts as unexplained."""

    def emulate_row(ulps: int, seed: int) -> np.ndarray:
        return out_bits(call.emulate(ptx, [route], seed=seed, checks=OFF, arithmetic=Arithmetic(approx_ulps=ulps)).out[route])

    where = {"seed": recorded.call.seed, "case": recorded.call.case, "route": route}
    if want is None:
        tally.unexplained += len(row)
        tally.differences.append(where | {"elements": None, "explained": 0, "instruction": None, "ulps": None})
        return
    count = int((want != row).sum())
    explained, ulps = explain(want, row, emulate_row)
    tally.equal += len(row) - count
    tally.explained += explained
    tally.unexplained += count - explained
    opcodes = ", ".join(approximate_opcodes(ptx))
    tally.differences.append(where | {"elements": count, "explained": explained, "instruction": opcodes, "ulps": ulps})


# ------------------------------------------------------------------------------------------------------------------- The whole run

HASHED_SEEDS, HASHED_ROUTES = 2, (0, 5)
"""What is emulated of the entries of which golden.json holds only hashes."""


def routes_of(recorded: GoldenCall) -> Sequence[int]:
    """Which routes of a golden call the run emulates: of WHOLE entries everything whose values are stored."""
    if recorded.entry in WHOLE:
        return (0,) if recorded.call.case else range(len(recorded.ids))
    return HASHED_ROUTES if not recorded.call.case and recorded.call.seed < HASHED_SEEDS else ()


def compare_entries(golden: Golden, manifest: Manifest, part: str, jobs: int, console: Console) -> Iterator[dict[str, Any]]:
    """One row per entry and kind of input (random, hard)."""
    for entry in manifest.entries:
        name = entry.spec.name
        if part not in name or not golden.of_entry(name):
            continue
        golden.check_cubin(entry)
        ptx = ptx_of(manifest, entry)
        opcodes = approximate_opcodes(ptx)
        for kind in ("random", "hard"):
            tally = Tally()
            for recorded in golden.of_entry(name):
                routes = routes_of(recorded)
                if bool(recorded.call.case) == (kind == "hard") and routes:
                    compare_call(tally, golden, recorded, EmulatedCall(entry.spec, recorded.call), ptx, routes, jobs)
                    console.print(
                        f"{name} {recorded.call.case or recorded.call.seed}: {tally.equal} of {tally.elements} equal", highlight=False
                    )
            if tally.calls:
                yield row(name, entry.cubin, kind, opcodes, tally)


def row(name: str, cubin: str, kind: str, opcodes: Sequence[str], tally: Tally) -> dict[str, Any]:
    """One line of the results."""
    return {
        "entry": name,
        "cubin": cubin,
        "kind": kind,
        "inputs": tally.calls,
        "routes": tally.routes,
        "elements": tally.elements,
        "bitwise_equal": tally.equal,
        "share": tally.share,
        "explained": tally.explained,
        "unexplained": tally.unexplained,
        "ids_different": tally.ids_different,
        "weights": tally.weights,
        "weights_equal": tally.weights_equal,
        "weights_worst_ulps": tally.weights_worst_ulps,
        "approximate_instructions": {opcode: APPROXIMATE[opcode] for opcode in opcodes},
        "differences": tally.differences,
        "ok": not tally.problems,
        "problems": tally.problems,
    }


_COLUMNS = ("entry", "kind", "inputs", "routes", "elements", "bitwise_equal", "explained", "unexplained", "weights_worst_ulps", "ok")


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    shown = Table(*_COLUMNS, title="Emulator against the H200")
    for line in rows:
        shown.add_row(*(str(line[column]) for column in _COLUMNS))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m verification agreement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entry", default="", help="only entries whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--golden", type=Path, default=FOLDER, help="folder of the golden files")
    parser.add_argument("--out", type=Path, default=OUT, help="results file")
    chosen = parser.parse_args(arguments)
    golden, manifest, console = Golden(chosen.golden), Manifest.load(), console_for_tables()
    known = ("date", "gpu", "driver", "driver_cuda", "commit", "packages")
    header = results.header(manifest) | {"golden": {name: golden.header.get(name) for name in known}}
    rows = []
    for line in compare_entries(golden, manifest, chosen.entry, chosen.jobs, console):
        rows.append(line)
        write_json(chosen.out, header, rows=rows)
    if not rows:
        parser.error(f"neither {golden.folder} nor the artifacts have an entry with {chosen.entry!r} in its name")
    console.print(table(rows))
    for line in rows:
        console.print(*(f"FAILED {line['entry']} ({line['kind']}): {problem}" for problem in line["problems"]), sep="\n", end="")
    return 0 if all(line["ok"] for line in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
