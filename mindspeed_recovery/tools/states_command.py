# SPDX-License-Identifier: Apache-2.0
"""``mindspeed-recovery states``: which states the catalogue has for the versions that are installed, or for given ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mindspeed_recovery import catalogue
from mindspeed_recovery.core.policy import StateSpec
from mindspeed_recovery.errors import CatalogueError
from mindspeed_recovery.tools import sources, verify


def run(files: Sequence[Path | str], given: Sequence[str], versions: Sequence[str], *, as_json: bool) -> int:
    """Print the states. ``given``: source trees and wheels whose versions count; ``versions``: ``PACKAGE==VERSION``;
    neither: what is installed. Returns 0. Raises SourceError or CatalogueError for what cannot be read or is not known."""
    specs = _specs(files, given, versions) if given or versions else catalogue.installed_states(files)
    if as_json:
        print(json.dumps([_as_json(spec) for spec in specs], indent=2))
        return 0
    if not specs:
        print(
            "no package of the catalogue is installed here; name one with --for PACKAGE==VERSION, or give its --source"
        )
        return 0
    rows = [(spec.name, str(spec.policy), str(spec.location), _line(spec)) for spec in specs]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, widths)).rstrip())
    print(f"{len(specs)} states of {', '.join(dict.fromkeys(_of(spec) for spec in specs))}")
    return 0


def _specs(files: Sequence[Path | str], given: Sequence[str], versions: Sequence[str]) -> list[StateSpec]:
    loaded = [catalogue.load(file) for file in files]
    specs: list[StateSpec] = []
    for text in versions:
        package, _, number = text.partition("==")
        wanted = [one for one in loaded if one.package == package]
        if not wanted:
            names = ", ".join(sorted(one.package for one in loaded if one.package))
            raise CatalogueError(f"--for {text}: the catalogue does not know '{package}'; it has {names}")
        try:
            version = Version(Version(number).base_version)
        except InvalidVersion:
            raise CatalogueError(f"--for {text}: '{number}' is not a version; write {package}==1.2.3") from None
        specs += [spec for one in wanted for spec in one.states(version)]
    trees = [sources.open_tree(path) for path in given]
    for tree in trees:
        held = [one for one in loaded if verify.holds_package(one, tree)]
        if not held:
            raise sources.SourceError(
                f"{tree.label}: no package of the catalogue; give the folder in which its own lies"
            )
        for one in held:
            version_here = verify.version_in(one, [tree, *trees])
            specs += (
                [row.spec for row in one.rows(None, unknown=True)] if version_here is None else one.states(version_here)
            )
    return specs


def _line(spec: StateSpec) -> str:
    """File and line of the catalogue."""
    return spec.source.split(", ")[0]


def _of(spec: StateSpec) -> str:
    """Package and version."""
    return spec.source.partition(", ")[2] or _line(spec).split(":")[0]


def _as_json(spec: StateSpec) -> dict[str, str]:
    keys = ("name", "policy", "location", "why", "source")
    return {**{key: str(getattr(spec, key)) for key in keys}, "catalogue": _line(spec)}
