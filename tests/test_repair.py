# SPDX-License-Identifier: Apache-2.0
"""States that move between ranks: real processes, forks of this one, over gloo groups."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forks import run_ranks
from test_wire import DTYPES, NESTED, VIEWS
from torch import nn

from mindspeed_recovery.core import link, notices, repair, wire
from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.errors import RecoveryFailed, RepairError, StateError
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)
HOME = sys.modules["test_wire"]  # the states live where the classes of their values are
TIMEOUT = 10.0
R = 4
"""The step that is rolled back to."""


def spec(name: str, policy: str = "replicate", **options: Any) -> StateSpec:
    return StateSpec(name, Location.parse(f"test_wire:STATE_{name}"), Policy(policy), source="the test", **options)


def put(name: str, value: Any) -> Any:
    setattr(HOME, f"STATE_{name}", value)
    return value


def get(name: str) -> Any:
    return getattr(HOME, f"STATE_{name}")


def started(*specs: StateSpec, timeout: float = TIMEOUT, **options: Any) -> Session:
    session = Session(Registry(specs), repair_timeout=timeout, **options)
    session.start()
    return session


def reach(session: Session, step: int = R) -> None:
    """Step ``step`` ends and the next one begins: its copies are ``update(step)`` and ``start(step + 1)``."""
    session.begin_step(step)
    session.before_update(step)
    session.after_log(step)
    session.begin_step(step + 1)


def plan(rank: int, *pairs: tuple[int, int, int], step: int = R) -> Any:
    return SimpleNamespace(step=step, rank=rank, pairs=tuple(pair for pair in pairs if rank in pair[:2]))


DENSE = (0, 1, 0)


def recover(session: Session, rank: int, *pairs: tuple[int, int, int], step: int = R, replay: bool = False) -> Any:
    """A whole recovery; returns its report."""
    session.stop()
    session.clean()
    session.after_repair(plan(rank, *(pairs or (DENSE,)), step=step), dist.group.WORLD)
    session.before_rollback(step, replay=replay)
    return session.after_rollback()


def lose_copies(session: Session) -> None:
    session.copies.discard(since=0.0)


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """What the simulated memory imports at its first use, it imports before the forks."""
    memory = UnsafeMemory()
    with memory.active():
        memory.host_empty([1], torch.uint8).add_(1)


@contextlib.contextmanager
def nothing_forbidden() -> Iterator[None]:
    """Neither a new group nor an object collective nor pickle."""

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not allowed in a repair")

    names = ("new_group", "send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, forbidden))
        for name in ("_object_to_tensor", "_tensor_to_object", "_new_group_with_tag"):
            stack.enter_context(mock.patch.object(dist.distributed_c10d, name, forbidden))
        stack.enter_context(mock.patch("pickle.dumps", forbidden))
        yield


def ranks(body: Callable[[int], Any], size: int = 2, dies: tuple[int, ...] = ()) -> list[Any]:
    """Run ``body(rank)`` in forked ranks with a default gloo group, whose store lives here."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def main(rank: int) -> Any:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        limit = timedelta(seconds=20)
        dist.init_process_group("gloo", store=client, rank=rank, world_size=size, timeout=limit)
        dist.barrier()
        with nothing_forbidden():
            return body(rank)

    return run_ranks(size, main, dies)


def test_what_is_forbidden_would_be_seen() -> None:
    with nothing_forbidden(), pytest.raises(AssertionError, match="not allowed in a repair"):
        dist.new_group([0])


def failure(call: Callable[[], Any]) -> tuple[str, float]:
    """The error of a call, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(RepairError) as error:
        call()
    return str(error.value), time.monotonic() - began


# ---- values ------------------------------------------------------------------------------------------------------------


def _values(rank: int) -> dict[str, tuple[Any, Any]]:
    """For each state what the source has, and what the receiver has before."""
    torch.manual_seed(5)
    found: dict[str, tuple[Any, Any]] = {}
    for dtype in DTYPES:
        found[f"dtype-{str(dtype).split('.')[1]}"] = (torch.randint(0, 2, (3, 4)).to(dtype) == 1, None)
        found[f"dtype-{str(dtype).split('.')[1]}"] = (torch.tensor([1, 0, 1]).to(dtype), torch.zeros(3).to(dtype))
    for name, make in VIEWS.items():
        found[f"view-{name}"] = (make(), None)
        found[f"view-{name}-over-another-shape"] = (make(), torch.full((7,), 3.0))
    for name, value in NESTED.items():
        if name == "module":  # of a class of another package: one must stand there
            found["nested-module"] = (value, nn.Linear(2, 3))
        else:
            found[f"nested-{name}"] = (value, None)
            found[f"nested-{name}-over-a-list"] = (value, [torch.ones(5), {"x": 1}])
    many = {f"t{i}": torch.full((i % 7,), float(i)) for i in range(500)}
    found["many-tensors"] = (many, {"extra": torch.ones(3)})
    found["cut-into-parts"] = (torch.arange(wire.CHUNK_BYTES // 4 * 2 + 5, dtype=torch.float32), None)
    return found


def test_every_value_arrives_as_the_source_had_it_at_the_step() -> None:
    def body(rank: int) -> list[str]:
        values = _values(rank)
        names = {name: f"s{number}" for number, name in enumerate(values)}
        for name, short in names.items():
            put(short, values[name][rank])
        session = started(*(spec(short) for short in names.values()))
        session.begin_step(R + 1)
        digest = notices.copy_digest
        before = {name: digest(session.copies.start.get(short, R + 1)) for name, short in names.items()}
        if rank == 0:
            for short in names.values():
                put(short, "half-changed present")
        for short in names.values():
            handle = session.handle(short, R)
            if rank == 0:
                handle.send(1, dist.group.WORLD)
            else:
                handle.recv(0, dist.group.WORLD)
        session.copies.start.step = -1
        session.begin_step(R + 2)  # copies of what stands there now
        after = {name: digest(session.copies.start.get(short, R + 2)) for name, short in names.items()}
        return [before, after]

    (source, _), (mine, received) = ranks(body)
    assert len(source) > 50
    assert None not in source.values()
    assert [name for name in source if source[name] == mine[name] and name not in ("view-zero-size",)] == []
    assert [name for name in source if source[name] != received[name]] == []


def test_tensors_keep_their_storage_and_modules_their_buffers() -> None:
    def body(rank: int) -> Any:
        module = nn.Module()
        module.register_buffer("bias", torch.full((4,), float(rank)))
        put("module", module)
        view = put("tensor", torch.full((8,), float(rank)))[2:4]
        session = started(spec("module"), spec("tensor"))
        session.begin_step(R + 1)
        before = module.bias.data_ptr(), get("tensor").data_ptr()
        for name in ("module", "tensor"):
            handle = session.handle(name, R)
            handle.send(1, dist.group.WORLD) if rank == 0 else handle.recv(0, dist.group.WORLD)
        same = (module.bias.data_ptr(), get("tensor").data_ptr()) == before
        return same, view.tolist(), get("module").bias.tolist(), "bias" in dict(module.named_buffers())

    assert ranks(body)[1] == [True, [0.0, 0.0], [0.0] * 4, True]


def test_items_and_attributes_that_the_receiver_lacks_are_made_and_others_dropped() -> None:
    class Layer:
        pass

    def body(rank: int) -> Any:
        HOME.Layer = Layer
        layer, tracker = Layer(), put("tracker", {"total": torch.ones(1), "other": 5} if rank == 0 else {"count": 3})
        if rank == 0:
            layer.scale = torch.full((2,), 7.0)
        else:
            layer.extra = torch.ones(1)
        fields = ("total", "count")
        scale, extra = (
            StateSpec(name, Location.parse(f"test_wire:Layer.{name}"), Policy.REPLICATE, on="instances", source="test")
            for name in ("scale", "extra")
        )
        Layer.__annotations__ = {"scale": Any, "extra": Any}
        session = started(spec("tracker", fields=fields), scale, extra, roots={"model": [layer]})
        session.begin_step(R + 1)
        if rank == 1:
            lose_copies(session)
        report = recover(session, rank)
        return vars(layer) and {k: str(v) for k, v in vars(layer).items()}, str(tracker), report.failures

    (source, _, _), (layer, tracker, failures) = ranks(body)
    assert failures == []
    assert layer == source | {"extra": "None"}
    assert tracker == "{'total': tensor([1.])}"


# ---- recoveries --------------------------------------------------------------------------------------------------------


def test_a_lost_copy_comes_from_the_replica_and_own_ones_are_kept() -> None:
    def body(rank: int) -> Any:
        put("bias", torch.full((4,), 1.0))
        put("kept", torch.full((4,), float(rank)))
        memory = UnsafeMemory()
        with memory.active():
            session = started(spec("bias"), spec("kept"), memory=memory)
            reach(session)
            get("bias").add_(1)  # the next step has begun
            if rank == 1:
                for slot in (session.copies.start, session.copies.update):
                    slot._copies["bias"].whole = False
                memory.mark_unsafe([get("bias")])
            report = recover(session, rank)
            unsafe = memory.is_unsafe(get("bias"))
            return get("bias").tolist(), get("kept").tolist(), dataclasses.asdict(report), report.failures, unsafe

    for rank, (bias, kept, report, failures, unsafe) in enumerate(ranks(body)):
        assert (bias, kept, failures, unsafe) == ([1.0] * 4, [float(rank)] * 4, [], False)
        outcomes = report["outcomes"]
        assert (outcomes["kept"]["source"], outcomes["kept"]["tried"]) == ("start(5)", [])
        assert outcomes["bias"]["source"] == ("replica 0" if rank else "start(5)")
        tried = ["start(5)", "update(4)", "replica 0 (received)"] if rank else []
        assert outcomes["bias"]["tried"] == tried


def test_no_bytes_move_where_nothing_is_lost() -> None:
    def body(rank: int) -> Any:
        put("bias", torch.ones(4))
        session = started(spec("bias"))
        reach(session)
        with mock.patch.object(link.Link, "send_bytes", side_effect=AssertionError("bytes move")):
            report = recover(session, rank)
        return report.failures, report.outcomes["bias"].source

    assert ranks(body) == [[[], "start(5)"]] * 2


def test_two_recoveries_in_one_process() -> None:
    def body(rank: int) -> Any:
        seen = []
        put("bias", torch.zeros(3))
        session = started(spec("bias"))
        for step in (R, R + 3):
            get("bias").fill_(step)
            reach(session, step)
            get("bias").fill_(-1 - rank)
            if rank == 1:
                lose_copies(session)
            report = recover(session, rank, step=step)
            seen.append([get("bias").tolist(), report.outcomes["bias"].source, report.failures])
        return seen

    expected = [[[4.0] * 3, "replica 0", []], [[7.0] * 3, "replica 0", []]]
    assert ranks(body)[1] == expected


def test_the_received_copy_serves_the_next_rollback_to_the_same_step() -> None:
    def body(rank: int) -> Any:
        put("bias", torch.zeros(3))
        session = started(spec("bias"))
        reach(session)
        get("bias").fill_(-1)
        if rank == 1:
            lose_copies(session)
        recover(session, rank)
        session.begin_step(R + 1)
        get("bias").fill_(-2)
        session.stop()  # a link fault: no repair
        session.clean()
        session.before_rollback(R)
        return get("bias").tolist(), session.after_rollback().failures

    assert ranks(body) == [[[0.0] * 3, []]] * 2


def _restarted(rank: int, *specs: StateSpec, equal: bool = True, **options: Any) -> Session:
    """A session of this rank; on rank 1 that of a process which has been restarted after step R."""
    torch.manual_seed(3 if equal else rank)
    put("rng", torch.Generator().manual_seed(3 if equal else rank))
    put("own", random.Random(rank))
    states = [spec("rng", "snapshot"), *specs]
    first = started(*states)
    reach(first)
    dist.barrier()
    if rank == 0:
        session = first
        session._strict = options.get("strict", False)
    else:
        put("rng", torch.Generator().manual_seed(99))
        session = started(*states, **options)
    torch.rand(3, generator=get("rng"))
    return session


@pytest.mark.parametrize("equal", [True, False])
def test_a_restarted_rank_gets_its_generators_if_they_were_those_of_the_replica(equal: bool) -> None:
    def body(rank: int) -> Any:
        put("bias", torch.full((2,), float(rank)))
        session = _restarted(rank, spec("bias"), equal=equal)
        report = recover(session, rank)
        drawn = torch.rand(3, generator=get("rng")).tolist()
        return drawn, get("bias").tolist(), report.failures, report.outcomes["rng"].tried

    (source, _, _, _), (drawn, bias, failures, tried) = ranks(body)
    assert bias == [0.0, 0.0]
    assert (drawn == source) is equal
    if equal:
        assert failures == []
    else:
        why = "replica 0 (its copy of step 3 was another one than on rank 1)"
        assert tried == ["start(5)", "update(4)", why]
        assert failures == [f"rng: no copy of the end of step 4 (left as it is); tried start(5), update(4), {why}"]


def test_a_restarted_rank_without_a_source_fails_under_strict() -> None:
    def body(rank: int) -> Any:
        session = _restarted(rank, equal=False, strict=True)
        try:
            recover(session, rank)
        except RecoveryFailed as error:
            return str(error)
        return "exact"

    source, restarted = ranks(body)
    assert source == "exact"
    assert restarted.startswith("FORCE STOP: the recovery is not exact: rng: no copy of the end of step 4")


def test_missing_without_a_source_follows_on_missing() -> None:
    def body(rank: int) -> Any:
        put("bias", torch.zeros(1))
        session = started(spec("bias", on_missing="error"))
        if rank == 0:
            reach(session)
            lose_copies(session)
        session.copies.start.step = -1
        get("bias").fill_(5)
        with pytest.raises(RecoveryFailed, match="no copy of the end of step 4"):
            recover(session, rank)
        return session.reports[0].failures

    source, destination = ranks(body)
    assert source == ["bias: no copy of the end of step 4 (left as it is); tried start(5), update(4)"]
    assert destination[0].endswith("replica 0 (it has no copy of step 4 either)")


@pytest.mark.parametrize("replay", [False, True])
def test_a_state_of_the_log_line_arrives_as_of_before_or_after_it(replay: bool) -> None:
    def body(rank: int) -> Any:
        put("seen", 10)
        session = started(spec("seen", settled="after-logging"))
        session.begin_step(R)
        session.before_update(R)
        put("seen", 11)  # by its log line
        session.after_log(R)
        if rank == 1:
            lose_copies(session)
            session.copies.logged = -1
        put("seen", -1)
        report = recover(session, rank, replay=replay)
        return get("seen"), report.failures

    assert ranks(body) == [[10 if replay else 11, []]] * 2


def test_a_source_that_stopped_while_it_took_its_copies_sends_what_stands_there() -> None:
    def body(rank: int) -> Any:
        put("ema", torch.full((2,), float(rank)))
        session = started(spec("ema", settled="after-update"))
        reach(session)
        lose_copies(session)
        if rank == 0:
            session.copies.taking = session.copies.start
        else:
            session.copies.start.step = -1
        return recover(session, rank).failures, get("ema").tolist()

    assert ranks(body) == [[[], [0.0, 0.0]]] * 2


def test_dense_and_expert_states_follow_their_own_pairs() -> None:
    def body(rank: int) -> Any:
        put("dense", torch.full((2,), float(rank)))
        put("expert", torch.full((2,), float(rank)))
        session = started(spec("dense"), spec("expert", replica="expert"))
        reach(session)
        if rank == 1:
            lose_copies(session)
            session.copies.start.step = -1
        report = recover(session, rank, (2, 1, 1), (0, 1, 0))
        return get("dense").tolist(), get("expert").tolist(), report.failures

    assert ranks(body, 3)[1] == [[0.0, 0.0], [2.0, 2.0], []]


def test_expert_states_do_not_move_with_dense_pairs() -> None:
    def body(rank: int) -> Any:
        put("expert", torch.full((2,), float(rank)))
        session = started(spec("expert", replica="expert"))
        reach(session)
        if rank == 1:
            lose_copies(session)
            session.copies.start.step = -1
        return recover(session, rank).failures, get("expert").tolist()

    failures, value = ranks(body)[1]
    assert value == [1.0, 1.0]
    assert failures == ["expert: no copy of the end of step 4 (left as it is); tried start(5), update(4)"]


def test_chains_of_pairs_do_not_wait_for_each_other() -> None:
    pairs = ((0, 1, 0), (1, 2, 1), (2, 0, 1), (2, 1, 0), (1, 0, 1))

    def body(rank: int) -> Any:
        put("bias", torch.full((2,), 1.0))
        session = started(spec("bias"), timeout=8)
        reach(session)
        mine = list(pairs) if rank % 2 else list(reversed(pairs))
        began = time.monotonic()
        report = recover(session, rank, *mine)
        return report.failures, time.monotonic() - began < 4

    assert ranks(body, 3) == [[[], True]] * 3


class _OfDevice:
    """The work of a device's group: ``wait`` does not wait."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return self._work.wait()

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("backend", ["gloo", "hccl"])
def test_large_states_go_over_the_devices_group(backend: str) -> None:
    def body(rank: int) -> Any:
        with mock.patch.object(repair, "LARGE_BYTES", 5000):
            put("large", torch.full((2000,), float(rank)))
            put("small", torch.full((2,), float(rank)))
            session = started(spec("large", large=True), spec("small"))
            reach(session)
            if rank == 1:
                lose_copies(session)
                session.copies.start.step = -1
            used = []
            start = link.Link._start

            def spy(self: Any, operation: Any, data: Any) -> Any:
                used.append((self._group is bulk, data.numel()))
                work = start(self, operation, data)
                return work if self._on_host else _OfDevice(work)

            session.stop()
            session.clean()
            of_group = dist.get_backend
            backends = mock.patch.object(dist, "get_backend", lambda g: backend if g is bulk else of_group(g))
            with mock.patch.object(link.Link, "_start", spy), backends:
                session.after_repair(plan(rank, DENSE), dist.group.WORLD, bulk)
            session.before_rollback(R)
            report = session.after_rollback()
            return report.failures, [get("large").sum().item(), get("small").sum().item()], used

    # The second group is made before the repair, by the test.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    bulk: Any = None

    def outer(rank: int) -> Any:
        nonlocal bulk
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        dist.init_process_group("gloo", store=client, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        bulk = dist.new_group([0, 1], backend="gloo")
        with nothing_forbidden():
            return body(rank)

    for failures, sums, used in run_ranks(2, outer):
        assert (failures, sums) == ([], [0.0, 0.0])
        assert [size for over_device, size in used if over_device] == [8000]
        assert 8 in [size for over_device, size in used if not over_device]


def test_work_of_a_device_that_never_completes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_backend", lambda group: "hccl")
    monkeypatch.setattr(dist, "isend", lambda *args, **kwargs: SimpleNamespace(is_completed=lambda: False))
    peer = link.Link(1, None, 0.2)
    text, seconds = failure(lambda: peer.send_bytes([torch.ones(8, dtype=torch.uint8)]))
    assert text == "FORCE STOP: the connection to rank 1 failed: nothing arrived within 0.2 s"
    assert seconds < 2


# ---- what goes wrong ---------------------------------------------------------------------------------------------------


def _two(rank: int, timeout: float = 8.0, **options: Any) -> Session:
    """States on both ranks, of which rank 1 has lost all copies."""
    put("bias", torch.full((4,), float(rank)))
    put("large", torch.full((wire.CHUNK_BYTES,), float(rank)))
    put("other", [torch.full((2,), float(rank))])
    session = started(spec("bias"), spec("large"), spec("other"), timeout=timeout, **options)
    reach(session)
    if rank == 1:
        lose_copies(session)
        session.copies.start.step = -1
    dist.barrier()
    return session


def _repaired(session: Session, rank: int) -> Any:
    """Failures of a recovery, how long its exchange took, and what stands there then."""
    session.stop()
    session.clean()
    began = time.monotonic()
    session.after_repair(plan(rank, DENSE), dist.group.WORLD)
    seconds = time.monotonic() - began
    session.before_rollback(R)
    report = session.after_rollback()
    return report.failures, seconds, [get("bias")[0].item(), get("large")[0].item(), get("other")[0][0].item()]


def test_without_a_fault_all_three_states_arrive() -> None:
    for failures, _, values in ranks(lambda rank: _repaired(_two(rank), rank)):
        assert (failures, values) == ([], [0.0, 0.0, 0.0])


def _at_byte_chunk(number: int, action: Callable[[], Any]) -> Any:
    """Do something when the chunk of this number is sent or awaited."""
    start, seen = link.Link._start, []

    def wrapped(self: Any, operation: Any, data: Any) -> Any:
        if data.numel() == wire.CHUNK_BYTES:
            seen.append(1)
            if len(seen) == number:
                action()
        return start(self, operation, data)

    return mock.patch.object(link.Link, "_start", wrapped)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_in_the_middle_leaves_nobody_waiting(dead: int) -> None:
    def body(rank: int) -> Any:
        session = _two(rank, timeout=2.0)
        with _at_byte_chunk(3, lambda: os._exit(1)) if rank == dead else contextlib.nullcontext():
            return _repaired(session, rank)

    failures, seconds, values = ranks(body, dies=(dead,))[1 - dead]
    assert seconds < 6
    if dead == 0:
        assert values == [1.0, 1.0, 1.0]
        assert len(failures) == 3
        assert all("replica 0 (FORCE STOP: the connection to rank 0 failed: " in line for line in failures)
    else:
        assert (failures, values) == ([], [0.0, 0.0, 0.0])


@pytest.mark.parametrize("stuck", [0, 1])
def test_every_wait_ends_by_its_timeout(stuck: int) -> None:
    def body(rank: int) -> Any:
        session = _two(rank, timeout=1.0)
        if rank == stuck:
            with _at_byte_chunk(2, lambda: time.sleep(4)):
                return _repaired(session, rank)[:2]
        return _repaired(session, rank)[:2]

    failures, seconds = ranks(body)[1 - stuck]
    assert 0.5 < seconds < 3.5
    assert bool(failures) is (stuck == 0)


def test_a_rank_that_never_comes_is_waited_for_once_in_all_pairs() -> None:
    def body(rank: int) -> Any:
        put("bias", 1)
        put("expert", 1)
        session = started(spec("bias"), spec("expert", replica="expert"), timeout=1.0)
        dist.barrier()
        if rank != 1:
            time.sleep(3)
            return None
        session.stop()
        session.clean()
        began = time.monotonic()
        session.after_repair(plan(1, DENSE, (0, 1, 1), (2, 1, 1), (1, 2, 0)), dist.group.WORLD)
        return time.monotonic() - began, session._tried

    seconds, tried = ranks(body, 3)[1]
    assert 0.9 < seconds < 2.5
    assert tried["bias"][0].startswith("replica 0 (FORCE STOP: the connection to rank 0 failed")
    assert len(tried["expert"]) == 2
    for peer, line in zip((0, 2), tried["expert"]):
        assert line.startswith(f"replica {peer} (not asked, since the repair group failed: FORCE STOP: the connection")


def test_a_peer_without_the_plugin_is_sent_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int) -> Any:
        if rank == 0:
            dist.barrier()
            time.sleep(2)
            return None
        session = _two(rank, timeout=1.0)
        with mock.patch.object(dist, "isend", side_effect=AssertionError("a send")):
            session.stop()
            session.after_repair(plan(1, DENSE, (1, 0, 0)), dist.group.WORLD)
        return session._tried["bias"], [r.message for r in caplog.records if r.levelname == "WARNING"]

    tried, warnings = ranks(body)[1]
    assert tried == ["replica 0 (FORCE STOP: rank 0 does not run the plugin; no states are exchanged with it)"]
    assert len([line for line in warnings if "does not run the plugin" in line]) == 1


def test_another_catalogue_means_no_sends() -> None:
    def body(rank: int) -> Any:
        put("more", 1)
        session = _two(rank)
        if rank == 0:
            session.track(spec("more"))
        dist.barrier()
        with mock.patch.object(dist, "isend", side_effect=AssertionError("a send")):
            return _repaired(session, rank)

    (_, _, _), (failures, seconds, values) = ranks(body)
    assert values == [1.0, 1.0, 1.0]
    assert seconds < 4
    assert all("replica 0 (FORCE STOP: rank 0 has another catalogue: " in line for line in failures)


def test_what_the_notices_did_not_show_the_messages_do() -> None:
    def body(rank: int) -> Any:
        session = _two(rank)
        dist.barrier()
        with mock.patch.object(repair.Exchange, "check"):
            if rank == 0:
                session.registry.add(spec("more"))
            return _repaired(session, rank)

    (_, fast, _), (failures, seconds, values) = ranks(body)
    assert values == [1.0, 1.0, 1.0]
    assert max(fast, seconds) < 4
    assert all("rank 0 sends nothing: catalogue " in line for line in failures)


def test_another_step_is_refused_on_both_sides() -> None:
    def body(rank: int) -> Any:
        session = _two(rank)
        handle = session.handle("bias", R + rank)
        return failure(lambda: handle.recv(0, dist.group.WORLD) if rank else handle.send(1, dist.group.WORLD))

    (source, _), (destination, seconds) = ranks(body)
    assert source == "FORCE STOP: nothing is sent to rank 1: step 5 there, 4 here"
    assert destination == "FORCE STOP: rank 0 sends nothing: step 5 there, 4 here"
    assert seconds < 4


def test_damaged_bytes_are_not_used() -> None:
    def body(rank: int) -> Any:
        session = _two(rank)
        gather = link._gather

        def damaged(chunk: Any, storages: Any) -> Any:
            data = gather(chunk, storages).clone()
            if isinstance(chunk, wire.Packed) and rank == 0:
                sums = link.checksum_of
                good = sums(data)
                data[3] ^= 1
                link.checksum_of = lambda other: good if other is data else sums(other)
            return data

        with mock.patch.object(link, "_gather", damaged):
            return _repaired(session, rank)

    failures, _, values = ranks(body)[1]
    assert values == [1.0, 0.0, 1.0]
    assert [line.split(":")[0] for line in failures] == ["bias", "other"]
    assert all("replica 0 (its bytes arrived damaged)" in line for line in failures)


def test_a_state_that_cannot_be_sent_is_named_and_the_others_move() -> None:
    def body(rank: int) -> Any:
        session = _two(rank)
        if rank == 0:
            session.copies.start._copies["other"].captures[0][1].root.items[0].layout = None  # a bug of ours
        return _repaired(session, rank)

    failures, _, values = ranks(body)[1]
    assert values == [0.0, 0.0, 1.0]
    assert len(failures) == 1
    assert failures[0].startswith("other: ")


def test_a_function_among_the_values_is_named() -> None:
    def body(rank: int) -> Any:
        put("odd", {"f": print})
        put("bias", torch.full((2,), float(rank)))
        session = started(spec("odd"), spec("bias"))
        reach(session)
        if rank == 1:
            lose_copies(session)
            session.copies.start.step = -1
        return recover(session, rank).failures, get("bias").tolist()

    failures, bias = ranks(body)[1]
    assert bias == [0.0, 0.0]
    assert len(failures) == 1
    assert "test_wire:STATE_odd['f']: a builtin_function_or_method cannot be sent to another rank" in failures[0]


@pytest.mark.parametrize("part", ["_lacking", "_prepare", "_allocate", "_store", "_describe"])
def test_a_bug_in_one_state_stops_no_other_and_leaves_nobody_waiting(part: str) -> None:
    def body(rank: int) -> Any:
        session = _two(rank)
        original = getattr(repair.Exchange, part)

        def broken(self: Any, first: Any, *rest: Any) -> Any:
            item = getattr(first, "item", first)
            if getattr(item, "state", getattr(item, "name", "")) == "bias":
                raise ZeroDivisionError("a bug of ours")
            return original(self, first, *rest)

        with mock.patch.object(repair.Exchange, part, broken):
            return _repaired(session, rank)

    (_, first, _), (failures, second, values) = ranks(body)
    assert values == [1.0, 0.0, 0.0]
    assert max(first, second) < 4
    assert len(failures) == 1
    assert "replica 0 (ZeroDivisionError: a bug of ours)" in failures[0]


def test_a_source_that_cannot_read_a_chunk_sends_the_rest() -> None:
    def body(rank: int) -> Any:
        session = _two(rank)
        gather = link._gather

        def broken(chunk: Any, storages: Any) -> Any:
            if isinstance(chunk, wire.Part) and chunk.start:
                raise OSError("host memory is broken")
            return gather(chunk, storages)

        with mock.patch.object(link, "_gather", broken):
            return _repaired(session, rank)

    failures, _, values = ranks(body)[1]
    assert values == [0.0, 1.0, 0.0]
    assert len(failures) == 1
    assert "large" in failures[0]
    assert "it could not be read there" in failures[0]


HOSTILE = {
    "huge": lambda value: value["layouts"][0].__setitem__(6, 2**62),
    "negative": lambda value: value["layouts"][0].__setitem__(1, [-4]),
    "dtype": lambda value: value["layouts"][0].__setitem__(0, "object"),
    "path": lambda value: value["places"][0].__setitem__(0, "../../etc/passwd"),
    "class": lambda value: value["places"][0].__setitem__(1, ["r", "subprocess:Popen", ["args"], [["p", "x"]]]),
    "announced": lambda value: value.__setitem__("bytes", 2**62),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused_before_memory_is_allocated(case: str) -> None:
    def body(rank: int) -> Any:
        session = _two(rank)
        encode = repair.encode

        def hostile(captures: Any) -> Any:
            value, storages = encode(captures)
            HOSTILE[case](value)
            return value, storages

        allocated: list[int] = []
        with mock.patch.object(repair, "encode", hostile if rank == 0 else encode):
            host_empty = session.memory.host_empty

            def counted(shape: Any, dtype: Any) -> Any:
                allocated.append(shape[0])
                return host_empty(shape, dtype)

            session.copies.start._host_empty = session.copies.update._host_empty = counted
            for slot in (session.copies.start, session.copies.update):
                slot._copies.clear()
            if rank == 0:
                session._recovering = False
                session.copies.start.step = -1
                reach(session)
                allocated.clear()
            result = _repaired(session, rank)
        return *result, allocated

    (_, _, _, _), (failures, seconds, values, allocated) = ranks(body)
    assert values == [1.0, 1.0, 1.0]
    assert (len(failures), allocated) == (3, [])
    assert seconds < 4


def test_a_message_that_is_none_of_ours_is_refused() -> None:
    def body(rank: int) -> Any:
        session = _two(rank, timeout=1.0)
        if rank == 0:
            peer = link.Link(1, dist.group.WORLD, 1.0)
            peer.recv(wire.Request)
            peer._run(dist.isend, torch.full((wire.HEADER_BYTES,), 65, dtype=torch.uint8))
            return peer.recv(wire.Answer).refused
        return _repaired(session, rank)

    refused, (failures, seconds, _) = ranks(body)
    assert refused == "what arrived is not a message of this protocol"
    assert seconds < 4
    assert all("what arrived is not a message of this protocol" in line for line in failures)


# ---- handles -----------------------------------------------------------------------------------------------------------


def test_a_handle_needs_a_state_that_moves(make_module: Callable[..., Any]) -> None:
    make_module("plain_home", x=1, y=2)
    states = [
        StateSpec("x", Location.parse("plain_home:x"), Policy.RESET),
        StateSpec("y", Location.parse("plain_home:y"), Policy.REPLICATE),
    ]
    session = started(*states)
    with pytest.raises(StateError, match="state 'x': states of policy 'reset' are not moved between ranks"):
        session.handle("x", 1)
    with pytest.raises(KeyError, match="no state 'z' is tracked"):
        session.handle("z", 1)
    with pytest.raises(RepairError, match="there is no default process group"):
        session.handle("y", 1).send(1, None)


def test_a_handle_does_not_take_a_generator_that_was_another_one() -> None:
    def body(rank: int) -> Any:
        put("own", random.Random(rank))
        session = started(spec("own", "snapshot"))
        reach(session)
        dist.barrier()
        handle = session.handle("own", R)
        before = get("own").getstate()
        text, _ = failure(lambda: handle.recv(0, dist.group.WORLD) if rank else handle.send(1, dist.group.WORLD))
        return text, get("own").getstate() == before

    for text, unchanged in ranks(body):
        assert "its copy of step 3 was another one than on rank 1" in text
        assert unchanged


def test_a_failed_handle_leaves_state_and_own_copy() -> None:
    def body(rank: int) -> Any:
        put("bias", torch.full((2,), float(rank)))
        session = started(spec("bias"))
        reach(session)
        if rank == 0:
            lose_copies(session)
            session.copies.start.step = -1
        handle = session.handle("bias", R)
        text, _ = failure(lambda: handle.recv(0, dist.group.WORLD) if rank else handle.send(1, dist.group.WORLD))
        return text, get("bias").tolist(), session.copies.source(session.registry["bias"].spec, R, False) is not None

    source, destination = ranks(body)
    assert destination == [
        "FORCE STOP: state 'bias' was not moved: it has no copy of step 4 either",
        [1.0, 1.0],
        True,
    ]
    assert source[0] == destination[0]


def test_ranks_outside_the_group_are_refused() -> None:
    def body(rank: int) -> Any:
        session = _two(rank)
        with mock.patch.object(repair.Exchange, "check"):
            return failure(lambda: session.handle("bias", R).recv(5, dist.group.WORLD))[0]

    assert ranks(body)[0] == "FORCE STOP: rank 5 is not in the group [0, 1]"


# ---- notices -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def noticing(store: Any, rank: int) -> notices.Notices:
    return notices.Notices(lambda: notices.DefaultStore(store, rank, 2))


def test_notices_say_protocol_catalogue_and_states(store: Any) -> None:
    registry = Registry([spec("bias")])
    mine, theirs = noticing(store, 0), noticing(store, 1)
    assert theirs.problem_with(0, registry, 0) == "rank 0 does not run the plugin"
    mine.publish(registry)
    notice = json.loads(store.get("mindspeed-recovery/peer/0"))
    assert notice == {"protocol": 1, "catalogue": notices.catalogue_digest(registry), "states": ["bias"]}
    assert theirs.problem_with(0, registry, 0) == ""
    assert "another catalogue" in theirs.problem_with(0, Registry([spec("bias", settled="after-update")]), 0)
    store.set("mindspeed-recovery/peer/0", json.dumps(notice | {"protocol": 2}))
    assert theirs.problem_with(0, registry, 0) == "rank 0 has another protocol: 2 there, 1 here"
    for nonsense in ("", "[1", "[]", "7"):
        store.set("mindspeed-recovery/peer/0", nonsense)
        assert theirs.problem_with(0, registry, 0) == "rank 0 does not run the plugin"


def test_a_session_that_is_closed_takes_its_notice_back(store: Any) -> None:
    put("bias", 1)
    session = started(spec("bias"))
    session._notices = noticing(store, 0)
    session._publish()
    assert noticing(store, 1).problem_with(0, session.registry, 0) == ""
    session.close()
    assert noticing(store, 1).problem_with(0, session.registry, 0) == "rank 0 does not run the plugin"


def test_notices_are_given_again_to_a_new_store(store: Any) -> None:
    stores = [store]
    mine = notices.Notices(lambda: notices.DefaultStore(stores[-1], 0, 2))
    registry = Registry([spec("bias")])
    mine.publish(registry)
    stores.append(dist.HashStore())
    mine.publish(registry)
    assert stores[1].check(["mindspeed-recovery/peer/0"])


def test_catalogue_digest_does_not_depend_on_order_or_words() -> None:
    first, second = spec("a"), spec("b")
    digest = notices.catalogue_digest(Registry([first, second]))
    assert notices.catalogue_digest(Registry([second, dataclasses.replace(first, why="x", source="y")])) == digest
    assert notices.catalogue_digest(Registry([first])) != digest


def test_digests_are_compared_at_the_last_step_that_both_have(store: Any) -> None:
    session, ranks_ = started(), [noticing(store, rank) for rank in range(2)]
    del session

    def publish(rank: int, step: int, value: Any) -> None:
        put("own", value)
        registry = Registry([spec("own", "snapshot")])
        session = Session(registry)
        session.begin_step(step + 1)
        copy = session.copies.start.get("own", step + 1)
        ranks_[rank].publish_digests(step, {"own": copy})

    assert ranks_[1].not_equal("own", 0) == "no digests of one step are known of ranks 1 and 0"
    publish(0, 50, 5)
    publish(1, 50, 5)
    assert ranks_[1].not_equal("own", 0) == ""
    publish(0, 100, 6)  # rank 1 has died before
    assert ranks_[1].not_equal("own", 0) == ""
    publish(1, 100, 7)
    assert ranks_[1].not_equal("own", 0) == "its copy of step 100 was another one than on rank 1"
    assert ranks_[1].not_equal("unknown", 0) != ""


def test_digests_are_published_in_the_first_step_and_then_now_and_then() -> None:
    published: list[int] = []
    put("own", 1)
    session = started(spec("own", "snapshot"))
    with mock.patch.object(
        session._notices, "publish_digests", lambda step, copies: published.append((step, list(copies)))
    ):
        for step in range(40, 102):
            session.begin_step(step)
            session.before_update(step)
        session.stop()
        session.before_rollback(101)
        session.after_rollback()
        session.begin_step(102)
        session.before_update(102)
    assert published == [(39, ["own"]), (49, ["own"]), (99, ["own"]), (101, ["own"])]


def test_a_store_that_fails_does_not_end_training() -> None:
    put("own", 1)
    session = started(spec("own", "snapshot"))
    with mock.patch.object(session._notices, "publish_digests", side_effect=OSError("no store")) as publish:
        session.begin_step(1)
        session.before_update(1)
        session.begin_step(2)
    assert publish.call_count == 1
    assert session.copies.start.get("own", 2) is not None
