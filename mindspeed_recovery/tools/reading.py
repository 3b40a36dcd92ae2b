# SPDX-License-Identifier: Apache-2.0
"""What the line of code at the end of a traceback reads, as names of process state. Imports and runs nothing of it.

The line comes from the traceback, its surroundings from source files, where there are any. A name in it is followed back:
through assignments in its function, arguments of the calls in the traceback, imports, and what called functions return,
until it ends in a global of a module, an attribute of a class, or nowhere.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mindspeed_recovery.tools.tracebacks import Frame

LARGEST_SOURCE = 4 << 20  # bytes
_MOST_SOURCES = 32  # held at a time, parsed
_MOST_MISSING = 10_000
_DEEPEST = 30
_MOST_NODES = 5000  # that one traceback may look at

_INFRASTRUCTURE = re.compile(
    r"(?:site|dist)-packages/(?:torch|torch_npu)/|/mindspeed_recovery/(?:core|frameworks|runtimes|testing|run\.py)|^<"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FRESH = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant, ast.JoinedStr)  # their result is nobody's state yet


@dataclass(frozen=True)
class Name:
    """A piece of state that is read. ``module``: None where it is not known. ``path``: names, then constant keys.

    ``owner_known``: False if ``path`` begins with a local variable, or is an attribute of an object of which nothing else
    is known. ``called``: it is called; what it is a name of is a function, or has a cache. ``derived``: what is read came out
    of a call, so that it may be something new; of no use but to compare it with what is known to be state.
    """

    module: str | None
    path: tuple[str, ...]
    owner_known: bool = True
    called: bool = False
    derived: bool = False

    def __str__(self) -> str:
        return f"{self.module or '?'}:{'.'.join(self.path)}"


@dataclass
class Source:
    """One source file. ``tree`` is an empty module where only a line of it is known."""

    module: str
    tree: ast.Module
    lines: Sequence[str] = ()
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Local name: module, and the name in it (None: the module itself)."""
    names: set[str] = field(default_factory=set)
    """What the module itself defines."""
    package: bool = False

    def __post_init__(self) -> None:
        base = self.module.split(".") if self.package else self.module.split(".")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    target = alias.name if alias.asname else alias.name.split(".")[0]
                    self.imports[alias.asname or target] = (target, None)
            elif isinstance(node, ast.ImportFrom):
                parts = base[: len(base) - node.level + 1] if node.level else []
                module = ".".join([*parts, *(node.module or "").split(".")]).strip(".")
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (module, alias.name)
        for statement in _module_level(self.tree.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.names.add(statement.name)
            else:
                self.names.update(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and _is_store(n))

    def definition(self, *path: str) -> ast.AST | None:
        """The function or class at a dotted path in the module."""
        body: Sequence[ast.stmt] = self.tree.body
        found: ast.AST | None = None
        for name in path:
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            found = next((s for s in _module_level(body) if isinstance(s, kinds) and s.name == name), None)
            if found is None:
                return None
            body = found.body
        return found


class Sources:
    """Source files by path and module: below ``roots``, and where Python would import from here. ``packages``: names of
    top-level packages, to tell the module of a path."""

    def __init__(self, roots: Iterable[Path] = (), packages: Iterable[str] = ()) -> None:
        self._roots = [root.resolve() for root in roots]
        self._packages = frozenset(packages)
        self._loaded: OrderedDict[tuple[str, str], Source] = OrderedDict()
        self._missing: set[tuple[str, str]] = set()

    def of_frame(self, file: str) -> Source | None:
        """The source that a frame's file name stands for. A file of the same name below ``roots`` comes first."""
        parts = _parts(file)
        module = self.module_name(file)
        for root in self._roots:
            for start in range(len(parts)):
                found = self._load(root.joinpath(*parts[start:]), module)
                if found is not None:
                    return found
        return self._load(Path(file), module) or self.of_module(module)

    def of_module(self, name: str) -> Source | None:
        """The source of a module, by its dotted name."""
        if not name or not all(part.isidentifier() for part in name.split(".")):
            return None
        parts = name.split(".")
        for root in (*self._roots, *(Path(entry) for entry in sys.path if entry)):
            # A root may be the top-level package itself.
            for rest in (parts, parts[1:]) if root.name == parts[0] else (parts,):
                found = self._load(root.joinpath(*rest, "__init__.py"), name) if rest else None
                if found is None and rest:
                    found = self._load(root.joinpath(*rest[:-1], f"{rest[-1]}.py"), name)
                if found is not None:
                    return found
        return None

    def module_name(self, file: str) -> str:
        """The module that a path is likely to be of."""
        parts = _parts(file)
        start = len(parts) - 1
        for index, part in enumerate(parts[:-1]):
            if part in ("site-packages", "dist-packages"):
                start = index + 1
            elif part in self._packages and start == len(parts) - 1:
                start = index
            elif part in self._packages and parts[start] in self._packages and index - start > 1:
                start = index  # a checkout below a folder of the same name
        names = [*parts[start:-1], parts[-1].removesuffix(".py")] if parts else []
        return ".".join(names[:-1] if names[-1:] == ["__init__"] else names)

    def _load(self, path: Path, module: str) -> Source | None:
        key = (str(path), module)
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return self._loaded[key]
        source = None if key in self._missing else _read(path, module)
        if source is None:
            if len(self._missing) >= _MOST_MISSING:
                self._missing.clear()
            self._missing.add(key)
            return None
        if len(self._loaded) >= _MOST_SOURCES:
            self._loaded.popitem(last=False)
        self._loaded[key] = source
        return source


def _read(path: Path, module: str) -> Source | None:
    try:
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > LARGEST_SOURCE:
            return None
        text = path.read_bytes().decode("utf-8", "replace")
        return Source(module, parse(text), text.splitlines(), package=path.name == "__init__.py")
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None  # no source is a case that there is anyway


def _parts(file: str) -> tuple[str, ...]:
    return tuple(part for part in PurePosixPath(file.replace("\\", "/")).parts if part not in ("/", "..", "."))


def parse(text: str) -> ast.Module:
    """Parse Python. Raises what `ast.parse` raises; warnings about somebody else's code are not ours to print."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def is_infrastructure(frame: Frame) -> bool:
    """Whether a frame is torch's or the plugin's: what it reads, it was given."""
    return bool(_INFRASTRUCTURE.search(frame.file.replace("\\", "/")))


def read_by(frames: Sequence[Frame], sources: Sources) -> list[Name]:
    """What the innermost frame that is not infrastructure reads, the likeliest first. Empty if there is nothing to say."""
    return list(dict.fromkeys(_Reader(frames, sources).names()))


@dataclass(frozen=True)
class _Place:
    """Where an expression stands: its file, function, class, and its frame's index (None: not in the traceback).

    ``call``, ``caller``: for a function that is not in the traceback, the call that led to it and where that stands.
    """

    source: Source
    function: Function | None
    classes: tuple[str, ...]
    frame: int | None
    call: ast.Call | None = None
    caller: _Place | None = None

    @property
    def key(self) -> tuple[int, int | None, int]:
        """The same for places with the same variables."""
        return id(self.function or self.source), self.frame, id(self.call)


class _Reader:
    def __init__(self, frames: Sequence[Frame], sources: Sources) -> None:
        self._frames = [frame for frame in frames if not is_infrastructure(frame)]
        self._sources = sources
        self._marked = any(frame.anchors for frame in frames)  # Python 3.11 and later
        self._budget = _MOST_NODES
        self._here: dict[int, tuple[_Place, ast.AST | None, bool]] = {}
        self._known: dict[tuple[Any, ...], tuple[Name, ...]] = {}

    def names(self) -> Iterator[Name]:
        if not self._frames:
            return
        place, node, exact = self._at(len(self._frames) - 1)
        if node is None:
            return
        for expression in _operands(node) if exact else _chains(node):
            yield from self._follow(expression, place, 0)

    # ---- the line of a frame ----------------------------------------------------------------------------------------

    def _at(self, index: int) -> tuple[_Place, ast.AST | None, bool]:
        """Where a frame is, the operation that it was at, and whether that is known to the column."""
        if index not in self._here:
            self._here[index] = self._locate(index)
        return self._here[index]

    def _locate(self, index: int) -> tuple[_Place, ast.AST | None, bool]:
        frame = self._frames[index]
        source = self._sources.of_frame(frame.file)
        text = frame.source.strip()
        line = _matching_line(source, frame) if source is not None else None
        if source is None or line is None:
            module = self._sources.module_name(frame.file)
            place = _Place(Source(module, ast.Module([], [])), None, (), index)
            tree = parse_line(text)
            statement: ast.AST | None = tree.body[-1] if tree is not None and tree.body else None
            exact = self._operation(statement, frame, 1, 0)
            return (place, exact or statement, exact is not None)
        function, classes = _enclosing(source.tree, line)
        place = _Place(source, function, classes, index)
        statement = _statement(function or source.tree, line)
        full = source.lines[line - 1]
        exact = self._operation(statement, frame, line, len(full) - len(full.lstrip()))
        return (place, exact or statement, exact is not None)

    def _operation(self, statement: ast.AST | None, frame: Frame, line: int, indent: int) -> ast.AST | None:
        """The node below the marks of a line. Python leaves them out where the whole line is meant."""
        if statement is None or not self._marked or not frame.source:
            return None
        if not frame.anchors:
            if isinstance(statement, ast.Expr):
                return statement.value
            return statement if isinstance(statement, ast.AugAssign) else None
        # Both lines carry the same indentation of the log.
        shift = len(frame.source) - len(frame.source.lstrip())
        start = len(frame.anchors) - len(frame.anchors.lstrip()) - shift + indent
        end = len(frame.anchors.rstrip()) - shift + indent
        for node in ast.walk(statement):
            if getattr(node, "lineno", 0) != line or getattr(node, "end_lineno", 0) != line:
                continue
            if isinstance(node, ast.expr) and (node.col_offset, node.end_col_offset) == (start, end):
                return node
        return None

    # ---- following a name -------------------------------------------------------------------------------------------

    def _follow(self, node: ast.AST, place: _Place, depth: int) -> Iterator[Name]:
        self._budget -= 1
        if depth > _DEEPEST or self._budget < 0 or isinstance(node, _FRESH):
            return
        if isinstance(node, ast.Name):
            yield from self._follow_name(node.id, place, depth)
        elif isinstance(node, ast.Attribute):
            yield from self._follow_attribute(node, place, depth)
        elif isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if isinstance(key, int):
                yield from self._follow_item(node.value, key, place, depth + 1)
                return
            for name in self._follow(node.value, place, depth + 1):
                yield dataclasses.replace(name, path=(*name.path, key)) if isinstance(key, str) else name
        elif isinstance(node, ast.Call):
            yield from self._follow_call(node, place, depth)
        elif isinstance(node, (ast.Starred, ast.Await, ast.NamedExpr)):
            yield from self._follow(node.value, place, depth + 1)
        elif isinstance(node, ast.IfExp):
            for part in (node.body, node.orelse):
                yield from self._follow(part, place, depth + 1)
        elif isinstance(node, ast.BoolOp):
            for part in node.values:
                yield from self._follow(part, place, depth + 1)
        elif isinstance(node, (ast.Tuple, ast.List)):
            for part in node.elts:
                yield from self._follow(part, place, depth + 1)

    def _follow_item(self, node: ast.AST, index: int, place: _Place, depth: int) -> Iterator[Name]:
        """One item of what may be a tuple: of one that is written out, or returned by a function."""
        self._budget -= 1
        if depth > _DEEPEST or self._budget < 0:
            return
        values = list(_assigned(place.function, node.id)) if place.function and isinstance(node, ast.Name) else []
        if isinstance(node, (ast.Tuple, ast.List)):
            if -len(node.elts) <= index < len(node.elts):
                yield from self._follow(node.elts[index], place, depth + 1)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and node.slice.lower is None:
            yield from self._follow_item(node.value, index, place, depth + 1)
        elif isinstance(node, ast.Call):
            yield from self._follow_call(node, place, depth, index)
        elif isinstance(node, ast.Name) and values:
            follow = self._follow_item_of_variable
            yield from self._once((node.id, index, place.key), lambda: follow(node.id, values, index, place, depth))
        else:
            yield from self._follow(node, place, depth + 1)

    def _follow_item_of_variable(
        self, name: str, values: list[ast.AST], index: int, place: _Place, depth: int
    ) -> Iterator[Name]:
        for value in values:
            yield from self._follow_item(value, index, place, depth + 1)
        if place.function is not None and name in _parameters(place.function):
            yield from self._follow_argument(name, place, depth)

    def _once(self, key: tuple[Any, ...], follow: Callable[[], Iterator[Name]]) -> Iterator[Name]:
        """A variable is followed once, also if it is made from itself."""
        if key not in self._known:
            self._known[key] = ()
            self._known[key] = tuple(dict.fromkeys(follow()))
        yield from self._known[key]

    def _follow_name(self, name: str, place: _Place, depth: int) -> Iterator[Name]:
        yield from self._once((name, None, place.key), lambda: self._follow_variable(name, place, depth))

    def _follow_variable(self, name: str, place: _Place, depth: int) -> Iterator[Name]:
        source, function = place.source, place.function
        if function is not None:
            values = list(_assigned(function, name))
            for value in values:
                yield from self._follow(value, place, depth + 1)
            if name in _parameters(function):
                yield from self._follow_argument(name, place, depth)
            elif not values:
                yield from self._global(source, name)
            return
        if source.lines:
            yield from self._global(source, name)
        else:  # only the line is known: a local variable, or a global
            yield Name(source.module, (name,), owner_known=False)

    def _global(self, source: Source, name: str) -> Iterator[Name]:
        if name in source.imports:
            module, original = source.imports[name]
            yield from self._imported(module, original, 0)
        elif name in source.names:
            yield Name(source.module, (name,))

    def _imported(self, module: str, name: str | None, hops: int) -> Iterator[Name]:
        if name is None:
            yield Name(module, ())
            return
        source = self._sources.of_module(module)
        if source is not None and name not in source.names and name in source.imports and hops < 4:
            yield from self._imported(*source.imports[name], hops + 1)
        elif source is None or name in source.names:
            yield Name(module, (name,))
        if source is None or name not in source.names:
            yield Name(f"{module}.{name}", ())

    def _follow_attribute(self, node: ast.Attribute, place: _Place, depth: int) -> Iterator[Name]:
        known = False
        base = node.value
        if isinstance(base, ast.Name) and base.id in ("self", "cls") and place.classes:
            known = True
            for module, path in self._bases(place.source, place.classes):
                yield Name(module, (*path, node.attr))
        for name in self._follow(base, place, depth + 1):
            known = True
            yield Name(name.module, (*name.path, node.attr), name.owner_known and not name.called)
        if not known:
            yield Name(place.source.module, (node.attr,), owner_known=False)

    def _follow_call(self, node: ast.Call, place: _Place, depth: int, item: int | None = None) -> Iterator[Name]:
        """What a call hands out: its receiver's state (a view, an item), and what the function returns."""
        for name in self._follow(node.func, place, depth + 1):
            yield dataclasses.replace(name, called=True, derived=True)
            for made in self._type_of(name, depth):  # an object that is called: a torch module
                yield dataclasses.replace(made, path=(*made.path, "forward"), called=True, derived=True)
            source = self._sources.of_module(name.module) if name.module and name.path else None
            for path in _definitions(source, name.path) if source is not None else ():
                function = source.definition(*path) if source is not None else None
                if source is not None and isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    inner = _Place(source, function, path[:-1], None, node, place)
                    for value in _returned(function):
                        is_getter = isinstance(value, (ast.Name, ast.Attribute, ast.Subscript))
                        follow = self._follow_item(value, item, inner, depth + 1) if item is not None else None
                        for returned in follow or self._follow(value, inner, depth + 1):
                            yield dataclasses.replace(returned, derived=returned.derived or not is_getter)
        if isinstance(node.func, ast.Attribute):
            for name in self._follow(node.func.value, place, depth + 1):
                yield dataclasses.replace(name, derived=True) if item is not None else name

    def _type_of(self, name: Name, depth: int) -> Iterator[Name]:
        """The classes of the objects that methods of a class assign to one of its attributes."""
        source = (
            self._sources.of_module(name.module) if name.module and len(name.path) > 1 and name.owner_known else None
        )
        owner = source.definition(*name.path[:-1]) if source is not None else None
        if source is None or not isinstance(owner, ast.ClassDef) or depth > _DEEPEST:
            return
        for node in ast.walk(owner):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            if any(isinstance(t, ast.Attribute) and t.attr == name.path[-1] for t in node.targets):
                for made in self._follow(node.value.func, _Place(source, None, (), None), depth + 1):
                    there = self._sources.of_module(made.module) if made.module and made.path else None
                    if there is not None and isinstance(there.definition(*made.path), ast.ClassDef):
                        yield made

    def _follow_argument(self, name: str, place: _Place, depth: int) -> Iterator[Name]:
        """A parameter is what the calling frame passed, or what that one was given and passed on."""
        function, called = place.function, getattr(place.function, "name", "")
        if function is not None and place.call is not None and place.caller is not None:
            for argument in _argument(place.call, name, function, bool(place.classes)):
                yield from self._follow(argument, place.caller, depth + 1)
            return
        index = place.frame or 0
        while index > 0 and function is not None:
            index -= 1
            caller, node, _ = self._at(index)
            call = _call_of(node, called)
            if call is None:
                return
            arguments = list(_argument(call, name, function, bool(place.classes)))
            for argument in arguments:
                yield from self._follow(argument, caller, depth + 1)
            starred = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
            if arguments or not starred:
                return
            called = getattr(caller.function, "name", "")

    def _bases(self, source: Source, classes: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """A class and those it inherits from, as far as their sources are there."""
        queue: list[tuple[Source, tuple[str, ...]]] = [(source, classes)]
        seen: set[tuple[str, tuple[str, ...]]] = set()
        while queue and len(seen) < 20:
            here, path = queue.pop(0)
            if (here.module, path) in seen:
                continue
            seen.add((here.module, path))
            yield here.module, path
            definition = here.definition(*path)
            for base in definition.bases if isinstance(definition, ast.ClassDef) else ():
                for name in self._follow(base, _Place(here, None, (), None), 1):
                    there = self._sources.of_module(name.module) if name.module else None
                    if there is not None and name.path:
                        queue.append((there, name.path))


# ---- lines, statements, expressions --------------------------------------------------------------------------------------


def parse_line(text: str) -> ast.Module | None:
    """One line of code by itself: the beginning of a statement, or a part of one. None if it is none."""
    text = text.strip()
    opened = "".join({"(": ")", "[": "]", "{": "}"}.get(c, "") for c in text if c in "([{")
    closers = opened[::-1][: max(0, len(opened) - sum(text.count(c) for c in ")]}"))]
    for attempt in (
        text,
        f"{text}\n  pass",
        f"if 0: pass\n{text}\n  pass",
        f"{text}{closers}",
        f"{text}{closers}:\n  pass",
    ):
        try:
            return parse(attempt)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    names = re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", text)[:20]
    body = []
    for name in names:
        try:
            body += parse(name).body
        except (SyntaxError, ValueError):
            continue  # a keyword
    return ast.Module([ast.If(ast.Constant(True), body, [])], []) if body else None


def _matching_line(source: Source, frame: Frame) -> int | None:
    """The line of the source that the frame is at, by its number or, in another version, by its text."""
    text, lines = frame.source.strip(), source.lines
    if 1 <= frame.line <= len(lines) and (not text or lines[frame.line - 1].strip() == text):
        return frame.line
    same = [n for n, line in enumerate(lines, 1) if text and line.strip() == text]
    inside = [n for n in same if getattr(_enclosing(source.tree, n)[0], "name", "<module>") == frame.function]
    candidates = inside or same
    return min(candidates, key=lambda n: abs(n - frame.line)) if candidates else None


def _covers(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _enclosing(tree: ast.Module, line: int) -> tuple[Function | None, tuple[str, ...]]:
    """The innermost function around a line, and the class that it is a method of."""
    function: Function | None = None
    classes: tuple[str, ...] = ()
    owner: tuple[str, ...] = ()
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        for child in ast.iter_child_nodes(node):
            if not _covers(child, line) and hasattr(child, "lineno"):
                continue
            if isinstance(child, ast.ClassDef):
                classes = (*classes, child.name)
                owner = classes
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                function = child
                classes = ()
            stack.append(child)
    return function, owner


def _statement(tree: ast.AST, line: int) -> ast.AST | None:
    """The innermost statement at a line; of a compound one its head."""
    found: ast.AST | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _covers(node, line):
            span = (node.end_lineno or 0) - node.lineno
            if found is None or span <= (found.end_lineno or 0) - found.lineno:  # type: ignore[attr-defined]
                found = node
    return found


def _module_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, and of the conditions and handlers in it."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _module_level(statement.body)
            yield from _module_level(getattr(statement, "orelse", ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _module_level(handler.body)


def _is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _operands(node: ast.AST) -> list[ast.AST]:
    """What one operation reads; the result of another operation among it is nobody's state."""
    if isinstance(node, ast.BinOp):
        parts: list[ast.AST] = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.AugAssign):
        parts = [node.target, node.value]
    elif isinstance(node, ast.Call):
        parts = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            parts.insert(0, node.func.value)
    else:
        parts = [node]
    return [inner for part in parts for inner in _flat(part) if not isinstance(inner, _FRESH)]


def _flat(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Tuple, ast.List)):
        for item in node.elts:
            yield from _flat(item)
    else:
        yield node


def _chains(node: ast.AST) -> Iterator[ast.AST]:
    """Every name, attribute, item and call in a statement, outermost first. What is only assigned to is not read."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        if not (isinstance(node, ast.Name) and _is_store(node)):
            yield node
        inner: ast.AST = node
        while isinstance(inner, (ast.Attribute, ast.Subscript, ast.Call)):
            if isinstance(inner, ast.Subscript):
                yield from _chains(inner.slice)
            elif isinstance(inner, ast.Call):
                for part in (*inner.args, *(keyword.value for keyword in inner.keywords)):
                    yield from _chains(part)
            inner = inner.func if isinstance(inner, ast.Call) else inner.value
        if not isinstance(inner, ast.Name):
            yield from _chains(inner)
    elif isinstance(node, ast.AugAssign):
        yield node.target
        yield from _chains(node.target)
        yield from _chains(node.value)
    elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        compound = isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try))
        pretend = isinstance(node, ast.If) and isinstance(node.test, ast.Constant)
        for child in ast.iter_child_nodes(node):
            if not (compound and isinstance(child, ast.stmt)) or pretend:
                yield from _chains(child)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    stack: list[ast.AST] = list(function.body) if isinstance(function.body, list) else [function.body]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))


def _assigned(function: Function, name: str) -> Iterator[ast.AST]:
    """The values that a local variable is given."""
    for node in _own_nodes(function):
        pairs: list[tuple[ast.AST, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            pairs = [(node.target, node.iter)]
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            pairs = [(item.optional_vars, item.context_expr) for item in node.items if item.optional_vars]
        for target, value in pairs:
            yield from _bound(target, value, name)


def _bound(target: ast.AST, value: ast.expr, name: str) -> Iterator[ast.AST]:
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, (ast.Tuple, ast.List)):
        items = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        alike = len(items) == len(target.elts)
        for index, part in enumerate(target.elts):
            item = items[index] if alike else ast.Subscript(value, ast.Constant(index), ast.Load())
            yield from _bound(part, item, name)


def _definitions(source: Source, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """A function and, for a method, those of the module's classes that override it."""
    yield path
    if len(path) != 2:
        return
    derived = {path[0]}
    for statement in _module_level(source.tree.body):
        if isinstance(statement, ast.ClassDef) and any(getattr(b, "id", None) in derived for b in statement.bases):
            derived.add(statement.name)
            yield statement.name, path[1]


def _returned(function: Function) -> Iterator[ast.AST]:
    for node in _own_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [a.arg for a in (*named, arguments.vararg, arguments.kwarg) if a is not None]


def _call_of(node: ast.AST | None, function: str) -> ast.Call | None:
    """The call of ``function`` in a statement; else its only call, which led there through a decorator or a module."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)] if node is not None else []
    named = [c for c in calls if getattr(c.func, "attr", getattr(c.func, "id", None)) == function]
    if named:
        return named[0]
    return calls[0] if calls and (len(calls) == 1 or calls[0] is node) else None


def _argument(call: ast.Call, name: str, function: Function, is_method: bool) -> Iterator[ast.AST]:
    """The expression that a call passes for a parameter."""
    arguments = function.args
    if name == (arguments.vararg.arg if arguments.vararg else None):
        yield from call.args
        return
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    static = any(getattr(d, "id", "") == "staticmethod" for d in getattr(function, "decorator_list", ()))
    if is_method and positional and not static:
        if name == positional[0]:
            if isinstance(call.func, ast.Attribute):
                yield call.func.value
            return
        positional = positional[1:]
    for keyword in call.keywords:
        if keyword.arg == name:
            yield keyword.value
            return
    if name in positional and not any(isinstance(a, ast.Starred) for a in call.args):
        index = positional.index(name)
        if index < len(call.args):
            yield call.args[index]
