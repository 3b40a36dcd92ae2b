# SPDX-License-Identifier: Apache-2.0
"""Whole recoveries through the stock ``pretrain()`` of Megatron: equal to the uninterrupted run, bit for bit."""

from __future__ import annotations

import re
import types
from contextlib import nullcontext
from typing import Any

import pytest
from clusters import Run, StockCluster
from equal import ON, assert_equal, console, faults
from wandb_runs import Offline

from mindspeed_recovery.frameworks import megatron_job, megatron_loop
from mindspeed_recovery.frameworks.megatron_reentry import RecordedData, RecordedIterator
from mindspeed_recovery.testing.compare import scalars
from mindspeed_recovery.tools import report as report_tool

pytestmark = pytest.mark.timeout(120)


def check(stock: StockCluster, layout: str, *specs: str, options: tuple[str, ...] = ()) -> Run:
    run, baseline = stock.run(layout, ON, *options, *faults(*specs)), stock.baseline(layout, *options)
    assert_equal(run, baseline)
    assert set(console(baseline)) <= set(console(run)), "a log line may be written again, but says the same"
    for rank in (0, 1):
        reports = run.reports(rank)
        assert len(reports) == len(specs), "every fault has caused a recovery"
        for report in reports:
            assert not [outcome for outcome in report["outcomes"].values() if outcome["error"]], report
    return run


@pytest.mark.parametrize(
    ("at", "rank"),
    [("forward", 1), ("router", 0), ("backward", 1), ("optimizer", 0), ("optimizer", 1), ("log", 0), ("log", 1)],
)
def test_fault_at_any_point_of_a_step_is_recovered(stock, at, rank):
    check(stock, "overlap", f"uce@rank={rank},step=4,at={at}")


@pytest.mark.parametrize(("rank", "visit"), [(0, 1), (1, 4)])
def test_interrupted_evaluation_is_made_up_for(stock, rank, visit):
    check(stock, "overlap", f"uce@rank={rank},step=3,at=eval,visit={visit}")


@pytest.mark.parametrize(
    ("layout", "at"),
    [
        ("pp2", "backward"),
        pytest.param("ep2", "backward", marks=pytest.mark.full),
        pytest.param("ep2", "log", marks=pytest.mark.full),
    ],
)
def test_other_layouts(stock, layout, at):
    check(stock, layout, f"uce@rank=1,step=4,at={at}")


@pytest.mark.parametrize(("mtp", "entries"), [(0, 14), (1, 15)])
def test_stage_without_moe_holds_the_trackers_of_the_other(stock, mtp, entries):
    """What the next log line reduces over the pipeline has the same keys and shapes on both stages."""
    layers = ("--num-layers", "14", "--moe-layer-freq", "([0]*7+[1]*7)", "--mtp-num-layers", str(mtp))
    run = stock.run("pp2", ON, *layers, *faults("uce@rank=1,step=4,at=backward"), prepare="stock_server:tell_trackers")
    assert_equal(run, stock.baseline("pp2", *layers))
    told = [re.findall(r"^trackers: (.*)$", run.log(rank), re.MULTILINE) for rank in (0, 1)]
    assert told[0] == told[1]
    assert len(told[0]) == 1
    assert told[0][0].count(f"({entries},)") >= 2, "the load balancing and the z loss, by layer"


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_second_fault_in_the_first_recomputed_step(stock, at):
    check(stock, "overlap", f"uce@rank=1,step=4,at={at}", f"uce@rank=1,step=4,at={at}")


def test_sums_of_the_console_line_survive(stock):
    check(stock, "overlap", "uce@rank=1,step=4,at=backward", options=("--log-interval", "3"))


def test_interrupted_checkpoint_is_made_up_for(stock, tmp_path):
    saving = ("--ckpt-format", "torch", "--save-interval", "3")
    prepare = {"prepare": "stock_server:fail_while_saving", "rank": 1, "step": 3}
    run = stock.run("dp2", ON, *saving, "--save", str(tmp_path), **prepare)
    assert_equal(run, stock.baseline("dp2"))
    for rank in (0, 1):
        assert [report["step"] for report in run.reports(rank)] == [3]
    assert run.log(0).count("successfully saved checkpoint from iteration       3") == 2
    assert "successfully saved checkpoint from iteration       6" in run.log(0)


def test_state_of_the_jobs_own_is_read_from_its_file(stock, tmp_path):
    file = tmp_path / "my_states.toml"
    file.write_text(
        '[[state]]\nname = "my-batches"\nwhy = "counted twice"\npolicy = "snapshot"\nlocation = "stock_server:COUNTS"\n'
    )

    def batches(*options: str) -> int:
        run = stock.run("overlap", *options, prepare="stock_server:count_batches")
        assert run.ended_well, run.tail()
        return max(map(int, re.findall(r"^batches: (\d+)$", run.log(1), re.MULTILINE)))

    undisturbed, fault = batches(), faults("uce@rank=1,step=4,at=backward")
    assert batches(ON, *fault, "--recovery-patches", str(file)) == undisturbed
    assert batches(ON, *fault) > undisturbed


def test_interrupted_decision_to_exit_is_made_up_for(stock):
    run = stock.run("overlap", ON, "--exit-interval", "4", *faults("uce@rank=0,step=4,at=log"))
    assert run.ended_well, run.tail()
    assert "exiting program at iteration 4" in run.log(0)
    assert not any("iteration        5/" in line for line in console(run))


def test_recovery_is_told_where_people_look(stock):
    run = check(stock, "overlap", "uce@rank=1,step=4,at=backward", "uce@rank=1,step=4,at=backward")
    told = {key: bits for key, bits in scalars(run.folder / "tb").items() if key[0].startswith("recovery/")}
    assert told["recovery/marker", 3] == told["recovery/retry-1/marker", 3] == [0x3F800000]
    assert all(len(bits) == 1 for bits in told.values()), "each of them once"
    [recovered] = report_tool.read(run.folder / "tb")
    assert [(r["step"], r["cause"], r["ranks"], r["retries"], r["exact"]) for r in recovered.recoveries] == [
        (3, "memory fault", [1], 0, True),
        (3, "memory fault", [1], 1, True),
    ]
    for recovery in recovered.recoveries:
        assert recovery["bytes"] > 1000
        assert recovery["states"]["restored"] > 0
        assert list(recovery["phases"]) == ["stop", "clean", "repair", "rollback"]
    lines = [line for line in run.log(0).splitlines() if line.startswith("INFO:mindspeed_recovery:")]
    assert [re.sub(r" after.*", "", line) for line in lines] == [
        "INFO:mindspeed_recovery:recovery 1",
        "INFO:mindspeed_recovery:recovery 2",
    ]
    assert "INFO:mindspeed_recovery" not in run.log(1)


def test_run_without_the_flag_knows_nothing_of_recoveries(stock):
    points = scalars(stock.baseline("overlap").folder / "tb")
    assert not [tag for tag, _ in points if tag.startswith("recovery/")]


def test_wandb_has_the_rows_of_the_undisturbed_run(stock, tmp_path):
    pytest.importorskip("wandb", reason="pip install wandb")

    def rows(name: str, *options: str) -> list[dict[str, Any]]:
        naming = ("--wandb-project", "test", "--wandb-exp-name", name, "--wandb-save-dir", str(tmp_path))
        environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_RUN_ID": name, "WANDB_CONSOLE": "off"}
        run = stock.run("overlap", *naming, *options, prepare="stock_server:set_environment", **environment)
        assert run.ended_well, run.tail()
        times = ("_timestamp", "_runtime", "iteration-time", "throughput")
        return [
            {key: value for key, value in row.items() if key not in times and not key.startswith("recovery/")}
            for row in Offline(tmp_path).rows(name)
        ]

    undisturbed = rows("undisturbed")
    assert [row["_step"] for row in undisturbed] == [1, 2, 3, 4, 5, 6]
    recovered = rows("recovered", ON, *faults("uce@rank=1,step=3,at=log", "uce@rank=0,step=5,at=backward"))
    assert recovered == undisturbed
    assert all("lm loss" in row and "load_balancing_loss" in row for row in recovered)


def test_flag_without_a_runtime_is_one_warning_and_changes_nothing(stock):
    run = stock.run("overlap", ON, prepare="stock_server:forget_the_device")
    assert_equal(run, stock.baseline("overlap"))
    assert run.log(0).count("has no effect: no recovery runtime is here") == 1
    assert "has no effect" not in run.log(1)


def test_flag_alone_changes_nothing(stock):
    run = check(stock, "overlap")
    assert console(run) == console(stock.baseline("overlap"))
    assert "states tracked" in run.log(0)


def test_without_the_flag_a_fault_ends_the_job(stock):
    run = stock.run("overlap", *faults("uce@rank=1,step=4,at=forward"))
    assert run.codes[1] not in (0, -9)
    assert "InjectedFault: UCE ERROR" in run.log(1)
    assert "mindspeed-recovery:" not in run.log(0)


def test_a_bug_in_the_script_is_not_a_fault(stock):
    run = stock.run("overlap", ON, *faults("uce@rank=1,step=4,at=forward,states=no-such-state"))
    assert run.codes[1] not in (0, -9)
    assert "no state is called 'no-such-state'" in run.log(1)


def test_retries_are_bounded(stock):
    run = stock.run("overlap", ON, "--recovery-max-retries", "0", *faults("uce@rank=1,step=4,at=forward"))
    assert all(code not in (0, -9) for code in run.codes)
    assert "step 4 failed 1 times; giving up" in run.log(1)


def test_drill_passes_and_changes_nothing(stock):
    run = stock.run("overlap", ON, "--recovery-drill", "4")
    assert_equal(run, stock.baseline("overlap"))
    assert re.search(r"recovery drill at step 4: [0-9]{2} states overwritten, .*: PASSED", run.log(0)), run.tail()


@pytest.mark.parametrize("state", ["moe-aux-loss-tracker", "router-expert-bias", "rerun-state-machine"])
def test_drill_names_the_state_that_is_not_tracked(stock, state):
    run = stock.run("overlap", ON, "--recovery-drill", "4", prepare="stock_server:leave_out", state=state)
    assert all(code not in (0, -9) for code in run.codes)
    assert re.search(rf"(?s)drill at step 4: .*FAILED.*'{state}' at \S+ differs and is not tracked", run.log(0)), (
        run.tail()
    )


# ---- parts ---------------------------------------------------------------------------------------------------------------


def recorded(batches: list[Any]) -> tuple[Any, list[int]]:
    step = [1]
    return RecordedIterator(iter(batches), lambda: step[0], nullcontext), step


def test_iterator_goes_back_to_the_first_batch_of_a_step():
    data, step = recorded(list("abcdef"))
    assert [next(data), next(data)] == ["a", "b"]
    step[0] = 2
    assert [next(data), next(data)] == ["c", "d"]
    data.go_back(2)
    data.go_back(2)
    assert next(data) == "c"
    data.go_back(1)
    assert [next(data) for _ in range(6)] == list("abcdef")
    with pytest.raises(StopIteration):
        next(data)


def test_iterator_keeps_only_the_last_steps():
    data, step = recorded(list("abcd"))
    next(data)
    step[0] = 2
    next(data)
    data.forget(2)
    data.go_back(1)
    assert [next(data), next(data)] == ["b", "c"]


def test_a_batch_that_training_changes_is_given_out_unchanged():
    data, _ = recorded([{"tokens": 1}])
    next(data)["tokens"] = "on the device"
    data.go_back(1)
    assert next(data) == {"tokens": 1}


class Outer:
    """As Megatron's RerunDataIterator holds a loader's iterator."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __next__(self) -> Any:
        return next(self.iterable)

    def advance(self) -> None: ...


def test_data_that_somebody_has_put_anew_is_recorded_too():
    outer = Outer(iter("abc"))
    data = RecordedData([outer, None], lambda: 1, nullcontext)
    assert next(outer) == "a"
    outer.iterable = iter("xyz")
    data.follow()
    assert [next(outer), next(outer)] == ["x", "y"]
    data.go_back(1)
    assert [next(outer) for _ in range(3)] == ["x", "y", "z"]
    data.release()


def test_function_that_was_taken_by_name_is_followed(make_module):
    def training_log() -> None: ...

    loop = make_module("megatron.training.training", training_log=training_log)
    adaptor = make_module("an_adaptor", training_log=training_log)
    megatron_loop.install_when_loaded()
    assert adaptor.training_log is loop.training_log is not training_log
    megatron_loop.uninstall()
    assert adaptor.training_log is loop.training_log is training_log


@pytest.fixture
def rolled_back():
    return []


@pytest.fixture
def foreign(rolled_back):
    chores = {"eval": lambda step: step % 3 == 0, "end": lambda step: True}
    return megatron_job._Foreign(None, None, lambda *_: None, lambda *call: rolled_back.append(call), chores, 0)


def test_what_is_owed_after_a_step_is_what_any_rank_had_not_done(foreign, rolled_back):
    foreign.mark("end", 2)
    assert foreign.unfinished(2) == {"eval": False, "end": False, "save": False}
    assert foreign.unfinished(3) == {"eval": True, "end": True, "save": False}
    foreign.mark("eval", 3)
    assert foreign.unfinished(3) == {"eval": False, "end": True, "save": False}
    foreign.rolled_back(3, {"eval": True, "end": True}, False)
    assert (foreign.marked("eval"), foreign.marked("end")) == (2, 2)
    assert rolled_back == [(3, [])]


def test_without_an_agreement_nothing_is_made_up_for_and_that_is_told(foreign, rolled_back):
    foreign.rolled_back(3, None, False)
    assert (foreign.marked("eval"), foreign.marked("end")) == (3, 3)
    assert rolled_back == [(3, ["eval", "end"])]


def test_loop_that_goes_its_own_way_owes_nothing():
    foreign = megatron_job._Foreign(None, None, lambda *_: None, lambda *_: None, {}, 0)
    assert foreign.unfinished(3) == {"eval": False, "end": False, "save": False}


def test_what_a_loop_does_unnoticed_is_not_owed(foreign):
    foreign._session = types.SimpleNamespace(begin_step=lambda step: None)
    foreign.mark("end", 3)
    foreign.begin_step(4)  # the evaluation was due after step 3, and nobody has called the wrapper
    assert foreign.unfinished(6) == {"eval": False, "end": True, "save": False}


@pytest.mark.parametrize("name", megatron_loop.wrappers())
def test_wrapping_twice_wraps_once(name):
    def function() -> None: ...

    factory = megatron_loop.wrappers()[name]
    wrapped = factory(function)
    assert wrapped is not function
    assert factory(wrapped) is wrapped
    assert factory is megatron_loop.wrappers()[name]
    assert factory.__name__.startswith("recovery_")
    assert factory.__name__.endswith("wrapper")
