# SPDX-License-Identifier: Apache-2.0
"""Ranks that die and are started again under MindIO TFT ("ARF"), and repairs of more than one optimizer."""

from __future__ import annotations

from typing import Any

import pytest
from test_mindio import NEITHER, Result, Run, fault, run  # noqa: F401

pytestmark = pytest.mark.timeout(90)
AGENT = {"agent": True, "world": 2}


def die(step: int, at: str, rank: int = 1, **more: Any) -> dict[str, Any]:
    return fault("die", step, at, rank=rank, **more)


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> Any:  # noqa: F811
    return run(plugin=NEITHER, job=AGENT).outcome()


@pytest.mark.parametrize("rank", [1, 0])
def test_first(run: Run, undisturbed: Any, rank: int) -> None:  # noqa: F811
    result = run(die(3, "forward2", rank), job=AGENT, exchange="states")
    print(result.tail(), (result.folder / "agent.log").read_text())
    assert result.outcome() == undisturbed
