# SPDX-License-Identifier: Apache-2.0
"""Whole recoveries through the stock ``pretrain()`` of Megatron: equal to the uninterrupted run, bit for bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from clusters import ROOT, Run
from wandb_runs import Offline

from mindspeed_recovery.frameworks import megatron_loop
from mindspeed_recovery.frameworks.megatron_reentry import RecordedIterator
from mindspeed_recovery.testing.compare import compare_scalars, compare_states, scalars
from mindspeed_recovery.tools import report as report_tool

pytestmark = pytest.mark.timeout(120)

ON = "--enable-recovery-safe-globals"
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
LAYOUTS = {
    "overlap": OVERLAP,
    "ep2": ["--expert-model-parallel-size", "2", *OVERLAP],
    "dp2": [],
    "pp2": ["--pipeline-model-parallel-size", "2", "--micro-batch-size", "4"],
}


class StockCluster:
    """A parent process that has imported Megatron and the example, and forks two ranks for each job."""

    def __init__(self, megatron: Path, folder: Path) -> None:
        self._folder, self._jobs = folder, 0
        self._baselines: dict[tuple[str, ...], Run] = {}
        environment = os.environ | {
            "PYTHONPATH": f"{megatron}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._log = (folder / "server.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "stock_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.strip() == "ready":
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the rank server ended:\n" + (self._folder / "server.log").read_text()[-4000:])
        return line

    def run(self, layout: str, *options: str, prepare: str = "", **settings: Any) -> Run:
        self._jobs += 1
        folder = self._folder / f"{self._jobs:03}"
        folder.mkdir()
        argv = [*LAYOUTS[layout], "--tensorboard-dir", f"{folder}/tb", "--save-final", f"{folder}/final", *options]
        job = {
            "argv": argv,
            "world_size": 2,
            "out": str(folder),
            "timeout": 60,
            "prepare": prepare,
            "options": settings,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Run(folder, json.loads(self._answer()))

    def baseline(self, layout: str, *options: str) -> Run:
        """The run without a fault and without the plugin."""
        key = (layout, *options)
        if key not in self._baselines:
            run = self.run(layout, *options)
            assert run.ended_well, run.tail()
            self._baselines[key] = run
        return self._baselines[key]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def stock(megatron, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockCluster]:
    cluster = StockCluster(megatron("0.19.2"), tmp_path_factory.mktemp("stock"))
    yield cluster
    cluster.close()


def console(run: Run) -> list[str]:
    """The log lines of a run, without times."""
    lines = []
    for line in run.log(1).splitlines():
        match = re.search(r"(iteration +\d+/.*consumed samples: +\d+ \|).*?per iteration \(ms\): [\d.]+ \|(.*)", line)
        if match:
            lines.append(match[1] + match[2])
        elif "validation loss at" in line:
            lines.append(line.strip())
    return lines


def assert_equal(run: Run, baseline: Run) -> None:
    assert run.ended_well, run.tail()
    scalars = compare_scalars(baseline.folder / "tb", run.folder / "tb")
    assert scalars.compared > 100
    assert scalars.identical, scalars.differences[:10]
    for rank in (0, 1):
        states = compare_states(f"{baseline.folder}/final.rank{rank}", f"{run.folder}/final.rank{rank}")
        assert states.identical, (rank, states.differences[:10])


def faults(*specs: str) -> list[str]:
    return [option for spec in specs for option in ("--fault", spec)]


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


@pytest.mark.parametrize("state", ["moe-aux-loss-tracker", "router-expert-bias"])
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
