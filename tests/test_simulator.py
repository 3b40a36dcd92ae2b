# SPDX-License-Identifier: Apache-2.0
"""The simulated device memory keeps the rules of the real one."""

import copy
import ctypes
import gc
import io
import threading
import time
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from mindspeed_recovery.testing.simulator import (
    NOTHING_FOUND,
    PERSISTENT,
    STOPPED_MESSAGE,
    TEMPORARY,
    UNSAFE_MESSAGE,
    UnsafeMemory,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def memory() -> Iterator[UnsafeMemory]:
    memory = UnsafeMemory()
    with memory.active():
        yield memory


def unsafe() -> "pytest.RaisesExc[RuntimeError]":
    return pytest.raises(RuntimeError, match=f"^{UNSAFE_MESSAGE}")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of the whole storage, read without an operator."""
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


# ---------------------------------------------------------------- the flag


def test_views_made_before_and_after_share_the_flag(memory: UnsafeMemory) -> None:
    base = torch.zeros(4, 4)
    row = base[1]
    memory.mark_unsafe([base])
    assert memory.is_unsafe(row)
    with unsafe():
        row + 1
    memory.mark_safe(row)
    assert not memory.is_unsafe(base)
    assert not memory.is_unsafe(base[0])


def test_other_storages_stay_safe(memory: UnsafeMemory) -> None:
    hit, other = torch.zeros(4), torch.zeros(4)
    memory.mark_unsafe([hit])
    assert not memory.is_unsafe(other)
    assert torch.equal(other + 1, torch.ones(4))


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda t: t + 1,
    "second argument": lambda t: torch.ones(4) + t,
    "in a list": lambda t: torch.cat([torch.ones(4), t]),
    "foreach": lambda t: torch._foreach_add([torch.ones(4), t], 1.0),
    "in-place foreach": lambda t: torch._foreach_zero_([torch.ones(4), t]),
    "index": lambda t: t[torch.tensor([0])],
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(1.0),
    "+=": lambda t: t.__iadd__(1.0),
    "setitem": lambda t: t.__setitem__(0, 1.0),
    "out=": lambda t: torch.add(torch.ones(4), 1, out=t),
    "resize_": lambda t: t.resize_(8),
    "clone": lambda t: t.clone(),
    "deepcopy": lambda t: copy.deepcopy(t),
    "zeros_like": lambda t: torch.zeros_like(t),
    "empty_like": lambda t: torch.empty_like(t),
    "select": lambda t: t[0],
    "view": lambda t: t.view(2, 2),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "set_ from a tensor": lambda t: torch.ops.aten.set_(torch.empty(0), t),
    "to another dtype": lambda t: t.to(torch.float64),
    "item": lambda t: t.item(),
    "float": lambda t: float(t),
    "bool": lambda t: bool(t),
    "iteration": lambda t: list(t),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "array": lambda t: np.asarray(t),
    "save": lambda t: torch.save(t, io.BytesIO()),
    "equal": lambda t: torch.equal(t, torch.ones(4)),
    "copy_ from it": lambda t: torch.empty(4).copy_(t),
    "foreach copy from it": lambda t: torch._foreach_copy_([torch.empty(4)] * 2, [torch.ones(4), t]),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False) * 2,
}


@pytest.mark.parametrize("name", READS)
def test_operators_refuse_an_unsafe_tensor(memory: UnsafeMemory, name: str) -> None:
    tensor = torch.ones(1 if name in ("item", "float", "bool") else 4)
    try:
        READS[name](tensor.clone())  # the operation itself is possible
    except RuntimeError as error:
        pytest.fail(f"{name} does not run on a safe tensor: {error}")
    memory.mark_unsafe([tensor])
    errors = memory.raised_errors
    with unsafe():
        READS[name](tensor)
    assert memory.raised_errors == errors + 1
    assert memory.is_unsafe(tensor)


def test_error_names_the_operator_and_carries_an_error_code(memory: UnsafeMemory) -> None:
    tensor = torch.ones(4)
    memory.mark_unsafe([tensor])
    with pytest.raises(RuntimeError, match=r"(?s)unsafe data.*ERR00003.*aten\.zero_.*\(4,\)"):
        tensor.zero_()


def test_keyword_only_inputs_are_not_checked(memory: UnsafeMemory) -> None:
    library = torch.library.Library("unsafe_memory_test", "DEF")
    library.define("scaled(Tensor x, *, Tensor scale) -> Tensor")
    library.impl("scaled", lambda x, *, scale: x * scale, "CPU")
    scale = torch.ones(2)
    memory.mark_unsafe([scale])
    torch.ops.unsafe_memory_test.scaled(torch.ones(2), scale=scale)
    with unsafe():
        torch.ops.unsafe_memory_test.scaled(scale, scale=torch.ones(2))


def test_set_from_a_bare_storage_carries_the_flag(memory: UnsafeMemory) -> None:
    tensor = torch.ones(4)
    memory.mark_unsafe([tensor])
    other = torch.empty(0).set_(tensor.untyped_storage())
    assert memory.is_unsafe(other)
    with unsafe():
        other + 1


@pytest.mark.parametrize("foreach", [False, True])
def test_copy_from_safe_memory_clears_the_flag(memory: UnsafeMemory, foreach: bool) -> None:
    first, second = torch.ones(4), torch.ones(4)
    memory.mark_unsafe([first, second])
    fresh = torch.full((4,), 3.0)
    if foreach:
        torch._foreach_copy_([first, second], [fresh, fresh])
    else:
        first.copy_(fresh)
        second.copy_(fresh)
    assert torch.equal(first, fresh)
    assert torch.equal(second, fresh)
    assert memory.unsafe_count() == 0


def test_refused_copy_leaves_the_flag(memory: UnsafeMemory) -> None:
    tensor, source = torch.ones(4), torch.ones(4)
    memory.mark_unsafe([tensor, source])
    with unsafe():
        tensor.copy_(source)
    with unsafe():
        tensor.copy_(tensor)
    assert memory.unsafe_count() == 2


def test_copy_into_a_slice_clears_the_whole_block_and_leaves_garbage(memory: UnsafeMemory) -> None:
    tensor = torch.ones(8)
    part = tensor[:4]
    memory.mark_unsafe([tensor])
    part.copy_(torch.ones(4))
    assert not memory.is_unsafe(tensor)
    assert torch.equal(tensor[:4], torch.ones(4))
    assert not torch.equal(tensor[4:], torch.ones(4))


def test_freed_storage_is_forgotten_and_its_address_is_safe_again(memory: UnsafeMemory) -> None:
    for _ in range(200):
        tensor = torch.ones(64)
        address = tensor.data_ptr()
        memory.mark_unsafe([tensor])
        del tensor
        again = torch.ones(64)
        assert not memory.is_unsafe(again)
        again += 1
        if again.data_ptr() == address:
            break
    else:
        pytest.fail("the allocator never gave the same address again")
    assert memory.unsafe_count() == 0


def test_clearing_flags_without_values_is_no_recovery(memory: UnsafeMemory) -> None:
    states = [torch.ones(8), torch.arange(8), torch.ones(8, dtype=torch.bool)]
    expected = [state.clone() for state in states]
    memory.mark_unsafe(states)
    for state in states:
        memory.mark_safe(state)
    assert memory.unsafe_count() == 0
    assert not any(torch.equal(state, value) for state, value in zip(states, expected, strict=True))


# ---------------------------------------------------------------- the fault


def test_strike_damages_at_once_and_flags_at_the_check(memory: UnsafeMemory) -> None:
    tensor = torch.ones(8)
    assert memory.strike([tensor[2:4]]) == 1
    assert bytes_of(tensor) != bytes_of(torch.ones(8))
    assert not memory.is_unsafe(tensor)
    assert not torch.equal(tensor, torch.ones(8))  # operators still run
    assert memory.check_uce_in_memory() == PERSISTENT
    with unsafe():
        tensor + 1


def test_check_answers_what_was_found(memory: UnsafeMemory) -> None:
    assert memory.check_uce_in_memory() == NOTHING_FOUND
    memory.strike([], persistent=False)
    assert memory.check_uce_in_memory() == TEMPORARY
    assert memory.check_uce_in_memory() == NOTHING_FOUND
    tensor = torch.ones(2)
    memory.strike([], persistent=False)
    memory.strike([tensor])
    assert memory.check_uce_in_memory() == PERSISTENT
    assert memory.check_uce_in_memory() == NOTHING_FOUND


def test_temporary_strike_still_flags_what_is_alive(memory: UnsafeMemory) -> None:
    tensor = torch.ones(2)
    memory.strike([tensor], persistent=False)
    assert memory.check_uce_in_memory() == TEMPORARY
    assert memory.is_unsafe(tensor)


def test_struck_storage_that_is_freed_before_the_check_was_temporary(memory: UnsafeMemory) -> None:
    tensor = torch.ones(2)
    memory.strike([tensor])
    del tensor
    assert memory.check_uce_in_memory() == TEMPORARY
    assert memory.unsafe_count() == 0


def test_second_strike_does_not_undo_the_first(memory: UnsafeMemory) -> None:
    tensor = torch.ones(8, dtype=torch.bool)
    memory.strike([tensor, tensor[:2]])
    assert memory.strike([tensor]) == 1
    memory.check_uce_in_memory()
    assert memory.mark_unsafe([tensor]) == 1
    assert bytes_of(tensor) == bytes(8)


def test_second_fault_in_unsafe_memory_flags_it_again(memory: UnsafeMemory) -> None:
    tensor = torch.ones(8)
    memory.mark_unsafe([tensor])
    memory.strike([tensor])
    tensor.copy_(torch.ones(8))
    assert memory.check_uce_in_memory() == PERSISTENT
    assert memory.is_unsafe(tensor)


def test_garbage_depends_on_the_seed_only() -> None:
    def struck(seed: int) -> bytes:
        tensor = torch.arange(100)
        UnsafeMemory(seed).strike([tensor])
        return bytes_of(tensor)

    assert struck(1) == struck(1)
    assert struck(1) != struck(2)


def test_strike_uses_neither_operators_nor_the_default_generator(memory: UnsafeMemory) -> None:
    tensor, other = torch.ones(4), torch.ones(4)
    memory.mark_unsafe([other])
    state, checked = torch.get_rng_state(), memory.checked_ops
    memory.strike([tensor, other])
    memory.check_uce_in_memory()
    assert memory.is_unsafe(tensor)
    assert memory.device_tensors()
    assert memory.checked_ops == checked
    assert torch.equal(state, torch.get_rng_state())


def test_strike_is_invisible_to_autograd(memory: UnsafeMemory) -> None:
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    memory.strike([weight])
    loss.backward()  # no complaint about a changed version: the gradient is silently wrong
    assert weight.grad is not None
    assert not torch.equal(weight.grad, torch.full((4,), 2.0))


# ---------------------------------------------------------------- training


def test_backward_is_covered(memory: UnsafeMemory) -> None:
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    memory.mark_unsafe([weight])
    with unsafe():
        loss.backward()


def test_recomputation_and_custom_functions_are_covered(memory: UnsafeMemory) -> None:
    table = torch.ones(4)

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * table

        @staticmethod
        def backward(ctx, grad):
            return grad * table

    x = torch.ones(4, requires_grad=True)
    plain = Scale.apply(x).sum()
    recomputed = checkpoint(Scale.apply, x, use_reentrant=False).sum()
    reentrant = checkpoint(Scale.apply, x, use_reentrant=True).sum()
    memory.mark_unsafe([table])
    for loss in (plain, recomputed, reentrant):
        with unsafe():
            loss.backward()


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_step_is_covered(memory: UnsafeMemory, foreach: bool) -> None:
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=foreach)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    memory.mark_unsafe([optimizer.state[layer.bias]["exp_avg"]])
    with unsafe():
        optimizer.step()


def test_restoring_whole_storages_recovers_training(memory: UnsafeMemory) -> None:
    layer = torch.nn.Linear(3, 3)
    with memory.host():
        kept = [parameter.detach().clone() for parameter in layer.parameters()]
    expected = layer(torch.ones(1, 3))
    with memory.host():
        expected = expected.detach().clone()
    memory.mark_all()
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), kept, strict=True):
            parameter.copy_(value)
    assert torch.equal(layer(torch.ones(1, 3)), expected)


class Wrapped(torch.Tensor):
    """A tensor subclass that only holds another tensor."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return func(*[a.held if isinstance(a, cls) else a for a in args], **(kwargs or {}))


def test_wrapper_subclasses_are_seen_through(memory: UnsafeMemory) -> None:
    wrapped = Wrapped(torch.ones(3))
    assert torch.equal(wrapped + 1, torch.full((3,), 2.0))
    assert not memory.is_device(wrapped)
    assert memory.strike([wrapped]) == 0
    memory.mark_unsafe([wrapped.held])
    with unsafe():
        wrapped + 1


# ---------------------------------------------------------------- collectives


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_collectives_neither_check_nor_clear(memory: UnsafeMemory) -> None:
    tensor, gathered = torch.ones(4), torch.zeros(4)
    memory.mark_unsafe([tensor, gathered])
    torch.distributed.all_reduce(tensor)
    torch.distributed.broadcast(tensor, 0)
    torch.distributed.all_gather_into_tensor(gathered, tensor)
    assert memory.is_unsafe(tensor)
    assert memory.is_unsafe(gathered)
    assert bytes_of(gathered) == bytes_of(tensor)  # the garbage travelled


@pytest.mark.usefixtures("process_group")
def test_collectives_stop_with_the_device(memory: UnsafeMemory) -> None:
    tensor = torch.ones(4)
    memory.stop()
    with pytest.raises(RuntimeError, match=STOPPED_MESSAGE):
        torch.distributed.all_reduce(tensor)


# ---------------------------------------------------------------- host and device


def test_what_is_host_memory(memory: UnsafeMemory) -> None:
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    file.seek(0)
    with memory.host():
        loaded_batch, listed, converted = torch.ones(3), torch.tensor([1, 2]), torch.ones(3).double()
    registered = torch.ones(3)
    memory.register_host(registered)
    host = {
        "from_numpy": torch.from_numpy(np.ones(3)),
        "frombuffer": torch.frombuffer(bytearray(8), dtype=torch.uint8),
        "torch.load": torch.load(file),
        "generator": torch.get_rng_state(),
        "another generator": torch.Generator().get_state(),
        "meta": torch.ones(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "host_empty": memory.host_empty((2, 2), torch.bfloat16),
        "allocated in host()": loaded_batch,
        "listed in host()": listed,
        "converted in host()": converted,
        "registered": registered,
        "view of registered": registered[1:],
    }
    assert [name for name, tensor in host.items() if memory.is_device(tensor)] == []
    assert memory.mark_unsafe(host.values()) == memory.strike(host.values()) == memory.unsafe_count() == 0


def test_what_is_device_memory(memory: UnsafeMemory) -> None:
    existing = torch.ones(3)
    with memory.host():
        existing.add_(1)
        view = existing[1:]
        adopted = torch.empty(0).set_(existing.untyped_storage())
    device = [existing, view, adopted, torch.tensor([1.0]), torch.nn.Parameter(torch.ones(2))]
    device += [torch.zeros(5056, dtype=torch.float32), torch.zeros(5057, dtype=torch.uint8), torch.empty(0)]
    assert all(memory.is_device(tensor) for tensor in device)


def test_host_tensor_shape_and_dtype(memory: UnsafeMemory) -> None:
    tensor = memory.host_empty((2, 3), torch.float16)
    assert (tuple(tensor.shape), tensor.dtype) == ((2, 3), torch.float16)


def test_host_memory_is_host_only_while_it_lives(memory: UnsafeMemory) -> None:
    for _ in range(300):
        memory.host_empty((64,), torch.float32)
    assert memory.is_device(torch.ones(64))
    assert len(memory._host._references) <= 64  # the freed ones are forgotten in time
    assert memory._host.prune() == 0


def test_device_tensors_are_distinct_live_device_storages(memory: UnsafeMemory) -> None:
    class Sub(torch.Tensor):
        pass

    gc.collect()
    before = {tensor.untyped_storage()._cdata for tensor in memory.device_tensors()}
    plain = torch.ones(3)
    views = [plain[1:], plain[:1]]
    layer = torch.nn.Linear(2, 2, bias=False)
    layer(torch.ones(1, 2)).sum().backward()
    sub = torch.ones(2).as_subclass(Sub)
    host = memory.host_empty((3,), torch.float32)
    found = [t for t in memory.device_tensors() if t.untyped_storage()._cdata not in before]
    storages = [tensor.untyped_storage()._cdata for tensor in found]
    assert len(storages) == len(set(storages))
    assert layer.weight.grad is not None
    expected = {t.untyped_storage()._cdata for t in (plain, layer.weight, layer.weight.grad, sub)}
    assert expected <= set(storages)
    assert host.untyped_storage()._cdata not in storages
    assert len(views) == 2


def test_gradients_that_no_python_object_stands_for_are_found() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.sum().backward()  # outside the simulation nothing makes Python objects for gradients
    memory = UnsafeMemory()
    memory.mark_all()
    assert weight.grad is not None
    assert memory.is_unsafe(weight.grad)


def test_mark_all_flags_every_device_tensor(memory: UnsafeMemory) -> None:
    kept = [torch.ones(3), torch.nn.Parameter(torch.ones(3))]
    host = memory.host_empty((3,), torch.float32)
    assert memory.mark_all() >= 2
    assert all(memory.is_unsafe(tensor) for tensor in kept)
    assert not memory.is_unsafe(host)


# ---------------------------------------------------------------- stop and threads


def test_stopped_device_refuses_every_operator_until_restart(memory: UnsafeMemory) -> None:
    tensor = torch.ones(3)
    loss = torch.ones(3, requires_grad=True).sum()
    memory.stop()
    assert memory.stopped
    for operation in (lambda: tensor + 1, lambda: torch.ones(1), loss.backward, tensor.tolist):
        with pytest.raises(RuntimeError, match=STOPPED_MESSAGE):
            operation()
    assert memory.raised_errors == 4
    memory.restart()
    assert not memory.stopped
    assert torch.equal(tensor + 1, torch.full((3,), 2.0))


def test_restart_keeps_the_flags(memory: UnsafeMemory) -> None:
    tensor = torch.ones(3)
    memory.strike([tensor])
    memory.stop()
    assert memory.check_uce_in_memory() == PERSISTENT
    memory.restart()
    with unsafe():
        tensor + 1


def test_host_work_goes_on_while_the_device_is_stopped(memory: UnsafeMemory) -> None:
    """A loader that was refused in the middle of a batch would have lost the batch."""
    on_device = torch.ones(2)
    memory.stop()
    with memory.host():
        batch = torch.stack([torch.tensor([1, 2]), torch.arange(2)])
        for use in (lambda: on_device + 1, lambda: torch.add(batch, on_device), lambda: on_device.tolist()):
            with pytest.raises(RuntimeError, match=STOPPED_MESSAGE):
                use()
    with pytest.raises(RuntimeError, match=STOPPED_MESSAGE):
        batch + 1
    memory.restart()
    assert batch.tolist() == [[1, 2], [0, 1]]


def test_exempt_thread_works_while_the_device_is_stopped(memory: UnsafeMemory) -> None:
    tensor = torch.ones(3)
    memory.mark_unsafe([tensor])
    memory.stop()
    with memory.exempt():
        with memory.exempt():
            pass
        with unsafe():  # exempt from the stop, not from the check
            tensor + 1
        tensor.copy_(torch.zeros(3))
    with pytest.raises(RuntimeError, match=STOPPED_MESSAGE):
        tensor + 1


def test_stop_reaches_a_running_thread(memory: UnsafeMemory) -> None:
    errors: list[str] = []
    started = threading.Barrier(4, timeout=30)

    def train() -> None:
        with memory.active():
            tensor = torch.ones(3)
            started.wait()
            try:
                while True:
                    tensor += 1
            except RuntimeError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=train, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    memory.stop()
    for thread in threads:
        thread.join(10)
    assert errors == [STOPPED_MESSAGE] * 3


def test_thread_that_did_not_enter_is_not_checked(memory: UnsafeMemory) -> None:
    tensor = torch.ones(3)
    memory.mark_unsafe([tensor])
    results: list[list[float]] = []
    thread = threading.Thread(target=lambda: results.append((tensor * 1).tolist()))
    thread.start()
    thread.join(10)
    assert len(results) == 1


def test_active_is_reentrant_and_ends() -> None:
    memory = UnsafeMemory()
    tensor = torch.ones(3)
    tolist, reduce_ex = torch.Tensor.tolist, torch.Tensor.__reduce_ex__
    with memory.active():
        with memory.active():
            pass
        memory.mark_unsafe([tensor])
        with unsafe():
            tensor + 1
        assert memory.checked_ops == 1
    tensor + 1
    assert torch.Tensor.tolist is tolist
    assert torch.Tensor.__reduce_ex__ is reduce_ex
    assert "tolist" not in vars(torch.Tensor)


def test_nothing_is_checked_while_nothing_is_unsafe(memory: UnsafeMemory) -> None:
    tensor = torch.ones(3)
    tensor + 1
    assert memory.checked_ops == 0
    memory.mark_unsafe([tensor])
    tensor.copy_(torch.ones(3))
    checked = memory.checked_ops
    tensor + 1
    assert memory.checked_ops == checked == 2  # ones and copy_


def test_healthy_state_costs_little() -> None:
    def seconds() -> float:
        tensor = torch.ones(4)
        start = time.perf_counter()
        for _ in range(2000):
            tensor.add_(1)
        return (time.perf_counter() - start) / 2000

    seconds()
    with UnsafeMemory().active():
        cost = min(seconds() for _ in range(5))
    assert cost < 200e-6


# ---------------------------------------------------------------- any tensor

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "transposed": lambda t: t.t() if t.dim() == 2 else t,
    "sliced": lambda t: t[::2] if t.dim() else t,
    "tail": lambda t: t[-1:] if t.dim() else t,
    "expanded": lambda t: t.expand(2, *t.shape),
    "flattened": lambda t: t.reshape(-1),
}


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3),
    view=st.sampled_from(sorted(VIEWS)),
    seed=st.integers(0, 2**16),
    at_once=st.booleans(),
)
def test_any_tensor_is_damaged_flagged_refused_and_restored(
    dtype: torch.dtype, shape: list[int], view: str, seed: int, at_once: bool
) -> None:
    memory = UnsafeMemory(seed)
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    kept = tensor.clone()
    target = VIEWS[view](tensor)
    before = bytes_of(tensor)
    holds_bytes = len(before) > 0
    with memory.active():
        if at_once:
            assert memory.mark_unsafe([target]) == holds_bytes
        else:
            assert memory.strike([target]) == holds_bytes
            assert memory.check_uce_in_memory() == (PERSISTENT if holds_bytes else TEMPORARY)
        after = bytes_of(tensor)
        assert all(a != b for a, b in zip(after, before, strict=True))
        assert memory.is_unsafe(tensor) == memory.is_unsafe(target) == holds_bytes
        assert memory.unsafe_count() == holds_bytes
        if not holds_bytes:
            return
        with unsafe():
            torch.zeros_like(target)
        with unsafe():
            target.clone()
        tensor.copy_(kept)
        assert memory.unsafe_count() == 0
        assert bytes_of(tensor) == before
        target.clone()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["make", "strike", "check", "free", "restore"]), max_size=40), st.randoms())
def test_flags_follow_storages_through_any_history(actions: list[str], random: Random) -> None:
    memory = UnsafeMemory()
    live: list[torch.Tensor] = []
    struck: set[int] = set()
    flagged: set[int] = set()
    with memory.active():
        for action in actions:
            if action == "make":
                live.append(torch.ones(16))
                assert not memory.is_unsafe(live[-1])
            elif action == "check":
                flagged |= struck
                struck = set()
                memory.check_uce_in_memory()
            elif live:
                index = random.randrange(len(live))
                chosen = id(live[index])
                if action == "strike":
                    memory.strike([live[index]])
                    struck.add(chosen)
                elif action == "restore":
                    live[index].copy_(torch.ones(16))
                    flagged.discard(chosen)
                else:
                    del live[index]
                    struck.discard(chosen)
                    flagged.discard(chosen)
            assert [memory.is_unsafe(tensor) for tensor in live] == [id(tensor) in flagged for tensor in live]
            assert memory.unsafe_count() == len(flagged)
