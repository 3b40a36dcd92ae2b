# SPDX-License-Identifier: Apache-2.0
"""Registration of the callbacks, and the wrapped ``train()``."""

import functools

from adaptor import framework
from mindio_ttp.framework_ttp import (
    set_mindio_export_version,
    tft_exception_handler,
    tft_is_reboot_node,
    tft_register_clean_handler,
    tft_register_rebuild_group_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_set_optimizer_replica,
)

from .tft_arf_group_repair import arf_rebuild_process_group_callback, tft_is_arf_reboot_node, update_arf_reboot_flag
from .tft_optimizer_data_repair import repair_callback, set_log_args, tft_set_losses_reduced
from .tft_replica_group import get_repair_group  # noqa: F401  the group's module is loaded with the others
from .tft_replica_optimizer import TTPReplicaOptimizer
from .tft_rollback import rollback_callback
from .tft_stop_clean import clean_callback, save_callback, stop_callback

Optimizer = TTPReplicaOptimizer


def tft_register_processor():
    update_arf_reboot_flag(tft_is_reboot_node())
    tft_register_save_ckpt_handler(save_callback)
    tft_register_stop_handler(stop_callback)
    tft_register_clean_handler(clean_callback)
    tft_register_repair_handler(repair_callback)
    tft_register_rollback_handler(rollback_callback)
    tft_register_rebuild_group_handler(arf_rebuild_process_group_callback)
    framework.follow(tft_set_losses_reduced, set_log_args)


def train_wrapper(train):
    @functools.wraps(train)
    @tft_exception_handler
    def tft_train(*args, **kwargs):
        set_mindio_export_version("MindSpeed-LLM")
        tft_set_optimizer_replica(framework.rank(), framework.replica_info())
        if tft_is_arf_reboot_node():
            raise RuntimeError("ARF FINISH")
        return train(*args, **kwargs)

    return tft_train
