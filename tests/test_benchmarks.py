"""The parts of benchmarks/ that need no GPU: picks, floor plans, statistics and results files."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import math
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import checks, cuda_checks, environment, floor, h200_correctness, h200_speed, picks, pool, report, timing
from benchmarks.expected import Call, Oracle, merge_results
from benchmarks.harness import Inputs, Outputs, equal_bits, run
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.reference import Options, decode_fp8, moe_reference
from megamoe_aot.spec import KernelSpec
from megamoe_aot.weights import Packed, to_logical
from tests.data import BAD_TOKEN, HARD_INPUTS

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
MIB = 1 << 20


# ------------------------------------------------------------------------------------------------------------------- picks


def chosen_by_sigmoid(logits: list[float], bias: list[float], top_k: int) -> set[int]:
    """Plain Python: the top_k best of sigmoid(logit) + bias."""
    keys = [1 / (1 + math.exp(-logit)) + b for logit, b in zip(logits, bias, strict=True)]
    return set(sorted(range(len(keys)), key=lambda e: -keys[e])[:top_k])


@given(tokens=st.sampled_from([1, 2, 5, 16]), experts=st.sampled_from([32, 128, 288]), seed=st.integers(0, 1000))
def test_crafted_logits_choose_the_picks(tokens: int, experts: int, seed: int) -> None:
    wanted = picks.random_picks(2, tokens, 8, experts, seed)
    logits, bias = picks.logits_for(wanted, experts, seed), picks.bias_for(experts, seed)
    for dtype in (torch.float32, torch.bfloat16):
        for launch in range(2):
            for token in range(tokens):
                row = logits[launch, token].to(dtype).tolist()
                assert chosen_by_sigmoid(row, bias.tolist(), 8) == set(wanted[launch, token].tolist())
                assert set(sorted(range(experts), key=lambda e: -row[e])[:8]) == set(wanted[launch, token].tolist())
    assert bias.min() < 0 < bias.max()


def test_routes_of_a_launch_are_distinct_where_there_are_experts_enough() -> None:
    for launch in picks.random_picks(3, 16, 8, 128, seed=1):
        assert sorted(launch.flatten().tolist()) == list(range(128))
    scarce = picks.random_picks(3, 16, 8, 96, seed=1)
    assert all(len(set(token.tolist())) == 8 for launch in scarce for token in launch)
    assert not torch.equal(scarce[0], scarce[1])


# ------------------------------------------------------------------------------------------------------------------- floor


@given(
    count=st.integers(1, 40),
    w13=st.integers(1, 40).map(lambda n: n * 16 * 1024),
    w2=st.integers(1, 20).map(lambda n: n * 16 * 1024 + 48),
    variant=st.sampled_from(floor.VARIANTS),
)
def test_a_stream_reads_every_byte_of_the_experts_once(count: int, w13: int, w2: int, variant: floor.Variant) -> None:
    experts = [((e * 64 * MIB, w13), (e * 64 * MIB + 32 * MIB, w2)) for e in range(count)]
    stream = floor.plan(variant, experts, processors=132)
    joined: list[tuple[int, int]] = []
    for address, size in sorted(stream.chunks.tolist()):
        assert address % 16 == 0 and size % 16 == 0 and size > 0
        if joined and joined[-1][0] + joined[-1][1] == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((address, size))
    assert joined == sorted(region for expert in experts for region in expert)
    assert 0 < stream.grid <= len(stream.chunks)


def test_a_bulk_ring_fits_the_sm_at_the_largest_menu_call() -> None:
    experts = [((e * 64 * MIB, 4 * MIB), (e * 64 * MIB + 32 * MIB, 2 * MIB)) for e in range(128)]
    for variant in floor.VARIANTS:
        stream = floor.plan(variant, experts, processors=132)
        if variant.stages:
            assert stream.chunks[:, 1].max() <= floor.STAGE_BYTES
            # 228 KiB per SM, of which each CTA loses 1 KiB; floor.cu keeps its barriers in static shared memory besides.
            assert (stream.shared_bytes + 1024 + 128) * variant.ctas_per_sm <= 228 * 1024
            assert stream.grid == 132 * variant.ctas_per_sm


def test_cut_refuses_what_a_16_byte_load_cannot_read() -> None:
    for region, piece in (((8, 64), 16), ((0, 40), 16), ((0, 64), 24), ((0, 64), 0)):
        with pytest.raises(ValueError, match="multiples of 16"):
            floor.cut(region, piece)


def test_words_sum_wraps_like_unsigned_32_bit() -> None:
    data = torch.tensor([0xFF, 0xFF, 0xFF, 0xFF, 2, 0, 0, 0, 0, 1, 0, 0], dtype=torch.uint8)
    assert floor.words_sum([data]) == (0xFFFFFFFF + 2 + 256) % 2**32
    assert floor.words_sum([data, data]) == 2 * (0xFFFFFFFF + 2 + 256) % 2**32


@pytest.mark.parametrize("file", ["floor.cu", "pdl.cu"])
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH: the GPU run compiles these files with NVRTC")
def test_cuda_sources_compile_for_hopper(file: str, tmp_path: Path) -> None:
    command = ["nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Werror=all-warnings", "-Xptxas=-v"]
    done = subprocess.run([*command, str(BENCHMARKS / file), "-o", str(tmp_path / "out.cubin")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    usage = [line for line in done.stderr.splitlines() if "spill" in line]
    assert usage and all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in usage)


# -------------------------------------------------------------------------------------------------- timing, header, results


def test_timing_is_per_launch_in_microseconds() -> None:
    measured = timing.Timing.of([0.64, 0.32, 0.96], launches=32)
    assert (measured.median, measured.best, measured.worst) == pytest.approx((20, 10, 30))


def test_parse_nvidia_smi() -> None:
    parsed = environment.parse_nvidia_smi("NVIDIA H200, 580.159.04, 1980 MHz, 3201 MHz\n")
    assert parsed == {"name": "NVIDIA H200", "driver_version": "580.159.04", "clocks.sm": "1980 MHz", "clocks.mem": "3201 MHz"}
    with pytest.raises(ValueError, match="expected the fields"):
        environment.parse_nvidia_smi("No devices were found\n")


def test_package_versions_name_what_is_missing() -> None:
    versions = environment.package_versions(("numpy", "no-such-distribution"))
    assert versions == {"numpy": np.__version__, "no-such-distribution": None}


def test_results_file_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    rows = [{"entry": "a", "error": math.nan, "ok": True}, {"entry": "b", "error": 1e-3, "ok": False}]
    report.write_json(path, {"date": "now", "nested": {"worst": math.inf}}, rows=rows, checks=[])

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    loaded = json.loads(path.read_text(), parse_constant=refuse)
    assert loaded == {
        "header": {"date": "now", "nested": {"worst": None}},
        "rows": [{"entry": "a", "error": None, "ok": True}, {"entry": "b", "error": 1e-3, "ok": False}],
        "checks": [],
    }


def test_table_aligns_and_marks_failures() -> None:
    text = report.table([{"entry": "long name", "ok": False, "us": 12.345}, {"entry": "x", "us": 0.00123}], ["entry", "ok", "us"])
    assert text.splitlines() == ["    entry  ok       us", "long name  NO    12.35", "        x   -  0.00123"]


# ------------------------------------------------------------------------------------- the checks, on a stand-in for the GPU


@dataclasses.dataclass
class StandIn:
    """A kernel and its layer on the CPU: the reference in the place of the GPU, with room for a fault."""

    spec: KernelSpec
    weights: Packed | None = None
    calls: int = 0

    def bind(self, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor, **changes: Any) -> StandIn:
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes), weights=Packed(w13, w13_scale, w2, w2_scale))

    def __call__(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        bias: torch.Tensor | None = None,
        stream: Any = None,
        out: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        pdl: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.weights is not None
        self.calls += 1
        logical = to_logical(*self.weights, layout=self.spec.layout, w13_order=self.spec.w13_order)
        options = dataclasses.asdict(Options.of(self.spec, w13_order="up_gate"))
        result = moe_reference(x, logits, bias, *logical, **options)
        results = (result.out, result.ids, result.weights)
        given = (out, ids, weights)
        return tuple(want if to is None else to.copy_(want) for want, to in zip(results, given, strict=True))  # type: ignore[return-value]


SMALL = KernelSpec(1024, 128, 32, 2, "sm_90a", scale=2.5, limit=10.0)
SPECS = (
    SMALL,
    dataclasses.replace(SMALL, layout="row_major", w13_order="gate_up", logits_dtype="fp32"),
    dataclasses.replace(SMALL, layout="row_major", scoring="softmax", scale=1.0, limit=None),
)


@functools.cache
def oracle_of(spec: KernelSpec) -> Oracle:
    return Oracle(h200_correctness.same_arithmetic(spec), ThreadPoolExecutor(1))


def subject_of(kernel: StandIn) -> checks.Subject:
    oracle = oracle_of(kernel.spec)
    packed = oracle.weights_problem().packed(layout=kernel.spec.layout, w13_order=kernel.spec.w13_order)
    return checks.Subject(kernel, packed, oracle, kernel.bind(*packed))


def all_problems(subject: checks.Subject) -> list[str]:
    """Everything that the GPU run checks and that needs no GPU."""
    inputs = subject.inputs(Call(3, 0))
    problems = checks.agreement(subject, 3, (0, 1))["problems"]
    problems += checks.repeats(subject.layer, inputs, 3) + checks.batch_invariance(subject.layer, inputs)
    problems += checks.empty_batch(subject.layer, inputs) + checks.view_of_a_batch(subject.layer, inputs)
    problems += checks.options_matter(subject)
    for changes in checks.OPTION_CHANGES:
        problems += checks.options(subject, changes)
    for case in checks.hard_cases(subject.spec):
        problems += [f"{case}: {problem}" for problem in checks.hard_input(subject, case)]
    return problems


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_checks_pass_on_the_reference_itself(spec: KernelSpec) -> None:
    assert all_problems(subject_of(StandIn(spec))) == []


class Noisy(StandIn):
    """Every third launch is off by one bit."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = super().__call__(*args, **kwargs)
        if self.calls % 3 == 0 and len(results[0]):
            results[0].view(torch.int16)[0, 0] ^= 1
        return results


class BatchDependent(StandIn):
    """The last bit of a weight depends on how many tokens there are."""

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        results = super().__call__(x, *args, **kwargs)
        if len(x) > 2:
            results[2].view(torch.int32)[0, 0] ^= 1
        return results


class LeavesARow(StandIn):
    """The last output row keeps what the buffer held."""

    def __call__(self, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        results = super().__call__(*args, **kwargs)
        if out is None:
            return results
        out[:-1] = results[0][:-1]
        return out, *results[1:]


class Overruns(StandIn):
    """Writes one row too many."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = super().__call__(*args, **kwargs)
        if (out := kwargs.get("out")) is not None:
            out.as_strided((1, out.shape[1]), out.stride(), out.storage_offset() + out.numel()).fill_(1)
        return results


class Ignores(StandIn):
    """Binds with the entry's own launch arguments, whatever it is asked for."""

    def bind(self, *weights: Any, **changes: Any) -> StandIn:
        return super().bind(*weights)


class ScalesTwice(StandIn):
    """The routed scaling factor is applied to the outputs too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = super().__call__(*args, **kwargs)
        results[0].mul_(self.spec.scale)
        return results


class SpreadsNaN(StandIn):
    """One NaN anywhere in x or logits makes the last token's weights NaN."""

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        results = super().__call__(x, logits, *args, **kwargs)
        if bool(x.isnan().any() | logits.isnan().any()):
            results[2][-1] = math.nan
        return results


class SwapsHalves(StandIn):
    """Takes gate for up."""

    def bind(self, w13: torch.Tensor, w13_scale: torch.Tensor, *rest: Any, **changes: Any) -> StandIn:
        rows = -2 if w13.dim() == 4 else 1
        swapped = torch.cat(w13.view(torch.uint8).chunk(2, rows)[::-1], rows).view(w13.dtype)
        return super().bind(swapped, torch.cat(w13_scale.chunk(2, 1)[::-1], 1), *rest, **changes)


Check = Callable[[checks.Subject], list[str]]


def batch(subject: checks.Subject) -> Inputs:
    return subject.inputs(Call(3, 0))


@pytest.mark.parametrize(
    ("fault", "check", "complaint"),
    [
        (Noisy, lambda s: checks.repeats(s.layer, batch(s), 4), "differs from launch 0"),
        (BatchDependent, lambda s: checks.batch_invariance(s.layer, batch(s)), "differs from the same token alone"),
        (LeavesARow, lambda s: checks.agreement(s, 3, (0,))["problems"], "relative error"),
        (Overruns, lambda s: checks.agreement(s, 3, (0,))["problems"], "outside the outputs"),
        (SwapsHalves, lambda s: checks.agreement(s, 3, (0,))["problems"], "relative error"),
        (Ignores, lambda s: checks.options(s, {"limit": 0.5}), "relative error"),
        (Ignores, checks.options_matter, "is not passed on"),
        (ScalesTwice, checks.options_matter, "scale 2.5 is not 2.5 times"),
        (SpreadsNaN, lambda s: checks.hard_input(s, "nan_logits"), "which is not damaged, changed"),
    ],
)
def test_checks_find_a_fault(fault: type[StandIn], check: Check, complaint: str) -> None:
    problems = check(subject_of(fault(SPECS[1])))
    assert any(complaint in problem for problem in problems), problems


def test_wrong_order_check_wants_a_difference() -> None:
    subject = subject_of(StandIn(SPECS[1]))
    other = StandIn(dataclasses.replace(SPECS[1], w13_order="up_gate"))
    assert checks.wrong_order_shows(subject, other) == []
    assert checks.wrong_order_shows(subject, StandIn(SPECS[1])) != []


def requirement_faults() -> dict[str, Callable[[Outputs], object]]:
    """For each case with a requirement of its own, an edit of good outputs that breaks it."""

    def out(value: float) -> Callable[[Outputs], object]:
        return lambda outputs: outputs.token(BAD_TOKEN)[0].fill_(value)

    def ids(value: int) -> Callable[[Outputs], object]:
        return lambda outputs: outputs.ids.fill_(value)

    def weights(value: float) -> Callable[[Outputs], object]:
        return lambda outputs: outputs.weights.fill_(value)

    return {
        "zero_token": out(1.0),
        "nan_logits": ids(-1),
        "some_nan_logits": ids(3),
        "inf_logits": weights(math.inf),
        "disabled_experts": ids(4),
        "underflow": weights(math.nan),
        "all_ties": ids(1),
        "nan_w13": out(1.0),
        "nan_w2": out(1.0),
        "huge_w2_scale": out(1.0),
    }


@pytest.mark.parametrize("case", list(checks.REQUIREMENTS))
def test_requirements_refuse_what_breaks_them(case: str) -> None:
    assert case in HARD_INPUTS
    subject = subject_of(StandIn(SMALL))
    clean = run(subject.layer, subject.inputs(checks.hard_call(case)))
    with checks.damaged_expert(subject, case):
        outputs = run(subject.layer, subject.inputs(checks.hard_call(case)))
    assert checks.REQUIREMENTS[case](SMALL, outputs, clean) == []
    requirement_faults()[case](outputs)
    assert checks.REQUIREMENTS[case](SMALL, outputs, clean) != []


def test_a_damaged_expert_is_restored() -> None:
    subject = subject_of(StandIn(SMALL))
    before = [tensor.clone() for tensor in subject.packed]
    for case in ("nan_w13", "huge_w2_scale"):
        with pytest.raises(KeyError), checks.damaged_expert(subject, case):
            assert not equal_bits(tuple(subject.packed), tuple(before))
            raise KeyError
        assert equal_bits(tuple(subject.packed), tuple(before))


def test_merged_tokens_are_the_batch() -> None:
    oracle = oracle_of(SPECS[1])
    call = Call(3, 0)
    inputs = oracle.inputs(call)
    whole = moe_reference(*logical_call(oracle, inputs), **dataclasses.asdict(Options.of(SPECS[1], w13_order="up_gate")))
    merged = oracle.expect(call, everything=True)
    assert merged.exact is not None and merged.model is not None and merged.model.shape == whole.out.shape
    for name in ("out", "ids", "weights", "sums", "act", "hidden", "hidden_scale"):
        assert torch.equal(getattr(merged.result, name), getattr(whole, name)), name
    again = merge_results([whole])
    assert torch.equal(again.out, whole.out) and torch.equal(again.layer.x_q, whole.layer.x_q)


def logical_call(oracle: Oracle, inputs: Inputs) -> tuple[Any, ...]:
    packed = oracle.weights_problem().packed(layout="row_major", w13_order="up_gate")
    return inputs.x, inputs.logits, inputs.bias, *packed


def test_summary_counts_failures_and_unfinished_entries(capsys: pytest.CaptureFixture[str]) -> None:
    good = {"entry": "a", "tokens": 1, "ok": True, "problems": []}
    bad = {"entry": "b", "check": "PDL", "ok": False, "problems": ["launch 0 did not wait"]}
    assert h200_correctness.summarise([good], [], []) == 0
    assert h200_correctness.summarise([good], [bad], []) == 1
    assert "launch 0 did not wait" in capsys.readouterr().out
    assert h200_correctness.summarise([good], [], ["c"]) == 1


def test_attempt_turns_an_exception_into_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise ValueError("no such thing")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert "no such thing" in h200_correctness.attempt(broken)[0]
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(h200_correctness.ContextLost, match="no such thing"):
        h200_correctness.attempt(broken)


def test_an_entry_is_examined_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The glue of the correctness run, with the checks that need a GPU left out."""
    spec = SPECS[1]
    entry = Entry("model", "TP1", spec, "sha", spec.shared.total, spec.cluster)
    manifest = Manifest("digest", {"tool": "1"}, {}, (entry,), tmp_path)
    for name in (
        "graph",
        "pdl",
        "streams",
        "threads",
        "dlpack",
        "mega_experts",
        "bad_calls",
        "bad_weights",
        "bad_queries",
        "damaged_artifacts",
    ):
        monkeypatch.setattr(cuda_checks, name, lambda *_: [])
    monkeypatch.setattr(h200_correctness, "slow_predecessor", lambda _: None)
    monkeypatch.setattr(cuda_checks, "load", lambda asked, _: StandIn(asked))
    plan = h200_correctness.Plan(tokens=(1, 2), seeds=(0,), repeats=2)
    rows: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as workers:
        for found, subject in h200_correctness.subjects([entry], torch.device("cpu"), workers, plan):
            h200_correctness.examine(found, subject, manifest, plan, rows, others)
    assert [line["problems"] for line in rows + others if line["problems"]] == []
    assert [row["tokens"] for row in rows] == [1, 2]
    assert all(row["ids_equal"] and row["graph_equal"] and row["relative_error"] == 0 == row["worst_route"] for row in rows)
    assert all(0 < row["exact_worst"] < 5e-2 and 1e-3 < row["model_error"] < 7e-2 for row in rows), "exact arithmetic differs from Hopper's"
    assert {f"hard input: {case}" for case in HARD_INPUTS} < {line["check"] for line in others}
    assert h200_correctness.summarise(rows, others, []) == 0


# ------------------------------------------------------------------------------------------------- the speed run, without a GPU

TIMING = timing.Timing(median=20.0, best=19.0, worst=21.0)


class HostFloor:
    """The floor kernels on host memory: every chunk is really read, through its address."""

    def __init__(self, device: torch.device, total: int = 0) -> None:
        self.device = device
        self.total = total

    def prepare(self, variant: floor.Variant, experts: Any) -> HostFloor:
        chunks = floor.plan(variant, experts, processors=4).chunks.tolist()
        words = (np.frombuffer(ctypes.string_at(*chunk), dtype=np.uint32) for chunk in chunks)
        return HostFloor(self.device, sum(int(part.sum(dtype=np.uint64)) for part in words))

    def enqueue(self) -> None:
        """Nothing to launch."""

    def words_sum(self) -> int:
        return self.total & 0xFFFFFFFF


class Chooses:
    """A layer that knows the picks: it writes them, and finite outputs."""

    spec = dataclasses.replace(SMALL, layout="row_major", w13_order="gate_up")
    active_clusters = 14

    def bind(self, *weights: torch.Tensor) -> Chooses:
        return self

    def __call__(
        self,
        x: Any,
        logits: Any,
        bias: Any = None,
        stream: Any = None,
        out: Any = None,
        ids: Any = None,
        weights: Any = None,
        pdl: bool = True,
    ) -> None:
        ids.copy_(logits.topk(self.spec.top_k).indices)
        weights.fill_(0.5)
        out.copy_(x.repeat_interleave(self.spec.top_k, 0))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> h200_speed.Bench:
    monkeypatch.setattr(h200_speed, "POOL_BYTES", 3 * pool.layer_bytes(SMALL))
    monkeypatch.setattr(h200_speed, "LAUNCHES", 5)
    monkeypatch.setattr(h200_speed, "COLD_BYTES", 0)
    monkeypatch.setattr(h200_speed, "FloorKernels", HostFloor)
    monkeypatch.setattr(h200_speed, "capture", lambda enqueue: enqueue())
    monkeypatch.setattr(h200_speed, "time_graph", lambda *_: TIMING)
    monkeypatch.setattr(h200_speed, "clocks_under", lambda *_: {"sm": "1 MHz"})
    monkeypatch.setattr(h200_speed, "load", lambda *_: Chooses())
    return h200_speed.Bench(torch.device("cpu"), replays=2)


def test_speed_rows_of_one_shape(bench: h200_speed.Bench) -> None:
    entry = Entry("model", "TP1", Chooses.spec, "sha", 1, 16)
    rows: list[dict[str, Any]] = []
    floors: list[dict[str, Any]] = []
    bench.shape([entry], (1, 3), rows, floors)
    assert [line["problems"] for line in rows + floors if line["problems"]] == []
    assert [(row["tokens"], row["pdl"]) for row in rows] == [(1, True), (1, False), (3, True), (3, False)]
    assert len(floors) == 1 + 2 * len(floor.VARIANTS)
    # K = 2 routes per token, all distinct; an expert has 3 * H * I bytes.
    assert [(row["unique_experts"], row["bytes"]) for row in rows[::2]] == [(2, 2 * 3 * 1024 * 128), (6, 6 * 3 * 1024 * 128)]
    assert all(row["ours_us"] == row["floor_us"] == 20.0 and row["ratio"] == 1.0 for row in rows)
    assert h200_speed.summarise(rows, floors) == 0


def test_a_floor_that_skips_bytes_is_refused(bench: h200_speed.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostFloor, "words_sum", lambda self: (self.total - 1) & 0xFFFFFFFF)
    layers = pool.layers_of(bench.pool, Chooses.spec, 5)
    load_ = h200_speed.Load(1, picks.random_picks(5, 1, 2, 32, seed=1))
    row = bench.floor(floor.VARIANTS[0], load_, layers, Chooses.spec, ceiling=1e9)
    assert not row["ok"] and "the words read add up to" in row["problems"][0]
    assert "one long read" in bench.floor(floor.VARIANTS[0], load_, layers, Chooses.spec, ceiling=1e-3)["problems"][-1]


def test_measurements_that_cannot_be_are_refused() -> None:
    assert h200_speed.not_believed(TIMING, {"us": 20.5}) == []
    assert h200_speed.not_believed(TIMING, {"us": 25.0}) != []
    assert h200_speed.not_linear(TIMING, timing.Timing(20.4, 20, 21)) == []
    assert h200_speed.not_linear(TIMING, timing.Timing(38.0, 37, 39)) != [], "half the launches took almost as long"
    load_ = h200_speed.Load(1, picks.random_picks(32, 1, 8, 288, seed=1))
    lead = KernelSpec(4096, 512, 288, 8, "sm_90a")
    three: list[Any] = [None] * 3
    assert h200_speed.cold(load_, [None] * 11, lead) == []  # type: ignore[list-item]
    assert "may still be in L2" in h200_speed.cold(load_, three, lead)[0]


def test_unwritten_or_foreign_results_are_refused(bench: h200_speed.Bench) -> None:
    load_ = h200_speed.Load(2, picks.random_picks(5, 2, 2, 32, seed=1))
    inputs = bench.inputs(Chooses.spec, load_)
    good = [run(Chooses(), batch) for batch in inputs]
    assert h200_speed.wrong_results(good, good, load_) == []
    unwritten = [Outputs(Chooses.spec, 2, torch.device("cpu")), *good[1:]]
    assert "not finite" in h200_speed.wrong_results(unwritten, good, load_)[0]
    assert "not those" in h200_speed.wrong_results(good, good, h200_speed.Load(2, load_.picks.flip(0)))[0]


def test_pool_bytes_are_finite_and_random() -> None:
    bytes_ = pool.random_weights(1 << 16, torch.device("cpu"))
    values = decode_fp8(bytes_)
    assert values.isfinite().all() and values.abs().max() < 2
    assert len(bytes_.unique()) == 128, "one bit is cleared, seven are random"
    assert 0.9 < float(values.square().mean().sqrt()) / pool.SPREAD < 1.1
    spec = KernelSpec(1024, 128, 32, 2, "sm_90a")
    layers = pool.layers_of(pool.random_weights(2 * pool.layer_bytes(spec) + 5, torch.device("cpu")), spec, 9)
    assert len(layers) == 2 and layers[0].w13.shape == (32, 8, 256, 128) and layers[1].w2_scale.shape == (32, 8, 1)
    assert layers[1].w13.data_ptr() - layers[0].w13.data_ptr() == 32 * 3 * 1024 * 128
