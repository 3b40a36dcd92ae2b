# SPDX-License-Identifier: Apache-2.0
"""What recovery does with a state (`Policy`), and the declaration of one state (`StateSpec`). Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.errors import StateError


class Policy(str, Enum):
    """What recovery does with a state on rollback to step R, on every rank."""

    RESET = "reset"
    """Training does not depend on it (trackers, queues, partial counts): what an end-of-step clear leaves."""
    DROP = "drop"
    """A cache: dropped; the framework makes it anew on its next use."""
    CONSTANT = "constant"
    """Made once: written back from the one host copy that was taken when it was adopted."""
    REPLICATE = "replicate"
    """Training depends on it and it is equal on its replicas: own host copy of R, else a replica's."""
    SNAPSHOT = "snapshot"
    """Training depends on it and it is the rank's own: own host copy of R, else a replica's if the two were equal."""
    IGNORED = "ignored"
    """Known and deliberately left alone; the reason stands in ``why``."""

    def __str__(self) -> str:
        return self.value

    @property
    def copied(self) -> bool:
        """Whether a host copy is taken twice in every step."""
        return self in (Policy.REPLICATE, Policy.SNAPSHOT)


NAME = re.compile(r"[a-z0-9]+(?:[-_.][a-z0-9]+)*")
ON = ("module", "instances")
TO = ("zeros", "empty", "none")
SETTLED = ("before-update", "after-update", "after-logging")
ON_MISSING = ("warn", "error")
REPLICA = ("dense", "expert")
CHECKPOINT = ("plugin", "framework")


@dataclass(frozen=True)
class StateSpec:
    """One state as it is declared, by the catalogue or by `track`.

    ``name``: lower-case words joined by dashes, unique.
    ``location``, ``policy``: see `Location` and `Policy`. ``why``: one line for people.
    ``on``: ``"instances"`` if the location is ``module:Class.attr`` and every instance of the class holds the state.
    ``quarantine`` (reset, drop): the dict, list, deque, set or object there raises between clean and reset.
    ``replay`` (reset): the sums before logging are kept in case the log line of the step has to be written again.
    ``to`` (reset): ``"zeros"`` (tensors become zeros, keys and shapes stay), ``"empty"`` (containers are emptied in
    place), ``"none"``, or a number or bool.
    ``fields``: only these attributes of the object, or items of the dict.
    ``clear`` (reset): location of a function without arguments, called when the tensors are zeros in safe memory.
    ``settled``: ``"after-update"`` or ``"after-logging"`` if the step's last change to the state comes after the
    optimizer update, or with its log line.
    ``on_missing``: ``"error"`` if training is wrong without the state.
    ``large``: keep host copies even above the size limit.
    ``optional``: only some builds of the version have it, or only with some features: where the attribute is absent there
    is no state, instead of a LocationError.
    ``replica`` (replicate, snapshot): ``"expert"`` if it belongs to expert layers, and so is equal on the replicas of
    the experts' parameters instead of those of the dense ones.
    ``checkpoint`` (replicate, snapshot): ``"framework"`` if the framework's own checkpoint holds the state, or the framework
    makes it anew on purpose; else it rides there under a key of the plugin's.
    ``source``: where the declaration stands, for messages.

    Raises StateError for options that contradict each other.
    """

    name: str
    location: Location
    policy: Policy
    why: str = ""
    on: str = "module"
    quarantine: bool = False
    replay: bool = False
    to: str | bool | int | float = "zeros"
    fields: tuple[str, ...] = ()
    clear: Location | None = None
    settled: str = "before-update"
    on_missing: str = "warn"
    large: bool = False
    optional: bool = False
    replica: str = "dense"
    checkpoint: str = "plugin"
    source: str = field(default="", compare=False)

    @property
    def host_copies(self) -> int:
        """How many host copies are held: the constant's one, the tracker's sums for the log line, or those of the step."""
        if self.policy.copied:
            return 1 if self.settled == "after-update" else 2
        return int(self.policy is Policy.CONSTANT or self.replay)

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise StateError(f"state '{self.name}'{f' ({self.source})' if self.source else ''}: {problem}")

    def _problem(self) -> str | None:
        if not NAME.fullmatch(self.name):
            return "name: write lower-case words and digits joined by '-', '_' or '.'"
        for key, allowed in (
            ("on", ON),
            ("settled", SETTLED),
            ("on_missing", ON_MISSING),
            ("replica", REPLICA),
            ("checkpoint", CHECKPOINT),
        ):
            if getattr(self, key) not in allowed:
                return f"{key}: '{getattr(self, key)}' is not one of {', '.join(allowed)}"
        if isinstance(self.to, str) and self.to not in TO:
            return f"to: '{self.to}' is not one of {', '.join(TO)}, a bool or a number"
        if self.on == "instances" and len(self.location.path) < 2:
            return f"location: {self.location} must be module:Class.attribute for a state on instances"
        reset_only: dict[str, Any] = {"replay": False, "to": "zeros", "clear": None}
        for key, default in reset_only.items():
            if getattr(self, key) != default and self.policy is not Policy.RESET:
                return f"{key}: only with policy 'reset', not '{self.policy}'"
        if self.quarantine and self.policy not in (Policy.RESET, Policy.DROP):
            return f"quarantine: only with policy 'reset' or 'drop', not '{self.policy}'"
        if self.settled != "before-update" and not self.policy.copied:
            return f"settled: only with policy 'replicate' or 'snapshot', not '{self.policy}'"
        if self.replica != "dense" and not self.policy.copied:
            return f"replica: only with policy 'replicate' or 'snapshot', not '{self.policy}'"
        if self.checkpoint != "plugin" and not self.policy.copied:
            return f"checkpoint: only with policy 'replicate' or 'snapshot', not '{self.policy}'"
        return None
