"""The rules that every cubin must meet before it may ship; what they read becomes its manifest record.

Three witnesses are compared: the cubin's own records, the compiler's log and the PTX. Any breach fails the build.
"""

from __future__ import annotations

import hashlib

from megamoe_aot.finalize import CodeSpec, FinalizeSpec
from megamoe_aot.manifest import CubinRecord, ParameterRecord
from megamoe_aot.shared_memory import GROUP_BYTES

from . import occupancy
from .compile import Compiled
from .cubin import CubinError, CubinFacts, read_cubin
from .errors import BuildError
from .pdl import pdl_problems, protected_parameters
from .ptx import Entry, PtxError, read_entry
from .ptxas_log import PtxasReport, read_log

Instruction = tuple[str, ...]
"""Opcode, modifiers."""

_TRIGGER: Instruction = ("griddepcontrol.launch_dependents",)
_COMMON: tuple[Instruction, ...] = (
    ("griddepcontrol.wait",),
    ("mbarrier.init",),
    ("cp.async.bulk.tensor.3d", "shared::cluster", "global"),
    ("redux",),
)
_STRUCTURE: dict[str, tuple[Instruction, ...]] = {
    "cluster": (("st.async", "shared::cluster"), ("barrier.cluster.arrive",), ("barrier.cluster.wait",)),
    "list": (
        _TRIGGER,
        ("st.relaxed.gpu.global",),
        ("ld.relaxed.gpu.global",),
        ("atom", "gpu", "global", "add"),
        ("cp.async.bulk.shared::cluster.global",),
    ),
}
_ENGINE: dict[str, Instruction] = {"hopper": ("wgmma.mma_async", "e4m3"), "blackwell": ("tcgen05.mma", "kind::f8f6f4")}


def required(spec: CodeSpec) -> tuple[Instruction, ...]:
    """Instructions without which the code is not the kernel of this design."""
    if isinstance(spec, FinalizeSpec):
        return (_TRIGGER,)
    return (*_COMMON, *_STRUCTURE[spec.structure], _ENGINE[spec.engine])


def verify(spec: CodeSpec, compiled: Compiled) -> CubinRecord:
    """The manifest record of a compiled spec. Raises BuildError with every rule that it breaks."""
    symbol = symbol_of(spec)
    try:
        facts, report, entry = read_cubin(compiled.cubin), read_log(compiled.log, symbol), read_entry(compiled.ptx, symbol)
    except (CubinError, PtxError, ValueError) as error:
        raise BuildError(spec.code_name, [str(error)]) from error
    problems = [*cubin_problems(spec, facts), *log_problems(facts, report), *ptx_problems(spec, entry)]
    if problems:
        raise BuildError(spec.code_name, problems)
    return CubinRecord(
        code=spec.code_name,
        bytes=len(compiled.cubin),
        ptx_sha256=sha256(compiled.ptx.encode()),
        symbol=facts.symbol,
        arch=facts.arch,
        min_driver=min_driver(facts.ptxas),
        registers=facts.registers,
        spill_bytes=report.spill_bytes,
        stack_bytes=facts.stack_bytes,
        static_shared=facts.static_shared,
        parameters=tuple(ParameterRecord(p.name, q.offset, q.size) for p, q in zip(spec.parameters, facts.parameters, strict=True)),
        block=facts.block[0],
        resident_ctas=resident_ctas(spec, facts),
    )


def symbol_of(spec: CodeSpec) -> str:
    """The kernel's symbol; the DSL numbers the launches of a host function, and there is one."""
    return f"{spec.code_name}_0"


def cubin_problems(spec: CodeSpec, facts: CubinFacts) -> list[str]:
    """Rules on the cubin's own records."""
    found = tuple((p.index, p.size) for p in facts.parameters)
    wanted = tuple((i, p.size) for i, p in enumerate(spec.parameters))
    ends = [p.offset + p.size for p in facts.parameters]
    overlaps = any(end > p.offset for end, p in zip(ends, facts.parameters[1:], strict=False))
    threads, dynamic, ctas, resident = spec.block_threads, spec.shared_bytes, spec.ctas_per_sm, resident_ctas(spec, facts)
    most_registers, most_shared = occupancy.most_registers(threads, ctas), occupancy.most_shared_memory(ctas)
    return _broken(
        (facts.arch == spec.arch, f"the cubin is for {facts.arch}, the spec says {spec.arch}"),
        (f"sm_{facts.sm}" == spec.arch.rstrip("af"), f"e_flags of the cubin say sm_{facts.sm}, the spec says {spec.arch}"),
        (facts.symbol == symbol_of(spec), f"the symbol is {facts.symbol}, expected {symbol_of(spec)}"),
        (found == wanted, f"parameters (index, bytes) are {found}, the ABI says {wanted}"),
        (not overlaps and ends[-1:] == [facts.parameter_bytes], f"parameter offsets overlap or do not end at {facts.parameter_bytes}"),
        (facts.block == (threads, 1, 1), f"the kernel requires {facts.block} threads, the spec says {threads}"),
        (facts.stack_bytes == 0, f"the kernel has a stack frame of {facts.stack_bytes} bytes (spills or an indexed register array)"),
        (facts.static_shared == 0, f"{facts.static_shared} bytes of static shared memory move the 1024-aligned dynamic base"),
        (facts.registers <= most_registers, f"{facts.registers} registers; {ctas} CTAs of {threads} threads leave {most_registers}"),
        (dynamic <= most_shared, f"{dynamic} bytes of dynamic shared memory; {ctas} CTAs leave {most_shared}"),
        (resident >= ctas, f"only {resident} CTA fits an SM, the design needs {ctas}"),
    )


def log_problems(facts: CubinFacts, report: PtxasReport) -> list[str]:
    """Rules on what ptxas said, and its agreement with the cubin."""
    said, holds = (report.arch, report.registers, report.stack_bytes), (facts.arch, facts.registers, facts.stack_bytes)
    return _broken(
        (said == holds, f"ptxas reported (arch, registers, stack) {said}, the cubin holds {holds}: log and cubin differ in origin"),
        (report.spill_bytes == 0, f"ptxas spilled: {report.spill_bytes} bytes of loads and stores"),
        *((False, f"ptxas warns: {warning}") for warning in report.warnings),
    )


def ptx_problems(spec: CodeSpec, entry: Entry) -> list[str]:
    """Rules on the PTX."""
    sizes, wanted = tuple(p.size for p in entry.parameters), tuple(p.size for p in spec.parameters)
    if sizes != wanted:
        return [f"PTX parameters have {sizes} bytes, the ABI says {wanted}"]
    missing = [" with ".join(i) for i in required(spec) if not entry.find(*i)]
    ctas, align = spec.ctas_per_sm, GROUP_BYTES if spec.shared_bytes else None
    may_trigger = isinstance(spec, FinalizeSpec) or spec.structure == "list"
    return _broken(
        (entry.block == (spec.block_threads, 1, 1), f".reqntid is {entry.block}, the spec says {spec.block_threads}"),
        (entry.min_ctas == ctas, f".minnctapersm is {entry.min_ctas}, the budget is {ctas}"),
        (entry.shared_align == align, f"dynamic shared memory is aligned to {entry.shared_align}, the swizzle needs {align}"),
        (not missing, f"the PTX lacks {missing}"),
        *((False, problem) for problem in pdl_problems(entry, protected_parameters(spec, entry), may_trigger)),
    )


def resident_ctas(spec: CodeSpec, facts: CubinFacts) -> int:
    """CTAs per SM that the figures imply."""
    return occupancy.resident_ctas(facts.registers, spec.block_threads, spec.shared_bytes, facts.static_shared)


def min_driver(ptxas: str) -> int:
    """Smallest ``cuDriverGetVersion`` for cubins of this ptxas: x.0 of its major version (minor version compatibility).

    Measured: cubins of ptxas 13.4 load and run on driver 580, which is CUDA 13.0.
    """
    return int(ptxas.split(".")[0]) * 1000


def sha256(data: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()


def _broken(*rules: tuple[bool, str]) -> list[str]:
    return [problem for holds, problem in rules if not holds]
