"""Shared test settings."""

import os

import pytest
from hypothesis import settings

from megamoe_aot import structures

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tensors are small: more threads only wait for each other

settings.register_profile("megamoe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("megamoe")


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if neither structure had been measured: what is not forced gets the cluster structure, whatever the newest figures say."""
    monkeypatch.setattr(structures, "shipped", dict)
