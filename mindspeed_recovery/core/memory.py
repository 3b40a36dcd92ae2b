# SPDX-License-Identifier: Apache-2.0
"""Device and host memory: which tensors can become unsafe, and how one is refreshed.

The rules come from torch_npu's allocator: *unsafe* is a property of a whole storage, every operation on an unsafe tensor
raises, and only ``copy_`` from safe memory makes it safe again. So a tensor is always saved and written back as the
bytes of its whole storage: its address, its views and captured graphs stay, for every dtype and every stride.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceMemory(Protocol):
    """What the plugin asks of a device's memory. May be called on any thread."""

    def is_device(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is device memory, which a fault can make unsafe."""

    def is_unsafe(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is marked unsafe. Never raises."""

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A fresh host tensor, pinned where the device can copy into it asynchronously."""


class PlainMemory:
    """The memory of whatever device torch has, without a way to ask for unsafe data."""

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.device.type not in ("cpu", "meta")

    def is_unsafe(self, tensor: Tensor) -> bool:
        return False

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=has_device())


HostEmpty = Callable[[Sequence[int], torch.dtype], Tensor]


def _accelerator() -> Any:
    """torch's module of the device in use, or None. ``torch.accelerator`` is there from 2.6 on."""
    if hasattr(torch, "accelerator"):
        return torch.accelerator if torch.accelerator.is_available() else None
    modules = (getattr(torch, name, None) for name in ("npu", "cuda"))
    return next((module for module in modules if module is not None and module.is_available()), None)


def has_device() -> bool:
    """Whether this process has a device, so that copies are asynchronous."""
    return _accelerator() is not None


def current_device() -> torch.device:
    """The device this process computes on; the host without one."""
    if not has_device():
        return torch.device("cpu")
    if hasattr(torch, "accelerator"):
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    else:
        kind = next(name for name in ("npu", "cuda") if getattr(torch, name, None) is _accelerator())
    return torch.empty(0, device=kind).device


def synchronize() -> None:
    """Wait for what has been enqueued on the device, if there is one."""
    module = _accelerator()
    if module is not None:
        module.synchronize()


def _record_event() -> Any:
    event = _accelerator().Event() if not hasattr(torch, "Event") else torch.Event()
    event.record()
    return event


def _device() -> torch.device:
    current = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return current or torch.device("npu" if hasattr(torch, "npu") else "cuda")


class Fences:
    """Numbered points on the device's stream: one is passed when all that was enqueued before it has happened.

    The stream itself writes the number of each into host memory when it comes there. So whether one is passed can be read
    at any time without a wait, also after *stop* and of a device that answers nothing any more. A stream goes no further
    after an operation that failed (torch_npu sets stop-on-failure), so nothing behind a passed fence has failed. Without a
    device everything has happened when it returns, and every fence is passed.

    `enqueue` and `wait` on the training thread, the others on any.
    """

    def __init__(self, host_empty: HostEmpty) -> None:
        self._host_empty = host_empty
        self._reached: Tensor | None = None
        self._event: Any = None
        self.following = 0
        """The number of the fence that comes next on the stream: what is enqueued now is behind it."""

    def enqueue(self) -> None:
        """Put the `following` fence at the present end of the stream. Raises what the device raises."""
        if not has_device():
            return
        if self._reached is None:
            self._reached = self._host_empty([1], torch.int64).fill_(-1)
        to_host(torch.full([1], self.following, dtype=torch.int64, device=_device()), self._reached)
        self._event = _record_event()
        self.following += 1

    def passed(self, number: int) -> bool:
        """Whether all that was enqueued before fence ``number`` has happened; before a negative one nothing was. Asks no
        device."""
        if number < 0:
            return True
        return not has_device() if self._reached is None else int(self._reached) >= number

    def wait(self) -> None:
        """Wait until the last fence is passed. Healthy state only: after *stop* no device event may be touched."""
        if self._event is not None and not self.passed(self.following - 1):
            self._event.synchronize()

    def abandon(self) -> None:
        """The device was stopped: what it has not passed it never will, and nobody waits for it."""
        self._event = None


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage behind ``tensor`` as a 1-D uint8 tensor that shares its memory.

    It is made from the storage, not from the tensor: no operation reads the tensor, which may be unsafe.
    """
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return alias.set_(tensor.untyped_storage())


def to_host(source: Tensor, host: Tensor) -> None:
    """Copy ``source`` into the host tensor ``host``. Enqueued on the current stream."""
    host.copy_(source, non_blocking=True)


def save(tensor: Tensor, host: Tensor) -> None:
    """Copy the storage of ``tensor`` into ``host`` (uint8, as many bytes). Enqueued on the current stream."""
    to_host(storage_bytes(tensor), host)


def load(tensor: Tensor, host: Tensor) -> None:
    """Write ``host`` (uint8) back over the whole storage of ``tensor``, which becomes safe."""
    storage_bytes(tensor).copy_(host)


def refresh_zeros(tensor: Tensor) -> None:
    """Make the whole storage of ``tensor`` zeros in safe memory. ``zero_()`` would raise on unsafe data."""
    target = storage_bytes(tensor)
    target.copy_(torch.zeros(target.numel(), dtype=torch.uint8, device=target.device))


def host_view(data: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    array: Any = data.numpy()
    return memoryview(array)


def nbytes(tensor: Tensor) -> int:
    """Bytes of the whole storage behind ``tensor``; 0 for one without (sparse, fake)."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0
