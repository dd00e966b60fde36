"""One CTA: its warps, named barriers and tensor memory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from .config import Dim3
from .decode import Program
from .tmem import TensorMemory
from .warp import LANES, Fragment, Warp

if TYPE_CHECKING:
    from .cluster import Cluster


@dataclasses.dataclass
class NamedBarrier:
    """A bar.sync barrier in use: it opens when ``arrived`` threads are ``count``."""

    count: int
    arrived: int = 0
    waiting: list[Fragment] = dataclasses.field(default_factory=list)
    views: Any = None


class Cta:
    """State that the warps of one CTA share."""

    def __init__(self, cluster: Cluster, rank: int, program: Program) -> None:
        launch = cluster.launch
        self.cluster = cluster
        self.rank = rank
        """In the cluster."""
        self.number: int = cluster.slot * launch.ctas + rank
        """In the wave."""
        self.threads: int = launch.threads
        self.warp_count: int = -(-launch.threads // LANES)
        self.barriers: dict[int, NamedBarrier] = {}
        self.tmem = TensorMemory()
        self.mma_warps: set[int] = set()
        """Warps that issued an MMA."""
        self.alive = True
        self.position = _unflatten(rank, launch.cluster)
        cluster_position = _unflatten(cluster.index, _divide(launch.grid, launch.cluster))
        self.coordinates = tuple(c * n + p for c, n, p in zip(cluster_position, launch.cluster, self.position, strict=True))
        self._special = self._registers(launch.grid, launch.cluster, cluster_position)
        self._warp_ids = cluster.rng.sample(range(64), self.warp_count)  # %warpid is volatile: any values are allowed
        self.warps = [Warp(program, self, index) for index in range(self.warp_count)]

    def _registers(self, grid: Dim3, cluster: Dim3, cluster_position: Dim3) -> dict[str, int]:
        values: dict[str, int] = {}
        launch = self.cluster.launch
        for name, dims in (
            ("ntid", launch.block), ("ctaid", self.coordinates), ("nctaid", grid), ("clusterid", cluster_position),
            ("nclusterid", _divide(grid, cluster)), ("cluster_ctaid", self.position), ("cluster_nctaid", cluster),
        ):  # fmt: skip
            values |= {f"%{name}.{axis}": value for axis, value in zip("xyz", dims, strict=True)}
        return values | {"%cluster_ctarank": self.rank, "%cluster_nctarank": launch.ctas}

    def special(self, name: str, warp: Warp) -> Any:
        """Value(s) of one of ``decode.SPECIAL_REGISTERS``."""
        thread = warp.index * LANES + np.arange(LANES)
        x, y, _ = self.cluster.launch.block
        per_thread = {"%tid.x": thread % x, "%tid.y": thread // x % y, "%tid.z": thread // (x * y), "%laneid": thread % LANES}
        if name in per_thread:
            return per_thread[name]
        if name == "%warpid":
            return self._warp_ids[warp.index]
        return self._special[name]


def _divide(a: Dim3, b: Dim3) -> Dim3:
    return a[0] // b[0], a[1] // b[1], a[2] // b[2]


def _unflatten(index: int, dims: Dim3) -> Dim3:
    return index % dims[0], index // dims[0] % dims[1], index // (dims[0] * dims[1])
