"""The kernel's parameter list, in order: what the build compiles, the manifest records and the loader passes."""

from __future__ import annotations

import dataclasses

FLAG_UE8M0 = 1
"""Round the token's activation scales up to powers of two."""
FLAG_GATE_FIRST = 2
"""w13's gate rows come before its up rows (w13_order = "gate_up")."""

FLAG_TRIGGER = 4
"""Let the stream's next kernel start early (griddepcontrol.launch_dependents); the list structure and the finalize kernels. Safe only
where that kernel waits (griddepcontrol.wait) before it touches anything that this launch reads or writes."""

TENSOR_MAP_BYTES = 128


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One kernel parameter: its kind is ``pointer``, ``tensor_map``, ``f32`` or ``u32``."""

    name: str
    kind: str
    meaning: str

    @property
    def size(self) -> int:
        """Bytes in the parameter block."""
        return {"pointer": 8, "tensor_map": TENSOR_MAP_BYTES, "f32": 4, "u32": 4}[self.kind]


PARAMETERS = (
    Parameter("x", "pointer", "BF16 [M, H], 16-byte aligned"),
    Parameter("logits", "pointer", "BF16 or FP32 [M, E]"),
    Parameter("bias", "pointer", "FP32 [E]; 0 where the scoring has none"),
    Parameter("w13_scale", "pointer", "FP32 [E, 2I/128, H/128]"),
    Parameter("w2_scale", "pointer", "FP32 [E, H/128, I/128]"),
    Parameter("out", "pointer", "BF16 [M*K, H], 16-byte aligned, written"),
    Parameter("ids", "pointer", "INT32 [M, K], written"),
    Parameter("weights", "pointer", "FP32 [M, K], written"),
    Parameter("w13_map", "tensor_map", "w13, see tensor_map.py"),
    Parameter("w2_map", "tensor_map", "w2"),
    Parameter("scale", "f32", "routed scaling factor"),
    Parameter("limit", "f32", "SwiGLU clamp, +inf for none"),
    Parameter("flags", "u32", "FLAG_UE8M0 | FLAG_GATE_FIRST | FLAG_TRIGGER"),
)

LIST_PARAMETERS = (
    Parameter("scratch", "pointer", "epoch, ticket and packets of the list structure, see work_list.py; 128-byte aligned"),
    Parameter("tokens", "u32", "M, 1 to columns"),
)
"""What the list structure's kernels take after PARAMETERS."""


def parameters(structure: str) -> tuple[Parameter, ...]:
    """The parameter list of a kernel of ``structure``, a member of ``spec.STRUCTURES``."""
    return PARAMETERS + LIST_PARAMETERS if structure == "list" else PARAMETERS
