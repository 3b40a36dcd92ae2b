# SPDX-License-Identifier: Apache-2.0
"""Faults that hit a recovery itself: it begins anew and is exact, or every rank ends with the reason, and nobody hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import run_ranks
from small_job import LINK, UCE, Rank

from mindspeed_recovery.core import memory as core_memory
from mindspeed_recovery.runtimes import standalone
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(90)
STEPS = 5
QUICK = 4.0
FAILED = "RecoveryFailed: FORCE STOP: "
Prepare = Callable[[Rank], None]


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """What the simulated memory imports at its first use, it imports before the forks."""
    with UnsafeMemory().active():
        torch.zeros(1).add_(1)


def run(prepare: Prepare, *, dies: tuple[int, ...] = (), **options: Any) -> list[Any]:
    """Two ranks, each changed by ``prepare``; what they left."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def body(number: int) -> Any:
        rank = Rank(number, store.port, **({"steps": STEPS} | options))
        prepare(rank)
        return rank.run()

    return run_ranks(2, body, dies)


def equal(one: list[Any], other: list[Any]) -> bool:
    assert [rank["error"] for rank in one] == ["", ""]
    return [(r["digest"], r["log"]) for r in one] == [(r["digest"], r["log"]) for r in other]


@pytest.fixture(scope="module")
def undisturbed(loaded: None) -> list[Any]:
    ranks = run(lambda rank: None)
    assert not any(rank["error"] or rank["recoveries"] for rank in ranks)
    return ranks


def at(rank: Rank, point: str, step: int, action: Callable[[], Any]) -> None:
    """Do something once at a point of training."""
    waiting = [action]
    before = rank.job.at

    def visit(visited: str, number: int) -> None:
        before(visited, number)
        if (visited, number) == (point, step) and waiting:
            waiting.pop()()

    rank.job.at = visit


def once(owner: Any, name: str, action: Callable[[], Any], *, times: int = 1) -> None:
    """Do something before the next calls of a method."""
    method, left = getattr(owner, name), [action] * times

    def call(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()()
        return method(*args, **kwargs)

    setattr(owner, name, call)


def fail(text: str) -> Callable[[], Any]:
    def raise_it() -> None:
        raise RuntimeError(text)

    return raise_it


def in_replay(rank: Rank, action: Callable[[], Any], times: int) -> None:
    """In the middle of a log line that is written again: on the runtime's thread."""
    left = [action] * times
    before = rank.job.at

    def visit(point: str, step: int) -> None:
        before(point, step)
        if point == "log" and left and threading.current_thread().name == "recovery":
            left.pop()()

    rank.job.at = visit


def in_state(rank: Rank, action: Callable[[], Any], times: int) -> None:
    """While the plugin puts one of its states back, where an error stops no other state."""
    left, put_back = [action] * times, rank.session._put_copy_back

    def call(state: Any, *args: Any) -> None:
        if state.name == "bias" and left:
            left.pop()()
        put_back(state, *args)

    rank.session._put_copy_back = call  # type: ignore[method-assign]


def method(find: Callable[[Rank], Any], name: str) -> Callable[[Rank, Callable[[], Any], int], None]:
    return lambda rank, action, times: once(find(rank), name, action, times=times)


PHASES: dict[str, Callable[[Rank, Callable[[], Any], int], None]] = {
    "stop": method(lambda rank: rank.memory, "stop"),
    "clean": method(lambda rank: rank.session, "clean"),
    "restart": method(lambda rank: rank.memory, "restart"),
    "agreement": method(lambda rank: rank.runtime, "_agree"),
    "repair": method(lambda rank: standalone._ModelCopy, "put_back_tensors"),
    "restoring-a-state": in_state,
    "rollback": method(lambda rank: rank.job, "load_host_state"),
    "replay": in_replay,
    "check": method(lambda rank: rank.session, "after_rollback"),
}
FIRST = {"replay": "log"}
"""Where the first fault strikes, if not in the backward pass: a log line is only written again if it is owed."""


def twice(phase: str, second: int, action: Callable[[Rank], Callable[[], Any]], times: int = 1) -> Prepare:
    """A memory fault of rank 1 in step 3, and something in a phase of its recovery on the rank ``second``."""

    def prepare(rank: Rank) -> None:
        if rank.number == 1:
            at(rank, FIRST.get(phase, "backward"), 3, rank.strike)
        if rank.number == second:
            PHASES[phase](rank, action(rank), times)

    return prepare


# ---- a second fault of the device ------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_memory_fault_in_a_recovery_is_recovered(undisturbed: list[Any], phase: str, second: int) -> None:
    ranks = run(twice(phase, second, lambda rank: rank.strike))
    assert equal(ranks, undisturbed)
    assert [rank["recoveries"] for rank in ranks] == [1, 1], "it was one recovery"


@pytest.mark.parametrize("phase", ["stop", "clean", "repair", "rollback", "replay"])
def test_link_fault_in_a_recovery_is_recovered(undisturbed: list[Any], phase: str) -> None:
    assert equal(run(twice(phase, 1, lambda rank: fail(LINK))), undisturbed)


def test_fault_on_each_rank_in_the_same_recovery_is_recovered(undisturbed: list[Any]) -> None:
    def prepare(rank: Rank) -> None:
        if rank.number == 1:
            at(rank, "backward", 3, rank.strike)
        PHASES["clean" if rank.number else "rollback"](rank, rank.strike, 2)

    assert equal(run(prepare), undisturbed)


def test_memory_fault_of_a_training_thread_that_is_being_stopped_is_recovered(undisturbed: list[Any]) -> None:
    """Its rank was healthy when the recovery began."""

    def prepare(rank: Rank) -> None:
        def linger() -> None:
            deadline = time.monotonic() + 10
            while not rank.memory.stopped and time.monotonic() < deadline:
                time.sleep(0.001)
            rank.strike()

        at(rank, "forward", 3, linger if rank.number == 0 else rank.strike)

    assert equal(run(prepare), undisturbed)


def test_recovery_that_is_hit_again_and_again_is_given_up_on_every_rank() -> None:
    ranks = run(twice("rollback", 0, lambda rank: fail(UCE), times=50), max_retries=3)
    for rank in ranks:
        assert rank["error"].startswith(FAILED)
        assert "a recovery was hit by faults 4 times; giving up" in rank["error"]


def test_a_half_finished_attempt_would_be_noticed(undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: only the first of the tensors is put back."""

    def put_back(self: Any, job: Any) -> None:
        for key, tensor in list(standalone._storages(job.tensors()).items())[:1]:
            core_memory.load(tensor, self._host[key])

    monkeypatch.setattr(standalone._ModelCopy, "put_back_tensors", put_back)

    def prepare(rank: Rank) -> None:
        if rank.number == 1:
            at(rank, "update", 3, fail(LINK))

    assert not equal(run(prepare), undisturbed)


# ---- what is no fault of the device --------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("phase", ["stop", "clean", "repair", "rollback", "replay", "check"])
def test_bug_in_a_recovery_ends_every_rank_with_the_reason(phase: str, second: int) -> None:
    ranks = run(twice(phase, second, lambda rank: fail("a bug in the recovery")))
    for rank in ranks:
        assert "a bug in the recovery" in rank["error"]
        assert rank["seconds"] < 30
    assert ranks[1 - second]["error"].startswith(f"{FAILED}another rank gave up: rank {second}: ")


def test_memory_fault_outside_the_pool_ends_every_rank_with_the_reason() -> None:
    def prepare(rank: Rank) -> None:
        if rank.number == 1:
            at(rank, "backward", 3, rank.strike)
            rank.memory.check_uce_in_memory = lambda: 1  # type: ignore[method-assign]

    for rank in run(prepare):
        assert "the memory fault is outside the allocator's pool" in rank["error"]


# ---- ranks that die or hang ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("phase", ["stop", "repair", "rollback", "replay"])
def test_rank_that_dies_in_a_recovery_is_not_waited_for_without_end(phase: str, second: int) -> None:
    left = run(twice(phase, second, lambda rank: lambda: os._exit(1)), dies=(second,), timeout=QUICK)[1 - second]
    assert left["error"].startswith(FAILED)
    assert left["seconds"] < 30


def test_rank_that_hangs_in_a_recovery_is_not_waited_for_without_end() -> None:
    left = run(twice("rollback", 0, lambda rank: lambda: time.sleep(12)), dies=(0,), timeout=QUICK)[1]
    assert left["error"] == f"{FAILED}rank 1: waited 4 s for all ranks to be rolled-back"


@pytest.mark.parametrize(("point", "step"), [("forward", 3), ("update", 3), ("optimizer", 3), ("end", STEPS)])
def test_rank_that_dies_in_training_is_not_waited_for_without_end(point: str, step: int) -> None:
    def prepare(rank: Rank) -> None:
        if rank.number == 1:
            at(rank, point, step, lambda: os._exit(1))

    left = run(prepare, dies=(1,), timeout=QUICK)[0]
    assert left["error"]
    if point == "end":  # nothing but the watch can tell: the other rank waits for no collective any more
        assert left["error"] == f"{FAILED}rank 1 has given no sign of life for 4 s"
    assert left["seconds"] < 25


def test_slow_rank_is_alive(undisturbed: list[Any]) -> None:
    """The negative control of the watch."""

    def prepare(rank: Rank) -> None:
        if rank.number == 1:
            at(rank, "end", STEPS, lambda: time.sleep(1.5 * QUICK))

    assert equal(run(prepare, timeout=QUICK), undisturbed)
