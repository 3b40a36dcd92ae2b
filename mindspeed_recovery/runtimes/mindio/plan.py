# SPDX-License-Identifier: Apache-2.0
"""What TFT has planned for the repair of this rank, read from its handler."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class RepairPlan:
    """What TFT has asked this rank to do. ``pairs``: (source rank, destination rank, replica type) that it takes part in;
    type 0 is the dense optimizer's replicas, 1 the experts'."""

    step: int
    rank: int
    pairs: tuple[tuple[int, int, int], ...] = ()
    loads_checkpoint: bool = False

    @property
    def receives(self) -> bool:
        """Whether this rank is repaired, from a replica."""
        return any(destination == self.rank for _, destination, _ in self.pairs)


NO_REPAIR = RepairPlan(0, -1)


def read_plan(decorator: ModuleType) -> RepairPlan:
    """The plan of the repair that is about to begin. The lists of sources, destinations and types run in parallel."""
    handler, types = decorator.save_handler, getattr(decorator, "RepairType", None)
    info, rank = handler._repair_info or {}, getattr(decorator, "rank_", None)
    kinds = info.get("type")
    kinds = kinds if isinstance(kinds, list) else itertools.repeat(kinds or 0)
    triples = zip(info.get("src") or [], info.get("dst") or [], kinds)
    loads = {getattr(types, name).value for name in ("RT_LOAD_CKPT", "RT_LOAD_REBUILD") if hasattr(types, name)}
    loading = info.get("repair_type") in loads
    pairs = () if loading else tuple(triple for triple in triples if rank in triple[:2])
    return RepairPlan(handler._repair_step, -1 if rank is None else rank, pairs, loading)
