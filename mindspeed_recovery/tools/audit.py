# SPDX-License-Identifier: Apache-2.0
"""Which process-wide state of a program can hold device tensors, and does the catalogue know it? By its text alone.

Each file is read and parsed once and forgotten; its facts stay (`audit_facts`), are linked (`audit_link`), judged
(`audit_rules`) and compared here with the catalogue and with the comments in the sources.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.tools import audit_facts, audit_rules
from mindspeed_recovery.tools.audit_link import Linked
from mindspeed_recovery.tools.audit_model import ModuleFacts
from mindspeed_recovery.tools.audit_rules import Finding
from mindspeed_recovery.tools.progress import Progress
from mindspeed_recovery.tools.sources import SourceError, SourceFile


class Status(str, Enum):
    """What the catalogue says about a finding."""

    TRACKED = "tracked"
    IGNORED = "ignored"
    """Left alone on purpose: by an entry with the policy ``ignored``, or by a comment; with the reason."""
    UNTRACKED = "untracked"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Judged:
    """A finding and what is known about it. ``by``: the entry or the comment; ``missing``: parts that no entry covers."""

    finding: Finding
    status: Status
    by: str = ""
    missing: tuple[str, ...] = ()


@dataclass
class Audit:
    """``problems``: files that could not be read and comments that do not count, one line each."""

    judged: list[Judged] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    files: int = 0

    def count(self, status: Status) -> int:
        return sum(one.status is status for one in self.judged)


def audit(files: Sequence[SourceFile], specs: Iterable[StateSpec] = (), *, progress: Progress | None = None) -> Audit:
    """Read the files and judge what they say. ``specs``: the states of the catalogue for the versions at hand."""
    # Facts and graph are made to stay, and trees have no circles: the collector would look at all of it in vain.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _audit(files, specs, progress)
    finally:
        if collects:
            gc.enable()


def _audit(files: Sequence[SourceFile], specs: Iterable[StateSpec], progress: Progress | None) -> Audit:
    result = Audit(files=len(files))
    facts: dict[str, ModuleFacts] = {}
    for file in progress.each(files, "reading", len(files)) if progress is not None else files:
        try:
            one = _read(file)
        except SourceError as error:
            result.problems.append(str(error))
            continue
        known = facts.setdefault(one.module, one)
        if known is not one:
            result.problems.append(f"{file.path}: not read: {known.path} is the module {one.module} already")
    linked = Linked(facts.values())
    catalogue = _Known(linked, specs)
    for finding in audit_rules.findings(linked):
        result.judged.append(_judge(finding, catalogue, facts, result.problems))
    return result


def _read(file: SourceFile) -> ModuleFacts:
    """The facts of one file. Raises SourceError."""
    data = file.data()
    try:
        facts = audit_facts.read(file.parse(data), file.module, file.path, is_package=file.is_package)
    except RecursionError:
        raise SourceError(f"{file.path}: cannot be read: nested too deeply") from None
    if b"recovery:" in data:
        facts.ignores = audit_facts.ignores(file.text(data))
    return facts


def _judge(finding: Finding, known: _Known, facts: dict[str, ModuleFacts], problems: list[str]) -> Judged:
    for module, line in finding.lines:
        for at in (line, line - 1):
            comment = facts[module].ignores.get(at)
            if comment is None or not comment[0] & {finding.rule, "*"}:
                continue
            if comment[1]:
                return Judged(finding, Status.IGNORED, comment[1])
            problems.append(
                f"{facts[module].path}:{at}: a comment that ignores {finding.rule} must say why: not counted"
            )
    return known.judge(finding)


class _Known:
    """The catalogue by where its states really stand."""

    def __init__(self, linked: Linked, specs: Iterable[StateSpec]) -> None:
        self._linked = linked
        self._by_module: dict[str, list[tuple[tuple[str, ...], StateSpec]]] = {}
        for spec in specs:
            module, path = self._home(spec.location)
            self._by_module.setdefault(module, []).append((path, spec))

    def _home(self, location: Location) -> tuple[str, tuple[str, ...]]:
        """Module and path, through imports of imports."""
        if location.module in self._linked.modules:
            key = self._linked.name(location.module, location.path[0])
            if key is not None and key[0] == "g":
                return key[1], (key[2], *location.path[1:])
        return location.module, location.path

    def _inherited(self, module: str, path: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
        """The same attribute in the classes that its class inherits from: an entry there is about all their instances."""
        owner = ".".join(path[:-1])
        facts = self._linked.modules.get(module)
        if facts is None or owner not in facts.classes:
            return []
        return [(at, (*cls.split("."), path[-1])) for at, cls in self._linked.mro((module, owner))[0][1:]]

    def judge(self, finding: Finding) -> Judged:
        path = tuple(finding.name.split("."))
        covered: list[StateSpec] = []
        parts: dict[str, StateSpec] = {}
        for at, spec in self._by_module.get(finding.module, ()):
            if path[: len(at)] == at:
                inner = path[len(at) :]
                if not spec.fields or not inner or inner[0] in spec.fields:
                    covered.append(spec)
            elif at[: len(path)] == path:
                parts[at[len(path)]] = spec
        for module, inherited in self._inherited(finding.module, path):
            covered += (spec for at, spec in self._by_module.get(module, ()) if at == inherited)
        if covered:
            return Judged(finding, _status(covered), ", ".join(dict.fromkeys(spec.name for spec in covered)))
        if parts:
            missing = tuple(part for part in finding.parts if part not in parts)
            status = Status.UNTRACKED if missing else _status(parts.values())
            return Judged(finding, status, ", ".join(dict.fromkeys(spec.name for spec in parts.values())), missing)
        return Judged(finding, Status.UNTRACKED)


def _status(specs: Iterable[StateSpec]) -> Status:
    return Status.IGNORED if all(spec.policy is Policy.IGNORED for spec in specs) else Status.TRACKED
