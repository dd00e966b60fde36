"""A kernel that only routes: CTA t, one warp, chooses token t's experts and stores their ids and weights.

As a program it compiles specs: python -m tests.routing_kernel FOLDER, the specs' fields as a JSON list on stdin; it leaves
``<code_name>.ptx`` and ``<code_name>.cubin``.
"""

# The DSL has no types.
# mypy: disable-error-code="untyped-decorator"

import json
import sys
from pathlib import Path

import cutlass
from cutlass import Float32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from kernels import ptx, routing
from kernels.build.compile import options
from megamoe_aot.spec import KernelSpec

PARAMETERS = ("logits", "bias", "ids", "weights")
"""logits BF16 or FP32 [M, E]; bias FP32 [M, E], a row for each token; ids INT32 [M, K]; weights FP32 [M, K]."""


@cute.kernel
def route(
    spec: cutlass.Constexpr[KernelSpec], logits: cute.Pointer, bias: cute.Pointer, ids: cute.Pointer, weights: cute.Pointer, scale: Float32
) -> None:
    token, lane = ptx.special("%ctaid.x"), ptx.special("%tid.x")
    scratch = Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
    biases = routing.load_bias(spec, bias.toint() + Int64(token) * Int64(4 * spec.experts), lane)
    ptx.grid_dependency_wait()
    values = routing.load_logits(spec, logits.toint(), token, lane)
    chosen = routing.choose(spec, routing.selection_keys(spec, values, biases), lane, scratch)
    known = ptx.select(lane < Uint32(spec.top_k), chosen, Uint32(0))
    weight = routing.weigh(spec, logits.toint(), token, known, lane, scale)
    at = Int64(token * Uint32(spec.top_k) + lane) * Int64(4)
    if ptx.per_lane(lane < Uint32(spec.top_k)):
        ptx.store_global_u32(ids.toint() + at, chosen)
        ptx.store_global_f32(weights.toint() + at, weight)


@cute.jit
def launch(
    spec: cutlass.Constexpr[KernelSpec], logits: cute.Pointer, bias: cute.Pointer, ids: cute.Pointer, weights: cute.Pointer, scale: Float32
) -> None:
    """Never run: it only fixes the kernel's parameter types."""
    route(spec, logits, bias, ids, weights, scale).launch(grid=[1, 1, 1], block=[32, 1, 1], smem=routing.SCRATCH_BYTES)


def main(folder: Path) -> None:
    for fields in json.load(sys.stdin):
        spec = KernelSpec.from_dict(fields)
        dump = folder / f"{spec.code_name}_dump"
        dump.mkdir()
        route.set_name_prefix(f"route_{spec.code_name}", remove_cutlass_symbol=True, keep_mangled_name=False)
        pointer = make_ptr(cutlass.Uint8, 0x1000, cute.AddressSpace.gmem, assumed_align=4)
        compiled = cute.compile(launch, spec, *[pointer] * 4, Float32(1.0), options=options(spec.arch, dump))
        (folder / f"{spec.code_name}.ptx").write_text(compiled.artifacts.PTX)
        (folder / f"{spec.code_name}.cubin").write_bytes(compiled.artifacts.CUBIN)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
