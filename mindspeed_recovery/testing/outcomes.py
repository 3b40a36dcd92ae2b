# SPDX-License-Identifier: Apache-2.0
"""How a run with a fault may end, what was expected of it beforehand, and the table of both."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspeed_recovery.testing.faults import POINTS

RECOVERED = (
    "recovered"  # every parameter, buffer, optimizer state and scalar equal to the run without a fault, bit for bit
)
ERROR = "error"  # the job ended, on every rank
TOLD = "told"  # not equal, and the recovery's report says so
SILENT = "silently different"
HANG = "hang"
MISSED = "missed"  # the fault hit nothing: no such storage at that point
OUTCOMES = (RECOVERED, ERROR, TOLD, SILENT, HANG, MISSED)


@dataclass(frozen=True)
class Expectation:
    """Of the faults at ``points`` of a step up to ``last_step``, in storages of ``kind``; None is all. ``says``: what an error
    must say."""

    outcome: str
    kind: str | None = None
    points: tuple[str, ...] | None = None
    last_step: int | None = None
    says: str = ""

    def covers(self, kind: str, point: str, step: int) -> bool:
        return (
            (self.kind is None or kind == self.kind)
            and (self.points is None or point in self.points)
            and (self.last_step is None or step <= self.last_step)
        )

    def met(self, outcome: str, message: str) -> bool:
        return outcome == self.outcome and self.says in message


EXPECTED = (
    # As under MindIO TFT: before the first update the optimizer has no state that could be restored.
    Expectation(
        ERROR,
        points=("forward", "router", "backward", "update"),
        last_step=1,
        says="a fault before the first optimizer update cannot be recovered",
    ),
    Expectation(RECOVERED),
)
"""Of a job whose device states are all catalogued. The first that covers a case counts."""


def expected(kind: str, point: str, step: int, table: Sequence[Expectation] = EXPECTED) -> Expectation:
    """What must become of a fault. Raises LookupError where the table does not say."""
    for expectation in table:
        if expectation.covers(kind, point, step):
            return expectation
    raise LookupError(f"the table of expected outcomes has no row for {kind} at {point} of step {step}")


@dataclass(frozen=True)
class Result:
    """One run with a fault. ``message``: of an error its text, of a difference the first ones, of a hang where it was."""

    case: str
    kind: str
    point: str
    outcome: str
    expected: str
    as_expected: bool
    message: str = ""
    seconds: float = 0.0


def table(results: Iterable[Result]) -> str:
    """Outcomes by kind of storage and point, in Markdown; what was not expected is marked."""
    cells: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for result in results:
        text = result.outcome if result.as_expected else f"**{result.outcome}, not expected**"
        cells[result.kind][result.point][text] += 1
    points = [point for point in POINTS if any(point in row for row in cells.values())]
    lines = [f"| storage | {' | '.join(points)} |", f"|---|{'---|' * len(points)}"]
    for kind in sorted(cells):
        row = [", ".join(f"{count} {text}" for text, count in sorted(cells[kind][p].items())) for p in points]
        lines.append(f"| {kind} | {' | '.join(row)} |")
    return "\n".join(lines)
