# SPDX-License-Identifier: Apache-2.0
"""What one Python module says about the state of its process, from one walk over its syntax tree.

The facts, and the atoms that values are made of, are those of `audit_model`. Nothing is executed. The order
of statements counts within a function, branches are joined.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from typing import Any

from mindspeed_recovery.tools import audit_words as words
from mindspeed_recovery.tools.audit_model import (
    NOTHING,
    Atom,
    Atoms,
    Call,
    ClassFacts,
    Flow,
    FunctionFacts,
    ModuleFacts,
)
from mindspeed_recovery.tools.symbols import dotted, import_targets, statements

_MOST_ATOMS = 8  # of one value: beyond that a name stands for anything
_DEEPEST = 5  # attributes and calls of one atom
_MOST_PLACES = 6  # readers that are remembered of one name
_IGNORE = re.compile(r"#\s*recovery:\s*ignore\[([\w\s,*-]*)\]\s*(.*)")

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def read(tree: ast.Module, module: str, path: str, *, is_package: bool = False) -> ModuleFacts:
    """The facts of a module from its tree. Raises RecursionError for one that is nested too deeply."""
    facts = ModuleFacts(module, path, is_package)
    for node, _ in statements(tree.body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, target in import_targets(node, module, is_package):
                if name == "*":
                    facts.stars.append(target)
                else:
                    facts.imports.setdefault(name, target)
    _Scope(facts, None, "", None).run(tree.body)
    return facts


def ignores(text: str) -> dict[int, tuple[frozenset[str], str]]:
    """The comments ``# recovery: ignore[RULE, …] reason`` of a source, by line. ``*`` stands for every rule."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _IGNORE.search(line) if "recovery:" in line else None
        if match is not None:
            rules = frozenset(rule.strip() for rule in match[1].split(",") if rule.strip())
            found[number] = (rules, match[2].strip())
    return found


def _join(*values: Atoms) -> Atoms:
    parts = [value for value in values if value]
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    return tuple(dict.fromkeys(atom for part in parts for atom in part))[:_MOST_ATOMS]


def _depth(atom: Atom) -> int:
    depth = 0
    while atom[0] in (".", "()", "+", "i", "e"):
        atom, depth = atom[1], depth + 1
    return depth


def _root(atom: Atom) -> Atom:
    while atom[0] in (".", "()", "+", "i", "e", "x"):
        atom = atom[1]
    return atom


def _result(atoms: Atoms) -> Atoms:
    """What an operation makes of these: tensors only."""
    made = []
    for atom in atoms:
        if atom[0] == "!":
            if atom[1][0] in (words.Holds.TENSOR, words.Holds.PARAMETER):
                made.append(("!", (words.Holds.TENSOR, *atom[1][1:]), atom[2]))
        elif atom[0] not in ("f", "c", "s"):
            made.append(atom if atom[0] == "+" else ("+", atom))
    return tuple(made)


def _tensors(atoms: Atoms) -> Atoms:
    """Those that are known to be tensors."""
    return tuple(atom for atom in atoms if atom[0] == "!" and atom[1][0] is words.Holds.TENSOR)


def _contained(atoms: Atoms) -> Atoms:
    """A container of these."""
    return tuple(atom if atom[0] in ("!", "+", "x", "e", "f", "c") else ("e", atom) for atom in atoms)


def _leaves(node: ast.expr | None) -> list[str]:
    """The names in an annotation."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ["?"]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, (ast.Name, ast.Attribute)):
        return [dotted(node) or "?"]
    if isinstance(node, ast.Subscript):
        outer = dotted(node.value)
        if outer.rpartition(".")[2] in ("Callable", "Literal", "Type", "type"):
            return ["int" if outer.endswith("Literal") else outer]
        return [outer, *_leaves(node.slice)]
    if isinstance(node, (ast.Tuple, ast.List)):
        return [name for item in node.elts for name in _leaves(item)]
    if isinstance(node, ast.BinOp):
        return [*_leaves(node.left), *_leaves(node.right)]
    return ["?"]


class _Scope:
    """A module, class or function body; ``env`` has its local names."""

    def __init__(
        self, facts: ModuleFacts, outer: _Scope | None, name: str, owner: ClassFacts | None, function: bool = False
    ) -> None:
        self.facts = facts
        self.outer = outer  # the enclosing function, if any
        self.name = name
        self.owner = owner
        self.is_function = function
        self.env: dict[str, Atoms] = {}
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()
        self.nested: list[tuple[Function, str, FunctionFacts]] = []
        self.record: FunctionFacts | None = None
        self.branches = 0

    # ---- statements -------------------------------------------------------------------------------------------------

    def run(self, body: Iterable[ast.stmt]) -> None:
        self.body(body)
        for node, name, record in self.nested:
            scope = _Scope(self.facts, self if self.is_function else self.outer, name, self._owner_of(record), True)
            scope.function(node, record)

    def _owner_of(self, record: FunctionFacts) -> ClassFacts | None:
        return self.facts.classes.get(record.owner)

    def function(self, node: Function, record: FunctionFacts) -> None:
        self.record = record
        for index, parameter in enumerate(record.parameters):
            self.env[parameter] = (("p", record.name, index),)
        if record.receiver and record.parameters:
            self.env[record.parameters[0]] = (("s" if record.receiver == "self" else "c", record.owner),)
        if isinstance(node, ast.Lambda):
            self.facts.returns.append((self.name, -1, self.value(node.body)))
            self.run(())
        else:
            self.run(node.body)

    def body(self, body: Iterable[ast.stmt]) -> None:
        for node in body:
            handler = _STATEMENTS.get(type(node))
            if handler is not None:
                handler(self, node)

    def _branch(self, *bodies: list[ast.stmt]) -> None:
        self.branches += 1
        for body in bodies:
            self.body(body)
        self.branches -= 1

    def _if(self, node: ast.If) -> None:
        if dotted(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            self.body(node.orelse)
            return
        self.value(node.test)
        self._branch(node.body, node.orelse)

    def _for(self, node: ast.For) -> None:
        self.branches += 1
        self._bind_items(node.target, node.iter)
        self.branches -= 1
        self._branch(node.body, node.orelse)

    def _while(self, node: ast.While) -> None:
        self.value(node.test)
        self._branch(node.body, node.orelse)

    def _try(self, node: ast.Try) -> None:
        self._branch(node.body, node.orelse, *(handler.body for handler in node.handlers))
        self.body(node.finalbody)

    def _with(self, node: ast.With) -> None:
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, value, "=", node.lineno)
        self.body(node.body)

    def _match(self, node: ast.Match) -> None:
        self.value(node.subject)
        self._branch(*(case.body for case in node.cases))

    def _expression(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _return(self, node: ast.Return) -> None:
        value = node.value
        if isinstance(value, ast.Tuple):
            for index, item in enumerate(value.elts):
                if atoms := self.value(item):
                    self.facts.returns.append((self.name, index, atoms))
        elif value is not None and (atoms := self.value(value)):
            self.facts.returns.append((self.name, -1, atoms))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        at_module = not self.is_function and self.owner is None
        for name, target in import_targets(node, self.facts.module, self.facts.is_package):
            if name == "*":
                continue
            if not at_module and name not in self.globals:
                self.env[name] = (("m", target),)
            elif name in self.globals:
                self.facts.imports.setdefault(name, target)

    def _global(self, node: ast.Global) -> None:
        self.globals.update(node.names)

    def _nonlocal(self, node: ast.Nonlocal) -> None:
        self.nonlocals.update(node.names)

    def _assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                self._unpack(target, node.value, node.lineno)
            else:
                self.bind(target, self.value(node.value), "=", node.lineno, node.value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        promised = self.annotation(node.annotation)
        target = node.target
        denied = words.denies(_leaves(node.annotation))
        if denied:
            if isinstance(target, ast.Name) and self.owner is not None and not self.is_function:
                self.owner.denied[target.id] = denied
            elif isinstance(target, ast.Name) and self._is_global(target.id):
                self.facts.denied[target.id] = denied
            elif isinstance(target, ast.Attribute) and self.owner is not None and dotted(target.value) == "self":
                self.owner.denied[self._mangled(target.attr)] = denied
        if self.owner is not None and not self.is_function and isinstance(target, ast.Name):
            kind = "field" if self.owner.is_record else _shape(node.value)
            if node.value is not None or self.owner.is_record:
                self.owner.attributes.setdefault(target.id, (node.lineno, kind))
            else:  # declared for the objects
                self.owner.rebound.add(target.id)
            value = _join(promised, self.value(node.value))
            if value:
                self._flow((".", ("c", self.owner.name), target.id), value, "=", node.lineno)
            return
        if node.value is None:
            if promised and isinstance(target, ast.Name):
                self._local(target.id, promised)
            return
        self.bind(target, _join(self.value(node.value), promised), "=", node.lineno, node.value)

    def _augmented(self, node: ast.AugAssign) -> None:
        value = self.value(node.value)
        if isinstance(node.target, ast.Name) and not self._is_global(node.target.id):
            self.value(node.target)
            self._local(node.target.id, _join(self.env.get(node.target.id, NOTHING), _result(value)))
            if node.target.id in self.nonlocals:
                self.bind(node.target, value, "+=", node.lineno)
            return
        self.bind(
            node.target,
            value if isinstance(node.value, (ast.List, ast.ListComp)) else _result(value),
            "+=",
            node.lineno,
        )

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        at_module = not self.is_function and self.owner is None
        record = self._function(node, node.name)
        if self.owner is not None and not self.is_function:
            name = self._mangled(node.name)
            known = self.owner.methods.get(name)
            if known is None or not self.facts.functions[known].is_property:
                self.owner.methods[name] = record.name
            if record.is_property and record.cached:  # a cached_property is kept in the instance
                self._flow((".", ("s", self.owner.name), name), (("()", ("f", record.name), -1),), "=", node.lineno)
        elif at_module:
            self.facts.globals.setdefault(node.name, node.lineno)
            self.env[node.name] = (("f", record.name),)
        else:
            self._local(node.name, (("f", record.name),))

    def _function(self, node: Function, label: str) -> FunctionFacts:
        arguments = node.args
        everything = [*arguments.posonlyargs, *arguments.args]
        names = [argument.arg for argument in everything]
        star = -1
        if arguments.vararg is not None:
            star = len(names)
            names.append(arguments.vararg.arg)
        names += [argument.arg for argument in arguments.kwonlyargs]
        if arguments.kwarg is not None:
            names.append(arguments.kwarg.arg)
        name = f"{self.name}.{label}" if self.name else label
        while name in self.facts.functions:
            name += "'"
        positions = dict(enumerate(everything))
        defaults = dict(zip(range(len(everything) - len(arguments.defaults), len(everything)), arguments.defaults))
        first_keyword = len(everything) + (star >= 0)
        for index, (argument, default) in enumerate(zip(arguments.kwonlyargs, arguments.kw_defaults), first_keyword):
            positions[index] = argument
            if default is not None:
                defaults[index] = default
        decorators = getattr(node, "decorator_list", [])
        endings = {dotted(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2] for d in decorators}
        method = self.owner is not None and not self.is_function
        receiver = ""
        if method and "staticmethod" in endings and names and label in ("forward", "backward", "setup_context"):
            bases = self.owner.bases if self.owner is not None else ()
            receiver = "self" if any(base.endswith("Function") for base in bases) else ""  # ctx: an object of the class
        elif method and "staticmethod" not in endings and names:
            of_class = "classmethod" in endings or label in ("__new__", "__init_subclass__", "__class_getitem__")
            receiver = "cls" if of_class else "self"
        record = FunctionFacts(
            name,
            node.lineno,
            self.owner.name if method and self.owner is not None else "",
            receiver,
            tuple(names),
            star,
            frozenset(index for index, default in defaults.items() if _shape(default) == "container"),
            bool(endings & words.CACHES) or "cached_property" in endings,
            bool(endings & {"property", "cached_property", "getter", "abstractproperty"}),
            self.is_function,
            tuple(atom for d in decorators for atom in self.value(d.func if isinstance(d, ast.Call) else d)),
        )
        self.facts.functions[name] = record
        returns = getattr(node, "returns", None)
        if returns is not None and (denied := words.denies(_leaves(returns))):
            record.denied[-1] = denied
        for index, default in defaults.items():
            if value := self.value(default):
                self._flow(("p", name, index), value, "default", node.lineno)
        for index, argument in positions.items():
            if argument.annotation is not None and (denied := words.denies(_leaves(argument.annotation))):
                record.denied[index] = denied
            if argument.annotation is not None and (promised := self.annotation(argument.annotation)):
                self._flow(("p", name, index), promised, "use", node.lineno)
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None and (promised := self.annotation(rest.annotation)):
                self._flow(("p", name, names.index(rest.arg)), promised, "use", node.lineno)
        self.nested.append((node, name, record))
        return record

    def _class(self, node: ast.ClassDef) -> None:
        name = f"{self.name}.{node.name}" if self.name else node.name
        endings = {dotted(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2] for d in node.decorator_list}
        bases = tuple(
            base for b in node.bases if (base := self._canonical(b.value if isinstance(b, ast.Subscript) else b))
        )
        short = {base.rpartition(".")[2].rpartition(":")[2] for base in bases}
        metaclass = next((self._canonical(k.value) for k in node.keywords if k.arg == "metaclass"), "")
        is_record = bool("dataclass" in endings or short & {"NamedTuple", "TypedDict", "Enum", "IntEnum", "BaseModel"})
        cls = ClassFacts(name, node.lineno, bases, metaclass, is_record, self.is_function)
        cls.decorators = tuple(
            atom for d in node.decorator_list for atom in self.value(d.func if isinstance(d, ast.Call) else d)
        )
        self.facts.classes[name] = cls
        if self.is_function:
            self._local(node.name, (("c", name),))
        elif self.owner is None:
            self.facts.globals.setdefault(node.name, node.lineno)
            self.env[node.name] = (("c", name),)
        else:
            self.env[node.name] = (("c", name),)
        scope = _Scope(self.facts, self if self.is_function else self.outer, name, cls)
        scope.run(node.body)

    # ---- putting values somewhere -----------------------------------------------------------------------------------

    def bind(self, target: ast.expr, value: Atoms, how: str, line: int, source: ast.expr | None = None) -> None:
        if isinstance(target, ast.Name):
            self._bind_name(target.id, value, how, line, source)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for item in target.elts:
                self.bind(item, value, how, line)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, value, how, line)
        elif isinstance(target, ast.Attribute):
            attribute = self._mangled(target.attr)
            for base in self.value(target.value):
                if base[0] == "s" and how == "=" and self.owner is not None and base[1] == self.owner.name:
                    self.owner.rebound.add(attribute)
                    if isinstance(source, ast.Call) and words.is_layer(self._canonical(source.func).replace(":", ".")):
                        self.owner.registered.add(attribute)
                if base[0] != "!" and (value or base[0] != "s") and _depth(base) < _DEEPEST:
                    self._flow((".", base, attribute), value, how, line)
        elif isinstance(target, ast.Subscript):
            name = self._computed_global(target)
            if name:
                if name == "globals":
                    value = _result(value)
                    if any(_root(atom)[0] in ("p", "cell") for atom in value):
                        why = "put under a computed name; what it is cannot be told"
                        value = (("!", (words.Holds.TENSOR, words.MEDIUM, why), line),)
                self.facts.globals.setdefault(name, line)
                self._flow(("g", name), value, "globals()", line)
                return
            self.value(target.slice)
            for base in self.value(target.value):
                if base[0] != "!" and value:
                    self._flow(base, value, "item" if how == "=" else how, line)

    def _mangled(self, name: str) -> str:
        """A name as Python stores it: ``__name`` within a class belongs to that class alone."""
        if not name.startswith("__") or name.endswith("__"):
            return name
        scope: _Scope | None = self
        while scope is not None and scope.owner is None:
            scope = scope.outer
        if scope is None or scope.owner is None:
            return name
        return f"_{scope.owner.name.rpartition('.')[2].lstrip('_')}{name}"

    def _bind_name(self, name: str, value: Atoms, how: str, line: int, source: ast.expr | None) -> None:
        if name in self.nonlocals:
            owner = self._captured_from(name)
            if owner is not None and value:
                if self.record is not None:
                    self.record.cells.add((owner.name, name))
                self._flow(("cell", owner.name, name), value, how, line)
            return
        if not self.is_function and self.owner is not None:
            self.env[name] = _join(self.env.get(name, NOTHING), value)
            name = self._mangled(name)
            if isinstance(source, ast.Call) and dotted(source.func) == "property":
                self.owner.attributes[name] = (line, "property")
                return
            self.owner.attributes.setdefault(name, (line, "field" if self.owner.is_record else _shape(source)))
            if value:
                self._flow((".", ("c", self.owner.name), name), value, how, line)
            return
        if self._is_global(name):
            self.facts.globals.setdefault(name, line)
            if _shape(source) == "container":
                self.facts.containers.add(name)
                if isinstance(source, ast.Call) and dotted(source.func).rpartition(".")[2] in words.QUEUES:
                    self.facts.queues.add(name)
            if not self.is_function and value:
                self.env[name] = _join(self.env.get(name, NOTHING), value)
            self._flow(("g", name), value, how, line)
            return
        if self.branches and source is not None and self.env.get(name) and _mentions(source, name):
            self.env[name] = value if value or not _pins(source) else self.env[name]  # x = x.cpu()
        else:
            self._local(name, value)

    def _fill(self, container: ast.expr, value: Atoms) -> None:
        """A local list has the value in it from now on. (Of a mapping with this and that in it, nobody knows the rest.)"""
        if isinstance(container, ast.Name) and self.is_function and value:
            name = container.id
            if name in self.env and name not in self.globals:
                self.env[name] = _join(self.env[name], _contained(value))

    def _local(self, name: str, value: Atoms) -> None:
        self.env[name] = _join(self.env.get(name, NOTHING), value) if self.branches else value

    def _is_global(self, name: str) -> bool:
        return name in self.globals or (not self.is_function and self.owner is None)

    def _unpack(self, target: ast.Tuple | ast.List, source: ast.expr, line: int) -> None:
        if isinstance(source, (ast.Tuple, ast.List)) and len(source.elts) == len(target.elts):
            values = [self.value(item) for item in source.elts]
            for item, value, node in zip(target.elts, values, source.elts):
                self.bind(item, value, "=", line, node)
            return
        value = self.value(source)
        starred = any(isinstance(item, ast.Starred) for item in target.elts)
        for index, item in enumerate(target.elts):
            part = value
            if not starred:
                part = tuple(("i", atom, index) if atom[0] == "()" else atom for atom in value)
            self.bind(item, part, "=", line)

    def _bind_items(self, target: ast.expr, source: ast.expr) -> None:
        """The targets of a loop."""
        line = source.lineno
        called = source.func if isinstance(source, ast.Call) else None
        pair = isinstance(target, (ast.Tuple, ast.List))
        if (
            pair
            and isinstance(called, ast.Name)
            and isinstance(source, ast.Call)
            and isinstance(target, (ast.Tuple, ast.List))
        ):
            if called.id == "enumerate" and len(target.elts) == 2 and source.args:
                self.bind(target.elts[0], NOTHING, "=", line)
                self._bind_items(target.elts[1], source.args[0])
                return
            if called.id == "zip" and len(source.args) == len(target.elts):
                for item, part in zip(target.elts, source.args):
                    self._bind_items(item, part)
                return
        value = self.value(source)
        if (
            isinstance(called, ast.Attribute)
            and called.attr in ("items", "named_parameters", "named_buffers", "named_modules", "named_children")
            and isinstance(target, (ast.Tuple, ast.List))
            and len(target.elts) == 2
        ):
            self.bind(target.elts[0], NOTHING, "=", line)
            self.bind(target.elts[1], value, "=", line)
            return
        self.bind(target, value, "=", line)

    def _flow(self, place: Atom, values: Atoms, how: str, line: int) -> None:
        self.facts.flows.append(Flow(place, values, how, line, self.name))

    def _used(self, atoms: Atoms, why: str, line: int) -> None:
        """What these are follows from what is done with them."""
        for atom in atoms:
            if atom[0] in ("p", "g", ".", "cell") and _depth(atom) < 3:
                self._flow(atom, (("!", (words.Holds.TENSOR, words.MEDIUM, why), line),), "used", line)

    def _computed_global(self, node: ast.Subscript) -> str:
        """The name in ``globals()["NAME"]``, or in ``sys.modules[__name__].__dict__["NAME"]``."""
        if not self._is_namespace(node.value):
            return ""
        key = node.slice
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.isidentifier():
            return key.value
        return "globals"

    def _is_namespace(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            return name == "globals" or (name == "vars" and bool(node.args) and _is_this_module(node.args[0]))
        return isinstance(node, ast.Attribute) and node.attr == "__dict__" and _is_this_module(node.value)

    # ---- values -----------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr | None) -> Atoms:
        handler = _EXPRESSIONS.get(type(node))
        return handler(self, node) if handler is not None else NOTHING

    def _name(self, node: ast.Name) -> Atoms:
        name = node.id
        if not self.is_function and self.owner is not None and name in self.env:
            return self.env[name]
        if self.is_function and name in self.env and name not in self.globals:
            if self.nested and self.record is not None:  # a function within this one may have put something there
                return _join(self.env[name], (("cell", self.name, name),))
            return self.env[name]
        if name not in self.globals:
            owner = self._captured_from(name)
            if owner is not None:
                if self.record is not None:
                    self.record.cells.add((owner.name, name))
                return _join((("cell", owner.name, name),), owner.env.get(name, NOTHING))
        self._read(name, node.lineno)
        return (("g", name),)

    def _captured_from(self, name: str) -> _Scope | None:
        scope = self.outer
        while scope is not None:
            if name in scope.env and name not in scope.globals:
                return scope
            scope = scope.outer
        return None

    def _read(self, name: str, line: int) -> None:
        places = self.facts.reads.setdefault(name, [])
        if len(places) < _MOST_PLACES:
            places.append((line, self.name))

    def _attribute(self, node: ast.Attribute) -> Atoms:
        attribute = self._mangled(node.attr)
        base = self.value(node.value)
        self._read("." + attribute, node.lineno)
        if attribute in words.ONLY_TENSOR_ATTRIBUTES and base:
            self._used(base, f"its .{attribute} is read", node.lineno)
        if attribute in words.HOST_ATTRIBUTES:
            if attribute == "__class__":
                return tuple(("c", atom[1]) for atom in base if atom[0] == "s")
            return NOTHING
        made: list[Atom] = []
        for atom in base:
            if atom[0] in ("!", "+", "x"):
                if attribute in words.TENSOR_ATTRIBUTES:
                    made.append(atom)
            elif _depth(atom) < _DEEPEST:
                made.append((".", atom, attribute))
                if attribute in words.TENSOR_ATTRIBUTES:
                    made.append(("+", atom))
        if attribute in ("weight", "bias") and base and made:
            made.append(("!", (words.Holds.PARAMETER, words.MEDIUM, f"a .{attribute}"), node.lineno))
        if attribute == "main_grad":
            made.append(("!", (words.Holds.TENSOR, words.MEDIUM, "a main_grad"), node.lineno))
        return tuple(made)[:_MOST_ATOMS]

    def _subscript(self, node: ast.Subscript) -> Atoms:
        self.value(node.slice)
        name = self._computed_global(node)
        if name:
            return (("g", name),)
        return self.value(node.value)

    def _operation(self, node: ast.BinOp) -> Atoms:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Mod) and isinstance(node.left, (ast.Constant, ast.JoinedStr)):
            return NOTHING
        return _join(_result(left), _result(right))

    def _unary(self, node: ast.UnaryOp) -> Atoms:
        value = self.value(node.operand)
        return NOTHING if isinstance(node.op, ast.Not) else _result(value)

    def _compare(self, node: ast.Compare) -> Atoms:
        left = self.value(node.left)
        right = [self.value(item) for item in node.comparators]
        if any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
            return NOTHING
        return tuple(a for a in _join(_result(left), *map(_result, right)) if a[0] == "!")

    def _several(self, node: ast.BoolOp) -> Atoms:
        return _join(*(self.value(item) for item in node.values))

    def _choice(self, node: ast.IfExp) -> Atoms:
        self.value(node.test)
        return _join(self.value(node.body), self.value(node.orelse))

    def _elements(self, node: ast.Tuple | ast.List | ast.Set) -> Atoms:
        return _contained(_join(*(self.value(item) for item in node.elts)))

    def _mapping(self, node: ast.Dict) -> Atoms:
        for key in node.keys:
            self.value(key)
        return _contained(_join(*(self.value(item) for item in node.values)))

    def _inner(self, node: ast.Starred | ast.Await | ast.YieldFrom | ast.FormattedValue) -> Atoms:
        return self.value(node.value)

    def _yield(self, node: ast.Yield) -> Atoms:
        if atoms := self.value(node.value):
            self.facts.returns.append((self.name, -1, atoms))
        return NOTHING

    def _text(self, node: ast.JoinedStr) -> Atoms:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.value(part.value)
        return NOTHING

    def _walrus(self, node: ast.NamedExpr) -> Atoms:
        value = self.value(node.value)
        self.bind(node.target, value, "=", node.lineno, node.value)
        return value

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Atoms:
        kept = self.env
        names, function, owner = self.globals, self.is_function, self.owner
        self.env, self.is_function = dict(kept), True  # its names are its own
        self.globals = set()
        for generator in node.generators:
            self._bind_items(generator.target, generator.iter)
            for condition in generator.ifs:
                self.value(condition)
        made = self.value(node.value if isinstance(node, ast.DictComp) else node.elt)
        self.env, self.globals, self.is_function, self.owner = kept, names, function, owner
        return made

    def _lambda(self, node: ast.Lambda) -> Atoms:
        owner, function = self.owner, self.is_function
        record = self._function(node, f"<lambda {node.lineno}>")
        record.receiver = record.owner = ""
        record.nested = self.is_function
        self.owner, self.is_function = owner, function
        return (("f", record.name),)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Atoms:
        arguments = [self.value(argument) for argument in node.args]
        keywords = [(keyword.arg or "", self.value(keyword.value)) for keyword in node.keywords]
        function = node.func
        if isinstance(function, ast.Name) and (special := _SPECIAL.get(function.id)) and function.id not in self.env:
            made = special(self, node, arguments)
            if made is not None:
                return made
        if (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Call)
            and dotted(function.value.func) == "super"
        ):
            if function.attr == "__call__" and self.owner is not None and "type" in self.owner.bases:
                return (("meta", self.owner.name),)  # the instances of the classes that it is the class of
            callee = tuple((".", ("super", self.owner.name), function.attr) for _ in "1" if self.owner is not None)
            return self._called(callee, arguments, keywords, node.lineno)
        name = self._canonical(function).replace(":", ".")
        if name:
            known = self._known_call(name, node, arguments, keywords)
            if known is not None:
                return known
        if isinstance(function, ast.Attribute):
            return self._method(node, function, arguments, keywords)
        last = name.rpartition(".")[2]
        passed = _join(*arguments, *(value for _, value in keywords)) if last in words.PASSING else NOTHING
        callee = self.value(function)
        if callee and self._is_given_dtype(node):
            word = (words.Holds.TENSOR, words.MEDIUM, f"{name}() is given a type of tensors")
            passed = _join(passed, tuple(("x", atom, ("!", word, node.lineno)) for atom in callee))
        return _join(passed, self._called(callee, arguments, keywords, node.lineno))

    def _known_call(
        self, name: str, node: ast.Call, arguments: list[Atoms], keywords: list[tuple[str, Atoms]]
    ) -> Atoms | None:
        """The result of a call of torch."""
        if not name.startswith("torch"):
            return None
        line = node.lineno
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        where = options.get("device")
        device = None if where is None else not self._is_host(where)
        if isinstance(pin := options.get("pin_memory"), ast.Constant) and pin.value:
            device = False
        if name.startswith("torch.distributed.") and not _is_false(options.get("async_op"), absent=True):
            return (("!", (words.Holds.HANDLE, words.HIGH, f"{name}(async_op=True)"), line),)
        if device is False:
            return NOTHING
        word = words.call(name, device)
        if word is not None:
            return (("!", word, line),)
        if words.is_operation(name):
            given = [value for value, argument in zip(arguments, node.args) if value]
            for value in given[:1]:
                self._used(value, f"given to {name}()", line)
            flat = _join(*given, *(value for key, value in keywords if key not in ("device", "dtype")))
            sure = words.HIGH if device else words.MEDIUM
            if flat and all(atom[0] == "!" for atom in flat):
                sure = max(atom[1][1] for atom in flat)
            return (("!", (words.Holds.TENSOR, sure, f"{name}()"), line),)
        if name.startswith("torch.") and name.rpartition(".")[2] in words.PASSING | {"script", "compile"}:
            return _join(*arguments)
        if name.startswith("torch."):
            last = name.rpartition(".")[2]
            if device and last[:1].islower():
                return (("!", (words.Holds.TENSOR, words.HIGH, f"{name}() on a device"), line),)
            if name.startswith("torch.nn.") and last[:1].isupper():
                return _join(*arguments)  # a container of layers
            return NOTHING
        return None

    def _method(
        self, node: ast.Call, function: ast.Attribute, arguments: list[Atoms], keywords: list[tuple[str, Atoms]]
    ) -> Atoms:
        method, line = function.attr, node.lineno
        if self._registers(node, method, arguments):
            return NOTHING
        if method == "cuda" and dotted(function.value) in ("torch", "th"):
            return NOTHING
        base = self.value(function.value)
        method = self._mangled(method)
        for atom in base:
            if atom[0] == "s":
                self.facts.classes[atom[1]].called.add(method)
            elif atom[0] == "." and atom[1][0] == "s" and method in words.ONLY_MODULE_METHODS:
                self.facts.classes[atom[1][1]].called.add(atom[2])
        if method in words.SURE_METHODS and base and not all(atom[0] in ("!", "s", "c") for atom in base):
            if method.endswith("_"):
                for atom in base:
                    if atom[0] != "!" and _depth(atom) < _DEEPEST:
                        word = (words.Holds.TENSOR, words.MEDIUM, f".{method}() is called on it")
                        self._flow(atom, (("!", word, line),), method, line)
            else:
                self._used(base, f".{method}() is called on it", line)
        if method in words.STORES and node.args:
            index = min(words.STORES[method], len(arguments) - 1)
            value = _join(arguments[index], *(value for _, value in keywords) if method == "update" else ())
            for atom in base:
                if atom[0] != "!" and value and _depth(atom) < _DEEPEST:
                    self._flow(atom, value, method, line)
            if method in words.APPENDS:
                self._fill(function.value, value)
        elif method == "clear" and not node.args:
            for atom in base:
                if atom[0] in ("g", ".", "c"):
                    self._flow(atom, NOTHING, method, line)
        if method in words.HOST_METHODS:
            return NOTHING
        where = next((keyword.value for keyword in node.keywords if keyword.arg == "device"), None)
        if method == "to" and node.args and where is None:
            where = node.args[0]
        if where is not None and self._is_host(where):
            return NOTHING
        callee = tuple(
            (".", atom, method) for atom in base if atom[0] not in ("!", "+", "x") and _depth(atom) < _DEEPEST
        )
        called = self._called(callee, arguments, keywords, line)
        if method in ("cuda", "npu", "xpu") and not (base and base[0][0] == "s"):
            return _join((("!", (words.Holds.TENSOR, words.HIGH, f".{method}()"), line),), called)
        if method in words.TENSOR_METHODS and not (base and base[0][0] in ("s", "c")):
            word = (words.Holds.TENSOR, words.HIGH if where is not None else words.MEDIUM, f".{method}()")
            known = _tensors(base) if where is None else NOTHING
            return _join(known or (("!", word, line),), called)
        if method == "to" and where is not None and not (base and base[0][0] in ("s", "c")):
            place = dotted(where)
            if node.args and where is node.args[0] and not ("device" in place or place.endswith("local_rank")):
                return _join(_result(base), called)
            return _join((("!", (words.Holds.TENSOR, words.HIGH, ".to(device)"), line),), called)
        if method in words.VIEW_METHODS:
            return _join(_result(base), called)
        if method.endswith("_") and not method.startswith("_") and method in words.SURE_METHODS:
            return _join(_result(base), called)
        if method in words.ITEM_METHODS:
            extra = arguments[1] if len(arguments) > 1 and method in ("get", "setdefault", "pop") else NOTHING
            return _join(base, extra, called)
        if method == "apply" and base and (arguments or keywords) and _looks_like_class(function.value):
            word = (words.Holds.TENSOR, words.MEDIUM, f"{dotted(function.value)}.apply()")
            return _join((("!", word, line),), called)
        if method in words.MODULE_METHODS:
            return (("!", (words.Holds.PARAMETER, words.MEDIUM, f".{method}()"), line),)
        word_of_any = words.method(method) if base and base[0][0] not in ("s", "c") else None
        if word_of_any is not None:
            return _join((("!", word_of_any, line),), called)
        return _join(_tensors(base), called)  # a method of a tensor answers with one

    def _called(self, callee: Atoms, arguments: list[Atoms], keywords: list[tuple[str, Atoms]], line: int) -> Atoms:
        callee = tuple(atom for atom in callee if atom[0] not in ("!", "+", "x") and _depth(atom) < _DEEPEST)
        if not callee:
            return NOTHING
        given = any(arguments) or any(value for _, value in keywords)
        number = -1
        if given:
            number = len(self.facts.calls)
            self.facts.calls.append(Call(callee, tuple(arguments), tuple(keywords)))
        made = tuple(("()", atom, number) for atom in callee)
        tensors = _result(_join(*arguments, *(value for _, value in keywords)))[:3] if given else NOTHING
        outside = tuple(("x", atom, tensor) for atom in callee for tensor in tensors)
        return (made + outside)[:_MOST_ATOMS]

    def _registers(self, node: ast.Call, method: str, arguments: list[Atoms]) -> bool:
        """Whether the call registers a parameter, buffer or module of ``self``."""
        if method not in ("register_buffer", "register_parameter", "add_module", "register_module") or not node.args:
            return False
        first = node.args[0]
        if self.owner is not None and isinstance(first, ast.Constant) and isinstance(first.value, str):
            self.owner.registered.add(first.value)
        return True

    def _canonical(self, node: ast.expr) -> str:
        """A dotted name through the imports: ``torch.zeros``; ``module:NAME.rest`` of what is imported from a module."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        name = node.id
        target = None
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.env and (scope.is_function or scope.owner is not None):
                atoms = scope.env[name]
                if len(atoms) == 1 and atoms[0][0] == "m":
                    target = atoms[0][1]
                    break
                return ".".join([name, *reversed(parts)]) if atoms and atoms[0][0] == "c" else ""
            scope = scope.outer
        if target is None:
            target = self.facts.imports.get(name, name)
        return ".".join([target, *reversed(parts)])

    def _is_given_dtype(self, node: ast.Call) -> bool:
        """Whether a type of tensors is among the arguments."""
        return any(
            argument.attr.startswith(words.DTYPES) and self._canonical(argument) == f"torch.{argument.attr}"
            for argument in (*node.args, *(keyword.value for keyword in node.keywords))
            if isinstance(argument, ast.Attribute)
        )

    def _is_host(self, node: ast.expr) -> bool:
        """Whether a device is the host."""
        if isinstance(node, ast.Call) and node.args:
            node = node.args[0]
        return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("cpu", "meta"))

    # ---- annotations ------------------------------------------------------------------------------------------------

    def annotation(self, node: ast.expr | None) -> Atoms:
        """What an annotation promises; of a class of the module, an instance."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return NOTHING
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = self._canonical(node).replace(":", ".") or dotted(node)
            word = words.annotation(name)
            if word is not None:
                return (("!", word, getattr(node, "lineno", 0)),)
            if name.rpartition(".")[2][:1].isupper() and name.partition(".")[0] not in words.HOST_PACKAGES:
                return tuple(("new", atom) for atom in self.value(node) if atom[0] in ("g", "m", ".", "c"))
            return NOTHING
        if isinstance(node, ast.Subscript):
            outer = dotted(node.value).rpartition(".")[2]
            if outer in ("Callable", "Type", "type", "Literal", "ClassVar"):
                return self.annotation(node.slice) if outer == "ClassVar" else NOTHING
            return self.annotation(node.slice)
        if isinstance(node, (ast.Tuple, ast.List)):
            return _join(*map(self.annotation, node.elts))
        if isinstance(node, ast.BinOp):
            return _join(self.annotation(node.left), self.annotation(node.right))
        return NOTHING

    # ---- functions that are known by their name ---------------------------------------------------------------------

    def _setattr(self, node: ast.Call, arguments: list[Atoms]) -> Atoms | None:
        if len(node.args) != 3:
            return NOTHING
        key = node.args[1]
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            return NOTHING
        if _is_this_module(node.args[0]):
            self.facts.globals.setdefault(key.value, node.lineno)
            self._flow(("g", key.value), arguments[2], "setattr", node.lineno)
            return NOTHING
        for base in arguments[0]:
            if base[0] != "!" and (arguments[2] or base[0] != "s"):
                self._flow((".", base, key.value), arguments[2], "setattr", node.lineno)
        return NOTHING

    def _getattr(self, node: ast.Call, arguments: list[Atoms]) -> Atoms | None:
        if len(node.args) < 2:
            return NOTHING
        key = node.args[1]
        fallback = arguments[2] if len(arguments) > 2 else NOTHING
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            return fallback
        self._read("." + key.value, node.lineno)
        return _join(tuple((".", atom, key.value) for atom in arguments[0] if atom[0] not in "!+x"), fallback)

    def _type(self, node: ast.Call, arguments: list[Atoms]) -> Atoms | None:
        return tuple(("c", atom[1]) for atom in arguments[0] if atom[0] == "s") if len(arguments) == 1 else NOTHING

    def _nothing(self, node: ast.Call, arguments: list[Atoms]) -> Atoms | None:
        return NOTHING


def _shape(node: ast.expr | None) -> str:
    """``container`` or ``value``."""
    if isinstance(node, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)):
        return "container"
    if isinstance(node, ast.Call):
        name = dotted(node.func).rpartition(".")[2]
        if name == "field":  # of a dataclass
            return "value"
        return "container" if name in words.CONTAINERS else "value"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _shape(node.left)
    return "value"


def _pins(node: ast.expr) -> bool:
    """Whether a tensor is moved to pinned memory of the host: what an option may ask for."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pin_memory"


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))


def _is_this_module(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and dotted(node.value) == "sys.modules"
        and isinstance(node.slice, ast.Name)
        and node.slice.id == "__name__"
    )


def _is_false(node: ast.expr | None, *, absent: bool) -> bool:
    return absent if node is None else isinstance(node, ast.Constant) and not node.value


def _looks_like_class(node: ast.expr) -> bool:
    return dotted(node).rpartition(".")[2].lstrip("_")[:1].isupper()


_STATEMENTS: dict[type, Callable[[_Scope, Any], None]] = {
    ast.Expr: _Scope._expression,
    ast.Assign: _Scope._assign,
    ast.AnnAssign: _Scope._annotated,
    ast.AugAssign: _Scope._augmented,
    ast.If: _Scope._if,
    ast.For: _Scope._for,
    ast.AsyncFor: _Scope._for,
    ast.While: _Scope._while,
    ast.Try: _Scope._try,
    ast.With: _Scope._with,
    ast.AsyncWith: _Scope._with,
    ast.Match: _Scope._match,
    ast.Return: _Scope._return,
    ast.Import: _Scope._import,
    ast.ImportFrom: _Scope._import,
    ast.Global: _Scope._global,
    ast.Nonlocal: _Scope._nonlocal,
    ast.FunctionDef: _Scope._define,
    ast.AsyncFunctionDef: _Scope._define,
    ast.ClassDef: _Scope._class,
}
if hasattr(ast, "TryStar"):
    _STATEMENTS[ast.TryStar] = _Scope._try

_EXPRESSIONS: dict[type, Callable[[_Scope, Any], Atoms]] = {
    ast.Name: _Scope._name,
    ast.Attribute: _Scope._attribute,
    ast.Subscript: _Scope._subscript,
    ast.Call: _Scope._call,
    ast.BinOp: _Scope._operation,
    ast.UnaryOp: _Scope._unary,
    ast.Compare: _Scope._compare,
    ast.BoolOp: _Scope._several,
    ast.IfExp: _Scope._choice,
    ast.Tuple: _Scope._elements,
    ast.List: _Scope._elements,
    ast.Set: _Scope._elements,
    ast.Dict: _Scope._mapping,
    ast.Starred: _Scope._inner,
    ast.Await: _Scope._inner,
    ast.YieldFrom: _Scope._inner,
    ast.Yield: _Scope._yield,
    ast.JoinedStr: _Scope._text,
    ast.NamedExpr: _Scope._walrus,
    ast.ListComp: _Scope._comprehension,
    ast.SetComp: _Scope._comprehension,
    ast.GeneratorExp: _Scope._comprehension,
    ast.DictComp: _Scope._comprehension,
    ast.Lambda: _Scope._lambda,
}

_SPECIAL: dict[str, Callable[[_Scope, ast.Call, list[Atoms]], Atoms | None]] = {
    "setattr": _Scope._setattr,
    "getattr": _Scope._getattr,
    "type": _Scope._type,
    **dict.fromkeys(
        words.named(
            "len int float str bool isinstance issubclass hasattr print range repr id hash callable any all round ord chr "
            "bytes super format delattr divmod"
        ),
        _Scope._nothing,
    ),
}
