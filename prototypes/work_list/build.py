"""Compile the prototype for the menu's Hopper entries with BF16 logits (up_gate): python -m prototypes.work_list.build [--out FOLDER]."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megamoe_aot.menu import menu_specs
from megamoe_aot.spec import KernelSpec

from .plan import ListPlan, name_of

OUT = Path(__file__).resolve().parents[2] / "build" / "work_list"
TOKEN_CLASSES = (8, 16)


def specs() -> Iterator[KernelSpec]:
    """Each code once per number of token columns."""
    for _, spec in menu_specs(("sm_90a",)):
        if spec.logits_dtype == "bf16" and spec.w13_order == "up_gate":
            for tokens in TOKEN_CLASSES:
                yield dataclasses.replace(spec, tokens=tokens)


def main() -> None:
    import cutlass.cute as cute

    from . import kernel

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for spec in specs():
        with tempfile.TemporaryDirectory() as dump:
            function, arguments = kernel.host_function(spec)
            options = f"--gpu-arch={spec.arch} --keep-cubin --keep-ptx --dump-dir={dump}"
            compiled = cute.compile(function, *arguments, options=options)
            (out / f"{name_of(spec)}.cubin").write_bytes(compiled.artifacts.CUBIN)
            (out / f"{name_of(spec)}.ptx").write_text(compiled.artifacts.PTX)
        print(f"{name_of(spec)}: ring of {ListPlan.of(spec).ring} stages, {ListPlan.of(spec).total} bytes of shared memory")


if __name__ == "__main__":
    main()
