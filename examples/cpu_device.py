# SPDX-License-Identifier: Apache-2.0
"""The device under `pretrain_gpt.py`: a CPU with simulated device memory, gloo groups that can be rebuilt, and faults.

Nothing here is needed on real devices. There the memory is the device's own, and MindIO TFT recovers the job.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_recovery.frameworks import megatron, megatron_cpu
from mindspeed_recovery.runtimes import restartable_gloo
from mindspeed_recovery.testing.faults import GRAMMAR, FaultInjector, FaultSpec, FaultSpecError
from mindspeed_recovery.testing.simulator import UnsafeMemory

megatron_cpu.install(training=True)  # before Megatron is imported

ARGUMENTS = shlex.split("""
    --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-persist-layer-norm --no-rope-fusion
    --distributed-backend gloo --disable-gloo-process-groups --num-workers 0
""")
"""What Megatron must be told so that it asks for nothing only a GPU has."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """An ``extra_args_provider`` of Megatron."""
    group = parser.add_argument_group("simulated device")
    group.add_argument(
        "--fault", type=_fault, action="append", default=[], metavar="SPEC", help=f"{GRAMMAR}; repeatable"
    )
    group.add_argument(
        "--save-final",
        type=Path,
        metavar="FILE",
        help="save the final parameters, buffers and optimizer state of each rank to FILE.rank<R>",
    )
    return parser


def _fault(text: str) -> FaultSpec:
    try:
        return FaultSpec.parse(text)
    except FaultSpecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def join(store: dist.Store | None = None) -> dist.Store:
    """Join the other ranks as torchrun's environment says; return a store of the runtime's own."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0 and not agent_serves)
    restartable_gloo.register(peer_failure_grace=5.0)
    dist.init_process_group(
        "restartable_gloo", store=dist.PrefixStore("groups", store), rank=rank, world_size=world_size
    )
    return dist.PrefixStore("recovery", store)


@contextlib.contextmanager
def run(args: argparse.Namespace, store: dist.Store) -> Iterator[Device]:
    """Inside, ``cuda`` is the simulated device, which the faults of ``args`` hit and the standalone runtime recovers."""
    from mindspeed_recovery.frameworks import megatron_loop

    device = Device(args)
    with megatron_cpu.cpu_mode(), device.memory.active():
        megatron_loop.use_standalone(device.memory, store, context=device.context)
        yield device
        if args.save_final:
            args.save_final.parent.mkdir(parents=True, exist_ok=True)
            torch.save(device.final_state(), f"{args.save_final}.rank{args.rank}")
    for milliseconds in megatron_loop.recoveries() if args.rank == 0 else []:
        print(f"recovery: {milliseconds}", flush=True)


class Device:
    """The simulated device of one rank and the places where faults hit it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.memory = UnsafeMemory(args.seed)
        self._args = args
        self._injector = FaultInjector(
            args.fault,
            args.rank,
            self.memory,
            lambda names: megatron.state_tensors(names, self._model, self._optimizer),
        )
        self._model: list[Any] = []
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._place_faults()

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What another thread enters to use the device without being checked."""
        with megatron_cpu.cpu_mode(), self.memory.active(), self.memory.exempt():
            yield

    def at(self, point: str, step: int | None = None) -> None:
        """A point of a training step, where a fault may wait. ``step``: by default the one that is being computed."""
        self._injector.at(point, self._args.curr_iteration + 1 if step is None else step)

    def _place_faults(self) -> None:
        """Points that a user's script does not reach: they lie inside the framework."""
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
        from megatron.core.transformer.transformer_layer import TransformerLayer
        from megatron.training import training

        def in_router(module: Any, inputs: Any, outputs: Any) -> None:
            if module.training:
                self.at("router")

        setup = training.setup_model_and_optimizer

        def setup_and_keep(*args: Any, **kwargs: Any) -> Any:
            self._model, self._optimizer, self._scheduler = built = setup(*args, **kwargs)
            modules = list(self._model[0].modules())
            for module in modules:
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(in_router)
            next(m for m in modules if isinstance(m, TransformerLayer)).register_forward_hook(self._in_backward)
            for optimizer in megatron.optimizers(self._optimizer):
                optimizer.optimizer.register_step_post_hook(lambda *unused: self.at("update"))
            return built

        training.setup_model_and_optimizer = setup_and_keep
        # A log line begins when the update is over; MoE metrics are written before those of multi-token prediction.
        logger = training.one_logger_utils
        logger.track_app_tag = _before(logger.track_app_tag, lambda *a, **k: self.at("optimizer"))
        MTPLossLoggingHelper.track_mtp_metrics = staticmethod(
            _before(MTPLossLoggingHelper.track_mtp_metrics, lambda *a, **k: self.at("log"))
        )

    def _in_backward(self, module: Any, inputs: Any, outputs: Any) -> None:
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.at("backward"))

    def final_state(self) -> dict[str, Any]:
        """What two equal runs end with."""
        optimizers = []
        for optimizer in megatron.optimizers(self._optimizer):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            moments = [dict(optimizer.optimizer.state.get(parameter, {})) for parameter in parameters]
            optimizers.append({"parameters": [p.detach() for p in parameters], "state": moments})
        chunk = self._model[0].module
        return {
            "parameters": {name: parameter.detach() for name, parameter in chunk.named_parameters()},
            "buffers": dict(chunk.named_buffers()),
            "optimizers": optimizers,
            "scheduler": self._scheduler.state_dict(),
            "consumed": [self._args.consumed_train_samples, self._args.consumed_valid_samples],
            "rng": torch.get_rng_state(),
        }


def _before(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return function(*args, **kwargs)

    return called


def prepare(argv: list[str]) -> None:
    """Put what a CPU needs before the user's arguments, and refuse to start outside torchrun."""
    if "RANK" not in os.environ:
        print(f"{argv[0]}: start it with torchrun, for example: torchrun --nproc-per-node 2 {argv[0]}", file=sys.stderr)
        raise SystemExit(2)
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING"))
    torch.set_num_threads(1)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    argv[1:1] = ARGUMENTS
