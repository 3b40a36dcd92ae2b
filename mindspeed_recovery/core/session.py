# SPDX-License-Identifier: Apache-2.0
"""The phases of a recovery, and the copies that healthy steps take for it.

`begin_step` and `before_update` are called on the training thread, the phases on the runtime's thread, on every rank
and in the order of their definition. No phase uses a collective. A phase never raises because of one state: it goes on
with the others, and `after_rollback` reports all of them together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_recovery.core import actions
from mindspeed_recovery.core.container import Quarantine
from mindspeed_recovery.core.copies import Copies, Slot
from mindspeed_recovery.core.memory import DeviceMemory, PlainMemory
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry, TrackedState
from mindspeed_recovery.core.report import Outcome, Report
from mindspeed_recovery.core.values import Buffers
from mindspeed_recovery.errors import FORCE_STOP, QuarantineError, RecoveryError, RecoveryFailed

logger = logging.getLogger("mindspeed_recovery")

LARGE_BYTES = 64 * 2**20


class Session:
    """Protects the states of ``registry`` in this process.

    ``roots``: named objects (model chunks, optimizer) below which the states on instances are found. ``memory``: the
    device's memory. ``strict``: `after_rollback` raises if a state is not exact. ``is_fault``: tells the errors of the
    device and of the runtime, which must reach the training thread's caller, from bugs of ours, which must not.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        roots: Mapping[str, Any] | None = None,
        memory: DeviceMemory | None = None,
        strict: bool = False,
        is_fault: Callable[[BaseException], bool] | None = None,
    ) -> None:
        self.registry = registry
        self.memory: DeviceMemory = memory or PlainMemory()
        self.copies = Copies(self.memory.host_empty)
        self.reports: list[Report] = []
        self._roots = dict(roots or {})
        self._strict = strict
        self._is_fault = is_fault or (lambda error: str(error).startswith(FORCE_STOP))
        self._constants = Buffers(self.memory.host_empty)
        self._constants_checked = False
        self._gate = threading.Lock()
        self._recovering = False
        self._report = Report(0)
        self._quarantines: dict[str, list[Quarantine]] = {}

    # ---- start ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what stands now. Raises LocationError, naming the entry, for a location that cannot be right."""
        with self._quiet():
            self.registry.find_owners(self._roots)
            for state in self._protected():
                try:
                    strangers = self.registry.adopt(state, self._constants)
                except RecoveryError as error:
                    raise type(error)(f"state '{state.name}' ({state.spec.source}): {error}") from None
                for holder in strangers:
                    logger.warning("state '%s': %s still holds the object that stood there before", state.name, holder)
                self._check_size(state)

    def track(self, spec: StateSpec) -> None:
        """Declare and adopt one more state. Raises StateError or LocationError and tracks nothing then."""
        state = self.registry.add(spec)
        try:
            self.registry.find_owners(self._roots)
            self.registry.adopt(state, self._constants)
        except RecoveryError:
            self.registry.remove(spec.name)
            raise
        self._check_size(state)

    def untrack(self, name: str) -> None:
        """Stop tracking a state; a plain container stands in its place again. Raises KeyError for an unknown name."""
        self._lift(name)
        self.registry.release(self.registry[name])
        self.registry.remove(name)

    def close(self) -> None:
        """Track nothing any more: the inverse of `start`. The session is not used afterwards."""
        for state in list(self.registry):
            self.untrack(state.name)

    def _check_size(self, state: TrackedState) -> None:
        if state.spec.large or not (state.spec.policy.copied or state.spec.policy is Policy.CONSTANT):
            return
        size = self.registry.describe(state)["bytes"]
        if size > LARGE_BYTES:
            state.unprotected = (
                f"{size} bytes are above the limit of {LARGE_BYTES} for host copies; declare it with large = true"
            )
            logger.warning("state '%s' is not copied: %s", state.name, state.unprotected)

    def summary(self) -> str:
        """What is tracked, in one line."""
        described = [self.registry.describe(state) for state in self._protected()]
        here = [d for d in described if d["places"]]
        size = sum(d["bytes"] for d in here)
        return (
            f"{len(described)} states tracked, {len(here)} present here "
            f"({size} bytes, {self.copies.nbytes} bytes in host copies)"
        )

    def _protected(self) -> Iterator[TrackedState]:
        return (state for state in self.registry if state.spec.policy is not Policy.IGNORED)

    # ---- healthy steps, on the training thread ---------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Step ``step`` begins: the one before it is quite finished, logging included. Takes ``start(step)``."""
        self._commit(self.copies.start, self.copies.update, step)

    def before_update(self, step: int) -> None:
        """The gradients of ``step`` are ready (also when an overflow skips the update) and nothing has been written yet;
        the trackers hold the step's sums, not yet reduced by logging. Takes ``update(step)``."""
        self._commit(self.copies.update, self.copies.start, step)

    def after_log(self, step: int) -> None:
        """The log line of ``step`` is written: states that change with it are copied for ``start(step + 1)`` now, since an
        evaluation or a checkpoint may come before that."""
        for state in self._protected():
            if state.spec.settled == "after-logging" and not self._recovering and not state.unprotected:
                try:
                    self.copies.start.take(state.spec, state.places(), step + 1)
                except Exception as error:
                    self._swallow(error, state)

    def _commit(self, slot: Slot, other: Slot, step: int) -> None:
        if self._recovering:
            return
        try:
            other.settle()
        except Exception as error:
            self._swallow(error, None)
        self.copies.taking = slot
        slot.begin(step)
        with torch.no_grad():
            for state in self._protected():
                if self._recovering:
                    return
                try:
                    self._commit_state(state, slot)
                except Exception as error:
                    self._swallow(error, state)
            slot.enqueued()
        with self._gate:
            if not self._recovering:
                self.copies.taking = None
        self._constants_checked = True

    def _commit_state(self, state: TrackedState, slot: Slot) -> None:
        if state.unprotected:
            return
        spec = state.spec
        if spec.quarantine or spec.policy is Policy.CONSTANT:
            self.registry.adopt(state, self._constants)
        if spec.policy is Policy.CONSTANT and not self._constants_checked:
            self._check_constants(state)
        wanted = spec.policy.copied and (slot is self.copies.start or spec.settled != "after-update")
        if wanted or (spec.replay and slot is self.copies.update):
            slot.take(spec, state.places())

    def _check_constants(self, state: TrackedState) -> None:
        for place in state.places():
            constant = state.constants.get(place.path)
            if constant is not None and not constant.matches(place.get()):
                logger.warning(
                    "state '%s' at %s changed after adoption; the copy is taken again", state.name, place.path
                )
                del state.constants[place.path]
        self.registry.adopt(state, self._constants)

    def _swallow(self, error: Exception, state: TrackedState | None) -> None:
        """A bug of ours in a healthy step must not end training; a fault of the device must reach the runtime."""
        if self._recovering or isinstance(error, QuarantineError):
            return
        if self._is_fault(error):
            raise error
        if state is None:
            logger.warning("a copy could not be confirmed: %s", error)
            return
        state.unprotected = f"{type(error).__name__}: {error}"
        logger.warning("state '%s' is not protected any more, training goes on: %s", state.name, state.unprotected)

    # ---- recovery, on the runtime's thread -------------------------------------------------------------------------

    def stop(self) -> None:
        """All ranks: close the commit gate. Nothing else: the training thread still runs Python."""
        with self._gate:
            self._recovering = True
        self._report = Report(len(self.reports) + 1)

    def clean(self, error_time: float | None = None) -> None:
        """All ranks: move the contents out of the containers and put these in quarantine.

        ``error_time`` (seconds since the epoch): copies enqueued at or after it are not to be trusted on this rank.
        """
        with self._phase("clean"):
            self.copies.discard(since=error_time)
            for state in self._protected():
                if state.spec.quarantine and state.name not in self._quarantines:
                    with self._outcome(state, "quarantined"):
                        # Filled one by one: what is in quarantine when an error comes must be found again by _lift.
                        quarantines = self._quarantines[state.name] = []
                        self.registry.adopt(state, self._constants)
                        for place in state.whole():
                            if place.get() is not None:
                                quarantines.append(Quarantine(place.get(), state.name, place.path))

    def before_rollback(self, step: int, *, replay: bool = False) -> None:
        """All ranks: put every state to the end of ``step``; quarantine ends.

        ``replay``: the log line of ``step`` will be written again, as decided alike on every rank; the trackers then get
        the sums they held before logging.
        """
        self._report.step, self._report.replayed = step, replay
        with self._phase("restore"):
            self.copies.discard(after_step=step)
            for name in list(self._quarantines):
                self._lift(name)
            self._find_owners()
            for state in self._protected():
                with self._outcome(state, _DONE[state.spec.policy]) as outcome:
                    self._restore(state, step, replay, outcome)

    def after_rollback(self) -> Report:
        """All ranks: reset the trackers again, put the rank's own states to the step once more (the rollback may have
        drawn random numbers), check that nothing tracked is unsafe, and open the commit gate.

        Raises RecoveryFailed under ``strict`` if the report is not exact.
        """
        report = self._report
        with self._phase("check"):
            for state in self._protected():
                with self._outcome(state, _DONE[state.spec.policy]) as outcome:
                    if state.spec.policy is Policy.RESET:
                        self._reset(state)
                    elif (
                        state.spec.policy is Policy.SNAPSHOT
                        and state.spec.settled == "before-update"
                        and outcome.source
                    ):
                        self._restore(state, report.step, False, outcome)
                    report.unsafe += [path for path, tensor in state.tensors() if self.memory.is_unsafe(tensor)]
        self.reports.append(report)
        self._open()
        for line in report.failures:
            logger.warning("recovery %d, step %d is not exact: %s", report.number, report.step, line)
        if self._strict and report.failures:
            raise RecoveryFailed("the recovery is not exact: " + "; ".join(report.failures))
        return report

    def before_save(self) -> None:
        """All ranks, before a last-words checkpoint: lift the quarantine and nothing else."""
        for name in list(self._quarantines):
            self._lift(name)
        self._open()

    def _open(self) -> None:
        with self._gate:
            self._recovering = False
            self.copies.taking = None

    def _find_owners(self) -> None:
        try:
            self.registry.find_owners(self._roots)
        except RecoveryError as error:
            self._report.outcomes["instances"] = Outcome("instances", "search", error=str(error))

    def _restore(self, state: TrackedState, step: int, replay: bool, outcome: Outcome) -> None:
        spec = state.spec
        if spec.policy is Policy.RESET:
            copy = self.copies.source(spec, step, replay) if replay and spec.replay else None
            self._reset(state)  # first of all, so that no holder keeps an unsafe tensor whatever the copy holds
            if copy is not None:
                outcome.action, outcome.source = "replayed", copy[0]
                for place in state.places():
                    _put_back(place, copy[1].taken)
        elif spec.policy is Policy.DROP:
            for place in state.places():
                actions.drop(place, spec)
        elif spec.policy is Policy.CONSTANT:
            for place in state.places():
                _put_back(place, state.constants)
        else:
            self._restore_copied(state, step, replay, outcome)

    def _restore_copied(self, state: TrackedState, step: int, replay: bool, outcome: Outcome) -> None:
        places = state.places()
        if all(place.get() is None for place in places):
            outcome.action = "absent"
            return
        source = self.copies.source(state.spec, step, replay)
        if source is not None:
            outcome.source = source[0]
            for place in places:
                _put_back(place, source[1].taken)
            return
        outcome.tried = [f"start({step + 1})", f"update({step})"]
        unsafe = [path for path, tensor in state.tensors() if self.memory.is_unsafe(tensor)]
        if self.copies.interrupted_at(state.spec, step) and not unsafe:
            outcome.action = "kept"
            return
        outcome.error = (
            f"no copy of the end of step {step} ({'unsafe' if unsafe else state.unprotected or 'left as it is'}); "
            f"tried {', '.join(outcome.tried)}"
        )
        if state.spec.on_missing == "error":
            raise RecoveryFailed(f"state '{state.name}': {outcome.error}; training is wrong without it")

    def _reset(self, state: TrackedState) -> None:
        places = state.places()
        for place in places:
            actions.reset(place, state.spec)
        # Upstream's clear expects the items that the first record makes: nothing to clear, nothing to call.
        if state.spec.clear is not None and any(place.get() for place in places):
            actions.run_clear(state.spec.clear)

    def _lift(self, name: str) -> None:
        for quarantine in self._quarantines.pop(name, []):
            quarantine.lift()

    @contextmanager
    def _outcome(self, state: TrackedState, action: str) -> Iterator[Outcome]:
        """Run one state's part of a phase; its error is kept for the report and stops nobody else."""
        outcome = self._report.outcomes.get(state.name)
        if outcome is None or outcome.action == "quarantined":
            outcome = self._report.outcomes[state.name] = Outcome(state.name, action)
        try:
            yield outcome
        except Exception as error:
            logger.debug("state '%s'", state.name, exc_info=True)
            outcome.error = outcome.error or f"{type(error).__name__}: {error}"

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with self._quiet():
            yield
        self._report.milliseconds[name] = self._report.milliseconds.get(name, 0.0) + (time.perf_counter() - began) * 1e3

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """No autograd; whatever was enqueued has happened at the end."""
        with torch.no_grad():
            yield
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()


_DONE = {
    Policy.RESET: "reset",
    Policy.DROP: "dropped",
    Policy.CONSTANT: "rewritten",
    Policy.REPLICATE: "restored",
    Policy.SNAPSHOT: "restored",
}


def _put_back(place: Any, taken: Mapping[str, Any]) -> None:
    capture = taken.get(place.path)
    if capture is None:
        return
    current = place.get()
    value = capture.restore(current)
    if value is not current:
        place.set(value)
