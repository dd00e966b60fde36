"""Which structure serves a call where the caller does not say: the one that was measured to be faster.

The measurements are of one GPU per target (``measured.py``). Without a measurement of both structures the answer is "cluster": it
needs neither scratch memory nor all its CTAs on the GPU at once. That is so for every shape on ``sm_100f``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .measured import ROWS
from .spec import KernelSpec

DEFAULT = "cluster"


class Shape(NamedTuple):
    """What a measurement holds for. The logits' dtype and the row order of w13 change no time that matters."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    scoring: str
    layout: str
    arch: str

    @classmethod
    def of(cls, spec: KernelSpec) -> Shape:
        """The shape of a spec, whatever its structure."""
        return cls(spec.hidden, spec.inter, spec.experts, spec.top_k, spec.scoring, spec.layout, spec.arch)


class Row(NamedTuple):
    """One measurement."""

    shape: Shape
    tokens: int
    structure: str
    us: float


Choices = Mapping[Shape, Mapping[int, str]]
"""Shape -> measured token count -> the faster structure."""


def choices(rows: Iterable[Row]) -> Choices:
    """The faster structure of every (shape, tokens) that was measured in both; a tie is the cluster's."""
    times: dict[tuple[Shape, int], dict[str, float]] = {}
    for row in rows:
        times.setdefault((row.shape, row.tokens), {})[row.structure] = row.us
    found: dict[Shape, dict[int, str]] = {}
    for (shape, tokens), us in sorted(times.items()):
        if len(us) == 2:
            found.setdefault(shape, {})[tokens] = "list" if us["list"] < us["cluster"] else "cluster"
    return found


@functools.cache
def shipped() -> Choices:
    """The choices of this version."""
    return choices(Row(Shape(*row[:7]), *row[7:]) for row in ROWS)


def faster(spec: KernelSpec, tokens: int, table: Choices | None = None) -> str:
    """The structure for ``tokens`` tokens of ``spec``'s shape: that of the smallest measured count that is not smaller.

    Args:
        table: None for :func:`shipped`.
    """
    measured = (shipped() if table is None else table).get(Shape.of(spec), {})
    above = [count for count in measured if count >= tokens]
    return measured[min(above)] if above else DEFAULT
