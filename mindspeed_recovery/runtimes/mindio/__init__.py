# SPDX-License-Identifier: Apache-2.0
"""The runtime of production: recoveries driven by MindIO TFT (``mindio_ttp``).

TFT stops, cleans, repairs and rolls back; this runtime adds the phases of a `Session` to its callbacks. Nothing is
registered with TFT and nothing of it is imported: what is loaded is found by looking, and followed when it is loaded
later. Documented upstream under "MindIO TFT" in the MindCluster documentation (``tft_register_*_handler``).
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from mindspeed_recovery.errors import FORCE_STOP
from mindspeed_recovery.runtimes.mindio.layout import (
    DECORATOR,
    PACKAGE,
    PHASES,
    MindioLayoutError,
    MindioUnsupported,
    check_elastic,
    find_adaptor,
    find_decorator,
)

if TYPE_CHECKING:
    from mindspeed_recovery.core.session import Session
    from mindspeed_recovery.runtimes.mindio.recovery import Duties
    from mindspeed_recovery.runtimes.standalone import LogSink

__all__ = ["MindioLayoutError", "MindioUnsupported", "install", "install_when_loaded", "is_available", "is_fault"]

logger = logging.getLogger("mindspeed_recovery")

_installed: Callable[[], None] | None = None


def is_available() -> bool:
    """Whether ``mindio_ttp`` is loaded or could be. Imports nothing."""
    return PACKAGE in sys.modules or importlib.util.find_spec(PACKAGE) is not None


def is_fault(error: BaseException) -> bool:
    """Whether TFT would begin a recovery for this error, or is stopping the training thread with it. For `Session`."""
    text = str(error)
    handlers = getattr(sys.modules.get(DECORATOR), "fault_handles", None) or {}
    return text.startswith(FORCE_STOP) or any(pattern in text for pattern in handlers)


def install(
    session: Callable[[], Session | None],
    *,
    sink: Callable[[], LogSink | None] = lambda: None,
    duties: Callable[[], Duties | None] = lambda: None,
    max_retries: int = 3,
    timeout: float = 20.0,
    copy_before_update: bool = True,
) -> Callable[[], None]:
    """Let TFT drive the session that ``session()`` returns; while it returns None, recoveries are as without the plugin.

    ``sink()``: where log lines go, told of every rollback. ``duties()``: see `recovery.Duties`. ``max_retries``: how often
    the unsafe-data net has one step tried again. ``timeout``: seconds to wait for the other ranks' vote in a rollback; must
    stay below TFT's limit for one callback. ``copy_before_update``: whether the copies before the update are taken here;
    False where the framework's own hook takes them.

    Before or after the adaptor registers its callbacks. Returns the inverse; a second call changes nothing and returns
    the first one's. Any thread. Raises MindioLayoutError if mindio_ttp is not loaded or not one that we know, and
    MindioUnsupported if elastic training is on; what shows only later is one ERROR in the log, and recoveries then are as
    without the plugin.
    """
    global _installed
    if _installed is not None:
        logger.warning("the recoveries of MindIO TFT drive the plugin already; the second installation changes nothing")
        return _installed
    decorator = find_decorator()
    if decorator is None:
        raise MindioLayoutError(f"{DECORATOR} is not loaded; use install_when_loaded() to wait for it")
    check_elastic(decorator, find_adaptor())
    from mindspeed_recovery.runtimes.mindio.chain import chain  # these need torch
    from mindspeed_recovery.runtimes.mindio.recovery import Recovery
    from mindspeed_recovery.runtimes.mindio.window import watch

    recovery = Recovery(
        decorator,
        session,
        sink,
        duties,
        max_retries=max_retries,
        timeout=timeout,
        copy_before_update=copy_before_update,
    )
    around = {phase: recovery.account.timed(phase, getattr(recovery, phase)) for phase in PHASES}
    undos = [chain(decorator.save_handler, f"execute_{phase}", around[phase]) for phase in PHASES]
    undos += [watch(decorator, recovery.before_window, recovery.window), recovery.net.install()]

    def undo() -> None:
        global _installed
        while undos:
            undos.pop()()
        _installed = None

    _installed = undo
    return undo


def install_when_loaded(
    session: Callable[[], Session | None],
    *,
    sink: Callable[[], LogSink | None] = lambda: None,
    duties: Callable[[], Duties | None] = lambda: None,
    max_retries: int = 3,
    timeout: float = 20.0,
    copy_before_update: bool = True,
) -> Callable[[], None]:
    """`install` now or as soon as TFT is loaded. Returns the inverse. A refusal is one ERROR in the log, never an error of
    the import."""
    import wrapt

    undo: Callable[[], None] | None = None
    wanted = True

    def loaded(module: object) -> None:
        nonlocal undo
        if not wanted:
            return
        try:
            undo = install(
                session,
                sink=sink,
                duties=duties,
                max_retries=max_retries,
                timeout=timeout,
                copy_before_update=copy_before_update,
            )
        except (MindioLayoutError, MindioUnsupported) as error:
            logger.error("%s", error)

    def inverse() -> None:
        nonlocal wanted
        wanted = False
        if undo is not None:
            undo()

    wrapt.register_post_import_hook(loaded, DECORATOR)
    return inverse
