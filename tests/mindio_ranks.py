# SPDX-License-Identifier: Apache-2.0
"""`rank_server` for the toy job under the stand-in of TFT.

Each rank leaves ``rank{n}.json`` in the job's folder if it ends well. Keys of a job: ``layout`` ("llm" or "older"),
``plugin`` (one bool for each rank), ``first`` ("plugin" or "adaptor": who comes first), ``faults``, ``settings``.

With ``agent`` the store and TFT's controller live in a process of their own and ranks that die are started again, see
`mindio_agent`; with 4 ranks there are experts.

A fault is ``{"rank", "step", "at", "kind"}`` and for a memory fault ``hits``, the names of what it hits; it strikes once,
in the entry of ``train()`` number ``entry``, of the rank's process number ``life``.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindio_agent
import rank_server

STEPS = 6


def _run_rank(loaded: Any, job: dict[str, Any], rank: int, listener: socket.socket) -> int:
    import torch
    import torch.distributed as dist
    import toy
    from toy import training

    from mindspeed_recovery.testing.simulator import UnsafeMemory

    logging.basicConfig(level="INFO")
    port, size, life = listener.getsockname()[1], job["world_size"], job.get("life", 0)
    store = rank_server.join(job, rank, listener)

    def client() -> Any:
        return dist.TCPStore("127.0.0.1", port, size, is_master=False, use_libuv=True)

    folder, settings = Path(job["out"]), job.get("settings", {})
    links = mindio_agent.Links(store, client, rank, size, life, new_store=settings.get("new_store", False))
    checkpoint = str(folder / "checkpoint") if settings.get("save_at") else None
    vars(toy.ARGS).update(
        enable_elastic_training=settings.get("elastic", False),
        rank=rank,
        train_iters=STEPS,
        save_at=settings.get("save_at"),
        checkpoint=checkpoint,
        dump=str(folder / "dump"),
    )
    memory = UnsafeMemory()
    torch.manual_seed(7)
    vars(training).update(
        device=memory, store=client(), rank=rank, world_size=size, bias=torch.zeros(8), counts=torch.zeros(8)
    )
    training.rebuild_links = links.rebuild
    training.log = training.Log(str(folder / "points") if job.get("agent") else None)
    with memory.active():
        model = training.Model()
        with links.watched() as collectives:
            run = _start(job, rank, client, checkpoint, memory, settings)
        training.hooks["point"].append(_faults(job, rank, memory, model))
        arguments = None, [model], run.adaptor.Optimizer(model), None
        iterations = run.adaptor.train_wrapper(training.train)(*arguments)
    from mindio_ttp.framework_ttp import ttp_decorator as tft

    tensors = [model.weight, training.bias, training.counts, torch.get_rng_state()]
    tensors += [] if model.expert is None else [model.expert]
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
        "collectives": collectives,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(left))
    rank_server.part(job, rank, store)
    return 0


def _start(
    job: dict[str, Any], rank: int, client: Any, checkpoint: str | None, memory: Any, settings: dict[str, Any]
) -> Any:
    """TFT, the adaptor and the plugin, in the order of the job."""
    from toy import training

    run = SimpleNamespace(session=None, adaptor=None, rolled_back=[])

    def plugin() -> None:
        if settings.get("meets_at_start"):
            import torch.distributed as dist

            dist.barrier()
        if job["plugin"][rank]:
            run.session = _session(memory, settings)
            from mindspeed_recovery.runtimes import mindio

            mindio.install_when_loaded(
                lambda: run.session, sink=lambda: training.log, timeout=settings.get("timeout", 5.0)
            )
            training.hooks["begin"].append(run.session.begin_step)

    def tft_and_adaptor() -> None:
        import adaptor.toy
        from mindio_ttp.framework_ttp import ttp_decorator as tft

        _older(tft, settings)
        tft.thread_context = memory.active
        controlled = job.get("agent", False)
        tft.tft_init_processor(rank, training.world_size, client, checkpoint=checkpoint, controlled=controlled)
        adaptor.toy.replicas, adaptor.toy.copies = settings.get("replicas", True), settings.get("copies")
        run.adaptor = adaptor.register("toy", job["layout"])
        run.rolled_back = importlib.import_module("adaptor.callbacks").rolled_back

    for step in (plugin, tft_and_adaptor) if job["first"] == "plugin" else (tft_and_adaptor, plugin):
        step()
    if settings.get("exchange") and run.session is not None:
        run.session.after_repair = mindio_agent.Exchange(run.session, settings["exchange"])
    _break(run, rank, settings)
    _break_exchange(rank, settings)
    _strike_callback(rank, settings, memory)
    return run


def _older(tft: Any, settings: dict[str, Any]) -> None:
    if settings.get("no_exception_hook"):
        del tft.tft_register_exception_handler


def _session(memory: Any, settings: dict[str, Any]) -> Any:
    from toy import training

    from mindspeed_recovery.core.location import Location
    from mindspeed_recovery.core.policy import Policy, StateSpec
    from mindspeed_recovery.core.registry import Registry
    from mindspeed_recovery.core.session import Session
    from mindspeed_recovery.runtimes import mindio

    def spec(name: str, location: str, policy: Policy, **options: Any) -> StateSpec:
        return StateSpec(name, Location.parse(location), policy, source="the test", **options)

    tracker = "toy.parallel_state:_MOE_LAYER_WISE_LOGGING_TRACKER"
    saved = {"checkpoint": "framework"}  # the toy's own checkpoint holds them
    states = [
        spec("tracker", tracker, Policy.RESET, quarantine=True, replay=True),
        spec("counts", "toy.training:counts", Policy.RESET),
        spec("bias", "toy.training:bias", Policy.REPLICATE, on_missing=settings.get("on_missing", "error"), **saved),
        spec("rng", "torch:default_generator", Policy.SNAPSHOT, **saved),
    ]
    untracked = settings.get(f"untracked_on_{training.rank}", settings.get("untracked", ()))
    states = [state for state in states if state.name not in untracked]
    patience = settings.get("repair_timeout", 30.0)
    session = Session(Registry(states), memory=memory, is_fault=mindio.is_fault, repair_timeout=patience)
    session.start()
    return session


def _break(run: Any, rank: int, settings: dict[str, Any]) -> None:
    """What a test wants to go wrong, on rank 1 unless it says so."""
    handler = sys.modules["mindio_ttp.framework_ttp.ttp_decorator"].save_handler
    if rank in settings.get("loses_sums", ()):
        from toy import parallel_state

        roll_back, context = handler._slots["rollback"]

        def roll_back_and_clear(*args: Any) -> None:
            roll_back(*args)
            parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER.clear()

        handler._slots["rollback"] = (roll_back_and_clear, context)
    if rank != 1:
        return
    result = settings.get("clean")
    if result is not None:

        def clean(uce: bool, args: Any, ctx: Any) -> Any:
            if result == "raise":
                raise ValueError("clean is broken")
            if result == "exit":
                raise SystemExit(3)

        handler._slots["clean"] = (clean, None)
    if settings.get("lost_copies"):
        clean_session = run.session.clean

        def clean_and_lose(error_time: float | None = None) -> None:
            clean_session(error_time)
            run.session.copies.discard(since=0.0)

        run.session.clean = clean_and_lose
    if settings.get("dumb_log"):
        from toy import training

        training.log.recovered = {}.__getitem__
    if settings.get("broken_session"):

        def fail(*args: Any, **kwargs: Any) -> None:
            raise KeyError("a bug of ours")

        for phase in ("stop", "clean", "before_rollback", "after_rollback"):
            setattr(run.session, phase, fail)


def _strike_callback(rank: int, settings: dict[str, Any], memory: Any) -> None:
    """A second fault, in a callback of the adaptor: ``strikes`` is the phase, the rank, and "uce", "bug" or "die"."""
    phase, struck, kind = settings.get("strikes", ("", None, ""))
    if rank != struck:
        return
    slots = sys.modules["mindio_ttp.framework_ttp.ttp_decorator"].save_handler._slots
    context = slots[phase][1]

    def strike(*args: Any) -> Any:
        print(f"second fault: {kind} in {phase}", flush=True)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        if kind == "uce":
            from toy import training

            memory.strike([training.bias])
            raise RuntimeError("UCE ERROR: in a callback")
        raise ValueError("a bug in a callback")

    slots[phase] = (strike, context)


def _break_exchange(rank: int, settings: dict[str, Any]) -> None:
    """What goes wrong while states move: ``breaks`` is the rank and "die", "hang", "payload", "step" or "catalogue"."""
    broken, kind = settings.get("breaks", (None, ""))
    if rank != broken:
        return
    from mindspeed_recovery.core import link, repair

    if kind in ("die", "hang"):
        for name in ("send_bytes", "recv_bytes"):

            def end(self: Any, *args: Any) -> Any:
                print(f"{kind} in the exchange", flush=True)
                if kind == "hang":
                    time.sleep(6)
                    raise RuntimeError("hung")
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

            setattr(link.Link, name, end)
    elif kind == "payload":
        checksum = link.checksum_of
        link.checksum_of = lambda data: checksum(data) ^ 1
    else:
        init = repair.Exchange.__init__

        def other_terms(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            wrong = {"step": self._terms.step + 1} if kind == "step" else {"catalogue": "another"}
            self._terms = dataclasses.replace(self._terms, **wrong)

        repair.Exchange.__init__ = other_terms  # type: ignore[method-assign]


def _faults(job: dict[str, Any], rank: int, memory: Any, model: Any) -> Any:
    from toy import parallel_state, training

    waiting = [f for f in job["faults"] if f["rank"] == rank and f.get("life", 0) == job.get("life", 0)]

    def tensors(names: list[str]) -> list[Any]:
        found = []
        for name in names:
            if name == "tracker":
                found += [entry["values"] for entry in parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER.values()]
            elif name == "losses":
                values = sys.modules["adaptor.repair"].LogArgs.losses_reduced_
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
            if kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            if kind == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
                return
            raise ValueError("a bug in the user's code")

    return strike


def _load() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent / "stand_ins"))
    for module in ("toy.training", "wrapt", "mindspeed_recovery.core.session"):
        importlib.import_module(module)
    import torch

    from mindspeed_recovery.testing.simulator import UnsafeMemory

    with UnsafeMemory().active():  # the first use of a dispatch mode imports a lot
        torch.zeros(1).add_(1)
    gc.collect()
    gc.freeze()  # the ranks collect garbage often, and none of it is here


if __name__ == "__main__":
    rank_server.serve(_load, _run_rank, mindio_agent.supervise)
