# SPDX-License-Identifier: Apache-2.0
"""`rank_server` for the stock loop: the ranks run ``examples/pretrain_gpt.py``. ``prepare`` is called without a job object.

The reports of a rank are those that its training loop kept. A job with ``tft`` runs under the stand-in of MindIO TFT; its
value holds the options of `mindio_stock.use`.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import time
from typing import Any

import mindio_stock
import rank_server

# ---- what `prepare` may name: changes to the framework before a rank's job begins ------------------------------------------


def fail_while_saving(rank: int, step: int, error: str = "UCE ERROR") -> None:
    """A fault in the first checkpoint of ``step``, after the file was written."""
    from megatron.training import training

    save, failed = training.save_checkpoint, []

    def save_and_fail(iteration: int, *args: Any, **kwargs: Any) -> None:
        save(iteration, *args, **kwargs)
        if iteration == step and int(os.environ["RANK"]) == rank and not failed:
            failed.append(iteration)
            raise RuntimeError(f"{error}: while saving")

    training.save_checkpoint = save_and_fail


def fail_after_the_metrics(rank: int, step: int) -> None:
    """A fault in the log line of ``step``, when its MTP metrics are reduced; the other ranks finish theirs meanwhile."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import get_args

    clean, failed = MTPLossLoggingHelper.clean_metrics_in_tracker, []

    def fail_or_clean() -> None:
        if get_args().curr_iteration + 1 == step and int(os.environ["RANK"]) == rank and not failed:
            failed.append(step)
            time.sleep(0.5)
            raise RuntimeError("HCCL OP RETRY FAILED: with the metrics")
        clean()

    MTPLossLoggingHelper.clean_metrics_in_tracker = staticmethod(fail_or_clean)


def tell_trackers() -> None:
    """Print where the sums of the MoE metrics are, and their shapes, after each rollback."""
    from mindspeed_recovery.core.session import Session

    after_rollback = Session.after_rollback

    def tell(session: Any) -> Any:
        report = after_rollback(session)
        metrics = {path: shape for path, shape in session.sum_layout().items() if "_MOE_METRICS_TRACKER" in path}
        print(f"trackers: {sorted(metrics.items())}", flush=True)
        return report

    Session.after_rollback = tell  # type: ignore[method-assign]


COUNTS = {"batches": 0}
"""A state of the job's own."""


def count_batches() -> None:
    """The job counts its batches in a global, and tells the count."""
    import pretrain_gpt

    forward_step = pretrain_gpt.forward_step

    @functools.wraps(forward_step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        COUNTS["batches"] += 1
        print(f"batches: {COUNTS['batches']}", flush=True)
        return forward_step(*args, **kwargs)

    pretrain_gpt.forward_step = counted


def leave_out(state: str) -> None:
    """The catalogue has no entry for ``state``."""
    from mindspeed_recovery import catalogue

    installed = catalogue.installed_states
    read = []

    def without(files: Any) -> list[Any]:
        read.append(files)
        return [spec for spec in installed(files) if len(read) > 1 or spec.name != state]

    catalogue.installed_states = without


def save_no_states() -> None:
    """Checkpoints are those of a job without the plugin."""
    from mindspeed_recovery.frameworks import megatron_checkpoint

    megatron_checkpoint.states = lambda *args: {}


AVERAGES: dict[str, Any] = {}
"""Running averages of the parameters: equal on replicas, and changed after the optimizer has written."""
CALLS = {"steps": 0}
"""A rank's own."""


def average_parameters(save_states: bool = True) -> None:
    """The job keeps averages of its parameters, and counts its steps; it tells both at its end."""
    import cpu_device
    import torch
    from megatron.training import training

    import mindspeed_recovery

    if not save_states:
        save_no_states()
    mindspeed_recovery.track("stock_server:AVERAGES", policy="replicate", settled="after-update", name="averages")
    mindspeed_recovery.track("stock_server:CALLS", policy="snapshot", name="calls")
    train_step = training.train_step
    final_state = cpu_device.Device.final_state

    @functools.wraps(train_step)
    def step_and_average(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS["steps"] += 1
        result = train_step(forward_step, data, model, *args, **kwargs)
        with torch.no_grad():
            for name, parameter in model[0].module.named_parameters():
                average = AVERAGES.setdefault(name, torch.zeros_like(parameter, dtype=torch.bfloat16))
                average.lerp_(parameter.to(average.dtype), 0.25)
        return result

    def state_and_averages(device: Any) -> dict[str, Any]:
        return final_state(device) | {"averages": dict(AVERAGES), "calls": dict(CALLS)}

    training.train_step = step_and_average
    cpu_device.Device.final_state = state_and_averages


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

    port = listener.getsockname()[1]
    store = rank_server.join(job, rank, listener)
    torch.manual_seed(0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world_size"])}
    logging.basicConfig(level="INFO")
    prepare = rank_server.prepared(job)
    if prepare is not None:
        prepare()
    sys.argv[:] = ["pretrain_gpt.py", *job["argv"]]
    if job.get("tft"):

        def client() -> Any:
            return torch.distributed.TCPStore("127.0.0.1", port, job["world_size"], is_master=False, use_libuv=True)

        mindio_stock.use(example, rank, job["world_size"], client, **job["tft"])
    code = example.main(store)
    rank_server.leave(job, rank, store, megatron_loop.reports())
    return code


if __name__ == "__main__":
    loaded = "pretrain_gpt", "mindspeed_recovery.frameworks.megatron_job"
    rank_server.serve(lambda: rank_server.load_example(*loaded), run_rank)
