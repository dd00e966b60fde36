"""The menu: which model shapes the project compiles, and the specs that each shape expands to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from .spec import ARCHS, LOGITS_DTYPES, STRUCTURES, KernelSpec

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
    groups: int = 0
    top_groups: int = 0


LEAD = ModelShape("GLM-5.3-Flash", "TP4", 4096, 512, 288, 8, "sigmoid_bias", True, 2.5, 10.0)
QWEN3_30B = ModelShape("Qwen3-30B-A3B", "TP1", 2048, 768, 128, 8, "softmax", True, 1.0, None)
DEEPSEEK_V3 = ModelShape("DeepSeek-V3", "TP8", 7168, 256, 256, 8, "sigmoid_bias_grouped", True, 2.5, None, groups=8, top_groups=4)
QWEN3_235B = ModelShape("Qwen3-235B-A22B", "TP1", 4096, 1536, 128, 8, "softmax", True, 1.0, None)
QWEN35_35B = ModelShape("Qwen3.5-35B-A3B", "TP1", 2048, 512, 256, 8, "softmax", True, 1.0, None)

MENU = (LEAD, QWEN3_30B, DEEPSEEK_V3, QWEN3_235B, QWEN35_35B)

WEIGHT_FORMATS = (("trtllm_gen", "up_gate"), ("row_major", "gate_up"), ("row_major", "up_gate"))
"""(layout, w13_order) pairs; the two row_major orders share one cubin."""


LIST_COLUMNS = (8, 16)
"""Column counts of the list structure's entries; each serves up to so many tokens."""


def specs_of(shape: ModelShape, archs: Iterable[str] = ARCHS, structures: Iterable[str] = STRUCTURES) -> Iterator[KernelSpec]:
    """Every spec of one model shape: for each format and target the cluster spec, then the list specs."""
    structures = tuple(structures)
    for arch in archs:
        for layout, order in WEIGHT_FORMATS:
            for logits_dtype in LOGITS_DTYPES:
                cluster = KernelSpec(
                    hidden=shape.hidden,
                    inter=shape.inter,
                    experts=shape.experts,
                    top_k=shape.top_k,
                    arch=arch,
                    scoring=shape.scoring,
                    renormalise=shape.renormalise,
                    groups=shape.groups,
                    top_groups=shape.top_groups,
                    layout=layout,
                    logits_dtype=logits_dtype,
                    tokens=max(TOKEN_COUNTS),
                    scale=shape.scale,
                    limit=shape.limit,
                    w13_order=order,
                )
                if "cluster" in structures:
                    yield cluster
                if "list" in structures:
                    for columns in LIST_COLUMNS:
                        yield dataclasses.replace(cluster, structure="list", columns=columns, tokens=columns)


def menu_specs(archs: Iterable[str] = ARCHS) -> list[tuple[ModelShape, KernelSpec]]:
    """The whole menu, in the order in which it is built and listed."""
    archs = tuple(archs)
    return [(shape, spec) for shape in MENU for spec in specs_of(shape, archs)]
