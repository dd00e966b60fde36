"""The PTX reader and the checks on it: hand-written PTX, random control flow, and damaged copies of the real kernels."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.build import constants, pdl, ptx
from megamoe_aot.spec import ARCHS
from tests.built import lead, lead_spec

PROTECTED = {"k_param_0": "x", "k_param_1": "logits"}


def module(*lines: str, parameters: int = 3) -> str:
    """A PTX module with pointers x, logits and out in %rd1, %rd2 and %rd3."""
    declared = ",\n".join(f"\t.param .u64 .ptr .global .align 16 k_param_{i}" for i in range(parameters))
    loads = [f"ld.param.b64 %rd{i + 1}, [k_param_{i}];" for i in range(parameters)]
    body = "\n\t".join([*loads, *lines])
    return f"""// a comment; with a semicolon
.version 9.4
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(
{declared}
)
.reqntid 160, 1, 1
.minnctapersm 2
{{
	.reg .pred %p<9>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<99>;
	{body}
	ret;
}}
"""


def problems(*lines: str) -> list[str]:
    return pdl.pdl_problems(ptx.read_entry(module(*lines)), PROTECTED)


# ---- the reader ----


def test_header_is_read() -> None:
    entry = ptx.read_entry(module())
    assert (entry.name, entry.block, entry.min_ctas, entry.shared_align) == ("k", (160, 1, 1), 2, 1024)
    assert [(p.name, p.size) for p in entry.parameters] == [("k_param_0", 8), ("k_param_1", 8), ("k_param_2", 8)]


def test_parameter_kinds() -> None:
    text = ".entry k(.param .u64 .ptr .global .align 16 a, .param .align 64 .b8 b[128], .param .f32 c, .param .u32 d)\n{ ret; }"
    assert [(p.name, p.size) for p in ptx.read_entry(text).parameters] == [("a", 8), ("b", 128), ("c", 4), ("d", 4)]


def test_statements_have_guard_opcode_operands_and_line() -> None:
    text = module("@!%p1 ld.global.v4.b32 {%r1, %r2, %r3, %r4},\n [%rd1+16];", "elect.sync %r5|%p2, 0xffffffff; bra.uni L;", "L:")
    load, elect, branch, end = ptx.statements(text)[3:]
    assert (load.guard, load.opcode, load.operands) == ("!%p1", "ld.global.v4.b32", ("{%r1, %r2, %r3, %r4}", "[%rd1+16]"))
    assert text.splitlines()[load.line - 1].strip().startswith("@!%p1 ld.global")
    assert (load.written, load.space) == (("%r1", "%r2", "%r3", "%r4"), "global")
    assert (elect.written, branch.operands, end.labels) == (("%r5", "%p2"), ("L",), ("L",))


def test_scopes_keep_their_names_apart() -> None:
    wait = "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2; @p bra D; bra W; D: }"
    entry = ptx.read_entry(module(wait, wait))
    first, second = entry.find("mbarrier.try_wait")
    assert first.written != second.written
    assert len(entry.labels) == 4
    jumps = {s.index: entry.labels[s.operands[0]] for s in entry.find("bra")}
    assert jumps == {4: 6, 5: 3, 7: 9, 8: 6}, "each loop branches to its own labels; statements 0 to 2 load parameters"


def test_census_counts_full_opcodes() -> None:
    counted = ptx.census(module("add.s32 %r1, %r2, 1;", "add.s32 %r1, %r1, 1;", "add.s64 %rd4, %rd5, 1;"))
    assert counted == {"ld.param.b64": 3, "add.s32": 2, "add.s64": 1, "ret": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("brx.idx %r1, targets;", "indirect branch"),
        ("targets: .branchtargets A, B;", "directive"),
        ("bra NOWHERE;", "no such label"),
        ("add.s32 %r1, %r2, 1", None),
    ],
)
def test_what_it_cannot_judge_is_an_error(line: str, message: str | None) -> None:
    if message is None:
        with pytest.raises(ptx.PtxError, match="does not end"):
            ptx.read_entry(module(line).replace("ret;", "ret"))
    else:
        with pytest.raises(ptx.PtxError, match=message):
            ptx.read_entry(module(line))


def test_missing_entry_is_named() -> None:
    with pytest.raises(ptx.PtxError, match=r"no entry 'other'; this PTX has \['k'\]"):
        ptx.read_entry(module(), "other")


# ---- constants ----


@pytest.mark.parametrize(
    ("lines", "operand", "expected"),
    [
        ([], "16384", {16384}),
        ([], "0x12F0000000000000", {0x12F0000000000000}),
        ([], "0f3F800000", {0x3F800000}),
        (["mov.b32 %r1, 4;"], "%r1", {4}),
        (["mov.b32 %r1, -4;", "add.s32 %r2, %r1, 20;"], "%r2", {16}),
        (["selp.b32 %r1, 16384, 8192, %p1;"], "%r1", {16384, 8192}),
        (["@%p1 bra L;", "mov.b32 %r1, 1;", "bra M;", "L: mov.b32 %r1, 2;", "M:"], "%r1", {1, 2}),
        (["mov.b32 %r1, 3;", "shl.b32 %r2, %r1, 10;", "or.b32 %r3, %r2, 1;"], "%r3", {3073}),
        (["ld.global.b32 %r1, [%rd1];"], "%r1", None),
        (["@%p1 mov.b32 %r1, 3;"], "%r1", None),
        (["mov.b32 %r1, 0;", "L: add.s32 %r1, %r1, 1;", "@%p1 bra L;"], "%r1", None),
        (["mov.u32 %r1, %tid.x;"], "%r1", None),
        (["mov.b32 %r1, smem;"], "%r1", None),
    ],
)
def test_immediates(lines: list[str], operand: str, expected: set[int] | None) -> None:
    found = constants.immediates(ptx.read_entry(module(*lines)), operand)
    assert found == (None if expected is None else frozenset(expected))


def test_shared_offsets_follow_the_base_symbol() -> None:
    entry = ptx.read_entry(module("mov.b32 %r1, smem;", "add.s32 %r2, %r1, 1024;", "mbarrier.init.shared::cta.b64 [%r2+8], 4;"))
    (init,) = entry.find("mbarrier.init")
    assert constants.shared_offsets(entry, init.operands[0]) == frozenset([1032])
    assert constants.immediate(entry, init.operands[1]) == 4
    assert constants.shared_offsets(entry, "4") is None, "a number alone is no address in shared memory"


# ---- the dependency wait ----

WAIT = "griddepcontrol.wait;"
LOAD_X = "ld.global.b32 %r1, [%rd1];"
STORE = "st.global.b32 [%rd3], %r1;"


def test_good_kernel_has_no_problems() -> None:
    assert problems("prefetch.tensormap [%rd9];", "ld.global.f32 %r7, [%rd3];", "st.shared.b32 [%r2], %r1;", WAIT, LOAD_X, STORE) == []


def test_wait_in_every_branch_is_enough() -> None:
    assert problems("@%p1 bra L;", WAIT, "bra M;", f"L: {WAIT}", f"M: {LOAD_X}", STORE) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([LOAD_X], "no griddepcontrol.wait"),
        ([LOAD_X, WAIT], "accesses memory of x "),
        (["ld.global.v2.b32 {%r1, %r2}, [%rd2+8];", WAIT], "accesses memory of logits "),
        (["@%p1 bra L;", WAIT, f"L: {LOAD_X}"], "accesses memory of x "),
        ([f"@%p1 {WAIT}", LOAD_X], "accesses memory of x "),
        (["L:", LOAD_X, WAIT, "@%p1 bra L;"], "accesses memory of x "),
        ([STORE, WAIT], "writes global memory"),
        (["@%p1 bra L;", WAIT, f"L: {STORE}"], "writes global memory"),
        (["st.b32 [%rd9], %r1;", WAIT], "writes global memory"),
        (["red.global.add.u32 [%rd3], 1;", WAIT], "writes global memory"),
        (["atom.global.add.u32 %r1, [%rd3], 1;", WAIT], "writes global memory"),
        (["cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r1], 16;", WAIT], "writes global memory"),
        (["cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%rd3, {%r1, %r2, %r3}], [%r4];", WAIT], "writes global memory"),
        (["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2];", WAIT], "accesses memory of x "),
        (["prefetch.global.L2 [%rd1];", WAIT], "accesses memory of x "),
        ([WAIT, "st.shared.b64 [%r1], %rd1;"], "stores a pointer derived from x"),
        ([WAIT, "griddepcontrol.launch_dependents;"], "must not let its successor start"),
        ([WAIT, "call.uni helper, (%rd1);"], "cannot judge a call"),
    ],
)
def test_breaches_are_named(lines: list[str], message: str) -> None:
    (problem,) = problems(*lines)
    assert message in problem


@pytest.mark.parametrize(
    "line",
    [
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd9, {%r2, %r3, %r4}], [%r5];",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3];",
        "st.shared.b32 [%r1], %r2;",
        "ld.global.f32 %r1, [%rd3];",
        "cp.async.bulk.prefetch.L2.global [%rd9], 128;",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16384;",
    ],
)
def test_prologue_may_touch_weights_and_shared_memory(line: str) -> None:
    assert problems(line, WAIT) == []


ADDRESS_STEPS = (
    "add.s64 {to}, {at}, 64;",
    "add.s64 {to}, %rd90, {at};",
    "mad.lo.s64 {to}, %rd90, 2, {at};",
    "mad.wide.u32 {to}, %r90, 2, {at};",
    "cvta.to.global.u64 {to}, {at};",
    "mov.b64 {to}, {at};",
    "selp.b64 {to}, {at}, %rd90, %p1;",
    "selp.b64 {to}, %rd90, {at}, %p1;",
    "{{ .reg .b64 t; add.s64 t, {at}, 8; mov.b64 {to}, t; }}",
    "mov.b64 {{%r91, %r92}}, {at}; mov.b64 {to}, {{%r91, %r92}};",
)


@given(st.lists(st.sampled_from(ADDRESS_STEPS), max_size=8), st.sampled_from([1, 2]), st.booleans())
def test_address_arithmetic_is_followed(steps: list[str], parameter: int, through_loop: bool) -> None:
    """However the address is computed, the early load is found; the same arithmetic on another pointer is no breach."""

    def early_load(start: int) -> list[str]:
        registers = [f"%rd{start}", *(f"%rd{20 + i}" for i in range(len(steps)))]
        chain = [step.format(at=a, to=b) for step, (a, b) in zip(steps, itertools.pairwise(registers), strict=True)]
        if through_loop:  # used above its definition: the value arrives over the back edge
            return problems("L:", f"ld.global.b32 %r1, [{registers[-1]}];", *chain, "@%p1 bra L;", WAIT)
        return problems(*chain, f"ld.global.b32 %r1, [{registers[-1]}+4];", WAIT)

    (problem,) = early_load(parameter)
    assert ("x", "logits")[parameter - 1] in problem
    assert early_load(3) == []


def test_data_loaded_through_a_pointer_is_no_pointer_into_it() -> None:
    """An expert id out of the logits indexes the weights: that is no access to the logits."""
    assert problems(WAIT, "ld.global.b32 %r1, [%rd2];", "mad.wide.u32 %rd20, %r1, 4, %rd3;", "ld.global.b32 %r2, [%rd20];") == []
    assert pdl.derivations(ptx.read_entry(module("ld.global.b64 %rd20, [%rd1];")), PROTECTED).get("%rd20", set()) == set()


OPERATIONS = ("nop", "wait", "guarded wait", "store", "jump", "branch", "exit", "guarded exit")


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9)), min_size=1, max_size=10))
def test_reachability_equals_an_exhaustive_walk(program: list[tuple[str, int]]) -> None:
    """A store is a problem exactly if some execution, over all branch outcomes, runs it before it waited."""
    text = {
        "nop": "add.s32 %r1, %r1, 1;",
        "wait": WAIT,
        "guarded wait": f"@%p1 {WAIT}",
        "store": STORE,
        "jump": "bra L{};",
        "branch": "@%p1 bra L{};",
        "exit": "exit;",
        "guarded exit": "@%p1 exit;",
    }
    lines = [f"L{i}: {text[operation].format(target % len(program))}" for i, (operation, target) in enumerate(program)]
    entry = ptx.read_entry(module(*lines))
    found = {s.index - 3 for s in entry.find("st.global") if s.index in pdl.reachable_without(entry, "griddepcontrol.wait")}

    early_stores: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    pending = [(0, False)]
    while pending:
        state = pending.pop()
        at, waited = state
        if state in seen or at == len(program):
            continue
        seen.add(state)
        operation, target = program[at]
        if operation == "store" and not waited:
            early_stores.add(at)
        if operation in ("jump", "branch"):
            pending.append((target % len(program), waited))
        if operation not in ("jump", "exit"):
            pending.append((at + 1, waited or operation == "wait"))
        if operation == "guarded wait":
            pending.append((at + 1, waited))
    assert found == early_stores


# ---- the real kernels, whole and damaged ----


@pytest.mark.parametrize("arch", ARCHS)
def test_real_kernels_pass_and_damaged_copies_do_not(arch: str) -> None:
    built = lead(arch)
    text, symbol = built.compiled.ptx, built.record.symbol

    def check(changed: str) -> list[str]:
        entry = ptx.read_entry(changed, symbol)
        return pdl.pdl_problems(entry, pdl.protected_parameters(lead_spec(arch), entry))

    assert check(text) == []
    assert text.count(WAIT) == 2, "one in each warp role that touches what a predecessor may touch; the MMA warp does not"
    assert check(text.replace(WAIT, "")) == ["the kernel has no griddepcontrol.wait"]
    first_only = text.replace(WAIT, "", 1)
    assert check(first_only), "the first role reads or writes without its wait"
    at_the_end = text.replace(WAIT, "").replace("\tret;", f"\t{WAIT}\n\tret;")
    for changed in (at_the_end, text.replace(WAIT, "@%p1 " + WAIT)):
        found = " ".join(check(changed))
        for broken in ("accesses memory of x ", "accesses memory of logits ", "writes global memory", "ids", "weights"):
            assert broken in found
