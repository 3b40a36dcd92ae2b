# SPDX-License-Identifier: Apache-2.0
"""An unsafe-data error carries the names of its tensors, and nothing else of the step that failed."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_recovery.core import unsafe
from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.core.unsafe_note import UnsafeNote, parse
from mindspeed_recovery.frameworks.megatron_job import Loop
from mindspeed_recovery.runtimes.standalone import StandaloneRuntime
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)

SOURCE = """
import torch
TRACKER = {"loss": {"values": torch.zeros(2, 3)}}
MASK = torch.ones(4)

def read_tracker():
    tracker = TRACKER
    return tracker["loss"]["values"] + 1

def read_mask():
    mask = MASK
    return apply(mask)

def apply(scores):
    return torch.nn.functional.relu(scores)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(5)
        self.register_buffer("bias", torch.ones(6))
    def forward(self, attribute):
        return getattr(self, attribute) * 2
"""


@pytest.fixture
def module(make_module: Callable[..., Any], memory: UnsafeMemory) -> Any:
    return make_module("toy_unsafe", SOURCE)


def tracked(*names: str) -> Registry:
    return Registry([StateSpec(n.lower(), Location.parse(f"toy_unsafe:{n}"), Policy.RESET) for n in names])


def failure(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except RuntimeError as error:
        return error
    raise AssertionError("nothing was raised")


def notes(call: Callable[[], Any], registry: Registry, memory: UnsafeMemory) -> list[UnsafeNote]:
    error = failure(call)
    unsafe.annotate(error, registry, memory)
    parsed = [parse(text) for text in error.__notes__]
    assert None not in parsed, error.__notes__
    return [note for note in parsed if note]


def test_a_tracked_tensor_is_named_with_state_place_shape_and_line(module, memory):
    memory.mark_unsafe([module.TRACKER["loss"]["values"]])
    (note,) = notes(module.read_tracker, tracked("TRACKER", "MASK"), memory)
    assert (note.state, note.place) == ("tracker", "toy_unsafe:TRACKER['loss']['values']")
    assert (note.shape, note.dtype) == ("(2, 3)", "torch.float32")
    assert (note.file, note.line) == ("<toy_unsafe>", 8)


@pytest.mark.parametrize(
    ("call", "struck", "place", "line"),
    [
        (lambda m, layer: m.read_mask(), lambda m, layer: m.MASK, "toy_unsafe:MASK", 15),
        (lambda m, layer: layer("scale"), lambda m, layer: layer.scale, "toy_unsafe:Layer.scale", 23),
        (lambda m, layer: layer("bias"), lambda m, layer: layer.bias, "toy_unsafe:Layer.bias", 23),
    ],
)
def test_a_tensor_of_nobody_is_named_by_what_holds_it(module, memory, call, struck, place, line):
    layer = module.Layer()
    memory.mark_unsafe([struck(module, layer)])
    (note,) = notes(lambda: call(module, layer), tracked("TRACKER"), memory)
    assert (note.state, note.place, note.file, note.line) == (None, place, "<toy_unsafe>", line)


def test_a_local_variable_is_named_where_nothing_else_holds_the_tensor(module, memory):
    def step() -> None:
        hidden = torch.ones(3)
        memory.mark_unsafe([hidden])
        module.apply(hidden)

    (note,) = notes(step, tracked("TRACKER"), memory)
    assert note.state is None
    assert note.place == "local scores of toy_unsafe:apply"


def test_states_are_named_where_no_frame_shows_a_tensor(module, memory):
    memory.mark_unsafe([module.MASK])
    error = RuntimeError("There is unsafe data in the input tensor.")
    unsafe.annotate(error, tracked("MASK"), memory)
    assert error.__notes__ == ["unsafe tensor: state 'mask' at toy_unsafe:MASK, shape (4,), torch.float32"]


def test_other_errors_get_no_notes_and_none_gets_them_twice(module, memory):
    memory.mark_unsafe([module.MASK])
    other = ValueError("bad shape")
    unsafe.annotate(other, tracked("MASK"), memory)
    assert not hasattr(other, "__notes__")
    error = failure(module.read_mask)
    for _ in range(2):
        unsafe.annotate(error, tracked("MASK"), memory)
    assert len(error.__notes__) == 1


def test_a_failing_device_does_not_replace_the_error(module, memory):
    memory.mark_unsafe([module.MASK])
    error = failure(module.read_mask)

    class Broken:
        def is_unsafe(self, tensor: torch.Tensor) -> bool:
            raise OSError("the device does not answer")

    unsafe.annotate(error, tracked("MASK"), Broken())  # type: ignore[arg-type]
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("cleared", [False, True], ids=["error dropped", "frames cleared"])
def test_a_diagnosed_frame_keeps_no_tensor_alive(module, memory, cleared):
    watched: list[Any] = []

    def step() -> None:
        hidden = torch.ones(3)
        watched.append(weakref.ref(hidden))
        memory.mark_unsafe([hidden])
        module.apply(hidden)

    error: Any = failure(step)
    unsafe.annotate(error, tracked("MASK"), memory)
    assert parse(error.__notes__[0])
    gc.collect()
    assert watched[0]() is not None, "as long as the error holds its frames, the tensor lives"
    if cleared:  # what a runtime does that keeps the error: the frames stay, their variables do not
        traceback.clear_frames(error.__traceback__)
    else:
        del error
    gc.collect()
    assert watched[0]() is None


def test_a_frame_that_goes_on_keeps_no_tensor_alive(module, memory):
    hidden = torch.ones(3)
    watched = weakref.ref(hidden)
    memory.mark_unsafe([hidden])
    found = 0
    try:
        module.apply(hidden)
    except RuntimeError as error:
        unsafe.annotate(error, tracked("MASK"), memory)
        found = len(error.__notes__)
    assert found == 1
    del hidden
    gc.collect()
    assert watched() is None


def test_the_session_explains_by_its_own_states_and_memory(module, memory):
    session = Session(tracked("MASK"), memory=memory)
    session.start()
    try:
        memory.mark_unsafe([module.MASK])
        error: Any = failure(module.read_mask)
        session.explain(error)
        text = "".join(traceback.format_exception(error))
        assert (
            "unsafe tensor: state 'mask' at toy_unsafe:MASK, shape (4,), torch.float32, seen at <toy_unsafe>:15" in text
        )
    finally:
        session.close()


class Listener:
    """A session that notes what it is asked to explain."""

    def __init__(self) -> None:
        self.explained: list[BaseException] = []

    def explain(self, error: BaseException) -> None:
        self.explained.append(error)


def failing() -> None:
    raise RuntimeError("There is unsafe data in the input tensor.")


def test_the_standalone_runtime_lets_the_session_explain_an_error(memory):
    listener = Listener()
    runtime = StandaloneRuntime(
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
        device=memory,
        job=SimpleNamespace(tensors=list, host_state=dict),  # type: ignore[arg-type]
        write_log=lambda step, line: None,
        session=listener,  # type: ignore[arg-type]
        timeout=5,
    )
    with pytest.raises(RuntimeError, match="unsafe data") as caught:
        runtime.run(failing, [])
    assert listener.explained == [caught.value]


def test_the_stock_loop_lets_the_session_explain_what_mindio_is_about_to_catch():
    listener = Listener()
    loop = SimpleNamespace(_runtime=None, _session=listener, _arguments={}, _enter=lambda train, arguments: train())
    arguments = SimpleNamespace(arguments={"opt_param_scheduler": None})
    with pytest.raises(RuntimeError, match="unsafe data") as caught:
        Loop.run(loop, failing, arguments)  # type: ignore[arg-type]
    assert listener.explained == [caught.value]
