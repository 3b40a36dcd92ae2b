# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from background_device import BackgroundDevice
from clusters import ROOT, Cluster, StockCluster

from mindspeed_recovery.core import memory as core_memory
from mindspeed_recovery.testing.simulator import UnsafeMemory


@pytest.fixture(scope="session")
def megatron() -> Callable[[str], Path]:
    """The folder that holds a version of megatron-core, as `make test` lays it."""

    def folder(version: str) -> Path:
        path = Path(os.environ.get("MEGATRON_CORE_DIR", ROOT / ".cache" / "megatron")) / version
        if not (path / "megatron" / "core").is_dir():
            pytest.fail(f"megatron-core {version} is not at {path}; run `make test`, which fetches it")
        return path

    return folder


@pytest.fixture(scope="session")
def cluster(
    megatron: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Cluster]]:
    """``cluster(version)``: two ranks with that version of megatron-core."""
    clusters: dict[str, Cluster] = {}

    def get(version: str) -> Cluster:
        if version not in clusters:
            clusters[version] = Cluster(megatron(version), tmp_path_factory.mktemp(f"megatron-{version}-"))
        return clusters[version]

    yield get
    for cluster in clusters.values():
        cluster.close()


@pytest.fixture(scope="session")
def stock(megatron: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockCluster]:
    """Ranks that run Megatron's stock loop."""
    cluster = StockCluster(megatron("0.19.2"), tmp_path_factory.mktemp("stock"))
    yield cluster
    cluster.close()


@pytest.fixture
def make_module() -> Iterator[Callable[..., Any]]:
    """``make_module(name, source="", **contents)``: a module in ``sys.modules`` until the test ends."""
    made: list[str] = []

    def make(name: str, source: str = "", **contents: Any) -> ModuleType:
        assert name not in sys.modules
        module = sys.modules[name] = ModuleType(name)
        made.append(name)
        vars(module).update(contents)
        exec(compile(source, f"<{name}>", "exec"), vars(module))
        return module

    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def memory() -> Iterator[UnsafeMemory]:
    """Simulated device memory, active in the test's thread."""
    memory = UnsafeMemory()
    with memory.active():
        yield memory


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> BackgroundDevice:
    """The process's device, with copies in the background."""
    background = BackgroundDevice()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", background.synchronize)
    monkeypatch.setattr(torch, "Event", background.event)
    monkeypatch.setattr(core_memory, "to_host", background.to_host)
    return background


@pytest.fixture
def plugin() -> Iterator[Any]:
    """The package, with nothing declared; switched off and with nothing declared at the end."""
    import mindspeed_recovery
    from mindspeed_recovery import api

    api._declared.clear()
    yield mindspeed_recovery
    try:
        mindspeed_recovery.disable()
    finally:
        api._active = None
        api._declared.clear()
