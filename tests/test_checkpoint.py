# SPDX-License-Identifier: Apache-2.0
"""Tracked states in a checkpoint: what goes in comes out, and what is no use is named and left alone."""

from __future__ import annotations

import copy
import io
import logging
import random
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mindspeed_recovery.core import checkpoint as checkpoint_module
from mindspeed_recovery.core import notices
from mindspeed_recovery.core.checkpoint import KEY, Loaded
from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.notices import DefaultStore, Notices
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.errors import StateError
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)

STEP = 6


def spec(policy: str = "replicate", location: str = "toy:STATE", name: str = "state", **options: Any) -> StateSpec:
    return StateSpec(name=name, location=Location.parse(location), policy=Policy(policy), source="toy.toml", **options)


@pytest.fixture
def start(memory: UnsafeMemory) -> Iterator[Callable[..., Session]]:
    """``start(*specs, **options)``: a session that is closed when the test ends."""
    sessions: list[Session] = []

    def begin(*specs: StateSpec, **options: Any) -> Session:
        session = Session(Registry(specs), memory=memory, **options)
        sessions.append(session)
        session.start()
        return session

    yield begin
    for session in sessions:
        session.close()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "mindspeed_recovery")
    return lambda: [record.getMessage() for record in caplog.records]


def through_a_file(content: Any) -> Any:
    file = io.BytesIO()
    torch.save({KEY: content}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)[KEY]


def resume(session: Session, content: Any, step: int = STEP, **options: Any) -> None:
    session.resume(step, Loaded(content, **options))


def as_bits(value: Any) -> Any:
    """Equal for values that are equal bit by bit, kinds and layouts included."""
    if isinstance(value, torch.Tensor):
        storage = bytes(value.untyped_storage())
        return type(value), value.dtype, tuple(value.shape), value.stride(), value.requires_grad, storage
    if isinstance(value, dict):
        return type(value), [(key, as_bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [as_bits(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, nn.Module):
        return type(value), as_bits(dict(value.named_buffers())), as_bits(dict(value.named_parameters()))
    if type(value).__name__ == "Ema":
        return type(value), as_bits(vars(value))
    return type(value), value


DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def some(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2, (8, 8)).to(dtype)


def shared() -> dict[str, torch.Tensor]:
    base = torch.rand(6)
    return {"whole": base, "part": base[2:4]}


def buffers() -> nn.Module:
    module = nn.BatchNorm1d(3)
    module(torch.rand(5, 3))
    return module


VALUES: dict[str, Callable[[], Any]] = {
    **{str(dtype).removeprefix("torch."): lambda dtype=dtype: some(dtype) for dtype in DTYPES},  # type: ignore[misc]
    "zero-size": lambda: torch.empty(0, 5),
    "zero-dim": lambda: torch.rand(()),
    "transposed": lambda: torch.rand(3, 4).t(),
    "expanded": lambda: torch.rand(1, 4).expand(3, 4),
    "strided": lambda: torch.rand(12)[1::3],
    "nan": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
    "parameter": lambda: nn.Parameter(torch.rand(3)),
    "dict": lambda: {"a": torch.rand(3), 7: random.random(), "b": None},
    "list": lambda: [torch.rand(2), "text", random.random(), 2**70, True, 1 + random.random() * 1j, b"\0\xff"],
    "nested": lambda: {"layers": [{"ema": (torch.rand(2), [torch.rand(1)])}, OrderedDict(x=torch.rand(2))]},
    "deque": lambda: deque([torch.rand(1), random.random()], maxlen=3),
    "shared": shared,
    "module": buffers,
    "array": lambda: np.random.rand(3, 2),
    "number": random.random,
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("policy", ["replicate", "snapshot"])
def test_what_goes_into_a_checkpoint_comes_out_bit_for_bit(make_module, start, warnings, name, policy):
    module = make_module("toy", STATE=VALUES[name]())
    saved = as_bits(module.STATE)
    session = start(spec(policy))
    content = through_a_file(session.checkpoint.save(STEP))
    session.close()
    module.STATE = VALUES[name]()
    fresh = start(spec(policy))
    if name not in ("zero-size", "nan"):
        assert as_bits(module.STATE) != saved, "there is something to put back"
    resume(fresh, content)
    assert as_bits(module.STATE) == saved
    assert not warnings()


def test_object_comes_back_in_place(make_module, start, warnings):
    module = make_module("toy", "class Ema: pass")
    module.STATE = module.Ema()
    module.STATE.values, module.STATE.steps = torch.rand(3), 6
    saved = as_bits(module.STATE)
    session = start(spec())
    content = through_a_file(session.checkpoint.save(STEP))
    module.STATE.values.zero_()
    module.STATE.steps = 0
    ema, values = module.STATE, module.STATE.values
    resume(session, content)
    assert as_bits(module.STATE) == saved
    assert module.STATE is ema and ema.values is values
    assert not warnings()


def test_generator_goes_on_where_it_was_saved_unless_that_was_switched_off(make_module, start, warnings):
    module = make_module("toy", STATE=torch.Generator().manual_seed(1))
    session = start(spec("snapshot"))
    content = through_a_file(session.checkpoint.save(STEP))
    expected = torch.rand(3, generator=module.STATE)
    other = torch.Generator().manual_seed(5)
    module.STATE.manual_seed(5)
    resume(session, content, generators=False)
    assert torch.equal(torch.rand(3, generator=module.STATE), torch.rand(3, generator=other)), "left alone"
    resume(session, content)
    assert torch.equal(torch.rand(3, generator=module.STATE), expected)
    assert not session.checkpoint.save(STEP, generators=False)["states"]
    assert not warnings()


def test_state_of_the_optimizer_follows_the_optimizer(make_module, start, warnings):
    module = make_module("toy", "class Owner: average = None")
    optimizer, owner = module.Owner(), module.Owner()
    optimizer.inner, owner.average = owner, torch.ones(2)
    session = start(spec(location="toy:Owner.average", on="instances"), roots={"optimizer": optimizer, "model": []})
    content = through_a_file(session.checkpoint.save(STEP))
    owner.average.zero_()
    resume(session, content, without=("optimizer",))
    assert owner.average.tolist() == [0, 0]
    resume(session, content)
    assert owner.average.tolist() == [1, 1]
    assert not session.checkpoint.save(STEP, without=("optimizer",))["states"]
    assert not warnings()


def test_what_the_framework_saves_itself_does_not_ride(make_module, start, warnings):
    module = make_module("toy", STATE=torch.ones(2))
    session = start(spec(checkpoint="framework"))
    assert not session.checkpoint.save(STEP)["states"]
    resume(session, None)
    assert module.STATE.tolist() == [1, 1]
    assert not warnings(), "it is not missed"


def test_only_copied_states_can_be_left_to_the_framework():
    with pytest.raises(StateError, match="checkpoint: only with policy 'replicate' or 'snapshot'"):
        spec("reset", checkpoint="framework")


def test_what_was_saved_does_not_follow_the_live_value(make_module, start):
    module = make_module("toy", STATE={"ema": torch.ones(2), "array": np.ones(2), "list": [1]})
    session = start(spec())
    content = session.checkpoint.save(STEP)  # as an asynchronous save keeps it
    before = copy.deepcopy(content)
    module.STATE["ema"].zero_()
    module.STATE["array"][:] = 0
    module.STATE["list"].append(2)
    assert content["states"]["state"]["value"] == before["states"]["state"]["value"]
    assert all(map(torch.equal, content["states"]["state"]["storages"], before["states"]["state"]["storages"]))


def test_what_is_put_back_does_not_share_memory_with_what_was_loaded(make_module, start):
    module = make_module("toy", STATE={"ema": torch.ones(2)})
    session = start(spec())
    content = through_a_file(session.checkpoint.save(STEP))
    module.STATE.clear()
    resume(session, content)
    module.STATE["ema"].zero_()
    assert any(storage.any() for storage in content["states"]["state"]["storages"])


def test_restored_values_are_not_taken_for_a_copy_of_the_next_step(make_module, start):
    module = make_module("toy", STATE=torch.ones(2))
    session = start(spec())
    content = session.checkpoint.save(STEP)
    resume(session, content)
    module.STATE.fill_(3)  # the script goes on before the first step
    session.begin_step(STEP + 1)
    module.STATE.fill_(4)
    session.stop()
    session.clean()
    session.before_rollback(STEP)
    assert session.after_rollback().exact
    assert module.STATE.tolist() == [3, 3]


# ---- what is no use ------------------------------------------------------------------------------------------------------


def broken(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**content, **changes}


def entry(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return broken(content, states={"state": {**content["states"]["state"], **changes}})


USELESS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no key": (lambda c: None, "holds no tracked states"),
    "not a dict": (lambda c: [c], "is not of this plugin"),
    "no version": (lambda c: {}, "is not of this plugin"),
    "later version": (lambda c: broken(c, version=2), "of version 2, this plugin reads version 1"),
    "another step": (lambda c: broken(c, step=5), "of step 5, training goes on after step 6"),
    "another layout": (lambda c: broken(c, layout="world 8"), "saved with world 8, this job has "),
    "states of a wrong kind": (lambda c: broken(c, states=[1]), r"damaged \(states\)"),
    "alike of a wrong kind": (lambda c: broken(c, alike=None), r"damaged \(alike\)"),
    "rank of a wrong kind": (lambda c: broken(c, rank="0"), r"damaged \(rank\)"),
    "without the state": (lambda c: broken(c, states={}), "it is not in the checkpoint: 'state'"),
    "entry of a wrong kind": (lambda c: broken(c, states={"state": 5}), "'state'"),
    "entry without value": (lambda c: broken(c, states={"state": {}}), "'state'"),
    "no JSON": (lambda c: entry(c, value="{"), "'state'"),
    "JSON of a wrong kind": (lambda c: entry(c, value="[]"), "damaged.*'state'"),
    "deep JSON": (lambda c: entry(c, value="[" * 100_000), "'state'"),
    "truncated storages": (lambda c: entry(c, storages=[]), "damaged: not as many storages"),
    "storages of a wrong kind": (lambda c: entry(c, storages=[5]), "damaged: a storage is not"),
    "short storage": (lambda c: entry(c, storages=[torch.zeros(3, dtype=torch.uint8)]), "damaged: a storage is not"),
    "storage of another dtype": (lambda c: entry(c, storages=[torch.zeros(8)]), "damaged: a storage is not"),
    "storage that is not there": (
        lambda c: entry(c, storages=[torch.zeros(8, dtype=torch.uint8, device="meta")]), "damaged: a storage is not",
    ),
    "class from elsewhere": (
        lambda c: entry(c, value=c["states"]["state"]["value"].replace('["d", "dict"', '["d", "os:environ"')),
        "a class that is not known here",
    ),
    "another place": (
        lambda c: entry(c, value=c["states"]["state"]["value"].replace("toy:STATE", "toy:OTHER")), "no place toy:OTHER",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USELESS)
def test_useless_content_is_one_warning_and_changes_nothing(make_module, start, warnings, name):
    break_it, text = USELESS[name]
    module = make_module("toy", STATE={"ema": torch.ones(2)})
    session = start(spec())
    content = through_a_file(break_it(session.checkpoint.save(STEP))) if "not there" not in name else None
    if content is None:
        content = break_it(session.checkpoint.save(STEP))
    module.STATE["ema"].fill_(7)
    resume(session, content)
    assert module.STATE["ema"].tolist() == [7, 7]
    (warning,) = warnings()
    assert re.search(text, warning)
    assert "'state'" in warning


def test_tensor_of_another_shape_is_named_and_the_others_are_put_back(make_module, start, warnings):
    module = make_module("toy", STATE={"ema": torch.ones(2)}, OTHER=torch.ones(3))
    specs = spec(), spec(location="toy:OTHER", name="other")
    session = start(*specs)
    content = session.checkpoint.save(STEP)
    session.close()
    module.STATE = {"ema": torch.zeros(4)}
    module.OTHER.zero_()
    session = start(*specs)
    resume(session, content)
    assert module.STATE["ema"].tolist() == [0] * 4
    assert module.OTHER.tolist() == [1] * 3
    (warning,) = warnings()
    assert (
        "toy:STATE['ema']: torch.float32 of shape (2,) in the checkpoint, torch.float32 of shape (4,) here" in warning
    )
    assert "other" not in warning


def test_all_problems_are_one_warning(make_module, start, warnings):
    make_module("toy", STATE=torch.ones(1), OTHER=torch.ones(1), ABSENT=None)
    session = start(spec(), spec("snapshot", "toy:OTHER", "other"), spec(location="toy:ABSENT", name="absent"))
    resume(session, None)
    (warning,) = warnings()
    assert warning.endswith("(was it saved without the plugin?): 'other', 'state'")


@pytest.mark.parametrize("options", [{"strict": True}, {"on_missing": "error"}])
def test_missing_states_are_an_error_where_that_was_asked_for(make_module, start, options):
    make_module("toy", STATE=torch.ones(1))
    strict = options.pop("strict", False)
    session = start(spec(**options), strict=strict)
    with pytest.raises(StateError, match=r"it would have: the checkpoint holds no tracked states.*'state'"):
        resume(session, None)
    content = session.checkpoint.save(STEP)
    resume(session, content)


def test_state_that_cannot_be_saved_is_named_once_and_the_others_are_saved(make_module, start, warnings):
    make_module("toy", STATE={"function": print}, OTHER=torch.ones(1))
    session = start(spec(), spec(location="toy:OTHER", name="other"))
    for step in (1, 2):
        assert list(session.checkpoint.save(step)["states"]) == ["other"]
    (warning,) = warnings()
    assert "state 'state' is not in the checkpoint of step 1: toy:STATE['function']" in warning


def test_fault_of_the_device_while_saving_reaches_the_runtime(make_module, start, memory):
    module = make_module("toy", STATE=torch.ones(2))
    session = start(spec(), is_fault=lambda error: True)
    memory.mark_unsafe([module.STATE])
    with pytest.raises(RuntimeError, match="unsafe"):
        session.checkpoint.save(STEP)


# ---- whose it is -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``as_rank(n)``: what follows happens on rank n, with one store for all."""
    store = torch.distributed.HashStore()
    now = [0]
    monkeypatch.setattr(checkpoint_module, "_rank", lambda: now[0])
    place = Notices.__init__.__defaults__
    monkeypatch.setattr(Notices.__init__, "__defaults__", (lambda: DefaultStore(store, now[0], 3),))
    assert place == (notices.default_store,)

    def become(rank: int) -> None:
        now[0] = rank

    return become


def test_ranks_own_state_goes_only_to_ranks_whose_value_was_the_same(make_module, start, warnings, as_rank):
    module = make_module("toy", STATE=torch.ones(1), OTHER=torch.ones(1))
    specs = spec("snapshot"), spec(location="toy:OTHER", name="other")
    session = start(*specs)
    for rank, value in ((1, 5.0), (2, 1.0)):
        as_rank(rank)
        module.STATE.fill_(value)
        session.checkpoint.announce(STEP)
    as_rank(0)
    content = through_a_file(session.checkpoint.save(STEP, peers=[1, 2]))
    assert content["alike"] == {"state": [2]}
    taken = {}
    for rank in range(3):
        as_rank(rank)
        module.STATE.zero_()
        module.OTHER.zero_()
        resume(session, content)
        taken[rank] = (module.STATE.item(), module.OTHER.item())
    assert taken == {0: (1, 1), 1: (0, 1), 2: (1, 1)}
    (warning,) = warnings()
    assert "it is a rank's own, and the checkpoint has that of rank 0: 'state'" in warning


def test_peer_that_says_nothing_of_this_step_is_not_waited_for_long(make_module, start, as_rank, monkeypatch):
    make_module("toy", STATE=torch.ones(1))
    monkeypatch.setattr(checkpoint_module, "PEER_SECONDS", 0.2)
    session = start(spec("snapshot"))
    as_rank(1)
    session.checkpoint.announce(STEP - 1)
    as_rank(0)
    assert session.checkpoint.save(STEP, peers=[1, 2])["alike"] == {"state": []}


# ---- after a fault ---------------------------------------------------------------------------------------------------------


def fall_back(session: Session, content: Any, step: int = STEP) -> Any:
    session.stop()
    session.clean()
    session.checkpoint.loaded = Loaded(content)
    session.before_rollback(step, from_checkpoint=True)
    return session.after_rollback()


def test_fault_without_a_live_source_is_recovered_from_the_checkpoint(make_module, start, memory):
    module = make_module("toy", STATE={"ema": torch.ones(2)})
    session = start(spec(settled="after-update"))
    session.begin_step(STEP + 1)
    content = through_a_file(session.checkpoint.save(STEP))
    for step in (STEP + 1, STEP + 2):
        session.begin_step(step)
        module.STATE["ema"].add_(1)
    memory.mark_unsafe([module.STATE["ema"]])
    report = fall_back(session, content)
    assert report.exact
    assert report.outcomes["state"].source == "checkpoint"
    assert module.STATE["ema"].tolist() == [1, 1]
    # The copy serves the next fault, too.
    session.begin_step(STEP + 1)
    module.STATE["ema"].add_(1)
    session.stop()
    session.clean()
    session.before_rollback(STEP)
    assert session.after_rollback().exact
    assert module.STATE["ema"].tolist() == [1, 1]


@pytest.mark.parametrize("content", [None, {"version": 1}])
def test_fallback_without_the_states_is_not_exact_and_says_so(make_module, start, content):
    module = make_module("toy", STATE={"ema": torch.ones(2)})
    session = start(spec())
    session.begin_step(STEP + 2)
    module.STATE["ema"].fill_(5)
    report = fall_back(session, content)
    (failure,) = report.failures
    assert "tried start(7), update(6), checkpoint (" in failure
    assert module.STATE["ema"].tolist() == [5, 5]


def test_generator_is_put_right_once_more_after_the_rollback(make_module, start):
    module = make_module("toy", STATE=torch.Generator().manual_seed(1))
    session = start(spec("snapshot"))
    content = session.checkpoint.save(STEP)
    expected = torch.rand(3, generator=module.STATE)
    session.stop()
    session.clean()
    session.checkpoint.loaded = Loaded(content)
    session.before_rollback(STEP, from_checkpoint=True)
    torch.rand(3, generator=module.STATE)
    assert session.after_rollback().exact
    assert torch.equal(torch.rand(3, generator=module.STATE), expected)


def stop_for_last_words(session: Session) -> None:
    session.stop()
    session.clean()
    session.before_save()


def test_last_words_hold_the_copy_of_their_step_and_never_a_live_value_that_is_further(
    make_module, start, memory, warnings
):
    module = make_module("toy", STATE=torch.ones(2), LATE=torch.ones(2))
    session = start(spec(), spec(location="toy:LATE", name="late", settled="after-update"))
    session.begin_step(STEP)
    session.before_update(STEP)
    module.LATE.add_(1)  # after the update, whose copy does not have it
    module.STATE.add_(1)  # of the aborted step
    memory.mark_unsafe([module.STATE, module.LATE])
    stop_for_last_words(session)
    content = through_a_file(session.checkpoint.save(STEP))
    assert list(content["states"]) == ["state"]
    (warning,) = warnings()
    assert f"'late' is not in the checkpoint of step {STEP}: no copy of the end of step {STEP} (unsafe)" in warning
    (storage,) = content["states"]["state"]["storages"]
    assert storage.view(torch.float32).tolist() == [1, 1]


def test_last_words_never_fail_because_of_the_states(make_module, start, memory, warnings):
    module = make_module("toy", STATE=torch.ones(2))
    session = start(spec(), is_fault=lambda error: True)
    memory.mark_unsafe([module.STATE])
    stop_for_last_words(session)
    assert not session.checkpoint.save(STEP)["states"]
    assert len(warnings()) == 1
