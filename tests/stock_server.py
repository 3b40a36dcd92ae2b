# SPDX-License-Identifier: Apache-2.0
"""`rank_server` for the stock loop: the ranks run ``examples/pretrain_gpt.py``. ``prepare`` is called without a job object.

The reports of a rank are those that its training loop kept.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import logging
import os
import socket
import sys
import time
import warnings
from pathlib import Path
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


# ---- ranks ---------------------------------------------------------------------------------------------------------------


def run_rank(example: Any, job: dict[str, Any], rank: int, listener: socket.socket) -> int:
    import torch
    import torch.distributed as dist

    from mindspeed_recovery.frameworks import megatron_loop

    world_size = job["world_size"]
    store = dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        world_size,
        is_master=rank == 0,
        master_listen_fd=listener.detach() if rank == 0 else None,
        use_libuv=True,
    )
    torch.manual_seed(0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    logging.basicConfig(level="INFO")
    if job.get("prepare"):
        module, name = job["prepare"].split(":")
        functools.partial(getattr(importlib.import_module(module), name), **job.get("options", {}))()
    sys.argv[:] = ["pretrain_gpt.py", *job["argv"]]
    code = example.main(store)
    reports = [dataclasses.asdict(report) for report in megatron_loop.reports()]
    Path(job["out"], f"rank{rank}.reports.json").write_text(json.dumps(reports))
    store.add("ended", 1)
    deadline = time.monotonic() + 20
    while rank == 0 and store.add("ended", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.002)  # the store lives in rank 0
    return code


def main() -> None:
    warnings.simplefilter("ignore")
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root / "examples"), str(root / "tests")]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    import torch

    torch.set_num_threads(1)
    example = importlib.import_module("pretrain_gpt")
    importlib.import_module("torch.utils.tensorboard")
    importlib.import_module("mindspeed_recovery.frameworks.megatron_job")
    rank_server._run_rank = run_rank
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            pids = [rank_server._fork(example, job, rank, listener) for rank in range(job["world_size"])]
        print(json.dumps(rank_server._wait(pids, job["timeout"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
