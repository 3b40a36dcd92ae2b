# SPDX-License-Identifier: Apache-2.0
"""The two copies of every step: which serves which rollback, and that a torn or distrusted one never does."""

import time

import pytest
import torch
from background_device import BackgroundDevice

from mindspeed_recovery.core.copies import Copies, Slot
from mindspeed_recovery.core.location import Location, Place
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)


def spec(settled: str = "before-update", name: str = "count") -> StateSpec:
    return StateSpec(name=name, location=Location.parse("toy:COUNT"), policy=Policy.SNAPSHOT, settled=settled)


class Training:
    """A state that every step adds one to, before the update, after it or with the log line."""

    def __init__(self, memory: UnsafeMemory, settled: str = "before-update") -> None:
        self.holder = {"count": torch.zeros(2)}
        self.places = [Place("toy:COUNT", self.holder, "count")]
        self.spec = spec(settled)
        self.copies = Copies(memory.host_empty)

    def add(self) -> None:
        self.holder["count"] += 1

    def begin(self, step: int) -> None:
        self.take(self.copies.start, self.copies.update, step)

    def before_update(self, step: int) -> None:
        if self.spec.settled == "before-update":
            self.add()
        self.take(self.copies.update, self.copies.start, step)
        if self.spec.settled == "after-update":
            self.add()

    def log(self, step: int) -> None:
        if self.spec.settled == "after-logging":
            self.add()

    def step(self, step: int) -> None:
        self.begin(step)
        self.before_update(step)
        self.log(step)

    def take(self, slot: Slot, other: Slot, step: int) -> None:
        other.settle()
        slot.begin(step)
        slot.take(self.spec, self.places)
        slot.enqueued()

    def served(self, rollback_step: int, replay: bool = False) -> tuple[str, float] | None:
        source = self.copies.source(self.spec, rollback_step, replay)
        if source is None:
            return None
        [(_, capture)] = source[1].captures
        live = self.holder["count"].clone()
        value = float(capture.restore(self.holder["count"])[0])
        self.holder["count"].copy_(live)
        return source[0], value


def test_fault_in_a_step_is_served_by_its_start(memory: UnsafeMemory) -> None:
    training = Training(memory)
    training.step(1)
    training.step(2)
    training.begin(3)
    training.add()
    assert training.served(2) == ("start(3)", 2)


def test_rollback_to_the_step_itself_is_served_by_its_update(memory: UnsafeMemory) -> None:
    training = Training(memory)
    training.step(1)
    training.step(2)
    assert training.served(2) == ("update(2)", 2)
    assert training.served(1) == ("start(2)", 1)
    assert training.served(0) is None
    assert training.served(3) is None


def test_start_of_the_next_step_comes_before_the_update(memory: UnsafeMemory) -> None:
    training = Training(memory)
    training.step(1)
    training.begin(2)
    assert training.served(1) == ("start(2)", 1)


def test_state_settled_after_the_update_is_never_served_by_the_update_copy(memory: UnsafeMemory) -> None:
    training = Training(memory, "after-update")
    training.step(1)
    training.step(2)
    assert training.served(1) == ("start(2)", 1)
    assert training.served(2) is None
    training.begin(3)
    assert training.served(2) == ("start(3)", 2)


def test_state_settled_with_the_log_line_is_served_from_before_it_for_a_replay(memory: UnsafeMemory) -> None:
    training = Training(memory, "after-logging")
    training.step(1)
    training.step(2)
    assert training.served(2, replay=False) is None
    assert training.served(2, replay=True) == ("update(2)", 1)


def test_replay_is_served_from_before_the_log_line_also_where_this_rank_had_logged(memory: UnsafeMemory) -> None:
    training = Training(memory, "after-logging")
    training.step(1)
    training.copies.start.take(training.spec, training.places, 2)
    assert training.served(1, replay=False) == ("start(2)", 1)
    assert training.served(1, replay=True) == ("update(1)", 0)


@pytest.mark.parametrize("torn", ["start", "update"])
def test_copy_whose_taking_failed_is_never_served_and_the_other_is(memory: UnsafeMemory, torn: str) -> None:
    training = Training(memory)
    training.step(1)
    if torn == "update":
        training.begin(2)
        training.add()
    memory.stop()  # the device stops in the middle of the copy
    slot = getattr(training.copies, torn)
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        training.take(slot, training.copies.start if torn == "update" else training.copies.update, 2)
    memory.restart()
    assert slot.get("count", 2) is None
    assert training.served(1) == (("update(1)", 1) if torn == "start" else ("start(2)", 1))
    assert training.served(2) is None


def test_copy_whose_second_taking_failed_is_not_served(memory: UnsafeMemory) -> None:
    training = Training(memory, "after-logging")
    training.step(1)
    training.log(1)
    memory.stop()
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        training.copies.start.take(training.spec, training.places, 2)
    memory.restart()
    assert training.served(1) is None
    assert training.served(0) is None


def test_copy_that_was_never_taken_in_this_step_is_not_served(memory: UnsafeMemory) -> None:
    training = Training(memory)
    training.step(1)
    training.copies.start.begin(2)
    assert training.served(1) == ("update(1)", 1)
    assert training.served(0) is None


def test_host_buffer_that_is_being_written_again_is_not_served_for_its_old_step(memory: UnsafeMemory) -> None:
    training = Training(memory)
    training.step(1)
    training.copies.update.begin(2)
    assert training.served(1) is None


def test_copies_of_later_steps_are_discarded_on_rollback(memory: UnsafeMemory) -> None:
    training = Training(memory)
    training.step(1)
    training.step(2)
    training.copies.discard(after_step=1)
    assert training.served(1) == ("start(2)", 1)
    assert training.copies.update.get("count", 2) is None
    training.copies.discard(after_step=0)
    assert training.served(1) is None


@pytest.mark.parametrize(
    ("moment", "left"),
    [("before both", None), ("between", "start(2)"), ("after both", "start(2)")],
)
def test_copies_enqueued_at_or_after_the_error_time_are_discarded(
    memory: UnsafeMemory, monkeypatch: pytest.MonkeyPatch, moment: str, left: str | None
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    training = Training(memory)
    clock[0] = 110
    training.begin(2)
    clock[0] = 120
    training.before_update(2)
    training.copies.discard(since={"before both": 105.0, "between": 115.0, "after both": 125.0}[moment])
    source = training.copies.source(training.spec, 1, False)
    assert (source and source[0]) == left
    assert (training.copies.update.get("count", 2) is not None) == (moment == "after both")


def test_copy_taken_after_the_error_in_a_slot_begun_before_it_is_discarded(
    memory: UnsafeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    training = Training(memory)
    training.copies.start.begin(2)
    clock[0] = 110
    training.copies.start.take(training.spec, training.places)
    training.copies.discard(since=105.0)
    assert training.served(1) is None


@pytest.mark.parametrize(
    ("stopped_in", "settled", "rollback_step", "live"),
    [
        ("start", "before-update", 1, True),
        ("start", "after-update", 1, True),
        ("start", "before-update", 2, False),
        ("update", "before-update", 2, True),
        ("update", "before-update", 1, False),
        ("update", "after-logging", 2, False),
        ("step", "before-update", 1, False),
        ("step", "after-update", 1, True),
        ("step", "after-update", 2, False),
    ],
)
def test_live_value_is_known_to_be_that_of_a_step_by_where_the_rank_stopped(
    memory: UnsafeMemory, stopped_in: str, settled: str, rollback_step: int, live: bool
) -> None:
    training = Training(memory, settled)
    training.step(1)
    training.begin(2)
    if stopped_in == "start":
        training.copies.taking = training.copies.start
    elif stopped_in == "update":
        training.copies.update.begin(2)
        training.copies.taking = training.copies.update
    assert training.copies.live_is(training.spec, rollback_step, replay=False) == live


# ---------------------------------------------------------------- a device that copies in the background


def test_copy_serves_only_after_its_transfer_has_finished(memory: UnsafeMemory, device: BackgroundDevice) -> None:
    training = Training(memory)
    training.step(1)
    assert training.served(1) is None
    training.begin(2)  # waits for update(1)
    assert training.served(1) == ("update(1)", 1)
    training.before_update(2)
    assert training.served(1) == ("start(2)", 1)
    assert device.waits == 3


def test_nobody_waits_for_a_transfer_that_has_finished(memory: UnsafeMemory, device: BackgroundDevice) -> None:
    training = Training(memory)
    for step in (1, 2, 3):
        training.begin(step)
        device.run()  # as the framework's own synchronisations do
        training.before_update(step)
        device.run()
    assert device.waits == 0
    assert training.served(3) == ("update(3)", 3)


def test_what_had_arrived_serves_though_the_device_answers_nothing_any_more(
    memory: UnsafeMemory, device: BackgroundDevice
) -> None:
    training = Training(memory)
    training.step(1)
    device.run()
    device.die()
    assert training.served(1) == ("update(1)", 1)


def test_what_had_not_quite_arrived_does_not_serve(memory: UnsafeMemory, device: BackgroundDevice) -> None:
    training = Training(memory)
    training.begin(1)
    device.run()
    training.before_update(1)
    device.run(1)  # the state's bytes, but not yet what is enqueued behind them
    device.die()
    assert training.served(1) is None
    assert training.served(0) == ("start(1)", 0)


def test_transfer_that_a_stop_cut_short_is_not_waited_for_and_serves_no_later_recovery(
    memory: UnsafeMemory, device: BackgroundDevice
) -> None:
    training = Training(memory)
    training.begin(1)
    device.run()
    training.before_update(1)
    device.die()
    training.copies.discard(after_step=0)
    training.begin(1)  # kept as it is: the copy of this very step is whole
    device.restart()
    training.before_update(1)
    assert training.served(1) is None, "the second transfer has not finished, and the first one never will"
    device.run()
    assert training.served(1) == ("update(1)", 2)


def test_state_that_changes_with_logging_is_live_when_stop_came_right_after_its_log_line(memory: UnsafeMemory) -> None:
    training = Training(memory, "after-logging")
    training.step(1)
    training.step(2)
    assert not training.copies.live_is(training.spec, 2, replay=False)
    training.copies.logged = 2  # the line is written, and stop has come before it could be copied
    assert training.copies.live_is(training.spec, 2, replay=False)
    assert not training.copies.live_is(training.spec, 2, replay=True), "a replay would count the line twice"
    assert not training.copies.live_is(training.spec, 1, replay=False)


def test_copy_of_a_commit_that_was_cut_short_does_not_serve(memory: UnsafeMemory, device: BackgroundDevice) -> None:
    training = Training(memory)
    training.step(1)
    device.run()
    training.copies.start.begin(2)
    training.copies.start.take(training.spec, training.places)  # and the commit never reached its end
    device.run()
    assert training.copies.start.get("count", 2) is None
    assert training.served(1) == ("update(1)", 1)


def test_copy_that_could_not_be_waited_for_does_not_serve(memory: UnsafeMemory, device: BackgroundDevice) -> None:
    training = Training(memory)
    training.begin(1)
    device.die()
    with pytest.raises(RuntimeError, match="device lost"):
        training.copies.start.settle()
    assert training.served(0) is None


def test_copy_taken_again_after_it_had_arrived_must_arrive_again(
    memory: UnsafeMemory, device: BackgroundDevice
) -> None:
    training = Training(memory, "after-logging")
    training.step(1)
    device.run()
    training.copies.start.take(training.spec, training.places, 2)  # with the log line
    device.run()
    assert training.served(1) is None, "its fence is not enqueued yet"
    training.copies.start.enqueued()
    assert training.served(1) is None, "its fence is not passed yet"
    device.run()
    assert training.served(1) == ("start(2)", 1)


def test_bytes_of_both_slots_are_counted(memory: UnsafeMemory) -> None:
    training = Training(memory)
    assert training.copies.nbytes == 0
    training.step(1)
    assert training.copies.nbytes == 16


def test_places_that_vanish_are_not_in_the_next_copy(memory: UnsafeMemory) -> None:
    training = Training(memory)
    training.begin(1)
    training.places = []
    training.begin(2)
    found = training.copies.start.get("count", 2)
    assert found is not None
    assert found.captures == []
