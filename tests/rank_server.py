# SPDX-License-Identifier: Apache-2.0
"""A process that has imported torch, Megatron and the example once, and forks the ranks of one job after another.

Reads one job a line from standard input, as JSON: ``world_size``, ``out`` (folder for the ranks' output: ``rank{n}.log``),
``timeout`` in seconds and what the ranks want to know. Answers with one line: the exit code of each rank, -9 for one that
was ended by the timeout, 3 for one that an exception has ended.

A job with ``agent`` has its store, and what starts its ranks, outside of them (`Supervise`).

By itself it serves ``examples/pretrain_moe.py``, with ``argv`` and ``prepare`` (``module:function``, called in each rank
before training with the `Pretraining` object and the job's ``options``).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RunRank = Callable[[Any, dict[str, Any], int, socket.socket], int]
Supervise = Callable[[dict[str, Any], Callable[[dict[str, Any], int], int], socket.socket], list[int]]
"""``supervise(job, fork, listener)`` runs a whole job: serves the store, and starts its ranks by ``fork(job, rank)``, which
returns a pid. Returns the exit codes."""


def join(job: dict[str, Any], rank: int, listener: socket.socket) -> Any:
    """The store of the job's ranks; unless there is an agent, it lives in rank 0."""
    from mindspeed_recovery.testing import ranks

    return ranks.join(listener, job["world_size"], serves=_serves(job, rank))


def _serves(job: dict[str, Any], rank: int) -> bool:
    return rank == 0 and not job.get("agent")


def prepared(job: dict[str, Any]) -> Callable[..., None] | None:
    """What the job names as ``prepare``, with its options."""
    if not job.get("prepare"):
        return None
    module, name = job["prepare"].split(":")
    return functools.partial(getattr(importlib.import_module(module), name), **job.get("options", {}))


def leave(job: dict[str, Any], rank: int, store: Any, reports: Iterable[Any]) -> None:
    """Write the rank's reports, and wait as `part` does."""
    text = json.dumps([dataclasses.asdict(report) for report in reports])
    Path(job["out"], f"rank{rank}.reports.json").write_text(text)
    part(job, rank, store)


def part(job: dict[str, Any], rank: int, store: Any) -> None:
    """Let rank 0, where the store lives, be the last to go."""
    from mindspeed_recovery.testing import ranks

    ranks.leave(store, job["world_size"], serves=_serves(job, rank))


def _run_rank(example: Any, job: dict[str, Any], rank: int, listener: socket.socket) -> int:
    import torch

    import mindspeed_recovery.api

    store = join(job, rank, listener)
    torch.manual_seed(0)
    args = example.parse_args(job["argv"])
    logging.basicConfig(level=job.get("loglevel", "INFO"))
    world_size = job["world_size"]
    example.pretrain(args, rank, world_size, example.join(store, rank, world_size), prepared(job))
    session = mindspeed_recovery.api._active
    leave(job, rank, store, session.reports if session is not None else [])
    return 0


def serve(load: Callable[[], Any], run_rank: RunRank, supervise: Supervise | None = None) -> None:
    """Call ``load()``, which imports what the ranks need, then run one job a line, each rank by ``run_rank``, which is
    given what ``load`` has returned. ``supervise``: for jobs with ``agent``."""
    warnings.simplefilter("ignore")
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root / "examples"), str(root / "tests"), str(root)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    import torch

    from mindspeed_recovery.testing import ranks

    torch.set_num_threads(1)
    loaded = load()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("agent") and supervise is not None:
            with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

                def fork(job: dict[str, Any], rank: int, listener: socket.socket = listener) -> int:
                    log = Path(job["out"], f"rank{rank}.log")
                    return ranks.fork(lambda: run_rank(loaded, job, rank, listener), log)

                codes = supervise(job, fork, listener)
        else:
            body = functools.partial(run_rank, loaded, job)
            codes = ranks.run(job["world_size"], body, Path(job["out"]), job["timeout"])
        print(json.dumps(codes), file=answers, flush=True)


def load_example(example: str, *others: str) -> Any:
    """The module of an example, with what it imports later; ``others``: those that its version of Megatron has."""
    loaded = importlib.import_module(example)
    for module in ("torch.utils.tensorboard", *others):
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    return loaded


if __name__ == "__main__":
    serve(lambda: load_example("pretrain_moe", "megatron.core.transformer.multi_token_prediction"), _run_rank)
