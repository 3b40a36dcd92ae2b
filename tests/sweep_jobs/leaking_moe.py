# SPDX-License-Identifier: Apache-2.0
"""``examples/pretrain_moe.py`` with two states that no catalogue knows: one is read in every step, one only at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pretrain_moe
import torch
from pretrain_moe import join, parse_args

__all__ = ["join", "parse_args", "pretrain"]

READ: dict[str, torch.Tensor] = {}
KEPT: dict[str, torch.Tensor] = {}


def pretrain(args: Any, rank: int, world_size: int, store: Any, prepare: Callable[[Any], None] | None = None) -> None:
    def prepare_too(job: Any) -> None:
        READ["scale"], KEPT["bias"] = torch.ones(2), torch.ones(2)
        chunk = job.model.module
        chunk.register_buffer("untracked", KEPT["bias"])
        chunk.register_forward_pre_hook(lambda *_: READ.update(scale=READ["scale"] * 1.0))
        assert prepare is not None
        prepare(job)

    pretrain_moe.pretrain(args, rank, world_size, store, prepare_too)
