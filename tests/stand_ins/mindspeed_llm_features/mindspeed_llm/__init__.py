# SPDX-License-Identifier: Apache-2.0
"""Stand-in for MindSpeed-LLM: its own list of features, its own training loop, and its adaptor."""

from mindspeed_llm.tasks import megatron_adaptor_v2 as megatron_adaptor

__all__ = ["megatron_adaptor"]
