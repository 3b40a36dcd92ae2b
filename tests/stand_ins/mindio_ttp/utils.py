# SPDX-License-Identifier: Apache-2.0
"""The times of the update window, which a device would take."""


def tft_set_update_start_time(start_time=None):
    pass


def tft_set_update_end_time(end_time=None):
    pass
