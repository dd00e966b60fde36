"""Golden files: what an H200 makes of fixed inputs, kept in git so that the emulator can be held against it anywhere.

    python -m verification.golden [--out FOLDER] [--commit HASH]

Run it from the repository root on a machine with a Hopper GPU. Every Hopper cluster entry of the manifest runs SEEDS random inputs and the
hard inputs, one token each. Inputs are not stored: seed and case say how ``tests/data.py`` makes them (weights are always those of seed 0).

| file | what |
|---|---|
| ``golden.json`` | header, and one row per entry and call: ids, weights (FP32 bits), a hash of each ``out`` row |
| ``<entry>.<first>-<last>.npz`` | entries of WHOLE: ``seeds`` [n] and ``out`` uint16 [n, K, H], BF16 bits |
| ``<entry>.hard.npz`` | the same entries: ``cases`` [n] and ``out`` uint16 [n, H] of route 0, which the damage is aimed at |
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import checks, cuda_checks, environment, report
from benchmarks.expected import Call, Oracle
from benchmarks.harness import run
from megamoe_aot.arch import runs_on
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.spec import KernelSpec
from megamoe_aot.weights import Packed

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "verification" / "golden"
FILE_NAME = "golden.json"
SEEDS = tuple(range(20))
SEEDS_PER_FILE = 10
"""Keeps every file below 1 MiB."""
WHOLE = (
    "moe_h4096_i512_e288_k8_sigmoid_bias_row_major_bf16_sm_90a_gate_up",
    "moe_h2048_i768_e128_k8_softmax_trtllm_gen_fp32_sm_90a",
)
"""Entries whose outputs are stored and not only hashed: both models, both layouts, both logits dtypes."""


@dataclasses.dataclass(frozen=True)
class GoldenCall:
    """What the GPU returned for one call of one entry."""

    entry: str
    """``KernelSpec.name``."""
    call: Call
    ids: np.ndarray
    """int32 [K]."""
    weights: np.ndarray
    """float32 [K]."""
    hashes: tuple[str, ...]
    """:func:`row_hash` of each of the K rows of ``out``."""

    def row(self) -> dict[str, Any]:
        """As a row of golden.json."""
        return {
            "entry": self.entry,
            "seed": self.call.seed,
            "case": self.call.case,
            "ids": self.ids.tolist(),
            "weights": self.weights.view(np.uint32).tolist(),
            "out": list(self.hashes),
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> GoldenCall:
        """Inverse of :meth:`row`."""
        return cls(
            row["entry"],
            Call(1, row["seed"], row["case"]),
            np.array(row["ids"], np.int32),
            np.array(row["weights"], np.uint32).view(np.float32),
            tuple(row["out"]),
        )


def row_hash(bits: np.ndarray) -> str:
    """16 hex digits of the sha256 of one row's BF16 bits, uint16 [H]."""
    return hashlib.sha256(np.ascontiguousarray(bits, "<u2").tobytes()).hexdigest()[:16]


def out_bits(out: torch.Tensor) -> np.ndarray:
    """BF16 tensor -> uint16 array of the same shape."""
    return out.contiguous().view(torch.int16).numpy().view(np.uint16)


# --------------------------------------------------------------------------------------------------------------------- Reading


class Golden:
    """The golden files of a folder. Raises FileNotFoundError with the command that makes them."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        path = folder / FILE_NAME
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; make it on a Hopper GPU: python -m verification.golden")
        data = json.loads(path.read_text())
        self.header: dict[str, Any] = data["header"]
        self.calls = [GoldenCall.of_row(row) for row in data["rows"]]

    def check_cubin(self, entry: Entry) -> None:
        """Raise ValueError unless the entry's cubin is the one that ran on the GPU."""
        ran = self.header["cubins"].get(entry.spec.name)
        if ran != entry.cubin:
            raise ValueError(
                f"the golden files hold what cubin {ran} computed, the artifacts hold cubin {entry.cubin} for {entry.spec.name}; "
                "build the commit of the golden files, or make new ones on a Hopper GPU: python -m verification.golden"
            )

    def of_entry(self, name: str) -> list[GoldenCall]:
        """All calls of one entry."""
        return [call for call in self.calls if call.entry == name]

    @functools.cached_property
    def _rows(self) -> dict[tuple[str, int, str], np.ndarray]:
        """(entry, seed, case) -> uint16 [rows, H], the first rows of ``out``."""
        found: dict[tuple[str, int, str], np.ndarray] = {}
        for path in sorted(self.folder.glob("*.npz")):
            name = path.name.rsplit(".", 2)[0]
            with np.load(path, allow_pickle=False) as file:
                if "seeds" in file:
                    found |= {(name, int(seed), ""): out for seed, out in zip(file["seeds"], file["out"], strict=True)}
                else:
                    found |= {(name, 0, str(case)): out[None] for case, out in zip(file["cases"], file["out"], strict=True)}
        return found

    def out(self, call: GoldenCall, route: int) -> np.ndarray | None:
        """uint16 [H], BF16 bits of one row; None where only its hash was stored."""
        rows = self._rows.get((call.entry, call.call.seed, call.call.case))
        return rows[route] if rows is not None and route < len(rows) else None


# ------------------------------------------------------------------------------------------------------------- Making, on a GPU


def calls_of(spec: KernelSpec) -> list[Call]:
    """The calls that are recorded of an entry."""
    return [Call(1, seed) for seed in SEEDS] + [Call(1, 0, case) for case in checks.hard_cases(spec)]


def record(entries: list[Entry], device: torch.device) -> Iterator[tuple[Entry, list[tuple[GoldenCall, np.ndarray]]]]:
    """Run every call of every entry: (entry, [(call, out bits uint16 [K, H])])."""

    @functools.lru_cache(maxsize=1)
    def packed(shape: KernelSpec) -> Packed:
        return Oracle(shape, pool).weights_problem().packed(layout=shape.layout, w13_order=shape.w13_order, device=device)

    with ThreadPoolExecutor(1) as pool, torch.cuda.stream(torch.cuda.Stream(device)):
        for entry in entries:
            spec = entry.spec
            weights = packed(dataclasses.replace(spec, logits_dtype="bf16"))  # both logits dtypes have the same weights
            kernel = cuda_checks.load(spec, device)
            subject = checks.Subject(kernel, weights, Oracle(spec, pool), kernel.bind(*weights))
            yield entry, [record_call(subject, call) for call in calls_of(spec)]


def record_call(subject: checks.Subject, call: Call) -> tuple[GoldenCall, np.ndarray]:
    """Launch one call."""
    damage = checks.damaged_expert(subject, call.case) if call.case else contextlib.nullcontext()
    with damage:
        out, ids, weights = run(subject.layer, subject.inputs(call)).cpu()
    bits = out_bits(out)
    return GoldenCall(subject.spec.name, call, ids[0].numpy(), weights[0].numpy(), tuple(map(row_hash, bits))), bits


def write_outputs(folder: Path, name: str, recorded: list[tuple[GoldenCall, np.ndarray]]) -> None:
    """The npz files of one entry."""
    plain = [(golden.call.seed, bits) for golden, bits in recorded if not golden.call.case]
    for at in range(0, len(plain), SEEDS_PER_FILE):
        seeds, outs = zip(*plain[at : at + SEEDS_PER_FILE], strict=True)
        np.savez_compressed(folder / f"{name}.{seeds[0]:02}-{seeds[-1]:02}.npz", seeds=np.array(seeds), out=np.stack(outs))
    hard = [(golden.call.case, bits[0]) for golden, bits in recorded if golden.call.case]
    cases, rows = zip(*hard, strict=True)
    np.savez_compressed(folder / f"{name}.hard.npz", cases=np.array(cases), out=np.stack(rows))


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the files (default: the one in git)")
    parser.add_argument("--commit", help="the commit that is measured, for the header")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: golden files are made on a Hopper GPU. To compare the emulator with those in git: verification.agreement")
    manifest = Manifest.load()
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    entries = [e for e in manifest.entries if e.spec.structure == "cluster" and e.spec.arch == "sm_90a" and runs_on("sm_90a", capability)]
    entries.sort(key=lambda e: (e.model, e.spec.layout, e.spec.w13_order))  # neighbours share their weights
    if not {e.spec.name for e in entries} >= set(WHOLE):
        sys.exit(f"{manifest.folder} has no entries {WHOLE} that run on capability {capability}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for entry, recorded in record(entries, device):
        rows += [golden.row() for golden, _ in recorded]
        if entry.spec.name in WHOLE:
            write_outputs(arguments.out, entry.spec.name, recorded)
        print(f"{entry.spec.name}: {len(recorded)} calls", flush=True)
    header = environment.header(device, manifest, arguments.commit) | {"cubins": {e.spec.name: e.cubin for e in entries}}
    report.write_json(arguments.out / FILE_NAME, header, rows=rows)
    for path in sorted(arguments.out.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
