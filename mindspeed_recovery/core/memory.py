# SPDX-License-Identifier: Apache-2.0
"""Device and host memory: which tensors can become unsafe, and how one is refreshed.

The rules come from torch_npu's allocator: *unsafe* is a property of a whole storage, every operation on an unsafe tensor
raises, and only ``copy_`` from safe memory makes it safe again. So a tensor is always saved and written back as the
bytes of its whole storage: its address, its views and captured graphs stay, for every dtype and every stride.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.accelerator.is_available())


HostEmpty = Callable[[Sequence[int], torch.dtype], Tensor]


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage behind ``tensor`` as a 1-D uint8 tensor that shares its memory.

    It is made from the storage, not from the tensor: no operation reads the tensor, which may be unsafe.
    """
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return alias.set_(tensor.untyped_storage())


def save(tensor: Tensor, host: Tensor) -> None:
    """Copy the storage of ``tensor`` into ``host`` (uint8, as many bytes). Enqueued on the current stream."""
    host.copy_(storage_bytes(tensor), non_blocking=True)


def load(tensor: Tensor, host: Tensor) -> None:
    """Write ``host`` (uint8) back over the whole storage of ``tensor``, which becomes safe."""
    storage_bytes(tensor).copy_(host)


def refresh_zeros(tensor: Tensor) -> None:
    """Make the whole storage of ``tensor`` zeros in safe memory. ``zero_()`` would raise on unsafe data."""
    target = storage_bytes(tensor)
    target.copy_(torch.zeros(target.numel(), dtype=torch.uint8, device=target.device))


def nbytes(tensor: Tensor) -> int:
    """Bytes of the whole storage behind ``tensor``."""
    return tensor.untyped_storage().nbytes()
