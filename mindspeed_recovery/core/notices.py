# SPDX-License-Identifier: Apache-2.0
"""What a rank tells all others through the default store: that it runs the plugin, with which catalogue, and digests of
the copies of its own states.

No collective and no group: a restarted rank has none. A rank reads the notice of another one before it sends or awaits
anything, so a rank without the plugin is never sent to. The digests outlive the process that took them, which is how a
restarted rank learns that its random generators were those of its replica.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mindspeed_recovery.core import codec, memory
from mindspeed_recovery.core.copies import StateCopy
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.wire import PROTOCOL
from mindspeed_recovery.errors import StateError

_PREFIX = "mindspeed-recovery"
_POLL_SECONDS = 0.02


class DefaultStore(NamedTuple):
    """The store of the default process group."""

    store: Any
    rank: int
    world_size: int


def default_store() -> DefaultStore | None:
    """None without torch.distributed. Looked up each time: a runtime replaces the store when the rank that held it has been
    restarted."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    return DefaultStore(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


def catalogue_digest(registry: Registry) -> str:
    """The same on two ranks if, and only if, these track the same states in the same way."""
    specs = []
    for state in registry:
        values = {f.name: getattr(state.spec, f.name) for f in dataclasses.fields(state.spec) if f.compare}
        specs.append({name: str(value) for name, value in values.items() if name != "why"})
    text = json.dumps(sorted(specs, key=lambda spec: spec["name"]), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def copy_digest(copy: StateCopy) -> str | None:
    """The same on two ranks if the copies are equal; None for a value that has no meaning on another rank."""
    try:
        value, storages = codec.encode((place.path, capture) for place, capture in copy.captures)
    except StateError:
        return None
    return digest(value, storages)


def digest(value: dict[str, Any], storages: Iterable[Tensor]) -> str:
    """Of a described value (see `codec`) and its bytes."""
    result = hashlib.sha256(json.dumps(value).encode())
    for storage in storages:
        result.update(memory.host_view(storage))
    return result.hexdigest()[:32]


class Notices:
    """This rank's notices and those of the others. ``find``: the store to use."""

    def __init__(self, find: Callable[[], DefaultStore | None] = default_store) -> None:
        self._find = find
        self._published: tuple[int, str] | None = None
        self._digests: list[tuple[int, dict[str, str]]] = []

    def publish(self, registry: Registry) -> None:
        """Say that this rank runs the plugin, once for each store and catalogue. Errors of the store are the caller's."""
        place = self._find()
        if place is None:
            return
        catalogue = catalogue_digest(registry)
        if self._published == (id(place.store), catalogue):
            return
        notice = {"protocol": PROTOCOL, "catalogue": catalogue, "states": [state.name for state in registry]}
        place.store.set(f"{_PREFIX}/peer/{place.rank}", json.dumps(notice))
        self._published = id(place.store), catalogue

    def withdraw(self) -> None:
        """Say that this rank does not run the plugin any more."""
        place = self._find()
        if place is not None and self._published is not None:
            place.store.set(f"{_PREFIX}/peer/{place.rank}", "")
            self._published = None

    def problem_with(self, rank: int, registry: Registry, timeout: float) -> str:
        """Why nothing may be sent to or awaited from ``rank``; empty if there is nothing. Waits up to ``timeout`` seconds
        for a notice: after a restart of the rank that holds the store, all are given anew."""
        place = self._find()
        if place is None:
            return "there is no default process group"
        notice = _read(place.store, f"{_PREFIX}/peer/{rank}", timeout)
        if not isinstance(notice, dict):
            return f"rank {rank} does not run the plugin"
        for what, mine in (("protocol", PROTOCOL), ("catalogue", catalogue_digest(registry))):
            if notice.get(what) != mine:
                return f"rank {rank} has another {what}: {notice.get(what)!s:.80} there, {mine} here"
        return ""

    def publish_digests(self, step: int, copies: Mapping[str, StateCopy]) -> None:
        """Digests of copies as of the end of ``step``. The last two of such steps are kept."""
        place = self._find()
        if place is None:
            return
        digests = {name: found for name, copy in copies.items() if (found := copy_digest(copy)) is not None}
        self._digests = [*self._digests[-1:], (step, digests)]
        place.store.set(f"{_PREFIX}/digests/{place.rank}", json.dumps(self._digests))

    def announce(self, step: int, digests: Mapping[str, str]) -> None:
        """Digests of this rank's own states as they are saved after ``step``."""
        place = self._find()
        if place is not None:
            place.store.set(f"{_PREFIX}/saved/{place.rank}", json.dumps([step, digests]))

    def alike(
        self, step: int, digests: Mapping[str, str], peers: Sequence[int], timeout: float
    ) -> dict[str, list[int]]:
        """For each state those of ``peers`` that have announced the same digest for ``step``. Waits up to ``timeout``
        seconds in all for them."""
        place = self._find()
        alike: dict[str, list[int]] = {name: [] for name in digests}
        deadline = time.monotonic() + timeout
        if place is None:
            return alike
        for peer in peers:
            theirs = _announced(place.store, peer, step, deadline)
            for name, mine in digests.items():
                if theirs.get(name) == mine:
                    alike[name].append(peer)
        return alike

    def not_equal(self, state: str, other: int) -> str:
        """Why the copies of ``state`` here and on rank ``other`` cannot be taken for equal; empty if their digests were
        equal at the last step of which both ranks have published some."""
        place = self._find()
        if place is None:
            return "there is no default process group"
        mine, theirs = (_digests(place.store, rank) for rank in (place.rank, other))
        common = max(set(mine) & set(theirs), default=None)
        if common is None:
            return f"no digests of one step are known of ranks {place.rank} and {other}"
        if state not in mine[common] or mine[common][state] != theirs[common].get(state):
            return f"its copy of step {common} was another one than on rank {place.rank}"
        return ""


def _digests(store: Any, rank: int) -> dict[int, dict[str, str]]:
    found = _read(store, f"{_PREFIX}/digests/{rank}", 0)
    return dict(found) if isinstance(found, list) else {}


def _announced(store: Any, rank: int, step: int, deadline: float) -> dict[str, str]:
    """The digests of ``rank`` for ``step``; empty if none have come until then. What it has said before is of earlier steps."""
    while True:
        said = _read(store, f"{_PREFIX}/saved/{rank}", max(0.0, deadline - time.monotonic()))
        if isinstance(said, list) and said[0] == step:
            return dict(said[1])
        if time.monotonic() >= deadline:
            return {}
        time.sleep(_POLL_SECONDS)


def _read(store: Any, key: str, timeout: float) -> Any:
    deadline = time.monotonic() + timeout
    # Polled: a blocking wait would hold the client's lock against every other thread that uses the store.
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)
    try:
        return json.loads(store.get(key))
    except ValueError:
        return None
