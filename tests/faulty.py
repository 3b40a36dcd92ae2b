# SPDX-License-Identifier: Apache-2.0
"""Changes to a rank's job, named by tests as ``prepare``; each is called with the example's `Pretraining`."""

from __future__ import annotations

import time
from typing import Any

from mindspeed_recovery.testing.faults import FaultSpec, InjectedFault


def while_copying(job: Any, slot: str, step: int, trust_torn: bool = False) -> None:
    """A memory fault of rank 1 in the middle of taking the copy ``slot`` of ``step``."""
    copies = job._session.copies
    taken = getattr(copies, slot)
    take, count = taken.take, 0

    def take_and_fail(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        if taken.step == step:
            count += 1
            if count == 6:
                job.memory.strike(job.memory.device_tensors())
                if trust_torn:
                    for state in job._session.registry:
                        if state.spec.policy.copied:
                            take(state.spec, state.places())
                raise InjectedFault(FaultSpec.parse(f"uce@rank=1,step={step},at=forward"))
        take(*args, **kwargs)

    if job.rank == 1:
        taken.take = take_and_fail


def python_after_stop(job: Any) -> None:
    """The healthy rank's training thread runs on for a second after stop, without touching the device."""

    def run_on(module: Any, inputs: Any, outputs: Any) -> None:
        if job.progress.iteration + 1 != 4 or not job.model.training or job._session.reports:
            return
        deadline = time.monotonic() + 20
        while not job._session._recovering and time.monotonic() < deadline:
            time.sleep(0.001)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            sum(range(1000))
        print("ran plain Python after stop", flush=True)

    if job.rank == 0:
        job.model.module.decoder.layers[0].mlp.register_forward_hook(run_on)
