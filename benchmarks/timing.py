"""Time per launch inside a CUDA graph."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch

WARM_UP_SECONDS = 0.05
"""Replays before the timed ones: the clocks rise, and what was idle is busy."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per launch over the timed replays of one graph."""

    median: float
    best: float
    worst: float

    @classmethod
    def of(cls, replay_ms: Sequence[float], launches: int) -> Timing:
        """From the milliseconds of each replay of a graph of ``launches`` launches."""
        each = [1000 * ms / launches for ms in replay_ms]
        return cls(median=statistics.median(each), best=min(each), worst=max(each))


def capture(enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what ``enqueue`` puts on torch's current stream, not the default one, on which it must have run once before:

    nothing is loaded lazily then, and list kernels have their scratch memory.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        enqueue()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, launches: int, replays: int, warm_up_seconds: float = WARM_UP_SECONDS) -> Timing:
    """Replay ``graph`` ``replays`` times between device events, each replay timed on its own, after a warm-up."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    warm_up = time.perf_counter()
    while time.perf_counter() - warm_up < warm_up_seconds:
        graph.replay()
        torch.cuda.synchronize()
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(stop) for start, stop in events], launches)
