"""Divisions side by side have the bits of IEEE division, whatever the operands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from emulator import Buffer, Launch, Pointer, emulate
from megamoe_aot.spec import ARCHS
from tests.child import run_python
from tests.division_kernel import OUTPUTS, SIDE_BY_SIDE

WARPS = 24
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=ARCHS)
def ptx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("division")
    run_python("-m", "tests.division_kernel", str(folder), request.param)
    return (folder / "divide.ptx").read_text()


def operands(kind: str) -> tuple[Floats, Floats]:
    """Numerators and denominators, [threads, 4] each."""
    rng = np.random.default_rng(0)
    shape = (32 * WARPS, SIDE_BY_SIDE)
    if kind == "any bits":
        return tuple(rng.integers(0, 2**32, shape, np.uint64).astype(np.uint32).view(np.float32) for _ in range(2))  # type: ignore[return-value]
    if kind == "around the limits":  # 2^-59 and 2^59, zeros and denormals
        edges = np.array([2.0**-59, 2.0**59, 2.0**-60, 2.0**60, 0.0, -0.0, 1e-40, 3e38, np.inf, np.nan, 1.0, -7.0], np.float32)
        near = np.nextafter(edges, np.float32(1))
        values = np.concatenate([edges, near, -near])
        return rng.choice(values, shape), rng.choice(values, shape)
    mantissas = [(1 + rng.integers(0, 2**23, shape) / 2**23).astype(np.float32) for _ in range(2)]
    exponents = [np.exp2(rng.integers(-50, 51, shape)).astype(np.float32) for _ in range(2)]
    return mantissas[0] * exponents[0], -mantissas[1] * exponents[1]


@pytest.mark.parametrize("kind", ["moderate", "any bits", "around the limits"])
def test_quotients_have_the_bits_of_ieee_division(ptx: str, kind: str) -> None:
    n, d = operands(kind)
    out = np.full((*n.shape[:1], OUTPUTS, SIDE_BY_SIDE), np.nan, np.float32)
    buffers = [
        Buffer("numerators", n.view(np.uint8).ravel()),
        Buffer("denominators", d.view(np.uint8).ravel()),
        Buffer("out", out.view(np.uint8).ravel(), "output"),
    ]
    result = emulate(ptx, Launch(grid=(WARPS, 1, 1), block=(32, 1, 1)), buffers, [Pointer(buffer.name) for buffer in buffers])
    assert not [finding for finding in result.findings if finding.severity != "info"], result.report()
    quotients, divided, sigmoids, plain = np.moveaxis(np.asarray(buffers[2].data).view(np.float32).reshape(out.shape), 1, 0)
    with np.errstate(all="ignore"):
        wanted = n / d
    for got, want in ((quotients, wanted), (divided, wanted), (sigmoids, plain)):
        same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
        assert same.all(), [(hex(a), hex(b)) for a, b in zip(got[~same].view(np.uint32)[:4], want[~same].view(np.uint32)[:4], strict=True)]
