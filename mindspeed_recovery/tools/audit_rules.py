# SPDX-License-Identifier: Apache-2.0
"""The places of a linked program that can hold device state outside a model's parameters and buffers, as findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_recovery.core.policy import Policy
from mindspeed_recovery.tools import audit_words as words
from mindspeed_recovery.tools.audit_link import ClassId, Evidence, Key, Label, Linked
from mindspeed_recovery.tools.audit_model import Flow, FunctionFacts, ModuleFacts
from mindspeed_recovery.tools.audit_words import Holds

RULES = {
    "AUD101": "module global",
    "AUD102": "computed global",
    "AUD103": "object in a global",
    "AUD104": "queue",
    "AUD105": "bound method",
    "AUD106": "closure",
    "AUD107": "cached function",
    "AUD108": "memo decorator",
    "AUD109": "function attribute",
    "AUD110": "mutable default",
    "AUD111": "class attribute",
    "AUD112": "handle",
    "AUD201": "attribute of a module",
    "AUD202": "attribute of an optimizer",
    "AUD203": "attribute of an object that a module, an optimizer or a trainer holds, or of the trainer",
}
"""Rule: the kind of hiding place."""

_MOST_PLACES = 5
_DEPTH = 3  # objects in objects
_SUMS = {"+=", "add_", "append", "appendleft", "extend", "insert", "put", "put_nowait", "add", "push", "index_add_"}
_MEANS = {"lerp_", "mul_", "addcmul_"}


@dataclass(frozen=True)
class Finding:
    """One place. ``path``, ``line``: where it is bound; ``parts``: attributes of the object there that hold the state;
    ``importers``: modules that bound the object to a name of their own; ``confidence``: see `audit_words.CONFIDENCE`."""

    rule: str
    module: str
    name: str
    path: str
    line: int
    holds: str
    confidence: int
    why: str
    policy: Policy
    reason: str
    writers: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    importers: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    on: str = "module"
    lines: tuple[tuple[str, int], ...] = ()
    """Module and line of each writer, and of the place itself: where an inline comment counts."""

    @property
    def location(self) -> str:
        return f"{self.module}:{self.name}"

    @property
    def kind(self) -> str:
        return RULES[self.rule]


def findings(linked: Linked) -> list[Finding]:
    """Every place that is believed to hold device state, of any confidence, by module and line."""
    found = list(_Rules(linked).all())
    return sorted(found, key=lambda finding: (finding.module, finding.line, finding.name))


@dataclass(frozen=True)
class _State:
    """What a place holds: the strongest evidence, and through which attributes of an object it was found."""

    holds: Holds
    evidence: Evidence
    parts: tuple[str, ...] = ()
    via: str = ""
    """``""``, ``object``, ``bound method`` or ``closure``."""


class _Rules:
    def __init__(self, linked: Linked) -> None:
        self._linked = linked
        self._held: dict[tuple[ClassId, int], tuple[tuple[str, ...], Holds, Evidence] | None] = {}
        self._kinds: dict[ClassId, str] = {}
        self._imported: dict[tuple[str, str], list[str]] = {}
        self._stars: dict[str, list[str]] = {}
        for facts in linked.modules.values():
            for target in facts.imports.values():
                key = linked.target(target) if ":" in target else None
                if key is not None and key[0] == "g" and key[1] != facts.module:
                    self._imported.setdefault((key[1], key[2]), []).append(facts.module)
            for star in facts.stars:
                self._stars.setdefault(star, []).append(facts.module)

    def all(self) -> Iterator[Finding]:
        for facts in self._linked.modules.values():
            for name in facts.globals:
                yield from self._global(facts, name)
            for function in facts.functions.values():
                yield from self._function(facts, function)
            for cls in facts.classes.values():
                yield from self._decorated_class(facts, cls.name)
        for key in self._linked.function_attributes:
            yield from self._function_attribute(key)
        yield from self._attributes()

    # ---- globals ----------------------------------------------------------------------------------------------------

    def _global(self, facts: ModuleFacts, name: str) -> Iterator[Finding]:
        key = ("g", facts.module, name)
        writes = self._linked.writes.get(key, [])
        if name in facts.functions or name in facts.classes:
            return
        if facts.imports.get(name) and not writes:
            return
        paths = self._linked.paths.get(key, {})
        covered = set()
        for attribute, flows in paths.items():
            for cls in self._classes(key):
                state = self._state(("A", *cls, attribute))
                if state is not None and any(flow.values for _, flow in flows):
                    covered.add(attribute)
                    yield self._finding(
                        "AUD103", facts, f"{name}.{attribute}", flows[0][1].line, state, flows,
                        readers=self._readers(facts, name), importers=self._importers(facts.module, name),
                    )  # fmt: skip
                    break
        state = self._state(key)
        if state is None:
            return
        if state.via == "object" and covered:
            rest = tuple(part for part in state.parts if part not in covered)
            if not rest:
                return
            state = _State(state.holds, state.evidence, rest, state.via)
        hows = {flow.how for _, flow in writes}
        if state.via == "bound method":
            rule = "AUD105"
        elif state.via == "closure":
            rule = "AUD106"
        elif state.holds is Holds.HANDLE:
            rule = "AUD112"
        elif hows & {"globals()", "setattr"} and not hows & {"="}:
            rule = "AUD102"
        elif state.via == "object" and name not in facts.containers:
            rule = "AUD103"
        elif name in facts.queues:
            rule = "AUD104"
        else:
            rule = "AUD101"
        yield self._finding(
            rule, facts, name, facts.globals[name], state, writes,
            readers=self._readers(facts, name), importers=self._importers(facts.module, name),
        )  # fmt: skip

    # ---- functions --------------------------------------------------------------------------------------------------

    def _function(self, facts: ModuleFacts, function: FunctionFacts) -> Iterator[Finding]:
        for index in sorted(function.mutable):
            key = ("d", facts.module, function.name, index)
            writes = [w for w in self._linked.writes.get(key, []) if w[1].how not in ("use", "default")]
            state = self._state(key)
            if state is not None and writes:
                yield self._finding("AUD110", facts, function.name, function.line, state, writes)
        returned = ("ret", facts.module, function.name, None)
        if function.cached and not function.is_property and (state := self._state(returned)) is not None:
            yield self._finding("AUD107", facts, function.name, function.line, state, [])
        elif function.decorators and not function.nested and self._memoised(facts, function.decorators, "F"):
            state = self._state(returned)
            if state is not None:
                yield self._finding("AUD108", facts, function.name, function.line, state, [])

    def _decorated_class(self, facts: ModuleFacts, name: str) -> Iterator[Finding]:
        cls = facts.classes[name]
        if cls.decorators and self._memoised(facts, cls.decorators, "C"):
            held = self._holds((facts.module, name), 1)
            if held is not None:
                parts, holds, evidence = held
                state = _State(holds, evidence, parts, "object")
                yield self._finding("AUD108", facts, name, cls.line, state, [])

    def _memoised(self, facts: ModuleFacts, decorators: tuple[tuple[object, ...], ...], kind: str) -> bool:
        """Whether one of the decorators is a function of the tree that keeps what it calls in a captured container."""
        for atom in decorators:
            if atom[0] not in ("g", "f", "m", "."):
                continue
            for label in self._of_atom(facts.module, atom):
                if label[0] == "F" and self._keeps_calls(label[1], label[2]):
                    return True
        return False

    def _of_atom(self, module: str, atom: tuple[object, ...]) -> list[Label]:
        if atom[0] == "g":
            key = self._linked.name(module, str(atom[1]))
        elif atom[0] == "m":
            key = self._linked.target(str(atom[1]))
        else:
            key = ("v", module, atom)
        return self._linked.objects(key) if key is not None else []

    def _keeps_calls(self, module: str, name: str) -> bool:
        facts = self._linked.modules[module]
        called = ("p", name, 0)
        for flow in facts.flows:
            if flow.place[0] == "cell" and flow.place[1].startswith(name) and flow.how not in ("use",):
                for atom in flow.values:
                    if atom[0] == "()" and (atom[1] == called or called in _inside(atom[1]) or _names(atom[1], name)):
                        return True
        return False

    def _function_attribute(self, key: Key) -> Iterator[Finding]:
        _, module, function, attribute = key
        facts = self._linked.modules[module]
        record = facts.functions.get(function)
        state = self._state(key)
        if state is None or record is None or record.nested or attribute.startswith("__"):
            return
        writes = self._linked.writes.get(key, [])
        line = writes[0][1].line if writes else record.line
        yield self._finding("AUD109", facts, f"{function}.{attribute}", line, state, writes)

    # ---- attributes -------------------------------------------------------------------------------------------------

    def _attributes(self) -> Iterator[Finding]:
        lived = self._long_lived()
        for cls, attributes in list(self._linked.attributes.items()):
            facts, record = self._linked.modules[cls[0]], self._linked.class_facts(cls)
            if record.is_local or "Enum" in " ".join(record.bases):
                continue
            for attribute in attributes:
                key = ("A", *cls, attribute)
                if attribute.startswith("__") or attribute in record.registered or self._is_property(cls, attribute):
                    continue
                if not self._linked.has(key):
                    continue
                writes = [w for w in self._linked.writes.get(key, []) if w[1].how != "use"]
                if self._is_of_class(key, writes):
                    state = self._state(key)
                    if state is not None:
                        rule = {"bound method": "AUD105", "closure": "AUD106"}.get(state.via, "AUD111")
                        rule = "AUD112" if state.holds is Holds.HANDLE else rule
                        line = record.attributes.get(attribute, (writes[0][1].line if writes else record.line, ""))[0]
                        yield self._finding(
                            rule,
                            facts,
                            f"{cls[1]}.{attribute}",
                            line,
                            state,
                            writes,
                            readers=self._readers(facts, f".{attribute}"),
                        )
                elif cls in lived and writes and not any(map(self._class_kind, self._classes(key))):
                    evidence = self._linked.evidence(key).get(Holds.TENSOR)
                    parameter = self._linked.evidence(key).get(Holds.PARAMETER)
                    handle = self._linked.evidence(key).get(Holds.HANDLE)
                    others = [other.level for other in (parameter, handle) if other is not None]
                    if evidence is None or (others and max(others) >= evidence.level):
                        continue
                    rule = {"module": "AUD201", "optimizer": "AUD202"}.get(lived[cls], "AUD203")
                    yield self._finding(
                        rule, facts, f"{cls[1]}.{attribute}", writes[0][1].line, _State(Holds.TENSOR, evidence), writes,
                        readers=self._readers(facts, f".{attribute}"), on="instances",
                    )  # fmt: skip

    def _is_property(self, cls: ClassId, attribute: str) -> bool:
        return any(
            self._linked.class_facts(owner).attributes.get(attribute, (0, ""))[1] == "property"
            for owner in self._linked.mro(cls)[0]
        )

    def _is_of_class(self, key: Key, writes: list[tuple[str, Flow]]) -> bool:
        """Whether all instances share the attribute, rather than have one each."""
        _, module, name, attribute = key
        record = self._linked.class_facts((module, name))
        if key in self._linked.class_writes:
            return True
        bound = record.attributes.get(attribute)
        if bound is None or bound[1] in ("field", "property") or attribute in record.rebound:
            return False
        return bound[1] == "container" or any(flow.values and flow.function == name for _, flow in writes)

    def _long_lived(self) -> dict[ClassId, str]:
        """Classes whose objects outlive a step: modules, optimizers, what holds an optimizer, and what these hold."""
        linked = self._linked
        lived: dict[ClassId, str] = {}
        for module, facts in linked.modules.items():
            for name in facts.classes:
                if kind := self._class_kind((module, name)):
                    lived[module, name] = kind
        for cls, attributes in list(linked.attributes.items()):
            if cls not in lived and any(self._is_optimizer(("A", *cls, attribute)) for attribute in list(attributes)):
                lived[cls] = "trainer"
        waiting = list(lived)
        while waiting:
            cls = waiting.pop()
            for owner in linked.mro(cls)[0]:
                if owner not in lived:
                    lived[owner] = lived[cls]
                    waiting.append(owner)
                for attribute in list(linked.attributes.get(owner, ())):
                    if not linked.writes.get(("A", *owner, attribute)):
                        continue
                    for label in linked.objects(("A", *owner, attribute)):
                        inner = (label[1], label[2]) if label[0] == "I" else None
                        if inner is not None and inner not in lived:
                            lived[inner] = "held"
                            waiting.append(inner)
        return lived

    def _is_optimizer(self, key: Key) -> bool:
        """Whether an optimizer is there: what holds one lives as long as the training."""
        written = self._linked.writes.get(key)
        return bool(written) and any(self._class_kind(cls) == "optimizer" for cls in self._classes(key))

    def _is_function(self, cls: ClassId) -> bool:
        """Whether it is an autograd function: its ``apply`` is bound to no object."""
        return any(base.endswith("Function") for base in self._linked.mro(cls)[1])

    def _class_kind(self, cls: ClassId) -> str:
        if cls not in self._kinds:
            known, outside = self._linked.mro(cls)
            methods = {name for owner in known for name in self._linked.class_facts(owner).methods}
            ends = [base.rpartition(".")[2] for base in outside]
            if self._is_function(cls):
                kind = ""
            elif (
                any(end.endswith("Optimizer") or base.startswith("torch.optim.") for base, end in zip(outside, ends))
                or {"step", "zero_grad"} <= methods
            ):
                kind = "optimizer"
            elif any(
                base.startswith("torch.nn.") or end.endswith(("Module", "Layer")) for base, end in zip(outside, ends)
            ):
                kind = "module"
            else:
                kind = ""
            self._kinds[cls] = kind
        return self._kinds[cls]

    # ---- what a place holds -----------------------------------------------------------------------------------------

    def _classes(self, key: Key) -> list[ClassId]:
        return [(label[1], label[2]) for label in self._linked.objects(key) if label[0] == "I"]

    def _state(self, key: Key) -> _State | None:
        best: _State | None = None
        for holds, evidence in self._linked.evidence(key).items():
            if best is None or (evidence.level, holds is Holds.TENSOR) > (
                best.evidence.level,
                best.holds is Holds.TENSOR,
            ):
                best = _State(holds, evidence)
        for label in self._linked.objects(key):
            inner: _State | None = None
            if label[0] == "I" or (label[0] == "B" and not self._is_function((label[-2], label[-1]))):
                held = self._holds((label[-2], label[-1]), 1)
                if held is not None:
                    inner = _State(held[1], held[2], held[0], "object" if label[0] == "I" else "bound method")
            elif label[0] == "F":
                inner = self._closure(label[1], label[2])
            if inner is not None and (best is None or inner.evidence.level > best.evidence.level):
                best = inner
        return best

    def _closure(self, module: str, name: str) -> _State | None:
        function = self._linked.modules[module].functions[name]
        for owner, local in sorted(function.cells):
            key = ("cell", module, owner, local)
            if self._linked.writes.get(key):
                for holds, evidence in self._linked.evidence(key).items():
                    return _State(holds, evidence, (), "closure")
        return None

    def _holds(self, cls: ClassId, depth: int) -> tuple[tuple[str, ...], Holds, Evidence] | None:
        """The attributes of a class's objects that hold device state, and the strongest evidence."""
        if (cls, depth) in self._held:
            return self._held[cls, depth]
        self._held[cls, depth] = None
        parts: dict[str, None] = {}
        best: tuple[Holds, Evidence] | None = None
        for owner in self._linked.mro(cls)[0]:
            for attribute in list(self._linked.attributes.get(owner, ())):
                key = ("A", *owner, attribute)
                writes = self._linked.writes.get(key, [])
                if self._is_of_class(key, writes) or not self._linked.has(key):
                    continue
                inner = [(h, e) for h, e in self._linked.evidence(key).items()]
                if depth < _DEPTH:
                    for at in self._classes(key):
                        held = self._holds(at, depth + 1)
                        if held is not None:
                            inner.append((held[1], held[2]))
                inner = [(h, e) for h, e in inner if e.level >= words.MEDIUM]
                for holds, evidence in inner:
                    parts[attribute] = None
                    if best is None or (evidence.level, holds is Holds.TENSOR) > (
                        best[1].level,
                        best[0] is Holds.TENSOR,
                    ):
                        best = holds, evidence
        result = None
        if best is not None:
            evidence = best[1]._replace(level=min(best[1].level, words.MEDIUM))
            result = (tuple(parts), best[0], evidence)
        self._held[cls, depth] = result
        return result

    # ---- the finding ------------------------------------------------------------------------------------------------

    def _finding(
        self,
        rule: str,
        facts: ModuleFacts,
        name: str,
        line: int,
        state: _State,
        writes: list[tuple[str, Flow]],
        *,
        readers: tuple[str, ...] = (),
        importers: tuple[str, ...] = (),
        on: str = "module",
    ) -> Finding:
        evidence = state.evidence
        level = evidence.level
        if state.holds is Holds.TENSOR and words.is_host_name(name.rpartition(".")[2]):
            level = words.LOW
        where = self._linked.modules[evidence.module]
        through = (
            f"{state.via}, through {', '.join(state.parts)}: " if state.parts else f"{state.via}: " if state.via else ""
        )
        why = f"{through}{evidence.text} at {where.path}:{evidence.line}"
        effective = [(module, flow) for module, flow in writes if flow.how not in ("use", "default")]
        writers = dict.fromkeys(
            f"{self._linked.modules[module].path}:{flow.line} {flow.function or 'module body'} ({flow.how})"
            for module, flow in effective
        )
        policy, reason = _suggestion(rule, state, effective, on)
        lines = ((facts.module, line), *((module, flow.line) for module, flow in effective))
        return Finding(
            rule, facts.module, name, facts.path, line, str(state.holds), level, why, policy, reason,
            tuple(writers)[:_MOST_PLACES], readers[:_MOST_PLACES], importers, state.parts, on, tuple(dict.fromkeys(lines)),
        )  # fmt: skip

    def _readers(self, facts: ModuleFacts, name: str) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                f"{facts.path}:{line} {function or 'module body'}" for line, function in facts.reads.get(name, ())
            )
        )

    def _importers(self, module: str, name: str) -> tuple[str, ...]:
        stars = () if name.startswith("_") else self._stars.get(module, ())
        return tuple(dict.fromkeys((*self._imported.get((module, name), ()), *stars)))


def _suggestion(rule: str, state: _State, writes: list[tuple[str, Flow]], on: str) -> tuple[Policy, str]:
    hows = {flow.how for _, flow in writes if flow.values}
    functions = {flow.function.rpartition(".")[2] for _, flow in writes if flow.values}
    if state.holds is Holds.HANDLE:
        return Policy.IGNORED, "a handle: it holds no tensor's contents; check that the recovery keeps or renews it"
    if state.holds is Holds.RNG:
        return Policy.SNAPSHOT, "a random state: the recomputed step must draw the same numbers"
    if state.holds is Holds.PARAMETER and not state.parts:
        return Policy.IGNORED, "parameters: check that they are among those that the recovery repairs"
    if rule in ("AUD107", "AUD108", "AUD109"):
        return Policy.DROP, "a cache: made anew on its next use"
    if hows & _MEANS and "zero_" not in hows:
        return Policy.REPLICATE, "a running value: training goes on from it"
    if hows & _SUMS or rule in ("AUD104", "AUD106", "AUD110"):
        return Policy.RESET, "collects values within a step: an aborted step leaves a part of them"
    if on == "instances" and functions and functions <= {"__init__", "__post_init__", "reset_parameters"}:
        return Policy.CONSTANT, "made once, with its object"
    if "item" in hows or state.parts:
        return Policy.RESET, "filled while a step runs: an aborted step leaves a part of it"
    if state.evidence.level == words.HIGH and len(functions) <= 1:
        return Policy.DROP, "made in one place: the next use makes it anew if it is None"
    return Policy.RESET, "assigned while a step runs: an aborted step leaves its value"


def _inside(atom: tuple[object, ...]) -> Iterator[object]:
    for part in atom:
        if isinstance(part, tuple):
            yield part
            yield from _inside(part)


def _names(atom: tuple[object, ...], function: str) -> bool:
    """Whether the atom is a captured parameter of the function: what a decorator was given."""
    return atom[0] == "cell" and atom[1] == function
