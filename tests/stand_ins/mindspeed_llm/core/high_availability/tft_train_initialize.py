# SPDX-License-Identifier: Apache-2.0
"""Registration of the callbacks, and the wrapped ``train()``."""

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
)
from toy import training

from .tft_arf_group_repair import arf_rebuild_process_group_callback, tft_is_arf_reboot_node, update_arf_reboot_flag
from .tft_optimizer_data_repair import repair_callback, tft_set_losses_reduced
from .tft_replica_optimizer import TTPReplicaOptimizer
from .tft_rollback import rollback_callback
from .tft_stop_clean import clean_callback, save_callback, stop_callback


def tft_register_processor():
    update_arf_reboot_flag(tft_is_reboot_node())
    tft_register_save_ckpt_handler(save_callback)
    tft_register_stop_handler(stop_callback)
    tft_register_clean_handler(clean_callback)
    tft_register_repair_handler(repair_callback)
    tft_register_rollback_handler(rollback_callback)
    tft_register_rebuild_group_handler(arf_rebuild_process_group_callback)
    training.hooks["losses"].append(tft_set_losses_reduced)


@tft_exception_handler
def tft_train(*args):
    set_mindio_export_version("MindSpeed-LLM")
    if tft_is_arf_reboot_node():
        raise RuntimeError("ARF FINISH")
    return training.train(*args)


def run(model):
    return tft_train(None, [model], TTPReplicaOptimizer(model), None)
