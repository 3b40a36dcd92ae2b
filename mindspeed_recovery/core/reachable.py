# SPDX-License-Identifier: Apache-2.0
"""Every device tensor that this process can reach from its modules and that nobody has claimed, with the path to each.

The walk goes where Python's garbage collector goes (``gc.get_referents``): into module globals, class attributes, closures,
defaults, bound methods, and the insides of C objects such as the cache of an ``lru_cache``. So it calls no code of what it
meets: no ``__getattr__``, ``__iter__``, ``__eq__`` or ``__repr__``, and no lazy module is loaded. Only the few paths that
are reported are put into words.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor

from mindspeed_recovery.core.memory import nbytes
from mindspeed_recovery.core.registry import TrackedState
from mindspeed_recovery.core.values import storage_key
from mindspeed_recovery.errors import LocationError, QuarantineError


@dataclass(frozen=True)
class Untracked:
    """A device tensor of nobody. Holds text and numbers only, so it keeps nothing alive.

    ``path``: where it is in the process, ``pkg.module:NAME['key'][0].attribute``. Besides attributes and items a path has
    ``.<closure>.name`` and ``.<default>.name`` of a function, ``.<cache>[i]`` of an ``lru_cache``, and ``.<referent>[i]``
    inside other objects that are not Python's; ``[i]`` of a dict is its i-th item where the key is not text or a number.
    ``location``: the part of the path that a declaration can name. ``nbytes``: of the whole storage.
    """

    path: str
    location: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: str


def untracked(
    is_device: Callable[[Tensor], bool],
    owners: Iterable[Any] = (),
    states: Iterable[TrackedState] = (),
    passed_over: Iterable[Any] = (),
) -> list[Untracked]:
    """The device tensors that are reachable from modules, but not from ``owners`` or ``states``; sorted by path.

    ``is_device``: which tensors are on the device. ``owners``: objects whose tensors somebody else restores: model,
    optimizer, data loaders; all that they reach through attributes and items is theirs, what a hook on them reaches is not.
    ``states``: states that are tracked or deliberately ignored; one in quarantine is passed over. ``passed_over``: objects
    whose insides are nobody's state.

    Tensors are told apart by storage, the unit in which memory is lost and restored: a view of a parameter is the
    parameter's wherever it stands, and of several views of one storage that nobody owns the nearest to its module is
    reported. Tensors that only C++ holds, as those saved for a backward pass, cannot be seen; what a stack frame or a
    traceback holds is no state. Cost is one visit of each object of the process, about a second with Megatron loaded.
    Changes nothing, and enqueues nothing on the device. Any thread; the objects must not be freed meanwhile by another.
    """
    states = list(states)
    # Neither a tensor subclass nor a mode may intercept what is asked of a tensor.
    with torch._C.DisableTorchFunction():
        hidden = {id(one) for one in passed_over}
        graph = _Graph([module for module in list(sys.modules.values()) if module is not None], hidden)
        hidden |= {id(_MODULE_DICT(module)) for module in graph.roots if _is(type(module), ModuleType)}
        owned = _Graph(owners, hidden, stop=(_NAMESPACE, _FUNCTION))
        tracked = _Graph(_values(states, graph), hidden, stop=(_NAMESPACE,))
        taken = {storage_key(tensor) for part in (owned, tracked) for _, tensor in part.tensors()}
        found = []
        for index, tensor in graph.tensors():
            key = storage_key(tensor)
            if key in taken or not nbytes(tensor) or not is_device(tensor):
                continue
            taken.add(key)
            path, location = _describe(graph.chain(index))
            shape, dtype, device = tuple(_SHAPE(tensor)), str(_DTYPE(tensor)), str(_DEVICE(tensor))
            found.append(Untracked(path, location, shape, dtype, nbytes(tensor), device))
        return sorted(found, key=lambda one: one.path)


def _values(states: list[TrackedState], graph: _Graph) -> list[Any]:
    """The values of states: those at a location, and those on each instance that the process reaches."""
    values: list[Any] = []
    for state in states:
        spec = state.spec
        try:
            if spec.on == "instances":
                owner = spec.location.owner_class(optional=True)
                holders = [*graph.instances(owner)] if owner is not None else []
                state = TrackedState(spec, [(str(spec.location), holder) for holder in holders])
            values += [place.get() for place in state.places()]
        except (QuarantineError, LocationError):
            continue
    return values


# ---- the walk ------------------------------------------------------------------------------------------------------------

_LEAF, _INNER, _NAMESPACE, _FUNCTION, _TENSOR = range(5)
_FUNCTIONS = (FunctionType, MethodType, BuiltinMethodType, functools.partial)
_LEAVES = (
    FrameType,  # what runs, or has failed
    TracebackType,
    CodeType,
    # These lead to the class that they were found in.
    WrapperDescriptorType,
    MethodDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
)
_HAS_REFERENTS = 1 << 14  # Py_TPFLAGS_HAVE_GC

# A metaclass, or a class that lies about itself, may have code behind any of these names.
_FLAGS = type.__dict__["__flags__"].__get__
_MRO = type.__dict__["__mro__"].__get__
_MODULE_DICT = vars(ModuleType)["__dict__"].__get__
_SHAPE, _DTYPE, _DEVICE, _GRAD = (getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "grad"))
_IS_LEAF, _RETAINS_GRAD = (getattr(Tensor, name).__get__ for name in ("is_leaf", "retains_grad"))


class _Graph:
    """The objects that some roots reach, each once, breadth-first.

    ``hidden``: addresses of objects that are not entered. ``stop``: nor are these kinds of object, unless they are roots.
    Through a module, a class or the globals of a function everything is reachable; through a hook's closure or its bound
    method most.
    """

    def __init__(self, roots: Iterable[Any], hidden: set[int], stop: tuple[int, ...] = ()) -> None:
        self.roots = list({id(root): root for root in roots}.values())
        self._objects: list[Any] = [*self.roots]  # holds all of them, so that no address is used twice
        self._parents = [-1] * len(self._objects)
        self._kinds: dict[int, int] = {}  # by address of the type: a metaclass may have a hash of its own
        self._types: list[type] = []
        self._tensors = [i for i, root in enumerate(self._objects) if self._kind(type(root)) == _TENSOR]
        self._walk(hidden | {id(root) for root in self.roots}, (_LEAF, *stop))

    def _walk(self, seen: set[int], stop: tuple[int, ...]) -> None:
        objects, parents, kinds = self._objects, self._parents, self._kinds
        for index, value in enumerate(objects):  # which grows
            if _NAMESPACE in stop and type(value) is FunctionType:
                seen.add(id(value.__globals__))
            children = gc.get_referents(value)
            if kinds[id(type(value))] == _TENSOR:
                children += _gradient(value)
            for child in children:
                kind = kinds.get(id(type(child)))
                if kind is None:
                    kind = self._kind(type(child))
                if kind in stop or id(child) in seen:
                    continue
                if kind == _TENSOR:
                    self._tensors.append(len(objects))
                seen.add(id(child))
                objects.append(child)
                parents.append(index)

    def _kind(self, cls: type) -> int:
        kind = self._kinds.get(id(cls))
        if kind is None:
            kind = self._kinds[id(cls)] = _kind(cls)
            self._types.append(cls)
        return kind

    def tensors(self) -> Iterator[tuple[int, Tensor]]:
        return ((index, self._objects[index]) for index in self._tensors)

    def chain(self, index: int) -> list[Any]:
        """The objects on the way from a root to one that was found."""
        chain = []
        while index >= 0:
            chain.append(self._objects[index])
            index = self._parents[index]
        return chain[::-1]

    def instances(self, cls: type) -> Iterator[Any]:
        """Those of subclasses too."""
        types = {id(one) for one in self._types if _is(one, cls)}
        return (value for value in self._objects if id(type(value)) in types)

    def __len__(self) -> int:
        return len(self._objects)


def _is(cls: type, base: type) -> bool:
    return any(one is base for one in _MRO(cls))


def _kind(cls: type) -> int:
    if not _FLAGS(cls) & _HAS_REFERENTS or any(cls is leaf for leaf in _LEAVES):
        return _LEAF
    if _is(cls, Tensor):
        return _TENSOR
    if any(cls is function for function in _FUNCTIONS):
        return _FUNCTION
    return _NAMESPACE if _is(cls, type) or _is(cls, ModuleType) else _INNER


def _gradient(tensor: Tensor) -> list[Tensor]:
    """The gradient, which C++ holds. torch warns of asking a tensor that cannot have one."""
    gradient = _GRAD(tensor) if _IS_LEAF(tensor) or _RETAINS_GRAD(tensor) else None
    return [] if gradient is None else [gradient]


# ---- the words -----------------------------------------------------------------------------------------------------------


def _describe(chain: list[Any]) -> tuple[str, str]:
    """Path and location of the last object of a chain of referents."""
    start, first = _start(chain)
    steps = [text for text in _steps(chain[first:]) if text]
    location = start
    for step in steps:
        if not (step[0] == "." and step[1:].isidentifier()):
            break
        location += _joined(location, step)
    path = start
    for step in steps:
        path += _joined(path, step)
    return path, location


def _joined(path: str, step: str) -> str:
    return step.removeprefix(".") if path.endswith(":") else step


def _start(chain: list[Any]) -> tuple[str, int]:
    """Where the path begins: at the last class or function that is found by its own name, else at the module."""
    for index in range(len(chain) - 1, 0, -1):
        name = _own_name(chain[index])
        if name is not None:
            return name, index
    if _is(type(chain[0]), ModuleType):
        name = _MODULE_DICT(chain[0]).get("__name__")
        if type(name) is str and sys.modules.get(name) is chain[0]:
            return f"{name}:", 0
    return next((f"{name}:" for name, module in list(sys.modules.items()) if module is chain[0]), "?:"), 0


def _own_name(value: Any) -> str | None:
    """``module:name`` of a class or function, if that leads to it."""
    if _is(type(value), type):
        module, name = type.__dict__["__module__"].__get__(value), type.__dict__["__qualname__"].__get__(value)
    elif type(value) is FunctionType or type(value) is functools._lru_cache_wrapper:
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    else:
        return None
    if type(module) is not str or type(name) is not str:
        return None
    here: Any = sys.modules.get(module)
    for part in name.split("."):
        here = (attributes_of(here) or {}).get(part)
    return f"{module}:{name}" if here is value else None


def _steps(chain: list[Any]) -> Iterator[str]:
    index = 0
    while index < len(chain) - 1:
        text, used = _step(chain[index], chain[index + 1 :])
        yield text
        index += used


def _step(holder: Any, rest: list[Any]) -> tuple[str, int]:
    """The text that leads from ``holder`` on, and over how many of the objects ``rest``."""
    child, kind = rest[0], type(holder)
    if kind is FunctionType:
        step = _into_function(holder, rest)
        if step is not None:
            return step
    if any(kind is wrapper for wrapper in _TRANSPARENT):
        return "", 1
    if _is(kind, functools._lru_cache_wrapper):
        step = _into_cache(holder, rest)
        if step is not None:
            return step
    attributes = attributes_of(holder)
    if attributes is not None and len(rest) > 1 and child is attributes:
        return _attribute(attributes, rest[1]), 2
    if _is(kind, type) and len(rest) > 1 and type(child) is dict:  # the dict behind the proxy
        text = _attribute(child, rest[1])
        if text:
            return text, 2
    for text in (
        _attribute(attributes or {}, child),
        _slot(holder, child),
        _item(holder, child),
        ".grad" if _is(kind, Tensor) and child is rest[-1] and not _held(holder, child) else "",
        ".__class__" if kind is child else "",
    ):
        if text:
            return text, 1
    position = next((i for i, referent in enumerate(gc.get_referents(holder)) if referent is child), "?")
    return f".<referent>[{position}]", 1


_TRANSPARENT = (CellType, MappingProxyType, staticmethod, classmethod)
"""Who asks for the attribute gets what is inside."""


def _held(holder: Any, child: Any) -> bool:
    return any(referent is child for referent in gc.get_referents(holder))


def attributes_of(value: Any) -> Any:
    """The dict, or proxy of one, of an object's attributes, past what its class may have put under that name; else None."""
    for cls in _MRO(type(value)):
        descriptor = type.__dict__["__dict__"].__get__(cls).get("__dict__")
        if type(descriptor) is GetSetDescriptorType or type(descriptor) is MemberDescriptorType:
            attributes = descriptor.__get__(value)
            return attributes if type(attributes) in (dict, MappingProxyType) else None
    return None


def _attribute(attributes: Any, child: Any) -> str:
    name = next((name for name, value in list(attributes.items()) if value is child), None)
    return "" if type(name) is not str else f".{name}" if name.isidentifier() else f".__dict__[{name!r}]"


def _slot(holder: Any, child: Any) -> str:
    """Slots, and what C objects show as attributes: ``__self__`` of a method, ``func`` of a partial."""
    for cls in _MRO(type(holder)):
        for name, member in list(type.__dict__["__dict__"].__get__(cls).items()):
            if type(member) is MemberDescriptorType:
                try:
                    value = member.__get__(holder)
                except (AttributeError, TypeError):
                    continue
                if value is child:
                    return f".{name}"
    return ""


_SEQUENCES = (list, tuple, deque, set, frozenset)


def _item(holder: Any, child: Any) -> str:
    kind = type(holder)
    if _is(kind, dict):
        for index, (key, value) in enumerate(list(dict.items(holder))):
            if value is child:
                return f"[{key!r}]" if type(key) in (str, int, bool, type(None)) else f"[{index}]"
            if key is child:
                return f".<key>[{index}]"
    base: Any = next((base for base in _SEQUENCES if _is(kind, base)), None)
    if base is not None:
        for index, value in enumerate(list(base.__iter__(holder))):
            if value is child:
                return f"[{index}]"
    return ""


def _into_function(function: FunctionType, rest: list[Any]) -> tuple[str, int] | None:
    if len(rest) < 2:
        return None
    code, container, child = function.__code__, rest[0], rest[1]
    closure: Any = function.__closure__
    defaults: Any = function.__defaults__
    keywords: Any = function.__kwdefaults__
    named: Iterable[tuple[str, Any]]
    if container is closure and len(rest) > 2:
        kind, named, used = "closure", zip(code.co_freevars, closure), 3  # the cell and what is in it
    elif container is defaults:
        names = code.co_varnames[: code.co_argcount]
        kind, named, used = "default", zip(names[len(names) - len(defaults) :], defaults), 2
    elif container is keywords:
        kind, named, used = "default", list(keywords.items()), 2
    else:
        return None
    name = next((name for name, value in named if value is child), None)
    return None if name is None else (f".<{kind}>.{name}", used)


def _into_cache(wrapper: Any, rest: list[Any]) -> tuple[str, int] | None:
    """An ``lru_cache`` without a limit has a dict of its results. One with a limit has a chain of C structures of key and
    result, oldest first, which show only as referents of the wrapper: behind its type if that is one, before all else."""
    child, info = rest[0], functools._lru_cache_wrapper.cache_info(wrapper)
    referents = gc.get_referents(wrapper)
    if info.maxsize is None:
        if len(rest) > 1 and type(child) is dict and child is not attributes_of(wrapper):
            index = next((i for i, value in enumerate(list(child.values())) if value is rest[1]), None)
            return None if index is None else (f".<cache>[{index}]", 2)
        return None
    parts = [part for part in referents if type(part) is not type or part.__name__ != "_lru_list_elem"]
    if parts and parts[0] is type(wrapper):
        parts = parts[1:]
    index = next((i for i, result in enumerate(parts[1 : 2 * info.currsize : 2]) if result is child), None)
    return None if index is None else (f".<cache>[{index}]", 1)
