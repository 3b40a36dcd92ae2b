# SPDX-License-Identifier: Apache-2.0
"""Megatron-core: what a runtime restores of its training job, and where the optimizer's first write is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_recovery import api, catalogue
from mindspeed_recovery.core.registry import Registry


def roots(model: list[Any], optimizer: Any) -> dict[str, Any]:
    """The objects below which the states on instances are found, by name."""
    return {"model": model, "optimizer": optimizer}


def state_tensors(names: Iterable[str], model: list[Any], optimizer: Any) -> list[Tensor]:
    """The tensors of these states, tracked or not: what a fault is to hit. For the ``resolve`` of a `FaultInjector`.

    Raises KeyError, with the name and all that there are, for an unknown one.
    """
    if api._active is not None:
        registry = api._active.registry
    else:  # the catalogue, without protection
        registry = Registry(catalogue.installed_states(catalogue.shipped()))
        registry.find_owners(roots(model, optimizer))
    tensors: list[Tensor] = []
    for name in names:
        if name not in registry:
            raise KeyError(name, [state.name for state in registry])
        tensors += [tensor for _, tensor in registry[name].tensors()]
    return tensors


def optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a chain (dense and expert parameters), or the one there is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


class MegatronJob:
    """Parameters, optimizer and scheduler of a Megatron job, as a `Recoverable` of the standalone runtime.

    ``model``: the list of DistributedDataParallel chunks of this rank. ``progress``: an object whose attributes
    (iteration, consumed samples) are the data position.
    """

    def __init__(self, model: list[Any], optimizer: Any, scheduler: Any, progress: Any) -> None:
        self._model, self._optimizer, self._scheduler, self._progress = model, optimizer, scheduler, progress

    def tensors(self) -> Iterator[Tensor]:
        for chunk in self._model:
            yield from chunk.parameters()
            yield from (buffer.param_data for buffer in _buffers(chunk) if buffer.param_data is not None)
        for optimizer in optimizers(self._optimizer):
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def scratch(self) -> Iterator[Tensor]:
        for chunk in self._model:
            yield from (buffer.grad_data for buffer in _buffers(chunk))
            for parameter in chunk.parameters():
                parameter.grad = None
        for optimizer in optimizers(self._optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def host_state(self) -> Any:
        groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in optimizers(self._optimizer)
        ]
        return copy.deepcopy((groups, self._scheduler.state_dict(), vars(self._progress)))

    def load_host_state(self, state: Any) -> None:
        groups, scheduler, progress = copy.deepcopy(state)
        self._scheduler.num_steps = 0  # load_state_dict() adds the loaded steps to it
        self._scheduler.load_state_dict(scheduler)
        for optimizer, saved in zip(optimizers(self._optimizer), groups):
            for group, values in zip(optimizer.param_groups, saved):
                group.update(values)
        vars(self._progress).update(progress)

    def abandon_step(self) -> None:
        # A step aborted under overlap leaves handles of collectives that will never end.
        for chunk in self._model:
            for group in [*_bucket_groups(chunk)]:
                for handle in ("grad_reduce_handle", "param_gather_handle"):
                    if hasattr(group, handle):
                        setattr(group, handle, None)


def _buffers(chunk: Any) -> Iterable[Any]:
    # DistributedDataParallel has a *list* attribute `buffers` that hides nn.Module.buffers().
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _bucket_groups(chunk: Any) -> Iterable[Any]:
    return [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]


def before_first_write(optimizer: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call()`` in every ``optimizer.step()`` when the gradients are ready (unscaled, checked, clipped) and nothing
    has been written yet; also, once the step is over, where an overflow skipped the update. Returns the inverse.

    Both methods are replaced on the instance: 0.11 – 0.19 call ``self.step_with_ready_grads()`` from ``self.step()``.
    """
    step, write = optimizer.step, optimizer.step_with_ready_grads
    called = False

    def step_with_ready_grads(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called = True
        call()
        return write(*args, **kwargs)

    @torch.no_grad()
    def step_and_note(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called = False
        result = step(*args, **kwargs)
        if not called:
            call()
        return result

    def undo() -> None:
        for name in ("step", "step_with_ready_grads"):
            vars(optimizer).pop(name, None)

    optimizer.step, optimizer.step_with_ready_grads = step_and_note, step_with_ready_grads
    return undo
