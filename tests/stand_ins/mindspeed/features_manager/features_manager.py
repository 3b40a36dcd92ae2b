# SPDX-License-Identifier: Apache-2.0
"""The list of features, and the loops over it."""

from typing import ClassVar

from mindspeed.features_manager import MindSpeedFeature  # noqa: F401  (made before this module is imported)
from mindspeed.patch_utils import MindSpeedPatchesManager


class MindSpeedFeaturesManager:
    FEATURES_LIST: ClassVar[list] = []

    @classmethod
    def set_features_list(cls, features_list):
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def _apply(cls, phase, args):
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                getattr(feature, phase)(MindSpeedPatchesManager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_pre_patches(cls, mindspeed_args):
        cls._apply("pre_register_patches", mindspeed_args)

    @classmethod
    def apply_features_patches(cls, mindspeed_args):
        cls._apply("register_patches", mindspeed_args)

    @classmethod
    def register_features_args(cls, parser):
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def pre_validate_features_args(cls, args):
        for feature in cls.FEATURES_LIST:
            feature.pre_validate_args(args)

    @classmethod
    def post_validate_features_args(cls, args):
        for feature in cls.FEATURES_LIST:
            feature.post_validate_args(args)

    @classmethod
    def validate_features_args(cls, args):
        for feature in cls.FEATURES_LIST:
            feature.validate_args(args)

    @classmethod
    def remove_patches(cls):
        MindSpeedPatchesManager.remove_patches()
