# SPDX-License-Identifier: Apache-2.0
from torch_npu.npu import _recovery

default_generators = ()
"""One for each device, once it is used; the simulated device draws from the CPU's."""

__all__ = ["_recovery", "default_generators"]
