# SPDX-License-Identifier: Apache-2.0
"""What is made good before a step is computed once more, with a stand-in of Megatron's globals."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.frameworks.megatron_job import LOG_SUMS, Loop
from mindspeed_recovery.frameworks.megatron_reentry import Reentry
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)


class State(enum.Enum):
    NOT_RUNNING_YET = 0
    INITIAL_RUN = 1


class Timers:
    def __init__(self) -> None:
        self._timers: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        timer = SimpleNamespace(_started=False)
        timer.start = lambda: setattr(timer, "_started", True)
        timer.reset = lambda: setattr(timer, "_started", False)
        return self._timers.setdefault(name, timer)


@pytest.fixture
def rerun(make_module: Callable[..., Any]) -> Any:
    machine = SimpleNamespace(state=State.NOT_RUNNING_YET, mode="disabled", current_iteration=-1)
    machine.get_mode = lambda: machine.mode
    module = make_module("megatron.core.rerun_state_machine", _GLOBAL_RERUN_STATE_MACHINE=machine)
    module.get_rerun_state_machine = lambda: module._GLOBAL_RERUN_STATE_MACHINE
    make_module("megatron.core", rerun_state_machine=module)
    make_module("megatron")
    return module


def test_abandoned_step_keeps_the_count_of_a_loop_that_does_not_set_it(rerun: Any) -> None:
    """MindSpeed-LLM's loop leaves the machine to count for itself: it is one behind. The session has put that back."""
    timers = Timers()
    training = SimpleNamespace(get_timers=lambda: timers)
    reentry = Reentry(training, [], None, SimpleNamespace())
    timers("forward-backward").start()
    machine = rerun.get_rerun_state_machine()
    machine.state, machine.current_iteration = State.INITIAL_RUN, 1
    reentry.abandon_step()
    assert machine.current_iteration == 1
    assert machine.state is State.NOT_RUNNING_YET
    assert timers("interval-time")._started
    assert not timers("forward-backward")._started


def test_machine_that_the_runtime_has_thrown_away_is_put_back_with_its_mode(rerun: Any) -> None:
    machine = rerun.get_rerun_state_machine()
    machine.mode = "validate_results"
    timers = Timers()
    args = SimpleNamespace(iteration=3, consumed_train_samples=24)
    training = SimpleNamespace(
        get_timers=lambda: timers,
        get_args=lambda: args,
        update_num_microbatches=lambda *args, **kwargs: None,
        should_disable_forward_pre_hook=lambda args: False,
    )
    reentry = Reentry(training, [], None, SimpleNamespace())
    machine.state, machine.mode = State.INITIAL_RUN, "disabled"  # stopped in an evaluation
    rerun._GLOBAL_RERUN_STATE_MACHINE = None
    reentry.prepare()
    assert rerun.get_rerun_state_machine() is machine
    assert (machine.state, machine.mode) == (State.NOT_RUNNING_YET, "validate_results")


# ---- a line that the runtime writes again ---------------------------------------------------------------------------


def loop_with(session: Any, running: bool) -> tuple[Loop, Any]:
    timer = SimpleNamespace(_started=running)
    timer.start = lambda: setattr(timer, "_started", True)
    loop = Loop.__new__(Loop)
    loop._training, loop._session = SimpleNamespace(get_timers=lambda: lambda name: timer), session
    return loop, timer


@pytest.mark.parametrize("running", [True, False])
def test_line_is_written_again_with_its_timer_running_on_every_rank(running: bool) -> None:
    """Its end is a barrier where it runs, and a rank that was in an evaluation has stopped it: the others would wait."""
    loop, timer = loop_with(SimpleNamespace(after_log=lambda step: None), running)
    seen = []

    def training_log(total_loss_dict: Any, iteration: int) -> None:
        seen.append((timer._started, total_loss_dict is LOG_SUMS))

    loop.log_again(training_log, inspect.signature(training_log).bind({}, 4))
    assert seen == [(True, True)]


def test_second_fault_right_after_a_line_was_written_again_finds_its_sums() -> None:
    """Between the two there is no step that would copy them, but an evaluation that is made up for."""
    location = Location.parse("mindspeed_recovery.frameworks.megatron_job:LOG_SUMS")
    state = StateSpec("sums", location, Policy.SNAPSHOT, settled="after-logging")
    session = Session(Registry([state]), memory=UnsafeMemory())
    session.start()
    loop, _ = loop_with(session, True)

    def training_log(total_loss_dict: dict[str, int], iteration: int) -> None:
        total_loss_dict["lines"] = total_loss_dict.get("lines", 0) + 1

    LOG_SUMS.clear()
    try:
        session.begin_step(4)
        session.before_update(4)
        for replay in (True, False):
            session.stop()
            session.clean()
            session.before_rollback(4, replay=replay)
            if replay:
                loop.log_again(training_log, inspect.signature(training_log).bind({}, 4))
            assert session.after_rollback().exact
            assert LOG_SUMS == {"lines": 1}
    finally:
        session.close()
        LOG_SUMS.clear()
