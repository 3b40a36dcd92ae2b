# SPDX-License-Identifier: Apache-2.0
"""Event files as they lie on the disk: a sequence of records, of which the last may be torn.

A record is its length (8 bytes, little endian), the length's checksum (4), the serialized ``Event``, its checksum (4). Files
are streamed; checksums of contents are left to those who show them. Needs TensorBoard only where an event is parsed.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mindspeed_recovery.core.report import MARKER, TAGS
from mindspeed_recovery.logs.held import History

logger = logging.getLogger("mindspeed_recovery")

LARGE_BYTES = 2**23
"""Files above this are read by another process: a thread would take turns with training for a minute."""

_HEADER = struct.Struct("<Q4x")
_CHECKSUM_BYTES = 4


def files(folder: Path | str) -> list[Path]:
    """The event files of one run, which lie directly in its folder, oldest first. None for a folder that is not there."""
    return sorted(path for path in Path(folder).glob("*tfevents*") if path.is_file())


def records(path: Path | str, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """The whole records of a file from byte ``start`` on: the byte after each, and its content. Ends at a torn one."""
    size, position = os.path.getsize(path), start
    with open(path, "rb") as file:
        file.seek(start)
        while True:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return
            (length,) = _HEADER.unpack(header)
            end = position + _HEADER.size + length + _CHECKSUM_BYTES
            if end > size:
                return
            content = file.read(length + _CHECKSUM_BYTES)
            if end - position > _HEADER.size + len(content):
                return
            position = end
            yield end, content[:length]


def torn_bytes(path: Path | str) -> int:
    """How many bytes at the end of a file are of a record that is not whole; readers leave them out."""
    size, position = os.path.getsize(path), 0
    with open(path, "rb") as file:
        while position + _HEADER.size <= size:
            file.seek(position)
            (length,) = _HEADER.unpack(file.read(_HEADER.size))
            end = position + _HEADER.size + length + _CHECKSUM_BYTES
            if end > size:
                break
            position = end
    return size - position


def history(paths: Sequence[Path | str]) -> History:
    """What an earlier process has logged to these files. Tags whose steps went back within one file (a counter that begins
    anew, say) are left out: of those the last step says nothing about the others."""
    if sum(os.path.getsize(path) for path in paths) > LARGE_BYTES:
        try:
            return _read_elsewhere(paths)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            logger.debug("no other process can read what was logged: %s", error)
    return _read(paths)


def _read(paths: Iterable[Path | str]) -> History:
    from tensorboard.compat.proto.event_pb2 import Event

    parse = Event.FromString
    found = History()
    no_order: set[str] = set()
    for path in paths:
        last: dict[str, int] = {}
        for _, content in records(path):
            event = parse(content)
            step = event.step
            for value in event.summary.value:
                tag = value.tag
                if tag.startswith(TAGS):
                    found.recoveries[step] += tag.endswith(MARKER)
                elif step > last.get(tag, -1):
                    last[tag] = step
                else:
                    no_order.add(tag)
        for tag, step in last.items():
            found.last[tag] = max(step, found.last.get(tag, step))
    for tag in no_order:
        found.last.pop(tag, None)
    return found


def _read_elsewhere(paths: Sequence[Path | str]) -> History:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", __name__, *map(str, paths)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=True
    )
    last, recoveries = json.loads(done.stdout)
    return History(last, Counter({int(step): count for step, count in recoveries.items()}))


if __name__ == "__main__":
    _found = _read(sys.argv[1:])
    json.dump([_found.last, _found.recoveries], sys.stdout)
