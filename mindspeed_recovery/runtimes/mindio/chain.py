# SPDX-License-Identifier: Apache-2.0
"""Around one of TFT's callbacks, without registering anything: each kind has one slot, and the last writer wins.

The *instance* methods of TFT's handler are replaced by ones that call what stood there. TFT looks them up at each call,
so it does not matter whether the adaptor has registered its callbacks before or does so later.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("mindspeed_recovery")

OK = 0
FAILED = 1
NOTHING_TO_REBUILD = 2

Around = Callable[[Callable[[], Any]], Any]


def chain(handler: Any, method: str, around: Around) -> Callable[[], None]:
    """Run ``around(original)`` in place of ``handler.method``; returns the inverse, which is idempotent.

    Whatever leaves ``around`` becomes `FAILED`: TFT turns an Exception that it does not catch, a SystemExit or a result
    of None into the abort of the process. Called on TFT's thread.
    """
    before = vars(handler).get(method)
    original = getattr(handler, method)
    active = True

    @functools.wraps(original)
    def chained(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, *args, **kwargs)
        if not active:
            return call()
        try:
            return around(call)
        except BaseException as error:
            logger.error("%s: %s: %s", method, type(error).__name__, error, exc_info=True)
            return FAILED

    def undo() -> None:
        nonlocal active
        active = False  # somebody may hold the wrapper, or have put their own around it
        if vars(handler).get(method) is chained:
            if before is None:
                delattr(handler, method)
            else:
                setattr(handler, method, before)

    setattr(handler, method, chained)
    return undo


def code(result: Any, method: str) -> int:
    """The result of a callback as the integer that TFT needs; anything else is a failure."""
    if isinstance(result, int):
        return int(result)
    logger.error("%s answered %r where MindIO TFT needs an integer; taken for a failure", method, result)
    return FAILED
