# SPDX-License-Identifier: Apache-2.0
"""The states that are tracked in this process, and where each of them stands now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mindspeed_recovery.core import actions, container, instances, values
from mindspeed_recovery.core.location import Place
from mindspeed_recovery.core.memory import nbytes
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.values import Buffers, Capture
from mindspeed_recovery.errors import LocationError, QuarantineError, StateError


@dataclass
class TrackedState:
    """One declared state in this process."""

    spec: StateSpec
    owners: list[tuple[str, Any]] = field(default_factory=list)
    """For a state on instances: path and object of each."""
    constants: list[tuple[Place, Capture]] = field(default_factory=list)
    unprotected: str | None = None
    """Why the state is not copied any more, after an error of ours in a healthy step; until the next recovery."""
    too_large: str | None = None
    """Why the state is not copied at all."""

    @property
    def name(self) -> str:
        return self.spec.name

    def whole(self, *, absent: bool = False) -> list[Place]:
        """Where the state's value stands now, before ``fields`` narrows it. What quarantine takes. With ``absent`` also
        where it could stand."""
        spec = self.spec
        if spec.on == "instances":
            attribute = spec.location.path[-1]
            return [
                Place(f"{path}.{attribute}", owner, attribute)
                for path, owner in self.owners
                if absent or hasattr(owner, attribute)
            ]
        place = spec.location.place(spec.optional)
        return [] if place is None else [place]

    def places(self, *, absent: bool = False) -> list[Place]:
        """Where the state stands now; with ``absent`` also where it could stand. Empty while it has not been made. Raises
        LocationError if it cannot be there."""
        if not self.spec.fields:
            return self.whole(absent=absent)
        return [part for place in self.whole() for part in self._parts(place, absent)]

    def _parts(self, place: Place, absent: bool) -> list[Place]:
        owner = place.get()
        if owner is None:
            return []
        if isinstance(owner, dict):  # an item appears when it is first written
            names = [name for name in self.spec.fields if absent or name in owner]
            return [Place(f"{place.path}[{name!r}]", owner, name) for name in names]
        missing = [name for name in self.spec.fields if not hasattr(owner, name)]
        if missing:
            raise LocationError(
                f"{place.path}: the {type(owner).__name__} there has no attribute '{missing[0]}' (fields)"
            )
        return [Place(f"{place.path}.{name}", owner, name) for name in self.spec.fields]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state with its path. A container in quarantine raises QuarantineError."""
        for place in self.places():
            yield from values.tensors(place.get(), place.path)


Pairs = list[tuple[Place, Capture]]


def _identity(place: Place) -> tuple[int, str]:
    return id(place.holder), place.attribute


def pair_up(here: list[Place], taken: Pairs) -> tuple[Pairs, list[Place]]:
    """Which capture goes to which place, and the places that no capture is of.

    By holder first, since a path may have changed, then by path, since a holder may have been made anew; a capture whose
    place is gone goes back to where it was taken.
    """
    rest = {_identity(place): place for place in here}
    pairs: Pairs = []
    later: Pairs = []
    for place, capture in taken:
        if rest.pop(_identity(place), None) is not None:
            pairs.append((place, capture))
        else:
            later.append((place, capture))
    by_path = {place.path: place for place in rest.values()}
    for place, capture in later:
        other = by_path.pop(place.path, None)
        pairs.append((other or place, capture))
    return pairs, list(by_path.values())


@contextmanager
def naming(state: TrackedState) -> Iterator[None]:
    """Put the state's name and the place of its declaration before the text of an error."""
    try:
        yield
    except (LocationError, StateError) as error:
        raise type(error)(f"state '{state.name}' ({state.spec.source}): {error}") from None
    except RecursionError:
        raise StateError(f"state '{state.name}' ({state.spec.source}): its value contains itself") from None
    except Exception as error:  # a kind of value that nobody has thought of
        text = f"state '{state.name}' ({state.spec.source}): {type(error).__name__}: {error}; untrack it or declare 'fields'"
        raise StateError(text) from error


class Registry:
    """Declared states by name. Declared and adopted on the training thread, read on the runtime's."""

    def __init__(self, specs: Iterable[StateSpec] = ()) -> None:
        self._states: dict[str, TrackedState] = {}
        for spec in specs:
            self.add(spec)

    def __iter__(self) -> Iterator[TrackedState]:
        return iter(list(self._states.values()))

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def __getitem__(self, name: str) -> TrackedState:
        """Raise KeyError, with the tracked names, for an unknown one."""
        try:
            return self._states[name]
        except KeyError:
            raise KeyError(
                f"no state '{name}' is tracked; tracked: {', '.join(sorted(self._states)) or 'none'}"
            ) from None

    def add(self, spec: StateSpec) -> TrackedState:
        """Raise StateError if the name, or the same location, is tracked already."""
        for other in self._states.values():
            same_place = (other.spec.location, other.spec.on, other.spec.fields) == (
                spec.location,
                spec.on,
                spec.fields,
            )
            if other.name == spec.name or same_place:
                raise StateError(
                    f"state '{spec.name}' at {spec.location} ({spec.source}) is tracked already, as '{other.name}' at "
                    f"{other.spec.location} ({other.spec.source}); untrack one of the two"
                )
        state = self._states[spec.name] = TrackedState(spec)
        return state

    def remove(self, name: str) -> None:
        self[name]
        del self._states[name]

    def find_owners(self, roots: Mapping[str, Any]) -> None:
        """Find the objects that hold the states on instances. Walks the object graph once.

        Raises LocationError, naming the entry, for an absent class or an attribute that no code of the class mentions.
        """
        classes: dict[str, type] = {}
        for state in self:
            if state.spec.on == "instances" and state.spec.policy is not Policy.IGNORED:
                with naming(state):
                    owner = state.spec.location.owner_class(state.spec.optional)
                if owner is not None:
                    classes[state.name] = owner
        found = instances.find(roots, set(classes.values()))
        for name, cls in classes.items():
            self._states[name].owners = found[cls]

    def adopt(self, state: TrackedState, buffers: Buffers) -> list[str]:
        """Make what stands at the state's places now recoverable; cheap where that is done. Returns holders that keep
        the old object. Raises LocationError or StateError where the declaration does not fit."""
        spec, strangers = state.spec, []
        for place in state.whole() if spec.quarantine else ():
            strangers += [f"{place.path}: {holder}" for holder in container.contain(place)]
        places = state.places()  # also to find out, at start, that a location cannot be right
        if spec.policy is Policy.CONSTANT and not state.too_large:
            known = {_identity(place) for place, _ in state.constants}
            for place in places:
                if _identity(place) not in known and place.get() is not None:
                    state.constants.append((place, Capture(place.get(), buffers, f"{spec.name} {place.path}")))
        if spec.clear is not None and (places or not spec.optional):
            actions.check_function(spec.clear)
        return strangers

    def release(self, state: TrackedState) -> None:
        """Put plain containers back where `adopt` put recovery-aware ones, with their contents."""
        for place in state.whole() if state.spec.quarantine else ():
            container.release(place)

    def describe(self, state: TrackedState) -> dict[str, Any]:
        """Name, policy, location, source, number of places here, bytes, devices and host-copy bytes of a state, for people.

        ``host_bytes`` is what its copies hold once both of a step have been taken.
        """
        try:
            places = [] if state.spec.policy is Policy.IGNORED else [p for p in state.places() if p.get() is not None]
            leaves = [tensor for place in places for _, tensor in values.tensors(place.get())]
        except QuarantineError:  # a recovery is under way
            places, leaves = [], []
        size = sum({values.storage_key(tensor): nbytes(tensor) for tensor in leaves}.values())
        return {
            "name": state.name,
            "policy": str(state.spec.policy),
            "location": str(state.spec.location),
            "source": state.spec.source,
            "places": len(places),
            "bytes": size,
            "device": ", ".join(sorted({str(tensor.device) for tensor in leaves})),
            "host_bytes": 0 if state.too_large else size * state.spec.host_copies,
        }
