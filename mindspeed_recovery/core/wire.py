# SPDX-License-Identifier: Apache-2.0
"""What two ranks say to each other before and after the bytes of a state: frames of JSON, without pickle.

One exchange, in this order; every message is checked for length, checksum and form before it is looked at:

===========  ==========  ===========================================================================================
message      direction   says
===========  ==========  ===========================================================================================
`Request`    receiver →  protocol, catalogue, step, and which states it wants
`Manifest`   → receiver  the same three, and for each state what it is made of, or why it cannot be sent
`Answer`     receiver →  which states it takes, or why none
(bytes)      → receiver  the storages of these states, in chunks
`Closing`    → receiver  a checksum for each chunk
===========  ==========  ===========================================================================================

The checksums come last, so that they are computed while the chunks are on their way; nothing is used before they fit.
Imports no torch.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

PROTOCOL = 1
MAX_MESSAGE_BYTES = 16 * 2**20
CHUNK_BYTES = 8 * 2**20
SMALL_BYTES = 2**18
"""Storages up to this size are packed together into chunks."""

_HEADER = struct.Struct(">4sHHQI")
_MAGIC = b"MSRP"
HEADER_BYTES = _HEADER.size

T = TypeVar("T", bound="Message")


class WireError(ValueError):
    """What arrived is not a message of this protocol, or the other rank refuses."""


class Item(NamedTuple):
    """One copy of a state: of the end of the step or, with ``replay``, of the moment before its log line."""

    state: str
    replay: bool


@dataclass(frozen=True)
class Message:
    """``refused``: why the exchange ends here; empty if it goes on."""

    KIND: ClassVar[int] = 0

    def encode(self) -> bytes:
        """Raise WireError for a message that is too large."""
        text = json.dumps(self, separators=(",", ":"), allow_nan=False, check_circular=False, default=vars)
        body = text.encode("ascii")
        if len(body) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(body)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        return body

    def header(self, body: bytes) -> bytes:
        return _HEADER.pack(_MAGIC, PROTOCOL, self.KIND, len(body), zlib.crc32(body))

    @classmethod
    def read_header(cls, header: bytes) -> tuple[int, int]:
        """Length and checksum of the body. Raises WireError."""
        magic, protocol, kind, length, checksum = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise WireError("what arrived is not a message of this protocol")
        if protocol != PROTOCOL:
            raise WireError(f"the other rank speaks version {protocol} of the protocol, this one version {PROTOCOL}")
        if kind != cls.KIND:
            raise WireError(f"message {kind} arrived, {cls.KIND} ({cls.__name__}) was expected")
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        return length, checksum

    @classmethod
    def decode(cls: type[T], body: bytes, checksum: int) -> T:
        """Raise WireError for anything but an encoded message of this class."""
        if zlib.crc32(body) != checksum:
            raise WireError(f"the {cls.__name__} arrived damaged")
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WireError(f"the {cls.__name__} is not JSON: {error}") from None
        names = [f.name for f in fields(cls)]
        if not isinstance(data, dict) or set(data) != set(names):
            raise WireError(f"the {cls.__name__} does not have the keys {', '.join(names)}")
        try:
            message = cls(**data)
            message.check()
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(f"{cls.__name__}: {error}") from None
        return message

    def check(self) -> None:
        """Raise TypeError or ValueError for fields of a wrong form."""
        raise NotImplementedError


@dataclass(frozen=True)
class Terms:
    """What both ranks must agree on."""

    protocol: int
    catalogue: str
    step: int

    def difference(self, other: Terms) -> str:
        """In which point ``other``, the other rank's, differs; empty if in none."""
        for point in fields(self):
            mine, theirs = getattr(self, point.name), getattr(other, point.name)
            if mine != theirs:
                return f"{point.name} {theirs!s:.80} there, {mine!s:.80} here"
        return ""


@dataclass(frozen=True)
class Request(Message):
    """``bulk``: the receiver can take large states over the device group."""

    KIND: ClassVar[int] = 1
    terms: Terms
    want: list[Item]
    bulk: bool = False
    refused: str = ""

    def check(self) -> None:
        object.__setattr__(self, "terms", _terms(self.terms))
        object.__setattr__(self, "want", [_item(*item) for item in _list(self.want)])
        _is(bool, self.bulk)
        _is(str, self.refused)


@dataclass(frozen=True)
class Offer:
    """One copy that the source has. ``value``: see `codec`. ``bulk``: its bytes go over the device group."""

    item: Item
    value: dict[str, Any]
    bulk: bool = False


@dataclass(frozen=True)
class Manifest(Message):
    """``missing``: what was asked for and cannot be sent, each with the reason."""

    KIND: ClassVar[int] = 2
    terms: Terms
    offers: list[Offer] = field(default_factory=list)
    missing: list[tuple[Item, str]] = field(default_factory=list)
    refused: str = ""

    def check(self) -> None:
        object.__setattr__(self, "terms", _terms(self.terms))
        object.__setattr__(self, "offers", [_offer(**offer) for offer in _list(self.offers)])
        missing = [(_item(*item), _is(str, reason)) for item, reason in _list(self.missing)]
        object.__setattr__(self, "missing", missing)
        _is(str, self.refused)


@dataclass(frozen=True)
class Answer(Message):
    """``taken``: numbers of offers, ascending; ``declined``: the states of the others, each with the reason."""

    KIND: ClassVar[int] = 3
    taken: list[int] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)
    refused: str = ""

    def check(self) -> None:
        taken = [_is(int, number) for number in _list(self.taken)]
        if taken != sorted(set(taken)) or (taken and taken[0] < 0):
            raise ValueError("taken: numbers of offers are ascending")
        for reason in _is(dict, self.declined).values():
            _is(str, reason)
        _is(str, self.refused)


@dataclass(frozen=True)
class Closing(Message):
    """``checksums``: of each chunk, in the order of `chunks`; None for one that the source could not read."""

    KIND: ClassVar[int] = 4
    checksums: list[int | None]
    refused: str = ""

    def check(self) -> None:
        for checksum in _list(self.checksums):
            _is((int, type(None)), checksum)
        _is(str, self.refused)


def _is(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.40} is not a {kind}")
    return value


def _list(value: Any) -> list[Any]:
    return _is(list, value)


def _terms(data: Any) -> Terms:
    terms = Terms(**_is(dict, data))
    _is(int, terms.protocol), _is(str, terms.catalogue), _is(int, terms.step)
    return terms


def _item(state: Any, replay: Any) -> Item:
    return Item(_is(str, state), _is(bool, replay))


def _offer(item: Any, value: Any, bulk: Any) -> Offer:
    return Offer(_item(*_list(item)), _is(dict, value), _is(bool, bulk))


# ---- chunks ------------------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Several whole storages in one chunk."""

    storages: list[int]
    nbytes: int


class Part(NamedTuple):
    """The bytes from ``start`` to ``stop`` of one storage."""

    storage: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def chunks(sizes: Sequence[int]) -> Iterator[Packed | Part]:
    """Both ranks cut storages of these sizes (bytes) in the same way: small ones are packed together, and come first."""
    packed: list[int] = []
    used = 0
    for storage, size in enumerate(sizes):
        if not 0 < size <= SMALL_BYTES:
            continue
        if used + size > CHUNK_BYTES:
            yield Packed(packed, used)
            packed, used = [], 0
        packed.append(storage)
        used += size
    if packed:
        yield Packed(packed, used)
    for storage, size in enumerate(sizes):
        if size > SMALL_BYTES:
            for start in range(0, size, CHUNK_BYTES):
                yield Part(storage, start, min(start + CHUNK_BYTES, size))
