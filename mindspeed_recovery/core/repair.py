# SPDX-License-Identifier: Apache-2.0
"""Repair: a copy that this rank does not have comes from a replica.

What moves are the host copies of the step that is being restored, never the live values, which may be half a step further.
A received copy stands where the rank's own would, so that everything after it (writing back in place, making what is
absent, dropping what is too much, checking) is the same for both. On the wire see `wire` and `codec`; over what, `link`.

One state that cannot be sent, understood or stored is named, and the others move; the other rank never waits for it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_recovery.core import memory, values
from mindspeed_recovery.core.codec import Decoder, Malformed, class_name, encode
from mindspeed_recovery.core.copies import Copies, StateCopy
from mindspeed_recovery.core.link import Link
from mindspeed_recovery.core.location import Place
from mindspeed_recovery.core.memory import DeviceMemory
from mindspeed_recovery.core.notices import Notices, catalogue_digest
from mindspeed_recovery.core.policy import REPLICA, Policy, StateSpec
from mindspeed_recovery.core.registry import Registry, TrackedState
from mindspeed_recovery.core.values import Buffers, Capture
from mindspeed_recovery.core.wire import (
    PROTOCOL,
    SMALL_BYTES,
    Answer,
    Closing,
    Item,
    Manifest,
    Message,
    Offer,
    Packed,
    Request,
    Terms,
    WireError,
    chunks,
)
from mindspeed_recovery.errors import RepairError, StateError

logger = logging.getLogger("mindspeed_recovery")

LARGE_BYTES = 64 * 2**20
"""A state above this is copied only if its declaration says so, and moves over the device's group where there is one."""
NOTICE_SECONDS = 3.0


class Plan(Protocol):
    """What a runtime wants repaired. ``pairs``: (source, destination, replica type: 0 dense, 1 expert) in which this rank
    takes part, by global rank."""

    @property
    def step(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def pairs(self) -> Sequence[tuple[int, int, int]]: ...


def ordered(plan: Plan) -> list[tuple[int, int, int]]:
    """The pairs in an order that is the same on every rank, so that no two ranks wait for each other."""
    return sorted(set(plan.pairs), key=lambda pair: (pair[2], pair[0], pair[1]))


def follows(spec: StateSpec, replica_type: int) -> bool:
    """Whether the state moves with replicas of this type."""
    return spec.policy.copied and REPLICA.index(spec.replica) == replica_type


@dataclass
class _Incoming:
    """An offer that this rank takes."""

    item: Item
    decoder: Decoder
    places: list[Place]
    copy: StateCopy
    bulk: bool
    storages: list[Tensor]
    problem: str = ""


class Exchange:
    """Sends and receives copies for a rollback to ``step``. ``timeout``: seconds that one wait for the other rank may last.

    Both ranks of a pair must come here, in any order. Runs on the calling thread; healthy training must not.
    """

    def __init__(
        self,
        registry: Registry,
        copies: Copies,
        device: DeviceMemory,
        notices: Notices,
        *,
        step: int,
        timeout: float,
    ) -> None:
        self._registry, self._copies, self._device, self._notices = registry, copies, device, notices
        self._step, self._timeout = step, timeout
        self._terms = Terms(PROTOCOL, catalogue_digest(registry), step)

    def check(self, peer: int) -> None:
        """Raise RepairError if nothing may be sent to or awaited from ``peer``: it does not run this plugin with this
        catalogue."""
        self._notices.publish(self._registry)
        problem = self._notices.problem_with(peer, self._registry, min(NOTICE_SECONDS, self._timeout))
        if problem:
            raise RepairError(f"{problem}; no states are exchanged with it")

    # ---- source ----------------------------------------------------------------------------------------------------

    def send(self, peer: int, names: Collection[str], group: Any, bulk_group: Any = None) -> dict[str, str]:
        """Give ``peer`` the copies that it wants of the states ``names``. Returns why not, for those it did not get.

        Raises RepairError if one of the two ranks refuses, or the connection fails.
        """
        link, over_device = self._links(peer, group, bulk_group)
        broken = False
        try:
            request = link.recv(Request)
            refused = self._terms.difference(request.terms)
            if not request.want:
                if request.refused or refused:
                    raise RepairError(f"rank {peer} asks for nothing: {request.refused or refused}")
                return {}
        except WireError as error:
            request, refused, broken = Request(self._terms, []), str(error), True
        offers, storages, missing = [], [], []
        for item in [] if refused else request.want:
            try:
                value, parts = self._describe(item, names)
                bulk = request.bulk and over_device is not None and value["bytes"] > LARGE_BYTES
                offers.append(Offer(item, value, bulk))
                storages.append(parts)
            except Exception as error:
                missing.append((item, _text(error)))
        try:
            if not refused:
                link.send(Manifest(self._terms, offers, missing))
        except WireError as error:
            refused = str(error)
        if refused:
            self._refuse(link, Manifest(self._terms, refused=refused))
            raise RepairError(f"nothing is sent to rank {peer}: {refused}", broken=broken)
        problems = {item.state: reason for item, reason in missing}
        answer = self._answer(link, len(offers))
        checksums: list[int | None] = []
        for bulk in (False, True):
            mine = [part for n in answer.taken if offers[n].bulk is bulk for part in storages[n]]
            if mine:
                checksums += (over_device if bulk and over_device else link).send_bytes(mine)
        if answer.taken:
            link.send(Closing(checksums))
        return problems | answer.declined

    def _links(self, peer: int, group: Any, bulk_group: Any) -> tuple[Link, Link | None]:
        """Over the group and, where it can be used, over the device's."""
        link = Link(peer, group, self._timeout)
        try:
            return link, None if bulk_group is None else Link(peer, bulk_group, self._timeout)
        except RepairError as error:
            logger.debug("%s", error)
            return link, None

    def _describe(self, item: Item, names: Collection[str]) -> tuple[dict[str, Any], list[Tensor]]:
        if item.state not in names:
            raise StateError("it is not among the states that are sent here")
        state = self._registry[item.state]
        source = self._copies.source(state.spec, self._step, item.replay)
        if source is not None:
            captures = source[1].captures
        elif self._is_live(state, item.replay):
            buffers = Buffers(self._device.host_empty)
            captures = [(place, Capture(place.get(), buffers, place.path)) for place in state.places()]
            memory.synchronize()
        else:
            raise StateError(state.too_large or f"it has no copy of step {self._step} either")
        return encode((place.path, capture) for place, capture in captures)

    def _is_live(self, state: TrackedState, replay: bool) -> bool:
        """Whether what stands here now is safe, and of the step."""
        return self._copies.live_is(state.spec, self._step, replay) and not any(
            self._device.is_unsafe(tensor) for _, tensor in state.tensors()
        )

    def _refuse(self, link: Link, message: Message) -> None:
        """Say why, so that the other rank need not wait; whether it hears that changes nothing here."""
        with suppress(RepairError):
            link.send(message)

    def _answer(self, link: Link, offers: int) -> Answer:
        try:
            answer = link.recv(Answer)
        except WireError as error:
            raise RepairError(f"rank {link.peer}: {error}", broken=True) from None
        if answer.refused:
            raise RepairError(f"rank {link.peer} takes nothing: {answer.refused}")
        if answer.taken and answer.taken[-1] >= offers:
            raise RepairError(f"rank {link.peer} takes what was not offered", broken=True)
        return answer

    # ---- destination -----------------------------------------------------------------------------------------------

    def receive(
        self, peer: int, names: Collection[str], group: Any, bulk_group: Any = None, *, all_of_them: bool = False
    ) -> dict[str, str]:
        """Fetch from ``peer`` the copies that this rank lacks of the states ``names``; with ``all_of_them`` also those it
        has. Returns why not, for those it did not get.

        Raises RepairError if one of the two ranks refuses, or the connection fails; what had come until then is not used.
        """
        link, over_device = self._links(peer, group, bulk_group)
        problems: dict[str, str] = {}
        want: list[Item] = []
        for name in names:
            try:
                want += self._lacking(self._registry[name], peer, all_of_them)
            except Exception as error:
                problems[name] = _text(error)
        unwilling = "; ".join(problems.values()) if all_of_them and not want else ""
        link.send(Request(self._terms, want, over_device is not None, unwilling))
        if not want:
            return problems
        incoming = self._negotiate(link, want, problems, over_device is not None)
        self._fetch(incoming, link, over_device)
        for entry in incoming:
            if not entry.problem:
                try:
                    self._store(entry, peer)
                except Exception as error:
                    entry.problem = _text(error)
            if entry.problem:
                problems[entry.item.state] = entry.problem
        return problems

    def _lacking(self, state: TrackedState, peer: int, all_of_them: bool) -> list[Item]:
        spec = state.spec
        if not spec.policy.copied:
            raise StateError(f"states of policy '{spec.policy}' are not sent")
        moments = (False, True) if spec.settled == "after-logging" else (False,)
        lacking = [
            Item(spec.name, replay)
            for replay in moments
            if all_of_them
            or not (self._copies.source(spec, self._step, replay) is not None or self._is_live(state, replay))
        ]
        if lacking and spec.policy is Policy.SNAPSHOT:
            unequal = self._notices.not_equal(spec.name, peer)
            if unequal:
                raise StateError(unequal)
        return lacking

    def _negotiate(self, link: Link, want: list[Item], problems: dict[str, str], bulk: bool) -> list[_Incoming]:
        broken = False
        try:
            manifest = link.recv(Manifest)
            refused = "" if manifest.refused else self._terms.difference(manifest.terms)
            offered = [offer.item for offer in manifest.offers]
            if not refused and (len(set(offered)) < len(offered) or not {*offered} <= {*want}):
                refused = "it offers what was not asked for"
            if not refused and not bulk and any(offer.bulk for offer in manifest.offers):
                refused = "it uses the device's group, which is not there"
        except WireError as error:
            manifest, offered, refused, broken = Manifest(self._terms), [], str(error), True
        if manifest.refused:
            raise RepairError(f"rank {link.peer} sends nothing: {manifest.refused}")
        incoming: dict[int, _Incoming] = {}
        declined: dict[str, str] = {}
        for number, offer in enumerate([] if refused else manifest.offers):
            try:
                incoming[number] = self._prepare(offer)
            except Malformed as error:
                refused = f"state '{offer.item.state}': {error}"
                break
            except Exception as error:
                declined[offer.item.state] = _text(error)
        if refused:
            self._refuse(link, Answer(refused=refused))
            raise RepairError(f"nothing is taken from rank {link.peer}: {refused}", broken=broken)
        for number in list(incoming):
            try:
                self._allocate(incoming[number])
            except Exception as error:
                declined[incoming.pop(number).item.state] = _text(error)
        link.send(Answer(list(incoming), declined))
        problems |= declined
        problems |= {item.state: reason for item, reason in manifest.missing if item in want}
        unanswered = {*want} - {*offered} - {item for item, _ in manifest.missing}
        problems |= {item.state: "it was not answered" for item in unanswered}
        return list(incoming.values())

    def _prepare(self, offer: Offer) -> _Incoming:
        """Read one offer. Nothing is allocated for it."""
        state = self._registry[offer.item.state]
        sites = {place.path: place for place in state.places(absent=True)}
        decoder = Decoder(offer.value, classes_of(state), device_of, size_limit(state))
        unknown = next((path for path, _ in decoder.roots if path not in sites), None)
        if unknown is not None:
            raise StateError(f"there is no place {unknown:.200} here")
        slot = self._copies.slot(offer.item.replay)
        copy = slot.receiving(state.name, self._step + (not offer.item.replay))
        return _Incoming(offer.item, decoder, [sites[path] for path, _ in decoder.roots], copy, offer.bulk, [])

    def _allocate(self, entry: _Incoming) -> None:
        """Memory for what arrives in parts; the rest stays in the chunks that it arrives in."""
        entry.storages = [
            entry.copy.buffers.get(path, size) if size > SMALL_BYTES else _NOTHING
            for path, size in entry.decoder.storages
        ]

    def _fetch(self, incoming: list[_Incoming], link: Link, over_device: Link | None) -> None:
        checksums: list[int | None] = []
        owners: list[list[_Incoming]] = []
        for bulk in (False, True):
            mine = [
                (entry, number) for entry in incoming if entry.bulk is bulk for number in range(len(entry.storages))
            ]
            if not mine:
                continue
            sizes = [entry.decoder.storages[number][1] for entry, number in mine]
            large = {i: entry.storages[number] for i, (entry, number) in enumerate(mine) if sizes[i] > SMALL_BYTES}
            arrived, sums = (over_device if bulk and over_device else link).recv_bytes(sizes, large)
            for (entry, number), storage in zip(mine, arrived):
                entry.storages[number] = storage
            checksums += sums
            for chunk in chunks(sizes):
                parts = chunk.storages if isinstance(chunk, Packed) else [chunk.storage]
                owners.append(list({id(mine[i][0]): mine[i][0] for i in parts}.values()))
        if not incoming:
            return
        try:
            closing = link.recv(Closing)
        except WireError as error:
            raise RepairError(f"rank {link.peer}: {error}", broken=True) from None
        if len(closing.checksums) != len(checksums):
            text = f"rank {link.peer} has sent {len(closing.checksums)} chunks, {len(checksums)} were announced"
            raise RepairError(text, broken=True)
        for theirs, mine_sum, entries in zip(closing.checksums, checksums, owners):
            if theirs != mine_sum:
                for entry in entries:
                    entry.problem = "its bytes arrived damaged" if theirs is not None else "it could not be read there"

    def _store(self, entry: _Incoming, peer: int) -> None:
        entry.decoder.bind(entry.storages)
        captures = [
            (place, Capture.of(node, 0 if index else entry.decoder.nbytes))
            for index, (place, (_, node)) in enumerate(zip(entry.places, entry.decoder.roots))
        ]
        slot = self._copies.slot(entry.item.replay)
        slot.receive(entry.item.state, entry.copy, captures, f"replica {peer}")


class RepairHandle:
    """Sends or receives one state between two ranks, for runtimes that move states themselves.

    ``group``: a gloo group that both ranks are in; ``bulk_group``: the device's group, for a state above 64 MiB. Both ranks
    call it, one `send` and the other `recv`, with the same step. Every wait ends; when a wait has failed (`broken` of
    the error), the group must not be used any more. Not on the training thread while a step runs.
    """

    def __init__(self, name: str, exchange: Exchange, put_back: Callable[[], None]) -> None:
        self.name, self._exchange, self._put_back = name, exchange, put_back

    def send(self, dst: int, group: Any, bulk_group: Any = None) -> None:
        """Send this rank's copy of the step to global rank ``dst``. Raises RepairError."""
        self._exchange.check(dst)
        self._raise(self._exchange.send(dst, [self.name], group, bulk_group))

    def recv(self, src: int, group: Any, bulk_group: Any = None) -> None:
        """Make the state what it was at the end of the step on global rank ``src``, in place. Raises RepairError; the state
        is then as it was."""
        self._exchange.check(src)
        self._raise(self._exchange.receive(src, [self.name], group, bulk_group, all_of_them=True))
        self._put_back()

    def _raise(self, problems: dict[str, str]) -> None:
        if problems:
            raise RepairError(f"state '{self.name}' was not moved: {'; '.join(problems.values())}")


def classes_of(state: TrackedState) -> Callable[[str], type | None]:
    """The classes that a sent value may have: those of what stands here, and loaded ones of the state's own package."""
    package = state.spec.location.module.split(".", 1)[0]
    known: dict[str, type] = {}

    def collect(value: Any, top: bool) -> None:
        if not isinstance(value, Tensor):
            known.setdefault(class_name(type(value)), type(value))
            for _, child in values.children(value, top):
                collect(child, False)

    def find(name: str) -> type | None:
        if not known:
            for place in state.places():
                collect(place.get(), True)
        if name in known:
            return known[name]
        module, _, path = name.partition(":")
        if module.split(".", 1)[0] != package:
            return None
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        # What stands there by that name, not what was imported into it.
        return found if isinstance(found, type) and class_name(found) == name else None

    return find


def device_of(kind: str) -> torch.device | None:
    """This rank's device of a type; None if it has none."""
    if kind == "cpu":
        return torch.device("cpu")
    here = memory.current_device()
    return here if here.type == kind else None


def size_limit(state: TrackedState) -> int:
    """How many bytes a value of this state may have, as far as a sender can be believed."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if state.spec.large else LARGE_BYTES


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"


_NOTHING = torch.empty(0, dtype=torch.uint8)
