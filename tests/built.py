"""Real build results that several test files read; each is compiled once per test run."""

from __future__ import annotations

import functools

from kernels.build.jobs import Built, build_code
from megamoe_aot.finalize import CodeSpec
from megamoe_aot.menu import LEAD, specs_of
from megamoe_aot.spec import KernelSpec


def lead_spec(arch: str) -> KernelSpec:
    """The lead model's first entry for ``arch``."""
    return next(specs_of(LEAD, (arch,)))


def lead_list_spec(arch: str) -> KernelSpec:
    """The lead model's first entry of the list structure for ``arch``: 8 columns."""
    return next(specs_of(LEAD, (arch,), ("list",)))


@functools.cache
def built(spec: CodeSpec) -> Built:
    """Any code, compiled and verified."""
    return build_code(spec)


def lead(arch: str) -> Built:
    """The lead model's first entry, compiled and verified."""
    return built(lead_spec(arch))
