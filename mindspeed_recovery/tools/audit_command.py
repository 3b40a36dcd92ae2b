# SPDX-License-Identifier: Apache-2.0
"""``mindspeed-recovery audit``: find the files, audit them, print what was found as a table, JSON or catalogue entries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_recovery import catalogue
from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.errors import LocationError
from mindspeed_recovery.tools import sources, verify
from mindspeed_recovery.tools.audit import Audit, Judged, Status, audit
from mindspeed_recovery.tools.audit_words import CONFIDENCE
from mindspeed_recovery.tools.progress import Progress
from mindspeed_recovery.tools.sources import SourceFile, SourceTree

_SHOWN = 3  # importers and parts on one line


def run(
    paths: Sequence[str],
    files: Sequence[Path | str],
    *,
    confidence: str = "medium",
    only: str | None = None,
    fail_on: str | None = None,
    form: str = "table",
) -> int:
    """Audit and print. ``paths``: files, folders, wheels or names of installed packages; ``files``: the catalogue.

    ``confidence``: the least to be shown. ``only``: a status. ``form``: ``table``, ``json`` or ``toml``. Returns 1 if a
    finding that is shown has the status ``fail_on``, else 0. Raises SourceError or CatalogueError.
    """
    found, trees = _sources(paths)
    specs = _specs(files, trees)
    progress = Progress()
    try:
        result = audit(found, specs, progress=progress)
    finally:
        progress.done()
    least = next(level for level, name in CONFIDENCE.items() if name == confidence)
    result.judged = [one for one in result.judged if one.finding.confidence >= least]
    shown = [one for one in result.judged if only is None or str(one.status) == only]
    if form == "json":
        print(json.dumps(_as_json(result, shown), indent=2))
    elif form == "toml":
        print(to_toml(shown), end="")
    else:
        _print(result, shown)
    return int(fail_on is not None and any(str(one.status) == fail_on for one in shown))


def _sources(paths: Sequence[str]) -> tuple[list[SourceFile], list[SourceTree]]:
    found: dict[str, SourceFile] = {}
    trees: list[SourceTree] = []
    for path in paths:
        files, tree = sources.everything(path)
        found.update((file.path, file) for file in files)
        trees.append(tree)
    return list(found.values()), trees


def _specs(files: Sequence[Path | str], trees: Sequence[SourceTree]) -> list[StateSpec]:
    """The states of the versions at hand; of the newest where nothing tells the version."""
    specs: list[StateSpec] = []
    for file in files:
        one = catalogue.load(file)
        version = verify.version_in(one, trees) if one.package else None
        specs += [row.spec for row in one.rows(version, unknown=version is None)]
    return list({(spec.name, spec.location): spec for spec in specs}.values())


# ---- output ------------------------------------------------------------------------------------------------------------


def _print(result: Audit, shown: Sequence[Judged]) -> None:
    for one in shown:
        finding = one.finding
        print(f"{finding.path}:{finding.line}: {finding.rule} {finding.kind}: {finding.location}")
        by = f" by {one.by}" if one.by and one.status is Status.TRACKED else f": {one.by}" if one.by else ""
        lacking = f", but not {', '.join(one.missing)}" if one.missing else ""
        print(f"    {one.status}{by}{lacking}; {finding.holds}, confidence {CONFIDENCE[finding.confidence]}")
        print(f"    why: {finding.why}")
        if finding.writers:
            print(f"    written: {_some(finding.writers)}")
        if finding.readers:
            print(f"    read: {_some(finding.readers)}")
        if finding.importers:
            print(f"    held by name: {_some(finding.importers)}: act in place, a new object would not reach them")
        if one.status is Status.UNTRACKED:
            print(f"    policy: {finding.policy} ({finding.reason})")
    for problem in result.problems:
        print(f"not read: {problem}")
    counts = ", ".join(f"{result.count(status)} {status}" for status in Status)
    print(f"{len(result.judged)} places in {result.files} files can hold device state: {counts}")


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")


def _as_json(result: Audit, shown: Sequence[Judged]) -> dict[str, Any]:
    return {
        "files": result.files,
        "counts": {str(status): result.count(status) for status in Status},
        "findings": [
            {
                "rule": one.finding.rule,
                "kind": one.finding.kind,
                "location": one.finding.location,
                "on": one.finding.on,
                "path": one.finding.path,
                "line": one.finding.line,
                "holds": one.finding.holds,
                "parts": one.finding.parts,
                "why": one.finding.why,
                "confidence": CONFIDENCE[one.finding.confidence],
                "writers": one.finding.writers,
                "readers": one.finding.readers,
                "importers": one.finding.importers,
                "policy": str(one.finding.policy),
                "reason": one.finding.reason,
                "status": str(one.status),
                "by": one.by,
                "missing": one.missing,
            }
            for one in shown
        ],
        "problems": result.problems,
    }


def to_toml(judged: Sequence[Judged]) -> str:
    """Entries for a catalogue file of one's own; what has no location that a catalogue can name is left as a comment."""
    lines: list[str] = []
    names: dict[str, int] = {}
    for one in judged:
        finding = one.finding
        try:
            Location.parse(finding.location)
        except LocationError:
            lines += [f"# {_one_line(finding.location)}: {finding.kind}: has no name by which it can be declared", ""]
            continue
        base = re.sub(r"[^a-z0-9]+", "-", finding.name.lower()).strip("-") or "state"
        names[base] = names.get(base, 0) + 1
        name = base if names[base] == 1 else f"{base}-{names[base]}"
        while name != base and name in names:
            name += "-x"
        names.setdefault(name, 1)
        lines += [
            f"# {finding.rule} {finding.kind}, confidence {CONFIDENCE[finding.confidence]}: {_one_line(finding.why)}",
            "[[state]]",
            f"name = {_quoted(name)}",
            f"why = {_quoted(finding.reason)}",
            f"policy = {_quoted(str(finding.policy))}",
            f"location = {_quoted(finding.location)}",
            *(_options(one)),
            "",
        ]
    return "\n".join([*lines, ""]) if lines else ""


def _options(one: Judged) -> Iterator[str]:
    if one.finding.on == "instances":
        yield 'on = "instances"'
        yield "optional = true"
    if one.finding.parts and one.finding.policy is not Policy.IGNORED:
        yield f"fields = [{', '.join(map(_quoted, one.missing or one.finding.parts))}]"


def _quoted(text: str) -> str:
    return json.dumps(_one_line(text), ensure_ascii=True)


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", text).split())
