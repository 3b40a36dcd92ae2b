# SPDX-License-Identifier: Apache-2.0
"""Each tensor in a hiding place of its own."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types

import torch

LOSS = None
TRACKER = {}
PENDING = collections.deque()


class Scaler:
    scale = None

    @classmethod
    def update(cls, device):
        cls.scale = torch.ones(1, device=device)


@dataclasses.dataclass
class Metrics:
    total: torch.Tensor | None = None


METRICS = Metrics()


class Counter:
    _instance = None

    def __init__(self, device):
        self.counts = torch.zeros(3, device=device)

    @classmethod
    def get(cls, device):
        if cls._instance is None:
            cls._instance = cls(device)
        return cls._instance


class Ema:
    def __init__(self, device):
        self.average = torch.zeros(4, device=device)

    def update(self, value):
        self.average.lerp_(value, 0.1)


HOOKS = []  # holds the bound method `Ema.update`, and so the Ema


def _make_running_mean():
    mean = None

    def running_mean(value):
        nonlocal mean
        mean = value.clone() if mean is None else mean.lerp(value, 0.1)
        return mean

    return running_mean


running_mean = _make_running_mean()


def accumulate(value, sums={}):  # noqa: B006 (the default argument is the hiding place)
    sums["sum"] = sums["sum"] + value if "sum" in sums else value.clone()
    return sums["sum"]


@functools.lru_cache(maxsize=4)
def causal_mask(size, device):
    return torch.ones(size, size, device=device).tril()


def memo(function):
    kept = {}

    @functools.wraps(function)
    def call(*args):
        if args not in kept:
            kept[args] = function(*args)
        return kept[args]

    return call


@memo
def positions(size, device):
    return torch.arange(size, device=device)


def workspace(size, device):
    if not hasattr(workspace, "buffer"):
        workspace.buffer = torch.empty(size, device=device)
    return workspace.buffer


def remember(device):
    globals()["LAST_GRAD_NORM"] = torch.ones((), device=device)


def fill(device):
    """Make every tensor, as a first step of training does."""
    global LOSS
    LOSS = torch.ones(1, device=device)
    TRACKER["moe"] = {"values": torch.zeros(2, device=device)}
    PENDING.append(torch.ones(5, device=device))
    Scaler.update(device)
    METRICS.total = torch.zeros(6, device=device)
    Counter.get(device)
    HOOKS.append(Ema(device).update)
    running_mean(torch.ones(1, device=device))
    accumulate(torch.ones(1, device=device))
    causal_mask(2, device)
    positions(3, device)
    workspace(7, device)
    remember(device)


# What an audit must not report: constants of the host, and what a model has in its own lists.

HOST_SCALE = torch.ones(1)
NAMES = ("load_balancing_loss", "z_loss")
SETTINGS = types.MappingProxyType({"alpha": 0.1})


class Layer(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, device=device))
        self.register_buffer("bias", torch.zeros(2, device=device))

    def forward(self, value):
        return value * self.weight + self.bias
