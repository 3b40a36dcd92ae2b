# SPDX-License-Identifier: Apache-2.0
"""Read `patches/*.toml`: which states each version of an upstream package has. Imports no torch and no upstream.

A file names one package and lists its entries; each entry has one row per range of versions, the ranges follow each other
without a gap, so that a version between two rows can never silently have none. A file without ``package`` (a user's own)
gives each entry one ``location`` instead.

An entry is one state. Where its ``location`` is a list, or ends in names in braces (``module:Class.{first, second}``), it
stands for one state for each, named ``entry.first``, ``entry.second`` after the last part of the location.

The version is that of the loaded module (``version_from``), else that of the installed distribution. A package that is
there without either, a source checkout on the path, counts as newer than every range that ends.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.errors import CatalogueError, LocationError, StateError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

logger = logging.getLogger("mindspeed_recovery")

_FILE_KEYS = {"package", "version_from", "state"}
_OPTIONS: dict[str, type | tuple[type, ...]] = {
    "on": str,
    "quarantine": bool,
    "replay": bool,
    "to": (str, bool, int, float),
    "fields": list,
    "clear": str,
    "settled": str,
    "on_missing": str,
    "large": bool,
    "optional": bool,
    "replica": str,
    "checkpoint": str,
}
_LOCATION = (str, list)
_STATE_KEYS = {"name", "why", "policy", "at", "location", *_OPTIONS}
_ROW_KEYS = {"versions", "location", "fields", "to", "clear"}
_BRACES = re.compile(r"(.*)\{([^{}]*)\}")
_RANGE = re.compile(r">=\s*([^,<>=\s]+)\s*(?:,\s*<\s*([^,<>=\s]+)\s*)?")


@dataclass(frozen=True)
class Row:
    """One state in one range of versions: from ``since`` (included) to ``before`` (excluded; None: still so)."""

    since: Version | None
    before: Version | None
    spec: StateSpec

    def covers(self, version: Version | None) -> bool:
        if self.since is None:
            return True
        return version is not None and self.since <= version and (self.before is None or version < self.before)


@dataclass(frozen=True)
class Catalogue:
    """One catalogue file."""

    file: str
    package: str | None
    version_from: Location | None
    entries: Mapping[str, tuple[Row, ...]]
    """By the name of the state."""

    def version(self) -> Version | None:
        """The version of the package that is loaded or, failing that, installed; None if there is none."""
        try:
            place = self.version_from.place() if self.version_from else None
        except LocationError as error:
            raise CatalogueError(f"{self.file}: key 'version_from': {error}") from None
        text = place.get() if place else None
        if text is None and self.package is not None:
            try:
                text = importlib.metadata.version(self.package)
            except importlib.metadata.PackageNotFoundError:
                return None
        try:
            # A release candidate or a development build of a version already has what that version has.
            return Version(Version(str(text)).base_version) if text else None
        except InvalidVersion:
            raise CatalogueError(
                f"{self.file}: package '{self.package}' has the version '{text}', which is not one"
            ) from None

    def is_importable(self) -> bool:
        """Whether the package is loaded or on the path. Imports nothing."""
        if self.package is None:
            return False
        module = re.sub(r"[-.]", "_", self.package)
        return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None

    def rows(self, version: Version | None, *, unknown: bool = False) -> list[Row]:
        """The rows of one version. ``unknown``: the package is there but nothing tells its version; taken then are the rows
        that hold for the newest one."""
        rows = [row for rows in self.entries.values() for row in rows]
        return [row for row in rows if (row.before is None if unknown else row.covers(version))]

    def states(self, version: Version | None, *, unknown: bool = False) -> list[StateSpec]:
        """The states of one version of the package; ``unknown``: see `rows`. Their ``source`` names the version, for
        messages."""
        specs = [row.spec for row in self.rows(version, unknown=unknown)]
        if version is None and not unknown:
            return specs
        of = "of unknown version" if unknown else str(version)
        return [dataclasses.replace(spec, source=f"{spec.source}, {self.package} {of}") for spec in specs]


def shipped() -> list[Path]:
    """The catalogue files that come with the package."""
    try:
        folder = Path(str(resources.files("mindspeed_recovery.patches")))
    except ModuleNotFoundError:  # a source checkout on the path, not installed
        folder = Path(__file__).resolve().parent.parent / "patches"
    return sorted(folder.glob("*.toml"))


def installed_states(files: Iterable[Path | str]) -> list[StateSpec]:
    """The states that the versions installed here have, from all files. Raises CatalogueError."""
    seen: dict[str, str] = {}
    specs: list[StateSpec] = []
    for file in files:
        catalogue = load(file)
        version = catalogue.version()
        for name in catalogue.entries:
            if name in seen:
                raise CatalogueError(f"{file}: entry '{name}': duplicate name, also in {seen[name]}")
            seen[name] = str(file)
        unknown = version is None and catalogue.is_importable()
        states = catalogue.states(version, unknown=unknown)
        if version is not None and not states:
            logger.warning(
                "%s has no states for %s %s: is it older than the catalogue?", file, catalogue.package, version
            )
        specs += states
    return specs


def load(file: Path | str) -> Catalogue:
    """Read one file. Raises CatalogueError with file, entry and key for anything that is not right in it."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path}: cannot be read: {error}") from None
    return parse(text, str(path))


def parse(text: str, file: str) -> Catalogue:
    """Parse the text of a file; ``file`` names it in messages."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers and nesting beyond what Python reads
        raise CatalogueError(f"{file}: not TOML: {error}") from None
    _check_keys(data, _FILE_KEYS, file)
    package = _typed(data, "package", str, file)
    version_from = _location(data, "version_from", file)
    tables = data.get("state", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise CatalogueError(f"{file}: key 'state': write each state as [[state]]")
    entries: dict[str, tuple[Row, ...]] = {}
    lines = _lines(text, tables)
    for index, table in enumerate(tables, 1):
        name = table.get("name")
        where = f"{file}: entry '{name}'" if isinstance(name, str) else f"{file}: entry number {index}"
        if not isinstance(name, str):
            raise CatalogueError(f"{where}: key 'name': every state needs a name")
        at = [f"{Path(file).name}:{line}" if line else Path(file).name for line in lines[index - 1]]
        for state, rows in _entry(table, package, at, where).items():
            if state in entries:
                raise CatalogueError(f"{where}: key 'name': duplicate name")
            entries[state] = rows
    return Catalogue(file, package, version_from, entries)


def _lines(text: str, tables: list[dict[str, Any]]) -> list[list[int]]:
    """For each state the lines on which its rows stand (tomllib tells none): the line of its table where they cannot be
    told apart, 0 where the tables cannot."""
    heads: list[int] = []
    rows: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*state\s*\]\]", line):
            heads.append(number)
            rows.append([])
        elif rows and not line.lstrip().startswith("#"):
            rows[-1] += [number] * len(re.findall(r"\bversions\s*=", line))
    if len(heads) != len(tables):
        return [[0] * _row_count(table) for table in tables]
    return [
        found if len(found) == _row_count(table) else [head] * _row_count(table)
        for table, head, found in zip(tables, heads, rows)
    ]


def _row_count(table: dict[str, Any]) -> int:
    rows = table.get("at")
    return max(len(rows), 1) if isinstance(rows, list) else 1


def _entry(table: dict[str, Any], package: str | None, places: list[str], where: str) -> dict[str, tuple[Row, ...]]:
    """The states of one entry, by name, each with its rows. ``places``: file and line of each row."""
    _check_keys(table, _STATE_KEYS, where)
    for key in ("why", "policy"):
        if not _typed(table, key, str, where):
            raise CatalogueError(f"{where}: key '{key}': missing")
    if ("at" in table) == ("location" in table):
        raise CatalogueError(f"{where}: give either 'at' (rows of version ranges) or one 'location'")
    common = {key: table[key] for key in _OPTIONS if key in table}
    if "location" in table:
        specs = _specs(table, {**common, "location": table["location"]}, places[0], where)
        return {spec.name: (Row(None, None, spec),) for spec in specs}
    if package is None:
        raise CatalogueError(f"{where}: key 'at': version ranges need a 'package' at the top of the file")
    rows = _typed(table, "at", list, where) or []
    result: dict[str, tuple[Row, ...]] = {}
    end: Version | None = None
    for number, row in enumerate(rows, 1):
        at = f"{where}: key 'at', row {number}"
        if not isinstance(row, dict):
            raise CatalogueError(f'{at}: write {{ versions = ">=A,<B", location = "module:NAME" }}')
        _check_keys(row, _ROW_KEYS, at)
        since, before = _range(row, at)
        if number > 1 and end != since:
            raise CatalogueError(
                f"{at}: key 'versions': begins at {since}, but the row before it ends at {end or 'no version'}; "
                "ranges follow each other without gap or overlap"
            )
        end = before
        options = {**common, **{key: value for key, value in row.items() if key != "versions"}}
        for spec in _specs(table, options, places[number - 1], at):
            result[spec.name] = (*result.get(spec.name, ()), Row(since, before, spec))
    if not result:
        raise CatalogueError(f"{where}: key 'at': no rows")
    return result


def _range(row: dict[str, Any], where: str) -> tuple[Version, Version | None]:
    text = _typed(row, "versions", str, where) or ""
    match = _RANGE.fullmatch(text.strip())
    try:
        if match is None:
            raise InvalidVersion(text)
        since, before = Version(match[1]), Version(match[2]) if match[2] else None
        if before is not None and before <= since:
            raise InvalidVersion(text)
    except InvalidVersion:
        raise CatalogueError(f"{where}: key 'versions': '{text}' is not a range; write >=A or >=A,<B") from None
    return since, before


def _specs(table: dict[str, Any], options: dict[str, Any], source: str, where: str) -> list[StateSpec]:
    """The states at the location, or locations, of one row."""
    value = _typed(options, "location", _LOCATION, where)
    if value is None:
        raise CatalogueError(f"{where}: key 'location': missing")
    texts = [text for item in (value if isinstance(value, list) else [value]) for text in _braces(item, where)]
    if texts == [value]:
        return [_spec(table, {**options, "location": value}, table["name"], source, where)]
    if not texts:
        raise CatalogueError(f"{where}: key 'location': an empty list")
    specs: dict[str, StateSpec] = {}
    for text in texts:
        last = re.sub(r"[^a-z0-9]+", "-", re.split(r"[:.]", text)[-1].lower()).strip("-")
        name, number = f"{table['name']}.{last}", 2
        while name in specs:
            name, number = f"{table['name']}.{last}-{number}", number + 1
        specs[name] = _spec(table, {**options, "location": text}, name, source, where)
    return list(specs.values())


def _braces(text: Any, where: str) -> list[str]:
    if not isinstance(text, str):
        raise CatalogueError(f"{where}: key 'location': {text!r} is not a str")
    match = _BRACES.fullmatch(text)
    return [text] if match is None else [match[1] + name.strip() for name in match[2].split(",")]


def _spec(table: dict[str, Any], options: dict[str, Any], name: str, source: str, where: str) -> StateSpec:
    policy = table["policy"]
    if policy not in set(map(str, Policy)):
        raise CatalogueError(f"{where}: key 'policy': unknown policy '{policy}'; one of {', '.join(map(str, Policy))}")
    for key, kind in _OPTIONS.items():
        _typed(options, key, kind, where)
    location = _location(options, "location", where)
    if location is None:
        raise CatalogueError(f"{where}: key 'location': missing")
    options = {key: value for key, value in options.items() if key in _OPTIONS}
    options["clear"] = _location(options, "clear", where)
    options["fields"] = tuple(options.get("fields", ()))
    if not all(isinstance(item, str) for item in options["fields"]):
        raise CatalogueError(f"{where}: key 'fields': a list of attribute names")
    try:
        return StateSpec(
            name=name, location=location, policy=Policy(policy), why=table["why"], source=source, **options
        )
    except StateError as error:
        raise CatalogueError(f"{where}: {str(error).split(': ', 1)[1]}") from None


def _check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(sorted(known))}"
            raise CatalogueError(f"{where}: unknown key '{key}'{hint}")


def _typed(table: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    value = table.get(key)
    empty = isinstance(value, str) and not value.strip()
    if value is None or (isinstance(value, kind) and not empty):
        return value
    expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    raise CatalogueError(f"{where}: key '{key}': {value!r} is not a {expected}")


def _location(table: Mapping[str, Any], key: str, where: str) -> Location | None:
    text = _typed(table, key, str, where)
    try:
        return None if text is None else Location.parse(text)
    except LocationError as error:
        raise CatalogueError(f"{where}: key '{key}': {error}") from None
