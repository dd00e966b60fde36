"""Facts out of real cubins against nvdisasm and ptxas, and damaged cubins, which must be errors and never half-read."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.build import occupancy
from kernels.build.cubin import CubinError, CubinFacts, read_cubin
from kernels.build.ptx import read_entry
from kernels.build.ptxas_log import read_log
from kernels.build.verify import min_driver
from megamoe_aot.abi import PARAMETERS
from megamoe_aot.spec import ARCHS
from tests.built import lead, lead_spec


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The kernel of bad_kernel.py: (cubin path, compiler log)."""
    folder = tmp_path_factory.mktemp("bad")
    script = Path(__file__).with_name("bad_kernel.py")
    run = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=True)
    return folder / "bad.cubin", run.stderr


def disassembly(cubin: Path) -> str:
    """nvdisasm's text, in which the vendor's own tool names the records."""
    inside = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "nvdisasm"
    tool = str(inside) if inside.exists() else shutil.which("nvdisasm")
    assert tool is not None, "install the build extra: it brings nvidia-cuda-nvdisasm"
    return subprocess.run([tool, str(cubin)], capture_output=True, text=True, check=True).stdout


def vendor_values(text: str, name: str) -> list[bytes]:
    """The value bytes of every ``name`` record in nvdisasm's text, without its symbol indices."""
    values = []
    for block in re.findall(rf"nvinfo : {name}\n(.*?)\n\n\n", text, re.DOTALL):
        value = b""
        for kind, numbers in re.findall(r"\.(byte|short|word)\s+((?:0x[0-9a-f]+(?:, )?)+)", block)[1:]:
            size = {"byte": 1, "short": 2, "word": 4}[kind]
            value += b"".join(int(n, 16).to_bytes(size, "little") for n in numbers.split(", "))
        values.append(value)
    return values


def check_against_vendor(facts: CubinFacts, text: str) -> None:
    (registers,) = vendor_values(text, "EIATTR_REGCOUNT")
    assert int.from_bytes(registers, "little") == facts.registers
    (threads,) = vendor_values(text, "EIATTR_REQNTID")
    assert tuple(int.from_bytes(threads[i : i + 4], "little") for i in (0, 4, 8)) == facts.block
    stacks = re.findall(
        rf"nvinfo : EIATTR_FRAME_SIZE.*?index@\({re.escape(facts.symbol)}\)\s*/\*\w+\*/\s*\.word\s+(0x[0-9a-f]+)", text, re.DOTALL
    )
    assert int(stacks[-1], 16) == facts.stack_bytes
    shared = re.search(rf"\.nv\.shared\.{re.escape(facts.symbol)}:\s+\.zero\s+(\d+)", text)
    assert (int(shared.group(1)) - 1024 if shared else 0) == facts.static_shared


@pytest.mark.parametrize("arch", ARCHS)
def test_facts_agree_with_the_vendors_disassembler(arch: str, tmp_path: Path) -> None:
    built = lead(arch)
    path = tmp_path / "lead.cubin"
    path.write_bytes(built.compiled.cubin)
    facts, text = read_cubin(built.compiled.cubin), disassembly(path)
    check_against_vendor(facts, text)
    (limit,) = {int(n, 16) for n in re.findall(r"EIATTR_MAXREG_COUNT\n.*?\.short\s+(0x[0-9a-f]+)", text, re.DOTALL)}
    assert occupancy.most_registers(facts.block[0], 2) == limit, "ptxas' own limit for .minnctapersm 2"


@pytest.mark.parametrize("arch", ARCHS)
def test_facts_agree_with_log_ptx_and_spec(arch: str) -> None:
    built, spec = lead(arch), lead_spec(arch)
    facts = read_cubin(built.compiled.cubin)
    report, entry = read_log(built.compiled.log, facts.symbol), read_entry(built.compiled.ptx)
    assert (facts.arch, facts.sm) == (arch, {"sm_90a": 90, "sm_100f": 100}[arch])
    assert (facts.symbol, facts.block) == (f"{spec.code_name}_0", (spec.block_threads, 1, 1))
    assert (report.arch, report.registers, report.stack_bytes) == (arch, facts.registers, 0)
    assert (report.spill_bytes, report.warnings) == (0, ())
    assert [p.size for p in facts.parameters] == [p.size for p in entry.parameters] == [p.size for p in PARAMETERS]
    # Offsets by the rule of PTX: natural alignment, 64 for a tensor map; only the start of the block depends on the arch.
    at = 0
    shift = facts.parameters[8].offset - 64
    for found, parameter in zip(facts.parameters, PARAMETERS, strict=True):
        at = -(-at // min(parameter.size, 64)) * min(parameter.size, 64)
        assert found.offset == at + (shift if found.index >= 8 else 0)
        at += parameter.size
    assert facts.parameter_bytes == at + shift


def test_a_bad_kernel_is_read_as_bad(bad: tuple[Path, str]) -> None:
    path, log = bad
    facts, report = read_cubin(path.read_bytes()), read_log(log, "bad_0")
    check_against_vendor(facts, disassembly(path))
    assert facts.static_shared == 1200
    assert facts.stack_bytes == report.stack_bytes > 0
    assert facts.registers == report.registers == 64, "1024 threads and 65536 registers"
    assert report.spill_bytes > 0
    (warning,) = report.warnings
    assert warning.startswith("(C7508) Potential Performance Loss: 'setmaxnreg' ignored")


@pytest.mark.parametrize("arch", ARCHS)
def test_ptxas_version_comes_from_the_cubin(arch: str) -> None:
    built = lead(arch)
    said = re.search(r"release [\d.]+, V([\d.]+)", built.compiled.ptx)
    assert said is not None and built.ptxas == said.group(1), "the PTX names the same tool release"


def test_min_driver_is_the_toolkits_major_version() -> None:
    assert (min_driver("13.4.59"), min_driver("12.9.86")) == (13000, 12000)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not an ELF file at all", Path(sys.executable).read_bytes()[:4096]])
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(CubinError):
        read_cubin(content)


@given(st.floats(0, 1, exclude_max=True))
def test_truncation_is_an_error(fraction: float) -> None:
    image = lead("sm_90a").compiled.cubin
    with pytest.raises(CubinError):
        read_cubin(image[: int(len(image) * fraction)])


@settings(max_examples=300)
@given(st.integers(0, 2**30), st.integers(1, 255))
def test_flipped_bytes_never_raise_anything_else(position: int, flip: int) -> None:
    """A damaged cubin is read the same, read differently, or refused; the reader itself does not break."""
    image = bytearray(lead("sm_90a").compiled.cubin)
    image[position % len(image)] ^= flip
    with contextlib.suppress(CubinError):
        read_cubin(bytes(image))


def test_log_without_a_report_is_an_error() -> None:
    with pytest.raises(ValueError, match="no ptxas report on moe_0"):
        read_log("nothing of interest", "moe_0")


def test_log_is_read_through_colours_and_line_wrapping() -> None:
    log = """\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info    : 0 bytes gmem
        ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized
        due to a reason
        ptxas info    : Compiling entry function
        'moe_0' for 'sm_90a'
        ptxas info    : Function properties for helper
        ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
        ptxas info    : Function properties for moe_0
        ptxas         .     16 bytes stack frame, 12 bytes spill stores, 20 bytes spill
        loads
        ptxas info    : Used 77 registers, used 1 barriers"""
    report = read_log(log, "moe_0")
    assert (report.arch, report.registers, report.stack_bytes, report.spill_bytes) == ("sm_90a", 77, 16, 32)
    assert report.warnings == ("(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a reason",)


@pytest.mark.parametrize(
    ("registers", "threads", "ctas"),
    [(32, 1024, 2), (33, 1024, 1), (64, 1024, 1), (168, 192, 2), (169, 192, 1), (168, 160, 2), (255, 128, 2), (128, 256, 2), (32, 64, 32)],
)
def test_occupancy_by_registers(registers: int, threads: int, ctas: int) -> None:
    """Figures of the vendor's occupancy rules: 64 K registers in four partitions, 256 at a time per warp."""
    assert occupancy.by_registers(registers, threads) == ctas


@pytest.mark.parametrize(("dynamic", "ctas"), [(115_712, 2), (115_713, 1), (232_448, 1), (232_449, 0), (76_800, 3)])
def test_occupancy_by_shared_memory(dynamic: int, ctas: int) -> None:
    """115,712 and 115,713 bytes were measured on an H200; 227 KiB is the documented largest block."""
    assert occupancy.by_shared_memory(dynamic) == ctas
