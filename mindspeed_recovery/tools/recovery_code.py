# SPDX-License-Identifier: Apache-2.0
"""Faults in hand-written recovery code, found in its text: resets that reach nothing, or reach it in a way that fails.

- *dead reset*: assigns an attribute that its target never defines and nobody reads; the real state keeps its contents.
- *split reset*: rebinds a global that other modules imported by name; they go on with the old object.
- *unsafe reset*: works in place on a tensor (``zero_``, ``fill_``, ``+=``) in a rollback path; on unsafe memory it raises.
- *slot overwrite*: registers a handler twice where there is one slot; only the last one is ever called.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.tools.library import Library
from mindspeed_recovery.tools.sources import SourceError, SourceFile
from mindspeed_recovery.tools.symbols import (
    IMPORT,
    VALUE,
    Branch,
    ClassSymbols,
    dotted,
    import_targets,
    statements,
    targets,
)

DEAD, SPLIT, UNSAFE, SLOT = "dead reset", "split reset", "unsafe reset", "slot overwrite"

_ROLLBACK = re.compile(r"rollback|roll_back|repair|clean|recover|restore|reset", re.IGNORECASE)
_REGISTER = re.compile(r"(?:^|_)register_(?:\w+_)?handler$")  # hooks are lists: each registration adds one
_IN_PLACE = {"zero_", "fill_", "add_", "sub_", "mul_", "div_", "masked_fill_", "clamp_", "index_fill_"}
_FRESH = {
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "rand",
    "randn",
    "arange",
    "zeros_like",
    "empty_like",
    "new_zeros",
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class CodeFault:
    """One fault. ``kind``: one of the four; ``text``: what is wrong and what to do instead."""

    kind: str
    path: str
    line: int
    text: str


@dataclass
class CodeReport:
    """``unresolved``: modules whose attributes the code assigns but that are in no source; what it does to them is unknown."""

    files: int
    faults: list[CodeFault]
    unresolved: list[str]
    problems: list[str]


def check(files: Sequence[SourceFile], library: Library, known: Mapping[str, Sequence[str]]) -> CodeReport:
    """Look for the four faults in ``files``.

    ``library``: the sources that the code works on. ``known``: for each location of the catalogue in any version
    (``module:NAME``), where the same state is in the version at hand, for the advice.
    """
    read: list[_File] = []
    problems: list[str] = []
    for source in files:
        try:
            read.append(_File(source, source.parse(), library))
        except SourceError as error:
            problems.append(str(error))
    faults: list[CodeFault] = []
    unresolved: set[str] = set()
    inside = {file.source.module for file in read}
    readers = _Readers(library, inside)
    for file in read:
        for reset in file.resets():
            if reset.unresolved:
                if reset.unresolved.split(".")[0] not in sys.stdlib_module_names:
                    unresolved.add(reset.unresolved)
            elif (fault := _dead(reset, library, readers, known) or _split(reset, library, readers)) is not None:
                faults.append(CodeFault(fault[0], file.source.path, reset.line, fault[1]))
    faults += _unsafe_resets(read)
    faults += _slot_overwrites(read)
    faults.sort(key=lambda fault: (fault.path, fault.line, fault.kind))
    return CodeReport(len(files), faults, sorted(unresolved), problems + list(library.problems.values()))


@dataclass(frozen=True)
class _Reset:
    """An assignment to an attribute of a module, or of a class in one."""

    module: str
    name: str
    line: int
    classes: tuple[tuple[str, ClassSymbols], ...] = ()
    unresolved: str = ""


class _Scope:
    """What names stand for where they are used: imports and aliases of a file and of the functions around a place."""

    def __init__(self, library: Library, source: SourceFile, nodes: Iterable[ast.AST], outer: _Scope | None) -> None:
        self._library = library
        self._outer = outer
        self.imports: dict[str, str] = {}
        self.aliases: dict[str, ast.expr] = {}
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imports.update(import_targets(node, source.module, source.is_package))
            elif isinstance(node, ast.stmt):
                self.aliases.update((t.id, value) for t, value in targets(node) if isinstance(t, ast.Name) and value)

    def target(self, name: str) -> str | None:
        """What an imported name was imported from."""
        return self.imports.get(name) or (self._outer.target(name) if self._outer else None)

    def alias(self, name: str) -> ast.expr | None:
        return self.aliases.get(name) or (self._outer.alias(name) if self._outer else None)

    def module(self, node: ast.AST | None, depth: int = 0) -> str | None:
        """The module that an expression is: a name, an attribute, ``sys.modules[…]`` or ``import_module(…)``."""
        if depth > 5:
            return None
        named = _named_module(node)
        if named is not None:
            return self._library.as_module(named)
        first, _, rest = dotted(node).partition(".")
        target = self.target(first)
        if target is not None:
            module = self._library.as_module(target)
        else:
            alias = self.alias(first) if first else None
            module = self.module(alias, depth + 1) if alias is not None else None
        return self._library.below(module, rest) if module is not None and rest else module

    def classes(self, node: ast.AST) -> list[tuple[str, ClassSymbols]]:
        """The classes that a name may stand for."""
        name = dotted(node)
        owner, _, last = name.rpartition(".")
        if owner:
            parent = node.value if isinstance(node, ast.Attribute) else None
            module = self.module(parent)
            return self._library.classes(module, last) if module is not None else []
        target = self.target(name) if name else None
        module, _, attribute = (target or "").partition(":")
        return self._library.classes(module, attribute) if attribute else []


def _named_module(node: ast.AST | None) -> str | None:
    text: ast.AST | None = None
    if isinstance(node, ast.Subscript) and dotted(node.value) == "sys.modules":
        text = node.slice
    elif isinstance(node, ast.Call) and dotted(node.func).rsplit(".", 1)[-1] == "import_module" and node.args:
        text = node.args[0]
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else None


class _File:
    def __init__(self, source: SourceFile, tree: ast.Module, library: Library) -> None:
        self.source, self.tree, self._library = source, tree, library
        top = [node for node, _ in statements(tree.body)]
        self.scope = _Scope(library, source, top, None)
        self.functions: list[tuple[_Function, _Scope]] = list(self._functions(tree.body, self.scope))

    def _functions(self, body: Iterable[ast.stmt], outer: _Scope) -> Iterator[tuple[_Function, _Scope]]:
        for node, _ in statements(body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = list(ast.walk(node))
                yield node, _Scope(self._library, self.source, inside, outer)
            elif isinstance(node, ast.ClassDef):
                yield from self._functions(node.body, outer)

    def resets(self) -> Iterator[_Reset]:
        """Every assignment to an attribute of a module or class, at module level and in functions."""
        for node, _ in statements(self.tree.body):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from self._assigned([node, *_calls_in(node)], self.scope)
        for function, scope in self.functions:
            nodes = list(ast.walk(function))
            yield from self._assigned(nodes, scope)
            declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
            for statement in (node for node in nodes if isinstance(node, ast.stmt) and declared):
                for target, _ in targets(statement):
                    if isinstance(target, ast.Name) and target.id in declared:
                        yield _Reset(self.source.module, target.id, statement.lineno)

    def _assigned(self, nodes: Iterable[ast.AST], scope: _Scope) -> Iterator[_Reset]:
        for node in nodes:
            if isinstance(node, ast.stmt):
                for target, _ in targets(node):
                    if isinstance(target, ast.Attribute):
                        yield from self._reset(target.value, target.attr, target.lineno, scope)
            elif isinstance(node, ast.Call) and dotted(node.func) == "setattr" and len(node.args) == 3:
                name = node.args[1]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield from self._reset(node.args[0], name.value, node.lineno, scope)

    def _reset(self, owner: ast.expr, name: str, line: int, scope: _Scope) -> Iterator[_Reset]:
        module = scope.module(owner)
        if module is not None:
            yield _Reset(module, name, line)
            return
        classes = scope.classes(owner)
        if classes:
            yield _Reset(classes[0][0], name, line, tuple(classes))
            return
        target = scope.target(dotted(owner).split(".")[0]) if dotted(owner) else None
        if target is not None and self._library.as_module(target.split(":")[0]) is None:
            yield _Reset("", name, line, unresolved=target.split(":")[0])


def _calls_in(node: ast.AST) -> list[ast.AST]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Call)]


# ---- dead and split ----------------------------------------------------------------------------------------------------


class _Readers:
    """Who reads a module's attribute through the module, and who holds its value under a name of its own."""

    def __init__(self, library: Library, ignored: set[str]) -> None:
        self._library = library
        self._ignored = ignored
        self._files: dict[str, _File | None] = {}

    def reads(self, module: str, name: str) -> bool:
        """Whether the module itself mentions the name, or another one reads ``module.name``."""
        own = self._library.file(module)
        if own is not None and module not in self._ignored and self._mentions(own, name):
            return True
        for file in self._library.mentioning(module.split(".", 1)[0], name):
            if file.module in self._ignored or file.module == module:
                continue
            parsed = self._file(file)
            if parsed is not None and self._reads_attribute(parsed, module, name):
                return True
        return False

    def holders(self, module: str, name: str) -> list[str]:
        """Places of the imports by name that were made when their modules were loaded, and keep the object of then."""
        found: list[str] = []
        tops = dict.fromkeys([module.split(".", 1)[0], *(m.split(".", 1)[0] for m in sorted(self._ignored))])
        for top in tops:
            for file in self._library.mentioning(top, name):
                symbols = self._library.symbols(file.module)
                if symbols is None or file.module == module:
                    continue
                for bindings in symbols.names.values():
                    for binding in bindings:
                        if binding.kind == IMPORT and self._library.origin(binding.target) == f"{module}:{name}":
                            found.append(f"{file.path}:{binding.line}")
                if module in symbols.stars and not name.startswith("_"):
                    found.append(file.path)
        return found

    def _file(self, file: SourceFile) -> _File | None:
        if file.module not in self._files:
            try:
                self._files[file.module] = _File(file, file.parse(), self._library)
            except SourceError:
                self._files[file.module] = None
        return self._files[file.module]

    def _mentions(self, file: SourceFile, name: str) -> bool:
        try:
            nodes = ast.walk(file.parse())
        except SourceError:
            return True  # what cannot be read is not accused
        return any(
            (isinstance(node, ast.Name) and node.id == name)
            or (isinstance(node, ast.Constant) and node.value == name)
            or (isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load))
            for node in nodes
        )

    def _reads_attribute(self, file: _File, module: str, name: str) -> bool:
        scopes = [(node, scope) for function, scope in file.functions for node in ast.walk(function)]
        inner = {id(node) for node, _ in scopes}
        scopes += [(node, file.scope) for node in ast.walk(file.tree) if id(node) not in inner]
        for node, scope in scopes:
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
                owner: ast.AST | None = node.value
            elif isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) > 1:
                text = node.args[1]
                owner = node.args[0] if isinstance(text, ast.Constant) and text.value == name else None
            else:
                continue
            if owner is not None and scope.module(owner) == module:
                return True
        return False


def _dead(
    reset: _Reset, library: Library, readers: _Readers, known: Mapping[str, Sequence[str]]
) -> tuple[str, str] | None:
    if reset.classes:
        at, cls = reset.classes[0]
        if any(library.member(at, cls, reset.name) is not None for at, cls in reset.classes):
            return None
        owner, path = f"{at}:{cls.name}", f"{cls.name}.{reset.name}"
        names = library.member_names(at, cls)
        complete = all(library.classes(at, base) for base in cls.bases if base != "object")
    else:
        found = library.symbols(reset.module)
        if found is None or library.lookup(reset.module, reset.name) is not None or library.is_open(reset.module):
            return None
        if library.file(f"{reset.module}.{reset.name}") is not None:  # a submodule is an attribute, too
            return None
        owner, path = reset.module, reset.name
        names = {name: (reset.module, bindings[0].line) for name, bindings in found.names.items()}
        complete = True
    if not complete or readers.reads(reset.module, reset.name):
        return None
    location = str(Location(reset.module, tuple(path.split("."))))
    advice = [f"the catalogue has this state at {place}" for place in known.get(location, ()) if place != location]
    close = difflib.get_close_matches(reset.name, sorted(names), n=2, cutoff=0.6)
    advice += [f"there is {name} ({library.path(names[name][0])}:{names[name][1]})" for name in close if not advice]
    hint = f"; {'; '.join(advice)}" if advice else ""
    return DEAD, f"{owner} neither defines nor reads '{reset.name}': the assignment resets nothing{hint}"


def _split(reset: _Reset, library: Library, readers: _Readers) -> tuple[str, str] | None:
    found = library.lookup(reset.module, reset.name) if not reset.classes else None
    if found is None or VALUE not in found.kinds:
        return None
    holders = readers.holders(reset.module, reset.name)
    if not holders:
        return None
    shown = ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")
    return (
        SPLIT,
        f"{reset.module}:{reset.name} gets a new object, but {shown} imported the old one by name and keep it; "
        "empty it in place (clear())",
    )


# ---- unsafe ------------------------------------------------------------------------------------------------------------


def _unsafe_resets(files: Sequence[_File]) -> Iterator[CodeFault]:
    for file, function, scope in _rollback_path(files):
        fresh = {name for name, value in scope.aliases.items() if _is_fresh(value)}
        for node in ast.walk(function):
            what = _in_place(node, fresh, scope)
            if what is not None and isinstance(node, (ast.expr, ast.stmt)):
                yield CodeFault(
                    UNSAFE,
                    file.source.path,
                    node.lineno,
                    f"{what} in the rollback path ('{function.name}') raises if the tensor is unsafe; "
                    "copy_ a fresh tensor over its whole storage",
                )


def _rollback_path(files: Sequence[_File]) -> list[tuple[_File, _Function, _Scope]]:
    """Functions of the given code that run between a fault and the recomputed step: those whose name says so or that are
    registered as a handler, and what they call."""
    by_name: dict[str, list[tuple[_File, _Function, _Scope]]] = {}
    registered: set[str] = set()
    for file in files:
        for function, scope in file.functions:
            by_name.setdefault(function.name, []).append((file, function, scope))
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and _REGISTER.search(dotted(node.func).rsplit(".", 1)[-1]):
                registered.update(dotted(argument).rsplit(".", 1)[-1] for argument in node.args)
    waiting = [name for name in by_name if _ROLLBACK.search(name) or name in registered]
    reached = set(waiting)
    while waiting:
        for _, function, scope in by_name[waiting.pop()]:
            for node in ast.walk(function):
                name = _called(node, scope)
                if name in by_name and name not in reached:
                    reached.add(name)
                    waiting.append(name)
    return [place for name in sorted(reached) for place in by_name[name]]


def _called(node: ast.AST, scope: _Scope) -> str:
    """The function that a call names: a bare name, one of a module, or a method of the object's own."""
    if not isinstance(node, ast.Call):
        return ""
    owner, _, name = dotted(node.func).rpartition(".")
    own = owner in ("", "self", "cls") or (isinstance(node.func, ast.Attribute) and scope.module(node.func.value))
    return name if own else ""


def _in_place(node: ast.AST, fresh: set[str], scope: _Scope) -> str | None:
    """What a node does in place to a tensor that may be unsafe; None if it does nothing of the kind."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        receiver, method = node.func.value, node.func.attr
        if method == "_foreach_zero_":
            return method
        if method in _IN_PLACE and not _is_fresh(receiver) and dotted(receiver).split(".")[0] not in fresh:
            return f"{ast.unparse(receiver)}.{method}()"
    if isinstance(node, ast.AugAssign) and not isinstance(node.value, ast.Constant) and _shared(node.target, scope):
        return f"'{ast.unparse(node.target)}' {_operator(node.op)}="
    return None


def _operator(operator: ast.operator) -> str:
    signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
    return signs.get(type(operator), type(operator).__name__)


def _is_fresh(node: ast.AST) -> bool:
    """Memory that was allocated just now."""
    return isinstance(node, ast.Call) and dotted(node.func).rsplit(".", 1)[-1] in _FRESH


def _shared(node: ast.AST, scope: _Scope, depth: int = 0) -> bool:
    """Whether an expression is (part of) a module global or a class attribute, not a number of the function's own."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        if isinstance(node, ast.Attribute) and (scope.module(node.value) or scope.classes(node.value)):
            return True
        node = node.value
    if not isinstance(node, ast.Name) or depth > 5:
        return False
    target = scope.target(node.id)
    if target is not None:
        return ":" in target
    alias = scope.alias(node.id)
    return alias is not None and _shared(alias, scope, depth + 1)


# ---- slots -------------------------------------------------------------------------------------------------------------


def _slot_overwrites(files: Sequence[_File]) -> Iterator[CodeFault]:
    seen: dict[tuple[str, ...], list[tuple[str, int, Branch]]] = {}
    functions = {function.name for file in files for function, _ in file.functions}
    for file in files:
        for call, branch in _registrations(file.tree.body):
            name = dotted(call.func)
            if file.scope.target(name.split(".", 1)[0]) is not None:  # a function of a module, however that is called
                name = name.rsplit(".", 1)[-1]
            slot = (name, *_keys(call, functions))
            places = seen.setdefault(slot, [])
            for path, line, other in places:
                if path != file.source.path or not _exclusive(branch, other):
                    yield CodeFault(
                        SLOT,
                        file.source.path,
                        call.lineno,
                        f"{slot[0]} was called at {path}:{line} already: there is one slot, and the handler registered last "
                        "replaces the other; let one handler call both",
                    )
                    break
            places.append((file.source.path, call.lineno, branch))


def _keys(call: ast.Call, functions: set[str]) -> list[str]:
    """What chooses the slot: all arguments before the handler; there is one slot for each."""
    keys: list[str] = []
    for argument in call.args[:-1]:
        if isinstance(argument, ast.Lambda) or dotted(argument).rsplit(".", 1)[-1] in functions:
            break
        keys.append(ast.unparse(argument))
    return keys


def _registrations(body: Iterable[ast.stmt], branch: Branch = ()) -> Iterator[tuple[ast.Call, Branch]]:
    for node, arms in statements(body, branch):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _registrations(node.body, arms)
        elif isinstance(node, (ast.Expr, ast.Assign, ast.Return)) and node.value is not None:
            for part in ast.walk(node.value):
                if isinstance(part, ast.Call) and _REGISTER.search(dotted(part.func).rsplit(".", 1)[-1]):
                    yield part, arms


def _exclusive(one: Branch, other: Branch) -> bool:
    arms = dict(other)
    return any(arms.get(line, arm) != arm for line, arm in one)
