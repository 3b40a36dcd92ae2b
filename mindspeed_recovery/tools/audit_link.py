# SPDX-License-Identifier: Apache-2.0
"""The facts of all modules together: which values reach which places.

Every global, attribute of a class, parameter, result and captured local is a node of one graph; flows are its edges. What
travels along them are labels: that a value is a tensor (see `audit_words.Holds`), an instance of a class, a function, a
class, a module, or the object that lives at a place, so that ``get_tracker()[key] = loss`` reaches the global behind
``get_tracker``. The graph grows as labels tell what is called and whose attribute is meant, until nothing changes.
"""

from __future__ import annotations

import builtins
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mindspeed_recovery.tools import audit_words as words
from mindspeed_recovery.tools.audit_model import Atom, Atoms, Call, ClassFacts, Flow, FunctionFacts, ModuleFacts
from mindspeed_recovery.tools.audit_words import Holds

Key = tuple[Any, ...]
Label = tuple[Any, ...]
ClassId = tuple[str, str]
"""Module and name of a class; a function has the like."""

_DEPTH = 20
_MOST_OBJECTS = 16  # classes, functions and places that one value may be: beyond that it may be anything
_MOST_HOPS = 8  # arguments and results that a tensor is followed through


class Evidence(NamedTuple):
    """Why something is believed to hold device state. ``level``: see `audit_words`; ``hops``: calls in between."""

    level: int
    hops: int
    text: str
    module: str
    line: int


@dataclass
class _Node:
    key: Key
    evidence: dict[tuple[Holds, Context], Evidence]
    objects: dict[Label, dict[Context, None]]
    edges: list[_Edge]
    listeners: list[tuple[Any, ...]]
    denied: str  # what its annotation rules out
    forgets: bool  # a place that outlives calls: what is read from it was put there by anybody


Context = tuple[int, ...]
"""The calls, innermost last, through whose arguments something came: it leaves a function by the call that it came by."""
_Edge = tuple[int, int, int]
"""To which node, how (below), and by which call."""
_ALL, _OPERATION, _ARGUMENT, _RESULT, _WEAK, _ELEMENT, _MADE, _HANDED = range(8)
_MOST_CALLS = 2  # of a context
_MOST_CONTEXTS = 12


class Linked:
    """The graph. ``writes``: the flows into each place; ``class_writes``: attributes that a function writes on a
    class; ``given``: attributes that only code outside of their class gives its objects; ``paths``: attributes of the
    object in a global, written through that global."""

    def __init__(self, modules: Iterable[ModuleFacts]) -> None:
        self.modules = {facts.module: facts for facts in modules}
        self.writes: dict[Key, list[tuple[str, Flow]]] = defaultdict(list)
        self.class_writes: set[Key] = set()
        self.given: set[Key] = set()
        self.paths: dict[Key, dict[str, list[tuple[str, Flow]]]] = defaultdict(lambda: defaultdict(list))
        self.attributes: dict[ClassId, dict[str, None]] = defaultdict(dict)
        self.function_attributes: dict[Key, None] = {}
        self._tops = {module.partition(".")[0] for module in self.modules}
        self._suffixes: dict[str, list[str]] = defaultdict(list)
        for module in self.modules:
            self._suffixes[module.rpartition(".")[2]].append(module)
        self._packages = {m[:i] for m in self.modules for i in range(len(m)) if m[i] == "."}
        self._nodes: list[_Node] = []
        self._ids: dict[Key, int] = {}
        self._names: dict[tuple[str, str], Key | None] = {}
        self._found_modules: dict[str, str | None] = {}
        self._mros: dict[ClassId, tuple[list[ClassId], list[str]]] = {}
        self._waiting: deque[tuple[int, Any, Any]] = deque()
        self._connected: set[tuple[Any, ...]] = set()
        self._sites: dict[tuple[str, Any], int] = {}
        self._unknown: list[tuple[int, int, int]] = []
        """Calls of something that may turn out to be a function that is read: callee, argument, result."""
        self._used: list[tuple[str, Flow]] = []
        """What is treated as a tensor, unless it turns out to be an object of a class that is read."""
        self._strange: dict[tuple[int, str, str, Flow], None] = {}
        """Writes of an attribute that the class of the object does not have: the object may be something else."""
        self._handed: dict[int, tuple[int, int]] = {}
        self._callables: set[Key] = set()
        self._has_edge: set[tuple[int, int, int, int]] = set()
        self._by_metaclass: dict[ClassId, list[ClassId]] = defaultdict(list)
        for facts in self.modules.values():
            self._seed(facts)
        for facts in self.modules.values():
            self._build(facts)
        self._settle()
        for module, flow in self._used:
            number = self._atom(module, flow.place)
            if number is not None and not self._is_object(number):
                self._flow(module, flow._replace(how="use"))
        for source, module, name, flow in self._strange:
            self._set_strange(source, module, name, flow)
        self._settle()
        for callee, source, target in self._unknown:
            if not any(label[0] in "FBCI" for label in self._nodes[callee].objects):
                self._edge(source, target, _WEAK)
        self._settle()

    # ---- reading the result -----------------------------------------------------------------------------------------

    def evidence(self, key: Key) -> dict[Holds, Evidence]:
        """What is at a place, by itself or in a container."""
        number = self._ids.get(key)
        best: dict[Holds, Evidence] = {}
        for (holds, _), evidence in self._nodes[number].evidence.items() if number is not None else ():
            if holds not in best or evidence.level > best[holds].level:
                best[holds] = evidence
        return best

    def objects(self, key: Key) -> list[Label]:
        """``("I", module, class)``, ``("F", module, function)``, ``("B", module, function, module, class)`` … at a place."""
        number = self._ids.get(key)
        return list(self._nodes[number].objects) if number is not None else []

    def keys(self) -> Iterator[Key]:
        for node in list(self._nodes):
            yield node.key

    def class_facts(self, cls: ClassId) -> ClassFacts:
        return self.modules[cls[0]].classes[cls[1]]

    def mro(self, cls: ClassId) -> tuple[list[ClassId], list[str]]:
        """The class and those it inherits from that are read, nearest first, and the names of the others."""
        if cls not in self._mros:
            known: dict[ClassId, None] = {}
            outside: dict[str, None] = {}
            waiting = [cls]
            while waiting and len(known) < 50:
                here = waiting.pop(0)
                if here in known:
                    continue
                known[here] = None
                for base in self.class_facts(here).bases:
                    found = self.find_class(here[0], base)
                    if found is not None:
                        waiting.append(found)
                    else:
                        outside[base.replace(":", ".")] = None
            self._mros[cls] = (list(known), list(outside))
        return self._mros[cls]

    def data_class(self, cls: ClassId) -> bool:
        """Whether objects of the class serve data to a training loop: from the host, if nothing tells otherwise."""
        return any(base.startswith("torch.utils.data.") for base in self.mro(cls)[1])

    def has(self, key: Key) -> bool:
        """Whether an attribute is one of its class: by its text, by what it inherits from elsewhere, or given to it."""
        cls = (key[1], key[2])
        known = _defines(self.class_facts(cls), key[3]) or key in self.given or key in self.class_writes
        return known or any(
            base.partition(".")[0] not in words.HOST_PACKAGES and not hasattr(builtins, base)
            for base in self.mro(cls)[1]
        )

    # ---- names ------------------------------------------------------------------------------------------------------

    def find_module(self, name: str) -> str | None:
        """The module that is read under this name: itself, or the one whose name ends so (a checkout's ``src.pkg``)."""
        if name in self.modules:
            return name
        if name not in self._found_modules:
            found = [m for m in self._suffixes.get(name.rpartition(".")[2], ()) if m.endswith(f".{name}")]
            self._found_modules[name] = found[0] if len(found) == 1 and "." in name else None
        return self._found_modules[name]

    def name(self, module: str, name: str, depth: int = 0) -> Key | None:
        """The node of a global name of a module: ``("g", module, name)``, ``("m", module)``; None for what is not read."""
        cached = (module, name)
        if cached in self._names:
            return self._names[cached]
        self._names[cached] = None  # imports in a circle
        facts = self.modules[module]
        found: Key | None = None
        if name in facts.globals:
            found = ("g", module, name)
        elif depth < _DEPTH and name in facts.imports:
            found = self.target(facts.imports[name], depth + 1)
        elif depth < _DEPTH:
            for star in facts.stars:
                inner = self.find_module(star)
                if inner is not None and inner != module and (found := self.name(inner, name, depth + 1)) is not None:
                    break
        self._names[cached] = found
        return found

    def target(self, target: str, depth: int = 0) -> Key | None:
        """The node of an import's target, ``module`` or ``module:NAME``."""
        origin, _, name = target.partition(":")
        module = self.find_module(origin)
        if not name:
            return ("m", module or origin) if module is not None or origin in self._packages else None
        if module is not None:
            found = self.name(module, name, depth)
            if found is not None:
                return found
        inner = self.find_module(f"{origin}.{name}")
        return ("m", inner) if inner is not None else None

    def find_class(self, module: str, name: str) -> ClassId | None:
        """The class that a base or metaclass, as it is written with its import resolved, stands for."""
        facts = self.modules[module]
        if name in facts.classes:
            return module, name
        origin, _, rest = name.partition(":")
        if rest:
            first, _, more = rest.partition(".")
            key = self.target(f"{origin}:{first}")
        else:
            owner, _, last = name.rpartition(".")
            inner = self.find_module(owner) if owner else None
            key, more = (self.name(inner, last), "") if inner is not None else (self.name(module, name), "")
        for part in more.split(".") if more else ():
            key = (
                self.name(key[1], part) if key is not None and key[0] == "m" else key and (*key[:2], f"{key[2]}.{part}")
            )
        if key is not None and key[0] == "g" and key[2] in self.modules[key[1]].classes:
            return key[1], key[2]
        return None

    # ---- building ---------------------------------------------------------------------------------------------------

    def _node(self, key: Key) -> int:
        number = self._ids.get(key)
        if number is None:
            number = self._ids[key] = len(self._nodes)
            kind = key[0]
            self._nodes.append(_Node(key, {}, {}, [], [], self._denied(key), kind in ("g", "A", "cell", "d", "fa")))
            if kind in ("g", "A", "cell", "d") and not (kind == "g" and self._is_defined(key)):
                self._object(number, ("L", number))
                if kind == "A":
                    self.attributes[key[1], key[2]][key[3]] = None
            elif kind == "m":
                self._object(number, ("M", key[1]))
        return number

    def _denied(self, key: Key) -> str:
        if key[0] == "g":
            return self.modules[key[1]].denied.get(key[2], "")
        if key[0] == "A":
            cls = (key[1], key[2])
            told = self.class_facts(cls).denied.get(key[3], "")
            return told or ("tensors" if key in self._callables else "guesses" if self.data_class(cls) else "")
        if key[0] in ("p", "ret") and key[2]:
            function = self.modules[key[1]].functions[key[2]]
            told = function.denied.get(key[3] if key[0] == "p" else -1, "")
            return told or ("guesses" if function.owner and self.data_class((key[1], function.owner)) else "")
        return ""

    def _is_defined(self, key: Key) -> bool:
        """Whether a global is a function or a class: what is put into it is an attribute, not the thing itself."""
        facts = self.modules[key[1]]
        return key[2] in facts.functions or key[2] in facts.classes

    def _site(self, module: str, number: Any) -> int:
        """A number for a call."""
        return self._sites.setdefault((module, number), len(self._sites) + 1)

    def _seed(self, facts: ModuleFacts) -> None:
        module = facts.module
        for name in facts.globals:
            if name in facts.functions:
                self._object(self._node(("g", module, name)), ("F", module, name))
            if name in facts.classes:
                self._object(self._node(("g", module, name)), ("C", module, name))
        for name, function in facts.functions.items():
            for index in function.mutable:
                place = self._node(("d", module, name, index))
                self._edge(place, self._node(("p", module, name, index)))
        for name, cls in facts.classes.items():
            if cls.metaclass and (meta := self.find_class(module, cls.metaclass)) is not None:
                self._by_metaclass[meta].append((module, name))
            for called in cls.called:
                if self._method((module, name), (called,)) is None:
                    self._callables.update(("A", *owner, called) for owner in self._definers((module, name), called))
        for name in facts.imports:
            if name in facts.globals:  # bound twice: an import with a fallback
                target = self.target(facts.imports[name])
                if target is not None and target != ("g", module, name):
                    self._edge(self._node(target), self._node(("g", module, name)))

    def _build(self, facts: ModuleFacts) -> None:
        module = facts.module
        for flow in facts.flows:
            self._flow(module, flow)
        for function, index, values in facts.returns:
            node = self._node(("ret", module, function, index))
            self._put(module, values, node)
            if index >= 0:
                self._edge(node, self._node(("ret", module, function, None)))
            else:
                self._edge(node, self._node(("ret", module, function, None)))
        for number, call in enumerate(facts.calls):
            for atom in call.callee:
                callee = self._atom(module, atom)
                if callee is not None:
                    self._listen(callee, ("call", module, number, call))
        for decorated in facts.functions.values():
            self._decorated(module, decorated)

    def _decorated(self, module: str, function: FunctionFacts) -> None:
        for atom in function.decorators:
            decorator = self._atom(module, atom)
            if decorator is not None:
                call = Call((atom,), ((("f", function.name),),), ())
                self._listen(decorator, ("call", module, ("decorator", function.name, atom), call))

    def _flow(self, module: str, flow: Flow) -> None:
        place, how = flow.place, flow.how
        if how == "used":
            self._used.append((module, flow))
            return
        kind = place[0]
        if kind == "g":
            key = self.name(module, place[1])
            if key is not None and key[0] == "g" and not self._is_defined(key):
                self.writes[key].append((module, flow))
                if how in ("=", "+=", "use", "globals()", "setattr") or how.endswith("_"):
                    self._put(module, flow.values, self._node(key))
        elif kind == "cell" or (kind == "p" and how in ("use", "default")):
            key = (kind, module, *place[1:])
            if kind == "cell":
                self.writes[key].append((module, flow))
            if how != "default" or self.modules[module].functions[place[1]].mutable.isdisjoint({place[2]}):
                self._put(module, flow.values, self._node(key))
        elif kind == ".":
            base = self._atom(module, place[1])
            if base is not None:
                self._listen(base, ("set", module, place[2], flow))
        if how not in ("=", "use", "default", "globals()", "setattr"):
            target = self._atom(module, place)
            if target is not None and (flow.values or kind in ("g", ".")):
                self._listen(target, ("store", module, flow))

    def _put(self, module: str, values: Atoms, target: int, mode: int = _ALL) -> None:
        for atom in values:
            if atom[0] == "!":
                holds, level, text = atom[1]
                self._evidence(target, holds, Evidence(level, 0, text, module, atom[2]))
            else:
                source = self._atom(module, atom)
                if source is not None and source != target:
                    self._edge(source, target, mode)

    def _atom(self, module: str, atom: Atom) -> int | None:
        """The node whose labels are those of an atom; None for what is certainly outside."""
        kind = atom[0]
        if kind == "g":
            key = self.name(module, atom[1])
            return None if key is None else self._node(key)
        if kind == "m":
            key = self.target(atom[1])
            return None if key is None else self._node(key)
        if kind in ("p", "cell"):
            return self._node((kind, module, *atom[1:]))
        key = ("v", module, atom)
        if key in self._ids:
            return self._ids[key]
        if kind == "!":
            number = self._node(key)
            self._put(module, (atom,), number)
            return number
        if kind == "meta":
            number = self._node(key)
            for cls in self._by_metaclass.get((module, atom[1]), ()):
                self._object(number, ("I", *cls))
            return number
        if kind == "super":
            number = self._node(key)
            for base in self.mro((module, atom[1]))[0][1:2]:
                self._object(number, ("I", *base))
            return number
        if kind in ("s", "c", "f"):
            number = self._node(key)
            self._object(number, ({"s": "I", "c": "C", "f": "F"}[kind], module, atom[1]))
            return number
        if kind == "x":
            callee, source = self._atom(module, atom[1]), self._atom(module, atom[2])
            if source is None or self._is_host(module, atom[1]):
                return None
            number = self._node(key)
            if callee is None:
                self._edge(source, number, _MADE if _is_class_name(atom[1]) else _OPERATION)
            else:
                self._unknown.append((callee, source, number))
            return number
        source = self._atom(module, atom[1])
        if source is None:
            return None
        number = self._node(key)
        if kind == "+":
            self._edge(source, number, _OPERATION)
        elif kind == "e":
            self._edge(source, number, _ELEMENT)
        elif kind == ".":
            self._listen(source, ("get", atom[2], number))
        elif kind == "()":
            self._listen(source, ("result", None, number, module, atom[2]))
        elif kind == "i":
            inner = atom[1]
            called = self._atom(module, inner[1])
            if called is not None:
                self._listen(called, ("result", atom[2], number, module, inner[2]))
        elif kind == "new":
            self._listen(source, ("new", number))
        return number

    def _is_host(self, module: str, atom: Atom) -> bool:
        while atom[0] in (".", "()"):
            atom = atom[1]
        if atom[0] == "g":
            target = self.modules[module].imports.get(atom[1])
            if target is None:
                return atom[1] not in self.modules[module].globals  # a builtin
            return target.replace(":", ".").partition(".")[0] in words.HOST_PACKAGES
        return atom[0] == "m" and atom[1].replace(":", ".").partition(".")[0] in words.HOST_PACKAGES

    # ---- labels -----------------------------------------------------------------------------------------------------

    def _edge(self, source: int, target: int, mode: int = _ALL, site: int = 0) -> None:
        if (source, target, mode, site) in self._has_edge:
            return
        self._has_edge.add((source, target, mode, site))
        node = self._nodes[source]
        edge = (target, mode, site)
        node.edges.append(edge)
        for (holds, context), evidence in list(node.evidence.items()):
            self._travel(edge, holds, context, evidence)
        for label, contexts in list(node.objects.items()):
            for context in list(contexts):
                self._carry(edge, label, context)

    def _passed(self, edge: _Edge, context: Context) -> Context | None:
        """The context beyond an edge; None if it cannot be passed."""
        if edge[1] == _ARGUMENT:
            return (*context, edge[2])[-_MOST_CALLS:]
        if edge[1] == _RESULT and context:
            return context[:-1] if context[-1] == edge[2] else None
        if edge[1] == _HANDED:
            site, by = self._handed[edge[2]]
            return (by,) if not context else context[:-1] if context[-1] == site else None
        return context

    def _travel(self, edge: _Edge, holds: Holds, context: Context, evidence: Evidence) -> None:
        target, mode, _ = edge
        beyond = self._passed(edge, context)
        if beyond is None:
            return
        if mode in (_OPERATION, _WEAK):
            if holds in (Holds.HANDLE, Holds.RNG):
                return
            holds = Holds.TENSOR
            if mode == _WEAK:
                evidence = evidence._replace(level=min(evidence.level, words.MEDIUM))
        elif mode in (_ARGUMENT, _RESULT, _HANDED):
            if evidence.hops >= _MOST_HOPS:
                return
            evidence = evidence._replace(hops=evidence.hops + 1)
        self._evidence(target, holds, evidence, beyond)

    def _carry(self, edge: _Edge, label: Label, context: Context) -> None:
        if edge[1] in (_OPERATION, _WEAK, _MADE) or (edge[1] == _ELEMENT and label[0] == "L"):
            return  # a container is not the place that its element stands at
        beyond = self._passed(edge, context)
        if beyond is not None:
            self._object(edge[0], label, beyond)

    def _evidence(self, target: int, holds: Holds, evidence: Evidence, context: Context = ()) -> None:
        node = self._nodes[target]
        if node.denied == "everything" or (node.denied == "tensors" and holds is Holds.TENSOR):
            return
        if node.denied == "guesses" and holds is Holds.TENSOR and evidence.level < words.HIGH:
            return
        if node.forgets:
            context = ()
        known = node.evidence.get((holds, context))
        if known is None and context and len(node.evidence) >= _MOST_CONTEXTS:
            return
        if known is None or evidence.level > known.level:
            node.evidence[holds, context] = evidence
            self._waiting.append((target, (holds, context), evidence))

    def _object(self, target: int, label: Label, context: Context = ()) -> None:
        node = self._nodes[target]
        if node.forgets:
            context = ()
        contexts = node.objects.get(label)
        if contexts is None:
            if len(node.objects) >= _MOST_OBJECTS:
                return
            contexts = node.objects[label] = {}
        elif context in contexts or len(contexts) >= _MOST_CONTEXTS:
            return
        contexts[context] = None
        self._waiting.append((target, context, label))

    def _listen(self, source: int, listener: tuple[Any, ...]) -> None:
        node = self._nodes[source]
        node.listeners.append(listener)
        for label, contexts in list(node.objects.items()):
            for context in list(contexts) if listener[0] == "result" else ((),):
                self._tell(source, listener, label, context)

    def _settle(self) -> None:
        waiting, nodes = self._waiting, self._nodes
        while waiting:
            number, where, what = waiting.popleft()
            node = nodes[number]
            if isinstance(what, Evidence):
                if node.evidence[where] is what:
                    for edge in list(node.edges):
                        self._travel(edge, where[0], where[1], what)
                continue
            for edge in list(node.edges):
                self._carry(edge, what, where)
            first = len(node.objects[what]) == 1  # of its contexts
            for listener in list(node.listeners):
                if first or listener[0] == "result":
                    self._tell(number, listener, what, where)

    def _tell(self, source: int, listener: tuple[Any, ...], label: Label, context: Context) -> None:
        """One more thing that the value at ``source`` may be; through which calls it came there."""
        what = listener[0]
        if what == "get":
            self._get(source, listener[1], listener[2], label)
        elif what == "set":
            self._set(source, listener[1], listener[2], listener[3], label)
        elif what == "call":
            self._connect(listener[1], listener[2], listener[3], label)
        elif what == "result":
            self._result(listener[1], listener[2], self._site(listener[3], listener[4]), label, context)
        elif what == "store" and label[0] == "L":
            key = self._nodes[label[1]].key
            module, flow = listener[1], listener[2]
            if (module, flow) not in self.writes[key][-3:]:
                self.writes[key].append((module, flow))
            self._put(module, flow.values, label[1], _ELEMENT)
        elif what == "new" and label[0] == "C":
            self._object(listener[1], ("I", *label[1:]))

    def _get(self, source: int, name: str, target: int, label: Label) -> None:
        kind = label[0]
        if kind == "M":
            if label[1] in self.modules:
                key = self.name(label[1], name)
                if key is None and (inner := self.find_module(f"{label[1]}.{name}")) is not None:
                    key = ("m", inner)
            else:
                key = self.target(f"{label[1]}.{name}")
            if key is not None:
                self._edge(self._node(key), target)
        elif kind in ("I", "C"):
            cls = (label[1], label[2])
            for owner in self.mro(cls)[0]:
                facts = self.class_facts(owner)
                method = facts.methods.get(name)
                if method is not None:
                    function = self.modules[owner[0]].functions[method]
                    if function.is_property and kind == "I":
                        self._edge(self._node(("ret", owner[0], method, None)), target, _RESULT)
                    elif function.receiver and (kind == "I" or function.receiver == "cls"):
                        self._object(target, ("B", owner[0], method, *cls))
                    else:
                        self._object(target, ("F", owner[0], method))
                    return
                inner = f"{owner[1]}.{name}"
                if inner in self.modules[owner[0]].classes:
                    self._object(target, ("C", owner[0], inner))
                    return
            if name == "apply" and kind == "C" and any(base.endswith("Function") for base in self.mro(cls)[1]):
                forward = self._method(cls, ("forward",))
                if forward is not None:
                    self._object(target, ("B", *forward, *cls))
            for owner in self._definers(cls, name):
                self._edge(self._node(("A", *owner, name)), target)
        elif kind == "F":
            self._edge(self._node(("fa", label[1], label[2], name)), target)

    def _definers(self, cls: ClassId, name: str) -> list[ClassId]:
        """The classes, of this one and those it inherits from, that define an attribute; the class itself if none does."""
        found = [owner for owner in self.mro(cls)[0] if _defines(self.class_facts(owner), name)]
        return found or [cls]

    def _is_object(self, number: int) -> bool:
        """Whether what is there has a class, which is no tensor's."""
        return any(
            label[0] in "CFB" or (label[0] == "I" and not self._is_tensor((label[1], label[2])))
            for label in self._nodes[number].objects
        )

    def _is_tensor(self, cls: ClassId) -> bool:
        return any(base in ("torch.Tensor", "torch.nn.Parameter") for base in self.mro(cls)[1])

    def _set_strange(self, source: int, module: str, name: str, flow: Flow) -> None:
        """An attribute that no class that is read defines: it is that of the one class that the object can be of."""
        node = self._nodes[source]
        if any(holds is Holds.TENSOR for holds, _ in node.evidence):
            return
        classes = list(dict.fromkeys((label[1], label[2]) for label in node.objects if label[0] == "I"))
        for cls in classes:
            if all(cls in self.mro(other)[0] for other in classes):
                self.given.add(("A", *cls, name))
                self._set(source, module, name, flow, ("I", *cls))

    def _set(self, source: int, module: str, name: str, flow: Flow, label: Label) -> None:
        kind = label[0]
        use = flow.how == "use"
        key: Key | None = None
        if kind == "M" and label[1] in self.modules:
            found = self.name(label[1], name)
            if found is None and not use:
                return  # made by the assignment alone
            key = found if found is not None and found[0] == "g" else None
        elif kind in ("I", "C"):
            key = ("A", *self._definers((label[1], label[2]), name)[0], name)
            if kind == "I" and key not in self.given and not _defines(self.class_facts((key[1], key[2])), name):
                self._strange[source, module, name, flow] = None
                return
            if not use:
                base = self._nodes[source].key
                named = base[0] == "g" or (
                    base[0] == "v" and (base[2][0] == "c" or (base[2][1:2] and base[2][1][0] in "gm"))
                )
                if kind == "C" and not named:
                    return  # a class that was handed over: which one is anybody's guess
                if kind == "C" and flow.values and flow.function in self.modules[module].functions:
                    self.class_writes.add(key)
                if kind == "I" and base[0] == "g":
                    self.paths[base][name].append((module, flow))
        elif kind == "F" and not use and label[1] in self.modules:
            key = ("fa", label[1], label[2], name)
            self.function_attributes[key] = None
        if key is not None:
            if not use and flow.how in ("=", "+=", "setattr", "globals()"):
                self.writes[key].append((module, flow))
            if flow.how in ("=", "+=", "setattr", "use") or (flow.values and flow.how.endswith("_")):
                self._put(module, flow.values, self._node(key))

    def _connect(self, module: str, number: Any, call: Call, label: Label) -> None:
        """Arguments become parameters."""
        kind, shift = label[0], 0
        if kind == "F":
            function: Key | None = (label[1], label[2])
        elif kind == "B":
            function, shift = (label[1], label[2]), 1
        elif kind in ("C", "I"):
            name = "__init__" if kind == "C" else "forward"
            function, shift = self._method((label[1], label[2]), (name,) if kind == "C" else ("__call__", name)), 1
            if kind == "C" and function is None:
                self._fields((label[1], label[2]), module, call)
        else:
            return
        if function is None or (module, number, function) in self._connected:
            return
        self._connected.add((module, number, function))
        facts = self.modules[function[0]].functions[function[1]]
        shift = shift if facts.receiver else 0
        count = len(facts.parameters)
        for index, atoms in enumerate(call.arguments, shift):
            if facts.star >= 0:
                index = min(index, facts.star)
            if index < count and atoms:
                self._argument(module, atoms, self._node(("p", *function, index)), self._site(module, number))
        for name, atoms in call.keywords:
            if name in facts.parameters and atoms:
                self._argument(
                    module,
                    atoms,
                    self._node(("p", *function, facts.parameters.index(name))),
                    self._site(module, number),
                )

    def _argument(self, module: str, atoms: Atoms, target: int, site: int) -> None:
        for atom in atoms:
            if atom[0] == "!":
                holds, level, text = atom[1]
                self._evidence(target, holds, Evidence(level, 0, text, module, atom[2]), (site,))
            else:
                source = self._atom(module, atom)
                if source is not None:
                    self._edge(source, target, _ARGUMENT, site)

    def _fields(self, cls: ClassId, module: str, call: Call) -> None:
        """The arguments of a dataclass."""
        facts = self.class_facts(cls)
        if not facts.is_record:
            return
        names = [name for name, (_, kind) in facts.attributes.items() if kind == "field"]
        for name, atoms in (*zip(names, call.arguments), *call.keywords):
            if atoms and name in facts.attributes:
                self._put(module, atoms, self._node(("A", *cls, name)))

    def _method(self, cls: ClassId, names: tuple[str, ...]) -> tuple[str, str] | None:
        for owner in self.mro(cls)[0]:
            for name in names:
                method = self.class_facts(owner).methods.get(name)
                if method is not None:
                    return owner[0], method
        return None

    def _result(self, index: int | None, target: int, site: int, label: Label, context: Context) -> None:
        kind = label[0]
        function: tuple[str, str] | None = None
        if kind in ("F", "B"):
            function = (label[1], label[2])
        elif kind == "C":
            cls = (label[1], label[2])
            self._object(target, ("I", *cls))
            return
        elif kind == "I":
            function = self._method((label[1], label[2]), ("__call__", "forward"))
        if function is None:
            return
        mode = _RESULT
        if context:  # a function that was handed over: what it makes is for the call that did so
            mode, made = _HANDED, self._site("", (site, context[-1]))
            self._handed[made] = (site, context[-1])
            site = made
        for part in (None,) if index is None else (index, -1):
            self._edge(self._node(("ret", *function, part)), target, mode, site)


def _defines(facts: ClassFacts, name: str) -> bool:
    return name in facts.rebound or name in facts.attributes or name in facts.registered


def _is_class_name(atom: Atom) -> bool:
    name = str(atom[2] if atom[0] == "." else atom[1]).rpartition(":")[2].rpartition(".")[2]
    return name.lstrip("_")[:1].isupper()
