# SPDX-License-Identifier: Apache-2.0
"""Offline runs of Weights & Biases, and what lies in their files."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7


class Offline:
    """Offline runs in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, name: str) -> Any:
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True
        )
        return wandb.init(project="test", mode="offline", dir=str(self.folder), id=name, settings=settings)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a run's history, as they lie in its file."""
        from wandb.proto.wandb_internal_pb2 import Record

        deadline, records = time.monotonic() + 20, []
        while not any(record.WhichOneof("record_type") == "exit" for record in records):
            assert time.monotonic() < deadline, "the run's file is not complete"
            time.sleep(0.05)  # wandb's own process may write after finish()
            path = next(self.folder.glob(f"wandb/offline-run-*-{name}/run-*.wandb"))
            records = [Record.FromString(content) for content in _records(path.read_bytes())]
        history = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
        return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in items} for items in history]

    def points(self, name: str) -> list[dict[str, Any]]:
        """The rows without times."""
        return [{k: v for k, v in row.items() if k not in ("_timestamp", "_runtime")} for row in self.rows(name)]


def _records(data: bytes) -> Iterator[bytes]:
    """A log of blocks, in which a record may come in parts."""
    position, content = _HEADER, b""
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _HEADER + length
        content += data[position - length : position]
        if kind in (1, 4):  # whole, or the last part
            yield content
            content = b""
