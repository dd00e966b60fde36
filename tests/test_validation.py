"""Recording which GPU ran a build: only for that very build, only for what passed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.build.lock import Lock, LockedCode
from kernels.build.validation import validated
from megamoe_aot.manifest import Manifest
from tests.fake_driver import fake_artifacts


@pytest.fixture
def built(tmp_path: Path) -> Manifest:
    fake_artifacts(tmp_path)
    return Manifest.load(tmp_path)


def hopper(built: Manifest) -> list[Any]:
    return [entry.spec for entry in built.entries if entry.spec.arch == "sm_90a"]


def lock_of(built: Manifest) -> Lock:
    return Lock("digest", {"ptxas": "1"}, {e.spec.code_name: LockedCode(e.cubin, e.cubin) for e in built.entries})


def results(folder: Path, build_id: str, names: list[str], ok: bool = True) -> Path:
    rows: list[dict[str, Any]] = [{"entry": name, "ok": ok} for name in names]
    header = {"build_id": build_id, "gpu": "GPU X", "driver": "1.2", "date": "2026-11-29T00:00:00"}
    path = folder / "run.json"
    path.write_text(json.dumps({"header": header, "rows": rows, "checks": []}))
    return path


def test_only_codes_whose_entries_all_passed(built: Manifest, tmp_path: Path) -> None:
    """A row_major cubin serves two entries (both w13 orders): one of them alone does not validate it."""
    trtllm = [spec for spec in hopper(built) if spec.layout == "trtllm_gen"]
    half = [spec for spec in hopper(built) if spec.w13_order == "gate_up"]
    run = results(tmp_path, built.build_id, [spec.name for spec in trtllm + half])
    found = validated(lock_of(built), built, run)
    assert {name for name, code in found.codes.items() if code.validated_on} == {spec.code_name for spec in trtllm}
    assert found.codes[trtllm[0].code_name].validated_on == ("GPU X, driver 1.2, 2026-11-29",)
    assert validated(found, built, run) == found


def test_another_build_is_refused(built: Manifest, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="measured build"):
        validated(lock_of(built), built, results(tmp_path, "f" * 64, [hopper(built)[0].name]))


def test_a_failed_run_is_refused(built: Manifest, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="failures"):
        validated(lock_of(built), built, results(tmp_path, built.build_id, [hopper(built)[0].name], ok=False))
