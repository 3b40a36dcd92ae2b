# SPDX-License-Identifier: Apache-2.0
"""A torch.distributed backend on gloo whose process groups can be stopped and rebuilt in place.

A framework keeps its process groups in globals, so a recovery must not replace them. A group of this
backend stays the same Python object for ever; the gloo group inside it belongs to one *epoch* (the number
of the recovery that opened it) and is thrown away by :func:`abort_all` and replaced by :func:`reopen_all`.
This gives a CPU run what stopping and resuming the collective communication gives a run on NPUs: pending
operations end with ``FORCE STOP.``.

gloo itself cannot be aborted (``ProcessGroup.abort()`` does nothing). But a gloo receive that times out
closes every connection of its context and wakes every wait on them, so a receive that nobody answers, with
a timeout of one millisecond, is a local and immediate abort; no wait has to poll. Peers see their
connection close.

Thread rules: :func:`abort_all` and :func:`reopen_all` are for a control thread and may be called while
other threads are inside any operation of any group. Rank rules: both are local; the ranks agree on the
epoch beforehand.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Work

BACKEND_NAME = "restartable_gloo"
FORCE_STOP = "FORCE STOP."

_CPU = torch.device("cpu")
_NO_TIMEOUT = timedelta(0)  # the default of Work.wait: until the operation ends
_BREAK_TIMEOUT = timedelta(milliseconds=1)
_BREAK_TAG = 2**30  # far from the tags of applications
_CONNECT_TIMEOUT = timedelta(seconds=30)  # to exchange addresses once all members have arrived
_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
_TRANSPORT_ERRORS = ("gloo/transport", "pair closure")


@dataclass
class _State:
    """What this process knows of its groups; ``lock`` guards all fields. No peer is awaited under it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    groups: list[RestartableGroup] = field(default_factory=list)
    retired: list[_Connection] = field(default_factory=list)  # stopped, not yet destroyed
    epoch: int = 0
    stopped: bool = False
    peer_failure_grace: float = 10.0


_state = _State()


def register(peer_failure_grace: float = 10.0) -> None:
    """Make ``restartable_gloo`` known to ``init_process_group`` and ``new_group``. Idempotent.

    ``peer_failure_grace`` (seconds): a rank whose peer closed a connection waits this long for its own
    :func:`abort_all`, which turns the error into ``FORCE STOP.``; after that gloo's own error is raised.
    Backend registration is documented at ``torch.distributed.Backend.register_backend``.
    """
    _state.peer_failure_grace = peer_failure_grace
    if not hasattr(dist.Backend, BACKEND_NAME.upper()):
        dist.Backend.register_backend(BACKEND_NAME, RestartableGroup, extended_api=True, devices=["cpu"])


def abort_all() -> None:
    """Stop all groups of this process, also those still being connected.

    From now on every call, and every wait that is blocked already, raises ``RuntimeError("FORCE STOP.")``,
    whatever the peers do. Takes some 10 ms, a few more with many groups; waits for no peer.
    Idempotent. Groups cannot be created until :func:`reopen_all`.
    """
    with _state.lock:
        _state.stopped = True
        _retire([group._connection for group in _state.groups])
        _reap()


def reopen_all(epoch: int) -> None:
    """Give every group a new gloo group of ``epoch``; groups not stopped yet are stopped. Waits for no peer.

    A thread connects the groups one after the other, in an order that is the same on all ranks, and ends.
    Meanwhile operations wait for their group; they end with an error if a member does not reopen it within
    the group's timeout. :func:`abort_all` may interrupt at any time. Called before any group exists, it
    sets the epoch of the groups to come.

    Raises ValueError unless ``epoch`` is greater than every epoch before: its store keys must be unused.
    The keys, a few for each group, member and epoch, stay in the store until the epoch after the next.
    """
    with _state.lock:
        if epoch <= _state.epoch:
            raise ValueError(
                f"{BACKEND_NAME}: cannot reopen in epoch {epoch}: epoch {_state.epoch} is already used; "
                "pass the number of the recovery, which grows by one each time on all ranks"
            )
        _retire([group._connection for group in _state.groups])
        _reap()
        _state.epoch, _state.stopped = epoch, False
        # Members know a group by the same name. Connecting in one order, ranks cannot wait in a circle.
        ordered = sorted(_state.groups, key=lambda group: (len(group.group_name), group.group_name))
        connections = [group._renew(epoch) for group in ordered]
    if connections:
        threading.Thread(
            target=_connect_in_order, args=(connections,), name=f"{BACKEND_NAME}-{epoch}", daemon=True
        ).start()


def _connect_in_order(connections: list[_Connection]) -> None:
    for connection in connections:
        connection.connect()
        connection.forget_old_keys()
    with _state.lock:
        _reap()


def _retire(connections: list[_Connection]) -> None:
    """Stop ``connections``. All are marked before one is broken, so that whoever wakes finds its mark."""
    fresh = [connection for connection in connections if connection.stop_reason is None]
    for connection in fresh:
        connection.mark_stopped(FORCE_STOP)
    # Side by side: each takes some 10 ms, which gloo spends closing sockets.
    breakers = [threading.Thread(target=connection.break_waits, daemon=True) for connection in fresh]
    for breaker in breakers:
        breaker.start()
    for breaker in breakers:
        breaker.join()
    _state.retired.extend(fresh)


def _reap() -> None:
    _state.retired[:] = [connection for connection in _state.retired if not connection.destroy()]


@dataclass(frozen=True)
class _Membership:
    """The place of this rank in one group; the same in all epochs."""

    name: Any  # a str; its static type differs between versions of torch
    store: dist.Store
    rank: int  # in the group
    size: int
    global_ranks: list[int]
    written: dict[int, set[str]] = field(default_factory=dict)
    """The keys in the store that this rank has written, by epoch."""

    def store_of(self, epoch: int) -> dist.Store:
        return PrefixStore(f"epoch{epoch}", self.store)


class _ConnectError(RuntimeError):
    """The members of a group did not connect."""


class _AddressStore(dist.Store):
    """The store through which gloo exchanges addresses; waits by polling.

    A blocking wait would lock the connection of the store for everyone else in the process, and could not
    be stopped. A clone of the store has its own connection, but may look up host names, which took seconds
    where DNS is slow.
    """

    def __init__(
        self, store: dist.Store, await_keys: Callable[[dist.Store, list[str]], None], written: set[str]
    ) -> None:
        super().__init__()
        self._store = store
        self._await_keys = await_keys
        self._written = written

    def set(self, key: str, value: Any) -> None:
        self._written.add(key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._await_keys(self._store, [key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await_keys(self._store, keys)  # which knows the deadline

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        self._written.add(key)
        return self._store.add(key, amount)


class _Connection:
    """The gloo group inside a restartable group, during one epoch."""

    def __init__(self, membership: _Membership, epoch: int, timeout: timedelta) -> None:
        self.membership = membership
        self.epoch = epoch
        self.timeout = timeout
        self.stop_reason: str | None = None
        self._stopped = threading.Event()
        self._settled = threading.Event()  # connected or failed
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._failure: str | None = None  # why it could not connect
        # gloo's C++ part may call the store: its Python part must live as long as the group.
        self._addresses: _AddressStore | None = None
        self._gloo: Any = None  # ProcessGroupGloo; torch's stubs know only part of its methods
        self._group: ProcessGroup | None = None
        self._pending: dict[Work, None] = {}  # collectives that gloo's threads may still be working on

    def connect(self) -> None:
        """Meet the other members and connect; blocks up to the timeout. The outcome shows in :meth:`call`."""
        try:
            self._build()
        except Exception as error:  # kept for the threads that will use the group
            self._failure = str(error)
        finally:
            self._settled.set()
        if self._stopped.is_set():
            self.break_waits()  # stopped in between: peers that connected to this rank must see it leave

    def _build(self) -> None:
        member = self.membership
        store, written = member.store_of(self.epoch), member.written.setdefault(self.epoch, set())
        if member.size > 1:
            keys = [f"arrived/{rank}" for rank in range(member.size)]
            written.add(keys[member.rank])
            store.set(keys[member.rank], "1")
            self._await_keys(store, keys)
        # Now that all members are about to call this constructor, it needs little time.
        self._addresses = _AddressStore(store, self._await_keys, written)
        limit = min(self.timeout, _CONNECT_TIMEOUT)
        gloo: Any = ProcessGroupGloo(self._addresses, member.rank, member.size, timeout=limit)
        gloo._set_default_timeout(self.timeout)
        gloo.options.global_ranks_in_group = member.global_ranks
        gloo.options.group_name = member.name
        # A whole ProcessGroup around it has every method that torch may call, whatever its version.
        group = ProcessGroup(store, member.rank, member.size)
        group._register_backend(_CPU, ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        group._set_group_name(member.name)
        self._gloo, self._group = gloo, group

    def _await_keys(self, store: dist.Store, keys: list[str]) -> None:
        """Wait until ``store`` has ``keys``; ends early with RuntimeError after a stop or the deadline."""
        pause = 0.0005
        while not store.check(keys):
            if self._stopped.wait(pause):
                self.check()
            if time.monotonic() > self._deadline:
                missing = [key for key in keys if not store.check([key])]
                raise RuntimeError(
                    f"{BACKEND_NAME}: process group '{self.membership.name}' "
                    f"(ranks {self.membership.global_ranks}) was not connected in epoch {self.epoch}: "
                    f"{missing} (with ranks in the group) not found within {self.timeout}; "
                    "abort and reopen on all ranks, or restart"
                )
            pause = min(2 * pause, 0.02)

    def forget_old_keys(self) -> None:
        """Of epochs before the last one. Since then all members have left them, threads that were still connecting too."""
        member = self.membership
        if self._failure is None:
            for epoch in [epoch for epoch in member.written if epoch < self.epoch - 1]:
                store = member.store_of(epoch)
                with contextlib.suppress(RuntimeError):  # the store is gone
                    for key in member.written.pop(epoch):
                        store.delete_key(key)

    def mark_stopped(self, reason: str) -> None:
        """From now on all calls and waits raise ``RuntimeError(reason)``, once they notice."""
        if self._gloo is not None:
            self.timeout = self._gloo.options._timeout  # it may have been changed; the next epoch inherits it
        self.stop_reason = reason
        self._stopped.set()

    def break_waits(self) -> None:
        """Close the connections to all peers and so end every blocked wait. Local; about 10 ms."""
        gloo, member = self._gloo, self.membership
        if gloo is None:
            return
        probe = torch.empty(1, device=_CPU)
        for context in range(len(gloo.options._devices)):  # consecutive tags visit the contexts in turn
            # The first live peer breaks the context. A closed one says nothing about the others, so ask all.
            for peer in range(member.size):
                if peer != member.rank:
                    with contextlib.suppress(RuntimeError):
                        gloo.recv([probe], peer, _BREAK_TAG + context).wait(_BREAK_TIMEOUT)

    def destroy(self) -> bool:
        """Free threads and sockets if that cannot block; returns whether it was done.

        gloo's destructor waits for its unfinished work while it holds the GIL, which that work may need. So
        it runs only when all work has ended, and while the work objects still keep their tensors.
        """
        if not self._settled.is_set() or self.has_pending_work():
            return False
        self._group = None
        self._gloo = None
        self._addresses = None
        self._pending.clear()
        return True

    def has_pending_work(self) -> bool:
        return not all(work.is_completed() for work in list(self._pending))

    def check(self) -> None:
        """Raise RuntimeError if this epoch is over."""
        if self.stop_reason is not None:
            raise RuntimeError(self.stop_reason)

    def check_connected(self) -> None:
        """Raise RuntimeError if connecting has failed."""
        if self._failure is not None:
            self.fail(_ConnectError(self._failure))

    def stopped_after(self, error: Exception) -> bool:
        """Whether ``error`` is due to a stop. When a peer failed, this rank's stop may still be to come."""
        if isinstance(error, _ConnectError) or any(text in str(error) for text in _TRANSPORT_ERRORS):
            return self._stopped.wait(_state.peer_failure_grace)
        return self._stopped.is_set()

    def fail(self, error: Exception) -> NoReturn:
        """Raise what the caller of a failed operation should see: FORCE STOP after a stop, else ``error``."""
        try:
            if self.stopped_after(error):
                raise RuntimeError(self.stop_reason) from error
            raise error
        finally:
            # No reference cycle: it would keep the failed operation, and its sockets, until it is collected.
            del error

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call method ``name`` of the gloo group once it is connected; a Work is made stoppable."""
        while not self._settled.wait(0.05):
            self.check()
        group = self._group  # read before the check: it is gone only after a stop
        self.check()
        self.check_connected()
        try:
            result = getattr(group, name)(*args, **kwargs)
        except RuntimeError as error:
            self.fail(error)
        if isinstance(result, Work):
            if name not in _POINT_TO_POINT:  # those use no thread of gloo's
                self._track(result)
            result = _Work(result, self, any_source=name == "recv_anysource")
        self.check()
        return result

    def _track(self, work: Work) -> None:
        for old in list(self._pending):
            if old.is_completed():
                self.forget(old)
        self._pending[work] = None

    def forget(self, work: Work) -> None:
        self._pending.pop(work, None)

    def wait_aside(self, work: Work, timeout: timedelta) -> bool:
        """Wait for ``work`` in a thread of its own: gloo cannot wake a receive from any source.

        After a stop that thread stays until the group's timeout.
        """
        outcome: list[bool | RuntimeError] = []

        def wait() -> None:
            try:
                outcome.append(work.wait(timeout))
            except RuntimeError as error:
                outcome.append(error)

        thread = threading.Thread(target=wait, name=f"{BACKEND_NAME}-recv", daemon=True)
        thread.start()
        while thread.is_alive():
            self.check()
            thread.join(0.01)
        if isinstance(outcome[0], RuntimeError):
            raise outcome[0]
        return outcome[0]


class _Work(Work):
    """A pending operation of one epoch; ends with ``FORCE STOP.`` when the epoch does."""

    def __init__(self, inner: Work, connection: _Connection, any_source: bool) -> None:
        super().__init__()
        self._inner = inner
        self._connection = connection
        self._any_source = any_source

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        connection = self._connection
        connection.check()
        try:
            wait = functools.partial(connection.wait_aside, self._inner) if self._any_source else self._inner.wait
            done = wait(timeout)
        except RuntimeError as error:
            connection.fail(error)
        connection.check()
        connection.forget(self._inner)
        return done

    def is_completed(self) -> bool:
        return self._connection.stop_reason is not None or self._inner.is_completed()

    def is_success(self) -> bool:
        return self._connection.stop_reason is None and self._inner.is_success()

    def get_future(self) -> torch.futures.Future:
        self._connection.check()
        future: torch.futures.Future = torch.futures.Future()

        def finish(inner: torch.futures.Future) -> None:
            try:
                value = inner.value()
            except RuntimeError as error:
                stopped = self._connection.stopped_after(error)
                future.set_exception(RuntimeError(self._connection.stop_reason) if stopped else error)
            else:
                future.set_result(value)

        self._inner.get_future().add_done_callback(finish)
        return future


class RestartableGroup(ProcessGroup):
    """A process group whose gloo group is replaced in each epoch. torch.distributed makes them.

    Methods that are not defined here go to the gloo group. Questions of identity (rank, size, names, store)
    are answered also while the group is stopped.
    """

    def __init__(self, options: Any, backend_options: object = None) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._membership = _Membership(
            options.group_id, options.store, options.group_rank, options.group_size,
            list(options.global_ranks_in_group or range(options.group_size)),  # empty for the default group
        )  # fmt: skip
        self._description = ""
        with _state.lock:
            if _state.stopped:
                raise RuntimeError(FORCE_STOP)
            self._connection = _Connection(self._membership, _state.epoch, options.timeout)
            _state.groups.append(self)
        self._connection.connect()
        try:
            self._connection.check_connected()
        except RuntimeError:
            self.shutdown()
            raise

    def _renew(self, epoch: int) -> _Connection:
        self._connection = _Connection(self._membership, epoch, self._connection.timeout)
        return self._connection

    def getBackendName(self) -> str:
        """The backend's name; C++ looks this method up."""
        return BACKEND_NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._membership.name

    def _set_group_name(self, name: str) -> None:
        pass  # known since construction; the base class asks for a registered backend

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def get_group_store(self) -> dist.Store:
        return self._membership.store

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported (NotImplementedError): the new group could not be restarted. Use ``new_group``."""
        raise NotImplementedError(f"{BACKEND_NAME}: a split group could not be restarted; use new_group")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported (NotImplementedError): the new group could not be restarted. Use ``new_group``."""
        raise NotImplementedError(f"{BACKEND_NAME}: a merged group could not be restarted; use new_group")

    def abort(self) -> None:
        """Stop this group alone, as :func:`abort_all` stops all of them."""
        with _state.lock:
            _retire([self._connection])
            _reap()

    def shutdown(self) -> None:
        """End this group for good (``destroy_process_group`` calls this). Work still pending is stopped."""
        connection = self._connection
        with _state.lock:
            if self in _state.groups:
                _state.groups.remove(self)
            if connection.stop_reason is None:
                connection.mark_stopped(
                    f"{BACKEND_NAME}: process group '{self.group_name}' was destroyed; create a new one"
                )
                if connection.has_pending_work():
                    connection.break_waits()
                _state.retired.append(connection)
            _reap()


# Methods answered by the base class: plain identity, or C++ plumbing of the outer object.
_IDENTITY = {"rank", "size", "name", "_get_backend_name", "_id"}
_BASE_METHODS = frozenset(_IDENTITY | {"boxed", "unbox", "_register_backend", "_set_default_backend"})


def _forward_group_method(name: str) -> Callable[..., Any]:
    def method(self: RestartableGroup, *args: Any, **kwargs: Any) -> Any:
        return self._connection.call(name, *args, **kwargs)

    method.__name__ = name
    return method


def _forward_work_method(name: str) -> Callable[..., Any]:
    def method(self: _Work, *args: Any, **kwargs: Any) -> Any:
        self._connection.check()
        return getattr(self._inner, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _forward_missing(own: type, base: type, kept: frozenset[str], forward: Callable[[str], object]) -> None:
    """Forward every method of ``base`` as this torch has it: new versions call new ones."""
    for name in dir(base):
        value = getattr(base, name)
        if not callable(value) or isinstance(value, type) or name.startswith(("__", "_pybind11")):
            continue
        if name not in own.__dict__ and name not in kept:
            setattr(own, name, forward(name))


_forward_missing(RestartableGroup, ProcessGroup, _BASE_METHODS, _forward_group_method)
_forward_missing(_Work, Work, frozenset({"boxed", "unbox"}), _forward_work_method)
