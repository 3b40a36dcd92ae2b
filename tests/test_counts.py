# SPDX-License-Identifier: Apache-2.0
"""What a healthy step and a repair cost in counts: operators, host buffers, messages. Times are nobody's to assert."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_repair import lose_copies, put, ranks, reach, recover, spec, started
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_recovery.core import memory
from mindspeed_recovery.core.session import Session

pytestmark = pytest.mark.timeout(60)
HOME = sys.modules["test_wire"]
MESSAGES = 8
"""Header and body of the request, the manifest, the answer and the closing message."""


class Operators(TorchDispatchMode):
    """Counts the operators that are called inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def session_with(count: int) -> Session:
    """A session that copies ``count`` tensors, in one state."""
    put("many", {f"t{number}": torch.full((64,), float(number)) for number in range(count)})
    return started(spec("many"))


def operators_of_a_step(count: int, step: int = 5) -> Counter[str]:
    session = session_with(count)
    for healthy in range(1, step):
        reach(session, healthy)
    with Operators() as operators:
        session.before_update(step)
        session.after_log(step)
        session.begin_step(step + 1)
    return operators.called


def test_operators_of_a_step_grow_with_the_tensors_alone() -> None:
    few, more, most = (operators_of_a_step(count) for count in (10, 20, 40))
    assert few["aten::copy_"] == 2 * 10, "each tensor once in each of the two copies"
    assert more["aten::copy_"] == 2 * 20
    assert sum(most.values()) - sum(more.values()) == 2 * (sum(more.values()) - sum(few.values()))
    assert (sum(more.values()) - sum(few.values())) / 10 <= 6, "operators for one tensor, in both copies together"


def test_step_computes_nothing_and_asks_nothing_of_the_device() -> None:
    """No value is read, so nothing waits for the device."""
    called = operators_of_a_step(10)
    assert set(called) <= {"aten::copy_", "aten::empty", "aten::set_"}, called


def test_value_that_is_read_would_be_seen() -> None:
    with Operators() as operators:
        torch.ones(1).item()
    assert "aten::_local_scalar_dense" in operators.called


def test_no_host_buffer_is_made_after_the_third_step() -> None:
    made = []
    plain = memory.PlainMemory()

    class Counting(memory.PlainMemory):
        def host_empty(self, shape: Any, dtype: Any) -> torch.Tensor:
            made.append(shape)
            return plain.host_empty(shape, dtype)

    put("many", {f"t{number}": torch.full((64,), float(number)) for number in range(10)})
    session = started(spec("many"), memory=Counting())
    for step in range(1, 4):
        reach(session, step)
    after_three = len(made)
    assert after_three >= 20, "two copies of each"
    for step in range(4, 8):
        reach(session, step)
    assert len(made) == after_three
    HOME.STATE_many["another"] = torch.ones(64)
    reach(session, 8)
    assert len(made) > after_three, "what is new needs one"


@pytest.mark.parametrize(
    ("count", "size", "chunks"), [(10, 128, 1), (1000, 128, 1), (1, 5 * 2**20, 3)], ids=["few", "many", "large"]
)
def test_messages_of_a_repair_follow_the_bytes_and_not_the_tensors(count: int, size: int, chunks: int) -> None:
    def body(rank: int) -> Any:
        put("many", {f"t{number}": torch.full((size,), float(rank)) for number in range(count)})
        session = started(spec("many"))
        reach(session)
        if rank == 1:
            lose_copies(session)
        sent, received = mock.Mock(wraps=dist.isend), mock.Mock(wraps=dist.irecv)
        with mock.patch.object(dist, "isend", sent), mock.patch.object(dist, "irecv", received):
            recover(session, rank)
        right = all(bool((value == 0).all()) for value in HOME.STATE_many.values())
        return [sent.call_count + received.call_count, right]

    assert ranks(body) == [[MESSAGES + chunks, True]] * 2
