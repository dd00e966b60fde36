"""The emulator's inputs are those of the reference, the command line judges what it ran, and wrong PTX fails."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.expected import Call
from emulator import Finding, Pointer, SparseBuffer, TensorMap
from emulator.findings import Where
from megamoe_aot import abi, tensor_map
from megamoe_aot.errors import DamagedArtifactError
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.menu import LEAD, QWEN3_30B, specs_of
from megamoe_aot.spec import KernelSpec
from megamoe_aot.weights import Packed, unpack_expert
from tests.data import HARD_INPUTS, Problem
from verification import run
from verification.problem import EmulatedCall, shared_labels
from verification.run import Schedule

CHEAP = "moe_h2048_i768_e128_k8_softmax_trtllm_gen_fp32_sm_100f"
"""The entry whose route takes the least time."""

SMALL = KernelSpec(hidden=1024, inter=128, experts=32, top_k=4, arch="sm_90a", layout="row_major", w13_order="gate_up", tokens=4, scale=2.5)


@functools.cache
def manifest() -> Manifest:
    return Manifest.load()


def cheap_entry() -> Entry:
    return next(entry for entry in manifest().entries if entry.spec.name == CHEAP)


# ------------------------------------------------------------------------------------------------------------------ The inputs


@pytest.mark.parametrize("spec", [SMALL, dataclasses.replace(SMALL, layout="trtllm_gen", w13_order="up_gate")], ids=lambda s: s.layout)
def test_pages_hold_the_chosen_experts_and_nothing_else(spec: KernelSpec) -> None:
    call = EmulatedCall(spec, Call(2, 3))
    buffers = {buffer.name: buffer for buffer in call.buffers([1, 6])}
    chosen = {int(call.routing.ids[0, 1]), int(call.routing.ids[1, 2])}
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    shapes = {"w13": (torch.uint8, (1, 8, 256, 128)), "w2": (torch.uint8, (1, 1, 1024, 128))}
    if spec.layout == "row_major":
        shapes = {"w13": (torch.uint8, (1, 256, 1024)), "w2": (torch.uint8, (1, 1024, 128))}
    shapes |= {"w13_scale": (torch.float32, (1, 2, 8)), "w2_scale": (torch.float32, (1, 8, 1))}
    for expert in range(spec.experts):
        pages = {}
        for name in shapes:
            data = buffers[name].data
            assert isinstance(data, SparseBuffer)
            pages[name] = data.page(expert)
        if expert not in chosen:
            assert set(map(type, pages.values())) == {type(None)}
            continue
        tensors = {
            name: torch.from_numpy(page).view(shapes[name][0]).view(shapes[name][1]) for name, page in pages.items() if page is not None
        }
        unpacked = unpack_expert(Packed(**tensors), 0, layout=spec.layout, w13_order=spec.w13_order)
        for got, want in zip(unpacked, Problem.of(spec, 1).expert(expert), strict=True):  # weights are always those of seed 0
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_parameters_follow_the_abi() -> None:
    call = EmulatedCall(SMALL, Call(1, 0, changes=(("limit", None), ("scale", 0.5), ("ue8m0", True))))
    values = dict(zip([p.name for p in abi.PARAMETERS], call.parameters(), strict=True))
    assert [values[name] for name in ("x", "bias", "out", "w2_scale")] == [Pointer(name) for name in ("x", "bias", "out", "w2_scale")]
    assert values["w13_map"] == TensorMap(tensor_map.w13_map(SMALL), "w13") and values["w2_map"] == TensorMap(
        tensor_map.w2_map(SMALL), "w2"
    )
    assert (values["scale"], values["limit"], values["flags"]) == (0.5, float("inf"), abi.FLAG_UE8M0 | abi.FLAG_GATE_FIRST)
    softmax = dataclasses.replace(SMALL, scoring="softmax", w13_order="up_gate", limit=3.0)
    values = dict(zip([p.name for p in abi.PARAMETERS], EmulatedCall(softmax, Call(1, 0)).parameters(), strict=True))
    assert (values["bias"], values["limit"], values["flags"]) == (Pointer(None), 3.0, 0)


def test_inputs_are_marked_as_the_predecessors_and_outputs_are_poisoned() -> None:
    buffers = {buffer.name: buffer for buffer in EmulatedCall(SMALL, Call(2, 0)).buffers()}
    assert {name for name, buffer in buffers.items() if buffer.predecessor} == {"x", "logits"}
    outputs = {name: buffer.data for name, buffer in buffers.items() if buffer.role == "output"}
    assert {name: data.size for name, data in outputs.items()} == {"out": 8 * 1024 * 2, "ids": 8 * 4, "weights": 8 * 4}
    assert all(isinstance(data, np.ndarray) and (data == 0xFF).all() for data in outputs.values())


def test_the_reference_of_some_routes_is_that_of_the_whole_call() -> None:
    call = EmulatedCall(SMALL, Call(2, 1))
    whole = Problem.of(SMALL, 2, seed=1).replace(seed=1)
    some = call.reference([2, 5])
    inputs = whole.reference(logits_dtype=torch.bfloat16)  # weights of seed 1: only the routing is the same
    assert torch.equal(some.ids, inputs.ids) and torch.equal(some.weights, inputs.weights)
    everything = call.reference()
    assert torch.equal(some.out[[2, 5]], everything.out[[2, 5]])
    assert not some.out[[0, 1, 3, 4, 6, 7]].any() and everything.out.any(1).all()


def test_every_barrier_and_region_has_a_label() -> None:
    for shape in (LEAD, QWEN3_30B):
        for spec in specs_of(shape, structures=("cluster",)):
            labels = shared_labels(spec)
            shared = spec.shared
            barriers = sum(number for number, _ in shared.barrier_counts.values())
            groups = shared.operand_blocks + (shared.zero_group is not None)
            assert len(labels) == shared.ring + groups + 8 + barriers == len(set(labels.values()))
            assert labels[shared.barriers["full"] + 8] == "full[1]" and labels[shared.sums] == "sums"


# ------------------------------------------------------------------------------------------------------------ The command line


def test_a_route_agrees_and_the_results_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, file = tmp_path / "t.svg", tmp_path / "r.json"
    arguments = ["--entry", CHEAP, "--tokens", "2", "--routes", "12", "--timeline", str(picture), "--json", str(file)]
    assert run.main(arguments) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["ok"], row["bits_equal"], row["ids_equal"], row["findings"], row["routes"]) == (True, 1.0, True, [], [12])
    assert row["weights_error"] < 1e-6
    assert "full[0]" not in capsys.readouterr().out and "<svg" in picture.read_text()


def test_wrong_ptx_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GEMM2 reads its scales one place too far: ordinary data, no finding, a wrong result."""
    spec = cheap_entry().spec
    right = run.ptx_of(manifest(), cheap_entry())
    mine, next_one = (f", {spec.shared.hidden_scale + offset};" for offset in (0, 16))
    assert right.count(mine) >= 2
    monkeypatch.setattr(run, "ptx_of", lambda manifest, entry: right[::-1].replace(mine[::-1], next_one[::-1], 1)[::-1])
    file = tmp_path / "r.json"
    assert run.main(["--entry", CHEAP, "--routes", "0", "--no-checks", "--json", str(file)]) == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert not row["ok"] and row["relative_error"] > 1e-2 and "which no rounding edge explains" in row["problems"][0]


def test_ptx_that_is_not_the_cubins_is_refused(tmp_path: Path) -> None:
    entry, record = cheap_entry(), manifest().record(cheap_entry())
    only = dataclasses.replace(manifest(), cubins={entry.cubin: record}, entries=(entry,), folder=tmp_path)
    shutil.copy(manifest().folder / f"{entry.cubin}.cubin", tmp_path)
    with pytest.raises(DamagedArtifactError, match=r"PTX is not in the wheel: python build_kernels\.py"):
        run.ptx_of(only, entry)
    ptx = (manifest().folder / f"{entry.cubin}.ptx").read_text()
    (tmp_path / f"{entry.cubin}.ptx").write_text(ptx.replace("bar.sync", "bar.sync ", 1))
    with pytest.raises(DamagedArtifactError, match=f"the manifest says {record.ptx_sha256}"):
        run.ptx_of(only, entry)
    (tmp_path / f"{entry.cubin}.ptx").write_text(ptx)
    assert run.ptx_of(only, entry) == ptx


@pytest.mark.parametrize("arguments", [["--entry", "no such"], ["--hard", "no such"], ["--checks", "E-RACE,E-NONE"]])
def test_a_run_of_nothing_is_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    assert "no such" in capsys.readouterr().err or "E-NONE" in arguments[1]


def test_the_full_plan_runs_what_the_project_claims() -> None:
    plan = list(run.full_plan(manifest(), jobs=1))
    clusters = {entry.spec.name for entry in manifest().entries if entry.spec.structure == "cluster"}
    assert {entry.spec.name for entry, *_ in plan if entry.spec.structure == "cluster"} == clusters
    for arch in ("sm_90a", "sm_100f"):
        here = [job for job in plan if job[0].spec.arch == arch]
        mine = [job[1:] for job in here if job[0].model == LEAD.model and job[0].spec.structure == "cluster"]
        whole = {schedule for _, routes, schedule in mine if routes is None}
        assert len(whole) == 5 == len({(s.policy, s.seed) for s in whole}) and all(s.checks == Schedule().checks for s in whole)
        assert {call.case for call, *_ in mine} - {""} == set(HARD_INPUTS)
        lists = [
            (e.spec.hidden, e.spec.inter) for e, call, routes, _ in here if e.spec.columns == 8 and call.tokens == 1 and routes is None
        ]
        assert sorted(lists) == [(2048, 512), (2048, 768), (4096, 512)]
    assert [call.tokens for _, call, _, schedule in plan if schedule.flags == abi.FLAG_TRIGGER] == [3]


def test_routes_leave_list_entries_out_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["--entry", "h2048_i512_e256_k8_softmax_trtllm_gen_bf16_list8_sm_90a", "--routes", "0"])
    assert "1 list entries are left out" in capsys.readouterr().out


def test_only_half_tiles_are_tolerated() -> None:
    where = Where(cluster=0, cta=0, warp=0, line=1, text="")
    half, full = (next(e.spec for e in manifest().entries if e.spec.hidden == h and e.spec.arch == "sm_100f") for h in (7168, 4096))
    said, other = Finding("E-UNINIT", run.HALF_TILE, where), Finding("E-UNINIT", "read of shared memory that nobody wrote", where)
    assert run.tolerated(half, said) and not run.tolerated(half, other) and not run.tolerated(full, said)
