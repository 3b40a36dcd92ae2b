# SPDX-License-Identifier: Apache-2.0
"""MindIO TFT's stand-in under a rank that runs the stock loop: a simulated NPU, an adaptor, and TFT's threads.

Nothing of the plugin is called here: it finds TFT by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def use(example: Any, rank: int, world_size: int, stores: Callable[[], Any], *, layout: str, first: str) -> None:
    """Before ``example.main()``. ``first``: "adaptor", which then registers before the plugin's flag is parsed, or
    "plugin"; ``layout``: see `adaptor`; ``stores()``: a fresh client of the job's store."""
    import cpu_device

    from mindspeed_recovery.frameworks import megatron_cpu
    from mindspeed_recovery.testing.simulator import UnsafeMemory

    memory = UnsafeMemory(1234)
    cpu_device.UnsafeMemory = lambda seed: memory
    sys.path.append(str(Path(__file__).resolve().parent / "stand_ins"))
    importlib.import_module("torch_npu.npu._recovery").simulate(memory)

    @contextlib.contextmanager
    def on_device() -> Iterator[None]:
        with megatron_cpu.cpu_mode(), memory.active():
            yield

    def register() -> None:
        import adaptor
        from megatron.training import training
        from mindio_ttp.framework_ttp import ttp_decorator as tft

        tft.thread_context = on_device
        checkpoint = None
        if "--load" in sys.argv:
            checkpoint = Path(sys.argv[sys.argv.index("--load") + 1]) / "latest_checkpointed_iteration.txt"
        tft.tft_init_processor(rank, world_size, stores, checkpoint=checkpoint)
        training.train = adaptor.register("stock", layout).train_wrapper(training.train)

    if first == "adaptor":
        register()
        return
    pretrain = example.pretrain

    def register_and_pretrain(*args: Any, **kwargs: Any) -> Any:
        register()
        return pretrain(*args, **kwargs)

    example.pretrain = register_and_pretrain
