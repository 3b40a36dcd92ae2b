# SPDX-License-Identifier: Apache-2.0
"""The examples of the README do what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clusters import ROOT

from mindspeed_recovery import cli
from mindspeed_recovery.core.report import Report
from mindspeed_recovery.logs import sinks
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)

README = (ROOT / "README.md").read_text(encoding="utf-8")


def example(language: str, title: str = "Declare your own state") -> str:
    """The first example of a section in one language."""
    section = re.search(rf"^## {title}$(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert section
    blocks = re.findall(rf"^```{language}$\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    assert blocks
    return blocks[0]


@pytest.fixture
def package(make_module: Callable[..., Any], memory: UnsafeMemory) -> SimpleNamespace:
    """The package that the examples speak of."""
    return SimpleNamespace(
        losses=make_module("my_pkg.losses", TRACKER={"z_loss": {"values": torch.zeros(2)}}),
        model=make_module(
            "my_pkg.model", "class Rotary:\n    def __init__(self, inv_freq):\n        self.inv_freq = inv_freq"
        ),
        ema=make_module("my_pkg.ema", EMA=torch.full((3,), 0.5)),
        data=make_module("my_pkg.data", COUNTER={"tokens": 0}),
    )


Declare = Callable[[SimpleNamespace, Callable[..., Any], Path], list[Path]]


def in_python(package: SimpleNamespace, make_module: Callable[..., Any], folder: Path) -> list[Path]:
    package.masks = make_module("my_pkg.masks", example("python"))
    return []


def in_toml(package: SimpleNamespace, make_module: Callable[..., Any], folder: Path) -> list[Path]:
    source = example("python")
    package.masks = make_module(
        "my_pkg.masks", "\n".join(re.findall(r"^(?!.*mindspeed_recovery).*", source, re.MULTILINE))
    )
    file = folder / "my_states.toml"
    file.write_text(example("toml"), encoding="utf-8")
    return [file]


@pytest.mark.parametrize("declare", [in_python, in_toml])
def test_own_state_of_each_policy_is_recovered(
    plugin: Any,
    package: SimpleNamespace,
    make_module: Callable[..., Any],
    memory: UnsafeMemory,
    tmp_path: Path,
    declare: Declare,
) -> None:
    catalogues = declare(package, make_module, tmp_path)
    rotary = package.model.Rotary(torch.tensor([1.0, 0.5]))
    session = plugin.enable(roots={"model": [rotary]}, memory=memory, catalogues=catalogues)

    def step(number: int, *, until: str = "end") -> None:
        session.begin_step(number)
        package.losses.TRACKER["z_loss"]["values"] += 1
        package.data.COUNTER["tokens"] += 100
        package.masks.position_mask(2)
        if until == "forward":
            return
        session.before_update(number)
        package.ema.EMA.mul_(0.5).add_(number * rotary.inv_freq[1])
        package.losses.TRACKER["z_loss"]["values"].zero_()  # the log line
        session.after_log(number)

    step(1)
    step(2)
    ema = package.ema.EMA.clone()
    step(3, until="forward")
    tracker, mask = package.losses.TRACKER["z_loss"]["values"], package.masks.position_mask(2)
    memory.mark_unsafe([tracker, mask, rotary.inv_freq, package.ema.EMA])

    session.stop()
    session.clean()
    with pytest.raises(RuntimeError, match="in quarantine"):
        package.losses.TRACKER["z_loss"]
    session.before_rollback(2)
    report = session.after_rollback()

    assert report.exact, report.failures
    actions = [report.outcomes[state["name"]].action for state in plugin.states()]
    assert actions == ["reset", "dropped", "rewritten", "restored", "restored"]
    assert package.losses.TRACKER["z_loss"]["values"].tolist() == [0, 0]
    assert package.data.COUNTER == {"tokens": 200}
    assert torch.equal(package.ema.EMA, ema)
    assert rotary.inv_freq.tolist() == [1.0, 0.5]
    assert package.masks.position_mask.cache_info().currsize == 0
    assert package.masks.position_mask(2).tolist() == [[1, 0], [1, 1]]
    del mask
    assert memory.unsafe_count() == 0


def test_log_of_ones_own_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sinks, "_makers", [])
    names: dict[str, Any] = {}
    exec(example("python", "Logs, and what happened"), names)
    found = sinks.find(None, None)
    assert found is not None
    for step in (1, 2, 3):
        found.settle(step - 1)
        found.begin(step)
        names["lines"].log(step, loss=step / 2)
    found.rollback(2)
    names["lines"].log(2, loss=-1.0, late=1.0)
    found.recovered(Report(1, step=2))
    found.begin(3)
    names["lines"].log(3, loss=9.0)
    found.uninstall()
    lines = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 1.0},
        {"step": 2, "late": 1.0},
        {"step": 3, "loss": 9.0},
    ]


def test_what_is_not_tracked_is_listed(
    plugin: Any, package: SimpleNamespace, memory: UnsafeMemory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    package.model.HEAD = model
    plugin.track("my_pkg.ema:EMA", policy="snapshot")
    plugin.enable(memory=memory, catalogues=[])
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    exec(example("python", "What is not tracked"), names)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("my_pkg")]
    assert lines == [
        "my_pkg.losses:TRACKER['z_loss']['values'] my_pkg.losses:TRACKER (2,) torch.float32 8 cpu",
    ]


def test_the_audit_says_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    title = "Which state of my own code is not covered\\?"
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").write_text("")
    (tmp_path / "my_pkg" / "losses.py").write_text(example("python", title))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", "my_pkg", "--fail-on", "untracked"]) == 1
    assert capsys.readouterr().out.startswith(example("text", title))
