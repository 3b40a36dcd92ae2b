# SPDX-License-Identifier: Apache-2.0
"""The live audit: which device tensors of this process would nobody restore?

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_recovery import api

if TYPE_CHECKING:
    from torch import Tensor

    from mindspeed_recovery.core.reachable import Untracked


def live(
    *, owners: Mapping[str, Any] | None = None, is_device: Callable[[Tensor], bool] | None = None
) -> list[Untracked]:
    """Every device tensor that module globals, class attributes, closures, defaults and caches of this process reach, and
    that neither a tracked state nor an owner has; one `Untracked` (path, location, shape, dtype, nbytes, device) for each
    storage, sorted by path.

    ``owners``: named objects whose tensors somebody else restores (``{"model": model, "optimizer": optimizer, "data":
    iterator}``), besides the roots that `enable` was given. ``is_device``: which tensors count, by default those in the
    memory of the session or, before `enable`, those that are on neither ``cpu`` nor ``meta``. States that `track` has
    declared count as tracked also before `enable`, as do states whose policy is ``ignored``.

    Call it when a step or two are over, so that what is made lazily is there. It changes nothing (random generators, lazy
    modules, reference counts), reads no tensor's data, needs no other rank, and takes about a second. Any thread that is
    not in a race with training.
    """
    from mindspeed_recovery.core import memory, reachable
    from mindspeed_recovery.core.registry import TrackedState

    more = list((owners or {}).values())
    if api._active is not None:
        return api._active.untracked(more, is_device)
    states = [TrackedState(spec) for spec in api._declared.values()]
    return reachable.untracked(is_device or memory.PlainMemory().is_device, more, states)
