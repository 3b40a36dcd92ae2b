# SPDX-License-Identifier: Apache-2.0
"""Repair: parameters and optimizer from a replica, or everything from the checkpoint."""

import torch
import torch.distributed as dist
from mindio_ttp.framework_ttp import RepairType
from mindio_ttp.framework_ttp.ttp_decorator import tft_report_load_ckpt_step
from toy import get_args, training

from .tft_replica_group import build_repair_group, get_repair_group

MODEL, OPTIM = 1, 2
load_ckpt = False


def set_load_ckpt(status):
    global load_ckpt
    load_ckpt = status


def get_load_ckpt():
    return load_ckpt


class LogArgs:
    losses_reduced_ = None
    grad_norm_ = None
    num_zeros_in_grad_ = None


def tft_set_losses_reduced(losses=None):
    LogArgs.losses_reduced_ = losses


def average(losses):
    return [{"lm loss": sum(part["lm loss"][0] for part in losses) / sum(part["lm loss"][1] for part in losses)}]


def repair_callback(step, need_rebuild, error_ranks, repair_info, train_args, ctx):
    kind = repair_info["repair_type"]
    lists = repair_info["src"], repair_info["dst"], repair_info["type"], repair_info["rank_list"]
    if kind == RepairType.RT_SEND.value:
        send_rank_repair(*lists, train_args)
    elif kind in (RepairType.RT_UCE_HIGHLEVEL.value, RepairType.RT_RECV_REPAIR.value):
        recv_rank_repair(*lists, train_args)
    elif kind in (RepairType.RT_LOAD_CKPT.value, RepairType.RT_LOAD_REBUILD.value):
        load_ckpt_repair(train_args)
    else:
        raise ValueError("repair type is invalid")


def send_rank_repair(src_ranks, dest_ranks, optim_idxs, rank_list, train_args):
    build_repair_group(rank_list)
    group, optimizer = get_repair_group(), train_args[OPTIM]
    losses = LogArgs.losses_reduced_ and average(LogArgs.losses_reduced_)
    numbers = torch.tensor([get_args().iteration, -1 if losses is None else len(losses)])
    for destination, kind in zip(dest_ranks, optim_idxs):
        for tensor in (*optimizer.tensors(kind), numbers):
            dist.send(tensor, destination, group=group)
        for part in losses or []:
            dist.send(part["lm loss"], destination, group=group)


def recv_rank_repair(src_ranks, dest_ranks, optim_idxs, rank_list, train_args):
    build_repair_group(rank_list)
    group, optimizer = get_repair_group(), train_args[OPTIM]
    if LogArgs.losses_reduced_:  # its own old ones, before the source's arrive
        LogArgs.losses_reduced_ = average(LogArgs.losses_reduced_)
    for source, kind in zip(src_ranks, optim_idxs):
        numbers = torch.zeros(2, dtype=torch.int64)
        for target in (*optimizer.tensors(kind), numbers):
            fresh = torch.empty(target.shape, dtype=target.dtype)
            dist.recv(fresh, source, group=group)
            target.copy_(fresh)
        get_args().iteration = int(numbers[0])
        if int(numbers[1]) >= 0:
            LogArgs.losses_reduced_ = [{"lm loss": torch.empty(())} for _ in range(int(numbers[1]))]
            for part in LogArgs.losses_reduced_:
                dist.recv(part["lm loss"], source, group=group)


def load_ckpt_repair(train_args):
    global load_ckpt
    load_ckpt = True
    args = get_args()
    args.iteration = training.load_checkpoint(args.checkpoint, train_args[MODEL][0], train_args[OPTIM])
    tft_report_load_ckpt_step(args.iteration)
