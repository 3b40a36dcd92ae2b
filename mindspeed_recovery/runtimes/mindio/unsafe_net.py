# SPDX-License-Identifier: Apache-2.0
"""The unsafe-data net: a retry where the recomputed step meets an unsafe tensor that a rollback can rebuild.

TFT does not know the error text of unsafe data: it dumps a last checkpoint and ends the job. Where it lets third parties
add to its fault table, the text is registered as a communication fault: stop, clean, rollback and retry, without repair.
That is right only for tensors of tracked states; for all others the answer stays ``OTHER``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from mindspeed_recovery.core import unsafe
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.core.values import storage_key
from mindspeed_recovery.errors import UNSAFE_DATA

logger = logging.getLogger("mindspeed_recovery")

PATTERN = UNSAFE_DATA
RETRY_WITHOUT_REPAIR = "RS_HCCL_FAILED"
OTHER = "OTHER"

_DEVICE_TIME_PATTERN = "HBM MULTI BIT ECC"


class UnsafeNet:
    """Answers for unsafe data on this rank. Called on the training thread, while the error is being handled.

    ``step``: the last step that is done; ``model``: the model chunks, to name their tensors; ``max_retries``: how often
    the step after one and the same step is tried again.
    """

    def __init__(
        self,
        decorator: ModuleType,
        session: Callable[[], Session | None],
        step: Callable[[], int],
        model: Callable[[], list[Any]],
        max_retries: int,
    ) -> None:
        self._decorator, self._session, self._step, self._model = decorator, session, step, model
        self._max_retries = max_retries
        self._retries: dict[int, int] = {}
        self.device_time_known = False
        """Whether the last fault came with the device's time of the error; taken back by who has used it."""

    def install(self) -> Callable[[], None]:
        """Enter the text into TFT's fault table if TFT has one that is open; returns the inverse."""
        undo_time = self._note_device_time()
        register = getattr(self._decorator, "tft_register_exception_handler", None)
        types, handlers = (getattr(self._decorator, name, None) for name in ("fault_types", "fault_handles"))
        if register is None or not isinstance(types, dict) or not isinstance(handlers, dict) or OTHER not in types:
            logger.info("this mindio_ttp takes no further fault texts: unsafe data still ends in a last checkpoint")
            return undo_time
        if PATTERN in handlers:
            logger.info("unsafe data has an entry in the fault table of MindIO TFT already; it stays")
            return undo_time
        register(PATTERN, RETRY_WITHOUT_REPAIR, self.answer)

        def undo() -> None:
            undo_time()
            if handlers.get(PATTERN) == self.answer:
                del handlers[PATTERN], types[PATTERN]

        return undo

    def answer(self, text: str) -> str:
        """The key of TFT's fault table for an error of this text. Never raises: a wrong answer ends the job."""
        try:
            return PATTERN if self._can_rebuild() else OTHER
        except Exception:
            logger.warning("could not look for the unsafe tensors", exc_info=True)
            return OTHER

    def _can_rebuild(self) -> bool:
        session, handler = self._session(), self._decorator.save_handler
        enabled = getattr(handler, "enable_retry", lambda: True)()
        if session is None or not enabled:
            return False
        states, others = self._unsafe(session, sys.exc_info()[2])
        step = self._step()
        if others or not states:
            named = "; ".join(others) or "a tensor that no frame of the error and no tracked state shows"
            logger.error(
                "unsafe data in the step after %d that nobody rebuilds: %s. If it is state of yours, declare it with "
                "mindspeed_recovery.track('module:NAME', policy=…) or in a catalogue file (--recovery-patches)",
                step,
                named,
            )
            return False
        self._retries = {step: self._retries.get(step, 0) + 1}  # of this step only: another one is progress
        if self._retries[step] > self._max_retries:
            logger.error(
                "unsafe data in %s, and the step after %d has been tried again %d times: giving up. Its declaration does "
                "not rebuild it; look at its policy and fields",
                "; ".join(states),
                step,
                self._max_retries,
            )
            return False
        logger.warning("unsafe data in %s: rolling back to step %d to rebuild it", "; ".join(states), step)
        return True

    def _unsafe(self, session: Session, traceback: TracebackType | None) -> tuple[list[str], list[str]]:
        """The unsafe tensors as text: those of tracked states, and those of nobody that the error's frames show."""
        states = unsafe.in_states(session.registry, session.memory)
        shown = unsafe.in_frames(traceback, session.memory, states, _model_names(self._model()))
        others = [f"{n.place}, {n.shape} {n.dtype}" for n in shown.values() if n.state is None]
        return [f"state '{n.state}' at {n.place}" for n in states.values()], others

    def _note_device_time(self) -> Callable[[], None]:
        handlers = getattr(self._decorator, "fault_handles", None)
        original = handlers.get(_DEVICE_TIME_PATTERN) if isinstance(handlers, dict) else None
        if not isinstance(handlers, dict) or original is None:
            return lambda: None

        def noting(text: str) -> Any:
            self.device_time_known = True
            return original(text)

        handlers[_DEVICE_TIME_PATTERN] = noting

        def undo() -> None:
            if handlers.get(_DEVICE_TIME_PATTERN) is noting:
                handlers[_DEVICE_TIME_PATTERN] = original

        return undo


def _model_names(chunks: list[Any]) -> dict[int, str]:
    """Names of the model's tensors by storage."""
    names: dict[int, str] = {}
    for chunk in chunks:
        module = getattr(chunk, "module", chunk)  # the wrapper for data parallelism hides buffers()
        for kind in ("named_parameters", "named_buffers"):
            for name, tensor in getattr(module, kind, list)():
                names.setdefault(storage_key(tensor), f"the model's {name}")
    return names
