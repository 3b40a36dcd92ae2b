# SPDX-License-Identifier: Apache-2.0
"""Its adaptor parses the command line anew whenever it applies patches, and removes the old ones first."""

import argparse

from mindspeed.args_utils import take_unknown
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

import mindspeed_llm.features_manager  # noqa: F401  (for its list)


def repatch(changes):
    MindSpeedFeaturesManager.remove_patches()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    MindSpeedFeaturesManager.register_features_args(parser)
    args = take_unknown(*parser.parse_known_args())
    vars(args).update(changes)
    MindSpeedFeaturesManager.apply_features_pre_patches(args)
    MindSpeedFeaturesManager.apply_features_patches(args)


repatch({})
