# SPDX-License-Identifier: Apache-2.0
"""Faults injected at a chosen rank, step and point of a training step.

A fault is written ``KIND@rank=R,step=K,at=POINT[,states=NAME+NAME|all|none][,visit=N]``, for example
``uce@rank=1,step=3,at=router,states=moe-aux-loss-tracker,visit=3``. The same text twice is a second fault in
the first recomputation of the step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

KINDS = ("uce", "link")
POINTS = ("forward", "router", "backward", "update", "optimizer", "log", "eval")
ALL, NONE = "all", "none"
GRAMMAR = "KIND@rank=R,step=K,at=POINT[,states=NAME+NAME|all|none][,visit=N]"

_NUMBER_KEYS = ("rank", "step", "visit")
_KEYS = ("rank", "step", "at", "states", "visit")
_REQUIRED_KEYS = ("rank", "step", "at")
_STATE_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


class FaultSpecError(ValueError):
    """A fault is written wrongly, or names a state that does not exist."""


class InjectedFault(RuntimeError):
    """A fault that was fired; its text holds what recovery runtimes look for. ``spec`` is the fault."""

    def __init__(self, spec: FaultSpec) -> None:
        place = f"at step {spec.step}, point {spec.at}, rank {spec.rank}"
        text = {
            "uce": f"UCE ERROR: uncorrectable device memory error {place}",
            "link": f"HCCL OP RETRY FAILED: link error {place}",
        }
        super().__init__(text[spec.kind])
        self.spec = spec

    @property
    def kind(self) -> str:
        """The fault's kind, one of ``KINDS``."""
        return self.spec.kind


@dataclass(frozen=True)
class FaultSpec:
    """One fault. ``str()`` gives its text, ``parse`` reads it back.

    Attributes:
        kind: ``uce`` damages device memory; ``link`` damages nothing.
        rank: global rank, from 0.
        step: training step, from 1 as frameworks count them (0 is allowed).
        at: the point of the step, one of ``POINTS``.
        states: names of the states that are hit; ``("all",)`` is all device memory, ``("none",)`` memory that is in
            nobody's use.
        visit: which visit of the point within one attempt at the step, from 1.

    Raises:
        FaultSpecError: a field has an impossible value.
    """

    kind: str
    rank: int
    step: int
    at: str
    states: tuple[str, ...] = (ALL,)
    visit: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise self._error(f"kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.at not in POINTS:
            raise self._error(f"at={self.at}: the point is not one of {', '.join(POINTS)}")
        for key, least in (("rank", 0), ("step", 0), ("visit", 1)):
            if getattr(self, key) < least:
                raise self._error(f"{key}={getattr(self, key)}: must be at least {least}")
        for name in self.states:
            if not _STATE_NAME.fullmatch(name):
                raise self._error(f"states: {name!r} is not a state name")
        if not self.states or len(set(self.states)) != len(self.states):
            raise self._error(f"states={'+'.join(self.states)}: name each state once")
        for word in (ALL, NONE):
            if word in self.states and len(self.states) > 1:
                raise self._error(f"states={'+'.join(self.states)}: {word} stands alone")
        if self.kind == "link" and self.states != (ALL,):
            raise self._error(f"states={'+'.join(self.states)}: a link fault damages no state")

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Read a fault from its text.

        Raises:
            FaultSpecError: names the wrong part and shows the grammar.
        """
        kind, separator, rest = text.strip().partition("@")
        if not separator:
            raise cls._error(f"{text!r} has no '@'")
        values: dict[str, str] = {}
        for part in rest.split(","):
            key, separator, value = part.partition("=")
            if not separator or not value:
                raise cls._error(f"{part!r} is not KEY=VALUE")
            if key not in _KEYS:
                raise cls._error(f"{part!r}: the key is not one of {', '.join(_KEYS)}")
            if key in values:
                raise cls._error(f"{part!r}: {key} is given twice")
            if key in _NUMBER_KEYS and not re.fullmatch("[0-9]+", value):
                raise cls._error(f"{part!r}: {key} is not a whole number")
            values[key] = value
        for key in _REQUIRED_KEYS:
            if key not in values:
                raise cls._error(f"{text!r} has no {key}=")
        return cls(
            kind=kind,
            rank=int(values["rank"]),
            step=int(values["step"]),
            at=values["at"],
            states=tuple(values.get("states", ALL).split("+")),
            visit=int(values.get("visit", "1")),
        )

    def __str__(self) -> str:
        text = f"{self.kind}@rank={self.rank},step={self.step},at={self.at}"
        if self.states != (ALL,):
            text += f",states={'+'.join(self.states)}"
        if self.visit != 1:
            text += f",visit={self.visit}"
        return text

    @staticmethod
    def _error(problem: str) -> FaultSpecError:
        return FaultSpecError(f"bad fault: {problem}. A fault is written {GRAMMAR}")


class Strikable(Protocol):
    """The device memory that a fault damages."""

    def strike(self, tensors: Iterable[torch.Tensor], persistent: bool = True) -> int:
        """Damage the storages of the tensors; return how many were hit."""

    def device_tensors(self) -> list[torch.Tensor]:
        """One tensor for each storage of the device."""


class FaultInjector:
    """Fires this rank's faults, each once, in the order given.

    Call ``begin_step`` when an attempt at a step begins and ``at`` at its points, both on the training
    thread.

    Args:
        faults: of all ranks; the others' are ignored.
        rank: this process's global rank.
        memory: the device memory that ``uce`` damages.
        resolve: gives the tensors of the named states, and raises ``KeyError(name, known_names)`` for an
            unknown one. It is called when the fault fires, since states may be made lazily.

    Attributes:
        fired: faults fired so far.
        struck: storages damaged so far. A fault that hits nothing still fires: a test that relies on damage
            looks here.
        visits: how often each point was visited, over all steps and attempts.
    """

    def __init__(
        self,
        faults: Iterable[FaultSpec],
        rank: int,
        memory: Strikable,
        resolve: Callable[[Sequence[str]], Iterable[torch.Tensor]],
    ) -> None:
        self.fired = 0
        self.struck = 0
        self.visits = dict.fromkeys(POINTS, 0)
        self._waiting = [fault for fault in faults if fault.rank == rank]
        self._memory = memory
        self._resolve = resolve
        self._step: int | None = None
        self._attempt: Counter[str] = Counter()

    @property
    def waiting(self) -> tuple[FaultSpec, ...]:
        """This rank's faults that have not fired."""
        return tuple(self._waiting)

    def begin_step(self, step: int) -> None:
        """A new attempt at the step begins: its visits are counted from 1 again."""
        self._step = step
        self._attempt.clear()

    def at(self, point: str, step: int) -> None:
        """Count a visit of the point, and fire the first waiting fault that matches it.

        Another step than before begins a new attempt by itself, and so does a fault, since it ends the
        present one.

        Raises:
            InjectedFault: the fault.
            FaultSpecError: it names a state that does not exist; it stays waiting.
            ValueError: the point is not one of ``POINTS``.
        """
        if point not in self.visits:
            raise ValueError(f"fault injection: point {point!r} is not one of {', '.join(POINTS)}")
        if step != self._step:
            self.begin_step(step)
        self.visits[point] += 1
        self._attempt[point] += 1
        for fault in self._waiting:
            if (fault.step, fault.at, fault.visit) == (step, point, self._attempt[point]):
                self._fire(fault)

    def _fire(self, fault: FaultSpec) -> None:
        if fault.kind == "uce":
            temporary = fault.states == (NONE,)
            self.struck += self._memory.strike([] if temporary else self._tensors_of(fault), not temporary)
        self._waiting.remove(fault)
        self.fired += 1
        self.begin_step(fault.step)
        raise InjectedFault(fault)

    def _tensors_of(self, fault: FaultSpec) -> Iterable[torch.Tensor]:
        if fault.states == (ALL,):
            return self._memory.device_tensors()
        try:
            return list(self._resolve(fault.states))
        except KeyError as error:
            name, *known = error.args or ("?",)
            names = ", ".join(sorted(known[0])) if known else "not told"
            text = f"fault {fault}: no state is called {name!r}; known states: {names}"
            raise FaultSpecError(text) from error
