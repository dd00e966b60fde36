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
from megamoe_aot.manifest import Manifest
from megamoe_aot.menu import menu_specs
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
    assert len(row_major) == 4, "both w13 orders share a cubin: 2 archs x 2 logits dtypes"


def test_saving_twice_gives_the_same_bytes_and_leaves_nothing_behind(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    names = sorted(folder.iterdir())
    Manifest.load(folder).save(folder)
    assert (folder / "manifest.json").read_bytes() == before
    assert sorted(folder.iterdir()) == names


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(format=2), "format 2, this version of megamoe_aot reads format 1"),
        (lambda data: data.pop("compiler"), "missing or unknown fields ['compiler']"),
        (lambda data: data.update(extra=1), "missing or unknown fields ['extra']"),
        (lambda data: data["entries"][0].pop("cluster"), "missing or unknown fields ['cluster']"),
        (lambda data: data["entries"][0]["spec"].update(colour="red"), "unknown spec fields ['colour']"),
        (lambda data: data["entries"][0]["spec"].update(inter=100), "multiple of 128"),
        (lambda data: next(iter(data["cubins"].values())).pop("symbol"), "missing or unknown fields ['symbol']"),
        (lambda data: data["entries"].pop(), "build_id"),
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
