"""The census of every artifact is explained, its numbers are the kernel's, and it fails where PTX and SASS part."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from build_kernels import ARTIFACTS
from kernels.build.sources import source_digest
from megamoe_aot.manifest import Manifest
from megamoe_aot.menu import menu_specs
from megamoe_aot.spec import ARCHS, KernelSpec
from tests.built import lead, lead_spec
from verification import census, disassembly
from verification.disassembly import SassInstruction, read_listing

CODES = [spec for _, spec in menu_specs() if (spec.layout, spec.logits_dtype) == ("trtllm_gen", "bf16") and spec.columns != 16]
"""Of every model, arch and structure one."""


@functools.cache
def manifest() -> Manifest:
    built = Manifest.load(ARTIFACTS)
    assert built.source_digest == source_digest(), "artifacts/ is older than the sources: run python build_kernels.py --all"
    return built


@pytest.mark.slow
@pytest.mark.parametrize("spec", CODES, ids=lambda spec: spec.code_name)
def test_artifacts_are_explained(spec: KernelSpec) -> None:
    """A part of ``python -m verification census``."""
    sha = next(entry.cubin for entry in manifest().entries if entry.spec.code == spec.code)
    found = census.census_of(manifest(), sha)
    assert found.problems == ()
    judged = [row.what for row in found.rows if row.judged]
    assert len(judged) > 30 and all(row.ok for row in found.rows)
    assert {row.what for row in found.rows} - set(judged) <= (set(census.UNDERIVED) if spec.structure == "list" else set())
    if spec.structure == "list":
        assert {
            "bulk copy",
            "packet load",
            "ticket",
            "ticket of the pool",
            "shared minimum",
            "named barrier, arrive",
            "TMA load, 3-D",
        } <= set(judged)


# ---- numbers that follow from the spec, not from the census' own table ----


@functools.cache
def sass(arch: str) -> tuple[SassInstruction, ...]:
    return disassembly.disassemble(lead(arch).compiled.cubin)


def opcodes(arch: str) -> Counter[str]:
    return Counter(i.opcode for i in sass(arch) if i.function == lead(arch).record.symbol)


@pytest.mark.parametrize("arch", ARCHS)
def test_common_counts_follow_from_the_spec(arch: str) -> None:
    spec, found = lead_spec(arch), opcodes(arch)
    assert found["UTMALDG.3D"] == 2 + min(2, spec.shared.ring, spec.split.unit_blocks)  # a loop per GEMM, the first boxes before
    assert found["STAS.128"] == spec.cluster // 4  # a lane sends to every fourth CTA
    assert found["SYNCS.EXCH.64"] == sum(number for number, _ in spec.shared.barrier_counts.values())
    assert found["SYNCS.ARRIVE.TRANS64"] == found["UTMALDG.3D"] + 1  # every box and the remote sums announce their bytes
    roles = {"sm_90a": 2, "sm_100f": 3}[arch]  # producer and consumers, on Blackwell the MMA warp too
    assert found["UCGABAR_ARV"] == found["UCGABAR_WAIT"] == roles
    assert found["ACQBULK"] == 2  # producer and consumers: the MMA warp touches nothing of the preceding kernel
    assert found["STG.E"] == 2  # one id, one weight
    assert found["LDG.E.64"] == spec.split.unit_blocks // 4  # a warp quantises every fourth block of the token


def test_hopper_mma_count_follows_from_the_split() -> None:
    """Four k32 steps per K block, 64-row halves, one loop per group of eight K blocks."""
    split = lead_spec("sm_90a").split
    loops1, loops2 = split.unit_blocks // 8, -(-split.blocks2 // 8)
    expected = 4 * (2 * loops1 + split.tile2_rows // 64 * loops2)
    assert opcodes("sm_90a")["QGMMA.64x8x32.F32.E4M3.E4M3"] == expected == 24


def test_blackwell_mma_count_follows_from_the_split() -> None:
    """Four k32 steps per K block, one loop per GEMM; a commit per block and per tile; accumulators of 16 columns."""
    split, found = lead_spec("sm_100f").split, opcodes("sm_100f")
    assert (found["UTCQMMA"], found["UTCBAR"]) == (8, 4)
    assert found["LDTM.x16"] == split.unit_blocks // 16 + -(-split.blocks2 // 16)


# ---- what must be noticed ----


def take(arch: str, ptx: Callable[[str], str] = str, code: Callable[[list[SassInstruction]], object] = list) -> tuple[str, ...]:
    """Problems of the lead entry after an edit of its PTX, or of its SASS (in place)."""
    built, instructions = lead(arch), list(sass(arch))
    code(instructions)
    return census.take_census(built.record.code, built.record.symbol, ptx(built.compiled.ptx), instructions).problems


@pytest.mark.parametrize("arch", ARCHS)
def test_untouched_lead_entry_has_no_problem(arch: str) -> None:
    assert take(arch) == ()


@pytest.mark.parametrize(
    ("arch", "statement", "what"),
    [
        ("sm_100f", r"tcgen05\.mma[^;]*;", "MMA (tcgen05)"),
        ("sm_100f", r"tcgen05\.commit[^;]*;", "MMA commit (tcgen05)"),
        ("sm_100f", r"tcgen05\.dealloc[^;]*;", "TMEM free"),
        ("sm_100f", r"fence\.proxy\.async[^;]*;", "proxy fence"),
        ("sm_100f", r"barrier\.cluster\.wait[^;]*;", "cluster wait"),
        ("sm_100f", r"mbarrier\.arrive\.shared[^;]*;", "mbarrier arrive"),
        ("sm_100f", r"mbarrier\.arrive\.expect_tx[^;]*;", "mbarrier arrive + expect_tx"),
        ("sm_90a", r"wgmma\.mma_async[^;]*;", "MMA (wgmma)"),
        ("sm_90a", r"wgmma\.commit_group[^;]*;", "MMA group end (wgmma)"),
        ("sm_90a", r"wgmma\.wait_group[^;]*;", "MMA wait (wgmma)"),
        ("sm_90a", r"st\.async[^;]*;", "remote store, 16 bytes"),
        ("sm_90a", r"griddepcontrol\.wait;", "grid dependency wait"),
        ("sm_90a", r"mbarrier\.init[^;]*;", "mbarrier init"),
        ("sm_90a", r"st\.global\.v2\.b32[^;]*;", "global store, 8 bytes"),
        ("sm_90a", r"cvt\.rn\.satfinite\.e4m3x2[^;]*;", "FP8 conversion"),
    ],
)
def test_an_instruction_that_the_ptx_does_not_have(arch: str, statement: str, what: str) -> None:
    """As if ptxas had added one."""
    problems = take(arch, ptx=lambda text: re.sub(statement, "", text, count=1))
    assert any(problem.startswith(f"{what}: ") for problem in problems), problems


@pytest.mark.parametrize(
    ("arch", "opcode", "what"),
    [
        ("sm_100f", "UTCQMMA", "MMA (tcgen05)"),
        ("sm_100f", "UTMALDG.3D", "TMA load, 3-D"),
        ("sm_100f", "FENCE.VIEW.ASYNC.S", "proxy fence"),
        ("sm_90a", "QGMMA.64x8x32.F32.E4M3.E4M3", "MMA (wgmma)"),
        ("sm_90a", "STAS.128", "remote store, 16 bytes"),
        ("sm_90a", "BAR.SYNC.DEFER_BLOCKING", "named barrier"),
        ("sm_90a", "LDG.E.U16", "global load, 2 bytes"),
    ],
)
def test_an_instruction_that_ptxas_dropped(arch: str, opcode: str, what: str) -> None:
    problems = take(arch, code=lambda code: code.remove(next(i for i in code if i.opcode == opcode)))
    assert len(problems) == 1 and problems[0].startswith(f"{what}: "), problems


@pytest.mark.parametrize(
    ("opcode", "operands", "why"),
    [
        ("LDL.64", "R2, [R1]", "local memory: the PTX explains 0 SASS instructions, there are 1"),
        ("STL", "[R1+0x8], R2", "local memory: "),
        ("CALL.REL.NOINC", "`(somewhere)", "call: "),
        ("CALL.ABS", "R2", "call: "),
        ("LD.E", "R2, [R4.64]", "SASS opcode LD.E in the kernel (1) is on no line"),
        ("ATOMG.E.ADD", "PT, R2, [R4.64], R5", "SASS opcode ATOMG.E.ADD in the kernel"),
        ("LDTM.x32", "R4, tmem[UR4]", "SASS opcode LDTM.x32 in the kernel"),
        ("WARPSYNC.ALL", "", None),
    ],
)
def test_an_instruction_that_must_not_be_there(opcode: str, operands: str, why: str | None) -> None:
    """Only a warp barrier may be one more: the PTX has more of them than ptxas needs."""
    symbol = lead("sm_90a").record.symbol
    problems = take("sm_90a", code=lambda code: code.append(SassInstruction(symbol, 0, None, opcode, operands)))
    assert (problems == ()) if why is None else any(problem.startswith(why) for problem in problems), problems


def test_a_function_beside_the_kernel_must_be_a_known_slow_path() -> None:
    problems = take("sm_90a", code=lambda code: code.append(SassInstruction("helper", 0, None, "FADD", "R1, R2, R3")))
    assert problems == ("SASS opcode FADD in helper (1) is on no line and not known to be plain",)
    name = "$__internal_1_$__cuda_sm3x_div_rn_noftz_f32_slowpath"
    problems = take("sm_90a", code=lambda code: code.append(SassInstruction(name, 0, None, "STG.E", "[R2.64], R3")))
    assert problems == (f"SASS opcode STG.E in {name} (1) is on no line and not known to be plain",)


def test_an_unknown_ptx_opcode() -> None:
    problems = take("sm_90a", lambda text: text.replace("griddepcontrol.wait;", "griddepcontrol.wait; red.global.add.u32 [%rd1], %r1;", 1))
    assert problems == ("PTX opcode red.global.add.u32 (1) is neither counted nor known to be plain",)


# ---- reading a listing ----

LISTING = """
	.target	sm_90a
//--------------------- .text.k --------------------------
	.section	.text.k,"ax",@progbits
        .type           k,@function
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_1:
        /*0020*/               @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        .type           $helper,@function
$helper:
        /*0030*/                   NOP;
"""


def test_listing_is_read() -> None:
    assert read_listing(LISTING) == (
        SassInstruction("k", 0x00, None, "LDC", "R1, c[0x0][0x28]"),
        SassInstruction("k", 0x10, "!P0", "BRA", "`(.L_x_1)"),
        SassInstruction("k", 0x20, "UP0", "UIADD3", "UR4, UR4, 0x1, URZ"),
        SassInstruction("$helper", 0x30, None, "NOP", ""),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LISTING + "        /*0040*/                   lower case ;\n", "line 15 of the listing is not understood"),
        ("        /*0000*/                   NOP ;\n", "before any function"),
        ("\t.target\tsm_90a\n", "no instruction"),
    ],
)
def test_listing_that_is_not_understood(text: str, why: str) -> None:
    with pytest.raises(disassembly.DisassemblyError, match=why):
        read_listing(text)


def test_garbage_is_an_error_of_nvdisasm() -> None:
    with pytest.raises(disassembly.DisassemblyError, match="ended with status"):
        disassembly.disassemble(b"no cubin")


@pytest.mark.parametrize(
    ("statement", "size"),
    [("ld.global.b16 %rs1, [%rd1];", 2), ("st.shared.f32 [%r1], %r2;", 4), ("ld.shared.v4.f32 {%r1, %r2, %r3, %r4}, [%r5];", 16)],
)
def test_access_bytes(statement: str, size: int) -> None:
    from kernels.build.ptx import statements

    (found,) = statements(f".visible .entry k()\n{{\n{statement}\n}}")
    assert census.access_bytes(found) == size


# ---- command line ----


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = lead_spec("sm_90a").code_name
    assert census.main(["--entry", name, "--json", str(tmp_path / "census.json")]) == 0
    written = json.loads((tmp_path / "census.json").read_text())
    (artifact,) = written["artifacts"]
    assert (artifact["code"], artifact["problems"]) == (name, [])
    mma = next(row for row in artifact["rows"] if row["what"] == "MMA (wgmma)")
    assert (mma["ptx"], mma["expected"], mma["sass"], mma["ok"]) == ({"wgmma n8": 24}, 24, 24, True)
    assert {rule for row in artifact["rows"] for rule in row["rules"]} <= set(written["rules"])
    assert "1 artifacts" in capsys.readouterr().out


def test_command_line_without_a_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert census.main(["--entry", "no such entry"]) == 1
    assert "no artifact's name contains 'no such entry'" in capsys.readouterr().out
