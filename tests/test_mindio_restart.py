# SPDX-License-Identifier: Apache-2.0
"""Ranks that die under MindIO TFT and are started again ("ARF"), and repairs with more than one type of optimizer.

The tests stand in for what a session sends after a repair (`mindio_agent.Exchange`): these are about everything around it.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_mindio import NEITHER, Result, Run, fault, run  # noqa: F401

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.notices import DefaultStore
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.frameworks import megatron_loop
from mindspeed_recovery.runtimes.mindio.agreement import Agreement
from mindspeed_recovery.runtimes.mindio.plan import read_plan

pytestmark = pytest.mark.timeout(120)
AGENT = {"agent": True, "world_size": 2}
FOUR = {"agent": True, "world_size": 4}
Arf = Callable[..., Result]


def die(step: int, at: str, rank: int = 1, **more: Any) -> dict[str, Any]:
    return fault("die", step, at, rank=rank, **more)


@pytest.fixture
def arf(run: Run) -> Arf:  # noqa: F811
    """Run a job whose dead ranks are started again; with the plugin, and states that move after a repair, unless told."""

    def arf(*faults: dict[str, Any], world: int = 2, again: list[bool] | None = None, **settings: Any) -> Result:
        plugin = settings.pop("plugin", [True] * world)
        job = (AGENT if world == 2 else FOUR) | {"plugin_again": again or plugin}
        return run(*faults, job=job, plugin=plugin, **{"exchange": "states"} | settings)

    return arf


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> Any:  # noqa: F811
    return run(plugin=NEITHER, job=AGENT).outcome()


@pytest.fixture(scope="module")
def undisturbed_four(run: Run) -> Any:  # noqa: F811
    return run(plugin=[False] * 4, job=FOUR).outcome()


def reports(result: Result, rank: int) -> list[dict[str, Any]]:
    return result.left(rank)["reports"]


# ---- one rank is started again -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "at"), [(1, "forward2"), (0, "forward2"), (1, "log-late"), (0, "log-reduced")])
def test_run_with_a_restarted_rank_equals_the_undisturbed_one(arf: Arf, undisturbed: Any, rank: int, at: str) -> None:
    result = arf(die(3, at, rank, delay=0.2))
    assert result.outcome() == undisturbed
    assert not any(report["failures"] for r in range(2) for report in reports(result, r))


def test_without_the_plugin_a_restarted_rank_is_silently_wrong(arf: Arf, undisturbed: Any) -> None:
    digests, log = arf(die(3, "forward2"), plugin=NEITHER).outcome()
    assert digests != undisturbed[0]
    assert log != undisturbed[1]


def test_restarted_rank_joins_at_its_repair_with_nothing_in_quarantine(arf: Arf) -> None:
    result = arf(die(3, "forward2"))
    assert [call[0] for call in result.left(1)["calls"]] == ["rebuild", "repair", "rollback"]
    assert [call[0] for call in result.left(0)["calls"]] == ["stop", "clean", "rebuild", "repair", "rollback"]
    assert ["clean" in reports(result, rank)[0]["milliseconds"] for rank in range(2)] == [True, False]


def test_log_line_is_missing_alike_on_every_rank_if_a_restarted_one_has_lost_its_sums(
    arf: Arf, undisturbed: Any
) -> None:
    result = arf(die(3, "updated", delay=0.2))
    digests, log = result.outcome()
    assert (digests, log) == (undisturbed[0], [point for point in undisturbed[1] if point[0] != 3])
    for rank in range(2):
        assert "the log line of step 3: not every rank has its sums any more" in result.log(rank)
    assert arf(die(3, "updated", delay=0.2), plugin=NEITHER).codes == [2, 2]  # the replay's collective


def test_process_knows_whether_it_kept_the_sums_of_a_log_line(make_module: Any) -> None:
    module = make_module("sums_of_a_line", TRACKER={})
    location = Location.parse("sums_of_a_line:TRACKER")
    spec = StateSpec("tracker", location, Policy.RESET, quarantine=True, replay=True, source="the test")
    session = Session(Registry([spec]))
    session.start()
    session.stop()
    assert session.sums(3) is None  # as in a process that was started again
    session.before_save()
    session.before_update(3)
    assert session.sums(3) is False  # there was nothing, and that is known
    module.TRACKER["load"] = torch.ones(2)
    session.before_update(4)
    assert session.sums(4) is True
    assert session.sums(3) is None
    session.close()


def lost_generator(result: Result) -> bool:
    """Only the generator of rank 1 is not exact: digests that would show it to be that of rank 0 are not in the store."""
    first, other = (reports(result, rank)[0] for rank in range(2))
    return not first["failures"] and [text.split(":")[0] for text in other["failures"]] == ["rng"]


def test_links_that_are_built_anew_over_another_store_do_not_lose_the_vote(arf: Arf) -> None:
    later = fault("link", 5, "log-late", life=1, entry=2, delay=0.3)
    result = arf(die(3, "forward2"), later, new_store=True)
    assert result.codes == [0, 0], result.tail()
    assert lost_generator(result)
    assert result.left(0)["rolled_back"] == [2, 5]
    assert "decides for itself" not in result.log(0) + result.log(1)


def test_state_that_nobody_sends_is_named_and_training_does_not_go_on_without_it(arf: Arf) -> None:
    result = arf(die(3, "forward2"), exchange="nothing")
    assert result.codes == [2, 2], result.tail()
    assert "not exact: bias: no copy of the end of step 2" in result.log(1)
    assert "not exact" not in result.log(0)


def test_state_that_nobody_sends_is_reported_where_training_may_go_on(arf: Arf) -> None:
    result = arf(die(3, "forward2"), exchange="nothing", on_missing="warn")
    assert result.codes == [0, 0], result.tail()
    assert [len(reports(result, rank)[0]["failures"]) for rank in range(2)] == [0, 2]  # bias and generator


def test_checkpoint_is_loaded_where_there_is_no_replica(arf: Arf, undisturbed: Any) -> None:
    result = arf(die(4, "forward2"), replicas=False, save_at=2)
    assert result.outcome() == undisturbed
    assert result.left(1)["rolled_back"] == [2]


def test_start_of_a_restarted_rank_uses_no_collective(arf: Arf) -> None:
    assert arf(die(3, "forward2")).left(1)["collectives"] == []
    assert arf(die(3, "forward2"), meets_at_start=True).left(1)["collectives"] == ["barrier"]  # it is seen


# ---- peers ---------------------------------------------------------------------------------------------------------


def test_rank_that_comes_back_without_the_plugin_does_not_hang_the_others(arf: Arf) -> None:
    result = arf(die(3, "forward2"), again=[True, False], timeout=1)
    assert result.codes == [0, 0], result.tail()
    assert "rank 1 does not run the plugin: no states move between it and rank 0" in result.log(0)
    assert "1 of 2 ranks voted within 1 s" in result.log(0)


def test_rank_that_comes_back_with_the_plugin_is_repaired(arf: Arf) -> None:
    result = arf(die(3, "forward2"), plugin=[True, False], again=[True, True], timeout=1)
    assert result.codes == [0, 0], result.tail()
    assert lost_generator(result)


def test_rank_with_another_catalogue_is_sent_nothing(arf: Arf) -> None:
    result = arf(fault("uce", 3, "forward2", "weight", "tracker"), untracked_on_1=["counts"])
    assert result.codes == [0, 0], result.tail()
    for rank in range(2):
        assert f"rank {1 - rank} tracks other states (another catalogue or version)" in result.log(rank)
        assert "exchange:" not in result.log(rank)


# ---- afterwards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "later",
    [
        die(5, "forward1", life=1, entry=2),
        die(4, "forward1", rank=0, entry=2),
        fault("link", 3, "forward2", life=1, entry=2),
        fault("uce", 5, "forward2", "tracker", "weight", "bias", life=1, entry=2),
        fault("unsafe", 3, "forward1", "tracker", life=1, entry=2),
    ],
    ids=["dies-again", "other-rank-dies", "link-before-its-first-update", "memory", "unsafe-before-its-first-update"],
)
def test_fault_after_a_restart_is_recovered(arf: Arf, undisturbed: Any, later: dict[str, Any]) -> None:
    result = arf(die(3, "forward2"), later)
    assert result.outcome() == undisturbed
    assert "decides for itself" not in result.log(0) + result.log(1)


def test_rank_that_dies_after_a_recovery_in_place_is_recovered(arf: Arf, undisturbed: Any) -> None:
    first = fault("uce", 2, "forward2", "tracker", "weight", "bias")
    assert arf(first, die(4, "log-late", entry=2, delay=0.2)).outcome() == undisturbed


def test_unsafe_data_of_nobody_on_a_restarted_rank_ends_in_a_dump(arf: Arf) -> None:
    result = arf(die(3, "forward2"), fault("unsafe", 4, "forward1", "weight", life=1, entry=2))
    assert result.codes == [2, 2]
    assert "that nobody rebuilds: the model's weight" in result.log(1)
    assert sorted(path.name for path in result.folder.glob("dump.*")) == ["dump.0", "dump.1"]


# ---- two types of optimizers ---------------------------------------------------------------------------------------

DENSE, EXPERT = 0, 1


def exchanged(result: Result, rank: int) -> list[str]:
    return [line.partition("pairs ")[2] for line in result.log(rank).splitlines() if line.startswith("exchange: step")]


@pytest.mark.parametrize(
    ("faults", "settings", "pairs"),
    [
        ([die(3, "forward2")], {}, {1: ((2, 1, DENSE), (3, 1, EXPERT)), 2: ((2, 1, DENSE),), 3: ((3, 1, EXPERT),)}),
        (
            [fault("uce", 3, "forward2", "weight", "expert", "tracker", "bias")],
            {"copies": 2},
            {1: ((3, 1, DENSE), (3, 1, EXPERT)), 3: ((3, 1, DENSE), (3, 1, EXPERT))},
        ),
        (
            [die(3, "forward2", rank=0), die(3, "forward2", rank=1)],
            {},
            {
                0: ((2, 0, DENSE), (2, 0, EXPERT)),
                1: ((2, 1, DENSE), (3, 1, EXPERT)),
                2: ((2, 0, DENSE), (2, 0, EXPERT), (2, 1, DENSE)),
                3: ((3, 1, EXPERT),),
            },
        ),
    ],
    ids=["from-two-sources", "both-types-from-one-source", "two-ranks-die"],
)
def test_ranks_are_repaired_for_each_type_of_optimizer(
    arf: Arf, undisturbed_four: Any, faults: list[Any], settings: dict[str, Any], pairs: dict[int, Any]
) -> None:
    result = arf(*faults, world=4, **settings)
    assert result.outcome() == undisturbed_four
    for rank in range(4):
        told = exchanged(result, rank)
        assert len(told) == (rank in pairs)
        for line in told:
            assert line.startswith(f"{pairs[rank]}, receives {all(pair[1] == rank for pair in pairs[rank])}")


def test_both_holders_of_an_expert_lost_and_no_checkpoint_ends_the_job(arf: Arf) -> None:
    assert arf(die(3, "forward2", rank=0), die(3, "forward2", rank=2), world=4).codes == [2] * 4


RT = types.SimpleNamespace(**{
    name: types.SimpleNamespace(value=value) for value, name in enumerate(("RT_SEND", "RT_LOAD_CKPT", "RT_LOAD_REBUILD"))
})  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "info", "pairs", "receives"),
    [
        (1, {"type": [0, 1], "src": [3, 3], "dst": [1, 1]}, ((3, 1, 0), (3, 1, 1)), True),
        (3, {"type": [0, 1], "src": [3, 3], "dst": [1, 1]}, ((3, 1, 0), (3, 1, 1)), False),
        (2, {"type": [0, 0, 1], "src": [2, 2, 2], "dst": [0, 1, 0]}, ((2, 0, 0), (2, 1, 0), (2, 0, 1)), False),
        (1, {"type": [0, 0], "src": [2, 3], "dst": [0, 1]}, ((3, 1, 0),), True),  # a list of all ranks
        (1, {"type": 0, "src": [0], "dst": [1]}, ((0, 1, 0),), True),  # the default of the adaptor's own signature
        (1, {"type": [0], "src": [1], "dst": [1], "repair_type": 1}, (), False),  # loads the checkpoint
    ],
)
def test_lists_of_a_repair_are_read_in_parallel(rank: int, info: Any, pairs: Any, receives: bool) -> None:
    handler = types.SimpleNamespace(_repair_step=2, _repair_info=info)
    plan = read_plan(types.SimpleNamespace(save_handler=handler, rank_=rank, RepairType=RT))  # type: ignore[arg-type]
    assert (plan.pairs, plan.receives, plan.loads_checkpoint) == (pairs, receives, info.get("repair_type") == 1)


# ---- elastic training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["plugin", "adaptor"])
def test_elastic_training_is_refused_with_one_message_and_trains_as_without_the_plugin(
    run: Run,  # noqa: F811
    first: str,
) -> None:
    result = run(fault("link", 3, "forward1"), fault("link", 4, "forward1", entry=2), first=first, elastic=True)
    assert result.codes == [0, 0], result.tail()
    for rank in range(2):
        assert result.log(rank).count("elastic training (--enable-elastic-training)") == 1
        assert result.left(rank)["reports"] == []


# ---- the vote ------------------------------------------------------------------------------------------------------


def vote(*agreements: Agreement, recovery: str = "1") -> list[Any]:
    answers: list[Any] = [None] * len(agreements)
    threads = [
        threading.Thread(target=lambda i=i: answers.__setitem__(i, agreements[i].vote(recovery, {"owed": True})))
        for i in range(len(agreements))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


@pytest.fixture
def agreement() -> Callable[..., Agreement]:
    """``agreement(store, rank)``: a process of a job with two ranks."""

    def make(store: Any, rank: int, timeout: float = 20) -> Agreement:
        return Agreement(timeout, lambda: DefaultStore(stores[0] if store is None else store, rank, 2))

    stores: list[Any] = []
    make.stores = stores  # type: ignore[attr-defined]
    return make


def test_restarted_rank_votes_at_once_and_is_counted_once(agreement: Any) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    first = [agreement(store, rank) for rank in range(2)]
    for process in first:
        process.announce()
    again = agreement(store, 1)
    assert vote(first[0], again) == [{"owed": 2}] * 2
    again.announce()
    agreement(store, 1).announce()
    assert store.add("mindspeed-recovery/tft/present", 0) == 2


def test_restart_does_not_make_up_for_a_rank_without_the_plugin(agreement: Any) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    for _ in range(2):
        process = agreement(store, 1)
        process.announce()
    assert (
        process.vote("1", {"owed": True}) is None
    )  # and does not wait for the other one, which never announced itself


def test_vote_in_a_new_store_waits_for_those_who_come_later(agreement: Any) -> None:
    import torch.distributed as dist

    agreement.stores[:] = [dist.HashStore()]
    processes = [agreement(None, rank) for rank in range(2)]
    for process in processes:
        process.announce()
    agreement.stores[:] = [dist.HashStore()]
    assert vote(*processes) == [{"owed": 2}] * 2


def test_process_that_has_lost_count_of_the_votes_reads_no_old_outcome(agreement: Any) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    first = [agreement(store, rank, 1) for rank in range(2)]
    for process in first:
        process.announce()
    assert vote(*first) == [{"owed": 2}] * 2
    assert vote(first[0], agreement(store, 1, 1)) == [None] * 2  # the same recovery once more, and one process is new


def test_rank_that_was_given_up_is_given_up_by_all(agreement: Any) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    assert agreement(store, 0, 0.1).words("1", [1]) == {1: None}
    late = agreement(store, 1, 0.1)
    assert not late.introduce("1", "states")
    assert agreement(store, 0, 0.1).words("1", [1]) == {1: None}
    assert late.introduce("2", "states")
    assert agreement(store, 0, 0.1).words("2", [1]) == {1: "states"}


# ---- MindSpeed-LLM's entry -----------------------------------------------------------------------------------------


def test_states_are_adopted_before_a_restarted_process_waits_for_its_repair(
    make_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    arguments = types.SimpleNamespace(enable_recovery_safe_globals=True)

    def train(forward_step_func: Any, model: Any, optimizer: Any, config: Any) -> None:
        raise AssertionError("a restarted process has not been repaired yet")

    def tft_train(*args: Any) -> Any:
        return list(begun)

    make_module("megatron.training.training", get_args=lambda: arguments, train=train)
    adaptor = make_module("mindspeed_llm.core.high_availability", tft_train=tft_train)
    monkeypatch.setattr(megatron_loop, "_loop", None)
    monkeypatch.setattr(megatron_loop, "_loops", {})
    monkeypatch.setattr(megatron_loop, "_begin", lambda train, arguments: begun.append(dict(arguments)))
    train.__module__ = "megatron.training.training"
    wrapped = megatron_loop.recovery_train_wrapper(train)
    # Somebody has put a wrapper around ours that tells no parameters.
    sys.modules["megatron.training.training"].train = lambda *args: wrapped(*args)  # type: ignore[attr-defined]
    leave = megatron_loop.follow_adaptor()
    try:
        assert megatron_loop.follow_adaptor() is leave
        assert adaptor.tft_train("step", "model", "optimizer") == [
            {"forward_step_func": "step", "model": "model", "optimizer": "optimizer"}
        ]
        arguments.enable_recovery_safe_globals = False
        assert len(adaptor.tft_train("step", "model", "optimizer")) == 1
    finally:
        leave()
    assert adaptor.tft_train is tft_train
