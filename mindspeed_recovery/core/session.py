# SPDX-License-Identifier: Apache-2.0
"""The phases of a recovery, and the copies that healthy steps take for it.

`begin_step` and `before_update` are called on the training thread, the phases on the runtime's thread, on every rank
and in the order of their definition; `after_repair`, which alone talks to other ranks, only on those in a repair. No phase
uses a collective. A phase never raises because of one state: it goes on with the others, and `after_rollback` reports all
of them together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from mindspeed_recovery.core import actions, container, reachable, unsafe
from mindspeed_recovery.core.checkpoint import Checkpoint, Loaded, together
from mindspeed_recovery.core.copies import Copies, Slot, StateCopy
from mindspeed_recovery.core.location import Place
from mindspeed_recovery.core.memory import DeviceMemory, synchronize
from mindspeed_recovery.core.notices import Notices
from mindspeed_recovery.core.npu_memory import device_memory
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry, TrackedState, naming, pair_up
from mindspeed_recovery.core.repair import LARGE_BYTES, Exchange, Plan, RepairHandle, follows, ordered
from mindspeed_recovery.core.report import Outcome, Report
from mindspeed_recovery.core.values import Buffers, Capture, Restoring
from mindspeed_recovery.errors import (
    QuarantineError,
    RecoveryError,
    RecoveryFailed,
    RepairError,
    StateError,
    is_device_fault,
)

logger = logging.getLogger("mindspeed_recovery")

DIGEST_STEPS = 50
"""Digests of the ranks' own states are published every so many steps, and in the first step after a recovery."""
REPORTS_KEPT = 100


class Session:
    """Protects the states of ``registry`` in this process.

    ``roots``: named objects (model chunks, optimizer) below which the states on instances are found. ``memory``: the
    device's memory. ``strict``: `after_rollback` raises if a state is not exact. ``is_fault``: tells the errors of the
    device and of the runtime, which must reach the training thread's caller, from bugs of ours, which must not.
    ``repair_timeout``: seconds that one wait for another rank may last while states move between the two.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        roots: Mapping[str, Any] | None = None,
        memory: DeviceMemory | None = None,
        strict: bool = False,
        is_fault: Callable[[BaseException], bool] | None = None,
        repair_timeout: float = 30.0,
    ) -> None:
        self.registry = registry
        self.memory: DeviceMemory = memory or device_memory()
        self.copies = Copies(self.memory.host_empty)
        self.reports: list[Report] = []
        """Of the last recoveries."""
        self._recoveries = 0
        self._roots = dict(roots or {})
        self._strict = strict
        self._is_fault = is_fault or is_device_fault
        self._repair_timeout = repair_timeout
        self._notices = Notices()
        self.checkpoint = Checkpoint(registry, self.copies, self.memory, self._notices, self._is_fault)
        self._not_loaded: dict[str, str] = {}
        self._digests_due = True
        self._tried: dict[str, list[str]] = {}
        self._constants = Buffers(self.memory.host_empty)
        self._constants_checked = False
        self._measured: set[str] = set()
        self._strangers: set[tuple[str, str]] = set()
        self._owners_known = False  # objects made between `start` and the first step are found with it
        self._warned = False
        self._undo_loading: Callable[[], None] = lambda: None
        self._gate = threading.Lock()
        self._recovering = False
        self._report = Report(0)
        self._quarantines: dict[str, list[container.Quarantine]] = {}

    # ---- start ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what stands now. Raises LocationError or StateError, naming the entry, for one that cannot be right."""
        self._undo_loading = container.allow_loading()
        with self._quiet():
            self.registry.find_owners(self._roots)
            for state in self._protected():
                with naming(state):
                    self._adopt(state)
        self._publish()

    def track(self, spec: StateSpec, *, now: bool = True) -> None:
        """Declare one more state and adopt it, or leave that to the next step if not ``now``.

        Raises StateError or LocationError and tracks nothing then.
        """
        state = self.registry.add(spec)
        self._owners_known = False
        if not now:
            return
        try:
            self.registry.find_owners(self._roots)
            with naming(state):
                self._adopt(state)
        except Exception:
            self.registry.remove(spec.name)
            raise
        self._publish()

    def untrack(self, name: str) -> None:
        """Stop tracking a state; a plain container stands in its place again. Raises KeyError for an unknown name."""
        self._untrack(name)
        self._publish()

    def _untrack(self, name: str) -> None:
        self._lift(name)
        state = self.registry[name]
        self.registry.remove(name)
        self.registry.release(state)

    def _publish(self) -> None:
        """Tell the other ranks that, and with which catalogue, this one runs the plugin."""
        with self._harmless(None):
            self._notices.publish(self.registry)

    def close(self) -> None:
        """Track nothing any more: the inverse of `start`. The session is not used afterwards."""
        for state in list(self.registry):
            try:
                self._untrack(state.name)
            except Exception as error:
                logger.debug("state '%s' is not where it was: %s", state.name, error)
        self._undo_loading()
        with self._harmless(None):
            self._notices.withdraw()

    def explain(self, error: BaseException) -> None:
        """Add notes to an unsafe-data error that name its unsafe tensors: see `unsafe.annotate`. Never raises.

        Called on the training thread where the error is caught, before anything has changed the memory.
        """
        unsafe.annotate(error, self.registry, self.memory)

    def summary(self) -> str:
        """What is tracked: one line of totals, and one for each state that is present here."""
        described = [self.registry.describe(state) for state in self._protected()]
        here = [d for d in described if d["places"]]
        size, copied = sum(d["bytes"] for d in here), sum(d["host_bytes"] for d in here)
        lines = [
            f"{len(described)} states tracked, {len(here)} present here ({size} bytes; {copied} bytes of host copies)"
        ]
        width = max((len(d["name"]) for d in here), default=0)
        for d in here:
            where = f"{d['bytes']} bytes on {d['device']}" if d["device"] else "on the host"
            lines.append(f"  {d['name']:<{width}}  {d['policy']:<9}  {where}; {d['host_bytes']} bytes of host copies")
        return "\n".join(lines)

    def untracked(
        self, owners: Iterable[Any] = (), is_device: Callable[[Tensor], bool] | None = None
    ) -> list[reachable.Untracked]:
        """The device tensors of this process that neither the session's roots, further ``owners``, nor a state has: see
        `reachable.untracked`."""
        owners = [*self._roots.values(), *owners]
        return reachable.untracked(is_device or self.memory.is_device, owners, self.registry, passed_over=[self])

    def _adopt(self, state: TrackedState) -> None:
        self._check_size(state)
        for holder in self.registry.adopt(state, self._constants):
            if (state.name, holder) in self._strangers:
                continue
            self._strangers.add((state.name, holder))
            logger.warning("state '%s': %s still holds the object that stood there before", state.name, holder)

    def _check_size(self, state: TrackedState) -> None:
        """Once there is something to measure: a large state is copied only if its declaration says so."""
        copied = state.spec.policy.copied or state.spec.policy is Policy.CONSTANT
        if state.name in self._measured or state.spec.large or not copied:
            return
        size = self.registry.describe(state)["bytes"]
        if size:
            self._measured.add(state.name)
        if size > LARGE_BYTES:
            state.too_large = (
                f"{size} bytes, above the limit of {LARGE_BYTES} for host copies; declare it with large = true"
            )
            logger.warning("state '%s' is not copied: %s", state.name, state.too_large)

    def _protected(self) -> Iterator[TrackedState]:
        return (state for state in self.registry if state.spec.policy is not Policy.IGNORED)

    def resume(self, step: int, loaded: Loaded) -> None:
        """A new process goes on after ``step`` of a checkpoint: put back, in place, what that holds of the states. After
        `start` and what the framework loads itself, before the first step; every rank for itself.

        One WARNING names all states that cannot be put back. Raises StateError for these if the session is ``strict``,
        or training is wrong without one of them.
        """
        with self._quiet():
            copies, problems = self.checkpoint.read(step, loaded)
            for name, copy in copies.items():
                outcome = Outcome(name, "restored")
                try:
                    self._put_copy_back(self.registry[name], copy, outcome)
                except Exception as error:
                    outcome.error = f"{type(error).__name__}: {error}"
                if outcome.error:
                    problems[name] = outcome.error
        if not problems:
            return
        text = f"training does not go on after step {step} as it would have: {together(problems)}"
        if self._strict or any(self.registry[name].spec.on_missing == "error" for name in problems):
            raise StateError(text)
        logger.warning("%s", text)

    # ---- healthy steps, on the training thread ---------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Step ``step`` begins: the one before it is quite finished, logging included. Takes ``start(step)``."""
        self.checkpoint.last_words = False
        self._commit(self.copies.start, self.copies.update, step)

    def before_update(self, step: int) -> None:
        """The gradients of ``step`` are ready (also when an overflow skips the update) and nothing has been written yet;
        the trackers hold the step's sums, not yet reduced by logging. Takes ``update(step)``."""
        self._commit(self.copies.update, self.copies.start, step)

    def after_log(self, step: int) -> None:
        """The log line of ``step`` is written: states that change with it are copied for ``start(step + 1)`` now, since an
        evaluation or a checkpoint may come before that."""
        self.copies.logged = step  # also if stop has come in the meantime: the live values are those of its end
        if self._recovering:
            return
        states = [
            s for s in self._protected() if s.spec.settled == "after-logging" and not s.unprotected and not s.too_large
        ]
        for state in states:
            with self._harmless(state), torch.no_grad():
                self.copies.start.take(state.spec, state.places(), step + 1)
        if states:
            with self._harmless(None):
                self.copies.start.enqueued()
                self.copies.start.settle()  # logging has waited for the device just now

    def _commit(self, slot: Slot, other: Slot, step: int) -> None:
        if self._recovering:
            return
        with self._harmless(None):
            other.settle()
            if other is self.copies.start and (self._digests_due or step % DIGEST_STEPS == 0):
                self._publish_digests(step)
        if self._recovering:  # stop came while this waited: the other slot may be all there is
            return
        self.copies.taking = slot
        slot.begin(step)
        if not self._owners_known:
            with self._harmless(None):
                self.registry.find_owners(self._roots)
                self._owners_known = True
        with torch.no_grad():
            for state in self._protected():
                if self._recovering:
                    return
                with self._harmless(state):
                    self._commit_state(state, slot)
        with self._harmless(None):
            slot.enqueued()
            if other.is_empty:  # the first copy of a process: nothing else could serve a fault in the meantime
                slot.settle()
        with self._gate:
            if not self._recovering:
                self.copies.taking = None
        self._constants_checked = True

    def _publish_digests(self, step: int) -> None:
        """Of the rank's own states as of the start of ``step``: two ranks with equal ones can repair each other's."""
        self._digests_due = False
        names = [state.name for state in self._protected() if state.spec.policy is Policy.SNAPSHOT]
        copies = {name: copy for name in names if (copy := self.copies.start.get(name, step)) is not None}
        self._notices.publish_digests(step - 1, copies)

    def _commit_state(self, state: TrackedState, slot: Slot) -> None:
        if state.unprotected or state.too_large:
            return
        spec = state.spec
        if spec.quarantine or spec.policy is Policy.CONSTANT:
            self._adopt(state)
        if spec.policy is Policy.CONSTANT and not self._constants_checked:
            self._check_constants(state)
        wanted = spec.policy.copied and (slot is self.copies.start or spec.settled != "after-update")
        if wanted or (spec.replay and slot is self.copies.update):
            self._check_size(state)
            if not state.too_large and slot.get(spec.name, slot.step) is None:
                slot.take(spec, state.places())

    def _check_constants(self, state: TrackedState) -> None:
        for pair in list(state.constants):
            place, constant = pair
            if not constant.matches(place.get()):
                logger.warning(
                    "state '%s' at %s changed after adoption; its copy is taken again", state.name, place.path
                )
                state.constants.remove(pair)
        self.registry.adopt(state, self._constants)

    @contextmanager
    def _harmless(self, state: TrackedState | None) -> Iterator[None]:
        """A bug of ours in a healthy step must not end training; a fault of the device must reach the runtime."""
        try:
            yield
        except Exception as error:
            if self._recovering or isinstance(error, QuarantineError):
                return
            if self._is_fault(error):
                raise
            if state is not None:
                state.unprotected = f"{type(error).__name__}: {error}"
                logger.warning(
                    "state '%s' is not protected any more, training goes on: %s", state.name, state.unprotected
                )
            elif not self._warned:
                self._warned = True
                logger.warning(
                    "the copies of this step may be missing, training goes on: %s: %s", type(error).__name__, error
                )

    # ---- recovery, on the runtime's thread -------------------------------------------------------------------------

    def stop(self) -> None:
        """All ranks, before the device is stopped: close the commit gate. Nothing else: the training thread still runs
        Python."""
        with self._gate:
            self._recovering = True
        self._report = Report(self._recoveries + 1)
        self._tried = {}

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
                            value = place.get()
                            if value is not None and not container.is_quarantined(value):
                                quarantines.append(container.Quarantine(value, state.name, place.path))

    def sums(self, step: int) -> bool | None:
        """Whether this rank has kept anything of what the log line of ``step`` was summed up from, to write the line again;
        None if it may have had something and has lost it, as a process that was started again has. After `stop`."""
        kept = False
        for state in self._protected():
            if not state.spec.replay:
                continue
            source = self.copies.source(state.spec, step, True)
            if source is not None:
                kept = kept or source[1].nbytes > 0
            elif self.copies.live_is(state.spec, step, True):
                kept = True
            else:
                return None
        return kept

    def after_repair(self, plan: Plan, group: Any, bulk_group: Any = None) -> None:
        """Source and destination ranks, when the runtime has repaired model and optimizer: fetch the copies of the end of
        ``plan.step`` that this rank lacks from its replicas, and give its own to those that ask.

        ``group``: a gloo group of all ranks in the repair; ``bulk_group``: the device's, for large states. Nothing is
        written yet: `before_rollback` does that, from whatever copy is there then. Never raises because of another rank,
        and never waits longer than the timeout for one.
        """
        with self._phase("repair"):
            self._find_owners()
            exchange = self._exchange(plan.step)
            broken, refused = "", dict[int, str]()
            for source, destination, kind in ordered(plan):
                sends = plan.rank == source
                peer = destination if sends else source
                names = [state.name for state in self._protected() if follows(state.spec, kind)]
                problem = broken or refused.get(peer)
                problems = dict.fromkeys(names, problem) if problem else {}
                try:
                    if not problem:
                        exchange.check(peer)
                        move = exchange.send if sends else exchange.receive
                        problems = move(peer, names, group, bulk_group)
                except Exception as error:
                    logger.warning("no states move from rank %d to rank %d: %s", source, destination, error)
                    problems = dict.fromkeys(names, str(error))
                    refused[peer] = str(error)
                    if not isinstance(error, RepairError) or error.broken:
                        broken = f"not asked, since the repair group failed: {error}"
                for name in [] if sends else names:
                    self._tried.setdefault(name, []).append(f"replica {peer} ({problems.get(name) or 'received'})")

    def handle(self, name: str, step: int) -> RepairHandle:
        """A handle that moves one state, as it was at the end of ``step``, between two ranks; for runtimes that do it
        themselves instead of calling `after_repair`. Raises KeyError for an unknown name, StateError for a policy whose
        states are not moved (only those of `replicate` and `snapshot` are)."""
        state = self.registry[name]
        if not state.spec.policy.copied:
            raise StateError(f"state '{name}': states of policy '{state.spec.policy}' are not moved between ranks")

        def put_back() -> None:
            with self._quiet():
                source = self.copies.source(state.spec, step, False)
                if source is not None:
                    outcome = Outcome(name, "restored")
                    self._put_copy_back(state, source[1], outcome)
                    if outcome.error:
                        raise RepairError(f"state '{name}': {outcome.error}")

        return RepairHandle(name, self._exchange(step), put_back)

    def _exchange(self, step: int) -> Exchange:
        return Exchange(self.registry, self.copies, self.memory, self._notices, step=step, timeout=self._repair_timeout)

    def before_rollback(self, step: int, *, replay: bool = False, from_checkpoint: bool = False) -> None:
        """All ranks: put every state to the end of ``step``; quarantine ends.

        ``replay``: the log line of ``step`` will be written again, as decided alike on every rank; the trackers then get
        the sums they held before logging. ``from_checkpoint``: the runtime has just loaded the checkpoint of ``step``;
        copies of a run that is given up are worth nothing then. The states come from what the checkpoint holds of them
        (``checkpoint.loaded``), and what the framework has loaded itself stays as it is.
        """
        self._report.step, self._report.replayed, self._report.from_checkpoint = step, replay, from_checkpoint
        with self._phase("restore"):
            self.copies.discard(after_step=-1 if from_checkpoint else step)
            for name in list(self._quarantines):
                self._lift(name)
            self._find_owners()
            self.copies.kept.discard(after_step=-1)
            self.copies.kept.begin(step)
            self._not_loaded = self.checkpoint.install(step) if from_checkpoint else {}
            for state in self._protected():
                with self._outcome(state, _DONE[state.spec.policy]) as outcome:
                    self._restore(state, step, replay, outcome)
            self.copies.kept.enqueued()
            self.copies.kept.settle()

    def sum_layout(self) -> dict[str, str]:
        """Where the sums that a log line reduces over the ranks are, each with its shape and dtype. Ranks whose trackers differ
        in this meet in collectives of different numbers or sizes."""
        with self._quiet():
            states = [state for state in self._protected() if state.spec.replay]
            return {path: f"{tuple(t.shape)} {t.dtype}" for state in states for path, t in state.tensors()}

    def report_missing(self, what: str) -> None:
        """Between *stop* and `after_rollback`: something besides the states is not as in a run without the fault."""
        self._report.missing.append(what)

    def after_rollback(self) -> Report:
        """All ranks: reset the trackers again, put the rank's own states to the step once more (the rollback may have
        drawn random numbers), check that nothing tracked is unsafe, and open the commit gate.

        Raises RecoveryFailed if the report is not exact and the session is ``strict``, or training is wrong without one
        of the states that could not be restored.
        """
        report = self._report
        with self._phase("check"):
            for state in self._protected():
                with self._outcome(state, _DONE[state.spec.policy]) as outcome:
                    if state.spec.policy is Policy.RESET:
                        self._reset(state)
                    elif _drawn_from(state.spec) and outcome.source:
                        self._restore(state, report.step, False, outcome)
                    elif (kept := self.copies.kept.get(state.name, report.step)) is not None:
                        self._put_copy_back(state, kept, outcome)
                    report.unsafe += self._unsafe(state)
        self.reports.append(report)
        del self.reports[:-REPORTS_KEPT]
        self._recoveries += 1
        for outcome in report.outcomes.values():
            logger.debug("recovery %d: %s", report.number, outcome)
        for state in self.registry:
            state.unprotected = None  # whatever a step of before could not copy may be well again
        self._digests_due = True
        self._open()
        for line in report.failures:
            logger.warning("recovery %d, step %d is not exact: %s", report.number, report.step, line)
        if report.fatal or (self._strict and report.failures):
            raise RecoveryFailed("the recovery is not exact: " + "; ".join(report.failures))
        return report

    def before_save(self) -> None:
        """All ranks, before a last-words checkpoint: lift the quarantine and nothing else. What rides in it (`checkpoint`)
        comes from host copies."""
        self.checkpoint.last_words = True
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
        with suppress(Exception):  # only told; what is wrong with the state shows below
            outcome.nbytes = self.registry.describe(state)["bytes"]
        if spec.policy is Policy.RESET:
            if replay and spec.replay:
                self._restore_sums(state, step, outcome)
            elif not replay or isinstance(spec.to, str):
                self._reset(state)
            # A flag or a number waits for `after_rollback`: the replay must find it (a running timer) as it was.
        elif spec.policy is Policy.DROP:
            for place in state.places():
                actions.drop(place, spec)
        elif spec.policy is Policy.CONSTANT:
            restoring = Restoring()
            pairs, _ = pair_up(state.places(), state.constants)  # a place without a copy is adopted with the next step
            for place, constant in pairs:
                _put_back(place, constant, restoring)
        else:
            self._restore_copied(state, step, replay, outcome)

    def _restore_sums(self, state: TrackedState, step: int, outcome: Outcome) -> None:
        """What the tracker held before the log line of ``step``, for its replay."""
        source = self.copies.source(state.spec, step, True)
        if source is not None:
            # Not upstream's clear: it would forget the groups that the sums are reduced over.
            for place in state.places():
                actions.reset(place, state.spec)
            outcome.action, outcome.source = "replayed", source[0]
            self._put_copy_back(state, source[1], outcome)
        elif self.copies.live_is(state.spec, step, True) and not self._unsafe(state):
            outcome.action = "kept"
        else:
            self._reset(state)
            outcome.tried = [f"update({step})"]
            outcome.error = f"no sums for the log line of step {step}; tried update({step})"

    def _restore_copied(self, state: TrackedState, step: int, replay: bool, outcome: Outcome) -> None:
        source = self.copies.source(state.spec, step, replay)
        outcome.tried = [f"start({step + 1})", f"update({step})", *self._tried.get(state.name, ())]
        if source is not None:
            outcome.source = source[0]
            if not source[1].origin:
                outcome.tried = []
            self._put_copy_back(state, source[1], outcome)
            return
        if all(place.get() is None for place in state.places()):
            outcome.action = "absent"
            return
        unsafe = self._unsafe(state)
        loaded = self._report.from_checkpoint and state.spec.checkpoint == "framework"
        if state.name in self._not_loaded:
            outcome.tried.append(f"checkpoint ({self._not_loaded[state.name]})")
        if not unsafe and (loaded or self.copies.live_is(state.spec, step, replay)):
            outcome.action = "loaded" if loaded else "kept"
            if _drawn_from(state.spec):
                self.copies.kept.take(state.spec, state.places())
            return
        reason = "unsafe" if unsafe else state.too_large or state.unprotected or "left as it is"
        outcome.error = f"no copy of the end of step {step} ({reason}); tried {', '.join(outcome.tried)}"
        if unsafe and self._report.from_checkpoint:
            self._begin_anew(state, outcome)
        outcome.fatal = state.spec.on_missing == "error"

    def _begin_anew(self, state: TrackedState, outcome: Outcome) -> None:
        """A state that is in no checkpoint: in a process that has begun with one, the framework makes the items anew."""
        for place in state.places():
            if isinstance(place.holder, dict):
                place.remove()
                outcome.action = "begun anew"

    def _put_copy_back(self, state: TrackedState, copy: StateCopy, outcome: Outcome) -> None:
        outcome.nbytes = max(outcome.nbytes, copy.nbytes)  # generators hold no tensor
        pairs, new = pair_up(state.places(), copy.captures)
        restoring = Restoring()
        for place, capture in pairs:
            _put_back(place, capture, restoring)
        for place in new:
            if isinstance(place.holder, dict) or copy.origin:  # made by the aborted step, or not there on the replica
                place.remove()
            else:
                outcome.error = f"{place.path} appeared after its copy was taken, and was left as it is"

    def _unsafe(self, state: TrackedState) -> list[str]:
        return [path for path, tensor in state.tensors() if self.memory.is_unsafe(tensor)]

    def _reset(self, state: TrackedState) -> None:
        # Upstream's clear expects the items that the first record makes: nothing to clear, nothing to call.
        filled = any(_is_filled(place.get()) for place in state.whole())
        for place in state.places():
            actions.reset(place, state.spec)
        if state.spec.clear is not None and filled:
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
        try:
            synchronize()
        except RuntimeError as error:  # a device that is still stopped says so again at the next operation
            logger.debug("the device does not synchronise: %s", error)


_DONE = {
    Policy.RESET: "reset",
    Policy.DROP: "dropped",
    Policy.CONSTANT: "rewritten",
    Policy.REPLICATE: "restored",
    Policy.SNAPSHOT: "restored",
}


def _drawn_from(spec: StateSpec) -> bool:
    """Whether the code of a rollback may change the state: a random generator."""
    return spec.policy is Policy.SNAPSHOT and spec.settled == "before-update"


def _put_back(place: Place, capture: Capture, restoring: Restoring) -> None:
    current = place.get()
    value = capture.restore(current, restoring)
    if value is not current:
        place.set(value)


def _is_filled(value: Any) -> bool:
    return value is not None and not (isinstance(value, (dict, list, set, deque)) and not value)
