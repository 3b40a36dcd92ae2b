# SPDX-License-Identifier: Apache-2.0
"""The benchmark: how it measures, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import ROOT

from mindspeed_recovery.testing.bench import Row, medians, table

pytestmark = pytest.mark.timeout(100)


def clock(*durations: float) -> Iterator[float]:
    """The times before and after calls of these durations."""
    now = 0.0
    for duration in durations:
        yield now
        now += duration
        yield now


def test_ways_take_turns_and_the_first_call_of_each_does_not_count() -> None:
    called = []
    times = clock(100.0, 100.0, 1.0, 2.0, 3.0, 4.0, 50.0, 4.0)
    taken = medians(lambda: called.append("a"), lambda: called.append("b"), repeats=3, clock=lambda: next(times))
    assert called == ["a", "b"] * 4
    assert taken == [3.0, 4.0], "medians: one slow call does not matter"


@pytest.mark.parametrize(
    ("measured", "goal", "at_least", "met"),
    [
        (1.0, 1.15, False, True),
        (1.2, 1.15, False, False),
        (25, 20, True, True),
        (13, 20, True, False),
        (7, None, False, None),
    ],
)
def test_goal_is_a_limit_in_its_direction(
    measured: float, goal: float | None, at_least: bool, met: bool | None
) -> None:
    row = Row("this", "that", measured, goal, at_least=at_least)
    assert row.met is met
    line = table([row]).splitlines()[-1]
    assert ("missed" in line) is (met is False)
    assert ("| met |" in line) is (met is True)


def bench(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "examples/bench.py", "--out", str(out), *options],
        cwd=ROOT, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


def test_rows_are_printed_and_written(tmp_path: Path) -> None:
    done = bench(tmp_path, "--only", "small_tensors")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "bench.json").read_text())
    [row] = written["rows"]
    assert row["measured"] > 0
    assert row["what"] in done.stdout
    assert written["machine"]["cores"] >= 1
    assert written["failed"] == {}


def test_unknown_row_is_refused_with_the_names_of_all(tmp_path: Path) -> None:
    done = bench(tmp_path, "--only", "nonsense")
    assert done.returncode == 2
    assert "step_copies" in done.stderr
    assert not (tmp_path / "bench.json").exists()
