# SPDX-License-Identifier: Apache-2.0
"""Tools around a recovery."""
