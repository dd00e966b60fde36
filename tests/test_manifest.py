"""Manifest: strict reading, build id, atomic writing, integrity of the cubins."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megamoe_aot import DamagedArtifactError, ManifestError
from megamoe_aot.finalize import FinalizeSpec
from megamoe_aot.manifest import Manifest
from megamoe_aot.menu import menu_specs
from megamoe_aot.spec import ARCHS
from tests.fake_driver import fake_artifacts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_artifacts(tmp_path)
    return tmp_path


def edited(folder: Path, edit: Any) -> None:
    """Change the manifest's JSON in place."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def test_the_whole_menu_survives_a_round_trip(folder: Path) -> None:
    read = Manifest.load(folder)
    assert [(entry.model, entry.spec) for entry in read.entries] == [(shape.model, spec) for shape, spec in menu_specs()]
    assert read.archs == ("sm_100f", "sm_90a")
    assert {read.record(entry).arch for entry in read.entries if entry.spec.arch == "sm_90a"} == {"sm_90a"}
    row_major = {entry.cubin for entry in read.entries if entry.spec.layout == "row_major" and entry.spec.hidden == 2048}
    assert len(row_major) == 2 * 2 * 2 * 3, "both w13 orders share a cubin: 2 archs x 2 models x 2 logits dtypes x (cluster, list8, list16)"
    assert {entry.spec for entry in read.finalize} == {FinalizeSpec(hidden, 8, arch) for hidden in (2048, 4096, 7168) for arch in ARCHS}


def test_every_cubin_names_its_spec(folder: Path) -> None:
    read = Manifest.load(folder)
    assert {read.spec_of(sha256).code_name: sha256 for sha256 in read.cubins} == {r.code: sha for sha, r in read.cubins.items()}
    with pytest.raises(KeyError):
        read.spec_of("0" * 64)


def test_entries_of_one_model_have_names_of_their_own() -> None:
    names = [spec.name for _, spec in menu_specs()]
    assert len(set(names)) == len(names)
    grouped = [spec for shape, spec in menu_specs() if shape.model == "DeepSeek-V3"]
    assert {(s.scoring, s.groups, s.top_groups, s.scale) for s in grouped} == {("sigmoid_bias_grouped", 8, 4, 2.5)}


def test_saving_twice_gives_the_same_bytes_and_leaves_nothing_behind(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    names = sorted(folder.iterdir())
    Manifest.load(folder).save(folder)
    assert (folder / "manifest.json").read_bytes() == before
    assert sorted(folder.iterdir()) == names


def _drop(data: Any, layout: str) -> None:
    """Remove the last entry of a layout: a row_major cubin has another entry that names it."""
    at = max(i for i, entry in enumerate(data["entries"]) if entry["spec"]["layout"] == layout)
    del data["entries"][at]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(format=1), "format 1, this version of megamoe_aot reads format 2"),
        (lambda data: data.pop("compiler"), "missing or unknown fields ['compiler']"),
        (lambda data: data.update(extra=1), "missing or unknown fields ['extra']"),
        (lambda data: data["entries"][0].pop("cluster"), "missing or unknown fields ['cluster']"),
        (lambda data: data["entries"][0]["spec"].update(colour="red"), "unknown spec fields ['colour']"),
        (lambda data: data["entries"][0]["spec"].update(inter=100), "multiple of 128"),
        (lambda data: next(iter(data["cubins"].values())).pop("symbol"), "missing or unknown fields ['symbol']"),
        (lambda data: _drop(data, "trtllm_gen"), "disagree"),
        (lambda data: _drop(data, "row_major"), "build_id"),
        (lambda data: data.pop("finalize"), "missing or unknown fields ['finalize']"),
        (lambda data: data["finalize"].pop(), "disagree"),
        (lambda data: data["finalize"].append(data["finalize"][0]), "two finalize kernels have one spec"),
        (lambda data: data["finalize"][0].pop("cubin"), "missing or unknown fields ['cubin']"),
        (lambda data: data["finalize"][0]["spec"].update(inter=512), "unknown finalize spec fields ['inter']"),
        (lambda data: data["finalize"][0]["spec"].update(top_k=7), "names a cubin of finalize_h4096_k8"),
        (lambda data: data["finalize"][0].update(cubin=data["entries"][0]["cubin"]), "disagree|names a cubin of"),
        (lambda data: data["finalize"].reverse(), "changed after the build"),
        (lambda data: data["cubins"].popitem(), "disagree"),
        (lambda data: data["entries"][0].update(cubin=data["entries"][1]["cubin"]), "disagree|names a cubin of"),
        (lambda data: data["entries"][0].update(dynamic_shared=7), "changed after the build"),
    ],
)
def test_a_manifest_that_is_not_exactly_right_is_refused(folder: Path, edit: Any, message: str) -> None:
    edited(folder, edit)
    with pytest.raises(ManifestError, match=message if "|" in message else re.escape(message)):
        Manifest.load(folder)


def test_text_that_is_no_json_and_a_missing_file_are_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ManifestError, match="not JSON"):
        Manifest.load(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ManifestError, match=r"install the wheel.*build_kernels\.py"):
        Manifest.load(folder)


def test_validated_on_does_not_change_the_build_id(folder: Path) -> None:
    before = Manifest.load(folder).build_id
    edited(folder, lambda data: next(iter(data["cubins"].values())).update(validated_on=["NVIDIA H200"]))
    assert Manifest.load(folder).build_id == before


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_and_any_truncation_of_a_cubin_is_found(folder: Path, data: st.DataObject) -> None:
    manifest = Manifest.load(folder)
    sha256 = data.draw(st.sampled_from(sorted(manifest.cubins)))
    path = folder / f"{sha256}.cubin"
    image = path.read_bytes()
    assert manifest.read_cubin(sha256) == image
    position = data.draw(st.integers(0, len(image) - 1))
    flipped = bytearray(image)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(flipped)
        with pytest.raises(DamagedArtifactError, match=f"sha256.*{sha256}"):
            manifest.read_cubin(sha256)
        path.write_bytes(image[:position])
        with pytest.raises(DamagedArtifactError, match=f"{position} bytes, the manifest says {len(image)}"):
            manifest.read_cubin(sha256)
        path.unlink()
        with pytest.raises(DamagedArtifactError, match="cannot read"):
            manifest.read_cubin(sha256)
    finally:
        path.write_bytes(image)
