# SPDX-License-Identifier: Apache-2.0
"""Importing this replaces the contents of MindSpeed's list."""

from mindspeed.features_manager import MegatronBasicFeature, NoopLayersFeature, RequirementsBasicFeature
from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager


class TrainingBasicFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("training-basic", optimization_level=0)

    def register_patches(self, patch_manager, args):
        from mindspeed_llm.training.training import train

        patch_manager.register_patch("megatron.training.training.train", train)


MindSpeedFeaturesManager.set_features_list(
    [RequirementsBasicFeature(), MegatronBasicFeature(), TrainingBasicFeature(), NoopLayersFeature()]
)
