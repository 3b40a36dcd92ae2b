# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases through a recovery: a row of the history is sent when its training step is settled, and only once.

The steps of a run only go forward, and a row that has been sent cannot be taken back or added to. So a row is sent whole,
with the time at which it was logged, and nothing is sent for a step below one that the run has already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mindspeed_recovery.core.report import MARKER, TAGS, Report
from mindspeed_recovery.logs.held import HeldLog

logger = logging.getLogger("mindspeed_recovery")

_TIME = "_timestamp"


class Row(NamedTuple):
    """One call of ``log()``. ``step``: None where wandb counts by itself."""

    data: dict[str, Any]
    step: int | None
    commit: bool | None


class HeldRun(HeldLog[Row]):
    """Holds what is logged to a run of wandb. A `LogSink` of a runtime; any thread.

    ``wandb``: the module, as frameworks keep it for their writer, or the run itself. What is logged without a step is held
    in its order too, and is known by the training step it was logged in.
    """

    def __init__(self, wandb: Any) -> None:
        """Raises ValueError if no run is open."""
        run = getattr(wandb, "run", wandb)
        if run is None or not hasattr(run, "log"):
            raise ValueError("wandb has no run that is open: call wandb.init() first")
        super().__init__()
        self._module = wandb if wandb is not run else None
        self._run, self._log = run, run.log
        self._next = int(getattr(run, "starting_step", 0) or 0)
        """The lowest step that the run still takes. Above 0 for one that is resumed."""
        self._news: dict[str, Any] = {}
        self._ending = False
        run.log = self._hold_row
        if self._module is not None:
            self._module.log = self._hold_row

    def uninstall(self) -> None:
        """Send what is held and give the run its own ``log`` back. Idempotent."""
        self._ending = True
        self.drain(everything=True)
        if vars(self._run).get("log") == self._hold_row:
            del self._run.log
        if self._module is not None and self._module.log == self._hold_row:
            self._module.log = self._log

    def recovered(self, report: Report) -> None:
        """What the recovery did goes with the next row, since that of its step has been sent."""
        numbers = {MARKER: float(report.exact), "step": report.step, "bytes": report.nbytes, "ms/total": report.total}
        numbers |= {f"ms/{phase}": ms for phase, ms in report.phases.items()}
        numbers |= {f"states/{action}": count for action, count in report.actions.items()}
        self._news |= {TAGS + name: number for name, number in numbers.items()}

    def write(self, contents: Sequence[Row]) -> None:
        rows = _merge(contents)
        for row in rows:
            try:
                self._send(row, stays_open=self._ending and row is rows[-1])
            except Exception as error:  # the row's own fault: wandb does not raise where the disk or the net fails
                logger.warning("a row of wandb is left out: %s: %s", type(error).__name__, error)

    def without(self, content: Row, tags: set[str]) -> Row:
        return content._replace(data={name: value for name, value in content.data.items() if name not in tags})

    def _hold_row(self, data: Any, step: int | None = None, commit: bool | None = None, **more: Any) -> None:
        """In place of ``log()``."""
        if more or not _is_row(data) or self._is_child():
            self._log(data, step, commit, **more)  # which says what is wrong with it
            return
        at = self._step if step is None else int(step)
        values = {name: _on_the_host(value) for name, value in data.items()}
        self.hold(
            Row({_TIME: time.time(), **values}, None if step is None else at, commit), [(name, at) for name in data]
        )

    def _send(self, row: Row, stays_open: bool) -> None:
        if row.step is None:
            self._log(row.data, commit=row.commit)
            return
        if row.step < self._next:
            logger.debug("wandb has step %d already; left out: %s", row.step, ", ".join(row.data))
            return
        news, self._news = self._news, {}
        # A row that is not committed is lost with the process. After the last one the framework goes on by itself, and may
        # add to it.
        self._log({**row.data, **news}, step=row.step, commit=None if stays_open else True)
        self._next = row.step + (not stays_open)


def _is_row(data: Any) -> bool:
    return isinstance(data, Mapping) and all(isinstance(name, str) for name in data)


def _on_the_host(value: Any) -> Any:
    """A tensor as it is now: until it is sent its memory may be written again, or fail."""
    if not hasattr(value, "detach"):
        return value
    return value.item() if value.numel() == 1 else value.detach().cpu().clone()


def _merge(rows: Sequence[Row]) -> list[Row]:
    """Neighbours of one step are one row. The first value of a name, and the first time, stand."""
    merged: list[Row] = []
    for row in rows:
        last = merged[-1] if merged else None
        if last is not None and row.step is not None and row.step == last.step:
            merged[-1] = last._replace(data={**row.data, **last.data})
        else:
            merged.append(row)
    return merged
