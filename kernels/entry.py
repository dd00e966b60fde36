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

from megamoe_aot.spec import KernelSpec

from . import blackwell, hopper
from .work_list import program as work_list

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
        min_blocks_per_mp=spec.ctas_per_sm,
        preferred_smem_carveout=100,
    )


@cute.kernel
def moe_list(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
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
    scratch: cute.Pointer,
    tokens: Uint32,
) -> None:
    work_list.program(
        spec,
        without,
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
        scratch.toint(),
        tokens,
    )


@cute.jit
def launch_list(
    spec: cutlass.Constexpr[KernelSpec],
    without: cutlass.Constexpr[frozenset[str]],
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
    scratch: cute.Pointer,
    tokens: Uint32,
) -> None:
    """Never run, as :func:`launch`."""
    maps = [
        create_tensor_map_tiled(x.toint(), cutlass.Uint8, [128, 128, 4], [8, 1024], [128, 128, 1], swizzle=TensorMapSwizzle.s128b)
        for _ in range(2)
    ]
    moe_list(
        spec, without, x, logits, bias, w13_scale, w2_scale, out, ids, weights, maps[0], maps[1], scale, limit, flags, scratch, tokens
    ).launch(
        grid=[1, 1, 1],
        block=[spec.block_threads, 1, 1],
        smem=spec.shared_bytes,
        min_blocks_per_mp=spec.ctas_per_sm,
        preferred_smem_carveout=100,
    )


def host_function(spec: KernelSpec, without: frozenset[str] = frozenset()) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The host function and the example arguments for ``cute.compile``; the symbol is ``<spec.code_name>_0``.

    Args:
        without: stages of the list structure to leave out, for a measured breakdown: see work_list/program.py.
    """
    kernel, static = (moe_list, ["spec", "without"]) if spec.structure == "list" else (moe, ["spec"])
    assert [*inspect.signature(kernel).parameters] == [*static, *(p.name for p in spec.parameters)]
    kernel.set_name_prefix(spec.code_name, remove_cutlass_symbol=True, keep_mangled_name=False)
    pointer = make_ptr(cutlass.Uint8, 0x1000, cute.AddressSpace.gmem, assumed_align=4)
    arguments = [*[pointer] * 8, Float32(1.0), Float32(1.0), Uint32(0)]
    if spec.structure == "list":
        return launch_list, (spec.code, without, *arguments, pointer, Uint32(1))
    assert not without
    return launch, (spec.code, *arguments)
