"""A second opinion on synchronisation and races: the static verifier ``sentryward`` on the PTX of the Blackwell artifacts.

    python -m verification.static [--entry SUBSTRING] [--timeout SECONDS] [--json FILE]

It executes one launch symbolically, every thread of it, and decides whether barriers, mbarrier phases and byte counts fit in
every schedule (``synchronization``) and whether all conflicting accesses are ordered (``memory``). It does not see fences and
proxies, wgmma, or a CTA that exits while remote stores are on their way to it: the emulator's sanitizer covers those.

A menu entry takes it 2 to 8 minutes of one core and up to 5 GB, most of it for the happens-before relation of 3072 threads;
the tests use the same generator on smaller numbers.

The PTX is not given to it as it is. :func:`normalise` makes four changes and refuses what it does not understand; three keep
the meaning, one narrows the claim to one routing (all logits equal, one expert), and the verdict then holds for that.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import Console
from rich.table import Table

from megamoe_aot import abi, tensor_map
from megamoe_aot.finalize import CodeSpec
from megamoe_aot.manifest import Manifest
from megamoe_aot.spec import ENGINES, KernelSpec

from .artifacts import read_ptx

EXPERT = 0
"""The expert of the route, and of every entry of the table of experts: with equal logits the first route's expert is 0."""
NO_LIMIT = 3.4028234663852886e38
"""The verifier wants finite launch arguments; the clamp's value does not matter to it."""
MEMORY_MIB = 12_000

_WARP_BARRIER = "bar.warp.sync 0xffffffff;"
_FIRST_FREE_BARRIER = 8
"""The kernels use the named barriers 0 to 2; 8 to 15 are free for eight warps."""


class NormaliseError(ValueError):
    """The PTX does not have the form that a change needs; nothing may be changed on a guess."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the verifier said of one launch. ``result`` is its own word, such as race_free or not_wellsynced."""

    name: str
    result: str
    synchronization: str
    memory: str
    seconds: float
    findings: tuple[str, ...] = ()
    """Its diagnostics and races, in its own words."""

    @property
    def passed(self) -> bool:
        """Everything that it was asked is proved."""
        return self.result == "race_free" and self.synchronization == self.memory == "passed"


def normalise(ptx: str, spec: KernelSpec) -> str:
    """The text that the verifier gets. Raises NormaliseError."""
    return fix_routing(select_increments(count_warp_barriers(name_tensor_maps(ptx))), spec)


def name_tensor_maps(ptx: str) -> str:
    """Meaning kept: a TMA load names its tensor map parameter instead of a register that holds the parameter's address.

    The verifier does not follow a map's address through a register into a loop.
    """
    for register, source in re.findall(r"cvta\.param\.u64\s+(%rd\d+), (%rd\d+);", ptx):
        symbols = re.findall(rf"mov\.b64\s+{source}, (\w+_param_\d+);", ptx)
        writes = re.findall(rf"^\s+[\w.:]+\s+{register},", ptx, re.MULTILINE)
        if len(symbols) != 1 or len(writes) != 1:
            raise NormaliseError(f"{register} does not hold the address of exactly one parameter: {symbols}, {len(writes)} writes")
        ptx = re.sub(rf"(cp\.async\.bulk\.tensor\S* \[%r\d+\], \[){register}(, \{{)", rf"\g<1>{symbols[0]}\2", ptx)
    if loose := re.search(r"cp\.async\.bulk\.tensor\S* \[%r\d+\], \[(%rd\d+), ", ptx):
        raise NormaliseError(f"the tensor map in {loose[1]} is no kernel parameter")
    return ptx


def count_warp_barriers(ptx: str) -> str:
    """Meaning kept: bar.warp.sync of a whole warp becomes a named barrier of that warp's 32 threads.

    LLVM copies a bar.warp.sync to both sides of a branch on the lane. PTX lets the lanes meet in two such instructions; the
    verifier wants the same one of all lanes, but only counts threads at a named barrier.
    """
    if other := re.search(rf"bar\.warp\.sync(?! {_WARP_BARRIER.split()[1]})[^;]*;", ptx):
        raise NormaliseError(f"{other[0]} does not name all lanes")
    if taken := {n for n in map(int, re.findall(r"\bbar\.sync\s+(\d+)", ptx)) if n >= _FIRST_FREE_BARRIER}:
        raise NormaliseError(f"named barriers {sorted(taken)} are in use")
    counted = (
        f"{{ .reg .b32 warp; mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; add.u32 warp, warp, {_FIRST_FREE_BARRIER}; bar.sync warp, 32; }}"
    )
    return ptx.replace(_WARP_BARRIER, counted)


def select_increments(ptx: str) -> str:
    """Meaning kept: ``@p add.u32 r, r, 1`` adds the selection of 1 or 0 instead: the verifier wants to know every guard."""
    return re.sub(r"@(\w+) add\.u32 (%r\d+), \2, 1;", r"{ .reg .b32 one; selp.b32 one, 1, 0, \1; add.u32 \2, \2, one; }", ptx)


def fix_routing(ptx: str, spec: KernelSpec) -> str:
    """Claim narrowed: all logits are equal, and what is loaded from the table of experts in shared memory is EXPERT.

    The verifier has no value for a top-k: it could not tell the reads that the expert addresses (scales, one logit) from the
    output's writes. So every ballot of the top-k (keys that reach the threshold) is one of all lanes, which is what equal
    logits give, and each load from the table stays but its result is replaced by the constant.
    """
    ptx = re.sub(r"(vote\.sync\.ballot\.b32 %r\d+, (%p\d+), 0xffffffff;)", r"setp.eq.u32 \2, 0, 0; \1", ptx)
    loads = 0
    for address in re.findall(rf"add\.s32\s+(%r\d+), %r\d+, {spec.shared.ids};", ptx):
        ptx, here = re.subn(
            rf"ld\.shared\.b32 (%r\d+), \[{address}\];",
            rf"{{ .reg .b32 table; ld.shared.b32 table, [{address}]; mov.b32 \1, {EXPERT}; }}",
            ptx,
        )
        loads += here
    if loads != 2:
        raise NormaliseError(f"found {loads} loads from the table of experts at offset {spec.shared.ids}, expected 2")
    return ptx


def launch_input(spec: KernelSpec, symbol: str, routes: int = 1) -> dict[str, Any]:
    """The verifier's description of one launch of ``routes`` clusters."""
    declarations: list[dict[str, Any]] = []
    arguments: list[dict[str, Any]] = []
    values = {"scale": spec.scale, "limit": NO_LIMIT if spec.limit is None else spec.limit, "flags": 0}
    maps = {"w13_map": tensor_map.w13_map(spec), "w2_map": tensor_map.w2_map(spec)}
    descriptors = []
    for index, parameter in enumerate(abi.PARAMETERS):
        if parameter.kind == "pointer":
            declarations.append({"parameter": index, "type": "pointer", "space": "global", "object": parameter.name})
        elif parameter.kind == "tensor_map":
            weights = parameter.name.removesuffix("_map")
            declarations.append({"parameter": index, "type": "tensor_map", "object": weights})
            description = maps[parameter.name]
            descriptors.append(
                {
                    "parameter": index,
                    "object": weights,
                    "element_type": "u8",
                    "rank": 3,
                    "base_byte_offset": 0,
                    "global_shape": list(description.dims),
                    "global_strides_bytes": list(description.strides),
                    "box_shape": list(description.box),
                    "element_strides": [1, 1, 1],
                    "swizzle": "128B",
                    "interleave": "none",
                    "oob_fill": "zero",
                }
            )
        else:
            arguments.append({"parameter": index, "type": parameter.kind, "value": values[parameter.name]})
    return {
        "schema": "spverify.kernel-input/v1",
        "entry": symbol,
        "launch": {
            "grid_dim": [routes * spec.cluster, 1, 1],
            "block_dim": [spec.block_threads, 1, 1],
            "cluster_dim": [spec.cluster, 1, 1],
            "dynamic_shared_bytes": spec.shared.total,
        },
        "declarations": declarations,
        "arguments": arguments,
        "tma_descriptors": descriptors,
    }


def verify(name: str, ptx: str, description: dict[str, Any], timeout: float) -> Verdict:
    """Run the verifier on normalised PTX. A timeout is a verdict too: result ``timeout``, with what was reached by then.

    Raises ModuleNotFoundError where sentryward is not installed.
    """
    import sentryward

    if not math.isfinite(timeout) or timeout <= 0:
        raise ValueError(f"timeout must be a positive number of seconds; got {timeout}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megamoe_static_") as folder:
        text, launch = Path(folder) / "kernel.ptx", Path(folder) / "launch.json"
        text.write_text(ptx)
        launch.write_text(json.dumps(description))
        report = sentryward.verify(text, input=launch, timeout_seconds=timeout, memory_limit_mib=MEMORY_MIB)
    checks = report["checks"]
    return Verdict(name, report["result"], checks["synchronization"], checks["memory"], time.monotonic() - started, _findings(report))


def _findings(report: dict[str, Any]) -> tuple[str, ...]:
    """Each distinct diagnostic once, with its first PTX line where it has one."""
    found: dict[str, str] = {}
    for item in [*report.get("diagnostics", []), *report.get("races", []), *report.get("warnings", [])]:
        details = item.get("details", {}) if isinstance(item, dict) else {}
        line = details.get("ptx_line") or details.get("location", {}).get("line") if isinstance(details, dict) else None
        text = f"{item.get('code', 'race')}: {item.get('message', '')}".rstrip(": ")
        found.setdefault(text, f"{text} (line {line} of the normalised PTX)" if line else text)
    return tuple(found.values())


def is_cluster(spec: CodeSpec) -> TypeGuard[KernelSpec]:
    """True for the kernels that can be asked about, on Blackwell."""
    return isinstance(spec, KernelSpec) and spec.structure == "cluster"


@dataclasses.dataclass(frozen=True)
class Question:
    """One artifact, ready to be asked about: one route, because clusters share nothing but global memory that each writes alone."""

    name: str
    ptx: str
    launch: dict[str, Any]

    @classmethod
    def of(cls, manifest: Manifest, sha256: str) -> Question:
        """Raises ValueError where the PTX is missing or another one, or cannot be normalised."""
        record = manifest.cubins[sha256]
        spec = manifest.spec_of(sha256)
        if not is_cluster(spec):
            raise ValueError(f"{record.code} is no kernel of the cluster structure, the only one for which there is a launch description")
        return cls(record.code, normalise(read_ptx(manifest, sha256), spec), launch_input(spec, record.symbol))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: every Blackwell artifact is proved; 1: one is not, be it a finding, a timeout or something unsupported."""
    parser = argparse.ArgumentParser(prog="verification.static", description="Run sentryward on the PTX of the Blackwell artifacts.")
    parser.add_argument("--entry", default="", help="only codes whose name contains this")
    parser.add_argument("--artifacts", type=Path, help="artifacts folder (default: this checkout's)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds per artifact")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        version = importlib.metadata.version("sentryward")
    except importlib.metadata.PackageNotFoundError:
        console.print("sentryward is not installed; pip install -e '.[verify]'")
        return 1
    manifest = Manifest.load(options.artifacts)
    chosen = {sha: record for sha, record in manifest.cubins.items() if options.entry in record.code}
    clusters = [sha for sha in chosen if is_cluster(manifest.spec_of(sha))]
    if skipped := len(chosen) - len(clusters):
        console.print(f"{skipped} list and finalize kernels are not asked about: their PTX has forms that no change here covers")
    questions = [Question.of(manifest, sha) for sha in clusters if ENGINES[chosen[sha].arch] == "blackwell"]
    if skipped := len(clusters) - len(questions):
        console.print(f"{skipped} Hopper artifacts are not asked about: sentryward has no semantics for wgmma")
    verdicts = []
    for question in sorted(questions, key=lambda q: q.name):
        verdicts.append(verify(question.name, question.ptx, question.launch, options.timeout))
        console.print(f"{verdicts[-1].result}: {question.name} ({verdicts[-1].seconds:.0f} s)")
    table = Table("code", "result", "synchronization", "memory", "seconds", "findings", title=f"sentryward {version}", title_justify="left")
    for v in verdicts:
        table.add_row(v.name, v.result, v.synchronization, v.memory, f"{v.seconds:.0f}", "\n".join(v.findings[:5]))
    console.print(table)
    if options.json:
        document = {"sentryward": version, "expert": EXPERT, "verdicts": [dataclasses.asdict(v) for v in verdicts]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if verdicts and all(v.passed for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
