"""Real build results that several test files read; each is compiled once per test run."""

from __future__ import annotations

import functools

from kernels.build.jobs import Built, build_code
from megamoe_aot.menu import LEAD, specs_of
from megamoe_aot.spec import KernelSpec


def lead_spec(arch: str) -> KernelSpec:
    """The lead model's first entry for ``arch``."""
    return next(specs_of(LEAD, (arch,)))


@functools.cache
def lead(arch: str) -> Built:
    """The lead model's first entry, compiled and verified."""
    return build_code(lead_spec(arch))
