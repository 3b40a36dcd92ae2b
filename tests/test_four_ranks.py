# SPDX-License-Identifier: Apache-2.0
"""Faults on two of four ranks at once: replicas that complement each other, a checkpoint, or the same error everywhere.

Under TFT a rank is repaired if, for each type of optimizer, a rank that is whole holds the same shard: the dense parameters
of a pipeline stage are on all its data-parallel ranks, an expert's on every second rank of DP2×EP2 and on one of PP2×EP2.
"""

from __future__ import annotations

import pytest
from clusters import StockCluster
from equal import ON, assert_equal, differences, faults
from test_mindio_stock import checkpoints

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.full
TFT = {"layout": "llm", "first": "plugin"}


def both(layout: str, one: int, other: int, step: int = 4) -> list[str]:
    at = "optimizer" if layout.startswith("pp") else "router"  # where all stages are at once
    return faults(*(f"uce@rank={rank},step={step},at={at}" for rank in (one, other)))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("ep2dp2", (0, 1)),  # two experts, each with a replica on one of the other ranks
        pytest.param("ep2dp2", (0, 3), marks=full),
        pytest.param("pp2dp2", (0, 3), marks=full),  # one rank of each stage
        pytest.param("pp2dp2", (1, 2), marks=full),
    ],
)
def test_two_ranks_with_complementary_replicas_are_recovered(stock: StockCluster, layout, ranks):
    run = stock.run(layout, ON, *both(layout, *ranks), tft=TFT)
    assert_equal(run, stock.baseline(layout))
    for report in [report for rank in range(4) for report in run.reports(rank)]:
        assert not [outcome for outcome in report["outcomes"].values() if outcome["error"]], report


@full
@pytest.mark.parametrize(("layout", "ranks"), [("ep2dp2", (0, 1)), ("pp2dp2", (0, 3))])
def test_without_the_plugin_they_are_not(stock: StockCluster, layout, ranks):
    run = stock.run(layout, *both(layout, *ranks), tft=TFT)
    assert not run.ended_well or differences(run, stock.baseline(layout))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("pp2ep2", (0, 3)),  # no expert has a replica
        pytest.param("ep2dp2", (0, 2), marks=full),  # both holders of an expert
        pytest.param("pp2dp2", (2, 3), marks=full),  # a whole stage
    ],
)
def test_without_a_whole_replica_the_checkpoint_is_loaded(stock: StockCluster, tmp_path, layout, ranks):
    run = stock.run(layout, ON, *checkpoints(tmp_path, 2), *both(layout, *ranks, step=5), tft=TFT)
    assert run.ended_well, run.tail()
    # It is counted since the start of the process, and in no checkpoint.
    assert not [line for line in differences(run, stock.baseline(layout)) if "cumulative" not in line]
    for rank in range(4):
        reports = run.reports(rank)  # two, if the first fault stops the other rank before its own
        assert {(report["step"], report["from_checkpoint"]) for report in reports} == {(4, True)}


@pytest.mark.parametrize(("layout", "ranks"), [("ep2dp2", (0, 2)), pytest.param("pp2ep2", (0, 3), marks=full)])
def test_without_replica_and_checkpoint_every_rank_ends(stock: StockCluster, layout, ranks):
    run = stock.run(layout, ON, *both(layout, *ranks), tft=TFT)
    assert run.codes == [2] * 4, run.tail()


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("pp2ep2", (0, 3)), *(pytest.param("ep2dp2", ranks, marks=full) for ranks in ((0, 1), (0, 2)))],
)
def test_every_rank_of_the_standalone_runtime_is_its_own_replica(cluster, layout, ranks):
    job = cluster("0.19.2")
    run = job.run(layout, ON, *both(layout, *ranks))
    assert_equal(run, job.baseline(layout))
    assert all(run.reports(rank) for rank in range(4))
