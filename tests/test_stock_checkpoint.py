# SPDX-License-Identifier: Apache-2.0
"""Megatron's stock ``pretrain()`` goes on from its checkpoint: with the tracked states it is the run that never ended."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import Run, StockCluster
from equal import ON

from mindspeed_recovery.testing.compare import compare_states

pytestmark = pytest.mark.timeout(200)

DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
"""Megatron restores the generators before it makes its data loaders, which draw a number from one each; here that one is
the device's too."""

AVERAGING = {"prepare": "stock_server:average_parameters"}
KEY = "mindspeed_recovery"


def saving(folder: Path) -> tuple[str, ...]:
    return "--ckpt-format", "torch", "--save", str(folder), "--save-interval", "100"


def first_half(stock: StockCluster, layout: str, folder: Path, *options: str, **prepare: Any) -> Run:
    run = stock.run(layout, ON, *DROPOUT, *saving(folder), "--exit-interval", "3", *options, **AVERAGING, **prepare)
    assert run.ended_well, run.tail()
    return run


def second_half(stock: StockCluster, layout: str, folder: Path, *options: str, on: tuple[str, ...] = (ON,)) -> Run:
    run = stock.run(layout, *on, *DROPOUT, "--ckpt-format", "torch", "--load", str(folder), *options, **AVERAGING)
    assert run.ended_well, run.tail()
    return run


@pytest.fixture(scope="module")
def whole(stock: StockCluster) -> Any:
    """The run that is not interrupted, without the plugin's checkpoint."""
    runs: dict[str, Run] = {}

    def get(layout: str) -> Run:
        if layout not in runs:
            runs[layout] = stock.run(layout, ON, *DROPOUT, **AVERAGING)
            assert runs[layout].ended_well, runs[layout].tail()
        return runs[layout]

    return get


def differences(run: Run, whole: Run) -> list[str]:
    found = []
    for rank in range(len(run.codes)):
        files = f"{whole.folder}/final.rank{rank}", f"{run.folder}/final.rank{rank}"
        found += [f"rank {rank}: {line}" for line in compare_states(*files).differences if "['rng']" not in line]
    return found


def warnings(run: Run, rank: int = 0) -> list[str]:
    return [line for line in run.log(rank).splitlines() if line.startswith("WARNING:mindspeed_recovery")]


def test_new_process_goes_on_as_the_run_that_was_not_interrupted(stock, whole, tmp_path):
    first_half(stock, "dp2", tmp_path)
    run = second_half(stock, "dp2", tmp_path)
    assert not differences(run, whole("dp2"))
    assert not warnings(run)
