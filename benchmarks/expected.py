"""What the checks compare with: the CPU reference of a call, computed token by token in worker processes and kept.

Entries that differ only in layout or row order compute the same thing, so they share references.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import pickle
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

import torch

from megamoe_aot.reference import Layer, MoeResult, Options, Routing, dequantised_model, evaluate
from megamoe_aot.spec import KernelSpec
from tests.data import Problem

from .harness import LOGITS_DTYPES, Inputs


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: which inputs, at which model shape, with which launch arguments. Equal calls have equal results."""

    tokens: int
    seed: int
    case: str = ""
    """A name in ``tests.data.HARD_INPUTS``, or none."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Launch arguments that differ from the entry's: scale, limit, ue8m0."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """The reference of one call."""

    result: MoeResult
    """With the engine's own arithmetic."""
    exact: MoeResult | None
    """With exact arithmetic; None where it was not asked for."""
    model: torch.Tensor | None
    """FP64 [M*K, H]: the dequantised model; None where it was not asked for."""


class Oracle:
    """References of the calls of one model shape and logits dtype, computed in ``pool``, a job per token.

    Weights are those of seed 0 throughout, the activations those of the call's seed.
    """

    def __init__(self, spec: KernelSpec, pool: Executor) -> None:
        self.spec = spec
        self._pool = pool
        self._jobs: dict[tuple[Call, bool], list[Future[bytes]]] = {}
        self._inputs: dict[Call, Inputs] = {}

    def weights_problem(self, case: str = "") -> Problem:
        """The generator of the weights, damaged as ``case`` says."""
        return weights_problem(self.spec, case)

    def inputs(self, call: Call) -> Inputs:
        """The call's activations, on the CPU; not to be changed."""
        if call not in self._inputs:
            self._inputs[call] = inputs_of(self.spec, call)
        return self._inputs[call]

    def ask(self, call: Call, everything: bool = False) -> None:
        """Start computing; ``everything`` includes exact arithmetic and the FP64 model."""
        if (key := (call, everything)) not in self._jobs:
            self._jobs[key] = [self._pool.submit(token_reference, self.spec, call, token, everything) for token in range(call.tokens)]

    def expect(self, call: Call, everything: bool = False) -> Expected:
        """The reference of ``call``; waits for it."""
        self.ask(call, everything)
        return merge([pickle.loads(job.result()) for job in self._jobs[call, everything]])


def reference_pool() -> ProcessPoolExecutor:
    """One single-threaded worker process per core. (Threads would share one address space, and meet in its page faults.)"""
    return ProcessPoolExecutor(
        max_workers=os.cpu_count(),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    )


def weights_problem(spec: KernelSpec, case: str) -> Problem:
    """The generator of all weights of a shape."""
    return Problem.of(spec, 1, case=case)


def inputs_of(spec: KernelSpec, call: Call) -> Inputs:
    """The activations of a call."""
    problem = Problem.of(spec, call.tokens, seed=call.seed, case=call.case)
    return Inputs(problem.x(), problem.logits(LOGITS_DTYPES[spec.logits_dtype]), problem.bias())


def token_reference(spec: KernelSpec, call: Call, token: int, everything: bool) -> bytes:
    """The reference of one token of a call, as a pickled :class:`Expected`.

    Pickled here, since torch would pass each tensor between processes as an open file, of which there are too few.
    """
    inputs = inputs_of(spec, call).rows([token])
    problem = weights_problem(spec, call.case)
    source = functools.cache(problem.source)
    options = Options.of(spec, w13_order="up_gate", **dict(call.changes))

    def result(options: Options) -> MoeResult:
        found = evaluate(inputs.x, inputs.logits, inputs.bias, source, options)
        return dataclasses.replace(found, layer=dataclasses.replace(found.layer, source=problem.source))  # the cache stays here

    engine = result(options)
    if not everything:
        return pickle.dumps(Expected(engine, None, None))
    exact = result(dataclasses.replace(options, arithmetic="exact", order="ascending"))
    model = dequantised_model(inputs.x, engine.ids, source, w13_order="up_gate", limit=options.limit)
    return pickle.dumps(Expected(engine, exact, model))


def merge(tokens: list[Expected]) -> Expected:
    """The reference of a batch from those of its tokens: a token's result does not depend on the others."""
    exact = [token.exact for token in tokens if token.exact is not None]
    model = [token.model for token in tokens if token.model is not None]
    return Expected(
        merge_results([token.result for token in tokens]),
        merge_results(exact) if exact else None,
        torch.cat(model) if model else None,
    )


def merge_results(results: list[MoeResult]) -> MoeResult:
    """Several tokens' results as one."""
    first = results[0]

    def joined(parts: list[Any]) -> Any:
        return None if parts[0] is None else torch.cat(parts)

    def fields(parts: list[Any], names: tuple[str, ...]) -> dict[str, Any]:
        return {name: joined([getattr(part, name) for part in parts]) for name in names}

    routing = fields([result.routing for result in results], ("ids", "weights", "logits", "scores", "keys", "groups"))
    layer = fields([result.layer for result in results], ("x_q", "x_scale"))
    return MoeResult(
        routing=Routing(**routing, bias=first.routing.bias),
        layer=Layer(**layer, source=first.layer.source, options=first.layer.options),
        **fields(results, ("out", "sums", "act", "hidden", "hidden_scale")),
    )
