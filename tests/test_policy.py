# SPDX-License-Identifier: Apache-2.0
"""Declarations: which options go together."""

from typing import Any

import pytest

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.errors import StateError

pytestmark = pytest.mark.timeout(60)


def spec(**options: Any) -> StateSpec:
    location = Location.parse(options.pop("location", "pkg.module:NAME"))
    return StateSpec(
        **{"name": "a-state", "policy": Policy.RESET, "location": location, "source": "file.toml", **options}
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "Upper"}, "name: write lower-case"),
        ({"name": "two--dashes"}, "name: write lower-case"),
        ({"name": ""}, "name: write lower-case"),
        ({"on": "class"}, "on: 'class' is not one of module, instances"),
        ({"settled": "later", "policy": Policy.SNAPSHOT}, "settled: 'later' is not one of"),
        ({"on_missing": "stop"}, "on_missing: 'stop' is not one of warn, error"),
        ({"to": "ones"}, "to: 'ones' is not one of zeros, empty, none"),
        ({"on": "instances"}, "must be module:Class.attribute"),
        ({"replay": True, "policy": Policy.SNAPSHOT}, "replay: only with policy 'reset', not 'snapshot'"),
        ({"to": "none", "policy": Policy.DROP}, "to: only with policy 'reset', not 'drop'"),
        ({"clear": Location.parse("a:b"), "policy": Policy.CONSTANT}, "clear: only with policy 'reset'"),
        ({"quarantine": True, "policy": Policy.REPLICATE}, "quarantine: only with policy 'reset' or 'drop'"),
        ({"settled": "after-update", "policy": Policy.RESET}, "settled: only with policy 'replicate' or 'snapshot'"),
        ({"replica": "expert", "policy": Policy.RESET}, "replica: only with policy 'replicate' or 'snapshot'"),
        ({"replica": "both", "policy": Policy.REPLICATE}, "replica: 'both' is not one of dense, expert"),
    ],
)
def test_options_that_contradict_each_other_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError) as caught:
        spec(**options)
    assert text in str(caught.value)
    assert "(file.toml)" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"to": 0},
        {"to": False},
        {"to": 1.5},
        {"to": "none"},
        {"replay": True, "quarantine": True, "clear": Location.parse("a:b")},
        {"policy": Policy.DROP, "quarantine": True},
        {"policy": Policy.SNAPSHOT, "settled": "after-logging", "on_missing": "error", "large": True},
        {"policy": Policy.REPLICATE, "replica": "expert"},
        {"on": "instances", "location": "pkg.module:Class.attribute"},
        {"name": "a-b_c.d-1"},
    ],
)
def test_options_that_belong_together_are_taken(options: dict[str, Any]) -> None:
    assert spec(**options)


def test_policies_read_as_their_text_and_say_what_is_copied() -> None:
    assert [str(policy) for policy in Policy] == ["reset", "drop", "constant", "replicate", "snapshot", "ignored"]
    assert [policy for policy in Policy if policy.copied] == [Policy.REPLICATE, Policy.SNAPSHOT]


def test_where_a_declaration_stands_is_no_part_of_it() -> None:
    assert spec(source="one") == spec(source="other")
