# SPDX-License-Identifier: Apache-2.0
"""Points reach the event file when their step is settled, and each only once."""

import errno
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter

from mindspeed_recovery.core.report import Outcome, Report
from mindspeed_recovery.logs import event_files, held, tensorboard
from mindspeed_recovery.logs.tensorboard import HeldEvents, from_markdown

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


def read_scalars(folder: Path) -> list[tuple[str, int, float]]:
    """As `read`, without texts."""
    return [
        (value.tag, event.step, value.tensor.float_val[0])
        for file in sorted(folder.glob("events.*"))
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tensor.float_val
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


def add_everything(writer: SummaryWriter, step: int) -> None:
    """One event of each kind that a writer of torch knows without further packages."""
    image = np.zeros((3, 8, 8), dtype=np.float32)
    writer.add_scalar("scalar", 1.5, step, walltime=100.0 + step)
    writer.add_scalar("new style", 2.5, step, new_style=True, double_precision=True)
    writer.add_scalars("many", {"a": 1.0, "b": 2.0}, step)
    writer.add_histogram("histogram", np.array([1.0, 2.0, 3.0]), step)
    writer.add_histogram_raw("raw", 0.0, 3.0, 2, 3.0, 5.0, [1.0, 3.0], [1, 1], step)
    writer.add_image("image", image, step)
    writer.add_images("images", image[None], step)
    writer.add_text("text", "a *text*", step)
    writer.add_tensor("tensor", torch.ones(2), step)
    writer.add_pr_curve("precision", np.array([0, 1]), np.array([0.1, 0.9]), step)
    writer.add_mesh("mesh", torch.zeros(1, 3, 3), global_step=step)
    writer.add_audio("audio", torch.zeros(1, 16), step)
    writer.add_embedding(torch.eye(3), global_step=step, tag="embedding")
    writer.add_hparams({"lr": 0.1}, {"hparam/loss": 1.0}, run_name=f"trial {step}")
    writer.add_custom_scalars({"layout": {"loss": ["Multiline", ["scalar"]]}})
    writer.flush()


def everything(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What is in each run below a folder: step, tag and content of each value, in order; times where they were given."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for file in sorted(folder.rglob("*tfevents*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                given = event.wall_time if event.wall_time < 1000 else None
                point = (
                    event.step,
                    value.tag,
                    given,
                    value.tensor.SerializeToString(),
                    value.metadata.plugin_data.plugin_name,
                )
                found.setdefault(str(file.parent.relative_to(folder)), []).append(point)
    return found


def test_every_kind_of_event_arrives_as_without_the_sink(tmp_path: Path) -> None:
    def run(folder: Path, held: bool) -> dict[str, list[tuple[Any, ...]]]:
        writer = SummaryWriter(str(folder))
        sink = HeldEvents(writer) if held else None
        for step in range(1, 4):
            if sink is not None:
                sink.settle(step - 1)
                sink.begin(step)
            add_everything(writer, step)
        writer.close()
        return everything(folder)

    plain, with_sink = run(tmp_path / "plain", False), run(tmp_path / "held", True)
    assert len(plain["."]) > 30
    assert "many_a" in plain
    assert any(name.startswith("trial") for name in plain)

    def without_step(points: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [point for point in points if point[0] == 0]

    def with_step(points: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [point for point in points if point[0] != 0]

    assert with_sink.keys() == plain.keys()
    for name, points in plain.items():  # those without a step do not wait for those with one
        assert with_step(with_sink[name]) == with_step(points)
        assert without_step(with_sink[name]) == without_step(points)


def test_every_kind_of_event_is_dropped_and_written_once(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    sink = HeldEvents(writer)
    sink.begin(1)
    add_everything(writer, 1)
    sink.settle(1)
    sink.begin(2)
    add_everything(writer, 2)
    sink.rollback(1)
    add_everything(writer, 1)
    sink.begin(2)
    add_everything(writer, 2)
    writer.close()
    points = [point[:2] for points in everything(tmp_path).values() for point in points if point[0]]
    assert len([point for point in points if point[0] == 2]) == 13
    many = [point for point in points if point[1] == "many"]
    assert len(points) - len(set(points)) == len(many) // 2, "the two curves of add_scalars have one tag, in two files"


def test_event_without_a_step_is_in_the_file_at_once(writer: Any, sink: Any, tmp_path: Path) -> None:
    sink.begin(1)
    writer.add_custom_scalars({"layout": {"loss": ["Multiline", ["loss"]]}})
    writer.add_scalar("loss", 0.5, 0)
    [point] = everything(tmp_path)["."]
    assert point[4] == "custom_scalars"
    sink.settle(1)
    assert [point[1] for point in everything(tmp_path)["."]][1:] == ["loss"]


def test_event_of_which_a_part_is_written_loses_that_part(writer: Any, sink: Any, points: Any) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary

    def both(b: float) -> Summary:
        return Summary(value=[Summary.Value(tag="a", simple_value=1.0), Summary.Value(tag="b", simple_value=b)])

    sink.begin(1)
    writer.add_scalar("a", 0.5, 1)
    sink.rollback(1)
    writer.file_writer.add_summary(both(2.0), 1)
    sink.settle(1)
    assert points() == [("a", 1, 0.5), ("b", 1, 2.0)]


def test_file_that_is_opened_after_close_is_held_too(writer: Any, sink: Any, points: Any) -> None:
    train(writer, sink, range(1, 3))
    writer.close()
    time.sleep(1.1)  # files are named by the second
    train(writer, sink, range(3, 5))
    sink.rollback(3)
    log(writer, 3, -1)
    train(writer, sink, range(4, 6))
    writer.close()
    assert points() == [point for step in range(1, 6) for point in line(step, step)]


def test_times_are_those_of_logging(writer: Any, sink: Any, tmp_path: Path) -> None:
    sink.begin(1)
    writer.add_scalar("loss", 1.0, 1)
    after = time.time()
    time.sleep(0.05)
    sink.settle(1)
    [file] = tmp_path.glob("events.*")
    assert next(event.wall_time for event in EventFileLoader(str(file)).Load() if event.HasField("summary")) <= after


# ---- what an earlier process left ----------------------------------------------------------------------------------------


def test_steps_that_go_back_within_a_file_say_nothing_about_the_others(tmp_path: Path, points: Any) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (0, 1, 2, 0, 1):
            writer.add_scalar("in the step", step, step)
        writer.add_scalar("loss", 1.0, 9)
    found = event_files.history(event_files.files(tmp_path))
    assert found.last == {"loss": 9}


def test_recoveries_of_before_a_restart_are_counted(tmp_path: Path) -> None:
    for expected in ({"recovery/marker"}, {"recovery/marker", "recovery/retry-1/marker"}):
        writer = SummaryWriter(str(tmp_path))
        sink = HeldEvents(writer)
        sink.recovered(Report(1, step=4))
        writer.close()
        tags = {point[1] for point in everything(tmp_path)["."]}
        assert {tag for tag in tags if tag.endswith("marker")} == expected


def test_nothing_is_written_before_the_old_files_are_read(tmp_path: Path, points: Any, monkeypatch: Any) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 5):
            log(writer, step, step)
    monkeypatch.setattr(held, "_PATIENCE_SECONDS", 0.01)
    go_on, read_history = threading.Event(), event_files.history
    monkeypatch.setattr(event_files, "history", lambda files: (go_on.wait(20), read_history(files))[1])
    time.sleep(1.1)
    writer = SummaryWriter(str(tmp_path))
    sink = HeldEvents(writer)
    before = points()
    train(writer, sink, range(3, 7), 0.5)
    assert points() == before, "a large file does not stop training"
    go_on.set()
    writer.close()
    assert points() == before + line(5, 5.5) + line(6, 6.5)


def test_large_files_are_read_by_another_process(tmp_path: Path, monkeypatch: Any) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        sink = HeldEvents(writer)
        train(writer, sink, range(1, 4))
        sink.recovered(Report(1, step=3))
    files = event_files.files(tmp_path)
    here = event_files.history(files)
    monkeypatch.setattr(event_files, "LARGE_BYTES", 0)
    read_here = event_files._read
    monkeypatch.setattr(event_files, "_read", lambda paths: pytest.fail("read by this process"))
    assert event_files.history(files) == here
    assert (here.last, here.recoveries[3]) == ({"loss": 3, "loss vs samples": 24}, 1)
    monkeypatch.setattr(event_files.sys, "executable", "/no/such/python")
    monkeypatch.setattr(event_files, "_read", read_here)
    assert event_files.history(files) == here


def test_old_files_that_cannot_be_read_are_one_warning(
    tmp_path: Path, points: Any, monkeypatch: Any, caplog: Any
) -> None:
    (tmp_path / "events.out.tfevents.1.host.1.0").write_bytes(b"\x05" + bytes(11) + b"\xff" * 20)
    writer = SummaryWriter(str(tmp_path))
    sink = HeldEvents(writer)
    train(writer, sink, range(1, 3))
    writer.close()
    assert [point for point in points() if point[0] == "loss"] == [("loss", 1, 1.0), ("loss", 2, 2.0)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# ---- a disk that is full -------------------------------------------------------------------------------------------------


class FullDisk:
    """Lets TensorBoard's file, and whoever asks for room, meet a full disk, in the middle of a record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.full, self.refused = False, 0
        write, room = RecordWriter.write, tensorboard.tempfile.TemporaryFile

        def write_until_full(record_writer: Any, data: bytes) -> None:
            if self.full:
                self.refused += 1
                record_writer._writer.write(b"torn")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(record_writer, data)

        def room_until_full(*args: Any, **kwargs: Any) -> Any:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return room(*args, **kwargs)

        monkeypatch.setattr(RecordWriter, "write", write_until_full)
        monkeypatch.setattr(tensorboard.tempfile, "TemporaryFile", room_until_full)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # the queue's thread tells of its end
    return FullDisk(monkeypatch)


def test_full_disk_is_one_warning_and_nothing_is_lost(
    writer: Any, sink: Any, points: Any, disk: FullDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(writer, sink, range(1, 4))
    disk.full = True
    train(writer, sink, range(4, 7))
    sink.rollback(5)
    log(writer, 5, -1)
    writer.flush()
    train(writer, sink, range(6, 9))
    assert disk.refused > 0, "the disk was asked"
    assert points() == line(1, 1) + line(2, 2) + line(3, 3)[: len(points()) - 4], "and nothing torn is left in the file"
    disk.full = False
    time.sleep(1.1)
    train(writer, sink, range(9, 11))
    writer.close()
    assert points() == [point for step in range(1, 11) for point in line(step, step)]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "No space left on device" in caplog.messages[0]
    assert len(list(tmp_path.glob("events.*"))) == 2
    assert not any(event_files.torn_bytes(file) for file in tmp_path.glob("events.*"))


def test_without_the_sink_a_full_disk_raises_into_training(writer: Any, disk: FullDisk) -> None:
    disk.full = True
    with pytest.raises(OSError, match="No space left"):
        for step in range(100):
            log(writer, step, 0)
            writer.flush()


def test_disk_that_stays_full_does_not_keep_training_from_its_end(
    writer: Any, sink: Any, points: Any, disk: FullDisk, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(held, "LIMIT", 10)
    disk.full = True
    train(writer, sink, range(1, 50))
    assert len(sink._main._items) <= 10 + 2
    writer.close()
    sink.uninstall()
    assert points() == []
    assert len(caplog.messages) == 2
    assert caplog.messages[1] == "the log could not be written to its end; 98 lines are lost"


def test_full_disk_is_one_warning_for_all_files_of_a_writer(
    writer: Any, sink: Any, disk: FullDisk, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    for step in range(1, 12):
        disk.full = 4 <= step < 8
        sink.settle(step - 1)
        sink.begin(step)
        log(writer, step, step)
        writer.add_scalars("experts", {"a": step, "b": step}, step)
    writer.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    for run in ("experts_a", "experts_b"):
        assert [step for _, step, _ in sorted(read(tmp_path / run))] == list(range(1, 12))


# ---- fork ----------------------------------------------------------------------------------------------------------------


def _child(writer: SummaryWriter, sink: HeldEvents) -> None:
    log(writer, 3, -1)
    sink.settle(3)
    writer.flush()
    writer.close()
    os._exit(0)


def test_fork_neither_loses_nor_repeats_what_is_held(writer: Any, sink: Any, points: Any) -> None:
    train(writer, sink, range(1, 4))
    child = multiprocessing.get_context("fork").Process(target=_child, args=(writer, sink))
    with sink._main._lock:  # another thread logs at this moment
        child.start()
        child.join(20)
    assert child.exitcode == 0, "the child does not wait for a lock of its parent"
    assert points() == line(1, 1) + line(2, 2)
    train(writer, sink, range(4, 5))
    writer.close()
    assert points() == [point for step in range(1, 5) for point in line(step, step)]


# ---- recoveries ----------------------------------------------------------------------------------------------------------


def test_recovery_is_told_below_its_own_tags(writer: Any, sink: Any, tmp_path: Path) -> None:
    report = Report(3, step=2, replayed=True, cause="memory fault", ranks=[1, 5], retries=1)
    report.phases, report.milliseconds = {"stop": 1.0, "repair": 2.5}, {"restore": 0.5}
    report.outcomes = {
        "mask": Outcome("mask", "dropped", nbytes=64),
        "bias": Outcome("bias", "restored", nbytes=32, error="no copy --> of it"),
    }
    train(writer, sink, range(1, 4))
    sink.rollback(2)
    sink.recovered(report)
    sink.settle(2)
    found = {point[1]: point for point in everything(tmp_path)["."] if point[1].startswith("recovery/")}
    assert {point[0] for point in found.values()} == {2}
    scalars = {tag: value for tag, _, value in read_scalars(tmp_path) if tag.startswith("recovery/")}
    assert scalars == {
        "recovery/marker": 0.0,
        "recovery/bytes": 96.0,
        "recovery/ms/total": 3.5,
        "recovery/ms/stop": 1.0,
        "recovery/ms/repair": 2.5,
        "recovery/ms/plugin/restore": 0.5,
        "recovery/states/dropped": 1.0,
        "recovery/states/restored": 1.0,
    }
    text = tensorboard.markdown(report)
    assert from_markdown(text) == report.as_dict()
    assert found["recovery/report/text_summary"][4] == "text"
    from tensorboard.plugin_util import markdown_to_safe_html

    shown = markdown_to_safe_html(text)
    for wanted in (
        "<td>memory fault</td>",
        "<td>1, 5</td>",
        "<strong>no</strong>",
        "1 dropped, 1 restored",
        "bias: no copy",
    ):
        assert wanted in shown
    assert "milliseconds" not in shown, "what programs read is not shown"
    writer.close()


def test_text_of_others_is_no_recovery() -> None:
    assert from_markdown("a table") is None
    assert from_markdown("<!-- a comment -->") is None
    assert from_markdown('<!-- {"a": 1} -->') is None


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
    assert vars(writer).keys() == {*vars(SummaryWriter(str(tmp_path / "other")))} | {"_get_file_writer"}
    sink.uninstall()
    assert "_get_file_writer" not in vars(writer)


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
