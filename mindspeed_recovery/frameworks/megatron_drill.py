# SPDX-License-Identifier: Apache-2.0
"""``--recovery-drill STEP`` in Megatron's stock loop: that step is computed twice, with a recovery in between.

See `tools.drill`. The first computation ends before the optimizer's first write; ``train()`` notices nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from mindspeed_recovery import catalogue
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.errors import RecoveryError
from mindspeed_recovery.frameworks import megatron
from mindspeed_recovery.frameworks.megatron_reentry import RecordedData, Reentry
from mindspeed_recovery.tools.drill import Drill, StepAbandoned


class Rehearsal:
    """The drill of one training step. Training thread, all ranks alike."""

    def __init__(self, training: Any, session: Session, model: list[Any], optimizer: Any, step: int) -> None:
        self.step = step
        self._training, self._session, self._model, self._optimizer = training, session, model, optimizer
        self._drill: Drill | None = None
        self._computation = 0
        self._losses: Any = None

    def train_step(
        self,
        train_step: Callable[..., Any],
        call: inspect.BoundArguments,
        data: Iterable[RecordedData],
        reentry: Reentry,
    ) -> Any:
        """``train_step()`` of the drilled step. Raises RecoveryError, naming what differs, if the drill fails."""
        roots = megatron.roots(self._model, self._optimizer)
        known = catalogue.installed_states(catalogue.shipped())
        self._drill = Drill(self._session, known, roots, self.step)
        self._keep_losses(call)
        self._computation = 1
        try:
            train_step(*call.args, **call.kwargs)
        except StepAbandoned:
            pass
        else:
            raise RecoveryError(f"recovery drill at step {self.step}: the optimizer was not reached")
        for recorded in data:
            recorded.go_back(self.step)
        reentry.abandon_step()
        self._computation = 2
        return train_step(*call.args, **call.kwargs)

    def before_write(self) -> None:
        """The gradients are ready: in the first computation the end, in the second the comparison."""
        if self._drill is None:
            return
        # DistributedDataParallel has lists of its own under these names.
        buffers = [buffer for chunk in self._model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        measured = {"loss": self._losses, "gradients": [buffer.grad_data for buffer in buffers]}
        if self._computation == 1:
            self._drill.abandon(measured)
            raise StepAbandoned
        result, self._drill = self._drill.compare(measured), None
        if not result.passed:
            raise RecoveryError(str(result))
        self._training.print_rank_0(str(result))

    def _keep_losses(self, call: inspect.BoundArguments) -> None:
        run = call.arguments.get("forward_backward_func")
        if run is None:  # before 0.17 each step asks for it; the gradients must do
            return

        def run_and_keep(*args: Any, **kwargs: Any) -> Any:
            self._losses = run(*args, **kwargs)
            return self._losses

        call.arguments["forward_backward_func"] = run_and_keep
