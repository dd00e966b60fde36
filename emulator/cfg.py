"""Control flow: the immediate post-dominator of every branch, where diverged lanes meet again."""

from __future__ import annotations

from collections.abc import Sequence

from .parser import Instruction, Label, PtxError


def successors(code: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """Indices that may follow each instruction; ``len(code)`` stands for the exit."""
    end = len(code)
    following: list[tuple[int, ...]] = []
    for index, instruction in enumerate(code):
        name = instruction.opcode.split(".")[0]
        straight = (min(index + 1, end),)
        if name == "bra":
            label = instruction.operands[0]
            if not isinstance(label, Label):
                raise PtxError(f"line {instruction.line}: branch to something that is no label: {instruction.text!r}")
            following.append((label.target, *straight) if instruction.guard else (label.target,))
        elif name in ("ret", "exit"):
            following.append((end, *straight) if instruction.guard else (end,))
        else:
            following.append(straight)
    return following


def post_dominators(code: Sequence[Instruction]) -> list[int]:
    """Immediate post-dominator of each instruction (``len(code)`` is the exit); -1 where the exit cannot be reached.

    The usual iteration to a fixed point over the reverse graph in postorder; instructions are the nodes.
    """
    end = len(code)
    forward = [*successors(code), ()]
    backward: list[list[int]] = [[] for _ in range(end + 1)]
    for index, following in enumerate(forward):
        for successor in following:
            backward[successor].append(index)
    order = _postorder(backward, end)
    number = {node: n for n, node in enumerate(order)}
    above = [-1] * (end + 1)
    above[end] = end

    def meet(a: int, b: int) -> int:
        while a != b:
            while number[a] < number[b]:
                a = above[a]
            while number[b] < number[a]:
                b = above[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in reversed(order):
            if node == end:
                continue
            best = -1
            for successor in forward[node]:
                if above[successor] >= 0:
                    best = successor if best < 0 else meet(best, successor)
            if best != above[node]:
                above[node] = best
                changed = True
    return above[:end]


def _postorder(edges: Sequence[Sequence[int]], root: int) -> list[int]:
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(edges[root]))]
    while stack:
        node, rest = stack[-1]
        for following in rest:
            if following not in seen:
                seen.add(following)
                stack.append((following, iter(edges[following])))
                break
        else:
            order.append(node)
            stack.pop()
    return order
