# SPDX-License-Identifier: Apache-2.0
"""Values of states: nested dicts, lists, dataclasses and objects with tensors and random generators in them.

`tensors` walks over the tensors of a value; `Capture` keeps a copy of one on the host and writes it back *in place*:
containers keep their identity, since others may hold them by name, and tensors keep their storage.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from mindspeed_recovery.core import memory

_SEQUENCES = (list, tuple, deque)


def children(value: Any, top: bool = False) -> Iterator[tuple[str, Any]]:
    """The parts of a value that can hold tensors, with the text that leads to each.

    Dicts, lists, tuples, deques, sets and dataclass instances are followed at any depth; the attributes of any other
    object only where it is itself the state (``top``), so that a walk never strays into the framework.
    """
    if isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield f"[{key!r}]", item
    elif isinstance(value, _SEQUENCES):
        for index, item in enumerate(list(value)):
            yield f"[{index}]", item
    elif isinstance(value, (set, frozenset)):
        for item in list(value):
            yield "{…}", item
    elif is_record(value, top):
        for key, item in list(vars(value).items()):
            yield f".{key}", item


def is_record(value: Any, top: bool = False) -> bool:
    """Whether the attributes of ``value`` are part of the state."""
    if isinstance(value, (type, Tensor)) or not hasattr(value, "__dict__") or is_generator(value):
        return False
    return dataclasses.is_dataclass(value) or (top and not callable(value))


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a random number generator, by what it can do: torch's, numpy's and ``random``'s all pass."""
    return not isinstance(value, type) and any(
        callable(getattr(value, reader, None)) and callable(getattr(value, writer, None))
        for reader, writer in (("get_state", "set_state"), ("getstate", "setstate"))
    )


def tensors(value: Any, path: str = "", top: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in ``value`` with its path. Reads no tensor's data or metadata."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for step, child in children(value, top):
        yield from tensors(child, path + step, top=False)


class Buffers:
    """Host buffers of one copy slot, by path; a buffer is allocated once and used in every later step."""

    def __init__(self, host_empty: memory.HostEmpty) -> None:
        self._host_empty = host_empty
        self._buffers: dict[str, Tensor] = {}

    def get(self, path: str, size: int) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.numel() != size:
            buffer = self._buffers[path] = self._host_empty([size], torch.uint8)
        return buffer

    def __len__(self) -> int:
        return len(self._buffers)


class Capture:
    """A copy of one value, with its structure. Not thread-safe; made and written back on different threads in turn."""

    def __init__(self, value: Any, buffers: Buffers, path: str = "") -> None:
        self.nbytes = 0
        self._by_storage: dict[int, Tensor] = {}
        self._root = self._take(value, buffers, path, top=True)
        self._by_storage.clear()  # addresses mean nothing once a storage may have been freed

    def _take(self, value: Any, buffers: Buffers, path: str, top: bool) -> _Node:
        if isinstance(value, Tensor):
            # Tensors that share a storage share its one copy.
            key = value.untyped_storage()._cdata
            host = self._by_storage.get(key)
            if host is None:
                host = self._by_storage[key] = buffers.get(path, memory.nbytes(value))
                memory.save(value, host)
                self.nbytes += host.numel()
            return _TensorNode(value, host)
        if is_generator(value):
            return _GeneratorNode(value)
        if isinstance(value, Mapping):
            return _DictNode({k: self._take(v, buffers, f"{path}[{k!r}]", False) for k, v in list(value.items())})
        if isinstance(value, (*_SEQUENCES, set)):
            kind = next(k for k in (*_SEQUENCES, set) if isinstance(value, k))
            return _SequenceNode(
                kind, [self._take(v, buffers, f"{path}[{i}]", False) for i, v in enumerate(list(value))]
            )
        if is_record(value, top):
            items = {k: self._take(v, buffers, f"{path}.{k}", False) for k, v in list(vars(value).items())}
            return _RecordNode(value, items)
        return _PlainNode(value)

    def restore(self, current: Any) -> Any:
        """Write the copy back over ``current`` where that is possible, and return what should stand in its place."""
        return self._root.restore(current)

    def matches(self, current: Any) -> bool:
        """Whether the tensors of ``current`` still have the bytes of the copy (they must all be safe)."""
        return self._root.matches(current)


class _Node:
    def restore(self, current: Any) -> Any:
        raise NotImplementedError

    def matches(self, current: Any) -> bool:
        raise NotImplementedError


class _PlainNode(_Node):
    """A number, string, enum, process group, …: kept by reference."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def restore(self, current: Any) -> Any:
        return self._value

    def matches(self, current: Any) -> bool:
        return bool(self._value is current or self._value == current)


class _TensorNode(_Node):
    def __init__(self, tensor: Tensor, host: Tensor) -> None:
        # Weak: a copy must not keep device memory alive that the framework has dropped.
        self._tensor = weakref.ref(tensor)
        self._host = host
        self._shape, self._stride, self._offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._dtype, self._device = tensor.dtype, tensor.device

    def _fits(self, tensor: Any) -> TypeGuard[Tensor]:
        return (
            isinstance(tensor, Tensor)
            and (tensor.dtype, tensor.device, tensor.shape) == (self._dtype, self._device, self._shape)
            and (tensor.stride(), tensor.storage_offset()) == (self._stride, self._offset)
            and memory.nbytes(tensor) == self._host.numel()
        )

    def restore(self, current: Any) -> Any:
        for tensor in (current, self._tensor()):
            if self._fits(tensor):
                memory.load(tensor, self._host)
                return tensor
        fresh = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
        fresh.copy_(self._host)
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(
            fresh.untyped_storage(), self._offset, self._shape, self._stride
        )

    def matches(self, current: Any) -> bool:
        return self._fits(current) and torch.equal(memory.storage_bytes(current).cpu(), self._host)


class _GeneratorNode(_Node):
    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._new = hasattr(generator, "get_state")
        self._state = generator.get_state() if self._new else generator.getstate()

    def restore(self, current: Any) -> Any:
        generator = current if is_generator(current) else self._generator
        (generator.set_state if self._new else generator.setstate)(self._state)
        return generator

    def matches(self, current: Any) -> bool:
        return is_generator(current)


class _DictNode(_Node):
    def __init__(self, items: dict[Any, _Node]) -> None:
        self._items = items

    def restore(self, current: Any) -> Any:
        old = current if isinstance(current, dict) else {}
        items = {key: node.restore(old.get(key)) for key, node in self._items.items()}
        if not isinstance(current, dict):
            return items
        current.clear()
        current.update(items)
        return current

    def matches(self, current: Any) -> bool:
        return (
            isinstance(current, Mapping)
            and list(current) == list(self._items)
            and all(node.matches(current[key]) for key, node in self._items.items())
        )


class _SequenceNode(_Node):
    def __init__(self, kind: Any, items: list[_Node]) -> None:
        self._kind = kind
        self._items = items

    def restore(self, current: Any) -> Any:
        old = list(current) if isinstance(current, self._kind) and self._kind is not set else []
        old += [None] * (len(self._items) - len(old))
        items = [node.restore(value) for node, value in zip(self._items, old)]
        if self._kind is tuple or not isinstance(current, self._kind):
            unchanged = isinstance(current, tuple) and len(current) == len(items) and all(map(_same, current, items))
            return current if unchanged else self._kind(items)
        current.clear()
        (current.update if self._kind is set else current.extend)(items)
        return current

    def matches(self, current: Any) -> bool:
        if self._kind is set:
            return isinstance(current, set) and len(current) == len(self._items)
        return (
            isinstance(current, self._kind)
            and len(current) == len(self._items)
            and all(node.matches(value) for node, value in zip(self._items, current))
        )


def _same(one: Any, other: Any) -> bool:
    return one is other


class _RecordNode(_Node):
    def __init__(self, record: Any, items: dict[str, _Node]) -> None:
        self._record = record
        self._items = items

    def restore(self, current: Any) -> Any:
        record = current if type(current) is type(self._record) else self._record
        old = dict(vars(record))
        items = {key: node.restore(old.get(key)) for key, node in self._items.items()}
        vars(record).clear()
        vars(record).update(items)
        return record

    def matches(self, current: Any) -> bool:
        return type(current) is type(self._record) and all(
            key in vars(current) and node.matches(vars(current)[key]) for key, node in self._items.items()
        )
