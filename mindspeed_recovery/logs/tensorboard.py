# SPDX-License-Identifier: Apache-2.0
"""TensorBoard through a recovery: a point reaches the file when its training step is settled, and only once.

The framework's own ``SummaryWriter`` stays what it is; only the objects that queue its events for the files are wrapped, so
every ``add_*`` works as before. No point of a step that may still be rolled back is ever in a file, since no reader takes
one back reliably (``purge_step`` cuts the curves that are drawn over consumed samples).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mindspeed_recovery.core.report import MARKER, TAGS, Report
from mindspeed_recovery.logs import event_files
from mindspeed_recovery.logs.held import HeldLog, Outage, WriteFailed

logger = logging.getLogger("mindspeed_recovery")

JSON_OPENS, JSON_CLOSES = "<!-- ", " -->"
"""Around the recovery's data in its text: a comment, which TensorBoard does not show."""

_ENOUGH_BYTES = 2**16


class HeldEvents:
    """Holds the events of a ``SummaryWriter``. A `LogSink` of a runtime; any thread.

    All files of the writer are held: its own, those of ``add_scalars``, and those that it opens after ``close()``. Events
    without a step (graphs, layouts, hyperparameters) pass through at once; ``add_hparams`` writes its metrics to a run of
    their own, which is not held.
    """

    def __init__(self, writer: Any) -> None:
        """Hold the events of ``writer``, a ``torch.utils.tensorboard.SummaryWriter`` that is open."""
        self._writer = writer
        self._open = writer._get_file_writer
        self._step, self._settled = 0, -1
        self._files: list[_HeldFile] = []
        self._outage = Outage()
        self._main = self._hold(self._open())
        writer._get_file_writer = self._get_file_writer
        self._get_file_writer()

    def uninstall(self) -> None:
        """Write what is held and give the writer its own event queues back. Idempotent."""
        vars(self._writer).pop("_get_file_writer", None)
        if isinstance(self._writer.all_writers, _Files):
            self._writer.all_writers = dict(self._writer.all_writers)
        while self._files:
            self._files.pop().uninstall()

    # ---- the runtime's side ----------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """See `HeldLog.begin`."""
        self._step = step
        for file in self._files:
            file.begin(step)

    def settle(self, step: int) -> None:
        """See `HeldLog.settle`."""
        self._settled = max(self._settled, step)
        for file in self._files:
            file.settle(step)

    def rollback(self, step: int) -> None:
        """See `HeldLog.rollback`."""
        self._step = step
        for file in self._files:
            file.rollback(step)

    def recovered(self, report: Report) -> None:
        """Write what the recovery did, at its step and below `TAGS`: a marker, times, states, bytes, and a text."""
        from torch.utils.tensorboard.summary import scalar, text

        # A step that is gone back to once more has its points already, each of them once.
        before = self._main.recoveries(report.step)
        tags = TAGS + (f"retry-{before}/" if before else "")
        numbers = {MARKER: float(report.exact), "bytes": report.nbytes, "ms/total": report.total}
        numbers |= {f"ms/{phase}": ms for phase, ms in report.phases.items()}
        numbers |= {f"ms/plugin/{phase}": ms for phase, ms in report.milliseconds.items()}
        numbers |= {f"states/{action}": count for action, count in report.actions.items()}
        summaries = [scalar(tags + name, number) for name, number in numbers.items()]
        for summary in [*summaries, text(f"{tags}report", markdown(report))]:
            self._main.tell(summary, report.step)

    # ---- the SummaryWriter's side ----------------------------------------------------------------------------------

    def _get_file_writer(self) -> Any:
        """In place of the writer's own: whatever file it has open, or opens now, is held."""
        file_writer = self._open()
        if not isinstance(self._writer.all_writers, _Files):
            self._writer.all_writers = _Files(self, self._writer.all_writers)
        if not isinstance(file_writer.event_writer, _HeldFile):
            self._main = self._hold(file_writer)
        return file_writer

    def _hold(self, file_writer: Any) -> _HeldFile:
        if isinstance(file_writer.event_writer, _HeldFile):
            return file_writer.event_writer
        file = _HeldFile(file_writer, self._writer, self._outage)
        file.begin(self._step)
        if self._settled >= 0:
            file.settle(self._settled)
        self._files = [other for other in self._files if not other.closed] + [file]
        return file


class _Files(dict[str, Any]):
    """The writer's files by folder: each one that is added is held. ``add_scalars`` opens one for each of its curves."""

    def __init__(self, events: HeldEvents, files: dict[str, Any]) -> None:
        super().__init__(files)
        self._events = events
        for file_writer in files.values():
            events._hold(file_writer)

    def __setitem__(self, folder: str, file_writer: Any) -> None:
        self._events._hold(file_writer)
        super().__setitem__(folder, file_writer)


class _HeldFile(HeldLog[Any]):
    """Stands between a ``FileWriter`` of torch and TensorBoard's ``EventFileWriter``, whose methods it has."""

    def __init__(self, file_writer: Any, writer: Any, outage: Outage) -> None:
        self._file_writer = file_writer
        self._events = file_writer.event_writer
        self._options = (writer.max_queue, writer.flush_secs, writer.filename_suffix)
        self._broken = self.closed = False
        self._recoveries: dict[int, int] = {}
        earlier = [path for path in event_files.files(self.get_logdir()) if str(path) != self._path()]
        super().__init__(functools.partial(event_files.history, earlier) if earlier else None, outage)
        self._add_event = file_writer.add_event
        file_writer.add_event = self._add_event_with_step
        file_writer.event_writer = self

    def uninstall(self) -> None:
        if self.closed:
            return
        self.drain(everything=True)
        self.closed = True
        vars(self._file_writer).pop("add_event", None)
        if self._file_writer.event_writer is self:
            self._file_writer.event_writer = self._events

    def recoveries(self, step: int) -> int:
        """How many recoveries to ``step`` this file tells of; the next one is counted."""
        count = self._recoveries.get(step, 0)
        self._recoveries[step] = count + 1
        return count + self.earlier().recoveries[step]

    def tell(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.hold(Event(summary=summary, step=step, wall_time=time.time()), at=step)

    # ---- as an EventFileWriter -----------------------------------------------------------------------------------------

    def add_event(self, event: Any) -> None:
        """Hold ``event`` unless all of it is written already."""
        points = [(value.tag, event.step) for value in event.summary.value] if event.HasField("summary") else []
        self.hold(event, points)

    def _add_event_with_step(self, event: Any, step: Any = None, walltime: float | None = None) -> None:
        """``FileWriter.add_event``: on the disk an event without a step looks like one of step 0, here it does not."""
        if step is None and not event.step:
            event.wall_time = time.time() if walltime is None else walltime
            self.pass_on(event)
        else:
            self._add_event(event, step, walltime)

    def flush(self) -> None:
        """Flush what is settled; what may still be rolled back stays here."""
        self.drain()

    def close(self) -> None:
        """Write everything: the run is over."""
        if self._is_child():
            return
        self.uninstall()
        with suppress(OSError):  # which has been told
            self._events.close()

    def reopen(self) -> None:
        self._events.reopen()

    def get_logdir(self) -> str:
        return str(self._events.get_logdir())

    # ---- as a HeldLog --------------------------------------------------------------------------------------------------

    def write(self, contents: Sequence[Any]) -> None:
        if self._broken:
            self._replace()
        path = self._path()
        start = os.path.getsize(path) if path else 0
        try:
            for event in contents:
                self._events.add_event(event)
            self._events.flush()
        except Exception as error:
            self._broken = True
            raise WriteFailed(self._arrived(path, start)) from error

    def without(self, content: Any, tags: set[str]) -> Any:
        rest = type(content)()
        rest.CopyFrom(content)
        del rest.summary.value[:]
        rest.summary.value.extend(value for value in content.summary.value if value.tag not in tags)
        return rest

    def _path(self) -> str | None:
        """The file that is open, if it lies on a disk and not behind a URL."""
        path = getattr(self._events, "_file_name", None)
        return path if path is not None and os.path.isfile(path) else None

    def _arrived(self, path: str | None, start: int) -> int:
        """How many events have reached the file beyond ``start``. What the error tore is cut off: nothing is lost by that,
        and a reader would stop there."""
        with suppress(Exception):
            self._events.flush()  # the error need not be that of the queue's thread
        if path is None:
            return 0
        ends = []
        try:
            ends = [end for end, _ in event_files.records(path, start)]
            os.truncate(path, ends[-1] if ends else start)
        except OSError as error:
            logger.debug("%s: %s", path, error)
        return len(ends)

    def _replace(self) -> None:
        """TensorBoard's queue does not come back after an error: open a new file, once there is room for it. Raises
        OSError until then."""
        with tempfile.TemporaryFile(dir=self.get_logdir()) as file:  # an empty event file at each attempt would stay
            file.write(bytes(_ENOUGH_BYTES))
            file.flush()
        old, self._events = self._events, type(self._events)(self.get_logdir(), *self._options)
        self._broken = False
        with suppress(Exception):
            old.close()


def markdown(report: Report) -> str:
    """A recovery for people, as a table, and for programs, as JSON in a comment."""
    phases = ", ".join(f"{name} {ms:.1f}" for name, ms in report.phases.items())
    plugin = ", ".join(f"{name} {ms:.1f}" for name, ms in report.milliseconds.items())
    line = "written again" if report.replayed else "was complete"
    rows = {
        "cause": report.cause or "not known",
        "ranks": ", ".join(map(str, report.ranks)) or "not known",
        "back at step": f"{report.step}{', from a checkpoint' if report.from_checkpoint else ''}; its log line {line}",
        "states": ", ".join(f"{count} {action}" for action, count in report.actions.items()) or "none",
        "bytes": f"{report.nbytes:,}",
        "ms": f"{report.total:.1f} ({phases or 'phases not known'})",
        "of that the plugin": f"{sum(report.milliseconds.values()):.1f} ({plugin})",
        "retries": str(report.retries),
        "exact": "yes" if report.exact else "**no**",
    }
    table = ["| recovery | " + str(report.number) + " |", "|---|---|"]
    table += [f"| {name} | {value} |" for name, value in rows.items()]
    table += ["", *(f"- not exact: {failure}" for failure in report.failures)]
    data = json.dumps(report.as_dict()).replace(">", "\\u003e")
    return "\n".join([*table, "", JSON_OPENS + data + JSON_CLOSES])


def from_markdown(text: str) -> dict[str, Any] | None:
    """`Report.as_dict()` of the recovery that ``text`` tells of; None for another text."""
    _, opens, rest = text.partition(JSON_OPENS)
    data, closes, _ = rest.partition(JSON_CLOSES)
    if not (opens and closes):
        return None
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "step" in found else None
