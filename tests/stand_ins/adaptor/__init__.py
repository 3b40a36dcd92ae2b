# SPDX-License-Identifier: Apache-2.0
"""What every adaptor between MindIO TFT and a training framework does, written from its observed behaviour.

The two layouts in the field (``mindspeed_llm.core.high_availability``, ``mindio_ttp.adaptor.modellink_adaptor``) are shells
over it. What differs between frameworks is in the module that `use` names: `adaptor.toy`, `adaptor.stock`.
"""

import importlib

framework = None


def use(name):
    """Before a layout is imported: the module of this package that knows the framework."""
    global framework
    framework = importlib.import_module(f"{__name__}.{name}")
    return framework
