# SPDX-License-Identifier: Apache-2.0
"""What every feature is: arguments, their validation, and two phases of patches."""

import mindspeed.patch_utils  # noqa: F401  (the real one needs its type)


class MindSpeedFeature:
    def __init__(self, feature_name, optimization_level=2):
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args):
        switched_on = self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, None)
        return switched_on or self.default_patches

    def register_args(self, parser):
        pass

    def pre_validate_args(self, args):
        pass

    def post_validate_args(self, args):
        pass

    def validate_args(self, args):
        pass

    def pre_register_patches(self, patch_manager, args):
        pass

    def register_patches(self, patch_manager, args):
        pass
