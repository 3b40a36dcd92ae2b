# SPDX-License-Identifier: Apache-2.0
"""TensorBoard through a recovery: a point reaches the file when its training step is settled, and only once.

The framework's own ``SummaryWriter`` stays what it is; only the object that queues its events for the file is wrapped,
so every ``add_*`` works as before. No point of a step that may still be rolled back is ever in the file, since no reader
takes one back reliably (``purge_step`` cuts the curves that are drawn over consumed samples).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any


class HeldEvents:
    """Stands between a ``SummaryWriter`` and its event file. A `LogSink` of a runtime; one thread at a time.

    Only the file that the writer has open now is held: ``add_scalars`` and ``add_hparams`` write files of their own, which
    go through as before, as does a file that the writer opens after ``close()``.
    """

    def __init__(self, writer: Any) -> None:
        """Hold the events of ``writer``, a ``torch.utils.tensorboard.SummaryWriter`` that is open."""
        self._file_writer = writer.file_writer
        self._events = self._file_writer.event_writer
        self._file_writer.event_writer = self
        self._closed = False
        self._step = 0
        self._settled = -1
        self._held: deque[tuple[int, Any]] = deque()
        # How often each (tag, step) was written, by training step: in this attempt at the step, and at most in one before.
        # Those of settled steps are forgotten: all of such a step is in the file.
        self._now: dict[int, Counter[tuple[str, int]]] = {}
        self._before: dict[int, Counter[tuple[str, int]]] = {}

    def uninstall(self) -> None:
        """Write what is held and give the writer its own event queue back."""
        if self._closed:
            return
        self._release(self._step)
        self._closed = True
        if self._file_writer.event_writer is self:
            self._file_writer.event_writer = self._events

    # ---- the runtime's side ----------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Events from now on belong to training step ``step``, of which this is a new attempt."""
        self._step = step
        self._end_attempt(step)

    def settle(self, step: int) -> None:
        """No recovery will go back before the end of ``step``: its events, and all before, go to the file."""
        if self._closed:
            return
        self._release(step)
        self._events.flush()
        self._settled = max(self._settled, step)
        for counts in (self._now, self._before):
            for old in [at for at in counts if at <= step]:
                del counts[old]

    def rollback(self, step: int) -> None:
        """Training goes back to the end of ``step``: events of later steps never were, and what is written again for
        ``step`` is written only where it was not written before."""
        self._held = deque((at, event) for at, event in self._held if at <= step)
        for at in list(self._now):
            self._end_attempt(at)
        self._before = {at: counts for at, counts in self._before.items() if at <= step}
        self._step = step

    # ---- the SummaryWriter's side ----------------------------------------------------------------------------------

    def add_event(self, event: Any) -> None:
        """Hold ``event`` unless an earlier attempt at this step has written all of it: the first write wins. Only a
        checkpoint is behind the last settled step, and what is computed again up to that is in the file."""
        if self._step <= self._settled:
            return
        keys = [(value.tag, event.step) for value in event.summary.value] if event.HasField("summary") else []
        now = self._now.setdefault(self._step, Counter())
        now.update(keys)
        before = self._before.get(self._step, Counter())
        if keys and all(now[key] <= before[key] for key in keys):
            return
        self._held.append((self._step, event))

    def flush(self) -> None:
        """Flush what is settled; what may still be rolled back stays here."""
        self._events.flush()

    def close(self) -> None:
        """Write everything: the run is over."""
        self.uninstall()
        self._events.close()

    def reopen(self) -> None:
        self._events.reopen()

    def get_logdir(self) -> str:
        return self._events.get_logdir()

    def _end_attempt(self, step: int) -> None:
        self._before[step] = self._before.get(step, Counter()) | self._now.pop(step, Counter())

    def _release(self, step: int) -> None:
        later: deque[tuple[int, Any]] = deque()
        while self._held:  # one by one: an error of the file loses no more than the event it came with
            at, event = self._held.popleft()
            if at <= step:
                self._events.add_event(event)
            else:
                later.append((at, event))
        self._held = later
