"""What ptxas said: registers, stack, spills and performance warnings, out of the compiler's log.

The DSL forwards ``ptxas -v`` to stderr as remarks, with terminal colours, source excerpts and line wrapping around it, so
the text is read as one line of words.
"""

from __future__ import annotations

import dataclasses
import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COMPILING = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
_PROPERTIES = re.compile(
    r"Function properties for (\S+) ptxas \S (\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_WARNING = re.compile(r"\(C\d+\).*?(?= ptxas |$)")


@dataclasses.dataclass(frozen=True)
class PtxasReport:
    """Figures of one kernel; sizes in bytes."""

    arch: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    """Spill stores plus spill loads."""
    warnings: tuple[str, ...]
    """Every message that ptxas numbers, such as C7514 (wgmma serialised) and C7508 (setmaxnreg ignored)."""


def read_log(log: str, symbol: str) -> PtxasReport:
    """The report on kernel ``symbol``; its own record, not those of the helper functions that tcgen05 brings along.

    Raises ValueError where the log has none: then nothing is known about spills, which must not pass for no spills.
    """
    text = " ".join(_COLOUR.sub("", log).split())
    compiled = {match.group(1): match for match in _COMPILING.finditer(text)}
    properties = {match.group(1): match for match in _PROPERTIES.finditer(text)}
    if symbol not in compiled or symbol not in properties:
        raise ValueError(f"the compiler's log has no ptxas report on {symbol}; it reports on {sorted(compiled)}")
    registers = _REGISTERS.search(text, compiled[symbol].end())
    if registers is None:
        raise ValueError(f"the compiler's log does not say how many registers {symbol} uses")
    stack, stores, loads = (int(properties[symbol].group(i)) for i in (2, 3, 4))
    arch = compiled[symbol].group(2)
    return PtxasReport(arch, int(registers.group(1)), stack, stores + loads, tuple(_WARNING.findall(text)))
