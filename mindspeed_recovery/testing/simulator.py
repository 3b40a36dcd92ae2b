# SPDX-License-Identifier: Apache-2.0
"""Device memory that can become unsafe, simulated on CPU tensors.

The rules are those of torch_npu's caching allocator and generated operators: "unsafe" is a flag on a block,
so on everything that shares a storage; operators refuse unsafe inputs; only ``copy_``, ``_foreach_copy_``,
an explicit "this is safe now" or freeing the memory clears the flag.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

NOTHING_FOUND = 0
TEMPORARY = 2
PERSISTENT = 3

UNSAFE_MESSAGE = "There is unsafe data in the input tensor."
STOPPED_MESSAGE = "FORCE STOP."


class UnsafeDataError(RuntimeError):
    """An operator was given an unsafe tensor; the text begins with ``UNSAFE_MESSAGE``."""


class DeviceStoppedError(RuntimeError):
    """An operator was called while the device is stopped; the text begins with ``STOPPED_MESSAGE``."""


class UnsafeMemory:
    """The memory of one simulated device.

    **What counts as device memory.** With no device there is nothing in a tensor that says where it would
    live, so every CPU storage counts, except what is on the host on every backend or was said to be:

    * memory wrapped from outside torch (``from_numpy``, ``frombuffer``, and what ``torch.load`` returns):
      known by its storage not being resizable. State kept from a loaded file without a copy is therefore
      host memory here, and so is, from then on, a tensor whose ``numpy()`` somebody has taken;
    * a generator's state, known by its form: uint8, one dimension, the size of ``torch.get_rng_state()``;
    * storages registered by ``host_empty``, ``host`` or ``register_host`` (data sets, loader batches, …);
    * tensors without CPU storage: meta, sparse, and subclasses that only wrap other tensors (the inner ones
      count).

    Host memory and storages of zero bytes are never unsafe.

    **What is checked.** In a thread inside ``active``, while anything is unsafe, every operator checks its
    positional tensors (``self``, and those inside lists) and the keyword tensors it writes (``out=``); other
    keyword-only tensors are not checked. Operators that only read metadata (``zeros_like``, ``select``,
    ``detach``, …) check too. Collectives and point-to-point operations neither check nor clear. ``tolist``,
    ``numpy`` and pickling, which on a device begin with a copy to the host, check as well. Not seen:
    ``set_`` from a bare storage (the flag follows the storage, so the next operator raises); printing a
    tensor, for which torch switches modes off; and a storage that is resized to nothing and back, which keeps
    its flag until it is written by ``copy_``.

    **Threads.** Dispatch modes are thread-local: enter ``active`` in each thread. Autograd's CPU engine runs
    backward in the calling thread. All methods may be called from any thread, active or not; none of them
    goes through a checked operator, except that ``host_empty`` allocates.

    Args:
        seed: of the garbage that faults write; equal seeds and equal calls give equal bytes.

    Attributes:
        checked_ops: operators whose arguments were checked (none are while nothing is unsafe).
        raised_errors: errors raised, both for unsafe data and for a stopped device.
    """

    def __init__(self, seed: int = 0) -> None:
        self.checked_ops = 0
        self.raised_errors = 0
        self._garbage = np.random.default_rng(seed)
        self._generator_state_size = torch.get_rng_state().numel()
        self._lock = threading.RLock()
        self._unsafe = _StorageSet()
        self._host = _StorageSet()
        self._hits: list[StorageWeakRef] = []
        self._fault = NOTHING_FOUND
        self._stopped = False
        self._alert = False  # the one thing the dispatch mode looks at in the healthy state
        self._thread = _ThreadState()

    # ---------------------------------------------------------------- threads

    @contextmanager
    def active(self) -> Iterator[UnsafeMemory]:
        """Simulate the device in the calling thread; re-entrant, and usable in many threads at once."""
        if self._thread.active:
            yield self
            return
        self._thread.active = True
        try:
            with _DispatchedReads(), _DeviceMode(self):
                yield self
        finally:
            self._thread.active = False

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Let the calling thread use the device while it is stopped, as the runtime's control thread must."""
        self._thread.exempt += 1
        try:
            yield
        finally:
            self._thread.exempt -= 1

    # ---------------------------------------------------------------- faults

    def strike(self, tensors: Iterable[torch.Tensor], persistent: bool = True) -> int:
        """The fault: garbage in the whole storage of each tensor now, flags at ``check_uce_in_memory``.

        Every byte changes (a bool is negated), except in a storage that is unsafe or was struck since the
        last check: it holds garbage already. Host memory is left alone. ``persistent=False`` is a fault in
        memory that is nobody's for long: ``strike([], False)`` is one that hits no tensor at all.

        Returns:
            How many storages were hit.
        """
        with self._lock:
            hit = self._damage(tensors)
            self._hits.extend(StorageWeakRef(storage) for storage in hit)
            self._fault = max(self._fault, PERSISTENT if persistent else TEMPORARY)
            return len(hit)

    def check_uce_in_memory(self) -> int:
        """Flag what was struck since the last call and is still allocated.

        Returns:
            ``NOTHING_FOUND`` (0) without a strike; ``TEMPORARY`` (2) if the strikes were temporary or
            all that they hit has been freed; else ``PERSISTENT`` (3). The codes are those of
            ``torch_npu.npu.check_uce_in_memory``.
        """
        with self._lock:
            hits, self._hits = [hit for hit in self._hits if not hit.expired()], []
            fault, self._fault = self._fault, NOTHING_FOUND
            for hit in hits:
                self._unsafe.add(hit)
            self._update_alert()
            return TEMPORARY if fault == PERSISTENT and not hits else fault

    def mark_unsafe(self, tensors: Iterable[torch.Tensor]) -> int:
        """Put garbage into the whole storage of each tensor, as ``strike`` does, and flag it at once.

        Returns:
            How many storages were hit.
        """
        with self._lock:
            hit = self._damage(tensors)
            for storage in hit:
                self._unsafe.add(StorageWeakRef(storage))
            self._update_alert()
            return len(hit)

    def mark_all(self) -> int:
        """``mark_unsafe`` for all device memory: a restart that rebuilds every resource."""
        return self.mark_unsafe(self.device_tensors())

    def mark_safe(self, tensor: torch.Tensor) -> None:
        """Clear the flag of the tensor's storage and nothing else: the garbage stays."""
        storage = _storage_of(tensor)
        if storage is not None:
            self._clear([storage])

    def stop(self) -> None:
        """From now on every operator in an active, not exempt thread raises ``DeviceStoppedError``, but for host work."""
        with self._lock:
            self._stopped = True
            self._update_alert()

    def restart(self) -> None:
        """End the stop. Flags stay."""
        with self._lock:
            self._stopped = False
            self._unsafe.prune()
            self._update_alert()

    # ---------------------------------------------------------------- questions

    @property
    def stopped(self) -> bool:
        """Whether the device is stopped."""
        return self._stopped

    def is_unsafe(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is flagged; never raises for unsafe data."""
        storage = _storage_of(tensor)
        return storage is not None and storage in self._unsafe

    def unsafe_count(self) -> int:
        """The number of storages that are flagged and still allocated."""
        with self._lock:
            return self._unsafe.prune()

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor would live on the device; see the class for the rules."""
        return self._device_storage(tensor) is not None

    def device_tensors(self) -> list[torch.Tensor]:
        """One tensor for each distinct live device storage that some Python object or ``.grad`` leads to.

        Found among the objects the garbage collector knows: tensors held by C++ only (activations saved in a
        graph) and objects put away by ``gc.freeze()`` are not.
        """
        found: dict[int, torch.Tensor] = {}
        host: set[int] = set()
        for tensor in _live_tensors():
            storage = _storage_of(tensor)
            if storage is None:
                continue
            found.setdefault(storage._cdata, tensor)
            if not self._on_device(tensor, storage):  # what one of its tensors shows is true of the storage
                host.add(storage._cdata)
        return [tensor for key, tensor in found.items() if key not in host]

    # ---------------------------------------------------------------- host memory

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in host memory."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        self.register_host(tensor)
        return tensor

    @contextmanager
    def host(self) -> Iterator[None]:
        """Storages that the calling thread's operators allocate inside are host memory, and operators on nothing but host
        memory run although the device is stopped, as a data loader's do.

        ``copy.deepcopy`` allocates without an operator and is not seen: use ``clone`` or ``register_host``.
        """
        self._thread.host += 1
        try:
            with _HostMode(self):
                yield
        finally:
            self._thread.host -= 1

    def register_host(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage as host memory for as long as it lives; a flag on it is cleared."""
        storage = _storage_of(tensor)
        if storage is not None:
            with self._lock:
                self._host.add(StorageWeakRef(storage))
            self._clear([storage])

    # ---------------------------------------------------------------- inside

    def _device_storage(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        storage = _storage_of(tensor)
        return storage if storage is not None and self._on_device(tensor, storage) else None

    def _on_device(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        size = self._generator_state_size
        generator_state = tensor.dtype is torch.uint8 and tensor.shape == (size,) and storage.nbytes() == size
        return storage.resizable() and storage not in self._host and not generator_state

    def _damage(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Put garbage into the tensors' device storages where there is none yet; return the storages."""
        damaged = _StorageSet()
        for reference in self._hits:
            damaged.add(reference)
        hit: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = self._device_storage(tensor)
            if storage is None or not storage.nbytes() or storage._cdata in hit:
                continue
            hit[storage._cdata] = storage
            if storage in damaged or storage in self._unsafe:  # a second change could undo the first
                continue
            size = storage.nbytes()
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(storage.data_ptr()))
            if tensor.dtype is torch.bool:  # any byte but 0 and 1 would be undefined behaviour, not garbage
                memory ^= 1
            else:
                memory ^= self._garbage.integers(1, 256, size, dtype=np.uint8)
        return list(hit.values())

    def _clear(self, storages: Iterable[torch.UntypedStorage]) -> None:
        with self._lock:
            for storage in storages:
                self._unsafe.discard(storage)
            self._update_alert()

    def _update_alert(self) -> None:
        self._alert = self._stopped or bool(self._unsafe)

    def _run_checked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stopped and not self._thread.exempt and not self._is_host_work(func, args, kwargs):
            with self._lock:
                self.raised_errors += 1
            raise DeviceStoppedError(STOPPED_MESSAGE)
        rule = _rule_of(func)
        if rule.collective:
            return func(*args, **kwargs)
        with self._lock:
            self.checked_ops += 1
        checked = args[1:2] if rule.copies else (args, [kwargs.get(name) for name in rule.outputs])
        for tensor in _tensors_in(checked):
            if self.is_unsafe(tensor):
                with self._lock:
                    self.raised_errors += 1
                raise UnsafeDataError(_unsafe_text(func, tensor))
        result = func(*args, **kwargs)
        if rule.copies:
            self._clear(_storages_in(args[:1]))
        return result

    def _is_host_work(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self._thread.host:
            return False
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor() has just allocated its argument
            return True
        return not any(map(self.is_device, _tensors_in((args, list(kwargs.values())))))


# -------------------------------------------------------------------- dispatch


class _DeviceMode(TorchDispatchMode):
    def __init__(self, memory: UnsafeMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._memory._alert:
            return func(*args, **kwargs) if kwargs else func(*args)
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented  # the subclass unwraps itself, and its inner operators come back here
        return self._memory._run_checked(func, args, kwargs or {})


class _HostMode(TorchDispatchMode):
    def __init__(self, memory: UnsafeMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = set()  # as they are after the operator: what set_ made of its argument is not a new storage
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor() has just allocated its argument
            given = {storage._cdata for storage in _storages_in((args, list(kwargs.values())))}
        for tensor in _tensors_in((result,)):
            if not given.issuperset(storage._cdata for storage in _storages_in((tensor,))):
                self._memory.register_host(tensor)
        return result


class _Rule(NamedTuple):
    collective: bool
    copies: bool
    outputs: tuple[str, ...]


@functools.cache
def _rule_of(func: Any) -> _Rule:
    arguments = func._schema.arguments
    return _Rule(
        collective=func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"),
        copies=func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_),
        outputs=tuple(a.name for a in arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write),
    )


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _storages_in(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for tensor in _tensors_in(values):
        storage = _storage_of(tensor)
        if storage is not None:
            yield storage


def _unsafe_text(func: Any, tensor: torch.Tensor) -> str:
    now = time.strftime("%Y-%m-%d-%H:%M:%S")
    return (
        f"{UNSAFE_MESSAGE}\n"
        f"[ERROR] {now} (PID:{os.getpid()}, Device:0, RankID:-1) ERR00003 PTA invalid value\n"
        f"operator {func}, tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
    )


# -------------------------------------------------------------------- storages


class _StorageSet:
    """Storages by identity, held weakly.

    A storage's ``_cdata`` cannot be given to another storage while a weak reference to it exists, so a new
    tensor at the address of a freed one is never mistaken for it.
    """

    def __init__(self) -> None:
        self._references: dict[int, StorageWeakRef] = {}
        self._prune_at = 64

    def add(self, reference: StorageWeakRef) -> None:
        if len(self._references) >= self._prune_at:
            self._prune_at = 2 * max(32, self.prune())
        self._references[reference.cdata] = reference

    def discard(self, storage: torch.UntypedStorage) -> None:
        self._references.pop(storage._cdata, None)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._references

    def __bool__(self) -> bool:
        """Whether any storage is in the set; one freed since the last ``prune`` still counts."""
        return bool(self._references)

    def prune(self) -> int:
        """Forget the storages that were freed, and return the number of the others."""
        for key in [key for key, reference in self._references.items() if reference.expired()]:
            del self._references[key]
        return len(self._references)


def _live_tensors() -> Iterator[torch.Tensor]:
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):  # isinstance() would run code of proxy objects
            continue
        yield candidate
        if candidate.is_leaf and candidate.grad is not None:  # its Python object may not be made yet
            yield candidate.grad


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's CPU storage, or None where it has none of its own."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":
            return None
        storage.data_ptr()
    except (RuntimeError, ValueError):  # opaque layouts, parameters that are not made yet, wrapper subclasses
        return None
    return storage


class _ThreadState(threading.local):
    active = False
    exempt = 0
    host = 0


class _DispatchedReads:
    """While entered anywhere, ``Tensor.tolist`` and pickling run one operator on the tensor first.

    Both read CPU memory without any operator, where a device would copy to the host with one. The operator is
    checked by whatever mode is active in the calling thread, and costs next to nothing elsewhere.
    """

    _lock = threading.Lock()
    _users = 0
    _reduce_ex = torch.Tensor.__reduce_ex__

    def __enter__(self) -> None:
        cls = _DispatchedReads
        with cls._lock:
            cls._users += 1
            if cls._users == 1:
                torch.Tensor.tolist = _tolist  # type: ignore[method-assign, assignment]
                torch.Tensor.__reduce_ex__ = _reduce_ex  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        cls = _DispatchedReads
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                del torch.Tensor.tolist  # the one it inherits is visible again
                torch.Tensor.__reduce_ex__ = cls._reduce_ex  # type: ignore[method-assign]


def _tolist(tensor: torch.Tensor) -> Any:
    tensor.detach()
    return torch._C.TensorBase.tolist(tensor)


def _reduce_ex(tensor: torch.Tensor, protocol: Any) -> Any:
    tensor.detach()
    return _DispatchedReads._reduce_ex(tensor, protocol)
