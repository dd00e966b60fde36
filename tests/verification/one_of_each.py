"""Which artifacts the tests look at: what 126 kernels have in common need not be seen 126 times."""

from __future__ import annotations

from megamoe_aot.manifest import Manifest


def one_of_each(manifest: Manifest) -> list[str]:
    """Cubins, by sha256: of every model, arch, structure and columns the one with trtllm_gen and BF16 logits; all finalize kernels."""
    entries = [e.cubin for e in manifest.entries if (e.spec.layout, e.spec.logits_dtype) == ("trtllm_gen", "bf16")]
    return [*entries, *(e.cubin for e in manifest.finalize)]
