"""Compiles a kernel that the DSL's linter must complain about: python unordered_kernel.py FOLDER.

With the DSL's wrapper operations it loads from TMEM, uses the result without tcgen05.wait::ld, and frees the TMEM at once.
"""

# The DSL has no types.
# mypy: disable-error-code="untyped-decorator"

import sys
from pathlib import Path

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives

COLUMNS = 32


@cute.kernel
def unordered(x: cute.Pointer) -> None:
    cell = cute.arch.get_dyn_smem(cutlass.Int32, alignment=16)
    primitives.tcgen05_alloc(cell, COLUMNS)
    cute.arch.sync_threads()
    tmem = primitives.make_tmem_ptr(cute.make_tensor(cell, cute.make_layout(1))[0], Int32)
    value = primitives.tcgen05_ld("32x32b", tmem)
    thread, _, _ = cute.arch.thread_idx()
    cute.make_tensor(x, cute.make_layout(32))[thread] = value[0]
    primitives.tcgen05_dealloc(tmem, COLUMNS)


@cute.jit
def launch(x: cute.Pointer) -> None:
    unordered(x).launch(grid=[1, 1, 1], block=[32, 1, 1], smem=16)


if __name__ == "__main__":
    pointer = make_ptr(Int32, 0x1000, cute.AddressSpace.gmem, assumed_align=16)
    cute.compile(launch, pointer, options=f"--gpu-arch=sm_100f --keep-cubin --keep-ptx --dump-dir={Path(sys.argv[1])}")
