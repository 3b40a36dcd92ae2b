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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mindspeed_recovery.core.notices import DefaultStore, default_store

logger = logging.getLogger("mindspeed_recovery")

_PREFIX = "mindspeed-recovery/tft"
_COMPLETE, _VOID = "complete", "void"
_VOTES_KEPT = 8
"""So many of the last votes stay in the store: nobody reads those of earlier recoveries any more."""
_POLL_SECONDS = (0.001, 0.1)


class Agreement:
    """The votes of this process. ``timeout``: seconds to wait for the other ranks, well below TFT's limit for a callback;
    ``place()``: where it votes at this moment.

    Any thread. `announce` on every rank before the first recovery; a job where not every rank has announced itself
    does not wait for a vote. A process that was started again in the middle of a recovery need not have done so.
    """

    def __init__(self, timeout: float, place: Callable[[], DefaultStore | None] = default_store) -> None:
        self._timeout = timeout
        self._place = place
        self._joined: Any = None
        self._taken: Counter[str] = Counter()
        self._left: deque[tuple[Any, str, list[str]]] = deque()
        self.notes: list[str] = []
        """What ranks had to say with the last vote that was complete."""

    def announce(self) -> None:
        """Say once, in each store that the job comes to have, that this rank takes part in votes."""
        place = self._place()
        if place is not None:
            self._join(place)

    def _join(self, place: DefaultStore) -> bool:
        """Announce this rank in the store; False if it is the first process of the rank there.

        The count of ranks present is then no verdict yet: the store may be new, and the others on their way. A rank that is
        started again is not counted twice.
        """
        store = place.store
        if store is self._joined:
            return True
        first = store.add(f"{_PREFIX}/present/{place.rank}", 1) == 1
        if first:
            store.add(f"{_PREFIX}/present", 1)
        self._joined = store
        return not first

    def introduce(self, recovery: str, word: str) -> bool:
        """Leave ``word`` for the ranks that this one will meet in ``recovery``. False if one of them has given it up."""
        place = self._place()
        if place is None:
            return False
        key = f"{_PREFIX}/met/{recovery}/{place.rank}"
        self._leave(place.store, recovery, [key])
        return place.store.compare_set(key, "", word).decode() == word

    def words(self, recovery: str, ranks: Iterable[int]) -> dict[int, str | None]:
        """What these ranks have left; None for one that has not in time, which is then given up by all others alike."""
        place = self._place()
        deadline = time.monotonic() + self._timeout
        words: dict[int, str | None] = dict.fromkeys(ranks)
        for rank in words if place is not None else ():
            word = self._outcome(place.store, f"{_PREFIX}/met/{recovery}/{rank}", deadline)  # type: ignore[union-attr]
            words[rank] = None if word == _VOID else word
        return words

    def vote(self, recovery: str, votes: Mapping[str, bool], note: str = "") -> dict[str, int] | None:
        """How many ranks said yes to each question; None, alike on every rank that votes, if not all of them did in time.

        ``recovery`` names the recovery, alike on all ranks. The questions are the same on every rank. ``note``: something
        that this rank has to say; every rank finds it in `notes`. Few ranks should have one.
        """
        self.notes = [note] if note else []
        place = self._place()
        if place is None:
            return {name: int(vote) for name, vote in votes.items()}
        store, _, size = place
        if self._join(place) and store.add(f"{_PREFIX}/present", 0) < size:
            logger.warning("not every rank runs the plugin: no vote is taken, each rank decides for itself")
            return None
        prefix = f"{_PREFIX}/vote/{recovery}/{self._taken[recovery]}"
        self._taken[recovery] += 1
        keys = [f"{prefix}/{name}" for name in (*votes, "notes", "voters", "outcome")]
        self._leave(store, recovery, keys)
        for name, vote in votes.items():
            if vote:
                store.add(f"{prefix}/{name}", 1)
        if note:
            number = store.add(f"{prefix}/notes", 1)
            store.set(f"{prefix}/note/{number}", note)
            keys.append(f"{prefix}/note/{number}")
        voters = store.add(f"{prefix}/voters", 1)
        if voters > size:  # a process that was started again does not know how often its rank has voted
            logger.warning("the ranks have lost count of their votes in recovery %s: no vote is taken", recovery)
            return None
        if voters == size:
            store.compare_set(f"{prefix}/outcome", "", _COMPLETE)
        if self._outcome(store, f"{prefix}/outcome", time.monotonic() + self._timeout) != _COMPLETE:
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

    def _leave(self, store: Any, recovery: str, keys: list[str]) -> None:
        """These keys come into the store for this recovery, and those of an old one go."""
        self._left.append((store, recovery, keys))
        if len(self._left) > _VOTES_KEPT:
            old_store, old_recovery, old_keys = self._left.popleft()
            if old_recovery not in (recovery for _, recovery, _ in self._left):
                self._taken.pop(old_recovery, None)
            if old_store is store:  # another one went with the rank that held it
                for key in old_keys:
                    store.delete_key(key)

    @staticmethod
    def _outcome(store: Any, key: str, deadline: float) -> str:
        pause, longest = _POLL_SECONDS
        # Polled: a blocking wait would hold the client's lock against every other thread that uses the store.
        while not store.check([key]):
            if time.monotonic() > deadline:
                store.compare_set(key, "", _VOID)
                break
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return store.get(key).decode()
