# SPDX-License-Identifier: Apache-2.0
"""Run an unmodified megatron-core (0.11 and later) on a CPU, reversibly.

Megatron asks for a CUDA device in many places, but every operation that training needs exists on the CPU with
gloo. This module answers those questions with "the device is the CPU":

* ``install()`` replaces the few ``torch.cuda`` functions and Megatron functions that cannot work without a
  device; ``uninstall()`` puts every one of them back.
* ``install(training=True)`` also answers what ``megatron.training`` (the stock ``pretrain()``) asks of a device.
* ``cpu_mode()`` redirects the tensors: inside it ``device="cuda"`` means the CPU.

::

    from mindspeed_recovery.frameworks import megatron_cpu

    megatron_cpu.install()            # before or after the first import of megatron
    from megatron.core import parallel_state
    with megatron_cpu.cpu_mode():
        ...                           # build the model, train

The device's default random generator is torch's CPU generator, so the two are one stream: draw data from a
generator of its own. It is meant for tests and examples, never for a process that has a real device.
"""

from __future__ import annotations

import copy
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import wrapt
from torch.overrides import TorchFunctionMode
from torch.utils import _triton

_MISSING = object()
_CPU = torch.device("cpu")


# --- reversible changes ------------------------------------------------------------------------------------


class _Changes:
    """Attribute changes that can be taken back. Not thread-safe: install from one thread."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` (a module or a class) and remember what stood in its own ``__dict__``."""
        self._saved.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, the newest change first."""
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_changes = _Changes()
_installed = False
_training = False
_hooked = False


# --- torch.cuda --------------------------------------------------------------------------------------------


class _Event:
    """A device event on a CPU: everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """A device stream on a CPU: all streams are one, and always idle. Its methods are the ones Megatron calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return hash(_Stream)

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return _Event() if event is None else event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda", graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one seeds the cuda generators too, and so comes back here.
    torch.default_generator.manual_seed(int(seed))


def _change_torch() -> None:
    cuda = torch.cuda
    _changes.set(cuda, "current_device", lambda: _CPU)
    _changes.set(cuda, "Stream", _Stream)
    _changes.set(cuda, "Event", _Event)
    _changes.set(cuda, "current_stream", _Stream)
    for owner in (cuda, cuda.random):
        _changes.set(owner, "get_rng_state", _get_rng_state)
        _changes.set(owner, "set_rng_state", _set_rng_state)
        _changes.set(owner, "manual_seed", _manual_seed)


_PROPERTIES = SimpleNamespace(name="cpu", major=9, minor=0, total_memory=2**30, multi_processor_count=1)
"""Of the device that the CPU stands for: recent enough that Megatron takes no path for old ones."""


def _answering(value: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    """A new function for whatever arguments. torch._dynamo refuses to find one function under two names of torch."""
    return lambda *args, **kwargs: value()


def _change_torch_for_training() -> None:
    cuda = torch.cuda
    nothing = ("set_device", "set_stream", "synchronize", "empty_cache")
    memory = (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "device_memory_used",
    )
    answers = {
        "is_available": _answering(lambda: True),
        "device_count": _answering(lambda: 1),
        "get_device_name": _answering(lambda: _PROPERTIES.name),
        "get_device_properties": _answering(lambda: _PROPERTIES),
        "get_device_capability": _answering(lambda: (_PROPERTIES.major, _PROPERTIES.minor)),
        "stream": _answering(nullcontext),
        "memory_stats": _answering(lambda: defaultdict(int)),
        **{name: _answering() for name in nothing},
        **{name: _answering(lambda: 0) for name in memory},
    }
    for name, answer in answers.items():
        _changes.set(cuda, name, answer)
    if not hasattr(typing, "override"):  # Python before 3.12; 0.18 and later import it
        _changes.set(typing, "override", lambda method: method)


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """Decorates nothing, written as ``@decorator`` or as ``@decorator(...)``."""
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _decorator


# --- megatron.core -----------------------------------------------------------------------------------------


def _change_jit(module: ModuleType) -> None:
    # The functions it decorates run eagerly: from 0.16 the router has one, and compiling it takes a C++ compiler
    # and many seconds of the first step.
    _changes.set(module, "jit_fuser", _decorator)


def _change_random(module: ModuleType) -> None:
    # It defers the call until CUDA is initialised, which is never.
    _changes.set(module, "_set_cuda_rng_state", _set_rng_state)


def _change_moe_utils(module: ModuleType) -> None:
    # 0.13 - 0.16 read the name, but leave it undefined where Transformer Engine is missing.
    if not hasattr(module, "te_general_gemm"):
        _changes.set(module, "te_general_gemm", None)


def _change_token_dispatcher(module: ModuleType) -> None:
    # The dispatcher asks for splits as numpy arrays, and Megatron converts only what it moves off a device.
    original = getattr(module, "maybe_move_tensor_to_cpu", None)
    if original is None:
        return

    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _changes.set(module, "maybe_move_tensor_to_cpu", move)


def _change_fp8_utils(module: ModuleType) -> None:
    # 0.12's fallback for a missing Transformer Engine raises even where there is no fp8 parameter.
    original = getattr(module, "_quantize_param_shard_impl", None)
    if original is None:
        return

    @functools.wraps(original)
    def quantize(model_params: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if model_params else None

    _changes.set(module, "_quantize_param_shard_impl", quantize)


def _change_torch_norm(module: ModuleType) -> None:
    # torch's norms work on a sequence shard as they are; their gradients only have to be reduced over the
    # tensor parallel ranks, which finalize_model_grads does for parameters marked ``sequence_parallel``.
    norm = getattr(module, "WrappedTorchNorm", None)
    if norm is None:
        return
    original = norm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        layer = original(cls, plain, *args, **kwargs)
        for parameter in layer.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return layer

    _changes.set(norm, "__new__", staticmethod(new))


def _change_datasets_utils(module: ModuleType) -> None:
    # Rank 0 of pretrain() runs make in the installed package; the wheels hold the built library already.
    if _training:
        _changes.set(module, "compile_helpers", _answering())


_MEGATRON: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.datasets.utils": _change_datasets_utils,
    "megatron.core.fp8_utils": _change_fp8_utils,
    "megatron.core.jit": _change_jit,
    "megatron.core.tensor_parallel.random": _change_random,
    "megatron.core.transformer.moe.moe_utils": _change_moe_utils,
    "megatron.core.transformer.moe.token_dispatcher": _change_token_dispatcher,
    "megatron.core.transformer.torch_norm": _change_torch_norm,
}


def _on_import(module: ModuleType) -> None:
    if _installed:  # wrapt keeps its hooks for the life of the process
        _MEGATRON[module.__name__](module)


def _change_megatron() -> None:
    global _hooked
    for name in _MEGATRON:
        if not _hooked:
            wrapt.register_post_import_hook(_on_import, name)  # at once if it is imported already
        elif name in sys.modules:
            _on_import(sys.modules[name])
    _hooked = True


class _OneGenerator(logging.Filter):
    """Drops the warning that the CPU generator moved inside a device RNG context: here they are one."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


_rng_logger = logging.getLogger("megatron.core.tensor_parallel.random")
_one_generator = _OneGenerator()


# --- triton ------------------------------------------------------------------------------------------------


class _StubTriton(ModuleType):
    """Stands for triton while a module that only defines kernels is imported. Nothing in it can be run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorator


class _KernelLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        if "triton" in sys.modules:  # an outer one of these modules is being imported
            super().exec_module(module)
            return
        stub, language = _StubTriton("triton"), _StubTriton("triton.language")
        stub.__dict__.update(__path__=[], language=language)
        sys.modules.update({"triton": stub, "triton.language": language})
        try:
            super().exec_module(module)
        finally:
            del sys.modules["triton"], sys.modules["triton.language"]


class _KernelFinder(importlib.abc.MetaPathFinder):
    """Megatron 0.18 and later import triton unconditionally, in these modules alone (0.18, 0.19).

    The stub is visible only while one of them is imported, so nobody else mistakes it for a triton.
    """

    modules = ("megatron.core.transformer.moe.paged_stash", "megatron.core.transformer.moe.ops.paged_stash")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _KernelLoader(fullname, spec.origin)
        return spec


_kernel_finder = _KernelFinder()


# --- tensors -----------------------------------------------------------------------------------------------


def _on_cpu(value: Any) -> Any:
    """A cuda device, in any of its spellings, becomes the CPU; everything else is itself."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return _CPU if value == "cuda" or value.startswith("cuda:") else value
    return value


class _CpuMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device:  # takes the name and the index apart: ("cuda", 0)
            return _on_cpu(func(*args, **(kwargs or {})))
        args = tuple(_on_cpu(arg) for arg in args)
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        # Megatron's optimizers sort parameters by the type's name, and know only the device's names.
        if func is torch.Tensor.type and isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextmanager
def cpu_mode() -> Iterator[None]:
    """Let this thread's torch calls for ``"cuda"`` use the CPU.

    ``device="cuda"`` and ``.to("cuda")`` mean the CPU, ``Tensor.cuda()`` returns the tensor itself, and
    ``Tensor.type()`` reports the device's name (``torch.cuda.FloatTensor``). The mode belongs to the thread
    that enters it: each thread that runs Megatron code enters its own. It may be nested.
    """
    with _CpuMode():
        yield


# --- public ------------------------------------------------------------------------------------------------


def install(*, training: bool = False) -> None:
    """Make megatron-core usable without a device, whether it is imported already or only later.

    ``training``: for ``megatron.training`` too, which refuses to start where ``torch.cuda`` finds no device; it is then
    told of one device, without memory statistics. A second call does nothing. Call it before Megatron is imported where
    that is possible: without triton, Megatron 0.18 and later cannot be imported earlier, and functions that Megatron
    (0.16 and later) marked for compilation earlier are compiled in the first step.

    Raises:
        RuntimeError: a CUDA device is there; this module would hide it.
    """
    global _installed, _training
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "megatron_cpu: this process has a CUDA device; hide it (CUDA_VISIBLE_DEVICES='') or do not call install()"
        )
    _installed, _training = True, training
    _change_torch()
    if training:
        _change_torch_for_training()
    _rng_logger.addFilter(_one_generator)
    # torch keeps the answer for good: let it give the true one before a stub is in sight.
    if not _triton.has_triton_package():
        sys.meta_path.insert(0, _kernel_finder)
    _change_megatron()


def uninstall() -> None:
    """Take back everything ``install()`` changed; does nothing if it was not called.

    Modules of Megatron imported in between stay imported and have their own attributes again; only the functions
    that Megatron would have compiled while it was imported stay eager.
    """
    global _installed, _training
    if not _installed:
        return
    _installed = _training = False
    _changes.undo()
    _rng_logger.removeFilter(_one_generator)
    if _kernel_finder in sys.meta_path:
        sys.meta_path.remove(_kernel_finder)
