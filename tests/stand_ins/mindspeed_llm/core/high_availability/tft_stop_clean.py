# SPDX-License-Identifier: Apache-2.0
from adaptor.callbacks import clean_callback, save_callback, stop_callback

__all__ = ["clean_callback", "save_callback", "stop_callback"]
