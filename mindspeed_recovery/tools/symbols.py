# SPDX-License-Identifier: Apache-2.0
"""What one Python module defines, from its syntax tree: globals, functions, classes and their attributes.

Found are also the roundabout ways: ``global X`` in a function, ``globals()["X"] = …``, ``setattr(module, "X", …)``,
attributes that methods give ``self`` or ``cls``, registered buffers, dataclass fields, slots, and each branch of an ``if``
or ``try``. Nothing is executed, so what is bound only through computed names is not seen.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Branch = tuple[tuple[int, int], ...]
"""The ``if`` and ``try`` statements around a binding: the line of each, and which of its arms."""

VALUE, FUNCTION, CLASS, IMPORT, FIELD, INSTANCE = "value", "function", "class", "import", "field", "instance"

_CACHES = {"lru_cache", "cache"}
_CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "OrderedDict", "Counter"}
_REGISTER = {"register_buffer", "register_parameter", "add_module", "register_module"}
_EMPTY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Binding:
    """One place at which a name gets a value.

    ``kind``: ``value``, ``function``, ``class`` or ``import``; of a class attribute also ``field`` (each instance has
    its own: dataclasses, slots) or ``instance`` (given to ``self``). ``types``: names whose call, or whose use as an
    annotation, tells what the value is. ``target`` (import): ``module`` or ``module:NAME``. ``cached`` (function): it has
    an ``lru_cache``. ``needs`` (function): arguments that a caller must give, ``self`` or ``cls`` not counted.
    """

    kind: str
    line: int
    branch: Branch = ()
    types: frozenset[str] = _EMPTY
    target: str = ""
    cached: bool = False
    is_property: bool = False
    overload: bool = False
    needs: int = 0
    cls: ClassSymbols | None = field(default=None, compare=False, repr=False)

    def excludes(self, other: Binding) -> bool:
        """Whether the two stand in different arms of one statement: only one of them ever takes effect."""
        arms = dict(other.branch)
        return any(arms.get(line, arm) != arm for line, arm in self.branch)


@dataclass(frozen=True)
class ClassSymbols:
    """One class: ``bases`` as they are written, ``members`` by name."""

    name: str
    line: int
    bases: tuple[str, ...]
    members: dict[str, list[Binding]]


@dataclass
class ModuleSymbols:
    """What one module defines.

    ``names``: its globals. ``typing``: names bound for type checkers only. ``stars``: modules whose names are imported by
    ``*``. ``computed``: it also binds names that are made up at run time.
    """

    module: str
    names: dict[str, list[Binding]] = field(default_factory=dict)
    typing: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    computed: bool = False


def read(tree: ast.Module, module: str, *, is_package: bool = False) -> ModuleSymbols:
    """The symbols of a module. ``module``: its dotted name, against which relative imports are resolved."""
    return _Reader(module, is_package).read(tree)


def dotted(node: ast.AST | None) -> str:
    """``a.b.c`` for a name or a chain of attributes, otherwise ``""``."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def import_targets(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> Iterator[tuple[str, str]]:
    """``(name, target)`` of what an import binds; ``*`` stands for all names of the target."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        return
    origin = node.module or ""
    if node.level:
        parts = module.split(".")
        kept = len(parts) - node.level + is_package
        origin = ".".join([*parts[: max(kept, 0)], *([node.module] if node.module else [])])
    for alias in node.names:
        yield (alias.asname or alias.name), (origin if alias.name == "*" else f"{origin}:{alias.name}")


def statements(body: Iterable[ast.stmt], branch: Branch = ()) -> Iterator[tuple[ast.stmt, Branch]]:
    """The simple statements, functions and classes of a body with the branches around each; not what is inside them."""
    for node in body:
        yield node, branch
        for arm, inner in _arms(node):
            yield from statements(inner, branch if arm is None else (*branch, (node.lineno, arm)))


def _arms(node: ast.stmt) -> Iterator[tuple[int | None, list[ast.stmt]]]:
    """The bodies within a compound statement; an arm of None runs whichever of the others does."""
    if isinstance(node, ast.If):
        yield from ((0, node.body), (1, node.orelse))
    elif isinstance(node, ast.Try) or (sys.version_info >= (3, 11) and isinstance(node, ast.TryStar)):
        yield 0, node.body
        yield 0, node.orelse
        yield from ((number, handler.body) for number, handler in enumerate(node.handlers, 1))
        yield None, node.finalbody
    elif isinstance(node, ast.Match):
        yield from ((number, case.body) for number, case in enumerate(node.cases))
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
        yield from ((None, node.body), (None, node.orelse))
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        yield None, node.body


def targets(node: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a statement assigns to, each with the value, or with None where the value is not an expression of its own.

    ``x += 1`` is not among them: it needs a name that is there already.
    """
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value)
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield from _unpacked(node.target, None)
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield from _unpacked(item.optional_vars, item.context_expr)


def _unpacked(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) else None
        for index, item in enumerate(target.elts):
            yield from _unpacked(item, parts[index] if parts else None)
    elif isinstance(target, ast.Starred):
        yield from _unpacked(target.value, None)
    else:
        yield target, value


def type_names(node: ast.expr | None, local: LocalTypes | None = None) -> frozenset[str]:
    """Names that tell the type of an expression; ``local`` says what a function's own names may stand for."""
    if isinstance(node, (ast.Dict, ast.DictComp)):
        return frozenset({"dict"})
    if isinstance(node, (ast.List, ast.ListComp)):
        return frozenset({"list"})
    if isinstance(node, (ast.Set, ast.SetComp)):
        return frozenset({"set"})
    if isinstance(node, ast.IfExp):
        return type_names(node.body, local) | type_names(node.orelse, local)
    if isinstance(node, ast.BoolOp):
        return frozenset().union(*(type_names(value, local) for value in node.values))
    if isinstance(node, ast.NamedExpr):
        return type_names(node.value, local)
    name = dotted(node.func if isinstance(node, ast.Call) else node)
    if not name:
        return _EMPTY
    if isinstance(node, ast.Call) and name.rsplit(".", 1)[-1] == "partial" and node.args:
        return type_names(node.args[0], local)
    if name.rsplit(".", 1)[-1] in _CONTAINERS:
        return frozenset({name.rsplit(".", 1)[-1]})
    return frozenset({name}) | (local.of(name) if local is not None else _EMPTY)


def _annotated(node: ast.expr | None) -> frozenset[str]:
    """Names in an annotation; a text in it is an annotation too."""
    names: set[str] = set()
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            try:
                names |= _annotated(ast.parse(part.value, mode="eval").body)
            except (SyntaxError, ValueError):
                continue
        elif isinstance(part, (ast.Name, ast.Attribute)):
            names.add(dotted(part))
    return frozenset(name.lower() if name in ("Dict", "List", "Set") else name for name in names if name)


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


class _Reader:
    def __init__(self, module: str, is_package: bool) -> None:
        self._is_package = is_package
        self._found = ModuleSymbols(module)
        self._later: list[tuple[str, str, Binding]] = []
        """``Class.attribute = …`` outside of the class: name of the class, attribute, binding."""

    def read(self, tree: ast.Module) -> ModuleSymbols:
        self._module_body(tree.body)
        for name, attribute, binding in self._later:
            for owner in self._found.names.get(name, ()):
                if owner.cls is not None:
                    owner.cls.members.setdefault(attribute, []).append(binding)
        return self._found

    # ---- module level ----

    def _module_body(self, body: list[ast.stmt]) -> None:
        names = self._found.names
        for_checkers: set[tuple[int, int]] = set()
        for node, branch in statements(body):
            if isinstance(node, ast.If) and dotted(node.test).rsplit(".", 1)[-1] == "TYPE_CHECKING":
                for_checkers.add((node.lineno, 0))
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(node, branch, self._found.typing if for_checkers.intersection(branch) else names)
            elif for_checkers.intersection(branch):
                continue
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.setdefault(node.name, []).append(_function(node, branch, method=False))
                self._function_body(node, None)
            elif isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(self._class(node, branch))
            else:
                self._assignment(node, branch, names, None)
                if isinstance(node, ast.Expr):
                    self._calls(ast.walk(node), None, "", branch)

    def _import(self, node: ast.Import | ast.ImportFrom, branch: Branch, names: dict[str, list[Binding]]) -> None:
        for name, target in import_targets(node, self._found.module, self._is_package):
            if name == "*":
                self._found.stars.append(target)
            else:
                names.setdefault(name, []).append(Binding(IMPORT, node.lineno, branch, target=target))

    def _assignment(
        self,
        node: ast.stmt,
        branch: Branch,
        names: dict[str, list[Binding]],
        local: LocalTypes | None,
        only: set[str] | None = None,
    ) -> None:
        """Names that the statement binds in this scope, ``globals()["X"]`` and ``Class.attribute``."""
        annotation = _annotated(node.annotation) if isinstance(node, ast.AnnAssign) else _EMPTY
        for target, value in targets(node):
            binding = _value(node.lineno, branch, type_names(value, local) | annotation, value)
            if isinstance(target, ast.Name):
                if only is None or target.id in only:
                    names.setdefault(target.id, []).append(binding)
            elif isinstance(target, ast.Subscript):
                called = target.value.func if isinstance(target.value, ast.Call) else None
                if dotted(called) == "globals" and _text(target.slice):
                    self._found.names.setdefault(_text(target.slice), []).append(binding)
                elif dotted(called) == "globals":
                    self._found.computed = True
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                self._later.append((target.value.id, target.attr, binding))

    # ---- classes ----

    def _class(self, node: ast.ClassDef, branch: Branch) -> Binding:
        members: dict[str, list[Binding]] = {}
        bases = tuple(name for base in node.bases if (name := dotted(base)))
        decorators = {dotted(d.func if isinstance(d, ast.Call) else d).rsplit(".", 1)[-1] for d in node.decorator_list}
        record = "dataclass" in decorators or "NamedTuple" in {base.rsplit(".", 1)[-1] for base in bases}
        for inner, arm in statements(node.body):
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                members.setdefault(inner.name, []).append(_function(inner, arm, method=True))
                self._function_body(inner, members)
            elif isinstance(inner, ast.ClassDef):
                members.setdefault(inner.name, []).append(self._class(inner, arm))
            elif isinstance(inner, ast.AnnAssign) and record and isinstance(inner.target, ast.Name):
                types = type_names(inner.value) | _annotated(inner.annotation)
                members.setdefault(inner.target.id, []).append(Binding(FIELD, inner.lineno, arm, types))
            else:
                self._assignment(inner, arm, members, None)
                for slot in _slots(inner):
                    members.setdefault(slot, []).append(Binding(FIELD, inner.lineno, arm))
        symbols = ClassSymbols(node.name, node.lineno, bases, members)
        return Binding(CLASS, node.lineno, branch, cls=symbols)

    # ---- functions ----

    def _function_body(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, members: dict[str, list[Binding]] | None
    ) -> None:
        """What a function does to the globals, to ``self`` and to ``cls`` when it runs."""
        owner, kind = _receiver(node) if members is not None else ("", VALUE)
        parts = list(ast.walk(node))
        declared = {name for part in parts if isinstance(part, ast.Global) for name in part.names}
        local = LocalTypes(parts)
        for part in parts[1:]:
            if not isinstance(part, ast.stmt):
                continue
            self._assignment(part, (), self._found.names, local, only=declared)
            if declared:
                self._declared(part, declared)
            for target, value in targets(part) if owner else ():
                if members is not None and isinstance(target, ast.Attribute) and dotted(target.value) == owner:
                    annotation = _annotated(part.annotation) if isinstance(part, ast.AnnAssign) else _EMPTY
                    bound = Binding(kind, part.lineno, types=type_names(value, local) | annotation)
                    members.setdefault(target.attr, []).append(bound)
        self._calls(parts, members, owner, ())

    def _declared(self, node: ast.stmt, declared: set[str]) -> None:
        """Imports, functions and classes that a function binds to a name it has declared global."""
        names = self._found.names
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, target in import_targets(node, self._found.module, self._is_package):
                if name in declared:
                    names.setdefault(name, []).append(Binding(IMPORT, node.lineno, target=target))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in declared:
            names.setdefault(node.name, []).append(_function(node, (), method=False))
        elif isinstance(node, ast.ClassDef) and node.name in declared:
            names.setdefault(node.name, []).append(self._class(node, ()))

    def _calls(
        self, parts: Iterable[ast.AST], members: dict[str, list[Binding]] | None, owner: str, branch: Branch
    ) -> None:
        """``setattr`` on the module or on ``self``, and buffers registered by name."""
        for part in parts:
            if not isinstance(part, ast.Call) or not part.args:
                continue
            called = dotted(part.func)
            if called == "setattr" and len(part.args) == 3 and _text(part.args[1]):
                name, receiver = _text(part.args[1]), part.args[0]
                if ast.unparse(receiver) == "sys.modules[__name__]":
                    self._found.names.setdefault(name, []).append(
                        _value(part.lineno, branch, type_names(part.args[2]), part.args[2])
                    )
                elif dotted(receiver) == owner and members is not None:
                    members.setdefault(name, []).append(Binding(INSTANCE, part.lineno))
                elif dotted(receiver):
                    self._later.append((dotted(receiver), name, Binding(VALUE, part.lineno)))
            elif (
                members is not None and called in {f"{owner}.{method}" for method in _REGISTER} and _text(part.args[0])
            ):
                members.setdefault(_text(part.args[0]), []).append(Binding(INSTANCE, part.lineno))


def _value(line: int, branch: Branch, types: frozenset[str], value: ast.expr | None) -> Binding:
    """A name that gets a value; ``f = lru_cache(…)(g)`` is a cached function."""
    called = value.func if isinstance(value, ast.Call) else None
    if _is_cache(called) or (isinstance(called, ast.Call) and _is_cache(called.func)):
        return Binding(FUNCTION, line, branch, cached=True)
    return Binding(VALUE, line, branch, types)


def _is_cache(node: ast.AST | None) -> bool:
    return dotted(node).rsplit(".", 1)[-1] in _CACHES


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, branch: Branch, *, method: bool) -> Binding:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    endings = {dotted(decorator).rsplit(".", 1)[-1] for decorator in decorators}
    positional = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
    needed = positional - (method and "staticmethod" not in endings)
    needed += sum(default is None for default in node.args.kw_defaults)
    return Binding(
        FUNCTION,
        node.lineno,
        branch,
        cached=any(map(_is_cache, decorators)),
        is_property=bool(endings & {"property", "cached_property", "setter", "getter"}),
        overload=bool(endings & {"overload", "setter", "getter", "deleter", "register"}),
        needs=max(needed, 0),
    )


def _receiver(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str]:
    """The name that stands for the object in a method, and what an attribute given to it is."""
    decorators = {dotted(decorator) for decorator in node.decorator_list}
    arguments = [*node.args.posonlyargs, *node.args.args]
    if "staticmethod" in decorators or not arguments:
        return "", VALUE
    is_class = "classmethod" in decorators or node.name in ("__init_subclass__", "__class_getitem__")
    return arguments[0].arg, VALUE if is_class else INSTANCE


def _slots(node: ast.stmt) -> Iterator[str]:
    for target, value in targets(node):
        if isinstance(target, ast.Name) and target.id == "__slots__" and value is not None:
            yield from (text for part in ast.walk(value) if isinstance(part, ast.Constant) and (text := _text(part)))


class LocalTypes:
    """What the names of a function may stand for, followed through its own assignments and classes; made on first use."""

    def __init__(self, parts: Iterable[ast.AST]) -> None:
        self._parts = parts
        self._direct: dict[str, set[str]] | None = None

    def of(self, name: str) -> frozenset[str]:
        if self._direct is None:
            self._direct = self._assigned()
        reached, waiting = {name}, [name]
        while waiting:
            for other in self._direct.get(waiting.pop(), ()):
                if other not in reached:
                    reached.add(other)
                    waiting.append(other)
        return frozenset(reached - {name})

    def _assigned(self) -> dict[str, set[str]]:
        direct: dict[str, set[str]] = {}
        for node in self._parts:
            if isinstance(node, ast.ClassDef):
                direct.setdefault(node.name, set()).update(filter(None, map(dotted, node.bases)))
            elif isinstance(node, ast.stmt):
                for target, value in targets(node):
                    if isinstance(target, ast.Name):
                        direct.setdefault(target.id, set()).update(type_names(value))
        return direct
