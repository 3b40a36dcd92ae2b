# SPDX-License-Identifier: Apache-2.0
"""The drill on a toy job: it passes where every state is tracked rightly, and names the state where one is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.testing.simulator import UnsafeMemory
from mindspeed_recovery.tools.drill import Drill, Result, digest

SOURCE = """
import torch
TRACKER = {"loss": torch.zeros(2)}
COUNTS = torch.zeros(3)
BIAS = torch.ones(3)
SCALE = torch.full((1,), 2.0)
GENERATOR = torch.Generator()
"""
SPECS = {
    "tracker": ("TRACKER", Policy.RESET, {"quarantine": True, "replay": True}),
    "counts": ("COUNTS", Policy.RESET, {}),
    "bias": ("BIAS", Policy.REPLICATE, {}),
    "scale": ("SCALE", Policy.CONSTANT, {}),
    "generator": ("GENERATOR", Policy.SNAPSHOT, {}),
}


def specs(policies: dict[str, Policy] | None = None) -> list[StateSpec]:
    changed = policies or {}
    return [
        StateSpec(
            name, Location.parse(f"toy_drill:{at}"), changed.get(name, policy), **({} if name in changed else options)
        )
        for name, (at, policy, options) in SPECS.items()
    ]


def compute(module: Any) -> dict[str, torch.Tensor]:
    """A step up to its gradients, with all of the module's states in it."""
    noise = torch.rand(3, generator=module.GENERATOR)
    module.TRACKER["loss"][0] += noise[0]
    module.COUNTS += 1
    module.BIAS += 0.1 * module.COUNTS
    return {"gradients": module.BIAS * module.SCALE + noise}


def rehearse(
    module: Any, tracked: list[StateSpec], memory: UnsafeMemory, extra: Callable[[], None] = lambda: None
) -> Result:
    session = Session(Registry(tracked), memory=memory)
    session.start()
    try:
        drill = Drill(session, specs(), {}, step=5)
        session.begin_step(5)
        drill.abandon(compute(module))
        extra()
        return drill.compare(compute(module))
    finally:
        session.close()


@pytest.fixture
def module(make_module: Callable[..., Any], memory: UnsafeMemory) -> Any:
    return make_module("toy_drill", SOURCE)


def test_a_job_whose_states_are_tracked_passes(module, memory):
    result = rehearse(module, specs(), memory)
    assert result.passed, str(result)
    assert result.overwritten == 4, "the generator's state is on the host"
    assert "PASSED" in str(result)


@pytest.mark.parametrize("missing", ["tracker", "counts", "bias", "generator"])
def test_a_state_that_is_not_tracked_is_named(module, memory, missing):
    result = rehearse(module, [spec for spec in specs() if spec.name != missing], memory)
    assert not result.passed
    assert f"'{missing}' at toy_drill:{SPECS[missing][0]} differs and is not tracked" in str(result)


def test_a_policy_that_does_not_fit_is_named(module, memory):
    result = rehearse(module, specs({"bias": Policy.RESET}), memory)
    assert "state 'bias' at toy_drill:BIAS differs: its policy does not fit" in str(result)


def test_a_difference_outside_the_states_is_found(module, memory):
    def disturb() -> None:
        module.SCALE.add_(1)

    result = rehearse(module, specs(), memory, disturb)
    assert "gradients differs" in result.different


def test_digests_see_bytes_shapes_types_and_generators():
    values = [
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.float64),
        torch.tensor([0.0, -0.0]),
        {"a": torch.zeros(2)},
        [torch.zeros(2)],
        0,
        0.0,
        "0",
        None,
    ]
    assert len({digest(value) for value in values}) == len(values)
    generator = torch.Generator()
    before = digest(generator)
    assert digest(generator) == before
    torch.rand(1, generator=generator)
    assert digest(generator) != before


def test_a_tensor_whose_storage_was_freed_is_not_read():
    """A framework frees the storage of tensors that it will not use again; reading one ends the process."""
    tensor = torch.ones(4096)
    tensor.untyped_storage().resize_(0)
    assert digest([tensor]) == digest([tensor])
    assert digest([tensor]) != digest([torch.ones(4096)])
    assert digest([tensor]) != digest([torch.ones(0)])
