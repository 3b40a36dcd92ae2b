# SPDX-License-Identifier: Apache-2.0
"""Tracked states in the framework's checkpoint: what rides there, and how it is taken out again.

The states of the policies `replicate` and `snapshot` ride, but for those that the framework saves itself
(``checkpoint = "framework"``). What is saved is one dict that ``torch.load(weights_only=True)`` accepts:

=============  =========================================================================================
``version``    of this format
``step``       at whose end the values are
``rank``       that took them (one file serves several ranks)
``layout``     of the job, as the framework says it; where it differs, the file is of another rank's part
``catalogue``  digest of what was tracked
``alike``      for each `snapshot` state the other ranks whose value was the same
``states``     by name: ``value``, the description of `codec` as JSON, and its ``storages`` (uint8)
=============  =========================================================================================

A loaded copy stands where the rank's own would, so that all that follows is the same for both.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_recovery.core import memory, values
from mindspeed_recovery.core.codec import Decoder, Malformed, encode
from mindspeed_recovery.core.copies import Copies, StateCopy
from mindspeed_recovery.core.memory import DeviceMemory
from mindspeed_recovery.core.notices import Notices, catalogue_digest, digest
from mindspeed_recovery.core.policy import Policy
from mindspeed_recovery.core.registry import Pairs, Registry, TrackedState
from mindspeed_recovery.core.repair import classes_of, device_of, size_limit
from mindspeed_recovery.core.values import Buffers, Capture, Layout
from mindspeed_recovery.errors import StateError

logger = logging.getLogger("mindspeed_recovery")

KEY = "mindspeed_recovery"
"""Under which a framework's checkpoint holds the states."""

VERSION = 1
ORIGIN = "checkpoint"
PEER_SECONDS = 2.0
"""How long the rank that saves waits in all for the digests of its peers."""

_FIELDS = {"step": int, "rank": int, "layout": str, "catalogue": str, "alike": dict, "states": dict}


@dataclass(frozen=True)
class Loaded:
    """What the framework has loaded. ``content``: what stood under `KEY`, from whoever wrote it; None for nothing.
    ``layout``: of this job. ``generators``: whether random generators were to be loaded; ``without``: names of the roots
    (``"optimizer"``) that were not."""

    content: Any
    layout: str = ""
    generators: bool = True
    without: Sequence[str] = ()


class Checkpoint:
    """Gives the states of this rank to a checkpoint, and takes them out of a loaded one. ``is_fault``: see `Session`.

    `announce` and `save` on the training thread, or on the runtime's for last words; `read` and `install` as the phases
    of the session.
    """

    def __init__(
        self,
        registry: Registry,
        copies: Copies,
        device: DeviceMemory,
        notices: Notices,
        is_fault: Callable[[BaseException], bool],
    ) -> None:
        self._registry, self._copies, self._device, self._notices = registry, copies, device, notices
        self._is_fault = is_fault
        self._told: set[str] = set()
        self.last_words = False
        """A fault ends training: what is live may be unsafe or half a step further, the host copies are not."""
        self.loaded: Loaded | None = None
        """What the framework has loaded in this recovery."""

    def must_pass(self, error: BaseException) -> bool:
        """Whether an error while saving is the runtime's to see. Others, and all in last words, must not end a save."""
        return self._is_fault(error) and not self.last_words

    # ---- save --------------------------------------------------------------------------------------------------------

    def announce(self, step: int) -> None:
        """Every rank, before the checkpoint of ``step`` is saved: tell the ranks that save the digests of what is this
        rank's own. No collective; never raises, but for a fault of the device."""
        digests = {}
        for state in self._riding():
            if state.spec.policy is Policy.SNAPSHOT:
                described = self._described(state, step)
                if described is not None:
                    digests[state.name] = digest(*described)
        try:
            self._notices.announce(step, digests)
        except Exception as error:
            logger.debug("the digests for the checkpoint of step %d are not published: %s", step, error)

    def save(
        self,
        step: int,
        *,
        layout: str = "",
        peers: Sequence[int] = (),
        generators: bool = True,
        without: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The states as of the end of ``step``, on the host and of nobody else's memory; between two steps, or as last words
        after a fault. ``peers``: other global ranks that will load the same file; the rest as in `Loaded`.

        One state that cannot be saved is left out, with a WARNING. Raises only a fault of the device in a healthy process.
        """
        states, digests = {}, {}
        for state in self._riding():
            if _left_out(state, generators, without):
                continue
            described = self._described(state, step)
            if described is None:
                continue
            value, storages = described
            if self.last_words:
                storages = [storage.clone() for storage in storages]
            states[state.name] = {"value": json.dumps(value), "storages": storages}
            if state.spec.policy is Policy.SNAPSHOT:
                digests[state.name] = digest(value, storages)
        alike: dict[str, list[int]] = {}
        if not self.last_words and digests:
            try:
                alike = self._notices.alike(step, digests, peers, PEER_SECONDS)
            except Exception as error:
                logger.debug("the digests of the peers cannot be read: %s", error)
        return {
            "version": VERSION,
            "step": step,
            "rank": _rank(),
            "layout": layout,
            "catalogue": catalogue_digest(self._registry),
            "alike": alike,
            "states": states,
        }

    def _riding(self) -> Iterator[TrackedState]:
        return (s for s in self._registry if s.spec.policy.copied and s.spec.checkpoint == "plugin" and not s.too_large)

    def _described(self, state: TrackedState, step: int) -> tuple[dict[str, Any], list[Tensor]] | None:
        try:
            with torch.no_grad():
                return encode((place.path, capture) for place, capture in self._captures(state, step))
        except Exception as error:
            if self.must_pass(error):
                raise
            if state.name not in self._told:
                self._told.add(state.name)
                logger.warning("state '%s' is not in the checkpoint of step %d: %s", state.name, step, _text(error))
            return None

    def _captures(self, state: TrackedState, step: int) -> Pairs:
        if self.last_words:
            source = self._copies.source(state.spec, step, False)
            if source is not None:
                return source[1].captures
            unsafe = any(self._device.is_unsafe(tensor) for _, tensor in state.tensors())
            if unsafe or not self._copies.live_is(state.spec, step, False):
                raise StateError(
                    f"no copy of the end of step {step} ({'unsafe' if unsafe else 'the live value is not'})"
                )
        buffers = Buffers(_host_empty)
        captures = [(place, Capture(place.get(), buffers, place.path)) for place in state.places()]
        memory.synchronize()
        return captures

    # ---- load --------------------------------------------------------------------------------------------------------

    def install(self, step: int) -> dict[str, str]:
        """In a recovery that has fallen back to the checkpoint of ``step``: its copies are the rank's own from now on. Returns
        why not, for the states that it lacks."""
        loaded, self.loaded = self.loaded or Loaded(None), None
        copies, problems = self.read(step, loaded)
        for name, copy in copies.items():
            self._copies.start.receive(name, copy, copy.captures, ORIGIN)
        return problems

    def read(self, step: int, loaded: Loaded) -> tuple[dict[str, StateCopy], dict[str, str]]:
        """Take the states of the end of ``step`` out of what was loaded. Returns a copy of each that this rank can use, and
        why not, for those that stand here and have none. What was to be left alone is in neither. Changes no state."""
        copies: dict[str, StateCopy] = {}
        problems: dict[str, str] = {}
        problem = _problem(loaded, step)
        for state in self._riding():
            try:
                if _left_out(state, loaded.generators, loaded.without):
                    continue
                if problem:
                    raise StateError(problem)
                copies[state.name] = StateCopy(
                    Buffers(self._device.host_empty),
                    step + 1,
                    origin=ORIGIN,
                    captures=self._decode(state, loaded.content),
                )
            except Exception as error:
                if any(place.get() is not None for place in state.places()):
                    problems[state.name] = _text(error)
        return copies, problems

    def _decode(self, state: TrackedState, content: dict[str, Any]) -> Pairs:
        name, rank = state.name, _rank()
        if name not in content["states"]:
            raise StateError("it is not in the checkpoint")
        if state.spec.policy is Policy.SNAPSHOT and rank not in (content["rank"], *content["alike"].get(name, ())):
            raise StateError(f"it is a rank's own, and the checkpoint has that of rank {content['rank']}")
        entry = content["states"][name]
        decoder = Decoder(json.loads(entry["value"]), classes_of(state), device_of, size_limit(state))
        paths = [path for path, _ in decoder.roots]
        sites = {place.path: place for place in state.places(absent=True)}
        unknown = next((path for path in paths if path not in sites), None)
        if unknown is not None:
            raise StateError(f"there is no place {unknown:.200} here")
        for place in state.places():
            if place.path not in paths and not isinstance(place.holder, dict) and place.get() is not None:
                raise StateError(f"{place.path} was not there when the checkpoint was saved")
        decoder.bind(_checked(entry["storages"], [size for _, size in decoder.storages]))
        here = dict(state.tensors())
        for path, root in decoder.roots:
            for where, layout in values.layouts(root, path):
                _check_fit(where, layout, here.get(where))
        return [
            (sites[path], Capture.of(node, 0 if index else decoder.nbytes))
            for index, (path, node) in enumerate(decoder.roots)
        ]


def together(problems: Mapping[str, str]) -> str:
    """Which states have which problem, for one line of a log."""
    states: dict[str, list[str]] = {}
    for name, problem in sorted(problems.items()):
        states.setdefault(problem, []).append(f"'{name}'")
    return "; ".join(f"{problem}: {', '.join(names)}" for problem, names in states.items())


def _problem(loaded: Loaded, step: int) -> str:
    """Why nothing of it can be used; empty if it can."""
    content = loaded.content
    if content is None:
        return "the checkpoint holds no tracked states (was it saved without the plugin?)"
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is not int:
        return f"what the checkpoint has under '{KEY}' is not of this plugin"
    if version != VERSION:
        return f"the checkpoint has tracked states of version {version}, this plugin reads version {VERSION}"
    wrong = next((name for name, kind in _FIELDS.items() if type(content.get(name)) is not kind), None)
    if wrong is not None:
        return f"the tracked states in the checkpoint are damaged ({wrong})"
    if content["step"] != step:
        return f"the tracked states in the checkpoint are of step {content['step']}, training goes on after step {step}"
    if content["layout"] != loaded.layout:
        return f"the checkpoint was saved with {content['layout']:.200}, this job has {loaded.layout}"
    return ""


def _left_out(state: TrackedState, generators: bool, without: Sequence[str]) -> bool:
    """Whether the framework was told to leave alone what this state belongs to."""
    places = state.places()
    below = any(place.path.startswith((f"{root}.", f"{root}[")) for place in places for root in without)
    return below or (not generators and any(_has_generator(place.get(), True) for place in places))


def _has_generator(value: Any, top: bool) -> bool:
    return values.is_generator(value) or any(_has_generator(child, False) for _, child in values.children(value, top))


def _checked(storages: Any, sizes: Sequence[int]) -> list[Tensor]:
    if not isinstance(storages, list) or len(storages) != len(sizes):
        raise Malformed("not as many storages as it is made of")
    for storage, size in zip(storages, sizes):
        plain = isinstance(storage, Tensor) and storage.layout is torch.strided and storage.device.type == "cpu"
        if not plain or storage.dtype is not torch.uint8 or storage.shape != (size,) or not storage.is_contiguous():
            raise Malformed(f"a storage is not {size} bytes on the host")
    return storages


def _check_fit(path: str, layout: Layout, here: Tensor | None) -> None:
    """A tensor that stands here already says what fits; an empty one says nothing."""
    if here is None or not here.numel():
        return
    if (here.dtype, here.shape) != (layout.dtype, layout.shape):
        raise StateError(
            f"{path}: {layout.dtype} of shape {tuple(layout.shape)} in the checkpoint, {here.dtype} of shape "
            f"{tuple(here.shape)} here"
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _text(error: Exception) -> str:
    if isinstance(error, StateError):
        return str(error)
    return f"{'damaged' if isinstance(error, Malformed) else type(error).__name__}: {error}"
