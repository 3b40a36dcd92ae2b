# SPDX-License-Identifier: Apache-2.0
"""What calling Megatron's ``train()`` a second time breaks, and how it is made good.

``train()`` is written to be called once: it refuses a ``no_sync_func`` that it has set itself, removes forward pre-hooks
that are gone already, starts timers that run, and finds the state machine of reruns and the data iterators in the middle of
a step. Checked against the loops of 0.12.1, 0.17.1, 0.18.2 and 0.19.2. All of it is called on the training thread.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

_SYNC_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func")


class Reentry:
    """The state of a first entry that a later one needs again. Made before the first call of ``train()``."""

    def __init__(self, training: Any, model: list[Any], optimizer: Any, config: Any) -> None:
        from megatron.core import rerun_state_machine

        self._training, self._model, self._optimizer, self._config = training, model, optimizer, config
        self._rerun_module: Any = rerun_state_machine
        self._rerun = rerun_state_machine.get_rerun_state_machine()
        self._rerun_mode = self._rerun.get_mode()
        self._functions = {name: getattr(config, name, None) for name in _SYNC_FUNCTIONS}

    def prepare(self) -> None:
        """Put back what ``train()`` expects at its beginning. ``args`` are those of the step rolled back to."""
        args = self._training.get_args()
        for name, function in self._functions.items():
            setattr(self._config, name, function)
        self.stop_timers()
        self._forget_rerun()
        args.curr_iteration = max(args.iteration - 1, 0)
        # A rollback over the step where the batch grows: the loop expects to see it grow.
        self._training.update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        self._enable_hooks()

    def abandon_step(self) -> None:
        """``train()`` goes on, and calls ``train_step()`` once more for the same step."""
        self.stop_timers()
        self._training.get_timers()("interval-time").start()
        self._forget_rerun()

    def _forget_rerun(self) -> None:
        # MindIO TFT's adaptor throws the machine away; the one that Megatron makes then has forgotten its mode.
        self._rerun_module._GLOBAL_RERUN_STATE_MACHINE = self._rerun
        self._rerun.state = type(self._rerun.state).NOT_RUNNING_YET
        self._rerun.mode = self._rerun_mode  # an evaluation switches it off; set_mode() would log it

    def stop_timers(self) -> None:
        """Timers that the aborted step had started are stopped, and their time forgotten."""
        for timer in self._training.get_timers()._timers.values():
            if timer._started:
                timer.reset()

    def without_hooks(self, call: Callable[[], None]) -> None:
        """Gather the parameters from the ranks that own them, then ``call()`` with the forward pre-hooks removed.

        Under ``--overlap-param-gather`` a rank holds only its own share of an update until the next forward has gathered
        the others', and ``train()`` runs its first forward without gathering. A collective.
        """
        training, overlapped = self._training, self._overlapped()
        if overlapped:
            disable = training.disable_forward_pre_hook
            disable(self._model, **known(disable, optimizer=self._optimizer))
        call()
        if overlapped:
            training.enable_forward_pre_hook(self._model)

    def _enable_hooks(self) -> None:
        # train() removes them again. They are missing after a fault in the first step of a process or of a recovery.
        if self._overlapped():
            for chunk in self._model:
                if not chunk.remove_forward_pre_hook_handles:
                    chunk.enable_forward_pre_hook()

    def _overlapped(self) -> bool:
        return bool(self._training.should_disable_forward_pre_hook(self._training.get_args()))


def known(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The options that this version's function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


class RecordedIterator:
    """A data iterator that can go back: the batches of the last steps stay here and are given out again.

    Works with every kind of data loader, since none has to be rebuilt. A batch that a loader draws from the host's random
    generator is not drawn again. ``step()``: the step that a batch is drawn for; ``host()``: entered to draw it.
    """

    def __init__(self, iterator: Any, step: Callable[[], int], host: Callable[[], AbstractContextManager[Any]]) -> None:
        self._iterator, self._step, self._host = iterator, step, host
        self._given: deque[tuple[int, Any]] = deque()
        self._again: deque[Any] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._again:
            batch = self._again.popleft()
        else:
            with self._host():
                batch = next(self._iterator)
        self._given.append((self._step(), batch))
        # Training code puts device tensors into the batch that it is given.
        return batch.copy() if isinstance(batch, (dict, list)) else batch

    def forget(self, before: int) -> None:
        """No recovery will go back to before step ``before``."""
        while self._given and self._given[0][0] < before:
            self._given.popleft()

    def go_back(self, first: int) -> None:
        """Batches that were drawn for step ``first`` and later steps are given out again."""
        again = [batch for step, batch in self._given if step >= first]
        while self._given and self._given[-1][0] >= first:
            self._given.pop()
        self._again.extendleft(reversed(again))


class RecordedData:
    """The data iterators of one argument of ``train()``: one, one for each model chunk, or None on this rank."""

    def __init__(self, data: Any, step: Callable[[], int], host: Callable[[], AbstractContextManager[Any]]) -> None:
        self._recorded: list[RecordedIterator] = []
        self._outer: dict[int, Any] = {}  # by the place of their recorded iterator
        self._step, self._host = step, host
        self.data = [self._record(one) for one in data] if isinstance(data, list) else self._record(data)
        """To be passed to ``train()`` in place of ``data``."""

    def _record(self, iterator: Any) -> Any:
        if iterator is None:
            return None
        if not hasattr(iterator, "iterable"):  # not Megatron's RerunDataIterator
            recorded = RecordedIterator(iterator, self._step, self._host)
        else:
            recorded = iterator.iterable = RecordedIterator(iterator.iterable, self._step, self._host)
            self._outer[len(self._recorded)] = iterator
        self._recorded.append(recorded)
        return iterator if hasattr(iterator, "iterable") else recorded

    def forget(self, before: int) -> None:
        """See `RecordedIterator.forget`."""
        for recorded in self._recorded:
            recorded.forget(before)

    def go_back(self, first: int) -> None:
        """See `RecordedIterator.go_back`."""
        for recorded in self._recorded:
            recorded.go_back(first)
        for iterator in self._outer.values():
            iterator.advance()  # a rerun of the aborted step is not under way any more

    def follow(self) -> None:
        """Record again where somebody (the adaptor of MindIO TFT, going back in its own way) has put another iterator."""
        for place, iterator in self._outer.items():
            if not isinstance(iterator.iterable, RecordedIterator):
                recorded = RecordedIterator(iterator.iterable, self._step, self._host)
                self._recorded[place] = iterator.iterable = recorded

    def release(self) -> None:
        """The framework's iterators draw for themselves again; what was to be given out again still is."""
        for iterator in self._outer.values():
            recorded = iterator.iterable
            if isinstance(recorded, RecordedIterator) and not recorded._again:
                iterator.iterable = recorded._iterator
