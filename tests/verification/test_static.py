"""sentryward on the Blackwell kernel: passes as it is, and fails where a barrier, a byte count or a wait is wrong.

The verifier needs minutes for a menu entry (``python -m verification.static``). These tests use the same generator on smaller
numbers: CHAIN has every step of the kernel and runs in seconds, RING also goes round its ring of stages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest

from kernels.build.jobs import build_code
from megamoe_aot.menu import LEAD, specs_of
from megamoe_aot.spec import KernelSpec
from verification import static

CHAIN = KernelSpec(arch="sm_100f", hidden=1024, inter=128, experts=32, top_k=1, cluster=8)
RING = KernelSpec(arch="sm_100f", hidden=3072, inter=128, experts=32, top_k=1, cluster=8)


@functools.cache
def ptx_of(spec: KernelSpec) -> str:
    return build_code(spec).compiled.ptx


def verdict(spec: KernelSpec, ptx: str) -> static.Verdict:
    pytest.importorskip("sentryward", reason="sentryward is not installed (extra: verify)")
    description = static.launch_input(spec, f"{spec.code_name}_0")
    return static.verify(spec.code_name, static.normalise(ptx, spec), description, timeout=300)


# ---- the verifier ----


@pytest.mark.slow
@pytest.mark.parametrize("spec", [CHAIN, RING], ids=["chain", "ring"])
def test_kernel_is_proved(spec: KernelSpec) -> None:
    found = verdict(spec, ptx_of(spec))
    assert found.passed, found


def test_ring_goes_round() -> None:
    """Or RING would show nothing that CHAIN does not."""
    assert RING.split.stages1 + RING.split.stages2 > RING.shared.ring
    assert CHAIN.split.stages1 + CHAIN.split.stages2 <= CHAIN.shared.ring


def change(pattern: str, replacement: str, which: int = 0) -> Callable[[str], str]:
    """An edit of match number ``which`` of a pattern; it must be there."""

    def edit(ptx: str) -> str:
        match = list(re.finditer(pattern, ptx))[which]
        return ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]

    return edit


COMMIT = r"tcgen05\.commit[^;]*;"
CLUSTER_SCOPE_WAIT = r"\{ \.reg \.pred done; WAIT: mbarrier\.try_wait\.parity\.acquire\.cluster[^}]*\}"
MUTANTS = {
    "accumulator commit removed": (CHAIN, change(COMMIT, "", 1), "not_wellsynced"),
    "stage expects one byte more": (CHAIN, change(r"(arrive\.expect_tx[^;]*), 16384;", r"\1, 16385;"), "not_wellsynced"),
    "wait for the remote sums removed": (CHAIN, change(CLUSTER_SCOPE_WAIT, ""), "potential_race"),
    "stage is not given back": (RING, change(COMMIT, "", 0), "not_wellsynced"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_found(mutant: str) -> None:
    spec, edit, result = MUTANTS[mutant]
    found = verdict(spec, edit(ptx_of(spec)))
    assert (found.result, found.passed) == (result, False), found
    assert found.findings


# ---- what it is given ----


def test_launch_input_of_the_lead_entry() -> None:
    """Numbers written down by hand from the model's shape and the layout's definition."""
    spec = next(specs_of(LEAD, ("sm_100f",)))
    given = static.launch_input(spec, "k", routes=16)
    assert given["launch"] == {
        "grid_dim": [256, 1, 1],  # 16 clusters of 16 CTAs
        "block_dim": [192, 1, 1],
        "cluster_dim": [16, 1, 1],
        "dynamic_shared_bytes": spec.shared.total,
    }
    assert [d["object"] for d in given["declarations"]] == [
        *("x", "logits", "bias", "w13_scale", "w2_scale", "out", "ids", "weights", "w13", "w2"),
    ]
    assert {a["parameter"]: a["value"] for a in given["arguments"]} == {10: 2.5, 11: 10.0, 12: 0}
    w13, w2 = given["tma_descriptors"]
    assert (w13["parameter"], w13["global_shape"], w13["global_strides_bytes"]) == (8, [128, 1024, 288 * 32], [128, 1024 * 128])
    assert (w2["parameter"], w2["global_shape"], w2["global_strides_bytes"]) == (9, [128, 4096, 288 * 4], [128, 4096 * 128])


MAP = """\
\tmov.b64 \t%rd1, k_param_8;
\tcvta.param.u64 \t%rd2, %rd1;
\tprefetch.tensormap [%rd2];
\tcp.async.bulk.tensor.3d.tile [%r1], [%rd2, {%r2, %r3, %r4}], [%r5], %rd9;
"""


def test_tensor_map_is_named() -> None:
    named = static.name_tensor_maps(MAP)
    assert named == MAP.replace("[%rd2, {", "[k_param_8, {")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (MAP + "\tadd.s64 \t%rd2, %rd2, 128;\n", "2 writes"),
        (MAP.replace("[%rd2, {", "[%rd7, {"), "%rd7 is no kernel parameter"),
        (MAP + "\tmov.b64 \t%rd1, k_param_9;\n", "exactly one parameter"),
    ],
)
def test_unclear_tensor_map_is_refused(broken: str, why: str) -> None:
    with pytest.raises(static.NormaliseError, match=why):
        static.name_tensor_maps(broken)


def test_warp_barrier_is_counted_per_warp() -> None:
    counted = static.count_warp_barriers("a; bar.warp.sync 0xffffffff; bar.sync 2, 160; bar.warp.sync 0xffffffff;")
    assert "bar.warp.sync" not in counted
    assert counted.count("shr.u32 warp, warp, 5; add.u32 warp, warp, 8; bar.sync warp, 32;") == 2
    assert "bar.sync 2, 160;" in counted


@pytest.mark.parametrize(
    ("broken", "why"),
    [("bar.warp.sync 0x0000ffff;", "does not name all lanes"), ("bar.sync 9, 64; bar.warp.sync 0xffffffff;", r"\[9\] are in use")],
)
def test_other_barriers_are_refused(broken: str, why: str) -> None:
    with pytest.raises(static.NormaliseError, match=why):
        static.count_warp_barriers(broken)


def test_predicated_increment_becomes_a_selection() -> None:
    assert static.select_increments("@p add.u32 %r1, %r1, 1;") == "{ .reg .b32 one; selp.b32 one, 1, 0, p; add.u32 %r1, %r1, one; }"
    untouched = "@p add.u32 %r1, %r2, 1; @p add.u32 %r1, %r1, 2; add.u32 %r1, %r1, 1;"
    assert static.select_increments(untouched) == untouched


def test_routing_is_fixed() -> None:
    """Both loads from the table give the constant, other loads stay; a ballot is one of all lanes."""
    load = "\tadd.s32 \t%r{0}, %r1, {1};\n\tld.shared.b32 %r{2}, [%r{0}];\n"
    at = CHAIN.shared.ids
    text = load.format(10, at, 11) + load.format(12, at, 13) + load.format(14, at + 4, 15)
    fixed = static.fix_routing(text + "vote.sync.ballot.b32 %r3, %p4, 0xffffffff;", CHAIN)
    assert fixed.count("{ .reg .b32 table; ld.shared.b32 table, [%r10]; mov.b32 %r11, 0; }") == 1
    assert fixed.count("mov.b32 %r13, 0;") == 1
    assert "ld.shared.b32 %r15, [%r14];" in fixed
    assert fixed.endswith("setp.eq.u32 %p4, 0, 0; vote.sync.ballot.b32 %r3, %p4, 0xffffffff;")
    with pytest.raises(static.NormaliseError, match="found 1 loads"):
        static.fix_routing(load.format(10, at, 11), CHAIN)
