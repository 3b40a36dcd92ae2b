# SPDX-License-Identifier: Apache-2.0
"""Python tracebacks out of the lines of one writer, whole or truncated, each of bounded size."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mindspeed_recovery.core.unsafe_note import UnsafeNote, parse
from mindspeed_recovery.tools.loglines import Line

HEADER = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "(?P<file>[^"]{1,1000})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,200}))?')
_ANCHORS = re.compile(r"\s*[~^]+\s*")
_ERROR = re.compile(r"(?P<type>(?:\w+\.)*[A-Za-z_]\w*)(?::(?:\s(?P<message>.*))?)?")
_ERROR_NAME = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Failed|Aborted|Fault|Iteration)$|[a-z][A-Z]"
)

_MOST_FRAMES = 100  # the innermost
_MOST_NOTES = 20
_LONGEST_MESSAGE = 2000
_MESSAGE_LINES = 30  # how far behind its first line a message may go on
_STRANGE_LINES = 200  # lines of the writer that belong to no traceback, after which one is taken to be cut off


@dataclass
class Frame:
    """One frame: the line of code and the marks below it as the traceback prints them, or empty."""

    file: str
    line: int
    function: str
    source: str = ""
    anchors: str = ""


@dataclass
class Traceback:
    """``error``: the exception's class; empty if the log has an error's text without a traceback. ``number``: the line of
    the log where it begins, ``end`` where its exception stands. ``shared``: lines of several ranks may be mixed in it."""

    rank: int | None
    number: int
    frames: deque[Frame] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))
    error: str = ""
    message: str = ""
    end: int = 0
    notes: list[UnsafeNote] = field(default_factory=list)
    shared: bool = False

    @property
    def last_line(self) -> str:
        """As Python prints it: class and message."""
        return f"{self.error}: {self.message}" if self.error and self.message else self.error or self.message


class Assembler:
    """Puts the tracebacks of one writer together. ``text_marks``: texts that are an error even without a traceback."""

    def __init__(self, text_marks: tuple[str, ...] = ()) -> None:
        self._marks = text_marks
        self._open: Traceback | None = None
        self._headers = 0
        self._last: Traceback | None = None
        self._strange = 0
        self._column = 0  # of the last frame's line; the code below it is indented further
        self._after_frame = False

    @property
    def is_open(self) -> bool:
        """Whether a traceback has begun and not ended, so that every line counts."""
        return self._open is not None

    def abandon(self) -> None:
        """The traceback that is open has been cut off."""
        self._open = None

    def finish(self) -> Iterator[Traceback]:
        """The log has ended."""
        self._open = None
        yield from self.settle()

    def settle(self) -> Iterator[Traceback]:
        """What is complete and was held for lines that could follow."""
        last, self._last = self._last, None
        if last is not None:
            yield last

    def feed(self, line: Line) -> Iterator[Traceback]:
        """Take one line; yields tracebacks for which no more lines can follow."""
        text = line.text
        frame = _FRAME.search(text)
        after_frame, self._after_frame = self._after_frame, frame is not None
        if frame is not None:
            if self._open is None:  # its beginning is not in the log
                yield from self._begin(line)
            self._column = frame.start()
            self._add_frame(frame, line.rank is None)
        elif HEADER in text:
            if self._open is not None and line.rank is None:  # two writers without prefixes
                self._headers += 1
                self._open.shared = True
            else:
                yield from self._begin(line)
        elif self._open is not None:
            yield from self._inside(self._open, line, after_frame and self._column == 0)
        else:
            yield from self._outside(line)

    def _begin(self, line: Line) -> Iterator[Traceback]:
        yield from self.settle()
        self._open = Traceback(line.rank, line.number)
        self._headers, self._strange = 1, 0

    def _add_frame(self, match: re.Match[str], several: bool) -> None:
        assert self._open is not None
        self._strange = 0
        frame = Frame(match["file"], int(match["line"]), (match["function"] or "").strip())
        recent = list(self._open.frames)[-self._headers :]
        place = (frame.file, frame.line, frame.function)
        if several and self._headers > 1 and any((f.file, f.line, f.function) == place for f in recent):
            return  # the other writer's
        self._open.frames.append(frame)

    def _inside(self, traceback: Traceback, line: Line, bare: bool) -> Iterator[Traceback]:
        text, frame = line.text, traceback.frames[-1] if traceback.frames else None
        indent = len(text) - len(text.lstrip())
        error = _ERROR.fullmatch(text)
        if error is not None and _is_error(error["type"]):
            self._end(traceback, error["type"], error["message"] or "", line.number)
            if self._headers > 1:
                yield from self._flush_shared()
            return
        if frame is not None and _ANCHORS.fullmatch(text):
            frame.anchors = frame.anchors or text
        elif frame is not None and not frame.source and text.strip() and (bare or indent > self._column):
            frame.source = text[:_LONGEST_MESSAGE]
        elif text.strip() and indent < 2:
            self._strange += 1
            if self._strange > _STRANGE_LINES:
                self._open = None

    def _end(self, traceback: Traceback, error: str, message: str, number: int) -> None:
        traceback.error, traceback.message, traceback.end = error, message[:_LONGEST_MESSAGE], number
        self._last, self._open = traceback, None

    def _flush_shared(self) -> Iterator[Traceback]:
        """One of the writers has ended; the frames are those of the others too."""
        ended = self._last
        assert ended is not None
        yield from self.settle()
        self._headers -= 1
        self._open = Traceback(ended.rank, ended.number, ended.frames.copy(), shared=True)

    def _outside(self, line: Line) -> Iterator[Traceback]:
        note = parse(line.text)
        last = self._last
        if note is not None:
            if last is not None and len(last.notes) < _MOST_NOTES:
                last.notes.append(note)
        elif any(mark in line.text for mark in self._marks):
            if last is not None and last.frames and line.number - last.end <= _MESSAGE_LINES:
                if not any(mark in last.message for mark in self._marks):
                    last.message = f"{last.message} {line.text.strip()}"[:_LONGEST_MESSAGE]
                return
            yield from self.settle()
            error = _ERROR.fullmatch(line.text.strip())
            named = error is not None and _is_error(error["type"])
            self._last = Traceback(line.rank, line.number, end=line.number)
            self._last.error = error["type"] if error is not None and named else ""
            message = (error["message"] or "") if error is not None and named else line.text.strip()
            self._last.message = message[:_LONGEST_MESSAGE]


def _is_error(name: str) -> bool:
    last = name.rsplit(".", 1)[-1]
    return last[:1].isupper() and (bool(_ERROR_NAME.search(last)) or "." in name)
