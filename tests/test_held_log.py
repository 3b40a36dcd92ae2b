# SPDX-License-Identifier: Apache-2.0
"""The rule of a held log, whatever it is written to, and the sinks of a job."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mindspeed_recovery.core.report import Report
from mindspeed_recovery.logs import sinks
from mindspeed_recovery.logs.held import HeldLog, History

pytestmark = pytest.mark.timeout(30)


class Lines(HeldLog[dict[str, Any]]):
    """A log of one's own: JSON lines in a file, which a restarted process goes on with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(self._earlier_lines if path.exists() else None)

    def log(self, step: int, **values: float) -> None:
        self.hold({"step": step, **values}, [(name, step) for name in values])

    def write(self, contents: Sequence[dict[str, Any]]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in contents)

    def without(self, content: dict[str, Any], tags: set[str]) -> dict[str, Any]:
        return {name: value for name, value in content.items() if name not in tags}

    def recovered(self, report: Report) -> None:
        self.hold({"recovered": report.step}, at=report.step)

    def uninstall(self) -> None:
        self.drain(everything=True)

    def _earlier_lines(self) -> History:
        last = {name: line["step"] for line in read(self._path) for name in line if name != "step" and "step" in line}
        return History(last)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def train(log: Lines, steps: range, **more: float) -> None:
    for step in steps:
        log.settle(step - 1)
        log.begin(step)
        log.log(step, loss=float(step), **more)


def test_sink_of_ones_own_writes_each_point_once(file: Path) -> None:
    log = Lines(file)
    train(log, range(1, 5))
    assert [line["step"] for line in read(file)] == [1, 2, 3]
    log.rollback(3)
    log.log(3, loss=-1.0)
    log.log(3, loss=-1.0, late=1.0)
    log.recovered(Report(1, step=3))
    train(log, range(4, 6))
    log.uninstall()
    assert read(file) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 3.0},
        {"step": 3, "late": 1.0},
        {"recovered": 3},
        {"step": 4, "loss": 4.0},
        {"step": 5, "loss": 5.0},
    ]


def test_restarted_process_goes_on_where_the_log_ends(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = Lines(file)
    train(log, range(1, 8))
    log.settle(7)
    log = Lines(file)
    train(log, range(4, 7), late=0.5)
    log.rollback(4)
    train(log, range(5, 10), late=0.5)
    log.uninstall()
    losses = [(line["step"], line["loss"]) for line in read(file) if "loss" in line]
    assert losses == [(step, float(step)) for step in range(1, 10)]
    assert [line["step"] for line in read(file) if "late" in line] == [4, 5, 6, 7, 8, 9]
    assert [message for message in caplog.messages if "in the log up to step 7 already" in message] == caplog.messages


def test_nothing_is_dropped_where_no_step_is_computed_again(file: Path) -> None:
    log = Lines(file)
    for step in range(1, 4):
        log.settle(step - 1)
        log.begin(step)
        for microbatch in (0, 1, 1):
            log.log(microbatch, inner=float(step))
    log.uninstall()
    assert [line["step"] for line in read(file)] == [0, 1, 1] * 3


def test_memory_does_not_grow_with_the_steps(file: Path) -> None:
    log = Lines(file)
    train(log, range(1, 2000))
    for step in range(1000, 1500):
        log.rollback(step - 1)
        train(log, range(step, step + 2))
    held = [log._now, log._before, log._last, log._items]
    assert all(len(part) <= 3 for part in held), [len(part) for part in held]


def test_log_that_raises_is_tried_again(file: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    log = Lines(file)
    write = log.write
    monkeypatch.setattr(log, "write", lambda contents: 1 / 0)
    train(log, range(1, 5))
    monkeypatch.setattr(log, "write", write)
    train(log, range(5, 7))
    log.uninstall()
    assert [line["step"] for line in read(file)] == [1, 2, 3, 4, 5, 6]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# ---- the sinks of a job ------------------------------------------------------------------------------------------------------


class Broken:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, step: int) -> None:
        self.calls.append("begin")
        raise KeyError("a bug in a sink")

    def settle(self, step: int) -> None:
        self.calls.append("settle")

    def rollback(self, step: int) -> None:
        self.calls.append("rollback")

    def recovered(self, report: Report) -> None:
        self.calls.append("recovered")

    def uninstall(self) -> None:
        self.calls.append("uninstall")


def test_registered_sink_is_one_of_the_job(file: Path) -> None:
    assert sinks.find(None, None) is None
    undo = sinks.register(lambda: Lines(file))
    undo_other = sinks.register(lambda: None)
    try:
        found = sinks.find(None, None)
    finally:
        undo()
        undo_other()
    assert found is not None
    found.begin(1)
    found._sinks[0].log(1, loss=1.0)
    found.settle(1)
    found.recovered(Report(1, step=1))
    found.uninstall()
    assert read(file) == [{"step": 1, "loss": 1.0}, {"recovered": 1}]
    assert sinks.find(None, None) is None


def test_sink_with_a_bug_is_left_alone_and_does_not_end_training(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken, log = Broken(), Lines(file)
    both = sinks.Sinks([broken, log])
    for step in (1, 2):
        both.settle(step - 1)
        both.begin(step)
        log.log(step, loss=0.0)
    both.rollback(2)
    both.uninstall()
    assert broken.calls == ["settle", "begin", "uninstall"]
    assert [line["step"] for line in read(file)] == [1, 2]
    assert ["Broken" in message for message in caplog.messages] == [True]


def test_writer_that_cannot_be_held_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert sinks.find(object(), None) is None
    assert "cannot be kept right" in caplog.text
