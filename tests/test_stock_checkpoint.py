# SPDX-License-Identifier: Apache-2.0
"""Megatron's stock ``pretrain()`` goes on from its checkpoint: with the tracked states it is the run that never ended."""

from __future__ import annotations

import pickle
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


class WithoutMegatron:
    """A ``pickle_module`` that reads a checkpoint where Megatron is not installed."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.split(".")[0] != "megatron":
                return super().find_class(module, name)
            return lambda *args: (module, name, args)


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


def test_without_the_saved_states_the_averages_differ_and_one_warning_names_them(stock, whole, tmp_path):
    first_half(stock, "dp2", tmp_path, save_states=False)
    run = second_half(stock, "dp2", tmp_path)
    found = differences(run, whole("dp2"))
    assert found
    assert all("['averages']" in line or "['calls']" in line for line in found)
    for rank in (0, 1):
        (warning,) = warnings(run, rank)
        assert "the checkpoint holds no tracked states" in warning
        assert "'averages', 'calls'" in warning


def test_without_the_plugin_the_saved_states_are_ignored(stock, whole, tmp_path):
    first_half(stock, "dp2", tmp_path)
    run = second_half(stock, "dp2", tmp_path, on=())
    found = differences(run, whole("dp2"))
    assert found
    assert all("['averages']" in line or "['calls']" in line for line in found)
    assert not warnings(run)


def test_finetuning_begins_with_fresh_states(stock, tmp_path):
    first_half(stock, "dp2", tmp_path)
    run = second_half(stock, "dp2", tmp_path, "--finetune")
    assert not warnings(run)
    final = torch.load(f"{run.folder}/final.rank0", weights_only=False)
    assert final["calls"] == {"steps": 6}, "three more if those of the checkpoint were counted"


def test_strict_refuses_a_checkpoint_without_the_states(stock, tmp_path):
    first_half(stock, "dp2", tmp_path, save_states=False)
    run = stock.run(
        "dp2", ON, "--recovery-strict", *DROPOUT, "--ckpt-format", "torch", "--load", str(tmp_path), **AVERAGING
    )
    assert not run.ended_well
    assert "StateError: training does not go on after step 3 as it would have" in run.log(0)


def test_checkpoint_that_is_saved_after_training_has_ended_holds_the_states_too(stock, tmp_path):
    run = stock.run("dp2", ON, *saving(tmp_path), **AVERAGING)
    assert run.ended_well, run.tail()
    file = tmp_path / "iter_0000006/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False, pickle_module=WithoutMegatron)[KEY]  # type: ignore[arg-type]
    assert (content["version"], content["step"], content["rank"]) == (1, 6, 0)
    assert {"averages", "calls", "console-log-sums"} <= set(content["states"])
    assert content["alike"]["calls"] == [1]
    assert not {"router-expert-bias", "rng-cpu"} & set(content["states"]), "Megatron has these itself"


@pytest.mark.full
def test_each_stage_has_its_own(stock, whole, tmp_path):
    first_half(stock, "pp2", tmp_path)
    run = second_half(stock, "pp2", tmp_path)
    assert not differences(run, whole("pp2"))
    assert not warnings(run)


def test_other_formats_are_one_warning_at_the_start(stock, tmp_path):
    run = stock.run("dp2", ON, "--train-iters", "3", "--ckpt-format", "torch_dist", "--load", str(tmp_path))
    assert run.ended_well, run.tail()
    (warning,) = [line for line in warnings(run) if "format" in line]
    assert "'torch_dist' do not hold the tracked states" in warning
