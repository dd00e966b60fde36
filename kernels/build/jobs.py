"""Building many codes at once, and the manifest and lock that describe the result."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from megamoe_aot.finalize import CodeSpec, FinalizeSpec
from megamoe_aot.manifest import CubinRecord, Entry, FinalizeEntry, Manifest
from megamoe_aot.menu import ModelShape
from megamoe_aot.spec import KernelSpec

from .compile import Compiled, compile_spec
from .cubin import read_cubin
from .errors import BuildError
from .lock import Lock, LockedCode
from .verify import sha256, verify

Selection = Sequence[tuple[ModelShape, KernelSpec]]


@dataclasses.dataclass(frozen=True)
class Built:
    """One code that compiled and passed verification."""

    compiled: Compiled
    record: CubinRecord
    ptxas: str
    """Version stamped into the cubin."""

    @property
    def sha256(self) -> str:
        """Of the cubin; the artifact's file name."""
        return sha256(self.compiled.cubin)


def finalize_specs(selection: Selection) -> list[FinalizeSpec]:
    """The finalize kernels that the entries need, each once."""
    return list(dict.fromkeys(FinalizeSpec.of(spec) for _, spec in selection))


def codes_of(selection: Selection) -> dict[str, CodeSpec]:
    """The distinct codes behind the entries: entries that differ only in launch arguments share one; then their finalize kernels.

    Raises BuildError where two different codes have one name: names are symbols, and keys of the lock.
    """
    codes: dict[str, CodeSpec] = {}
    specs: list[CodeSpec] = [*(spec for _, spec in selection), *finalize_specs(selection)]
    for spec in specs:
        if codes.setdefault(spec.code_name, spec.code) != spec.code:
            raise BuildError(spec.code_name, [f"two codes have this name: {codes[spec.code_name]} and {spec.code}"])
    return codes


def build_code(spec: CodeSpec) -> Built:
    """Compile and verify one code. Raises BuildError."""
    compiled = compile_spec(spec)
    return Built(compiled, verify(spec, compiled), read_cubin(compiled.cubin).ptxas)


def build_codes(
    codes: Iterable[CodeSpec],
    jobs: int,
    on_done: Callable[[CodeSpec, Built | BuildError], None],
) -> tuple[dict[str, Built], list[BuildError]]:
    """Build every code, ``jobs`` compiler processes at a time; a failure does not stop the others.

    Returns (code name -> result, failures).
    """
    built: dict[str, Built] = {}
    failures: list[BuildError] = []
    with ThreadPoolExecutor(jobs) as pool:
        pending = {pool.submit(build_code, spec): spec for spec in codes}
        try:
            for future in as_completed(pending):
                spec = pending[future]
                try:
                    result: Built | BuildError = built.setdefault(spec.code_name, future.result())
                except BuildError as error:
                    failures.append(error)
                    result = error
                on_done(spec, result)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return built, failures


def compiler_versions(built: Mapping[str, Built]) -> dict[str, str]:
    """The DSL's version, and the ptxas version that all cubins carry. Raises BuildError where they disagree."""
    ptxas = {b.ptxas for b in built.values()}
    if len(ptxas) != 1:
        raise BuildError("compiler", [f"the cubins carry several ptxas versions: {sorted(ptxas)}"])
    return {"nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"), "ptxas": ptxas.pop()}


def lock_of(built: Mapping[str, Built], digest: str) -> Lock:
    """The lock that these results would have; nothing is validated yet."""
    codes = {name: LockedCode(b.sha256, b.record.ptx_sha256) for name, b in sorted(built.items())}
    return Lock(digest, compiler_versions(built), codes)


def manifest_of(selection: Selection, built: Mapping[str, Built], lock: Lock) -> Manifest:
    """The manifest of the selected entries; ``lock`` is their own, with the validation that still holds."""
    cubins = {}
    for name, b in sorted(built.items()):
        cubins[b.sha256] = dataclasses.replace(b.record, validated_on=lock.codes[name].validated_on)
    entries = tuple(
        Entry(shape.model, shape.parallel, spec, built[spec.code_name].sha256, spec.shared_bytes, spec.cluster_ctas)
        for shape, spec in selection
    )
    finalize = tuple(FinalizeEntry(spec, built[spec.code_name].sha256) for spec in finalize_specs(selection))
    return Manifest(lock.source_digest, dict(lock.compiler), cubins, entries, finalize=finalize)


def files_of(built: Mapping[str, Built]) -> dict[str, bytes]:
    """File name -> content: the cubin, and beside it the PTX that the checks read."""
    files = {}
    for b in built.values():
        files[f"{b.sha256}.cubin"] = b.compiled.cubin
        files[f"{b.sha256}.ptx"] = b.compiled.ptx.encode()
    return files
