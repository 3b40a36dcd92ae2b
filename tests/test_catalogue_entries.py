# SPDX-License-Identifier: Apache-2.0
"""Negative controls of the megatron-core catalogue: each entry taken out by itself makes a recovery wrong.

The cases are in `catalogue_cases`; they run in one process for each version of Megatron, both at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import catalogue_cases
import pytest
from catalogue_cases import CASES, CATALOGUE, NO_CASE
from clusters import ask_versions
from packaging.version import Version

from mindspeed_recovery import catalogue
from mindspeed_recovery.core.policy import Policy

pytestmark = pytest.mark.timeout(300)  # the first test waits for all runs of both versions

VERSIONS = ("0.12.1", "0.19.2")

Results = dict[str, dict[str, dict[str, Any]]]


@functools.cache
def treated(version: str | None = None) -> list[str]:
    """The entries that recovery does something about; those of one version, or of any."""
    rows = (row for rows in catalogue.load(CATALOGUE).entries.values() for row in rows)
    specs = [row.spec for row in rows if version is None or row.covers(Version(version))]
    return list(dict.fromkeys(spec.name for spec in specs if spec.policy is not Policy.IGNORED))


def excused(entry: str, version: str) -> bool:
    return entry in NO_CASE or f"{entry}@{version}" in NO_CASE


PAIRS = [
    (version, entry)
    for version in VERSIONS
    for entry in treated(version)
    if entry in CASES and not excused(entry, version)
]


@pytest.fixture(scope="session")
def results(megatron: Callable[[str], Path]) -> dict[str, Results]:
    """By version and entry: the three runs of its case."""

    questions = {version: [entry for other, entry in PAIRS if other == version] for version in VERSIONS}
    answers = ask_versions(catalogue_cases.__file__, questions, megatron)
    return {version: {answer.pop("entry"): answer for answer in found} for version, found in answers.items()}


def test_each_entry_has_a_case_or_a_reason_for_none() -> None:
    names = {key.split("@")[0] for key in NO_CASE}
    assert CASES.keys() | names == set(treated())
    assert not CASES.keys() & NO_CASE.keys(), "both a case and a reason for none"
    assert all(reason.strip() for reason in NO_CASE.values())
    for version in VERSIONS:
        assert [entry for entry in treated(version) if not excused(entry, version) and entry not in CASES] == []


def test_entries_of_other_versions_are_really_of_other_versions() -> None:
    elsewhere = {key for key, reason in NO_CASE.items() if reason.startswith("only in version")}
    assert elsewhere == set(treated()) - {entry for version in VERSIONS for entry in treated(version)}


@pytest.mark.parametrize(("version", "entry"), PAIRS)
def test_the_recovered_step_is_right_with_the_entry_and_wrong_without(
    version: str, entry: str, results: dict[str, Results]
) -> None:
    runs = results[version][entry]
    undisturbed, whole, without = runs["undisturbed"], runs["whole"], runs["without"]
    assert "error" not in undisturbed, undisturbed["error"]
    assert "error" not in whole, whole["error"]
    assert whole["value"] == undisturbed["value"]
    if "error" in without:
        assert without["after"], f"not the recomputed step fails: {without['error']}"
    else:
        assert without["value"] != undisturbed["value"], (
            f"nothing goes wrong without '{entry}': the entry is not needed"
        )
