# SPDX-License-Identifier: Apache-2.0
"""Three features: arguments of the manager itself, hooks into Megatron's arguments, and a metric replaced."""

import functools

from mindspeed.features_manager.feature import MindSpeedFeature


class RequirementsBasicFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("requirements-basic", optimization_level=0)

    def register_args(self, parser):
        parser.add_argument("--optimization-level", type=int, choices=[0, 1, 2], default=2)


class MegatronBasicFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("megatron-basic", optimization_level=0)

    def register_patches(self, patch_manager, args):
        patch_manager.register_patch("megatron.training.arguments.parse_args", parse_args_wrapper)
        patch_manager.register_patch("megatron.training.arguments.validate_args", validate_args_wrapper)


class NoopLayersFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("noop-layers")

    def register_args(self, parser):
        parser.add_argument_group(title=self.feature_name).add_argument("--noop-layers", type=str)

    def register_patches(self, patch_manager, args):
        patch_manager.register_patch("megatron.core.transformer.moe.moe_utils.track_moe_metrics", track_without_noops)


def track_without_noops():
    return "without no-op layers"


def parse_args_wrapper(parse_args):
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

    @functools.wraps(parse_args)
    def wrapper(extra_args_provider=None, ignore_unknown_args=False):
        def provider(parser):
            parser = parser if extra_args_provider is None else extra_args_provider(parser)
            MindSpeedFeaturesManager.register_features_args(parser)
            return parser

        return parse_args(provider, ignore_unknown_args)

    return wrapper


def validate_args_wrapper(validate_args):
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

    @functools.wraps(validate_args)
    def wrapper(args, defaults=None):
        MindSpeedFeaturesManager.pre_validate_features_args(args)
        args = validate_args(args, defaults or {})
        MindSpeedFeaturesManager.post_validate_features_args(args)
        MindSpeedFeaturesManager.validate_features_args(args)
        return args

    return wrapper
