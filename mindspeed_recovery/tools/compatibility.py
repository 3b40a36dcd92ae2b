# SPDX-License-Identifier: Apache-2.0
"""How many states the catalogue has for each range of versions of each upstream package, as a table in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import Version

from mindspeed_recovery import catalogue
from mindspeed_recovery.core.policy import Policy


def table(files: Iterable[Path | str]) -> str:
    """One row for each range of versions that have the same states. Raises CatalogueError."""
    policies = list(Policy)
    lines = [f"| package | versions | {' | '.join(policies)} |", "|---|---|" + "---:|" * len(policies)]
    for file in files:
        loaded = catalogue.load(file)
        for since, before in _ranges(loaded):
            counts = Counter(row.spec.policy for row in loaded.rows(since))
            versions = f"{since} and later" if before is None else f"{since} – before {before}"
            lines.append(f"| {loaded.package} | {versions} | {' | '.join(str(counts[p]) for p in policies)} |")
    return "\n".join(lines)


def _ranges(loaded: catalogue.Catalogue) -> Iterator[tuple[Version, Version | None]]:
    rows = [row for rows in loaded.entries.values() for row in rows if row.since is not None]
    ends = sorted({end for row in rows for end in (row.since, row.before) if end is not None})
    yield from zip(ends, [*ends[1:], None])
