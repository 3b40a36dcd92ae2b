# SPDX-License-Identifier: Apache-2.0
"""Faults fire once, at the rank, step, point and visit they name."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_recovery.testing.faults import (
    GRAMMAR,
    POINTS,
    FaultInjector,
    FaultSpec,
    FaultSpecError,
    InjectedFault,
)
from mindspeed_recovery.testing.simulator import PERSISTENT, TEMPORARY, UnsafeMemory

pytestmark = pytest.mark.timeout(60)


class Bench:
    """A device with two named states."""

    def __init__(self) -> None:
        self.memory = UnsafeMemory()
        self.states = {"tracker": torch.ones(4), "bias": torch.ones(2)}

    def resolve(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        for name in names:
            if name not in self.states:
                raise KeyError(name, self.states)
            yield self.states[name]

    def injector(self, *faults: str, rank: int = 1) -> FaultInjector:
        return FaultInjector([FaultSpec.parse(text) for text in faults], rank, self.memory, self.resolve)

    def unsafe(self) -> set[str]:
        assert self.memory.check_uce_in_memory() == PERSISTENT
        return {name for name, tensor in self.states.items() if self.memory.is_unsafe(tensor)}


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ---------------------------------------------------------------- text

names = st.text("abcxyz019-_.:", min_size=1, max_size=8).filter(lambda name: name not in ("all", "none"))
states = st.one_of(
    st.sampled_from([("all",), ("none",)]), st.lists(names, min_size=1, max_size=3, unique=True).map(tuple)
)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["uce", "link"]),
    rank=st.integers(0, 10**4),
    step=st.integers(0, 10**9),
    at=st.sampled_from(POINTS),
    states=states,
    visit=st.integers(1, 100),
)
def test_text_round_trips(kind: str, rank: int, step: int, at: str, states: tuple[str, ...], visit: int) -> None:
    spec = FaultSpec(kind, rank, step, at, states if kind == "uce" else ("all",), visit)
    assert FaultSpec.parse(str(spec)) == spec


def test_defaults_and_key_order() -> None:
    spec = FaultSpec.parse(" uce@at=router,step=3,rank=1 ")
    assert spec == FaultSpec("uce", 1, 3, "router", ("all",), 1)
    assert str(spec) == "uce@rank=1,step=3,at=router"
    text = "uce@rank=1,step=3,at=router,states=a+b,visit=2"
    assert str(FaultSpec.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no '@'"),
        ("uce", "no '@'"),
        ("oom@rank=1,step=3,at=router", "'oom'"),
        ("UCE@rank=1,step=3,at=router", "'UCE'"),
        ("uce@", "''"),
        ("uce@rank=1,step=3", "no at="),
        ("uce@step=3,at=router", "no rank="),
        ("uce@rank=1,at=router", "no step="),
        ("uce@rank=1,step=3,at=nowhere", "at=nowhere"),
        ("uce@rank=x,step=3,at=router", "'rank=x'"),
        ("uce@rank=-1,step=3,at=router", "'rank=-1'"),
        ("uce@rank=1,step=3.5,at=router", "'step=3.5'"),
        ("uce@rank=1,step=٣,at=router", "'step=٣'"),
        ("uce@rank=1,step=3,at=router,visit=0", "visit=0"),
        ("uce@rank=1,rank=2,step=3,at=router", "'rank=2'"),
        ("uce@rank=1,step=3,at=router,times=2", "'times=2'"),
        ("uce@rank=1,step=3,at", "'at'"),
        ("uce@rank=1,step=3,at=", "'at='"),
        ("uce@rank=1,step=3,at=router,", "''"),
        ("uce@rank=1,step=3,at=router,states=", "'states='"),
        ("uce@rank=1,step=3,at=router,states=a+", "''"),
        ("uce@rank=1,step=3,at=router,states=a+a", "states=a+a"),
        ("uce@rank=1,step=3,at=router,states=all+a", "states=all+a"),
        ("uce@rank=1,step=3,at=router,states=a b", "'a b'"),
        ("link@rank=1,step=3,at=router,states=a", "states=a"),
    ],
)
def test_bad_text_is_refused_with_the_wrong_part_and_the_grammar(text: str, wrong: str) -> None:
    with pytest.raises(FaultSpecError) as caught:
        FaultSpec.parse(text)
    assert wrong in str(caught.value)
    assert GRAMMAR in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.text("ucelink@=,+rstpa0123 ", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = FaultSpec.parse(text)
    except FaultSpecError:
        return
    assert FaultSpec.parse(str(spec)) == spec


# ---------------------------------------------------------------- firing


def test_memory_fault_strikes_the_named_states(bench: Bench) -> None:
    injector = bench.injector("uce@rank=1,step=3,at=router,states=tracker")
    injector.at("forward", 3)
    with pytest.raises(RuntimeError, match=r"^UCE ERROR.*step 3.*router.*rank 1") as caught:
        injector.at("router", 3)
    assert isinstance(caught.value, InjectedFault)
    assert caught.value.kind == "uce"
    assert bench.unsafe() == {"tracker"}
    assert (injector.fired, injector.struck, injector.waiting) == (1, 1, ())


def test_memory_fault_strikes_all_device_memory_by_default(bench: Bench) -> None:
    injector = bench.injector("uce@rank=1,step=3,at=router")
    with pytest.raises(InjectedFault):
        injector.at("router", 3)
    assert bench.unsafe() == {"tracker", "bias"}
    assert injector.struck >= 2


def test_link_fault_damages_nothing(bench: Bench) -> None:
    injector = bench.injector("link@rank=1,step=3,at=backward")
    with pytest.raises(InjectedFault, match=r"^HCCL OP RETRY FAILED") as caught:
        injector.at("backward", 3)
    assert caught.value.kind == "link"
    assert bench.memory.check_uce_in_memory() == 0
    assert (injector.fired, injector.struck) == (1, 0)


def test_fault_may_hit_memory_that_nobody_uses(bench: Bench) -> None:
    injector = bench.injector("uce@rank=1,step=3,at=update,states=none")
    with pytest.raises(InjectedFault, match="UCE ERROR"):
        injector.at("update", 3)
    assert bench.memory.check_uce_in_memory() == TEMPORARY
    assert (injector.fired, injector.struck) == (1, 0)


def test_only_the_named_rank_and_step_are_hit(bench: Bench) -> None:
    text = "uce@rank=1,step=3,at=router"
    bench.injector(text, rank=0).at("router", 3)
    injector = bench.injector(text)
    injector.at("router", 2)
    injector.at("log", 3)
    injector.at("router", 4)
    assert injector.fired == 0
    assert injector.visits == {**dict.fromkeys(POINTS, 0), "router": 2, "log": 1}


def test_fault_fires_once(bench: Bench) -> None:
    injector = bench.injector("link@rank=1,step=3,at=router")
    with pytest.raises(InjectedFault):
        injector.at("router", 3)
    injector.begin_step(3)
    injector.at("router", 3)
    assert (injector.fired, injector.visits["router"]) == (1, 2)


@pytest.mark.parametrize("announced", [True, False])
def test_same_fault_twice_hits_the_recomputed_step(bench: Bench, announced: bool) -> None:
    injector = bench.injector(*["link@rank=1,step=3,at=router,visit=2"] * 2)
    for fired in (1, 2):
        if announced:
            injector.begin_step(3)
        injector.at("router", 3)
        with pytest.raises(InjectedFault):
            injector.at("router", 3)
        assert injector.fired == fired
    injector.begin_step(3)
    injector.at("router", 3)
    injector.at("router", 3)


def test_visits_are_counted_within_one_attempt(bench: Bench) -> None:
    injector = bench.injector("link@rank=1,step=3,at=router,visit=3")
    injector.begin_step(3)
    injector.at("router", 3)
    injector.at("router", 3)
    injector.begin_step(3)  # another rank's fault ended the first attempt
    injector.at("router", 3)
    injector.at("forward", 3)
    injector.at("router", 3)
    with pytest.raises(InjectedFault):
        injector.at("router", 3)


def test_faults_of_different_visits_fire_in_their_own_attempts(bench: Bench) -> None:
    injector = bench.injector("link@rank=1,step=3,at=router", "link@rank=1,step=3,at=log")
    with pytest.raises(InjectedFault):
        injector.at("router", 3)
    injector.begin_step(3)
    injector.at("router", 3)
    with pytest.raises(InjectedFault):
        injector.at("log", 3)


def test_unknown_state_is_refused_with_the_known_names(bench: Bench) -> None:
    injector = bench.injector("uce@rank=1,step=3,at=router,states=tracker+nobody")
    with pytest.raises(FaultSpecError, match=r"'nobody'.*bias, tracker"):
        injector.at("router", 3)
    assert injector.fired == 0
    assert bench.memory.check_uce_in_memory() == 0


def test_unknown_point_is_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="'lunch'"):
        bench.injector().at("lunch", 3)
