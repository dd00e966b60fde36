"""Golden files read back what was recorded, differences are traced or reported, TMA means what a plain loop says, and the H200 agrees."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import checks, report
from benchmarks.expected import Call, Oracle
from emulator import Buffer
from kernels.build.ptx import census
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.menu import menu_specs
from megamoe_aot.reference import moe_reference
from megamoe_aot.spec import KernelSpec
from megamoe_aot.tensor_map import TensorMapSpec
from megamoe_aot.weights import Packed, to_logical
from verification import agreement, golden, tensor_maps
from verification.agreement import Tally, compare_call, explain
from verification.golden import WHOLE, Golden
from verification.problem import EmulatedCall
from verification.run import ptx_of

# ---------------------------------------------------------------------------------------------------------- Against the H200


@functools.cache
def manifest() -> Manifest:
    return Manifest.load()


def entry_of(name: str) -> Entry:
    return next(entry for entry in manifest().entries if entry.spec.name == name)


@pytest.mark.parametrize(("name", "seed", "route"), [(WHOLE[0], 3, 2), (WHOLE[1], 11, 5)], ids=["lead", "qwen3"])
def test_the_emulator_computes_what_the_h200_computed(name: str, seed: int, route: int) -> None:
    """A part of ``python -m verification agreement``."""
    recorded = Golden()
    entry = entry_of(name)
    recorded.check_cubin(entry)
    call = next(call for call in recorded.of_entry(name) if call.call == Call(1, seed))
    tally = Tally()
    compare_call(tally, recorded, call, EmulatedCall(entry.spec, call.call), ptx_of(manifest(), entry), [route])
    assert tally.problems == [] and tally.elements == entry.spec.hidden


def test_every_hopper_cluster_entry_of_two_models_was_recorded() -> None:
    """Of the models whose whole rows are stored; the other models and the list structure are compared on the GPU itself."""
    recorded = Golden()
    models = {entry_of(name).model for name in WHOLE}
    for entry in manifest().entries:
        if entry.spec.arch == "sm_90a" and entry.spec.structure == "cluster" and entry.model in models:
            assert [call.call for call in recorded.of_entry(entry.spec.name)] == golden.calls_of(entry.spec)
    for name in WHOLE:
        for call in recorded.of_entry(name):
            rows = [recorded.out(call, route) for route in range(8)]
            assert sum(row is not None for row in rows) == (1 if call.call.case else 8)
            assert all(row is None or golden.row_hash(row) == wanted for row, wanted in zip(rows, call.hashes, strict=True))


# --------------------------------------------------------------------------------------------------------------- Golden files

SMALL = KernelSpec(hidden=1024, inter=128, experts=32, top_k=2, arch="sm_90a", cluster=8)
CALLS = golden.calls_of(SMALL)[::4]


@dataclasses.dataclass
class ReferenceLayer:
    """A bound layer that computes with the reference."""

    spec: KernelSpec
    packed: Packed

    def __call__(self, x: Any, logits: Any, bias: Any = None, *, out: Any, ids: Any, weights: Any, **_: Any) -> None:
        options = dataclasses.asdict(EmulatedCall(self.spec, Call(1, 0)).options)
        logical = to_logical(*self.packed, layout=self.spec.layout, w13_order=self.spec.w13_order)
        result = moe_reference(x, logits, bias, *logical, **options)
        for to, value in ((out, result.out), (ids, result.ids), (weights, result.weights)):
            to.copy_(value)


def test_golden_files_read_back_what_was_recorded(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        oracle = Oracle(SMALL, pool)
        packed = oracle.weights_problem().packed(layout=SMALL.layout, w13_order=SMALL.w13_order)
        subject = checks.Subject(ReferenceLayer(SMALL, packed), packed, oracle, ReferenceLayer(SMALL, packed))  # type: ignore[arg-type]
        recorded = [golden.record_call(subject, call) for call in CALLS]
    golden.write_outputs(tmp_path, SMALL.name, recorded)
    report.write_json(tmp_path / golden.FILE_NAME, {"cubins": {SMALL.name: "sha"}}, rows=[call.row() for call, _ in recorded])

    files = Golden(tmp_path)
    for (call, bits), read in zip(recorded, files.of_entry(SMALL.name), strict=True):
        want = EmulatedCall(SMALL, call.call).reference()
        assert read.call == call.call and read.ids.tolist() == want.ids[0].tolist()
        assert read.weights.tobytes() == want.weights.numpy().tobytes()
        assert read.hashes == tuple(golden.row_hash(row) for row in golden.out_bits(want.out))
        stored = files.out(read, 0)
        assert stored is not None and stored.tobytes() == bits[0].tobytes()
        assert (files.out(read, 1) is None) == bool(call.call.case)
    assert len({call.hashes for call, _ in recorded}) > 5


def test_golden_files_of_another_cubin_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"make it on a Hopper GPU: python -m verification\.golden"):
        Golden(tmp_path)
    report.write_json(tmp_path / golden.FILE_NAME, {"cubins": {WHOLE[0]: "0123"}}, rows=[])
    with pytest.raises(ValueError, match=f"what cubin 0123 computed, the artifacts hold cubin {entry_of(WHOLE[0]).cubin}"):
        Golden(tmp_path).check_cubin(entry_of(WHOLE[0]))


# ---------------------------------------------------------------------------------------------------------------- Differences


def bf16(values: np.ndarray) -> np.ndarray:
    return golden.out_bits(torch.from_numpy(values).bfloat16())


def test_a_difference_within_the_approximations_is_explained() -> None:
    """The GPU's row is one that the emulator computes when approximations are 2 ulp off; a corrupted element of it is not."""
    rng = np.random.default_rng(0)
    row = rng.normal(size=64).astype(np.float32)

    def emulate_row(ulps: int, seed: int) -> np.ndarray:
        moved = row.copy()
        moved[:3] *= 1 + 0.05 * ulps * np.random.default_rng(seed).uniform(-1, 1)
        return bf16(moved)

    gpu = row.copy()
    gpu[:3] *= 1.09
    assert explain(bf16(gpu), bf16(row), emulate_row) == (3, 2)
    gpu[40] += 1
    assert explain(bf16(gpu), bf16(row), emulate_row) == (3, 2)
    gpu[1] = np.nan
    assert explain(bf16(gpu), bf16(row), emulate_row) == (2, 2)


def test_what_is_not_explained_is_a_problem() -> None:
    good = Tally(calls=1, routes=2, elements=4000, equal=3998, explained=2, weights=2, weights_worst_ulps=2)
    assert good.problems == []
    for bad, word in (
        (dataclasses.replace(good, equal=3990), "99.7500%"),
        (dataclasses.replace(good, explained=1, unexplained=1), "1 elements differ"),
        (dataclasses.replace(good, ids_different=1), "1 expert ids"),
        (dataclasses.replace(good, weights_worst_ulps=9), "9 ulp"),
    ):
        (problem,) = bad.problems
        assert word in problem


def test_only_documented_approximations_are_used() -> None:
    found = set()
    for sha256 in {entry.cubin for entry in manifest().entries if entry.spec.structure == "cluster"}:  # those with golden files
        ptx = (manifest().folder / f"{sha256}.ptx").read_text()
        assert set(agreement.approximate_opcodes(ptx)) <= {"ex2.approx.ftz.f32"}
        found |= set(census(ptx))
    assert "ex2.approx.ftz.f32" in found
    with pytest.raises(ValueError, match=r"no documented error for \['rcp\.approx\.ftz\.f32'\]"):
        agreement.approximate_opcodes(ptx.replace("ex2.approx", "rcp.approx"))


# ------------------------------------------------------------------------------------------------------------------------- TMA

SMALL_MAPS = [dataclasses.replace(spec, dims=(*spec.dims[:2], 3)) for spec in tensor_maps.descriptions(spec for _, spec in menu_specs())]
"""Every description that the menu binds, with three outermost slices: that dimension only counts experts or their K blocks."""


def image_by_hand(spec: TensorMapSpec, data: np.ndarray, c: tuple[int, int, int]) -> np.ndarray:
    """Byte by byte: the box's slices of rows of 128 bytes, zeros outside the tensor, chunk j of row r at j ^ (r % 8)."""
    image = np.zeros(spec.box_bytes, np.uint8)
    inside = range(max(0, -c[0]), min(128, spec.dims[0] - c[0]))
    for z, r in itertools.product(range(spec.box[2]), range(spec.box[1])):
        if 0 <= c[1] + r < spec.dims[1] and 0 <= c[2] + z < spec.dims[2]:
            start = (c[2] + z) * spec.strides[1] + (c[1] + r) * spec.strides[0] + c[0]
            line = 128 * (spec.box[1] * z + r)
            for i in inside:
                image[line + 16 * (i // 16 ^ r % 8) + i % 16] = data[start + i]
    return image


@settings(max_examples=12)
@given(st.sampled_from(SMALL_MAPS), st.data())
def test_a_box_is_what_a_plain_loop_says(spec: TensorMapSpec, draw: st.DataObject) -> None:
    data = np.random.default_rng(1).integers(0, 256, spec.bytes, np.uint8)
    places = [[draw.draw(st.integers(-box, dim + box)) for dim, box in zip(spec.dims, spec.box, strict=True)] for _ in range(2)]
    for place in places:
        place[0] = place[0] // 128 * 128  # as every kernel does it: an H200 does not take every other place
    images = tensor_maps.emulated_images(spec, Buffer("tensor", data), np.array(places, np.int32))
    for image, (c0, c1, c2) in zip(images, places, strict=True):
        assert image.tobytes() == image_by_hand(spec, data, (c0, c1, c2)).tobytes()


def test_the_boxes_that_the_gpu_loads_reach_every_edge() -> None:
    for spec in tensor_maps.descriptions(spec for _, spec in menu_specs()):
        places, dims, box = tensor_maps.box_coordinates(spec), np.array(spec.dims), np.array(spec.box)
        inside = ((places >= 0) & (places + box <= dims)).all(1)
        outside = ((places + box <= 0) | (places >= dims)).any(1)
        assert inside.sum() > 20 and outside.sum() >= 6 and (~inside & ~outside).sum() > 3
        assert places.min(0).tolist() == (-box).tolist() and (places.max(0) >= dims).all()
