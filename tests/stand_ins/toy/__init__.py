# SPDX-License-Identifier: Apache-2.0
"""A toy training framework: global arguments, a tracker in a module global, a loop; see `training`."""

from __future__ import annotations

from types import SimpleNamespace

ARGS = SimpleNamespace(iteration=0, curr_iteration=0, enable_elastic_training=False, num_experts=2)


def get_args():
    return ARGS
