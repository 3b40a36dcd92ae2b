# SPDX-License-Identifier: Apache-2.0
"""Recoveries of a rank whose device copies in the background and, once it is struck, answers nothing until its restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from background_device import BackgroundDevice

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.report import Report
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)


class Job:
    """One state of every kind that a copy serves. A step adds one to each, and logging empties the tracker."""

    def __init__(self, module: ModuleType, device: BackgroundDevice, session: Session) -> None:
        self.module, self.device, self.session = module, device, session

    def until_update(self, step: int) -> None:
        self.session.begin_step(step)
        self.module.TRACKER["loss"] += 1
        self.module.BIAS += 1
        self.device.run()  # the gradient norm
        self.session.before_update(step)

    def step(self, step: int) -> None:
        self.until_update(step)
        self.device.run()  # the runtime waits for the device when the update has ended
        self.module.TRACKER["loss"].zero_()
        self.session.after_log(step)

    def recover(self, step: int, *, replay: bool) -> Report:
        self.session.stop()
        self.device.die()
        self.session.clean()
        self.device.restart()
        self.session.before_rollback(step, replay=replay)
        self.replayed = self.module.TRACKER["loss"].tolist()
        return self.session.after_rollback()


@pytest.fixture
def job(make_module: Callable[..., Any], memory: UnsafeMemory, device: BackgroundDevice) -> Iterator[Job]:
    module = make_module("toy_sick", TRACKER={"loss": torch.zeros(2)}, BIAS=torch.zeros(2))
    specs = [
        StateSpec("tracker", Location.parse("toy_sick:TRACKER"), Policy.RESET, quarantine=True, replay=True),
        StateSpec("bias", Location.parse("toy_sick:BIAS"), Policy.REPLICATE),
    ]
    session = Session(Registry(specs), memory=memory)
    session.start()
    yield Job(module, device, session)
    session.close()


def test_line_owed_by_a_rank_whose_device_died_after_its_update_is_written_with_its_sums(job: Job) -> None:
    job.step(1)
    job.until_update(2)
    job.device.run()  # the update has ended
    job.module.TRACKER["loss"] *= 0.5  # logging has begun to reduce the sums in place
    report = job.recover(2, replay=True)
    assert report.exact, report.failures
    assert job.replayed == [1, 1]
    assert job.module.BIAS.tolist() == [2, 2]
    assert job.module.TRACKER["loss"].tolist() == [0, 0]


def test_rank_whose_device_died_inside_its_update_has_what_arrived_before(job: Job) -> None:
    job.step(1)
    job.until_update(2)
    job.device.run(3)  # the copies and what is enqueued behind them, but nothing of the update
    report = job.recover(2, replay=True)
    assert report.exact, report.failures
    assert job.replayed == [1, 1]


def test_copies_that_the_device_did_not_finish_are_reported_and_not_used(job: Job) -> None:
    job.step(1)
    job.until_update(2)
    job.device.run(2)
    job.module.BIAS.fill_(7)
    report = job.recover(2, replay=True)
    assert "no sums for the log line of step 2" in report.failures[0]
    assert "bias: no copy of the end of step 2" in report.failures[1]
    assert job.replayed == [0, 0]


def test_healthy_steps_wait_for_no_copy(job: Job) -> None:
    job.step(1)
    waits = job.device.waits
    for step in range(2, 6):
        job.step(step)
    assert job.device.waits == waits
