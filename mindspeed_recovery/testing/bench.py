# SPDX-License-Identifier: Apache-2.0
"""Measure two ways of doing a thing side by side: on a shared machine only their ratio says something.

The ways take turns, so that whatever else the machine does hits all of them, and the medians are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """A line of the table. ``measured`` and ``goal`` are ratios or, with the ``unit`` ``µs`` or ``ms``, times; a goal is an
    upper limit, or with ``at_least`` a lower one; None where no number is asked for."""

    what: str
    against: str
    measured: float
    goal: float | None = None
    unit: str = "×"
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        return self.measured >= self.goal if self.at_least else self.measured <= self.goal


def timed(way: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    began = clock()
    way()
    return clock() - began


def medians(*ways: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds that each way takes: the median of ``repeats`` calls, after one that does not count. They take turns."""
    taken: list[list[float]] = [[] for _ in ways]
    for repeat in range(repeats + 1):
        for times, way in zip(taken, ways):
            seconds = timed(way, clock)
            if repeat:
                times.append(seconds)
    return [statistics.median(times) for times in taken]


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| what | against | measured | goal | |", "|---|---|---|---|---|"]
    for row in rows:
        goal = "" if row.goal is None else f"{'≥' if row.at_least else '≤'} {row.goal:g} {row.unit}"
        told = {None: "", True: "met", False: "missed"}[row.met]
        lines.append(f"| {row.what} | {row.against} | {row.measured:.3g} {row.unit} | {goal} | {told} |")
    return "\n".join(lines)
