"""One launch of every entry, for a memory checker:

    compute-sanitizer --tool memcheck --report-api-errors no python -m benchmarks.sanitize [--entry SUBSTRING] [--tokens M]

Run it from the repository root. Beside the kernel under test nothing but copies reaches the GPU: data are made on the CPU, so that the
checker's time and findings are the kernel's. Exits with 1 if a launch did not choose the wanted experts or wrote no finite output.
"""

from __future__ import annotations

import argparse
import sys

import torch

from megamoe_aot.arch import runs_on
from megamoe_aot.manifest import Manifest
from megamoe_aot.spec import KernelSpec

from .cuda_checks import load
from .harness import LOGITS_DTYPES
from .picks import bias_for, logits_for, random_picks
from .pool import layer_bytes, layers_of, random_weights

BLOCK_BYTES = 1 << 26
"""Random bytes made on the CPU; the weights repeat them."""


def main() -> int:
    """Launch every entry once with ``--tokens`` tokens; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entry", default="", help="only entries whose name contains this")
    parser.add_argument("--tokens", type=int, default=2)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: there is nothing to check")

    manifest = Manifest.load()
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    specs = [e.spec for e in manifest.entries if runs_on(e.spec.arch, capability) and arguments.entry in e.spec.name]
    if not specs:
        sys.exit(f"no entry of {manifest.folder} runs on capability {capability} with {arguments.entry!r} in its name")
    weights = repeated(random_weights(BLOCK_BYTES, torch.device("cpu")), max(map(layer_bytes, specs)), device)
    failures = 0
    for spec in specs:
        problem = launch(spec, weights, arguments.tokens)
        failures += bool(problem)
        print(f"{spec.name}: {problem or 'launched'}", flush=True)
    return 1 if failures else 0


def repeated(block: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size] on ``device``: copies of ``block``, one after another."""
    whole = torch.empty(size, dtype=torch.uint8, device=device)
    for start in range(0, size, block.numel()):
        part = whole[start : start + block.numel()]
        part.copy_(block[: part.numel()])
    return whole


def launch(spec: KernelSpec, weights: torch.Tensor, tokens: int) -> str:
    """One launch into outputs full of 0xFF; what is wrong with the result, or nothing."""
    device = weights.device
    (layer,) = layers_of(weights, spec, 1)
    picks = random_picks(1, tokens, spec.top_k, spec.experts, seed=0, groups=spec.groups, top_groups=spec.top_groups)[0]
    x = torch.randn(tokens, spec.hidden, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    logits = logits_for(picks, spec.experts, seed=0).to(LOGITS_DTYPES[spec.logits_dtype]).to(device)
    bias = None if spec.scoring == "softmax" else bias_for(spec.experts, seed=0).to(device)
    shapes = ((tokens * spec.top_k, spec.hidden, torch.bfloat16), (tokens, spec.top_k, torch.int32), (tokens, spec.top_k, torch.float32))
    poisoned = [torch.full((rows, columns * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype) for rows, columns, dtype in shapes]
    out, ids, chosen = (tensor.to(device) for tensor in poisoned)
    bound = load(spec, device).bind(*layer.tensors)
    bound(x, logits, bias, out=out, ids=ids, weights=chosen, pdl=False)
    torch.cuda.synchronize()
    if not torch.equal(ids.cpu().long().sort(-1).values, picks.sort(-1).values):
        return f"experts {ids.tolist()}, expected {picks.tolist()}"
    if not bool(out.cpu().isfinite().all() & chosen.cpu().isfinite().all()):
        return "an output is not finite, or was not written"
    return ""


if __name__ == "__main__":
    sys.exit(main())
