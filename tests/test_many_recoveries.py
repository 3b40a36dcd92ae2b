# SPDX-License-Identifier: Apache-2.0
"""Fifty recoveries in one process leave nothing behind: what there is after the last one was there after the second."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from forks import run_ranks
from small_job import LINK, Rank

from mindspeed_recovery.core import session
from mindspeed_recovery.runtimes import restartable_gloo, standalone
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(100)
POINTS = ("backward", "update", "optimizer", "log", "forward")
KEPT = 3
"""Reports, in these tests: as many as there are at the first count."""


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REPORTS_KEPT", KEPT)
    monkeypatch.setattr(standalone, "_KEPT", KEPT)
    monkeypatch.setattr(forks, "RANK_LIMIT", 90.0)
    with UnsafeMemory().active():
        torch.zeros(1).add_(1)


def _groups() -> dict[str, int]:
    world = dist.distributed_c10d._world
    tables = {"pg_map": world.pg_map, "pg_names": world.pg_names, "pg_group_ranks": world.pg_group_ranks}
    counts = {f"group table {name}": len(table) for name, table in tables.items()}
    state = restartable_gloo._state
    written = sum(len(group._membership.written) for group in state.groups)
    return counts | {
        "restartable groups": len(state.groups),
        "retired": len(state.retired),
        "epochs with keys": written,
    }


def usage(rank: Rank) -> dict[str, int]:
    """What a recovery could leave behind, by kind. Both ranks are at the same place, and what ends by itself has ended."""
    dist.barrier()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (threading.active_count() > 2 or restartable_gloo._state.retired):
        time.sleep(0.002)
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, (torch.Tensor, BaseException, FrameType, TracebackType)):
            found[kind.__name__] += 1
        elif str(kind.__module__).startswith("mindspeed_recovery") and "testing" not in kind.__module__:
            found[f"{kind.__module__}.{kind.__name__}"] += 1
    found["threads"] = threading.active_count()
    found["tasks"] = len(os.listdir("/proc/self/task"))
    found["files"] = len(os.listdir("/proc/self/fd"))
    found |= _groups()
    dist.barrier()
    if rank.number == 0:
        found["keys in the store"] = rank.store.num_keys()
    dist.barrier()
    return found


def run(recoveries: int, leak: Callable[[Rank, list[Any]], None] = lambda rank, kept: None) -> list[Any]:
    """A fault in each step from the second on, on the two ranks in turn; ``leak`` is called with each recovery. What has grown
    from the third recovery to the last, by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def body(number: int) -> Any:
        rank = Rank(number, store.port, steps=recoveries + 2)
        kept: list[Any] = []
        seen: dict[int, dict[str, int]] = {}
        done: set[int] = set()

        def visit(point: str, step: int) -> None:
            # After the fault of step 4, and after that of the last step: the computation of the step after.
            if (
                point == "begin"
                and step in (KEPT + 2, recoveries + 2)
                and len(rank.session.reports)
                and step not in seen
            ):
                seen[step] = usage(rank)
            if step < 2 or step in done or step > recoveries + 1 or point != POINTS[step % len(POINTS)]:
                return
            done.add(step)
            if number == step % 2:
                rank.strike() if step % 3 else fail()

        def fail() -> None:
            raise RuntimeError(LINK)

        rank.job.at = visit
        tell = rank.job.log.recovered
        rank.job.log.recovered = lambda report: (tell(report), leak(rank, kept))  # type: ignore[method-assign]
        outcome = rank.run()
        assert not outcome["error"], outcome["error"]
        assert not outcome["failures"]
        assert rank.session._recoveries == recoveries
        first, last = (seen[step] for step in sorted(seen))
        grown = {kind: last[kind] - first.get(kind, 0) for kind in last}
        # Which keys a recovery needs depends a little on its fault; none has fewer than ten.
        return {kind: more for kind, more in grown.items() if more > (4 if kind == "keys in the store" else 0)}

    return run_ranks(2, body)


def test_fifty_recoveries_leave_nothing_behind() -> None:
    assert run(50) == [{}, {}]


def _leak_thread(rank: Rank, kept: list[Any]) -> None:
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


def _leak_error(rank: Rank, kept: list[Any]) -> None:
    try:
        raise ValueError
    except ValueError as error:
        kept.append(error)


LEAKS = {
    "Tensor": lambda rank, kept: kept.append(rank.job.weight.clone()),
    "ValueError": _leak_error,
    "threads": _leak_thread,
    "files": lambda rank, kept: kept.append(os.open("/proc/self/status", os.O_RDONLY)),
    "keys in the store": lambda rank, kept: [
        rank.store.set(f"leak/{n}{rank.session._recoveries}", "") for n in range(3)
    ],
    "mindspeed_recovery.core.report.Report": lambda rank, kept: kept.append(rank.session.reports[-1]),
}


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("Tensor", "keys in the store") else pytest.param(kind, marks=pytest.mark.full) for kind in LEAKS],
)
def test_what_a_recovery_leaves_behind_is_seen(kind: str) -> None:
    """The negative control."""
    assert run(6, LEAKS[kind])[0].get(kind, 0) >= 2
