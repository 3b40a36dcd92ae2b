# SPDX-License-Identifier: Apache-2.0
"""An unsafe tensor, as the one line of text that goes onto an exception and into a log. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "unsafe tensor: "
_LONGEST = 300

_NOTE = re.compile(
    re.escape(PREFIX)
    + r"(?:state '(?P<state>[^']*)' at |not tracked: )(?P<place>.*?), shape (?P<shape>\([\d, ]*\)), (?P<dtype>[\w.]+)"
    r"(?:, seen at (?P<file>.*):(?P<line>\d+))?"
)


@dataclass(frozen=True)
class UnsafeNote:
    """``state``: its name, None for a tensor that no tracked state holds. ``place``: where the tensor is, for people.
    ``shape``, ``dtype``: the tensor's, as text. ``file``, ``line``: of the frame that shows it, if one does."""

    state: str | None
    place: str
    shape: str
    dtype: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        owner = f"state '{self.state}' at " if self.state else "not tracked: "
        seen = f", seen at {self.file}:{self.line}" if self.file else ""
        place = " ".join(self.place.split())[:_LONGEST]
        return f"{PREFIX}{owner}{place}, shape {self.shape}, {self.dtype}{seen}"


def parse(text: str) -> UnsafeNote | None:
    """The note that stands somewhere in a line of a log, or None."""
    match = _NOTE.search(text)
    if match is None:
        return None
    line = match["line"] or ""
    return UnsafeNote(
        match["state"], match["place"], match["shape"], match["dtype"], match["file"] or "", int(line[:9] or 0)
    )
