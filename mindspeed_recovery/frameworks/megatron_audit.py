# SPDX-License-Identifier: Apache-2.0
"""``--recovery-audit {off,warn,error}`` in Megatron's stock loop: once, when two steps are over, what would nobody restore?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_recovery import audit
from mindspeed_recovery.errors import RecoveryError

if TYPE_CHECKING:
    from mindspeed_recovery.core.reachable import Untracked

logger = logging.getLogger("mindspeed_recovery")

MOST_LINES = 10
"""So many findings are in the warning or error; all are at DEBUG."""

_STEPS = 2
"""The second step meets what the first has made."""

_REMEDY = (
    "After a fault nobody makes them good. Declare each of them in a file for --recovery-patches or with "
    'mindspeed_recovery.track(), with policy "ignored" and the reason where nothing need be done; or switch the audit off '
    "with --recovery-audit off"
)


class LiveAudit:
    """The audit of one rank, which talks to no other: ranks hold different parts of the model, so each tells its own.
    Training thread."""

    def __init__(self, mode: str, owners: Callable[[], Mapping[str, Any]]) -> None:
        """``mode``: off, warn or error; ``owners()``: what has tensors of its own besides the session's roots."""
        self._mode, self._owners = mode, owners
        self._steps_left = 0 if mode == "off" else _STEPS

    def after_step(self, step: int) -> None:
        """``train_step()`` of ``step`` has returned; its log line, which empties trackers, is to come. Raises
        RecoveryError in mode ``error`` if there are findings; it leaves ``train()``, and the runtime ends the job on every
        rank as after any error that is no fault of the device."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        if self._steps_left:
            return
        try:
            found = audit.live(owners=self._owners())
        except Exception as error:  # a bug of ours must not end training
            logger.warning("the audit of this process failed, training goes on: %s: %s", type(error).__name__, error)
            return
        logger.debug("audit after step %d: %d untracked device tensors", step, len(found))
        for one in found:
            logger.debug("untracked: %s", _line(one))
        if not found:
            return
        text = told(found, step)
        if self._mode == "error":
            raise RecoveryError(text)
        logger.warning("%s", text)


def told(found: list[Untracked], step: int) -> str:
    """What is said of findings: a line for each of the first, and the remedy."""
    many = "1 device tensor belongs" if len(found) == 1 else f"{len(found)} device tensors belong"
    lines = [f"after step {step}, {many} to no model, optimizer, data loader or tracked state:"]
    lines += [f"  {_line(one)}" for one in found[:MOST_LINES]]
    if len(found) > MOST_LINES:
        lines.append(
            f"  and {len(found) - MOST_LINES} more (all at log level DEBUG, or mindspeed_recovery.audit.live())"
        )
    return "\n".join([*lines, _REMEDY])


def _line(one: Untracked) -> str:
    place = "" if one.location == one.path else f"; location {one.location}"
    return f"{one.path}: shape {one.shape}, {one.dtype}, {one.nbytes} bytes on {one.device}{place}"
