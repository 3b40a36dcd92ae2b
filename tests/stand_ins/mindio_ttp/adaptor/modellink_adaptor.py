# SPDX-License-Identifier: Apache-2.0
"""The adaptor of the older wheels: one module, and the arguments of ``train()`` one level deeper."""

import functools

from adaptor import callbacks, framework, repair
from adaptor.callbacks import feature_rollback, get_args, mpu, rolled_back
from adaptor.optimizer import ReplicaOptimizer as Optimizer
from adaptor.repair import LogArgs

from mindio_ttp.framework_ttp import (
    tft_exception_handler,
    tft_register_clean_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_set_optimizer_replica,
)

__all__ = ["LogArgs", "Optimizer", "feature_rollback", "get_args", "mpu", "rolled_back"]


def _nested(callback):
    """For arguments of ``train()`` that are the one argument of another function."""

    def call(*args):
        *first, train_args, ctx = args
        return callback(*first, train_args[0], ctx)

    return call


def send_rank_repair(src_ranks, dest_ranks, optim_idxs, rank_list, args):
    repair.send_rank_repair(src_ranks, dest_ranks, optim_idxs, rank_list, args[0])


def recv_rank_repair(src_ranks, dest_ranks, optim_idxs, rank_list, args):
    repair.recv_rank_repair(src_ranks, dest_ranks, optim_idxs, rank_list, args[0])


def tft_register_processor():
    tft_register_save_ckpt_handler(_nested(callbacks.save_callback))
    tft_register_stop_handler(_nested(callbacks.stop_callback))
    tft_register_clean_handler(_nested(callbacks.clean_callback))
    tft_register_repair_handler(_nested(repair.repair_callback))
    tft_register_rollback_handler(_nested(callbacks.rollback_callback))
    framework.follow(repair.set_losses, repair.set_log_args)


def train_wrapper(train):
    @tft_exception_handler
    def tft_train(train_args, options):
        tft_set_optimizer_replica(framework.rank(), framework.replica_info())
        return train(*train_args, **options)

    @functools.wraps(train)
    def call(*args, **kwargs):
        return tft_train(list(args), kwargs)

    return call
