# SPDX-License-Identifier: Apache-2.0
"""The group of the ranks in a repair; here the world does."""

import torch.distributed as dist

REPAIR_GROUP = None


def build_repair_group(rank_list):
    global REPAIR_GROUP
    REPAIR_GROUP = dist.group.WORLD


def get_repair_group(use_gloo=False):
    return REPAIR_GROUP


def destroy_repair_group():
    global REPAIR_GROUP
    REPAIR_GROUP = None
