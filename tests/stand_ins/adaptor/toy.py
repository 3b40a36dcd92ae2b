# SPDX-License-Identifier: Apache-2.0
"""The toy framework, as an adaptor sees it."""

import torch
from toy import get_args, training
from toy import parallel_state as mpu
from toy.training import Optimizer

__all__ = ["Optimizer", "get_args", "mpu"]

MODEL, OPTIM = 1, 2
replicas = True
"""Whether every rank holds a whole copy of parameters and optimizer that may repair another's."""


def device_memory():
    return training.device


def stop():
    training.device.stop()


def restart():
    training.device.restart()


def abandon_collectives(train_args):
    pass


def rebuilt(train_args):
    optimizer = train_args[OPTIM]
    return optimizer.model.weight, optimizer.model.grad, optimizer.momentum


def replicated(train_args, kind):
    optimizer = train_args[OPTIM]
    return optimizer.model.weight, optimizer.momentum


def rank():
    return training.rank


def replica_info():
    ranks = list(range(training.world_size))
    return [{"rank_list": ranks, "replica_cnt": len(ranks) if replicas else 1, "replica_shift": 0}]


def host_state(train_args):
    return get_args().iteration


def load_host_state(train_args, state):
    get_args().iteration = state


def load_checkpoint(train_args):
    return training.load_checkpoint(get_args().checkpoint, train_args[MODEL][0], train_args[OPTIM])


def set_position(step, train_args):
    pass


def gather_parameters(train_args):
    optimizer = train_args[OPTIM]
    optimizer.model.grad = torch.zeros(8)
    optimizer.model.weight.add_(0)


def rebuild_data(train_args):
    pass


def rebuild_globals():
    pass


def write_log(step, values, train_args):
    training.training_log(values.losses_reduced_, step, tag="/replay")


def dump(step, train_args):
    tracker = training.parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER
    values = {key: entry["values"] for key, entry in tracker.items()}
    weight = train_args[OPTIM].model.weight
    torch.save({"step": step, "weight": weight, "tracker": values}, f"{get_args().dump}.{training.rank}")


def follow(set_losses, set_log_args):
    training.hooks["losses"].append(set_losses)
