# SPDX-License-Identifier: Apache-2.0
"""Make global training state recoverable in place: a recovered run equals the run without a fault, bit for bit.

Importing the package imports neither torch nor any framework. It registers the flag in Megatron's argument parser and in
MindSpeed's list of features, for when these are loaded.
"""

from mindspeed_recovery import audit
from mindspeed_recovery.api import disable, enable, states, track, untrack
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.errors import (
    CatalogueError,
    LocationError,
    QuarantineError,
    RecoveryError,
    RecoveryFailed,
    StateError,
)
from mindspeed_recovery.frameworks import megatron_flag as _megatron_flag
from mindspeed_recovery.frameworks import mindspeed as _mindspeed

__version__ = "0.1.0"

__all__ = [
    "CatalogueError",
    "LocationError",
    "Policy",
    "QuarantineError",
    "RecoveryError",
    "RecoveryFailed",
    "StateError",
    "StateSpec",
    "audit",
    "disable",
    "enable",
    "states",
    "track",
    "untrack",
]

_megatron_flag.install()
_mindspeed.install_when_loaded()
