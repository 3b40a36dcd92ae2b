# SPDX-License-Identifier: Apache-2.0
"""Stand-in for Megatron: a parser that refuses unknown flags, a loop, and a metric."""
