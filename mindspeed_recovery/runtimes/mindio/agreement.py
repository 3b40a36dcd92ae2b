# SPDX-License-Identifier: Apache-2.0
"""A vote of all ranks through the default store: no collective, no group, and nobody waits for ever.

Rollback has no barrier, communicators may be broken and ranks may have been restarted, so a group is the wrong tool. Each
rank adds its votes to counters and then itself to the count of voters; the last one closes the vote. A rank whose time is
up closes it as void. Both closings are one compare-and-set on one key, so every rank reads the same outcome. Constant work
for each rank, however many there are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("mindspeed_recovery")

_PREFIX = "mindspeed-recovery/tft"
_COMPLETE, _VOID = "complete", "void"
_POLL_SECONDS = (0.001, 0.1)


class Agreement:
    """The votes of this process. ``timeout``: seconds to wait for the other ranks, well below TFT's limit for a callback.

    Any thread. `announce` on every rank before the first recovery; a job where not every rank has announced itself
    never waits for a vote.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._announced = False
        self._last = ("", 0)
        self.notes: list[str] = []
        """What ranks had to say with the last vote that was complete."""

    def announce(self) -> None:
        """Say once that this rank takes part in votes."""
        group = None if self._announced else _store_and_size()
        if group is not None:
            self._announced = True
            group[0].add(f"{_PREFIX}/present", 1)

    def vote(self, recovery: str, votes: Mapping[str, bool], note: str = "") -> dict[str, int] | None:
        """How many ranks said yes to each question; None, alike on every rank that votes, if not all of them did in time.

        ``recovery`` names the recovery, alike on all ranks. The questions are the same on every rank. ``note``: something
        that this rank has to say; every rank finds it in `notes`. Few ranks should have one.
        """
        self.notes = [note] if note else []
        group = _store_and_size()
        if group is None:
            return {name: int(vote) for name, vote in votes.items()}
        store, size = group
        if store.add(f"{_PREFIX}/present", 0) < size:
            logger.warning("not every rank runs the plugin: no vote is taken, each rank decides for itself")
            return None
        self._last = (recovery, self._last[1] + 1 if self._last[0] == recovery else 0)
        prefix = f"{_PREFIX}/vote/{recovery}/{self._last[1]}"
        for name, vote in votes.items():
            if vote:
                store.add(f"{prefix}/{name}", 1)
        if note:
            store.set(f"{prefix}/note/{store.add(f'{prefix}/notes', 1)}", note)
        if store.add(f"{prefix}/voters", 1) == size:
            store.compare_set(f"{prefix}/outcome", "", _COMPLETE)
        if self._outcome(store, f"{prefix}/outcome") != _COMPLETE:
            logger.warning(
                "%d of %d ranks voted within %.0f s: each rank decides for itself",
                store.add(f"{prefix}/voters", 0),
                size,
                self._timeout,
            )
            return None
        notes = range(1, store.add(f"{prefix}/notes", 0) + 1)
        self.notes = sorted(store.get(f"{prefix}/note/{number}").decode() for number in notes)
        return {name: store.add(f"{prefix}/{name}", 0) for name in votes}

    def _outcome(self, store: Any, key: str) -> str:
        deadline = time.monotonic() + self._timeout
        pause, longest = _POLL_SECONDS
        # Polled: a blocking wait would hold the client's lock against every other thread that uses the store.
        while not store.check([key]):
            if time.monotonic() > deadline:
                store.compare_set(key, "", _VOID)
                break
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return store.get(key).decode()


def _store_and_size() -> tuple[Any, int] | None:
    """Looked up each time: TFT replaces the default store when the rank that held it has been restarted."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store(), dist.get_world_size()
