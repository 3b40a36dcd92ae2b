# SPDX-License-Identifier: Apache-2.0
"""Sinks of the training log, and the rule by which a recovered run logs each point once."""
