# SPDX-License-Identifier: Apache-2.0
"""A data-parallel training loop whose state is spread over module globals.

All ranks hold the same parameters, and experts, if there are any, that they share with every second rank. Every step draws
random numbers, sums losses into the tracker, counts tokens, moves an expert bias before the update, and logs the tracker's
mean over the ranks.
"""

from __future__ import annotations

import json
import os
import time

import torch

from . import get_args, parallel_state

MICROBATCHES = 2
device = None
"""The simulated memory."""
store = None
rank, world_size = 0, 1
bias = None
counts = None
log = None
hooks = {"begin": [], "logged": [], "losses": [], "point": []}
entries = 0
rebuild_links = None


class Log:
    """Log lines; knows a rollback, and keeps the first of two points of one step and name. ``path``: a file in which the
    points of the rank's earlier processes are found."""

    def __init__(self, path=None):
        self.path = path
        self.points = []
        if path and os.path.exists(path):
            with open(path) as file:
                self.points = [json.loads(line) for line in file]
        self.twice = 0
        self.recoveries = []

    def add(self, step, name, value):
        if any(point[:2] == [step, name] for point in self.points):
            self.twice += 1
            return
        self.points.append([step, name, value])
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps(self.points[-1]) + "\n")

    def begin(self, step):
        pass

    def settle(self, step):
        pass

    def rollback(self, step):
        self.points = [point for point in self.points if point[0] <= step]

    def recovered(self, report):
        self.recoveries.append(report.as_dict())


class Model:
    def __init__(self):
        self.weight = torch.linspace(-1, 1, 8)
        self.grad = torch.zeros(8)
        self.expert = torch.linspace(0, 1, 8) + rank % 2 if with_experts() else None
        self.expert_grad = torch.zeros(8)

    def named_parameters(self):
        return [("weight", self.weight)] + ([] if self.expert is None else [("expert", self.expert)])


def with_experts():
    """Four ranks hold two experts, each of them twice."""
    return world_size == 4


def expert_ranks():
    return list(range(rank % 2, world_size, 2))


def point(name, step):
    for hook in hooks["point"]:
        hook(name, step)


def exchange(tensor, tag, timeout=6, ranks=None):
    """Sum over all or these ranks, in place; stopped with the device as a collective is. Does not look at unsafe flags."""
    key = f"x/{entries}/{tag}"
    mine = tensor.numpy() if device is None else _raw(tensor)
    store.set(f"{key}/{rank}", mine.tobytes())
    deadline = time.monotonic() + timeout
    total = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for other in ranks or range(world_size):
        while not store.check([f"{key}/{other}"]):
            if device.stopped:
                raise RuntimeError("FORCE STOP.")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank} waited for rank {other} in {tag}: the collective hangs")
            time.sleep(0.001)
        data = bytearray(store.get(f"{key}/{other}"))
        total += torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape)
    tensor.copy_(total)


def _raw(tensor):
    import ctypes

    import numpy as np

    size = tensor.numel() * tensor.element_size()
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(tensor.data_ptr())).copy()


def save_to_tracker(microbatch, value):
    tracker = parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER
    if "load" not in tracker:
        tracker["load"] = {"values": torch.zeros(MICROBATCHES), "reduce_group": "dp"}
    tracker["load"]["values"][microbatch] += value


def training_log(losses, iteration, tag=""):
    tracker = parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER
    point("log-early", iteration)
    exchange(tracker["load"]["values"], f"log/{iteration}{tag}")
    point("log-reduced", iteration)
    if rank == world_size - 1:  # the last rank writes
        log.add(iteration, "lm loss", losses[0]["lm loss"].item())
        log.add(iteration, "load", tracker["load"]["values"].tolist())
    tracker["load"]["values"].zero_()
    point("log-late", iteration)


def train_step(model, optimizer, iteration):
    global bias, counts
    step = iteration + 1
    model.grad.zero_()
    model.expert_grad.zero_()
    losses = []
    for microbatch in range(MICROBATCHES):
        data = torch.arange(8, dtype=torch.float32) * (rank + 1) + step + microbatch
        noise = torch.rand(8)
        loss = ((model.weight * data + noise + bias) ** 2).mean()
        reported = loss.clone()  # over all data, as Megatron reports it
        exchange(reported, f"loss/{step}/{microbatch}")
        losses.append({"lm loss": (reported, torch.tensor(1.0))})
        save_to_tracker(microbatch, loss)
        counts += data.abs()
        point(f"forward{microbatch + 1}", step)
        model.grad += 2 * (model.weight * data + noise + bias) * data / 8
        if model.expert is not None:
            model.expert_grad += model.expert * data * noise
    for hook in hooks["losses"]:
        hook(losses)
    exchange(model.grad, f"grad/{step}")
    if model.expert is not None:
        exchange(model.expert_grad, f"expert-grad/{step}", ranks=expert_ranks())
    exchange(counts, f"counts/{step}")
    bias += (counts.mean() - counts).sign() * 0.01
    counts.zero_()
    optimizer.step(step)
    return losses


def train(forward_step_func, model, optimizer, scheduler, *rest):
    global entries
    args = get_args()
    entries += 1
    iteration = args.iteration
    while iteration < args.train_iters:
        for hook in hooks["begin"]:
            hook(iteration + 1)
        args.curr_iteration = iteration
        losses = train_step(model[0], optimizer, iteration)
        iteration += 1
        mean = [{"lm loss": sum(part["lm loss"][0] for part in losses) / MICROBATCHES}]
        training_log(mean, iteration)
        args.iteration = iteration
        for hook in hooks["logged"]:
            hook(iteration)
        if iteration == args.save_at:
            save_checkpoint(args.checkpoint, model[0], optimizer, iteration)
        point("end", iteration)
    exchange(torch.zeros(1), "end")
    return iteration


def save_checkpoint(path, model, optimizer, iteration):
    state = {"weight": model.weight, "momentum": optimizer.momentum, "bias": bias, "iteration": iteration}
    state["rng"] = torch.get_rng_state()
    if path is not None:
        torch.save(state, f"{path}.{rank}")
        with open(path, "w") as file:
            file.write(str(iteration))


def load_checkpoint(path, model, optimizer):
    state = torch.load(f"{path}.{rank}", weights_only=False)
    for target, name in ((model.weight, "weight"), (optimizer.momentum, "momentum"), (bias, "bias")):
        target.copy_(state[name])
    torch.set_rng_state(state["rng"])
    return state["iteration"]


class Optimizer:
    """Momentum; ``begin_to_update`` and ``end_to_update`` are the adaptor's."""

    def __init__(self, model):
        self.model = model
        self.momentum = torch.zeros(8)
        self.expert_momentum = torch.zeros(8)

    def tensors(self, kind):
        """Parameters and momentum of one type of optimizer: 0 for the dense ones, 1 for the experts'."""
        if kind == 0:
            return self.model.weight, self.momentum
        return () if self.model.expert is None else (self.model.expert, self.expert_momentum)

    def step(self, step):
        exchange(torch.zeros(1), f"barrier/{step}")
        self.begin_to_update()
        self.momentum.mul_(0.9).add_(self.model.grad)
        point("update", step)
        self.model.weight.sub_(self.momentum * 1e-4)
        if self.model.expert is not None:
            self.expert_momentum.mul_(0.9).add_(self.model.expert_grad)
            self.model.expert.sub_(self.expert_momentum * 1e-3)
        point("update-late", step)
        self.end_to_update(step)
        point("updated", step)
