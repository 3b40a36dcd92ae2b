# SPDX-License-Identifier: Apache-2.0
"""The drill: prove on the user's own hardware, before a real fault, that a step computed again is the same step.

A step is computed up to the point where the optimizer would write. Then every tracked state is overwritten (and marked
unsafe, where the memory can do that), the phases of a recovery are run without a fault, and the step is computed again.
Nothing has been written yet, so neither parameters nor optimizer have to be restored, and no runtime is needed. Both
computations must agree in loss, gradients and every known state, those that are *not* tracked included.

All ranks call everything here in the same order, on the training thread; there are no collectives.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mindspeed_recovery.core import memory, values
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.errors import RecoveryError

logger = logging.getLogger("mindspeed_recovery")

_GARBAGE = 0xA5


class StepAbandoned(Exception):
    """Ends the first computation of the drilled step just before the optimizer's first write."""


@dataclass
class Result:
    """What the drill found. ``different``: the measurements that are not equal, each with what to do about it."""

    step: int
    overwritten: int
    compared: int
    different: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """A drill that could destroy nothing proves nothing."""
        return not self.different and self.overwritten > 0

    def __str__(self) -> str:
        counts = f"{self.overwritten} states overwritten, {self.compared} measurements compared"
        reasons = self.different or ["no tracked state is in device memory here: nothing could be destroyed"]
        end = "PASSED, the recomputed step is the same" if self.passed else "FAILED\n  " + "\n  ".join(reasons)
        return f"recovery drill at step {self.step}: {counts}: {end}"


class Drill:
    """One drill of one step. ``known``: every state that should be tracked, usually the shipped catalogue."""

    def __init__(self, session: Session, known: Iterable[StateSpec], roots: Mapping[str, Any], step: int) -> None:
        self._session, self._step = session, step
        self._witness = Registry(spec for spec in known if spec.policy is not Policy.IGNORED)
        self._witness.find_owners(roots)
        for state in session.registry:  # a user's own
            if state.name not in self._witness and state.spec.policy is not Policy.IGNORED:
                self._witness.add(state.spec).owners = state.owners
        self._first: dict[str, str] = {}
        self._overwritten = 0

    def abandon(self, measured: Mapping[str, Any]) -> None:
        """End of the first computation: note it and run a recovery without a fault to the step before.

        ``measured``: loss, gradient norm, gradients, … by name; tensors or numbers.
        """
        self._first = self._measure(measured)
        self._session.stop()
        self._overwritten = self._overwrite()
        self._session.clean()
        self._session.before_rollback(self._step - 1)
        self._session.after_rollback()

    def compare(self, measured: Mapping[str, Any]) -> Result:
        """End of the second computation."""
        second = self._measure(measured)
        result = Result(self._step, self._overwritten, len(self._first))
        for name in sorted(self._first.keys() | second.keys()):
            if self._first.get(name) != second.get(name):
                result.different.append(self._explain(name))
        report = self._session.reports[-1] if self._session.reports else None
        result.different += [f"not exact: {line}" for line in (report.failures if report else ())]
        return result

    def _explain(self, name: str) -> str:
        if name not in self._witness:
            return f"{name} differs"
        if name not in self._session.registry:
            return (
                f"state '{name}' at {self._witness[name].spec.location} differs and is not tracked: put its entry back"
            )
        return f"state '{name}' at {self._witness[name].spec.location} differs: its policy does not fit"

    def _measure(self, measured: Mapping[str, Any]) -> dict[str, str]:
        digests = {name: digest(value) for name, value in measured.items()}
        for state in self._witness:
            if state.spec.policy is Policy.DROP:  # scratch: what matters of it shows in loss and gradients
                continue
            try:
                places = state.places()
            except RecoveryError as error:
                logger.debug("state '%s' cannot be measured: %s", state.name, error)
                continue
            digests[state.name] = digest({place.path: place.get() for place in places})
        return digests

    def _overwrite(self) -> int:
        """Destroy what is tracked, as a fault would. Host memory never fails, so it stays."""
        device = self._session.memory
        count = 0
        for state in self._session.registry:
            if state.spec.policy is Policy.IGNORED:
                continue
            found = [t for _, t in state.tensors() if device.is_device(t) and memory.nbytes(t)]
            tensors = {values.storage_key(tensor): tensor for tensor in found}
            for tensor in tensors.values():
                target = memory.storage_bytes(tensor)
                # Another state may share the storage and have marked it: nothing may read it, not even its metadata.
                target.copy_(torch.full(target.shape, _GARBAGE, dtype=target.dtype, device=target.device))
            mark = getattr(device, "mark_unsafe", None)
            if mark is not None:
                mark(tensors.values())
            count += bool(tensors)
        return count


def digest(value: Any) -> str:
    """SHA-256 of a value: the bytes of its tensors and arrays, the states of its generators, its numbers and texts."""
    sha = hashlib.sha256()
    _feed(sha, value, top=True)
    return sha.hexdigest()


def _feed(sha: Any, value: Any, top: bool = False) -> None:
    if isinstance(value, Tensor) and value.numel() and not memory.nbytes(value):
        sha.update(b"freed")  # a framework took its storage away, to save memory: reading it may end the process
    elif isinstance(value, Tensor):
        # A copy also on the CPU: numpy() changes the storage of the tensor that it is called on.
        flat = value.detach().to("cpu", copy=True).contiguous().reshape(-1)
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
    elif values.is_generator(value):
        _feed(sha, values.generator_state(value))
    elif hasattr(value, "__array_interface__"):
        sha.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, (str, bytes, int, float, bool, type(None))):
        sha.update(repr(value).encode())
    else:
        sha.update(type(value).__name__.encode())
        for step, child in values.children(value, top):
            sha.update(step.encode())
            _feed(sha, child)
