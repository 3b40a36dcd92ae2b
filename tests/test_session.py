# SPDX-License-Identifier: Apache-2.0
"""All phases of a recovery, with toy modules on simulated device memory."""

import contextlib
import functools
import gc
import logging
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mindspeed_recovery.core import session as session_module
from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.report import Report
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.errors import LocationError, QuarantineError, RecoveryFailed, StateError
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)


def spec(location: str, policy: str, name: str = "state", **options: Any) -> StateSpec:
    if "clear" in options:
        options["clear"] = Location.parse(options["clear"])
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


def recover(
    session: Session,
    step: int,
    *,
    replay: bool = False,
    from_checkpoint: bool = False,
    between: Callable[[], Any] = lambda: None,
) -> Report:
    session.stop()
    session.clean()
    session.before_rollback(step, replay=replay, from_checkpoint=from_checkpoint)
    between()
    return session.after_rollback()


def action(report: Report, name: str = "state") -> str:
    return report.outcomes[name].action


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "mindspeed_recovery")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---------------------------------------------------------------- reset


def test_unsafe_tracker_is_zeros_in_the_same_tensors_and_the_same_dict(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    values = torch.ones(4)
    module = make_module("toy", TRACKER={"aux": {"values": values, "group": "dp"}})
    importer = make_module("toy_importer", ALIAS=module.TRACKER)
    session = start(spec("toy:TRACKER", "reset", quarantine=True))
    tracker = module.TRACKER
    memory.mark_unsafe([values])
    report = recover(session, 1)
    assert report.exact
    assert action(report) == "reset"
    assert module.TRACKER is tracker is importer.ALIAS
    assert tracker["aux"]["values"] is values
    assert values.tolist() == [0, 0, 0, 0]
    assert tracker["aux"]["group"] == "dp"
    assert memory.unsafe_count() == 0
    values += 1


@pytest.mark.parametrize(
    ("value", "to", "expected"),
    [
        (lambda: torch.ones(2), "zeros", [0, 0]),
        (lambda: torch.ones(2), "none", None),
        (lambda: [torch.ones(2)], "none", None),
        (lambda: [], "none", []),
        (lambda: [1, 2], "empty", []),
        (lambda: {"a": 1}, "empty", {}),
        (lambda: deque([1]), "empty", deque()),
        (lambda: {1}, "empty", set()),
        (lambda: True, False, False),
        (lambda: 5, 0, 0),
        (lambda: 0.5, 1.0, 1.0),
        (lambda: 5, "zeros", 0),
        (lambda: None, "zeros", None),
    ],
)
def test_reset_leaves_what_the_declaration_says(
    make_module: Callable[..., Any], start: Callable[..., Session], value: Any, to: Any, expected: Any
) -> None:
    module = make_module("toy", STATE=value())
    before = module.STATE
    report = recover(start(spec("toy:STATE", "reset", to=to)), 1)
    assert report.exact
    after = module.STATE.tolist() if isinstance(module.STATE, torch.Tensor) else module.STATE
    assert after == expected
    assert type(after) is type(expected)
    assert module.STATE is before or to not in ("zeros", "empty") or isinstance(before, int)


def test_queue_is_emptied_in_place_with_its_lock(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    import queue

    module = make_module("toy", QUEUE=queue.Queue())
    module.QUEUE.put(1)
    waiting = module.QUEUE
    assert recover(start(spec("toy:QUEUE", "reset", to="empty", quarantine=True)), 1).exact
    assert module.QUEUE is waiting
    assert module.QUEUE.empty()


def test_emptying_something_that_is_no_container_is_reported(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    make_module("toy", STATE=torch.ones(1))
    report = recover(start(spec("toy:STATE", "reset", to="empty")), 1)
    assert report.failures == ["state: StateError: toy:STATE: to = 'empty' needs a container, found a Tensor"]


@pytest.mark.parametrize("fields", [(), ("values",)])
@pytest.mark.parametrize("size", [1, 3])
def test_clear_of_the_framework_is_called_when_the_tensors_are_zeros(
    make_module: Callable[..., Any],
    start: Callable[..., Session],
    memory: UnsafeMemory,
    fields: tuple[str, ...],
    size: int,
) -> None:
    module = make_module(
        "toy",
        "def clear():\n    SEEN.append(float(TRACKER['values'].sum()))\n    TRACKER['group'] = None\n",
        TRACKER={"values": torch.ones(size), "group": "dp"},
        SEEN=[],
    )
    session = start(spec("toy:TRACKER", "reset", quarantine=True, clear="toy:clear", fields=fields))
    memory.mark_unsafe([module.TRACKER["values"]])
    report = recover(session, 1)
    assert report.failures == []
    assert module.SEEN
    assert set(module.SEEN) == {0.0}
    assert module.TRACKER["group"] is None


def test_clear_is_not_called_where_there_is_nothing_to_clear(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    make_module("toy", "def clear():\n    TRACKER['values'].zero_()\n", TRACKER={})
    assert recover(start(spec("toy:TRACKER", "reset", quarantine=True, clear="toy:clear")), 1).exact


def test_fields_of_a_dict_leave_the_rest_alone(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module("toy", TRACKER={"sum": torch.ones(2), "total": torch.ones(2)})
    session = start(spec("toy:TRACKER", "reset", quarantine=True, fields=("sum", "not made yet")))
    memory.mark_unsafe([module.TRACKER["sum"]])
    assert recover(session, 1).exact
    assert module.TRACKER["sum"].tolist() == [0, 0]
    assert module.TRACKER["total"].tolist() == [1, 1]
    assert "not made yet" not in module.TRACKER


def test_fields_of_an_object_leave_the_rest_alone(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", "class Manager:\n    pass\n")
    module.MANAGER = module.Manager()
    module.MANAGER.queue, module.MANAGER.config = [1], [2]
    assert recover(start(spec("toy:MANAGER", "reset", to="empty", fields=("queue",))), 1).exact
    assert (module.MANAGER.queue, module.MANAGER.config) == ([], [2])


def test_absent_field_of_an_object_is_an_error_at_start(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    make_module("toy", "class Manager:\n    pass\nMANAGER = Manager()\n")
    with pytest.raises(LocationError, match=r"state 'state' \(toy.toml\): .*has no attribute 'queue'"):
        start(spec("toy:MANAGER", "reset", to="empty", fields=("queue",)))


def test_part_of_a_larger_storage_that_is_safe_leaves_the_rest_alone(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    storage = torch.ones(6)
    make_module("toy", STATE={"a": storage[2:4]})
    recover(start(spec("toy:STATE", "reset")), 1)
    assert storage.tolist() == [1, 1, 0, 0, 1, 1]


# ---------------------------------------------------------------- drop


def test_cached_function_is_cleared(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module(
        "toy",
        "import functools, torch\n@functools.lru_cache\ndef mask(size):\n    return torch.ones(size)\n"
        "def outer(*args):\n    return mask(*args)\nouter.__wrapped__ = mask\n",
    )
    old = module.mask(3)
    memory.mark_unsafe([old])
    session = start(spec("toy:mask", "drop"), spec("toy:outer", "drop", name="wrapped"))
    function = module.mask
    assert recover(session, 1).exact
    assert module.mask is function
    assert module.mask(3).tolist() == [1, 1, 1]


def test_cached_method_is_cleared(make_module: Callable[..., Any], start: Callable[..., Session]) -> None:
    module = make_module(
        "toy", "import functools\nclass Rope:\n    @functools.cache\n    def table(self):\n        return object()\n"
    )
    rope = module.Rope()
    first = rope.table()
    assert recover(start(spec("toy:Rope.table", "drop")), 1).exact
    assert rope.table() is not first


@pytest.mark.parametrize("value", [{"a": 1}, [1], {1}, deque([1])], ids=lambda value: type(value).__name__)
def test_cache_in_a_container_is_emptied_in_place(
    make_module: Callable[..., Any], start: Callable[..., Session], value: Any
) -> None:
    module = make_module("toy", CACHE=value)
    assert recover(start(spec("toy:CACHE", "drop")), 1).exact
    assert module.CACHE is value
    assert len(value) == 0


def test_cached_tensor_becomes_none(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module("toy", MASK=torch.ones(2))
    session = start(spec("toy:MASK", "drop"))
    memory.mark_unsafe([module.MASK])
    assert recover(session, 1).exact
    assert module.MASK is None


def test_dropped_item_leaves_its_dict(make_module: Callable[..., Any], start: Callable[..., Session]) -> None:
    module = make_module("toy", CACHE={"mask": torch.ones(2), "size": 2})
    assert recover(start(spec("toy:CACHE", "drop", fields=("mask",))), 1).exact
    assert module.CACHE == {"size": 2}


def test_function_without_a_cache_is_never_taken_away(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", "def mask():\n    return 1\n")
    with contextlib.suppress(StateError, LocationError):  # refused at start: as good
        recover(start(spec("toy:mask", "drop")), 1)
    assert module.mask() == 1


def test_attribute_of_instances_is_dropped_on_each(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", "class Layer:\n    def __init__(self):\n        self.mask = [1]\n")
    layers = [module.Layer(), module.Layer()]
    session = start(spec("toy:Layer.mask", "drop", on="instances"), roots={"model": layers})
    assert session.registry.describe(session.registry["state"])["places"] == 2
    assert recover(session, 1).exact
    assert [layer.mask for layer in layers] == [[], []]


# ---------------------------------------------------------------- constant


def test_constant_is_written_back_in_place(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    frequency = torch.arange(4.0)
    module = make_module("toy", FREQUENCY=frequency)
    session = start(spec("toy:FREQUENCY", "constant"))
    for step in (1, 2):
        memory.mark_unsafe([frequency])
        report = recover(session, step)
        assert report.exact
        assert action(report) == "rewritten"
        assert module.FREQUENCY is frequency
        assert frequency.tolist() == [0, 1, 2, 3]


def test_constant_that_changed_before_the_first_step_is_taken_again_with_a_warning(
    make_module: Callable[..., Any], start: Callable[..., Session], warnings: Callable[[], list[str]]
) -> None:
    module = make_module("toy", SCALE=torch.ones(1))
    session = start(spec("toy:SCALE", "constant"))
    module.SCALE.fill_(2)
    session.begin_step(1)
    assert [text for text in warnings() if "changed after adoption" in text]
    module.SCALE.fill_(3)
    session.before_update(1)  # too late to be taken for the constant's true value
    recover(session, 0)
    assert module.SCALE.tolist() == [2]


def test_constant_made_later_is_adopted_by_the_next_commit(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module("toy", SCALE=None)
    session = start(spec("toy:SCALE", "constant"))
    session.begin_step(1)
    module.SCALE = torch.ones(1)
    session.before_update(1)
    memory.mark_unsafe([module.SCALE])
    assert recover(session, 1).exact
    assert module.SCALE.tolist() == [1]


# ---------------------------------------------------------------- replicate, snapshot


@pytest.mark.parametrize("policy", ["replicate", "snapshot"])
def test_copied_state_goes_back_to_either_step(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory, policy: str
) -> None:
    bias = torch.zeros(2)
    make_module("toy", BIAS=bias)
    session = start(spec("toy:BIAS", policy))
    session.begin_step(1)
    bias += 1
    session.before_update(1)
    bias += 10
    memory.mark_unsafe([bias])
    report = recover(session, 1)
    assert (report.exact, report.outcomes["state"].source, bias.tolist()) == (True, "update(1)", [1, 1])
    session.begin_step(2)
    bias += 1
    memory.mark_unsafe([bias])
    report = recover(session, 1)
    assert (report.exact, report.outcomes["state"].source, bias.tolist()) == (True, "start(2)", [1, 1])


def test_instances_are_found_in_a_repair_though_trackers_are_in_quarantine(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module(
        "toy", "class Router:\n    def __init__(self, bias):\n        self.bias = bias", TRACKER={"aux": 1}
    )
    router = module.Router(torch.ones(2))
    session = start(
        spec("toy:TRACKER", "reset", "tracker", quarantine=True),
        spec("toy:Router.bias", "replicate", "bias", on="instances"),
        roots={"model": [router]},
    )
    session.begin_step(1)
    session.stop()
    session.clean()
    session.after_repair(types.SimpleNamespace(step=0, rank=0, pairs=()), None)
    session.before_rollback(0)
    assert session.after_rollback().exact


def test_state_on_instances_is_put_back_on_each(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module(
        "toy",
        "import torch\nclass Router(torch.nn.Module):\n    def __init__(self, value):\n        super().__init__()\n"
        "        self.register_buffer('bias', torch.full((2,), value))\n",
    )
    model = torch.nn.ModuleList([module.Router(1.0), torch.nn.Sequential(module.Router(2.0))])
    optimizer = {("key", "tuple"): module.Router(3.0), ("other", "tuple"): module.Router(4.0)}
    session = start(
        spec("toy:Router.bias", "replicate", on="instances"), roots={"model": [model], "optimizer": optimizer}
    )
    routers = [router for router in (*model.modules(), *optimizer.values()) if isinstance(router, module.Router)]
    session.begin_step(1)
    for router in routers:
        router.bias += 5
    memory.mark_unsafe([router.bias for router in routers])
    assert recover(session, 0).exact
    assert [router.bias.tolist() for router in routers] == [[1, 1], [2, 2], [3, 3], [4, 4]]


SHARED = """
class Layer:
    def __init__(self, table):
        self.table = table
"""


@pytest.mark.parametrize("policy", ["replicate", "constant"])
def test_tensor_shared_by_two_instances_is_still_one(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory, policy: str
) -> None:
    module = make_module("toy", SHARED)
    table = torch.ones(4)
    first, second, part = module.Layer(table), module.Layer(table), module.Layer(table[1:3])
    session = start(spec("toy:Layer.table", policy, on="instances"), roots={"model": [first, second, part]})
    session.begin_step(1)
    memory.mark_unsafe([table])
    assert recover(session, 0).exact
    assert first.table is second.table is table
    assert part.table.untyped_storage().data_ptr() == table.data_ptr()
    assert table.tolist() == [1, 1, 1, 1]


def test_random_numbers_of_the_step_come_again_also_if_the_rollback_drew_some(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    generator = torch.Generator().manual_seed(1)
    make_module("toy", STATES={"model": generator})
    session = start(spec("toy:STATES", "snapshot"))

    def draw() -> float:
        return float(torch.rand((), generator=generator))

    session.begin_step(1)
    first = draw()
    assert recover(session, 0, between=draw).exact
    assert draw() == first


def test_random_numbers_that_a_checkpoint_has_put_right_come_also_if_the_rollback_drew_some(
    start: Callable[..., Session],
) -> None:
    session = start(spec("torch:default_generator", "snapshot", checkpoint="framework"))
    for step in (1, 2, 3):
        session.begin_step(step)
        torch.rand(3)
    loaded = torch.get_rng_state()
    expected = torch.rand(5)
    torch.set_rng_state(loaded)
    report = recover(session, 1, from_checkpoint=True, between=lambda: torch.rand(7))
    assert (report.exact, action(report)) == (True, "loaded")
    assert torch.equal(torch.rand(5), expected)


def test_what_no_checkpoint_holds_is_begun_anew_where_it_is_unsafe(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    counts = {"hit": torch.ones(2), "well": torch.ones(2)}
    module = make_module("toy", TRACKER=dict(counts))
    session = start(
        *(spec("toy:TRACKER", "snapshot", name, fields=(name,), settled="after-logging") for name in counts)
    )
    session.begin_step(1)
    memory.mark_unsafe([module.TRACKER["hit"]])
    report = recover(session, 1, from_checkpoint=True)
    assert list(module.TRACKER) == ["well"]
    assert action(report, "hit") == "begun anew"
    assert not report.unsafe
    unsafe, left = report.failures
    assert "no copy of the end of step 1 (unsafe)" in unsafe
    assert "no copy of the end of step 1 (left as it is)" in left


def test_item_that_the_aborted_step_made_goes_and_one_that_it_removed_comes_back(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", COUNTS={"seen": torch.ones(1)})
    session = start(spec("toy:COUNTS", "snapshot", fields=("seen", "late")))
    session.begin_step(1)
    module.COUNTS["late"] = torch.ones(1)
    del module.COUNTS["seen"]
    assert recover(session, 0).exact
    assert list(module.COUNTS) == ["seen"]
    assert module.COUNTS["seen"].tolist() == [1]


def test_value_that_the_aborted_step_set_to_none_comes_back(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", LAST=torch.ones(2))
    session = start(spec("toy:LAST", "snapshot"))
    session.begin_step(1)
    module.LAST = None
    assert recover(session, 0).exact
    assert module.LAST.tolist() == [1, 1]


def test_state_that_has_not_been_made_is_no_failure(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    make_module("toy", LAST=None)
    session = start(spec("toy:LAST", "snapshot"), spec("toy_not_loaded:X", "replicate", name="other"))
    session.begin_step(1)
    report = recover(session, 0)
    assert report.exact


def test_ema_changed_after_the_update_is_served_by_the_next_start_only(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    ema = torch.zeros(1)
    make_module("toy", EMA=ema)
    session = start(spec("toy:EMA", "replicate", settled="after-update"))
    session.begin_step(1)
    session.before_update(1)
    ema += 1
    memory.mark_unsafe([ema])
    report = recover(session, 1)
    assert not report.exact
    assert "tried start(2), update(1)" in report.failures[0]


def test_count_that_changes_with_the_log_line_is_put_back_from_after_it(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    total = torch.zeros(1)
    make_module("toy", TOTAL=total)
    session = start(spec("toy:TOTAL", "snapshot", settled="after-logging"))
    session.begin_step(1)
    session.before_update(1)
    total += 1
    session.after_log(1)
    total += 100
    assert recover(session, 1).exact
    assert total.tolist() == [1]


def test_count_that_changes_with_the_log_line_is_counted_once_when_the_line_is_replayed(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    total = torch.zeros(1)
    make_module("toy", TOTAL=total)
    session = start(spec("toy:TOTAL", "snapshot", settled="after-logging"))

    def log() -> None:
        nonlocal total
        total += 1

    session.begin_step(1)
    session.before_update(1)
    log()
    session.after_log(1)  # this rank had logged, another had not
    assert recover(session, 1, replay=True, between=log).exact
    assert total.tolist() == [1]


def test_missing_copy_is_reported_with_what_was_tried_and_the_value_stays(
    make_module: Callable[..., Any], start: Callable[..., Session], warnings: Callable[[], list[str]]
) -> None:
    module = make_module("toy", BIAS=torch.ones(1))
    report = recover(start(spec("toy:BIAS", "replicate")), 7)
    assert report.failures == ["state: no copy of the end of step 7 (left as it is); tried start(8), update(7)"]
    assert not report.exact
    assert "NOT exact" in report.summary()
    assert module.BIAS.tolist() == [1]
    assert any("step 7 is not exact: state: no copy" in text for text in warnings())


def test_missing_copy_of_a_state_that_training_needs_fails_the_recovery(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    make_module("toy", BIAS=torch.ones(1))
    session = start(spec("toy:BIAS", "replicate", on_missing="error"))
    session.stop()
    session.clean()
    session.before_rollback(7)
    with pytest.raises(RecoveryFailed, match=r"^FORCE STOP: .*no copy of the end of step 7"):
        session.after_rollback()


@pytest.mark.parametrize("policy", ["reset", "replicate"])
def test_rank_interrupted_while_taking_update_of_the_step_keeps_its_live_values(
    make_module: Callable[..., Any], start: Callable[..., Session], policy: str
) -> None:
    module = make_module("toy", FIRST=torch.ones(1), TRACKER={"sum": torch.full((1,), 3.0)})
    options: dict[str, Any] = {"quarantine": True, "replay": True} if policy == "reset" else {}
    session = start(spec("toy:FIRST", "snapshot", name="first"), spec("toy:TRACKER", policy, **options))
    session.begin_step(1)
    module.FIRST.fill_(2)
    module.TRACKER["sum"].fill_(4)
    session.copies.update.begin = functools.partial(_stop_first, session, session.copies.update.begin)  # type: ignore
    session.before_update(1)
    seen: list[Any] = []
    report = recover(session, 1, replay=True, between=lambda: seen.append(module.TRACKER["sum"].tolist()))
    assert report.exact, report.failures
    assert action(report) == "kept"
    assert seen == [[4]]
    assert module.FIRST.tolist() == [2]


def _stop_first(session: Session, begin: Callable[[int], None], step: int) -> None:
    begin(step)
    session.stop()


def test_state_above_the_size_limit_is_copied_only_if_declared_large(
    make_module: Callable[..., Any],
    start: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
) -> None:
    monkeypatch.setattr(session_module, "LARGE_BYTES", 100)
    module = make_module("toy", A=torch.ones(50), B=torch.ones(50), C=torch.ones(50), LATE=None)
    session = start(
        spec("toy:A", "replicate", name="a"),
        spec("toy:B", "replicate", name="b", large=True),
        spec("toy:C", "constant", name="c"),
        spec("toy:LATE", "snapshot", name="late"),
    )
    module.LATE = torch.ones(50)
    session.begin_step(1)
    session.before_update(1)
    assert session.copies.nbytes == 400  # b, twice
    texts = warnings()
    assert len(texts) == 3
    assert all("large = true" in text for text in texts)
    module.A.fill_(2)
    report = recover(session, 0)
    assert [line.split(":")[0] for line in report.failures] == ["a", "late"] or "c" in str(report.failures)
    assert "large = true" in report.outcomes["a"].error


# ---------------------------------------------------------------- replay


def test_replay_has_the_sums_of_before_logging_and_afterwards_they_are_gone(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module(
        "toy", "def clear():\n    TRACKER['group'] = None\n", TRACKER={"sum": torch.zeros(2), "group": None}
    )
    session = start(spec("toy:TRACKER", "reset", quarantine=True, replay=True, clear="toy:clear"))
    session.begin_step(3)
    module.TRACKER["sum"] += 8
    module.TRACKER["group"] = "dp"
    session.before_update(3)
    module.TRACKER["sum"] /= 2  # logging reduces in place
    memory.mark_unsafe([module.TRACKER["sum"]])
    logged: list[Any] = []
    report = recover(
        session,
        3,
        replay=True,
        between=lambda: logged.append((module.TRACKER["sum"].tolist(), module.TRACKER["group"])),
    )
    assert report.exact
    assert (action(report), report.outcomes["state"].source) == ("replayed", "update(3)")
    assert logged == [([8, 8], "dp")]
    assert module.TRACKER["sum"].tolist() == [0, 0]
    assert module.TRACKER["group"] is None


def test_without_replay_the_tracker_is_reset_before_the_rollback_too(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", TRACKER={"sum": torch.ones(1)})
    session = start(spec("toy:TRACKER", "reset", quarantine=True, replay=True))
    session.begin_step(3)
    session.before_update(3)
    seen: list[Any] = []
    recover(session, 3, between=lambda: seen.append(module.TRACKER["sum"].tolist()))
    assert seen == [[0]]


def test_replay_without_the_sums_is_not_exact(make_module: Callable[..., Any], start: Callable[..., Session]) -> None:
    make_module("toy", TRACKER={"sum": torch.ones(1)})
    report = recover(start(spec("toy:TRACKER", "reset", quarantine=True, replay=True)), 3, replay=True)
    assert not report.exact


# ---------------------------------------------------------------- several states, several recoveries


def test_one_failing_state_stops_no_other_and_all_failures_are_named(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    source = "def clear():\n    raise ValueError('broken clear')\n"
    module = make_module(
        "toy", source, A={"a": torch.ones(1)}, B=torch.ones(1), C={"c": torch.ones(1)}, D=torch.ones(1)
    )
    session = start(
        spec("toy:A", "reset", name="a", quarantine=True, clear="toy:clear"),
        spec("toy:B", "reset", name="b", to="empty"),
        spec("toy:C", "reset", name="c", quarantine=True),
        spec("toy:D", "constant", name="d"),
    )
    memory.mark_unsafe([module.A["a"], module.C["c"], module.D])
    report = recover(session, 1)
    assert [line.split(":")[0] for line in report.failures] == ["a", "b"]
    assert "ValueError: broken clear" in report.failures[0]
    assert (module.C["c"].tolist(), module.D.tolist(), module.A["a"].tolist()) == ([0], [1], [0])


def test_strict_recovery_that_is_not_exact_fails_with_every_state(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    make_module("toy", A=torch.ones(1), B=torch.ones(1))
    session = start(spec("toy:A", "replicate", name="a"), spec("toy:B", "snapshot", name="b"), strict=True)
    session.stop()
    session.clean()
    session.before_rollback(4)
    with pytest.raises(RecoveryFailed) as caught:
        session.after_rollback()
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value).startswith("FORCE STOP: the recovery is not exact: a: no copy")
    assert "b: no copy" in str(caught.value)


def test_strict_recovery_that_is_exact_does_not_fail(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    make_module("toy", A={})
    assert recover(start(spec("toy:A", "reset", quarantine=True), strict=True), 1).exact


def test_tensor_that_stays_unsafe_is_reported(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module("toy", BIAS=[torch.ones(1)])
    session = start(spec("toy:BIAS", "replicate"))
    memory.mark_unsafe(module.BIAS)
    report = recover(session, 1)
    assert "toy:BIAS[0]: still unsafe after rollback" in report.failures


def test_two_states_in_one_container_are_both_reset_and_it_works_again(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    tracker = {"a": torch.ones(1), "b": torch.ones(1)}
    module = make_module("toy", TRACKER=tracker, ALIAS=tracker)
    session = start(
        spec("toy:TRACKER", "reset", name="a", quarantine=True, fields=("a",)),
        spec("toy:ALIAS", "reset", name="b", quarantine=True, fields=("b",)),
    )
    memory.mark_unsafe(tracker.values())
    session.stop()
    session.clean()
    with pytest.raises(QuarantineError):
        module.ALIAS["a"]
    session.before_rollback(1)
    assert session.after_rollback().exact
    assert {key: value.tolist() for key, value in module.TRACKER.items()} == {"a": [0], "b": [0]}


def test_second_recovery_in_one_process(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module("toy", TRACKER={"sum": torch.zeros(1)}, COUNT=torch.zeros(1))
    session = start(spec("toy:TRACKER", "reset", quarantine=True), spec("toy:COUNT", "snapshot", name="count"))
    for number in (1, 2, 3):
        session.begin_step(2)
        module.TRACKER["sum"] += 1
        module.COUNT += 1
        memory.mark_unsafe([module.TRACKER["sum"], module.COUNT])
        report = recover(session, 1)
        assert (report.number, report.exact) == (number, True)
        assert (module.TRACKER["sum"].tolist(), module.COUNT.tolist()) == ([0], [0])
    assert len(session.reports) == 3


def test_fault_during_a_recovery_begins_it_anew(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module("toy", TRACKER={"sum": torch.ones(1)}, COUNT=torch.zeros(1))
    session = start(spec("toy:TRACKER", "reset", quarantine=True), spec("toy:COUNT", "snapshot", name="count"))
    session.begin_step(2)
    for phases in (1, 2):
        session.stop()
        session.clean()
        if phases == 2:
            session.before_rollback(1)
        memory.mark_unsafe([module.COUNT])
    report = recover(session, 1)
    assert report.exact
    assert module.TRACKER["sum"].tolist() == [0]
    assert module.COUNT.tolist() == [0]


def test_framework_that_rebinds_its_tracker_is_followed(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", TRACKER={})
    session = start(spec("toy:TRACKER", "reset", quarantine=True))
    module.TRACKER = {"sum": torch.ones(1)}
    session.stop()
    session.clean()
    with pytest.raises(QuarantineError):
        module.TRACKER["sum"]
    session.before_rollback(1)
    assert session.after_rollback().exact
    assert module.TRACKER["sum"].tolist() == [0]


def test_state_made_later_is_adopted_by_the_next_commit(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", TRACKER=None)
    importer = make_module("toy_importer", ALIAS=None)
    session = start(spec("toy:TRACKER", "reset", quarantine=True))
    module.TRACKER = importer.ALIAS = {"sum": torch.ones(1)}
    session.begin_step(1)
    assert importer.ALIAS is module.TRACKER
    session.stop()
    session.clean()
    with pytest.raises(QuarantineError):
        importer.ALIAS["sum"]
    session.before_rollback(0)
    session.after_rollback()


def test_ten_recoveries_keep_no_old_tensor_alive(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module("toy", TRACKER={}, CACHE=None, COUNT=torch.zeros(1))
    session = start(
        spec("toy:TRACKER", "reset", name="tracker", quarantine=True, replay=True),
        spec("toy:CACHE", "drop", name="cache"),
        spec("toy:COUNT", "snapshot", name="count"),
    )
    references = []
    for step in range(10):
        module.TRACKER["sum"], module.CACHE, module.COUNT = torch.ones(1), torch.ones(1), torch.ones(1)
        references += [weakref.ref(tensor) for tensor in (module.TRACKER["sum"], module.CACHE, module.COUNT)]
        session.begin_step(step + 1)
        session.before_update(step + 1)
        memory.mark_unsafe([module.TRACKER["sum"], module.CACHE, module.COUNT])
        recover(session, step, replay=step % 2 == 0)
    module.TRACKER.clear()
    module.COUNT = None
    gc.collect()
    assert [reference() for reference in references] == [None] * 30


# ---------------------------------------------------------------- healthy steps


class BrokenDict(dict):  # type: ignore[type-arg]
    """A value whose copying is broken."""

    broken = False

    def items(self) -> Any:
        if self.broken:
            raise ValueError("cannot be copied")
        return super().items()


def test_error_of_ours_in_a_step_leaves_training_running_with_one_warning(
    make_module: Callable[..., Any], start: Callable[..., Session], warnings: Callable[[], list[str]]
) -> None:
    state = BrokenDict(a=torch.ones(1))
    module = make_module("toy", STATE=state, OTHER=torch.zeros(1))
    session = start(spec("toy:STATE", "snapshot", name="broken"), spec("toy:OTHER", "snapshot", name="other"))
    state.broken = True
    for step in (1, 2, 3):
        session.begin_step(step)
        session.before_update(step)
    assert len(warnings()) == 1
    assert "'broken'" in warnings()[0]
    assert "ValueError: cannot be copied" in warnings()[0]
    module.OTHER.fill_(5)
    report = recover(session, 3)
    assert [line.split(":")[0] for line in report.failures] == ["broken"]
    assert module.OTHER.tolist() == [0]


def test_error_of_ours_with_the_log_line_leaves_training_running_with_one_warning(
    make_module: Callable[..., Any], start: Callable[..., Session], warnings: Callable[[], list[str]]
) -> None:
    state = BrokenDict(a=torch.ones(1))
    make_module("toy", STATE=state)
    session = start(spec("toy:STATE", "snapshot", settled="after-logging"))
    for step in (1, 2):
        session.begin_step(step)
        session.before_update(step)
        state.broken = True
        session.after_log(step)
    assert len(warnings()) == 1
    assert "ValueError: cannot be copied" in warnings()[0]


@pytest.mark.parametrize("part", ["enqueued", "settle"])
def test_error_of_ours_outside_any_state_leaves_training_running(
    make_module: Callable[..., Any],
    start: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
    part: str,
) -> None:
    make_module("toy", STATE=torch.ones(1))
    session = start(spec("toy:STATE", "snapshot"))

    def fail(*_: Any) -> None:
        raise NotImplementedError("no events on this device")

    for slot in (session.copies.start, session.copies.update):
        monkeypatch.setattr(slot, part, fail)
    for step in (1, 2):
        session.begin_step(step)
        session.before_update(step)
        session.after_log(step)
    assert len(warnings()) == 1
    assert "no events on this device" in warnings()[0]


@pytest.mark.parametrize("commit", ["begin_step", "before_update", "after_log"])
def test_fault_of_the_device_in_a_commit_reaches_the_caller(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory, commit: str
) -> None:
    module = make_module("toy", STATE=torch.ones(1))
    settled = "after-logging" if commit == "after_log" else "before-update"
    session = start(spec("toy:STATE", "snapshot", settled=settled), is_fault=lambda error: "unsafe data" in str(error))
    session.begin_step(1)
    session.before_update(1)
    memory.mark_unsafe([module.STATE])
    with pytest.raises(RuntimeError, match="unsafe data"):
        getattr(session, commit)(2)


def test_stop_of_the_device_in_a_commit_reaches_the_caller_by_default(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    make_module("toy", STATE=torch.ones(1))
    session = start(spec("toy:STATE", "snapshot"))
    memory.stop()
    with pytest.raises(RuntimeError, match=r"^FORCE STOP"):
        session.begin_step(1)
    memory.restart()


def test_commits_after_stop_return_silently_and_take_nothing(
    make_module: Callable[..., Any],
    start: Callable[..., Session],
    memory: UnsafeMemory,
    warnings: Callable[[], list[str]],
) -> None:
    module = make_module("toy", TRACKER={"sum": torch.ones(1)}, STATE=torch.ones(1))
    session = start(
        spec("toy:TRACKER", "reset", name="t", quarantine=True, replay=True),
        spec("toy:STATE", "snapshot", settled="after-logging"),
    )
    session.begin_step(1)
    session.before_update(1)
    session.stop()
    memory.stop()
    module.TRACKER = {"new": 1}
    for commit in (session.begin_step, session.before_update, session.after_log):
        commit(2)
    assert type(module.TRACKER) is dict
    memory.restart()
    session.clean()
    for commit in (session.begin_step, session.before_update, session.after_log):
        commit(2)
    assert session.copies.start.step == 1
    assert session.copies.update.step == 1
    assert session.copies.start.get("state", 3) is None
    session.before_rollback(1, replay=True)
    assert session.after_rollback().exact
    assert warnings() == []
    session.begin_step(2)
    assert session.copies.start.step == 2


def test_training_thread_that_runs_plain_python_after_stop_meets_no_other_error(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module("toy", TRACKER={"sum": torch.ones(1)}, STATE=torch.zeros(1))
    session = start(spec("toy:TRACKER", "reset", name="t", quarantine=True), spec("toy:STATE", "snapshot"))
    session.begin_step(1)
    running, stopped, cleaned = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []
    reads = 0

    def train() -> None:
        nonlocal reads
        with memory.active():
            try:
                module.STATE + 1
                running.set()
                stopped.wait(10)
                until = time.monotonic() + 1.0
                while time.monotonic() < until:
                    assert "sum" in module.TRACKER
                    assert [key for key, _ in module.TRACKER.items()] == ["sum"]
                    session.begin_step(2)
                    session.before_update(2)
                    reads += 1
                module.STATE + 1
            except BaseException as error:
                errors.append(error)
            cleaned.wait(10)
            try:
                len(module.TRACKER)
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    running.wait(10)
    session.stop()
    memory.stop()
    stopped.set()
    while not errors and thread.is_alive():
        time.sleep(0.01)
    memory.restart()
    session.clean()
    cleaned.set()
    thread.join(10)
    assert [str(error).split(".")[0][:10] for error in errors] == ["FORCE STOP", "FORCE STOP"]
    assert reads > 10
    session.before_rollback(0)
    assert session.after_rollback().exact


def test_training_thread_inside_a_commit_when_it_is_stopped_does_no_harm(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", SLOW=BrokenDict(a=torch.zeros(1)), STATE=torch.zeros(1))
    session = start(spec("toy:SLOW", "snapshot", name="slow"), spec("toy:STATE", "snapshot"))
    session.begin_step(1)
    session.before_update(1)
    entered, leave = threading.Event(), threading.Event()
    take = session.copies.start.take

    def slow(*args: Any) -> None:
        entered.set()
        leave.wait(10)
        take(*args)

    session.copies.start.take = slow  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=session.begin_step, args=(2,))
    thread.start()
    entered.wait(10)
    session.stop()
    leave.set()
    thread.join(10)
    session.copies.start.take = take  # type: ignore[method-assign]
    assert session.copies.start.get("state", 2) is None  # it went no further
    module.STATE.fill_(9)
    assert recover(session, 1).exact
    assert module.STATE.tolist() == [0]


# ---------------------------------------------------------------- dump, start, end


def test_dump_finds_everything_and_nothing_is_reset(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", TRACKER={"sum": torch.ones(1)}, QUEUE=[1, 2], COUNT=torch.ones(1))
    session = start(
        spec("toy:TRACKER", "reset", name="t", quarantine=True),
        spec("toy:QUEUE", "reset", name="q", quarantine=True, to="empty"),
        spec("toy:COUNT", "snapshot", name="c"),
    )
    session.begin_step(1)
    module.COUNT.fill_(7)
    session.stop()
    session.clean()
    session.before_save()
    assert module.TRACKER["sum"].tolist() == [1]
    assert module.QUEUE == [1, 2]
    assert module.COUNT.tolist() == [7]
    session.begin_step(2)
    assert session.copies.start.step == 2


@pytest.mark.parametrize(
    ("location", "options"), [("toy:TRACKR", {}), ("toy:Layer.trackr", {}), ("toy:Layer.mak", {"on": "instances"})]
)
def test_start_up_error_names_entry_file_and_candidates(
    make_module: Callable[..., Any], memory: UnsafeMemory, location: str, options: dict[str, Any]
) -> None:
    source = "class Layer:\n    tracker = None\n    def __init__(self):\n        self.mask = None\n"
    module = make_module("toy", source, TRACKER={}, OTHER={})
    bad = spec(location, "reset", name="bad", **options)
    session = Session(Registry([spec("toy:OTHER", "reset", name="good", quarantine=True), bad]), memory=memory)
    with pytest.raises(LocationError) as caught:
        session.start()
    session.close()
    text = str(caught.value)
    assert text.startswith("state 'bad' (toy.toml): ")
    assert "candidates: " in text
    assert type(module.OTHER) is dict


def test_value_that_contains_itself_is_refused_by_name_or_tracked(
    make_module: Callable[..., Any], memory: UnsafeMemory
) -> None:
    module = make_module("toy", STATE={})
    module.STATE["self"] = module.STATE
    session = Session(Registry([spec("toy:STATE", "snapshot")]), memory=memory)
    with pytest.raises(StateError, match="state 'state'"):
        session.start()
    session.close()


def test_clear_function_that_is_absent_is_an_error_at_start(
    make_module: Callable[..., Any], memory: UnsafeMemory
) -> None:
    make_module("toy", TRACKER={}, clear_aux=lambda: None, number=5)
    for clear in ("toy:clear_aus", "toy:number"):
        session = Session(Registry([spec("toy:TRACKER", "reset", clear=clear)]), memory=memory)
        with pytest.raises(LocationError, match=clear):
            session.start()
        session.close()


def test_close_puts_everything_back_even_if_a_location_is_gone(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", GONE={}, TRACKER={"a": 1}, QUEUE=[1])
    importer = make_module("toy_importer", ALIAS=module.TRACKER)
    session = start(
        spec("toy:GONE", "reset", name="gone", quarantine=True),
        spec("toy:TRACKER", "reset", name="t", quarantine=True),
        spec("toy:QUEUE", "reset", name="q", quarantine=True),
    )
    del module.GONE
    session.close()
    assert (type(module.TRACKER), type(module.QUEUE)) == (dict, list)
    assert (module.TRACKER, module.QUEUE) == ({"a": 1}, [1])
    assert importer.ALIAS is module.TRACKER


def test_close_in_the_middle_of_a_recovery_lifts_the_quarantine(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    module = make_module("toy", TRACKER={"a": 1})
    session = start(spec("toy:TRACKER", "reset", quarantine=True))
    session.stop()
    session.clean()
    session.close()
    assert type(module.TRACKER) is dict
    assert module.TRACKER == {"a": 1}


def test_holders_that_cannot_be_followed_are_named_at_start(
    make_module: Callable[..., Any], start: Callable[..., Session], warnings: Callable[[], list[str]]
) -> None:
    module = make_module("toy", "class Layer:\n    pass\n", TRACKER={})
    layer = module.Layer()
    layer.mine = module.TRACKER
    start(spec("toy:TRACKER", "reset", quarantine=True))
    assert warnings() == ["state 'state': toy:TRACKER: a Layer still holds the object that stood there before"]


def test_healthy_life_draws_no_random_numbers(make_module: Callable[..., Any], start: Callable[..., Session]) -> None:
    make_module("toy", TRACKER={"sum": torch.ones(1)}, STATE=torch.ones(1), SCALE=torch.ones(1))
    before = torch.get_rng_state()
    session = start(
        spec("toy:TRACKER", "reset", name="t", quarantine=True, replay=True),
        spec("toy:STATE", "snapshot"),
        spec("toy:SCALE", "constant", name="c"),
    )
    session.begin_step(1)
    session.before_update(1)
    session.after_log(1)
    session.summary()
    recover(session, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_summary_counts_states_and_bytes(make_module: Callable[..., Any], start: Callable[..., Session]) -> None:
    make_module("toy", STATE=torch.ones(4), OTHER=None)
    session = start(spec("toy:STATE", "snapshot"), spec("toy:OTHER", "snapshot", name="other"))
    session.begin_step(1)
    session.before_update(1)
    assert session.summary().splitlines() == [
        "2 states tracked, 1 present here (16 bytes; 32 bytes of host copies)",
        "  state  snapshot   16 bytes on cpu; 32 bytes of host copies",
    ]


def test_host_copy_bytes_in_the_summary_are_those_that_are_held(
    make_module: Callable[..., Any], start: Callable[..., Session]
) -> None:
    make_module(
        "toy", A=torch.ones(1), B=torch.ones(2), C={"sum": torch.ones(4)}, D=torch.ones(8), E=torch.ones(16), N=3
    )
    session = start(
        spec("toy:A", "snapshot", name="a"),
        spec("toy:B", "replicate", name="b", settled="after-update"),
        spec("toy:C", "reset", name="c", replay=True),
        spec("toy:D", "reset", name="d"),
        spec("toy:E", "constant", name="e"),
        spec("toy:N", "snapshot", name="n"),
    )
    session.begin_step(1)
    session.before_update(1)
    held = {d["name"]: d["host_bytes"] for d in map(session.registry.describe, session.registry)}
    assert held == {"a": 8, "b": 8, "c": 16, "d": 0, "e": 64, "n": 0}
    assert sum(held.values()) == session.copies.nbytes + 64, "the constant's copy is in no slot"
    assert session.summary().splitlines()[-1] == "  n  snapshot   on the host; 0 bytes of host copies"


def test_ignored_state_is_left_alone(
    make_module: Callable[..., Any], start: Callable[..., Session], memory: UnsafeMemory
) -> None:
    module = make_module("toy", STATE=torch.ones(1))
    session = start(spec("toy:STATE", "ignored"), spec("toy:ABSENT", "ignored", name="absent"))
    memory.mark_unsafe([module.STATE])
    report = recover(session, 1)
    assert report.exact
    assert memory.is_unsafe(module.STATE)


def test_recovery_uses_no_module_that_was_not_loaded(start: Callable[..., Session]) -> None:
    before = set(sys.modules)
    recover(start(spec("wave.open:x", "reset"), spec("this:s", "drop", name="other")), 1)
    assert not {"wave", "this"} & (set(sys.modules) - before)


# ---------------------------------------------------------------- optional states


def test_optional_attribute_that_is_absent_is_no_state(start: Callable[..., Session], make_module: Any) -> None:
    make_module("toy", "class Box: pass")
    optional = {"optional": True, "clear": "toy:absent_too"}
    session = start(
        spec("toy:ABSENT", "reset", **optional),
        spec("toy:Absent.attr", "drop", "on-class", on="instances", optional=True),
    )
    report = recover(session, 1)
    assert report.exact, report.failures
    with pytest.raises(LocationError, match="has no attribute 'ABSENT'"):
        start(spec("toy:ABSENT", "reset"))


def test_optional_attribute_is_found_once_it_is_there(start: Callable[..., Session], make_module: Any) -> None:
    toy = make_module("toy", "")
    session = start(spec("toy:QUEUE", "reset", to="empty", optional=True))
    toy.QUEUE = [1]
    recover(session, 1)
    assert toy.QUEUE == []


def test_optional_attribute_on_instances_may_come_from_code_outside_the_class(
    start: Callable[..., Session], make_module: Any
) -> None:
    toy = make_module("toy", "class Box: pass")
    box = toy.Box()
    box.table = torch.ones(2)
    roots = {"box": box}
    with pytest.raises(LocationError, match="has no attribute 'table'"):
        start(spec("toy:Box.table", "constant", on="instances"), roots=roots)
    session = start(spec("toy:Box.table", "constant", on="instances", optional=True), roots=roots)
    session.begin_step(1)
    box.table.zero_()
    recover(session, 0)
    assert box.table.tolist() == [1, 1]
