# SPDX-License-Identifier: Apache-2.0
"""The optimizer update as TFT sees it: from ``tft_start_updating_os()`` to ``tft_end_updating_os(step)``.

The adaptor's optimizers open the window after the gradients are unscaled and clipped and all ranks have met, immediately
before the first write. With ``--reuse-fp32-param`` there are further windows in the same step, around the conversion of
the parameters before and after the update; the copies are taken at the first one, when the parameters are the only thing
that is going to change. A step that an overflow skips has no window, and TFT does not count it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspeed_recovery.runtimes.mindio import layout


class UpdateWindow:
    """Whether this rank is inside its update, and which step its parameters hold. Written on the training thread, and on
    TFT's while the training thread is out of ``train()``."""

    def __init__(self) -> None:
        self.is_open = False
        self.opened_at: float | None = None
        """When the last window was opened, in seconds since the epoch."""
        self.done: int | None = None
        """The step that the parameters hold; None until the first update of this process has ended."""
        self._claimed: int | None = None

    def open(self) -> None:
        self.is_open, self.opened_at = True, time.time()

    def close(self, step: int) -> None:
        self.is_open, self.done = False, step
        if self._claimed is not None and step >= self._claimed:
            self._claimed = None

    def rolled_back(self, step: int, tft_step: int) -> None:
        """The parameters hold ``step`` now; TFT rolled back to ``tft_step``. Only a checkpoint is older than either what
        TFT names or what was done here, and TFT goes on believing in the later one."""
        believed = max(tft_step, self.done or 0)
        self.is_open, self.done = False, step
        if believed > step:
            self._claimed = believed

    def loses_a_step(self, tft_step: int, repaired: bool) -> bool:
        """Whether a rollback to ``tft_step`` would skip steps that this rank has not computed.

        After a checkpoint load TFT goes on believing in the later step of before, until every rank has ended an update
        again. A rank is at most one step behind another, and then it is repaired.
        """
        if self._claimed is None or self.done is None:
            return False
        return tft_step > self.done + (1 if repaired else 0)


def watch(decorator: ModuleType, before_open: Callable[[], None], window: UpdateWindow) -> Callable[[], None]:
    """Follow TFT's two functions wherever they are bound by name, and call ``before_open()`` before each window opens.
    Modules that are loaded later bind the watched ones. Returns the inverse. Training thread."""
    start, end = (getattr(decorator, name) for name in layout.WINDOW)

    @functools.wraps(start)
    def watched_start(*args: Any, **kwargs: Any) -> Any:
        before_open()
        result = start(*args, **kwargs)  # raises FORCE STOP, or waits, where another rank has failed already
        window.open()
        return result

    @functools.wraps(end)
    def watched_end(step: int, *args: Any, **kwargs: Any) -> Any:
        window.close(step)  # first: TFT counts the step as done, and may then hold the rank inside the call
        return end(step, *args, **kwargs)

    pairs = list(zip(layout.WINDOW, (start, end), (watched_start, watched_end)))
    for name, plain, watched in pairs:
        _rebind(name, plain, watched)

    def undo() -> None:
        for name, plain, watched in pairs:
            _rebind(name, watched, plain)

    return undo


def _rebind(name: str, old: Any, new: Any) -> None:
    for module in layout.holders(name, old):
        setattr(module, name, new)
