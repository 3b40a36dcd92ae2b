# SPDX-License-Identifier: Apache-2.0
"""`rank_server` for the stock loop: the ranks run ``examples/pretrain_gpt.py``. ``prepare`` is called without a job object.

The reports of a rank are those that its training loop kept.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Any

import rank_server

# ---- what `prepare` may name: changes to the framework before a rank's job begins ------------------------------------------


def fail_while_saving(rank: int, step: int) -> None:
    """A fault in the first checkpoint of ``step``, after the file was written."""
    from megatron.training import training

    save, failed = training.save_checkpoint, []

    def save_and_fail(iteration: int, *args: Any, **kwargs: Any) -> None:
        save(iteration, *args, **kwargs)
        if iteration == step and int(os.environ["RANK"]) == rank and not failed:
            failed.append(iteration)
            raise RuntimeError("UCE ERROR: while saving")

    training.save_checkpoint = save_and_fail


def leave_out(state: str) -> None:
    """The catalogue has no entry for ``state``."""
    from mindspeed_recovery import catalogue

    installed = catalogue.installed_states
    read = []

    def without(files: Any) -> list[Any]:
        read.append(files)
        return [spec for spec in installed(files) if len(read) > 1 or spec.name != state]

    catalogue.installed_states = without


def forget_the_device() -> None:
    """Nothing names a device for the standalone runtime: nobody can recover the job."""
    from mindspeed_recovery.frameworks import megatron_loop

    megatron_loop.use_standalone = lambda *args, **kwargs: None


def set_environment(**values: str) -> None:
    """Variables of the rank's environment."""
    os.environ |= values


# ---- ranks ---------------------------------------------------------------------------------------------------------------


def run_rank(example: Any, job: dict[str, Any], rank: int, listener: socket.socket) -> int:
    import torch

    from mindspeed_recovery.frameworks import megatron_loop

    store = rank_server.join(job, rank, listener)
    torch.manual_seed(0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world_size"])}
    logging.basicConfig(level="INFO")
    prepare = rank_server.prepared(job)
    if prepare is not None:
        prepare()
    sys.argv[:] = ["pretrain_gpt.py", *job["argv"]]
    code = example.main(store)
    rank_server.leave(job, rank, store, megatron_loop.reports())
    return code


if __name__ == "__main__":
    rank_server.serve("pretrain_gpt", "mindspeed_recovery.frameworks.megatron_job", run_rank)
