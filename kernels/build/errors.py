"""The one exception of the build."""

from __future__ import annotations

from collections.abc import Sequence


class BuildError(RuntimeError):
    """One code did not compile or did not pass verification; ``problems`` lists every reason that was found."""

    def __init__(self, code: str, problems: Sequence[str]) -> None:
        super().__init__("\n  ".join([f"{code}:", *problems]))
        self.code = code
        self.problems = list(problems)
