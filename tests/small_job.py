# SPDX-License-Identifier: Apache-2.0
"""A job of two ranks under the standalone runtime, small enough to be recovered some hundred times in a test.

Its state is what the real ones have: parameters and momentum, which the runtime restores, and a tracker, a bias and the
random generator, which the plugin does. Every step draws random numbers and meets the other rank before and after its
update, and the log line is a reduction.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.runtimes import restartable_gloo, standalone
from mindspeed_recovery.testing.simulator import UnsafeMemory

TIMEOUT = 20.0
TRACKER: dict[str, torch.Tensor] = {}
BIAS = torch.zeros(4)

UCE, LINK = "UCE ERROR: for a test", "HCCL OP RETRY FAILED: for a test"


class Log:
    """Points by step and name; the first one stays, as in the real logs."""

    def __init__(self) -> None:
        self.points: dict[tuple[int, str], float] = {}

    def add(self, step: int, name: str, value: float) -> None:
        self.points.setdefault((step, name), value)

    def begin(self, step: int) -> None: ...
    def settle(self, step: int) -> None: ...
    def recovered(self, report: Any) -> None: ...

    def rollback(self, step: int) -> None:
        self.points = {key: value for key, value in self.points.items() if key[0] <= step}


class Job:
    """One rank. ``at``: called with the name of each point of a step, and the step."""

    def __init__(self, rank: int, steps: int, at: Callable[[str, int], None] = lambda point, step: None) -> None:
        self.rank, self.steps, self.step, self.at = rank, steps, 0, at
        self.weight, self.momentum, self.grad = torch.linspace(0, 1, 4), torch.zeros(4), torch.zeros(4)
        self.log = Log()
        self.runtime: Any = None

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.momentum]

    def scratch(self) -> list[torch.Tensor]:
        return [self.grad]

    def host_state(self) -> int:
        return self.step

    def load_host_state(self, state: int) -> None:
        self.step = state

    def abandon_step(self) -> None: ...

    def train(self) -> None:
        while self.step < self.steps:
            step = self.step + 1
            self.runtime.begin_step(step)
            self.at("begin", step)
            noise = torch.rand(4)
            TRACKER["loss"] = TRACKER.get("loss", torch.zeros(1)) + (noise * self.weight + BIAS).sum()
            self.at("forward", step)
            self.grad.copy_(noise * (self.rank + 1) + self.weight)
            dist.all_reduce(self.grad)
            self.at("backward", step)
            BIAS.add_(self.grad.sign() * 0.01)
            self.runtime.begin_update(step)
            self.momentum.mul_(0.9).add_(self.grad)
            self.at("update", step)
            self.weight.sub_(self.momentum * 1e-2)
            self.step = step
            self.runtime.end_update(step, self.grad.sum().item())
            self.at("optimizer", step)
            self.runtime.log(step)
            self.at("end", step)

    def write_log(self, step: int, line: float) -> None:
        self.log.add(step, "grad", line)
        self.at("log", step)
        dist.all_reduce(TRACKER["loss"])
        self.log.add(step, "loss", TRACKER["loss"].item())
        TRACKER["loss"].zero_()

    def digest(self) -> str:
        parts = [self.weight, self.momentum, BIAS, torch.get_rng_state()]
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


class Rank:
    """One rank with its memory, plugin and runtime, in a process of its own. ``prepare(rank)`` changes it before it runs."""

    def __init__(self, number: int, port: int, steps: int, *, timeout: float = TIMEOUT, max_retries: int = 8) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.manual_seed(5)
        self.number = number
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        restartable_gloo.register(peer_failure_grace=2.0)
        dist.init_process_group(
            "restartable_gloo",
            store=dist.PrefixStore("groups", self.store),
            rank=number,
            world_size=2,
            timeout=timedelta(seconds=max(4, timeout / 2)),
        )
        self.memory = UnsafeMemory()
        self.job = Job(number, steps)

        def spec(name: str, location: str, policy: Policy, **options: Any) -> StateSpec:
            return StateSpec(name, Location.parse(location), policy, source="the test", **options)

        states = [
            spec("tracker", "small_job:TRACKER", Policy.RESET, quarantine=True, replay=True),
            spec("bias", "small_job:BIAS", Policy.REPLICATE, on_missing="error"),
            spec("rng", "torch:default_generator", Policy.SNAPSHOT),
        ]
        self.session = Session(Registry(states), memory=self.memory, is_fault=standalone.is_fault)
        self.runtime = self.job.runtime = standalone.StandaloneRuntime(
            store=dist.PrefixStore("recovery", self.store),
            rank=number,
            world_size=2,
            device=self.memory,
            job=self.job,
            write_log=self.job.write_log,
            session=self.session,
            sink=self.job.log,
            context=self._on_device,
            timeout=timeout,
            max_retries=max_retries,
        )

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with self.memory.active(), self.memory.exempt():
            yield

    def strike(self) -> None:
        """A memory fault; not of the tracker, which is in quarantine in a recovery."""
        self.memory.strike([*self.job.tensors(), *self.job.scratch(), BIAS])
        raise RuntimeError(UCE)

    def run(self) -> dict[str, Any]:
        """What is to be equal, and what became of it: ``error`` is that of ``train``, with the ``seconds`` it all took."""
        error, began = "", time.monotonic()
        with self.memory.active():
            self.session.start()
            try:
                self.runtime.run(self.job.train, [])
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
        return {
            "digest": "" if error else self.job.digest(),
            "log": [] if error else [[*key, value] for key, value in sorted(self.job.log.points.items())],
            "error": error,
            "seconds": time.monotonic() - began,
            "failures": [line for report in self.session.reports for line in report.failures],
            "recoveries": len(self.runtime.recoveries),
        }
