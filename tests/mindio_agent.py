# SPDX-License-Identifier: Apache-2.0
"""Ranks of the toy job that die and are started again, for `mindio_ranks`.

As on a cluster, the store and TFT's controller then live outside the ranks, in a process of their own (the agent of
torchrun, and TaskD of MindCluster), and a scheduler, here the parent of the ranks, starts new processes in place of dead
ones when the controller asks for them. They speak through files in the job's folder.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

DIED = -signal.SIGKILL
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "barrier",
    "all_gather",
    "all_gather_object",
    "broadcast_object_list",
    "new_group",
)


class Links:
    """The process groups of one rank."""

    def __init__(self, store: Any, client: Callable[[], Any], rank: int, size: int, life: int, new_store: bool) -> None:
        self._client, self._rank, self._size, self._life, self._new_store = client, rank, size, life, new_store
        self._connect(
            "gloo" if life == 0 else "fake", store
        )  # HCCL connects at the first use: a new process waits for nobody

    def _connect(self, backend: str, store: Any) -> None:
        import torch.distributed as dist

        if backend == "fake":
            import torch.testing._internal.distributed.fake_pg  # noqa: F401
        dist.init_process_group(
            backend, store=store, rank=self._rank, world_size=self._size, timeout=timedelta(seconds=12)
        )

    def rebuild(self, repair_id: int) -> None:
        """Connect all ranks anew. The default store stays, as with today's torch_npu, or is another one, as with older."""
        import torch.distributed as dist
        from toy import training

        c10d = dist.distributed_c10d
        kept = c10d._get_default_store()
        dist.destroy_process_group()
        self._connect("gloo", dist.PrefixStore(f"links/{repair_id}", self._client()))
        if not self._new_store:
            group = c10d._get_default_group()
            c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], kept)
        training.entries = repair_id  # what the toy's collectives are counted by

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Note the collectives that are begun meanwhile; in a process that was started again they do nothing."""
        import torch.distributed as dist

        called: list[str] = []
        originals = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, original in originals.items():

            def call(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                called.append(name)
                return original(*args, **kwargs) if self._life == 0 else None

            setattr(dist, name, call)
        try:
            yield called
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)


class Exchange:
    """Around the session's own exchange after a repair. ``what``: "states" says that it was called; "nothing" lets no state
    move, for a control."""

    def __init__(self, session: Any, what: Any) -> None:
        self._session, self._what, self._exchange = session, what, session.after_repair

    def __call__(self, plan: Any, group: Any, bulk_group: Any) -> None:
        about = f"step {plan.step}, rank {plan.rank}, pairs {plan.pairs}, receives {plan.receives}"
        print(f"exchange: {about}, group of {group.size()}", flush=True)
        # What is noted in the report here must not be lost to one that begins later, in rollback.
        assert self._session._report.number == len(self._session.reports) + 1
        if self._what != "nothing":
            self._exchange(plan, group, bulk_group)


class _Scheduler:
    """What the controller sees of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()

    def lost(self) -> list[int]:
        if not self._unseen():
            return []
        time.sleep(0.2)  # what dies together is replaced together
        new = self._unseen()
        self._seen |= new
        return sorted(int(name.split(".")[1]) for name in new)

    def died(self) -> bool:
        return bool(self._unseen())

    def start_again(self, ranks: list[int]) -> None:
        for rank in ranks:
            (self._folder / f"wanted.{rank}").touch()

    def _unseen(self) -> set[str]:
        return {path.name for path in self._folder.glob("died.*")} - self._seen


def _serve(job: dict[str, Any], listener: Any) -> None:
    """The agent's process."""
    import torch.distributed as dist
    from mindio_ttp.engine import Controller

    port, size, settings = listener.getsockname()[1], job["world_size"], job["settings"]
    folder = Path(job["out"])
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        size,
        is_master=True,
        master_listen_fd=listener.detach(),
        wait_for_workers=False,
        use_libuv=True,
    )
    checkpoint = str(folder / "checkpoint") if settings.get("save_at") else None

    def client() -> Any:
        return dist.TCPStore("127.0.0.1", port, size, is_master=False, use_libuv=True)

    while not all(store.check([f"tft/status/{rank}"]) for rank in range(size)):
        time.sleep(0.005)
    Controller(size, client, checkpoint, _Scheduler(folder)).run()
    time.sleep(60)  # the ranks still use the store; the parent ends this process


def supervise(job: dict[str, Any], fork: Callable[[dict[str, Any], int], int], listener: Any) -> list[int]:
    """Run the job's ranks, and start those again that were killed and are asked for. The exit code of each rank's last
    process; -9 for one that was ended by the timeout or is not asked for."""
    folder, size = Path(job["out"]), job["world_size"]
    agent = os.fork()
    if agent == 0:
        try:
            with (folder / "agent.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            _serve(job, listener)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    pids = {rank: fork(job, rank) for rank in range(size)}
    lives = dict.fromkeys(range(size), 0)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + job["timeout"]
    try:
        while pids:
            for rank, pid in list(pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del pids[rank]
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank] == DIED:
                        (folder / f"died.{rank}.{lives[rank]}").touch()
            for rank in [rank for rank, code in codes.items() if code == DIED]:
                wanted = folder / f"wanted.{rank}"
                if wanted.exists():
                    wanted.unlink()
                    lives[rank] += 1
                    del codes[rank]
                    pids[rank] = fork(
                        job | {"life": lives[rank], "plugin": job.get("plugin_again", job["plugin"])}, rank
                    )
            if time.monotonic() > deadline:
                for pid in pids.values():
                    os.kill(pid, signal.SIGUSR1)  # say where it hangs
                time.sleep(0.2)
                for rank, pid in pids.items():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[rank] = DIED
                break
            time.sleep(0.005)
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
    return [codes[rank] for rank in range(size)]
