# SPDX-License-Identifier: Apache-2.0
"""Which state of the catalogue a name in somebody's code is. By the text of the catalogue alone: nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from mindspeed_recovery import catalogue
from mindspeed_recovery.core.policy import StateSpec
from mindspeed_recovery.tools.reading import Name

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class Sure(IntEnum):
    """How sure a match is."""

    BY_NAME = 1
    """An attribute of this name, or a function that is called like the one that clears the state."""
    IN_MODULE = 2
    """A name of the state's own module."""
    EXACT = 3
    """The state's location, or something in it."""


@dataclass(frozen=True)
class Known:
    """A state of the catalogue in a range of versions (as text; empty for a state of the user's)."""

    spec: StateSpec
    versions: str = ""


class KnownStates:
    """The states of catalogue files, of all versions: the log tells what ran by the places that it names."""

    def __init__(self, files: Iterable[Path | str]) -> None:
        """Raises CatalogueError."""
        self._known: list[Known] = []
        for file in files:
            loaded = catalogue.load(file)
            for rows in loaded.entries.values():
                for row in rows:
                    before = f",<{row.before}" if row.before else ""
                    text = f"{loaded.package} >={row.since}{before}" if row.since else ""
                    self._known.append(Known(row.spec, text))

    @property
    def packages(self) -> set[str]:
        """Top-level packages that hold states."""
        return {known.spec.location.module.split(".")[0] for known in self._known}

    def named(self, name: str) -> list[Known]:
        """The rows of one entry."""
        return [known for known in self._known if known.spec.name == name]

    def match(self, names: Sequence[Name], module: str, function: str) -> tuple[list[Known], Sure]:
        """The states that ``names``, read in a function of a module, are; several where they cannot be told apart."""
        best: dict[str, Known] = {}
        surest = Sure.BY_NAME
        for name in names:
            for known in self._known:
                sure = _compare(name, known.spec)
                if sure is not None and (sure > surest or not best):
                    best, surest = {}, sure
                if sure is not None and sure == surest:
                    best.setdefault(known.spec.name, known)
        if not best:
            for known in self._known:
                clear = known.spec.clear
                if clear is not None and clear.module == module and len(_words(clear.path[-1]) & _words(function)) > 1:
                    best.setdefault(known.spec.name, known)
        return list(best.values()), surest


def _compare(name: Name, spec: StateSpec) -> Sure | None:
    location, path = spec.location, name.path
    if not path:
        return None
    at = location.path
    if name.owner_known and name.module == location.module and path[: len(at)] == at:
        rest = path[len(at) :]
        return None if spec.fields and rest and rest[0] not in spec.fields else Sure.EXACT
    if spec.fields and spec.on == "module":
        return None  # the parts of one object: nothing but the location tells them apart
    if name.called and spec.on == "module" and len(_words(at[0])) > 1 and _words(at[0]) <= _words(path[-1]):
        return Sure.BY_NAME  # get_the_tracker() for _THE_TRACKER
    rest = path[1:] if name.owner_known else path
    if name.module == location.module and (at[-1] in rest or _speaks_of(spec, name)):
        return Sure.IN_MODULE
    return Sure.BY_NAME if at[-1] in rest and spec.on == "instances" else None


def _speaks_of(spec: StateSpec, name: Name) -> bool:
    """Whether the entry says in words that it takes care of another attribute of the same class."""
    same_class = name.owner_known and len(name.path) > 1 and name.path[:-1] == spec.location.path[:-1]
    return same_class and "_" in name.path[-1] and name.path[-1] in _IDENTIFIER.findall(spec.why)


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[_\W]+", name.lower()) if len(word) > 2}
