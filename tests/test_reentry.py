# SPDX-License-Identifier: Apache-2.0
"""What is made good before a step is computed once more, with a stand-in of Megatron's globals."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_recovery.frameworks.megatron_reentry import Reentry

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
def machine(make_module: Callable[..., Any]) -> Any:
    machine = SimpleNamespace(state=State.NOT_RUNNING_YET, mode="disabled", current_iteration=-1)
    machine.get_mode = lambda: machine.mode
    for name in ("megatron", "megatron.core"):
        make_module(name)
    make_module("megatron.core.rerun_state_machine", get_rerun_state_machine=lambda: machine)
    return machine


def test_abandoned_step_keeps_the_count_of_a_loop_that_does_not_set_it(machine: Any) -> None:
    """MindSpeed-LLM's loop leaves the machine to count for itself: it is one behind. The session has put that back."""
    timers = Timers()
    training = SimpleNamespace(get_timers=lambda: timers)
    reentry = Reentry(training, [], None, SimpleNamespace())
    timers("forward-backward").start()
    machine.state, machine.current_iteration = State.INITIAL_RUN, 1
    reentry.abandon_step()
    assert machine.current_iteration == 1
    assert machine.state is State.NOT_RUNNING_YET
    assert timers("interval-time")._started
    assert not timers("forward-backward")._started
