"""From a KernelSpec to something that cute.compile takes: the kernel with the ABI of megamoe_aot.abi and its host function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, GridConstant, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from megamoe_aot import abi
from megamoe_aot.spec import KernelSpec

from . import blackwell, hopper

_PROGRAMS = {"hopper": hopper.program, "blackwell": blackwell.program}


@cute.kernel
def moe(
    spec: cutlass.Constexpr[KernelSpec],
    x: cute.Pointer,
    logits: cute.Pointer,
    bias: cute.Pointer,
    w13_scale: cute.Pointer,
    w2_scale: cute.Pointer,
    out: cute.Pointer,
    ids: cute.Pointer,
    weights: cute.Pointer,
    w13_map: GridConstant[TensorMap],
    w2_map: GridConstant[TensorMap],
    scale: Float32,
    limit: Float32,
    flags: Uint32,
) -> None:
    program = _PROGRAMS[spec.engine]
    program(
        spec,
        x.toint(),
        logits.toint(),
        bias.toint(),
        w13_scale.toint(),
        w2_scale.toint(),
        out.toint(),
        ids.toint(),
        weights.toint(),
        w13_map.get_ptr().toint(),
        w2_map.get_ptr().toint(),
        scale,
        limit,
        flags,
    )


@cute.jit
def launch(
    spec: cutlass.Constexpr[KernelSpec],
    x: cute.Pointer,
    logits: cute.Pointer,
    bias: cute.Pointer,
    w13_scale: cute.Pointer,
    w2_scale: cute.Pointer,
    out: cute.Pointer,
    ids: cute.Pointer,
    weights: cute.Pointer,
    scale: Float32,
    limit: Float32,
    flags: Uint32,
) -> None:
    """Never run: it only fixes the kernel's parameter types. The maps' numbers are irrelevant, their type is not."""
    maps = [
        create_tensor_map_tiled(x.toint(), cutlass.Uint8, [128, 128, 4], [8, 1024], [128, 128, 1], swizzle=TensorMapSwizzle.s128b)
        for _ in range(2)
    ]
    moe(spec, x, logits, bias, w13_scale, w2_scale, out, ids, weights, maps[0], maps[1], scale, limit, flags).launch(
        grid=[spec.cluster, 1, 1],
        block=[spec.block_threads, 1, 1],
        cluster=[spec.cluster, 1, 1],
        smem=spec.shared.total,
        min_blocks_per_mp=2,
        preferred_smem_carveout=100,
    )


def host_function(spec: KernelSpec) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The host function and the example arguments for ``cute.compile``; the symbol is ``<spec.code_name>_0``."""
    assert [*inspect.signature(moe).parameters] == ["spec", *(p.name for p in abi.PARAMETERS)]
    moe.set_name_prefix(spec.code_name, remove_cutlass_symbol=True, keep_mangled_name=False)
    pointer = make_ptr(cutlass.Uint8, 0x1000, cute.AddressSpace.gmem, assumed_align=4)
    return launch, (spec.code, *[pointer] * 8, Float32(1.0), Float32(1.0), Uint32(0))
