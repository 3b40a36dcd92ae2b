# SPDX-License-Identifier: Apache-2.0
"""The names that frameworks import."""

from .ttp_decorator import (
    RepairType,
    set_mindio_export_version,
    tft_end_updating_os,
    tft_exception_handler,
    tft_get_repair_step,
    tft_get_repair_type,
    tft_is_reboot_node,
    tft_register_clean_handler,
    tft_register_exception_handler,
    tft_register_rebuild_group_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_set_optimizer_replica,
    tft_start_updating_os,
)

__all__ = [
    "RepairType",
    "set_mindio_export_version",
    "tft_end_updating_os",
    "tft_exception_handler",
    "tft_get_repair_step",
    "tft_get_repair_type",
    "tft_is_reboot_node",
    "tft_register_clean_handler",
    "tft_register_exception_handler",
    "tft_register_rebuild_group_handler",
    "tft_register_repair_handler",
    "tft_register_rollback_handler",
    "tft_register_save_ckpt_handler",
    "tft_register_stop_handler",
    "tft_set_optimizer_replica",
    "tft_start_updating_os",
]
