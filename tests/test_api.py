# SPDX-License-Identifier: Apache-2.0
"""The public functions, and that the package by itself imports and changes nothing."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_recovery import LocationError, StateError
from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import NAME
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)


@functools.lru_cache
def cached_mask(size: int) -> torch.Tensor:
    return torch.ones(size)


class Helper:
    tracker: dict[str, Any] = {}  # noqa: RUF012


def enable(plugin: Any, memory: UnsafeMemory, **options: Any) -> Any:
    return plugin.enable(catalogues=[], memory=memory, **options)


def recover(session: Any, step: int = 1) -> Any:
    session.stop()
    session.clean()
    session.before_rollback(step)
    return session.after_rollback()


def declared(plugin: Any) -> dict[str, str]:
    return {state["name"]: state["location"] for state in plugin.states()}


# ---------------------------------------------------------------- track


def test_track_as_a_call(plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]) -> None:
    module = make_module("toy_api", TRACKER={"sum": torch.ones(1)})
    assert plugin.track("toy_api:TRACKER", policy="reset", quarantine=True, name="my-tracker") is None
    assert declared(plugin) == {"my-tracker": "toy_api:TRACKER"}
    assert plugin.states()[0]["source"].startswith("test_api.py:")
    assert recover(enable(plugin, memory)).exact
    assert module.TRACKER["sum"].tolist() == [0]


def test_track_as_a_decorator_of_a_cached_function(plugin: Any, memory: UnsafeMemory) -> None:
    assert plugin.track(policy="drop")(cached_mask) is cached_mask
    assert list(declared(plugin).values()) == [f"{__name__}:cached_mask"]
    old = cached_mask(3)
    assert recover(enable(plugin, memory)).exact
    assert cached_mask(3) is not old


def test_track_as_a_decorator_of_a_class_attribute(plugin: Any, memory: UnsafeMemory) -> None:
    Helper.tracker = {"sum": torch.ones(1)}
    assert plugin.track(policy="reset", attr="tracker", quarantine=True)(Helper) is Helper
    assert recover(enable(plugin, memory)).exact
    assert Helper.tracker["sum"].tolist() == [0]
    plugin.disable()
    assert type(Helper.tracker) is dict


def test_decorated_class_without_the_attribute_s_name_is_an_error(plugin: Any) -> None:
    with pytest.raises(StateError, match="name the class attribute that is the state"):
        plugin.track(policy="reset")(Helper)


def test_one_decorator_declares_several_classes_alike(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]
) -> None:
    decorate = plugin.track(policy="reset", attr="tracker", fields=["sum"], clear="toy_api:clear")
    module = make_module("toy_api", "class A:\n    tracker = {}\nclass B:\n    tracker = {}\n", clear=lambda: None)
    decorate(module.A)
    decorate(module.B)
    session = enable(plugin, memory)
    specs = [state.spec for state in session.registry]

    assert [spec.fields for spec in specs] == [("sum",), ("sum",)]
    assert [str(spec.clear) for spec in specs] == ["toy_api:clear"] * 2


SOURCE = """
import functools
import mindspeed_recovery

@mindspeed_recovery.track(policy="drop")
@functools.lru_cache
def mask(size):
    return [size]

@mindspeed_recovery.track(policy="reset", attr="tracker", quarantine=True)
class Helper:
    tracker = {}
"""


@pytest.mark.parametrize("before", [True, False], ids=["before enable", "after enable"])
def test_module_with_decorators_can_be_imported_before_and_after_enable(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any], before: bool
) -> None:
    if not before:
        session = enable(plugin, memory)
    module = make_module("toy_decorated", SOURCE)
    if before:
        session = enable(plugin, memory)
    session.begin_step(1)
    old = module.mask(1)
    module.Helper.tracker["sum"] = torch.ones(1)
    assert recover(session).exact
    assert module.mask(1) is not old
    assert module.Helper.tracker["sum"].tolist() == [0]


def test_state_tracked_after_enable_is_adopted_at_once(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]
) -> None:
    module = make_module("toy_api", TRACKER={})
    session = enable(plugin, memory)
    plugin.track("toy_api:TRACKER", policy="reset", quarantine=True)
    assert [state["places"] for state in plugin.states()] == [1]
    session.stop()
    session.clean()
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        len(module.TRACKER)
    session.before_rollback(1)
    session.after_rollback()


def test_instances_tracked_after_enable_are_found(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]
) -> None:
    module = make_module("toy_api", "class Layer:\n    def __init__(self):\n        self.count = 3\n")
    session = enable(plugin, memory, roots={"model": [module.Layer()]})
    plugin.track("toy_api:Layer.count", policy="reset", to=0, on="instances")
    assert plugin.states()[0]["places"] == 1
    assert recover(session).exact


def test_location_that_is_absent_is_an_error_after_enable_and_nothing_is_tracked(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]
) -> None:
    make_module("toy_api", "class Layer:\n    def __init__(self):\n        self.count = 3\n", TRACKER={})
    enable(plugin, memory)
    for location, options in (("toy_api:TRACKR", {}), ("toy_api:Layer.coun", {"on": "instances"})):
        with pytest.raises(LocationError, match=r"state 'mine' \(test_api.py:\d+\): .*candidates: "):
            plugin.track(location, policy="reset", name="mine", **options)
        assert plugin.states() == []


@pytest.mark.parametrize("enabled", [False, True])
def test_duplicate_names_and_locations_are_errors(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any], enabled: bool
) -> None:
    make_module("toy_api", A={}, B={})
    if enabled:
        enable(plugin, memory)
    plugin.track("toy_api:A", policy="reset", name="one")
    with pytest.raises(StateError, match="'one'"):
        plugin.track("toy_api:B", policy="reset", name="one")
    with pytest.raises(StateError, match="'one'"):
        plugin.track("toy_api:A", policy="reset", name="two")
    assert declared(plugin) == {"one": "toy_api:A"}


def test_fields_of_one_location_may_be_states_of_their_own(plugin: Any) -> None:
    plugin.track("toy_api:A", policy="reset", name="one", fields=["a"])
    plugin.track("toy_api:A", policy="snapshot", name="two", fields=["b"])
    assert set(declared(plugin)) == {"one", "two"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "rest"}, "unknown policy 'rest'; one of reset, drop"),
        ({"policy": "drop", "replay": True}, "replay: only with policy 'reset'"),
        ({"policy": "reset", "fields": "name"}, "fields"),
        ({"policy": "reset", "quarantin": True}, "quarantin"),
        ({"policy": "reset", "name": "Not A Name"}, "name: write lower-case"),
    ],
)
def test_options_that_are_wrong_are_state_errors(plugin: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError, match=text):
        plugin.track("toy_api:A", **options)
    assert plugin.states() == []


def test_malformed_location_is_an_error(plugin: Any) -> None:
    with pytest.raises(LocationError, match="is not a location"):
        plugin.track("toy_api.A", policy="reset")


PART = st.from_regex(r"[A-Za-z_]{1,3}[A-Za-z0-9_]{0,4}", fullmatch=True).filter(lambda part: part.strip("_"))


@given(st.lists(PART, min_size=1, max_size=3), st.lists(PART, min_size=1, max_size=3))
def test_every_location_has_a_valid_default_name(module: list[str], path: list[str]) -> None:
    from mindspeed_recovery.api import _default_name

    location = Location.parse(f"{'.'.join(module)}:{'.'.join(path)}")
    assert NAME.fullmatch(_default_name(location))


# ---------------------------------------------------------------- untrack, states


def test_untrack_takes_a_declaration_back(plugin: Any) -> None:
    plugin.track("toy_api:A", policy="reset", name="one")
    plugin.untrack("one")
    assert plugin.states() == []
    plugin.track("toy_api:A", policy="reset", name="one")


def test_untrack_puts_a_plain_container_back(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]
) -> None:
    module = make_module("toy_api", TRACKER={"a": 1}, OTHER={})
    plugin.track("toy_api:TRACKER", policy="reset", name="mine", quarantine=True)
    session = enable(plugin, memory)
    plugin.untrack("mine")
    assert type(module.TRACKER) is dict
    assert module.TRACKER == {"a": 1}
    assert plugin.states() == []
    assert recover(session).outcomes == {}


def test_untrack_stops_a_state_of_the_catalogue(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any], tmp_path: Path
) -> None:
    make_module("toy_api", TRACKER={})
    file = tmp_path / "mine.toml"
    file.write_text('[[state]]\nname = "t"\nwhy = "sums"\npolicy = "reset"\nlocation = "toy_api:TRACKER"\n')
    plugin.enable(catalogues=[file], memory=memory)
    assert [(state["name"], state["source"]) for state in plugin.states()] == [("t", "mine.toml:1")]
    plugin.untrack("t")
    assert plugin.states() == []


@pytest.mark.parametrize("enabled", [False, True])
def test_untrack_of_an_unknown_name_shows_the_known_ones(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any], enabled: bool
) -> None:
    make_module("toy_api", A={})
    plugin.track("toy_api:A", policy="reset", name="known")
    if enabled:
        enable(plugin, memory)
    with pytest.raises(KeyError, match="known"):
        plugin.untrack("unknown")


def test_states_before_and_after_enable(plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]) -> None:
    make_module("toy_api", TRACKER={"sum": torch.ones(4)}, LAZY=None)
    plugin.track("toy_api:TRACKER", policy="reset", name="tracker")
    plugin.track("toy_api:LAZY", policy="snapshot", name="lazy")
    plugin.track("toy_absent:X", policy="ignored", name="ignored")
    random = torch.get_rng_state()
    before = plugin.states()
    assert [(state["places"], state["bytes"]) for state in before] == [(0, 0)] * 3
    enable(plugin, memory)
    after = plugin.states()
    assert [(state["name"], state["policy"], state["places"], state["bytes"]) for state in after] == [
        ("tracker", "reset", 1, 16),
        ("lazy", "snapshot", 0, 0),
        ("ignored", "ignored", 0, 0),
    ]
    assert [sorted(state) for state in before] == [sorted(state) for state in after]
    assert torch.equal(torch.get_rng_state(), random)


def test_ignored_state_whose_attribute_is_absent_does_not_spoil_the_list(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]
) -> None:
    make_module("toy_api", A={})
    plugin.track("toy_api:ABSENT", policy="ignored", name="ignored")
    enable(plugin, memory)
    assert len(plugin.states()) == 1


# ---------------------------------------------------------------- enable, disable


def test_enabling_twice_is_an_error_and_after_disable_it_is_not(plugin: Any, memory: UnsafeMemory) -> None:
    enable(plugin, memory)
    with pytest.raises(StateError, match="enabled already"):
        enable(plugin, memory)
    plugin.disable()
    plugin.disable()
    enable(plugin, memory)


def test_disable_puts_everything_back_even_if_a_location_is_gone(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]
) -> None:
    module = make_module("toy_api", GONE={}, TRACKER={"a": 1})
    safe = set(torch.serialization.get_safe_globals())
    plugin.track("toy_api:GONE", policy="reset", quarantine=True)
    plugin.track("toy_api:TRACKER", policy="reset", quarantine=True)
    enable(plugin, memory)
    del module.GONE
    plugin.disable()
    assert type(module.TRACKER) is dict
    assert set(torch.serialization.get_safe_globals()) == safe
    assert declared(plugin)  # declarations outlive it
    module.GONE = {}
    enable(plugin, memory)


def test_failed_enable_leaves_nothing_behind(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any]
) -> None:
    module = make_module("toy_api", TRACKER={"a": 1}, LAST={"b": 1})
    safe = set(torch.serialization.get_safe_globals())
    plugin.track("toy_api:TRACKER", policy="reset", quarantine=True, name="first")
    plugin.track("toy_api:ABSENT", policy="reset", quarantine=True, name="bad")
    plugin.track("toy_api:LAST", policy="reset", quarantine=True, name="last")
    with pytest.raises(
        LocationError, match=r"^state 'bad' \(test_api.py:\d+\): toy_api:ABSENT: toy_api has no attribute"
    ):
        enable(plugin, memory)
    assert (type(module.TRACKER), type(module.LAST)) == (dict, dict)
    assert set(torch.serialization.get_safe_globals()) == safe
    plugin.untrack("bad")
    enable(plugin, memory)


def test_state_of_the_catalogue_may_not_be_tracked_again(
    plugin: Any, memory: UnsafeMemory, make_module: Callable[..., Any], tmp_path: Path
) -> None:
    make_module("toy_api", TRACKER={})
    file = tmp_path / "mine.toml"
    file.write_text('[[state]]\nname = "t"\nwhy = "sums"\npolicy = "reset"\nlocation = "toy_api:TRACKER"\n')
    plugin.track("toy_api:TRACKER", policy="reset", name="other")
    with pytest.raises(StateError, match=r"tracked already.*mine\.toml"):
        plugin.enable(catalogues=[file], memory=memory)


# ---------------------------------------------------------------- a fresh process


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_import_declarations_and_catalogue_import_no_torch_and_no_framework() -> None:
    code = """
import sys
import mindspeed_recovery
from mindspeed_recovery import catalogue
mindspeed_recovery.track("some.where:X", policy="reset")
mindspeed_recovery.states()
mindspeed_recovery.untrack("some.where.x")
mindspeed_recovery.disable()
assert catalogue.installed_states(catalogue.shipped()) is not None
wrong = {"torch", "numpy", "megatron", "mindspeed", "mindspeed_llm", "torch_npu", "tensorboard", "mindio_ttp"}
print(sorted(wrong & {name.split(".")[0] for name in sys.modules}))
"""
    assert in_a_fresh_process(code) == "[]"


def test_import_and_catalogue_change_nothing_of_torch() -> None:
    code = """
import sys, torch, torch.serialization, torch.utils.tensorboard

def picture():
    modules = [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] in ("torch", "tensorboard")]
    seen = {}
    for module in modules:
        for key, value in list(vars(module).items()):
            seen[module.__name__, key] = id(value)
            if isinstance(value, type):
                seen.update({(module.__name__, key, name): id(item) for name, item in list(vars(value).items())})
    return seen

before, safe = picture(), set(torch.serialization.get_safe_globals())
hooks = (list(sys.meta_path), list(sys.path_hooks), sys.excepthook)
import mindspeed_recovery
from mindspeed_recovery import catalogue
catalogue.installed_states(catalogue.shipped())
mindspeed_recovery.track("torch.nn:Module", policy="ignored")
mindspeed_recovery.states()
after = picture()
# One thing is added: the finder that waits for Megatron's parser and MindSpeed's list of features.
added = [finder for finder in sys.meta_path if finder not in hooks[0]]
assert [type(finder).__name__ for finder in added] == ["ImportHookFinder"], added
assert hooks[1:] == (list(sys.path_hooks), sys.excepthook)
print([key for key in before if before[key] != after.get(key)], safe ^ set(torch.serialization.get_safe_globals()))
"""
    assert in_a_fresh_process(code) == "[] set()"
