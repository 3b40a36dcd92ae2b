# SPDX-License-Identifier: Apache-2.0
"""Make global training state recoverable in place: a recovered run equals the run without a fault, bit for bit.

Importing the package imports neither torch nor any framework.
"""

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
    "disable",
    "enable",
    "states",
    "track",
    "untrack",
]
