"""Microseconds per launch on cold weights inside a CUDA graph, beside the cold-stream floor of the same experts.

    python -m benchmarks.h200_speed [--quick] [--out FOLDER] [--commit HASH] [--entry SUBSTRING] [--replays N]

Run it from the repository root. Needs 22 GB of GPU memory. Writes ``h200_speed.json``, prints a table, exits with 1 if a sanity check
failed (the figures are still written, with the reasons beside them).

A graph holds 32 launches. Each reads other layers' weights out of a pool of 20 GB, and its own random experts, all distinct where
there are enough. The floor reads exactly those experts' w13 and w2 bytes once, with the best of several plain stream kernels,
in a graph of the same shape, without programmatic dependent launch, in the same process.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megamoe_aot.arch import runs_on
from megamoe_aot.kernel import Kernel
from megamoe_aot.layer import Layer
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.menu import TOKEN_COUNTS
from megamoe_aot.spec import KernelSpec

from . import environment, report
from .cuda_checks import load
from .floor import VARIANTS, FloorKernels, Region, Variant, words_sum
from .harness import LOGITS_DTYPES, Inputs, Outputs, enqueue, run, same
from .picks import bias_for, logits_for, random_picks
from .pool import WeightLayer, expert_bytes, layers_of, random_weights
from .timing import Timing, capture, time_graph

FILE_NAME = "h200_speed.json"
ROW_COLUMNS = ("entry", "tokens", "pdl", "ours_us", "floor_us", "ratio", "floor_variant", "unique_experts", "megabytes", "ok")
LAUNCHES = 32
POOL_BYTES = 20 * 10**9
COLD_BYTES = 300 * 10**6
"""Bytes that are read between two uses of one layer, at least: five times the L2 of an H200."""
CEILING_BYTES = 10**9
CEILING_SLACK = 1.05
FASTEST_RATIO = 0.95
"""Below this share of the floor a measurement is not believed: the weights were not cold, or not all read."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What one graph reads: the picks of every launch, the same for the floor and for every entry of a model shape."""

    tokens: int
    picks: torch.Tensor
    """INT64 [LAUNCHES, M, K]."""

    @property
    def unique(self) -> list[list[int]]:
        """The experts of each launch, each once, in the order in which the routes name them."""
        return [list(dict.fromkeys(launch.flatten().tolist())) for launch in self.picks]


def main() -> int:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help=f"folder for {FILE_NAME}")
    parser.add_argument("--commit", help="the commit that is measured, for the header")
    parser.add_argument("--entry", default="", help="only entries whose name contains this")
    parser.add_argument("--replays", type=int, default=25, help="timed replays of each graph; the median counts")
    parser.add_argument("--quick", action="store_true", help="one and four tokens only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: there is nothing to time")

    manifest = Manifest.load()
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    entries = [e for e in manifest.entries if runs_on(e.spec.arch, capability) and arguments.entry in e.spec.name]
    if not entries:
        sys.exit(f"no entry of {manifest.folder} runs on capability {capability} with {arguments.entry!r} in its name")
    tokens = (1, 4) if arguments.quick else TOKEN_COUNTS
    header = environment.header(device, manifest, arguments.commit)
    rows: list[dict[str, Any]] = []
    floors: list[dict[str, Any]] = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        bench = Bench(device, arguments.replays)
        for shape in dict.fromkeys(model_shape(entry.spec) for entry in entries):
            members = [entry for entry in entries if model_shape(entry.spec) == shape]
            bench.shape(members, tokens, rows, floors)
            header["clocks_under_load"] = bench.clocks
            report.write_json(arguments.out / FILE_NAME, header, rows=rows, floors=floors)
    return summarise(rows, floors)


def model_shape(spec: KernelSpec) -> tuple[int, int, int, int]:
    """What decides which bytes a launch reads."""
    return spec.hidden, spec.inter, spec.experts, spec.top_k


class Bench:
    """The weight pool and the floor kernels of one device, and the measurements made with them."""

    def __init__(self, device: torch.device, replays: int) -> None:
        self.device = device
        self.replays = replays
        self.pool = random_weights(POOL_BYTES, device)
        self.kernels = FloorKernels(device)
        self.clocks: dict[str, str] = {}

    def shape(self, entries: Sequence[Entry], tokens: Sequence[int], rows: list[dict[str, Any]], floors: list[dict[str, Any]]) -> None:
        """Measure the floors of one model shape, then each of its entries; append to ``rows`` and ``floors``."""
        spec, model = entries[0].spec, f"{entries[0].model} {entries[0].parallel}"
        layers = layers_of(self.pool, spec, LAUNCHES)
        ceiling = self.ceiling(layers[0], spec)
        floors.append(
            {"model": model, "tokens": None, "variant": "whole layer", "gigabytes_per_second": ceiling, "ok": True, "problems": []}
        )
        best: dict[int, dict[str, Any]] = {}
        loads = {count: Load(count, random_picks(LAUNCHES, count, spec.top_k, spec.experts, seed=count)) for count in tokens}
        for count, load_ in loads.items():
            measured = [self.floor(variant, load_, layers, spec, ceiling) | {"model": model} for variant in VARIANTS]
            floors.extend(measured)
            best[count] = min(measured, key=lambda row: row["us"])
            print(f"{model}, M = {count}: floor {best[count]['us']:.2f} us ({best[count]['variant']})", flush=True)
        for entry in entries:
            start = time.perf_counter()
            kernel = load(entry.spec, self.device)
            bound = [kernel.bind(*layer.tensors) for layer in layers_of(self.pool, entry.spec, LAUNCHES)]
            for load_ in loads.values():
                rows.extend(self.entry(entry, kernel, bound, load_, best[load_.tokens]))
            print(f"{entry.spec.name}: {time.perf_counter() - start:.1f} s", flush=True)

    # -------------------------------------------------------------------------------------------------------------- Floor

    def floor(self, variant: Variant, load_: Load, layers: list[WeightLayer], spec: KernelSpec, ceiling: float) -> dict[str, Any]:
        """Time one stream kernel over the experts of every launch."""
        launches = [
            self.kernels.prepare(variant, [regions(layers[number % len(layers)], spec, expert) for expert in unique])
            for number, unique in enumerate(load_.unique)
        ]
        problems = cold(load_, layers, spec)
        want = words_sum([part for expert in load_.unique[0] for part in expert_parts(layers[0], spec, expert)])
        if (got := launches[0].words_sum()) != want:
            problems.append(f"the words read add up to {got:#x}, the experts' words to {want:#x}")

        def enqueue_all() -> None:
            for launch in launches:
                launch.enqueue()

        timing = time_graph(capture(enqueue_all), LAUNCHES, self.replays)
        bytes_ = mean_bytes(load_, spec)
        speed = bytes_ / timing.median / 1e3
        if speed > ceiling * CEILING_SLACK:
            problems.append(f"{speed:.0f} GB/s is more than the {ceiling:.0f} GB/s of one long read: the bytes were not cold")
        return {
            "tokens": load_.tokens,
            "variant": variant.name,
            "us": timing.median,
            "best_us": timing.best,
            "worst_us": timing.worst,
            "bytes": bytes_,
            "gigabytes_per_second": speed,
            "ok": not problems,
            "problems": problems,
        }

    def ceiling(self, layer: WeightLayer, spec: KernelSpec) -> float:
        """GB/s of one long launch over most of a layer, the best variant: what no floor can beat."""
        count = min(spec.experts, CEILING_BYTES // sum(expert_bytes(spec)))
        experts = [regions(layer, spec, expert) for expert in range(count)]
        size = count * sum(expert_bytes(spec))
        times = []
        for variant in VARIANTS:
            launch = self.kernels.prepare(variant, experts)
            launch.enqueue()
            times.append(time_graph(capture(launch.enqueue), 1, self.replays).median)
        return size / min(times) / 1e3

    # --------------------------------------------------------------------------------------------------------------- Ours

    def entry(self, entry: Entry, kernel: Kernel, bound: list[Layer], load_: Load, floor: dict[str, Any]) -> list[dict[str, Any]]:
        """Time one entry at one token count, with PDL and without: two rows."""
        spec = kernel.spec
        inputs = self.inputs(spec, load_)
        outputs = [Outputs(spec, load_.tokens, self.device) for _ in inputs]
        eager = [run(bound[number % len(bound)], batch) for number, batch in enumerate(inputs)]
        rows = []
        for pdl in (True, False):

            def launches(count: int, pdl: bool = pdl) -> None:
                for number in range(count):
                    enqueue(bound[number % len(bound)], inputs[number], outputs[number], pdl=pdl)

            for output in outputs:
                output.poison()
            graph = capture(lambda: launches(LAUNCHES))
            timing = time_graph(graph, LAUNCHES, self.replays)
            problems = wrong_results(outputs, eager, load_) + not_believed(timing, floor)
            if load_.tokens == 1:
                half = time_graph(capture(lambda: launches(LAUNCHES // 2)), LAUNCHES // 2, self.replays)
                problems += not_linear(timing, half)
            if not self.clocks:
                self.clocks = clocks_under(graph, self.device)
            rows.append(
                {
                    "entry": spec.name,
                    "model": f"{entry.model} {entry.parallel}",
                    "arch": spec.arch,
                    "layout": spec.layout,
                    "w13_order": spec.w13_order,
                    "logits_dtype": spec.logits_dtype,
                    "tokens": load_.tokens,
                    "pdl": pdl,
                    "ours_us": timing.median,
                    "ours_best_us": timing.best,
                    "ours_worst_us": timing.worst,
                    "floor_us": floor["us"],
                    "floor_variant": floor["variant"],
                    "ratio": timing.median / floor["us"],
                    "cluster": spec.cluster,
                    "active_clusters": kernel.active_clusters,
                    "launches": LAUNCHES,
                    "replays": self.replays,
                    "unique_experts": sum(map(len, load_.unique)) / LAUNCHES,
                    "bytes": floor["bytes"],
                    "megabytes": floor["bytes"] / 1e6,
                    "ok": not problems,
                    "problems": problems,
                }
            )
        return rows

    def inputs(self, spec: KernelSpec, load_: Load) -> list[Inputs]:
        """Random tokens and logits that choose the picks, a batch per launch."""
        generator = torch.Generator().manual_seed(load_.tokens)
        x = torch.randn(LAUNCHES, load_.tokens, spec.hidden, generator=generator).bfloat16().to(self.device)
        logits = logits_for(load_.picks, spec.experts, seed=load_.tokens).to(LOGITS_DTYPES[spec.logits_dtype]).to(self.device)
        bias = None if spec.scoring == "softmax" else bias_for(spec.experts, seed=0).to(self.device)
        return [Inputs(x[number], logits[number], bias) for number in range(LAUNCHES)]


def clocks_under(graph: torch.cuda.CUDAGraph, device: torch.device, seconds: float = 2.0) -> dict[str, str]:
    """nvidia-smi's clocks while the graph is being replayed; the replays are queued first, so that the GPU stays busy meanwhile."""
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    for _ in range(int(seconds / (time.perf_counter() - start))):
        graph.replay()
    smi = environment.nvidia_smi(device.index)
    torch.cuda.synchronize()
    return {"sm": smi["clocks.sm"], "memory": smi["clocks.mem"]}


# ---------------------------------------------------------------------------------------------------------------- Bytes and sanity


def expert_parts(layer: WeightLayer, spec: KernelSpec, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's w13 and w2 on the device; contiguous in both layouts."""
    return layer.w13[expert], layer.w2[expert]


def regions(layer: WeightLayer, spec: KernelSpec, expert: int) -> tuple[Region, Region]:
    """Where one expert's w13 and w2 lie."""
    w13, w2 = expert_parts(layer, spec, expert)
    sizes = expert_bytes(spec)
    return (w13.data_ptr(), sizes[0]), (w2.data_ptr(), sizes[1])


def mean_bytes(load_: Load, spec: KernelSpec) -> float:
    """Weight bytes that a launch must read, on average over the graph."""
    return sum(map(len, load_.unique)) / LAUNCHES * sum(expert_bytes(spec))


def cold(load_: Load, layers: Sequence[WeightLayer], spec: KernelSpec) -> list[str]:
    """Whether enough other bytes are read before a layer's turn comes again."""
    between = (len(layers) - 1) * mean_bytes(load_, spec)
    return (
        []
        if between >= COLD_BYTES
        else [f"only {between / 1e6:.0f} MB are read between two uses of a layer: its experts may still be in L2"]
    )


def wrong_results(outputs: Sequence[Outputs], eager: Sequence[Outputs], load_: Load) -> list[str]:
    """The timed launches did the work: every output written, the wanted experts chosen, the bits of eager launches."""
    problems = []
    for number, (got, want) in enumerate(zip(outputs, eager, strict=True)):
        if not bool(got.out.isfinite().all() & got.weights.isfinite().all()):
            problems.append(f"launch {number}: outputs are not finite")
        if not torch.equal(got.ids.cpu().long().sort(-1).values, load_.picks[number].sort(-1).values):
            problems.append(f"launch {number}: the experts are not those that its logits name")
        if not same(got, want):
            problems.append(f"launch {number}: other bits than an eager launch")
    return problems


def not_believed(timing: Timing, floor: dict[str, Any]) -> list[str]:
    """Faster than the floor by more than the noise cannot be."""
    ratio = timing.median / floor["us"]
    return [] if ratio >= FASTEST_RATIO else [f"{ratio:.2f} of the floor: the weights were not cold, or not all of them were read"]


def not_linear(whole: Timing, half: Timing) -> list[str]:
    """A launch costs the same in a graph of half as many, but for the share of the graph's own start (a few microseconds)."""
    ratio = half.median / whole.median
    return (
        []
        if 0.9 <= ratio <= 1.15
        else [f"a launch takes {half.median:.2f} us in a graph of half as many: time does not follow the launches"]
    )


def summarise(rows: Sequence[dict[str, Any]], floors: Sequence[dict[str, Any]]) -> int:
    """Print what failed, then the table; the exit status."""
    failed = [line for line in [*floors, *rows] if not line["ok"]]
    for line in failed:
        print(
            f"FAILED {line.get('entry', line.get('model'))}, M = {line['tokens']}, {line.get('variant', '')}:",
            *line["problems"][:4],
            sep="\n    ",
        )
    print(report.table(rows, ROW_COLUMNS))
    print(f"{len(rows)} rows, {len(floors)} floors: {len(failed)} failed a sanity check")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
