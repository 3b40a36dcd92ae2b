# SPDX-License-Identifier: Apache-2.0
"""The standalone runtime: recovers a training process in place, without MindIO TFT.

It is the embedded default for CPUs, tests and demonstrations, and keeps TFT's order, threads, arguments and step rule:
stop → clean → repair → rollback on one thread that is not the training thread, then ``train()`` is called again on the
training thread with the same arguments. It restores **only what TFT restores**: parameters, optimizer, scheduler and
data position, here from host copies of its own. Module buffers, random generators and globals are the plugin's part.

Two differences, because a process here has no replicas to repair from: each rank repairs itself from its own copy, and
where a rank does not hold the newest step (it failed inside its update) all ranks take the newest one that every rank
holds. A fault that hits a recovery begins it anew on every rank. As in TFT a fault before the first optimizer update of the
process is refused, and an error that is not a known fault ends the job on every rank.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_recovery.core import memory
from mindspeed_recovery.core.report import Report
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.core.values import storage_key
from mindspeed_recovery.errors import FORCE_STOP, RecoveryFailed
from mindspeed_recovery.runtimes import restartable_gloo

logger = logging.getLogger("mindspeed_recovery")

FAULTS = {"UCE ERROR": "uce", "HCCL OP RETRY FAILED": "link"}
"""Error texts that begin a recovery, and the kind of fault each stands for."""

_CAUSES = {"uce": "memory", "link": "link"}

_POLL_SECONDS = 0.002
_KEPT = 100
"""So many of the last recoveries are remembered."""


def is_fault(error: BaseException) -> bool:
    """Whether an error is a fault of the device, or the runtime stopping the training thread."""
    return str(error).startswith(FORCE_STOP) or fault_kind(error) is not None


def fault_kind(error: BaseException | str) -> str | None:
    """``"uce"``, ``"link"``, or None for an error that is not in the fault table."""
    return next((kind for text, kind in FAULTS.items() if text in str(error)), None)


class _BegunAnew(Exception):
    """Another rank has met a fault in this attempt at a recovery."""


class Device(Protocol):
    """The device under a process. `check_uce_in_memory` answers 0 nothing found, 2 temporary, 3 persistent."""

    def stop(self) -> None: ...
    def restart(self) -> None: ...
    def check_uce_in_memory(self) -> int: ...
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


class Recoverable(Protocol):
    """What a runtime restores of a training job."""

    def tensors(self) -> Iterable[Tensor]:
        """Parameters and optimizer state."""

    def scratch(self) -> Iterable[Tensor]:
        """Gradient memory: its contents need not be restored, but it must be usable."""

    def host_state(self) -> Any:
        """Scheduler, data position, optimizer counters: a deep copy without tensors."""

    def load_host_state(self, state: Any) -> None: ...

    def abandon_step(self) -> None:
        """Drop the communication handles of the aborted step."""


class LogSink(Protocol):
    """Where the log line goes. Told which training step it writes, which steps are settled or rolled back, and at the end of
    each recovery what it did. `logs.held.HeldLog` is one to build on."""

    def begin(self, step: int) -> None: ...
    def settle(self, step: int) -> None: ...
    def rollback(self, step: int) -> None: ...
    def recovered(self, report: Report) -> None: ...


class _ModelCopy:
    """The job as of the end of one step, on the host."""

    def __init__(self) -> None:
        self.step = -1
        self._host: dict[int, Tensor] = {}
        self._host_state: Any = None

    def take(self, job: Recoverable, step: int, host_empty: memory.HostEmpty) -> None:
        self.step = -1
        old, self._host = self._host, {}
        for key, tensor in _storages(job.tensors()).items():
            host = old.get(key)
            if host is None or host.numel() != memory.nbytes(tensor):
                host = host_empty([memory.nbytes(tensor)], torch.uint8)
            memory.save(tensor, host)
            self._host[key] = host
        self._host_state = job.host_state()
        self.step = step

    def put_back_tensors(self, job: Recoverable) -> None:
        """Raise RecoveryFailed for a tensor that was made after the copy."""
        for key, tensor in _storages(job.tensors()).items():
            if key not in self._host:
                raise RecoveryFailed(
                    f"a {tuple(tensor.shape)} tensor of the optimizer was made after step {self.step}, whose copy is to be "
                    "put back; load the last checkpoint"
                )
            memory.load(tensor, self._host[key])

    def put_back_host_state(self, job: Recoverable) -> None:
        job.load_host_state(self._host_state)


def _storages(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    return {storage_key(tensor): tensor for tensor in tensors}


class _Watch:
    """Whether the next rank is alive: each rank gives signs of life in the store, and looks for those of one other. So every
    wait for a rank that is gone ends, whatever it waits for, and costs the store the same with many ranks."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float) -> None:
        self._store, self._timeout = store, timeout
        self._mine, self._other = f"alive/{rank}", f"alive/{(rank + 1) % world_size}"
        self._rank, self._alone = (rank + 1) % world_size, world_size == 1
        self._due = self._seen_at = 0.0
        self._seen = -1
        self.begin()

    def begin(self) -> None:
        """Give the other rank its whole time, from now on."""
        self._seen_at = time.monotonic()

    def look(self) -> None:
        """Call this often. Raises RecoveryFailed if there was no sign of life for the timeout."""
        now = time.monotonic()
        if self._alone or now < self._due:
            return
        self._due = now + self._timeout / 20
        self._store.add(self._mine, 1)
        seen = self._store.add(self._other, 0)
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        elif now - self._seen_at > self._timeout:
            raise RecoveryFailed(f"rank {self._rank} has given no sign of life for {self._timeout:.0f} s")


class StandaloneRuntime:
    """Runs ``train`` on every rank and recovers it from device-memory and communication faults.

    ``store``: a torch.distributed store all ranks share, used by no one else under its prefix; ``device``: the device
    under this process; ``job``: what to restore; ``write_log(step, line)``: writes the log line of a step, with
    collectives; ``session``: the plugin, or None; ``sink``: where log lines go; ``context``: entered on the runtime's
    thread (thread-local modes). ``timeout`` (seconds) bounds every wait for another rank.

    The training loop calls, on the training thread and in this order in each step: `begin_step`, `begin_update`,
    `end_update`, `log`, and `mark` for anything else that a step must have done.
    """

    def __init__(
        self,
        *,
        store: Any,
        rank: int,
        world_size: int,
        device: Device,
        job: Recoverable,
        write_log: Callable[[int, Any], None],
        session: Session | None = None,
        sink: LogSink | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        max_retries: int = 8,
        timeout: float = 60.0,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._device, self._job, self._write_log = device, job, write_log
        self._session, self._sink, self._context = session, sink, context
        self._max_retries, self._timeout = max_retries, timeout
        self._copies = (_ModelCopy(), _ModelCopy())
        self._lines: dict[int, Any] = {}
        self._marks: dict[str, int] = {}
        self._done = self._first = self._agreed = 0
        self._epoch = 1
        self._retries: dict[int, int] = {}
        self._window = threading.Condition()
        self._updating = self._stopping = False
        self._kind = ""
        self._kinds: dict[int, str] = {}
        self._left, self._resume, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._watch = _Watch(store, rank, world_size, timeout)
        self._written: deque[set[str]] = deque([set()])
        self.recoveries: list[dict[str, float]] = []
        """Milliseconds by phase of each of the last recoveries."""

    # ---- training thread -------------------------------------------------------------------------------------------

    def run(self, train: Callable[..., Any], args: list[Any], *, step: int = 0) -> Any:
        """Call ``train(*args)`` until it ends; ``step`` is the last step done. Returns what train returned.

        Raises the error of ``train`` if it is not a fault, and RecoveryFailed if a recovery failed or another rank's
        job ended.
        """
        self._done = self._first = self._agreed = step
        self._marks = {"log": step}
        self._copies[0].take(self._job, step, self._device.host_empty)
        thread = threading.Thread(target=self._control, name="recovery", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    result = train(*args)
                except Exception as error:
                    self._on_error(error)
                else:
                    self._left.set()
                    if self._finish():
                        return result
                self._wait_for_recovery()
        finally:
            self._closed.set()
            thread.join(self._timeout)

    def begin_step(self, step: int) -> None:
        """Step ``step`` begins; everything of the step before it has been done, here and, its update, on every rank: from
        now on no rank can fall back behind it."""
        if step - 1 > self._agreed:
            updated, key = False, self._key(f"updated/{step - 1}")
            while not updated and not self._stopping:
                updated = self._store.add(key, 0) >= self._world_size
                if not updated:
                    time.sleep(_POLL_SECONDS)
            if updated and self._rank == 0:  # for that update, every rank had seen the one before to be done
                self._store.delete_key(self._key(f"updated/{step - 2}"))
        if self._sink is not None:
            self._sink.settle(step - 1)
            self._sink.begin(step)
        if self._session is not None:
            self._session.begin_step(step)

    def begin_update(self, step: int) -> None:
        """The gradients of ``step`` are ready; the next thing is the first write of the optimizer."""
        if self._session is not None:
            self._session.before_update(step)
        with self._window:
            if self._stopping:
                raise RuntimeError(f"{FORCE_STOP}.")
            self._updating = True

    def end_update(self, step: int, line: Any) -> None:
        """The update of ``step`` is done, the scheduler has been stepped. ``line``: what `log` will write; on the host."""
        copy = min(self._copies, key=lambda copy: copy.step)
        copy.take(self._job, step, self._device.host_empty)
        self._lines = {step: line}
        self._add(f"updated/{step}")
        with self._window:
            self._done, self._updating = step, False
            self._window.notify_all()

    def log(self, step: int) -> None:
        """Write the log line of ``step``."""
        self._write_log(step, self._lines[step])
        if self._session is not None:
            self._session.after_log(step)
        self.mark("log", step)

    def mark(self, what: str, step: int) -> None:
        """Note that ``what`` (an evaluation, say) has been done for ``step`` on this rank."""
        self._marks[what] = step

    def marked(self, what: str) -> int:
        """The last step for which ``what`` has been done; after a recovery, for which every rank had done it."""
        return self._marks.get(what, self._first)

    def _on_error(self, error: Exception) -> None:
        if self._session is not None:
            self._session.explain(error)
        kind = fault_kind(error)
        if kind is not None and self._done == self._first:
            self._die(f"rank {self._rank}: a fault before the first optimizer update cannot be recovered: {error}")
            raise error
        if kind is not None:
            self._kind = kind
            logger.debug("rank %d: %s fault after step %d: %s", self._rank, kind, self._done, error)
            self._set(f"done/{self._rank}", str(self._done))
            self._add("fault")
        elif not (str(error).startswith(FORCE_STOP) and self._stopping):
            self._die(f"rank {self._rank}: {type(error).__name__}: {error}")
            raise error
        self._abandon_window()
        # The frames of the aborted step hold its tensors and open context managers, which must end before the next step.
        error.__traceback__ = None
        gc.collect()
        self._left.set()

    def _abandon_window(self) -> None:
        with self._window:
            self._updating = False
            self._window.notify_all()

    def _finish(self) -> bool:
        """Wait until every rank has finished (True) or a recovery calls this rank back (False)."""
        key = self._key("finished")
        self._add("finished")
        while self._store.add(key, 0) < self._world_size:
            if self._stopping or self._resume.is_set() or self._failure is not None:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _wait_for_recovery(self) -> None:
        deadline = time.monotonic() + 4 * self._timeout
        while not self._resume.wait(_POLL_SECONDS * 5):
            if self._failure is not None:
                break
            if time.monotonic() > deadline:
                raise RecoveryFailed(f"rank {self._rank}: no recovery came within {4 * self._timeout:.0f} s")
        if self._failure is not None:
            raise self._failure
        self._resume.clear()

    # ---- runtime thread --------------------------------------------------------------------------------------------

    def _control(self) -> None:
        with self._context(), torch.no_grad():
            while not self._closed.wait(_POLL_SECONDS):
                try:
                    if self._store.check([self._key("fault")]):
                        self._recover()
                        self._watch.begin()
                    elif self._store.check(["dead"]):
                        raise RecoveryFailed(f"the job has ended on another rank: {self._store.get('dead').decode()}")
                    else:
                        self._watch.look()
                except Exception as error:
                    if self._closed.is_set():
                        return
                    # First: whatever else fails, the training thread must not wait for ever.
                    self._failure = self._blame(error)
                    self._die(f"rank {self._rank}: {error}")
                    self._stop()
                    return

    def _blame(self, error: Exception) -> RecoveryFailed:
        """Why this rank cannot go on. It may only be that another one gave up and took its connections along."""
        if isinstance(error, RecoveryFailed):
            return error
        reason = f"rank {self._rank} cannot go on: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the store is gone
            if self._store.check(["dead"]):
                reason = f"another rank gave up: {self._store.get('dead').decode()}"
        failure = RecoveryFailed(reason)
        failure.__cause__ = error
        return failure

    def _recover(self) -> None:
        """Raises RecoveryFailed, and what is no fault of the device. A fault begins the recovery anew, on every rank: the
        one that met it never comes to the next barrier, and the others are told there, or by the error of a collective
        with it."""
        milliseconds: dict[str, float] = {}
        for attempt in range(1, self._max_retries + 2):
            try:
                step = self._attempt(milliseconds)
                break
            except Exception as error:
                kind = fault_kind(error)
                if kind is None and not isinstance(error, _BegunAnew) and not self._begun_anew():
                    raise
                if attempt > self._max_retries:
                    raise RecoveryFailed(f"a recovery was hit by faults {attempt} times; giving up: {error}") from error
                logger.debug("rank %d: attempt %d at a recovery ends: %s", self._rank, attempt, error)
                if kind is not None:
                    self._kind = kind if kind == "uce" else self._kind or kind
                    self._add("anew")
                self._turn_page()
        self._retries = {step: self._retries.get(step, 0) + 1}  # nobody falls back behind a step that all have held
        self._tell(step, milliseconds)
        self._turn_page()
        self._kind = ""
        self._left.clear()
        self._stopping = False
        self._resume.set()

    def _begun_anew(self) -> bool:
        return self._store.check([self._key("anew")])

    def _attempt(self, milliseconds: dict[str, float]) -> int:
        began = time.perf_counter()

        def lap(phase: str) -> None:
            nonlocal began
            now = time.perf_counter()
            milliseconds[phase] = milliseconds.get(phase, 0.0) + (now - began) * 1e3
            began = now

        self._stop()
        self._barrier("stopped")
        self._forget()
        lap("stop")
        self._clean()
        lap("clean")
        step, replay, destination = self._agree()
        copy = next(copy for copy in self._copies if copy.step == step)
        if destination:
            copy.put_back_tensors(self._job)
        self._barrier("repaired")
        lap("repair")
        self._rollback(copy, step, replay)
        self._barrier("rolled-back")
        lap("rollback")
        return step

    def _tell(self, step: int, milliseconds: dict[str, float]) -> None:
        """What happened, where people look: one line for the job, and the log."""
        self.recoveries.append(milliseconds)
        del self.recoveries[:-_KEPT]
        level = logging.INFO if self._rank == 0 else logging.DEBUG
        if self._session is None:
            logger.log(level, "rank %d: back at step %d; %s", self._rank, step, milliseconds)
            return
        report = self._session.reports[-1]
        report.cause = " and ".join(f"{_CAUSES[kind]} fault" for kind in sorted(set(self._kinds.values())))
        report.ranks, report.retries, report.phases = sorted(self._kinds), self._retries[step] - 1, milliseconds
        logger.log(level, "%s", report.summary())
        if self._sink is not None:
            self._sink.recovered(report)

    def _stop(self) -> None:
        with self._window:
            if self._can_finish_update():
                self._window.wait_for(lambda: not self._updating, timeout=self._timeout)
            self._stopping = True
        if self._session is not None:
            self._session.stop()
        self._device.stop()
        restartable_gloo.abort_all()

    def _can_finish_update(self) -> bool:
        """Whether a rank that is writing its parameters will come to the end of that: only if every failed rank has
        finished the same update, and so sent all that its peers need."""
        if self._failure is not None:  # also if the store is gone
            return False
        keys = [self._key(f"done/{rank}") for rank in range(self._world_size)]
        failed_after = [int(self._store.get(key)) for key in keys if self._store.check([key])]
        return bool(failed_after) and min(failed_after) > self._done

    def _clean(self) -> None:
        checked = self._kind
        if checked == "uce":
            self._check_memory()
        if self._session is not None:
            self._session.clean()
        # From here on the device works again, so the training thread must have met its FORCE STOP before.
        self._wait(self._left.is_set, "the training thread of this rank to leave train()")
        if self._kind != checked:  # it met a fault of its own on the way out
            self._check_memory()
        self._job.abandon_step()
        self._device.restart()
        restartable_gloo.reopen_all(self._epoch)
        for tensor in _storages(self._job.scratch()).values():
            memory.refresh_zeros(tensor)

    def _check_memory(self) -> None:
        if self._device.check_uce_in_memory() == 1:
            raise RecoveryFailed(f"rank {self._rank}: the memory fault is outside the allocator's pool")

    def _agree(self) -> tuple[int, bool, bool]:
        """From what every rank says: the step to roll back to, whether its log line is still owed, and whether this
        rank must be repaired. Computed alike on every rank."""
        held = [copy.step for copy in self._copies if copy.step >= 0]
        mine = {"held": held, "done": self._done, "marks": self._marks, "kind": self._kind}
        self._set(f"rank/{self._rank}", json.dumps(mine))
        self._barrier("agreed")
        ranks = [json.loads(self._store.get(self._key(f"rank/{rank}"))) for rank in range(self._world_size)]
        common = set.intersection(*(set(rank["held"]) for rank in ranks))
        if not common:
            raise RecoveryFailed("no step is held by every rank; load the last checkpoint")
        step = max(common)
        tries = self._retries.get(step, 0) + 1
        if tries > self._max_retries:
            raise RecoveryFailed(f"step {step + 1} failed {tries} times; giving up")
        self._kinds = {number: rank["kind"] for number, rank in enumerate(ranks) if rank["kind"]}
        names = {name for rank in ranks for name in rank["marks"]}
        self._marks = {name: min(min(rank["marks"].get(name, self._first) for rank in ranks), step) for name in names}
        return step, self._marks["log"] < step, self._kind == "uce"

    def _rollback(self, copy: _ModelCopy, step: int, replay: bool) -> None:
        if self._session is not None:
            self._session.before_rollback(step, replay=replay)
        copy.put_back_tensors(self._job)
        copy.put_back_host_state(self._job)
        self._done = self._agreed = step
        for other in self._copies:
            other.step = other.step if other.step <= step else -1
        if self._sink is not None:
            self._sink.rollback(step)
        if replay:
            self.log(step)
        if self._session is not None:
            report = self._session.after_rollback()
            hit = next((line for line in report.failures if fault_kind(line) is not None), None)
            if hit is not None:
                raise RuntimeError(hit)

    # ---- between ranks ---------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._epoch}/{name}"

    def _add(self, name: str) -> None:
        self._written[-1].add(key := self._key(name))
        self._store.add(key, 1)

    def _set(self, name: str, value: str) -> None:
        self._written[-1].add(key := self._key(name))
        self._store.set(key, value)

    def _turn_page(self) -> None:
        """From now on keys are other ones."""
        self._epoch += 1
        self._written.append(set())

    def _forget(self) -> None:
        """Once every rank is in this recovery, nobody reads keys of those before."""
        while len(self._written) > 1:
            for key in self._written.popleft():
                self._store.delete_key(key)

    def _barrier(self, name: str) -> None:
        self._add(name)
        self._wait(lambda: self._store.add(self._key(name), 0) >= self._world_size, f"all ranks to be {name}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout
        while not condition():
            if self._store.check(["dead"]):
                raise RecoveryFailed(f"another rank gave up: {self._store.get('dead').decode()}")
            if self._begun_anew():
                raise _BegunAnew("another rank has met a fault")
            if time.monotonic() > deadline:
                raise RecoveryFailed(f"rank {self._rank}: waited {self._timeout:.0f} s for {what}")
            time.sleep(_POLL_SECONDS)

    def _die(self, reason: str) -> None:
        """Tell all ranks that the job has ended; the first reason stands."""
        logger.error("%s", reason)
        try:
            if not self._store.check(["dead"]):
                self._store.set("dead", reason)
        except RuntimeError as error:  # the rank that holds the store has ended already
            logger.debug("the store is gone: %s", error)
