# SPDX-License-Identifier: Apache-2.0
"""Rollback, with the reset as it is deployed: of a name that the framework does not have any more."""

import torch
import torch.distributed as dist
from toy import get_args, training
from toy import parallel_state as mpu

from .tft_optimizer_data_repair import OPTIM, LogArgs, average, get_load_ckpt, set_load_ckpt
from .tft_replica_group import destroy_repair_group

rolled_back = []


def rollback_callback(step, train_args, ctx):
    args = get_args()
    if get_load_ckpt():
        step = args.iteration
        set_load_ckpt(False)
    feature_rollback()
    gather_model_params(train_args[OPTIM])
    dist.barrier()
    destroy_repair_group()
    training_log_repair(step)
    args.iteration = step
    rolled_back.append(step)


def feature_rollback():
    if get_args().num_experts:
        mpu._MOE_AUX_LOSSES_LOGGING_TRACKER = {}


def gather_model_params(optimizer):
    optimizer.model.grad = torch.zeros(8)
    optimizer.model.weight.add_(0)


def training_log_repair(iteration):
    if LogArgs.losses_reduced_ and isinstance(LogArgs.losses_reduced_[0]["lm loss"], tuple):
        LogArgs.losses_reduced_ = average(LogArgs.losses_reduced_)
    if iteration == get_args().iteration or LogArgs.losses_reduced_ is None:
        return
    print(f"adaptor: replays the log line of {iteration}", flush=True)
    training.training_log(LogArgs.losses_reduced_, iteration, tag="/replay")
