# SPDX-License-Identifier: Apache-2.0
"""Find the instances of a class below named root objects, each with a path that is the same on every run and rank."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from mindspeed_recovery.core.container import is_quarantined
from mindspeed_recovery.core.values import key_text

_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    Tensor,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
)


def find(roots: Mapping[str, Any], classes: Iterable[type]) -> dict[type, list[tuple[str, Any]]]:
    """For each class, its instances (subclasses too) reachable from ``roots``, and from globals of the class's package.

    The walk is breadth-first over attributes, dicts, lists and tuples; it calls no code of the objects it meets, and passes
    over what is in quarantine. Cost is
    proportional to the size of the object graph, so it belongs at start-up and in a recovery, not in a step.
    """
    wanted = tuple(classes)
    found: dict[type, list[tuple[str, Any]]] = {cls: [] for cls in wanted}
    if wanted:
        packages = {cls.__module__.split(".", 1)[0] for cls in wanted}
        for path, value in _walk({**roots, **_globals(packages)}):
            if isinstance(value, wanted):
                for cls in wanted:
                    if isinstance(value, cls):
                        found[cls].append((path, value))
    return found


def _globals(packages: set[str]) -> dict[str, Any]:
    """Module globals of the packages that are instances of the packages' own classes (timers, trackers, …)."""
    result = {}
    for name, module in sorted(sys.modules.items()):
        if module is None or name.split(".", 1)[0] not in packages:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, (dict, list)) and key.startswith("__"):
                continue
            if isinstance(value, (dict, list)) or type(value).__module__.split(".", 1)[0] in packages:
                result[f"{name}:{key}"] = value
    return result


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    queue = deque((name, value) for name, value in roots.items())
    while queue:
        path, value = queue.popleft()
        if is_quarantined(value) or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        queue.extend((path + step, child) for step, child in _children(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for index, (key, item) in enumerate(list(value.items()) if isinstance(value, dict) else ()):
            if not isinstance(item, _LEAVES):
                yield key_text(key, index), item
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if not isinstance(item, _LEAVES):
                yield f"[{index}]", item
    else:
        namespace = getattr(value, "__dict__", None)
        if not isinstance(namespace, dict):
            return
        for key, item in list(namespace.items()):
            if isinstance(value, nn.Module) and key == "_modules":
                for name, module in list(item.items()):
                    yield f"[{name}]" if name.isdigit() else f".{name}", module
            elif not isinstance(item, _LEAVES):
                yield f".{key}", item
