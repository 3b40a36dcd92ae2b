# SPDX-License-Identifier: Apache-2.0
"""To import it is to parse the command line and to patch Megatron."""

from mindspeed.args_utils import get_mindspeed_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager


def patch_features():
    args = get_mindspeed_args()
    MindSpeedFeaturesManager.apply_features_pre_patches(args)
    MindSpeedFeaturesManager.apply_features_patches(args)


def repatch(changes):
    MindSpeedFeaturesManager.remove_patches()
    vars(get_mindspeed_args()).update(changes)
    patch_features()


patch_features()
