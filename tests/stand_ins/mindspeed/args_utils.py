# SPDX-License-Identifier: Apache-2.0
"""The command line, parsed once; what no feature knows is taken as it comes."""

import argparse

from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

_parsed = None


def take_unknown(args, unknown):
    key = None
    for word in unknown:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            key = key.replace("-", "_")
            setattr(args, key, value or True)
        elif key is not None:
            before = getattr(args, key)
            setattr(args, key, word if before is True else [*(before if isinstance(before, list) else [before]), word])
    return args


def get_mindspeed_args():
    global _parsed
    if _parsed is None:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        MindSpeedFeaturesManager.register_features_args(parser)
        _parsed = take_unknown(*parser.parse_known_args())
    return _parsed
