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
from types import FrameType, ModuleType
from typing import Any

import torch

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


def _container_class(base: Any) -> type:
    """The recovery-aware subclass of a plain type: nothing but how it pickles differs."""
    reduce = _REDUCE[base]
    namespace = {
        "__slots__": (),
        "__module__": __name__,
        "__doc__": f"A {base.__name__} that can be put in quarantine; pickles and deep-copies as a plain one.",
        "__reduce_ex__": lambda self, protocol: reduce(self),
    }
    if hasattr(base, "__copy__"):  # deque and defaultdict copy into their own class
        namespace["__copy__"] = lambda self: base(*_PLAIN_COPY.get(base, lambda c: (c,))(self))
    return type(f"Recovery{base.__name__[0].upper()}{base.__name__[1:]}", (base,), namespace)


CONTAINERS: dict[Any, Any] = {base: _container_class(base) for base in _REDUCE}
"""For each plain type the recovery-aware one."""

_LOADABLE = (dict, list)


def allow_loading() -> Callable[[], None]:
    """Let ``torch.load(weights_only=True)`` of this process rebuild containers: they pickle as calls of the plain types,
    which torch does not allow by itself. (A plain deque or defaultdict cannot be loaded so either.) Returns the inverse."""
    if not hasattr(torch.serialization, "get_safe_globals"):  # before torch 2.5 there is no such list to change
        return lambda: None
    before = torch.serialization.get_safe_globals()
    added = [kind for kind in _LOADABLE if kind not in before]
    torch.serialization.add_safe_globals(list(added))

    def undo() -> None:
        now = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([kind for kind in now if kind not in added])

    return undo


def is_container(value: Any) -> bool:
    """Whether quarantine can take ``value`` as it is."""
    return is_quarantined(value) or type(value) in CONTAINERS.values() or _is_plain_object(value)


def _is_plain_object(value: Any) -> bool:
    cls = type(value)
    return (
        bool(cls.__flags__ & (1 << 9))
        and hasattr(value, "__dict__")
        and not isinstance(value, (type, torch.Tensor, ModuleType, *_REDUCE))
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
    new = CONTAINERS[base]
    arguments = _PLAIN_COPY.get(base)
    container = new(*arguments(value)) if arguments else new(value)
    place.set(container)
    return _follow(value, container)


def release(place: Place) -> None:
    """The inverse of `contain`: a plain object with the same contents, here and where modules and classes hold it."""
    value = place.get()
    base = next((base for base, new in CONTAINERS.items() if type(value) is new), None)
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
    """One container in quarantine. Make it with `Quarantine(...)`, end it with `lift`. Any thread.

    A dict, list or deque keeps its length: a stand-in that raises takes the place of each value. The training thread may
    be in the middle of a loop over it, and must meet this error, not one about a changed size that no runtime knows.
    """

    def __init__(self, value: Any, state: str, location: str) -> None:
        self._value = value
        self._live_class = type(value)
        plain = next((base for base, new in CONTAINERS.items() if type(value) is new), None)
        self._plain = plain
        # The class is swapped first: from then on nobody can add to contents that are being moved.
        object.__setattr__(value, "__class__", _quarantined_class(self._live_class, plain, state, location))
        try:
            self._parked = _park(value, plain, _quarantined_class(object, None, state, location))
        except BaseException:
            object.__setattr__(value, "__class__", self._live_class)
            raise

    def lift(self) -> None:
        """Give the contents back; the container works again. Idempotent."""
        if type(self._value) is self._live_class:
            return
        _put_back(self._value, self._plain, self._parked)
        object.__setattr__(self._value, "__class__", self._live_class)
        self._parked = None


def is_quarantined(value: Any) -> bool:
    """Whether ``value`` is in quarantine, for whichever state."""
    return "_quarantined_state" in vars(type(value))


def _park(value: Any, plain: Any, stand_in: type) -> Any:
    """Move the contents out of ``value``, past what its class says now; return them."""
    if plain is None:
        namespace = object.__getattribute__(value, "__dict__")
        parked = dict(namespace)
        namespace.clear()
        return parked
    if plain is set:  # it cannot keep its size without its elements; nobody reaches them now but through C
        return None
    pairs = list(plain.items(value)) if hasattr(plain, "items") else list(enumerate(plain.__iter__(value)))
    for key, _ in pairs:
        plain.__setitem__(value, key, stand_in())
    return pairs


def _put_back(value: Any, plain: Any, parked: Any) -> None:
    if plain is None:
        namespace = object.__getattribute__(value, "__dict__")
        namespace.clear()
        namespace.update(parked)
    elif plain is not set:
        for key, item in parked:
            plain.__setitem__(value, key, item)


def _quarantined_class(live: type, plain: Any, state: str, location: str) -> type:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise QuarantineError(state, location)

    def show(self: Any, *args: Any) -> str:
        return f"<{live.__name__} of state '{state}' in quarantine>"

    names = {name for name in dir(plain or live) if name not in _ALWAYS} | {"__hash__", "__reduce_ex__"}
    if plain is None:
        names |= {
            "__setattr__",
            "__delattr__",
            "__bool__",
            "__len__",
            "__iter__",
            "__contains__",
            "__getitem__",
            "__call__",
        }
    namespace: dict[str, Any] = {
        # Not everything is a method: deque.maxlen is read, not called.
        name: refuse if callable(getattr(plain or live, name, refuse)) else property(refuse)
        for name in names
    }
    namespace |= {"__module__": live.__module__, "__repr__": show, "__str__": show, "_quarantined_state": state}
    namespace["__slots__"] = ()
    if plain is None:
        namespace["__getattribute__"] = _guard(refuse)
    return type(live.__name__, (live,), namespace)


def _guard(refuse: Callable[..., Any]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: Any, name: str) -> Any:
        return object.__getattribute__(self, name) if name in ("__class__", "__repr__") else refuse(self)

    return __getattribute__
