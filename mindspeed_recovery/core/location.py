# SPDX-License-Identifier: Apache-2.0
"""Where a state lives, as text, and how it is found again in every phase.

States are tracked by location, not by identity: frameworks rebind their globals, so the object is looked up anew
each time. Nothing is ever imported here: a module that is not loaded holds no state.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mindspeed_recovery.errors import LocationError

_NAME = r"[^\W\d]\w*"
_LOCATION = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME}(?:\.{_NAME})*)")
_ABSENT = object()


@dataclass(frozen=True)
class Place:
    """One concrete holder of a state; ``path`` names it for people. The state is an attribute, or an item of a dict."""

    path: str
    holder: Any
    attribute: str

    def get(self) -> Any:
        """The value that stands here now; None where the holder has no such attribute or item (any more)."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.attribute)
        return getattr(self.holder, self.attribute, None)

    def set(self, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.attribute] = value
        else:
            setattr(self.holder, self.attribute, value)

    def remove(self) -> None:
        """Take the value away: an item leaves its dict, an attribute becomes None."""
        if isinstance(self.holder, dict):
            self.holder.pop(self.attribute, None)
        else:
            self.set(None)


@dataclass(frozen=True)
class Location:
    """``package.module:NAME`` or ``package.module:NAME.attr.attr``."""

    module: str
    path: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Location:
        """Raise LocationError unless ``text`` is ``package.module:dotted.path``."""
        match = _LOCATION.fullmatch(text)
        if match is None:
            raise LocationError(f"'{text}' is not a location; write package.module:NAME or package.module:Class.attr")
        return cls(match[1], tuple(match[2].split(".")))

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.path)}"

    def place(self, optional: bool = False) -> Place | None:
        """Where the state is now; None while its module is not loaded or a step of the path is None (not made yet).

        Raise LocationError, with candidates, if an attribute of the path is absent; ``optional``: None then.
        """
        module = sys.modules.get(self.module)
        if module is None:
            return None
        holder: Any = module
        for depth, name in enumerate(self.path):
            value = _lookup(holder, name)
            if value is _ABSENT and optional:
                return None
            if value is _ABSENT:
                raise LocationError(self._absent(depth, holder))
            if depth == len(self.path) - 1:
                return Place(str(self), holder, name)
            if value is None:
                return None
            holder = value
        raise AssertionError("a location has at least one name")

    def owner_class(self, optional: bool = False) -> type | None:
        """For a state on instances: the class; None while its module is not loaded, or if no class stands there.

        Raise LocationError, with candidates, if the class is absent or none of its code mentions the attribute;
        ``optional``: code elsewhere may make the attribute, and an absent class is None.
        """
        module = sys.modules.get(self.module)
        if module is None:
            return None
        holder: Any = module
        for depth, name in enumerate(self.path[:-1]):
            value = _lookup(holder, name)
            if value is _ABSENT and optional:
                return None
            if value is _ABSENT:
                raise LocationError(self._absent(depth, holder))
            holder = value
        if not isinstance(holder, type):
            return None  # a stand-in, since the optional package that it needs is not installed
        if not optional and self.path[-1] not in attribute_names(holder):
            raise LocationError(self._absent(len(self.path) - 1, holder))
        return holder

    def _absent(self, depth: int, holder: Any) -> str:
        name = self.path[depth]
        owner = self.module if isinstance(holder, ModuleType) else f"{self.module}:{'.'.join(self.path[:depth])}"
        near = candidates(name, holder, self.module)
        hint = f"; candidates: {', '.join(near)}" if near else "; nothing with a similar name was found"
        return f"{self}: {owner} has no attribute '{name}'{hint}"


def _lookup(holder: Any, name: str) -> Any:
    # A module's __getattr__ may import or warn; only what stands in the module itself is state.
    if isinstance(holder, ModuleType):
        return vars(holder).get(name, _ABSENT)
    return getattr(holder, name, _ABSENT)


def attribute_names(cls: type) -> set[str]:
    """Every name that the class, or a class it inherits from, defines or mentions in the code of its methods."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base is object:
            continue
        names.update(vars(base))
        names.update(vars(base).get("__annotations__", ()))
        for value in vars(base).values():
            names.update(_mentioned(value))
    return names


def _mentioned(value: Any) -> Iterator[str]:
    if isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            yield from _mentioned(accessor)
        return
    function, seen = value, 0
    while function is not None and seen < 10:  # below static and class methods, cached properties and wrappers
        if isinstance(function, FunctionType):
            yield from _code_names(function.__code__)
        seen += 1
        function = next((inner for name in _INNER if (inner := getattr(function, name, None)) is not None), None)


_INNER = ("__wrapped__", "__func__", "func")


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):  # register_buffer("name", …), setattr(self, "name", …)
            yield constant
        elif isinstance(constant, CodeType):
            yield from _code_names(constant)


def candidates(name: str, holder: Any, module: str) -> list[str]:
    """Names like ``name``: on the holder itself, then the same name elsewhere in the loaded package."""
    names = (
        attribute_names(holder)
        if isinstance(holder, type)
        else set(vars(holder))
        if hasattr(holder, "__dict__")
        else set()
    )
    near = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.6)
    package = module.split(".", 1)[0]
    wanted = {name, *near}
    for other, loaded in sorted(sys.modules.items()):
        if loaded is None or other == module or other.split(".", 1)[0] != package:
            continue
        near.extend(f"{other}:{found}" for found in sorted(wanted & set(vars(loaded))))
    return near[:5]
