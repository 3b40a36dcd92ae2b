# SPDX-License-Identifier: Apache-2.0
"""What a recovery did, state by state."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What became of one state: ``action`` taken, from which ``source``, what was tried before, and any error."""

    state: str
    action: str
    source: str = ""
    tried: list[str] = field(default_factory=list)
    error: str = ""
    fatal: bool = False
    """The state is one without which training is wrong (``on_missing = "error"``)."""


@dataclass
class Report:
    """One recovery on one rank. ``step`` is the step that training was rolled back to; times are in milliseconds."""

    number: int
    step: int = -1
    replayed: bool = False
    from_checkpoint: bool = False
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    unsafe: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What the runtime could not make good besides the states: a log line, an evaluation."""

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

    def count(self, action: str) -> int:
        return sum(outcome.action == action for outcome in self.outcomes.values())

    def summary(self) -> str:
        """One line for a log."""
        actions = {outcome.action for outcome in self.outcomes.values()}
        parts = ", ".join(f"{self.count(action)} {action}" for action in sorted(actions))
        times = " + ".join(f"{name} {ms:.1f}" for name, ms in self.milliseconds.items())
        state = "exact" if self.exact else f"NOT exact ({len(self.failures)} differences)"
        return (
            f"recovery {self.number}: rolled back to step {self.step}, {state}; states: {parts or 'none'}; ms: {times}"
        )
