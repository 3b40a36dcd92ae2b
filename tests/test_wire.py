# SPDX-License-Identifier: Apache-2.0
"""What moves between ranks, without any rank: captured values as JSON and bytes, and messages from anybody."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import tracemalloc
import types
import zlib
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mindspeed_recovery.core import codec, link
from mindspeed_recovery.core.codec import Decoder, Malformed
from mindspeed_recovery.core.values import Buffers, Capture, Restoring
from mindspeed_recovery.core.wire import (
    CHUNK_BYTES,
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
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
from mindspeed_recovery.errors import StateError

pytestmark = pytest.mark.timeout(60)
LIMIT = 2**26


class Color(Enum):
    RED = 1


class Pair(NamedTuple):
    left: Any
    right: Any


class Bag:
    """Attributes, one of them a tensor."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    scale: Tensor
    history: list[Tensor]
    name: str = "fp8"


def find_class(name: str) -> type | None:
    kinds = (Color, Pair, Bag, Scaling, nn.Linear)
    return next((kind for kind in kinds if codec.class_name(kind) == name), None)


def find_device(kind: str) -> torch.device | None:
    return torch.device("cpu") if kind == "cpu" else None


def capture(value: Any) -> Capture:
    return Capture(value, Buffers(lambda shape, dtype: torch.empty(shape, dtype=dtype)), "m:X")


def encoded(value: Any) -> tuple[dict[str, Any], list[Tensor]]:
    return codec.encode([("m:X", capture(value))])


def decoder(description: Any, limit: int = LIMIT) -> Decoder:
    return Decoder(description, find_class, find_device, limit)


def moved(value: Any, current: Any = None) -> Any:
    """What another rank has at the end whose value was ``current``."""
    description, storages = encoded(value)
    there = decoder(json.loads(json.dumps(description, allow_nan=False)))
    assert [size for _, size in there.storages] == [storage.numel() for storage in storages]
    there.bind([storage.clone() for storage in storages])
    ((path, node),) = there.roots
    assert path == "m:X"
    return Capture.of(node, there.nbytes).restore(current, Restoring())


def same(left: Any, right: Any) -> bool:
    return capture(left).matches(right)


# ---- values ------------------------------------------------------------------------------------------------------------

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 4)).to(dtype)
    result = moved(tensor)
    assert result is not tensor
    assert result.dtype == dtype
    assert same(tensor, result)
    assert not same(tensor, moved(torch.zeros(3, 4).to(dtype)))


VIEWS = {
    "zero-size": lambda: torch.empty(0, 3),
    "no-dimension": lambda: torch.tensor(2.5),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "expanded": lambda: torch.arange(3.0).unsqueeze(1).expand(3, 1000),
    "overlapping": lambda: torch.arange(9.0).as_strided((5, 3), (1, 2)),
    "offset": lambda: torch.arange(12.0)[5:9],
    "parameter": lambda: nn.Parameter(torch.arange(3.0)),
    "frozen-parameter": lambda: nn.Parameter(torch.arange(3.0), requires_grad=False),
    "wants-gradient": lambda: torch.arange(3.0, requires_grad=True),
}


@pytest.mark.parametrize("case", VIEWS)
def test_views_keep_their_form_and_the_whole_storage(case: str) -> None:
    tensor = VIEWS[case]()
    result = moved(tensor)
    assert same(tensor, result)
    assert (type(result), result.requires_grad) == (type(tensor), tensor.requires_grad)
    if tensor.numel():
        assert not torch.equal(result, torch.full_like(tensor, -7.0))


def test_tensors_that_share_a_storage_share_one_again_and_move_once() -> None:
    base = torch.arange(10.0)
    value = {"left": base[:5], "right": base[3:], "same": base[:5], "again": base}
    _, storages = encoded(value)
    assert [storage.numel() for storage in storages] == [40]
    result = moved(value)
    result["again"][4] = -1
    assert result["left"][4] == result["right"][1] == -1


def test_an_object_in_two_places_is_one_object_again() -> None:
    shared = [torch.ones(2)]
    first, second, tensor = moved([shared, shared, shared[0]])
    assert first is second
    assert tensor is first[0]
    apart = moved([[torch.ones(2)], [torch.ones(2)]])
    assert apart[0] is not apart[1]


def test_the_last_object_twice() -> None:
    shared = [1]
    first, second = moved([shared, shared])
    assert first is second


NESTED = {
    "dict": {"a": torch.ones(2), 3: {"b": [torch.zeros(1), (1, 2.5, None)]}, (1, "x"): True},
    "ordered": OrderedDict(b=1, a=2),
    "default": defaultdict(list, {"a": [torch.ones(1)]}),
    "view": types.MappingProxyType({"a": 1}),
    "deque": deque([1, torch.ones(1)], maxlen=4),
    "sets": [{1, 2}, frozenset({"x"})],
    "named-tuple": Pair(torch.ones(1), "text"),
    "dataclass": Scaling(torch.ones(()), [torch.zeros(2)]),
    "module": nn.Linear(2, 3),
    "numbers": [
        0,
        -(2**70),
        2**63,
        True,
        0.1,
        -0.0,
        1e-310,
        complex(1, -2),
        b"\x00\xff",
        "\ud800é",
        Color.RED,
        torch.bfloat16,
    ],
    "array": [np.arange(6, dtype=np.uint32).reshape(2, 3).T, np.zeros((0, 2)), np.ones(1, dtype=bool)],
    "empty": [{}, [], (), None],
    "size": torch.Size([2, 3]),
}


@pytest.mark.parametrize("case", NESTED)
def test_nested_values(case: str) -> None:
    value = NESTED[case]
    result = moved(value)
    assert type(result) is type(value)
    assert same(value, result)


def test_numbers_that_are_no_numbers() -> None:
    nan, infinite = moved([float("nan"), float("-inf")])
    assert nan != nan
    assert infinite == float("-inf")


def test_what_stands_there_keeps_its_identity() -> None:
    tensor, inner = torch.zeros(2), {"x": 0, "extra": 1}
    there = {"t": tensor, "inner": inner, "gone": 5}
    result = moved({"t": torch.tensor([1.0, 2.0]), "inner": {"x": 7}, "new": [torch.ones(1)]}, there)
    assert result is there
    assert there["t"] is tensor
    assert there["inner"] is inner
    assert tensor.tolist() == [1.0, 2.0]
    assert inner == {"x": 7}
    assert list(there) == ["t", "inner", "new"]


def test_a_new_shape_is_bound_anew() -> None:
    there = {"t": torch.zeros(2)}
    before = there["t"]
    moved({"t": torch.ones(3)}, there)
    assert there["t"] is not before
    assert there["t"].tolist() == [1.0, 1.0, 1.0]


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(5), lambda g: torch.rand(4, generator=g).tolist()),
    "python": (lambda: random.Random(5), lambda g: [g.gauss(0, 1) for _ in range(3)]),
    "numpy": (lambda: np.random.default_rng(5), lambda g: g.random(4).tolist()),
    "numpy-legacy": (lambda: np.random.RandomState(5), lambda g: g.rand(4).tolist()),
}


@pytest.mark.parametrize("case", GENERATORS)
def test_generators_continue_where_the_other_one_was(case: str) -> None:
    make, draw = GENERATORS[case]
    source, there = make(), make()
    draw(source)
    result = moved(source, there)
    assert result is there
    after = draw(copy.deepcopy(source))
    assert draw(there) == after
    assert draw(make()) != after


def test_a_generator_needs_one_to_stand_there() -> None:
    with pytest.raises(TypeError, match="a random number generator was copied, but a int stands here"):
        moved(torch.Generator(), 3)


@pytest.mark.parametrize("value", [print, object(), types.SimpleNamespace, np.float64(1), {object(): 1}])
def test_what_has_no_meaning_elsewhere_is_named(value: Any) -> None:
    with pytest.raises(StateError, match=r"^m:X\['a'\]: a \w+ cannot be sent to another rank$"):
        encoded({"a": value})


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
tensors = st.builds(
    lambda data, dtype: torch.tensor(data).to(dtype), st.lists(st.integers(0, 1), max_size=5), st.sampled_from(DTYPES)
)
structures = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(structures)
def test_any_value_arrives_as_it_was(value: Any) -> None:
    result = moved(value)
    assert type(result) is type(value)
    assert same(value, result)


# ---- hostile descriptions ----------------------------------------------------------------------------------------------


def description(**changes: Any) -> dict[str, Any]:
    good, _ = encoded({"a": torch.arange(6.0).view(2, 3), "b": [torch.ones(2)]})
    return good | changes


LAYOUT = ["float32", [2, 3], [3, 1], 0, "cpu", 0, 24]
HOSTILE = {
    "huge-size": ([*LAYOUT[:6], 2**62], StateError),
    "huge-shape": (["float32", [2**40, 2**40], [1, 1], 0, "cpu", 0, 24], Malformed),
    "shape-beyond-storage": (["float32", [2, 4], [4, 1], 0, "cpu", 0, 24], Malformed),
    "offset-beyond-storage": (["float32", [2, 3], [3, 1], 1, "cpu", 0, 24], Malformed),
    "negative-shape": (["float32", [-2, 3], [3, 1], 0, "cpu", 0, 24], Malformed),
    "negative-stride": (["float32", [2, 3], [-3, 1], 0, "cpu", 0, 24], Malformed),
    "negative-offset": (["float32", [2, 3], [3, 1], -1, "cpu", 0, 24], Malformed),
    "negative-size": ([*LAYOUT[:6], -24], Malformed),
    "fraction": (["float32", [2.0, 3], [3, 1], 0, "cpu", 0, 24], Malformed),
    "truth-for-a-number": (["float32", [True, 3], [3, 1], 0, "cpu", 0, 24], Malformed),
    "unknown-dtype": (["float33", [2, 3], [3, 1], 0, "cpu", 0, 24], Malformed),
    "dtype-that-is-a-function": (["load", [2, 3], [3, 1], 0, "cpu", 0, 24], Malformed),
    "unknown-device": (["float32", [2, 3], [3, 1], 0, "meta", 0, 24], StateError),
    "too-few-strides": (["float32", [2, 3], [3], 0, "cpu", 0, 24], Malformed),
    "flags": (["float32", [2, 3], [3, 1], 0, "cpu", 9, 24], Malformed),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_layouts_are_refused(case: str) -> None:
    layout, error = HOSTILE[case]
    good = description()
    decoder(good)
    assert good["layouts"][0] == LAYOUT
    with pytest.raises(error):
        decoder(description(layouts=[layout, good["layouts"][1]]))


NODES = {
    "class-of-another-package": (["r", "subprocess:Popen", ["args"], [["p", "x"]]], StateError),
    "class-of-another-sort": (["d", "list", None, [], []], Malformed),
    "builtin-function": (["s", "builtins:eval", None, []], StateError),
    "private-attribute": (["r", codec.class_name(Bag), ["__class__"], [["p", 1]]], Malformed),
    "attribute-with-a-path": (["r", codec.class_name(Bag), ["a.b"], [["p", 1]]], Malformed),
    "attribute-twice": (["r", codec.class_name(Bag), ["a", "a"], [["p", 1], ["p", 1]]], Malformed),
    "key-twice": (["d", "dict", None, ["a", "a"], [["p", 1], ["p", 1]]], Malformed),
    "factory": (["d", "defaultdict", "eval", [], []], Malformed),
    "contains-itself": (["s", "list", None, [["=", 0]]], Malformed),
    "later-node": (["s", "list", None, [["=", 7]]], Malformed),
    "negative-node": (["s", "list", None, [["=", -1]]], Malformed),
    "no-layout": (5, Malformed),
    "negative-layout": (-1, Malformed),
    "no-storage": (["v", 0, 3], Malformed),
    "object-array": (["a", "|O8", [1]], Malformed),
    "structured-array": (["a", "V8", [1]], Malformed),
    "huge-array": (["a", "<f8", [2**40, 2**20]], StateError),
    "array-of-negative-length": (["a", "<f8", [-1]], Malformed),
    "unknown-tag": (["pickle", "gASVAAA="], Malformed),
    "nothing": (None, Malformed),
    "unhashable-key": (["d", "dict", None, [["t", ["l"]]], [["p", 1]]], Malformed),
    "enum-member": (["p", ["e", codec.class_name(Color), "BLACK"]], Malformed),
    "number-in-hex": (["p", ["x", "zz"]], Malformed),
}


@pytest.mark.parametrize("case", NODES)
def test_hostile_nodes_are_refused(case: str) -> None:
    node, error = NODES[case]
    with pytest.raises(error):
        decoder({"layouts": [LAYOUT], "places": [["m:X", node]], "bytes": 0})
    decoder({"layouts": [LAYOUT], "places": [["m:X", ["s", "list", None, [0, ["=", 1]]]]], "bytes": 24})


def test_more_than_announced_or_allowed_is_refused() -> None:
    with pytest.raises(Malformed, match="25 bytes are announced, but the tensors have 24"):
        decoder({"layouts": [LAYOUT], "places": [["m:X", 0]], "bytes": 25})
    many = {"layouts": [LAYOUT], "places": [["m:X", ["s", "list", None, [0] * 10]]], "bytes": 240}
    decoder(many, limit=240)
    with pytest.raises(StateError, match="more than the limit of 239 bytes"):
        decoder(many, limit=239)


def test_places_are_not_described_twice() -> None:
    with pytest.raises(Malformed, match="twice"):
        decoder({"layouts": [], "places": [["m:X", ["p", 1]], ["m:X", ["p", 2]]], "bytes": 0})


def test_deep_nesting_is_refused() -> None:
    node: Any = ["p", 1]
    for _ in range(500):
        node = ["s", "list", None, [node]]
    with pytest.raises(Malformed, match="nested deeper"):
        decoder({"layouts": [], "places": [["m:X", node]], "bytes": 0})


counts = st.integers() | st.sampled_from([-1, 0, 1, 2, 24, 2**31, 2**62, 2**63, 2**80])
scalars = st.none() | st.booleans() | counts | st.floats() | st.text(max_size=12)
tags = st.sampled_from(["p", "v", "a", "g", "d", "s", "r", "=", "t", "e", "f", "x", "list", "dict", "subprocess:Popen"])
junk = st.recursive(
    scalars | tags | st.just(0),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=25,
)
names = st.sampled_from(["../../etc/passwd", "a/b", "m:X\x00", "__class__", "m:X", "m:X['a']"]) | st.text(max_size=9)
layouts = st.tuples(
    st.sampled_from(["float32", "bool", "load", "float8_e4m3fn"]) | scalars,
    st.lists(counts, max_size=4) | scalars,
    st.lists(counts, max_size=4) | scalars,
    counts,
    st.sampled_from(["cpu", "meta", "npu:0"]),
    counts,
    counts,
).map(list)
nodes = junk | st.tuples(tags, junk, junk, junk).map(list) | st.tuples(tags, junk).map(list) | counts
hostile = st.fixed_dictionaries(
    {
        "layouts": st.lists(layouts, max_size=3) | junk,
        "places": st.lists(st.tuples(names, nodes).map(list), max_size=3) | junk,
        "bytes": counts | junk,
    }
)


@settings(max_examples=600, deadline=None)
@given(hostile)
@example({"layouts": [LAYOUT], "places": [["m:X", ["s", "list", None, [0] * 3]]], "bytes": 2**62})
def test_whatever_a_description_says_it_is_read_within_limits_or_refused(data: Any) -> None:
    try:
        there = decoder(data, limit=1000)
    except (Malformed, StateError):
        return
    assert sum(size for _, size in there.storages) == there.nbytes == data["bytes"] <= 1000


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_description_is_refused_or_still_fits_its_bytes(data: st.DataObject) -> None:
    good, storages = encoded({"a": torch.arange(6.0).view(2, 3), "b": [torch.ones(2), np.arange(3)], (1, 2): 5})

    def change(value: Any, depth: int = 0) -> Any:
        if depth > 1 and data.draw(st.integers(0, 5)) == 0:
            return data.draw(junk)
        if isinstance(value, dict):
            return {key: change(item, depth + 1) for key, item in value.items()}
        return [change(item, depth + 1) for item in value] if isinstance(value, list) else value

    try:
        there = decoder(change(good))
    except (Malformed, StateError):
        return
    sizes = [size for _, size in there.storages]
    assert sum(sizes) == there.nbytes <= LIMIT
    if sizes == [storage.numel() for storage in storages]:
        there.bind([storage.clone() for storage in storages])
        for _, node in there.roots:  # every tensor lies within its storage, or this would read beyond it
            try:
                Capture.of(node, there.nbytes).restore(None, Restoring())
            except TypeError:
                continue  # an element of a set, say, that has no hash


def test_refusing_allocates_nothing() -> None:
    data = {
        "layouts": [[*LAYOUT[:6], LIMIT]],
        "places": [["m:X", ["s", "list", None, [0] * 1000]]],
        "bytes": LIMIT * 1000,
    }
    tracemalloc.start()
    try:
        with pytest.raises(StateError, match="more than the limit"):
            decoder(data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


# ---- messages ----------------------------------------------------------------------------------------------------------

TERMS = Terms(1, "abc", 7)
MESSAGES = [
    Request(TERMS, [Item("a", False), Item("b", True)], True),
    Request(TERMS, [], False, "no"),
    Manifest(TERMS, [Offer(Item("a", False), description(), True)], [(Item("b", True), "has none")], ""),
    Manifest(TERMS, refused="no"),
    Answer([0, 3], {"b": "too large"}),
    Answer(refused="no"),
    Closing([1, None, 2**32 - 1]),
]


def sent(message: Message) -> Message:
    body = message.encode()
    length, checksum = message.read_header(message.header(body))
    assert length == len(body)
    return type(message).decode(body, checksum)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_arrive_as_they_were(message: Message) -> None:
    assert sent(message) == message


def decode(kind: type[Message], text: str | bytes) -> Message:
    body = text.encode() if isinstance(text, str) else text
    return kind.decode(body, zlib.crc32(body))


REQUEST = '{"terms":{"protocol":1,"catalogue":"abc","step":7},"want":[["a",false]],"bulk":false,"refused":""}'
WRONG = [
    "",
    "{",
    "[]",
    "null",
    "{}",
    '"' + "a" * 50,
    "[" * 100_000,
    "1" * 5000,
    REQUEST.replace('"bulk":false,', ""),
    REQUEST.replace('"bulk":false', '"bulk":0'),
    REQUEST.replace('"bulk"', '"bulk2"'),
    REQUEST.replace('"step":7', '"step":"7"'),
    REQUEST.replace('"step":7', '"step":true'),
    REQUEST.replace('"step":7', '"step":7,"more":1'),
    REQUEST.replace("[[", "[").replace("]]", "]"),
    REQUEST.replace('["a",false]', '["a",false,1]'),
    REQUEST.replace('["a",false]', '{"a":1}'),
    b"\xff\xfe" + REQUEST.encode(),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_messages_are_refused(number: int) -> None:
    assert decode(Request, REQUEST) == Request(TERMS, [Item("a", False)])
    with pytest.raises(WireError):
        decode(Request, WRONG[number])


@pytest.mark.parametrize("taken", ["[1,0]", "[0,0]", "[-1]", "[0.0]", "[true]", "{}", "null"])
def test_answers_name_offers(taken: str) -> None:
    decode(Answer, '{"taken":[0,1],"declined":{},"refused":""}')
    with pytest.raises(WireError):
        decode(Answer, f'{{"taken":{taken},"declined":{{}},"refused":""}}')


def test_damaged_messages_are_refused() -> None:
    body = REQUEST.encode()
    with pytest.raises(WireError, match="damaged"):
        Request.decode(body.replace(b"abc", b"abd"), zlib.crc32(body))


def test_headers() -> None:
    good = Answer().header(b"12")
    assert Answer.read_header(good)[0] == 2
    with pytest.raises(WireError, match="not a message of this protocol"):
        Answer.read_header(b"HTTP" + good[4:])
    with pytest.raises(WireError, match="speaks version 2"):
        Answer.read_header(good[:4] + b"\x00\x02" + good[6:])
    with pytest.raises(WireError, match=r"message 3 arrived, 4 \(Closing\) was expected"):
        Closing.read_header(good)
    too_long = good[:8] + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big") + good[16:]
    with pytest.raises(WireError, match="above the limit"):
        Answer.read_header(too_long)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_header_is_within_limits_or_refused(header: bytes) -> None:
    for data in (header, Answer().header(b"")[:8] + header[8:]):
        try:
            length, _ = Answer.read_header(data)
        except WireError:
            continue
        assert 0 <= length <= MAX_MESSAGE_BYTES


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([Request, Manifest, Answer, Closing]),
    junk | st.builds(lambda j: json.loads(REQUEST) | {"want": j}, junk),
)
def test_any_json_is_a_message_or_refused(kind: type[Message], data: Any) -> None:
    try:
        message = decode(kind, json.dumps(data))
    except WireError:
        return
    assert sent(message) == message


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(WireError, match="above the limit"):
        Answer(refused="x" * MAX_MESSAGE_BYTES).encode()


@pytest.mark.parametrize("point", ["protocol", "catalogue", "step"])
def test_terms_name_what_differs(point: str) -> None:
    other = dataclasses.replace(TERMS, **{point: 9})
    assert TERMS.difference(TERMS) == ""
    assert TERMS.difference(other) == f"{point} 9 there, {getattr(TERMS, point)} here"


# ---- chunks and checksums ----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3) | st.sampled_from([SMALL_BYTES, SMALL_BYTES + 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])))
def test_chunks_cover_every_byte_once_and_are_bounded(sizes: list[int]) -> None:
    covered = [0] * len(sizes)
    for chunk in chunks(sizes):
        assert 0 < chunk.nbytes <= CHUNK_BYTES
        if isinstance(chunk, Packed):
            assert chunk.nbytes == sum(sizes[number] for number in chunk.storages)
            for number in chunk.storages:
                covered[number] += sizes[number]
        else:
            assert chunk.start == covered[chunk.storage]
            covered[chunk.storage] = chunk.stop
    assert covered == sizes


def test_many_small_storages_are_few_chunks() -> None:
    assert len(list(chunks([512] * 10_000))) == 1


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 5000, 100_000])
def test_checksum_sees_any_changed_byte_and_exchanged_rows(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    good = link.checksum_of(data)
    assert link.checksum_of(data.clone()) == good
    assert link.checksum_of(torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]) == good
    for position in {0, size // 2, size - 1}:
        changed = data.clone()
        changed[position] ^= 64
        assert link.checksum_of(changed) != good
    if size >= 5000:
        assert link.checksum_of(data.roll(1024)) != good
