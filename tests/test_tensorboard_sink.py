# SPDX-License-Identifier: Apache-2.0
"""Points reach the event file when their step is settled, and each only once."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter

from mindspeed_recovery.logs.tensorboard import HeldEvents

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def writer(tmp_path: Path) -> SummaryWriter:
    return SummaryWriter(str(tmp_path), max_queue=1000)


@pytest.fixture
def sink(writer: SummaryWriter) -> HeldEvents:
    return HeldEvents(writer)


@pytest.fixture
def points(tmp_path: Path) -> Callable[..., list[tuple[str, int, float]]]:
    """Every point in the folder's event files, in the order of the files."""
    return lambda folder=tmp_path: read(folder)


def read(folder: Path) -> list[tuple[str, int, float]]:
    return [
        (value.tag, event.step, value.tensor.float_val[0])
        for file in sorted(folder.glob("events.*"))
        for event in EventFileLoader(str(file)).Load()
        if event.HasField("summary")
        for value in event.summary.value
    ]


def log(writer: SummaryWriter, step: int, value: float) -> None:
    """A log line as Megatron writes it: each curve over steps and over samples."""
    writer.add_scalar("loss", value, step)
    writer.add_scalar("loss vs samples", value, step * 8)


def line(step: int, value: float) -> list[tuple[str, int, float]]:
    return [("loss", step, value), ("loss vs samples", step * 8, value)]


def train(writer: SummaryWriter, sink: HeldEvents, steps: range, value: float = 0.0) -> None:
    for step in steps:
        sink.settle(step - 1)
        sink.begin(step)
        log(writer, step, step + value)


def test_points_of_a_step_are_held_until_it_is_settled(writer: Any, sink: Any, points: Any) -> None:
    train(writer, sink, range(1, 3))
    writer.flush()
    assert points() == line(1, 1)
    sink.settle(2)
    assert points() == line(1, 1) + line(2, 2)


def test_rollback_drops_the_points_of_later_steps(writer: Any, sink: Any, points: Any) -> None:
    train(writer, sink, range(1, 5))
    sink.rollback(3)
    train(writer, sink, range(4, 6), 0.5)
    writer.close()
    assert points() == line(1, 1) + line(2, 2) + line(3, 3) + line(4, 4.5) + line(5, 5.5)


def test_first_write_of_a_point_wins_when_its_log_line_is_replayed(writer: Any, sink: Any, points: Any) -> None:
    train(writer, sink, range(1, 4))
    sink.rollback(3)
    log(writer, 3, -1)
    train(writer, sink, range(4, 5))
    writer.close()
    assert points() == line(1, 1) + line(2, 2) + line(3, 3) + line(4, 4)


def test_replayed_line_completes_one_that_was_cut_in_the_middle(writer: Any, sink: Any, points: Any) -> None:
    train(writer, sink, range(1, 3))
    sink.settle(2)
    sink.begin(3)
    writer.add_scalar("loss", 3.0, 3)
    sink.rollback(3)
    log(writer, 3, 3.0)
    sink.settle(3)
    assert points() == line(1, 1) + line(2, 2) + line(3, 3)


def test_line_replayed_after_it_was_settled_is_not_written_again(writer: Any, sink: Any, points: Any) -> None:
    train(writer, sink, range(1, 4))
    sink.settle(3)
    sink.begin(4)
    sink.rollback(3)
    log(writer, 3, -1)
    train(writer, sink, range(4, 5))
    writer.close()
    assert points() == line(1, 1) + line(2, 2) + line(3, 3) + line(4, 4)


def test_settled_steps_that_a_checkpoint_makes_training_repeat_are_not_written_again(
    writer: Any, sink: Any, points: Any
) -> None:
    train(writer, sink, range(1, 5))
    sink.rollback(1)
    train(writer, sink, range(2, 7))
    writer.close()
    assert points() == [point for step in range(1, 7) for point in line(step, step)]


def test_many_recoveries_write_each_point_once(writer: Any, sink: Any, points: Any) -> None:
    for last in range(2, 9):
        train(writer, sink, range(last - 1, last + 1))
        sink.rollback(last - 1 + last % 2)
        if last % 2:
            log(writer, last, -1)
    writer.close()
    written = points()
    assert sorted(written) == sorted(set(written))
    assert len({point[:2] for point in written}) == len(written)
    assert all(value == step for tag, step, value in written if tag == "loss")


def test_no_event_is_lost_or_changed_in_a_run_without_faults(tmp_path: Path, points: Any) -> None:
    def run(folder: Path, held: bool) -> list[tuple[str, int, float]]:
        writer = SummaryWriter(str(folder))
        sink = HeldEvents(writer) if held else None
        for step in range(1, 20):
            if sink is not None:
                sink.settle(step - 1)
                sink.begin(step)
            log(writer, step, step / 3)
        writer.close()
        return read(folder)

    assert run(tmp_path / "held", True) == run(tmp_path / "plain", False)


def test_events_that_are_no_points_pass_through(writer: Any, sink: Any, tmp_path: Path) -> None:
    sink.begin(1)
    writer.add_text("arguments", "seed 1", 1)
    writer.add_histogram("weights", np.array([1.0, 2.0]), 1)
    sink.settle(1)
    events = [event for file in tmp_path.glob("events.*") for event in EventFileLoader(str(file)).Load()]
    tags = [value.tag for event in events if event.HasField("summary") for value in event.summary.value]
    assert tags == ["arguments/text_summary", "weights"]


def test_close_writes_what_is_held(writer: Any, sink: Any, points: Any) -> None:
    train(writer, sink, range(1, 4))
    writer.close()
    assert points() == line(1, 1) + line(2, 2) + line(3, 3)


def test_uninstall_writes_what_is_held_and_gives_the_writer_back(writer: Any, points: Any) -> None:
    events = writer.file_writer.event_writer
    sink = HeldEvents(writer)
    assert writer.file_writer.event_writer is not events
    train(writer, sink, range(1, 3))
    sink.uninstall()
    sink.uninstall()
    assert writer.file_writer.event_writer is events
    log(writer, 3, 3)
    writer.flush()
    assert points() == line(1, 1) + line(2, 2) + line(3, 3)
    writer.close()


def test_writer_stays_a_summary_writer(writer: Any, sink: Any, tmp_path: Path) -> None:
    assert type(writer) is SummaryWriter
    assert isinstance(writer, SummaryWriter)
    assert writer.get_logdir() == str(tmp_path)
    assert writer.file_writer.get_logdir() == str(tmp_path)
    writer.close()


def _log_and_die(folder: str) -> None:
    writer = SummaryWriter(folder, max_queue=1000)
    sink = HeldEvents(writer)
    train(writer, sink, range(1, 4))
    os.kill(os.getpid(), signal.SIGKILL)


def test_settled_points_survive_a_process_that_is_killed(tmp_path: Path, points: Any) -> None:
    child = multiprocessing.get_context("fork").Process(target=_log_and_die, args=(str(tmp_path),))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert points() == line(1, 1) + line(2, 2)
