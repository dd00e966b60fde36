"""The check for whole-warp instructions behind branches on the lane: what it accepts, what it refuses, and our artifacts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from build_kernels import ARTIFACTS
from emulator.parser import parse
from megamoe_aot.manifest import Manifest
from megamoe_aot.spec import ARCHS
from tests.built import lead
from tests.verification.one_of_each import one_of_each
from verification import divergence

PTX_FILES = [ARTIFACTS / f"{sha}.ptx" for sha in one_of_each(Manifest.load(ARTIFACTS))]
"""``python -m verification.divergence`` looks at all artifacts."""


def parted(body: str) -> list[str]:
    """Opcodes that the check refuses in a kernel with this body."""
    text = (
        ".version 9.4\n.target sm_100f\n.address_size 64\n.extern .shared .align 1024 .b8 memory[];\n"
        ".visible .entry k(.param .u32 n)\n{\n.reg .pred %p<9>;\n.reg .b32 %r<19>;\n.reg .b64 %rd<9>;\n"
        "mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; shr.u32 %r3, %r1, 5; ld.param.u32 %r4, [n]; mov.u32 %r5, memory;\n"
        f"{body}\nret;\n}}"
    )
    return [p.instruction.opcode for p in divergence.check(parse(text).kernel())]


BARRIER = "bar.sync 0, 192;"
SKIP = "@%p1 bra L; {0} L: mov.u32 %r18, 0;"


@pytest.mark.parametrize(
    ("condition", "refused"),
    [
        ("setp.ne.u32 %p1, %r2, 0;", True),  # the lane
        ("setp.ne.u32 %p1, %r4, 0;", False),  # a parameter
        ("setp.ne.u32 %p1, %r3, 0;", True),  # the warp index, as far as this check knows
        ("shfl.sync.idx.b32 %r6, %r3, 0, 31, -1; setp.ne.u32 %p1, %r6, 0;", False),  # the same, from one lane
        ("shfl.sync.idx.b32 %r6, %r4, %r2, 31, -1; setp.ne.u32 %p1, %r6, 0;", True),  # from a lane that varies
        ("shfl.sync.bfly.b32 %r6, %r2, 1, 31, -1; setp.ne.u32 %p1, %r6, 0;", True),
        ("redux.sync.max.u32 %r6, %r2, -1; setp.ne.u32 %p1, %r6, 0;", False),
        ("setp.ne.u32 %p2, %r2, 0; vote.sync.ballot.b32 %r6, %p2, -1; setp.ne.u32 %p1, %r6, 0;", False),
        ("ld.shared.b32 %r6, [%r5+4]; setp.ne.u32 %p1, %r6, 0;", False),  # the same address in all lanes
        ("add.u32 %r7, %r5, %r2; ld.shared.b32 %r6, [%r7]; setp.ne.u32 %p1, %r6, 0;", True),
        ("elect.sync %r6|%p1, -1;", True),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r5]; setp.ne.u32 %p1, %r6, 0;", True),
        ("mov.u32 %r6, %clock; setp.ne.u32 %p1, %r6, 0;", True),
        ("mov.u32 %r6, %cluster_ctarank; setp.ne.u32 %p1, %r6, 0;", False),
        ("mov.u32 %r6, %r2; mov.u32 %r6, 1; setp.ne.u32 %p1, %r6, 0;", False),  # the varying value is gone
        ("setp.ne.u32 %p2, %r2, 0; mov.u32 %r6, 1; @%p2 mov.u32 %r6, 2; setp.ne.u32 %p1, %r6, 0;", True),  # set in some lanes only
        ("setp.ne.u32 %p2, %r2, 0; mov.u32 %r6, 1; @%p2 bra M; mov.u32 %r6, 2; M: setp.ne.u32 %p1, %r6, 0;", True),
    ],
)
def test_condition(condition: str, refused: bool) -> None:
    assert parted(condition + SKIP.format(BARRIER)) == (["bar.sync"] if refused else [])


@pytest.mark.parametrize(
    ("instruction", "refused"),
    [
        (BARRIER, True),
        ("barrier.cluster.arrive.relaxed.aligned;", True),
        ("barrier.cluster.wait.acquire.aligned;", True),
        ("tcgen05.wait::ld.sync.aligned;", True),
        ("wgmma.fence.sync.aligned;", True),
        ("redux.sync.max.u32 %r6, %r2, -1;", True),
        ("shfl.sync.idx.b32 %r6, %r2, 0, 31, -1;", True),
        ("bar.warp.sync -1;", False),
        ("barrier.sync 3, 64;", False),
        ("mbarrier.arrive.shared::cta.b64 _, [%r5];", False),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];", False),
    ],
)
def test_instruction(instruction: str, refused: bool) -> None:
    found = parted("setp.ne.u32 %p1, %r2, 0;" + SKIP.format(instruction))
    assert found == ([instruction.split()[0].rstrip(";")] if refused else [])


def test_behind_the_meeting_point_all_is_well() -> None:
    assert parted("setp.ne.u32 %p1, %r2, 0;" + SKIP.format("add.u32 %r7, %r7, 1;") + BARRIER) == []


def test_duplicated_tail() -> None:
    """What LLVM makes of ``if (lane == 0) a; barrier; if (lane == 0) b;``."""
    body = f"setp.ne.u32 %p1, %r2, 0; @%p1 bra L; add.u32 %r7, %r7, 1; {BARRIER} bra.uni M; L: {BARRIER} M:"
    assert parted(body + " mov.u32 %r18, 0;") == ["bar.sync", "bar.sync"]


def test_unswitched_loop() -> None:
    """What LLVM makes of a loop with a barrier and an ``if`` on the lane: one loop for each side."""
    loop = "mov.u32 %r7, 0; {0}: {1} add.u32 %r7, %r7, 1; setp.ne.u32 %p2, %r7, 4; @%p2 bra {0};"
    one, other = loop.format("A", BARRIER), loop.format("B", BARRIER)
    assert parted(f"setp.ne.u32 %p1, %r2, 0; @%p1 bra L; {one} bra.uni M; L: {other} M: mov.u32 %r18, 0;") == ["bar.sync", "bar.sync"]


def test_a_loop_that_lanes_leave_at_different_times() -> None:
    """The counter varies behind the loop although every lane counts the same way."""
    body = f"mov.u32 %r7, 0; A: add.u32 %r7, %r7, 1; setp.ne.u32 %p2, %r7, %r2; @%p2 bra A; setp.ne.u32 %p1, %r7, 5; {SKIP}"
    assert parted(body.format(BARRIER)) == ["bar.sync"]


def test_waiting_for_an_mbarrier_parts_no_lane() -> None:
    wait = "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%r5], 0; @done bra DONE; bra WAIT; DONE: }"
    assert parted(wait + BARRIER) == []


@pytest.mark.parametrize("path", PTX_FILES, ids=lambda p: p.stem[:8])
def test_artifact(path: Path) -> None:
    assert divergence.check(parse(path.read_text()).kernel()) == []


def test_artifacts_are_there() -> None:
    assert PTX_FILES, "artifacts/ holds no PTX: run python build_kernels.py --all"


@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_without_its_uniform_warp_index(arch: str) -> None:
    """The warp roles part no lanes only because the warp index comes from one lane: without the shuffle all of them are refused."""
    text, shuffles = re.subn(r"shfl\.sync\.idx\.b32 \t(%r\d+), (%r\d+), 0, 31, -1;", r"mov.b32 \1, \2;", lead(arch).compiled.ptx)
    assert shuffles == 1
    found = divergence.check(parse(text).kernel())
    assert {"bar.sync", "barrier.cluster.wait.acquire.aligned"} <= {p.instruction.opcode for p in found}
    assert "line" in str(found[0])
