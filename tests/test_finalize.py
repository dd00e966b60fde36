"""The finalize kernel: its spec, its code for both architectures, and its emulated PTX against the reference, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import emulator
from emulator import Buffer, Checks, Launch, Pointer
from kernels.build.compile import ROOT
from kernels.build.cubin import read_cubin
from kernels.build.pdl import pdl_problems
from kernels.build.ptx import read_entry
from kernels.build.ptxas_log import read_log
from megamoe_aot import reference
from megamoe_aot.abi import FLAG_TRIGGER
from megamoe_aot.finalize import PARAMETERS, FinalizeSpec
from megamoe_aot.menu import menu_specs
from megamoe_aot.spec import ARCHS, KernelSpec, SpecError
from tests.child import run_python
from verification.disassembly import disassemble

SMALL = [FinalizeSpec(hidden, top_k, arch) for arch in ARCHS for hidden, top_k in ((1024, 1), (1024, 2), (1024, 8), (3072, 5))]
"""3072 is six CTAs per token: no power of two."""
LARGE = [FinalizeSpec(hidden, top_k, arch) for arch in ARCHS for hidden, top_k in ((4096, 8), (7168, 8), (1024, 32))]

CHILD = """
import json, sys
from pathlib import Path
from cutlass import cute
from kernels.build.compile import options
from kernels.finalize import host_function
from megamoe_aot.finalize import FinalizeSpec

for fields in json.load(sys.stdin):
    spec = FinalizeSpec.from_dict(fields)
    folder = Path(sys.argv[1]) / spec.code_name
    folder.mkdir()
    function, arguments = host_function(spec)
    compiled = cute.compile(function, *arguments, options=options(spec.arch, folder))
    (folder / "kernel.cubin").write_bytes(compiled.artifacts.CUBIN)
    (folder / "kernel.ptx").write_text(compiled.artifacts.PTX)
"""


@dataclasses.dataclass(frozen=True)
class Code:
    """What the compiler made of one spec."""

    cubin: bytes
    ptx: str
    log: str


@functools.cache
def codes() -> dict[FinalizeSpec, Code]:
    """All specs of this file, compiled in one process with the build's options and environment."""
    specs = [*SMALL, *LARGE]
    with tempfile.TemporaryDirectory() as folder:
        log = run_python("-c", CHILD, folder, stdin=json.dumps([spec.to_dict() for spec in specs]))
        folders = {spec: Path(folder) / spec.code_name for spec in specs}
        return {s: Code((f / "kernel.cubin").read_bytes(), (f / "kernel.ptx").read_text(), log) for s, f in folders.items()}


def name(spec: FinalizeSpec) -> str:
    return spec.code_name


# ---- the spec ----


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hidden": 0}, "hidden must be"),
        ({"hidden": -1024}, "hidden must be"),
        ({"hidden": 1536}, "hidden must be"),
        ({"top_k": 0}, "top_k must be"),
        ({"top_k": 33}, "top_k must be"),
        ({"arch": "sm_80"}, "arch must be"),
        ({"inter": 512}, r"unknown finalize spec fields \['inter'\]"),
    ],
)
def test_bad_specs(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        FinalizeSpec.from_dict({"hidden": 4096, "top_k": 8, "arch": "sm_90a"} | fields)


def test_missing_field() -> None:
    with pytest.raises(SpecError, match="arch"):
        FinalizeSpec.from_dict({"hidden": 4096, "top_k": 8})


@given(st.integers(1, 16), st.integers(1, 32), st.sampled_from(ARCHS), st.integers(1, 256))
def test_spec_properties(kilochannels: int, top_k: int, arch: str, tokens: int) -> None:
    spec = FinalizeSpec(1024 * kilochannels, top_k, arch)
    assert FinalizeSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec == spec.code
    assert spec.code_name == f"finalize_h{1024 * kilochannels}_k{top_k}_{arch}"
    assert spec.grid(tokens) * spec.block_threads * 8 == tokens * spec.hidden, "each thread computes eight channels, each channel once"
    assert spec.grid(tokens) == tokens * spec.grid(1), "no CTA works on two tokens"


def test_every_menu_entry_has_one() -> None:
    for _, spec in menu_specs():
        assert FinalizeSpec.of(spec) == FinalizeSpec(hidden=spec.hidden, top_k=spec.top_k, arch=spec.arch)
    assert len({FinalizeSpec.of(KernelSpec(4096, inter, 64, 8, "sm_90a")) for inter in (128, 256)}) == 1


def test_run_time_side_needs_no_compiler_and_no_torch() -> None:
    code = "import sys, megamoe_aot.finalize; print(*sorted({'torch', 'numpy', 'cutlass', 'cuda'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


# ---- the compiled code ----


def test_abi_order() -> None:
    """By name here; that each position means what its name says is shown by the emulated runs."""
    from kernels.finalize import finalize, launch

    for function in (finalize, launch):
        assert [*inspect.signature(function).parameters] == ["spec", *(p.name for p in PARAMETERS)]


@pytest.mark.parametrize("spec", [*SMALL, *LARGE], ids=name)
def test_code(spec: FinalizeSpec) -> None:
    symbol = f"{spec.code_name}_0"
    code = codes()[spec]
    facts, report, entry = read_cubin(code.cubin), read_log(code.log, symbol), read_entry(code.ptx, symbol)
    assert (facts.symbol, facts.arch, facts.block) == (symbol, spec.arch, (spec.block_threads, 1, 1))
    assert [p.size for p in facts.parameters] == [p.size for p in PARAMETERS] == [p.size for p in entry.parameters]
    assert (report.arch, report.spill_bytes, facts.stack_bytes, facts.static_shared) == (spec.arch, 0, 0, 0)
    assert report.warnings == () and entry.shared_align is None
    assert facts.registers <= (64 if spec.top_k <= 8 else 128)
    inputs = {q.name: p.name for p, q in zip(PARAMETERS, entry.parameters, strict=True) if p.kind == "pointer" and p.name != "y"}
    assert pdl_problems(entry, inputs, may_trigger=True) == []
    assert len(entry.find("ld.global", "v4")) == spec.top_k + 1 and len(entry.find("st.global", "v4")) == 1
    assert not entry.find("bra"), "straight-line code"
    (wait,), (trigger,) = entry.find("griddepcontrol.wait"), entry.find("griddepcontrol.launch_dependents")
    assert wait.guard is None and trigger.guard is not None and wait.index == trigger.index + 1
    assert entry.statements[wait.index + 1].matches("ld.global"), "the addresses are there before the wait"


@pytest.mark.parametrize("spec", [*SMALL, *LARGE], ids=name)
def test_loads_are_in_flight_together(spec: FinalizeSpec) -> None:
    """Of the machine code: ptxas is free to wait for one rank before it loads the next, and does so without a register budget."""
    opcodes = [instruction.opcode for instruction in disassemble(codes()[spec].cubin)]
    wait = opcodes.index("ACQBULK")
    first_use = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("FFMA"))
    before = opcodes[wait:first_use]
    assert sum(opcode.startswith("LDG.E.128") for opcode in before) >= min(spec.top_k, 16)
    assert not any(opcode.startswith(("LDG", "STG")) for opcode in opcodes[:wait])
    assert opcodes.count("PREEXIT") == 1 and opcodes.index("PREEXIT") < wait, "the successor may start before this launch's turn"


# ---- emulated runs ----


def run(
    spec: FinalizeSpec,
    out: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    ptx: str | None = None,
    flags: int = 0,
    dependents_wait: bool = False,
) -> tuple[Tensor, emulator.Result]:
    """(y, what the emulator found). Buffers are as badly aligned as the ABI allows, inputs appear at the dependency wait only.

    Unless ``dependents_wait``, a CTA that stores after its trigger is a finding.
    """
    tokens = len(weights)
    y = np.full(tokens * spec.hidden * 2, 0xFF, np.uint8)

    def given(title: str, tensor: Tensor, align: int) -> Buffer:
        return Buffer(title, tensor.contiguous().view(torch.uint8).flatten().numpy(), predecessor=True, align=align)

    buffers = [given("out", out, 16), given("weights", weights, 4), Buffer("y", y, "output", align=16)]
    if shared is not None:
        buffers.append(given("shared", shared, 16))
    named = {buffer.name for buffer in buffers}
    result = emulator.emulate(
        ptx or codes()[spec].ptx,
        Launch((spec.grid(tokens), 1, 1), (spec.block_threads, 1, 1)),
        buffers,
        [flags if p.name == "flags" else Pointer(p.name if p.name in named else None) for p in PARAMETERS],
        checks=Checks(dependents_wait=dependents_wait),
    )
    return torch.from_numpy(y).view(torch.bfloat16).view(tokens, spec.hidden), result


def check(spec: FinalizeSpec, out: Tensor, weights: Tensor, shared: Tensor | None, flags: int = 0) -> Tensor:
    """y, after comparing it with the reference: equal bits, and 0x7fff where the reference has a NaN."""
    got, result = run(spec, out, weights, shared, flags=flags, dependents_wait=flags == FLAG_TRIGGER)
    assert result.findings == [], result.report()
    want = reference.finalize(out, weights, shared)
    wanted_bits = torch.where(want.isnan(), torch.tensor(0x7FFF, dtype=torch.int16), want.view(torch.int16))
    different = (got.view(torch.int16) != wanted_bits).nonzero()
    assert len(different) == 0, f"{len(different)} channels differ, the first is (token, channel) {different[0].tolist()}"
    return got


def normal_inputs(spec: FinalizeSpec, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """out BF16 [M*K, H], weights FP32 [M, K], shared BF16 [M, H]."""
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(tokens * spec.top_k, spec.hidden, generator=g).bfloat16()
    return out, torch.rand(tokens, spec.top_k, generator=g), torch.randn(tokens, spec.hidden, generator=g).bfloat16()


SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 2.0**-133, -(2.0**-133), 3.38e38, -3.38e38]


def any_bits(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bit patterns (NaN of both signs, subnormals, sums that overflow), every eighth value one of SPECIAL."""
    size = torch.finfo(dtype).bits // 8
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator).view(dtype)
    special = torch.tensor(SPECIAL).to(dtype)[torch.randint(0, len(SPECIAL), shape, generator=generator)]
    return torch.where(torch.randint(0, 8, shape, generator=generator) == 0, special, bits)


@pytest.mark.parametrize("flags", [0, FLAG_TRIGGER], ids=["", "trigger"])
@pytest.mark.parametrize("with_shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("spec", SMALL, ids=name)
def test_normal_inputs(spec: FinalizeSpec, tokens: int, with_shared: bool, flags: int) -> None:
    out, weights, shared = normal_inputs(spec, tokens, seed=tokens)
    check(spec, out, weights, shared if with_shared else None, flags)


@pytest.mark.parametrize("spec", [*SMALL, *LARGE], ids=name)
def test_only_the_trigger_flag_lets_dependents_start(spec: FinalizeSpec) -> None:
    """y is stored behind the trigger, which the emulator reports unless it is told that dependents wait."""
    inputs = normal_inputs(spec, 1, seed=0)
    for flags in (0, 0xFFFFFFFF ^ FLAG_TRIGGER):
        _, result = run(spec, *inputs, flags=flags)
        assert result.findings == [], result.report()
    for flags in (FLAG_TRIGGER, 0xFFFFFFFF):
        _, result = run(spec, *inputs, flags=flags)
        assert result.ids() == {"E-PDL"} and "after this CTA's launch_dependents" in result.report()


@pytest.mark.parametrize("spec", LARGE, ids=name)
def test_large_shapes(spec: FinalizeSpec) -> None:
    check(spec, *normal_inputs(spec, 2, seed=0))


@pytest.mark.parametrize("with_shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("spec", SMALL, ids=name)
def test_any_bits(spec: FinalizeSpec, with_shared: bool) -> None:
    """Token 0: any bits everywhere. Token 1: moderate weights. Token 2: finite rows, some as large as BF16 can hold, and weights of 0."""
    g = torch.Generator().manual_seed(spec.top_k)
    out = any_bits(g, torch.bfloat16, 3 * spec.top_k, spec.hidden)
    weights = any_bits(g, torch.float32, 3, spec.top_k)
    shared = any_bits(g, torch.bfloat16, 3, spec.hidden)
    weights[1] = torch.rand(spec.top_k, generator=g) - 0.5
    out[2 * spec.top_k :] = out[2 * spec.top_k :].nan_to_num(1.0)
    weights[2] = torch.tensor([1.5, 0.0, -1.0, 1e-45])[torch.arange(spec.top_k) % 4]
    y = check(spec, out, weights, shared if with_shared else None)
    assert y.isnan().any() and y.isfinite().any() and y.isinf().any(), "the inputs reach every kind of result"


@pytest.mark.parametrize("arch", ARCHS)
def test_order_and_rounding_matter(arch: str) -> None:
    """Pairs of routes that almost cancel leave nothing but rounding errors: any other order or rounding gives other values."""
    spec = FinalizeSpec(1024, 8, arch)
    out, weights, shared = normal_inputs(spec, 2, seed=3)
    out[1::2] = out[::2]
    weights[:, 1::2] = -weights[:, ::2] * (1 + 2**-21)
    y = check(spec, out, weights, shared * 2**-20)
    rows, shared = out.float().view(2, 8, -1), shared.float() * 2**-20

    def chain(start: Tensor, order: list[int], fused: bool = True) -> Tensor:
        for k in order:
            factor = weights[:, k, None]
            start = reference.fma(factor, rows[:, k], start) if fused else factor * rows[:, k] + start
        return start

    zero, ascending = torch.zeros_like(shared), [*range(8)]
    assert torch.equal((chain(zero, ascending) + shared).bfloat16(), y)
    others = {
        "descending ranks": chain(zero, ascending[::-1]) + shared,
        "shared first": chain(shared, ascending),
        "two roundings per rank": chain(zero, ascending, fused=False) + shared,
        "two partial sums": (chain(zero, ascending[:4]) + chain(zero, ascending[4:])) + shared,
        "rounded before shared": chain(zero, ascending).bfloat16().float() + shared,
        "no shared": chain(zero, ascending),
    }
    for title, other in others.items():
        assert not torch.equal(other.bfloat16(), y), title


BY_HAND = {
    # name: (weights, one channel of the routes, shared, wanted bits)
    "sum": ([0.5, 0.25], [1.0, 4.0], None, 0x3FC0),
    "sum and shared": ([0.5, 0.25], [1.0, 4.0], -2.0, 0xBF00),
    "ties to even, down": ([1.0, 2.0**-8], [1.0, 1.0], None, 0x3F80),
    "ties to even, up": ([1.0, 2.0**-8], [1.0078125, 1.0], None, 0x3F82),
    "a zero weight hides no infinity": ([0.0, 1.0], [float("inf"), 1.0], None, 0x7FFF),
    "a zero weight hides no NaN": ([0.0, 1.0], [float("nan"), 1.0], None, 0x7FFF),
    "opposite infinities": ([1.0, -1.0], [float("inf"), float("inf")], None, 0x7FFF),
    "an infinity stays": ([1.0, -1.0], [float("inf"), 1.0], -3.0, 0x7F80),
    "NaN in shared": ([1.0, 1.0], [1.0, 1.0], float("nan"), 0x7FFF),
    "overflow": ([2.0, 0.0], [3e38, 0.0], None, 0x7F80),
    "the sum of -0 is +0": ([1.0, 1.0], [-0.0, -0.0], None, 0x0000),
    "and stays so": ([1.0, 1.0], [-0.0, -0.0], -0.0, 0x0000),
    "underflow keeps its sign": ([-1e-45, 0.0], [1e-30, -0.0], None, 0x8000),
    "which shared -0 keeps": ([-1e-45, 0.0], [1e-30, -0.0], -0.0, 0x8000),
    "and shared +0 does not": ([-1e-45, 0.0], [1e-30, -0.0], 0.0, 0x0000),
    "subnormals": ([1.0, 1.0], [2.0**-133, 2.0**-133], None, 0x0002),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case: str, arch: str) -> None:
    factors, values, last, wanted = BY_HAND[case]
    spec = FinalizeSpec(1024, 2, arch)
    out = torch.tensor(values).bfloat16()[:, None].expand(2, 1024)
    shared = None if last is None else torch.full((1, 1024), last).bfloat16()
    y = check(spec, out, torch.tensor([factors]), shared)
    assert (y.view(torch.int16).int() & 0xFFFF).unique().tolist() == [wanted]


def test_a_token_depends_on_its_own_rows_only() -> None:
    spec = FinalizeSpec(1024, 8, "sm_90a")
    out, weights, shared = normal_inputs(spec, 3, seed=5)
    before = check(spec, out, weights, shared)
    out[8:16], weights[1], shared[1] = float("nan"), float("inf"), float("-inf")
    after = check(spec, out, weights, shared)
    assert torch.equal(before[[0, 2]], after[[0, 2]]) and bool(after[1].isnan().all())


DAMAGE = {
    "no dependency wait": (r"griddepcontrol\.wait;", "", {"E-PDL"}),
    "a trigger unasked": (r"@%p\d+ griddepcontrol\.launch_dependents;", "griddepcontrol.launch_dependents;", {"E-PDL"}),
    "a row too far": (r"shr\.u32 (\s*%r\d+, %r\d+), 1;", r"shr.u32 \1, 0;", {"E-GLOBAL"}),
    "a store moved by a word": (r"st\.global\.v4\.b32 \[(%rd\d+)\]", r"st.global.v4.b32 [\1+4]", {"E-GLOBAL"}),
}


@pytest.mark.parametrize("title", DAMAGE)
def test_damaged_code_is_found_out(title: str) -> None:
    pattern, replacement, wanted = DAMAGE[title]
    spec = FinalizeSpec(1024, 8, "sm_90a")
    ptx, count = re.subn(pattern, replacement, codes()[spec].ptx, count=1)
    assert count == 1, "the kernel has changed: choose another edit"
    _, result = run(spec, *normal_inputs(spec, 2, seed=0), ptx)
    assert wanted <= result.ids(), result.report()
