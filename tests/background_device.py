# SPDX-License-Identifier: Apache-2.0
"""A device whose copies to the host happen later than they are asked for, and which can stop to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class BackgroundDevice:
    """A device that only notes what it is to copy to the host, and does so when `run` is called or it is waited for."""

    def __init__(self) -> None:
        self.waits = 0
        self._enqueued: list[Callable[[], Any]] = []
        self._answers = True

    def to_host(self, source: torch.Tensor, host: torch.Tensor) -> None:
        value = source.clone()
        self._enqueued.append(lambda: host.copy_(value))

    def run(self, count: int | None = None) -> None:
        """Do the first ``count`` copies, or all."""
        count = len(self._enqueued) if count is None else count
        for copy in self._enqueued[:count]:
            copy()
        del self._enqueued[:count]

    def die(self) -> None:
        """What is still enqueued never happens, and no event answers any more."""
        self._enqueued.clear()
        self._answers = False

    def restart(self) -> None:
        self._answers = True

    def synchronize(self) -> None:
        """Wait until all has happened."""
        if not self._answers:
            raise RuntimeError("device lost")
        self.waits += 1
        self.run()

    def event(self) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                device.synchronize()

            def query(self) -> bool:
                raise AssertionError("nobody has to ask the device")

        return Event()
