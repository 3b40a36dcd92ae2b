# SPDX-License-Identifier: Apache-2.0
"""The plugin in Megatron's own training loop, ``megatron.training.training`` (0.12 – 0.19), without a change of a script.

``pretrain()`` and ``train()`` call each other, and all the rest, by the names of that module, so each name gets a wrapper
(`wrappers`): ``train`` builds the session and finds the runtime, ``train_step`` begins a step (or the drill's),
``training_log`` ends its update, evaluations and the end of an iteration are marked. A runtime that recovers the job calls
``train`` again; what a second call breaks is made good by `megatron_reentry`. Where the runtime's wrapper stands inside
ours, so that it calls ``train`` again behind it, the first thing that ``train`` does shows it: it writes the arguments to
TensorBoard. The job itself is `megatron_job.Loop`.

The runtime is MindIO TFT where it is loaded, else the standalone one where `use_standalone` has named a device, else none:
the flag is then without effect, which is one WARNING. Importing this module imports neither torch nor Megatron, and no
wrapper does anything without the flag.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import wrapt

if TYPE_CHECKING:
    from mindspeed_recovery.core.checkpoint import Loaded
    from mindspeed_recovery.core.report import Report
    from mindspeed_recovery.frameworks.megatron_job import Loop

logger = logging.getLogger("mindspeed_recovery")

_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"
_ADAPTOR = "mindspeed_llm.core.high_availability"
_OWN_LOOP = "mindspeed_llm.training.training"

Wrapped = Callable[..., Any]


class Standalone(NamedTuple):
    """What `use_standalone` was told."""

    device: Any
    store: Any
    context: Callable[[], AbstractContextManager[Any]]
    timeout: float


_standalone: Standalone | None = None
_loops: dict[str, Wrapped] = {}
"""The ``train()`` functions that were wrapped, by module, as they were: others may have put wrappers around ours."""
_loop: Loop | None = None
_entered = False
_recoveries: list[dict[str, float]] = []
_reports: list[Report] = []
_loaded: Loaded | None = None
"""What the checkpoint that this process begins with holds of the tracked states."""
_last_states: dict[str, Any] | None = None
"""The tracked states as of the end of ``train()``, for the checkpoint that may follow."""
_last_step = -1
_installed = False
_hooked = False
_follows_adaptor = _hooked_adaptor = False


def use_standalone(
    device: Any,
    store: Any,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    timeout: float = 60.0,
) -> None:
    """Let the standalone runtime recover this process's training, if no other runtime is there.

    ``device``, ``store``, ``context``, ``timeout``: see `StandaloneRuntime`; ``device`` is the session's memory too. All
    process groups must be ``restartable_gloo``. Call it before ``pretrain()``, on every rank.
    """
    global _standalone
    _standalone = Standalone(device, store, context, timeout)


def recoveries() -> list[dict[str, float]]:
    """Milliseconds by phase of each recovery of the standalone runtime in this process."""
    return list(_recoveries)


def reports() -> list[Report]:
    """What the session did in each recovery of the jobs that have ended in this process."""
    return list(_reports)


# ---- wrappers ------------------------------------------------------------------------------------------------------------


def wrappers() -> Mapping[str, Callable[[Wrapped], Wrapped]]:
    """What is put around which function: a location and a factory, called with the function that stands there.

    The factories are always the same objects, and return a function that is wrapped already as it is.
    """
    return {f"{module}:{name}": factory for module in _FACTORIES for name, factory in _FACTORIES[module].items()}


def install_when_loaded() -> Callable[[], None]:
    """Wrap the loop's functions, and those of its checkpoints, now or when their modules are loaded. Idempotent. Returns the
    inverse."""
    global _installed, _hooked
    _installed = True
    if not _hooked:
        _hooked = True  # wrapt keeps its hooks for the life of the process
        for name in _FACTORIES:
            wrapt.register_post_import_hook(_wrap_all, name)
        return uninstall
    for name in _FACTORIES:
        if name in sys.modules:
            _wrap_all(sys.modules[name])
    return uninstall


def uninstall() -> None:
    """The inverse of `install_when_loaded`."""
    global _installed
    _installed = False
    _loops.clear()
    for module_name, factories in _FACTORIES.items():
        for name in factories:
            function = getattr(sys.modules.get(module_name), name, None)
            if getattr(function, "_recovery_wrapper", False):
                _rebind(name, function, function.__wrapped__)  # type: ignore[union-attr]


def _wrap_all(module: ModuleType) -> None:
    for name, factory in _FACTORIES[module.__name__].items() if _installed else ():
        function = getattr(module, name, None)
        if function is not None:
            _rebind(name, function, factory(function))


def _rebind(name: str, old: Any, new: Any) -> None:
    """In every loaded module: some have taken the function by name before, as the adaptor of MindIO TFT does with
    ``training_log``."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(name) is old:
            setattr(module, name, new)


def follow_adaptor() -> Callable[[], None]:
    """Begin where MindSpeed-LLM's adaptor of MindIO TFT does, now or when it is loaded. Idempotent. Returns the inverse.

    Its ``tft_train()`` stands around ``train()``. A process that was started again in the middle of a recovery is repaired
    and rolled back before it comes to ``train()``, and takes part in that only if its states are adopted by then.
    """
    global _follows_adaptor, _hooked_adaptor
    _follows_adaptor = True
    if not _hooked_adaptor:
        _hooked_adaptor = True  # wrapt keeps its hooks for the life of the process
        wrapt.register_post_import_hook(_wrap_adaptor, _ADAPTOR)
    elif _ADAPTOR in sys.modules:
        _wrap_adaptor(sys.modules[_ADAPTOR])
    return _leave_adaptor


def _wrap_adaptor(adaptor: ModuleType) -> None:
    if _follows_adaptor and hasattr(adaptor, "tft_train"):
        adaptor.tft_train = recovery_entry_wrapper(adaptor.tft_train)  # type: ignore[attr-defined]


def _leave_adaptor() -> None:
    global _follows_adaptor
    _follows_adaptor = False
    adaptor = sys.modules.get(_ADAPTOR)
    function = getattr(adaptor, "tft_train", None)
    if getattr(function, "_recovery_wrapper", False):
        adaptor.tft_train = function.__wrapped__  # type: ignore[union-attr]


def _around(function: Wrapped, around: Callable[..., Any]) -> Wrapped:
    """``around(function, *args, **kwargs)`` in place of ``function``, if that is not so already."""
    inner: Any = function
    while inner is not None:
        if getattr(inner, "_recovery_wrapper", False):
            return function
        inner = getattr(inner, "__wrapped__", None)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    called._recovery_wrapper = True  # type: ignore[attr-defined]
    return called


def recovery_train_wrapper(train: Wrapped) -> Wrapped:
    if not getattr(train, "_recovery_wrapper", False):
        _loops[train.__module__] = train

    def run(train: Wrapped, *args: Any, **kwargs: Any) -> Any:
        global _loop, _entered
        if not getattr(sys.modules[_TRAINING].get_args(), "enable_recovery_safe_globals", False):
            return train(*args, **kwargs)
        _entered = True
        arguments = _bind(train, args, kwargs)
        loop = _loop = _loop or _begin(train, arguments.arguments)
        return train(*args, **kwargs) if loop is None else _run(loop, train, arguments)

    return _around(train, run)


def recovery_entry_wrapper(tft_train: Wrapped) -> Wrapped:
    def run(tft_train: Wrapped, *args: Any, **kwargs: Any) -> Any:
        global _loop
        training = sys.modules[_TRAINING]
        if _loop is None and getattr(training.get_args(), "enable_recovery_safe_globals", False):
            train = _loops.get(_OWN_LOOP) or _loops.get(_TRAINING) or training.train
            _loop = _begin(train, inspect.signature(train).bind_partial(*args, **kwargs).arguments)
        return tft_train(*args, **kwargs)

    return _around(tft_train, run)


def recovery_train_step_wrapper(train_step: Wrapped) -> Wrapped:
    def run(train_step: Wrapped, *args: Any, **kwargs: Any) -> Any:
        if _loop is None:
            _warn_if_passed_by()
            return train_step(*args, **kwargs)
        return _loop.train_step(train_step, _bind(train_step, args, kwargs))

    return _around(train_step, run)


def recovery_training_log_wrapper(training_log: Wrapped) -> Wrapped:
    def run(training_log: Wrapped, *args: Any, **kwargs: Any) -> Any:
        if _loop is None:
            return training_log(*args, **kwargs)
        log = _loop.log if _loop.owns_this_thread() else _loop.log_again
        return log(training_log, _bind(training_log, args, kwargs))

    return _around(training_log, run)


def recovery_operations_wrapper(num_floating_point_operations: Wrapped) -> Wrapped:
    def run(count: Wrapped, *args: Any, **kwargs: Any) -> Any:
        operations = count(*args, **kwargs)
        if _loop is not None:
            _loop.add_operations(operations)
        return operations

    return _around(num_floating_point_operations, run)


def recovery_evaluation_wrapper(evaluate: Wrapped) -> Wrapped:
    def run(evaluate: Wrapped, *args: Any, **kwargs: Any) -> Any:
        if _loop is None:
            return evaluate(*args, **kwargs)
        return _loop.evaluate(lambda: evaluate(*args, **kwargs), _bind(evaluate, args, kwargs).arguments["iteration"])

    return _around(evaluate, run)


def recovery_checkpoint_wrapper(save: Wrapped) -> Wrapped:
    def run(save: Wrapped, *args: Any, **kwargs: Any) -> Any:
        if _loop is None:
            return save(*args, **kwargs)
        return _loop.save(lambda: save(*args, **kwargs))

    return _around(save, run)


def recovery_end_of_iteration_wrapper(checkpoint_and_decide_exit: Wrapped) -> Wrapped:
    def run(decide: Wrapped, *args: Any, **kwargs: Any) -> Any:
        if _loop is None:
            return decide(*args, **kwargs)
        return _loop.end_iteration(lambda: decide(*args, **kwargs), _bind(decide, args, kwargs).arguments["iteration"])

    return _around(checkpoint_and_decide_exit, run)


def recovery_write_args_wrapper(write_args_to_tensorboard: Wrapped) -> Wrapped:
    def run(write: Wrapped, *args: Any, **kwargs: Any) -> Any:
        return write(*args, **kwargs) if _loop is None or _loop.train_begins() else None

    return _around(write_args_to_tensorboard, run)


def recovery_state_dict_wrapper(generate_state_dict: Wrapped) -> Wrapped:
    def run(generate: Wrapped, *args: Any, **kwargs: Any) -> Any:
        state_dict = generate(*args, **kwargs)
        step = _bind(generate, args, kwargs).arguments.get("iteration")
        if _loop is not None and step is not None:
            state_dict |= _loop.states(step)
        elif _last_states is not None and _last_step == step:  # pretrain() saves once more after train()
            state_dict |= _last_states
        return state_dict

    return _around(generate_state_dict, run)


def recovery_load_wrapper(_load_base_checkpoint: Wrapped) -> Wrapped:
    def run(load: Wrapped, *args: Any, **kwargs: Any) -> Any:
        global _loaded
        result = load(*args, **kwargs)
        call = _bind(load, args, kwargs).arguments
        options = call.get("args")
        # Rank 0's file is read by all for the arguments in it.
        if getattr(options, "enable_recovery_safe_globals", False) and not call.get("rank0"):
            from mindspeed_recovery.frameworks import megatron_checkpoint

            loaded = megatron_checkpoint.loaded(options, call["load_dir"], result)
            if _loop is not None:
                _loop.loaded(loaded)
            elif loaded is not None:  # another model may be loaded later
                _loaded = loaded
        return result

    return _around(_load_base_checkpoint, run)


_FACTORIES: dict[str, dict[str, Callable[[Wrapped], Wrapped]]] = {
    _TRAINING: {
        "train": recovery_train_wrapper,
        "train_step": recovery_train_step_wrapper,
        "training_log": recovery_training_log_wrapper,
        "num_floating_point_operations": recovery_operations_wrapper,
        "evaluate_and_print_results": recovery_evaluation_wrapper,
        "save_checkpoint_and_time": recovery_checkpoint_wrapper,
        "checkpoint_and_decide_exit": recovery_end_of_iteration_wrapper,
        "write_args_to_tensorboard": recovery_write_args_wrapper,
    },
    _CHECKPOINTING: {
        "generate_state_dict": recovery_state_dict_wrapper,
        "_load_base_checkpoint": recovery_load_wrapper,
    },
}


def _bind(function: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    return inspect.signature(function).bind(*args, **kwargs)


def _warn_if_passed_by() -> None:
    """A step is computed under the flag, but ``train()`` was not entered through its wrapper: say so, once."""
    global _entered
    if not _entered and getattr(sys.modules[_TRAINING].get_args(), "enable_recovery_safe_globals", False):
        logger.warning(
            "--enable-recovery-safe-globals has no effect: another module held train() by name before the plugin came; "
            "put 'import mindspeed_recovery' above the framework's import"
        )
    _entered = True


def _begin(train: Wrapped, arguments: dict[str, Any]) -> Loop | None:
    """What the first call of ``train()`` sets up; None, with a WARNING, where nobody could recover this process."""
    from mindspeed_recovery.frameworks.megatron_job import Loop
    from mindspeed_recovery.runtimes.mindio import layout

    global _loaded
    loaded, _loaded = _loaded, None
    args = sys.modules[_TRAINING].get_args()
    mindio = layout.find_decorator() is not None
    if not mindio and _standalone is None:
        if args.rank == 0:
            logger.warning(
                "--enable-recovery-safe-globals has no effect: no recovery runtime is here. Train with MindIO TFT "
                "(mindio_ttp, --enable-high-availability), or name a device with megatron_loop.use_standalone()"
            )
        return None
    loop = Loop(sys.modules[_TRAINING], train, arguments, None if mindio else _standalone)
    if loaded is not None:
        try:
            loop.resume(loaded)
        except BaseException:
            loop.close()
            raise
    return loop


def _run(loop: Loop, train: Wrapped, arguments: inspect.BoundArguments) -> Any:
    """``train()`` until it ends. MindIO TFT comes here again by itself after each recovery."""
    global _last_states, _last_step
    try:
        result = loop.run(train, arguments)
        _last_states, _last_step = loop.last_states(), loop.done
    except Exception:
        if loop.recovered_by_itself:
            _end(loop)
        raise
    except BaseException:  # an exit that train() has decided on
        _end(loop)
        raise
    _end(loop)
    return result


def _end(loop: Loop) -> None:
    global _loop
    _loop = None
    _recoveries.extend(loop.milliseconds)
    _reports.extend(loop.reports)
    try:
        loop.close()
    except Exception as error:  # must not hide how training ended
        logger.warning("after training, the plugin could not be taken back: %s: %s", type(error).__name__, error)
