"""The menu: which model shapes the project compiles, and the specs that each shape expands to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from .spec import ARCHS, LOGITS_DTYPES, KernelSpec

TOKEN_COUNTS = (1, 2, 4, 8, 16)
"""Token counts that are tested and measured; every count from 0 to the largest launches."""


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """One model at one tensor-parallel degree. Source of the figures: public model configurations."""

    model: str
    parallel: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    scoring: str
    renormalise: bool
    scale: float
    limit: float | None


LEAD = ModelShape("GLM-5.3-Flash", "TP4", 4096, 512, 288, 8, "sigmoid_bias", True, 2.5, 10.0)
QWEN3_30B = ModelShape("Qwen3-30B-A3B", "TP1", 2048, 768, 128, 8, "softmax", True, 1.0, None)

MENU = (LEAD, QWEN3_30B)

WEIGHT_FORMATS = (("trtllm_gen", "up_gate"), ("row_major", "gate_up"), ("row_major", "up_gate"))
"""(layout, w13_order) pairs; the two row_major orders share one cubin."""


def specs_of(shape: ModelShape, archs: Iterable[str] = ARCHS) -> Iterator[KernelSpec]:
    """Every spec of one model shape."""
    for arch in archs:
        for layout, order in WEIGHT_FORMATS:
            for logits_dtype in LOGITS_DTYPES:
                yield KernelSpec(
                    hidden=shape.hidden,
                    inter=shape.inter,
                    experts=shape.experts,
                    top_k=shape.top_k,
                    arch=arch,
                    scoring=shape.scoring,
                    renormalise=shape.renormalise,
                    layout=layout,
                    logits_dtype=logits_dtype,
                    tokens=max(TOKEN_COUNTS),
                    scale=shape.scale,
                    limit=shape.limit,
                    w13_order=order,
                )


def menu_specs(archs: Iterable[str] = ARCHS) -> list[tuple[ModelShape, KernelSpec]]:
    """The whole menu, in the order in which it is built and listed."""
    archs = tuple(archs)
    return [(shape, spec) for shape in MENU for spec in specs_of(shape, archs)]
