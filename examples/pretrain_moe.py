# SPDX-License-Identifier: Apache-2.0
"""Pretrain a small GPT with mixture-of-experts layers on a CPU, and let device faults hit it.

Everything but the device is real: megatron-core's model, data parallelism, distributed optimizer, pipeline schedules and
MoE metrics, gloo between the ranks, TensorBoard's event files. The text is the English documentation that comes with
Python (``pydoc_data.topics``), read byte by byte. The device is the CPU behind a simulator of unsafe memory, and the
standalone runtime recovers the job after a fault.

    torchrun --nproc-per-node 2 examples/pretrain_moe.py --expert-model-parallel-size 2 --use-distributed-optimizer \\
        --tensorboard-dir runs/moe --fault uce@rank=1,step=20,at=router --enable-recovery-safe-globals
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_recovery
from mindspeed_recovery.frameworks import megatron as megatron_job
from mindspeed_recovery.frameworks import megatron_cpu
from mindspeed_recovery.logs.tensorboard import HeldEvents
from mindspeed_recovery.runtimes import restartable_gloo, standalone
from mindspeed_recovery.testing.faults import GRAMMAR, FaultInjector, FaultSpec, FaultSpecError
from mindspeed_recovery.testing.simulator import UnsafeMemory

megatron_cpu.install()  # before Megatron is imported

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

VOCABULARY = 256
SEQUENCE = 32
HIDDEN = 32
MICROBATCH = 2
MICROBATCHES = 3
EVAL_ITERATIONS = 2


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a small MoE GPT on a CPU, with device faults.")
    parser.add_argument("--train-iters", type=_positive, default=40, metavar="N")
    parser.add_argument("--eval-interval", type=_positive, default=10, metavar="N", help="evaluate every N iterations")
    parser.add_argument("--tensorboard-dir", type=Path, metavar="DIR", help="the last rank writes its scalars here")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--expert-model-parallel-size", type=_positive, default=1, metavar="N")
    parser.add_argument("--pipeline-model-parallel-size", type=_positive, default=1, metavar="N")
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument(
        "--enable-recovery-safe-globals", action="store_true", help="protect global state with mindspeed-recovery"
    )
    parser.add_argument(
        "--save-final",
        type=Path,
        metavar="FILE",
        help="save the final parameters, buffers and optimizer state of each rank to FILE.rank<R>",
    )
    parser.add_argument(
        "--fault", type=_fault, action="append", default=[], metavar="SPEC", help=f"{GRAMMAR}; repeatable"
    )
    args = parser.parse_args(argv)
    for fault in args.fault:
        if fault.step > args.train_iters:
            parser.error(f"--fault {fault}: there are only {args.train_iters} iterations (--train-iters)")
    return args


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive whole number")
    return int(text)


def _fault(text: str) -> FaultSpec:
    try:
        return FaultSpec.parse(text)
    except FaultSpecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# ---- the job -----------------------------------------------------------------------------------------------------------


def known(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The options that this version's function has: Megatron adds some from release to release."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def model_config(args: argparse.Namespace) -> TransformerConfig:
    pipeline = args.pipeline_model_parallel_size
    return TransformerConfig(
        **known(
            TransformerConfig,
            num_layers=2 * pipeline,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            ffn_hidden_size=2 * HIDDEN,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            add_bias_linear=False,
            pipeline_model_parallel_size=pipeline,
            expert_model_parallel_size=args.expert_model_parallel_size,
            pipeline_dtype=torch.float32,
            params_dtype=torch.float32,
            batch_p2p_comm=False,
            deallocate_pipeline_outputs=pipeline > 1,
            num_moe_experts=4,
            moe_router_topk=2,
            moe_ffn_hidden_size=2 * HIDDEN,
            moe_router_load_balancing_type="aux_loss",
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=1e-3,
            moe_aux_loss_coeff=1e-2,
            moe_z_loss_coeff=1e-3,
            moe_shared_expert_intermediate_size=HIDDEN,
            moe_token_dispatcher_type="alltoall",
            mtp_num_layers=1,
            mtp_loss_scaling_factor=0.1,
            # What needs a GPU is off.
            use_cpu_initialization=True,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )
    )


def build_model(config: TransformerConfig, args: argparse.Namespace) -> DistributedDataParallel:
    layers = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    extra = {}
    if getattr(config, "mtp_num_layers", None):
        extra["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **extra,
    )
    distributed = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    return DistributedDataParallel(config=config, ddp_config=distributed, module=model)


def build_optimizer(model: DistributedDataParallel, args: argparse.Namespace) -> tuple[Any, OptimizerParamScheduler]:
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            weight_decay=0.01,
            clip_grad=1.0,
            params_dtype=torch.float32,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_steps=max(args.train_iters, 4),
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=args.train_iters,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


class Text:
    """The documentation of Python, as bytes on the host. A sample is known by its number: nothing to restore."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        cut = len(text) * 9 // 10
        self._splits = {"train": text[:cut], "valid": text[cut:]}

    def microbatch(self, split: str, number: int) -> dict[str, torch.Tensor]:
        text = self._splits[split]
        rows = []
        for sample in range(number * MICROBATCH, (number + 1) * MICROBATCH):
            start = sample * 7919 * SEQUENCE % (len(text) - SEQUENCE - 1)  # a prime stride visits all of the text
            rows.append(list(text[start : start + SEQUENCE + 1]))
        tokens = torch.tensor(rows)
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(MICROBATCH, SEQUENCE),
            "position_ids": torch.arange(SEQUENCE).expand(MICROBATCH, -1).contiguous(),
        }


@dataclasses.dataclass
class Progress:
    """The data position."""

    iteration: int = 0

    def samples(self) -> int:
        return self.iteration * MICROBATCH * MICROBATCHES * parallel_state.get_data_parallel_world_size()


@dataclasses.dataclass
class Line:
    """The log line of one step, on the host. ``lm_loss`` is known on the last pipeline stage."""

    lm_loss: float | None
    grad_norm: float
    learning_rate: float
    samples: int


class Pretraining:
    """One rank's job: what ``pretrain()`` keeps in local variables."""

    def __init__(self, args: argparse.Namespace, rank: int, world_size: int, store: dist.Store) -> None:
        self.args, self.rank = args, rank
        self.memory = UnsafeMemory(args.seed)
        self.text, self.progress = Text(), Progress()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(
            args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
        )
        self.config = model_config(args)
        self.model = build_model(self.config, args)
        self.optimizer, self.scheduler = build_optimizer(self.model, args)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.forward_backward = get_forward_backward_func()
        self.writer = self._writer(args, is_last=rank == world_size - 1)
        self.injector = FaultInjector(
            args.fault, rank, self.memory, lambda names: megatron_job.state_tensors(names, [self.model], self.optimizer)
        )
        self._place_faults()

        self.roots = megatron_job.roots([self.model], self.optimizer)
        session = sink = None
        if args.enable_recovery_safe_globals:
            session = mindspeed_recovery.enable(roots=self.roots, memory=self.memory, is_fault=standalone.is_fault)
            sink = HeldEvents(self.writer) if self.writer else None
            if rank == 0:
                print(f"mindspeed-recovery: {session.summary()}", flush=True)
        self._session = session
        self.runtime = standalone.StandaloneRuntime(
            store=store,
            rank=rank,
            world_size=world_size,
            device=self.memory,
            job=megatron_job.MegatronJob([self.model], self.optimizer, self.scheduler, self.progress),
            write_log=self.write_log,
            session=session,
            sink=sink,
            context=self._device_context,
        )
        megatron_job.before_first_write(self.optimizer, lambda: self.runtime.begin_update(self.progress.iteration + 1))

    def _writer(self, args: argparse.Namespace, is_last: bool) -> Any:
        if args.tensorboard_dir is None or not is_last:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(args.tensorboard_dir), max_queue=1000)

    @contextlib.contextmanager
    def _device_context(self) -> Iterator[None]:
        with megatron_cpu.cpu_mode(), self.memory.active(), self.memory.exempt():
            yield

    # ---- faults --------------------------------------------------------------------------------------------------------

    def _place_faults(self) -> None:
        def point(name: str) -> None:
            self.injector.at(name, self.progress.iteration + 1)

        def training_point(name: str) -> None:
            if self.model.training:
                point(name)

        for optimizer in megatron_job.optimizers(self.optimizer):
            optimizer.optimizer.register_step_post_hook(lambda *unused: point("update"))
        chunk = self.model.module
        chunk.register_forward_pre_hook(lambda module, inputs: training_point("forward"))
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(lambda module, inputs, outputs: training_point("router"))

        def in_backward(module: Any, inputs: Any, outputs: Any) -> None:
            hidden = outputs[0] if isinstance(outputs, tuple) else outputs
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: point("backward"))

        chunk.decoder.layers[0].register_forward_hook(in_backward)

    # ---- training ------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """The training loop; called again after each recovery."""
        self.model.train()
        if self.evaluation_due() and self.runtime.marked("eval") < self.progress.iteration:
            self.evaluate()  # a fault interrupted it
        while self.progress.iteration < self.args.train_iters:
            step = self.progress.iteration + 1
            self.runtime.begin_step(step)
            self.injector.begin_step(step)
            line = self.train_step(step)
            self.progress.iteration = step
            line.samples = self.progress.samples()
            self.runtime.end_update(step, line)
            self.injector.at("optimizer", step)
            self.runtime.log(step)
            if self.rank == 0 and step % 10 == 0:
                print(f"iteration {step}/{self.args.train_iters}", flush=True)
            if self.evaluation_due():
                self.evaluate()

    def train_step(self, step: int) -> Line:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        first = (
            (step - 1) * parallel_state.get_data_parallel_world_size() + parallel_state.get_data_parallel_rank()
        ) * MICROBATCHES
        losses = self.run_schedule("train", first, MICROBATCHES, forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        loss = sum(loss["lm loss"] for loss in losses).item() / MICROBATCHES if losses else None
        return Line(loss, float(grad_norm), max(group["lr"] for group in self.optimizer.param_groups), 0)

    def run_schedule(self, split: str, first: int, count: int, *, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        data = (self.text.microbatch(split, number) for number in range(first, first + count))
        return self.forward_backward(
            forward_step_func=self.forward_step,
            data_iterator=data,
            model=[self.model],
            num_microbatches=count,
            seq_length=SEQUENCE,
            micro_batch_size=MICROBATCH,
            forward_only=forward_only,
        )

    def forward_step(self, data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        batch = next(data)
        targets = known(self.model.module.forward, labels=batch["labels"], loss_mask=batch["loss_mask"])
        output = model(batch["tokens"], batch["position_ids"], None, **targets)
        return output, lambda output: self.loss(output, batch["loss_mask"])

    def loss(self, output: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (output.float() * mask).sum() / mask.sum()
        reported = loss.detach().clone()
        dist.all_reduce(reported, op=dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
        return loss, {"lm loss": reported}

    def evaluation_due(self) -> bool:
        return self.progress.iteration > 0 and self.progress.iteration % self.args.eval_interval == 0

    def evaluate(self) -> None:
        """The validation loss. Which samples are read follows from the iteration alone."""
        step = self.progress.iteration
        self.model.eval()
        evaluation = step // self.args.eval_interval - 1
        losses = []
        with torch.no_grad():
            for iteration in range(EVAL_ITERATIONS):
                number = (evaluation * EVAL_ITERATIONS + iteration) * parallel_state.get_data_parallel_world_size()
                losses += self.run_schedule(
                    "valid", number + parallel_state.get_data_parallel_rank(), 1, forward_only=True
                )
                if iteration == 0:
                    self.injector.at("eval", step)
        if self.writer is not None:
            value = sum(loss["lm loss"] for loss in losses).item() / EVAL_ITERATIONS
            self.writer.add_scalar("lm loss validation", value, step)
            self.writer.add_scalar("lm loss validation vs samples", value, self.progress.samples())
        self.model.train()
        self.runtime.mark("eval", step)

    # ---- logging -------------------------------------------------------------------------------------------------------

    def write_log(self, step: int, line: Line) -> None:
        """The log line of a step. Megatron's metrics are reduced over all ranks, so every rank comes here."""
        writer = self.writer
        if writer is not None:
            writer.add_scalar("lm loss", line.lm_loss, step)
            writer.add_scalar("lm loss vs samples", line.lm_loss, line.samples)
            writer.add_scalar("grad-norm", line.grad_norm, step)
            writer.add_scalar("learning-rate", line.learning_rate, step)
        self.injector.at("log", step)
        report_moe_metrics(self.config, step, writer)
        if getattr(self.config, "mtp_num_layers", None):
            from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

            MTPLossLoggingHelper.track_mtp_metrics(1 / MICROBATCHES, step, writer, None, {})

    # ---- the end -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        with self.memory.active():
            self.runtime.run(self.train, [])
        for milliseconds in self.runtime.recoveries if self.rank == 0 else []:
            print(f"recovery: {json.dumps(milliseconds)}", flush=True)
        for fault in self.injector.waiting:
            print(f"WARNING: the fault {fault} never happened: the run did not pass that point", flush=True)
        if self.writer is not None:
            self.writer.close()
        if self.args.save_final:
            self.args.save_final.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.final_state(), f"{self.args.save_final}.rank{self.rank}")

    def final_state(self) -> dict[str, Any]:
        chunk = self.model.module
        optimizers = []
        for optimizer in megatron_job.optimizers(self.optimizer):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            moments = [optimizer.optimizer.state.get(parameter, {}) for parameter in parameters]
            optimizers.append(
                {"parameters": [p.detach() for p in parameters], "state": [dict(state) for state in moments]}
            )
        return {
            "parameters": {name: parameter.detach() for name, parameter in chunk.named_parameters()},
            "buffers": dict(chunk.named_buffers()),
            "optimizers": optimizers,
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }


def report_moe_metrics(config: TransformerConfig, step: int, writer: Any) -> None:
    """The version's own function; from 0.18 on a method of the metrics tracker."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        report = get_moe_metrics_tracker().report
    except ImportError:
        report = moe_utils.track_moe_metrics
    report(
        **known(
            report,
            loss_scale=1 / MICROBATCHES,
            iteration=step,
            writer=writer,
            total_loss_dict=None if hasattr(report, "__self__") else {},
            per_layer_logging=True,
            force_initialize=True,
            track_names=["load_balancing_loss", "z_loss"],
            num_layers=config.num_layers,
            moe_layer_freq=config.moe_layer_freq,
            mtp_num_layers=getattr(config, "mtp_num_layers", None),
        )
    )


def rendezvous(rank: int, world_size: int) -> dist.Store:
    """Join the other ranks as torchrun's environment says; return a store of the runtime's own."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(host, port, world_size, is_master=rank == 0 and not agent_serves)
    return join(store, rank, world_size)


def join(store: dist.TCPStore, rank: int, world_size: int) -> dist.Store:
    restartable_gloo.register(peer_failure_grace=5.0)
    dist.init_process_group(
        "restartable_gloo", store=dist.PrefixStore("groups", store), rank=rank, world_size=world_size
    )
    return dist.PrefixStore("recovery", store)


def pretrain(
    args: argparse.Namespace,
    rank: int,
    world_size: int,
    store: dist.Store,
    prepare: Callable[[Pretraining], None] | None = None,
) -> None:
    """Build this rank's job, let ``prepare`` change it, and run it."""
    with megatron_cpu.cpu_mode():
        job = Pretraining(args, rank, world_size, store)
        if prepare is not None:
            prepare(job)
        job.run()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if "RANK" not in os.environ:
        print(
            "pretrain_moe.py: start it with torchrun, for example: torchrun --nproc-per-node 2 " + sys.argv[0],
            file=sys.stderr,
        )
        return 2
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING"))
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for fault in args.fault:
        if fault.rank >= world_size:
            print(f"pretrain_moe.py: --fault {fault}: there are only {world_size} ranks", file=sys.stderr)
            return 2
    try:
        pretrain(args, rank, world_size, rendezvous(rank, world_size))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(2)  # a job that was given up leaves groups behind whose threads cannot be joined
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
