"""Which entries of the manifest serve a call: matching, nearest entries, ambiguity, the structure for each M. Pure; no driver."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple

from .errors import AmbiguousKernelError, ShapeNotInMenuError
from .manifest import Entry, Manifest
from .spec import BLOCK, KernelSpec
from .structures import faster


class Unset(enum.Enum):
    """Type of :data:`ENTRY`."""

    ENTRY = "the entry's value"


ENTRY: Final = Unset.ENTRY
"""Default of a launch argument for which None is a value of its own: keep what the entry says."""

OrEntry = Literal[Unset.ENTRY]

SHAPE_FIELDS = ("hidden", "inter", "experts", "top_k")
OPTION_FIELDS = ("layout", "logits_dtype", "w13_order", "scoring", "renormalise", "structure")


@dataclasses.dataclass(frozen=True)
class Query:
    """What the caller asked for; None in an option means "any"."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    tokens: int
    layout: str | None = "trtllm_gen"
    logits_dtype: str | None = "bf16"
    w13_order: str | None = None
    scoring: str | None = None
    renormalise: bool | None = None
    scale: float | OrEntry = ENTRY
    limit: float | OrEntry | None = ENTRY
    ue8m0: bool | OrEntry = ENTRY
    structure: str | None = None

    def mismatches(self, spec: KernelSpec) -> list[str]:
        """Fields of ``spec`` that do not serve this query, each as "field value (asked: value)"."""
        texts = self.differences(spec)
        if not 0 <= self.tokens <= spec.tokens:
            texts.append(f"tokens 0 to {spec.tokens} (asked: {self.tokens!r})")
        return texts

    def differences(self, spec: KernelSpec) -> list[str]:
        """:meth:`mismatches` in anything but the number of tokens, in which entries complement one another."""
        wrong = [name for name in SHAPE_FIELDS if getattr(self, name) != getattr(spec, name)]
        wrong += [name for name in OPTION_FIELDS if getattr(self, name) not in (None, getattr(spec, name))]
        return [f"{name} {getattr(spec, name)!r} (asked: {getattr(self, name)!r})" for name in wrong]

    def launch_arguments(self) -> dict[str, Any]:
        """The launch arguments that the caller fixed."""
        return {name: value for name in ("scale", "limit", "ue8m0") if (value := getattr(self, name)) is not ENTRY}

    def __str__(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ", ".join(f"{name}={value!r}" for name, value in fields.items() if value is not None and value is not ENTRY)


class Choice(NamedTuple):
    """One entry that serves a call."""

    entry: Entry
    spec: KernelSpec
    """The entry's spec with the caller's launch arguments."""


Group = tuple[Choice, ...]
"""The entries of one kind of call on one arch. They compute the same and differ only in structure, columns and tokens."""


def select(manifest: Manifest, query: Query) -> dict[str, Group]:
    """The entries that serve ``query``, per arch; together they serve every M up to ``query.tokens``.

    Raises:
        ShapeNotInMenuError: no entry fits; names the nearest ones.
        AmbiguousKernelError: entries that compute different things fit.
    """
    fitting = [entry for entry in manifest.entries if not query.differences(entry.spec)]
    largest: dict[str, int] = {}
    for entry in fitting:
        largest[entry.spec.arch] = max(entry.spec.tokens, largest.get(entry.spec.arch, 0))
    fitting = [entry for entry in fitting if 0 <= query.tokens <= largest[entry.spec.arch]]
    if not fitting:
        raise ShapeNotInMenuError(_not_in_menu(manifest, query))
    arguments = query.launch_arguments()
    groups: dict[str, dict[KernelSpec, Choice]] = {}
    for entry in fitting:
        spec = dataclasses.replace(entry.spec, **arguments)
        group = groups.setdefault(spec.arch, {})
        if any(_computation(other) != _computation(spec) for other in group):
            raise AmbiguousKernelError(_ambiguous(query, [e.spec for e in fitting]))
        group.setdefault(spec, Choice(entry, spec))
    return {arch: tuple(group.values()) for arch, group in groups.items()}


def variants(group: Iterable[Choice], tokens: int, structure: Callable[[KernelSpec, int], str] = faster) -> tuple[Choice, ...]:
    """For each M from 0 to ``tokens`` the choice that serves it: [M] -> choice. ``tokens`` must be within what the group serves.

    Of the entries for at least M tokens, those of the structure that ``structure`` (spec, M) names, if there are any; of these
    the one for the fewest tokens, since a list kernel with fewer columns does less work.
    """
    group = tuple(group)

    def best(count: int) -> Choice:
        able = [choice for choice in group if choice.spec.tokens >= count]
        wanted = structure(able[0].spec, count)
        return min(able, key=lambda choice: (choice.spec.structure != wanted, choice.spec.tokens))

    return tuple(best(max(count, 1)) for count in range(tokens + 1))


def _computation(spec: KernelSpec) -> KernelSpec:
    """``spec`` without what does not change which function is computed."""
    return dataclasses.replace(spec, structure="cluster", columns=0, tokens=1)


def _not_in_menu(manifest: Manifest, query: Query) -> str:
    lines = [f"no kernel for {query}."]
    if query.inter % BLOCK:
        padded = -(-query.inter // BLOCK) * BLOCK
        there = any(not dataclasses.replace(query, inter=padded).mismatches(entry.spec) for entry in manifest.entries)
        lines.append(
            f"inter (per rank) must be a multiple of {BLOCK}: zero-pad the weights to inter={padded}, "
            + ("which this build has." if there else "which this build does not have either.")
        )
    if nearest := _nearest(manifest, query):
        lines.append("Nearest entries, and where they differ:")
        lines += [f"  {title}: {difference}" for title, difference in nearest]
    else:
        lines.append(f"The manifest in {manifest.folder} has no entries at all.")
    return "\n".join(lines)


def _nearest(manifest: Manifest, query: Query, count: int = 3) -> list[tuple[str, str]]:
    """(title, differences) of the entries with the fewest and smallest differences; entries that differ alike count once."""

    def distance(entry: Entry) -> tuple[int, float, int]:
        ratios = (abs(math.log(max(getattr(query, name), 1) / getattr(entry.spec, name))) for name in SHAPE_FIELDS)
        return len(query.mismatches(entry.spec)), sum(ratios), -entry.spec.tokens

    found: dict[tuple[str, str], None] = {}
    for entry in sorted(manifest.entries, key=distance):
        found[entry.title, ", ".join(query.mismatches(entry.spec))] = None
    return list(found)[:count]


def _ambiguous(query: Query, specs: list[KernelSpec]) -> str:
    names = [f.name for f in dataclasses.fields(KernelSpec) if f.name not in ("arch", "structure", "columns", "tokens")]
    differing = {name: sorted({repr(getattr(spec, name)) for spec in specs}) for name in names}
    choices = "\n".join(f"  {name} = {' or '.join(values)}" for name, values in differing.items() if len(values) > 1)
    return f"more than one kernel fits {query}; say which:\n{choices}"
