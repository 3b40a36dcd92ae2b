# SPDX-License-Identifier: Apache-2.0
"""The toy framework, as an adaptor sees it."""

import torch
from toy import get_args, training
from toy import parallel_state as mpu
from toy.training import Optimizer

__all__ = ["Optimizer", "get_args", "mpu"]

MODEL, OPTIM = 1, 2
replicas = True
"""Whether ranks hold copies of parameters and optimizer that may repair another's."""
copies = None
"""How many copies of a shard of the dense optimizer there are; None: every rank holds one."""


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
    return optimizer.model.grad, *optimizer.tensors(0), *optimizer.tensors(1)


def replicated(train_args, kind):
    return train_args[OPTIM].tensors(kind)


def rank():
    return training.rank


def replica_info():
    dense = list(range(training.world_size))
    groups = [(dense, copies or len(dense))]
    if training.with_experts():
        experts = training.expert_ranks()
        groups.append((experts, len(experts)))
    return [
        {"rank_list": ranks, "replica_cnt": number if replicas else 1, "replica_shift": 0} for ranks, number in groups
    ]


def rebuild_links(repair_id):
    training.rebuild_links(repair_id)


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
