"""The manifest's lock: the hashes that a build of this commit must give. It is in git, the binaries are not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamoe_aot.files import write_atomically

FORMAT = 1
FILE_NAME = "manifest.lock.json"


@dataclasses.dataclass(frozen=True)
class LockedCode:
    """Hashes of one code (its spec's ``code_name``)."""

    cubin: str
    """sha256."""
    ptx: str
    validated_on: tuple[str, ...] = ()
    """GPUs on which exactly this cubin passed the correctness run; the build copies it into the manifest."""


@dataclasses.dataclass(frozen=True)
class Lock:
    """Hashes of all codes, and what made them."""

    source_digest: str
    compiler: Mapping[str, str]
    codes: Mapping[str, LockedCode]

    @classmethod
    def load(cls, path: Path) -> Lock | None:
        """The lock in ``path``; None where there is no such file. Raises ValueError for a file that is no lock."""
        if not path.exists():
            return None
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            if data.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            codes = {name: LockedCode(c["cubin"], c["ptx"], tuple(c["validated_on"])) for name, c in data.pop("codes").items()}
            return cls(codes=codes, **data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no lock that this version reads ({error!r}); restore it from git or use --update-lock") from error

    def save(self, path: Path) -> None:
        """Write ``path`` atomically; equal locks give equal bytes."""
        data = {"format": FORMAT, **dataclasses.asdict(self)}
        write_atomically(path, (json.dumps(data, indent=1, sort_keys=True) + "\n").encode())

    def keeping_validation_of(self, old: Lock | None) -> Lock:
        """This lock, with ``validated_on`` of every cubin that the old lock holds byte for byte."""
        validated = {code.cubin: code.validated_on for code in old.codes.values()} if old else {}
        codes = {name: dataclasses.replace(code, validated_on=validated.get(code.cubin, ())) for name, code in self.codes.items()}
        return dataclasses.replace(self, codes=codes)


def differences(lock: Lock | None, built: Lock, whole_menu: bool) -> list[str]:
    """How a build departs from the lock, as sentences; empty where it is what the lock says.

    ``whole_menu``: the build was meant to cover every code, so a locked code that it lacks is a difference too.
    """
    if lock is None:
        return ["there is no lock to compare with; make one with --all --update-lock"]
    found = []
    for tool in sorted({*lock.compiler, *built.compiler}):
        locked, ours = lock.compiler.get(tool), built.compiler.get(tool)
        if locked != ours:
            found.append(f"{tool}: this build used {ours}, the lock was made with {locked}")
    if lock.source_digest != built.source_digest:
        found.append(f"sources: digest {built.source_digest[:16]}, the lock was made from {lock.source_digest[:16]}")
    for name, code in sorted(built.codes.items()):
        if name not in lock.codes:
            found.append(f"{name}: not in the lock")
            continue
        locked_code = lock.codes[name]
        for what, ours, theirs in (("cubin", code.cubin, locked_code.cubin), ("PTX", code.ptx, locked_code.ptx)):
            if ours != theirs:
                found.append(f"{name}: {what} sha256 is {ours[:16]}, the lock says {theirs[:16]}")
    if whole_menu:
        found += [f"{name}: in the lock, but not in the menu" for name in sorted(set(lock.codes) - set(built.codes))]
    return found
