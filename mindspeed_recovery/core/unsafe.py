# SPDX-License-Identifier: Apache-2.0
"""Which tensors are unsafe when an error is handled: those of tracked states, and those that the error's frames show.

What is found is kept as text (`UnsafeNote`): a frame or tensor that were kept alive would hold the memory of the aborted step.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType

from torch import Tensor, nn

from mindspeed_recovery.core.memory import DeviceMemory
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.unsafe_note import PREFIX, UnsafeNote
from mindspeed_recovery.core.values import storage_key
from mindspeed_recovery.errors import LocationError, QuarantineError, is_unsafe_data

logger = logging.getLogger("mindspeed_recovery")

Notes = dict[int, UnsafeNote]
"""By storage. The keys are numbers, which keep nothing alive."""

_MOST_NOTES = 20
_INFRASTRUCTURE = ("torch", "torch_npu", "mindspeed_recovery")


def in_states(registry: Registry, memory: DeviceMemory) -> Notes:
    """The unsafe tensors of tracked states. A container in quarantine is passed over, as is a state that is not there."""
    notes: Notes = {}
    for state in registry:
        try:
            for path, tensor in state.tensors():
                if memory.is_unsafe(tensor):
                    notes.setdefault(storage_key(tensor), _note(state.name, path, tensor))
        except (QuarantineError, LocationError):
            continue
    return notes


def in_frames(
    traceback: TracebackType | None, memory: DeviceMemory, states: Notes, names: Mapping[int, str] | None = None
) -> Notes:
    """The unsafe tensors that the frames of a traceback show, innermost frame first.

    ``states``: what `in_states` has found, to tell whose they are. ``names``: places of further tensors by `storage_key`. A
    tensor of nobody is named by an attribute or global that holds it, else by a local variable. Frames of torch and of this
    package come last, and stand for the line that called them: that is the one to look at.
    """
    names = names or {}
    asked: dict[int, bool] = {}
    notes: Notes = {}
    unnamed: set[int] = set()
    frames = sorted(_frames(traceback), key=lambda entry: _is_infrastructure(entry[0]))
    reader = _read_at(traceback)
    for frame, line in frames:
        seen = reader if _is_infrastructure(frame) else (frame.f_code.co_filename, line)
        for where, is_local, tensor in _shown(frame):
            number = storage_key(tensor)
            if number not in asked:
                asked[number] = memory.is_unsafe(tensor)
                if asked[number]:
                    state = states.get(number)
                    place = state.place if state else names.get(number, where)
                    notes[number] = _note(state.state if state else None, place, tensor, *seen)
                    if place is where and is_local:
                        unnamed.add(number)
            elif number in unnamed and not is_local:
                unnamed.remove(number)
                notes[number] = dataclasses.replace(notes[number], place=where)
    return notes


def annotate(error: BaseException, registry: Registry, memory: DeviceMemory) -> None:
    """Add a note to an unsafe-data error for each unsafe tensor: state, place, shape, file and line. Never raises.

    Where no frame shows one, the tracked states that hold one are named. Python prints notes below the error's text (from
    3.11 on; before, they are in ``__notes__`` only). Does nothing to other errors, and nothing the second time.
    """
    try:
        if not is_unsafe_data(error) or any(str(n).startswith(PREFIX) for n in getattr(error, "__notes__", ())):
            return
        states = in_states(registry, memory)
        notes = list(in_frames(error.__traceback__, memory, states).values())
        if not notes:
            file, line = _read_at(error.__traceback__)
            notes = [dataclasses.replace(note, file=file, line=line) for note in states.values()]
        for note in notes[:_MOST_NOTES]:
            _add_note(error, str(note))
    except Exception:
        logger.debug("the unsafe tensors could not be named", exc_info=True)


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), text]


def _note(state: str | None, place: str, tensor: Tensor, file: str = "", line: int = 0) -> UnsafeNote:
    return UnsafeNote(state, place, str(tuple(tensor.shape)), str(tensor.dtype), file, line)


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """The frames of a traceback and the line in each, innermost first."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1]


def _read_at(traceback: TracebackType | None) -> tuple[str, int]:
    """File and line of the innermost frame that is neither torch's nor ours; empty if there is none."""
    frames = ((f.f_code.co_filename, line) for f, line in _frames(traceback) if not _is_infrastructure(f))
    return next(frames, ("", 0))


def _is_infrastructure(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".", 1)[0] in _INFRASTRUCTURE


def _shown(frame: FrameType) -> Iterator[tuple[str, bool, Tensor]]:
    """The tensors that a frame shows: its locals (True), the attributes of its ``self``, and the globals its code names."""
    code, module = frame.f_code, frame.f_globals.get("__name__", "?")
    function = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
    local = _locals(frame)
    owner = local.get("self")
    named = {f"{type(owner).__module__}:{type(owner).__qualname__}.{k}": v for k, v in _attributes(owner).items()}
    named |= {f"{module}:{name}": frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
    for where, value in named.items():
        for path, tensor in _leaves(where, value):
            yield path, False, tensor
    for name, value in local.items():
        for path, tensor in _leaves(f"local {name} of {module}:{function}", value):
            yield path, True, tensor


def _attributes(owner: object) -> dict[str, object]:
    """The attributes of an object; of a module its parameters and buffers too."""
    own = dict(getattr(owner, "__dict__", {}))
    for part in ("_parameters", "_buffers"):
        if isinstance(owner, nn.Module) and isinstance(own.get(part), dict):
            own |= own.pop(part)
    return own


def _locals(frame: FrameType) -> dict[str, object]:
    seen = frame.f_locals
    local = dict(seen)
    if isinstance(seen, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # Before Python 3.13 a function's f_locals is a copy that stays on the frame, where frame.clear() does not reach it.
        seen.clear()
    return local


def _leaves(where: str, value: object, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif depth and isinstance(value, dict):
        for name, item in list(dict.items(value)):
            yield from _leaves(f"{where}[{name!r}]", item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for index, item in enumerate(list.copy(value) if isinstance(value, list) else value):
            yield from _leaves(f"{where}[{index}]", item, depth - 1)
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield from _leaves(f"{where}.{name}", item, depth - 1)
