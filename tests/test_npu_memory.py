# SPDX-License-Identifier: Apache-2.0
"""The NPU's memory, asked through a stand-in for torch_npu's recovery functions."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_recovery.core import memory as rules
from mindspeed_recovery.core.memory import PlainMemory
from mindspeed_recovery.core.npu_memory import NpuMemory, device_memory
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture
def recovery(monkeypatch: pytest.MonkeyPatch, memory: UnsafeMemory) -> Iterator[Any]:
    """torch_npu, loaded, on the simulated device; its recovery functions."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    import torch_npu

    torch_npu.npu._recovery.allocator = memory
    yield torch_npu.npu._recovery
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_npu"]:
        del sys.modules[name]


def on_npu(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_npu = True  # type: ignore[attr-defined]
    return tensor


def test_without_torch_npu_the_memory_is_plain_and_torch_npu_is_not_imported() -> None:
    code = (
        "import sys; from mindspeed_recovery.core.npu_memory import device_memory; "
        "print(type(device_memory()).__name__, 'torch_npu' in sys.modules)"
    )
    path = {"PYTHONPATH": f"{STAND_INS}:{STAND_INS.parent.parent}", "PATH": ""}  # it could be imported
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, env=path)
    assert done.stdout.split() == ["PlainMemory", "False"], done.stderr


def test_a_torch_npu_whose_import_failed_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # type: ignore[arg-type]
    assert isinstance(device_memory(), PlainMemory)


def test_with_torch_npu_loaded_the_memory_is_the_npus(recovery: Any) -> None:
    assert isinstance(device_memory(), NpuMemory)


def test_a_tensor_is_on_the_device_if_torch_npu_says_so_or_its_device_is_an_npu(recovery: Any) -> None:
    npu = NpuMemory()
    assert npu.is_device(on_npu(torch.zeros(1)))
    assert npu.is_device(SimpleNamespace(device=SimpleNamespace(type="npu")))  # type: ignore[arg-type]
    assert not npu.is_device(torch.zeros(1))
    assert not npu.is_device(torch.zeros(1, device="meta"))


def test_unsafe_belongs_to_the_storage_and_so_to_every_view(recovery: Any, memory: UnsafeMemory) -> None:
    npu, whole = NpuMemory(), on_npu(torch.arange(8.0))
    view = on_npu(whole[2:4])
    assert not npu.is_unsafe(whole)
    memory.mark_unsafe([view])
    assert npu.is_unsafe(whole)
    assert npu.is_unsafe(view)


def test_a_host_tensor_is_never_asked_about(recovery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "check_npu_tensor_is_safe", lambda tensor: pytest.fail("asked"))
    assert not NpuMemory().is_unsafe(torch.zeros(1))


def test_copying_over_the_whole_storage_makes_it_safe_and_marking_it_safe_would_keep_the_garbage(
    recovery: Any, memory: UnsafeMemory
) -> None:
    npu, tensor = NpuMemory(), on_npu(torch.arange(4.0))
    host = memory.host_empty([rules.nbytes(tensor)], torch.uint8)
    rules.save(tensor, host)
    memory.mark_unsafe([tensor])
    rules.load(tensor, host)
    assert not npu.is_unsafe(tensor)
    assert tensor.tolist() == [0, 1, 2, 3]

    memory.mark_unsafe([tensor])
    recovery.update_npu_tensor_to_safe(tensor)
    assert not npu.is_unsafe(tensor)
    assert tensor.tolist() != [0, 1, 2, 3]


def test_the_plugin_never_marks_a_tensor_safe() -> None:
    package = Path(rules.__file__).parent.parent
    calls = [f"{path.name}" for path in package.rglob("*.py") if "tensor_to_safe(" in path.read_text()]
    assert calls == []


@pytest.mark.parametrize("missing", ["function", "module"])
def test_a_torch_npu_without_the_check_counts_every_tensor_as_safe_and_says_so_once(
    recovery: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    if missing == "function":
        monkeypatch.delattr(recovery, "check_npu_tensor_is_safe")
    else:
        monkeypatch.setitem(sys.modules, "torch_npu.npu._recovery", None)  # type: ignore[arg-type]
    with caplog.at_level(logging.DEBUG, "mindspeed_recovery"):
        npu = NpuMemory()
        assert [npu.is_unsafe(on_npu(torch.zeros(1))) for _ in range(3)] == [False] * 3
    assert [(r.levelname, "check_npu_tensor_is_safe" in r.getMessage()) for r in caplog.records] == [("DEBUG", True)]


def test_a_check_that_raises_never_reaches_the_caller(
    recovery: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(tensor: torch.Tensor) -> bool:
        raise RuntimeError("FORCE STOP")

    monkeypatch.setattr(recovery, "check_npu_tensor_is_safe", raising)
    with caplog.at_level(logging.DEBUG, "mindspeed_recovery"):
        npu = NpuMemory()
        assert [npu.is_unsafe(on_npu(torch.zeros(1))) for _ in range(3)] == [False] * 3
    assert [r.levelname for r in caplog.records] == ["DEBUG"]


def test_host_memory_is_pinned(recovery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    empty = torch.empty

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append({"pin_memory": pin_memory, **kwargs})
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", pinned)
    host = NpuMemory().host_empty([3, 2], torch.bfloat16)
    assert (host.shape, host.dtype) == ((3, 2), torch.bfloat16)
    assert asked == [{"pin_memory": True, "dtype": torch.bfloat16, "device": "cpu"}]


def test_host_memory_that_cannot_be_pinned_is_plain(
    recovery: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refusing(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no pinned memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refusing)
    with caplog.at_level(logging.DEBUG, "mindspeed_recovery"):
        npu = NpuMemory()
        assert [npu.host_empty([n], torch.uint8).numel() for n in (1, 2)] == [1, 2]
    assert len(caplog.records) == 1
