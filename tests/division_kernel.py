"""A kernel that only divides: thread i divides four numbers by four others with kernels.division, and once more by div.rn.

As a program it compiles for one target: python -m tests.division_kernel FOLDER ARCH; it leaves ``divide.ptx``.
"""

# The DSL has no types.
# mypy: disable-error-code="untyped-decorator"

import sys
from pathlib import Path

import cutlass
from cutlass import Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from kernels import ptx, routing
from kernels.build.compile import options
from kernels.division import divide_all, sigmoid_all

SIDE_BY_SIDE = 4
OUTPUTS = 4
"""Per number: the quotient, div.rn's, the numerator's sigmoid, routing.sigmoid's."""


@cute.kernel
def divide(numerators: cute.Pointer, denominators: cute.Pointer, out: cute.Pointer) -> None:
    """FP32 [threads, 4], FP32 [threads, 4] -> FP32 [threads, OUTPUTS, 4]."""
    thread = ptx.special("%ctaid.x") * Uint32(32) + ptx.special("%tid.x")
    ptx.grid_dependency_wait()
    at = Int64(thread * Uint32(4 * SIDE_BY_SIDE))
    n = [ptx.load_global_f32(numerators.toint() + at + Int64(4 * i)) for i in range(SIDE_BY_SIDE)]
    d = [ptx.load_global_f32(denominators.toint() + at + Int64(4 * i)) for i in range(SIDE_BY_SIDE)]
    found = [*divide_all(n, d), *[ptx.div(a, b) for a, b in zip(n, d, strict=True)], *sigmoid_all(n), *[routing.sigmoid(a) for a in n]]
    for i in cutlass.range_constexpr(len(found)):
        ptx.store_global_f32(out.toint() + at * Int64(OUTPUTS) + Int64(4 * i), found[i])


@cute.jit
def launch(numerators: cute.Pointer, denominators: cute.Pointer, out: cute.Pointer) -> None:
    """Never run: it only fixes the kernel's parameter types."""
    divide(numerators, denominators, out).launch(grid=[1, 1, 1], block=[32, 1, 1])


def main(folder: Path, arch: str) -> None:
    pointer = make_ptr(cutlass.Uint8, 0x1000, cute.AddressSpace.gmem, assumed_align=4)
    compiled = cute.compile(launch, *[pointer] * 3, options=options(arch, folder))
    (folder / "divide.ptx").write_text(compiled.artifacts.PTX)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
