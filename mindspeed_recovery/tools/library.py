# SPDX-License-Identifier: Apache-2.0
"""Names across the modules of several source trees: where an import leads, what a class inherits, who mentions a word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_recovery.tools import symbols
from mindspeed_recovery.tools.sources import SourceError, SourceFile, SourceTree
from mindspeed_recovery.tools.symbols import Binding, ClassSymbols, ModuleSymbols

_DEPTH = 20
"""Imports of imports, and bases of bases, that are followed; more can only be a circle."""


@dataclass(frozen=True)
class Defined:
    """Names that stand at one place: the module where they are bound, and each binding."""

    module: str
    bindings: tuple[Binding, ...]

    @property
    def line(self) -> int:
        return self.bindings[0].line

    @property
    def kinds(self) -> set[str]:
        return {binding.kind for binding in self.bindings}


class Library:
    """Modules of several trees; the first tree that holds a package provides all of it. Each file is read at most once.

    ``problems``: files that could not be read, one line each.
    """

    def __init__(self, trees: Sequence[SourceTree]) -> None:
        self.trees = list(trees)
        self.problems: dict[str, str] = {}
        self._read: dict[str, ModuleSymbols | None] = {}
        self._texts: dict[str, str] = {}

    def file(self, module: str) -> SourceFile | None:
        return next((tree.find(module) for tree in self.trees if tree.holds(module)), None)

    def path(self, module: str) -> str:
        """Where a module stands, for people."""
        file = self.file(module)
        return file.path if file is not None else module

    def symbols(self, module: str) -> ModuleSymbols | None:
        """None where no tree has the module, or it cannot be read (see ``problems``)."""
        if module not in self._read:
            file = self.file(module)
            self._read[module] = None if file is None else self._parse(file)
        return self._read[module]

    def _parse(self, file: SourceFile) -> ModuleSymbols | None:
        try:
            return symbols.read(file.parse(), file.module, is_package=file.is_package)
        except SourceError as error:
            self._note(file, error)
            return None

    def text(self, file: SourceFile) -> str:
        """The text of a file, empty if it cannot be read."""
        if file.path not in self._texts:
            try:
                self._texts[file.path] = file.text()
            except SourceError as error:
                self._note(file, error)
                self._texts[file.path] = ""
        return self._texts[file.path]

    def _note(self, file: SourceFile, error: SourceError) -> None:
        if not file.compiled:  # that a compiled module has no text is no fault of it
            self.problems[file.path] = str(error)

    def texts(self, module: str) -> set[str]:
        """The texts in a module that could be names: keys of its dicts, among others."""
        file = self.file(module)
        return set(re.findall(r"""["'](\w+)["']""", self.text(file))) if file is not None else set()

    def mentioning(self, package: str, *words: str) -> Iterator[SourceFile]:
        """The files of a package in which all of these words occur."""
        patterns = [re.compile(rf"\b{re.escape(word)}\b") for word in words]
        seen: set[str] = set()
        for tree in self.trees:
            for file in tree.modules(package):
                if file.module in seen or not tree.holds(file.module):
                    continue
                seen.add(file.module)
                text = self.text(file)
                # The plain search first: it is a hundred times faster, and nearly always says no.
                if all(word in text for word in words) and all(pattern.search(text) for pattern in patterns):
                    yield file

    # ---- names ----

    def lookup(self, module: str, name: str, depth: int = 0) -> Defined | None:
        """What stands under a name in a module, its own imports and star imports included."""
        found = self.symbols(module)
        if found is None or depth > _DEPTH:
            return None
        if name in found.names:
            return Defined(module, tuple(found.names[name]))
        for star in found.stars:
            if not name.startswith("_") and (defined := self.lookup(star, name, depth + 1)) is not None:
                return defined
        return None

    def follow(self, defined: Defined, depth: int = 0) -> Defined | None:
        """Where imports of one name lead in the end. None if that is outside of the trees, or is a module."""
        if depth > _DEPTH or defined.kinds != {symbols.IMPORT}:
            return defined if depth <= _DEPTH else None
        for binding in defined.bindings:
            module, _, name = binding.target.partition(":")
            inner = self.lookup(module, name) if name else None
            followed = self.follow(inner, depth + 1) if inner is not None else None
            if followed is not None:
                return followed
        return None

    def module_of(self, module: str, name: str, depth: int = 0) -> str | None:
        """The module that a dotted name in a module stands for: an imported one, an alias of one, or one below it."""
        first, _, rest = name.partition(".")
        found = self.symbols(module)
        if found is None or depth > _DEPTH:
            return None
        candidates: list[str] = []
        for binding in (*found.names.get(first, ()), *found.typing.get(first, ())):
            if binding.kind == symbols.IMPORT:
                candidates.append(binding.target)
            else:  # mpu = parallel_state
                candidates += (
                    target
                    for alias in binding.types
                    if alias != first
                    if (target := self.module_of(module, alias, depth + 1))
                )
        for target in candidates:
            resolved = self.as_module(target, depth + 1)
            if resolved is not None and not rest:
                return resolved
            if resolved is not None and (inner := self.below(resolved, rest, depth + 1)) is not None:
                return inner
        return None

    def as_module(self, target: str, depth: int = 0) -> str | None:
        """The module that an import's target (``module`` or ``module:NAME``) is, None if it is not one in the trees."""
        origin, _, name = target.partition(":")
        if not name:
            return origin if self._is_module(origin) else None
        if self.file(f"{origin}.{name}") is not None:
            return f"{origin}.{name}"
        return self.module_of(origin, name, depth + 1)

    def below(self, module: str, rest: str, depth: int = 0) -> str | None:
        """The module that a dotted name stands for within a module or package."""
        name, _, more = rest.partition(".")
        direct = f"{module}.{name}"
        inner = direct if self._is_module(direct) else self.module_of(module, name, depth)
        return inner if inner is None or not more else self.below(inner, more, depth)

    def _is_module(self, name: str) -> bool:
        """A file, or a namespace package that has none of its own."""
        return self.file(name) is not None or any(tree.has(name) and not tree.holds(name) for tree in self.trees)

    def origin(self, target: str, depth: int = 0) -> str:
        """``module:NAME`` where the name that an import names is really bound, through imports of imports."""
        module, _, name = target.partition(":")
        found = self.symbols(module) if name and depth < _DEPTH else None
        for binding in found.names.get(name, ()) if found else ():
            if binding.kind == symbols.IMPORT and ":" in binding.target:
                return self.origin(binding.target, depth + 1)
        return target

    def is_open(self, module: str, depth: int = 0) -> bool:
        """Whether a module may have names that its text does not show: made up at run time, or from a compiled module."""
        found = self.symbols(module)
        if found is None or depth > _DEPTH:
            return True
        return (
            found.computed or "__getattr__" in found.names or any(self.is_open(star, depth + 1) for star in found.stars)
        )

    # ---- classes ----

    def classes(self, module: str, name: str) -> list[tuple[str, ClassSymbols]]:
        """The classes that a (dotted) name in a module may stand for, each with the module that defines it."""
        first, _, rest = name.partition(".")
        found = self.symbols(module)
        if found is None:
            return []
        if rest:
            owner, _, last = name.rpartition(".")
            inner = self.module_of(module, owner)
            if inner is not None:
                return self.classes(inner, last)
        bindings = self.lookup(module, first)
        if bindings is None and first in found.typing:
            bindings = Defined(module, tuple(found.typing[first]))
        followed = self.follow(bindings) if bindings is not None else None
        if followed is None:
            return []
        here = [(followed.module, binding.cls) for binding in followed.bindings if binding.cls is not None]
        for step in rest.split(".") if rest else ():
            here = [(at, b.cls) for at, cls in here for b in cls.members.get(step, ()) if b.cls is not None]
        return here

    def member(self, module: str, cls: ClassSymbols, name: str, depth: int = 0) -> Defined | None:
        """An attribute of a class, or of the first class it inherits from that has it, all bindings there."""
        if name in cls.members:
            return Defined(module, tuple(cls.members[name]))
        for base in cls.bases if depth < _DEPTH else ():
            for at, inner in self.classes(module, base):
                if inner is not cls and (found := self.member(at, inner, name, depth + 1)) is not None:
                    return found
        return None

    def member_kinds(self, module: str, cls: ClassSymbols, name: str, depth: int = 0) -> set[str]:
        """Every kind in which the class and those it inherits from bind an attribute."""
        kinds = {binding.kind for binding in cls.members.get(name, ())}
        for base in cls.bases if depth < _DEPTH else ():
            for at, inner in self.classes(module, base):
                if inner is not cls:
                    kinds |= self.member_kinds(at, inner, name, depth + 1)
        return kinds

    def member_names(self, module: str, cls: ClassSymbols, depth: int = 0) -> dict[str, tuple[str, int]]:
        """Every attribute of a class and of those it inherits from, with module and line."""
        names = {name: (module, found[0].line) for name, found in cls.members.items()}
        for base in cls.bases if depth < _DEPTH else ():
            for at, inner in self.classes(module, base):
                if inner is not cls:
                    names = {**self.member_names(at, inner, depth + 1), **names}
        return names
