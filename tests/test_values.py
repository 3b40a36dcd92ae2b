# SPDX-License-Identifier: Apache-2.0
"""A capture written back equals what was captured: in place, in safe memory, for every dtype, layout and nesting."""

import ctypes
import gc
import random
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mindspeed_recovery.core.memory import PlainMemory
from mindspeed_recovery.core.values import Buffers, Capture, Restoring, tensors
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(120)

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@dataclass
class Entry:
    values: Any
    group: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


def raw(tensor: Tensor) -> bytes:
    """The bytes of the whole storage, read without an operator."""
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def frozen(value: Any) -> Any:
    """A value as data that can be compared: tensors as their bytes and how they lie in them."""
    if isinstance(value, Tensor):
        lie = (value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
        return ("tensor", raw(value), lie, value.requires_grad)
    if isinstance(value, dict):
        return ("dict", type(value).__name__, [(key, frozen(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value).__name__, getattr(value, "maxlen", None), [frozen(item) for item in value])
    if is_dataclass(value):
        return ("record", [(key, frozen(item)) for key, item in vars(value).items()])
    return value


def parts(value: Any) -> list[Any]:
    """Every container and tensor in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [value, *(part for item in value.values() for part in parts(item))]
    if isinstance(value, (list, tuple, deque)):
        return [value, *(part for item in value for part in parts(item))]
    if is_dataclass(value):
        return [value, *(part for item in vars(value).values() for part in parts(item))]
    return []


def flat(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    data = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    memory = torch.empty(len(data), dtype=torch.uint8)
    memory.copy_(torch.from_numpy(data & 1 if dtype is torch.bool else data))
    return memory.view(dtype) if len(data) else torch.empty(0, dtype=dtype)


LAYOUTS = {
    "plain": lambda dtype, seed: flat(dtype, 6, seed).view(2, 3),
    "0-dim": lambda dtype, seed: flat(dtype, 1, seed).view(()),
    "no elements": lambda dtype, seed: flat(dtype, 0, seed).view(0, 3),
    "not contiguous": lambda dtype, seed: flat(dtype, 24, seed).view(4, 6).t()[::2],
    "expanded": lambda dtype, seed: flat(dtype, 3, seed).view(3, 1).expand(3, 4),
    "overlapping": lambda dtype, seed: flat(dtype, 5, seed).as_strided((3, 3), (1, 1)),
    "part of a storage": lambda dtype, seed: flat(dtype, 8, seed)[2:5],
}


@st.composite
def single(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    tensor = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](dtype, draw(st.integers(0, 2**16)))
    if (dtype.is_floating_point or dtype.is_complex) and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    return tensor


@st.composite
def sharing(draw: st.DrawFn) -> list[Tensor]:
    base = flat(draw(st.sampled_from(DTYPES)), 12, draw(st.integers(0, 2**16)))
    return [base[2:7], base.view(3, 4).t(), base, base[:0]][: draw(st.integers(2, 4))]


PLAIN = st.one_of(st.none(), st.integers(-5, 5), st.text("ab", max_size=2), st.booleans())
VALUES = st.recursive(
    st.one_of(single(), sharing(), PLAIN),
    lambda inner: st.one_of(
        st.dictionaries(st.one_of(st.text("abc", max_size=2), st.integers(0, 3)), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.builds(Entry, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_every_value_comes_back_in_place_and_safe(value: Any) -> None:
    value = {"state": value}
    memory = UnsafeMemory()
    with memory.active():
        before, objects = frozen(value), [id(part) for part in parts(value)]
        addresses = [part.data_ptr() for part in parts(value) if isinstance(part, Tensor)]
        capture = Capture(value, Buffers(memory.host_empty))
        memory.mark_unsafe(tensor for _, tensor in tensors(value))
        restored = capture.restore(value)
        assert restored is value
        assert frozen(value) == before
        assert [id(part) for part in parts(value)] == objects
        assert [part.data_ptr() for part in parts(value) if isinstance(part, Tensor)] == addresses
        assert not any(memory.is_unsafe(tensor) for _, tensor in tensors(value))
        assert memory.unsafe_count() == 0
        assert capture.matches(value)


@settings(max_examples=100, deadline=None)
@given(VALUES, VALUES, st.data())
def test_a_changed_structure_comes_back(value: Any, other: Any, data: st.DataObject) -> None:
    memory = UnsafeMemory()
    with memory.active():
        value = {"a": value, "b": [value, 1]}
        containers = [part for part in parts(value) if not isinstance(part, (Tensor, tuple))]
        before, identities = frozen(value), [id(part) for part in containers]
        capture = Capture(value, Buffers(memory.host_empty))
        memory.strike(tensor for _, tensor in tensors(value))
        memory.check_uce_in_memory()
        for _ in range(data.draw(st.integers(1, 3))):
            change(data.draw(st.sampled_from(containers)), other, data)
        assert capture.restore(value) is value
        assert frozen(value) == before
        assert id(value) == identities[0]
        assert not any(memory.is_unsafe(tensor) for _, tensor in tensors(value))


def change(part: Any, other: Any, data: st.DataObject) -> None:
    """What an aborted step can do to one container."""
    if isinstance(part, dict):
        if part and data.draw(st.booleans()):
            del part[data.draw(st.sampled_from(list(part)))]
        part[data.draw(st.sampled_from(["a", "new", 7]))] = other
    elif isinstance(part, Entry):
        part.values = other
        part.extra = 1  # type: ignore[attr-defined]
    elif part and data.draw(st.booleans()):
        part.pop()
    else:
        part.append(other)


# ---------------------------------------------------------------- structure


@pytest.fixture
def buffers(memory: UnsafeMemory) -> Buffers:
    return Buffers(memory.host_empty)


def test_dict_keeps_its_identity_order_and_keys(buffers: Buffers) -> None:
    value = {"a": torch.ones(2), "b": 1}
    capture = Capture(value, buffers)
    del value["a"]
    value["late"] = 5
    assert capture.restore(value) is value
    assert list(value) == ["a", "b"]
    assert torch.equal(value["a"], torch.ones(2))


def test_shared_storage_is_copied_once(buffers: Buffers) -> None:
    base = torch.arange(100.0)
    capture = Capture({"a": base[:10], "b": base[50:], "c": base}, buffers)
    assert capture.nbytes == 400
    assert len(buffers) == 1


def test_host_buffers_are_used_again_in_every_later_step(buffers: Buffers) -> None:
    value = {"a": torch.ones(3), "b": [torch.ones(2)]}
    Capture(value, buffers)
    addresses = [buffer.data_ptr() for buffer in buffers._buffers.values()]
    Capture(value, buffers)
    assert [buffer.data_ptr() for buffer in buffers._buffers.values()] == addresses


def test_tensor_that_another_replaced_is_written_in_place_of_that(buffers: Buffers) -> None:
    value = {"a": torch.ones(2)}
    capture = Capture(value, buffers)
    value["a"] = torch.zeros(2)
    gc.collect()
    capture.restore(value)
    assert torch.equal(value["a"], torch.ones(2))


def test_tensor_of_another_shape_is_replaced(buffers: Buffers, memory: UnsafeMemory) -> None:
    value = {"a": torch.arange(6.0).view(2, 3).t()}
    capture = Capture(value, buffers)
    value["a"] = torch.zeros(4)
    memory.mark_unsafe([value["a"]])
    gc.collect()
    capture.restore(value)
    assert torch.equal(value["a"], torch.arange(6.0).view(2, 3).t())
    assert value["a"].stride() == (1, 3)
    assert not memory.is_unsafe(value["a"])


def test_tensor_set_to_none_comes_back_as_the_one_it_was_while_somebody_holds_it(buffers: Buffers) -> None:
    value = {"a": torch.ones(2)}
    held = value["a"]
    capture = Capture(value, buffers)
    held.fill_(3)
    value["a"] = None  # type: ignore[assignment]
    capture.restore(value)
    assert value["a"] is held
    assert torch.equal(held, torch.ones(2))


@pytest.mark.parametrize("held", [False, True])
def test_names_that_the_step_made_one_tensor_get_their_own_values_back(buffers: Buffers, held: bool) -> None:
    value = {"current": torch.full((2,), 1.0), "previous": torch.full((2,), 2.0)}
    keep = value["previous"] if held else None
    capture = Capture(value, buffers)
    value["previous"] = value["current"]
    gc.collect()
    capture.restore(value)
    assert value["current"].tolist() == [1, 1]
    assert value["previous"].tolist() == [2, 2]
    assert keep is None or keep.tolist() == [2, 2]


def test_views_of_one_storage_share_one_again_after_all_were_dropped(buffers: Buffers) -> None:
    base = torch.arange(4.0)
    value: dict[str, Any] = {"a": base[:2], "b": base[1:]}
    del base
    capture = Capture(value, buffers)
    value["a"] = value["b"] = None
    gc.collect()
    capture.restore(value)
    value["a"][1] = 9
    assert value["b"].tolist() == [9, 2, 3]


def test_keys_that_look_alike_do_not_share_a_copy(buffers: Buffers) -> None:
    class Key:
        def __repr__(self) -> str:
            return "key"

    value = {Key(): torch.full((2,), float(number)) for number in range(3)}
    capture = Capture(value, buffers)
    for tensor in value.values():
        tensor.fill_(9)
    capture.restore(value)
    assert [tensor.tolist() for tensor in value.values()] == [[0, 0], [1, 1], [2, 2]]


def test_tensor_as_key_is_not_read_and_costs_no_new_buffer_in_each_step(buffers: Buffers) -> None:
    key = torch.nn.Parameter(torch.ones(2))
    value = {key: torch.ones(2)}
    for _ in range(3):
        Capture(value, buffers)
        with torch.no_grad():
            key += 1
    assert len(buffers) == 1


def test_host_buffers_of_parts_that_are_gone_are_freed(buffers: Buffers) -> None:
    for step in range(5):
        Capture({"a": torch.ones(2), **({"late": torch.ones(3)} if step == 3 else {})}, buffers)
        buffers.sweep()
    assert len(buffers) == 1


@pytest.mark.parametrize(
    "value",
    [
        Pair(torch.ones(1), 1),
        defaultdict(int, {"a": 1}),
        OrderedDict(a=1),
        deque([1], maxlen=3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_type_of_a_part_comes_back_where_another_value_stands(buffers: Buffers, value: Any) -> None:
    holder = {"part": value}
    before = frozen(value)
    capture = Capture(holder, buffers)
    holder["part"] = None
    capture.restore(holder)
    assert type(holder["part"]) is type(value)
    assert frozen(holder["part"]) == before
    assert getattr(holder["part"], "default_factory", None) is getattr(value, "default_factory", None)


def test_named_tuple_whose_number_changed_stays_a_named_tuple(buffers: Buffers) -> None:
    holder = {"pair": Pair(torch.ones(1), 1)}
    capture = Capture(holder, buffers)
    holder["pair"] = holder["pair"]._replace(second=2)
    capture.restore(holder)
    assert isinstance(holder["pair"], Pair)
    assert holder["pair"].second == 1


def test_process_group_is_no_state_even_where_it_is_all_there_is(buffers: Buffers) -> None:
    class Group(torch.distributed.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 1)
            self.connection, self.scratch = "first", torch.ones(2)

    group = Group()
    assert list(tensors(group)) == []
    capture = Capture(group, buffers)
    group.connection = "second"
    assert capture.restore(None, Restoring()) is group
    assert group.connection == "second"


def test_objects_in_a_state_are_followed_if_they_hold_a_tensor_themselves(buffers: Buffers) -> None:
    class Tracker:
        def __init__(self) -> None:
            self.values = torch.ones(2)
            self.config = Config()
            self.meter = Meter()

    class Config:
        def __init__(self) -> None:
            self.inner = [torch.ones(2)]

    class Meter:
        def __init__(self) -> None:
            self.sum, self.count = torch.ones(1), 3

    tracker = Tracker()
    assert [path for path, _ in tensors(tracker)] == [".values", ".meter.sum"]
    capture = Capture(tracker, buffers)
    tracker.values.zero_()
    tracker.meter.sum += 1
    tracker.meter.count = 7
    config = tracker.config
    capture.restore(tracker)
    assert torch.equal(tracker.values, torch.ones(2))
    assert (tracker.meter.sum.item(), tracker.meter.count) == (1, 3)
    assert tracker.config is config


def test_module_as_a_state_comes_back_or_is_refused(buffers: Buffers) -> None:
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    capture = Capture(model, buffers)
    with torch.no_grad():
        model.weight.fill_(9)
    capture.restore(model)
    assert torch.equal(model.weight, before)


def test_tensors_in_frozen_sets_slotted_records_and_mapping_proxies_come_back(buffers: Buffers) -> None:
    @dataclass(slots=True)
    class Slotted:
        values: Tensor

    inside = [torch.ones(2), torch.ones(2), torch.ones(2)]
    value = {
        "frozenset": frozenset([inside[0]]),
        "slotted": Slotted(inside[1]),
        "proxy": MappingProxyType({"a": inside[2]}),
    }
    capture = Capture(value, buffers)
    for tensor in inside:
        tensor.fill_(5)
    capture.restore(value)
    assert [tensor.tolist() for tensor in inside] == [[1, 1]] * 3


def test_array_of_numpy_comes_back(buffers: Buffers) -> None:
    value = {"counts": np.zeros(3)}
    counts = value["counts"]
    capture = Capture(value, buffers)
    counts += 1
    capture.restore(value)
    assert value["counts"].tolist() == [0, 0, 0]


# ---------------------------------------------------------------- random generators


def _torch_draw(generator: Any) -> float:
    return float(torch.rand((), generator=generator))


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator().manual_seed(3), _torch_draw),
        (random.Random(3), lambda generator: generator.random()),
        (np.random.RandomState(3), lambda generator: generator.rand()),
        (np.random.default_rng(3), lambda generator: generator.random()),
    ],
    ids=["torch", "random", "numpy", "numpy new"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_generator_draws_the_same_numbers_again(buffers: Buffers, generator: Any, draw: Any, nested: bool) -> None:
    value = {"dropout": [generator]} if nested else generator
    capture = Capture(value, buffers)
    first = [draw(generator) for _ in range(3)]
    restored = capture.restore(value)
    assert restored is value
    assert [draw(generator) for _ in range(3)] == first


@pytest.mark.parametrize("module", [random, np.random], ids=lambda module: module.__name__)
def test_generator_of_a_whole_module_draws_the_same_numbers_again(buffers: Buffers, module: Any) -> None:
    capture = Capture(module, buffers)
    first = module.random()
    assert capture.restore(module) is module
    assert module.random() == first


# ---------------------------------------------------------------- lifetime


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: {"a": [t]}, lambda t: {"a": Entry(t)}], ids=["tensor", "dict", "record"]
)
def test_capture_keeps_no_tensor_alive(buffers: Buffers, wrap: Any) -> None:
    tensor = torch.ones(4)
    value = wrap(tensor)
    reference = weakref.ref(tensor)
    capture = Capture(value, buffers)
    if isinstance(value, dict):
        value.clear()
    del tensor, value
    gc.collect()
    assert reference() is None
    assert torch.equal(next(tensor for _, tensor in tensors(capture.restore(None))), torch.ones(4))


def test_capture_draws_no_random_numbers(buffers: Buffers) -> None:
    before = torch.get_rng_state()
    capture = Capture({"a": torch.ones(2), "g": torch.default_generator}, buffers)
    capture.restore(None)
    assert torch.equal(torch.get_rng_state(), before)


def test_matches_sees_a_changed_byte_shape_and_key(buffers: Buffers) -> None:
    value: dict[str, Any] = {"a": torch.tensor([float("nan"), 0.0]), "n": 1}
    capture = Capture(value, buffers)
    assert capture.matches(value)
    assert not capture.matches({**value, "late": 1})
    assert not capture.matches({**value, "n": 2})
    assert not capture.matches({**value, "a": value["a"].view(2, 1)})
    value["a"][1] = -0.0
    assert not capture.matches(value)


def test_plain_memory_knows_no_unsafe_data() -> None:
    memory = PlainMemory()
    assert not memory.is_device(torch.ones(1))
    assert not memory.is_unsafe(torch.ones(1))
    assert memory.host_empty([3], torch.uint8).shape == (3,)
