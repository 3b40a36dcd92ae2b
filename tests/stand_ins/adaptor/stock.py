# SPDX-License-Identifier: Apache-2.0
"""Megatron's own training loop, as an adaptor sees it; its device is the simulated one behind `torch_npu`.

The stock loop keeps its step in a local variable, so ``args.iteration`` is set here, after the log line, as the loops that
come with an adaptor do it. A loss that the framework averages over the data-parallel ranks after the update is averaged
before it, for the log line may have to be written again from it.
"""

import functools
import inspect
import pathlib

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training import get_args, global_vars, training
from megatron.training.checkpointing import load_checkpoint as load
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from torch_npu.npu import _recovery

from mindspeed_recovery.runtimes import restartable_gloo
from mindspeed_recovery.testing.faults import FaultSpec

MODEL, OPTIM, SCHEDULER, TRAIN_DATA, VALID_DATA = 1, 2, 3, 4, 5

epochs = 0
log_args = training_log = None


def rank():
    return dist.get_rank()


# ---- stop and clean ------------------------------------------------------------------------------------------------------


def device_memory():
    return _recovery.allocator


def stop():
    device_memory().stop()
    restartable_gloo.abort_all()


def restart():
    global epochs
    epochs += 1
    restartable_gloo.reopen_all(epochs)
    device_memory().restart()


def abandon_collectives(train_args):
    for chunk in train_args[MODEL]:
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            group.grad_reduce_handle = group.param_gather_handle = None


def rebuilt(train_args):
    """What the adaptor makes safe: it is sent by a replica, gathered from the other ranks, or zeroed."""
    for chunk in train_args[MODEL]:
        yield from chunk.parameters()
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield from (data for data in (buffer.param_data, buffer.grad_data) if data is not None)
    for optimizer in _chain(train_args):
        yield from _state(optimizer)
        yield from (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


# ---- repair --------------------------------------------------------------------------------------------------------------


def _chain(train_args):
    return getattr(train_args[OPTIM], "chained_optimizers", [train_args[OPTIM]])


def _state(optimizer):
    """Main parameters and moments."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            state = optimizer.optimizer.state.get(parameter, {})
            yield from (state[name] for name in sorted(state) if torch.is_tensor(state[name]))


def replicated(train_args, kind):
    return list(_state(_chain(train_args)[kind]))


def replica_info():
    """The dense optimizer's replicas and, with expert parallelism, the experts'. A distributed optimizer has none."""
    args = get_args()
    groups = [mpu.get_data_parallel_group(with_context_parallel=True)]
    if args.expert_model_parallel_size > 1:
        groups.append(mpu.get_expert_data_parallel_group())
    info = []
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        copies = 1 if args.use_distributed_optimizer else len(ranks)
        info.append({"rank_list": ranks, "replica_cnt": copies, "replica_shift": 0})
    return info


def host_state(train_args):
    args = get_args()
    groups = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in _chain(train_args)
    ]
    position = args.iteration, args.consumed_train_samples, args.consumed_valid_samples
    return position, groups, train_args[SCHEDULER].state_dict()


def load_host_state(train_args, state):
    args = get_args()
    position, groups, scheduler = state
    args.iteration, args.consumed_train_samples, args.consumed_valid_samples = position
    for optimizer, saved in zip(_chain(train_args), groups):
        for group, values in zip(optimizer.param_groups, saved):
            group.update(values)
    train_args[SCHEDULER].num_steps = 0
    train_args[SCHEDULER].load_state_dict(scheduler)


def load_checkpoint(train_args):
    args = get_args()
    args.consumed_train_samples = args.consumed_valid_samples = 0
    train_args[SCHEDULER].num_steps = 0
    # The arguments of the example are in the checkpoint too.
    with torch.serialization.safe_globals([FaultSpec, pathlib.PosixPath]):
        step, args.num_floating_point_operations_so_far = load(*train_args[MODEL : SCHEDULER + 1])
    return step


# ---- rollback ------------------------------------------------------------------------------------------------------------


def set_position(step, train_args):
    args = get_args()
    args.consumed_train_samples = step * args.global_batch_size
    if train_args[SCHEDULER].num_steps != args.consumed_train_samples:
        train_args[SCHEDULER].step(args.global_batch_size)


def gather_parameters(train_args):
    for optimizer in _chain(train_args):
        if hasattr(optimizer, "_copy_main_params_to_model_params"):
            with torch.no_grad():
                optimizer._copy_main_params_to_model_params()
        for chunk in optimizer.model_chunks if get_args().use_distributed_optimizer else ():
            chunk.start_param_sync(force_sync=True)


def rebuild_data(train_args):
    _rebuild_iterator(train_args[TRAIN_DATA], get_args().consumed_train_samples)
    _rebuild_iterator(train_args[VALID_DATA], get_args().consumed_valid_samples)


def _rebuild_iterator(iterator, consumed):
    if iterator is not None:
        iterator.iterable = iter(build_pretraining_data_loader(iterator.iterable._dataset, consumed))
        iterator.advance()


def rebuild_globals():
    global_vars._GLOBAL_TIMERS = None
    global_vars._set_timers(get_args())
    destroy_rerun_state_machine()


def write_log(step, values, train_args):
    optimizer = train_args[OPTIM]
    losses = values.losses_reduced_
    options = {
        "loss_dict": losses[0] if losses else {},
        "total_loss_dict": {},
        "learning_rate": training.get_canonical_lr_for_logging(optimizer.param_groups),
        "iteration": step,
        "loss_scale": optimizer.get_loss_scale().item(),
        "report_memory_flag": False,
        "skipped_iter": 0,
        "grad_norm": values.grad_norm_,
        "params_norm": None,
        "num_zeros_in_grad": values.num_zeros_in_grad_,
        "max_attention_logit": 0,
    }
    training_log(**options)


def dump(step, train_args):
    torch.save({"step": step, "model": train_args[MODEL][0].state_dict()}, f"{get_args().save_final}.dump{rank()}")


# ---- what the adaptor puts into the loop ---------------------------------------------------------------------------------


class Optimizer(ChainedOptimizer):
    """TFT learns of the update, which all ranks begin together."""

    def get_grad_norm(self):
        norm = super().get_grad_norm()
        log_args(norm, None)
        return norm

    @torch.no_grad()
    def step_with_ready_grads(self):
        dist.barrier()
        self.begin_to_update()
        for optimizer in self.chained_optimizers:
            optimizer._defer_param_sync = True
            optimizer.step_with_ready_grads()
        self.end_to_update(get_args().iteration + 1)
        for optimizer in self.chained_optimizers:
            if get_args().use_distributed_optimizer and not get_args().overlap_param_gather:
                optimizer.start_param_sync_for_bucket_group_subset()
        return True


def follow(set_losses, set_log_args):
    from .optimizer import ReplicaOptimizer

    global log_args, training_log
    log_args = set_log_args
    build, schedule, write = training.get_megatron_optimizer, training.get_forward_backward_func, training.training_log

    @functools.wraps(build)
    def build_replica_optimizer(*args, **kwargs):
        return ReplicaOptimizer(build(*args, **kwargs).chained_optimizers)

    @functools.wraps(schedule)
    def get_schedule(*args, **kwargs):
        run = schedule(*args, **kwargs)

        def run_and_keep(*args, **kwargs):
            losses = run(*args, **kwargs)
            if not kwargs["forward_only"]:
                set_losses(_averaged(losses))
            return losses

        return run_and_keep

    @functools.wraps(write)
    def write_and_count(*args, **kwargs):
        result = write(*args, **kwargs)
        get_args().iteration = inspect.signature(write).bind(*args, **kwargs).arguments["iteration"]
        return result

    training.get_megatron_optimizer, training.get_forward_backward_func = build_replica_optimizer, get_schedule
    training.training_log = training_log = write_and_count  # this adaptor holds it by name


def _averaged(losses):
    """One loss for the whole batch, as the sum and the count that the framework would divide."""
    if not losses:
        return []
    total = torch.vstack([loss["lm loss"].view(-1) for loss in losses]).sum(dim=0)
    dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return [{"lm loss": (total[0], total[1])}]
