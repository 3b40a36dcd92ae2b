# SPDX-License-Identifier: Apache-2.0
"""Whether two runs are the same, bit for bit: their TensorBoard scalars, and the states they saved.

Nothing is rounded and no tolerance is given. -0.0 differs from 0.0, and a NaN equals only the NaN of the same
bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_recovery.core.report import TAGS

Key = tuple[str, int]
"""A point of a curve: tag and step."""


@dataclass
class Comparison:
    """What a comparison found.

    Attributes:
        compared: how many points or values at least one side has.
        equal: how many of them are the same on both sides.
        differences: one line of text for each of the others; it begins with the place.
    """

    compared: int = 0
    equal: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether something was compared and all of it is the same: two empty sides prove nothing."""
        return self.compared > 0 and self.equal == self.compared

    def note(self, difference: str | None) -> None:
        """Count one point or value: ``difference`` says how it differs, None that it does not."""
        self.compared += 1
        if difference is None:
            self.equal += 1
        else:
            self.differences.append(difference)


# ---- scalars -----------------------------------------------------------------------------------------------


def scalars(logdir: Path | str) -> dict[Key, list[int]]:
    """Every scalar point of all event files below a folder, read by TensorBoard itself.

    Returns:
        ``{(tag, step): [bits, …]}``: the bits of each float32 value as a whole number, in the order of the
        files' names and within a file as written. More than one value is a point that was written more than
        once, which most readers hide.

    Raises:
        FileNotFoundError: no event file is there.
        ImportError: tensorboard is not installed.
    """
    files = sorted(path for path in Path(logdir).rglob("*tfevents*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{logdir}: no TensorBoard event file is below this folder")
    points: dict[Key, list[int]] = {}
    for file in files:
        for key, bits in _scalars_of(file):
            points.setdefault(key, []).append(bits)
    return points


def _scalars_of(file: Path) -> Iterator[tuple[Key, int]]:
    import numpy
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    of_scalars: dict[str, bool] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            # Only the first value of a tag in a file need say which plugin draws it.
            if value.tag not in of_scalars:
                of_scalars[value.tag] = value.metadata.plugin_data.plugin_name == "scalars"
            if of_scalars[value.tag]:
                number = numpy.asarray(tensor_util.make_ndarray(value.tensor), dtype=numpy.float32)
                yield (value.tag, event.step), int(number.view(numpy.uint32).item())


def value_of(bits: int) -> float:
    """The value of a float32's bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def compare_scalars(a: Path | str, b: Path | str, ignore: tuple[str, ...] = (TAGS,)) -> Comparison:
    """Compare two log folders: every (tag, step) must have the same values, written equally often.

    ``ignore``: beginnings of tags that are left out. Tags below ``recovery/`` are about the recoveries themselves, and a run
    without a fault has none: by default they are no part of what must be equal.
    Raises what `scalars` raises.
    """
    left, right = scalars(a), scalars(b)
    comparison = Comparison()
    for key in sorted(left.keys() | right.keys()):
        if not key[0].startswith(ignore):
            difference = _point_difference(left.get(key, []), right.get(key, []))
            comparison.note(difference and f"{key[0]!r} at step {key[1]}: {difference}")
    return comparison


def _point_difference(left: list[int], right: list[int]) -> str | None:
    if left == right:
        return None
    if not left or not right:
        return f"only in {'b' if right else 'a'}"
    if len(left) != len(right):
        return f"written {len(left)} times in a, {len(right)} times in b"
    shown = [", ".join(f"{value_of(bits)!r} ({bits:#010x})" for bits in side) for side in (left, right)]
    return " is not ".join(shown)


# ---- states ------------------------------------------------------------------------------------------------


def compare_states(file_a: Path | str, file_b: Path | str) -> Comparison:
    """Compare two files of ``torch.save`` that hold nested dicts, lists and tuples of tensors and values.

    Tensors must have the same dtype, shape and bytes, other values the same type and be equal by ``==``. The
    files are read without running any code of theirs, to the CPU.

    Raises:
        OSError: a file cannot be read.
        pickle.UnpicklingError: a file holds objects other than tensors and plain values.
    """
    import torch

    left, right = (torch.load(file, map_location="cpu", weights_only=True) for file in (file_a, file_b))
    comparison = Comparison()
    _compare("", left, right, comparison)
    return comparison


def _compare(path: str, left: Any, right: Any, comparison: Comparison) -> None:
    if type(left) is type(right) and isinstance(left, dict):
        _compare_items(path, left, right, comparison)
    elif type(left) is type(right) and isinstance(left, list | tuple):
        _compare_items(path, dict(enumerate(left)), dict(enumerate(right)), comparison)
    else:
        difference = _value_difference(left, right)
        comparison.note(difference and f"{path or 'all of it'}: {difference}")


def _compare_items(path: str, left: dict[Any, Any], right: dict[Any, Any], comparison: Comparison) -> None:
    for key in [*left, *(key for key in right if key not in left)]:
        place = f"{path}[{key!r}]"
        if key in left and key in right:
            _compare(place, left[key], right[key], comparison)
        else:
            comparison.note(f"{place}: only in {'a' if key in left else 'b'}")


def _value_difference(left: Any, right: Any) -> str | None:
    import torch

    if type(left) is not type(right):
        return f"{type(left).__name__} is not {type(right).__name__}"
    if isinstance(left, torch.Tensor):
        return _tensor_difference(left, right)
    return None if left == right else f"{left!r} is not {right!r}"


def _tensor_difference(left: Any, right: Any) -> str | None:
    for what in ("dtype", "shape"):
        if getattr(left, what) != getattr(right, what):
            return f"{what} {_plain(getattr(left, what))} is not {_plain(getattr(right, what))}"
    differs = (_bytes(left) != _bytes(right)).any(dim=1)
    return f"{int(differs.sum())} of {left.numel()} elements differ" if differs.any() else None


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _bytes(tensor: Any) -> Any:
    """uint8 of shape [elements, bytes of one element]."""
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1, 1)
    return flat.view(torch.uint8)
