# SPDX-License-Identifier: Apache-2.0
"""``mindspeed-recovery report``."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from mindspeed_recovery.cli import main
from mindspeed_recovery.core.report import Outcome, Report
from mindspeed_recovery.logs.tensorboard import HeldEvents
from mindspeed_recovery.tools import report as tool

pytestmark = pytest.mark.timeout(60)


def make_run(folder: Path, *recoveries: tuple[int, bool]) -> Path:
    """A run of ten steps with recoveries back to these steps, exact or not."""
    writer = SummaryWriter(str(folder))
    sink = HeldEvents(writer)
    waiting, step = list(recoveries), 1
    while step <= 10:
        sink.settle(step - 1)
        sink.begin(step)
        writer.add_scalar("lm loss", 1 / step, step)
        writer.add_scalar("lm loss vs samples", 1 / step, step * 8)
        writer.add_scalar("load_balancing_loss", 2 / step, step)
        step += 1
        if waiting and waiting[0][0] == step - 2:
            back, exact = waiting.pop(0)
            report = Report(len(recoveries) - len(waiting), step=back, cause="link fault", ranks=[3], retries=0)
            report.phases = {"stop": 1.0, "rollback": 3.25}
            report.outcomes = {"bias": Outcome("bias", "restored", nbytes=32, error="" if exact else "no copy")}
            sink.rollback(back)
            sink.recovered(report)
            step = back + 1
    writer.close()
    return folder


def test_table_of_the_recoveries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", (4, True), (7, False))
    make_run(tmp_path / "b")
    assert main(["report", str(tmp_path)]) == 0
    header, first, second, failure = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "time", "cause", "ranks", "step", "states", "ms", "retries", "exact"]
    assert first.split()[0] == "a"
    assert first.split()[3:] == ["link", "fault", "3", "4", "1", "restored", "4.2", "0", "yes"]
    assert second.split()[3:] == ["link", "fault", "3", "7", "1", "restored", "4.2", "0", "NO"]
    assert failure == "step 7 is not exact: bias: no copy"


def test_json_of_the_recoveries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, (4, True), (4, True))
    assert main(["report", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["findings"] == []
    assert [(r["step"], r["number"], r["cause"], r["ranks"], r["exact"]) for r in found["recoveries"]] == [
        (4, 1, "link fault", [3], True),
        (4, 2, "link fault", [3], True),
    ]
    assert found["recoveries"][0]["phases"] == {"stop": 1.0, "rollback": 3.25}
    assert found["recoveries"][0]["milliseconds"] == 4.25
    assert found["recoveries"][0]["time"] > 1e9


def test_run_without_a_recovery(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no recovery is in these logs\n"


def test_file_that_is_cut_is_read_up_to_there_and_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, (4, True))
    [file] = tmp_path.glob("*tfevents*")
    whole = tool.read(tmp_path, curves=True)[0]
    file.write_bytes(file.read_bytes()[:-3])
    [cut] = tool.read(tmp_path, curves=True)
    assert cut.recoveries == whole.recoveries
    assert cut.curves["lm loss"] == whole.curves["lm loss"]
    del whole.curves["load_balancing_loss"][10]  # the last record
    assert cut.curves == whole.curves
    assert main(["report", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 2
    [finding] = output.err.splitlines()
    assert finding.startswith("finding: ")
    assert str(file) in finding


def test_damaged_record_is_a_finding(tmp_path: Path) -> None:
    make_run(tmp_path, (4, True))
    [file] = tmp_path.glob("*tfevents*")
    data = bytearray(file.read_bytes())
    at = data.index(b"recovery/marker")
    data[at - 6 : at - 2] = b"\xff\xff\xff\xff"
    file.write_bytes(data)
    [run] = tool.read(tmp_path)
    assert len(run.recoveries) == 1
    assert ["damaged" in finding for finding in run.findings] == [True]


@pytest.mark.parametrize("runs", [["a"], ["a", "b"]])
def test_picture_of_the_curves(runs: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    import matplotlib.axes

    drawn, marked = [], []
    plot, mark = matplotlib.axes.Axes.plot, matplotlib.axes.Axes.axvline
    monkeypatch.setattr(matplotlib.axes.Axes, "plot", lambda *a, **k: (drawn.append(list(a[1])), plot(*a, **k))[1])
    monkeypatch.setattr(matplotlib.axes.Axes, "axvline", lambda *a, **k: (marked.append(a[1]), mark(*a, **k))[1])
    for run in runs:
        make_run(tmp_path / run, (4, True), (7, False))
    assert main(["report", str(tmp_path), "--png", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert drawn == [list(range(1, 11))] * 2 * len(runs), "the loss and the loss of a part"
    assert marked == [4, 7] * 2 * len(runs)


def test_nothing_to_read_is_bad_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "no TensorBoard event file" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "options"), [("tensorboard", []), ("matplotlib", ["--png", "x.png"])])
def test_package_that_is_missing_is_named_with_its_command(
    package: str, options: list[str], tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, (4, True))
    found = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["report", str(tmp_path), *options]) == 2
    assert f"pip install {package}" in capsys.readouterr().err


def test_report_needs_no_torch(tmp_path: Path) -> None:
    make_run(tmp_path, (4, True))
    code = (
        "import sys; sys.modules['torch'] = None; from mindspeed_recovery.cli import main; "
        f"sys.exit(main(['report', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "link fault" in done.stdout
