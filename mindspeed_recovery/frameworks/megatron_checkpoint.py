# SPDX-License-Identifier: Apache-2.0
"""The tracked states in Megatron's own checkpoint of torch format: one key of the dict that each file holds.

``generate_state_dict()`` makes that dict, for a checkpoint as for MindIO TFT's last words, and ``_load_base_checkpoint()``
reads it; `megatron_loop` wraps both. Without the plugin nobody looks at the key. In torch format only the first of the
ranks with equal parameters writes, and all of them read its file: see `core.checkpoint` for what each may take.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from mindspeed_recovery.core.checkpoint import KEY, Checkpoint, Loaded

logger = logging.getLogger("mindspeed_recovery")

_SIZES = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def holds_states(args: Any) -> bool:
    """Whether the checkpoints of this job are of the one format that can hold the states."""
    return args.ckpt_format == "torch" and not getattr(args, "use_dist_ckpt", False)


def warn_of_format(args: Any) -> None:
    """Once, at the start of a job that saves or loads: say that the states do not ride in other formats."""
    if (args.save or args.load) and not holds_states(args) and args.rank == 0:
        logger.warning(
            "checkpoints of format '%s' do not hold the tracked states: a job that goes on from one begins them anew. Use "
            "--ckpt-format torch, or save them yourself",
            args.ckpt_format,
        )


def announce(checkpoint: Checkpoint, args: Any, step: int) -> None:
    """Every rank, before a checkpoint of ``step`` is saved. Raises only a fault of the device."""
    if holds_states(args):
        checkpoint.announce(step)


def states(checkpoint: Checkpoint, args: Any, step: int) -> dict[str, Any]:
    """What is added to a file of the checkpoint of ``step``. Raises only a fault of the device; never in last words."""
    if not holds_states(args):
        return {}
    try:
        content = checkpoint.save(
            step,
            layout=_layout(args),
            peers=_peers(),
            generators=not args.no_save_rng,
            without=("optimizer",) if args.no_save_optim else (),
        )
    except Exception as error:
        if checkpoint.must_pass(error):
            raise
        logger.warning(
            "the checkpoint of step %d does not hold the tracked states: %s: %s", step, type(error).__name__, error
        )
        return {}
    return {KEY: content}


def loaded(args: Any, load_dir: Any, result: tuple[Any, ...]) -> Loaded | None:
    """What ``_load_base_checkpoint()`` has read for this rank, with the options of now; None if the states are not to be
    taken from it: it is no checkpoint of this run (``--finetune``, a release, another model's), or not of this format."""
    state_dict, _, release, *_ = result
    if state_dict is None or load_dir != args.load or not holds_states(args):
        return None
    if args.finetune or release:
        return None
    return Loaded(
        state_dict.get(KEY),
        _layout(args),
        generators=not args.no_load_rng,
        without=("optimizer",) if args.no_load_optim else (),
    )


def _layout(args: Any) -> str:
    return ", ".join(f"{name.removesuffix('_size').replace('_', ' ')} {getattr(args, name, 1)}" for name in _SIZES)


def _peers() -> list[int]:
    """The other ranks that read the file which this one writes."""
    import torch.distributed as dist

    state: Any = sys.modules["megatron.core.parallel_state"]
    groups = [state.get_data_parallel_group(with_context_parallel=True)]
    if hasattr(state, "get_expert_data_parallel_group"):
        groups.append(state.get_expert_data_parallel_group())
    ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    return sorted(ranks - {dist.get_rank()})
