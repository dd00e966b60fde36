"""SASS of a cubin as instructions, by the nvdisasm of the wheel nvidia-cuda-nvdisasm."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import subprocess
import tempfile
from pathlib import Path

PACKAGE = "nvidia-cuda-nvdisasm"

_FUNCTION = re.compile(r"\s*\.type\s+(\S+),@function")
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T0-9]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_COMMENT_OR_LABEL = re.compile(r"\s*(?:[.$\w]+:|//.*|\.\w+.*)?\s*")


class DisassemblyError(RuntimeError):
    """nvdisasm is missing, failed, or printed something that this reader does not know."""


@dataclasses.dataclass(frozen=True)
class SassInstruction:
    """One machine instruction."""

    function: str
    address: int
    """Byte offset in the code section."""
    guard: str | None
    """Predicate register, with a leading ``!`` where negated."""
    opcode: str
    """With all modifiers: ``SYNCS.ARRIVE.TRANS64``."""
    operands: str

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{self.address:#06x}: {guard}{self.opcode} {self.operands}".rstrip()


def nvdisasm() -> Path:
    """The tool's path. Raises DisassemblyError where the wheel is not installed or does not hold the tool."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise DisassemblyError(f"the package {PACKAGE} is not installed; pip install -e '.[build]'") from error
    for file in files:
        if Path(file).name in ("nvdisasm", "nvdisasm.exe"):
            return Path(str(file.locate()))
    raise DisassemblyError(f"{PACKAGE} {importlib.metadata.version(PACKAGE)} holds no nvdisasm; reinstall it")


def disassemble(cubin: bytes) -> tuple[SassInstruction, ...]:
    """Every instruction of every function in the cubin, in order. Raises DisassemblyError."""
    with tempfile.TemporaryDirectory(prefix="megamoe_sass_") as folder:
        image = Path(folder) / "kernel.cubin"
        image.write_bytes(cubin)
        run = subprocess.run([nvdisasm(), "-c", image], capture_output=True, text=True, timeout=120, check=False)
    if run.returncode != 0:
        raise DisassemblyError(f"nvdisasm ended with status {run.returncode}: {run.stderr.strip()[-500:]}")
    return read_listing(run.stdout)


def read_listing(text: str) -> tuple[SassInstruction, ...]:
    """Parse what ``nvdisasm -c`` prints. A line that is neither instruction, label, directive nor comment is an error."""
    found: list[SassInstruction] = []
    function: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if match := _FUNCTION.match(line):
            function = match[1]
        elif match := _INSTRUCTION.fullmatch(line.rstrip()):
            if function is None:
                raise DisassemblyError(f"line {number} of the listing: an instruction before any function: {line.strip()!r}")
            found.append(SassInstruction(function, int(match[1], 16), match[2], match[3], match[4]))
        elif not _COMMENT_OR_LABEL.fullmatch(line):
            raise DisassemblyError(f"line {number} of the listing is not understood: {line.strip()!r}")
    if not found:
        raise DisassemblyError("the listing holds no instruction")
    return tuple(found)
