# SPDX-License-Identifier: Apache-2.0
"""The memory of an Ascend NPU, asked through torch_npu's recovery functions where torch_npu is loaded already.

torch_npu needs the CANN libraries, so a process that has not imported it is never made to.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_recovery.core.memory import DeviceMemory, PlainMemory

logger = logging.getLogger("mindspeed_recovery")

_BACKEND = "torch_npu"
_RECOVERY = "torch_npu.npu._recovery"
_CHECK = "check_npu_tensor_is_safe"


def device_memory() -> DeviceMemory:
    """The memory of this process's device: `NpuMemory` where torch_npu is loaded, `PlainMemory` elsewhere."""
    return NpuMemory() if sys.modules.get(_BACKEND) is not None else PlainMemory()


class NpuMemory:
    """Asks torch_npu's allocator whether a tensor's block is marked unsafe (``torch_npu/npu/_recovery.py``).

    Only asks. ``update_npu_tensor_to_safe`` would clear the mark and keep the damaged bytes; the plugin makes a tensor safe
    by copying safe bytes over its whole storage, which clears the mark as well. May be used on any thread.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._is_safe = self._find_check()

    def is_device(self, tensor: Tensor) -> bool:
        # torch_npu gives every tensor the attribute; without it the device's name says the same.
        return bool(getattr(tensor, "is_npu", tensor.device.type == "npu"))

    def is_unsafe(self, tensor: Tensor) -> bool:
        if self._is_safe is None:
            return False
        try:
            return self.is_device(tensor) and not self._is_safe(tensor)
        except Exception as error:  # no storage to ask for (fake, sparse), or the device does not answer
            self._say(f"{_CHECK} failed: {type(error).__name__}: {error}; the tensor counts as safe", key=_CHECK)
            return False

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:  # no locked memory left, or the device is stopped: a copy from it waits, no more
            self._say(f"host memory could not be pinned: {error}; copies into it are not asynchronous", key="pin")
            return torch.empty(shape, dtype=dtype, device="cpu")

    def _find_check(self) -> Callable[[Any], bool] | None:
        try:
            check: Callable[[Any], bool] = getattr(importlib.import_module(_RECOVERY), _CHECK)
            return check
        except (ImportError, AttributeError) as error:
            self._say(f"this torch_npu has no {_RECOVERY}.{_CHECK} ({error}); every tensor counts as safe", key="api")
            return None

    def _say(self, text: str, *, key: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.debug("%s", text)
