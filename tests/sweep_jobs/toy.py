# SPDX-License-Identifier: Apache-2.0
"""A job for the sweep whose runs end in every way, by the tensor that a fault has hit. Its device is simulated, and it
recovers by itself."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed_recovery.testing.faults import InjectedFault
from mindspeed_recovery.testing.simulator import UnsafeMemory

GLOBALS: dict[str, torch.Tensor] = {}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensorboard-dir", type=Path)
    parser.add_argument("--save-final", type=Path)
    parser.add_argument("--enable-recovery-safe-globals", action="store_true")
    return parser.parse_args(argv)


def join(store: Any, rank: int, world_size: int) -> Any:
    return store


def pretrain(
    args: argparse.Namespace, rank: int, world_size: int, store: Any, prepare: Callable[[Any], None] | None = None
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    model = torch.nn.Linear(2, 2)
    names = ("repaired", "unnoticed", "refused", "waited_for")
    GLOBALS.update((name, torch.ones(3)) for name in names)
    job = SimpleNamespace(memory=UnsafeMemory(), roots={"model": model}, injector=None)
    assert prepare is not None
    prepare(job)
    for step in (1, 2, 3):
        try:
            job.injector.at("forward", step)
        except InjectedFault:
            job.memory.check_uce_in_memory()
            hit = [name for name in names if job.memory.is_unsafe(GLOBALS[name])]
            if hit == ["refused"] or len(hit) > 1:
                raise RuntimeError("refused is lost") from None
            if hit == ["waited_for"]:
                time.sleep(60)
            if hit == ["repaired"]:
                GLOBALS["repaired"].copy_(torch.ones(3))
    with SummaryWriter(str(args.tensorboard_dir)) as writer:
        writer.add_scalar("loss", 1.0, 1)
    torch.save({"globals": GLOBALS}, f"{args.save_final}.rank{rank}")
