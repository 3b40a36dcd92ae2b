# SPDX-License-Identifier: Apache-2.0
"""For each entry of the megatron-core catalogue: a step of real upstream calls that is wrong without the entry.

A case is a function that builds upstream objects, runs healthy steps, loses one to a fault (`Env.lose_step`) and returns
what the recomputed step gives. It is run three times, each in a process of its own: undisturbed, with the whole
catalogue, and with one entry taken out. The first two must agree bit for bit; the third must differ, or raise.

As a program: reads entry names from standard input, one a line, and prints one JSON line for each. The Megatron it runs
is the one on ``PYTHONPATH``; its import is paid once, the runs are forked. Importing this module imports neither torch
nor Megatron.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).resolve().parent.parent / "patches" / "megatron-core.toml"

Case = Callable[["Env"], Any]
CASES: dict[str, Case] = {}
"""By entry name."""

NO_CASE: dict[str, str] = {
    "nccl-ep-over-budget": "only in versions from 0.20 on, which are not released",
    "nccl-ep-required-tokens": "only in versions from 0.20 on, which are not released",
    "rng-router-benchmark": "only in versions 0.13 - 0.15; not run here",
    "sliding-window-mask-cache": "only in version 0.15; not run here",
    "rerun-last-loss": "only in versions 0.10 and 0.11; not run here",
    "rng-cuda": "needs a CUDA device: without one torch.cuda.default_generators is empty",
    "max-attention-logits": "needs Transformer Engine: without it TEDotProductAttention is no class",
}
"""Entries without a case, and why. ``name`` is for every version, ``name@version`` for one."""


def case(*entries: str) -> Callable[[Case], Case]:
    """The function exercises these entries, each of which is taken out by itself."""

    def declare(function: Case) -> Case:
        for entry in entries:
            assert entry not in CASES, entry
            CASES[entry] = function
        return function

    return declare


class StepAborted(RuntimeError):
    """What the training thread meets when the runtime has stopped the device."""

    def __init__(self) -> None:
        super().__init__("FORCE STOP.")


class Env:
    """One run of a case. ``specs``: what is tracked; None for the undisturbed run."""

    def __init__(self, memory: Any, specs: list[Any] | None, *, whole: bool) -> None:
        self.recovered = False
        self._memory, self._specs, self._whole = memory, specs, whole
        self._step = 0
        self._session: Any = None

    @property
    def disturbed(self) -> bool:
        return self._specs is not None

    def distributed(self) -> None:
        """One rank, with Megatron's groups and random number streams."""
        import torch.distributed as dist
        from megatron.core import parallel_state, tensor_parallel

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)

    def start(self, **roots: Any) -> None:
        """Protect what there is; ``roots`` are the named objects below which states on instances are found."""
        if self._specs is not None:
            from mindspeed_recovery.core.registry import Registry
            from mindspeed_recovery.core.session import Session

            self._session = Session(Registry(self._specs), roots=roots, memory=self._memory)
            self._session.start()

    def healthy_step(self, step: Callable[[], Any]) -> None:
        """One whole step that no fault hits."""
        self._begin_step()
        step()

    def lose_step(self, part: Callable[[], Any], unsafe: Callable[[], Iterable[Any]] = tuple) -> None:
        """The next step begins, comes as far as ``part``, loses the tensors of ``unsafe`` and is rolled back.

        In the undisturbed run nothing happens. ``part`` may raise StepAborted where it is cut.
        """
        if self._session is None:
            return
        self._begin_step()
        with contextlib.suppress(StepAborted):
            part()
        self._memory.strike(list(unsafe()))
        self._session.stop()
        self._memory.check_uce_in_memory()
        self._session.clean()
        self._session.before_rollback(self._step - 1)
        report = self._session.after_rollback()
        assert report.exact or not self._whole, report.failures
        self._step -= 1
        self.recovered = True

    def _begin_step(self) -> None:
        self._step += 1
        if self._session is not None:
            self._session.begin_step(self._step)


# ---- upstream objects ----------------------------------------------------------------------------------------------------


def known(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The options that this version's function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def transformer_config(**changes: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**known(TransformerConfig, **(options | changes)))


def moe_config(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 8,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_token_dispatcher_type": "alltoall",
    }
    return transformer_config(**(options | changes))


def process_groups() -> dict[str, Any]:
    """``pg_collection`` for the versions whose modules take their groups as an argument."""
    from megatron.core.transformer.moe import moe_utils

    default = getattr(moe_utils, "get_default_pg_collection", None)
    return {} if default is None else {"pg_collection": default()}


def router(env: Env, **changes: Any) -> Any:
    from megatron.core.transformer.moe.router import TopKRouter

    env.distributed()
    module = TopKRouter(config=moe_config(**changes), **known(TopKRouter, **process_groups()))
    module.set_layer_number(1)
    return module


def tokens(seed: int = 0) -> Any:
    """Hidden states of one microbatch: [sequence, batch, hidden]."""
    import torch

    return torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(seed))


def in_turn(*calls: Callable[[], Any]) -> Callable[[], None]:
    """One call that makes these, in their order."""

    def run_all() -> None:
        for call in calls:
            call()

    return run_all


class Scalars:
    """A TensorBoard writer that keeps the scalars."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.values[name] = float(value)


# ---- loss trackers -------------------------------------------------------------------------------------------------------


@case("moe-aux-loss-tracker")
def moe_aux_losses(env: Env) -> Any:
    module = router(env)
    writer = Scalars()

    def forward() -> None:
        module(tokens().requires_grad_())

    def report() -> None:
        from megatron.core.transformer.moe import moe_utils

        try:
            from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

            function = get_moe_metrics_tracker().report
        except ImportError:
            function = moe_utils.track_moe_metrics
        options = known(
            function, loss_scale=0.5, iteration=1, writer=writer, num_layers=1, track_names=["load_balancing_loss"]
        )
        function(**options)

    step = in_turn(forward, forward, report)
    env.start(model=module)
    env.healthy_step(step)
    env.lose_step(forward)
    step()
    return writer.values


@case("mtp-loss-tracker")
def mtp_losses(env: Env) -> Any:
    return _mtp_step(env, Scalars(), logged=False)


@case("mtp-acceptance-counts")
def mtp_acceptance(env: Env) -> Any:
    return _mtp_step(env, Scalars(), logged=True)


def _mtp_step(env: Env, writer: Scalars, logged: bool) -> dict[str, float]:
    """The scalars of a recomputed step. ``logged``: the lost one came as far as its log line."""
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Losses

    def microbatch(right: float) -> None:
        if hasattr(Losses, "save_metrics_to_tracker"):
            Losses.save_metrics_to_tracker(torch.tensor(right), torch.tensor(right), torch.tensor(8.0), 0, 1)
        else:
            Losses.save_loss_to_tracker(torch.tensor(right), 0, 1)

    def log() -> None:
        Losses.track_mtp_metrics(1.0, 1, writer)

    def step(right: float) -> Callable[[], None]:
        return in_turn(lambda: microbatch(right), log)

    env.start()
    env.healthy_step(step(2.0))
    env.lose_step(step(5.0) if logged else lambda: microbatch(5.0))
    step(5.0)()
    return writer.values


@case("dsa-indexer-loss-tracker")
def dsa_indexer_losses(env: Env) -> Any:
    import torch
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Losses

    env.distributed()
    writer = Scalars()

    def microbatch() -> None:
        Losses.save_loss_to_tracker(torch.tensor(3.0), 1, 1)

    step = in_turn(microbatch, lambda: Losses.track_indexer_metrics(1.0, 1, writer))
    env.start()
    env.healthy_step(step)
    env.lose_step(microbatch)
    step()
    return writer.values


@case("sequence-length-sums")
def packed_sequence_lengths(env: Env) -> Any:
    import torch
    from megatron.training import training

    lengths = torch.tensor([0, 3, 7], dtype=torch.int32)

    def microbatch() -> None:
        training.update_seqlen_stats_from_cu_seqlens(lengths)

    env.start()
    env.healthy_step(in_turn(microbatch, training.consume_seqlen_stats_in_iteration))
    env.lose_step(microbatch)
    microbatch()
    return training.consume_seqlen_stats_in_iteration()


@case("sequence-length-sums-active")
def packed_sequence_lengths_in_use(env: Env) -> Any:
    import torch
    from megatron.training import training

    env.start()
    env.healthy_step(lambda: None)
    env.lose_step(lambda: training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, 3, 7], dtype=torch.int32)))
    return training.consume_seqlen_stats_in_iteration()  # the recomputed step, unlike the lost one, is not packed


# ---- router --------------------------------------------------------------------------------------------------------------


def finish_router_step(module: Any) -> None:
    """What ``finalize_model_grads`` does to a router."""
    from megatron.core import parallel_state

    finalize: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # a function has its name
    groups = {
        "tp_dp_cp_group": parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if module.enable_expert_bias:
        update = finalize._update_router_expert_bias
        update([module], module.config, **known(update, **groups))
    if getattr(module, "qb_beta", None) is not None:
        update = finalize._update_router_qb_beta
        update([module], module.config, **known(update, **groups))
    if hasattr(finalize, "reset_model_temporary_tensors"):
        finalize.reset_model_temporary_tensors(module.config, [module])


@case("router-expert-bias", "router-local-tokens")
def router_expert_bias(env: Env) -> Any:
    module = router(
        env,
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_bias_update_rate=0.1,
    )

    def forward(seed: int) -> Callable[[], Any]:
        return lambda: module(tokens(seed).requires_grad_())

    def finish() -> None:
        finish_router_step(module)

    env.start(model=module)
    env.healthy_step(in_turn(forward(0), finish))
    env.lose_step(in_turn(forward(1), finish, forward(2)))  # far enough for a new bias, and for tokens of another one
    forward(1)()
    counts = module.local_tokens_per_expert.clone()
    finish()
    return counts, module.expert_bias


@case("router-global-tokens", "router-global-token-steps")
def router_global_aux_loss(env: Env) -> Any:
    module = router(env, moe_router_load_balancing_type="global_aux_loss")

    def microbatch(seed: int) -> None:
        probabilities, _ = module(tokens(seed).requires_grad_())
        probabilities.sum().backward()

    def step(*seeds: int) -> None:
        module.weight.grad = None
        for seed in seeds:
            microbatch(seed)
        finish_router_step(module)

    env.start(model=module)
    env.healthy_step(lambda: step(0, 1))
    env.lose_step(lambda: microbatch(2))
    step(2, 3)
    return module.weight.grad


@case("router-quantile-bias", "router-quantile-sum", "router-quantile-count")
def router_quantile_balancing(env: Env) -> Any:
    module = router(env, moe_router_load_balancing_type="quantile_balancing", moe_aux_loss_coeff=0.0)

    def forward(seed: int) -> Callable[[], Any]:
        return lambda: module(tokens(seed).requires_grad_())

    def finish() -> None:
        finish_router_step(module)

    env.start(model=module)
    env.healthy_step(in_turn(forward(0), finish))
    env.lose_step(in_turn(forward(1), finish, forward(2)))
    in_turn(forward(1), finish)()
    return module.qb_beta


@case("router-input-jitter")
def router_input_jitter(env: Env) -> Any:
    module = router(env, moe_input_jitter_eps=0.1)

    def forward() -> Any:
        return module(tokens())[0]

    env.start(model=module)
    env.healthy_step(forward)
    env.lose_step(forward, unsafe=lambda: [module.input_jitter.__self__.low, module.input_jitter.__self__.high])
    return forward()


@case("hybrid-ep-over-budget")
def over_budget_flag(env: Env) -> Any:
    """Dispatching needs DeepEP, for which a stand-in is enough until something is dispatched."""
    from megatron.core.transformer.moe import token_dispatcher

    env.distributed()
    token_dispatcher.hybrid_ep_dispatch = token_dispatcher.hybrid_ep_dispatch or object()
    config = moe_config(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    dispatcher = token_dispatcher.MoEFlexTokenDispatcher(4, [0, 1, 2, 3], config=config, **process_groups())
    env.start(model=dispatcher)
    env.healthy_step(dispatcher.reset_over_budget)
    env.lose_step(lambda: None, unsafe=lambda: [dispatcher.check_over_budget()])
    dispatcher.reset_over_budget()
    return dispatcher.check_over_budget()


@case("router-forced-bias")
def router_forced_bias(env: Env) -> Any:
    import torch
    from megatron.core.transformer.moe import moe_utils

    env.distributed()

    def forward() -> Any:
        return moe_utils.RandomSTEShared.apply(torch.zeros(3, 4), -1.0, 1)

    env.start()
    env.healthy_step(forward)
    env.lose_step(forward, unsafe=lambda: moe_utils.RandomSTEShared._cache.values())
    return forward(), forward()


# ---- random numbers ------------------------------------------------------------------------------------------------------


@case("rng-tracker")
def forked_random_numbers(env: Env) -> Any:
    import torch
    from megatron.core import tensor_parallel

    env.distributed()
    tracker = tensor_parallel.get_cuda_rng_tracker()

    def dropout() -> Any:
        with tracker.fork():
            return torch.rand(3)

    env.start()
    env.healthy_step(dropout)
    env.lose_step(dropout)
    return dropout()


@case("rng-tracker-current-name")
def fork_cut_while_it_ends(env: Env) -> Any:
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    env.distributed()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.add("other", 7)
    read = random._get_cuda_rng_state

    def stopped(*args: Any, **options: Any) -> Any:
        raise StepAborted

    def lost() -> None:
        with tracker.fork("other"):
            random._get_cuda_rng_state = stopped

    def dropout(name: str) -> Any:
        with tracker.fork(name):
            return torch.rand(3)

    env.start()
    env.healthy_step(lambda: dropout("other"))
    try:
        env.lose_step(lost)
    finally:
        random._get_cuda_rng_state = read
    return dropout("model-parallel-rng"), dropout("other")


@case("rng-cpu", "rng-python", "rng-numpy")
def default_generators(env: Env) -> Any:
    import random

    import numpy
    import torch

    def draw() -> Any:
        return torch.rand(1), random.random(), numpy.random.rand()

    env.start()
    env.healthy_step(draw)
    env.lose_step(draw)
    return draw()


# ---- caches and workspaces -----------------------------------------------------------------------------------------------


@case("global-memory-buffer")
def sequence_parallel_gather(env: Env) -> Any:
    """The gather of a sequence parallel linear layer is a collective: it fills the workspace and checks nothing."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    env.distributed()
    weight = torch.ones(2, 8, requires_grad=True)
    function = layers.linear_with_grad_accumulation_and_async_allreduce
    options = known(
        function,
        gradient_accumulation_fusion=False,
        async_grad_allreduce=False,
        allreduce_dgrad=False,
        sequence_parallel=True,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )

    def forward() -> Any:
        return function(tokens(), weight, None, **options)

    env.start()
    env.healthy_step(forward)
    env.lose_step(forward, unsafe=lambda: parallel_state.get_global_memory_buffer().buffer.values())
    return forward()


def rotary(env: Env) -> Any:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    env.distributed()
    return RotaryEmbedding(8, 1.0)


def yarn(env: Env) -> Any:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    env.distributed()
    return YarnRotaryEmbedding(8, scaling_factor=4.0, original_max_position_embeddings=16)


@case("rotary-cache")
def rotary_embeddings(env: Env) -> Any:
    module = rotary(env)
    env.start(model=module)
    env.healthy_step(lambda: module(4))
    env.lose_step(lambda: module(4), unsafe=lambda: [module(4)])
    return module(4)


@case("rotary-cache-yarn")
def yarn_embeddings(env: Env) -> Any:
    module = yarn(env)
    env.start(model=module)
    env.healthy_step(lambda: module(4))
    env.lose_step(lambda: module(4), unsafe=lambda: [module(4)[0]])
    return module(4)


@case("rotary-cached-length")
def yarn_cosines(env: Env) -> Any:
    module = yarn(env)

    def cosines() -> Any:
        return module.get_cached_cos_sin(4)

    env.start(model=module)
    env.healthy_step(cosines)
    env.lose_step(cosines, unsafe=lambda: [module.cos_cached, module.sin_cached])
    return cosines()


@case("causal-mask-cache")
def causal_mask(env: Env) -> Any:
    from megatron.core.transformer.utils import get_default_causal_mask

    env.start()
    env.healthy_step(lambda: get_default_causal_mask(4))
    env.lose_step(lambda: None, unsafe=lambda: [get_default_causal_mask(4)])
    return get_default_causal_mask(4)


@case("gated-delta-net-head-order")
def gated_delta_net_head_order(env: Env) -> Any:
    import torch
    from megatron.core.ssm.gated_delta_net.common import _build_head_perm_for_split_sections

    def order() -> Any:
        return _build_head_perm_for_split_sections((2, 4), 2, torch.device("cpu"))

    env.start()
    env.healthy_step(order)
    env.lose_step(lambda: None, unsafe=lambda: [order()])
    return order()


@case("dsa-scratch", "dsa-scratch-bytes")
def dsa_scratch(env: Env) -> Any:
    import torch
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    def work() -> Any:
        return tilelang_dsa._get_scratch_buffer("sums", (4,), torch.float32, torch.device("cpu")).zero_()

    env.start()
    env.healthy_step(work)
    env.lose_step(lambda: None, unsafe=lambda: tilelang_dsa._DSA_SCRATCH_CACHE.values())
    return work(), tilelang_dsa._DSA_SCRATCH_CACHE_TOTAL_BYTES


# ---- constants -----------------------------------------------------------------------------------------------------------


@case("rotary-frequencies")
def rotary_frequencies(env: Env) -> Any:
    module = rotary(env)
    env.start(model=module)
    env.healthy_step(lambda: module(4))
    env.lose_step(lambda: None, unsafe=lambda: [module.inv_freq])
    return module(5)  # a length that is not in the cache


@case("rotary-frequencies-multimodal")
def multimodal_rotary_frequencies(env: Env) -> Any:
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

    env.distributed()
    module = MultimodalRotaryEmbedding(8, 1.0)
    positions = torch.arange(4).expand(3, 1, 4)
    env.start(model=module)
    env.healthy_step(lambda: module(positions, [2, 1, 1]))
    env.lose_step(lambda: None, unsafe=lambda: [module.inv_freq])
    return module(positions, [2, 1, 1])


@case("rotary-frequencies-yarn-extra", "rotary-frequencies-yarn-inter")
def yarn_frequencies(env: Env) -> Any:
    module = yarn(env)
    env.start(model=module)
    env.healthy_step(lambda: module(4))
    env.lose_step(lambda: None, unsafe=lambda: [module.inv_freq_extra, module.inv_freq_inter])
    return module(5)


@case("dispatcher-input-order", "dispatcher-output-order")
def dispatcher_order(env: Env) -> Any:
    """Two of four experts are here: on one rank, where all are, the two orders are views of one tensor."""
    import torch
    from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    env.distributed()
    dispatcher = MoEAlltoAllTokenDispatcher(
        2, [0, 1], config=moe_config(), **known(MoEAlltoAllTokenDispatcher, **process_groups())
    )

    def sort() -> Any:
        chunks, sizes = torch.arange(8.0).view(8, 1), torch.tensor([1, 2, 2, 3])
        orders = (dispatcher.sort_input_by_local_experts, dispatcher.restore_output_by_local_experts)
        return [sort_chunks_by_idxs(chunks, sizes, order)[0] for order in orders]

    env.start(model=dispatcher)
    env.healthy_step(sort)
    env.lose_step(
        sort, unsafe=lambda: [dispatcher.sort_input_by_local_experts, dispatcher.restore_output_by_local_experts]
    )
    return sort()


@case("clip-position-ids")
def clip_positions(env: Env) -> Any:
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    env.distributed()
    config = transformer_config(hidden_dropout=0.0, attention_dropout=0.0, normalization="LayerNorm")
    model = CLIPViTModel(
        config, get_gpt_layer_local_spec(), ln_pre_impl=WrappedTorchNorm, patch_dim=2, img_h=4, img_w=4,
        **known(CLIPViTModel, **vision_groups()),
    )  # fmt: skip
    image = torch.ones(1, 3, 4, 4)
    env.start(model=model)
    env.healthy_step(lambda: model(image))
    env.lose_step(lambda: None, unsafe=lambda: [model.position_ids])
    return model(image)


def vision_groups() -> dict[str, Any]:
    with contextlib.suppress(ImportError):
        from megatron.core.process_groups_config import ProcessGroupCollection

        return {"pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
    return {}


# ---- optimizer scalars ---------------------------------------------------------------------------------------------------


def grad_scaler(growth_interval: int = 2, hysteresis: int = 2) -> Any:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    return DynamicGradScaler(
        initial_scale=8.0,
        min_scale=1.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
    )


def half_optimizer(env: Env, **precision: Any) -> Any:
    """Megatron's optimizer for half precision, around one parameter."""
    import torch
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    env.distributed()
    config = OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0, **precision)
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16 if config.bf16 else torch.float16))
    scaler = None if config.bf16 else grad_scaler()
    return Float16OptimizerWithFloat16Params(torch.optim.SGD([parameter], lr=0.1), config, scaler, lambda *args: None)


def set_gradient(optimizer: Any, value: float) -> None:
    import torch

    for group in optimizer.float16_groups:
        for parameter in group:
            parameter.main_grad = torch.full_like(parameter, value, dtype=torch.float32)


@case("loss-scale-one")
def loss_scale_of_bf16(env: Env) -> Any:
    import torch

    optimizer = half_optimizer(env, bf16=True)
    env.start(optimizer=optimizer)
    env.healthy_step(lambda: None)
    env.lose_step(lambda: None, unsafe=lambda: [optimizer._scale_one])
    return optimizer.scale_loss(torch.tensor(2.0))


@case("loss-scale-fp32")
def loss_scale_of_fp32(env: Env) -> Any:
    import torch
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = FP32Optimizer(torch.optim.SGD([parameter], lr=0.1), OptimizerConfig(), lambda *args: None)
    env.start(optimizer=optimizer)
    env.healthy_step(lambda: None)
    env.lose_step(lambda: None, unsafe=lambda: [optimizer._scale])
    return optimizer.scale_loss(torch.tensor(2.0))


@case("found-inf", "overflow-buffer", "grad-scaler-scale", "grad-scaler-growth-tracker")
def scaled_update(env: Env) -> Any:
    """The lost step comes as far as the update of the scale, which it doubles."""
    optimizer = half_optimizer(env, fp16=True)

    def prepare() -> None:
        set_gradient(optimizer, 16.0)
        optimizer.prepare_grads()

    def step() -> Any:
        prepare()
        optimizer.step_with_ready_grads()
        return [p for group in optimizer.float16_groups for p in group], optimizer.grad_scaler.state_dict()

    env.start(optimizer=optimizer)
    env.healthy_step(step)
    env.lose_step(prepare, unsafe=lambda: [optimizer.found_inf, optimizer._dummy_overflow_buf])
    return step(), step()


@case("grad-scaler-hysteresis-tracker", "grad-scaler-backoff-factor", "grad-scaler-min-scale")
def scale_backs_off(env: Env) -> Any:
    """One overflow is tolerated, the second shrinks the scale."""
    scaler = grad_scaler()
    env.start(optimizer=types.SimpleNamespace(grad_scaler=scaler))
    env.healthy_step(lambda: scaler.update(False))
    env.lose_step(lambda: scaler.update(True), unsafe=lambda: [scaler.backoff_factor, scaler.min_scale])
    scaler.update(True)
    once = dict(scaler.state_dict())
    scaler.update(True)
    return once, scaler.state_dict()


@case("grad-scaler-growth-factor")
def scale_grows(env: Env) -> Any:
    scaler = grad_scaler()
    env.start(optimizer=types.SimpleNamespace(grad_scaler=scaler))
    env.healthy_step(lambda: scaler.update(False))
    env.lose_step(lambda: None, unsafe=lambda: [scaler.growth_factor])
    scaler.update(False)
    return scaler.state_dict()


# ---- leftovers and queues ------------------------------------------------------------------------------------------------


def shared_expert(env: Env) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    env.distributed()
    config = moe_config(moe_shared_expert_intermediate_size=8, moe_shared_expert_overlap=True)
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    options = known(SharedExpertMLP, gate=True, **process_groups())
    return SharedExpertMLP(config, submodules, **options)


def shared_expert_calls(module: Any) -> list[Callable[[], Any]]:
    """The calls that the token dispatcher makes in one forward pass, in their order."""
    return [
        lambda: module.pre_forward_comm(tokens().requires_grad_()),
        module.linear_fc1_forward_and_act,
        module.linear_fc2_forward,
        module.post_forward_comm,
        module.get_output,
    ]


def shared_expert_leftover(attribute: str, calls: int) -> Case:
    """Only the leftover itself shows: the recomputed step overwrites it before it reads it. But until then, and in an
    evaluation for good, it keeps activations and their graph, which a fault may have hit, alive."""

    def leftover(env: Env) -> Any:
        module = shared_expert(env)
        env.start(model=module)
        env.healthy_step(lambda: [call() for call in shared_expert_calls(module)])
        env.lose_step(lambda: [call() for call in shared_expert_calls(module)[:calls]])
        return getattr(module, attribute)

    return leftover


case("shared-expert-fc1-input")(shared_expert_leftover("cached_fc1_input", 1))
case("shared-expert-gate-score")(shared_expert_leftover("gate_score", 1))
case("shared-expert-fc2-input")(shared_expert_leftover("cached_fc2_input", 2))
case("shared-expert-fc2-output")(shared_expert_leftover("cached_fc2_output", 3))


@case("shared-expert-output", "shared-expert-overlap-state")
def shared_expert_cut_before_its_end(env: Env) -> Any:
    module = shared_expert(env)
    env.start(model=module)
    env.healthy_step(lambda: [call() for call in shared_expert_calls(module)])
    env.lose_step(lambda: [call() for call in shared_expert_calls(module)[:4]])
    left = module.cached_output
    return left, [call() for call in shared_expert_calls(module)][-1]


@case("deferred-embedding-activations", "deferred-embedding-gradients")
def deferred_embedding_gradients(env: Env) -> Any:
    """The fused kernel that adds one weight gradient is CUDA's; the lists that feed it are upstream's."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.utils import drain_embedding_wgrad_compute

    def add_weight_gradient(activation: Any, gradient: Any, total: Any) -> None:
        total += gradient.t() @ activation

    kernel: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.wgrad_gemm_accum_fp32 = add_weight_gradient
    sys.modules[kernel.__name__] = kernel
    env.distributed()
    config = transformer_config()
    config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, 0  # its checks ask for a pipeline
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    model = GPTModel(config, spec, vocab_size=16, max_sequence_length=8, share_embeddings_and_output_weights=False)
    layer = model.output_layer
    layer.gradient_accumulation_fusion = True
    group = {"tp_group": parallel_state.get_tensor_model_parallel_group()}

    def forward(seed: int) -> Any:
        return layer(tokens(seed).requires_grad_())[0]

    def drain() -> Any:
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        config.gradient_accumulation_fusion = True
        drain_embedding_wgrad_compute(
            config, model.embedding_activation_buffer, model.grad_output_buffer, layer.weight,
            **known(drain_embedding_wgrad_compute, **group),
        )  # fmt: skip
        return layer.weight.main_grad

    def step() -> Any:
        for output in [forward(1), forward(2)]:
            output.square().sum().backward()
        return drain()

    def lost() -> None:
        forward(3)
        forward(4).square().sum().backward()

    env.start(model=model)
    env.healthy_step(step)
    env.lose_step(lost)
    return step()


@case("activation-offload-manager")
def activation_offload(env: Env) -> Any:
    """The manager counts the microbatches of a step; ``reset`` at the step's end is what puts it back."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    def microbatch() -> Any:
        manager = PipelineOffloadManager.get_instance()
        manager.init_model_chunk_offload_handler(0, 1, None)
        manager.pop_forward_chunk()
        return manager._cached_chunks_index_forward, len(manager._cached_chunks_forward), len(manager._queue)

    env.start()
    env.healthy_step(lambda: None)
    env.lose_step(microbatch)
    return microbatch()


@case("paged-stash-queues")
def paged_stash_queues(env: Env) -> Any:
    """Copying pages needs Triton, so the tensors are stand-ins; the queues are upstream's."""
    import torch

    manager = paged_stash()

    def stash() -> None:
        page = types.SimpleNamespace(dtype=torch.float32, hidden_size=4, offload_to_stash=lambda buffer: None)
        manager.add_paged_tensor_to_stash(page)
        manager.stash_paged_tensors(1001)

    def step() -> Any:
        in_turn(start_paged_stash_step, stash, manager.wait_for_stash_to_complete)()
        return len(manager.paged_tensors_to_reload.pop(1001))

    env.start()
    env.healthy_step(step)
    env.lose_step(in_turn(start_paged_stash_step, stash))
    return step()


@case("paged-stash-buffers")
def paged_stash_buffers(env: Env) -> Any:
    import torch

    manager = paged_stash()

    def tensors() -> list[Any]:
        buffer = manager.stash_buffers[torch.float32][4]
        return [value for holder in (buffer, manager) for value in vars(holder).values() if torch.is_tensor(value)]

    env.start()
    env.healthy_step(start_paged_stash_step)
    env.lose_step(lambda: None, unsafe=tensors)
    start_paged_stash_step()
    buffer = manager.stash_buffers[torch.float32][4]
    return buffer.free_list_cuda, buffer.free_list_head, buffer.free_list_tail, buffer.cuda_buffer.shape


def paged_stash() -> Any:
    """The manager after its warm-up steps, with room for 8 tokens."""
    import torch
    from megatron.core.transformer.moe.paged_stash import PagedStashManager

    manager = PagedStashManager.get_instance()
    manager.vp_size, manager.device, manager.page_size = 1, "cpu", 2
    manager.max_tokens_across_vp_stages = {(torch.float32, 4): 8}
    for _ in range(2):
        start_paged_stash_step()
    return manager


def start_paged_stash_step() -> None:
    from megatron.core.transformer.moe.paged_stash import paged_stash_reset

    paged_stash_reset()


# ---- data parallel bookkeeping -------------------------------------------------------------------------------------------


def data_parallel(env: Env, **overlap: bool) -> Any:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    env.distributed()
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True, **overlap)
    return DistributedDataParallel(transformer_config(), config, module)


def data_parallel_backward(model: Any) -> None:
    model.zero_grad_buffer()
    model.module(tokens()).square().sum().backward()


def data_parallel_step(model: Any) -> Any:
    data_parallel_backward(model)
    model.finish_grad_sync()
    return [parameter.main_grad for parameter in model.module.parameters()]


@case("grad-reduce-handle")
def gradient_reduction(env: Env) -> Any:
    model = data_parallel(env, overlap_grad_reduce=True)
    env.start(model=[model])
    env.healthy_step(lambda: data_parallel_step(model))
    env.lose_step(lambda: data_parallel_backward(model))
    return data_parallel_step(model)


@case("grad-ready-counts")
def gradients_of_a_first_step(env: Env) -> Any:
    model = data_parallel(env, overlap_grad_reduce=True)
    env.start(model=[model])
    env.lose_step(in_turn(model.zero_grad_buffer, lambda: model.module[0](tokens()).sum().backward()))
    return data_parallel_step(model)


@case("param-gather-handle", "param-gather-dispatched")
def parameter_gather(env: Env) -> Any:
    """With one rank a gather that is left out changes no parameter: the recomputed step's gathers are counted."""
    from megatron.core.distributed import param_and_grad_buffer

    model = data_parallel(env, overlap_grad_reduce=True, overlap_param_gather=True)
    gathered: list[int] = []
    gather = param_and_grad_buffer.dist_all_gather_func

    def counted(output: Any, *args: Any, **options: Any) -> Any:
        gathered.append(output.numel())
        return gather(output, *args, **options)

    param_and_grad_buffer.dist_all_gather_func = counted

    def forward() -> None:
        for group in model.bucket_groups:
            group.finish_param_sync()

    step = in_turn(forward, lambda: data_parallel_step(model))
    env.start(model=[model])
    env.healthy_step(step)
    env.lose_step(lambda: [group.start_param_sync() for group in model.bucket_groups])
    gathered.clear()
    step()
    return gathered


# ---- control flags -------------------------------------------------------------------------------------------------------


@case("timers")
def timer_running_when_the_step_is_cut(env: Env) -> Any:
    from megatron.core.timers import Timers

    timers = Timers(log_level=2, log_option="minmax")
    timer = timers("forward-backward", log_level=1)
    env.start(timers=timers)
    env.healthy_step(in_turn(timer.start, timer.stop))
    env.lose_step(timer.start)
    in_turn(timer.start, timer.stop)()
    return timer._started


def rerun_machine(mode: str) -> Any:
    from megatron.core import rerun_state_machine as rerun

    rerun.initialize_rerun_state_machine(
        mode=rerun.RerunMode[mode], state_save_func=dict, state_restore_func=lambda state: None
    )
    return rerun.get_rerun_state_machine()


def rerun_passes(machine: Any, forward_backward: Callable[[], None]) -> int:
    """How often one training step runs its forward and backward pass."""
    passes = 0
    while machine.should_run_forward_backward(None):
        forward_backward()
        passes += 1
    return passes


@case("rerun-state-machine")
def step_cut_inside_the_rerun_loop(env: Env) -> Any:
    env.distributed()
    machine = rerun_machine("DISABLED")
    env.start()
    env.healthy_step(lambda: rerun_passes(machine, lambda: None))
    env.lose_step(lambda: machine.should_run_forward_backward(None))
    return rerun_passes(machine, lambda: None), machine.current_iteration


@case("rerun-value-statistics")
def unexpectedly_large_values(env: Env) -> Any:
    """Three samples make the estimate; a lost one must not be among them."""
    import torch

    env.distributed()
    machine = rerun_machine("VALIDATE_RESULTS")

    def is_large(loss: float) -> bool:
        return bool(machine.is_unexpectedly_large(torch.tensor(loss), threshold=2.0, context="loss", num_samples=3))

    env.start()
    env.healthy_step(lambda: is_large(1.0))
    env.lose_step(lambda: is_large(4.0))
    return [is_large(loss) for loss in (1.0, 1.0, 3.0)]


@case("rerun-saved-results")
def results_for_the_determinism_report(env: Env) -> Any:
    import torch

    env.distributed()
    machine = rerun_machine("REPORT_DETERMINISM_STATS")

    def validate() -> None:
        machine.validate_result(torch.tensor(1.0), rejection_func=torch.isnan, message="loss is NaN")

    # Only the leftover shows: a result of the same call overwrites it. Until then it is a device tensor, unsafe perhaps.
    env.start()
    env.healthy_step(lambda: rerun_passes(machine, validate))
    env.lose_step(in_turn(lambda: machine.should_run_forward_backward(None), validate))
    return len(machine.saved_results), rerun_passes(machine, validate)


@case("recompute-flag")
def recomputed_region_cut(env: Env) -> Any:
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel.random import is_checkpointing

    env.distributed()

    def region(hidden: Any) -> Any:
        raise StepAborted

    env.start()
    env.healthy_step(lambda: tensor_parallel.checkpoint(lambda x: x * 1, False, tokens().requires_grad_()))
    env.lose_step(lambda: tensor_parallel.checkpoint(region, False, tokens().requires_grad_()))
    return is_checkpointing()


@case("graph-capture-flag")
def graph_capture_cut(env: Env) -> Any:
    from megatron.core.transformer import cuda_graphs

    model = data_parallel(env)
    env.start(model=[model])
    env.healthy_step(lambda: data_parallel_step(model))
    env.lose_step(cuda_graphs._set_capture_start)
    return data_parallel_step(model)


@case("graph-warmup-flag")
def graph_warmup_cut(env: Env) -> Any:
    from megatron.core.transformer import cuda_graphs

    env.start()
    env.healthy_step(lambda: None)
    env.lose_step(cuda_graphs._set_warmup_start)
    return cuda_graphs.is_graph_warmup()


@case("straggler-events")
def straggler_events(env: Env) -> Any:
    """The report reads every pair of events: it must find those of the recomputed step alone."""
    from megatron.core import utils

    detector = vars(utils)["__straggler__"]
    detector._off = False

    timed = in_turn(detector.start_method, detector.stop_method)
    env.start()
    env.healthy_step(in_turn(timed, detector.reset))
    env.lose_step(timed)
    timed()
    lists = (detector.start_gemm_ev, detector.stop_gemm_ev, detector.start_gemm_tm, detector.stop_gemm_tm)
    return [len(items) for items in lists]


# ---- running ---------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value as JSON, exact to the bit. Reads every tensor, so an unsafe one raises."""
    import torch

    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), plain(value.tolist())]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def run(case: Case, specs: list[Any] | None, whole: bool = False) -> dict[str, Any]:
    """One run in this process: ``value``, or ``error`` and whether it came ``after`` the recovery."""
    import random

    import torch

    from mindspeed_recovery.frameworks import megatron_cpu
    from mindspeed_recovery.testing.simulator import UnsafeMemory

    memory = UnsafeMemory()
    env = Env(memory, specs, whole=whole)
    random.seed(0)  # a fork seeds it anew
    torch.manual_seed(0)
    try:
        with megatron_cpu.cpu_mode(), memory.active():
            return {"value": plain(case(env))}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "after": env.recovered}


def in_a_process(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run it in a fork of this process, with whatever it prints thrown away; a process that dies is an error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as answer:
                json.dump(function(), answer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    return dict(json.loads(text)) if text else {"error": f"the process ended with status {status}", "after": False}


class Runner:
    """Runs the cases against one version's catalogue. What does not depend on the entry is run once for a case."""

    def __init__(self, specs: list[Any]) -> None:
        self._specs = specs
        self._shared: dict[Case, dict[str, dict[str, Any]]] = {}

    def run_entry(self, entry: str) -> dict[str, dict[str, Any]]:
        """The three runs of the case for ``entry``."""
        function = CASES[entry]
        rest = [spec for spec in self._specs if spec.name != entry]
        assert len(rest) == len(self._specs) - 1, f"{entry}: not in this version's catalogue"
        if function not in self._shared:
            self._shared[function] = {
                "undisturbed": in_a_process(lambda: run(function, None)),
                "whole": in_a_process(lambda: run(function, self._specs, whole=True)),
            }
        return {**self._shared[function], "without": in_a_process(lambda: run(function, rest))}


def import_everything(modules: Iterable[str]) -> Iterator[str]:
    """Import what the catalogue names, as a training process has; yields the modules that cannot be."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            yield module


def prepare() -> None:
    """Make Megatron importable and usable here."""
    import typing

    import torch

    from mindspeed_recovery.frameworks import megatron_cpu

    torch.set_num_threads(1)
    megatron_cpu.install()
    torch.cuda.synchronize = lambda device=None: None  # timers ask for it
    if not hasattr(typing, "override"):  # 0.18 and later, which ask for Python 3.12
        typing.override = lambda function: function  # type: ignore[attr-defined]


def main(version: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    sys.path.insert(0, str(CATALOGUE.parent.parent))
    from packaging.version import Version

    from mindspeed_recovery import catalogue

    importlib.import_module("mindspeed_recovery.core.session")  # once, for all forks
    importlib.import_module("mindspeed_recovery.testing.simulator")
    prepare()
    specs = catalogue.load(CATALOGUE).states(Version(version))
    list(import_everything(spec.location.module for spec in specs))
    runner = Runner(specs)
    for entry in map(str.strip, sys.stdin):
        print(json.dumps({"entry": entry, **runner.run_entry(entry)}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
