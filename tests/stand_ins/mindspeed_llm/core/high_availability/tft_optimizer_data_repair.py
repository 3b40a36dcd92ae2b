# SPDX-License-Identifier: Apache-2.0
from adaptor.repair import (
    LogArgs,
    get_load_ckpt,
    recv_rank_repair,
    repair_callback,
    send_rank_repair,
    set_log_args,
)
from adaptor.repair import set_losses as tft_set_losses_reduced

__all__ = [
    "LogArgs",
    "get_load_ckpt",
    "recv_rank_repair",
    "repair_callback",
    "send_rank_repair",
    "set_log_args",
    "tft_set_losses_reduced",
]
