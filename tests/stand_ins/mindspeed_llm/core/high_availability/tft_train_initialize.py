# SPDX-License-Identifier: Apache-2.0
"""Registration of the callbacks, and the wrapped ``train()``."""

from mindio_ttp.framework_ttp import (
    set_mindio_export_version,
    tft_exception_handler,
    tft_register_clean_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
)
from toy import training

from .tft_optimizer_data_repair import repair_callback, tft_set_losses_reduced
from .tft_replica_optimizer import TTPReplicaOptimizer
from .tft_rollback import rollback_callback
from .tft_stop_clean import clean_callback, save_callback, stop_callback


def tft_register_processor():
    tft_register_save_ckpt_handler(save_callback)
    tft_register_stop_handler(stop_callback)
    tft_register_clean_handler(clean_callback)
    tft_register_repair_handler(repair_callback)
    tft_register_rollback_handler(rollback_callback)
    training.hooks["losses"].append(tft_set_losses_reduced)


@tft_exception_handler
def tft_train(*args):
    set_mindio_export_version("MindSpeed-LLM")
    return training.train(*args)


def run(model):
    return tft_train(None, [model], TTPReplicaOptimizer(model), None)
