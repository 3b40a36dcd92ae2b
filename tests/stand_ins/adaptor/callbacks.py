# SPDX-License-Identifier: Apache-2.0
"""Stop, clean, rollback and save; with the reset as it is deployed: of a name that the framework does not have any more."""

import torch.distributed as dist
from mindio_ttp.framework_ttp.ttp_decorator import tft_get_repair_type

from . import framework
from .repair import LogArgs, average, destroy_repair_group, get_load_ckpt, set_load_ckpt

TEMPORARY, PERSISTENT = 2, 3
NOTHING_TO_REBUILD = 2

mpu = framework.mpu
get_args = framework.get_args
rolled_back = []


def stop_callback(train_args, ctx):
    framework.stop()


def clean_callback(is_uce_error, train_args, ctx):
    result = 0
    framework.abandon_collectives(train_args)
    if is_uce_error:
        memory = framework.device_memory()
        found = memory.check_uce_in_memory()
        print(f"adaptor: memory check answers {found}", flush=True)
        if found == TEMPORARY:
            result = NOTHING_TO_REBUILD
        elif found == PERSISTENT:
            for tensor in framework.rebuilt(train_args):
                memory.mark_safe(tensor)
        else:
            result = 1
    tft_get_repair_type()
    framework.restart()
    return result


def rollback_callback(step, train_args, ctx):
    args = get_args()
    if get_load_ckpt():
        step = args.iteration
        set_load_ckpt(False)
    framework.set_position(step, train_args)
    feature_rollback()
    framework.gather_parameters(train_args)
    framework.rebuild_data(train_args)
    dist.barrier()
    destroy_repair_group()
    training_log_repair(step, train_args)
    args.iteration = step
    framework.rebuild_globals()
    rolled_back.append(step)


def feature_rollback():
    if get_args().num_experts:
        mpu._MOE_AUX_LOSSES_LOGGING_TRACKER = {}


def training_log_repair(iteration, train_args):
    if LogArgs.losses_reduced_ and isinstance(LogArgs.losses_reduced_[0]["lm loss"], tuple):
        LogArgs.losses_reduced_ = average(LogArgs.losses_reduced_)
    if iteration == get_args().iteration or LogArgs.losses_reduced_ is None:
        return
    print(f"adaptor: replays the log line of {iteration}", flush=True)
    framework.write_log(iteration, LogArgs, train_args)


def save_callback(step, save_info, train_args, ctx):
    framework.dump(step, train_args)
