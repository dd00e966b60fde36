"""The DSL's linter is silent on our kernels, and is shown to be awake."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from megamoe_aot.spec import ARCHS
from tests.built import lead, lead_spec
from verification import lint


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_lead_entry_has_no_unexplained_warning(arch: str) -> None:
    """And the linted compile gave the PTX of the normal build."""
    result = lint.lint(lead_spec(arch))
    assert result.unexplained == []
    assert result.ptx_sha256 == hashlib.sha256(lead(arch).compiled.ptx.encode()).hexdigest()


@pytest.mark.slow
def test_linter_sees_an_unordered_tmem_load(tmp_path: Path) -> None:
    """Positive control: a load without wait::ld (W0014) and a dealloc not ordered after it (W0015), by wrapper operations."""
    log = lint.run_linted([sys.executable, str(Path(__file__).with_name("unordered_kernel.py")), str(tmp_path)])
    assert [warning.partition(":")[0] for warning in lint.read_warnings(log)] == ["W0014", "W0015"]


def test_warnings_are_read_out_of_a_coloured_log() -> None:
    log = "\x1b[93mwarning[W0015]:\x1b[0m tcgen05.dealloc is not ordered\n  --> a.py:18:4\n  warning: explanation\nerror[E0001]: no\n"
    assert lint.read_warnings(log) == ("W0015: tcgen05.dealloc is not ordered", "E0001: no")


def test_a_failing_compile_is_an_error() -> None:
    with pytest.raises(lint.LintError, match="status 3"):
        lint.run_linted([sys.executable, "-c", "raise SystemExit(3)"])
