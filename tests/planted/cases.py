# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of `state.py` are: location by kind of hiding place, and the path of the tensor in a running process.

The location is the one to declare, where a declaration can name it; the hiding place is then the last part of the path.
"""

from __future__ import annotations

PLANTED = {
    "module global": ("planted.state:LOSS", "planted.state:LOSS"),
    "nested dict": ("planted.state:TRACKER", "planted.state:TRACKER['moe']['values']"),
    "deque": ("planted.state:PENDING", "planted.state:PENDING[0]"),
    "class attribute": ("planted.state:Scaler.scale", "planted.state:Scaler.scale"),
    "dataclass": ("planted.state:METRICS.total", "planted.state:METRICS.total"),
    "singleton": ("planted.state:Counter._instance", "planted.state:Counter._instance.counts"),
    "bound method": ("planted.state:HOOKS", "planted.state:HOOKS[0].__self__.average"),
    "closure": ("planted.state:running_mean", "planted.state:running_mean.<closure>.mean"),
    "default argument": ("planted.state:accumulate", "planted.state:accumulate.<default>.sums['sum']"),
    "lru_cache": ("planted.state:causal_mask", "planted.state:causal_mask.<cache>[0]"),
    "memo decorator": ("planted.state:positions", "planted.state:positions.<closure>.kept[0]"),
    "function attribute": ("planted.state:workspace.buffer", "planted.state:workspace.buffer"),
    "globals()": ("planted.state:LAST_GRAD_NORM", "planted.state:LAST_GRAD_NORM"),
}
