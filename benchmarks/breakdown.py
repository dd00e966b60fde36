"""What each stage of the list structure costs: the shipped kernels once more, with stages left out, timed beside the whole ones.

    python -m benchmarks.breakdown build [--columns 8 16] [--jobs N]
    python -m benchmarks.breakdown check

``build`` compiles the variants of every Hopper list kernel of the default format into build/breakdown/; no GPU. It wants the artifacts
to be built from the same sources, and notes the shipped cubins' hashes: ``benchmarks.h200_speed --breakdown`` times the variants only
beside those very cubins. ``check`` says whether it would.

A kernel without "routing" takes experts token * K + rank instead of those that the logits name. They are as many as there are routes,
so that such a variant reads the same number of bytes at one token only; it is timed at no other count.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megamoe_aot import library
from megamoe_aot.files import write_atomically
from megamoe_aot.kernel import Kernel, Variant
from megamoe_aot.manifest import Entry, Manifest
from megamoe_aot.spec import KernelSpec

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "breakdown"
FILE_NAME = "breakdown.json"
FORMAT = 1
MODULE = "benchmarks.breakdown"

STAGES = ("routing", "exchange", "mma", "store")
"""What kernels/work_list can leave out: choosing experts; waiting for GEMM1's sums; MMAs and their scales; storing the outputs. The
compiler then drops what only fed them: SwiGLU's arithmetic with "exchange", the W2 tiles' scaling with "store"."""
LEFT_OUT: tuple[tuple[str, ...], ...] = (
    ("routing",),
    ("exchange",),
    ("mma",),
    ("store",),
    ("routing", "exchange"),
    ("exchange", "mma", "store"),
    STAGES,
)
"""The variants. The last leaves the weight stream and what it cannot do without; the one before it is its like for more than one token."""
TOKENS = (1, 2, 8, 16)
"""Token counts at which variants are timed, where there are any."""


class BreakdownError(Exception):
    """The variants are missing, damaged or of other sources than the artifacts."""


@dataclasses.dataclass(frozen=True)
class Built:
    """One compiled variant."""

    code: str
    """The whole kernel's ``code_name``."""
    shipped: str
    """sha256 of the whole kernel's cubin."""
    left_out: tuple[str, ...]
    cubin: str
    """sha256 of the variant's cubin, which is also its file's name."""

    @property
    def name(self) -> str:
        """The stages left out, for the results file."""
        return "+".join(self.left_out)


def measurable(left_out: tuple[str, ...], tokens: int) -> bool:
    """Whether the variant reads the bytes that the whole kernel reads."""
    return tokens in TOKENS and ("routing" not in left_out or tokens == 1)


class Variants:
    """The compiled variants in ``folder`` that belong to the artifacts of ``manifest``."""

    def __init__(self, manifest: Manifest, folder: Path | None = None) -> None:
        """``folder``: None for FOLDER. Raises BreakdownError."""
        folder = FOLDER if folder is None else folder
        self.manifest = manifest
        self.folder = folder
        how = "run: python -m benchmarks.breakdown build"
        try:
            data = json.loads((folder / FILE_NAME).read_text())
        except (OSError, ValueError) as error:
            raise BreakdownError(f"no variants in {folder} ({error}); {how}") from error
        if data.get("format") != FORMAT or data["source_digest"] != manifest.source_digest:
            raise BreakdownError(f"the variants in {folder} are not of the sources that the artifacts were built from; {how}")
        self.built = [Built(**(fields | {"left_out": tuple(fields["left_out"])})) for fields in data["variants"]]
        shipped = {entry.spec.code_name: entry.cubin for entry in manifest.entries}
        for variant in self.built:
            if shipped.get(variant.code) != variant.shipped:
                raise BreakdownError(f"{variant.code} without {variant.name} belongs to another cubin than the artifacts'; {how}")
            self.image(variant)

    def image(self, variant: Built) -> bytes:
        """The variant's cubin. Raises BreakdownError."""
        path = self.folder / f"{variant.cubin}.cubin"
        try:
            image = path.read_bytes()
        except OSError as error:
            raise BreakdownError(f"{variant.code} without {variant.name}: {error}") from error
        if hashlib.sha256(image).hexdigest() != variant.cubin:
            raise BreakdownError(f"{path} is damaged")
        return image

    def of(self, entry: Entry, tokens: int) -> list[Built]:
        """The variants of an entry's kernel that can be timed with ``tokens`` tokens."""
        return [b for b in self.built if b.shipped == entry.cubin and measurable(b.left_out, tokens)]

    def load(self, entry: Entry, variant: Built, device: int) -> Kernel:
        """The variant as a kernel for every M up to the entry's ``tokens``: loaded, bound and launched by the product's own code."""
        record = self.manifest.record(entry)
        code = library.load(self.image(variant), record, entry.spec, device)
        return Kernel((Variant(entry.spec, record, code),) * (entry.spec.tokens + 1), None)


# ------------------------------------------------------------------------------------------------------------------- Building


def measured_entries(manifest: Manifest, columns: tuple[int, ...]) -> list[Entry]:
    """The Hopper list entries of the default format, trtllm_gen and BF16 logits."""
    return [
        entry
        for entry in manifest.entries
        if (s := entry.spec).structure == "list"
        and (s.arch, s.layout, s.logits_dtype) == ("sm_90a", "trtllm_gen", "bf16")
        and s.columns in columns
    ]


def compile_without(spec: KernelSpec, left_out: tuple[str, ...]) -> bytes:
    """The cubin of ``spec.code`` with stages left out, made as the build makes the shipped one. Raises BreakdownError."""
    from kernels.build.compile import clean_environment

    with tempfile.TemporaryDirectory(prefix="breakdown_") as folder:
        run = subprocess.run(
            [sys.executable, "-m", MODULE, "compile", folder],
            input=json.dumps({"spec": spec.code.to_dict(), "left_out": left_out}),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=clean_environment(os.environ),
            check=False,
        )
        if run.returncode != 0:
            raise BreakdownError(f"{spec.code_name} without {'+'.join(left_out)}:\n{(run.stdout + run.stderr)[-3000:]}")
        return (Path(folder) / "kernel.cubin").read_bytes()


def _compile_here(folder: Path, request: Mapping[str, Any]) -> None:
    """Child process: one compile, whose temporary files are its own."""
    from cutlass import cute

    from kernels.build.compile import options
    from kernels.entry import host_function

    spec = KernelSpec.from_dict(request["spec"])
    function, arguments = host_function(spec, frozenset(request["left_out"]))
    dump = folder / "dump"
    dump.mkdir()
    compiled = cute.compile(function, *arguments, options=options(spec.arch, dump))
    (folder / "kernel.cubin").write_bytes(compiled.artifacts.CUBIN)


def build(manifest: Manifest, columns: tuple[int, ...], jobs: int, folder: Path = FOLDER) -> list[Built]:
    """Compile every variant of :func:`measured_entries` into ``folder``, whose other contents go. Raises BreakdownError."""
    from kernels.build.sources import source_digest

    if manifest.source_digest != source_digest():
        raise BreakdownError(f"the artifacts in {manifest.folder} are not of the present sources; run: python build_kernels.py --all")
    entries = measured_entries(manifest, columns)
    if not entries:
        raise BreakdownError(f"{manifest.folder} has no list kernel of {columns} columns for sm_90a in the default format")
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()

    def one(wanted: tuple[Entry, tuple[str, ...]]) -> Built:
        entry, left_out = wanted
        image = compile_without(entry.spec, left_out)
        built = Built(entry.spec.code_name, entry.cubin, left_out, hashlib.sha256(image).hexdigest())
        write_atomically(folder / f"{built.cubin}.cubin", image)
        print(f"{built.code} without {built.name}: {len(image)} bytes", flush=True)
        return built

    with ThreadPoolExecutor(jobs) as pool:
        variants = list(pool.map(one, [(entry, left_out) for entry in entries for left_out in LEFT_OUT]))
    data = {"format": FORMAT, "source_digest": manifest.source_digest, "variants": [dataclasses.asdict(v) for v in variants]}
    write_atomically(folder / FILE_NAME, (json.dumps(data, indent=1) + "\n").encode())
    return variants


def main() -> int:
    """Returns the exit status."""
    if sys.argv[1:2] == ["compile"]:
        _compile_here(Path(sys.argv[2]), json.load(sys.stdin))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "check"))
    parser.add_argument("--columns", type=int, nargs="+", default=[8], help="of which list kernels; those of 16 serve 16 tokens")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    try:
        manifest = Manifest.load()
        if arguments.what == "build":
            build(manifest, tuple(arguments.columns), arguments.jobs)
        built = Variants(manifest).built
    except BreakdownError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(built)} variants of {len({b.code for b in built})} kernels in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
