# SPDX-License-Identifier: Apache-2.0
"""The errors of the package. Importing this module imports nothing else.

Everything that can reach the training thread during a recovery is a RuntimeError whose text begins with
``FORCE STOP``: runtimes take any other error that leaves ``train()`` then for a new, unknown fault and end the job.
"""

from __future__ import annotations

FORCE_STOP = "FORCE STOP"

UNSAFE_DATA = "There is unsafe data in the input tensor"
"""What a device says to an operation on an unsafe tensor."""

FAULT_TEXTS = (FORCE_STOP, "UCE ERROR", "HBM MULTI BIT ECC", "HCCL OP RETRY FAILED", UNSAFE_DATA)
"""What the errors of a device, or of a runtime that stops it, say. They must reach the caller of ``train()``."""


def is_device_fault(error: BaseException) -> bool:
    """Whether an error comes from the device or the runtime, by its text."""
    return any(text in str(error) for text in FAULT_TEXTS)


def is_unsafe_data(error: BaseException) -> bool:
    """Whether an error is the device's answer to an operation on an unsafe tensor, by its text."""
    return UNSAFE_DATA in str(error)


class RecoveryError(Exception):
    """Base class of every error that this package raises itself."""


class LocationError(RecoveryError):
    """A location is malformed, or names an attribute that an imported module does not have."""


class CatalogueError(RecoveryError):
    """A catalogue file is not valid; the text names file, entry and key."""


class StateError(RecoveryError):
    """A state is declared wrongly, or twice under one name."""


class QuarantineError(RecoveryError, RuntimeError):
    """A tracked container was used between *clean* and its reset."""

    def __init__(self, state: str, location: str) -> None:
        super().__init__(
            f"{FORCE_STOP}: state '{state}' at {location} is in quarantine: a recovery has moved its contents away and "
            "has not reset it yet. Let the training thread end its step; the state works again after rollback."
        )


class RecoveryFailed(RecoveryError, RuntimeError):
    """A recovery left states that are not exact (only under ``strict``), or could not be completed."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{FORCE_STOP}: {text}")


class RepairError(RecoveryError, RuntimeError):
    """A state could not be moved from or to another rank. ``broken``: nor can the group be used any more."""

    def __init__(self, text: str, *, broken: bool = False) -> None:
        super().__init__(f"{FORCE_STOP}: {text}")
        self.broken = broken
