"""The build end to end: determinism, verification rules, atomic writing, the lock and the command line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import build_kernels
from kernels.build import artifacts, jobs, verify
from kernels.build.compile import ROOT, Compiled, clean_environment, compile_spec
from kernels.build.cubin import CubinFacts, CubinParameter, read_cubin
from kernels.build.errors import BuildError
from kernels.build.jobs import Built
from kernels.build.lock import Lock, LockedCode, differences
from kernels.build.ptx import read_entry
from kernels.build.ptxas_log import PtxasReport, read_log
from kernels.build.sources import source_digest
from megamoe_aot.finalize import CodeSpec, FinalizeSpec
from megamoe_aot.manifest import CubinRecord, Manifest
from megamoe_aot.menu import LEAD, menu_specs
from megamoe_aot.spec import ARCHS, KernelSpec
from tests.built import built, lead, lead_list_spec, lead_spec

# ---- the real compiler ----


def copy_of_sources(folder: Path) -> Path:
    """What a build reads, in another folder."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("kernels", "megamoe_aot"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "build_kernels.py", folder)
    return folder


def run_build(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "build_kernels.py", *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_two_builds_in_two_folders_are_identical(tmp_path: Path) -> None:
    """Another folder, another process and variables that would change the bytes if they reached the compiler."""
    folder = copy_of_sources(tmp_path)
    names = [argument for arch in ARCHS for argument in ("--entry", lead_spec(arch).code_name)]
    run = run_build(folder, *names, CUTE_DSL_LINEINFO="1", CUTE_DSL_KEEP="ptx", PYTHONHASHSEED="7")
    assert run.returncode == 0, run.stderr
    manifest = Manifest.load(folder / "artifacts")
    assert {entry.spec for entry in manifest.entries} == {lead_spec(arch) for arch in ARCHS}
    for entry in manifest.entries:
        ours = lead(entry.spec.arch)
        assert manifest.read_cubin(entry.cubin) == ours.compiled.cubin
        assert (manifest.folder / f"{entry.cubin}.ptx").read_text() == ours.compiled.ptx
        assert manifest.record(entry) == ours.record
    assert {entry.spec for entry in manifest.finalize} == {FinalizeSpec(4096, 8, arch) for arch in ARCHS}
    for summing in manifest.finalize:
        assert manifest.read_cubin(summing.cubin) == built(summing.spec).compiled.cubin
    assert manifest.source_digest == source_digest()
    assert str(folder) not in (manifest.folder / "manifest.json").read_text()


def test_compile_errors_name_the_code_and_leave_the_old_artifacts(tmp_path: Path) -> None:
    folder = copy_of_sources(tmp_path)
    (folder / "kernels" / "entry.py").write_text("raise RuntimeError('broken on purpose')\n")
    (folder / "artifacts").mkdir()
    (folder / "artifacts" / "manifest.json").write_text("old")
    name = lead_spec("sm_90a").code_name
    run = run_build(folder, "--entry", name, "--arch", "sm_90a")
    assert run.returncode == 1
    assert name in run.stderr and "broken on purpose" in run.stderr and "nothing was written" in run.stderr
    assert [p.name for p in (folder / "artifacts").iterdir()] == ["manifest.json"]
    assert (folder / "artifacts" / "manifest.json").read_text() == "old"


def test_a_stuck_compiler_is_an_error() -> None:
    with pytest.raises(BuildError, match="did not finish within 0 s"):
        compile_spec(lead_spec("sm_90a"), timeout=0.01)


def test_environment_is_cleaned() -> None:
    cleaned = clean_environment({"PATH": "p", "CUTE_DSL_ARCH": "sm_80", "CUTE_DSL_LINEINFO": "1", "HOME": "h", "PYTHONHASHSEED": "random"})
    assert cleaned == {"PATH": "p", "HOME": "h", "PYTHONHASHSEED": "0"}


# ---- verification ----

SPEC = lead_spec("sm_90a")


def good_facts() -> CubinFacts:
    return read_cubin(lead("sm_90a").compiled.cubin)


def good_report() -> PtxasReport:
    return read_log(lead("sm_90a").compiled.log, verify.symbol_of(SPEC))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "sm_100f"}, "the cubin is for sm_100f, the spec says sm_90a"),
        ({"arch": "sm_90"}, "the cubin is for sm_90, the spec says sm_90a"),
        ({"sm": 100}, "e_flags of the cubin say sm_100"),
        ({"symbol": "other"}, "the symbol is other"),
        ({"block": (192, 1, 1)}, "requires (192, 1, 1) threads, the spec says 160"),
        ({"block": (80, 2, 1)}, "requires (80, 2, 1) threads"),
        ({"stack_bytes": 8}, "stack frame of 8 bytes"),
        ({"static_shared": 4}, "4 bytes of static shared memory"),
        ({"registers": 169}, "169 registers; 2 CTAs of 160 threads leave 168"),
        ({"registers": 255}, "only 1 CTA fits an SM"),
        ({"parameter_bytes": 384}, "do not end at 384"),
    ],
)
def test_cubin_rules(change: dict[str, Any], message: str) -> None:
    assert verify.cubin_problems(SPEC, good_facts()) == []
    assert message in " | ".join(verify.cubin_problems(SPEC, dataclasses.replace(good_facts(), **change)))


def test_parameter_list_must_be_the_abi() -> None:
    facts = good_facts()
    resized = (*facts.parameters[:-1], CubinParameter(12, 376, 8))
    overlapping = (CubinParameter(0, 0, 8), CubinParameter(1, 4, 8), *facts.parameters[2:])
    for parameters, message in ((resized, "the ABI says"), (facts.parameters[:-1], "the ABI says"), (overlapping, "overlap")):
        assert message in " | ".join(verify.cubin_problems(SPEC, dataclasses.replace(facts, parameters=parameters)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spill_bytes": 4}, "ptxas spilled: 4 bytes"),
        ({"warnings": ("(C7514) serialized",)}, "ptxas warns: (C7514) serialized"),
        ({"registers": 1}, "log and cubin differ in origin"),
        ({"arch": "sm_100f"}, "log and cubin differ in origin"),
    ],
)
def test_log_rules(change: dict[str, Any], message: str) -> None:
    assert verify.log_problems(good_facts(), good_report()) == []
    (problem,) = verify.log_problems(good_facts(), dataclasses.replace(good_report(), **change))
    assert message in problem


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".minnctapersm 2", ".minnctapersm 1", ".minnctapersm is 1"),
        (".align 1024 .b8", ".align 16 .b8", "the swizzle needs 1024"),
        (".reqntid ", ".reqntid 1", ".reqntid is (1"),
        ("kind::f8f6f4", "kind::f16", "the PTX lacks ['tcgen05.mma with kind::f8f6f4']"),
        (".e4m3.e4m3", ".f16.f16", "the PTX lacks ['wgmma.mma_async with e4m3']"),
        ("st.async", "st.weak", "the PTX lacks ['st.async with shared::cluster']"),
        ("_param_12\n", "_param_12,\n.param .u32 more\n", "PTX parameters have"),
        ("griddepcontrol.wait", "griddepcontrol.launch_dependents", "no griddepcontrol.wait"),
    ],
)
def test_ptx_rules(arch: str, old: str, new: str, message: str) -> None:
    spec, text = lead_spec(arch), lead(arch).compiled.ptx
    if old not in text:
        assert (arch, old) in {("sm_90a", "kind::f8f6f4"), ("sm_100f", ".e4m3.e4m3")}, "each engine has its own MMA"
        return
    assert verify.ptx_problems(spec, read_entry(text)) == []
    assert message in " | ".join(verify.ptx_problems(spec, read_entry(text.replace(old, new))))


LIST = lead_list_spec("sm_90a")
FINALIZE = FinalizeSpec.of(LIST)


@pytest.mark.parametrize("arch", ARCHS)
def test_record_of_a_list_kernel(arch: str) -> None:
    """One CTA per SM, no clusters, two more parameters; nothing spilled."""
    spec, record = lead_list_spec(arch), built(lead_list_spec(arch)).record
    assert [(p.name, p.size) for p in record.parameters][-4:] == [("limit", 4), ("flags", 4), ("scratch", 8), ("tokens", 4)]
    assert (record.block, record.resident_ctas) == (spec.block_threads, 1)
    assert (record.code, record.symbol, record.spill_bytes, record.static_shared) == (spec.code_name, f"{spec.code_name}_0", 0, 0)


@pytest.mark.parametrize("arch", ARCHS)
def test_record_of_a_finalize_kernel(arch: str) -> None:
    record = built(FinalizeSpec(4096, 8, arch)).record
    assert [(p.name, p.size) for p in record.parameters] == [("out", 8), ("weights", 8), ("shared", 8), ("y", 8), ("flags", 4)]
    assert (record.code, record.symbol, record.block) == (f"finalize_h4096_k8_{arch}", f"finalize_h4096_k8_{arch}_0", 64)
    assert record.resident_ctas >= 2


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (LIST, {"registers": 255}, f"255 registers; 1 CTAs of {LIST.block_threads} threads leave "),
        (LIST, {"block": (160, 1, 1)}, f"requires (160, 1, 1) threads, the spec says {LIST.block_threads}"),
        (LIST, {"static_shared": 4}, "4 bytes of static shared memory"),
        (FINALIZE, {"stack_bytes": 8}, "stack frame of 8 bytes"),
        (FINALIZE, {"block": (128, 1, 1)}, "requires (128, 1, 1) threads, the spec says 64"),
    ],
)
def test_cubin_rules_of_the_other_kinds(spec: CodeSpec, change: dict[str, Any], message: str) -> None:
    facts = read_cubin(built(spec).compiled.cubin)
    assert verify.cubin_problems(spec, facts) == []
    assert message in " | ".join(verify.cubin_problems(spec, dataclasses.replace(facts, **change)))


def test_each_kind_has_its_own_parameter_list() -> None:
    kinds: list[CodeSpec] = [SPEC, LIST, FINALIZE]
    for code in kinds:
        facts, entry = read_cubin(built(code).compiled.cubin), read_entry(built(code).compiled.ptx)
        for spec in kinds:
            refused = any("the ABI says" in problem for problem in [*verify.cubin_problems(spec, facts), *verify.ptx_problems(spec, entry)])
            assert refused == (spec is not code)


TRIGGER = "griddepcontrol.launch_dependents;"


@pytest.mark.parametrize(
    ("spec", "old", "new", "message"),
    [
        (LIST, ".minnctapersm 1", ".minnctapersm 2", ".minnctapersm is 2, the budget is 1"),
        (LIST, ".align 1024 .b8", ".align 16 .b8", "the swizzle needs 1024"),
        (LIST, ".e4m3.e4m3", ".f16.f16", "the PTX lacks ['wgmma.mma_async with e4m3']"),
        (LIST, "atom.relaxed.gpu", "atom.relaxed.cta", "the PTX lacks ['atom with gpu with global with add']"),
        (LIST, "st.relaxed.gpu.global", "st.global", "the PTX lacks ['st.relaxed.gpu.global']"),
        (LIST, "ld.relaxed.gpu.global", "ld.global", "the PTX lacks ['ld.relaxed.gpu.global']"),
        (LIST, TRIGGER, "", "the PTX lacks ['griddepcontrol.launch_dependents']"),
        (LIST, "griddepcontrol.wait;", f"griddepcontrol.wait; {TRIGGER}", "the launch argument cannot turn it off"),
        (LIST, "griddepcontrol.wait;", "", "no griddepcontrol.wait"),
        (LIST, "griddepcontrol.wait;", "@%p1 griddepcontrol.wait;", "accesses memory of scratch"),
        (SPEC, "griddepcontrol.wait;", f"griddepcontrol.wait; {TRIGGER}", "must not let its successor start early"),
        (FINALIZE, ".minnctapersm 2", ".minnctapersm 1", ".minnctapersm is 1, the budget is 2"),
        (FINALIZE, "griddepcontrol.wait;", f"griddepcontrol.wait; {TRIGGER}", "the launch argument cannot turn it off"),
        (FINALIZE, TRIGGER, "griddepcontrol.wait;", "the PTX lacks ['griddepcontrol.launch_dependents']"),
        (FINALIZE, "griddepcontrol.wait;", "@%p1 griddepcontrol.wait;", "accesses memory of out"),
        (FINALIZE, ".entry", ".extern .shared .align 16 .b8 s[];\n.visible .entry", "aligned to 16, the swizzle needs None"),
    ],
)
def test_ptx_rules_of_every_kind(spec: CodeSpec, old: str, new: str, message: str) -> None:
    text = built(spec).compiled.ptx
    assert old in text and verify.ptx_problems(spec, read_entry(text)) == []
    assert message in " | ".join(verify.ptx_problems(spec, read_entry(text.replace(old, new))))


def test_a_cubin_of_another_arch_or_a_spilling_one_is_rejected() -> None:
    right, other = lead("sm_90a").compiled, lead("sm_100f").compiled
    assert verify.verify(SPEC, right) == lead("sm_90a").record
    with pytest.raises(BuildError, match="the cubin is for sm_100f, the spec says sm_90a"):
        verify.verify(SPEC, dataclasses.replace(right, cubin=other.cubin))
    spilling = dataclasses.replace(right, log=right.log.replace("0 bytes spill stores", "16 bytes spill stores"))
    with pytest.raises(BuildError, match="ptxas spilled: 16 bytes"):
        verify.verify(SPEC, spilling)
    with pytest.raises(BuildError, match="no ptxas report"):
        verify.verify(SPEC, dataclasses.replace(right, log=""))
    with pytest.raises(BuildError, match="truncated"):
        verify.verify(SPEC, dataclasses.replace(right, cubin=right.cubin[:-1]))


@pytest.mark.parametrize("arch", ARCHS)
def test_record_is_what_the_spec_implies(arch: str) -> None:
    spec, built = lead_spec(arch), lead(arch)
    record = built.record
    assert (record.code, record.symbol, record.arch) == (spec.code_name, f"{spec.code_name}_0", arch)
    assert (record.bytes, record.block) == (len(built.compiled.cubin), spec.block_threads)
    assert (record.resident_ctas, record.spill_bytes, record.stack_bytes, record.static_shared) == (2, 0, 0, 0)
    assert record.min_driver == 13000
    assert record.ptx_sha256 == hashlib.sha256(built.compiled.ptx.encode()).hexdigest()
    assert [p.name for p in record.parameters][:2] == ["x", "logits"]


# ---- source digest ----


def test_digest_covers_what_decides_the_bytes(tmp_path: Path) -> None:
    folder = copy_of_sources(tmp_path)
    assert source_digest(folder) == source_digest(ROOT), "it does not depend on the folder"

    def changed_by(path: str) -> bool:
        before = source_digest(folder)
        (folder / path).write_text((folder / path).read_text() + "\n# changed\n")
        return source_digest(folder) != before

    assert all(changed_by(path) for path in ("kernels/entry.py", "megamoe_aot/split.py", "megamoe_aot/abi.py", "kernels/build/compile.py"))
    assert not any(changed_by(path) for path in ("kernels/build/verify.py", "megamoe_aot/menu.py", "megamoe_aot/manifest.py"))


# ---- writing ----


def fake_built(spec: CodeSpec, salt: str = "") -> Built:
    """A result with the right records and made-up bytes."""
    compiled = Compiled(f"cubin of {spec.code_name} {salt}".encode(), f"ptx of {spec.code_name} {salt}", "")
    record = CubinRecord(
        code=spec.code_name,
        bytes=len(compiled.cubin),
        ptx_sha256=hashlib.sha256(compiled.ptx.encode()).hexdigest(),
        symbol=f"{spec.code_name}_0",
        arch=spec.arch,
        min_driver=13000,
        registers=64,
        spill_bytes=0,
        stack_bytes=0,
        static_shared=0,
        parameters=(),
        block=spec.block_threads,
        resident_ctas=2,
    )
    return Built(compiled, record, "13.4.59")


def write(folder: Path, selection: jobs.Selection, salt: str) -> list[str]:
    built = {name: fake_built(spec, salt) for name, spec in jobs.codes_of(selection).items()}
    return artifacts.write_artifacts(folder, jobs.manifest_of(selection, built, jobs.lock_of(built, "digest")), jobs.files_of(built))


def readable(folder: Path) -> dict[str, bytes]:
    """Every cubin that the manifest names, verified."""
    manifest = Manifest.load(folder)
    return {sha: manifest.read_cubin(sha) for sha in manifest.cubins}


LEAD_ENTRIES = [(shape, spec) for shape, spec in menu_specs() if shape is LEAD and spec.structure == "cluster"]
"""12 entries of 8 codes, and two finalize kernels."""


@pytest.mark.parametrize("crash_at", [0, 1, 7, 20])
@pytest.mark.parametrize("how", ["before the rename", "while writing"])
def test_a_crash_while_writing_leaves_a_complete_old_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int, how: str
) -> None:
    """10 codes are 20 files and a manifest, so step 20 is the manifest itself."""
    write(tmp_path, LEAD_ENTRIES, "old")
    before = readable(tmp_path)
    steps = 0
    real: dict[str, Callable[..., Any]] = {"replace": os.replace, "fsync": os.fsync}

    def crash(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > crash_at:
                raise KeyboardInterrupt
            return real[name](*arguments)

        return call

    target = "replace" if how == "before the rename" else "fsync"
    with monkeypatch.context() as patch:
        patch.setattr(os, target, crash(target))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, LEAD_ENTRIES, "new")
    assert readable(tmp_path) == before

    write(tmp_path, LEAD_ENTRIES, "new")
    assert len(readable(tmp_path)) == 10
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 21 and not [name for name in names if name.startswith(".")], "no leftovers"


def test_stale_files_go_and_foreign_files_stay(tmp_path: Path) -> None:
    write(tmp_path, LEAD_ENTRIES, "old")
    for name in ("manifest.lock.json", "README.md", ".manifest.json.123.tmp", ".x.cubin.9.tmp"):
        (tmp_path / name).write_text("x")
    removed = write(tmp_path, LEAD_ENTRIES[:1], "old")
    spec = LEAD_ENTRIES[0][1]
    kept = [fake_built(code, "old").sha256 for code in (spec, FinalizeSpec.of(spec))]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*(f"{sha}{suffix}" for sha in kept for suffix in (".cubin", ".ptx")), "README.md", "manifest.json", "manifest.lock.json"]
    )
    assert len(removed) == 2 * 8 + 2


def test_entries_that_share_code_share_the_cubin(tmp_path: Path) -> None:
    write(tmp_path, LEAD_ENTRIES, "")
    manifest = Manifest.load(tmp_path)
    assert len(manifest.entries) == 12 and len(manifest.cubins) == 10
    orders = {(e.spec.w13_order, e.cubin) for e in manifest.entries if "row_major_bf16_sm_90a" in e.spec.name}
    assert len(orders) == 2 and len({cubin for _, cubin in orders}) == 1


def test_token_counts_share_a_code() -> None:
    """M is a launch argument: an entry for more tokens adds no cubin."""
    larger = (LEAD, dataclasses.replace(SPEC, tokens=32))
    assert jobs.codes_of([*LEAD_ENTRIES, larger]).keys() == jobs.codes_of(LEAD_ENTRIES).keys()


def test_two_codes_may_not_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is compiled in but missing from the name would let one cubin stand in for another."""
    monkeypatch.setattr(KernelSpec, "code_name", "same")
    with pytest.raises(BuildError, match="two codes have this name"):
        jobs.codes_of(LEAD_ENTRIES)


# ---- the lock ----

LOCK = Lock("d1", {"ptxas": "13.4.59"}, {"a": LockedCode("ca", "pa", ("NVIDIA H200",)), "b": LockedCode("cb", "pb")})


def test_lock_round_trip_and_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    assert Lock.load(path) is None
    LOCK.save(path)
    assert Lock.load(path) == LOCK
    assert json.loads(path.read_text())["codes"]["a"] == {"cubin": "ca", "ptx": "pa", "validated_on": ["NVIDIA H200"]}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "codes": {"a": {}}, "compiler": {}, "source_digest": ""}']
)
def test_a_damaged_lock_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="restore it from git or use --update-lock"):
        Lock.load(path)


@pytest.mark.parametrize(
    ("change", "whole", "expected"),
    [
        ({}, True, []),
        ({"source_digest": "d2"}, True, ["sources: digest d2, the lock was made from d1"]),
        ({"compiler": {"ptxas": "13.5.1"}}, True, ["ptxas: this build used 13.5.1, the lock was made with 13.4.59"]),
        ({"codes": {**LOCK.codes, "a": LockedCode("cx", "pa")}}, True, ["a: cubin sha256 is cx, the lock says ca"]),
        ({"codes": {**LOCK.codes, "b": LockedCode("cb", "px")}}, True, ["b: PTX sha256 is px, the lock says pb"]),
        ({"codes": {**LOCK.codes, "new": LockedCode("c", "p")}}, False, ["new: not in the lock"]),
        ({"codes": {"a": LOCK.codes["a"]}}, True, ["b: in the lock, but not in the menu"]),
        ({"codes": {"a": LOCK.codes["a"]}}, False, []),
    ],
)
def test_differences_from_the_lock(change: dict[str, Any], whole: bool, expected: list[str]) -> None:
    assert differences(LOCK, dataclasses.replace(LOCK, **change), whole) == expected


def test_validation_is_kept_only_for_identical_cubins() -> None:
    new = dataclasses.replace(LOCK, codes={"a": LockedCode("ca", "pa"), "b": LockedCode("cx", "pb")})
    assert new.keeping_validation_of(LOCK).codes["a"].validated_on == ("NVIDIA H200",)
    changed = dataclasses.replace(LOCK, codes={"a": LockedCode("changed", "pa")})
    assert changed.keeping_validation_of(LOCK).codes["a"].validated_on == ()


# ---- the command line ----


@dataclasses.dataclass
class Cli:
    """build_kernels.main with made-up compiles and a folder of its own."""

    folder: Path
    compiled: list[str] = dataclasses.field(default_factory=list)
    failing: str = "nothing fails"

    def build(self, spec: CodeSpec) -> Built:
        self.compiled.append(spec.code_name)
        if self.failing in spec.code_name:
            raise BuildError(spec.code_name, ["ptxas spilled: 4 bytes [%rd1]"])
        return fake_built(spec)

    def __call__(self, *arguments: str) -> int:
        return build_kernels.main([*arguments, "--out", str(self.folder / "out"), "--lock", str(self.lock)])

    @property
    def lock(self) -> Path:
        return self.folder / "lock.json"

    def patch_lock(self, change: Callable[[dict[str, Any]], object]) -> None:
        data = json.loads(self.lock.read_text())
        change(data)
        self.lock.write_text(json.dumps(data))


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    made = Cli(tmp_path)
    monkeypatch.setattr(jobs, "build_code", made.build)
    return made


def test_all_builds_each_code_once_and_check_agrees(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--all", "--update-lock") == 0
    manifest = Manifest.load(cli.folder / "out")
    assert [e.spec for e in manifest.entries] == [spec for _, spec in menu_specs()]
    finalize = [f"finalize_h{hidden}_k8_{arch}" for hidden in (2048, 4096, 7168) for arch in ARCHS]
    assert sorted(cli.compiled) == sorted({spec.code_name for _, spec in menu_specs()} | set(finalize))
    assert sorted(manifest.record(entry).code for entry in manifest.finalize) == sorted(finalize)
    assert manifest.source_digest == source_digest()
    files = sorted((cli.folder / "out").iterdir())
    assert cli("--all", "--check") == 0
    assert "give the hashes of the lock" in capsys.readouterr().out
    assert sorted((cli.folder / "out").iterdir()) == files


def test_check_names_what_differs(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--all", "--update-lock") == 0
    name = lead_spec("sm_100f").code_name
    cli.patch_lock(lambda data: data["codes"][name].update(cubin="0" * 64))
    capsys.readouterr()
    assert cli("--all", "--check") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and "cubin sha256" in line
    assert cli("--entry", "softmax", "--check") == 0, "the entries chosen here are as locked"
    assert cli("--entry", name, "--check") == 1


def test_check_catches_changed_sources_and_a_missing_lock(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--all", "--check") == 1
    assert "there is no lock" in capsys.readouterr().err
    assert cli("--all", "--update-lock") == 0
    cli.patch_lock(lambda data: data.update(source_digest="0" * 64))
    assert cli("--all", "--check") == 1
    assert "sources: digest" in capsys.readouterr().err


def test_a_build_that_departs_from_the_lock_warns(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--all", "--update-lock") == 0
    name = lead_spec("sm_90a").code_name
    cli.patch_lock(lambda data: data["codes"][name].update(ptx="0" * 64))
    assert cli("--entry", name) == 0
    assert f"warning: differs from the lock: {name}: PTX sha256" in capsys.readouterr().err
    assert [e.spec.name for e in Manifest.load(cli.folder / "out").entries] == [name]


def test_validation_travels_from_the_lock_to_the_manifest(cli: Cli) -> None:
    assert cli("--all", "--update-lock") == 0
    name = lead_spec("sm_90a").code_name
    cli.patch_lock(lambda data: data["codes"][name].update(validated_on=["NVIDIA H200"]))
    assert cli("--all", "--update-lock") == 0
    validated = {r.code: r.validated_on for r in Manifest.load(cli.folder / "out").cubins.values() if r.validated_on}
    assert validated == {name: ("NVIDIA H200",)}
    lock = Lock.load(cli.lock)
    assert lock is not None and lock.codes[name].validated_on == ("NVIDIA H200",)


CODES = 2 * (5 * 4 * 3 + 3)
"""Per arch: five models, four codes (two layouts, two logits dtypes) in three structures; three widths of the finalize kernel."""


def test_one_failure_is_named_and_nothing_is_written(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    cli.failing = lead_spec("sm_100f").code_name
    assert cli("--all") == 1
    err = capsys.readouterr().err
    assert cli.failing in err and "ptxas spilled: 4 bytes [%rd1]" in err and f"1 of {CODES} codes failed; nothing was written" in err
    assert not (cli.folder / "out").exists()
    assert len(cli.compiled) == CODES, "a failure does not stop the other codes"


def test_sources_that_change_during_a_build_void_it(cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["before", "after"])
    monkeypatch.setattr(build_kernels, "source_digest", lambda: next(digests))
    assert cli("--all") == 1
    assert "the sources changed while the build ran" in capsys.readouterr().err
    assert not (cli.folder / "out").exists()


def test_an_unexpected_error_is_not_swallowed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(spec: KernelSpec) -> Built:
        raise ZeroDivisionError

    monkeypatch.setattr(jobs, "build_code", crash)
    with pytest.raises(ZeroDivisionError):
        cli("--all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "choose --all or --entry"),
        (["--arch", "sm_90a"], "choose --all or --entry"),
        (["--all", "--entry", "x"], "exclude each other"),
        (["--entry", "no_such_entry"], "no entry name contains 'no_such_entry'"),
        (["--all", "--arch", "sm_120a"], "invalid choice: 'sm_120a'"),
        (["--all", "--jobs", "0"], "--jobs must be at least 1"),
        (["--all", "--check", "--update-lock"], "choose one"),
        (["--all", "--arch", "sm_90a", "--update-lock"], "--update-lock needs --all and every arch"),
        (["--entry", "softmax", "--update-lock"], "--update-lock needs --all and every arch"),
    ],
)
def test_wrong_arguments(cli: Cli, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli(*arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert cli.compiled == []


def test_list_shows_entries_and_builds_nothing(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--list", "--arch", "sm_90a", "--entry", "sigmoid", "--entry", "softmax") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [spec.name for _, spec in menu_specs(("sm_90a",))]
    (shared,) = [line for line in lines if "h4096_i512" in line and "row_major_bf16_sm_90a_up_gate" in line.split()[2]]
    assert "(cubin of" in shared and "row_major_bf16_sm_90a_gate_up)" in shared
    assert cli.compiled == []
