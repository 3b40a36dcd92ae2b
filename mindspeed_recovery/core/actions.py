# SPDX-License-Identifier: Apache-2.0
"""What *reset* and *drop* do at one place. Both work on unsafe tensors and keep every container's identity."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from mindspeed_recovery.core import memory, values
from mindspeed_recovery.core.location import Location, Place
from mindspeed_recovery.core.policy import StateSpec
from mindspeed_recovery.errors import LocationError, StateError

_CLEARABLE = (dict, list, set, deque)


def reset(place: Place, spec: StateSpec) -> None:
    """Leave at ``place`` what the end of a step leaves there. No-op where nothing stands."""
    value = place.get()
    if value is None:
        return
    if spec.to == "zeros":
        if isinstance(value, (bool, int, float)):
            place.set(type(value)())
        for _, tensor in values.tensors(value):
            _zero(tensor)
    elif spec.to == "empty":
        _clear(place, value)
    elif spec.to == "none" and isinstance(value, _CLEARABLE) and not value:
        return  # as it was made: it holds nothing
    else:
        place.set(None if spec.to == "none" else spec.to)


def _zero(tensor: Tensor) -> None:
    """Make the tensor zeros, and its whole storage safe; a safe part of a larger storage leaves the rest alone."""
    if memory.nbytes(tensor) > tensor.numel() * tensor.element_size():
        try:
            tensor.detach().zero_()
            return
        except RuntimeError:  # unsafe: only the whole storage can be made safe
            pass
    memory.refresh_zeros(tensor)


def run_clear(function: Location) -> None:
    """Call upstream's own end-of-step clear, if its module is loaded."""
    place = function.place()
    if place is not None:
        place.get()()


def drop(place: Place, spec: StateSpec) -> None:
    """Forget the cache at ``place``; the framework makes it anew on its next use."""
    value = place.get()
    if value is None:
        return
    clear = cache_clear(value)
    if clear is not None:
        clear()
    elif isinstance(value, _CLEARABLE):
        value.clear()
    elif not callable(value):  # a function that has no cache (any more) holds nothing
        place.remove()


def cache_clear(function: Any) -> Any:
    """``cache_clear`` of a cached function, also below wrappers that others have put around it; else None."""
    while function is not None:
        clear = getattr(function, "cache_clear", None)
        if callable(clear):
            return clear
        function = getattr(function, "__wrapped__", None)
    return None


def _clear(place: Place, value: Any) -> None:
    if isinstance(value, _CLEARABLE):
        value.clear()
    elif hasattr(value, "queue") and hasattr(value, "mutex"):  # queue.Queue
        with value.mutex:
            value.queue.clear()
    else:
        raise StateError(f"{place.path}: to = 'empty' needs a container, found a {type(value).__name__}")


def check_function(function: Location) -> None:
    """Raise LocationError if the module of an upstream clear function is loaded but lacks it."""
    place = function.place()
    if place is not None and not callable(place.get()):
        raise LocationError(f"{function}: is not callable")
