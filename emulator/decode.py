"""From parsed instructions to closures: operands become indices into the register file, opcodes become functions.

Every opcode with all its modifiers is looked up when the program is decoded, so an unknown one is an error before anything
runs. The tables are in :mod:`emulator.isa`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import numpy as np

from . import polling
from .cfg import post_dominators
from .config import Arithmetic, Launch
from .memory import SHARED_START
from .parser import Address, Discard, Imm, Instruction, Kernel, Label, Module, Operand, PtxError, Reg, Symbol, Vector
from .polling import PollSite
from .warp import FULL, LANES, Fragment, Lanes, Warp

DTYPES = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {1: np.bool_, 8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOAT = {1: np.bool_, 8: np.uint8, 16: np.float16, 32: np.float32, 64: np.float64}

_DIMENSIONS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
SPECIAL_REGISTERS = {f"%{name}.{axis}" for name in _DIMENSIONS for axis in "xyz"} | {
    "%laneid", "%warpid", "%cluster_ctarank", "%cluster_nctarank"
}  # fmt: skip

NONE = -1
"""Register index of ``_``."""


class Signal(enum.Enum):
    """How a closure tells the interpreter that the fragment does not simply go on."""

    PARK = enum.auto()
    """The fragment waits; it goes on behind the instruction."""
    RETRY = enum.auto()
    """The fragment waits; it runs the instruction again."""
    GONE = enum.auto()
    """The fragment has been replaced (divergence) or has ended."""


Execute = Callable[[Fragment, Lanes], Signal | None]
Builder = Callable[["Decoder", Instruction], Execute]

OPCODES: dict[str, Builder] = {}
"""Full opcode -> what makes its closure."""


def opcode(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder for these opcodes."""

    def register(builder: Builder) -> Builder:
        for name in names:
            assert name not in OPCODES, name
            OPCODES[name] = builder
        return builder

    return register


@dataclasses.dataclass
class Op:
    """A decoded instruction."""

    __slots__ = ("execute", "guard", "negated", "reads", "source", "writes")

    execute: Execute
    guard: int
    """Predicate register, NONE where the instruction is unconditional."""
    negated: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    """Registers that hold a value once the instruction has run (asynchronous results are not among them)."""
    source: Instruction


@dataclasses.dataclass(frozen=True)
class Constant:
    """A read-only entry behind the registers: a literal, a shared variable's address, or a special register."""

    kind: str
    """``literal``, ``shared`` or ``special``."""
    value: Any
    width: int


class Layout:
    """Order of the register file: registers by width, then constants."""

    def __init__(self, registers: dict[str, int]) -> None:
        self.index: dict[str, int] = {}
        self.widths: list[int] = []
        self._runs: list[tuple[int, int]] = []
        for width in sorted(set(registers.values())):
            names = [n for n, w in registers.items() if w == width]
            self._runs.append((width, len(names)))
            for name in names:
                self.index[name] = len(self.widths)
                self.widths.append(width)
        self.registers = len(self.widths)
        self.names = list(self.index)
        self._constants: dict[Constant, int] = {}

    @property
    def constants(self) -> int:
        return len(self._constants)

    def constant(self, constant: Constant) -> int:
        """Index of a constant, added if it is new."""
        if constant not in self._constants:
            self._constants[constant] = self.registers + len(self._constants)
            self.widths.append(constant.width)
        return self._constants[constant]

    def fill(self, warp: Warp) -> None:
        """Create a warp's register file. Registers start as all ones."""
        for width, count in self._runs:
            storage: Any = np.full((count, LANES), -1, _SIGNED[width])
            warp.u += list(storage.view(DTYPES[width]))
            warp.s += list(storage)
            warp.f += list(storage.view(_FLOAT[width]))
        for constant in self._constants:
            value = self._value(constant, warp)
            array: Any = np.empty(LANES, DTYPES[constant.width])
            array[:] = value
            array.flags.writeable = False
            warp.u.append(array)
            warp.s.append(array.view(_SIGNED[constant.width]))
            warp.f.append(array.view(_FLOAT[constant.width]))

    def _value(self, constant: Constant, warp: Warp) -> Any:
        if constant.kind == "literal":
            return constant.value
        if constant.kind == "shared":
            return warp.cta.cluster.shared.address(warp.cta.rank, constant.value)
        return warp.cta.special(constant.value, warp)


@dataclasses.dataclass
class Program:
    """A decoded kernel."""

    kernel: Kernel
    ops: list[Op]
    meeting: list[int]
    """Immediate post-dominator of each instruction."""
    layout: Layout
    static_shared: int
    granule: int
    """Bytes of the narrowest shared-memory access, at most 4: what the sanitizer tells apart."""
    polls: dict[int, PollSite]
    """Loads of poll loops, by instruction index."""
    spins: bool
    """A warp may run on and on while it waits."""
    contracted: list[tuple[Instruction, Instruction]]
    """(mul.f32, add.f32) pairs that ptxas is free to fuse."""


class Decoder:
    """Resolves operands of the instruction at hand and notes which registers it reads and writes."""

    def __init__(self, module: Module, kernel: Kernel, arithmetic: Arithmetic, seed: int) -> None:
        self.kernel = kernel
        self.arithmetic = arithmetic
        self.seed = seed
        self.layout = Layout(kernel.registers)
        self.meeting = post_dominators(kernel.instructions)
        self.here = 0
        """Index of the instruction at hand."""
        self.granule = 4
        self.accumulators: set[int] = set()
        """Registers that wgmma accumulates in."""
        self._reads: list[int] = []
        self._writes: list[int] = []
        self._shared: dict[str, int] = {}
        at = 0
        for variable in sorted(module.shared, key=lambda v: v.size is None):  # dynamic memory follows the static
            at = -(-at // variable.align) * variable.align
            self._shared[variable.name] = SHARED_START + at
            at += variable.size or 0
        self.static_shared = at
        self.instruction: Instruction = kernel.instructions[0]

    def program(self) -> Program:
        """Decode all instructions. Raises PtxError for anything unknown."""
        ops = []
        for index, instruction in enumerate(self.kernel.instructions):
            self.here, self.instruction = index, instruction
            self._reads, self._writes = [], []
            if instruction.opcode not in OPCODES:
                self.fail(f"unknown instruction {instruction.opcode}")
            builder = OPCODES[instruction.opcode]
            guard, negated = NONE, False
            if instruction.guard and not instruction.opcode.startswith("bra"):
                guard, negated = self.register(Reg(instruction.guard[0]), 1), instruction.guard[1]
                self._reads.append(guard)
            execute = builder(self, instruction)
            ops.append(Op(execute, guard, negated, tuple(self._reads), tuple(self._writes), instruction))
        for op in ops:
            if touched := self.accumulators.intersection(op.writes):
                op.execute = _noting(op.execute, touched)
        polls = polling.analyse(ops)
        if polls:
            for op in filter(polling.impure, ops):
                op.execute = _ending_poll(op.execute)
        pairs = contractions(self.kernel.instructions)
        return Program(
            self.kernel, ops, self.meeting, self.layout, self.static_shared, self.granule, polls, polling.spins(ops, polls), pairs
        )

    def fail(self, why: str) -> Any:
        raise PtxError(f"line {self.instruction.line}: {why}: {self.instruction.text!r}")

    # ---- operands ----

    def expect(self, count: int) -> tuple[Operand, ...]:
        """The operands, which must be ``count``."""
        operands = self.instruction.operands
        if len(operands) != count:
            self.fail(f"{count} operands expected, got {len(operands)}")
        return operands

    def register(self, operand: Operand, width: int, wider: bool = False) -> int:
        """Index of a declared register of this width; ``wider``: or of a larger one, as loads and stores allow."""
        if not isinstance(operand, Reg) or operand.name not in self.layout.index:
            self.fail(f"{operand} is not a declared register")
        assert isinstance(operand, Reg)
        index = self.layout.index[operand.name]
        has = self.layout.widths[index]
        if has < width or (has > width and not wider):
            self.fail(f"register {operand.name} has {has} bits; {width} expected")
        return index

    def source(self, operand: Operand, width: int, wider: bool = False) -> int:
        """Index of a value to read: register, literal, special register or shared variable's address."""
        if isinstance(operand, Imm):
            if operand.float_width and operand.float_width != width:
                self.fail(f"a {operand.float_width}-bit literal where {width} bits are expected")
            value: Any = operand.value & ((1 << width) - 1) if width > 1 else operand.value != 0
            return self.layout.constant(Constant("literal", value, width))
        if isinstance(operand, Symbol) and operand.name in self._shared:
            return self.layout.constant(Constant("shared", self._shared[operand.name], width))
        if isinstance(operand, Reg) and operand.name in SPECIAL_REGISTERS:
            return self.layout.constant(Constant("special", operand.name, width))
        index = self.register(operand, width, wider)
        self._reads.append(index)
        return index

    def result(self, operand: Operand, width: int, wider: bool = False) -> int:
        """Index of a register to write; NONE for ``_``."""
        if isinstance(operand, Discard):
            return NONE
        index = self.register(operand, width, wider)
        self._writes.append(index)
        return index

    def late_result(self, operand: Operand, width: int) -> int:
        """A register that an asynchronous instruction writes later."""
        return self.register(operand, width)

    def vector(self, operand: Operand, count: int) -> tuple[Operand, ...]:
        """Items of a vector; a scalar counts as a vector of one."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if len(items) != count:
            self.fail(f"a vector of {count} expected, got {len(items)}")
        return items

    def address(self, operand: Operand, width: int) -> tuple[int, int]:
        """(index of the base, offset) of ``[base + offset]``; the base has ``width`` bits."""
        if not isinstance(operand, Address) or operand.coordinates is not None:
            self.fail(f"{operand} is not an address")
        assert isinstance(operand, Address)
        return self.source(operand.base, width), operand.offset

    def literal(self, operand: Operand) -> int:
        """A literal integer."""
        if not isinstance(operand, Imm) or operand.float_width:
            self.fail(f"{operand} is not an integer literal")
        assert isinstance(operand, Imm)
        return operand.value

    def full_mask(self, operand: Operand) -> None:
        """A membermask, which must be all lanes: nothing else is needed so far."""
        if self.literal(operand) & FULL != FULL:
            self.fail("only the full member mask is supported")

    def label(self, operand: Operand) -> int:
        if not isinstance(operand, Label):
            self.fail(f"{operand} is not a label")
        assert isinstance(operand, Label)
        return operand.target


def _noting(execute: Execute, registers: set[int]) -> Execute:
    """An ordinary write to wgmma accumulators asks for a wgmma.fence before the next MMA."""

    def noted(fragment: Fragment, lanes: Lanes) -> Signal | None:
        fragment.warp.unfenced |= registers
        return execute(fragment, lanes)

    return noted


def _ending_poll(execute: Execute) -> Execute:
    """Whatever has an effect ends a round of polling."""

    def ended(fragment: Fragment, lanes: Lanes) -> Signal | None:
        fragment.poll = None
        return execute(fragment, lanes)

    return ended


def contractions(code: tuple[Instruction, ...]) -> list[tuple[Instruction, Instruction]]:
    """Products without a rounding modifier that feed a sum without one: ptxas may make one fma of them (-fmad)."""
    products: dict[Operand, Instruction] = {}
    found = []
    for instruction in code:
        if instruction.opcode in ("add.f32", "sub.f32", "add.ftz.f32", "sub.ftz.f32"):
            found += [(products[o], instruction) for o in instruction.operands[1:] if o in products]
        if instruction.operands and isinstance(instruction.operands[0], Reg):
            products.pop(instruction.operands[0], None)
        if instruction.opcode in ("mul.f32", "mul.ftz.f32"):
            products[instruction.operands[0]] = instruction
    return found


def decode(module: Module, kernel: Kernel, launch: Launch, arithmetic: Arithmetic, seed: int) -> Program:
    """Decode a kernel. Raises PtxError for unknown instructions, ValueError where launch and kernel disagree."""
    from . import isa  # noqa: F401  (fills OPCODES)

    required = kernel.directives.get("reqntid")
    if required and tuple(required) + (1,) * (3 - len(required)) != launch.block:
        raise ValueError(f"{kernel.name} requires blocks of {required}; the launch has {launch.block}")
    return Decoder(module, kernel, arithmetic, seed).program()
