# SPDX-License-Identifier: Apache-2.0
"""Stand-in for MindSpeed: its features, its patch manager and its adaptor, as a plugin sees them."""
