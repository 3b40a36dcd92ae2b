# SPDX-License-Identifier: Apache-2.0
"""The adaptor of the older wheels: one module, and the arguments of ``train()`` one level deeper."""

import torch
import torch.distributed as dist
from toy import get_args, training
from toy import parallel_state as mpu

from mindio_ttp.framework_ttp import (
    RepairType,
    tft_end_updating_os,
    tft_exception_handler,
    tft_register_clean_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_start_updating_os,
)

MODEL, OPTIM = 1, 2
load_ckpt = False
rolled_back = []


class LogArgs:
    losses_reduced_ = None
    grad_norm_ = None
    num_zeros_in_grad_ = None


def average(losses):
    return [{"lm loss": sum(part["lm loss"][0] for part in losses) / sum(part["lm loss"][1] for part in losses)}]


def set_losses(losses):
    LogArgs.losses_reduced_ = losses


class Optimizer(training.Optimizer):
    def begin_to_update(self, step):
        tft_start_updating_os()

    def end_to_update(self, step):
        tft_end_updating_os(step)


def stop_callback(args, ctx):
    training.device.stop()


def clean_callback(is_uce_error, args, ctx):
    result = 0
    if is_uce_error:
        found = training.device.check_uce_in_memory()
        result = {2: 2, 3: 0}.get(found, 1)
        optimizer = args[0][OPTIM]
        for tensor in (optimizer.model.weight, optimizer.model.grad, optimizer.momentum) if found == 3 else ():
            training.device.mark_safe(tensor)
    training.device.restart()
    return result


def repair_callback(step, need_rebuild, error_ranks, repair_info, args, ctx):
    global load_ckpt
    kind = repair_info["repair_type"]
    lists = repair_info["src"], repair_info["dst"], repair_info["type"], repair_info["rank_list"]
    if kind == RepairType.RT_SEND.value:
        send_rank_repair(*lists, args)
    elif kind in (RepairType.RT_LOAD_CKPT.value, RepairType.RT_LOAD_REBUILD.value):
        load_ckpt, mine = True, args[0]
        get_args().iteration = training.load_checkpoint(get_args().checkpoint, mine[MODEL][0], mine[OPTIM])
    else:
        recv_rank_repair(*lists, args)


def send_rank_repair(src_ranks, dest_ranks, optim_idxs, rank_list, args):
    optimizer = args[0][OPTIM]
    losses = average(LogArgs.losses_reduced_)
    for destination in dest_ranks:
        for tensor in (optimizer.model.weight, optimizer.momentum, losses[0]["lm loss"]):
            dist.send(tensor, destination)


def recv_rank_repair(src_ranks, dest_ranks, optim_idxs, rank_list, args):
    optimizer = args[0][OPTIM]
    if LogArgs.losses_reduced_:
        average(LogArgs.losses_reduced_)
    for source in src_ranks:
        LogArgs.losses_reduced_ = [{"lm loss": torch.zeros(())}]
        for target in (optimizer.model.weight, optimizer.momentum, LogArgs.losses_reduced_[0]["lm loss"]):
            fresh = torch.empty(target.shape)
            dist.recv(fresh, source)
            target.copy_(fresh)


def rollback_callback(step, args, ctx):
    global load_ckpt
    if load_ckpt:
        step, load_ckpt = get_args().iteration, False
    feature_rollback()
    optimizer = args[0][OPTIM]
    optimizer.model.grad = torch.zeros(8)
    optimizer.model.weight.add_(0)
    dist.barrier()
    if LogArgs.losses_reduced_ and isinstance(LogArgs.losses_reduced_[0]["lm loss"], tuple):
        LogArgs.losses_reduced_ = average(LogArgs.losses_reduced_)
    if step != get_args().iteration and LogArgs.losses_reduced_ is not None:
        training.training_log(LogArgs.losses_reduced_, step, tag="/replay")
    get_args().iteration = step
    rolled_back.append(step)


def feature_rollback():
    mpu._MOE_AUX_LOSSES_LOGGING_TRACKER = {}


def save_callback(step, save_info, args, ctx):
    tracker = training.parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER
    values = {key: entry["values"] for key, entry in tracker.items()}
    torch.save(
        {"step": step, "weight": args[0][OPTIM].model.weight, "tracker": values}, f"{get_args().dump}.{training.rank}"
    )


def tft_register_processor():
    tft_register_save_ckpt_handler(save_callback)
    tft_register_stop_handler(stop_callback)
    tft_register_clean_handler(clean_callback)
    tft_register_repair_handler(repair_callback)
    tft_register_rollback_handler(rollback_callback)
    training.hooks["losses"].append(set_losses)


@tft_exception_handler
def tft_train(train_args):
    return training.train(*train_args)


def run(model):
    return tft_train([None, [model], Optimizer(model), None])
