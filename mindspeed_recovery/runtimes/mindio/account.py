# SPDX-License-Identifier: Apache-2.0
"""What a recovery under TFT was about and how long it took, for people: one line for the job, and the log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspeed_recovery.core.report import Report
from mindspeed_recovery.runtimes.standalone import LogSink

logger = logging.getLogger("mindspeed_recovery")

_FAULTS = {"uce_error_": "memory", "retry_error_": "link"}
"""Which of TFT's flags stands for which fault of this rank; TFT clears them at the end of *clean*."""

Around = Callable[[Callable[[], Any]], Any]


class Account:
    """Of the recovery that is going on. TFT's thread."""

    def __init__(self, decorator: ModuleType, sink: Callable[[], LogSink | None]) -> None:
        self._decorator, self._sink = decorator, sink
        self._milliseconds: dict[str, float] = {}
        self._faults: list[str] = []
        self._steps: Counter[int] = Counter()
        self._report: Report | None = None

    def timed(self, phase: str, around: Around) -> Around:
        """``around``, a phase of a recovery, with its time taken. The end of *rollback* is that of the recovery."""

        def taken(original: Callable[[], Any]) -> Any:
            if phase == "stop":
                self._milliseconds, self._faults = {}, []
            elif phase == "clean":
                self._faults = [fault for flag, fault in _FAULTS.items() if getattr(self._decorator, flag, False)]
            began = time.perf_counter()
            try:
                return around(original)
            finally:
                self._milliseconds[phase] = (time.perf_counter() - began) * 1e3
                if phase == "rollback":
                    self._tell()

        return taken

    @property
    def note(self) -> str:
        """What this rank has to tell the others of the fault; empty if it had none."""
        return " ".join([str(getattr(self._decorator, "rank_", "")), *self._faults]) if self._faults else ""

    def close(self, report: Report, notes: list[str]) -> None:
        """The recovery is over but for its time. ``notes``: those of all ranks."""
        faults = {int(rank): kinds for rank, *kinds in (note.split() for note in notes)}
        report.cause = " and ".join(f"{kind} fault" for kind in sorted({k for kinds in faults.values() for k in kinds}))
        named = getattr(self._decorator.save_handler, "_error_ranks", None)  # what is known where no vote was taken
        report.ranks = sorted(faults) or (sorted(named) if isinstance(named, (list, tuple)) and named else [])
        report.retries = self._steps[report.step]
        self._steps[report.step] += 1
        self._report = report

    def _tell(self) -> None:
        report, self._report = self._report, None
        if report is None:
            return
        report.phases, self._milliseconds = self._milliseconds, {}
        logger.log(logging.DEBUG if getattr(self._decorator, "rank_", 0) else logging.INFO, "%s", report.summary())
        try:
            sink = self._sink()
            if sink is not None:
                sink.recovered(report)
        except Exception as error:
            logger.warning("the log does not tell of recovery %d: %s: %s", report.number, type(error).__name__, error)
