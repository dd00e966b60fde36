"""The parts of benchmarks/ that need no GPU: picks, floor plans, statistics and results files."""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import (
    breakdown,
    checks,
    choose_structures,
    cuda_checks,
    environment,
    floor,
    h200_correctness,
    h200_speed,
    picks,
    plot,
    pool,
    report,
    timing,
)
from benchmarks.expected import Call, Oracle, merge_results
from benchmarks.harness import Inputs, Outputs, equal_bits, run
from kernels.build import sources
from kernels.build.cubin import read_cubin
from megamoe_aot import loader
from megamoe_aot.abi import FLAG_TRIGGER
from megamoe_aot.finalize import FinalizeSpec
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.menu import DEEPSEEK_V3, LEAD, MENU, TOKEN_COUNTS, ModelShape, specs_of
from megamoe_aot.reference import Options, decode_fp8, finalize, moe_reference
from megamoe_aot.spec import LAYOUTS, LOGITS_DTYPES, KernelSpec
from megamoe_aot.structures import choices
from megamoe_aot.weights import Packed, to_logical
from tests import fake_driver
from tests.data import BAD_TOKEN, HARD_INPUTS
from tests.fake_driver import H200, FakeDriver, fake_artifacts, install

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
MIB = 1 << 20


# ------------------------------------------------------------------------------------------------------------------- picks


def chosen_by_sigmoid(logits: list[float], bias: list[float], top_k: int, groups: int = 1, top_groups: int = 1) -> set[int]:
    """Plain Python: the top_k best of sigmoid(logit) + bias in the groups whose two best add up to most."""
    keys = [1 / (1 + math.exp(-logit)) + b for logit, b in zip(logits, bias, strict=True)]
    size = len(keys) // groups
    best_two = [sum(sorted(keys[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: -best_two[g])[:top_groups]
    allowed = [e for e in range(len(keys)) if e // size in kept]
    return set(sorted(allowed, key=lambda e: -keys[e])[:top_k])


@given(
    tokens=st.sampled_from([1, 2, 5, 16]),
    experts=st.sampled_from([64, 128, 256]),
    groups=st.sampled_from([(0, 0), (2, 1), (8, 4), (8, 8)]),
    seed=st.integers(0, 1000),
)
def test_crafted_logits_choose_the_picks(tokens: int, experts: int, groups: tuple[int, int], seed: int) -> None:
    wanted = picks.random_picks(2, tokens, 8, experts, seed, *groups)
    assert wanted.shape == (2, tokens, 8) and wanted.min() >= 0 and wanted.max() < experts
    logits, bias = picks.logits_for(wanted, experts, seed), picks.bias_for(experts, seed)
    for dtype in (torch.float32, torch.bfloat16):
        for launch in range(2):
            for token in range(tokens):
                row = logits[launch, token].to(dtype).tolist()
                pick = set(wanted[launch, token].tolist())
                assert len(pick) == 8
                assert chosen_by_sigmoid(row, bias.tolist(), 8, *(groups if groups[0] else (1, 1))) == pick
                assert groups[0] or set(sorted(range(experts), key=lambda e: -row[e])[:8]) == pick
    assert bias.min() < 0 < bias.max()


def test_tokens_draw_on_their_own() -> None:
    """As many unique experts as independent tokens choose: E * (1 - (1 - K / E) ** M) on average."""
    for experts, tokens, groups in ((288, 8, (0, 0)), (128, 16, (0, 0)), (256, 8, (8, 4))):
        drawn = picks.random_picks(200, tokens, 8, experts, 1, *groups)
        unique = sum(len(set(launch.flatten().tolist())) for launch in drawn) / len(drawn)
        assert unique == pytest.approx(experts * (1 - (1 - 8 / experts) ** tokens), rel=0.02)
        counts = torch.bincount(drawn.flatten(), minlength=experts)
        assert counts.min() > 0 and counts.max() < 2 * counts.float().mean(), "every expert has the same chance"
    assert not torch.equal(picks.random_picks(1, 1, 8, 288, 1), picks.random_picks(1, 1, 8, 288, 2))


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


@pytest.mark.parametrize("file", ["floor.cu", "pdl.cu", "empty.cu"])
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
        "finalize",
        "early_trigger",
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


TWO_SHAPES = (
    ModelShape(LEAD.model, "TP1", 1024, 128, 32, 2, "sigmoid_bias", True, 2.5, 10.0),
    ModelShape(DEEPSEEK_V3.model, "TP1", 1024, 128, 64, 2, "sigmoid_bias_grouped", True, 2.5, None, groups=2, top_groups=1),
)
STREAM = 0x5EED


def memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Host memory at ``address`` as a tensor."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=dtype).view(shape)


class HostKernels(FakeDriver):
    """A driver whose launches do something to host memory: the experts with the largest logits, and each row a copy of x."""

    fault: Callable[[torch.Tensor], object] | None = None
    """Applied to ``out`` of every launch that a graph would hold."""

    def __init__(self) -> None:
        super().__init__(H200)
        self.shapes: dict[str, KernelSpec | FinalizeSpec] = {}

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: int, extra: int) -> Any:
        answer = super().cuLaunchKernelEx(config, function, pointers, extra)
        if int(answer[0]) == 0:
            it = self.launches[-1]
            spec = self.shapes[it.symbol.removesuffix("_0")]
            arguments = it.arguments
            if isinstance(spec, FinalizeSpec):
                self.finalize(spec, it.grid[0] // spec.token_ctas, arguments)
            else:
                self.moe(spec, arguments.get("tokens") or it.grid[0] // (spec.cluster * spec.top_k), arguments)
        return answer

    def moe(self, spec: KernelSpec, tokens: int, at: dict[str, Any]) -> None:
        logits = memory(at["logits"], (tokens, spec.experts), torch.bfloat16 if spec.logits_dtype == "bf16" else torch.float32)
        memory(at["ids"], (tokens, spec.top_k), torch.int32).copy_(logits.topk(spec.top_k).indices)
        memory(at["weights"], (tokens, spec.top_k), torch.float32).fill_(0.5)
        out = memory(at["out"], (tokens * spec.top_k, spec.hidden), torch.bfloat16)
        out.copy_(memory(at["x"], (tokens, spec.hidden), torch.bfloat16).repeat_interleave(spec.top_k, 0))
        if self.fault is not None and self.capturing:
            self.fault(out)

    def finalize(self, spec: FinalizeSpec, tokens: int, at: dict[str, Any]) -> None:
        out = memory(at["out"], (tokens * spec.top_k, spec.hidden), torch.bfloat16)
        weights = memory(at["weights"], (tokens, spec.top_k), torch.float32)
        memory(at["y"], (tokens, spec.hidden), torch.bfloat16).copy_(finalize(out, weights))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HostKernels:
    """Two small model shapes on a GPU whose memory is the host's; the package's own code loads, binds and launches."""
    made = HostKernels()
    menu = [(shape, spec) for shape in TWO_SHAPES for spec in specs_of(shape, ("sm_90a",))]
    made.shapes = {spec.code_name: spec for _, spec in menu} | {
        spec.code_name: spec for spec in {FinalizeSpec.of(spec) for _, spec in menu}
    }
    monkeypatch.setattr(fake_driver, "menu_specs", lambda: menu)
    folder = tmp_path / "artifacts"
    folder.mkdir()
    install(monkeypatch, made, fake_artifacts(folder))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=STREAM, device_index=0))

    def capture(enqueue: Callable[[], None]) -> Callable[[], None]:
        """A graph is what runs again; while it is captured, scratch memory cannot be allocated."""

        def replay() -> None:
            made.capturing.add(STREAM)
            try:
                enqueue()
            finally:
                made.capturing.clear()

        replay()
        return replay

    def time_graph(graph: Callable[[], None], launches: int, replays: int, warm_up_seconds: float = 0.0) -> timing.Timing:
        graph()
        return TIMING

    for name, value in {
        "POOL_BYTES": 3 * pool.layer_bytes(made_spec(TWO_SHAPES[1])),
        "LAUNCHES": 5,
        "COLD_BYTES": 0,
        "FloorKernels": HostFloor,
        "capture": capture,
        "time_graph": time_graph,
        "clocks_under": lambda *_: {"sm": "1 MHz"},
    }.items():
        monkeypatch.setattr(h200_speed, name, value)
    return made


def made_spec(shape: ModelShape) -> KernelSpec:
    return next(specs_of(shape, ("sm_90a",)))


def speed_results(
    bench: h200_speed.Bench, tmp_path: Path, tokens: tuple[int, ...] = (1, 9), **chosen: tuple[str, ...]
) -> h200_speed.Results:
    results = h200_speed.Results(tmp_path / "h200_speed.json", {})
    for members in h200_speed.cases(loader.manifest(), (9, 0), "AB", **chosen):
        bench.shape(members, tokens, results)
    return results


def test_speed_rows(machine: HostKernels, tmp_path: Path) -> None:
    bench = h200_speed.Bench(torch.device("cpu"), replays=2)
    results = speed_results(bench, tmp_path)
    rows, floors = results.rows, results.floors
    assert [line["problems"] for line in rows + floors if line["problems"]] == []
    assert json.loads(results.path.read_text()) == {"header": {"clocks_under_load": {"sm": "1 MHz"}}, "rows": rows, "floors": floors}
    forms = [("list", True, False), ("list", False, False), ("list", True, True), ("cluster", True, False)]
    found = [(row["shape"], row["tokens"], row["structure"], row["pdl"], row["trigger"]) for row in rows]
    assert found == [(shape, tokens, *form) for shape in "AB" for tokens in (1, 9) for form in forms]
    for row in rows:
        columns = (8 if row["tokens"] == 1 else 16) if row["structure"] == "list" else 0
        assert row["columns"] == columns and (f"_list{columns}_" in row["entry"]) == (columns > 0)
        assert (row["cluster"], row["ctas"]) == ((0, 132) if columns else (16, 16 * row["tokens"] * 2))
        assert (row["ours_us"], row["ours_best_us"], row["ours_worst_us"], row["floor_us"], row["ratio"]) == (20, 19, 21, 20, 1)
        assert (row["with_finalize_us"], row["ratio_with_finalize"]) == ((20, 1) if row["pdl"] else (None, None))
        assert row["breakdown"] is None and (row["launches"], row["replays"]) == (5, 2)
        assert row["bytes"] == row["unique_experts"] * 3 * 1024 * 128, "an expert has 3 * H * I bytes"
        assert row["unique_experts"] == 2 if row["tokens"] == 1 else 9 < row["unique_experts"] < 18
    assert len(floors) == 2 * (1 + 2 * len(floor.VARIANTS))
    assert {(row["variant"], row["replays"]) for row in floors if row["tokens"] == 9} >= {(v.name, 5) for v in floor.VARIANTS[3:]}
    assert sum(row.get("replays") == 2 for row in floors) == 2 * 2 * h200_speed.FINALISTS
    assert h200_speed.summarise(rows, floors) == 0
    assert h200_speed.summarise([], []) == 0


def test_the_run_from_its_arguments(machine: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(Manifest, "load", lambda folder=None: loader.manifest())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(environment, "header", lambda device, manifest, commit: {"commit": commit})
    monkeypatch.setattr(h200_speed, "empty_launches", lambda device, replays: {"pdl": 1.0, "no_pdl": 2.0})
    asked: dict[str, Any] = {
        "out": tmp_path / "new",
        "commit": "abc",
        "shapes": "B",
        "tokens": [2, 1],
        "all_entries": False,
        "layout": "trtllm_gen",
    }
    asked |= {"breakdown": False, "replays": 3}
    results = h200_speed.measure(argparse.Namespace(**asked), torch.device("cpu"))
    written = json.loads((tmp_path / "new" / "h200_speed.json").read_text())
    assert written["header"] == {
        "commit": "abc",
        "empty_launch_us": {"pdl": 1.0, "no_pdl": 2.0},
        "clocks_under_load": {"sm": "1 MHz"},
    }
    assert [(row["shape"], row["tokens"], row["replays"]) for row in written["rows"]] == [("B", 1, 3)] * 4 + [("B", 2, 3)] * 4
    assert h200_speed.summarise(results.rows, results.floors) == 0
    assert "0 failed a sanity check" in capsys.readouterr().out
    for changes, message in (({"shapes": "C"}, "has nothing of C"), ({"breakdown": True}, "benchmarks.breakdown build")):
        monkeypatch.setattr(breakdown, "FOLDER", tmp_path)
        with pytest.raises(SystemExit, match=message):
            h200_speed.measure(argparse.Namespace(**(asked | changes)), torch.device("cpu"))


def test_speed_launches_are_the_products_own(machine: HostKernels, tmp_path: Path) -> None:
    bench = h200_speed.Bench(torch.device("cpu"), replays=2)
    speed_results(bench, tmp_path, tokens=(2,))
    moe = [it for it in machine.launches if not it.symbol.startswith("finalize")]
    flags = {(bool(it.cluster), it.pdl, bool(it.arguments["flags"] & FLAG_TRIGGER)) for it in moe}
    # (cluster, PDL, trigger): eager; list with PDL, with trigger (alone and before the finalize launch); cluster with PDL.
    assert flags == {(False, False, False), (True, False, False), (False, True, False), (False, True, True), (True, True, False)}
    behind: dict[tuple[bool, int], int] = collections.Counter()
    for before, it in itertools.pairwise(machine.launches):
        if it.symbol.startswith("finalize"):
            assert it.pdl and it.arguments["out"] == before.arguments["out"] and it.arguments["shared"] == 0
            assert bool(before.arguments["flags"] & FLAG_TRIGGER) == (before.cluster is None)
            behind[before.cluster is None, it.arguments["flags"]] += 1
    assert set(behind) == {(True, 0), (True, FLAG_TRIGGER), (False, 0)} and len({*behind.values()}) == 1
    written = {(it.symbol, it.arguments["out"]) for it in moe if it.arguments["flags"] & FLAG_TRIGGER}
    assert len(written) == 2 * 5, "every launch of a graph writes its own outputs"


def test_all_entries_are_measured_on_request(machine: HostKernels, tmp_path: Path) -> None:
    bench = h200_speed.Bench(torch.device("cpu"), replays=2)
    results = speed_results(bench, tmp_path, (1,), layouts=LAYOUTS, dtypes=LOGITS_DTYPES)
    assert [line["problems"] for line in results.rows if line["problems"]] == []
    kinds = {(row["layout"], row["w13_order"], row["logits_dtype"]) for row in results.rows}
    in_layout = h200_speed.cases(loader.manifest(), (9, 0), "A", ("row_major",))
    assert {(e.spec.layout, e.spec.w13_order, e.spec.logits_dtype) for e in in_layout[0]} < kinds
    assert {e.spec.layout for e in in_layout[0]} == {"row_major"}
    assert len(kinds) == 6 and len(results.rows) == 2 * 6 * 4
    assert [m.model for (m, *_) in h200_speed.cases(loader.manifest(), (9, 0), "B")] == [DEEPSEEK_V3.model]
    assert h200_speed.cases(loader.manifest(), (10, 0), "AB", layouts=LAYOUTS) == []


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (lambda out: out.fill_(math.nan), "not finite"),
        (lambda out: out[0].mul_(2), "other bits than an eager launch"),
    ],
)
def test_a_wrong_graph_is_found(machine: HostKernels, tmp_path: Path, fault: Callable[[torch.Tensor], object], complaint: str) -> None:
    machine.fault = fault
    results = speed_results(h200_speed.Bench(torch.device("cpu"), replays=2), tmp_path, tokens=(1,))
    assert all(any(complaint in problem for problem in row["problems"]) for row in results.rows)
    assert h200_speed.summarise(results.rows, results.floors) == 1


def test_a_failed_row_does_not_take_the_others_along(machine: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(calls: h200_speed.Calls) -> list[str]:
        raise ValueError("no sums today")

    monkeypatch.setattr(h200_speed, "wrong_sums", broken)
    results = speed_results(h200_speed.Bench(torch.device("cpu"), replays=2), tmp_path, tokens=(1,))
    assert [row["ok"] for row in results.rows] == [False, True, False, False] * 2, "only the row without PDL has no sums"
    assert results.rows[0]["problems"] == ["ValueError: no sums today"] and results.rows[0]["ours_us"] == 20


def test_wrong_sums_are_found(machine: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostKernels, "finalize", lambda self, spec, tokens, at: None)
    results = speed_results(h200_speed.Bench(torch.device("cpu"), replays=2), tmp_path, tokens=(1,))
    assert results.rows[0]["problems"] == ["the finalized tokens are not the reference's", "finalized tokens are not finite"]


def bench_of(machine: HostKernels) -> tuple[h200_speed.Bench, KernelSpec]:
    return h200_speed.Bench(torch.device("cpu"), replays=2), made_spec(TWO_SHAPES[0])


def test_a_floor_that_skips_bytes_is_refused(machine: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, spec = bench_of(machine)
    monkeypatch.setattr(HostFloor, "words_sum", lambda self: (self.total - 1) & 0xFFFFFFFF)
    layers = pool.layers_of(bench.pool, spec, 5)
    row = bench.floor(floor.VARIANTS[0], h200_speed.Load.of(spec, 1), layers, spec, ceiling=1e9)
    assert not row["ok"] and "the words read add up to" in row["problems"][0]
    assert "one long read" in bench.floor(floor.VARIANTS[0], h200_speed.Load.of(spec, 1), layers, spec, ceiling=1e-3)["problems"][-1]


def test_the_floor_is_the_best_stream_kernel(machine: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short look at all, then the best again: the order follows the long look."""
    bench, spec = bench_of(machine)
    short = {5: 1.0, 9: 2.0, 2: 3.0}

    def looked_at(variant: floor.Variant, *rest: Any) -> dict[str, Any]:
        number = floor.VARIANTS.index(variant)
        long_look = len(rest) == 4
        return {"variant": variant.name, "us": {5: 13.0, 9: 12.0, 2: 11.0}[number] if long_look else short.get(number, 50.0)}

    monkeypatch.setattr(bench, "floor", looked_at)
    rows = bench.floors(h200_speed.Load.of(spec, 1), [], spec, 1.0)
    assert [row["variant"] for row in rows[:3]] == [floor.VARIANTS[number].name for number in (2, 9, 5)]
    assert [row["us"] for row in rows] == [11.0, 12.0, 13.0] + [50.0] * (len(floor.VARIANTS) - 3)


def test_measurements_that_cannot_be_are_refused() -> None:
    assert h200_speed.not_believed(20 / 20.5) == []
    assert h200_speed.not_believed(20 / 25) != []
    assert h200_speed.not_linear(TIMING, timing.Timing(20.4, 20, 21)) == []
    assert h200_speed.not_linear(TIMING, timing.Timing(38.0, 37, 39)) != [], "half the launches took almost as long"
    lead = KernelSpec(4096, 512, 288, 8, "sm_90a")
    load_ = h200_speed.Load.of(lead, 1)
    three: list[Any] = [None] * 3
    assert h200_speed.cold(load_, [None] * 11, lead) == []  # type: ignore[list-item]
    assert "may still be in L2" in h200_speed.cold(load_, three, lead)[0]


def test_foreign_experts_are_refused(machine: HostKernels) -> None:
    bench, spec = bench_of(machine)
    load_ = h200_speed.Load.of(spec, 2)
    _, bound = bench.bind(spec, "list", 2)
    calls = h200_speed.Calls(bound, bench.inputs(spec, load_))
    good = calls.eager()
    assert h200_speed.wrong_results(good, good, load_) == []
    assert any("not finite" in problem for problem in h200_speed.wrong_results(calls.outputs, good, load_))
    assert "not those" in h200_speed.wrong_results(good, good, h200_speed.Load(2, load_.picks.flip(0)))[0]


def test_the_pool_of_the_largest_shapes_keeps_the_weights_cold() -> None:
    """What the run checks on the spot, for the whole menu: with 20 GB every (shape, tokens) is cold."""
    for shape in MENU:
        spec = made_spec(shape)
        layers: list[Any] = [None] * min(h200_speed.LAUNCHES, h200_speed.POOL_BYTES // pool.layer_bytes(spec))
        for tokens in TOKEN_COUNTS:
            assert h200_speed.cold(h200_speed.Load.of(spec, tokens), layers, spec) == []


def test_a_graph_is_captured_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list launch's scratch memory is its stream's: a stream of the graph's own would not be prepared."""
    done: list[Any] = []

    class Graph:
        def __init__(self, graph: Any, stream: Any) -> None:
            done.append(stream)

        def __enter__(self) -> None:
            done.append("begin")

        def __exit__(self, *_: object) -> None:
            done.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "mine")
    timing.capture(lambda: done.append("launch"))
    assert done == ["mine", "begin", "launch", "end"]


# --------------------------------------------------------------------------------------------------------------- breakdown


@pytest.fixture
def variants(machine: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> breakdown.Variants:
    """Variants of both shapes' list kernels, as ``build`` leaves them, with the whole kernels' code in the cubins."""
    monkeypatch.setattr(breakdown, "compile_without", lambda spec, left_out: whole_image(spec) + b" " * len("+".join(left_out)))
    monkeypatch.setattr(sources, "source_digest", lambda: loader.manifest().source_digest)
    breakdown.build(loader.manifest(), (8,), 2, tmp_path / "variants")
    return breakdown.Variants(loader.manifest(), tmp_path / "variants")


def whole_image(spec: KernelSpec) -> bytes:
    manifest = loader.manifest()
    return manifest.read_cubin(next(entry.cubin for entry in manifest.entries if entry.spec == spec))


def test_a_breakdown_is_what_each_stage_saves(
    machine: HostKernels, variants: breakdown.Variants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(1, 100))

    def time_graph(graph: Callable[[], None], launches: int, replays: int, warm_up_seconds: float = 0.0) -> timing.Timing:
        graph()
        return dataclasses.replace(TIMING, median=20.0 - next(times)) if breakdown_runs() else TIMING

    def breakdown_runs() -> bool:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != "breakdown":
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None

    monkeypatch.setattr(h200_speed, "time_graph", time_graph)
    results = speed_results(h200_speed.Bench(torch.device("cpu"), 2, variants), tmp_path, tokens=(1, 2, 4, 9))
    assert [row for row in results.rows if row["problems"] or row["breakdown_problems"]] == []
    with_breakdown = {(row["shape"], row["tokens"]): row["breakdown"] for row in results.rows if row["breakdown"]}
    one = ["routing", "exchange", "mma", "store", "routing+exchange", "exchange+mma+store", "routing+exchange+mma+store"]
    assert {key: list(saved) for key, saved in with_breakdown.items()} == {
        (shape, tokens): one if tokens == 1 else ["exchange", "mma", "store", "exchange+mma+store"] for shape in "AB" for tokens in (1, 2)
    }
    assert list(with_breakdown["A", 1].values()) == [1, 2, 3, 4, 5, 6, 7]
    assert list(with_breakdown["A", 2].values()) == [8, 9, 10, 11]


def test_a_failed_breakdown_leaves_the_row_alone(machine: HostKernels, variants: breakdown.Variants, tmp_path: Path) -> None:
    path = variants.folder / f"{variants.built[0].cubin}.cubin"
    path.write_bytes(b"")
    results = speed_results(h200_speed.Bench(torch.device("cpu"), 2, variants), tmp_path, tokens=(1,))
    row = results.rows[0]
    assert row["ok"] and row["breakdown"] is None and "is damaged" in row["breakdown_problems"][0]
    assert [bool(other["breakdown"]) for other in results.rows[1:]] == [False, False, False, True, False, False, False]
    assert h200_speed.summarise(results.rows, results.floors) == 1


def test_variants_of_other_artifacts_are_refused(variants: breakdown.Variants, machine: HostKernels) -> None:
    manifest, folder = variants.manifest, variants.folder
    assert len(variants.built) == 2 * len(breakdown.LEFT_OUT) and len({v.cubin for v in variants.built}) == len(variants.built)
    with pytest.raises(breakdown.BreakdownError, match="not of the sources"):
        breakdown.Variants(dataclasses.replace(manifest, source_digest="1" * 64), folder)
    others = tuple(dataclasses.replace(entry, cubin="2" * 64) for entry in manifest.entries)
    with pytest.raises(breakdown.BreakdownError, match="belongs to another cubin"):
        breakdown.Variants(dataclasses.replace(manifest, entries=others), folder)
    path = folder / f"{variants.built[0].cubin}.cubin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(breakdown.BreakdownError, match="is damaged"):
        breakdown.Variants(manifest, folder)
    path.unlink()
    with pytest.raises(breakdown.BreakdownError, match="No such file"):
        breakdown.Variants(manifest, folder)
    with pytest.raises(breakdown.BreakdownError, match="no variants in"):
        breakdown.Variants(manifest, folder / "elsewhere")


def test_variants_are_built_from_the_sources_of_the_artifacts_only(machine: HostKernels, tmp_path: Path) -> None:
    with pytest.raises(breakdown.BreakdownError, match="not of the present sources"):
        breakdown.build(loader.manifest(), (8,), 1, tmp_path / "variants")


@pytest.mark.slow
def test_left_out_stages_are_left_out() -> None:
    """Real compiles: every variant has its own code and keeps the kernel's symbol and parameters."""
    spec = dataclasses.replace(made_spec(TWO_SHAPES[0]), structure="list", columns=8, tokens=8)
    images = [breakdown.compile_without(spec, left_out) for left_out in ((), *breakdown.LEFT_OUT)]
    facts = [read_cubin(image) for image in images]
    assert len(set(images)) == len(images)
    assert {it.symbol for it in facts} == {f"{spec.code_name}_0"}
    assert {tuple(p.size for p in it.parameters) for it in facts} == {tuple(p.size for p in spec.parameters)}
    assert all(len(image) < len(images[0]) for image in images[1:])


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


# ------------------------------------------------------------------------------------------- from results to tables and picture


def speed_row(tokens: int, structure: str, us: float, **changes: Any) -> dict[str, Any]:
    """A row of shape A over a floor of 10 us; with finalize 1 us more."""
    row: dict[str, Any] = {
        "shape": "A",
        "model": "GLM-5.3-Flash TP4",
        "layout": "trtllm_gen",
        "logits_dtype": "bf16",
        "structure": structure,
    }
    row |= {"tokens": tokens, "pdl": True, "trigger": False, "ours_us": us, "ratio": us / 10, "floor_us": 10.0, "unique_experts": 8.0}
    row |= {"with_finalize_us": us + 1, "ratio_with_finalize": (us + 1) / 10, "replays": 25, "breakdown": None, "ok": True, "problems": []}
    return row | {"entry": f"moe_{structure}"} | changes


def speed_data(*more: dict[str, Any]) -> dict[str, Any]:
    header: dict[str, Any] = {"gpu": "NVIDIA H200", "date": "2026-11-30T01:02:03+00:00", "driver": "580.1", "commit": "0123456789abcdef"}
    header |= {"clocks_under_load": {"sm": "1980 MHz", "memory": "3201 MHz"}, "empty_launch_us": {"pdl": 0.914, "no_pdl": 1.526}}
    rows = [
        speed_row(1, "list", 11.8, breakdown={"routing": 0.914, "routing+exchange": 1.25}),
        speed_row(1, "list", 12.3, pdl=False),
        speed_row(1, "list", 11.2, trigger=True),
        speed_row(2, "list", 10.7, trigger=True, with_finalize_us=None, ratio_with_finalize=None),
        speed_row(1, "cluster", 14.0),
        speed_row(2, "list", 11.8, breakdown={"exchange": 0.333}),
        speed_row(2, "list", 1.0, logits_dtype="fp32"),
        *more,
    ]
    return {"header": header, "rows": rows}


def test_tables_say_what_the_results_say() -> None:
    measured = plot.Measured(speed_data())
    assert plot.times(measured).splitlines() == [
        "| shape | us (time over floor) | M = 1 | M = 2 |",
        "| --- | --- | --- | --- |",
        "| **A** GLM-5.3-Flash TP4 | floor | 10.0 | 10.0 |",
        "|  | unique experts | 8.0 | 8.0 |",
        "|  | list | **11.8 (1.18)** | 11.8 (1.18) |",
        "|  | list, with trigger | **11.2 (1.12)** | **10.7 (1.07)** |",
        "|  | list, with finalize | 12.8 (1.28) | 12.8 (1.28) |",
        "|  | list, with finalize and trigger | **12.2 (1.22)** | - |",
        "|  | cluster | 14.0 (1.40) | - |",
        "|  | cluster, with finalize | 15.0 (1.50) | - |",
    ]
    assert plot.options(measured).splitlines()[2:] == ["| **A** | PDL off | +0.50 | - |", "| **A** | PDL and trigger | -0.60 | -1.10 |"]
    assert plot.breakdown(measured).splitlines() == [
        "| shape | M | whole | floor | routing | routing + exchange | exchange |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| **A** | 1 | 11.80 | 10.00 | 0.91 | 1.25 | - |",
        "| **A** | 2 | 11.80 | 10.00 | - | - | 0.33 |",
        "",
        "An empty kernel of the same size in the same graph takes 0.91 us per launch with PDL, 1.53 us without.",
    ]
    assert plot.provenance(measured) == (
        "NVIDIA H200, 2026-11-30, driver 580.1, SM clock 1980 MHz and memory clock 3201 MHz under load, commit 0123456789ab; "
        "medians of 25 replays."
    )


def test_the_document_keeps_what_is_written_by_hand() -> None:
    measured = plot.Measured(speed_data())
    blank = "".join(f"before {name}\n<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in plot.SECTIONS) + "end"
    once = plot.filled(blank, measured)
    assert plot.filled(once, measured) == once and "old" not in once and once.endswith("end")
    assert all(f"before {name}\n<!-- {name} -->\n{write(measured)}\n<!-- /{name} -->" in once for name, write in plot.SECTIONS.items())
    with pytest.raises(ValueError, match="<!-- times -->"):
        plot.filled(blank.replace("<!-- times -->", ""), measured)


def test_the_picture_is_the_same_each_time() -> None:
    measured = plot.Measured(speed_data())
    drawn = plot.picture(measured)
    assert drawn == plot.picture(plot.Measured(speed_data()))
    assert plot.identity(measured).encode() in drawn and b"<dc:date>" not in drawn
    assert plot.series(measured)["A"]["cluster, with finalize"] == [[1, 1.5]]
    other = plot.Measured(speed_data(speed_row(2, "cluster", 13.0)))
    assert plot.identity(other) != plot.identity(measured)


def test_failed_measurements_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"{name}.file" for name in ("results", "document", "picture")}
    data = speed_data(speed_row(2, "cluster", 9.99, ok=False, problems=["too good"]))
    files["results"].write_text(json.dumps(data))
    files["document"].write_text("".join(f"<!-- {name} --><!-- /{name} -->" for name in plot.SECTIONS))
    monkeypatch.setattr(sys, "argv", ["plot", *(word for name, path in files.items() for word in (f"--{name}", str(path)))])
    assert plot.main() == 1
    assert "too good" in capsys.readouterr().err and "9.99" not in files["document"].read_text()
    assert files["picture"].read_bytes() == plot.picture(plot.Measured(speed_data()))


def test_the_committed_document_and_picture_are_of_the_committed_results() -> None:
    measured = plot.Measured(json.loads(plot.RESULTS.read_text()))
    document = plot.DOCUMENT.read_text()
    assert plot.filled(document, measured) == document, "run: python -m benchmarks.plot"
    assert plot.identity(measured) in plot.PICTURE.read_text(), "run: python -m benchmarks.plot"


def test_speed_rows_choose_structures(machine: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run writes is what the table is made of: of each structure the time with PDL and without trigger."""
    made = {("list", True, False): 15.0, ("list", False, False): 1.0, ("list", True, True): 2.0, ("cluster", True, False): 17.0}
    results = speed_results(h200_speed.Bench(torch.device("cpu"), replays=2), tmp_path)
    for row in results.rows:
        row["ours_us"] = made[row["structure"], row["pdl"], row["trigger"]] + row["tokens"]
    results.save()
    monkeypatch.setattr(choose_structures, "menu_specs", lambda: [(s, spec) for s in TWO_SHAPES for spec in specs_of(s, ("sm_90a",))])
    found = choose_structures.read(results.path)
    assert {(row.shape.experts, row.tokens, row.structure, row.us) for row in found} == {
        (experts, tokens, structure, us + tokens)
        for experts in (32, 64)
        for tokens in (1, 9)
        for structure, us in (("list", 15.0), ("cluster", 17.0))
    }
    assert len(found) == 8 and found == sorted(found)
    results.rows.reverse()
    results.save()
    assert choose_structures.module(choose_structures.read(results.path)) == choose_structures.module(found)
    assert list(choices(found).values()) == [{1: "list", 9: "list"}] * 2
