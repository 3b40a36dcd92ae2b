# SPDX-License-Identifier: Apache-2.0
"""Ranks of a test as forks of the test's own process."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

RANK_LIMIT = 40.0  # seconds a forked rank may live


def run_ranks(size: int, body: Callable[[int], Any], dies: tuple[int, ...] = ()) -> list[Any]:
    """Run ``body(rank)`` in ``size`` forked processes; their JSON results by rank (None: it died)."""
    release_read, release_write = os.pipe()
    pids: list[int] = []
    pipes: list[int] = []
    try:
        for rank in range(size):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(release_write)
                _rank_main(rank, body, write, release_read)
            os.close(write)
            pids.append(pid)
            pipes.append(read)
        texts = _read_all(pipes, RANK_LIMIT)
    finally:
        os.close(release_write)  # all results are here: ranks may exit, the one that hosts the store included
        os.close(release_read)
        for read in pipes:
            os.close(read)
        _reap_children(pids)
    results: list[Any] = []
    for rank, text in enumerate(texts):
        if rank in dies:
            results.append(None)
            continue
        assert text, f"rank {rank} gave no result"
        outcome = json.loads(text)
        assert outcome[0] == "ok", f"rank {rank}:\n{outcome[1]}"
        results.append(outcome[1])
    return results


def _rank_main(rank: int, body: Callable[[int], Any], write: int, release: int) -> None:
    faulthandler.dump_traceback_later(RANK_LIMIT, exit=True)
    torch.set_num_threads(1)
    try:
        outcome = ["ok", body(rank)]
    except BaseException:
        outcome = ["error", traceback.format_exc()]
    os.write(write, json.dumps(outcome).encode())
    os.close(write)
    select.select([release], [], [], RANK_LIMIT)
    os._exit(0)


def _read_all(pipes: list[int], limit: float) -> list[bytes]:
    texts = dict.fromkeys(pipes, b"")
    is_open, deadline = set(pipes), time.monotonic() + limit
    while is_open and time.monotonic() < deadline:
        for pipe in select.select(list(is_open), [], [], 0.5)[0]:
            chunk = os.read(pipe, 65536)
            texts[pipe] += chunk
            if not chunk:
                is_open.discard(pipe)
    return [texts[pipe] for pipe in pipes]


def _reap_children(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    left = set(pids)
    while left:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
