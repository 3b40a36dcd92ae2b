# SPDX-License-Identifier: Apache-2.0
"""A process that has imported torch once, and forks the two ranks of one toy job after another under the stand-in of TFT.

Reads one job a line from standard input, as JSON; answers with one line: the exit code of each rank (-9: ended by the
timeout). Each rank leaves ``rank{n}.json`` in the job's folder if it ends well, and ``rank{n}.log`` in any case. Keys of a
job: ``folder``, ``layout`` ("llm" or "older"), ``plugin`` (one bool for each rank), ``first`` ("plugin" or "adaptor": who
comes first), ``faults``, ``settings`` for `_prepare`, ``timeout``.

A fault is ``{"rank", "step", "at", "kind"}`` and for a memory fault ``hits``, the names of what it hits; it strikes once,
in the entry of ``train()`` number ``entry``.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORLD_SIZE = 2
STEPS = 6
ADAPTORS = {
    "llm": "mindspeed_llm.core.high_availability.tft_train_initialize",
    "older": "mindio_ttp.adaptor.modellink_adaptor",
}


def _run_rank(job: dict[str, Any], rank: int, listener: socket.socket) -> int:
    import torch
    import torch.distributed as dist
    import toy
    from toy import training

    from mindspeed_recovery.testing.simulator import UnsafeMemory

    port = listener.getsockname()[1]
    descriptor = listener.detach() if rank == 0 else None
    store = dist.TCPStore(
        "127.0.0.1", port, WORLD_SIZE, is_master=rank == 0, master_listen_fd=descriptor, use_libuv=True
    )

    def client() -> Any:
        return dist.TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=False, use_libuv=True)

    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=12))
    folder, settings = Path(job["folder"]), job.get("settings", {})
    checkpoint = str(folder / "checkpoint") if settings.get("save_at") else None
    vars(toy.ARGS).update(
        rank=rank, train_iters=STEPS, save_at=settings.get("save_at"), checkpoint=checkpoint, dump=str(folder / "dump")
    )
    memory = UnsafeMemory()
    torch.manual_seed(7)
    vars(training).update(
        device=memory, store=client(), rank=rank, world_size=WORLD_SIZE, bias=torch.zeros(8), counts=torch.zeros(8)
    )
    training.log = training.Log()
    with memory.active():
        model = training.Model()
        run = _start(job, rank, client, checkpoint, memory, settings)
        training.hooks["point"].append(_faults(job, rank, memory, model))
        iterations = run.adaptor.run(model)
    from mindio_ttp.framework_ttp import ttp_decorator as tft

    tensors = [model.weight, training.bias, training.counts, torch.get_rng_state()]
    reports = (
        [] if run.session is None else [dataclasses.asdict(r) | {"failures": r.failures} for r in run.session.reports]
    )
    left = {
        "iterations": iterations,
        "digest": hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest(),
        "log": training.log.points,
        "recoveries": training.log.recoveries,
        "reports": reports,
        "calls": tft.calls,
        "rolled_back": run.rolled_back,
        "entries": training.entries,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(left))
    store.add("ended", 1)
    deadline = time.monotonic() + 10
    while rank == 0 and store.add("ended", 0) < WORLD_SIZE and time.monotonic() < deadline:
        time.sleep(0.002)  # the store lives in rank 0
    return 0


def _start(
    job: dict[str, Any], rank: int, client: Any, checkpoint: str | None, memory: Any, settings: dict[str, Any]
) -> Any:
    """TFT, the adaptor and the plugin, in the order of the job."""
    import importlib

    from toy import training

    run = SimpleNamespace(session=None, adaptor=None, rolled_back=[])

    def plugin() -> None:
        if job["plugin"][rank]:
            run.session = _session(memory, settings)
            from mindspeed_recovery.runtimes import mindio

            mindio.install_when_loaded(
                lambda: run.session, sink=lambda: training.log, timeout=settings.get("timeout", 5.0)
            )
            training.hooks["begin"].append(run.session.begin_step)

    def adaptor() -> None:
        from mindio_ttp.framework_ttp import ttp_decorator as tft

        _older(tft, settings)
        tft.thread_context = memory.active
        tft.tft_init_processor(rank, WORLD_SIZE, client, replicas=settings.get("replicas", True), checkpoint=checkpoint)
        run.adaptor = importlib.import_module(ADAPTORS[job["layout"]])
        run.adaptor.tft_register_processor()
        holder = sys.modules.get("mindspeed_llm.core.high_availability.tft_rollback") or run.adaptor
        run.rolled_back = holder.rolled_back

    for step in (plugin, adaptor) if job["first"] == "plugin" else (adaptor, plugin):
        step()
    if settings.get("exchange"):

        def after_repair(plan: Any, group: Any) -> None:
            about = f"step {plan.step}, rank {plan.rank}, pairs {plan.pairs}, receives {plan.receives}"
            print(f"exchange: {about}, group of {group.size()}", flush=True)

        run.session.after_repair = after_repair
    _break(run, rank, settings)
    return run


def _older(tft: Any, settings: dict[str, Any]) -> None:
    if settings.get("no_exception_hook"):
        del tft.tft_register_exception_handler


def _session(memory: Any, settings: dict[str, Any]) -> Any:
    from mindspeed_recovery.core.location import Location
    from mindspeed_recovery.core.policy import Policy, StateSpec
    from mindspeed_recovery.core.registry import Registry
    from mindspeed_recovery.core.session import Session
    from mindspeed_recovery.runtimes import mindio

    def spec(name: str, location: str, policy: Policy, **options: Any) -> StateSpec:
        return StateSpec(name, Location.parse(location), policy, source="the test", **options)

    tracker = "toy.parallel_state:_MOE_LAYER_WISE_LOGGING_TRACKER"
    states = [
        spec("tracker", tracker, Policy.RESET, quarantine=True, replay=True),
        spec("counts", "toy.training:counts", Policy.RESET),
        spec("bias", "toy.training:bias", Policy.REPLICATE, on_missing="error"),
        spec("rng", "torch:default_generator", Policy.SNAPSHOT),
    ]
    states = [state for state in states if state.name not in settings.get("untracked", ())]
    session = Session(Registry(states), memory=memory, is_fault=mindio.is_fault)
    session.start()
    return session


def _break(run: Any, rank: int, settings: dict[str, Any]) -> None:
    """What a test wants to go wrong on rank 1."""
    if rank != 1:
        return
    handler = sys.modules["mindio_ttp.framework_ttp.ttp_decorator"].save_handler
    result = settings.get("clean")
    if result is not None:

        def clean(uce: bool, args: Any, ctx: Any) -> Any:
            if result == "raise":
                raise ValueError("clean is broken")
            if result == "exit":
                raise SystemExit(3)

        handler._slots["clean"] = (clean, None)
    if settings.get("dumb_log"):
        from toy import training

        training.log.recovered = {}.__getitem__
    if settings.get("broken_session"):

        def fail(*args: Any, **kwargs: Any) -> None:
            raise KeyError("a bug of ours")

        for phase in ("stop", "clean", "before_rollback", "after_rollback"):
            setattr(run.session, phase, fail)


def _faults(job: dict[str, Any], rank: int, memory: Any, model: Any) -> Any:
    from toy import parallel_state, training

    waiting = [fault for fault in job["faults"] if fault["rank"] == rank]

    def tensors(names: list[str]) -> list[Any]:
        found = []
        for name in names:
            if name == "tracker":
                found += [entry["values"] for entry in parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER.values()]
            elif name == "losses":
                repair = sys.modules.get("mindspeed_llm.core.high_availability.tft_optimizer_data_repair")
                values = (repair or sys.modules[ADAPTORS["older"]]).LogArgs.losses_reduced_
                found += [part for loss in values for part in loss["lm loss"]]
            elif name in ("bias", "counts"):
                found.append(getattr(training, name))
            else:
                found.append(getattr(model, name))
        return found

    def strike(point: str, step: int) -> None:
        for fault in waiting:
            if (fault["at"], fault["step"], fault.get("entry", 1)) != (point, step, training.entries):
                continue
            waiting.remove(fault)
            time.sleep(fault.get("delay", 0.05))  # the other rank goes on as far as it can
            print(f"fault: {fault}", flush=True)
            kind, hits = fault["kind"], tensors(fault.get("hits", []))
            if kind == "uce":
                memory.strike(hits, persistent=bool(hits))
                raise RuntimeError("UCE ERROR: an uncorrectable error of device memory")
            if kind == "unsafe":
                memory.mark_unsafe(hits)
                return
            if kind == "ecc":
                memory.strike(hits)
                raise RuntimeError("HBM MULTI BIT ECC, time us=1")
            if kind == "linger":  # plain Python after stop
                deadline = time.monotonic() + 5
                while not memory.stopped and time.monotonic() < deadline:
                    time.sleep(0.001)
                time.sleep(0.3)
                return
            if kind == "link":
                raise RuntimeError("HCCL OP RETRY FAILED")
            if kind == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
                return
            raise ValueError("a bug in the user's code")

    return strike


def _fork(job: dict[str, Any], rank: int, listener: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (Path(job["folder"]) / f"rank{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.register(signal.SIGUSR1)
        logging.basicConfig(level="INFO")
        code = _run_rank(job, rank, listener)
    except BaseException:
        traceback.print_exc()
        code = 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], timeout: float) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGUSR1)  # say where it hangs
                    time.sleep(0.2)
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = -9
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def main() -> None:
    warnings.simplefilter("ignore")
    root = Path(__file__).resolve().parent
    sys.path[:0] = [str(root / "stand_ins"), str(root.parent)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    import importlib

    import torch

    torch.set_num_threads(1)
    for module in ("toy.training", "wrapt", "mindspeed_recovery.core.session", "mindspeed_recovery.testing.simulator"):
        importlib.import_module(module)
    from mindspeed_recovery.testing.simulator import UnsafeMemory

    with UnsafeMemory().active():  # the first use of a dispatch mode imports a lot
        torch.zeros(1).add_(1)
    gc.collect()
    gc.freeze()  # the ranks collect garbage often, and none of it is here
    for line in sys.stdin:
        job = json.loads(line)
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            pids = [_fork(job, rank, listener) for rank in range(WORLD_SIZE)]
        print(json.dumps(_wait(pids, job["timeout"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
