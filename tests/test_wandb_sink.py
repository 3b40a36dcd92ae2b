# SPDX-License-Identifier: Apache-2.0
"""Rows reach a real run of Weights & Biases (offline) when their step is settled, each once, and never a lower step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import wandb
from wandb_runs import Offline

from mindspeed_recovery.core.report import Outcome, Report
from mindspeed_recovery.logs.wandb import HeldRun

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Offline:
    return Offline(tmp_path_factory.mktemp("wandb"))


def log(step: int, by: float = 0.0) -> None:
    """As Megatron logs, one call for each value."""
    wandb.log({"lm loss": torch.tensor(step + by)}, step)
    wandb.log({"lr": step / 8}, step)


def row(step: int, by: float = 0.0) -> dict[str, Any]:
    return {"_step": step, "lm loss": step + by, "lr": step / 8}


def train(sink: HeldRun, steps: range, by: float = 0.0) -> None:
    for step in steps:
        sink.settle(step - 1)
        sink.begin(step)
        log(step, by)


def test_recovered_run_has_the_rows_of_the_undisturbed_one(offline: Offline) -> None:
    offline.begin("undisturbed")
    for step in range(1, 13):
        log(step)
    wandb.log({"lm loss validation": 3.0}, 12)
    wandb.finish()
    run = offline.begin("recovered")
    before = run.log
    sink = HeldRun(wandb)
    train(sink, range(1, 4))
    for back in (2, 4, 5, 6, 7):
        sink.rollback(back)
        log(back, -1)  # the line is written again
        train(sink, range(back + 1, back + 3))
    wandb.log({"lr": 99.0}, 10)  # of a step that is given up
    sink.rollback(8)
    train(sink, range(9, 13))
    sink.uninstall()
    assert run.log == before
    assert wandb.log == before
    wandb.log({"lm loss validation": 3.0}, 12)  # after training, to the row of its last step
    wandb.finish()
    assert offline.points("recovered") == offline.points("undisturbed")
    assert len(offline.points("recovered")) == 12


def test_first_write_wins_after_a_fallback(offline: Offline) -> None:
    offline.begin("fallback")
    sink = HeldRun(wandb)
    train(sink, range(1, 15))
    sink.rollback(4)
    train(sink, range(5, 17), 0.5)
    sink.uninstall()
    wandb.finish()
    assert offline.points("fallback") == [row(step, 0.5 if step >= 14 else 0.0) for step in range(1, 17)]


def test_without_the_sink_a_recovered_run_is_wrong(offline: Offline) -> None:
    offline.begin("plain")
    for step in [*range(1, 15), *range(5, 17)]:
        log(step, 0.0 if step < 5 else 0.5)
    wandb.log({"lr": 99.0}, 16)
    wandb.finish()
    assert offline.points("plain") != [row(step) for step in range(1, 17)]


def test_a_tensor_is_sent_as_it_was_and_a_row_with_its_time(offline: Offline) -> None:
    offline.begin("values")
    sink = HeldRun(wandb)
    loss = torch.tensor(1.25)
    sink.begin(1)
    wandb.log({"loss": loss}, 1)
    after = time.time()
    loss.fill_(7)
    time.sleep(0.2)
    sink.settle(1)
    sink.uninstall()
    wandb.finish()
    [found] = offline.rows("values")
    assert found["loss"] == 1.25
    assert found["_timestamp"] <= after


def test_rows_without_a_step_and_rows_that_are_wrong(offline: Offline) -> None:
    run = offline.begin("loose")
    sink = HeldRun(run)
    for step in (1, 2):
        sink.settle(step - 1)
        sink.begin(step)
        run.log({"loose": step})
    sink.rollback(1)
    run.log({"loose": -1})
    sink.begin(2)
    run.log({"loose": 2})
    with pytest.raises(TypeError):
        run.log({1: 2})  # type: ignore[dict-item]
    sink.uninstall()
    wandb.finish()
    assert [found["loose"] for found in offline.points("loose")] == [1, 2]


def test_recovery_goes_with_the_next_row(offline: Offline) -> None:
    offline.begin("told")
    sink = HeldRun(wandb)
    train(sink, range(1, 4))
    sink.rollback(2)
    report = Report(1, step=2, phases={"stop": 1.5})
    report.outcomes = {"bias": Outcome("bias", "restored", nbytes=32)}
    sink.recovered(report)
    train(sink, range(3, 5))
    sink.uninstall()
    wandb.finish()
    told = {key: value for key, value in offline.points("told")[2].items() if key.startswith("recovery/")}
    assert told == {
        "recovery/marker": 1,
        "recovery/step": 2,
        "recovery/bytes": 32,
        "recovery/ms/total": 1.5,
        "recovery/ms/stop": 1.5,
        "recovery/states/restored": 1,
    }
    assert not any(
        key.startswith("recovery/") for found in (offline.points("told")[n] for n in (0, 1, 3)) for key in found
    )


def test_no_run_is_open() -> None:
    with pytest.raises(ValueError, match=r"wandb\.init"):
        HeldRun(wandb)
