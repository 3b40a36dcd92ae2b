# SPDX-License-Identifier: Apache-2.0
"""Process groups that are stopped and rebuilt in place, in real processes: forks of this one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from forks import run_ranks
from torch.distributed import ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d

from mindspeed_recovery.runtimes import restartable_gloo as rg

pytestmark = pytest.mark.timeout(90)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(rank: int, size: int, port: int, timeout: float = 30.0, grace: float = 10.0) -> Any:
    """Join the default group; returns the store for the test's own signals."""
    rg.register(peer_failure_grace=grace)
    dist.init_process_group(
        rg.BACKEND_NAME,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    return dist.PrefixStore("test", c10d._get_default_store())


def meet(store: Any, name: str, size: int) -> None:
    """All ranks, without any process group."""
    store.add(name, 1)
    while store.add(name, 0) < size:
        time.sleep(0.001)


@contextlib.contextmanager
def stop_after(seconds: float) -> Iterator[dict[str, float]]:
    """A control thread that stops this rank; gives the time it began."""
    times: dict[str, float] = {}

    def control() -> None:
        time.sleep(seconds)
        times["stop"] = time.monotonic()
        rg.abort_all()

    thread = threading.Thread(target=control)
    thread.start()
    yield times
    thread.join()


def sum_of_ranks(group: Any = None) -> float:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=group)
    return value.item()


# ---------------------------------------------------------------------------------------------- operations


def test_operations_give_the_results_of_gloo() -> None:
    port = free_port()

    def body(rank: int) -> None:
        start(rank, 2, port)
        other = 1 - rank
        mine = torch.arange(4.0) + 10 * rank

        average = mine.bfloat16()
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        assert average.tolist() == [5.0, 6.0, 7.0, 8.0]

        gathered = torch.empty(8)
        dist.all_gather_into_tensor(gathered, mine)
        assert gathered.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]

        scattered = torch.empty(2)
        dist.reduce_scatter_tensor(scattered, mine)
        assert scattered.tolist() == ([10, 12] if rank == 0 else [14, 16])

        sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
        exchanged = torch.empty(sum(received))
        dist.all_to_all_single(exchanged, mine, received, sent)
        assert exchanged.tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 3, 12, 13])

        cast = mine.clone()
        dist.broadcast(cast, src=1)
        assert cast.tolist() == [10, 11, 12, 13]

        parts = [torch.empty(4), torch.empty(4)] if rank == 0 else None
        dist.gather(mine, parts, dst=0)
        assert parts is None or parts[1].tolist() == [10, 11, 12, 13]
        part = torch.empty(4)
        dist.scatter(part, [mine, mine + 1] if rank == 0 else None, src=0)
        assert part.tolist() == [x + rank for x in (0, 1, 2, 3)]

        got = torch.empty(4)
        ops = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, got, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got.tolist() == (torch.arange(4.0) + 10 * other).tolist()
        if rank == 0:
            dist.send(mine, 1)
        else:
            assert dist.recv(got) == 0 and got.tolist() == [0, 1, 2, 3]  # from any source

        total = mine.clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        future = work.get_future()
        assert work.wait() and work.is_completed() and work.is_success()
        future.wait()
        assert total.tolist() == [10, 12, 14, 16]

        one, two = mine.clone(), mine.clone()
        with c10d._coalescing_manager():
            dist.all_reduce(one)
            dist.all_reduce(two)
        with c10d._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(one)
        manager.wait()
        assert one.tolist() == [20, 24, 28, 32] and two.tolist() == [10, 12, 14, 16]

        functional = funcol.all_reduce(mine, "sum", c10d._get_default_group())
        assert functional.tolist() == [10, 12, 14, 16]  # through C++ and the name of the group

        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        dist.barrier()
        world: Any = dist.group.WORLD
        world.monitored_barrier(timedelta(seconds=5))
        assert (dist.get_backend(), world.name(), world.rank(), world.size()) == (
            rg.BACKEND_NAME,
            rg.BACKEND_NAME,
            rank,
            2,
        )

    run_ranks(2, body)


def test_every_method_of_a_group_is_forwarded_or_answered_on_purpose() -> None:
    group, work = (rg.RestartableGroup, ProcessGroup, rg._BASE_METHODS), (rg._Work, Work, {"boxed", "unbox"})
    for own, base, kept in (group, work):
        for name in dir(base):
            value = getattr(base, name)
            if callable(value) and not isinstance(value, type) and not name.startswith(("__", "_pybind11")):
                assert name in own.__dict__ or name in kept, name


def test_registering_twice_is_harmless() -> None:
    rg.register()
    rg.register()
    assert rg.BACKEND_NAME in dist.Backend.backend_list


# ---------------------------------------------------------------------------------------------- stopping


def _blocking_operations() -> dict[str, Callable[[], Any]]:
    """Operations of rank 0 that cannot end as long as rank 1 does nothing."""
    world: Any = dist.group.WORLD
    x, pair = torch.ones(4), [torch.ones(4), torch.ones(4)]
    big = torch.ones(8_000_000)

    def async_sum() -> Any:
        return dist.all_reduce(x.clone(), async_op=True)

    def batch() -> None:
        ops = [dist.P2POp(dist.irecv, torch.empty(4), 1), dist.P2POp(dist.isend, big, 1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def coalesced() -> None:
        with c10d._coalescing_manager():
            dist.all_reduce(x.clone())
            dist.all_reduce(x.clone())

    return {
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "async_op": lambda: async_sum().wait(),
        "many works": lambda: [w.wait() for w in [dist.all_reduce(x.clone(), async_op=True) for _ in range(9)]],
        "future": lambda: async_sum().get_future().wait(),
        "reduce": lambda: dist.reduce(x.clone(), 0),
        "broadcast": lambda: dist.broadcast(x.clone(), 1),
        "all_gather": lambda: dist.all_gather([torch.empty(4), torch.empty(4)], x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(8), x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(4), pair),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(2), x),
        "all_to_all": lambda: dist.all_to_all([torch.empty(4), torch.empty(4)], pair),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(4), x),
        "gather": lambda: dist.gather(x, [torch.empty(4), torch.empty(4)], dst=0),
        "scatter": lambda: dist.scatter(torch.empty(4), None, src=1),
        "barrier": dist.barrier,
        "monitored_barrier": lambda: world.monitored_barrier(timedelta(seconds=20)),
        "objects": lambda: dist.all_gather_object([None, None], 1),
        "recv": lambda: dist.recv(torch.empty(4), 1),
        "recv from any": lambda: dist.recv(torch.empty(4)),
        "irecv": lambda: [work.wait() for work in [dist.irecv(torch.empty(4), 1)] if work],
        "send": lambda: dist.send(big, 1),
        "batch_isend_irecv": batch,
        "coalesced": coalesced,
    }


def test_a_stop_interrupts_every_operation_although_no_peer_closes() -> None:
    port = free_port()

    def body(rank: int) -> dict[str, float]:
        store = start(rank, 2, port)
        latency: dict[str, float] = {}
        for epoch, (name, operation) in enumerate(_blocking_operations().items(), start=1):
            if rank == 0:
                with stop_after(0.05) as times:
                    with pytest.raises(RuntimeError, match=r"^FORCE STOP\.$"):
                        operation()
                    latency[name] = time.monotonic() - times["stop"]
                with pytest.raises(RuntimeError, match=r"^FORCE STOP\.$"):
                    operation()  # and again, at once
            meet(store, name, 2)
            rg.abort_all()
            rg.reopen_all(epoch)
            assert sum_of_ranks() == 1.0
        return latency

    latency = run_ranks(2, body)[0]
    assert max(latency.values()) < 1.0, latency


def test_several_threads_are_released() -> None:
    port = free_port()

    def body(rank: int) -> int:
        store = start(rank, 2, port)
        groups = [dist.new_group([0, 1]) for _ in range(3)]
        stopped = []

        def blocked(group: Any) -> None:
            try:
                dist.recv(torch.empty(1), 1, group=group)
            except RuntimeError as error:
                stopped.append(str(error))

        if rank == 0:
            threads = [threading.Thread(target=blocked, args=(group,)) for group in groups]
            for thread in threads:
                thread.start()
            time.sleep(0.1)
            rg.abort_all()
            for thread in threads:
                thread.join(2)
            assert stopped == [rg.FORCE_STOP] * 3
        meet(store, "end", 2)
        return len(stopped)

    assert run_ranks(2, body) == [3, 0]


def test_work_of_an_old_epoch_stays_stopped() -> None:
    port = free_port()

    def body(rank: int) -> None:
        store = start(rank, 2, port)
        work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
        meet(store, "issued", 2)
        rg.abort_all()
        rg.reopen_all(1)
        assert sum_of_ranks() == 1.0
        if work is not None:
            assert work.is_completed() and not work.is_success()
            for call in (work.wait, work.get_future, work.result):
                with pytest.raises(RuntimeError, match="FORCE STOP"):
                    call()

    run_ranks(2, body)


def test_groups_cannot_be_made_while_stopped_but_say_who_they_are() -> None:
    port = free_port()

    def body(rank: int) -> None:
        start(rank, 1, port)
        rg.abort_all()
        assert dist.get_rank() == 0 and dist.get_world_size() == 1 and c10d._get_default_group().group_name == "0"
        for call in (lambda: dist.new_group([0]), dist.barrier):
            with pytest.raises(RuntimeError, match="FORCE STOP"):
                call()
        rg.reopen_all(1)
        dist.barrier(dist.new_group([0]))
        with pytest.raises(ValueError, match="epoch 1 is already used"):
            rg.reopen_all(1)

    run_ranks(1, body)


# ---------------------------------------------------------------------------------------------- failing peers


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_dead_peer_is_reported_as_stop_only_if_the_stop_comes(is_stopped: bool) -> None:
    port = free_port()

    def body(rank: int) -> None:
        start(rank, 2, port, grace=0.5)
        assert sum_of_ranks() == 1.0
        if rank == 1:
            time.sleep(0.1)
            os._exit(0)
        begin = time.monotonic()
        control = stop_after(0.3) if is_stopped else contextlib.nullcontext()
        with control, pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        took = time.monotonic() - begin
        if is_stopped:
            assert str(caught.value) == rg.FORCE_STOP and took < 0.5
        else:
            assert "FORCE STOP" not in str(caught.value) and 0.5 < took < 2

    run_ranks(2, body, dies=(1,))


def test_wrong_arguments_are_reported_at_once() -> None:
    port = free_port()

    def body(rank: int) -> None:
        start(rank, 1, port)
        begin = time.monotonic()
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather_into_tensor(torch.empty(7), torch.ones(2))
        assert time.monotonic() - begin < 1

    run_ranks(1, body)


# ---------------------------------------------------------------------------------------------- reopening


def test_messages_of_an_old_epoch_do_not_arrive() -> None:
    port = free_port()

    def body(rank: int) -> float:
        store = start(rank, 2, port)
        sent = dist.isend(torch.tensor([1.0]), 1) if rank == 0 else None
        meet(store, "sent", 2)
        rg.abort_all()
        rg.reopen_all(1)
        got = torch.tensor([2.0])
        if rank == 0:
            dist.send(got, 1)
            del sent
        else:
            dist.recv(got, 0)
        return got.item()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_groups_known_in_different_orders_are_reopened() -> None:
    port = free_port()

    def body(rank: int) -> list[float]:
        start(rank, 3, port)
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2], [0, 1, 2])]
        if rank == 1:
            rg._state.groups.reverse()
        rg.abort_all()
        rg.reopen_all(1)
        return [sum_of_ranks(g) for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER]

    assert run_ranks(3, body) == [[1, 2, 3], [1, 3, 3], [3, 2, 3]]


def test_a_first_message_needs_only_two_of_four_ranks() -> None:
    port = free_port()

    def body(rank: int) -> float:
        store = start(rank, 4, port)
        rg.abort_all()
        rg.reopen_all(1)
        got = torch.zeros(1)
        if rank == 2:
            dist.send(torch.ones(1), 3)
        elif rank == 3:
            dist.recv(got, 2)
        meet(store, "end", 4)
        return got.item()

    assert run_ranks(4, body) == [0, 0, 0, 1]


def test_a_second_fault_interrupts_a_reopening() -> None:
    port = free_port()

    def body(rank: int) -> float:
        store = start(rank, 2, port)
        rg.abort_all()
        if rank == 0:
            rg.reopen_all(1)
            with stop_after(0.2) as times:
                with pytest.raises(RuntimeError, match=r"^FORCE STOP\.$"):
                    dist.all_reduce(torch.ones(1))
                assert time.monotonic() - times["stop"] < 1
        meet(store, "again", 2)
        rg.reopen_all(2)
        return sum_of_ranks()

    assert run_ranks(2, body) == [1.0, 1.0]


def test_a_second_fault_interrupts_gloo_while_it_connects() -> None:
    port = free_port()

    def body(rank: int) -> float:
        store = start(rank, 2, port)
        rg.abort_all()
        if rank == 1:  # announces itself but never gives its address
            group_store = c10d._get_default_group().get_group_store()
            dist.PrefixStore("epoch1", group_store).set("arrived/1", "1")
        else:
            rg.reopen_all(1)
            time.sleep(0.2)
            store.set("free", "1")  # gloo waits for the address, but does not lock the store
            assert threading.active_count() == 2
            rg.abort_all()
            time.sleep(0.2)
            assert threading.active_count() == 1
        meet(store, "again", 2)
        rg.reopen_all(2)
        return sum_of_ranks()

    assert run_ranks(2, body) == [1.0, 1.0]


def test_a_member_that_does_not_reopen_is_named_after_the_timeout() -> None:
    port = free_port()

    def body(rank: int) -> float:
        store = start(rank, 2, port, timeout=1.0, grace=0.1)
        more = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        took = 0.0
        if rank == 0:
            begin = time.monotonic()
            rg.reopen_all(1)
            for group in (None, more):
                with pytest.raises(RuntimeError, match=r"\['arrived/1'\] .* not found within"):
                    dist.barrier(group)
            took = time.monotonic() - begin
        meet(store, "again", 2)
        rg.reopen_all(2)
        assert sum_of_ranks(more) == 1.0
        return took

    assert run_ranks(2, body)[0] < 3


def test_a_changed_timeout_survives() -> None:
    port = free_port()

    def body(rank: int) -> float:
        start(rank, 1, port)
        c10d._set_pg_timeout(timedelta(seconds=7), dist.group.WORLD)
        rg.reopen_all(1)
        return c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert run_ranks(1, body) == [7.0]


class Grid:
    """The groups of a 2×2 grid, as a framework keeps them: rows, columns, the rows again, each rank alone."""

    def __init__(self, rank: int) -> None:
        self.mine: dict[str, Any] = {"world": dist.group.WORLD}
        layout = {
            "tp": ([0, 1], [2, 3]),
            "dp": ([0, 2], [1, 3]),
            "ep": ([0, 1], [2, 3]),
            "cp": ([0], [1], [2], [3]),
        }
        for name, members in layout.items():
            for ranks in members:
                group = dist.new_group(ranks)
                if rank in ranks:
                    self.mine[name] = group

    def sums(self) -> list[float]:
        return [sum_of_ranks(group) for group in self.mine.values()]


GRID_SUMS = [[6, 1, 2, 1, 0], [6, 1, 4, 1, 1], [6, 5, 2, 5, 2], [6, 5, 4, 5, 3]]


@pytest.mark.parametrize("order", ["failed first", "failed last"])
def test_a_grid_recovers_in_place_again_and_again(order: str) -> None:
    port = free_port()
    rounds = 6

    def body(rank: int) -> list[Any]:
        store = start(rank, 4, port)
        grid = Grid(rank)
        before = {name: id(group) for name, group in grid.mine.items()}
        sums, slowest = [grid.sums()], 0.0
        for epoch in range(1, rounds + 1):
            failed = epoch % 4
            blocked = (rank - failed) % 4  # each healthy rank is somewhere else
            begin = time.monotonic()
            is_early = (blocked == 0) == (order == "failed first")
            with stop_after(0.1 if is_early else 0.2), pytest.raises(RuntimeError, match=r"^FORCE STOP\.$"):
                if blocked == 0:
                    time.sleep(0.3)  # its fault: it takes part in nothing until it is stopped
                    dist.barrier()
                elif blocked == 1:
                    dist.all_reduce(torch.ones(4))
                elif blocked == 2:
                    dist.recv(torch.empty(4), rank ^ 1, group=grid.mine["tp"])
                else:
                    dist.all_to_all_single(torch.empty(4), torch.ones(4), group=grid.mine["dp"])
                    dist.barrier()
            slowest = max(slowest, time.monotonic() - begin)
            meet(store, f"stopped{epoch}", 4)
            rg.reopen_all(epoch)
            sums.append(grid.sums())
        assert {name: id(group) for name, group in grid.mine.items()} == before
        assert grid.mine["world"] is dist.group.WORLD
        return [sums, slowest]

    for rank, (sums, slowest) in enumerate(run_ranks(4, body)):
        assert sums == [GRID_SUMS[rank]] * (rounds + 1)
        assert slowest < 1.2


# ---------------------------------------------------------------------------------------------- resources


def _usage() -> list[int]:
    return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]


def test_fifty_recoveries_leave_no_threads_files_or_groups() -> None:
    port = free_port()

    def body(rank: int) -> list[Any]:
        store = start(rank, 2, port)
        groups = [None, dist.new_group([0, 1]), dist.new_group([0]), dist.new_group([0, 1])]
        usage = []
        for epoch in range(1, 51):
            if rank == 0:
                abandoned = [dist.all_reduce(torch.ones(1000), group=groups[1], async_op=True) for _ in range(3)]
                with stop_after(0.01), pytest.raises(RuntimeError, match="FORCE STOP"):
                    dist.recv(torch.empty(1), 1, group=groups[3])
                del abandoned
            meet(store, f"stopped{epoch}", 2)
            rg.abort_all()
            rg.reopen_all(epoch)
            for group in groups:
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    assert sum_of_ranks(group) in (0.0, 1.0)
            meet(store, f"open{epoch}", 2)
            deadline = time.monotonic() + 2
            while (threading.active_count() > 1 or rg._state.retired) and time.monotonic() < deadline:
                time.sleep(0.001)
            usage.append([*_usage(), len(rg._state.retired), threading.active_count()])
        return usage

    for usage in run_ranks(2, body):
        assert usage[-1] == usage[4], usage
        assert usage[-1][2:] == [0, 1]


def test_destroying_leaves_nothing_behind_and_a_new_start_works() -> None:
    ports = [free_port() for _ in range(3)]

    def body(rank: int) -> None:
        before = _usage()
        for epoch, (port, is_stopped) in enumerate(zip(ports, [False, True, False], strict=True), start=1):
            store = start(rank, 2, port)
            group = dist.new_group([0, 1])
            assert sum_of_ranks(group) == 1.0
            if is_stopped:
                rg.abort_all()
            meet(store, "end", 2)
            dist.destroy_process_group(group)
            dist.destroy_process_group()
            with pytest.raises(RuntimeError, match="was destroyed" if not is_stopped else "FORCE STOP"):
                group.barrier().wait()
            rg.reopen_all(epoch)
            world = c10d._world
            assert not (rg._state.groups or rg._state.retired or world.pg_map or world.pg_names or world.tags_to_pg)
            time.sleep(0.2)
            del group, store
        assert _usage()[0] == before[0]

    run_ranks(2, body)


def test_a_group_with_pending_work_is_destroyed_at_once() -> None:
    port = free_port()

    def body(rank: int) -> float:
        store = start(rank, 2, port)
        work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
        begin = time.monotonic()
        dist.destroy_process_group()
        took = time.monotonic() - begin
        if work is not None:
            with pytest.raises(RuntimeError, match="was destroyed"):
                work.wait()
        meet(store, "end", 2)
        return took

    assert max(run_ranks(2, body)) < 1


def test_waiting_costs_little() -> None:
    port = free_port()

    def body(rank: int) -> list[float]:
        start(rank, 1, port)
        native = dist.new_group([0], backend="gloo")
        x, best = torch.ones(1), []
        for group in (native, dist.group.WORLD):
            times = []
            for _ in range(20):
                begin = time.perf_counter()
                for _ in range(50):
                    dist.all_reduce(x, group=group)
                times.append((time.perf_counter() - begin) / 50)
            best.append(min(times))
        return best

    native, ours = run_ranks(1, body)[0]
    assert ours - native < 200e-6
