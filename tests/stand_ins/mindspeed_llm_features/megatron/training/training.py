# SPDX-License-Identifier: Apache-2.0
from megatron.core.transformer.moe.moe_utils import track_moe_metrics


def pretrain():
    return train()


def train():
    return ["train", *train_step(), training_log()]


def train_step():
    return ["step"]


def training_log():
    return track_moe_metrics()
