# SPDX-License-Identifier: Apache-2.0
"""Registration of the callbacks, and the wrapped ``train()``."""

import functools

from adaptor import framework
from mindio_ttp.framework_ttp import (
    set_mindio_export_version,
    tft_exception_handler,
    tft_register_clean_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_set_optimizer_replica,
)

from .tft_optimizer_data_repair import repair_callback, set_log_args, tft_set_losses_reduced
from .tft_replica_group import get_repair_group  # noqa: F401  the group's module is loaded with the others
from .tft_replica_optimizer import TTPReplicaOptimizer
from .tft_rollback import rollback_callback
from .tft_stop_clean import clean_callback, save_callback, stop_callback

Optimizer = TTPReplicaOptimizer


def tft_register_processor():
    tft_register_save_ckpt_handler(save_callback)
    tft_register_stop_handler(stop_callback)
    tft_register_clean_handler(clean_callback)
    tft_register_repair_handler(repair_callback)
    tft_register_rollback_handler(rollback_callback)
    framework.follow(tft_set_losses_reduced, set_log_args)


def train_wrapper(train):
    @functools.wraps(train)
    @tft_exception_handler
    def tft_train(*args, **kwargs):
        set_mindio_export_version("MindSpeed-LLM")
        tft_set_optimizer_replica(framework.rank(), framework.replica_info())
        return train(*args, **kwargs)

    return tft_train
