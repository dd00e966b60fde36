"""The prototype on a GPU: agreement with the reference, repeatability, and time beside the floor and the cluster kernel.

python -m prototypes.work_list.build && python -m prototypes.work_list.bench [--out FOLDER] [--commit HASH]
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, h200_speed, report
from benchmarks.harness import Inputs, Outputs, bits
from benchmarks.picks import random_picks
from benchmarks.pool import layers_of
from megamoe_aot.agreement import compare
from megamoe_aot.manifest import Manifest
from megamoe_aot.menu import TOKEN_COUNTS
from megamoe_aot.spec import KernelSpec
from tests.data import Problem

from .build import TOKEN_CLASSES, specs
from .host import ListKernel

FILE_NAME = "work_list.json"
REPEATS = 20


def agreement(spec: KernelSpec, device: torch.device) -> list[dict[str, Any]]:
    """Rows of relative error against the reference (tokens as columns: K ascending, no split) and of repeatability."""
    packed = Problem.of(spec, 0).packed(layout=spec.layout, w13_order=spec.w13_order, device=device)
    layer = ListKernel(spec, device).bind(packed.w13, packed.w13_scale, packed.w2, packed.w2_scale)
    rows = []
    for tokens in (1, 3, min(spec.tokens, 8)):
        problem = Problem.of(spec, tokens)
        bias = problem.bias()
        inputs = Inputs(problem.x(), problem.logits(torch.bfloat16), bias).to(device)
        outputs = Outputs(spec, tokens, device)
        seen = []
        for _ in range(REPEATS):
            outputs.poison()
            layer(inputs.x, inputs.logits, inputs.bias, out=outputs.out, ids=outputs.ids, weights=outputs.weights)
            torch.cuda.synchronize()
            seen.append(bits(outputs.out).clone())
        found = compare(
            problem.reference(logits_dtype=torch.bfloat16, arithmetic="hopper", order="ascending", parts=1),
            outputs.out,
            outputs.ids,
            outputs.weights,
        )
        rows.append(
            {
                "entry": spec.name,
                "columns": spec.tokens,
                "tokens": tokens,
                "worst_route": found.worst_error,
                "ids_equal": found.ids_equal,
                "repeats_equal": all(torch.equal(seen[0], s) for s in seen),
                "ok": found.ok,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(h200_speed.__file__).parent / "results")
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    manifest = Manifest.load()
    header = environment.header(device, manifest, arguments.commit)
    checked = [row for spec in specs() for row in agreement(spec, device)]
    rows: list[dict[str, Any]] = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        bench = h200_speed.Bench(device, 25)
        for spec in specs():
            if spec.tokens != max(TOKEN_CLASSES):
                continue
            entry = next(e for e in manifest.entries if e.spec.name == spec.name)
            layers = layers_of(bench.pool, spec, h200_speed.LAUNCHES)
            ceiling = bench.ceiling(layers[0], spec)
            clusters = h200_speed.load(entry.spec, device)
            for tokens in TOKEN_COUNTS:
                load = h200_speed.Load(tokens, random_picks(h200_speed.LAUNCHES, tokens, spec.top_k, spec.experts, seed=tokens))
                floor = min((bench.floor(v, load, layers, spec, ceiling) for v in h200_speed.VARIANTS), key=lambda row: row["us"])
                narrow = dataclasses.replace(spec, tokens=next(c for c in TOKEN_CLASSES if tokens <= c))
                for structure, kernel in (("cluster", clusters), ("list", ListKernel(narrow, device))):
                    bound = [kernel.bind(*layer.tensors) for layer in layers]
                    for row in bench.entry(entry, kernel, bound, load, floor):
                        rows.append(row | {"structure": structure, "cluster": spec.cluster if structure == "cluster" else 0})
                    print(
                        f"{spec.name} M = {tokens} {structure}: {rows[-2]['ours_us']:.2f} us with PDL, floor {floor['us']:.2f}", flush=True
                    )
    header["clocks_under_load"] = bench.clocks
    report.write_json(arguments.out / FILE_NAME, header, agreement=checked, rows=rows)
    print(report.table(rows, ("entry", "structure", "tokens", "pdl", "ours_us", "floor_us", "ratio", "ok")))
    return 0 if all(row["ok"] for row in [*rows, *checked]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
