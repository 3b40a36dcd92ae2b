# SPDX-License-Identifier: Apache-2.0
"""The lines of training logs that matter, with the rank that wrote each. Streams: memory does not grow with the log.

A log of gigabytes has a few interesting places. Blocks are searched for fixed texts, at the speed of `bytes.find`, and only
from there on, as long as the reader asks for it, taken apart into lines.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 20
LONGEST_LINE = 1 << 13  # bytes of one line that are looked at

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")

# At most one blank goes with a prefix: the indentation behind it belongs to the traceback.
_PREFIX = re.compile(
    r"\[(?:rank|RANK|Rank|default|local_rank)?[ _]?(?P<torchrun>\d{1,7})\](?::[ ]?|[ ])"  # [rank1]: [default1]: [1]:
    r"|\[\d+,(?P<mpirun>\d{1,7})\](?:<\w+>)?:[ ]?"  # [1,3]<stderr>:
    r"|[ ]{0,6}(?P<srun>\d{1,7}):(?:[ ]|$)"  # 1:
    r"|[Rr]ank[ _]?(?P<word>\d{1,7})[:\]][ ]?"  # rank 1:
    r"|(?P<host>[a-z][a-z\d.-]{0,60}\d|\d{1,3}(?:\.\d{1,3}){3}):(?:[ ]|$)"  # worker-1:  10.0.0.1:
    r"|\((?P<actor>\w{1,60} (?:rank=\d+ )?pid=\d{1,9}[^)]{0,80})\)[ ]?"  # (TrainWorker pid=7, ip=10.0.0.1)
    r"|\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?[ ]?"  # a time
)
_MOST_PREFIXES = 4

_RANK_IN_PATH = (
    re.compile(r"rank[-_.]?(\d{1,7})", re.IGNORECASE),
    re.compile(r"(?:^|[/\\])(\d{1,7})[/\\]std(?:err|out)\.log"),  # torchrun --log-dir
    re.compile(r"worker[-_.]?(\d{1,7})", re.IGNORECASE),
)


@dataclass(frozen=True)
class Line:
    """``stream``: whose line it is, for putting together what one writer wrote; ``rank``: None where nothing says it."""

    number: int
    stream: str
    rank: int | None
    text: str


def rank_of_path(path: str) -> int | None:
    """The rank whose log a file is, by its name."""
    for pattern in _RANK_IN_PATH:
        matches = pattern.findall(path)
        if matches:
            return int(matches[-1])
    return None


def open_log(path: str) -> BinaryIO:
    """Open a log, gzipped if its name ends with ``.gz``. Raises OSError."""
    return gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb")  # type: ignore[return-value]


def read(stream: BinaryIO, rank: int | None, marks: tuple[bytes, ...], wanted: Callable[[], bool]) -> Iterator[Line]:
    """The lines that hold one of ``marks``, and all lines while ``wanted()``. ``rank``: of lines that name none.

    Bytes that are no UTF-8 are replaced. Of a line longer than `LONGEST_LINE`, and of one redrawn with carriage returns,
    the rest is left out. Raises OSError or EOFError where the stream does.
    """
    for number, raw in _raw_lines(stream, marks, wanted):
        yield parse(raw.decode("utf-8", "replace"), number, rank)


def parse(text: str, number: int = 0, rank: int | None = None) -> Line:
    """One line without colours and prefixes; ``rank`` where the line names none."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n")
    if "\r" in text:  # a progress bar; what stands last is what a terminal shows
        text = text.rsplit("\r", 1)[1]
    stream = ""
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(text)
        if match is None:
            break
        text = text[match.end() :]
        kind = match.lastgroup
        if kind in ("host", "actor"):
            stream += match[kind] + " "
        elif kind is not None:
            rank = int(match[kind])
    return Line(number, f"{stream}{'' if rank is None else rank}", rank, text)


def _raw_lines(stream: BinaryIO, marks: tuple[bytes, ...], wanted: Callable[[], bool]) -> Iterator[tuple[int, bytes]]:
    rest, number = b"", 1
    while True:
        data = stream.read(BLOCK)
        block = rest + data
        end = block.rfind(b"\n") + 1
        if not data or (not end and len(block) >= BLOCK):  # the last line, or one without an end
            end = len(block)
        rest = block[end:]
        search = _Search(block, end, marks)
        at = 0
        while at < end:
            if not wanted():
                hit = search.next(at)
                start = end if hit < 0 else max(block.rfind(b"\n", at, hit) + 1, at)
                number += block.count(b"\n", at, start)
                at = start
                if hit < 0:
                    break
            stop = block.find(b"\n", at, end)
            stop = end if stop < 0 else stop + 1
            yield number, block[at : min(stop, at + LONGEST_LINE)]
            number += block.endswith(b"\n", at, stop)  # the end of a block cuts a line that has none
            at = stop
        if not data:
            return


class _Search:
    """Where the next of several texts stands in a block; each part of it is searched once for each text."""

    def __init__(self, block: bytes, end: int, marks: tuple[bytes, ...]) -> None:
        self._block, self._end = block, end
        self._next = dict.fromkeys(marks, -1)
        self._gone: set[bytes] = set()

    def next(self, at: int) -> int:
        """The first position from ``at`` on, or -1. ``at`` never decreases."""
        for mark, position in self._next.items():
            if position < at and mark not in self._gone:
                position = self._next[mark] = self._block.find(mark, at, self._end)
                if position < 0:
                    self._gone.add(mark)
        return min((position for position in self._next.values() if position >= at), default=-1)
