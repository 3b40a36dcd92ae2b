# SPDX-License-Identifier: Apache-2.0
"""Who drives a recovery: the standalone runtime or MindIO TFT, and the communication they restart."""
