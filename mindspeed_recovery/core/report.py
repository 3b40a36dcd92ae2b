# SPDX-License-Identifier: Apache-2.0
"""What a recovery did, state by state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

TAGS = "recovery/"
"""Where a log tells of recoveries. Points below it are about the recoveries of a run, not about its training: a run without
a fault has none, so they are no difference between two runs."""

MARKER = "marker"
"""Below `TAGS`: the point that marks a recovery, at the step that training went back to; 1 if it was exact, else 0."""


@dataclass
class Outcome:
    """What became of one state: ``action`` taken, from which ``source``, what was tried before, and any error."""

    state: str
    action: str
    source: str = ""
    tried: list[str] = field(default_factory=list)
    error: str = ""
    nbytes: int = 0
    """Bytes of the state's tensors here."""
    fatal: bool = False
    """The state is one without which training is wrong (``on_missing = "error"``)."""


@dataclass
class Report:
    """One recovery on one rank. ``step`` is the step that training was rolled back to; times are in milliseconds:
    ``milliseconds`` what the plugin took in each of its phases, ``phases`` how long each phase of the runtime was in all.

    ``cause``, ``ranks``, ``retries`` and ``phases`` are the runtime's to fill in: the kind of fault, the ranks that had it,
    how often training had gone back to this step before. Empty where it does not know.
    """

    number: int
    step: int = -1
    replayed: bool = False
    from_checkpoint: bool = False
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    unsafe: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What the runtime could not make good besides the states: a log line, an evaluation."""
    cause: str = ""
    ranks: list[int] = field(default_factory=list)
    retries: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """One line for each state that is not exact, each tracked tensor that is still unsafe, and what else is missing."""
        lines = [f"{o.state}: {o.error}" for o in self.outcomes.values() if o.error]
        return lines + [f"{path}: still unsafe after rollback" for path in self.unsafe] + self.missing

    @property
    def fatal(self) -> bool:
        """Whether training must not go on."""
        return any(outcome.fatal for outcome in self.outcomes.values())

    @property
    def exact(self) -> bool:
        """Whether every tracked state, and all that is logged, is what it is in a run without the fault."""
        return not self.failures

    @property
    def actions(self) -> dict[str, int]:
        """How many states were reset, dropped, restored, …"""
        return dict(sorted(Counter(outcome.action for outcome in self.outcomes.values()).items()))

    @property
    def nbytes(self) -> int:
        """Bytes of the states that were dealt with."""
        return sum(outcome.nbytes for outcome in self.outcomes.values())

    @property
    def total(self) -> float:
        """Milliseconds of the whole recovery, as far as they are known."""
        return sum((self.phases or self.milliseconds).values())

    def summary(self) -> str:
        """One line for a log."""
        parts = ", ".join(f"{count} {action}" for action, count in self.actions.items())
        times = " + ".join(f"{name} {ms:.1f}" for name, ms in (self.phases or self.milliseconds).items())
        where = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        why = f" after a {self.cause}{where}" if self.cause else ""
        state = "exact" if self.exact else f"NOT exact ({len(self.failures)} differences)"
        return (
            f"recovery {self.number}{why}: back at step {self.step}, {state}; states: {parts or 'none'} "
            f"({self.nbytes} bytes); {self.total:.1f} ms: {times}"
        )

    def as_dict(self) -> dict[str, Any]:
        """What is told of the recovery, as JSON has it."""
        return {
            "number": self.number,
            "step": self.step,
            "cause": self.cause,
            "ranks": self.ranks,
            "retries": self.retries,
            "exact": self.exact,
            "failures": self.failures,
            "log_line_replayed": self.replayed,
            "from_checkpoint": self.from_checkpoint,
            "states": self.actions,
            "bytes": self.nbytes,
            "milliseconds": self.total,
            "phases": self.phases,
            "plugin": self.milliseconds,
        }
