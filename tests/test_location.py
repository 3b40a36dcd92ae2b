# SPDX-License-Identifier: Apache-2.0
"""Locations: how they are written, found, and what is said when one is not there."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_recovery.core.location import Location, Place
from mindspeed_recovery.errors import LocationError

pytestmark = pytest.mark.timeout(60)

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
DOTTED = st.lists(NAMES, min_size=1, max_size=4).map(".".join)


@given(DOTTED, DOTTED)
def test_a_well_formed_location_is_its_own_text(module: str, path: str) -> None:
    location = Location.parse(f"{module}:{path}")
    assert str(location) == f"{module}:{path}"
    assert (location.module, ".".join(location.path)) == (module, path)


@given(st.text(alphabet="ab.:_ 1-\n", max_size=12))
def test_any_other_text_is_a_location_error(text: str) -> None:
    parts = text.split(":")
    well_formed = len(parts) == 2 and all(name.isidentifier() for part in parts for name in part.split("."))
    if well_formed:
        assert str(Location.parse(text)) == text
    else:
        with pytest.raises(LocationError, match="is not a location"):
            Location.parse(text)


def test_place_reads_and_writes_where_the_state_is(make_module: Callable[..., Any]) -> None:
    module = make_module("toy_place", "class Helper:\n    tracker = {}\n")
    place = Location.parse("toy_place:Helper.tracker").place()
    assert place is not None
    assert place.get() is module.Helper.tracker
    place.set(5)
    assert module.Helper.tracker == 5
    assert place.path == "toy_place:Helper.tracker"


def test_place_follows_a_rebind(make_module: Callable[..., Any]) -> None:
    module = make_module("toy_rebind", TRACKER={"a": 1})
    location = Location.parse("toy_rebind:TRACKER")
    place = location.place()
    module.TRACKER = fresh = {"b": 2}
    assert place is not None
    assert place.get() is fresh


def test_item_of_a_dict_is_a_place() -> None:
    owner: dict[str, Any] = {"a": 1}
    place = Place("x[a]", owner, "a")
    assert place.get() == 1
    place.set(2)
    assert owner == {"a": 2}
    del owner["a"]
    assert place.get() is None


def test_module_that_is_not_loaded_holds_no_state() -> None:
    assert Location.parse("toy_never_loaded.part:X.y").place() is None
    assert Location.parse("toy_never_loaded.part:X.y").owner_class() is None


def test_nothing_is_imported() -> None:
    import sys

    sys.modules.pop("this", None)
    assert Location.parse("this:s").place() is None
    assert "this" not in sys.modules


def test_none_on_the_way_is_a_state_not_made_yet(make_module: Callable[..., Any]) -> None:
    module = make_module("toy_lazy", _TRACKER=None)
    location = Location.parse("toy_lazy:_TRACKER._metrics.x")
    assert location.place() is None
    module._TRACKER = type("Tracker", (), {"_metrics": None})()
    assert location.place() is None


def test_none_at_the_end_is_a_place(make_module: Callable[..., Any]) -> None:
    make_module("toy_end", MASK=None)
    place = Location.parse("toy_end:MASK").place()
    assert place is not None
    assert place.get() is None


def test_absent_attribute_of_a_loaded_module_names_the_same_name_elsewhere_in_the_package(
    make_module: Callable[..., Any],
) -> None:
    make_module("toy_pkg")
    make_module("toy_pkg.old")
    make_module("toy_pkg.moe.new", _TRACKER={})
    with pytest.raises(LocationError) as caught:
        Location.parse("toy_pkg.old:_TRACKER").place()
    assert str(caught.value).startswith("toy_pkg.old:_TRACKER: toy_pkg.old has no attribute '_TRACKER'")
    assert "toy_pkg.moe.new:_TRACKER" in str(caught.value)


def test_absent_attribute_names_a_similar_one(make_module: Callable[..., Any]) -> None:
    make_module("toy_similar", _MOE_LAYER_WISE_TRACKER={}, unrelated=1)
    with pytest.raises(LocationError, match=r"candidates: _MOE_LAYER_WISE_TRACKER$"):
        Location.parse("toy_similar:_MOE_LAYER_WISE_TRACKERS").place()


def test_similar_name_in_a_sibling_module_is_a_candidate(make_module: Callable[..., Any]) -> None:
    make_module("toy_sib")
    make_module("toy_sib.a", LOSS_TRACKER={})
    make_module("toy_sib.b", LOSS_TRACKER={})
    with pytest.raises(LocationError) as caught:
        Location.parse("toy_sib.a:LOSS_TRACKERS").place()
    assert "LOSS_TRACKER, toy_sib.b:LOSS_TRACKER" in str(caught.value)


def test_other_packages_are_no_candidates(make_module: Callable[..., Any]) -> None:
    make_module("toy_here")
    make_module("toy_there", XYZZY={})
    with pytest.raises(LocationError, match="nothing with a similar name was found"):
        Location.parse("toy_here:XYZZY").place()


def test_absent_class_attribute_names_the_class(make_module: Callable[..., Any]) -> None:
    make_module("toy_class", "class Helper:\n    tracker = {}\n")
    with pytest.raises(LocationError, match=r"toy_class:Helper has no attribute 'trackr'; candidates: tracker"):
        Location.parse("toy_class:Helper.trackr").place()


def test_module_getattr_is_not_asked(make_module: Callable[..., Any]) -> None:
    make_module("toy_getattr", "def __getattr__(name):\n    raise RuntimeError('called')\n")
    with pytest.raises(LocationError):
        Location.parse("toy_getattr:X").place()


INSTANCES = """
import functools

class Base:
    def __init__(self):
        self.inherited = 1

def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

class Module(Base):
    annotated: int
    def __init__(self):
        super().__init__()
        self.register_buffer("buffered", None)
        setattr(self, "set_by_name", 1)
        def later():
            self.in_closure = 1
    @property
    def prop(self):
        return self.in_property
    @wrapping
    def once(self):
        self.in_wrapped = 1
    @classmethod
    def made(cls):
        cls.in_classmethod = 1
    @wrapping
    @wrapping
    def twice(self):
        self.in_twice_wrapped = 1
    @classmethod
    @wrapping
    def wrapped_made(cls):
        cls.in_wrapped_classmethod = 1
    @functools.cached_property
    def cached(self):
        return self.in_cached_property
"""


@pytest.mark.parametrize(
    "attribute",
    ["inherited", "annotated", "buffered", "set_by_name", "in_closure", "in_property", "in_wrapped", "in_classmethod"],
)
def test_attribute_that_code_of_the_class_mentions_is_known_with_zero_instances(
    make_module: Callable[..., Any], attribute: str
) -> None:
    module = make_module("toy_inst", INSTANCES)
    assert Location.parse(f"toy_inst:Module.{attribute}").owner_class() is module.Module


@pytest.mark.parametrize("attribute", ["in_twice_wrapped", "in_wrapped_classmethod", "in_cached_property"])
def test_attribute_mentioned_below_several_wrappers_is_known(make_module: Callable[..., Any], attribute: str) -> None:
    module = make_module("toy_inst", INSTANCES)
    assert Location.parse(f"toy_inst:Module.{attribute}").owner_class() is module.Module


def test_attribute_that_no_code_of_the_class_mentions_is_an_error_with_zero_instances(
    make_module: Callable[..., Any],
) -> None:
    make_module("toy_inst", INSTANCES)
    with pytest.raises(LocationError, match=r"toy_inst:Module has no attribute 'bufered'; candidates: buffered"):
        Location.parse("toy_inst:Module.bufered").owner_class()


def test_absent_class_is_an_error(make_module: Callable[..., Any]) -> None:
    make_module("toy_inst", INSTANCES)
    with pytest.raises(LocationError, match=r"toy_inst has no attribute 'Modul'; candidates: Module"):
        Location.parse("toy_inst:Modul.buffered").owner_class()


@pytest.mark.parametrize("stand_in", [None, lambda: None])
def test_stand_in_for_a_missing_optional_class_has_no_instances(make_module: Callable[..., Any], stand_in: Any) -> None:
    make_module("toy_optional", TEModule=stand_in)
    assert Location.parse("toy_optional:TEModule.x").owner_class() is None
