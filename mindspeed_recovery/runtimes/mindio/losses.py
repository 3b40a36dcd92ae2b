# SPDX-License-Identifier: Apache-2.0
"""The losses that the adaptor keeps of the last step, for the case that its log line must be written again.

``LogArgs.losses_reduced_``: None before the first step, else a list of dicts, empty on ranks without a loss. Until it is
averaged a loss is a sum and a count, as a pair of numbers or one tensor of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def make_ready(values: Any, receives: bool) -> None:
    """Make the losses fit for a repair, which begins by averaging them over the microbatches on both sides.

    The receiver's own may be unsafe; they are not needed, the source's will come. The source's are an average already if a
    recovery has come since they were made, and the adaptor cannot average that: it gets the pair that it expects.
    """
    if values is None:
        return
    if receives:
        values.losses_reduced_ = None
        for name in ("grad_norm_", "num_zeros_in_grad_"):
            if isinstance(getattr(values, name, None), Tensor):
                setattr(values, name, None)
    elif values.losses_reduced_:
        values.losses_reduced_ = [
            {key: (loss, torch.ones_like(loss)) if _is_average(loss) else loss for key, loss in losses.items()}
            for losses in values.losses_reduced_
        ]


def drop_unsafe(values: Any, is_unsafe: Callable[[Tensor], bool]) -> None:
    """Forget losses of which any is unsafe: a rollback averages them before it decides whether to log at all."""
    if values is not None and any(is_unsafe(tensor) for tensor in _tensors(values.losses_reduced_)):
        values.losses_reduced_ = None


def _is_average(loss: Any) -> bool:
    return isinstance(loss, Tensor) and loss.numel() == 1


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
