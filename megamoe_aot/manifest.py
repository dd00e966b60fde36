"""The manifest: which entries the artifacts folder holds, and the integrity of each cubin.

The builder writes it with :meth:`Manifest.save`; the loader reads it with :meth:`Manifest.load`. Reading is strict: an
unknown format, a missing or unknown field, or a hash that does not fit is an error, never a guess.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from .errors import DamagedArtifactError, ManifestError
from .files import write_atomically
from .finalize import CodeSpec, FinalizeSpec
from .spec import KernelSpec

FORMAT = 2
FILE_NAME = "manifest.json"

Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True)
class ParameterRecord:
    """One kernel parameter as the cubin lays it out; offset and size in bytes."""

    name: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class CubinRecord:
    """What the build measured of one cubin. Sizes are bytes."""

    code: str
    """The spec's ``code_name``."""
    bytes: int
    ptx_sha256: str
    symbol: str
    arch: str
    """Target stamped into the ELF, a member of ``spec.ARCHS``."""
    min_driver: int
    """Smallest ``cuDriverGetVersion`` that loads this cubin, for example 13000."""
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared: int
    parameters: tuple[ParameterRecord, ...]
    block: int
    """Threads per CTA."""
    resident_ctas: int
    """CTAs per SM that registers and shared memory allow."""
    validated_on: tuple[str, ...] = ()
    """GPUs on which this very cubin passed the correctness run."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the menu. Entries that differ only in launch arguments name the same cubin."""

    model: str
    parallel: str
    spec: KernelSpec
    cubin: str
    """sha256 of the cubin file, which is also its name."""
    dynamic_shared: int
    """Bytes per CTA."""
    cluster: int
    """CTAs per cluster; 1 where the launch has no clusters."""

    @property
    def title(self) -> str:
        """Model and parallel degree, for people."""
        return f"{self.model} {self.parallel}"


@dataclasses.dataclass(frozen=True)
class FinalizeEntry:
    """The finalize kernel of all entries with one (hidden, top_k, arch)."""

    spec: FinalizeSpec
    cubin: str
    """sha256 of the cubin file, which is also its name."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The whole manifest, and the folder whose cubins it describes."""

    source_digest: str
    """sha256 over the kernel sources and the spec modules."""
    compiler: Mapping[str, str]
    """Tool -> version."""
    cubins: Mapping[str, CubinRecord]
    """sha256 -> record, of the entries' cubins and of the finalize kernels'."""
    entries: tuple[Entry, ...]
    folder: Path = dataclasses.field(default=Path("."), compare=False)
    finalize: tuple[FinalizeEntry, ...] = ()
    """The finalize kernels, one for each spec."""

    @cached_property
    def build_id(self) -> str:
        """sha256 over the sorted cubin hashes and all entries: equal exactly for builds with the same contents."""
        content = {
            "cubins": sorted(self.cubins),
            "entries": [_plain(entry) for entry in self.entries],
            "finalize": [_plain(entry) for entry in self.finalize],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def archs(self) -> tuple[str, ...]:
        """Targets for which there is at least one cubin, sorted."""
        return tuple(sorted({record.arch for record in self.cubins.values()}))

    @property
    def _everything(self) -> tuple[Entry | FinalizeEntry, ...]:
        return (*self.entries, *self.finalize)

    def record(self, entry: Entry | FinalizeEntry) -> CubinRecord:
        """The record of an entry's cubin."""
        return self.cubins[entry.cubin]

    def spec_of(self, sha256: str) -> CodeSpec:
        """The spec that a cubin was compiled from: of a finalize kernel, or the first entry's that names it. Raises KeyError."""
        for entry in self._everything:
            if entry.cubin == sha256:
                return entry.spec
        raise KeyError(sha256)

    def finalize_for(self, spec: KernelSpec) -> FinalizeEntry:
        """The finalize kernel that sums what ``spec``'s kernel writes. Raises ManifestError where the artifacts have none."""
        wanted = FinalizeSpec.of(spec)
        for entry in self.finalize:
            if entry.spec == wanted:
                return entry
        raise ManifestError(
            f"{self.folder / FILE_NAME} has no {wanted.code_name}, which layer.forward needs; rebuild the artifacts, "
            "or load with finalize=False and call the layer without forward"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "format": FORMAT,
            "build_id": self.build_id,
            "source_digest": self.source_digest,
            "compiler": dict(self.compiler),
            "cubins": {sha: _plain(record) for sha, record in self.cubins.items()},
            "entries": [_plain(entry) for entry in self.entries],
            "finalize": [_plain(entry) for entry in self.finalize],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], folder: Path = Path(".")) -> Manifest:
        """Inverse of :meth:`to_dict`.

        Raises:
            ManifestError: another format, a missing or unknown field, a cubin that no entry names or that no record
                describes, two finalize kernels of one spec, or a build id that does not fit the contents.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise ManifestError(f"{folder / FILE_NAME} has format {found!r}, this version of megamoe_aot reads format {FORMAT}")
        try:
            _same_keys("manifest", data, {"format", "build_id", "source_digest", "compiler", "cubins", "entries", "finalize"})
            manifest = cls(
                source_digest=data["source_digest"],
                compiler=dict(data["compiler"]),
                cubins={sha: _cubin(fields) for sha, fields in data["cubins"].items()},
                entries=tuple(_entry(fields) for fields in data["entries"]),
                folder=folder,
                finalize=tuple(_finalize(fields) for fields in data["finalize"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"{folder / FILE_NAME} cannot be read: {error}") from error
        manifest._check(data["build_id"])
        return manifest

    def _check(self, build_id: str) -> None:
        where = self.folder / FILE_NAME
        named = {entry.cubin for entry in self._everything}
        if loose := named ^ set(self.cubins):
            raise ManifestError(f"{where}: entries and cubin records disagree about {sorted(loose)}; rebuild the artifacts")
        for entry in self._everything:
            record = self.record(entry)
            if (entry.spec.code_name, entry.spec.arch) != (record.code, record.arch):
                raise ManifestError(
                    f"{where}: entry {entry.spec.code_name} names a cubin of {record.code} for {record.arch}; rebuild the artifacts"
                )
        if len({entry.spec for entry in self.finalize}) != len(self.finalize):
            raise ManifestError(f"{where}: two finalize kernels have one spec; rebuild the artifacts")
        if build_id != self.build_id:
            raise ManifestError(f"{where}: build_id is {build_id}, its contents give {self.build_id}; the file was changed after the build")

    def save(self, folder: Path) -> Path:
        """Write ``manifest.json`` into ``folder``, atomically and with the same bytes for the same contents."""
        target = folder / FILE_NAME
        write_atomically(target, (json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n").encode())
        return target

    @classmethod
    def load(cls, folder: Path | None = None) -> Manifest:
        """Read ``manifest.json`` from ``folder`` (None: :func:`artifacts_folder`). Raises ManifestError."""
        folder = artifacts_folder() if folder is None else folder
        try:
            text = (folder / FILE_NAME).read_text()
        except OSError as error:
            raise ManifestError(f"cannot read {folder / FILE_NAME}: {error.strerror}; {_HOW_TO_GET_ARTIFACTS}") from error
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"{folder / FILE_NAME} is not JSON: {error}") from error
        return cls.from_dict(data, folder)

    def read_cubin(self, sha256: str) -> bytes:
        """The cubin's bytes, verified. Raises DamagedArtifactError."""
        path = self.folder / f"{sha256}.cubin"
        try:
            image = path.read_bytes()
        except OSError as error:
            raise DamagedArtifactError(f"cannot read {path}: {error.strerror}; {_HOW_TO_REPAIR}") from error
        expected = self.cubins[sha256].bytes
        if len(image) != expected:
            raise DamagedArtifactError(f"{path} has {len(image)} bytes, the manifest says {expected}; {_HOW_TO_REPAIR}")
        if (found := hashlib.sha256(image).hexdigest()) != sha256:
            raise DamagedArtifactError(f"{path} has sha256 {found}, the manifest says {sha256}; {_HOW_TO_REPAIR}")
        return image


_HOW_TO_GET_ARTIFACTS = "install the wheel, or in a checkout run: python build_kernels.py --all"
_HOW_TO_REPAIR = "reinstall the wheel (pip install --force-reinstall megamoe-aot), or rebuild in a checkout"


def artifacts_folder() -> Path:
    """Where the artifacts are: inside the installed package, else ``artifacts/`` of the checkout. Raises ManifestError."""
    package = Path(__file__).resolve().parent
    checkout = package.parent
    places = [package / "artifacts"]
    if (checkout / "build_kernels.py").exists():
        places.append(checkout / "artifacts")
    for place in places:
        if (place / FILE_NAME).exists():
            return place
    raise ManifestError(f"no {FILE_NAME} in {' or '.join(map(str, places))}; {_HOW_TO_GET_ARTIFACTS}")


def _plain(record: Any) -> dict[str, Any]:
    """A record as JSON types: what :func:`json.loads` would give back."""
    return dict(json.loads(json.dumps(dataclasses.asdict(record))))


def _same_keys(what: str, fields: Mapping[str, Any], known: set[str]) -> None:
    if wrong := known ^ set(fields):
        raise ValueError(f"{what}: missing or unknown fields {sorted(wrong)}")


def _build(kind: type[Record], fields: Mapping[str, Any], **converted: Any) -> Record:
    _same_keys(kind.__name__, fields, {f.name for f in dataclasses.fields(kind)})  # type: ignore[arg-type]
    return kind(**{**fields, **converted})


def _cubin(fields: Mapping[str, Any]) -> CubinRecord:
    parameters = tuple(_build(ParameterRecord, parameter) for parameter in fields["parameters"])
    return _build(CubinRecord, fields, parameters=parameters, validated_on=tuple(fields["validated_on"]))


def _entry(fields: Mapping[str, Any]) -> Entry:
    return _build(Entry, fields, spec=KernelSpec.from_dict(fields["spec"]))


def _finalize(fields: Mapping[str, Any]) -> FinalizeEntry:
    return _build(FinalizeEntry, fields, spec=FinalizeSpec.from_dict(fields["spec"]))


__all__ = ["CubinRecord", "Entry", "FinalizeEntry", "Manifest", "ParameterRecord", "artifacts_folder"]
