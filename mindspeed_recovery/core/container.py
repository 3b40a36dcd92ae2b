# SPDX-License-Identifier: Apache-2.0
"""Recovery-aware containers and their quarantine.

In the live state a container is a subclass of the plain type with no overridden method, so that reading and writing it
costs what the plain type costs. Quarantine moves the contents out and swaps the instance's class for one whose every
access raises; whoever holds the container, under whatever name, meets the error, and afterwards the same object works.
An instance of an ordinary Python class needs no replacement: its class is swapped directly.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cache
from types import FrameType, ModuleType
from typing import Any

from mindspeed_recovery.core.location import Place
from mindspeed_recovery.errors import QuarantineError, StateError

# How each plain type is rebuilt by pickle and deepcopy: a container must leave the process as the plain type.
_REDUCE: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    dict: lambda c: (dict, (), None, None, iter(c.items())),
    OrderedDict: lambda c: (OrderedDict, (), None, None, iter(c.items())),
    defaultdict: lambda c: (defaultdict, (c.default_factory,), None, None, iter(c.items())),
    list: lambda c: (list, (), None, iter(c)),
    deque: lambda c: (deque, ((), c.maxlen), None, iter(c)),
    set: lambda c: (set, (list(c),)),
}
_PLAIN_COPY: dict[type, Callable[[Any], Any]] = {
    defaultdict: lambda c: (c.default_factory, c),
    deque: lambda c: (c, c.maxlen),
}
# What stays usable in quarantine: what Python itself needs of an object, and nothing that shows or changes contents.
_ALWAYS = {
    "__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__dir__",
    "__doc__", "__hash__", "__sizeof__", "__getstate__", "__module__", "__class_getitem__", "__del__", "__slots__",
    "__setattr__", "__delattr__", "__dict__", "__weakref__", "__repr__", "__str__", "__format__",
}  # fmt: skip


@cache
def container_class(base: Any) -> type:
    """The recovery-aware subclass of a plain type: nothing but how it pickles differs."""
    reduce = _REDUCE[base]
    namespace = {
        "__slots__": (),
        "__module__": __name__,
        "__doc__": f"A {base.__name__} that can be put in quarantine; pickles and deep-copies as a plain one.",
        "__reduce_ex__": lambda self, protocol: reduce(self),
    }
    return type(f"Recovery{base.__name__[0].upper()}{base.__name__[1:]}", (base,), namespace)


def is_container(value: Any) -> bool:
    """Whether quarantine can take ``value`` as it is."""
    return any(type(value) is container_class(base) for base in _REDUCE) or _is_plain_object(value)


def _is_plain_object(value: Any) -> bool:
    cls = type(value)
    return (
        bool(cls.__flags__ & (1 << 9))
        and hasattr(value, "__dict__")
        and not isinstance(value, (type, ModuleType, *_REDUCE))
    )


def contain(place: Place) -> list[str]:
    """Make what stands at ``place`` fit for quarantine; do nothing where it is already, or where nothing stands.

    A plain dict, list, deque or set is replaced by a container with the same contents, here and in every module and
    class that holds it by name. Returns the holders that could not be followed, for the start-up report. Raises
    StateError for a value of another kind.
    """
    value = place.get()
    if value is None or is_container(value):
        return []
    base = type(value)
    if base not in _REDUCE:
        raise StateError(
            f"{place.path}: a {base.__name__} cannot be put in quarantine; take 'quarantine' out of its entry"
        )
    new = container_class(base)
    arguments = _PLAIN_COPY.get(base)
    container = new(*arguments(value)) if arguments else new(value)
    place.set(container)
    return _follow(value, container)


def release(place: Place) -> None:
    """The inverse of `contain`: a plain object with the same contents, here and where modules and classes hold it."""
    value = place.get()
    base = next((base for base in _REDUCE if type(value) is container_class(base)), None)
    if base is not None:
        arguments = _PLAIN_COPY.get(base)
        plain = base(*arguments(value)) if arguments else base(value)
        place.set(plain)
        _follow(value, plain)


def _follow(old: Any, new: Any) -> list[str]:
    """Point every module and class that holds ``old`` to ``new``; return the other holders."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if value is old:
                setattr(module, name, new)
    strangers = []
    for holder in gc.get_referrers(old):
        if isinstance(holder, FrameType) or holder is new:
            continue
        owner = _owner_of_namespace(holder)
        if isinstance(owner, type):
            for name, value in list(vars(owner).items()):
                if value is old:
                    setattr(owner, name, new)
        else:
            strangers.append(f"a {type(owner if owner is not None else holder).__name__}")
    return strangers


def _owner_of_namespace(namespace: Any) -> Any:
    """The class or object whose ``__dict__`` this is, if any."""
    if not isinstance(namespace, dict):
        return None
    for owner in gc.get_referrers(namespace):
        if getattr(owner, "__dict__", None) is namespace or (isinstance(owner, type) and vars(owner) == namespace):
            return owner
    return None


class Quarantine:
    """One container in quarantine. Make it with `Quarantine(...)`, end it with `lift`. Any thread."""

    def __init__(self, value: Any, state: str, location: str) -> None:
        self._value = value
        self._live_class = type(value)
        plain = next((base for base in _REDUCE if isinstance(value, base)), None)
        # The class is swapped first: from then on nobody can add to contents that are being moved.
        object.__setattr__(value, "__class__", _quarantined_class(self._live_class, plain, state, location))
        self._contents = _OBJECT if plain is None else _MOVES[plain]
        self._parked = self._contents.out(value)

    @property
    def value(self) -> Any:
        """The container itself."""
        return self._value

    def lift(self) -> None:
        """Give the contents back; the container works again. Idempotent."""
        if type(self._value) is self._live_class:
            return
        self._contents.back(self._value, self._parked)
        object.__setattr__(self._value, "__class__", self._live_class)
        self._parked = None


def _quarantined_class(live: type, plain: type | None, state: str, location: str) -> type:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise QuarantineError(state, location)

    def show(self: Any, *args: Any) -> str:
        return f"<{live.__name__} of state '{state}' in quarantine>"

    namespace: dict[str, Any] = {name: refuse for name in dir(plain or live) if name not in _ALWAYS}
    namespace |= {
        "__slots__": (),
        "__module__": live.__module__,
        "__repr__": show,
        "__str__": show,
        "__reduce_ex__": refuse,
    }
    if plain is None:
        namespace |= {"__getattribute__": _guard(refuse), "__setattr__": refuse, "__delattr__": refuse}
        namespace.pop("__class__", None)
    return type(live.__name__, (live,), namespace)


def _guard(refuse: Callable[..., Any]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: Any, name: str) -> Any:
        return object.__getattribute__(self, name) if name in ("__class__", "__repr__") else refuse(self)

    return __getattribute__


class _Moves:
    """How the contents of one kind of container are taken out and put back, past whatever its class says."""

    def __init__(self, plain: Any, adder: str) -> None:
        self._plain, self._add = plain, getattr(plain, adder)

    def out(self, value: Any) -> Any:
        parked = list(self._plain.items(value)) if hasattr(self._plain, "items") else list(self._plain.__iter__(value))
        self._plain.clear(value)
        return parked

    def back(self, value: Any, parked: Any) -> None:
        self._add(value, parked)


class _ObjectMoves:
    def out(self, value: Any) -> Any:
        namespace = object.__getattribute__(value, "__dict__")
        parked = dict(namespace)
        namespace.clear()
        return parked

    def back(self, value: Any, parked: Any) -> None:
        object.__getattribute__(value, "__dict__").update(parked)


_MOVES: dict[Any, _Moves] = {
    dict: _Moves(dict, "update"),
    OrderedDict: _Moves(OrderedDict, "update"),
    defaultdict: _Moves(defaultdict, "update"),
    list: _Moves(list, "extend"),
    deque: _Moves(deque, "extend"),
    set: _Moves(set, "update"),
}
_OBJECT: Any = _ObjectMoves()
