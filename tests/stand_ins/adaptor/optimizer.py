# SPDX-License-Identifier: Apache-2.0
"""The optimizers that tell TFT about their update; binds TFT's functions by name."""

from mindio_ttp.framework_ttp import tft_end_updating_os, tft_start_updating_os

from . import framework


class ReplicaOptimizer(framework.Optimizer):
    def begin_to_update(self):
        tft_start_updating_os()

    def end_to_update(self, step):
        tft_end_updating_os(step)
