# SPDX-License-Identifier: Apache-2.0
"""The sinks of a job: those of the framework's own writers, and those of the user."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from mindspeed_recovery.core.report import Report

logger = logging.getLogger("mindspeed_recovery")


class Sink(Protocol):
    """What a runtime tells a log, and how it is taken back. `HeldLog` has the first four."""

    def begin(self, step: int) -> None: ...
    def settle(self, step: int) -> None: ...
    def rollback(self, step: int) -> None: ...
    def recovered(self, report: Report) -> None: ...
    def uninstall(self) -> None: ...


_makers: list[Callable[[], Sink | None]] = []


def register(make: Callable[[], Sink | None]) -> Callable[[], None]:
    """Let ``make()`` add a sink to each job that begins from now on in this process; it answers None on a rank that does not
    log. Returns the inverse."""
    _makers.append(make)
    return lambda: _makers.remove(make) if make in _makers else None


class Sinks:
    """All sinks of a job as one. An error of one of them is a WARNING, and it is left alone from then on: a log never ends
    training."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def begin(self, step: int) -> None:
        self._each(lambda sink: sink.begin(step))

    def settle(self, step: int) -> None:
        self._each(lambda sink: sink.settle(step))

    def rollback(self, step: int) -> None:
        self._each(lambda sink: sink.rollback(step))

    def recovered(self, report: Report) -> None:
        self._each(lambda sink: sink.recovered(report))

    def uninstall(self) -> None:
        self._each(lambda sink: sink.uninstall())
        self._sinks = []

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                logger.warning(
                    "the log of %s is not kept right through recoveries any more: %s: %s",
                    type(sink).__name__,
                    type(error).__name__,
                    error,
                )
                _let_go(sink)


def _let_go(sink: Sink) -> None:
    try:
        sink.uninstall()
    except Exception as error:
        logger.debug("%s: %s", type(sink).__name__, error)


def find(tensorboard: Any, wandb: Any) -> Sinks | None:
    """The sinks of a job with these writers of the framework's (either may be None); None if there are none on this rank."""
    from mindspeed_recovery.logs.tensorboard import HeldEvents
    from mindspeed_recovery.logs.wandb import HeldRun

    makers: list[Callable[[], Sink | None]] = [*_makers]
    if tensorboard is not None:
        makers.append(lambda: HeldEvents(tensorboard))
    if wandb is not None:
        makers.append(lambda: HeldRun(wandb))
    sinks = []
    for make in makers:
        try:
            sink = make()
        except Exception as error:
            logger.warning("a log cannot be kept right through recoveries: %s: %s", type(error).__name__, error)
            continue
        if sink is not None:
            sinks.append(sink)
    return Sinks(sinks) if sinks else None
