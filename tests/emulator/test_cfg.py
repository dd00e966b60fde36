"""Post-dominators against their definition, on random control flow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.cfg import post_dominators, successors
from emulator.parser import Instruction, Label


def branch(target: int, conditional: bool) -> Instruction:
    return Instruction("bra", (Label(target),), ("p", False) if conditional else None, 0, "")


STRAIGHT = Instruction("add.s32", (), None, 0, "")
EXIT = Instruction("ret", (), None, 0, "")


@st.composite
def programs(draw: st.DrawFn) -> list[Instruction]:
    size = draw(st.integers(1, 12))
    code = []
    for _ in range(size):
        kind = draw(st.sampled_from(["straight", "straight", "if", "if", "goto", "exit"]))
        target = draw(st.integers(0, size - 1))
        code.append({"straight": STRAIGHT, "if": branch(target, True), "goto": branch(target, False), "exit": EXIT}[kind])
    return code


def reaches_exit_without(edges: list[tuple[int, ...]], start: int, avoided: int) -> bool:
    seen, stack = {start}, [start]
    while stack:
        node = stack.pop()
        if node == len(edges):
            return True
        for following in edges[node]:
            if following != avoided and following not in seen:
                seen.add(following)
                stack.append(following)
    return False


@given(programs())
@settings(max_examples=300)
def test_immediate_post_dominator(code: list[Instruction]) -> None:
    edges = successors(code)
    end = len(code)
    for node, found in enumerate(post_dominators(code)):
        if not reaches_exit_without(edges, node, -2):
            assert found == -1
            continue
        strict = [d for d in range(end + 1) if d != node and (d == end or not reaches_exit_without(edges, node, d))]
        # the immediate one is post-dominated by all the others
        nearest = [d for d in strict if all(o in (d, end) or not reaches_exit_without(edges, d, o) for o in strict)]
        assert found == nearest[0] and len(nearest) == 1
