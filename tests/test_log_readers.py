# SPDX-License-Identifier: Apache-2.0
"""Every reader of TensorBoard's files shows each step of each curve once, whatever has happened to the run."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from log_readers import READERS, Curves, event_accumulator, without_load_fast
from torch.utils.tensorboard import SummaryWriter

from mindspeed_recovery.core.report import Outcome, Report
from mindspeed_recovery.logs.tensorboard import HeldEvents

pytestmark = pytest.mark.timeout(120)

STEPS = 24
reader = pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)


class Plain:
    """No sink: what is logged goes to the file."""

    def __init__(self, writer: Any) -> None: ...
    def begin(self, step: int) -> None: ...
    def settle(self, step: int) -> None: ...
    def rollback(self, step: int) -> None: ...
    def recovered(self, report: Report) -> None: ...
    def uninstall(self) -> None: ...


def log(writer: SummaryWriter, step: int, by: float = 0.0) -> None:
    """A log line as Megatron writes it, with tags that are not in every line, and curves in files of their own."""
    value = 10 / (step + 2) + by
    writer.add_scalar("lm loss", value, step)
    writer.add_scalar("lm loss vs samples", value, step * 8)
    if step % 3 == 0:
        writer.add_scalar("lm loss validation", value + 1, step)
    writer.add_scalars("experts", {"load": value / 2, "drop": value / 3}, step)


def report(step: int, number: int = 1) -> Report:
    found = Report(number, step=step, cause="memory fault", ranks=[1], phases={"stop": 1.5, "rollback": 2.0})
    found.outcomes = {"bias": Outcome("bias", "restored", nbytes=32), "mask": Outcome("mask", "dropped")}
    return found


def train(folder: Path, faults: list[tuple[int, int, bool]], sink: type = HeldEvents, first: int = 1) -> None:
    """``faults``: in which step, back to which, and whether the line of that step is written again."""
    writer = SummaryWriter(str(folder), max_queue=1000)
    events = sink(writer)
    waiting, step = list(faults), first
    while step <= STEPS:
        events.settle(step - 1)
        events.begin(step)
        if waiting and waiting[0][0] == step:
            _, back, replay = waiting.pop(0)
            writer.add_scalar("lm loss", 99.0, step)  # of a step that is given up
            events.rollback(back)
            if replay:
                log(writer, back)
            events.recovered(report(back))
            step = back + 1
            continue
        log(writer, step)
        step += 1
    writer.flush()
    events.uninstall()
    writer.close()


def curves(found: Curves) -> Curves:
    """Without what is told of recoveries, which a run without a fault does not have."""
    kept = {
        run: {tag: points for tag, points in tags.items() if not tag.startswith("recovery/")}
        for run, tags in found.items()
    }
    return {run: tags for run, tags in kept.items() if tags}


def each_once(found: Curves) -> bool:
    return all(len({step for step, _ in points}) == len(points) for tags in found.values() for points in tags.values())


PLANS = {
    "one": [(5, 4, False)],
    "replayed": [(5, 4, True)],
    "five": [(3, 2, False), (7, 6, True), (7, 6, True), (12, 11, False), (20, 19, True)],
    "fallback": [(16, 6, False)],
    "fallback-and-again": [(16, 6, True), (9, 8, True), (20, 6, False)],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder, [], Plain)
    return folder


@reader
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_each_reader_shows_the_undisturbed_run(
    read: Callable[..., Curves], plan: Any, undisturbed: Path, tmp_path: Path
):
    train(tmp_path, plan)
    found, expected = read(tmp_path), read(undisturbed)
    assert len(expected) == 3
    assert len(expected["."]["lm loss vs samples"]) == STEPS
    assert curves(found) == expected
    assert each_once(found)
    assert len(found["."]["recovery/marker"]) == len({back for _, back, _ in plan})


@pytest.mark.parametrize("read", [without_load_fast, event_accumulator])
def test_without_the_sink_these_readers_show_points_twice(read: Callable[..., Curves], tmp_path: Path):
    train(tmp_path, PLANS["fallback"], Plain)
    assert not each_once(read(tmp_path))


@reader
def test_first_write_wins_after_a_fallback(read: Callable[..., Curves], tmp_path: Path):
    writer = SummaryWriter(str(tmp_path))
    events = HeldEvents(writer)
    for step, by in [*((step, 0.0) for step in range(1, 15)), *((step, 0.5) for step in range(5, 17))]:
        if (step, by) == (5, 0.5):
            events.rollback(4)
            writer.add_scalar("new", 1.0, 4)
        events.settle(step - 1)
        events.begin(step)
        log(writer, step, by)
    writer.close()
    found = read(tmp_path)["."]
    assert each_once({".": found})
    # Line 14 was not settled when the run fell back, so it was never written.
    expected = [10 / (step + 2) + (0.5 if step >= 14 else 0.0) for step in range(1, 17)]
    import numpy as np

    values = [float(np.uint32(bits).view(np.float32)) for _, bits in found["lm loss"]]
    assert values == [float(np.float32(value)) for value in expected]
    assert [step for step, _ in found["lm loss vs samples"]] == [step * 8 for step in range(1, 17)]
    assert [step for step, _ in found["new"]] == [4], "what the first time left out is filled in"


def test_five_recoveries_open_no_file_and_no_thread(tmp_path: Path):
    import threading

    writer = SummaryWriter(str(tmp_path))
    events = HeldEvents(writer)
    log(writer, 1)
    events.settle(1)
    before = threading.active_count(), sorted(tmp_path.rglob("*tfevents*"))
    for number in range(1, 6):
        events.begin(number + 1)
        log(writer, number + 1)
        events.rollback(number)
        log(writer, number)
        events.recovered(report(number, number))
        events.begin(number + 1)
        log(writer, number + 1)
        events.settle(number + 1)
    assert (threading.active_count(), sorted(tmp_path.rglob("*tfevents*"))) == before
    writer.close()


# ---- killed at any moment --------------------------------------------------------------------------------------------------


def _train_until_killed(folder: Path, first: int, committed: Any, seed: int) -> None:
    logging.disable()
    chance = random.Random(seed)
    writer = SummaryWriter(str(folder), max_queue=1000)
    events = HeldEvents(writer)
    step = first
    while True:
        events.settle(step - 1)
        committed.value = step - 1
        events.begin(step)
        if step > first + 2 and chance.random() < 0.2:
            events.rollback(step - 1)
            log(writer, step - 1)
            events.recovered(report(step - 1))
            continue
        log(writer, step)
        time.sleep(0.002)
        step += 1


@pytest.mark.parametrize("seed", range(20))
def test_killed_at_any_moment_and_restarted(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    context = multiprocessing.get_context("fork")
    first, last = 1, 0
    for _ in range(2):
        committed = context.Value("i", 0)
        child = context.Process(target=_train_until_killed, args=(tmp_path, first, committed, seed))
        child.start()
        time.sleep(0.05 + 0.15 * chance.random())
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join(30)
        last = max(last, committed.value)
        found = event_accumulator(tmp_path)
        assert each_once(found)
        if last > 0:
            assert {step for step, _ in found["."]["lm loss"]} >= set(range(1, last + 1))
            assert {step for step, _ in found["experts_load"]["experts"]} >= set(range(1, last + 1))
        first = max(1, last - chance.randrange(8))  # the last checkpoint
    train_on = max(1, last - 3)
    writer = SummaryWriter(str(tmp_path))
    events = HeldEvents(writer)
    for step in range(train_on, last + 6):
        events.settle(step - 1)
        events.begin(step)
        log(writer, step)
    events.uninstall()
    writer.close()
    found = event_accumulator(tmp_path)
    assert each_once(found)
    assert [step for step, _ in sorted(found["."]["lm loss"])] == list(range(1, last + 6))
    assert [step for step, _ in sorted(found["."]["lm loss vs samples"])] == list(range(8, 8 * (last + 6), 8))


@reader
def test_restarted_run_goes_on_where_the_files_end(read: Callable[..., Curves], tmp_path: Path, undisturbed: Path):
    writer = SummaryWriter(str(tmp_path))
    events = HeldEvents(writer)
    for step in range(1, 15):
        events.settle(step - 1)
        events.begin(step)
        log(writer, step)
    events.settle(14)
    writer.close()
    time.sleep(1.1)  # the files' names, by which readers sort them, tell seconds
    train(tmp_path, [(13, 12, True), (20, 19, True)], first=7)
    found = read(tmp_path)
    assert each_once(found)
    assert curves(found) == read(undisturbed)


def test_without_the_sink_a_restarted_run_shows_points_twice(tmp_path: Path):
    train(tmp_path, [], Plain)
    train(tmp_path, [], Plain, first=7)
    assert not each_once(event_accumulator(tmp_path))
