# SPDX-License-Identifier: Apache-2.0
"""``mindspeed-recovery verify``: choose the sources, check catalogue and recovery code against them, print the result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from mindspeed_recovery import catalogue
from mindspeed_recovery.catalogue import Catalogue
from mindspeed_recovery.tools import recovery_code, sources, verify
from mindspeed_recovery.tools.library import Library
from mindspeed_recovery.tools.progress import Progress
from mindspeed_recovery.tools.recovery_code import CodeReport
from mindspeed_recovery.tools.sources import SourceError, SourceFile, SourceTree
from mindspeed_recovery.tools.verify import SourceReport, Status


def run(
    given: Sequence[str], code: Sequence[str], files: Sequence[Path | str], *, as_json: bool, show_all: bool
) -> int:
    """Verify and print. ``given``: folders and wheels, none for what is installed; ``code``: recovery code to read too.

    Returns 0 if all is well, 1 if an entry is dead, ambiguous or of another shape, or the code has a fault. Raises
    SourceError or CatalogueError for what cannot be read or holds nothing to verify.
    """
    loaded = [catalogue.load(file) for file in files]
    here = sources.installed()
    trees = [sources.open_tree(path) for path in given]
    written = [file for path in code for file in sources.python_files(Path(path))]
    progress = Progress()
    try:
        reports = _reports(loaded, trees, here, progress)
        if not reports:
            raise SourceError(_nothing(loaded, given))
        checked = _check_code(written, loaded, [*trees, *_around(code), here], reports) if written else None
    finally:
        progress.done()
    well = all(report.well for report in reports) and not (checked and checked.faults)
    if as_json:
        print(json.dumps(_as_json(reports, checked, well), indent=2))
    else:
        _print(reports, checked, show_all)
    return 0 if well else 1


def _reports(
    loaded: Sequence[Catalogue], trees: Sequence[SourceTree], here: SourceTree, progress: Progress
) -> list[SourceReport]:
    reports = []
    for tree in trees or [here]:
        others = [other for other in (*trees, here) if other is not tree]
        for one in loaded:
            if not verify.holds_package(one, tree):
                continue
            version = one.version() if tree is here else None
            version = version or verify.version_in(one, [tree, *(other for other in others if other is not here)])
            if not one.rows(version, unknown=version is None):
                raise SourceError(f"{tree.label}: {one.file} has no entry for {one.package} {version}{_begins(one)}")
            known = [location for other in loaded if other is not one for location in verify.locations(other)]
            reports.append(verify.check(one, tree, version=version, others=others, known=known, progress=progress))
    return reports


def _begins(loaded: Catalogue) -> str:
    first = min((rows[0].since for rows in loaded.entries.values() if rows[0].since is not None), default=None)
    return f"; its first is for {first}" if first else ""


def _nothing(loaded: Sequence[Catalogue], given: Sequence[str]) -> str:
    packages = ", ".join(dict.fromkeys(one.package or one.file for one in loaded))
    if not given:
        return f"none of these is installed: {packages}; give a source tree or wheel with --source"
    return (
        f"{', '.join(given)}: no package of the catalogue ({packages}); give the folder in which the package's own lies"
    )


def _around(code: Sequence[str]) -> list[SourceTree]:
    """The packages that the recovery code itself belongs to: its imports lead there."""
    return [sources.open_tree(root) for root in dict.fromkeys(sources.package_root(Path(path)) for path in code)]


def _check_code(
    written: Sequence[SourceFile],
    loaded: Sequence[Catalogue],
    trees: Sequence[SourceTree],
    reports: Sequence[SourceReport],
) -> CodeReport:
    today: dict[str, list[str]] = {}
    for report in reports:
        for finding in report.findings:
            today.setdefault(finding.entry, []).append(finding.location)
    known = {
        str(row.spec.location): today.get(name, [])
        for one in loaded
        for name, rows in one.entries.items()
        for row in rows
    }
    return recovery_code.check(written, Library(trees), known)


# ---- output ------------------------------------------------------------------------------------------------------------


def _as_json(reports: Sequence[SourceReport], code: CodeReport | None, well: bool) -> dict[str, Any]:
    return {
        "well": well,
        "sources": [
            {
                "package": report.package,
                "version": None if report.version is None else str(report.version),
                "source": report.label,
                "well": report.well,
                "entries": [{**dataclasses.asdict(f), "status": str(f.status)} for f in report.findings],
                "problems": report.problems,
            }
            for report in reports
        ],
        "code": None if code is None else dataclasses.asdict(code),
    }


def _print(reports: Sequence[SourceReport], code: CodeReport | None, show_all: bool) -> None:
    for report in reports:
        _print_report(report, show_all)
    if code is not None:
        for fault in code.faults:
            print(f"{fault.path}:{fault.line}: {fault.kind}: {fault.text}")
        for module in code.unresolved:
            print(f"not checked: what the code assigns in {module}, which is in no source")
        for problem in code.problems:
            print(f"not read: {problem}")
    print(_summary(reports, code))


def _print_report(report: SourceReport, show_all: bool) -> None:
    counts = [f"{n} {status}" for status in Status if status is not Status.FOUND and (n := report.count(status))]
    found = f"{report.count(Status.FOUND)} of {len(report.findings)} entries found"
    print(f"{_named(report.package, report.version)} in {report.label}: {', '.join([found, *counts])}")
    for finding in report.findings:
        if finding.status.well and not show_all:
            continue
        print(f"  {finding.status!s:<13}  {finding.entry}  ({finding.source})")
        print(f"  {'':<13}  {finding.location}{f'  {finding.place}' if finding.place else ''}")
        if finding.text:
            print(f"  {'':<13}  {finding.text}")
        for candidate in finding.candidates:
            print(f"  {'':<13}  candidate: {candidate}")
    for problem in report.problems:
        print(f"  not read: {problem}")


def _named(package: str, version: Version | None) -> str:
    return f"{package} {version}" if version else f"{package or 'catalogue'} (version unknown, newest entries)"


def _summary(reports: Sequence[SourceReport], code: CodeReport | None) -> str:
    bad = [finding.entry for report in reports for finding in report.findings if not finding.status.well]
    parts = []
    if bad:
        parts.append(f"{len(bad)} of the entries do not fit: {', '.join(dict.fromkeys(bad))}")
    if code is not None and code.faults:
        parts.append(f"{len(code.faults)} faults in {code.files} files of recovery code")
    return "; ".join(parts) or "all is well"
