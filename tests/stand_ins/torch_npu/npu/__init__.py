# SPDX-License-Identifier: Apache-2.0
from torch_npu.npu import _recovery

__all__ = ["_recovery"]
