# SPDX-License-Identifier: Apache-2.0
"""Where the framework keeps its tracker."""

_MOE_LAYER_WISE_LOGGING_TRACKER = {}
