# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job as forks of this process, which has imported once what they all need.

The ranks meet at a store that rank 0 serves, on a socket that the parent has bound, so that no two jobs on a machine can
meet at one port.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

HUNG = -9
"""Exit code of a rank that was ended because its time was up."""

_GRACE_SECONDS = 15.0  # for the others, once one rank has failed
_LEAVE_SECONDS = 20.0
_FAILED_SECONDS = 3.0


def run(size: int, body: Callable[[int, socket.socket], int], folder: Path, timeout: float) -> list[int]:
    """Run ``body(rank, listener)`` in ``size`` forked processes, and return their exit codes, at the latest after ``timeout``
    seconds and a little: `HUNG` for a rank that did not end, 3 for one that an exception has ended. Their output is
    ``folder/rank{n}.log``."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        pids = [fork(functools.partial(body, rank, listener), folder / f"rank{rank}.log") for rank in range(size)]
        return wait(pids, timeout)


def fork(body: Callable[[], int], log: Path) -> int:
    """Run ``body`` in a new process that writes to ``log`` and exits with what it returns; return the process's id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # by lines: an abort flushes nothing
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1)
        code = body()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: Sequence[int], timeout: float) -> list[int]:
    """The exit codes of the processes, in their order."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    failed_at: float | None = None
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid] and failed_at is None:
                        failed_at = time.monotonic()
        late = time.monotonic() > deadline or (failed_at is not None and time.monotonic() > failed_at + _GRACE_SECONDS)
        if late:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGUSR1)  # say where it hangs
                    time.sleep(0.2)
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = HUNG
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def join(listener: socket.socket, size: int, *, serves: bool) -> dist.TCPStore:
    """The store of the job's ranks; it lives in the process that ``serves``, on the parent's socket."""
    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        size,
        is_master=serves,
        master_listen_fd=listener.detach() if serves else None,
        use_libuv=True,
    )


def leave(store: dist.Store, size: int, *, serves: bool, failed: bool = False) -> None:
    """Let the process that serves the store be the last to go; with ``failed`` it waits for a moment only, in which the others
    can read there why."""
    with contextlib.suppress(dist.DistError):  # the one that serves has gone
        store.add("ended", 1)
    deadline = time.monotonic() + (_FAILED_SECONDS if failed else _LEAVE_SECONDS)
    while serves and store.add("ended", 0) < size and time.monotonic() < deadline:
        time.sleep(0.002)
