# SPDX-License-Identifier: Apache-2.0
"""Repair: parameters and optimizer from a replica, or everything from the checkpoint."""

import pickle

import torch
import torch.distributed as dist
from mindio_ttp.framework_ttp import RepairType
from mindio_ttp.framework_ttp.ttp_decorator import tft_report_load_ckpt_step

from . import framework

load_ckpt = False
REPAIR_GROUP = GLOO_REPAIR_GROUP = None


def set_load_ckpt(status):
    global load_ckpt
    load_ckpt = status


def get_load_ckpt():
    return load_ckpt


def build_repair_group(rank_list):
    """Of the ranks in a repair, for the device and for the host; the world does for the first."""
    global REPAIR_GROUP, GLOO_REPAIR_GROUP
    REPAIR_GROUP = GLOO_REPAIR_GROUP = dist.group.WORLD
    if dist.get_backend() != "gloo":
        GLOO_REPAIR_GROUP = dist.new_group(rank_list, backend="gloo", use_local_synchronization=True)


def get_repair_group(use_gloo=False):
    return GLOO_REPAIR_GROUP if use_gloo else REPAIR_GROUP


def destroy_repair_group():
    global REPAIR_GROUP, GLOO_REPAIR_GROUP
    if GLOO_REPAIR_GROUP is not None and GLOO_REPAIR_GROUP is not REPAIR_GROUP:
        dist.destroy_process_group(GLOO_REPAIR_GROUP)
    REPAIR_GROUP = GLOO_REPAIR_GROUP = None


class LogArgs:
    """What the log line of the last step is made of. Losses: None, or a list of dicts, empty on ranks without a loss; a
    loss is a sum and a count until it is averaged."""

    losses_reduced_ = None
    grad_norm_ = None
    num_zeros_in_grad_ = None


def set_losses(losses=None):
    LogArgs.losses_reduced_ = losses


def set_log_args(grad_norm, num_zeros_in_grad):
    LogArgs.grad_norm_ = grad_norm
    LogArgs.num_zeros_in_grad_ = num_zeros_in_grad


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
    for destination, kind in zip(dest_ranks, optim_idxs):
        _send_object(framework.host_state(train_args), destination)
        for tensor in framework.replicated(train_args, kind):
            dist.send(tensor.detach().contiguous(), destination, group=get_repair_group())
    if LogArgs.losses_reduced_:
        LogArgs.losses_reduced_ = average(LogArgs.losses_reduced_)
    losses = LogArgs.losses_reduced_
    for destination in dest_ranks:
        numbers = [LogArgs.grad_norm_, LogArgs.num_zeros_in_grad_]
        _send_object([None if losses is None else len(losses), numbers], destination)
        for part in losses or []:
            dist.send(part["lm loss"].reshape(1), destination, group=get_repair_group())


def recv_rank_repair(src_ranks, dest_ranks, optim_idxs, rank_list, train_args):
    build_repair_group(rank_list)
    for source, kind in zip(src_ranks, optim_idxs):
        framework.load_host_state(train_args, _recv_object(source))
        for target in framework.replicated(train_args, kind):
            fresh = torch.empty(target.shape, dtype=target.dtype)
            dist.recv(fresh, source, group=get_repair_group())
            target.detach().copy_(fresh)
    if LogArgs.losses_reduced_:  # its own old ones, before the source's arrive
        LogArgs.losses_reduced_ = average(LogArgs.losses_reduced_)
    for source in src_ranks:
        number, numbers = _recv_object(source)
        set_log_args(*numbers)
        if number is not None:
            LogArgs.losses_reduced_ = [{"lm loss": torch.empty(1)} for _ in range(number)]
            for part in LogArgs.losses_reduced_:
                dist.recv(part["lm loss"], source, group=get_repair_group())


def load_ckpt_repair(train_args):
    set_load_ckpt(True)
    framework.get_args().iteration = framework.load_checkpoint(train_args)
    tft_report_load_ckpt_step(framework.get_args().iteration)


def _send_object(value, destination):
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    for tensor in (torch.tensor([data.numel()]), data):
        dist.send(tensor, destination, group=get_repair_group())


def _recv_object(source):
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=get_repair_group())
    data = torch.zeros(int(size), dtype=torch.uint8)
    dist.recv(data, source, group=get_repair_group())
    return pickle.loads(bytes(data.tolist()))
