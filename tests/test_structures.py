"""Which structure serves which M: the measured table, the choice of variants, and what load_kernel then loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megamoe_aot as mm
from benchmarks import choose_structures
from megamoe_aot import loader, measured, structures
from megamoe_aot.manifest import Manifest
from megamoe_aot.menu import LEAD, QWEN3_30B, specs_of
from megamoe_aot.selection import Choice, Query, select, variants
from megamoe_aot.spec import KernelSpec
from megamoe_aot.structures import Row, Shape, choices, faster
from tests.fake_driver import B200, H200, FakeDriver, fake_artifacts, install

GLM: dict[str, Any] = {"hidden": 4096, "inter": 512, "experts": 288, "top_k": 8}
SPEC = next(specs_of(LEAD, ("sm_90a",)))
SHAPE = Shape(4096, 512, 288, 8, "sigmoid_bias", "trtllm_gen", "sm_90a")


def rows(shape: Shape, **us: tuple[float, float]) -> list[Row]:
    """``m4=(1.0, 2.0)``: with 4 tokens the cluster took 1 us and the list 2."""
    return [
        Row(shape, int(tokens[1:]), structure, time)
        for tokens, times in us.items()
        for structure, time in zip(("cluster", "list"), times, strict=True)
    ]


MEASURED = rows(SHAPE, m1=(17.4, 15.4), m2=(31.0, 26.7), m4=(52.5, 50.5), m8=(100.2, 100.1), m16=(190.1, 201.3))

Machine = Callable[..., FakeDriver]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """machine(*gpus, table=rows, only=...) installs a fake driver, artifacts and the measured table."""

    def make(*gpus: Any, table: list[Row] | None = None, only: Callable[[KernelSpec], bool] = lambda spec: True) -> FakeDriver:
        fake = FakeDriver(*gpus)
        install(monkeypatch, fake, fake_artifacts(tmp_path, only))
        monkeypatch.setattr(structures, "shipped", lambda: choices(table or []))
        return fake

    return make


# The table -----------------------------------------------------------------------------------------------------------


def test_a_shape_of_a_spec_is_the_same_in_both_structures() -> None:
    for shape in (LEAD, QWEN3_30B):
        assert len({Shape.of(spec) for spec in specs_of(shape, ("sm_90a",))}) == 2, "trtllm_gen and row_major"
    assert Shape.of(SPEC) == SHAPE


@pytest.mark.parametrize(
    ("tokens", "structure"), [(1, "list"), (2, "list"), (3, "list"), (5, "list"), (8, "list"), (9, "cluster"), (16, "cluster")]
)
def test_the_next_measured_count_decides(tokens: int, structure: str) -> None:
    assert faster(SPEC, tokens, choices(MEASURED)) == structure


def test_without_a_measurement_of_both_it_is_the_cluster() -> None:
    assert faster(SPEC, 1, {}) == "cluster"
    assert choices([row for row in MEASURED if row.structure == "list"]) == {}
    table = choices(MEASURED[:4])
    assert (faster(SPEC, 2, table), faster(SPEC, 3, table)) == ("list", "cluster"), "nothing was measured for 3 tokens or more"
    other = next(specs_of(LEAD, ("sm_100f",)))
    assert faster(other, 1, choices(MEASURED)) == "cluster"


def test_a_tie_is_the_clusters() -> None:
    assert choices(rows(SHAPE, m1=(5.0, 5.0))) == {SHAPE: {1: "cluster"}}


def test_the_shipped_table_is_readable() -> None:
    for shape, counts in structures.shipped().items():
        assert shape.arch in ("sm_90a", "sm_100f") and set(counts.values()) <= {"cluster", "list"}


# The choice for each M -----------------------------------------------------------------------------------------------


def group_of(manifest: Manifest, **query: Any) -> tuple[Choice, ...]:
    return select(manifest, Query(**GLM, **query))["sm_90a"]


def kinds(chosen: tuple[Choice, ...]) -> list[str]:
    return [f"{choice.spec.structure}{choice.spec.columns or ''}" for choice in chosen]


def test_each_m_has_its_variant(tmp_path: Path) -> None:
    group = group_of(fake_artifacts(tmp_path), tokens=16)
    table = choices(MEASURED)
    assert kinds(variants(group, 16, lambda spec, m: faster(spec, m, table))) == ["list8"] * 9 + ["cluster"] * 8
    assert kinds(variants(group, 16, lambda spec, m: "list")) == ["list8"] * 9 + ["list16"] * 8
    assert kinds(variants(group, 16, lambda spec, m: "cluster")) == ["cluster"] * 17
    assert kinds(variants(group, 0, lambda spec, m: "list")) == ["list8"], "M = 0 launches nothing but has shapes to give"


@given(wanted=st.lists(st.sampled_from(["cluster", "list"]), min_size=16, max_size=16), tokens=st.integers(0, 16))
def test_a_variant_serves_its_m_and_has_the_wanted_structure(wanted: list[str], tokens: int) -> None:
    specs = [spec for spec in specs_of(LEAD, ("sm_90a",)) if (spec.layout, spec.logits_dtype) == ("trtllm_gen", "bf16")]
    group = [Choice(None, spec) for spec in specs]  # type: ignore[arg-type]
    chosen = variants(group, tokens, lambda spec, m: wanted[m - 1])
    assert len(chosen) == tokens + 1
    for m, choice in enumerate(chosen):
        assert choice.spec.tokens >= m and choice.spec.structure == wanted[max(m, 1) - 1]
        assert choice.spec.columns in (0, 8 if m <= 8 else 16)


def test_a_build_without_the_faster_structure_serves_with_the_other(machine: Machine) -> None:
    machine(H200, table=MEASURED, only=lambda spec: spec.structure == "cluster")
    assert mm.load_kernel(**GLM, tokens=4).spec.structure == "cluster"


def test_a_build_of_list_kernels_alone_serves_what_they_can(machine: Machine) -> None:
    machine(H200, only=lambda spec: spec.columns == 8)
    assert mm.load_kernel(**GLM, tokens=8).spec.columns == 8
    reason = mm.why_not(**GLM, tokens=9)
    assert reason is not None and "tokens 0 to 8 (asked: 9)" in reason


# What is loaded ------------------------------------------------------------------------------------------------------


def loaded(fake: FakeDriver) -> list[str]:
    """Short names of the loaded cubins, in order."""
    symbols = [symbol for kernels in fake.libraries.values() for symbol in kernels]
    return [next((kind for kind in ("list8", "list16", "finalize") if kind in symbol), "cluster") for symbol in symbols]


@pytest.mark.parametrize(
    ("tokens", "structure", "expected"),
    [
        (16, None, ["list8", "cluster", "finalize"]),
        (8, None, ["list8", "finalize"]),
        (16, "list", ["list8", "list16", "finalize"]),
        (8, "list", ["list8", "finalize"]),
        (16, "cluster", ["cluster", "finalize"]),
        (1, "cluster", ["cluster", "finalize"]),
    ],
)
def test_only_what_serves_the_asked_tokens_is_loaded(machine: Machine, tokens: int, structure: str | None, expected: list[str]) -> None:
    fake = machine(H200, table=MEASURED)
    kernel = mm.load_kernel(**GLM, tokens=tokens, structure=structure)
    assert sorted(loaded(fake)) == sorted(expected)
    assert kernel.tokens == tokens == len(kernel.variants) - 1
    assert kernel.spec == kernel.variants[tokens].spec and kernel.record.code == kernel.spec.code_name
    assert kernel.active_clusters == (14 if "cluster" in expected else 0)
    assert kernel.processors == (132 if any("list" in name for name in expected) else 0)


def test_the_default_on_blackwell_is_the_cluster(machine: Machine) -> None:
    fake = machine(B200, table=MEASURED)
    mm.load_kernel(**GLM, tokens=16)
    assert loaded(fake) == ["cluster", "finalize"]


def test_an_unknown_structure_is_not_in_the_menu(machine: Machine) -> None:
    machine()
    reason = mm.why_not(**GLM, tokens=1, structure="ring")
    assert reason is not None and "structure 'cluster' (asked: 'ring')" in reason


def test_one_entry_can_be_loaded_for_all_its_tokens(machine: Machine) -> None:
    fake = machine(H200, B200, table=MEASURED)
    entry = next(e for e in mm.menu() if e.spec.columns == 16 and e.spec.arch == "sm_90a" and e.spec.layout == "row_major")
    kernel = loader.load_entry(entry)
    assert {variant.spec for variant in kernel.variants} == {entry.spec} and kernel.tokens == 16
    assert loaded(fake) == ["list16", "finalize"]
    with pytest.raises(mm.UnsupportedDeviceError):
        loader.load_entry(entry, device=1)


def test_a_missing_finalize_kernel_is_found_at_load(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = machine(H200)
    whole = loader.manifest()
    without = [entry for entry in whole.finalize if entry.spec.hidden != 4096]
    cubins = {sha: record for sha, record in whole.cubins.items() if not record.code.startswith("finalize_h4096")}
    lacking = Manifest(whole.source_digest, whole.compiler, cubins, whole.entries, whole.folder, tuple(without))
    monkeypatch.setattr(loader, "manifest", lambda: lacking)
    with pytest.raises(mm.ManifestError, match=r"no finalize_h4096_k8_sm_90a.*finalize=False"):
        mm.load_kernel(**GLM, tokens=1)
    assert "cuLibraryLoadData" not in fake.calls
    with pytest.raises(mm.ManifestError, match="no finalize_h4096_k8"):
        mm.has_kernel(**GLM, tokens=1)
    assert mm.has_kernel(**GLM, tokens=1, finalize=False)
    assert mm.load_kernel(**GLM, tokens=1, finalize=False).tokens == 1


# Residency -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine_fields", "words"),
    [
        ({"cooperative": False}, "cooperative launches (not there)"),
        ({"resident": 0}, "there is room for 0"),
        ({"processors": 7}, "at least 8 SMs (this process has 7)"),
        ({"context_processors": 4}, "at least 8 SMs (this process has 4)"),
    ],
)
def test_a_list_kernel_that_cannot_be_resident_is_refused_at_load(machine: Machine, machine_fields: dict[str, Any], words: str) -> None:
    fake = machine(H200)
    vars(fake).update(machine_fields)
    with pytest.raises(mm.ResidencyError) as caught:
        mm.load_kernel(**GLM, tokens=4, structure="list")
    assert words in str(caught.value) and 'structure="cluster" needs none of this' in str(caught.value)
    assert fake.libraries == {} and fake.stack == []
    assert mm.load_kernel(**GLM, tokens=4, structure="cluster").active_clusters == 14


def test_sixteen_columns_need_sixteen_sms(machine: Machine) -> None:
    """CTA t writes token t's ids and weights."""
    fake = machine(H200)
    fake.processors = 15
    assert mm.load_kernel(**GLM, tokens=8, structure="list").processors == 15
    with pytest.raises(mm.ResidencyError, match=r"at least 16 SMs \(this process has 15\)"):
        mm.load_kernel(**GLM, tokens=16, structure="list")


@pytest.mark.parametrize(("device", "context", "grid"), [(132, None, 132), (66, None, 66), (132, 40, 40), (40, 132, 40)])
def test_the_grid_is_the_smallest_of_the_drivers_answers(machine: Machine, device: int, context: int | None, grid: int) -> None:
    fake = machine(H200)
    fake.processors, fake.context_processors = device, context
    assert mm.load_kernel(**GLM, tokens=1, structure="list").processors == grid


def test_a_driver_that_cannot_name_the_contexts_sms_is_asked_for_the_devices(machine: Machine) -> None:
    fake = machine(H200)
    fake.fail["cuCtxGetDevResource"] = fake.CUresult.CUDA_ERROR_NOT_SUPPORTED
    assert mm.load_kernel(**GLM, tokens=1, structure="list").processors == 132


def test_a_list_kernel_gets_its_attributes_and_no_cluster_size(machine: Machine) -> None:
    fake = machine(H200)
    kernel = mm.load_kernel(**GLM, tokens=1, structure="list")
    shared = kernel.spec.work_list.total
    assert [set(k.attributes.items()) for k in fake.kernels.values()] == [
        {((0, "MAX_DYNAMIC_SHARED_SIZE_BYTES"), shared), ((0, "PREFERRED_SHARED_MEMORY_CARVEOUT"), 100)},
        {((0, "PREFERRED_SHARED_MEMORY_CARVEOUT"), 100)},
    ]
    assert "cuOccupancyMaxActiveClusters" not in fake.calls


# From a benchmark to the table ---------------------------------------------------------------------------------------


def result(spec: KernelSpec, tokens: int, us: float, **changes: Any) -> dict[str, Any]:
    return {"entry": spec.name, "tokens": tokens, "pdl": True, "ours_us": us, "ok": True} | changes


def entry(structure: str, columns: int = 0, logits_dtype: str = "bf16") -> KernelSpec:
    key = ("trtllm_gen", structure, columns, logits_dtype)
    return next(s for s in specs_of(LEAD, ("sm_90a",)) if (s.layout, s.structure, s.columns, s.logits_dtype) == key)


def test_rows_of_a_benchmark_become_the_table(tmp_path: Path) -> None:
    results = [
        result(entry("cluster"), 1, 17.0),
        result(entry("cluster", logits_dtype="fp32"), 1, 18.0),
        result(entry("cluster"), 1, 99.0, pdl=False),
        result(entry("list", 8), 1, 15.25),
        result(entry("list", 16), 1, 14.0),
        result(entry("list", 16), 16, 200.0),
        result(entry("cluster"), 16, 190.0),
    ]
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"header": {}, "rows": results}))
    found = choose_structures.read(path)
    assert found == [
        Row(SHAPE, 1, "cluster", 17.5),
        Row(SHAPE, 1, "list", 15.25),
        Row(SHAPE, 16, "cluster", 190.0),
        Row(SHAPE, 16, "list", 200.0),
    ], "the mean over logits dtypes; of two list kernels the one that load_kernel takes"
    assert choices(found) == {SHAPE: {1: "list", 16: "cluster"}}

    module: dict[str, Any] = {}
    exec(choose_structures.module(found), module)
    assert [Row(Shape(*row[:7]), *row[7:]) for row in module["ROWS"]] == found


def test_the_shipped_module_is_what_the_script_writes() -> None:
    path = Path(structures.__file__).with_name("measured.py")
    assert path.read_text() == choose_structures.module([Row(Shape(*row[:7]), *row[7:]) for row in measured.ROWS])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"ok": False}, "failed its checks"), ({"entry": "moe_unknown"}, "not in the menu"), ({"structure": "list"}, "says structure list")],
)
def test_doubtful_measurements_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"rows": [result(entry("cluster"), 1, 17.0, **changes)]}))
    with pytest.raises(ValueError, match=message):
        choose_structures.read(path)
