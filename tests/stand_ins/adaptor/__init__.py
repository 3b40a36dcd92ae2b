# SPDX-License-Identifier: Apache-2.0
"""What every adaptor between MindIO TFT and a training framework does, written from its observed behaviour.

The two layouts in the field (``mindspeed_llm.core.high_availability``, ``mindio_ttp.adaptor.modellink_adaptor``) are shells
over it. What differs between frameworks is in a module of this package: `adaptor.toy`, `adaptor.stock`.
"""

import importlib

LAYOUTS = {
    "llm": "mindspeed_llm.core.high_availability.tft_train_initialize",
    "older": "mindio_ttp.adaptor.modellink_adaptor",
}

framework = None


def register(name, layout):
    """Load the adaptor of a layout for the framework ``name`` and let it register its callbacks with TFT, whose processor
    is there. Returns its module."""
    global framework
    framework = importlib.import_module(f"{__name__}.{name}")
    adaptor = importlib.import_module(LAYOUTS[layout])
    adaptor.tft_register_processor()
    return adaptor
