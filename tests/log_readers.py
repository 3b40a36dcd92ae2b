# SPDX-License-Identifier: Apache-2.0
"""The ways in which people read TensorBoard's files, each as ``{run: {tag: [(step, bits of the float32), …]}}``.

Every point a reader shows is there, as often as it shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Curves = dict[str, dict[str, list[tuple[int, int]]]]
ALL = 100_000


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def default_loader(folder: Path) -> Curves:
    """As ``tensorboard`` loads them: by its data server."""
    from tensorboard.data import server_ingester
    from tensorboard.util import grpc_util

    ingester = server_ingester.SubprocessServerDataIngester(
        server_binary=server_ingester.get_server_binary(),
        logdir=str(folder),
        reload_interval=0,
        channel_creds_type=grpc_util.ChannelCredsType.LOCAL,
        samples_per_plugin={"scalars": ALL},
    )
    ingester.start()
    try:
        found, before = _scalars(ingester), None
        while not found or found != before:  # it answers while it is still loading
            time.sleep(0.1)
            found, before = _scalars(ingester), found
    finally:
        ingester._stdin_handle.close()  # which ends it
    return found


def _scalars(ingester: Any) -> Curves:
    from tensorboard import context

    found = ingester.data_provider.read_scalars(
        context.RequestContext(), experiment_id="", plugin_name="scalars", downsample=ALL
    )
    return {
        run: {tag: [(point.step, _bits(point.value)) for point in points] for tag, points in tags.items()}
        for run, tags in found.items()
    }


def without_load_fast(folder: Path) -> Curves:
    """As ``tensorboard --load_fast false`` loads them."""
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 0})
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    found: Curves = {}
    for run in multiplexer.Runs():
        for tag in multiplexer.PluginRunToTagToContent("scalars").get(run, {}):
            points = multiplexer.Tensors(run, tag)
            found.setdefault(run, {})[tag] = [(p.step, _bits(_number(p.tensor_proto))) for p in points]
    return found


def event_accumulator(folder: Path) -> Curves:
    """As most scripts do."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Curves = {}
    for path in sorted({file.parent for file in folder.rglob("*tfevents*")}):
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
        accumulator.Reload()
        found[str(path.relative_to(folder))] = {
            tag: [(point.step, _bits(point.value)) for point in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]
        }
    return found


def _number(proto: Any) -> float:
    from tensorboard.util.tensor_util import make_ndarray

    return float(make_ndarray(proto).item())


READERS: list[Callable[[Path], Curves]] = [default_loader, without_load_fast, event_accumulator]
