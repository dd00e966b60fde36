"""A call of a cluster entry as the emulator takes it: buffers, parameters, tensor maps, reference. See list_call.py for the list structure.

The weights are those of seed 0, the activations those of the call's seed, as in every GPU run (``benchmarks/expected.py``).
Only the experts that the reference's routing chooses for the emulated routes exist: a kernel that reads another expert meets a hole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

import emulator
from benchmarks.expected import Call, inputs_of, weights_problem
from emulator import Buffer, Launch, Pointer, SparseBuffer, TensorMap
from emulator.config import Parameter
from megamoe_aot import tensor_map
from megamoe_aot.abi import FLAG_GATE_FIRST, FLAG_UE8M0
from megamoe_aot.agreement import Report, compare
from megamoe_aot.reference import MoeResult, Options, evaluate, routing_of
from megamoe_aot.shared_memory import STAGE_BYTES
from megamoe_aot.spec import KernelSpec
from megamoe_aot.weights import Packed, allocate, pack_expert

POISON = 0xFF
"""Fill of the outputs: NaN in BF16 and FP32, -1 in INT32."""


@dataclasses.dataclass
class Outcome:
    """What the emulator made of a call. Rows of routes that were not run hold POISON bytes."""

    out: torch.Tensor
    """BF16 [M*K, H]."""
    ids: torch.Tensor
    """INT32 [M, K]."""
    weights: torch.Tensor
    """FP32 [M, K]."""
    result: emulator.Result

    @property
    def objections(self) -> list[emulator.Finding]:
        """Errors, and places where the kernel relies on something that PTX does not promise (severity "assumption")."""
        return [finding for finding in self.result.findings if finding.severity != "info"]


class EmulatedCall:
    """One call of one entry; made once, run as often as needed."""

    def __init__(self, spec: KernelSpec, call: Call) -> None:
        """``call.changes`` (scale, limit, ue8m0) replace the entry's launch arguments."""
        self.entry_spec = spec
        self.spec = dataclasses.replace(spec, **dict(call.changes))
        self.call = call
        self.inputs = inputs_of(self.spec, call)
        self.options = Options.of(self.spec, w13_order="up_gate")
        """Of the reference, with the engine's own arithmetic and order."""
        self.routing = routing_of(self.inputs.logits, self.inputs.bias, self.options)
        """The reference's: it says which experts exist."""
        self._weights = weights_problem(self.spec, call.case)
        self._source = functools.cache(self._weights.source)
        self._packed = functools.cache(self._pack)

    @property
    def routes(self) -> int:
        """M * K, which is also the number of clusters."""
        return self.routing.ids.numel()

    # ---- the launch ----

    def launch(self) -> Launch:
        """Grid, block, cluster, shared memory and the names of its regions."""
        spec = self.spec
        return Launch(
            grid=(spec.grid(self.call.tokens), 1, 1),
            block=(spec.block_threads, 1, 1),
            cluster=(spec.cluster, 1, 1),
            dynamic_shared=spec.shared.total,
            labels=shared_labels(spec),
        )

    def buffers(self, routes: Iterable[int] | None = None) -> list[Buffer]:
        """Every device allocation, as badly aligned as the ABI allows; the outputs are fresh and poisoned.

        Only the experts of ``routes`` (None: all) exist.
        """
        spec, inputs = self.spec, self.inputs
        ids = self.routing.ids.flatten().tolist()
        chosen = sorted({ids[route] for route in (range(self.routes) if routes is None else routes)})
        size = inputs.logits.element_size()
        buffers = [
            Buffer("x", _bytes(inputs.x), predecessor=True),
            Buffer("logits", _bytes(inputs.logits), predecessor=True, align=size),
            Buffer("w13", self._sparse("w13", chosen)),
            Buffer("w13_scale", self._sparse("w13_scale", chosen), align=4),
            Buffer("w2", self._sparse("w2", chosen)),
            Buffer("w2_scale", self._sparse("w2_scale", chosen), align=4),
            Buffer("out", _poisoned(self.routes * spec.hidden * 2), "output"),
            Buffer("ids", _poisoned(self.routes * 4), "output", align=4),
            Buffer("weights", _poisoned(self.routes * 4), "output", align=4),
        ]
        if inputs.bias is not None:
            buffers.append(Buffer("bias", _bytes(inputs.bias), align=4))
        return buffers

    def parameters(self, flags: int = 0) -> list[Parameter]:
        """In the order of the spec's ABI. The maps are the objects that the loader encodes.

        ``flags``: set beside the entry's own, also such as no launch of this entry sets.
        """
        spec = self.spec
        special: dict[str, Parameter] = {
            "w13_map": TensorMap(tensor_map.w13_map(spec), "w13"),
            "w2_map": TensorMap(tensor_map.w2_map(spec), "w2"),
            "scale": float(spec.scale),
            "limit": math.inf if spec.limit is None else float(spec.limit),
            "flags": flags | FLAG_UE8M0 * spec.ue8m0 | FLAG_GATE_FIRST * (spec.w13_order == "gate_up"),
        }
        if self.inputs.bias is None:
            special["bias"] = Pointer(None)
        return [special.get(parameter.name, Pointer(parameter.name)) for parameter in self.spec.parameters]

    def _pack(self, expert: int) -> Packed:
        """One expert in the entry's layout (E = 1)."""
        spec = self.spec
        packed = allocate(1, spec.hidden, spec.inter, layout=spec.layout)
        pack_expert(packed, 0, self._weights.expert(expert), layout=spec.layout, w13_order=spec.w13_order)
        return packed

    def _sparse(self, name: str, chosen: Iterable[int]) -> SparseBuffer:
        """A packed tensor [E, ...] with one page per expert, made now: forked processes must not enter torch's thread pool."""
        pages = {expert: _bytes(getattr(self._packed(expert), name)) for expert in chosen}
        size = len(next(iter(pages.values())))
        return SparseBuffer(self.spec.experts * size, size, pages)

    def emulate(self, ptx: str, routes: Sequence[int] | None = None, *, flags: int = 0, **options: Any) -> Outcome:
        """Run ``ptx`` for these routes (all by default). ``flags``: see :meth:`parameters`; the rest is for :func:`emulator.emulate`."""
        buffers = self.buffers(routes)
        result = emulator.emulate(ptx, self.launch(), buffers, self.parameters(flags), clusters=routes, **options)
        named = {buffer.name: buffer.data for buffer in buffers}
        shape = (self.call.tokens, self.spec.top_k)

        def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
            data = named[name]
            assert isinstance(data, np.ndarray)
            return torch.from_numpy(data).view(dtype)

        return Outcome(
            out=tensor("out", torch.bfloat16).view(self.routes, self.spec.hidden),
            ids=tensor("ids", torch.int32).view(shape),
            weights=tensor("weights", torch.float32).view(shape),
            result=result,
        )

    # ---- the reference ----

    def reference(self, routes: Sequence[int] | None = None) -> MoeResult:
        """The reference with the engine's arithmetic. Where ``routes`` are given the stages of all others are zeros."""
        ids = self.routing.ids
        if routes is not None:
            ids = torch.full_like(ids, -1)
            ids.view(-1)[list(routes)] = self.routing.ids.view(-1)[list(routes)]
        alone = dataclasses.replace(self.options, scoring="precomputed")
        found = evaluate(self.inputs.x, None, None, self._source, alone, ids=ids, weights=self.routing.weights)
        return dataclasses.replace(found, routing=self.routing, layer=dataclasses.replace(found.layer, options=self.options))

    def compare(self, outcome: Outcome, routes: Sequence[int] | None = None) -> tuple[Report, float]:
        """(the contract's judgement of the routes that were run, the share of their ``out`` elements with the reference's bits).

        A NaN equals a NaN: the reference does not say which.
        """
        want = self.reference(routes)
        run = list(range(self.routes) if routes is None else routes)
        out, ids, weights = want.out.clone(), want.ids.clone(), want.weights.clone()  # the other routes agree by definition
        out[run] = outcome.out[run]
        ids.view(-1)[run] = outcome.ids.view(-1)[run]
        weights.view(-1)[run] = outcome.weights.view(-1)[run]
        equal = (out[run].view(torch.int16) == want.out[run].view(torch.int16)) | (out[run].isnan() & want.out[run].isnan())
        return compare(want, out, ids, weights), float(equal.double().mean())

    def weights_error(self, outcome: Outcome, routes: Sequence[int] | None = None) -> float:
        """Largest relative error of the weights of the routes that were run."""
        run = slice(None) if routes is None else list(routes)
        want, got = self.routing.weights.view(-1)[run].double(), outcome.weights.view(-1)[run].double()
        return float(torch.where(got == want, 0.0, (got - want).abs() / want.abs()).max())


def shared_labels(spec: KernelSpec) -> dict[int, str]:
    """Byte offset in dynamic shared memory -> name, for the emulator's reports."""
    shared = spec.shared
    labels = {stage * STAGE_BYTES: f"stage[{stage}]" for stage in range(shared.ring)}
    labels |= {shared.operand_group(block): f"operand[{block}]" for block in range(shared.operand_blocks)}
    if shared.zero_group is not None:
        labels[shared.zero_group] = "zero group"
    for name in ("sums", "staging", "w13_scale", "x_scale", "w2_scale", "hidden_scale", "ids", "tmem"):
        labels[getattr(shared, name)] = name
    for name, (number, _) in shared.barrier_counts.items():
        first = shared.barriers[name]
        labels |= {first + 8 * i: f"{name}[{i}]" if number > 1 else f"{name} barrier" for i in range(number)}
    return labels


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """uint8 [bytes], a view where possible."""
    return np.ascontiguousarray(tensor.contiguous().view(torch.uint8).flatten().numpy())


def _poisoned(size: int) -> np.ndarray:
    return np.full(size, POISON, np.uint8)
