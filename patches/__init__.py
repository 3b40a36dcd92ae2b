# SPDX-License-Identifier: Apache-2.0
"""The catalogue: one TOML file for each upstream package. Installed as `mindspeed_recovery.patches`."""
