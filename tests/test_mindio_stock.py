# SPDX-License-Identifier: Apache-2.0
"""Whole recoveries of Megatron's stock loop by a stand-in of MindIO TFT: equal to the uninterrupted run, bit for bit.

The job is the example as a user would write it; its ranks run under real controllers, processors and threads, with an
adaptor in either layout, registered before the plugin or after it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from clusters import Run, StockCluster
from equal import ON, assert_equal, console, differences, faults

pytestmark = pytest.mark.timeout(150)
full = pytest.mark.full


@dataclass(frozen=True)
class Case:
    """``steps``: what each recovery rolls back to, and whether it writes the log line of that step again."""

    layout: str
    adaptor: str
    first: str
    faults: tuple[str, ...]
    steps: tuple[tuple[int, bool], ...]
    options: tuple[str, ...] = ()

    @property
    def tft(self) -> dict[str, str]:
        return {"layout": self.adaptor, "first": self.first}


BEFORE, AFTER = ((3, False),), ((4, True),)
TRACKER = "states=moe-aux-loss-tracker"
CASES = {
    "tracker-hit": Case("dp2", "llm", "plugin", (f"uce@rank=1,step=4,at=router,{TRACKER}",), BEFORE),
    "rank-0-hit-in-backward": Case("dp2", "older", "adaptor", ("uce@rank=0,step=4,at=backward",), BEFORE),
    "nothing-hit": Case("dp2", "llm", "adaptor", ("uce@rank=1,step=4,at=backward,states=none",), BEFORE),
    "hit-inside-the-update": Case("bf16", "older", "plugin", ("uce@rank=1,step=4,at=update",), AFTER),
    "nothing-hit-inside-the-update": Case("dp2", "llm", "adaptor", ("uce@rank=0,step=4,at=update,states=none",), AFTER),
    "hit-between-update-and-log": Case("dp2", "older", "adaptor", ("uce@rank=1,step=4,at=optimizer",), AFTER),
    "tracker-hit-in-a-pipeline": Case("pp2dp2", "llm", "plugin", ("uce@rank=3,step=4,at=log",), AFTER),
    "experts-and-others-from-replicas": Case("ep2dp2", "older", "adaptor", ("uce@rank=2,step=4,at=router",), BEFORE),
    "pipeline-without-replicas": Case("pp2", "older", "plugin", ("link@rank=0,step=4,at=log",), AFTER),
    "pipeline-nothing-hit": Case("pp2", "llm", "adaptor", ("uce@rank=1,step=4,at=forward,states=none",), BEFORE),
    "overlap": Case("overlap", "llm", "adaptor", ("link@rank=1,step=4,at=backward",), BEFORE),
    "twice-in-one-step": Case("overlap", "older", "plugin", ("link@rank=1,step=4,at=forward",) * 2, BEFORE * 2),
    "interrupted-evaluation": Case("dp2", "llm", "adaptor", ("uce@rank=1,step=3,at=eval,visit=4",), ((3, False),)),
    "evaluation-not-begun": Case("dp2", "older", "plugin", ("uce@rank=0,step=3,at=log",), ((3, True),)),
    "sums-of-the-console-line": Case(
        "dp2", "llm", "adaptor", ("uce@rank=1,step=5,at=optimizer",), ((5, True),), ("--log-interval", "3")
    ),
}
ALWAYS = (
    "tracker-hit",
    "nothing-hit-inside-the-update",
    "hit-between-update-and-log",
    "tracker-hit-in-a-pipeline",
    "pipeline-without-replicas",
    "overlap",
    "interrupted-evaluation",
)
"""Both layouts, both orders, every kind of repair; the others only in the full run."""
POINTS = {"forward": 3, "router": 3, "backward": 3, "update": 4, "optimizer": 4, "log": 4}
HITS = ("uce", "all"), ("uce", "moe-aux-loss-tracker"), ("uce", "none"), ("link", "all")


def full_cases() -> dict[str, Case]:
    """Every point, rank and kind of hit in the layouts where a replica can repair it, all adaptors and orders in turn."""
    cases = {}
    adaptors = itertools.cycle(itertools.product(("llm", "older"), ("plugin", "adaptor")))
    worlds = {"dp2": (0, 1), "bf16": (0, 1), "pp2dp2": (0, 3), "ep2dp2": (1, 2)}
    for (layout, ranks), (at, step), (kind, states) in itertools.product(worlds.items(), POINTS.items(), HITS):
        if (layout in ("pp2dp2", "ep2dp2") and states == "moe-aux-loss-tracker") or (at == "update" and kind == "link"):
            continue  # an update does not communicate
        for rank in ranks:
            spec = f"{kind}@rank={rank},step=4,at={at},states={states}"
            adaptor, first = next(adaptors)
            name = f"{layout}-{at}-{rank}-{kind}-{states}-{adaptor}-{first}"
            cases[name] = Case(layout, adaptor, first, (spec,), ((step, step == 4),))
    return cases


def recover(stock: StockCluster, case: Case) -> tuple[Run, Run]:
    run = stock.run(case.layout, ON, *case.options, *faults(*case.faults), tft=case.tft)
    baseline = stock.baseline(case.layout, *case.options)
    assert_equal(run, baseline)
    assert set(console(baseline)) <= set(console(run))
    for rank in range(len(run.codes)):
        reports = run.reports(rank)
        assert tuple((report["step"], report["replayed"]) for report in reports) == case.steps
        for report in reports:
            assert not [outcome for outcome in report["outcomes"].values() if outcome["error"]], report
    return run, baseline


@pytest.mark.parametrize("name", [name if name in ALWAYS else pytest.param(name, marks=full) for name in CASES])
def test_recovered_run_equals_the_uninterrupted_one(stock, name):
    recover(stock, CASES[name])


@full
@pytest.mark.parametrize(("name", "case"), full_cases().items(), ids=list(full_cases()))
def test_every_fault_point_rank_and_adaptor(stock, name, case):
    recover(stock, case)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("tracker-hit", "nothing-hit-inside-the-update") else pytest.param(name, marks=full)
        for name in CASES
        if name not in ("evaluation-not-begun", "sums-of-the-console-line")  # without a difference in their steps
    ],
)
def test_without_the_plugin_the_same_fault_ends_the_job_or_changes_it(stock, name):
    case = CASES[name]
    run = stock.run(case.layout, *case.options, *faults(*case.faults), tft=case.tft)
    # Where a rank ends alone, the others may wait for it until they are ended too.
    assert not run.ended_well or differences(run, stock.baseline(case.layout, *case.options))
    logs = "".join(run.log(rank) for rank in range(len(run.codes)))
    assert "tft: rank" in logs and ("caught UCE ERROR" in logs or "caught HCCL OP RETRY FAILED" in logs)


def test_line_that_another_rank_has_finished_is_written_again_with_its_groups(stock):
    prepare = {"prepare": "stock_server:fail_after_the_metrics", "rank": 1, "step": 4}
    run = stock.run("dp2", ON, tft=CASES["tracker-hit"].tft, **prepare)
    assert_equal(run, stock.baseline("dp2"))
    assert [(report["step"], report["replayed"]) for report in run.reports(0)] == [(4, True)]


@pytest.mark.parametrize("first", ["plugin", pytest.param("adaptor", marks=full)])
def test_without_a_fault_nothing_changes(stock, first):
    run = stock.run("dp2", ON, tft={"layout": "llm", "first": first})
    assert_equal(run, stock.baseline("dp2"))
    assert console(run) == console(stock.baseline("dp2"))
    assert "states tracked" in run.log(0)


def checkpoints(folder, every):
    return "--ckpt-format", "torch", "--save", str(folder), "--load", str(folder), "--save-interval", str(every)


def test_checkpoint_is_loaded_where_no_replica_is(stock, tmp_path):
    options = *checkpoints(tmp_path, 2), *faults("uce@rank=1,step=6,at=forward")
    run = stock.run("pp2", ON, *options, tft=CASES["overlap"].tft)
    assert run.ended_well, run.tail()
    assert_equal(run, stock.baseline("pp2"))
    for rank in (0, 1):
        (report,) = run.reports(rank)
        assert (report["step"], report["from_checkpoint"]) == (4, True)
        assert not [outcome for outcome in report["outcomes"].values() if outcome["error"]], report
        assert report["outcomes"]["mtp-acceptance-counts"]["source"] == "checkpoint"


def test_state_that_the_checkpoint_lacks_is_named_and_is_not_what_it_was(stock, tmp_path):
    options = *checkpoints(tmp_path, 2), *faults("uce@rank=1,step=6,at=forward")
    run = stock.run("pp2", ON, *options, tft=CASES["overlap"].tft, prepare="stock_server:save_no_states")
    assert run.ended_well, run.tail()
    found = differences(run, stock.baseline("pp2"))
    assert found
    assert all("cumulative" in line for line in found), "it is counted since the start of the process"
    (report,) = run.reports(1)
    failed = {name: outcome["error"] for name, outcome in report["outcomes"].items() if outcome["error"]}
    assert "mtp-acceptance-counts" in failed
    assert all("the checkpoint holds no tracked states" in error for error in failed.values())


@full
def test_points_that_a_checkpoint_makes_training_compute_again_are_written_once(stock, tmp_path):
    options = *checkpoints(tmp_path, 2), *faults("uce@rank=0,step=4,at=log")
    run = stock.run("pp2", ON, *options, tft=CASES["tracker-hit"].tft)
    assert_equal(run, stock.baseline("pp2"))
    assert [report["step"] for report in run.reports(1)] == [2]


@full
def test_interrupted_checkpoint_is_made_up_for(stock, tmp_path):
    saving = ("--ckpt-format", "torch", "--save", str(tmp_path), "--save-interval", "3")
    prepare = {"prepare": "stock_server:fail_while_saving", "rank": 1, "step": 3, "error": "HCCL OP RETRY FAILED"}
    run = stock.run("dp2", ON, *saving, tft=CASES["tracker-hit"].tft, **prepare)
    assert_equal(run, stock.baseline("dp2"))
    assert run.log(0).count("successfully saved checkpoint from iteration       3") == 2
    assert "successfully saved checkpoint from iteration       6" in run.log(0)


@full
def test_interrupted_decision_to_exit_is_made_up_for(stock):
    for name in ("rank-0-hit-in-backward", "tracker-hit"):
        run = stock.run("dp2", ON, "--exit-interval", "4", *faults("uce@rank=0,step=4,at=log"), tft=CASES[name].tft)
        assert run.ended_well, run.tail()
        assert "exiting program at iteration 4" in run.log(0)
        assert not any("iteration        5/" in line for line in console(run))


@full
def test_drill_passes_after_a_recovery(stock):
    run = stock.run(
        "dp2", ON, "--recovery-drill", "5", *faults("uce@rank=1,step=3,at=router"), tft=CASES["tracker-hit"].tft
    )
    assert_equal(run, stock.baseline("dp2"))
    assert "recovery drill at step 5" in run.log(0)
    assert "PASSED" in run.log(0)
