# SPDX-License-Identifier: Apache-2.0
"""TensorBoard through a recovery: a point reaches the file when its training step is settled, and only once.

The framework's own ``SummaryWriter`` stays what it is; only the object that queues its events for the file is wrapped,
so every ``add_*`` works as before. No point of a step that may still be rolled back is ever in the file, since no reader
takes one back reliably (``purge_step`` cuts the curves that are drawn over consumed samples).
"""

from __future__ import annotations

from typing import Any


class HeldEvents:
    """Stands between a ``SummaryWriter`` and its event file. A `LogSink` of a runtime; one thread at a time."""

    def __init__(self, writer: Any) -> None:
        """Hold the events of ``writer``, a ``torch.utils.tensorboard.SummaryWriter`` that is open."""
        self._file_writer = writer.file_writer
        self._events = self._file_writer.event_writer
        self._file_writer.event_writer = self
        self._step = 0
        self._held: list[tuple[int, Any]] = []
        # (tag, step) pairs by training step. A rollback never goes back behind the last settled step, so older ones
        # cannot come again and are forgotten.
        self._said: dict[int, set[tuple[str, int]]] = {}

    def uninstall(self) -> None:
        """Write what is held and give the writer its own event queue back."""
        self._release(self._step)
        if self._file_writer.event_writer is self:
            self._file_writer.event_writer = self._events

    # ---- the runtime's side ----------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Events from now on belong to training step ``step``."""
        self._step = step

    def settle(self, step: int) -> None:
        """No recovery will go back before the end of ``step``: its events, and all before, go to the file."""
        self._release(step)
        self._events.flush()
        self._said = {at: keys for at, keys in self._said.items() if at >= step}

    def rollback(self, step: int) -> None:
        """Training goes back to the end of ``step``: events of later steps never were."""
        self._held = [(at, event) for at, event in self._held if at <= step]
        self._said = {at: keys for at, keys in self._said.items() if at <= step}
        self._step = step

    # ---- the SummaryWriter's side ----------------------------------------------------------------------------------

    def add_event(self, event: Any) -> None:
        """Hold ``event`` unless all it says has been said: the first write of a (tag, step) wins."""
        keys = {(value.tag, event.step) for value in event.summary.value} if event.HasField("summary") else set()
        if keys and all(any(key in said for said in self._said.values()) for key in keys):
            return
        self._said.setdefault(self._step, set()).update(keys)
        self._held.append((self._step, event))

    def flush(self) -> None:
        """Flush what is settled; what may still be rolled back stays here."""
        self._events.flush()

    def close(self) -> None:
        """Write everything: the run is over."""
        self._release(self._step)
        self._events.close()

    def reopen(self) -> None:
        self._events.reopen()

    def get_logdir(self) -> str:
        return self._events.get_logdir()

    def _release(self, step: int) -> None:
        held, self._held = self._held, []
        for at, event in held:
            if at <= step:
                self._events.add_event(event)
            else:
                self._held.append((at, event))
