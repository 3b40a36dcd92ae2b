# SPDX-License-Identifier: Apache-2.0
"""The optimizer that tells TFT about its update; binds TFT's functions by name."""

from mindio_ttp.framework_ttp import tft_end_updating_os, tft_start_updating_os
from toy.training import Optimizer


class TTPReplicaOptimizer(Optimizer):
    def begin_to_update(self, step):
        tft_start_updating_os()

    def end_to_update(self, step):
        tft_end_updating_os(step)
