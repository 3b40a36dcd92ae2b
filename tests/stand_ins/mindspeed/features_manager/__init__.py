# SPDX-License-Identifier: Apache-2.0
"""MindSpeed's own features. The order of imports is the real one: the manager is complete before its list is set."""

from mindspeed.features_manager.basic import MegatronBasicFeature, NoopLayersFeature, RequirementsBasicFeature
from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

__all__ = ["MegatronBasicFeature", "MindSpeedFeature", "NoopLayersFeature", "RequirementsBasicFeature"]

MindSpeedFeaturesManager.set_features_list([RequirementsBasicFeature(), MegatronBasicFeature(), NoopLayersFeature()])
