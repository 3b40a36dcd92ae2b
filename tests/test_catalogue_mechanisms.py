# SPDX-License-Identifier: Apache-2.0
"""Negative controls of the catalogues of MindSpeed, MindSpeed-LLM and torch_npu, which cannot be installed here.

One case for each mechanism: modules under the upstream names, with state of the same shape and the same way to use it, and
a step that is wrong without the entry. Each case is run three times, as in `catalogue_cases`: undisturbed, with the whole
catalogue, and with one entry taken out. The first two must agree, the third must differ, or raise in the recomputed step.
"""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from catalogue_cases import Env, plain
from torch import nn

from mindspeed_recovery import catalogue
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(60)

FILES = [file for file in catalogue.shipped() if file.name != "megatron-core.toml"]
SPECS = [spec for file in FILES for spec in catalogue.load(file).states(None, unknown=True)]

Case = Callable[[Env], Any]
CASES: dict[str, Case] = {}


def case(*entries: str) -> Callable[[Case], Case]:
    """The function exercises these states, each of which is taken out by itself."""

    def declare(function: Case) -> Case:
        CASES.update(dict.fromkeys(entries, function))
        return function

    return declare


def module(name: str, **contents: Any) -> ModuleType:
    """A loaded module of upstream; `run` takes it away again. Its classes say that they are its own."""
    made = sys.modules[name] = ModuleType(name)
    for key, value in contents.items():
        if isinstance(value, type):
            value.__module__ = name
        setattr(made, key, value)
    return made


# ---- caches and their aliases ----------------------------------------------------------------------------------------------


@case("attention-mask", "layer-attention-mask.attention-mask")
def mask_that_layers_hold_too(env: Env) -> Any:
    """Dropping the global alone leaves the layers' own; dropping the layers' alone gives them the unsafe global again."""
    masks = module("mindspeed.model.transformer", _GLOBAL_ATTN_MASK=None)

    class CustomDotProductAttentionImpl:
        def forward(self) -> torch.Tensor:
            if getattr(self, "attention_mask", None) is None:
                if masks._GLOBAL_ATTN_MASK is None:
                    masks._GLOBAL_ATTN_MASK = torch.ones(4, 4).triu(1)
                self.attention_mask = masks._GLOBAL_ATTN_MASK
            return self.attention_mask.sum()

    module(
        "mindspeed_llm.core.transformer.custom_dot_product_attention",
        CustomDotProductAttentionImpl=CustomDotProductAttentionImpl,
    )
    layers = [CustomDotProductAttentionImpl(), CustomDotProductAttentionImpl()]
    env.start(model=layers)
    env.healthy_step(lambda: [layer.forward() for layer in layers])
    env.lose_step(lambda: None, lambda: [masks._GLOBAL_ATTN_MASK])
    sums = [layer.forward() for layer in layers]
    return sums, layers[0].attention_mask is masks._GLOBAL_ATTN_MASK


@case("alibi-bias.alibi-tensor")
def bias_that_layers_took_when_they_were_made(env: Env) -> Any:
    class AlibiForFusionAttnSingleton:
        _alibi_tensor: Any = torch.arange(4.0)
        _alibi_slopes = None

    module("mindspeed.core.transformer.flash_attention.alibi.alibi", AlibiForFusionAttnSingleton=AlibiForFusionAttnSingleton,
           Alibi=type("Alibi", (), {"_instance": None}))  # fmt: skip
    bias_of_a_layer = AlibiForFusionAttnSingleton._alibi_tensor
    env.start()
    env.healthy_step(lambda: None)
    env.lose_step(lambda: None, lambda: [bias_of_a_layer])
    return bias_of_a_layer * 2


@case("deepseek4-cache.get-window-topk-idxs")
def cached_static_method(env: Env) -> Any:
    class DeepSeek4SelfAttention:
        @staticmethod
        @lru_cache(maxsize=2)
        def get_window_topk_idxs(size: int) -> torch.Tensor:
            return torch.arange(size)

        get_compress_topk_idxs = get_window_topk_idxs

    module("mindspeed_llm.tasks.models.transformer.deepseek4.csa", DeepSeek4SelfAttention=DeepSeek4SelfAttention)
    indices = DeepSeek4SelfAttention.get_window_topk_idxs
    DeepSeek4SelfAttention.get_compress_topk_idxs = lambda size: None  # type: ignore[assignment,method-assign]
    env.start()
    env.healthy_step(lambda: indices(4))
    env.lose_step(lambda: None, lambda: [indices(4)])
    return indices(4) + 1


@case("adam-step-tensors.step-tensor-cache")
def step_tensor_filled_in_every_update(env: Env) -> Any:
    class AdamW:
        def __init__(self) -> None:
            self.group, self._step_tensor_cache = {"step": 0}, {}

        def step(self) -> torch.Tensor:
            self.group["step"] += 1
            tensor = self._step_tensor_cache.setdefault(id(self.group), torch.zeros(()))
            return tensor.fill_(self.group["step"])

    module("mindspeed.core.optimizer.adamw", AdamW=AdamW)
    optimizer = AdamW()
    env.start(optimizer=optimizer)
    env.healthy_step(optimizer.step)
    env.lose_step(lambda: None, lambda: optimizer._step_tensor_cache.values())
    return optimizer.step()


@case("hunyuan-cached-length")
def buffers_made_again_for_a_length_of_zero(env: Env) -> Any:
    class HunYuanRotaryEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(2), persistent=False)
            self.max_seq_len_cached = 0

        def forward(self, length: int) -> torch.Tensor:
            if length > self.max_seq_len_cached:
                self.max_seq_len_cached = length
                self.register_buffer(
                    "cos_cached", torch.outer(torch.arange(length), self.inv_freq).cos(), persistent=False
                )
            return self.cos_cached[:length] * 1

    module("mindspeed_llm.tasks.models.transformer.hunyuan_rope", HunYuanRotaryEmbedding=HunYuanRotaryEmbedding)
    embedding = HunYuanRotaryEmbedding()
    env.start(model=embedding)
    env.healthy_step(lambda: embedding(4))
    env.lose_step(lambda: None, lambda: [embedding.cos_cached])
    return embedding(4)


@case("hunyuan-frequencies", "router-hash-table")
def constants_that_no_optimizer_holds(env: Env) -> Any:
    class HunYuanRotaryEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
            self.max_seq_len_cached = 0

    class TopKRouter(nn.Module):
        """Its table is made by a function of MindSpeed-LLM."""

    module("mindspeed_llm.tasks.models.transformer.hunyuan_rope", HunYuanRotaryEmbedding=HunYuanRotaryEmbedding)
    module("megatron.core.transformer.moe.router", TopKRouter=TopKRouter)
    model = nn.ModuleList([HunYuanRotaryEmbedding(), TopKRouter()])
    model[1].tid2eid = nn.Parameter(torch.arange(4), requires_grad=False)
    env.start(model=model)
    env.healthy_step(lambda: None)
    env.lose_step(lambda: None, lambda: [model[0].inv_freq, model[1].tid2eid])
    return model[0].inv_freq * 2, model[1].tid2eid + 1


@case("silent-check.silent-data-dict", "silent-check-warm-up.global-step")
def statistics_of_gradients(env: Env) -> Any:
    """Whether the check is past its warm-up with statistics that it has just begun."""

    class Detector:
        def __init__(self) -> None:
            self.silent_data_dict: dict[int, torch.Tensor] = {}
            self.step = self.global_step = 0
            self.low_step = self.high_step = None

        def check(self, value: float) -> bool:
            begun_now, warming_up = 0 not in self.silent_data_dict, self.global_step < 2
            self.silent_data_dict.setdefault(0, torch.zeros(1)).add_(value)
            if warming_up:
                self.step = self.global_step = self.step + 1
            return begun_now and not warming_up

    detector = Detector()
    module("torch_npu", __version__="2.6.0")
    module("torch_npu.asd.asd", _silent_fault_detector=detector, _silent_fault_detector_v2=Detector())
    env.start()
    env.healthy_step(lambda: [detector.check(1.0) for _ in range(3)])
    env.lose_step(lambda: None, lambda: detector.silent_data_dict.values())
    return detector.check(1.0)


# ---- queues, mailboxes, handles --------------------------------------------------------------------------------------------


@case("moe-shared-expert-inputs.ag-shared-experts-inputs")
def queue_that_another_module_imported_by_name(env: Env) -> Any:
    name = "mindspeed.core.transformer.moe.moe_feature.overlap.moe_common"
    slots = ("AG_TP_HIDDEN_STATUS", "GEMM_BACKWARD_NEED_TENSORS", "RS_GLOBAL_HIDDEN_STATES_GRAD_WITH_HANDLE", "SWAP_TENSOR",
             "MATMUL_OUTPUT_GRAD", "UNPERMUTED_TOKENS", "ALL2ALL_EXPERTS_OUTPUT")  # fmt: skip
    common = module(name, AG_SHARED_EXPERTS_INPUTS=[], **dict.fromkeys(slots))
    producer = module("mindspeed.producer", AG_SHARED_EXPERTS_INPUTS=common.AG_SHARED_EXPERTS_INPUTS)

    def layers() -> list[Any]:
        read = []
        for layer in (1.0, 2.0):
            producer.AG_SHARED_EXPERTS_INPUTS.append(torch.tensor(layer))
            read.append(common.AG_SHARED_EXPERTS_INPUTS.pop(0) * 1)
        return read

    env.start()
    env.healthy_step(layers)
    env.lose_step(lambda: producer.AG_SHARED_EXPERTS_INPUTS.append(torch.tensor(9.0)))
    return layers(), producer.AG_SHARED_EXPERTS_INPUTS is common.AG_SHARED_EXPERTS_INPUTS


@case("moe-overlap-mailbox-legacy.swap-tensor")
def slot_that_the_next_function_takes(env: Env) -> Any:
    slots = ("AG_TP_HIDDEN_STATUS", "GEMM_BACKWARD_NEED_TENSORS", "RS_GLOBAL_HIDDEN_STATES_GRAD_WITH_HANDLE", "SWAP_TENSOR",
             "MATMUL_OUTPUT_GRAD", "UNPERMUTED_TOKENS", "ALL2ALL_EXPERTS_OUTPUT")  # fmt: skip
    mailbox: Any = module(
        "mindspeed.core.transformer.moe.moe_utils", AG_SHARED_EXPERTS_INPUTS=[], **dict.fromkeys(slots)
    )

    def take() -> Any:
        value, mailbox.SWAP_TENSOR = mailbox.SWAP_TENSOR, None
        return None if value is None else value * 1

    env.start()
    env.healthy_step(take)
    env.lose_step(lambda: setattr(mailbox, "SWAP_TENSOR", torch.ones(1)))
    return take()


def weight_grad_store() -> Any:
    class WeightGradStore:
        cache: ClassVar[list[Any]] = []
        grad_store: ClassVar[list[Any]] = []
        weight_grad_queue: Any = queue.Queue()
        store_grad_cache: Any = None
        is_decoupleBlock = False

        @classmethod
        def flush(cls) -> None:
            cls.weight_grad_queue.put(cls.cache)
            cls.cache = []

        @classmethod
        def pop(cls) -> torch.Tensor:
            grad = torch.zeros(1)
            for part in cls.weight_grad_queue.get(timeout=1):
                grad += part
            return grad

    module(
        "mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.weight_grad_store",
        WeightGradStore=WeightGradStore,
    )
    return WeightGradStore


@case("moe-weight-grads.cache", "moe-weight-grads.queue", "moe-weight-grads-postponed")
def weight_gradients_of_another_step(env: Env) -> Any:
    store = weight_grad_store()

    def backward(value: float, decouple: bool = True) -> None:
        store.is_decoupleBlock = decouple
        store.cache.append(torch.tensor([value]))

    def step() -> Any:
        postponed = store.is_decoupleBlock
        backward(3.0, decouple=False)
        store.flush()
        return postponed, store.pop()

    def cut() -> None:
        backward(5.0)
        store.flush()
        backward(7.0)

    env.start()
    env.healthy_step(step)
    env.lose_step(cut)
    return step()


@case("moe-shared-expert.pre-backward-handle")
def handle_of_a_communication_that_was_cut(env: Env) -> Any:
    class Cut:
        def wait(self) -> None:
            raise RuntimeError("waits for a communication of a group that is gone")

    names = ("cached_fc1_ag_input", "cached_fc1_input_grad", "cached_backward_grad", "cached_input_grad",
             "fc1_input_comm_handle", "fc2_output_comm_handle", "pre_backward_handle", "post_backward_handle")  # fmt: skip

    class SharedExpertMLPFbOverlap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, None)

        cached_fc1_ag_input: Any
        cached_fc1_input_grad: Any
        cached_backward_grad: Any
        cached_input_grad: Any
        fc1_input_comm_handle: Any
        fc2_output_comm_handle: Any
        pre_backward_handle: Any
        post_backward_handle: Any

        def backward(self) -> int:
            if self.pre_backward_handle:
                self.pre_backward_handle.wait()
            return 1

    module(
        "mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.shared_experts",
        SharedExpertMLPFbOverlap=SharedExpertMLPFbOverlap,
    )
    expert = SharedExpertMLPFbOverlap()
    env.start(model=expert)
    env.healthy_step(expert.backward)
    env.lose_step(lambda: setattr(expert, "pre_backward_handle", Cut()))
    return expert.backward()


@case("hot-expert-handles.hot-expert-broadcast-handles", "hot-experts")
def lists_of_handles_in_a_list_that_others_hold(env: Env) -> Any:
    """And the weights that a broadcast writes without clearing their unsafe mark."""

    class SharedParamsForHotExperts:
        def __init__(self) -> None:
            self.shared_weight1 = nn.Parameter(torch.zeros(2))

    class BalancedMoELayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hot_expert_broadcast_handles: list[list[str]] = [[], []]
            self.hot_expert_inter_ep_grad_reduce_handles = [[None], [None]]
            self.params = [self.hot_expert_broadcast_handles]

        def forward(self, broadcast: Callable[[], Any]) -> Any:
            self.params[0][1].append("handle")
            broadcast()
            waited = [len(handles) for handles in self.params[0]]
            for handles in self.hot_expert_broadcast_handles:
                handles.clear()
            return waited, modules._GLOBAL_SHARED_PARAMS_FOR_HOT_EXPERTS.shared_weight1 * 1

    modules: Any = module(
        "mindspeed.core.transformer.moe.moe_feature.balanced_moe.modules.moe_layer",
        BalancedMoELayer=BalancedMoELayer,
        _GLOBAL_SHARED_PARAMS_FOR_HOT_EXPERTS=SharedParamsForHotExperts(),
    )
    layer = BalancedMoELayer()
    weight = modules._GLOBAL_SHARED_PARAMS_FOR_HOT_EXPERTS.shared_weight1
    env.start(model=layer)
    env.healthy_step(lambda: layer(lambda: None))
    env.lose_step(lambda: layer.params[0][1].append("handle of the aborted step"), lambda: [weight])
    return layer(lambda: None)


@case("ri-pipe-recomputation")
def recomputation_that_is_left_over(env: Env) -> Any:
    class PipelineCheckpointManager:
        instance: Any = None

        def __init__(self) -> None:
            self.open_ri_pipe = self.do_pre_recompute = False
            self.checkpoint_list: list[Any] = []
            self.chunk_list: list[list[Any]] = [[], []]
            self.chunk_do_recompute = True

        def end_of_step(self) -> int:
            return sum(map(len, self.chunk_list)) + len(self.checkpoint_list)

    PipelineCheckpointManager.instance = manager = PipelineCheckpointManager()
    module("mindspeed.core.tensor_parallel.checkpoint_manager", PipelineCheckpointManager=PipelineCheckpointManager)
    env.start()
    env.healthy_step(lambda: None)
    env.lose_step(lambda: manager.chunk_list[1].append(lambda: None))
    return manager.end_of_step(), len(manager.chunk_list)


@case("fp8-scaling.amax-history", "fp8-scaling.scale")
def scaling_that_is_rebound_in_the_step(env: Env) -> Any:
    class ScaleData:
        def __init__(self) -> None:
            self.scale, self.amax = torch.ones(1), torch.zeros(1)
            self.amax_history, self.amax_history_current_len, self.current_interval = torch.zeros(4), 0, 1

        def quantise(self, value: float) -> torch.Tensor:
            used = self.scale * 1
            self.amax_history = self.amax_history.roll(-1)
            self.amax_history[-1] = value
            self.scale = self.amax_history.max() / 2
            return used

    module("mindspeed.te.pytorch.fp8.scale_data", ScaleData=ScaleData)
    data = ScaleData()
    env.start(model=[data])
    env.healthy_step(lambda: data.quantise(2.0))
    env.lose_step(lambda: data.quantise(8.0))
    return data.quantise(4.0), data.quantise(1.0)


@case("swapped-layer-inputs")
def inputs_on_their_way_to_the_host(env: Env) -> Any:
    class SwapLayerInputManager:
        def __init__(self) -> None:
            self.batch_stack: list[Any] = []

        def forward_and_backward(self) -> Any:
            self.batch_stack.append(torch.ones(1))
            return self.batch_stack.pop(0) * 1

    module(
        "mindspeed.core.memory.swap_layer_input.swap_layer_input_manager", SwapLayerInputManager=SwapLayerInputManager
    )
    layer = nn.Identity()
    layer.swap_manager = manager = SwapLayerInputManager()
    env.start(model=layer)
    env.healthy_step(manager.forward_and_backward)
    env.lose_step(lambda: manager.batch_stack.append(torch.full([1], 9.0)))
    return manager.forward_and_backward()


@case("expert-placement.expert-mapping", "expert-load.expert-load-prediction")
def estimate_and_placement_of_experts(env: Env) -> Any:
    """Both are attributes that a function of another module makes."""

    class MindSpeedFbOverlapMoELayer(nn.Module):
        def train_step(self) -> None:
            self.expert_load_prediction = 0.5 * self.expert_load_prediction + 1.0
            self.expert_mapping = self.expert_mapping.roll(1)

    module(
        "mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.moe_layer",
        MindSpeedFbOverlapMoELayer=MindSpeedFbOverlapMoELayer,
    )
    layer = MindSpeedFbOverlapMoELayer()
    layer.expert_load_prediction, layer.expert_mapping = torch.zeros(2), torch.arange(4)
    env.start(model=layer)
    env.healthy_step(layer.train_step)
    env.lose_step(layer.train_step)
    layer.train_step()
    return layer.expert_load_prediction, layer.expert_mapping


@case("attention-ratios.actual-attn-ratio-list", "attention-ratios.actual-count")
def ratios_of_a_log_line_over_several_steps(env: Env) -> Any:
    utils: Any = module("mindspeed_llm.training.utils", _ACTUAL_ATTN_RATIO_LIST=[], _ACTUAL_COUNT=0)

    def microbatch(ratio: float) -> None:
        utils._ACTUAL_ATTN_RATIO_LIST.append(ratio)
        utils._ACTUAL_COUNT += 1

    env.start()
    env.healthy_step(lambda: microbatch(0.25))
    env.lose_step(lambda: microbatch(0.5))
    microbatch(0.5)
    return utils._ACTUAL_ATTN_RATIO_LIST, utils._ACTUAL_COUNT


@case("llm-dsa-indexer-loss-tracker")
def losses_of_the_indexer(env: Env) -> Any:
    class DSAIndexerLossLoggingHelper:
        tracker: ClassVar[dict[str, Any]] = {}

        @staticmethod
        def save(loss: float) -> None:
            tracker = DSAIndexerLossLoggingHelper.tracker
            if "values" not in tracker:
                tracker["values"] = torch.zeros(1)
            tracker["values"][0] += loss
            tracker["reduce_group"] = None

        @staticmethod
        def clean_loss_in_tracker() -> None:
            DSAIndexerLossLoggingHelper.tracker["values"].zero_()

    helper = DSAIndexerLossLoggingHelper
    module("mindspeed_llm.tasks.models.transformer.dsa_indexer", DSAIndexerLossLoggingHelper=helper)
    env.start()
    env.healthy_step(lambda: [helper.save(2.0), helper.clean_loss_in_tracker()])
    env.lose_step(lambda: helper.save(5.0))
    helper.save(5.0)
    return helper.tracker["values"]


@case("sub-world-loss-tracker", "sub-world-memory-buffer")
def tracker_and_workspace_of_each_model(env: Env) -> Any:
    class GlobalMemoryBuffer:
        def __init__(self) -> None:
            self.buffer: dict[str, Any] = {}

        def get(self) -> Any:
            return self.buffer.setdefault("mpu", torch.ones(2)) * 1

    class DetachedSubWorld:
        def __init__(self) -> None:
            self.global_memory_buffer = GlobalMemoryBuffer()
            self.moe_layer_wise_logging_tracker: dict[str, Any] = {"aux": {"values": torch.zeros(1)}}

        def record(self) -> Any:
            self.global_memory_buffer.get()
            return self.moe_layer_wise_logging_tracker["aux"]["values"].add_(1.0)

    world = DetachedSubWorld()
    module("mindspeed.core.multi_modal.dist_train.dist_parallel_state", DetachedSubWorld=DetachedSubWorld,
           ALL_SUB_WORLD={"gpt": world})  # fmt: skip
    env.start()
    env.healthy_step(lambda: world.record().zero_())
    env.lose_step(world.record, lambda: world.global_memory_buffer.buffer.values())
    return world.record(), world.global_memory_buffer.get()


# ---- running ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def loaded_modules() -> Iterator[None]:
    before = dict(sys.modules)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]


def run(function: Case, specs: list[StateSpec] | None, whole: bool = False) -> dict[str, Any]:
    memory = UnsafeMemory()
    env = Env(memory, specs, whole=whole)
    with loaded_modules(), memory.active():
        try:
            return {"value": plain(function(env))}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "after": env.recovered}


@pytest.mark.parametrize("entry", CASES)
def test_the_recovered_step_is_right_with_the_entry_and_wrong_without(entry: str) -> None:
    rest = [spec for spec in SPECS if spec.name != entry]
    assert len(rest) == len(SPECS) - 1
    undisturbed, whole = run(CASES[entry], None), run(CASES[entry], SPECS, whole=True)
    assert "error" not in undisturbed, undisturbed
    assert whole == undisturbed
    without = run(CASES[entry], rest)
    assert without.get("after", True), f"not the recomputed step fails: {without}"
    assert without != undisturbed, f"nothing goes wrong without '{entry}': the entry is not needed"


def test_each_kind_of_entry_has_a_case() -> None:
    """A mechanism: what is done, to what kind of place."""

    def mechanism(spec: StateSpec) -> tuple[Any, ...]:
        return spec.policy, spec.on, spec.to if spec.policy is Policy.RESET else None, spec.settled, spec.replay

    treated = [spec for spec in SPECS if spec.policy is not Policy.IGNORED]
    covered = {mechanism(spec) for spec in treated if spec.name in CASES}
    missing = {mechanism(spec): spec.name for spec in treated if mechanism(spec) not in covered}
    assert missing == {}


# ---- where the packages are not there ----------------------------------------------------------------------------------------


def upstream_modules() -> set[str]:
    return {
        name for name in sys.modules if name.split(".")[0] in {"mindspeed", "mindspeed_llm", "torch_npu", "megatron"}
    }


def test_files_of_packages_that_are_not_there_give_no_states_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    before = upstream_modules()
    assert catalogue.installed_states(FILES) == []
    assert not caplog.records
    assert upstream_modules() == before


def test_a_recovery_imports_nothing_of_upstream() -> None:
    before = upstream_modules()

    def nothing_is_loaded(env: Env) -> Any:
        env.start()
        env.healthy_step(lambda: None)
        env.lose_step(lambda: None)
        return sorted(upstream_modules() - before)

    assert run(nothing_is_loaded, SPECS, whole=True) == {"value": []}
