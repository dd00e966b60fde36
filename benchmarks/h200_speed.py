"""Microseconds per launch on cold weights inside a CUDA graph, beside the cold-stream floor of the same experts.

    python -m benchmarks.h200_speed [--shapes ABCDE] [--tokens 1 2 4 8 16] [--layout row_major | --all-entries]
                                    [--breakdown] [--replays N] [--out FOLDER] [--commit HASH]

Run it from the repository root. Needs 24 GB of GPU memory. Writes ``h200_speed.json`` after every token count, prints a table, exits
with 1 if a sanity check failed (the figures are still written, with the reasons beside them).

A graph holds 32 launches. Each reads other layers' weights out of a pool of 20 GB, and its own random experts: every token draws
its own, so that tokens share some. The floor reads exactly those experts' w13 and w2 bytes once, with the best of several plain
stream kernels, in a graph of the same shape, without programmatic dependent launch, in the same process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import megamoe_aot as mm
from megamoe_aot import reference
from megamoe_aot.arch import runs_on
from megamoe_aot.kernel import Kernel
from megamoe_aot.layer import Layer
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.menu import DEEPSEEK_V3, LEAD, QWEN3_30B, QWEN3_235B, QWEN35_35B, TOKEN_COUNTS, specs_of
from megamoe_aot.spec import LAYOUTS, KernelSpec

from . import environment, report
from .breakdown import BreakdownError, Variants
from .cuda_source import allow_shared_memory, architecture, compile_cuda, launch_cuda
from .floor import VARIANTS, FloorKernels, Region, Variant, words_sum
from .harness import LOGITS_DTYPES, Inputs, Outputs, bits, enqueue, run, same
from .picks import bias_for, logits_for, random_picks
from .pool import WeightLayer, expert_bytes, layers_of, random_weights
from .timing import WARM_UP_SECONDS, Timing, capture, time_graph

FILE_NAME = "h200_speed.json"
ROW_COLUMNS = (
    *("shape", "layout", "logits_dtype", "structure", "tokens", "pdl", "trigger", "ours_us", "with_finalize_us", "floor_us"),
    *("ratio", "ratio_with_finalize", "floor_variant", "unique_experts", "ok"),
)
LETTERS = {LEAD.model: "A", DEEPSEEK_V3.model: "B", QWEN3_235B.model: "C", QWEN3_30B.model: "D", QWEN35_35B.model: "E"}
"""Model -> the letter of its shape."""
LAUNCHES = 32
POOL_BYTES = 20 * 10**9
COLD_BYTES = 300 * 10**6
"""Bytes that are read between two uses of one layer, at least: five times the L2 of an H200."""
CEILING_BYTES = 10**9
CEILING_SLACK = 1.05
FASTEST_RATIO = 0.95
"""Below this share of the floor a measurement is not believed: the weights were not cold, or not all read."""
SCREENING_REPLAYS = 5
SCREENING_SECONDS = 0.005
FINALISTS = 3
"""Every stream kernel has a short look; the floor is the best of so many that looked best, timed as our own launches are."""

Row = dict[str, Any]


class Form(NamedTuple):
    """One way to launch: a row for each token count."""

    structure: str
    pdl: bool
    trigger: bool = False

    @property
    def leading(self) -> bool:
        """Whether this is how a caller launches who says nothing else: the list's row with a breakdown."""
        return self.pdl and not self.trigger

    @property
    def summed(self) -> bool:
        """Whether the row has the time with finalize: of ``forward`` with the form's trigger."""
        return self.pdl


FORMS = (Form("list", True), Form("list", False), Form("list", True, trigger=True), Form("cluster", True))


@dataclasses.dataclass(frozen=True)
class Load:
    """What one graph reads: the picks of every launch, the same for the floor and for every entry of a model shape."""

    tokens: int
    picks: torch.Tensor
    """INT64 [LAUNCHES, M, K]."""

    @classmethod
    def of(cls, spec: KernelSpec, tokens: int) -> Load:
        """Random picks that the scoring of ``spec`` can choose."""
        shape = spec.top_k, spec.experts
        return cls(tokens, random_picks(LAUNCHES, tokens, *shape, seed=tokens, groups=spec.groups, top_groups=spec.top_groups))

    @property
    def unique(self) -> list[list[int]]:
        """The experts of each launch, each once, in the order in which the routes name them."""
        return [list(dict.fromkeys(launch.flatten().tolist())) for launch in self.picks]


@dataclasses.dataclass
class Results:
    """What has been measured so far, and the file it is kept in."""

    path: Path
    header: dict[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)
    floors: list[Row] = dataclasses.field(default_factory=list)

    def save(self) -> None:
        """Write everything: a run that is cut short keeps what it has."""
        report.write_json(self.path, self.header, rows=self.rows, floors=self.floors)


def main() -> int:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help=f"folder for {FILE_NAME}")
    parser.add_argument("--commit", help="the commit that is measured, for the header")
    parser.add_argument(
        "--shapes", default="ABCDE", help="letters of the model shapes: " + ", ".join(f"{v} {k}" for k, v in LETTERS.items())
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKEN_COUNTS))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="with BF16 logits (default: %(default)s)")
    which.add_argument("--all-entries", action="store_true", help="every layout and logits dtype")
    parser.add_argument("--breakdown", action="store_true", help="time the kernels of benchmarks/breakdown.py too")
    parser.add_argument("--replays", type=int, default=25, help="timed replays of each graph; the median counts")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: there is nothing to time")
    gc.freeze()  # each capture collects garbage: let it not go through everything that was imported
    results = measure(arguments, torch.device("cuda", torch.cuda.current_device()))
    return summarise(results.rows, results.floors)


def measure(arguments: argparse.Namespace, device: torch.device) -> Results:
    """The whole run. Exits where there is nothing to measure, or no breakdown though one was asked for."""
    manifest = Manifest.load()
    layouts = LAYOUTS if arguments.all_entries else (arguments.layout,)
    dtypes = tuple(LOGITS_DTYPES) if arguments.all_entries else ("bf16",)
    models = cases(manifest, torch.cuda.get_device_capability(device), arguments.shapes, layouts, dtypes)
    if not models:
        sys.exit(f"{manifest.folder} has nothing of {arguments.shapes} in {' or '.join(layouts)} for this GPU")
    try:
        variants = Variants(manifest) if arguments.breakdown else None
    except BreakdownError as error:
        sys.exit(str(error))
    results = Results(arguments.out / FILE_NAME, environment.header(device, manifest, arguments.commit))
    with torch.cuda.stream(torch.cuda.Stream(device)):
        bench = Bench(device, arguments.replays, variants)
        results.header["empty_launch_us"] = empty_launches(device, arguments.replays)
        for members in models:
            bench.shape(members, sorted(arguments.tokens), results)
    return results


def cases(
    manifest: Manifest,
    capability: tuple[int, int],
    letters: str,
    layouts: Sequence[str] = LAYOUTS[:1],
    dtypes: Sequence[str] = ("bf16",),
) -> list[list[Entry]]:
    """For each model shape one entry per weight format and logits dtype, the shape's first entry first.

    The entries of one format differ in structure and columns; the first stands for all, since load_kernel finds the others.
    """
    found: dict[str, dict[tuple[str, str, str], Entry]] = {}
    for entry in manifest.entries:
        spec = entry.spec
        if not runs_on(spec.arch, capability) or LETTERS.get(entry.model, "") not in letters:
            continue
        if spec.layout in layouts and spec.logits_dtype in dtypes:
            found.setdefault(entry.title, {}).setdefault((spec.layout, spec.w13_order, spec.logits_dtype), entry)
    return [list(members.values()) for _, members in sorted(found.items(), key=lambda item: LETTERS[next(iter(item[1].values())).model])]


def load(spec: KernelSpec, structure: str, tokens: int, device: torch.device) -> Kernel:
    """What a caller gets for this computation and structure, up to ``tokens`` tokens."""
    return mm.load_kernel(
        spec.hidden,
        spec.inter,
        spec.experts,
        spec.top_k,
        tokens,
        device=device.index,
        layout=spec.layout,
        logits_dtype=spec.logits_dtype,
        w13_order=spec.w13_order,
        scoring=spec.scoring,
        renormalise=spec.renormalise,
        structure=structure,
    )


class Calls:
    """LAUNCHES calls of one kernel at one token count: inputs, outputs, and what eager launches of them gave."""

    def __init__(self, bound: Sequence[Layer], inputs: Sequence[Inputs]) -> None:
        self.bound, self.inputs = bound, inputs
        spec, tokens, device = bound[0].spec, inputs[0].tokens, inputs[0].x.device
        self.outputs = [Outputs(spec, tokens, device) for _ in inputs]
        self.sums = torch.empty(len(inputs), tokens, spec.hidden, dtype=torch.bfloat16, device=device)

    def layer(self, number: int) -> Layer:
        """The layer of launch ``number``."""
        return self.bound[number % len(self.bound)]

    def poison(self) -> None:
        """Fill all outputs with NaN."""
        for output in self.outputs:
            output.poison()
        self.sums.view(torch.uint8).fill_(0xFF)

    def launch(self, count: int = 0, **options: Any) -> None:
        """Enqueue the first ``count`` calls; 0: all."""
        for number in range(count or len(self.inputs)):
            enqueue(self.layer(number), self.inputs[number], self.outputs[number], **options)

    def forward(self, **options: Any) -> None:
        """Enqueue all calls, each with the finalize launch behind it."""
        for number, batch in enumerate(self.inputs):
            to, y = self.outputs[number], self.sums[number]
            self.layer(number).forward(batch.x, batch.logits, batch.bias, y=y, out=to.out, ids=to.ids, weights=to.weights, **options)

    def eager(self) -> list[Outputs]:
        """Outputs of launches outside a graph, without PDL."""
        return [run(self.layer(number), batch, pdl=False) for number, batch in enumerate(self.inputs)]


class Bench:
    """The weight pool and the floor kernels of one device, and the measurements made with them."""

    def __init__(self, device: torch.device, replays: int, variants: Variants | None = None) -> None:
        self.device = device
        self.replays = replays
        self.variants = variants
        self.pool = random_weights(POOL_BYTES, device)
        self.kernels = FloorKernels(device)
        self.clocks: dict[str, str] = {}

    def shape(self, entries: Sequence[Entry], tokens: Sequence[int], results: Results) -> None:
        """Measure the floors of one model shape, then each of its entries in every form; fills ``results``."""
        spec, model = entries[0].spec, entries[0].title
        layers = layers_of(self.pool, spec, LAUNCHES)
        ceiling = self.ceiling(layers[0], spec)
        about = {"model": model, "shape": LETTERS[entries[0].model]}
        whole: Row = {"tokens": None, "variant": "whole layer", "gigabytes_per_second": ceiling, "ok": True, "problems": []}
        results.floors.append(about | whole)
        kernels = [
            {structure: self.bind(entry.spec, structure, max(tokens)) for structure in dict.fromkeys(form.structure for form in FORMS)}
            for entry in entries
        ]
        for count in tokens:
            start = time.perf_counter()
            load_ = Load.of(spec, count)
            floors = self.floors(load_, layers, spec, ceiling)
            results.floors.extend(about | row for row in floors)
            for entry, structures in zip(entries, kernels, strict=True):
                results.rows.extend(about | row for row in self.entry(entry, structures, load_, layers, floors[0]))
            results.header["clocks_under_load"] = self.clocks
            results.save()
            leading = next(row for row in reversed(results.rows) if row["structure"] == "list" and row["pdl"] and not row["trigger"])
            print(
                f"{about['shape']} {model}, M = {count}: floor {floors[0]['us']:.2f} us ({floors[0]['variant']}), list "
                f"{leading['ours_us'] or float('nan'):.2f} us; {time.perf_counter() - start:.1f} s",
                flush=True,
            )

    def bind(self, spec: KernelSpec, structure: str, tokens: int) -> tuple[Kernel, list[Layer]]:
        """One structure's kernel, and a layer of it for each that the pool holds, ready for captures on the current stream."""
        kernel = load(spec, structure, tokens, self.device)
        return kernel, self.bind_layers(kernel, layers_of(self.pool, spec, LAUNCHES))

    @staticmethod
    def bind_layers(kernel: Kernel, layers: Sequence[WeightLayer]) -> list[Layer]:
        """The layers bound to ``kernel``, with their scratch memory on the current stream."""
        bound = [kernel.bind(*layer.tensors) for layer in layers]
        for layer in bound:
            layer.prepare()
        return bound

    # -------------------------------------------------------------------------------------------------------------- Floor

    def floors(self, load_: Load, layers: list[WeightLayer], spec: KernelSpec, ceiling: float) -> list[Row]:
        """Time every stream kernel, the best ones at length; the floor first, then the others as they come."""
        screened = {
            variant: self.floor(variant, load_, layers, spec, ceiling, SCREENING_REPLAYS, SCREENING_SECONDS) for variant in VARIANTS
        }
        finalists = sorted(VARIANTS, key=lambda variant: screened[variant]["us"])[:FINALISTS]
        timed = [self.floor(variant, load_, layers, spec, ceiling) for variant in finalists]
        return [*sorted(timed, key=lambda row: row["us"]), *(row for variant, row in screened.items() if variant not in finalists)]

    def floor(
        self,
        variant: Variant,
        load_: Load,
        layers: list[WeightLayer],
        spec: KernelSpec,
        ceiling: float,
        replays: int | None = None,
        warm_up_seconds: float = WARM_UP_SECONDS,
    ) -> Row:
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

        timing = time_graph(capture(enqueue_all), LAUNCHES, replays or self.replays, warm_up_seconds)
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
            "replays": replays or self.replays,
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
            times.append(time_graph(capture(launch.enqueue), 1, self.replays, SCREENING_SECONDS).median)
        return size / min(times) / 1e3

    # --------------------------------------------------------------------------------------------------------------- Ours

    def entry(
        self,
        entry: Entry,
        structures: Mapping[str, tuple[Kernel, list[Layer]]],
        load_: Load,
        layers: list[WeightLayer],
        floor: Row,
    ) -> list[Row]:
        """Time one entry's computation at one token count, a row for each form."""
        inputs = self.inputs(entry.spec, load_)
        rows = []
        for structure, (kernel, bound) in structures.items():
            calls = Calls(bound, inputs)
            eager = calls.eager()
            for form in (form for form in FORMS if form.structure == structure):
                row = self.about(kernel, form, load_, floor)
                attempt(row["problems"], functools.partial(self.measure, form, calls, eager, load_, row))
                row["ok"] = not row["problems"]
                if self.variants and row["ok"] and structure == "list" and form.leading:
                    attempt(row["breakdown_problems"], functools.partial(self.breakdown, kernel, layers, inputs, load_, row))
                rows.append(row)
        return rows

    def about(self, kernel: Kernel, form: Form, load_: Load, floor: Row) -> Row:
        """A row's facts, its measurements still None."""
        variant = kernel.variants[load_.tokens]
        spec = variant.spec
        return {
            "entry": spec.name,
            "arch": spec.arch,
            "layout": spec.layout,
            "w13_order": spec.w13_order,
            "logits_dtype": spec.logits_dtype,
            "structure": spec.structure,
            "columns": spec.columns,
            "tokens": load_.tokens,
            "pdl": form.pdl,
            "trigger": form.trigger,
            "ours_us": None,
            "ours_best_us": None,
            "ours_worst_us": None,
            "with_finalize_us": None,
            "floor_us": floor["us"],
            "floor_variant": floor["variant"],
            "ratio": None,
            "ratio_with_finalize": None,
            "unique_experts": sum(map(len, load_.unique)) / LAUNCHES,
            "bytes": floor["bytes"],
            "cluster": 0 if spec.structure == "list" else spec.cluster_ctas,
            "ctas": spec.grid(load_.tokens, variant.code.processors),
            "launches": LAUNCHES,
            "replays": self.replays,
            "breakdown": None,
            "breakdown_problems": [],
            "ok": False,
            "problems": [],
        }

    def measure(self, form: Form, calls: Calls, eager: Sequence[Outputs], load_: Load, row: Row) -> None:
        """Time one form, with finalize where the row has it; fills ``row``."""
        options: dict[str, Any] = {"pdl": form.pdl} | ({"trigger": True} if form.trigger else {})
        calls.poison()
        calls.launch(**options)  # once outside a graph: capture wants nothing to be new
        graph = capture(lambda: calls.launch(**options))
        calls.poison()
        timing = self.time(graph)
        row |= {
            "ours_us": timing.median,
            "ours_best_us": timing.best,
            "ours_worst_us": timing.worst,
            "ratio": timing.median / row["floor_us"],
        }
        row["problems"] += wrong_results(calls.outputs, eager, load_) + not_believed(row["ratio"])
        if load_.tokens == 1:
            half = capture(lambda: calls.launch(len(calls.inputs) // 2, **options))
            row["problems"] += not_linear(timing, time_graph(half, LAUNCHES // 2, self.replays))
        if not self.clocks:
            self.clocks = clocks_under(graph, self.device)
        if form.summed:
            calls.forward(**options)
            graph = capture(lambda: calls.forward(**options))
            calls.poison()
            with_finalize = self.time(graph).median
            row |= {"with_finalize_us": with_finalize, "ratio_with_finalize": with_finalize / row["floor_us"]}
            row["problems"] += wrong_results(calls.outputs, eager, load_) + wrong_sums(calls) + not_believed(row["ratio_with_finalize"])

    def time(self, graph: torch.cuda.CUDAGraph) -> Timing:
        """Per launch of a whole graph."""
        return time_graph(graph, LAUNCHES, self.replays)

    def breakdown(self, kernel: Kernel, layers: list[WeightLayer], inputs: Sequence[Inputs], load_: Load, row: Row) -> None:
        """Stages left out -> microseconds that this saves, on the same layers and inputs; fills ``row`` where there are variants."""
        assert self.variants is not None
        entry = next(entry for entry in self.variants.manifest.entries if entry.spec.name == row["entry"])
        saved: dict[str, float] = {}
        for built in self.variants.of(entry, load_.tokens):
            variant = self.variants.load(entry, built, kernel.device)
            calls = Calls(self.bind_layers(variant, layers), inputs)
            calls.launch(pdl=True)
            saved[built.name] = row["ours_us"] - self.time(capture(functools.partial(calls.launch, pdl=True))).median
            if "routing" not in built.left_out:
                row["breakdown_problems"] += [f"without {built.name}: {problem}" for problem in wrong_experts(calls.outputs, load_)]
        row["breakdown"] = saved if saved and not row["breakdown_problems"] else None

    def inputs(self, spec: KernelSpec, load_: Load) -> list[Inputs]:
        """Random tokens and logits that choose the picks, a batch per launch."""
        generator = torch.Generator().manual_seed(load_.tokens)
        x = torch.randn(LAUNCHES, load_.tokens, spec.hidden, generator=generator).bfloat16().to(self.device)
        logits = logits_for(load_.picks, spec.experts, seed=load_.tokens).to(LOGITS_DTYPES[spec.logits_dtype]).to(self.device)
        bias = None if spec.scoring == "softmax" else bias_for(spec.experts, seed=0).to(self.device)
        return [Inputs(x[number], logits[number], bias) for number in range(LAUNCHES)]


def empty_launches(device: torch.device, replays: int) -> dict[str, float]:
    """Microseconds per launch of a kernel that does nothing, as large as shape A's list kernel, in a graph of the same form."""
    spec = next(specs_of(LEAD, ("sm_90a",), ("list",)))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    code = compile_cuda("empty.cu", architecture(device))
    kernel = code.get_kernel("empty")
    allow_shared_memory(kernel, spec.shared_bytes, device)

    def launches(pdl: bool) -> Callable[[], None]:
        def enqueue_all() -> None:
            for _ in range(LAUNCHES):
                launch_cuda(kernel, processors, spec.block_threads, shared_bytes=spec.shared_bytes, pdl=pdl)

        enqueue_all()
        return enqueue_all

    return {name: time_graph(capture(launches(pdl)), LAUNCHES, replays).median for name, pdl in (("pdl", True), ("no_pdl", False))}


def clocks_under(graph: torch.cuda.CUDAGraph, device: torch.device, seconds: float = 1.5) -> dict[str, str]:
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


def attempt(problems: list[str], step: Callable[[], None]) -> None:
    """An exception becomes a problem: the other rows are worth having. After a lost context they will say so too."""
    try:
        step()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")


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
    problems = wrong_experts(outputs, load_)
    for number, (got, want) in enumerate(zip(outputs, eager, strict=True)):
        if not bool(got.out.isfinite().all() & got.weights.isfinite().all()):
            problems.append(f"launch {number}: outputs are not finite")
        if not same(got, want):
            problems.append(f"launch {number}: other bits than an eager launch")
    return problems


def wrong_experts(outputs: Sequence[Outputs], load_: Load) -> list[str]:
    """Every launch chose the experts that its logits name."""
    ids = torch.stack([got.ids for got in outputs]).cpu().long()
    right = (ids.sort(-1).values == load_.picks.sort(-1).values).flatten(1).all(1)
    return [f"launch {number}: the experts are not those that its logits name" for number, ok in enumerate(right.tolist()) if not ok]


def wrong_sums(calls: Calls) -> list[str]:
    """The finalize launches did theirs: the first's bits are the reference's, all are written."""
    first = calls.outputs[0]
    want = reference.finalize(first.out.cpu(), first.weights.cpu())
    problems = [] if torch.equal(bits(calls.sums[0].cpu()), bits(want)) else ["the finalized tokens are not the reference's"]
    return problems + ([] if bool(calls.sums.isfinite().all()) else ["finalized tokens are not finite"])


def not_believed(ratio: float) -> list[str]:
    """Faster than the floor by more than the noise cannot be."""
    return [] if ratio >= FASTEST_RATIO else [f"{ratio:.2f} of the floor: the weights were not cold, or not all of them were read"]


def not_linear(whole: Timing, half: Timing) -> list[str]:
    """A launch costs the same in a graph of half as many, but for the share of the graph's own start (a few microseconds)."""
    ratio = half.median / whole.median
    return (
        []
        if 0.9 <= ratio <= 1.15
        else [f"a launch takes {half.median:.2f} us in a graph of half as many: time does not follow the launches"]
    )


def summarise(rows: Sequence[Row], floors: Sequence[Row]) -> int:
    """Print what failed, then the table; the exit status."""
    failed = [line for line in [*floors, *rows] if not line["ok"] or line.get("breakdown_problems")]
    for line in failed:
        print(
            f"FAILED {line.get('entry', line.get('model'))}, M = {line['tokens']}, {line.get('variant', '')}:",
            *[*line["problems"], *line.get("breakdown_problems", [])][:4],
            sep="\n    ",
        )
    print(report.table(rows, ROW_COLUMNS))
    print(f"{len(rows)} rows, {len(floors)} floors: {len(failed)} failed a sanity check")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
