# SPDX-License-Identifier: Apache-2.0
"""Stand-in for torch_npu: which tensors are on the device, and its recovery functions.

Its memory is a `mindspeed_recovery.testing.simulator.UnsafeMemory` that the test puts into ``npu._recovery.allocator``.
"""

from torch_npu import npu

__all__ = ["npu"]
__version__ = "2.6.0.post3+gitstandin"
