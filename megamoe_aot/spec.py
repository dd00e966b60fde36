"""The frozen kernel specification: what one entry of the menu is.

Build, manifest, loader checks, launch configuration and documentation all derive from :class:`KernelSpec` and from the
objects that it hands out (:class:`~megamoe_aot.split.WorkSplit`, :class:`~megamoe_aot.shared_memory.SharedMap`,
:class:`~megamoe_aot.work_list.ListPlan`, :mod:`~megamoe_aot.abi`). Nothing here imports the compiler, torch or a driver.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

from .abi import Parameter, parameters
from .shared_memory import SharedMap
from .split import WorkSplit
from .work_list import ListPlan

BLOCK = 128
"""Edge of one FP8 weight scale block, and the K depth of one pipeline stage."""

SCORINGS = ("sigmoid_bias", "sigmoid_bias_grouped", "softmax")
STRUCTURES = ("cluster", "list")
LAYOUTS = ("trtllm_gen", "row_major")
W13_ORDERS = ("up_gate", "gate_up")
LOGITS_DTYPES = ("bf16", "fp32")
ARCHS = ("sm_90a", "sm_100f")
ENGINES = {"sm_90a": "hopper", "sm_100f": "blackwell"}

LAUNCH_FIELDS = ("tokens", "scale", "limit", "ue8m0", "w13_order")
"""Fields that are launch arguments: entries that differ only in these share one cubin."""


class SpecError(ValueError):
    """A combination of numbers that no kernel of this design can serve; the message says which rule it breaks."""


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One entry of the menu.

    The first group of fields is compiled into the cubin; :data:`LAUNCH_FIELDS` are passed at each launch.
    """

    hidden: int
    """H, model width; a multiple of 1024."""
    inter: int
    """I, intermediate size that one rank holds; a multiple of 128."""
    experts: int
    """E, routed experts; a multiple of 32, at most 1024."""
    top_k: int
    """K, experts per token; 1 to 32."""
    arch: str
    """Target stamped into the cubin: ``sm_90a`` (Hopper) or ``sm_100f`` (the Blackwell family 10.x)."""
    scoring: str = "sigmoid_bias"
    renormalise: bool = True
    """Divide the chosen scores by their sum."""
    groups: int = 0
    """Expert groups of sigmoid_bias_grouped, 0 for other scorings; a group has a multiple of 32 experts."""
    top_groups: int = 0
    """Groups from which experts are chosen."""
    layout: str = "trtllm_gen"
    logits_dtype: str = "bf16"
    cluster: int = 16
    """CTAs that share one route, in the cluster structure."""
    structure: str = "cluster"
    """``cluster``: one cluster per route. ``list``: one CTA per SM and a list of the call's unique experts, see work_list.py."""
    columns: int = 0
    """List structure: MMA columns, one per token, 8 or 16; 0 in the cluster structure."""

    tokens: int = 16
    """Largest M that the entry is tested for; the M of a launch is its grid."""
    scale: float = 1.0
    """Routed scaling factor, applied to ``weights`` inside the kernel, once."""
    limit: float | None = None
    """SwiGLU clamp, None for no clamp."""
    ue8m0: bool = False
    """Round the activation scales of x up to powers of two."""
    w13_order: str = "up_gate"
    """Which half of w13's rows comes first."""

    def __post_init__(self) -> None:
        def need(ok: bool, why: str) -> None:
            if not ok:
                raise SpecError(f"{why}; got {self}")

        need(self.arch in ARCHS, f"arch must be one of {ARCHS}")
        need(self.scoring in SCORINGS, f"scoring must be one of {SCORINGS}")
        need(self.layout in LAYOUTS, f"layout must be one of {LAYOUTS}")
        need(self.logits_dtype in LOGITS_DTYPES, f"logits_dtype must be one of {LOGITS_DTYPES}")
        need(self.w13_order in W13_ORDERS, f"w13_order must be one of {W13_ORDERS}")
        need(self.layout != "trtllm_gen" or self.w13_order == "up_gate", "trtllm_gen puts the up rows first (up_gate)")
        need(self.hidden > 0 and self.hidden % 1024 == 0, "hidden must be a positive multiple of 1024")
        need(
            self.inter > 0 and self.inter % BLOCK == 0,
            f"inter (per rank) must be a positive multiple of {BLOCK}; zero-pad it to {-(-self.inter // BLOCK) * BLOCK}",
        )
        need(self.experts > 0 and self.experts % 32 == 0 and self.experts <= 1024, "experts must be a multiple of 32, at most 1024")
        need(1 <= self.top_k <= 32 and self.top_k <= self.experts, "top_k must be 1 to 32 and at most experts")
        need(1 <= self.tokens <= 256, "tokens must be 1 to 256")
        need(self.cluster in (8, 16), "cluster must be 8 or 16")
        need(math.isfinite(self.scale), "scale must be finite")
        need(self.structure in STRUCTURES, f"structure must be one of {STRUCTURES}")
        if self.structure == "list":
            need(self.columns in (8, 16), "columns must be 8 or 16 in the list structure")
            need(self.tokens <= self.columns, "tokens must be at most columns: each token is an MMA column")
        else:
            need(self.columns == 0, "columns belong to the list structure")
        if self.scoring == "sigmoid_bias_grouped":
            need(1 <= self.top_groups <= self.groups, "groups and top_groups must be given, top_groups at most groups")
            need(self.experts % (32 * self.groups) == 0, "a group must have a multiple of 32 experts")
            need(self.top_k <= self.experts // self.groups * self.top_groups, "the kept groups must have top_k experts")
        else:
            need(self.groups == self.top_groups == 0, "groups belong to sigmoid_bias_grouped")
        need(self.limit is None or self.limit > 0, "limit must be positive, or None for no clamp")

    @property
    def engine(self) -> str:
        """``hopper`` (wgmma) or ``blackwell`` (tcgen05)."""
        return ENGINES[self.arch]

    @cached_property
    def plan(self) -> tuple[WorkSplit, SharedMap]:
        """The work split with the fewest K parts whose shared memory fits twice into an SM, and that memory's map."""
        for split in WorkSplit.candidates(self):
            if (shared := SharedMap.of(split, self.engine)) is not None:
                return split, shared
        raise SpecError(f"no work split fits two CTAs per SM: {self}")

    @property
    def split(self) -> WorkSplit:
        """Which CTA of the cluster computes what."""
        return self.plan[0]

    @property
    def shared(self) -> SharedMap:
        """Byte offsets inside one CTA's dynamic shared memory."""
        return self.plan[1]

    @cached_property
    def work_list(self) -> ListPlan:
        """The list structure's geometry, shared memory and scratch."""
        if self.structure != "list":
            raise SpecError(f"only the list structure has a work list; got {self}")
        if (plan := ListPlan.of(self)) is None:
            raise SpecError(f"no ring fits an SM: {self}")
        return plan

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The kernel's parameter list."""
        return parameters(self.structure)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        return self.work_list.total if self.structure == "list" else self.shared.total

    @property
    def scratch_bytes(self) -> int:
        """Global scratch memory of one bound layer on one stream; 0 in the cluster structure."""
        return self.work_list.scratch_bytes if self.structure == "list" else 0

    @property
    def cluster_ctas(self) -> int:
        """CTAs per cluster at launch; 1 in the list structure, which has no clusters."""
        return 1 if self.structure == "list" else self.cluster

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that are meant to share an SM."""
        return 1 if self.structure == "list" else 2

    @property
    def block_threads(self) -> int:
        """Threads per CTA: four consumer warps and a producer, plus an MMA issuer on Blackwell; in the list structure see work_list.py."""
        if self.structure == "list":
            return 32 * self.work_list.warps
        return 160 if self.engine == "hopper" else 192

    def grid(self, tokens: int, processors: int = 0) -> int:
        """CTAs of a launch for ``tokens`` tokens : one cluster per route; list: one CTA on each of ``processors`` SMs."""
        return processors if self.structure == "list" else self.cluster * tokens * self.top_k

    @property
    def code(self) -> KernelSpec:
        """This spec with its launch arguments set to their defaults: equal for entries that share one cubin."""
        defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(self) if f.name in LAUNCH_FIELDS}
        if self.columns:
            defaults["tokens"] = self.columns
        return dataclasses.replace(self, **defaults)

    @property
    def code_name(self) -> str:
        """Readable name of the compiled code; also the kernel symbol's prefix."""
        norm = "" if self.renormalise else "_nonorm"
        groups = f"_g{self.groups}t{self.top_groups}" if self.groups else ""
        structure = f"_list{self.columns}" if self.structure == "list" else "" if self.cluster == 16 else f"_c{self.cluster}"
        return (
            f"moe_h{self.hidden}_i{self.inter}_e{self.experts}_k{self.top_k}_{self.scoring}{groups}{norm}"
            f"_{self.layout}_{self.logits_dtype}{structure}_{self.arch}"
        )

    @property
    def name(self) -> str:
        """Readable name of the menu entry: the code's name plus what only the entry fixes."""
        return self.code_name if self.layout == "trtllm_gen" else f"{self.code_name}_{self.w13_order}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, in field order."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> KernelSpec:
        """Inverse of :meth:`to_dict`; an unknown or missing field is a SpecError."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise SpecError(f"unknown spec fields {unknown}")
        try:
            return cls(**fields)
        except TypeError as error:
            raise SpecError(str(error)) from error
