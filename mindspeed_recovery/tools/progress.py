# SPDX-License-Identifier: Apache-2.0
"""A line on standard error for work that takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")

_QUIET_SECONDS = 1.0
_TERMINAL_SECONDS, _FILE_SECONDS = 0.1, 5.0


class Progress:
    """How far a long piece of work is. On a terminal one line is rewritten and wiped at the end; a file or pipe gets a
    line now and then. Nothing is written in the first second."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._next = time.monotonic() + _QUIET_SECONDS
        self._width = 0

    def each(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """The items; before each, perhaps a line ``what: n of total``."""
        for number, item in enumerate(items, 1):
            self._show(f"{what}: {number} of {total}")
            yield item

    def done(self) -> None:
        """Leave no trace on a terminal."""
        if self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()
            self._width = 0

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_TERMINAL_SECONDS if self._terminal else _FILE_SECONDS)
        if self._terminal:
            self._stream.write(f"\r{text:<{self._width}}")
            self._width = max(self._width, len(text))
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
