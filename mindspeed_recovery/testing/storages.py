# SPDX-License-Identifier: Apache-2.0
"""Every live device storage of a process, found by the garbage collector and named so that another run finds it again.

What is there is asked of the collector alone, never of a list of known states: a storage that nobody has thought of is
listed like any other. Names come from a walk over what holds the storages.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mindspeed_recovery.core.reachable import attributes_of
from mindspeed_recovery.core.values import storage_key

PARAMETER, OPTIMIZER, BUFFER, STATE, HELD, TEMPORARY = "parameter", "optimizer", "buffer", "state", "held", "temporary"

_FOREIGN = frozenset({"torch", "numpy", "tensorboard", "google", "mindspeed_recovery"}) | sys.stdlib_module_names
_CACHE = type(functools.lru_cache(len))
_LEAVES = {str, bytes, int, float, bool, type(None), property, ModuleType, CodeType, BuiltinFunctionType}
_LEAVES |= {type(str.join), type(type.mro), type(int.real), type(type.__init__)}  # methods and members written in C


class Device(Protocol):
    """The device whose storages are looked for."""

    def device_tensors(self) -> list[Tensor]: ...


class Storage(NamedTuple):
    """One storage. ``name``: the path of a holder, or of a temporary one its form and number. ``kind``: of a state also its
    name, as in ``state router-expert-bias``; *held* is what a module global, or an object below the roots, holds besides."""

    name: str
    kind: str
    tensor: Tensor


def live_storages(device: Device, roots: Mapping[str, Any], states: Mapping[str, Iterable[Tensor]]) -> list[Storage]:
    """All storages of the device with at least a byte, sorted by name.

    ``roots``: model and optimizer by name. ``states``: the tensors of known states by name; they only say that a storage is
    to be shown as one of them. No operator is called on any tensor.
    """
    found = {storage_key(tensor): tensor for tensor in device.device_tensors()}
    paths, kinds = _paths_and_kinds({**roots, **_globals()}, set(found))
    kinds |= {storage_key(tensor): f"{STATE} {name}" for name, tensors in states.items() for tensor in tensors}
    numbers: Counter[str] = Counter()
    result = []
    for key, tensor in found.items():
        if not tensor.untyped_storage().nbytes():
            continue
        name = paths.get(key)
        if name is None:
            form = f"{TEMPORARY} {tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")
            name = f"{form} #{numbers[form]}"
            numbers[form] += 1
        result.append(Storage(name, kinds.get(key, HELD if key in paths else TEMPORARY), tensor))
    return sorted(result, key=lambda storage: storage.name)


def storage_named(device: Device, roots: Mapping[str, Any], name: str) -> Tensor | None:
    """A tensor of the storage that `live_storages` gives this name, if there is one now.

    Only what the name begins with is walked: a shortest path is found before any other of the same root, too.
    """
    if name.startswith(f"{TEMPORARY} "):
        return next((found.tensor for found in live_storages(device, roots, {}) if found.name == name), None)
    below = {path: value for path, value in {**roots, **_globals()}.items() if name.startswith(path)}
    found = {storage_key(tensor): tensor for tensor in device.device_tensors()}
    paths, _ = _paths_and_kinds(below, set(found))
    return next((found[key] for key, path in paths.items() if path == name), None)


def _paths_and_kinds(roots: Mapping[str, Any], wanted: set[int]) -> tuple[dict[int, str], dict[int, str]]:
    paths: dict[int, str] = {}
    kinds: dict[int, str] = {}
    for path, value in _walk(roots):
        if isinstance(value, Tensor):
            key = storage_key(value)
            if key in wanted:
                paths.setdefault(key, path)
                if isinstance(value, nn.Parameter):
                    kinds[key] = PARAMETER
        elif isinstance(value, torch.optim.Optimizer):
            for _, tensor in _walk({"": value.state}):
                if isinstance(tensor, Tensor):
                    kinds.setdefault(storage_key(tensor), OPTIMIZER)
        elif isinstance(value, nn.Module):
            for buffer in vars(value)["_buffers"].values():
                if buffer is not None:
                    kinds.setdefault(storage_key(buffer), BUFFER)
    return paths, kinds


def _globals() -> dict[str, Any]:
    """The globals of every module but those of libraries that keep no state of a training run."""
    return {
        name: vars(module)
        for name, module in sorted(sys.modules.items())
        if type(module) is ModuleType and name.split(".", 1)[0] not in _FOREIGN
    }


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Breadth first, so that a name is a shortest path; no code of the objects is called."""
    seen: set[int] = set()
    queue = deque(roots.items())
    while queue:
        path, value = queue.popleft()
        if id(value) not in seen:
            seen.add(id(value))
            yield path, value
            queue.extend(child for child in _children(path, value) if type(child[1]) not in _LEAVES)


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for number, (key, item) in enumerate(list(value.items())):
            yield f"{path}.{key}" if isinstance(key, str) else f"{path}[{number}]", item
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"{path}[{number}]", item) for number, item in enumerate(list(value)))
    elif isinstance(value, FunctionType):
        for kind, held in ("closure", value.__closure__), ("default", value.__defaults__):
            yield from ((f"{path}.<{kind}>[{number}]", item) for number, item in enumerate(held or ()))
        yield path, value.__kwdefaults__
        yield path, value.__dict__
    elif isinstance(value, CellType):
        yield from ((path, item) for item in gc.get_referents(value))
    elif isinstance(value, MethodType):
        yield f"{path}.__self__", value.__self__
        yield path, value.__func__
    elif isinstance(value, (staticmethod, classmethod)):
        yield path, value.__func__
    elif isinstance(value, _CACHE):
        yield from ((f"{path}.<cache>[{number}]", item) for number, item in enumerate(gc.get_referents(value)))
    elif isinstance(value, type):
        members = vars(value)
        if str(members.get("__module__")).split(".", 1)[0] not in _FOREIGN:
            yield from ((f"{path}.{name}", item) for name, item in list(members.items()))
    elif not type(value).__module__.startswith("mindspeed_recovery."):
        yield path, attributes_of(value)
