# SPDX-License-Identifier: Apache-2.0
"""A protected run equals the run without a fault, bit for bit; an unprotected one dies or differs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from clusters import Cluster, Run

from mindspeed_recovery.testing.compare import compare_scalars, compare_states
from mindspeed_recovery.testing.faults import POINTS

pytestmark = pytest.mark.timeout(180)

VERSIONS = ("0.12.1", "0.19.2")
FACTORS = {
    "at": POINTS,
    "rank": (0, 1),
    "kind": ("uce", "link"),
    "count": ("one", "two steps", "again in the first recomputed step"),
    "layout": ("dp2", "ep2", "pp2"),
    "version": VERSIONS,
}
OTHER_VERSIONS = (
    "0.15.3",
    *(
        pytest.param(version, marks=pytest.mark.full)
        for version in ("0.11.0", "0.12.3", "0.13.1", "0.14.0", "0.16.1", "0.17.1", "0.18.2")
    ),
)
ONE_VERSION = ("0.19.2", pytest.param("0.12.1", marks=pytest.mark.full))
ON = "--enable-recovery-safe-globals"

Case = tuple[str, ...]


def pairwise(factors: dict[str, tuple]) -> Iterator[tuple]:
    """Cases in which every two values of different factors meet: the next case always covers the most new pairs."""

    def pairs(case: tuple) -> set:
        return set(itertools.combinations(enumerate(case), 2))

    product = list(itertools.product(*factors.values()))
    missing = set().union(*map(pairs, product))
    while missing:
        best = max(product, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        yield best


def faults(at: str, rank: int, kind: str, count: str) -> list[str]:
    # Evaluations come after steps 3 and 6.
    first, second = (3, 6) if at == "eval" else (4, 5)
    specs = [f"{kind}@rank={rank},step={first},at={at}"]
    if count == "two steps":
        specs.append(f"{kind}@rank={rank},step={second},at={at}")
    elif count != "one":
        # After the update of step k, the first step that is computed again is k + 1; an evaluation is itself repeated.
        again = (
            f"step={first},at={at}"
            if at in ("forward", "router", "backward", "eval")
            else f"step={first + 1},at=forward"
        )
        specs.append(f"{kind}@rank={rank},{again}")
    return [option for spec in specs for option in ("--fault", spec)]


def assert_equal(run: Run, baseline: Run) -> None:
    assert run.ended_well, run.tail()
    scalars = compare_scalars(baseline.folder / "tb", run.folder / "tb")
    assert scalars.compared > 50
    assert scalars.identical, scalars.differences[:10]
    for rank in range(len(run.codes)):
        states = compare_states(f"{baseline.folder}/final.rank{rank}", f"{run.folder}/final.rank{rank}")
        assert states.identical, (rank, states.differences[:10])


def differs(run: Run, baseline: Run) -> bool:
    try:
        assert_equal(run, baseline)
    except AssertionError:
        return True
    return False


def check(
    cluster: Callable[[str], Cluster], at: str, rank: int, kind: str, count: str, layout: str, version: str
) -> None:
    ranks = cluster(version)
    specs = faults(at, rank, kind, count)
    run = ranks.run(layout, ON, *specs)
    assert_equal(run, ranks.baseline(layout))
    for number in (0, 1):
        assert len(run.reports(number)) == len(specs) // 2, "every fault has caused a recovery"
        for report in run.reports(number):
            assert not [o for o in report["outcomes"].values() if o["error"]], report


@pytest.mark.parametrize(tuple(FACTORS), list(pairwise(FACTORS)))
def test_protected_run_equals_the_uninterrupted_one(cluster, at, rank, kind, count, layout, version):
    check(cluster, at, rank, kind, count, layout, version)


@pytest.mark.full
@pytest.mark.parametrize(tuple(FACTORS), list(itertools.product(*FACTORS.values())))
def test_protected_run_equals_the_uninterrupted_one_everywhere(cluster, at, rank, kind, count, layout, version):
    check(cluster, at, rank, kind, count, layout, version)


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_every_version_that_trains_is_protected(cluster, version):
    check(cluster, "backward", 1, "uce", "one", "ep2", version)
    assert not cluster(version).run("ep2", *faults("backward", 1, "uce", "one")).ended_well


@pytest.mark.parametrize("version", VERSIONS)
def test_two_undisturbed_runs_are_identical(cluster, version):
    ranks = cluster(version)
    assert_equal(ranks.run("ep2"), ranks.baseline("ep2"))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plugin_alone_changes_nothing(cluster, version):
    ranks = cluster(version)
    assert_equal(ranks.run("ep2", ON), ranks.baseline("ep2"))


@pytest.mark.parametrize("version", ONE_VERSION)
@pytest.mark.parametrize("at", POINTS)
def test_without_the_plugin_a_memory_fault_ends_the_run(cluster, at, version):
    run = cluster(version).run("ep2", *faults(at, 1, "uce", "one"))
    assert not run.ended_well
    assert "There is unsafe data in the input tensor." in run.log(0) + run.log(1)


# Between the update and the end of logging, and in an evaluation, a link fault hurts no state at all.
@pytest.mark.parametrize("version", ONE_VERSION)
@pytest.mark.parametrize("at", ("forward", "router", "backward", "log"))
def test_without_the_plugin_a_link_fault_makes_the_run_differ_silently(cluster, at, version):
    ranks = cluster(version)
    visit = "" if at == "log" else ",visit=2"  # at the first microbatch's forward nothing may have happened yet
    run = ranks.run("ep2", "--fault", f"link@rank=1,step=4,at={at}{visit}")
    assert run.ended_well, run.tail()
    assert differs(run, ranks.baseline("ep2"))


@pytest.mark.parametrize("version", VERSIONS)
def test_faults_on_both_ranks_in_one_step(cluster, version):
    ranks = cluster(version)
    both = ["--fault", "uce@rank=0,step=4,at=router", "--fault", "uce@rank=1,step=4,at=router"]
    assert_equal(ranks.run("ep2", ON, *both), ranks.baseline("ep2"))


def test_a_fault_in_named_states_hits_only_these(cluster):
    ranks = cluster("0.19.2")
    fault = ["--fault", "uce@rank=1,step=4,at=router,states=moe-aux-loss-tracker+router-expert-bias,visit=3"]
    assert_equal(ranks.run("ep2", ON, *fault), ranks.baseline("ep2"))
    unprotected = ranks.run("ep2", *fault)
    assert not unprotected.ended_well
    assert "There is unsafe data" in unprotected.log(1)


def test_a_fault_before_the_first_update_is_refused(cluster):
    run = cluster("0.19.2").run("ep2", ON, "--fault", "uce@rank=1,step=1,at=router")
    assert run.codes == [3, 3]
    assert "before the first optimizer update" in run.log(1)


def test_an_unknown_state_in_a_fault_is_named_with_those_there_are(cluster):
    run = cluster("0.19.2").run("ep2", ON, "--fault", "uce@rank=1,step=4,at=router,states=no-such-state")
    assert not run.ended_well
    assert "no-such-state" in run.log(1)
    assert "moe-aux-loss-tracker" in run.log(1)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_that_never_reached_its_next_step_serves_the_step_itself(cluster, version):
    ranks = cluster(version)
    run = ranks.run("ep2", ON, "--fault", "uce@rank=1,step=4,at=optimizer")
    assert_equal(run, ranks.baseline("ep2"))
    for rank in (0, 1):
        (report,) = run.reports(rank)
        assert report["step"] == 4, "rolled back to the step whose update was done"
        assert report["replayed"], "its log line was still owed"
        # The healthy rank may have come to the start of step 5, where no collective of the log line held it back.
        assert report["outcomes"]["router-expert-bias"]["source"] in ("update(4)", "start(5)" if rank == 0 else "")
        assert report["outcomes"]["moe-aux-loss-tracker"]["action"] == "replayed"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("slot", ("start", "update"))
def test_a_fault_while_a_copy_is_taken_never_restores_a_torn_copy(cluster, slot, version):
    ranks = cluster(version)
    run = ranks.run("ep2", ON, prepare="faulty:while_copying", slot=slot, step=4)
    assert_equal(run, ranks.baseline("ep2"))
    assert len(run.reports(1)) == 1


def test_restoring_a_torn_copy_would_be_noticed(cluster):
    ranks = cluster("0.19.2")
    run = ranks.run("ep2", ON, prepare="faulty:while_copying", slot="start", step=4, trust_torn=True)
    assert differs(run, ranks.baseline("ep2"))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_of_plain_python_after_stop_does_no_harm(cluster, version):
    ranks = cluster(version)
    run = ranks.run("ep2", ON, "--fault", "uce@rank=1,step=4,at=router,visit=2", prepare="faulty:python_after_stop")
    assert_equal(run, ranks.baseline("ep2"))
    assert "ran plain Python after stop" in run.log(0)


def test_fifteen_recoveries_in_one_process(cluster):
    ranks = cluster("0.19.2")
    specs = [
        ("--fault", f"uce@rank={n % 2},step={2 + n // 3},at={at}")
        for n, at in enumerate(("router", "backward", "log") * 5)
    ]
    run = ranks.run("ep2", ON, *itertools.chain(*specs))
    assert_equal(run, ranks.baseline("ep2"))
    assert len(run.reports(0)) == 15
