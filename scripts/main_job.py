"""The main job, end to end: build the lead entry, load it, launch it on a GPU if there is one, and compare with the reference.

Without a usable GPU the lead entry's Blackwell kernel runs in the emulator instead: one route, or the whole launch with --all-routes.
It says what was run and what was not; any failure exits with 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megamoe_aot as mm  # noqa: E402
from megamoe_aot import driver, loader  # noqa: E402
from megamoe_aot.menu import LEAD, TOKEN_COUNTS  # noqa: E402

FOLDER = ROOT / "build" / "main_job"
"""Not artifacts/: a build of one entry must not replace the whole menu."""
SHAPE: dict[str, Any] = {"hidden": LEAD.hidden, "inter": LEAD.inter, "experts": LEAD.experts, "top_k": LEAD.top_k}


def build() -> None:
    """Compile all cubins of the lead shape."""
    part = f"h{LEAD.hidden}_i{LEAD.inter}_e{LEAD.experts}_k{LEAD.top_k}_{LEAD.scoring}_"
    sys.stdout.flush()
    subprocess.run([sys.executable, ROOT / "build_kernels.py", "--entry", part, "--out", FOLDER], check=True)
    loader.use_artifacts(FOLDER)


def check_build() -> None:
    """What can be checked without a GPU: the menu, the answers of has_kernel, the integrity of every cubin."""
    manifest = loader.manifest()
    print(f"build {manifest.build_id[:12]}, compiler {dict(manifest.compiler)}")
    for entry in mm.menu():
        record = manifest.record(entry)
        loader.check_record(entry, record)
        figures = f"{record.registers} registers, {record.spill_bytes} spill bytes, {record.resident_ctas} CTAs per SM"
        print(f"  {entry.title}  {entry.spec.name}: {figures}")
    for sha256 in manifest.cubins:
        manifest.read_cubin(sha256)
    for tokens in TOKEN_COUNTS:
        if reason := mm.why_not(**SHAPE, tokens=tokens):
            raise SystemExit(f"the build cannot serve {LEAD.model} with {tokens} tokens: {reason}")
    if mm.has_kernel(**SHAPE, tokens=max(TOKEN_COUNTS) + 1):
        raise SystemExit(f"has_kernel promises more than {max(TOKEN_COUNTS)} tokens")
    counts = ", ".join(map(str, TOKEN_COUNTS))
    print(f"checked: {len(manifest.cubins)} cubins match their sha256 and the figures that the spec derives")
    print(f"checked: has_kernel answers for {counts} tokens and refuses more")


def launch() -> bool:
    """Load, bind, launch and compare on the current GPU; False if a result is wrong."""
    import torch

    from megamoe_aot.agreement import compare
    from tests.data import Problem

    kernel = mm.load_kernel(**SHAPE, tokens=max(TOKEN_COUNTS))
    device = torch.device("cuda", kernel.device)
    print(f"loaded {kernel}: {driver.device_name(kernel.device)}, driver {driver.version()}, {kernel.active_clusters} clusters at once")
    weights = Problem.of(kernel.spec, 0).packed(layout=kernel.spec.layout, w13_order=kernel.spec.w13_order, device=device)
    layer = kernel.bind(weights.w13, weights.w13_scale, weights.w2, weights.w2_scale)
    agree = True
    for tokens in TOKEN_COUNTS:
        problem = Problem.of(kernel.spec, tokens)
        bias = problem.bias()
        assert bias is not None  # the lead model's scoring has one
        result = layer(problem.x().to(device), problem.logits(torch.bfloat16).to(device), bias.to(device))
        report = compare(problem.reference(logits_dtype=torch.bfloat16), *result)
        verdict = "ok" if report.ok else report.reason
        print(f"  M = {tokens:2}: worst route {report.worst_error:.1e}, ids equal {report.ids_equal}: {verdict}")
        agree &= report.ok
    return agree


def emulate(all_routes: bool) -> bool:
    """Run the lead entry's Blackwell PTX in the emulator, sanitizer on, and compare with the reference; False if something is wrong."""
    from verification.run import main as run

    first = next(entry for entry in mm.menu() if (entry.spec.arch, entry.spec.structure) == ("sm_100f", "cluster"))
    routes = [] if all_routes else ["--routes", "0"]
    arguments = ["--artifacts", str(FOLDER), "--entry", first.spec.name, "--tokens", "1", "--jobs", "2", *routes]
    print(f"emulating {first.title} for {first.spec.arch}, M = 1, {'all routes' if all_routes else 'route 0 (--all-routes for all)'} ...")
    return run(arguments) == 0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all-routes", action="store_true", help="without a GPU: emulate the whole launch, not one route")
    all_routes = parser.parse_args().all_routes
    build()
    check_build()
    try:
        driver.capability(0)
    except mm.NoDriverError as error:
        print(f"not run: load_kernel, bind and launch, because there is no GPU here:\n{error}")
        agree = emulate(all_routes)
        print("run: the Blackwell kernel, in the emulator" if agree else "FAILED: the emulated kernel is wrong")
        return 0 if agree else 1
    agree = launch()
    print("run: everything, on the GPU" if agree else "FAILED: results differ from the reference")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
