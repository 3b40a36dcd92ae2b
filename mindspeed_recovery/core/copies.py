# SPDX-License-Identifier: Apache-2.0
"""The two host copies of every step, and which of them serves a rollback to step R.

``start(k)`` is taken when step k begins and holds the end of step k-1; ``update(k)`` is taken when the gradients of step
k are ready and nothing has been written yet, and serves R = k on a rank that never reached the start of k+1. While one
of the two is being overwritten the other, newer one is whole, so a fault during a copy never leaves only a torn one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mindspeed_recovery.core.location import Place
from mindspeed_recovery.core.memory import Fences, HostEmpty
from mindspeed_recovery.core.policy import StateSpec
from mindspeed_recovery.core.values import Buffers, Capture


@dataclass
class StateCopy:
    """One state's copy in one slot. ``whole``: all of it was taken; ``fence``: its transfer has finished when the device
    has passed this one."""

    buffers: Buffers
    step: int = -1
    whole: bool = False
    fence: int = -1
    taken_at: float = 0.0
    origin: str = ""
    """Which rank sent the copy; empty for one that was taken here."""
    captures: list[tuple[Place, Capture]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(capture.nbytes for _, capture in self.captures)


class Slot:
    """``start`` or ``update``: the copies of all states at that moment of one step."""

    def __init__(self, name: str, host_empty: HostEmpty) -> None:
        self.name = name
        self.step = -1
        self._host_empty = host_empty
        self._copies: dict[str, StateCopy] = {}
        self._fences = Fences(host_empty)

    def begin(self, step: int) -> None:
        """From here on nothing in the slot is valid until it has been taken again; but what is a whole copy of this very
        step (after a rollback to its start, or taken when the step before was logged) stays."""
        self.step = step
        for copy in self._copies.values():
            copy.whole = copy.step == step and self._is_valid(copy)

    def take(self, spec: StateSpec, places: list[Place], step: int | None = None) -> None:
        """Copy one state, for the slot's step unless another is given. On an error the copy stays invalid and the error
        is the caller's."""
        copy = self._copies.get(spec.name)
        if copy is None:
            copy = self._copies[spec.name] = StateCopy(Buffers(self._host_empty))
        copy.whole = False
        copy.step, copy.origin = self.step if step is None else step, ""
        copy.captures = [(place, Capture(place.get(), copy.buffers, place.path)) for place in places]
        copy.buffers.sweep()
        copy.fence = self._fences.following
        copy.whole, copy.taken_at = True, time.time()

    def receiving(self, name: str, step: int) -> StateCopy:
        """A copy that another rank will fill; nothing is valid of it before `receive`. It uses the buffers of what it
        replaces, unless that is a valid copy of this step."""
        old = self._copies.get(name)
        if old is None or self.get(name, step) is not None:
            return StateCopy(Buffers(self._host_empty), step)
        old.whole = False
        old.step = step
        return old

    def receive(self, name: str, copy: StateCopy, captures: list[tuple[Place, Capture]], origin: str) -> None:
        """What another rank has sent is the slot's copy of a state from now on."""
        copy.captures, copy.origin = captures, origin
        copy.buffers.sweep()
        copy.whole, copy.fence, copy.taken_at = True, -1, time.time()
        self._copies[name] = copy

    def enqueued(self) -> None:
        """All copies of the step are on their way: mark the point on the stream that must be reached first."""
        self._fences.enqueue()

    def settle(self) -> None:
        """Have the transfers finished. Healthy state only: after *stop* no device event may be touched.

        A synchronisation of the framework's own (the gradient norm's ``item()``, the loss) has normally passed by then;
        otherwise this waits for it.
        """
        self._fences.wait()

    def _is_valid(self, copy: StateCopy) -> bool:
        return copy.whole and self._fences.passed(copy.fence)

    def get(self, name: str, step: int) -> StateCopy | None:
        """The valid copy of a state at this step, if there is one. Touches no device."""
        copy = self._copies.get(name)
        return copy if copy is not None and copy.step == step and self._is_valid(copy) else None

    @property
    def is_empty(self) -> bool:
        """Whether the slot holds no valid copy of anything."""
        return not any(self._is_valid(copy) for copy in self._copies.values())

    def discard(self, *, after_step: int | None = None, since: float | None = None) -> None:
        """Make copies of a step later than ``after_step``, or taken at or after time ``since``, invalid. After *stop*."""
        self._fences.abandon()
        if after_step is not None and self.step > after_step:
            self.step = -1
        for copy in self._copies.values():
            late = after_step is not None and copy.step > after_step
            if late or (since is not None and copy.taken_at >= since):
                copy.whole = False

    @property
    def nbytes(self) -> int:
        """Host bytes held."""
        return sum(copy.nbytes for copy in self._copies.values())


class Copies:
    """Both slots. Taken on the training thread, read on the runtime's thread after the commit gate has closed."""

    def __init__(self, host_empty: HostEmpty) -> None:
        self.start = Slot("start", host_empty)
        self.update = Slot("update", host_empty)
        self.kept = Slot("kept", host_empty)
        """Values that a rollback found right and must leave so, though it runs code that may change them."""
        self.taking: Slot | None = None
        """The slot that was being taken when the gate closed. The training thread had then gone no further, so the
        live values are still those of that moment."""
        self.logged = -1
        """The last step whose log line this rank has finished."""

    def source(self, spec: StateSpec, rollback_step: int, replay: bool) -> tuple[str, StateCopy] | None:
        """The copy that holds the state as of the end of ``rollback_step``, with its name; where the log line will be
        replayed, as of the moment before it if the state changes with it."""
        before_logging = replay and (spec.settled == "after-logging" or spec.replay)
        copy = None if before_logging else self.start.get(spec.name, rollback_step + 1)
        if copy is not None:
            return copy.origin or f"start({rollback_step + 1})", copy
        if spec.settled == "after-update" or (spec.settled == "after-logging" and not replay):
            return None
        copy = self.update.get(spec.name, rollback_step)
        return (copy.origin or f"update({rollback_step})", copy) if copy is not None else None

    def slot(self, replay: bool) -> Slot:
        """Where a copy belongs that another rank sends for a rollback to step R: with ``replay`` it is of the moment before
        the log line of R, and serves as ``update(R)``, else as ``start(R + 1)``."""
        return self.update if replay else self.start

    def live_is(self, spec: StateSpec, rollback_step: int, replay: bool) -> bool:
        """Whether the live value (if safe) is that of the end of ``rollback_step``: the rank stopped while it was taking
        a copy of that moment, or the state changes only after the update, or only with the log line, and no later one
        has come near."""
        if self.taking is self.start and self.start.step == rollback_step + 1:
            return True
        if self.taking is self.update and self.update.step == rollback_step:
            return spec.settled == "before-update" or spec.replay
        if spec.settled == "after-logging" and not replay and self.logged == rollback_step:
            return True
        begun = self.start.step == rollback_step + 1 and self.update.step <= rollback_step
        return begun and spec.settled != "before-update"

    def discard(self, *, after_step: int | None = None, since: float | None = None) -> None:
        """See `Slot.discard`; ``after_step`` is the step that is rolled back to."""
        self.start.discard(after_step=None if after_step is None else after_step + 1, since=since)
        self.update.discard(after_step=after_step, since=since)

    @property
    def nbytes(self) -> int:
        return self.start.nbytes + self.update.nbytes + self.kept.nbytes
