# SPDX-License-Identifier: Apache-2.0
"""A copied value as JSON and bytes, for another rank; no pickle.

`encode` turns captures into a description and the host storages that belong to it, in the order in which the description
first mentions them. `Decoder` reads a description back, from whoever sent it: everything is checked before `bind` is
given a byte, no module is imported, and a class is one that stands at the receiver's own place or belongs to the package
of the state. Pure, except that arrays need the numpy that is loaded already.

A node of the description is one of

====================================  ==============================================================================
``L``                                 a tensor on the next storage; ``L`` is the number of its layout
``["v", L, S]``                       a tensor that shares storage number ``S``
``["p", literal]``                    a number, text, …
``["a", dtype, shape]``               an array, on the next storage
``["g", node]``                       a random number generator, by its state
``["d", kind, factory, keys, nodes]`` a dict, ``["s", kind, maxlen, nodes]`` a sequence or set,
``["r", kind, names, nodes]``         another object by its attributes
``["=", N]``                          what stands at node number ``N`` too (literals have no number)
====================================  ==============================================================================
"""

from __future__ import annotations

import math
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from mindspeed_recovery.core import container
from mindspeed_recovery.core.values import (
    ArrayNode,
    Buffers,
    Capture,
    DictNode,
    GeneratorNode,
    Layout,
    Node,
    PlainNode,
    RecordNode,
    Restoring,
    SequenceNode,
    TensorNode,
    key_text,
)
from mindspeed_recovery.errors import StateError

MAX_DEPTH = 64
_MAX_INT = 2**63 - 1

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
_ARRAY_DTYPE = re.compile(r"[<>|]([biufc])(1|2|4|8|16)")
_MAPPINGS = (dict, OrderedDict, defaultdict, MappingProxyType)
_SEQUENCES = (list, tuple, deque, set, frozenset, torch.Size)
_FACTORIES = (int, float, bool, str, list, dict, set)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*_MAPPINGS, *_SEQUENCES, *_FACTORIES)}


class Malformed(ValueError):
    """A description that no rank of this version has made."""


def class_name(kind: type) -> str:
    """How a class is named to the other rank."""
    for plain, ours in container.CONTAINERS.items():
        if kind is ours:
            kind = plain
    return kind.__name__ if _KINDS.get(kind.__name__) is kind else f"{kind.__module__}:{kind.__qualname__}"


# ---- encode ------------------------------------------------------------------------------------------------------------


def encode(captures: Iterable[tuple[str, Capture]]) -> tuple[dict[str, Any], list[Tensor]]:
    """Describe captures, each with its path. Returns the description and the storages (uint8, on the host).

    Raises StateError, with the path, for a value that has no meaning on another rank: a process group, a function, ….
    """
    encoder = _Encoder()
    places = [[path, encoder.node(capture.root, path)] for path, capture in captures]
    layouts = [encoder.layout_text(*layout) for layout in encoder.layouts]
    description = {
        "layouts": layouts,
        "places": places,
        "bytes": sum(storage.numel() for storage in encoder.storages),
    }
    return description, encoder.storages


class _Encoder:
    def __init__(self) -> None:
        self.storages: list[Tensor] = []
        self.layouts: dict[tuple[Layout, int], int] = {}
        self._numbers: dict[int, int] = {}
        self._storage_numbers: dict[int, int] = {}
        self._made: list[Capture] = []  # alive for as long as their ids are in use

    def node(self, node: Node, path: str) -> Any:
        if isinstance(node, PlainNode):
            return ["p", _literal(node.value, path)]
        if id(node) in self._numbers:
            return ["=", self._numbers[id(node)]]
        self._numbers[id(node)] = len(self._numbers)
        if isinstance(node, TensorNode):
            return self._tensor(node)
        if isinstance(node, ArrayNode):
            return self._array(node.array, path)
        if isinstance(node, GeneratorNode):
            state = Capture(node.state, Buffers(_host_empty), path)
            self._made.append(state)
            return ["g", self.node(state.root, path)]
        if isinstance(node, DictNode):
            if node.factory is not None and node.factory not in _FACTORIES:
                _unsendable(node.factory, path)
            factory = None if node.factory is None else node.factory.__name__
            keys = [_literal(key, path) for key in node.items]
            items = [self.node(n, path + key_text(k, i)) for i, (k, n) in enumerate(node.items.items())]
            return ["d", class_name(node.kind), factory, keys, items]
        if isinstance(node, SequenceNode):
            items = [self.node(item, f"{path}[{i}]") for i, item in enumerate(node.items)]
            return ["s", class_name(node.kind), node.maxlen, items]
        if isinstance(node, RecordNode):
            items = [self.node(part, f"{path}.{name}") for name, part in node.parts.items()]
            return ["r", class_name(node.kind), list(node.parts), items]
        raise TypeError(f"a {type(node).__name__} has no description")

    def _tensor(self, node: TensorNode) -> Any:
        key = node.layout, node.host.numel()
        layout = self.layouts.get(key)
        if layout is None:
            if node.layout.dtype not in DTYPES.values():
                raise StateError(f"a tensor of {node.layout.dtype} cannot be sent")
            layout = self.layouts[key] = len(self.layouts)
        known = self._storage_numbers.setdefault(id(node.host), len(self.storages))
        if known < len(self.storages):
            return ["v", layout, known]
        self.storages.append(node.host)
        return layout

    def _array(self, array: Any, path: str) -> Any:
        if not _ARRAY_DTYPE.fullmatch(array.dtype.str):
            _unsendable(array, path)
        data = bytearray(array.tobytes())
        self.storages.append(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))
        return ["a", array.dtype.str, list(array.shape)]

    @staticmethod
    def layout_text(layout: Layout, size: int) -> list[Any]:
        kind = layout.device.type
        flags = layout.is_parameter + 2 * layout.requires_grad
        dtype = str(layout.dtype).removeprefix("torch.")
        return [dtype, list(layout.shape), list(layout.stride), layout.offset, kind, flags, size]


def _host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _unsendable(value: Any, path: str) -> NoReturn:
    raise StateError(f"{path}: a {type(value).__name__} cannot be sent to another rank")


def _literal(value: Any, path: str) -> Any:
    """Numbers, text and nested tuples of them as JSON that keeps their type."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) <= _MAX_INT else ["x", hex(value)]
    if type(value) is float:
        return ["f", value.hex()]
    if type(value) is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if type(value) is bytes:
        return ["b", value.hex()]
    if type(value) is tuple:
        return ["t", *(_literal(item, path) for item in value)]
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return ["y", str(value).removeprefix("torch.")]
    if isinstance(value, Enum):
        return ["e", class_name(type(value)), value.name]
    _unsendable(value, path)


# ---- decode ------------------------------------------------------------------------------------------------------------


class Decoder:
    """Reads one description. ``find_class``: the class of a name, or None; ``find_device``: this rank's device of a type
    ("cpu", "npu", …), or None; ``limit``: bytes that the state may have.

    Attributes: ``roots``: (path, node) of each place; ``storages``: for each the path that leads to it first and its
    bytes. Allocates nothing of what the description asks for. Raises Malformed for a description that is not one, and
    StateError for one that this rank has no use for.
    """

    def __init__(
        self,
        description: Mapping[str, Any],
        find_class: Callable[[str], type | None],
        find_device: Callable[[str], torch.device | None],
        limit: int,
    ) -> None:
        self._find_class, self._find_device, self._limit = find_class, find_device, limit
        self.storages: list[tuple[str, int]] = []
        self.nbytes = 0
        self._nodes: list[Node | None] = []
        self._tensors: list[tuple[int, TensorNode]] = []
        self._arrays: list[tuple[int, ArrayNode, str, list[int]]] = []
        self._generators: list[tuple[GeneratorNode, Node]] = []
        try:
            self._layouts = [self._layout(*text) for text in description["layouts"]]
            self.roots = [(_text(path), self._node(node, path, 0)) for path, node in description["places"]]
            claimed = description["bytes"]
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            raise error if isinstance(error, Malformed) else Malformed(f"{type(error).__name__}: {error}") from None
        if claimed != self.nbytes:
            raise Malformed(f"{claimed} bytes are announced, but the tensors have {self.nbytes}")
        if len({path for path, _ in self.roots}) < len(self.roots):
            raise Malformed("a place is described twice")

    def bind(self, storages: list[Tensor]) -> None:
        """Give the nodes their bytes: a uint8 host tensor for each storage, of just its size."""
        for number, node in self._tensors:
            node.host = storages[number]
        for number, array, dtype, shape in self._arrays:
            data = bytearray(storages[number].numpy().tobytes())
            array.array = _numpy().frombuffer(data, dtype=dtype).reshape(shape)
        for generator, state in self._generators:
            generator.state = state.put_back(None, Restoring())

    def _layout(self, dtype: Any, shape: Any, stride: Any, offset: Any, kind: Any, flags: Any, size: Any) -> Any:
        if type(dtype) is not str or dtype not in DTYPES:
            raise Malformed(f"unknown dtype {dtype!r:.40}")
        if len(shape) != len(stride) or len(shape) > MAX_DEPTH:
            raise Malformed("shape and stride do not fit together")
        _check_count(size, "bytes")
        for number in (*shape, *stride, offset):
            _check_count(number, "shape, stride or offset")
        if math.prod(shape) > _MAX_INT:
            raise Malformed("too many elements")
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride)) if math.prod(shape) else -1
        if (last + 1) * DTYPES[dtype].itemsize > size:
            raise Malformed(f"a tensor of shape {shape} reaches beyond its storage of {size} bytes")
        if size > self._limit:
            raise StateError(f"a storage of {size} bytes is above the limit of {self._limit}")
        if type(flags) is not int or flags not in range(4):
            raise Malformed("unknown flags")
        device = self._find_device(_text(kind))
        if device is None:
            raise StateError(f"it has tensors on a device of type '{kind:.20}', which this rank has not")
        layout = Layout(
            DTYPES[dtype], torch.Size(shape), tuple(stride), offset, device, bool(flags & 1), bool(flags & 2)
        )
        return layout, size

    def _storage(self, path: str, size: int) -> int:
        self.nbytes += size
        if self.nbytes > self._limit:
            raise StateError(f"more than the limit of {self._limit} bytes")
        self.storages.append((path, size))
        return len(self.storages) - 1

    def _node(self, node: Any, path: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise Malformed(f"nested deeper than {MAX_DEPTH}")
        if type(node) is int:
            return self._tensor(node, path, None)
        tag, *rest = node
        if tag == "p":
            (value,) = rest
            return PlainNode(self._value(value, 0))
        if tag == "=":
            (number,) = rest
            known = self._nodes[_check_count(number, "number of a node")]
            if known is None:
                raise Malformed("a value that contains itself")
            return known
        if tag == "v":
            layout, storage = rest
            return self._tensor(layout, path, storage)
        number = len(self._nodes)
        self._nodes.append(None)
        result = self._nodes[number] = self._composite(tag, rest, path, depth)
        return result

    def _tensor(self, number: Any, path: str, storage: Any) -> Node:
        layout, size = self._layouts[_check_count(number, "number of a layout")]
        if storage is None:
            storage = self._storage(path, size)
        elif self.storages[_check_count(storage, "number of a storage")][1] != size:
            raise Malformed("two sizes for one storage")
        node = TensorNode(layout, _NO_BYTES)
        self._nodes.append(node)
        self._tensors.append((storage, node))
        return node

    def _composite(self, tag: Any, rest: list[Any], path: str, depth: int) -> Node:
        if tag == "a":
            return self._array(*rest, path=path)
        if tag == "g":
            (state,) = rest
            generator = GeneratorNode(None, None)
            self._generators.append((generator, self._node(state, path, depth + 1)))
            return generator
        if tag == "d":
            kind, factory, keys, nodes = rest
            keys = [self._value(key, 0) for key in keys]
            _check_names(keys, nodes)
            if factory is not None and _KINDS.get(factory) not in _FACTORIES:
                raise Malformed(f"unknown factory {factory!r:.40}")
            items = {k: self._node(n, path + key_text(k, i), depth + 1) for i, (k, n) in enumerate(zip(keys, nodes))}
            return DictNode(self._kind(kind, Mapping), items, None if factory is None else _KINDS[factory])
        if tag == "s":
            kind, maxlen, nodes = rest
            if maxlen is not None:
                _check_count(maxlen, "maxlen")
            parts = [self._node(n, f"{path}[{i}]", depth + 1) for i, n in enumerate(nodes)]
            return SequenceNode(self._kind(kind, (list, tuple, deque, set, frozenset)), parts, maxlen)
        if tag == "r":
            kind, names, nodes = rest
            _check_names(names, nodes)
            for name in names:
                if not _text(name).isidentifier() or name.startswith("__"):
                    raise Malformed(f"{name!r:.40} is not the name of an attribute")
            attributes = {name: self._node(n, f"{path}.{name}", depth + 1) for name, n in zip(names, nodes)}
            return RecordNode(self._kind(kind, object), attributes)
        raise Malformed(f"unknown node {tag!r:.40}")

    def _array(self, dtype: Any, shape: Any, *, path: str) -> Node:
        match = _ARRAY_DTYPE.fullmatch(_text(dtype))
        if match is None or len(shape) > 32:
            raise Malformed(f"unknown array type {dtype!r:.40}")
        try:
            known = _numpy().dtype(dtype)
        except TypeError:
            raise Malformed(f"unknown array type {dtype!r:.40}") from None
        size = math.prod([known.itemsize, *(_check_count(length, "shape") for length in shape)])
        array = ArrayNode(None)
        self._arrays.append((self._storage(path, size), array, dtype, list(shape)))
        return array

    def _kind(self, name: Any, base: Any) -> type:
        """The class of a value; it must be a subclass of ``base``."""
        kind = _KINDS.get(_text(name)) or self._find_class(name)
        if kind is None:
            raise StateError(f"it has a {name:.80}, a class that is not known here")
        if not issubclass(kind, base) and not (base is Mapping and kind is MappingProxyType):
            raise Malformed(f"a {name:.80} is no {base}")
        return kind

    def _value(self, literal: Any, depth: int) -> Any:
        if literal is None or type(literal) in (bool, int, str):
            return literal
        if depth > MAX_DEPTH:
            raise Malformed(f"nested deeper than {MAX_DEPTH}")
        tag, *rest = literal
        if tag == "t":
            return tuple(self._value(item, depth + 1) for item in rest)
        if tag == "e":
            kind, name = rest
            return self._kind(kind, Enum)[_text(name)]  # type: ignore[index]
        read = _LITERALS.get(tag) if isinstance(tag, str) else None
        if read is None:
            raise Malformed(f"unknown literal {tag!r:.40}")
        return read(*map(_text, rest))


_LITERALS: dict[str, Callable[..., Any]] = {
    "x": lambda text: int(text, 16),
    "f": float.fromhex,
    "c": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
    "b": bytes.fromhex,
    "y": DTYPES.__getitem__,
}
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Malformed(f"{value!r:.40} is not text")
    return value


def _check_count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise Malformed(f"{what}: {value!r:.40} is not a count")
    return value


def _check_names(names: Any, nodes: Any) -> None:
    if len(names) != len(nodes) or len(set(names)) < len(names):
        raise Malformed("names and values do not fit together")


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        raise StateError("it has arrays, and numpy is not loaded here")
    return numpy
