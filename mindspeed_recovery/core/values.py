# SPDX-License-Identifier: Apache-2.0
"""Values of states: nested dicts, lists, dataclasses and objects with tensors and random generators in them.

`tensors` walks over the tensors of a value; `Capture` keeps a copy of one on the host and writes it back *in place*:
containers keep their identity, since others may hold them by name, and tensors keep their storage.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_recovery.core import memory

_SEQUENCES = (list, tuple, deque, set, frozenset)
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")


def key_text(key: Any, index: int) -> str:
    """How an item of a dict is written in a path. Other keys than text and numbers are never asked for their repr."""
    return f"[{key!r}]" if type(key) in (str, int) else f"[#{index}]"


def children(value: Any, top: bool = False) -> Iterator[tuple[str, Any]]:
    """The parts of a value that can hold tensors, with the text that leads to each.

    Dicts, sequences, sets, dataclass instances and modules are followed at any depth; the attributes of any other object
    where it is itself the state (``top``) or holds a tensor directly, so that a walk never strays into the framework.
    """
    if isinstance(value, Mapping):
        for index, (key, item) in enumerate(list(value.items())):
            yield key_text(key, index), item
    elif isinstance(value, _SEQUENCES):
        for index, item in enumerate(list(value)):
            yield f"[{index}]", item
    elif is_record(value, top):
        for key in _attributes(value):
            yield f".{key}", getattr(value, key)


_OPAQUE: tuple[type, ...] = (type, Tensor, Enum)
if dist.is_available():
    _OPAQUE += (dist.ProcessGroup,)  # a means to communicate is not state; its attributes are its runtime's


def is_record(value: Any, top: bool = False) -> bool:
    """Whether the attributes of ``value`` are part of the state."""
    if isinstance(value, _OPAQUE) or is_generator(value):
        return False
    if dataclasses.is_dataclass(value) or isinstance(value, nn.Module):
        return True
    if callable(value) or not hasattr(value, "__dict__"):
        return False
    return top or any(isinstance(item, Tensor) for item in list(vars(value).values()))


def _attributes(record: Any) -> list[str]:
    if isinstance(record, nn.Module):
        return list(_MODULE_PARTS)
    if hasattr(record, "__dict__"):
        return list(vars(record))
    return [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]  # with slots


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a random number generator, by what it can do: torch's, numpy's and ``random``'s all pass."""
    if isinstance(value, type):
        return False
    return _has_bit_generator(value) or any(
        callable(getattr(value, reader, None)) and callable(getattr(value, writer, None))
        for reader, writer in (("get_state", "set_state"), ("getstate", "setstate"))
    )


def _has_bit_generator(value: Any) -> bool:
    return hasattr(getattr(value, "bit_generator", None), "state")


def storage_key(tensor: Tensor) -> int:
    """What tensors that share a storage have in common, while it lives; the tensor itself where it has no storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def tensors(value: Any, path: str = "", top: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in ``value`` with its path. Reads no tensor's data or metadata."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for step, child in children(value, top):
        yield from tensors(child, path + step, top=False)


class Buffers:
    """Host buffers of one copy, by path; a buffer is allocated once and used in every later step."""

    def __init__(self, host_empty: memory.HostEmpty) -> None:
        self._host_empty = host_empty
        self._buffers: dict[str, Tensor] = {}
        self._used: set[str] = set()

    def get(self, path: str, size: int) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.numel() != size:
            buffer = self._buffers[path] = self._host_empty([size], torch.uint8)
        self._used.add(path)
        return buffer

    def sweep(self) -> None:
        """Free the buffers that nobody has asked for since the last sweep."""
        if len(self._used) < len(self._buffers):
            self._buffers = {path: buffer for path, buffer in self._buffers.items() if path in self._used}
        self._used.clear()

    def __len__(self) -> int:
        return len(self._buffers)


class Restoring:
    """What belongs to one restore: no storage gets two different copies, and tensors that shared one share one again."""

    def __init__(self) -> None:
        # With the tensor, so that no storage made later has the address of one that was written.
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self._fresh: dict[int, torch.UntypedStorage] = {}
        self._claims: dict[int, tuple[Any, Node]] = {}
        self.results: dict[int, Any] = {}

    def claim(self, value: Any, node: Node) -> bool:
        """Whether ``node`` may write into ``value``: nobody else has. The aborted step may have put one object into two
        places that had one each."""
        return self._claims.setdefault(id(value), (value, node))[1] is node

    def write(self, tensor: Tensor, host: Tensor) -> bool:
        """Write ``host`` over the storage of ``tensor``; False if that has been given another copy already."""
        key = storage_key(tensor)
        if key not in self._written:
            memory.load(tensor, host)
            self._written[key] = (tensor, host)
        written = self._written[key][1]
        return written is host or torch.equal(written, host)  # one storage may have been copied for several places

    def fresh(self, host: Tensor, device: torch.device) -> torch.UntypedStorage:
        """New device memory with the contents of ``host``."""
        if id(host) not in self._fresh:
            storage = torch.empty(host.numel(), dtype=torch.uint8, device=device)
            storage.copy_(host)
            self._fresh[id(host)] = storage.untyped_storage()
        return self._fresh[id(host)]


class Capture:
    """A copy of one value, with its structure. Not thread-safe; made and written back on different threads in turn."""

    def __init__(self, value: Any, buffers: Buffers, path: str = "") -> None:
        self.nbytes = 0
        self._by_storage: dict[int, Tensor] = {}
        self._nodes: dict[int, Node] = {}
        self.root = self._take(value, buffers, path, top=True)
        # Addresses mean nothing once what was there may have been freed.
        self._by_storage.clear()
        self._nodes.clear()

    @classmethod
    def of(cls, root: Node, nbytes: int) -> Capture:
        """A copy that was taken elsewhere."""
        capture = cls.__new__(cls)
        capture.root, capture.nbytes = root, nbytes
        return capture

    def _take(self, value: Any, buffers: Buffers, path: str, top: bool) -> Node:
        node = self._nodes.get(id(value))
        if node is None:  # an object that stands in several places has one node
            node = self._nodes[id(value)] = self._make(value, buffers, path, top)
        return node

    def _make(self, value: Any, buffers: Buffers, path: str, top: bool) -> Node:
        if isinstance(value, Tensor):
            # Tensors that share a storage share its one copy.
            key = storage_key(value)
            host = self._by_storage.get(key)
            if host is None:
                host = self._by_storage[key] = buffers.get(path, memory.nbytes(value))
                memory.save(value, host)
                self.nbytes += host.numel()
            return TensorNode(Layout.of(value), host, value)
        if is_generator(value):
            return GeneratorNode(value, generator_state(value))
        if getattr(value, "shape", None) and hasattr(value, "__array_interface__"):  # a numpy array, not a number
            return ArrayNode(value.copy())
        if isinstance(value, Mapping):
            items = {}
            for index, (key, item) in enumerate(list(value.items())):
                items[key] = self._take(item, buffers, path + key_text(key, index), False)
            return DictNode(type(value), items, value.default_factory if isinstance(value, defaultdict) else None)
        if isinstance(value, _SEQUENCES):
            parts = [self._take(item, buffers, path + step, False) for step, item in children(value)]
            return SequenceNode(type(value), parts, value.maxlen if isinstance(value, deque) else None)
        if is_record(value, top):
            attributes = {
                key: self._take(getattr(value, key), buffers, f"{path}.{key}", False) for key in _attributes(value)
            }
            return RecordNode(type(value), attributes)
        return PlainNode(value)

    def restore(self, current: Any, restoring: Restoring | None = None) -> Any:
        """Write the copy back over ``current`` where that is possible, and return what should stand in its place.

        ``restoring``: shared by the restores that belong together.
        """
        return self.root.put_back(current, restoring or Restoring())

    def matches(self, current: Any) -> bool:
        """Whether ``current`` still has the structure and bytes of the copy (its tensors must all be safe)."""
        return self.root.matches(current)


class Node:
    def put_back(self, current: Any, restoring: Restoring) -> Any:
        """`restore`, once: what stood in several places does so again."""
        if id(self) not in restoring.results:
            restoring.results[id(self)] = self.restore(current, restoring)
        return restoring.results[id(self)]

    def restore(self, current: Any, restoring: Restoring) -> Any:
        raise NotImplementedError

    def matches(self, current: Any) -> bool:
        raise NotImplementedError


class PlainNode(Node):
    """A number, string, enum, process group, …: kept by reference."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def restore(self, current: Any, restoring: Restoring) -> Any:
        return self.value

    def matches(self, current: Any) -> bool:
        return bool(self.value is current or self.value == current)


class Layout(NamedTuple):
    """How a tensor lies in its storage, and what kind of tensor it is. ``offset`` and ``stride`` in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    is_parameter: bool
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.device,
            isinstance(tensor, nn.Parameter),
            tensor.requires_grad and tensor.is_leaf,
        )


class TensorNode(Node):
    """``host``: the bytes of the whole storage."""

    def __init__(self, layout: Layout, host: Tensor, tensor: Tensor | None = None) -> None:
        self.layout, self.host = layout, host
        # Weak: a copy must not keep device memory alive that the framework has dropped.
        self._tensor = weakref.ref(tensor) if tensor is not None else _nothing

    def _fits(self, tensor: Any) -> TypeGuard[Tensor]:
        layout = self.layout
        return (
            isinstance(tensor, Tensor)
            and (tensor.dtype, tensor.device, tensor.shape) == (layout.dtype, layout.device, layout.shape)
            and (tensor.stride(), tensor.storage_offset()) == (layout.stride, layout.offset)
            and memory.nbytes(tensor) == self.host.numel()
        )

    def restore(self, current: Any, restoring: Restoring) -> Any:
        # The tensor that stood here first: the aborted step may have put another state's tensor in its place.
        for tensor in (self._tensor(), current):
            if self._fits(tensor) and restoring.write(tensor, self.host):
                return tensor
        layout = self.layout
        storage = restoring.fresh(self.host, layout.device)
        fresh = torch.empty(0, dtype=layout.dtype, device=layout.device)
        fresh.set_(storage, layout.offset, layout.shape, layout.stride)
        if layout.is_parameter:
            return nn.Parameter(fresh, requires_grad=layout.requires_grad)
        return fresh.requires_grad_() if layout.requires_grad else fresh

    def matches(self, current: Any) -> bool:
        return self._fits(current) and torch.equal(memory.storage_bytes(current).cpu(), self.host)


def _nothing() -> None:
    return None


class GeneratorNode(Node):
    """``generator``: the one that was copied; None if that was on another rank."""

    def __init__(self, generator: Any, state: Any) -> None:
        self.generator, self.state = generator, state

    def restore(self, current: Any, restoring: Restoring) -> Any:
        generator = current if self.generator is None else self.generator  # the one that stood here, as with tensors
        if not is_generator(generator):
            raise TypeError(f"a random number generator was copied, but a {type(generator).__name__} stands here")
        if _has_bit_generator(generator):
            generator.bit_generator.state = self.state
        elif hasattr(generator, "set_state"):
            generator.set_state(self.state)
        else:
            generator.setstate(self.state)
        return generator

    def matches(self, current: Any) -> bool:
        return is_generator(current)


def generator_state(generator: Any) -> Any:
    """The state of a random number generator, as its own reader gives it."""
    if _has_bit_generator(generator):
        return generator.bit_generator.state
    return generator.get_state() if hasattr(generator, "get_state") else generator.getstate()


def layouts(node: Node, path: str) -> Iterator[tuple[str, Layout]]:
    """Every tensor of a copy with its path, as `tensors` has it for the value."""
    if isinstance(node, TensorNode):
        yield path, node.layout
    elif isinstance(node, DictNode):
        for index, (key, item) in enumerate(node.items.items()):
            yield from layouts(item, path + key_text(key, index))
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.items):
            yield from layouts(item, f"{path}[{index}]")
    elif isinstance(node, RecordNode):
        for name, part in node.parts.items():
            yield from layouts(part, f"{path}.{name}")


class ArrayNode(Node):
    """A numpy array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def restore(self, current: Any, restoring: Restoring) -> Any:
        same = type(current) is type(self.array) and (current.shape, current.dtype) == (
            self.array.shape,
            self.array.dtype,
        )
        if not same or not restoring.claim(current, self):
            return self.array.copy()
        current[...] = self.array
        return current

    def matches(self, current: Any) -> bool:
        return type(current) is type(self.array) and current.tobytes() == self.array.tobytes()


class DictNode(Node):
    """``factory``: of a defaultdict."""

    def __init__(self, kind: Any, items: dict[Any, Node], factory: Any = None) -> None:
        self.kind, self.items, self.factory = kind, items, factory

    def restore(self, current: Any, restoring: Restoring) -> Any:
        old = current if isinstance(current, Mapping) else {}
        items = {key: node.put_back(old.get(key), restoring) for key, node in self.items.items()}
        if not issubclass(self.kind, MutableMapping):  # a read-only view
            return self.kind(items)
        in_place = isinstance(current, self.kind) and restoring.claim(current, self)
        target: Any = current if in_place else self._empty()
        target.clear()
        target.update(items)
        return target

    def _empty(self) -> Any:
        return self.kind(self.factory) if issubclass(self.kind, defaultdict) else self.kind()

    def matches(self, current: Any) -> bool:
        return (
            isinstance(current, Mapping)
            and list(current) == list(self.items)
            and all(node.matches(current[key]) for key, node in self.items.items())
        )


class SequenceNode(Node):
    """A list, tuple, deque or set, or of a class made from one. ``maxlen``: of a deque."""

    def __init__(self, kind: Any, items: list[Node], maxlen: int | None = None) -> None:
        self.kind, self.items, self.maxlen = kind, items, maxlen

    def restore(self, current: Any, restoring: Restoring) -> Any:
        same_kind = isinstance(current, self.kind)
        old = list(current) if same_kind and not isinstance(current, (set, frozenset)) else []
        old += [None] * (len(self.items) - len(old))
        items = [node.put_back(value, restoring) for node, value in zip(self.items, old)]
        if issubclass(self.kind, (tuple, frozenset)):
            unchanged = same_kind and len(current) == len(items) and all(a is b for a, b in zip(current, items))
            return current if unchanged else self._build(items)
        if not same_kind or not restoring.claim(current, self):
            return self._build(items)
        current.clear()
        (current.update if isinstance(current, set) else current.extend)(items)
        return current

    def _build(self, items: list[Any]) -> Any:
        if hasattr(self.kind, "_make"):  # a named tuple
            return self.kind._make(items)
        return self.kind(items, self.maxlen) if issubclass(self.kind, deque) else self.kind(items)

    def matches(self, current: Any) -> bool:
        if not isinstance(current, self.kind) or len(current) != len(self.items):
            return False
        return isinstance(current, (set, frozenset)) or all(n.matches(value) for n, value in zip(self.items, current))


class RecordNode(Node):
    """A dataclass instance, a module, or another object by its attributes."""

    def __init__(self, kind: type, parts: dict[str, Node]) -> None:
        self.kind, self.parts = kind, parts

    def restore(self, current: Any, restoring: Restoring) -> Any:
        in_place = type(current) is self.kind and restoring.claim(current, self)
        record = current if in_place else object.__new__(self.kind)
        parts = {key: node.put_back(getattr(record, key, None), restoring) for key, node in self.parts.items()}
        for key in _attributes(record):
            if key not in parts:
                object.__delattr__(record, key)
        for key, value in parts.items():
            # Past __setattr__: frozen dataclasses, and modules, whose parts are restored in place.
            object.__setattr__(record, key, value)
        return record

    def matches(self, current: Any) -> bool:
        return type(current) is self.kind and all(
            hasattr(current, key) and node.matches(getattr(current, key)) for key, node in self.parts.items()
        )
