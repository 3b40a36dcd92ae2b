# SPDX-License-Identifier: Apache-2.0
"""A process that was started again: where it waits for the others, and the links that all ranks build anew."""

from adaptor import framework
from mindio_ttp.framework_ttp import ttp_decorator

ARF_REBOOT_FLAG = False


def tft_is_arf_reboot_node():
    return ARF_REBOOT_FLAG


def update_arf_reboot_flag(new_state):
    global ARF_REBOOT_FLAG
    ARF_REBOOT_FLAG = new_state


def arf_rebuild_process_group_callback(fault_ranks, train_args, ctx):
    update_arf_reboot_flag(False)
    framework.rebuild_links(ttp_decorator.repair_id_)
