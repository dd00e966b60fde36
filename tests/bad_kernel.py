"""Compiles a kernel that breaks the build's rules on purpose: python bad_kernel.py FOLDER; the compiler's log is on stderr.

It keeps 128 values alive with 64 registers per thread (spills), indexes a register array at run time (stack frame), has 1200
bytes of static shared memory, and asks for setmaxnreg without a register budget (ptxas warns C7508).
"""

# The DSL has no types.
# mypy: disable-error-code="untyped-decorator"

import sys
from pathlib import Path

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_ptr

THREADS = 1024
VALUES = 128
STATIC_SHARED = 1200


@cute.kernel
def bad(x: cute.Pointer, n: Int32) -> None:
    cute.arch.setmaxregister_decrease(40)
    thread, _, _ = cute.arch.thread_idx()
    shared = cute.make_tensor(cute.arch.alloc_smem(cutlass.Uint8, STATIC_SHARED), cute.make_layout(STATIC_SHARED))
    shared[thread] = cutlass.Uint8(n)
    tensor = cute.make_tensor(x, cute.make_layout(VALUES * THREADS))
    values = [tensor[i * THREADS + thread] for i in range(VALUES)]
    indexed = cute.make_rmem_tensor(cute.make_layout(4), Float32)
    for i in cutlass.range_constexpr(4):
        indexed[i] = values[i]
    cute.arch.sync_threads()
    tensor[thread] = indexed[n] + Float32(shared[THREADS - 1 - thread])
    for i in cutlass.range_constexpr(VALUES):
        tensor[(VALUES - 1 - i) * THREADS + thread] = values[i] * values[i - 1]


@cute.jit
def launch(x: cute.Pointer, n: Int32) -> None:
    bad.set_name_prefix("bad", remove_cutlass_symbol=True, keep_mangled_name=False)
    bad(x, n).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


def main(folder: Path) -> None:
    dump = folder / "dump"
    dump.mkdir()
    pointer = make_ptr(Float32, 0x1000, cute.AddressSpace.gmem, assumed_align=16)
    options = f"--gpu-arch=sm_90a --keep-cubin --keep-ptx --dump-dir={dump} remarks{{ptx}}"
    compiled = cute.compile(launch, pointer, Int32(0), options=options)
    (folder / "bad.cubin").write_bytes(compiled.artifacts.CUBIN)
    (folder / "bad.ptx").write_text(compiled.artifacts.PTX)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
