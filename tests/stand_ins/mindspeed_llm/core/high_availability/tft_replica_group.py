# SPDX-License-Identifier: Apache-2.0
from adaptor.repair import build_repair_group, destroy_repair_group, get_repair_group

__all__ = ["build_repair_group", "destroy_repair_group", "get_repair_group"]
