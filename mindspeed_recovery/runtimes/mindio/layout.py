# SPDX-License-Identifier: Apache-2.0
"""What is installed of MindIO TFT and of its adaptor, found by looking at the modules that are loaded.

Two adaptors are in the field: MindSpeed-LLM's own (``mindspeed_llm.core.high_availability``), and the one that the wheels
of mindio_ttp up to 7.0.RC1 carry, which nests the arguments of ``train()`` one level deeper. Everything else that this
runtime touches is the same in both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mindspeed_recovery.errors import RecoveryError

PACKAGE = "mindio_ttp"
DECORATOR = "mindio_ttp.framework_ttp.ttp_decorator"
PHASES = ("stop", "clean", "repair", "rollback", "save")
WINDOW = ("tft_start_updating_os", "tft_end_updating_os")

_MODEL_ARGUMENT = 1  # train(forward_step_func, model, optimizer, …)
_HANDLER_FIELDS = ("_args", "_repair_step", "_repair_info")


class MindioLayoutError(RecoveryError):
    """MindIO TFT, or its adaptor, is not one that this package knows; the text says what was looked for."""


class MindioUnsupported(RecoveryError):
    """A feature of MindIO TFT is switched on that the plugin cannot work with."""


@dataclass(frozen=True)
class _Known:
    name: str
    rollback: str
    repair: str
    group: str
    nested: bool


_OLDER = "mindio_ttp.adaptor.modellink_adaptor"
_KNOWN = (
    _Known(
        "MindSpeed-LLM",
        "mindspeed_llm.core.high_availability.tft_rollback",
        "mindspeed_llm.core.high_availability.tft_optimizer_data_repair",
        "mindspeed_llm.core.high_availability.tft_replica_group",
        False,
    ),
    _Known("modellink_adaptor", _OLDER, _OLDER, _OLDER, True),
)


@dataclass(frozen=True)
class Layout:
    """An adaptor that is loaded: its modules, and how it is given the arguments of ``train()``."""

    name: str
    rollback: ModuleType
    repair: ModuleType
    group: ModuleType | None
    nested: bool

    def arguments(self) -> Any:
        """The framework's global arguments, the object on which the adaptor itself reads and sets ``iteration``."""
        return _get_args(self.rollback)()

    def model(self, train_args: Any) -> list[Any]:
        """The model chunks among the arguments of ``train()`` as TFT holds them; empty if they are not there yet."""
        try:
            model = (train_args[0] if self.nested else train_args)[_MODEL_ARGUMENT]
        except (TypeError, IndexError, KeyError):
            return []
        return list(model) if isinstance(model, (list, tuple)) else [model]

    def log_values(self) -> Any:
        """Where the adaptor keeps what the log line of the last step is made of, or None if it keeps nothing."""
        values = getattr(self.repair, "LogArgs", None)
        return values if hasattr(values, "losses_reduced_") else None

    def checkpoint_loaded(self) -> bool:
        """Whether the adaptor has loaded a checkpoint for the recovery that is going on."""
        asked = getattr(self.repair, "get_load_ckpt", None) or getattr(self.rollback, "get_load_ckpt", None)
        return bool(asked()) if asked is not None else False

    def repair_groups(self) -> tuple[Any, Any] | None:
        """The gloo group and the device's group of the ranks in this repair, which exist from repair until the adaptor's
        rollback destroys them. None if there is no gloo group."""
        get = getattr(self.group, "get_repair_group", None)
        if get is None:
            return None
        gloo = get(True)
        return None if gloo is None else (gloo, get())


def find_decorator() -> ModuleType | None:
    """TFT's module with the handler of all callbacks; None if it is not loaded. Never imports anything.

    Raises MindioLayoutError if it is not made as expected.
    """
    decorator = sys.modules.get(DECORATOR)
    if decorator is None:
        return None
    handler = getattr(decorator, "save_handler", None)
    absent = [
        f"save_handler.execute_{phase}" for phase in PHASES if not callable(getattr(handler, f"execute_{phase}", None))
    ]
    absent += [f"save_handler.{name}" for name in _HANDLER_FIELDS if not hasattr(handler, name)]
    absent += [name for name in WINDOW if not callable(getattr(decorator, name, None))]
    if absent:
        raise MindioLayoutError(
            f"{DECORATOR} has no {', '.join(absent)}: this version of mindio_ttp is not known, and the plugin leaves its "
            "recoveries as they are. Report the version of mindio_ttp, or run without the plugin"
        )
    return decorator


def find_adaptor() -> Layout | None:
    """The adaptor that is loaded, None if there is none yet. Raises MindioLayoutError for one that lacks what we need."""
    for known in _KNOWN:
        rollback = sys.modules.get(known.rollback)
        if rollback is None:
            continue
        repair = sys.modules.get(known.repair)
        absent = [f"{known.rollback}.feature_rollback"] if not hasattr(rollback, "feature_rollback") else []
        for name in ("send_rank_repair", "recv_rank_repair"):
            if repair is None or not hasattr(repair, name):
                absent.append(f"{known.repair}.{name}")
        if not absent and _find_get_args(rollback) is None:
            absent.append("megatron.training.get_args")
        if absent or repair is None:
            raise MindioLayoutError(
                f"the adaptor {known.rollback} is loaded, but {', '.join(absent)} was looked for and not found: the plugin "
                "leaves the recoveries of this version as they are"
            )
        return Layout(known.name, rollback, repair, sys.modules.get(known.group), known.nested)
    return None


def no_adaptor() -> MindioLayoutError:
    """The error for training that has begun without an adaptor we know."""
    looked_for = ", ".join(known.rollback for known in _KNOWN)
    return MindioLayoutError(
        f"training runs under MindIO TFT, but none of its known adaptors is loaded (looked for {looked_for}): the plugin "
        "leaves the recoveries of this job as they are"
    )


def check_elastic(decorator: ModuleType, adaptor: Layout | None) -> None:
    """Raise MindioUnsupported if elastic scale-in and scale-out is on: it rebuilds groups and ranks without the phases
    that the plugin needs."""
    handler = decorator.save_handler
    registered = getattr(handler, "_fm_zit_upgrade_rollback_call", None) is not None
    wanted = False
    if adaptor is not None:
        with suppress(AssertionError):  # Megatron's answer before the arguments are parsed
            wanted = bool(getattr(adaptor.arguments(), "enable_elastic_training", False))
    if registered or wanted:
        raise MindioUnsupported(
            "elastic training (--enable-elastic-training) and --enable-recovery-safe-globals exclude each other: scaling "
            "in and out has no rollback in which global state could be restored. Switch one of the two off"
        )


def holders(name: str, value: Any) -> Iterator[ModuleType]:
    """Every loaded module that holds ``value`` under ``name``: importers have bound it in their own namespace."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(name) is value:
            yield module


def _get_args(rollback: ModuleType) -> Callable[[], Any]:
    found = _find_get_args(rollback)
    if found is None:
        raise MindioLayoutError("megatron.training.get_args is not there any more")
    return found


def _find_get_args(rollback: ModuleType) -> Callable[[], Any] | None:
    for module in (rollback, sys.modules.get("megatron.training"), sys.modules.get("megatron")):
        get_args = getattr(module, "get_args", None)
        if callable(get_args):
            return get_args
    return None
