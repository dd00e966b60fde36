"""Facts out of a cubin: what the bytes themselves say about one compiled kernel.

A cubin is an ELF file; pyelftools walks the sections, and the few NVIDIA records are decoded here. The vendor documents
them nowhere: tests/test_cubin.py compares the decoding with nvdisasm, and :mod:`kernels.build.verify` compares each build's
figures with the compiler's log and the PTX.
"""

from __future__ import annotations

import dataclasses
import io
import re
import struct
from collections.abc import Iterator

from elftools.elf.elffile import ELFFile

RESERVED_SHARED = 1024
"""Bytes of shared memory that the system keeps per CTA; ``.nv.shared.<kernel>`` counts them."""

_REGISTERS, _FRAME_SIZE, _PARAMETER, _REQUIRED_THREADS, _PARAMETER_BYTES = 0x2F, 0x11, 0x17, 0x10, 0x19
_WITH_BYTES = 4
"""Record format whose value has its own length; the others hold 16 bits in place."""


class CubinError(ValueError):
    """The bytes are no cubin, or not one with exactly one kernel and the records that the checks need."""


@dataclasses.dataclass(frozen=True)
class CubinParameter:
    """One kernel parameter in the constant bank; bytes. The first offset depends on the arch and on alignment."""

    index: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class CubinFacts:
    """One kernel's figures; sizes in bytes."""

    arch: str
    """Exact target that ptxas was given, such as ``sm_100f``: e_flags does not tell ``a`` from ``f``."""
    sm: int
    """Compute capability in e_flags, such as 100."""
    ptxas: str
    """Version, such as ``13.4.59``."""
    symbol: str
    parameters: tuple[CubinParameter, ...]
    parameter_bytes: int
    registers: int
    stack_bytes: int
    static_shared: int
    block: tuple[int, int, int]
    """Threads per CTA that the kernel requires; a launch with others fails."""


def read_cubin(image: bytes) -> CubinFacts:
    """Decode ``image``. Raises CubinError."""
    try:
        elf = ELFFile(io.BytesIO(image))
        if elf["e_machine"] != "EM_CUDA":
            raise CubinError(f"this is an ELF file for {elf['e_machine']}, not a cubin")
        _check_complete(elf, len(image))
        return _facts(elf)
    except CubinError:
        raise
    except Exception as error:  # pyelftools raises many types on damaged bytes, not only its own
        raise CubinError(f"{len(image)} bytes that are no complete cubin: {error!r}") from error


def _check_complete(elf: ELFFile, size: int) -> None:
    ends = [elf["e_shoff"] + elf["e_shnum"] * elf["e_shentsize"], elf["e_phoff"] + elf["e_phnum"] * elf["e_phentsize"]]
    ends += [s["sh_offset"] + s["sh_size"] for s in elf.iter_sections() if s["sh_type"] != "SHT_NOBITS"]
    if max(ends) > size:
        raise CubinError(f"the cubin is truncated: {size} bytes, its tables reach {max(ends)}")


def _facts(elf: ELFFile) -> CubinFacts:
    kernels = [s.name.removeprefix(".text.") for s in elf.iter_sections() if s.name.startswith(".text.")]
    if len(kernels) != 1:
        raise CubinError(f"expected one kernel, found {kernels}")
    (symbol,) = kernels
    numbers = [i for i, s in enumerate(elf.get_section_by_name(".symtab").iter_symbols()) if s.name == symbol]
    if len(numbers) != 1:
        raise CubinError(f"{symbol} stands {len(numbers)} times in the symbol table")
    shared = elf.get_section_by_name(f".nv.shared.{symbol}")
    arch, ptxas = _tool_note(_section(elf, ".note.nv.tkinfo"))
    common = list(_records(_section(elf, ".nv.info")))
    own = list(_records(_section(elf, f".nv.info.{symbol}")))
    parameters = sorted(_parameter(value) for kind, value in own if kind == _PARAMETER)
    return CubinFacts(
        arch=arch,
        sm=elf["e_flags"] >> 8 & 0xFF,
        ptxas=ptxas,
        symbol=symbol,
        parameters=tuple(CubinParameter(*p) for p in parameters),
        parameter_bytes=int.from_bytes(_only(own, _PARAMETER_BYTES, "parameter size"), "little"),
        registers=_of_symbol(common, _REGISTERS, numbers[0], "register count"),
        stack_bytes=_of_symbol(common, _FRAME_SIZE, numbers[0], "frame size"),
        static_shared=max(0, shared["sh_size"] - RESERVED_SHARED) if shared else 0,
        block=struct.unpack("<3I", _only(own, _REQUIRED_THREADS, "required block size (.reqntid)")),
    )


def _section(elf: ELFFile, name: str) -> bytes:
    section = elf.get_section_by_name(name)
    if section is None:
        raise CubinError(f"no section {name}")
    return bytes(section.data())


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) pairs of a ``.nv.info`` section."""
    at = 0
    while at < len(data):
        form, kind, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _WITH_BYTES:
            if at + value > len(data):
                raise CubinError(f"record {kind:#x} ends after its section")
            yield kind, data[at : at + value]
            at += -(-value // 4) * 4
        else:
            yield kind, struct.pack("<H", value)


def _parameter(value: bytes) -> tuple[int, int, int]:
    _, index, offset, flags = struct.unpack("<IHHI", value)
    return index, offset, flags >> 18


def _only(records: list[tuple[int, bytes]], kind: int, what: str) -> bytes:
    found = [value for k, value in records if k == kind]
    if len(found) != 1:
        raise CubinError(f"expected one record of the {what}, found {len(found)}")
    return found[0]


def _of_symbol(records: list[tuple[int, bytes]], kind: int, symbol: int, what: str) -> int:
    """The kernel's own record: helper functions that tcgen05 brings along have others."""
    pairs = [struct.unpack("<II", value) for k, value in records if k == kind]
    found = [count for owner, count in pairs if owner == symbol]
    if len(found) != 1:
        raise CubinError(f"expected one record of the kernel's {what}, found {len(found)}")
    return int(found[0])


def _tool_note(note: bytes) -> tuple[str, str]:
    """(arch, ptxas version) out of the tool note: a string table with tool name, version and options."""
    text = note.decode("latin-1")
    arch = re.search(r"-arch (sm_\w+)", text)
    version = re.search(r"release [\d.]+, V([\d.]+)", text)
    if arch is None or version is None or "\0ptxas\0" not in text:
        raise CubinError(f"the tool note names no ptxas version or no -arch: {text!r}")
    return arch.group(1), version.group(1)
