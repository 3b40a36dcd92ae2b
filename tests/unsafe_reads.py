# SPDX-License-Identifier: Apache-2.0
"""Tracebacks of real upstream code that reads unsafe state, one for each state below.

A case builds upstream objects and returns the roots below which the plugin finds their states, and a step. The step is run,
the state's tensors become unsafe, and the step is run again.

As a program: reads state names from standard input and prints one JSON line for each, with the traceback as Python prints
it and the notes that the plugin would add. The Megatron it runs is the one on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import catalogue_cases as cases

Case = Callable[[cases.Env], tuple[dict[str, Any], Callable[[], Any]]]
CASES: dict[str, Case] = {}


def case(*states: str) -> Callable[[Case], Case]:
    def declare(function: Case) -> Case:
        CASES.update(dict.fromkeys(states, function))
        return function

    return declare


@case("moe-aux-loss-tracker")
def router_losses(env: cases.Env) -> Any:
    module = cases.router(env)
    return {"model": module}, lambda: module(cases.tokens().requires_grad_())


@case("mtp-loss-tracker")
def mtp_losses(env: cases.Env) -> Any:
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Losses

    def step() -> None:
        if hasattr(Losses, "save_metrics_to_tracker"):
            Losses.save_metrics_to_tracker(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(8.0), 0, 1)
        else:
            Losses.save_loss_to_tracker(torch.tensor(1.0), 0, 1)

    return {}, step


@case("router-expert-bias", "router-local-tokens")
def router_bias(env: cases.Env) -> Any:
    module = cases.router(env, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    return {"model": module}, lambda: module(cases.tokens().requires_grad_())


@case("router-global-tokens")
def router_global_tokens(env: cases.Env) -> Any:
    module = cases.router(env, moe_router_load_balancing_type="global_aux_loss")
    return {"model": module}, lambda: module(cases.tokens().requires_grad_())


@case("dsa-indexer-loss-tracker")
def dsa_losses(env: cases.Env) -> Any:
    import torch
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Losses

    env.distributed()
    return {}, lambda: Losses.save_loss_to_tracker(torch.tensor(3.0), 1, 1)


@case("router-forced-bias")
def forced_bias(env: cases.Env) -> Any:
    import torch
    from megatron.core.transformer.moe import moe_utils

    env.distributed()
    return {}, lambda: moe_utils.RandomSTEShared.apply(torch.zeros(3, 4), -1.0, 1)


@case("global-memory-buffer")
def gather_buffer(env: cases.Env) -> Any:
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    env.distributed()
    weight = torch.ones(2, 8, requires_grad=True)
    function = layers.linear_with_grad_accumulation_and_async_allreduce
    options = cases.known(
        function,
        gradient_accumulation_fusion=False,
        async_grad_allreduce=False,
        allreduce_dgrad=False,
        sequence_parallel=True,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    return {}, lambda: function(cases.tokens(), weight, None, **options)


@case("rotary-frequencies")
def frequencies(env: cases.Env) -> Any:
    module = cases.rotary(env)
    lengths = iter(range(4, 9))  # each new to the cache
    return {"model": module}, lambda: module(next(lengths))


@case("rotary-frequencies-yarn-extra", "rotary-frequencies-yarn-inter")
def yarn_frequencies(env: cases.Env) -> Any:
    module = cases.yarn(env)
    lengths = iter(range(4, 9))
    return {"model": module}, lambda: module(next(lengths))


@case("loss-scale-fp32")
def fp32_scale(env: cases.Env) -> Any:
    import torch
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = FP32Optimizer(torch.optim.SGD([parameter], lr=0.1), OptimizerConfig(), lambda *args: None)
    return {"optimizer": optimizer}, lambda: optimizer.scale_loss(torch.tensor(2.0))


@case("found-inf", "overflow-buffer", "grad-scaler-growth-factor")
def fp16_update(env: cases.Env) -> Any:
    optimizer = cases.half_optimizer(env, fp16=True)

    def step() -> None:
        for _ in range(2):  # the scale grows with every second
            cases.set_gradient(optimizer, 16.0)
            optimizer.prepare_grads()
            optimizer.step_with_ready_grads()

    return {"optimizer": optimizer}, step


def run(state: str, specs: list[Any]) -> dict[str, Any]:
    """In this process: the traceback of the step that reads the unsafe state, and the plugin's notes on its error."""
    import torch

    from mindspeed_recovery.core import unsafe
    from mindspeed_recovery.core.registry import Registry
    from mindspeed_recovery.frameworks import megatron_cpu
    from mindspeed_recovery.testing.simulator import UnsafeMemory

    memory = UnsafeMemory()
    torch.manual_seed(0)
    with megatron_cpu.cpu_mode(), memory.active():
        roots, step = CASES[state](cases.Env(memory, None, whole=False))
        step()
        registry = Registry(specs)
        registry.find_owners(roots)
        struck = memory.mark_unsafe([tensor for _, tensor in registry[state].tensors()])
        try:
            step()
        except Exception as error:
            text = traceback.format_exc()
            unsafe.annotate(error, registry, memory)
            return {"struck": struck, "traceback": text, "notes": getattr(error, "__notes__", [])}
    return {"struck": struck, "traceback": "", "notes": []}


def main(version: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    from packaging.version import Version

    from mindspeed_recovery import catalogue

    importlib.import_module("mindspeed_recovery.core.session")  # once, for all forks
    importlib.import_module("mindspeed_recovery.testing.simulator")
    cases.prepare()
    specs = catalogue.load(cases.CATALOGUE).states(Version(version))
    list(cases.import_everything(spec.location.module for spec in specs))
    for state in map(str.strip, sys.stdin):
        answer = cases.in_a_process(lambda state=state: run(state, specs))  # type: ignore[misc]
        print(json.dumps({"state": state, **answer}), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(cases.CATALOGUE.parent.parent))
    main(sys.argv[1])
