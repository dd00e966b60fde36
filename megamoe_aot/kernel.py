"""A loaded kernel: what ``load_kernel`` returns, ready to be bound to a layer's weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import driver
from .finalize import FinalizeSpec
from .launch import Arguments
from .layer import Bound, BoundFinalize, Layer
from .library import LoadedCode
from .manifest import CubinRecord
from .scratch import Scratch
from .selection import ENTRY, OrEntry
from .spec import BLOCK, KernelSpec
from .tensor_map import WEIGHT_ALIGNMENT, encode, w2_map, w13_map
from .tensors import Requirement

_FP8 = ("float8_e4m3fn", "uint8")


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One loaded cubin of a kernel: it serves some of the token counts."""

    spec: KernelSpec
    """The entry's spec with the launch arguments asked for at load."""
    record: CubinRecord
    """What the build measured of this cubin."""
    code: LoadedCode


class Kernel:
    """One computation of the menu, loaded on one device. Many layers may be bound to it."""

    def __init__(self, variants: tuple[Variant, ...], finalize: tuple[FinalizeSpec, LoadedCode] | None) -> None:
        """``variants``: [M] -> what serves M tokens, for M from 0 to the largest that will be launched."""
        self._variants = variants
        self._finalize = finalize
        self.spec = variants[-1].spec
        """Of the variant that serves the largest M."""
        self.record = variants[-1].record
        """What the build measured of that variant's cubin."""

    @property
    def tokens(self) -> int:
        """The largest M of a launch."""
        return len(self._variants) - 1

    @property
    def variants(self) -> tuple[Variant, ...]:
        """[M] -> the variant that serves M tokens."""
        return self._variants

    @property
    def arch(self) -> str:
        """Target of the loaded cubins."""
        return self.record.arch

    @property
    def device(self) -> int:
        """CUDA ordinal."""
        return self._variants[-1].code.device

    @property
    def active_clusters(self) -> int:
        """Clusters (routes) that run at the same time on this device; 0 if no variant has the cluster structure."""
        return max(variant.code.active_clusters for variant in self._variants)

    @property
    def processors(self) -> int:
        """CTAs (one per SM) of a list launch on this device; 0 if no variant has the list structure."""
        return max(variant.code.processors for variant in self._variants)

    def bind(
        self,
        w13: Any,
        w13_scale: Any,
        w2: Any,
        w2_scale: Any,
        *,
        scale: float | OrEntry = ENTRY,
        limit: float | OrEntry | None = ENTRY,
        ue8m0: bool | OrEntry = ENTRY,
    ) -> Layer:
        """Bind one layer's weights; nothing is copied, and the layer keeps the four tensors alive.

        Args:
            w13: FP8 e4m3 or uint8; trtllm_gen [E, H/128, 2I, 128], row_major [E, 2I, H]; contiguous, 16-byte aligned.
            w13_scale: FP32 [E, 2I/128, H/128].
            w2: FP8 e4m3 or uint8; trtllm_gen [E, I/128, H, 128], row_major [E, H, I].
            w2_scale: FP32 [E, H/128, I/128].
            scale: routed scaling factor, applied to the weights once, inside the kernel.
            limit: SwiGLU clamp, None for no clamp.
            ue8m0: round the token's activation scales up to powers of two.
                These three default to the spec's values.

        Raises:
            TensorError: a tensor does not fit.
            SpecError: scale is not finite, or limit is not positive.
        """
        given = {"scale": scale, "limit": limit, "ue8m0": ue8m0}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not ENTRY}
        specs = {variant: dataclasses.replace(variant.spec, **changes) for variant in dict.fromkeys(self._variants)}
        for variant in specs:
            variant.code.handle()
        shapes = weight_shapes(self.spec)
        axes = ("[E, H/128, 2I, 128]", "[E, I/128, H, 128]") if self.spec.layout == "trtllm_gen" else ("[E, 2I, H]", "[E, H, I]")

        def pointer(name: str, tensor: Any, dtypes: tuple[str, ...], alignment: int, words: str) -> int:
            return Requirement(name, dtypes, alignment, words).pointer(tensor, shapes[name], self.device)

        w13_address = pointer("w13", w13, _FP8, WEIGHT_ALIGNMENT, axes[0])
        w2_address = pointer("w2", w2, _FP8, WEIGHT_ALIGNMENT, axes[1])
        w13_scales = pointer("w13_scale", w13_scale, ("float32",), 4, "[E, 2I/128, H/128]")
        w2_scales = pointer("w2_scale", w2_scale, ("float32",), 4, "[E, H/128, I/128]")

        def bound(variant: Variant, spec: KernelSpec) -> Bound:
            maps = encode(w13_map(spec), w13_address), encode(w2_map(spec), w2_address)
            scratch = Scratch(variant.code.context, spec.scratch_bytes) if spec.scratch_bytes else None
            return Bound(spec, variant.code, Arguments.of(spec, w13_scales, w2_scales, *maps), scratch)

        with driver.active(self._variants[-1].code.context):
            made = {variant: bound(variant, spec) for variant, spec in specs.items()}
        finalize = BoundFinalize(*self._finalize) if self._finalize else None
        return Layer(tuple(made[variant] for variant in self._variants), finalize, (w13, w13_scale, w2, w2_scale))

    def unload(self) -> None:
        """Free the code on the device. Layers bound to it, and to other kernels of the same cubins, stop working."""
        for variant in self._variants:
            variant.code.unload()
        if self._finalize:
            self._finalize[1].unload()

    def __repr__(self) -> str:
        names = " and ".join(dict.fromkeys(variant.spec.name for variant in self._variants))
        return f"<Kernel {names} on device {self.device}>"


def weight_shapes(spec: KernelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the four weight tensors that :meth:`Kernel.bind` takes."""
    experts, hidden, inter = spec.experts, spec.hidden, spec.inter
    blocks1, blocks2 = hidden // BLOCK, inter // BLOCK
    trtllm_gen = spec.layout == "trtllm_gen"
    return {
        "w13": (experts, blocks1, 2 * inter, BLOCK) if trtllm_gen else (experts, 2 * inter, hidden),
        "w13_scale": (experts, 2 * blocks2, blocks1),
        "w2": (experts, blocks2, hidden, BLOCK) if trtllm_gen else (experts, hidden, inter),
        "w2_scale": (experts, blocks1, blocks2),
    }
