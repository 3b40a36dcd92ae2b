# SPDX-License-Identifier: Apache-2.0
"""Does the catalogue fit an upstream? Each entry is looked up in the source text; nothing is imported, torch is not needed.

An entry is *found* if the module, the class and the attribute of its location are defined and are what the entry says
they are: an attribute of instances, a class attribute, a module global, a function with a cache.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from packaging.version import Version

from mindspeed_recovery.catalogue import Catalogue
from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.tools import versions
from mindspeed_recovery.tools.library import Defined, Library
from mindspeed_recovery.tools.progress import Progress
from mindspeed_recovery.tools.sources import SourceTree
from mindspeed_recovery.tools.symbols import CLASS, FIELD, FUNCTION, IMPORT, INSTANCE, VALUE, Binding, ClassSymbols

_NEAR = 0.75
"""How alike two names must be (difflib) for one to be a renaming of the other."""
_SHOWN = 5


class Status(str, Enum):
    """What became of an entry in one source tree."""

    FOUND = "found"
    RENAMED = "renamed"
    """Not there, but a name like it is, or the same name is elsewhere."""
    GONE = "gone"
    AMBIGUOUS = "ambiguous"
    """Defined more than once, and no entry says which is meant."""
    SHAPE = "another shape"
    """There, but not what the entry says it is."""
    UNREADABLE = "unreadable"
    """Its file cannot be parsed."""
    OPTIONAL = "optional"
    """Its package is not part of this source, or its entry says that only some builds have it."""
    UNCHECKED = "unchecked"
    """In a compiled module, which has no text."""

    def __str__(self) -> str:
        return self.value

    @property
    def well(self) -> bool:
        return self in (Status.FOUND, Status.OPTIONAL, Status.UNCHECKED)


@dataclass(frozen=True)
class Finding:
    """One entry in one source. ``place``: file and line where it was found; ``candidates``: best first, with places."""

    entry: str
    policy: str
    location: str
    source: str
    status: Status
    place: str = ""
    text: str = ""
    candidates: tuple[str, ...] = ()


@dataclass
class SourceReport:
    """One catalogue file against one source tree. ``version``: None where nothing in the source tells it."""

    package: str
    version: Version | None
    label: str
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return all(finding.status.well for finding in self.findings)

    def count(self, status: Status) -> int:
        return sum(finding.status is status for finding in self.findings)


def holds_package(loaded: Catalogue, tree: SourceTree) -> bool:
    """Whether a tree has (a part of) the package that a catalogue file is about.

    Its package is where most of its locations are: entries about torch or numpy do not make a torch wheel Megatron.
    """
    tops: dict[str, int] = {}
    for rows in loaded.entries.values():
        top = rows[-1].spec.location.module.split(".")[0]
        tops[top] = tops.get(top, 0) + 1
    return bool(tops) and tree.has(max(tops, key=lambda top: tops[top]))


def version_in(loaded: Catalogue, trees: Sequence[SourceTree]) -> Version | None:
    """The version by which the file's rows are chosen, as the trees tell it; None where they do not."""
    return versions.version_of(loaded.package or "", loaded.version_from, trees)


def check(
    loaded: Catalogue,
    tree: SourceTree,
    *,
    version: Version | None,
    others: Sequence[SourceTree] = (),
    known: Iterable[Location] = (),
    progress: Progress | None = None,
) -> SourceReport:
    """Look up every entry that one catalogue file has for ``version`` (None: unknown, the newest rows) in a tree.

    ``others`` serve for packages that the tree does not have. ``known``: locations of entries of other files, to which a
    second definition may belong.
    """
    library = Library([tree, *others])
    report = SourceReport(loaded.package or "", version, tree.label)
    rows = loaded.rows(version, unknown=version is None)
    checker = _Checker(library, tree, {str(row.spec.location) for row in rows} | set(map(str, known)))
    for row in progress.each(rows, f"verifying {tree.label}", len(rows)) if progress is not None else rows:
        report.findings.append(checker.finding(row.spec))
    report.problems = list(library.problems.values())
    return report


def locations(loaded: Catalogue) -> list[Location]:
    """Every location that any row of a file names."""
    return [row.spec.location for rows in loaded.entries.values() for row in rows]


@dataclass(eq=False)
class _Fault(Exception):
    status: Status
    text: str
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Holder:
    """What holds the last name of a path: the module, or a class of these or (not ``is_class``) an object of one."""

    classes: tuple[tuple[str, ClassSymbols], ...] = ()
    is_class: bool = False


class _Checker:
    def __init__(self, library: Library, tree: SourceTree, known: set[str]) -> None:
        self._library = library
        self._tree = tree
        self._known = known

    def finding(self, spec: StateSpec) -> Finding:
        about = (spec.name, str(spec.policy), str(spec.location), spec.source)
        try:
            return Finding(*about, Status.FOUND, self._state(spec))
        except _Fault as fault:
            absent = fault.status in (Status.GONE, Status.RENAMED)
            status = Status.OPTIONAL if spec.optional and absent else fault.status
            return Finding(*about, status, "", fault.text, fault.candidates)

    def _state(self, spec: StateSpec) -> str:
        """File and line of the state. Raises _Fault."""
        holder, found = self._locate(spec.location, once=spec.policy is not Policy.IGNORED)
        if holder.classes:
            self._class_shape(spec, holder, found)
        else:
            self._module_shape(spec, found)
        self._fields(spec, found)
        if spec.clear is not None:
            self._clear(spec.clear)
        if self._tree.holds(spec.location.module) and spec.policy is not Policy.IGNORED:
            self._elsewhere(spec, found)
        return f"{self._library.path(found.module)}:{found.line}"

    # ---- where ----

    def _locate(self, location: Location, *, once: bool = True) -> tuple[_Holder, Defined]:
        module, path = location.module, location.path
        self._module_here(location)
        first = self._library.lookup(module, path[0])
        if first is None:
            if not self._tree.holds(module) and self._library.is_open(module):
                raise _Fault(Status.UNCHECKED, f"{module} makes names that its text does not show")
            names = self._library.symbols(module)
            near = {name: (module, found[0].line) for name, found in names.names.items()} if names else {}
            raise self._absent(location, 0, f"{module} has no '{path[0]}'", near)
        if once:
            self._once(first, path[0])
        holder, found = _Holder(), first
        for depth, name in enumerate(path[1:], 1):
            classes, is_class = self._what(found)
            if not classes:  # all that can be said of an object of unknown type: some class of the module has it
                classes = self._owners(found.module, name)
            holder = _Holder(tuple(classes), is_class)
            inner = [m for at, cls in classes if (m := self._library.member(at, cls, name)) is not None]
            if not inner:
                near = {}
                for at, cls in classes:
                    near.update(self._library.member_names(at, cls))
                owner = " / ".join(sorted({cls.name for _, cls in classes})) or f"what stands at '{path[depth - 1]}'"
                raise self._absent(location, depth, f"{owner} has no '{name}'", near)
            found = inner[0]
            if once:
                self._once(found, name)
        return holder, found

    def _module_here(self, location: Location) -> None:
        library, module = self._library, location.module
        top = module.split(".", 1)[0]
        if self._tree.has(top):
            here = self._tree.holds(module)
        else:
            here = library.file(module) is not None or any(tree.has(module) for tree in library.trees)
        if not here:
            raise _Fault(Status.OPTIONAL, f"{module} is not part of this source")
        file = library.file(module)
        if file is None:
            fault = self._absent(location, 0, f"there is no module {module}", {})
            package = module.rpartition(".")[0]
            beside = [name for f in self._tree.modules(top) if (name := f.module).rpartition(".")[0] == package]
            near = difflib.get_close_matches(module, beside, n=3, cutoff=0.8)
            modules = tuple(f"{name} ({library.path(name)})" for name in near)
            status = Status.RENAMED if near else fault.status
            raise _Fault(status, fault.text, (fault.candidates + modules)[:_SHOWN])
        if file.compiled:
            raise _Fault(Status.UNCHECKED, f"{file.path} is compiled")
        files = [other.path for other in self._tree.all_of(module)]
        if len(files) > 1:
            raise _Fault(Status.AMBIGUOUS, f"{module} is in two files", tuple(files))
        if library.symbols(module) is None:
            raise _Fault(Status.UNREADABLE, library.problems[file.path])

    def _what(self, found: Defined) -> tuple[list[tuple[str, ClassSymbols]], bool]:
        """The classes that a name is, or that the object under it may be of; whether it is a class itself."""
        followed = self._library.follow(found) or found
        direct = [(followed.module, binding.cls) for binding in followed.bindings if binding.cls is not None]
        if direct:
            return direct, True
        typed: dict[int, tuple[str, ClassSymbols]] = {}
        for binding in followed.bindings:
            for name in sorted(binding.types):
                for at, cls in self._library.classes(followed.module, name):
                    typed.setdefault(id(cls), (at, cls))
        return list(typed.values()), False

    def _owners(self, module: str, name: str) -> list[tuple[str, ClassSymbols]]:
        symbols = self._library.symbols(module)
        found = [b.cls for bindings in symbols.names.values() for b in bindings if b.cls is not None] if symbols else []
        return [(module, cls) for cls in found if name in cls.members]

    def _once(self, found: Defined, name: str) -> None:
        made = [b for b in found.bindings if b.kind in (CLASS, FUNCTION) and not b.overload]
        for index, one in enumerate(made):
            for other in made[:index]:
                if not one.excludes(other):
                    path = self._library.path(found.module)
                    raise _Fault(
                        Status.AMBIGUOUS,
                        f"'{name}' is defined twice",
                        (f"{path}:{other.line}", f"{path}:{one.line}"),
                    )

    def _elsewhere(self, spec: StateSpec, found: Defined) -> None:
        """A second module of the package that defines the same: one of the two may be the one that is used."""
        others = [place for place in self._same(spec.location, spec.on) if str(place[0]) not in self._known]
        others = [place for place in others if place[0].module != found.module]
        if others:
            where = tuple(f"{location} ({path})" for location, path in others[:_SHOWN])
            raise _Fault(Status.AMBIGUOUS, f"{spec.location} is also defined in other modules", where)

    def _same(self, location: Location, on: str) -> Iterator[tuple[Location, str]]:
        """Where else in the tree the path of a location is defined in the same way."""
        package = location.module.split(".", 1)[0]
        for file in self._library.mentioning(package, *location.path):
            symbols = self._library.symbols(file.module)
            bindings = symbols.names.get(location.path[0], []) if symbols else []
            if file.module == location.module or not bindings:
                continue
            place = next((b for b in bindings if b.kind != IMPORT), None)
            if place is None:
                continue
            if len(location.path) > 1:
                members = [place.cls.members.get(location.path[1], [])] if place.cls else []
                kinds = {b.kind for found in members for b in found}
                wanted = {INSTANCE, FIELD} if on == "instances" else {VALUE, FUNCTION}
                if len(location.path) > 2 or not kinds & wanted:
                    continue
            yield Location(file.module, location.path), f"{file.path}:{place.line}"

    # ---- what ----

    def _module_shape(self, spec: StateSpec, found: Defined) -> None:
        name, kinds = spec.location.path[-1], found.kinds
        if kinds == {IMPORT}:
            if not self._tree.holds(spec.location.module):
                return  # of a foreign package only the name matters
            raise _Fault(
                Status.SHAPE,
                f"'{name}' is only imported here: rebinding it would not reach its module",
                tuple(binding.target for binding in found.bindings),
            )
        self._callable_shape(spec, found.bindings, name)

    def _class_shape(self, spec: StateSpec, holder: _Holder, found: Defined) -> None:
        name = spec.location.path[-1]
        kinds: set[str] = set()
        for at, cls in holder.classes:
            kinds |= self._library.member_kinds(at, cls, name)
        owner = holder.classes[0][1].name
        if spec.on == "instances":
            if not kinds & {INSTANCE, FIELD}:
                what = (
                    "a method or property" if FUNCTION in kinds else "an attribute of the class, one for all instances"
                )
                raise _Fault(Status.SHAPE, f"'{name}' is {what}, not an attribute of each {owner}")
            return
        if holder.is_class and not kinds & {VALUE, FUNCTION}:
            raise _Fault(Status.SHAPE, f"'{name}' is an attribute of each {owner}, not of the class")
        if holder.is_class and not any(name in cls.members for _, cls in holder.classes):
            definers = tuple(f"{found.module}:{base.name}.{name}" for _, base in self._owners(found.module, name))
            raise _Fault(Status.SHAPE, f"{owner} only inherits '{name}': it is the state of another class", definers)
        if not kinds & {VALUE, INSTANCE, FIELD}:
            self._callable_shape(spec, found.bindings, name)

    def _callable_shape(self, spec: StateSpec, bindings: Sequence[Binding], name: str) -> None:
        kinds = {binding.kind for binding in bindings}
        if VALUE in kinds or kinds & {INSTANCE, FIELD}:
            return
        if CLASS in kinds:
            raise _Fault(Status.SHAPE, f"'{name}' is a class")
        if spec.policy is Policy.IGNORED:
            return  # nothing is done to it, whatever it is
        if spec.policy is not Policy.DROP and FUNCTION in kinds:
            raise _Fault(Status.SHAPE, f"'{name}' is a function")
        if FUNCTION in kinds and not any(binding.cached for binding in bindings):
            raise _Fault(Status.SHAPE, f"the function '{name}' has no cache")

    def _fields(self, spec: StateSpec, found: Defined) -> None:
        if not spec.fields:
            return
        classes, _ = self._what(found)
        texts = self._library.texts(found.module)
        for name in spec.fields:
            if classes:
                kinds = {k for at, cls in classes for k in self._library.member_kinds(at, cls, name)}
                if not kinds & {VALUE, INSTANCE, FIELD}:
                    names: dict[str, tuple[str, int]] = {}
                    for at, cls in classes:
                        names.update(self._library.member_names(at, cls))
                    owner = classes[0][1].name
                    raise _Fault(
                        Status.SHAPE, f"{owner} has no attribute '{name}' (fields)", tuple(self._near(name, names))
                    )
            elif name not in texts and not self._known_member(found.module, name):  # the keys of a dict are texts
                near = difflib.get_close_matches(name, sorted(texts), n=3, cutoff=_NEAR)
                raise _Fault(Status.SHAPE, f"nothing in {found.module} uses the key '{name}' (fields)", tuple(near))

    def _known_member(self, module: str, name: str) -> bool:
        """Whether a class that the module defines or imports has an attribute ``name``: an object set from outside its class
        tells no type."""
        symbols = self._library.symbols(module)
        classes = (found for top in (symbols.names if symbols else ()) for found in self._library.classes(module, top))
        return any(self._library.member(at, cls, name) is not None for at, cls in classes)

    def _clear(self, location: Location) -> None:
        try:
            _, found = self._locate(location)
        except _Fault as fault:
            text = f"clear: {fault.text}"
            status = Status.SHAPE if fault.status in (Status.GONE, Status.RENAMED) else fault.status
            raise _Fault(status, text, fault.candidates) from None
        found = self._library.follow(found) or found
        functions = [binding for binding in found.bindings if binding.kind == FUNCTION]
        if not functions:
            raise _Fault(Status.SHAPE, f"clear: {location} is not a function")
        if all(function.needs for function in functions):
            raise _Fault(Status.SHAPE, f"clear: {location} needs arguments, it is called without")

    # ---- candidates ----

    def _absent(self, location: Location, depth: int, text: str, near: dict[str, tuple[str, int]]) -> _Fault:
        """Renamed where a like name stands in the same place, or the whole path in another module; else gone.

        What another entry is about is no candidate.
        """
        name = location.path[depth]
        same = {place: path for on in ("instances", "module") for place, path in self._same(location, on)}
        strong = [f"{place} ({path})" for place, path in same.items() if str(place) not in self._known]
        beside = {
            other: place for other, place in near.items() if str(_beside(location, depth, other)) not in self._known
        }
        strong += self._near(name, beside)
        weak = [] if strong else self._holders(location, name)
        status = Status.RENAMED if strong else Status.GONE
        return _Fault(status, text, tuple((strong + weak)[:_SHOWN]))

    def _near(self, name: str, names: dict[str, tuple[str, int]]) -> list[str]:
        close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=_NEAR)
        return [f"{other} ({self._library.path(names[other][0])}:{names[other][1]})" for other in close]

    def _holders(self, location: Location, name: str) -> list[str]:
        """Where else in the package anything of this name is defined."""
        found: list[str] = []
        for file in self._library.mentioning(location.module.split(".", 1)[0], name):
            symbols = self._library.symbols(file.module)
            if symbols is None:
                continue
            for top, bindings in symbols.names.items():
                for binding in bindings:
                    if top == name and binding.kind != IMPORT:
                        found.append(f"{file.module}:{name} ({file.path}:{binding.line})")
                    elif binding.cls is not None and name in binding.cls.members:
                        line = binding.cls.members[name][0].line
                        found.append(f"{file.module}:{top}.{name} ({file.path}:{line})")
            if len(found) >= _SHOWN:
                break
        return found


def _beside(location: Location, depth: int, name: str) -> Location:
    """The location with another name in the place of the one at ``depth``."""
    return Location(location.module, (*location.path[:depth], name, *location.path[depth + 1 :]))
