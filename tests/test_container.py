# SPDX-License-Identifier: Apache-2.0
"""Containers: as good as plain ones while training is healthy, and every access an error in quarantine."""

import copy
import gc
import io
import json
import operator
import pickle
import subprocess
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_recovery.core import container
from mindspeed_recovery.core.container import Quarantine, contain, is_container, release
from mindspeed_recovery.core.location import Location, Place
from mindspeed_recovery.errors import QuarantineError, StateError

pytestmark = pytest.mark.timeout(60)

PLAIN: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"a": 1, "b": [2]},
    "OrderedDict": lambda: OrderedDict(a=1, b=[2]),
    "defaultdict": lambda: defaultdict(list, {"a": [1]}),
    "list": lambda: [3, 1, 2],
    "deque": lambda: deque([1, 2, 3], maxlen=4),
    "set": lambda: {1, 2, 3},
}


class Tracker:
    """An object that stands where a state is tracked."""

    def __init__(self) -> None:
        self.values = {"a": 1}

    def record(self) -> int:
        return len(self.values)


def place_of(module: Any, name: str) -> Place:
    place = Location.parse(f"{module.__name__}:{name}").place()
    assert place is not None
    return place


@pytest.fixture(params=sorted(PLAIN))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def adopted(make_module: Callable[..., Any], kind: str) -> Any:
    """A container of each kind that has been adopted at ``toy_cont:STATE``."""
    module = make_module("toy_cont", STATE=PLAIN[kind]())
    assert contain(place_of(module, "STATE")) == []
    return module.STATE


# ---------------------------------------------------------------- live


def test_adopted_state_keeps_its_contents(adopted: Any, kind: str) -> None:
    plain = PLAIN[kind]()
    assert isinstance(adopted, type(plain))
    assert adopted == plain
    assert list(adopted) == list(plain)
    assert getattr(adopted, "maxlen", None) == getattr(plain, "maxlen", None)
    assert getattr(adopted, "default_factory", None) is getattr(plain, "default_factory", None)


def test_live_state_runs_no_code_of_ours(adopted: Any, kind: str) -> None:
    namespace = vars(type(adopted)) if type(adopted) is not type(PLAIN[kind]()) else {}
    assert set(namespace) <= {"__slots__", "__module__", "__doc__", "__reduce_ex__", "__copy__", "__qualname__"}


def test_adopting_again_changes_nothing(make_module: Callable[..., Any], kind: str) -> None:
    module = make_module("toy_again", STATE=PLAIN[kind]())
    contain(place_of(module, "STATE"))
    first = module.STATE
    assert contain(place_of(module, "STATE")) == []
    assert module.STATE is first


def test_state_rebound_to_a_plain_one_is_adopted_again(make_module: Callable[..., Any], kind: str) -> None:
    module = make_module("toy_rebound", STATE=PLAIN[kind]())
    place = place_of(module, "STATE")
    contain(place)
    module.STATE = PLAIN[kind]()
    contain(place)
    with pytest.raises(QuarantineError):
        _in_quarantine(module.STATE, len)


def test_none_is_not_adopted(make_module: Callable[..., Any]) -> None:
    module = make_module("toy_none", STATE=None)
    assert contain(place_of(module, "STATE")) == []
    assert module.STATE is None


@pytest.mark.parametrize("value", [torch.zeros(2), 5, "text", (1, 2)])
def test_value_that_cannot_be_put_in_quarantine_is_a_state_error(make_module: Callable[..., Any], value: Any) -> None:
    module = make_module("toy_odd", STATE=value)
    with pytest.raises(StateError, match=r"toy_odd:STATE: a .* cannot be put in quarantine"):
        contain(place_of(module, "STATE"))


def test_modules_and_classes_that_hold_the_state_by_name_follow(make_module: Callable[..., Any], kind: str) -> None:
    state = PLAIN[kind]()
    owner = make_module("toy_owner", STATE=state)
    importer = make_module("toy_importer", "class Reader:\n    state = ALIAS\n", ALIAS=state)
    contain(place_of(owner, "STATE"))
    assert owner.STATE is importer.ALIAS is importer.Reader.state
    quarantine = Quarantine(owner.STATE, "s", "toy_owner:STATE")
    for holder in (owner.STATE, importer.ALIAS, importer.Reader.state):
        with pytest.raises(QuarantineError):
            iter(holder)
    quarantine.lift()
    assert owner.STATE is importer.ALIAS is importer.Reader.state
    assert PLAIN[kind]() == owner.STATE


def test_other_holders_are_reported(make_module: Callable[..., Any], kind: str) -> None:
    state = PLAIN[kind]()
    module = make_module("toy_held", STATE=state)
    holder = Tracker()
    holder.values = state
    strangers = contain(place_of(module, "STATE"))
    assert strangers == ["a Tracker"]


def test_release_puts_plain_ones_back_wherever_they_are_held(make_module: Callable[..., Any], kind: str) -> None:
    state = PLAIN[kind]()
    module = make_module("toy_release", STATE=state)
    importer = make_module("toy_release_importer", ALIAS=state)
    contain(place_of(module, "STATE"))
    release(place_of(module, "STATE"))
    assert type(module.STATE) is type(state)
    assert state == module.STATE
    assert importer.ALIAS is module.STATE
    assert getattr(module.STATE, "maxlen", None) == getattr(state, "maxlen", None)


def test_no_reference_is_left_to_the_state_that_was_replaced(make_module: Callable[..., Any]) -> None:
    tensor = torch.ones(2)
    module = make_module("toy_refs", STATE={"a": tensor})
    contain(place_of(module, "STATE"))
    reference = weakref.ref(tensor)
    del tensor
    module.STATE.clear()
    gc.collect()
    assert reference() is None


# ---------------------------------------------------------------- leaving the process


def test_leaves_the_process_as_a_plain_one(adopted: Any, kind: str) -> None:
    plain = PLAIN[kind]()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(adopted, protocol)
        assert b"mindspeed_recovery" not in data
        loaded = pickle.loads(data)
        assert type(loaded) is type(plain)
        assert loaded == plain
    for copied in (copy.copy(adopted), copy.deepcopy(adopted)):
        assert type(copied) is type(plain)
        assert copied == plain
        assert getattr(copied, "maxlen", None) == getattr(plain, "maxlen", None)
        assert getattr(copied, "default_factory", None) is getattr(plain, "default_factory", None)


def test_self_reference_survives_deepcopy(make_module: Callable[..., Any]) -> None:
    module = make_module("toy_self", STATE={})
    contain(place_of(module, "STATE"))
    module.STATE["self"] = module.STATE
    copied = copy.deepcopy(module.STATE)
    assert copied["self"] is copied
    module.STATE.clear()


def test_json_reads_it() -> None:
    state = Place("x", {"s": {"a": [1]}}, "s")
    contain(state)
    assert json.dumps(state.get()) == '{"a": [1]}'


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"state": value, "tensor": torch.ones(2)}, file)
    return file.getvalue()


def test_torch_saves_and_loads_it_as_a_plain_one(adopted: Any, kind: str) -> None:
    loaded = torch.load(io.BytesIO(_saved(adopted)), weights_only=False)["state"]
    assert type(loaded) is type(PLAIN[kind]())
    assert loaded == PLAIN[kind]()


LOAD = """
import pathlib, pickle, sys, torch
for file in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        print(file.name, type(torch.load(file, weights_only=True)["state"]).__name__)
    except pickle.UnpicklingError as error:
        print(file.name, "refused")
assert "mindspeed_recovery" not in sys.modules
"""


def test_a_process_without_the_plugin_has_to_allow_dict_and_list_for_weights_only(tmp_path: Path) -> None:
    kinds = ["OrderedDict", "dict", "list", "set"]  # those that torch loads if they are plain
    for kind in kinds:
        holder = {"state": PLAIN[kind]()}
        contain(Place("x", holder, "state"))
        (tmp_path / kind).write_bytes(_saved(holder["state"]))
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, timeout=50, check=True
    )
    # No pickle of a subclass is written with the opcodes of a plain dict or list; a call of these is not allowed by default.
    assert loaded.stdout.split("\n")[:-1] == ["OrderedDict OrderedDict", "dict refused", "list refused", "set set"]


@pytest.mark.parametrize("kind", ["OrderedDict", "dict", "list", "set"], indirect=True)
def test_this_process_loads_it_with_weights_only_while_the_plugin_is_on(adopted: Any, kind: str) -> None:
    data = _saved(adopted)
    undo = container.allow_loading()
    try:
        loaded = torch.load(io.BytesIO(data), weights_only=True)["state"]
    finally:
        undo()
    assert type(loaded) is type(PLAIN[kind]())
    assert loaded == PLAIN[kind]()


def test_what_may_be_loaded_is_as_before_when_the_plugin_is_off() -> None:
    with torch.serialization.safe_globals([Tracker, list]):
        before = set(torch.serialization.get_safe_globals())
        undo = container.allow_loading()
        assert dict in torch.serialization.get_safe_globals()
        undo()
        assert set(torch.serialization.get_safe_globals()) == before


# ---------------------------------------------------------------- quarantine


def _in_quarantine(value: Any, use: Callable[[Any], Any]) -> None:
    quarantine = Quarantine(value, "aux-loss", "pkg.module:TRACKER")
    try:
        use(value)
    finally:
        quarantine.lift()


USES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "any": {
        "iter": iter,
        "len": len,
        "bool": bool,
        "==": lambda v: v == 1,
        "!=": lambda v: v != 1,
        "plain ==": lambda v: v == [] or v == {} or set() == v,
        "in": lambda v: 1 in v,
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": pickle.dumps,
        "list()": list,
        "unpack": lambda v: [*v],
        "sorted": sorted,
        "clear": lambda v: v.clear(),
        "torch.save": _saved,
    },
    "dict": {
        "get item": lambda v: v["a"],
        "set item": lambda v: operator.setitem(v, "a", 1),
        "delete item": lambda v: operator.delitem(v, "a"),
        "get": lambda v: v.get("a"),
        "items": lambda v: v.items(),
        "keys": lambda v: v.keys(),
        "values": lambda v: v.values(),
        "setdefault": lambda v: v.setdefault("c", 1),
        "update": lambda v: v.update(c=1),
        "pop": lambda v: v.pop("a", None),
        "popitem": lambda v: v.popitem(),
        "reversed": reversed,
        "dict()": dict,
        "** unpack": lambda v: {**v},
        "|": lambda v: v | {},
        "|=": lambda v: operator.ior(v, {"c": 1}),
        "plain |": lambda v: {} | v,
    },
    "list": {
        "get item": lambda v: v[0],
        "slice": lambda v: v[:1],
        "set item": lambda v: operator.setitem(v, 0, 1),
        "delete item": lambda v: operator.delitem(v, 0),
        "append": lambda v: v.append(1),
        "extend": lambda v: v.extend([1]),
        "pop": lambda v: v.pop(),
        "insert": lambda v: v.insert(0, 1),
        "index": lambda v: v.index(1),
        "sort": lambda v: v.sort(),
        "reverse": lambda v: v.reverse(),
        "+": lambda v: operator.add(v, [1]),
        "+=": lambda v: operator.iadd(v, [1]),
        "*": lambda v: v * 2,
        "reversed": reversed,
        "plain extend": lambda v: [].extend(v),
        "torch.stack": lambda v: torch.tensor(v),
    },
    "deque": {
        "get item": lambda v: v[0],
        "set item": lambda v: operator.setitem(v, 0, 1),
        "append": lambda v: v.append(1),
        "appendleft": lambda v: v.appendleft(1),
        "extend": lambda v: v.extend([1]),
        "pop": lambda v: v.pop(),
        "popleft": lambda v: v.popleft(),
        "rotate": lambda v: v.rotate(1),
        "+": lambda v: v + deque(),
        "reversed": reversed,
    },
    "set": {
        "add": lambda v: v.add(1),
        "discard": lambda v: v.discard(1),
        "pop": lambda v: v.pop(),
        "update": lambda v: v.update({1}),
        "|": lambda v: v | {1},
        "plain |": lambda v: {1} | v,
        "&": lambda v: v & {1},
        "-": lambda v: v - {1},
        "<=": lambda v: v <= {1},
    },
    "defaultdict": {"missing": lambda v: v["new"]},
    "OrderedDict": {"move_to_end": lambda v: v.move_to_end("a"), "popitem first": lambda v: v.popitem(last=False)},
}
for _kind in ("defaultdict", "OrderedDict"):
    USES[_kind].update(USES["dict"])


@pytest.mark.parametrize(
    ("kind", "use"),
    [(kind, use) for kind in sorted(PLAIN) for use in (*USES["any"], *USES[kind])],
    indirect=["kind"],
)
def test_every_use_in_quarantine_raises_and_afterwards_the_same_object_works(adopted: Any, kind: str, use: str) -> None:
    run = USES[kind].get(use) or USES["any"][use]
    identity, before = id(adopted), list(adopted.items()) if hasattr(adopted, "items") else list(adopted)
    live_class = type(adopted)
    with pytest.raises(QuarantineError) as caught:
        _in_quarantine(adopted, run)
    assert str(caught.value).startswith("FORCE STOP: state 'aux-loss' at pkg.module:TRACKER is in quarantine")
    assert isinstance(caught.value, RuntimeError)
    assert id(adopted) == identity
    assert type(adopted) is live_class
    assert (list(adopted.items()) if hasattr(adopted, "items") else list(adopted)) == before
    run_again = copy.deepcopy(adopted)
    assert run_again == PLAIN[kind]()


@pytest.mark.parametrize("kind", ["deque", "defaultdict"], indirect=True)
def test_data_attributes_raise_in_quarantine(adopted: Any, kind: str) -> None:
    attribute = {"deque": "maxlen", "defaultdict": "default_factory"}[kind]
    with pytest.raises(QuarantineError):
        _in_quarantine(adopted, lambda value: getattr(value, attribute))


def test_every_public_method_raises_in_quarantine(adopted: Any, kind: str) -> None:
    for name in [name for name in dir(PLAIN[kind]()) if not name.startswith("_")]:
        with pytest.raises(QuarantineError):
            _in_quarantine(adopted, lambda value, name=name: getattr(value, name)())


@pytest.mark.parametrize("kind", sorted(set(PLAIN) - {"set"}), indirect=True)
def test_values_are_out_of_reach_of_the_plain_methods(adopted: Any, kind: str) -> None:
    base = dict if isinstance(adopted, dict) else type(PLAIN[kind]())
    before = list(adopted.values()) if isinstance(adopted, dict) else list(adopted)
    quarantine = Quarantine(adopted, "s", "l")
    inside = list(base.values(adopted) if base is dict else base.__iter__(adopted))
    assert not any(value is old for value in inside for old in before)
    for value in inside:
        with pytest.raises(QuarantineError):
            value.anything  # noqa: B018
    quarantine.lift()
    assert adopted == PLAIN[kind]()


def test_quarantined_state_can_be_shown(adopted: Any) -> None:
    quarantine = Quarantine(adopted, "aux-loss", "l")
    assert "aux-loss" in repr(adopted)
    assert "quarantine" in str(adopted)
    assert "quarantine" in f"{adopted}"
    quarantine.lift()


def test_lifting_twice_changes_nothing(adopted: Any, kind: str) -> None:
    quarantine = Quarantine(adopted, "s", "l")
    quarantine.lift()
    quarantine.lift()
    assert adopted == PLAIN[kind]()


def test_order_of_an_ordered_dict_survives_quarantine(make_module: Callable[..., Any]) -> None:
    module = make_module("toy_order", STATE=OrderedDict(a=1, b=2, c=3))
    contain(place_of(module, "STATE"))
    module.STATE.move_to_end("a")
    with pytest.raises(QuarantineError):
        _in_quarantine(module.STATE, len)
    assert list(module.STATE.items()) == [("b", 2), ("c", 3), ("a", 1)]
    module.STATE["d"] = 4
    module.STATE.pop("c")
    assert list(module.STATE) == ["b", "a", "d"]


OBJECT_USES: dict[str, Callable[[Any], Any]] = {
    "read": lambda v: v.values,
    "write": lambda v: setattr(v, "values", 1),
    "delete": lambda v: delattr(v, "values"),
    "method": lambda v: v.record(),
    "hasattr": lambda v: hasattr(v, "values"),
    "vars": vars,
    "==": lambda v: v == 1,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "bound before": lambda v: Tracker.record(v),
}


@pytest.mark.parametrize("use", sorted(OBJECT_USES))
def test_every_use_of_an_object_in_quarantine_raises_and_afterwards_it_works(use: str) -> None:
    tracker = Tracker()
    assert is_container(tracker)
    values = tracker.values
    with pytest.raises(QuarantineError, match=r"state 'aux-loss' at pkg\.module:TRACKER"):
        _in_quarantine(tracker, OBJECT_USES[use])
    assert type(tracker) is Tracker
    assert tracker.values is values
    assert tracker.record() == 1


def test_hash_of_an_object_in_quarantine_is_no_unknown_error() -> None:
    tracker = Tracker()
    known = {tracker: 1}
    quarantine = Quarantine(tracker, "s", "l")
    try:
        assert known[tracker] == 1
    except QuarantineError:
        pass
    finally:
        quarantine.lift()


def test_iteration_that_quarantine_cuts_ends_with_force_stop_or_ends() -> None:
    place = Place("x", {"s": {"a": 1, "b": 2}}, "s")
    contain(place)
    iterator = iter(place.get())
    next(iterator)
    quarantine = Quarantine(place.get(), "s", "l")
    try:
        next(iterator, None)
    except RuntimeError as error:
        assert str(error).startswith("FORCE STOP")  # noqa: PT017
    finally:
        quarantine.lift()


def test_quarantine_class_of_one_state_does_not_touch_other_containers(make_module: Callable[..., Any]) -> None:
    module = make_module("toy_two", ONE={"a": 1}, OTHER={"b": 2})
    contain(place_of(module, "ONE"))
    contain(place_of(module, "OTHER"))
    quarantine = Quarantine(module.ONE, "one", "toy_two:ONE")
    assert module.OTHER["b"] == 2
    quarantine.lift()
    assert container.is_container(module.ONE)
