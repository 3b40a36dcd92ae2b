# SPDX-License-Identifier: Apache-2.0
"""The rule by which a recovered run logs each point once, whatever the log is written to.

What is logged is held until the training step in which it was logged is *settled*: no recovery will go back before its end.
So no line of a step that may still be computed again is ever written, and nothing has to be taken back. When steps are
computed again that were settled before (a fallback to a checkpoint, a restarted process), the first write of a point wins,
and what the first time left out is filled in.

A sink of one's own subclasses `HeldLog`: it says how items are written, and calls `hold` for each.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from mindspeed_recovery.core.report import Report

logger = logging.getLogger("mindspeed_recovery")

T = TypeVar("T")
Point = tuple[str, int]
"""A point of a curve: tag and step."""

LIMIT = 100_000
"""How many items wait, at most, for a log that cannot be written; the oldest are given up first."""

_PATIENCE_SECONDS = 2.0


class WriteFailed(Exception):
    """Raised by `HeldLog.write`: only the first ``written`` items have arrived."""

    def __init__(self, written: int) -> None:
        super().__init__(f"{written} items arrived")
        self.written = written


@dataclass
class History:
    """What an earlier process has left in the log. ``last``: the last step of each tag whose steps only went forward."""

    last: dict[str, int] = field(default_factory=dict)
    recoveries: Counter[int] = field(default_factory=Counter)
    """How often a recovery to each step is in the log."""


@dataclass
class _Item(Generic[T]):
    step: int | None
    """The training step it was logged in; None if nothing has to be waited for."""
    content: T
    points: Sequence[Point]
    again: bool
    """It was logged while a step was computed again that had been settled before."""


class Outage:
    """Whether logs cannot be written: one WARNING when it begins, however many logs there are, and one INFO at its end."""

    def __init__(self) -> None:
        self._failing: set[int] = set()
        self._lost = 0

    def begin(self, log: object, error: BaseException) -> None:
        if not self._failing:
            logger.warning("the log cannot be written, training goes on and what is logged waits: %s", error)
        self._failing.add(id(log))

    def lose(self, count: int) -> None:
        """That many items are given up."""
        self._lost += count

    def end(self, log: object, *, given_up: bool = False) -> None:
        if id(log) not in self._failing:
            return
        self._failing.discard(id(log))
        if self._failing:
            return
        lost = f"; {self._lost} lines are lost" if self._lost else ""
        if given_up:
            logger.warning("the log could not be written to its end%s", lost)
        else:
            logger.info("the log can be written again%s", lost)
        self._lost = 0


class HeldLog(ABC, Generic[T]):
    """Holds items of type T; a `LogSink` of a runtime.

    Any thread. Nothing here raises because the log cannot be written: that is one warning, what is due waits (at most
    `LIMIT` items) and is tried again with each step. In a child of ``fork`` it neither holds nor writes anything: what is
    held belongs to the parent.

    ``history``: reads what an earlier process left; called once, on a thread of its own, since files may be large. Until it
    has returned nothing is written. None where there was no earlier process. ``outage``: shared by logs that fail together.
    """

    def __init__(self, history: Callable[[], History] | None = None, outage: Outage | None = None) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._step = 0
        self._settled = -1
        self._items: deque[_Item[T]] = deque()
        # How often each point was logged, by training step: in this attempt at the step, and at most in one before. Steps
        # that are settled need no counts, only the last step of each tag.
        self._now: dict[int, Counter[Point]] = {}
        self._before: dict[int, Counter[Point]] = {}
        self._last: dict[str, int] = {}
        self._outage = outage or Outage()
        self._told = False
        self._earlier = History()
        self._reader: threading.Thread | None = None
        if history is not None:
            self._reader = threading.Thread(target=self._read, args=(history,), name="log-history", daemon=True)
            self._reader.start()
        self._patience = _PATIENCE_SECONDS

    # ---- what a sink says of itself ------------------------------------------------------------------------------------

    @abstractmethod
    def write(self, contents: Sequence[T]) -> None:
        """Write what is settled, in this order, so that it survives the death of the process.

        May raise anything: none of it has arrived then, or for `WriteFailed` only the first ones; the rest comes again.
        """

    def without(self, content: T, tags: set[str]) -> T:
        """``content`` without its points of these tags, which are written already. Only called if others are left."""
        return content

    # ---- the sink's side -----------------------------------------------------------------------------------------------

    def hold(self, content: T, points: Iterable[Point] = (), *, at: int | None = None) -> None:
        """Write ``content`` when the training step it is logged in is settled, if it has points that are not there yet.

        Without points it is never taken for a repetition. ``at``: another training step than the present one.
        """
        if self._is_child():
            return
        with self._lock:
            step, points = self._step if at is None else at, list(points)
            known: set[str] = set()
            if points and step > self._settled:
                now, before = self._now.setdefault(step, Counter()), self._before.get(step, Counter())
                now.update(points)
                known = {point[0] for point in points if now[point] <= before[point]}
            item = self._trim(_Item(step, content, points, step <= self._settled), known)
            if item is not None:
                self._items.append(item)

    def pass_on(self, content: T) -> None:
        """Write ``content`` now; later only if the log cannot be written now."""
        if self._is_child():
            return
        with self._lock:
            self._items.append(_Item(None, content, (), False))
            self._drain(self._settled)

    def drain(self, *, everything: bool = False) -> None:
        """Write what is settled, or with ``everything`` all that is held, because nothing will be computed again."""
        if self._is_child():
            return
        with self._lock:
            if everything:
                self._patience = float("inf")
                self._settled = max(self._settled, self._step)
            self._drain(None if everything else self._settled)
            if everything and self._items:
                self._outage.lose(len(self._items))
                self._outage.end(self, given_up=True)
                self._items.clear()

    def earlier(self) -> History:
        """What an earlier process left; waits a little for it to be read."""
        self._is_read()
        return self._earlier

    # ---- the runtime's side --------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """What is logged from now on belongs to training step ``step``, of which this is a new attempt."""
        if self._is_child():
            return
        with self._lock:
            self._step = step
            self._end_attempt(step)

    def settle(self, step: int) -> None:
        """No recovery will go back before the end of ``step``, unless to a checkpoint: its lines, and all before, are
        written."""
        if self._is_child():
            return
        with self._lock:
            self._settled = max(self._settled, step)
            for counts in (self._now, self._before):
                for old in [at for at in counts if at <= step]:
                    del counts[old]
            self._drain(self._settled)

    def rollback(self, step: int) -> None:
        """Training goes back to the end of ``step``: lines of later steps never were, and what is logged again for
        ``step`` is written only where it was not logged before."""
        if self._is_child():
            return
        with self._lock:
            self._items = deque(item for item in self._items if item.step is None or item.step <= step)
            for at in list(self._now):
                self._end_attempt(at)
            self._before = {at: counts for at, counts in self._before.items() if at <= step}
            self._step = step

    def recovered(self, report: Report) -> None:
        """A recovery to ``report.step`` is complete."""

    def follow(self, other: HeldLog[T]) -> None:
        """Take over the position of ``other``, a log of the same run."""
        with self._lock:
            self._step, self._settled = other._step, other._settled

    # ---- parts ---------------------------------------------------------------------------------------------------------

    def _is_child(self) -> bool:
        """Before the lock is taken: a thread of the parent may have held it at the fork."""
        return os.getpid() != self._process

    def _end_attempt(self, step: int) -> None:
        if step > self._settled:
            self._before[step] = self._before.get(step, Counter()) | self._now.pop(step, Counter())

    def _trim(self, item: _Item[T], known: set[str]) -> _Item[T] | None:
        if not known:
            return item
        left = [point for point in item.points if point[0] not in known]
        if not left:
            return None
        return _Item(item.step, self.without(item.content, known), left, item.again)

    def _drain(self, step: int | None) -> None:
        """Write what was logged up to the end of training step ``step``; None: everything."""
        if not self._is_read():
            return
        due, later = [], deque[_Item[T]]()
        for item in self._items:
            if step is not None and item.step is not None and item.step > step:
                later.append(item)
                continue
            fresh = self._trim(item, self._written(item))
            if fresh is not None:
                due.append(fresh)
                self._last.update({tag: max(at, self._last.get(tag, at)) for tag, at in fresh.points})
        self._items = later
        failed = self._write(due) if due else []
        if len(failed) > LIMIT:
            self._outage.lose(len(failed) - LIMIT)
            failed = failed[-LIMIT:]
        # Their points are in `_last` already: they are not looked at again.
        self._items.extendleft(_Item(None, item.content, (), False) for item in reversed(failed))

    def _written(self, item: _Item[T]) -> set[str]:
        """The tags of the points that are in the log from an earlier process, or from the first time of this step."""
        tags = set()
        for tag, step in item.points:
            last = self._earlier.last.get(tag)
            if last is not None and step <= last:
                tags.add(tag)
                if not self._told:
                    self._told = True
                    logger.info(
                        "'%s' is in the log up to step %d already: what is there stays, and the log goes on where it ended. "
                        "A new run needs a folder of its own",
                        tag,
                        last,
                    )
                continue
            self._earlier.last.pop(tag, None)  # it has caught up: from here on it is as any other
            if item.again and step <= self._last.get(tag, step - 1):
                tags.add(tag)
        return tags

    def _write(self, items: list[_Item[T]]) -> list[_Item[T]]:
        """Returns what could not be written."""
        try:
            self.write([item.content for item in items])
        except Exception as error:
            self._outage.begin(self, error.__cause__ or error)
            return items[error.written if isinstance(error, WriteFailed) else 0 :]
        self._outage.end(self)
        return []

    def _read(self, history: Callable[[], History]) -> None:
        try:
            self._earlier = history()
        except Exception as error:
            logger.warning(
                "what was logged before this process started cannot be read, points may be written twice: %s: %s",
                type(error).__name__,
                error,
            )

    def _is_read(self) -> bool:
        """Whether what an earlier process left is known. Waits for it, but not for long in all."""
        if self._reader is not None:
            began = time.monotonic()
            self._reader.join(None if self._patience == float("inf") else max(self._patience, 0))
            self._patience -= time.monotonic() - began
            if self._reader.is_alive():
                return False
            self._reader = None
        return True
