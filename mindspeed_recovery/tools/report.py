# SPDX-License-Identifier: Apache-2.0
"""What the recoveries of a run were, read from its TensorBoard files. Needs no torch, but ``tensorboard``.

The recoveries are those that `logs.tensorboard.HeldEvents` has written. A file whose end is torn (its process was killed) is
read up to there, which is a finding and no error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mindspeed_recovery.core.report import TAGS
from mindspeed_recovery.errors import RecoveryError
from mindspeed_recovery.logs import event_files
from mindspeed_recovery.logs.tensorboard import from_markdown

PANELS = 6
_NO_CURVE = ("vs samples", "validation", "test", "scale", "ppl")


@dataclass
class Run:
    """One folder of event files. ``curves``: tag → step → value, the first of a point that was written twice."""

    folder: Path
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


def read(logdir: Path | str, *, curves: bool = False) -> list[Run]:
    """Every run at or below ``logdir``, with its recoveries in the order of time and, if wanted, its loss curves.

    `Report.as_dict` says what is known of a recovery; ``time`` is added, in seconds since the epoch. Raises RecoveryError if
    there is no event file or TensorBoard is not installed.
    """
    folders = sorted({path.parent for path in Path(logdir).rglob("*tfevents*") if path.is_file()})
    if not folders:
        raise RecoveryError(f"{logdir}: no TensorBoard event file is at or below this folder")
    runs = [Run(folder) for folder in folders]
    for run in runs:
        for path in event_files.files(run.folder):
            _read_file(path, run, curves)
        run.recoveries.sort(key=lambda recovery: recovery["time"])
    return runs


def _read_file(path: Path, run: Run, curves: bool) -> None:
    for time, step, tag, value in _values(path, run, [TAGS.encode(), *([b"loss"] if curves else [])]):
        if isinstance(value, str):
            recovery = from_markdown(value) if tag.startswith(TAGS) else None
            if recovery is not None:
                run.recoveries.append({**recovery, "time": time})
        elif "loss" in tag and not tag.startswith(TAGS) and not any(word in tag for word in _NO_CURVE):
            run.curves.setdefault(tag, {}).setdefault(step, value)
    torn = event_files.torn_bytes(path)
    if torn:
        run.findings.append(
            f"{path}: the last {torn} bytes are of a record that is not whole, as after the death of its process; all before "
            "it is read"
        )


def _values(path: Path, run: Run, words: Sequence[bytes]) -> Iterator[tuple[float, int, str, float | str]]:
    """Time, step, tag and value of the scalars and texts in whose record one of the words occurs: files are large, and most
    of what is in them is not wanted."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.data_compat import migrate_event
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise RecoveryError(
            f"the report reads event files with TensorBoard: pip install tensorboard ({error})"
        ) from None
    for end, record in event_files.records(path):
        if not any(word in record for word in words):
            continue
        try:
            event = migrate_event(Event.FromString(record))
        except DecodeError as error:
            run.findings.append(f"{path}: the record that ends at byte {end} is damaged and left out: {error}")
            continue
        for value in event.summary.value:
            if value.HasField("tensor"):
                array = make_ndarray(value.tensor)
                if array.size == 1:
                    item = array.reshape(-1)[0]
                    text = item.decode(errors="replace") if isinstance(item, bytes) else float(item)
                    yield event.wall_time, event.step, value.tag, text


# ---- showing -------------------------------------------------------------------------------------------------------------

_COLUMNS = ("run", "time", "cause", "ranks", "step", "states", "ms", "retries", "exact")


def table(runs: Sequence[Run], logdir: Path | str) -> str:
    """The recoveries of all runs as lines of text, one for each; one sentence if there are none."""
    rows = [_COLUMNS]
    for run in runs:
        for recovery in run.recoveries:
            rows.append(
                (
                    _name(run, logdir),
                    datetime.fromtimestamp(recovery["time"]).strftime("%Y-%m-%d %H:%M:%S"),
                    recovery.get("cause") or "not known",
                    ",".join(map(str, recovery.get("ranks", []))) or "-",
                    str(recovery["step"]),
                    ", ".join(f"{count} {action}" for action, count in recovery.get("states", {}).items()) or "-",
                    f"{recovery.get('milliseconds', 0.0):.1f}",
                    str(recovery.get("retries", 0)),
                    "yes" if recovery.get("exact") else "NO",
                )
            )
    if len(rows) == 1:
        return "no recovery is in these logs"
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for run in runs:
        for recovery in run.recoveries:
            lines += [f"step {recovery['step']} is not exact: {failure}" for failure in recovery.get("failures", [])]
    return "\n".join(lines)


def _name(run: Run, logdir: Path | str) -> str:
    return str(run.folder.relative_to(logdir))


def draw(runs: Sequence[Run], logdir: Path | str, file: Path | str) -> None:
    """Draw the loss curves of the runs, with their recoveries marked. Raises RecoveryError without matplotlib or a curve."""
    try:
        import matplotlib
    except ImportError as error:
        raise RecoveryError(f"--png draws with matplotlib: pip install matplotlib ({error})") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    # The loss of the model first, those of single layers last; one value is no curve.
    tags = {tag for run in runs for tag, points in run.curves.items() if len(points) > 1}
    panels = sorted(tags, key=lambda tag: (tag != "lm loss", "layer" in tag, tag))[:PANELS]
    if not panels:
        raise RecoveryError(f"{logdir}: no curve has 'loss' in its name, there is nothing to draw")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.4 * rows), squeeze=False)
    figure.set_layout_engine("constrained")
    for axes, tag in zip(grid.flat, panels):
        for run in runs:
            points = sorted(run.curves.get(tag, {}).items())
            if points:
                (line,) = axes.plot(*zip(*points), linewidth=1.4, label=_name(run, logdir))
                for recovery in run.recoveries:
                    style = "--" if recovery.get("exact") else ":"
                    axes.axvline(recovery["step"], color=line.get_color(), linewidth=1.0, linestyle=style, zorder=0)
        axes.set_title(tag, fontsize=10, loc="left")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    count = sum(len(run.recoveries) for run in runs)
    figure.suptitle(
        f"{count} {'recovery' if count == 1 else 'recoveries'} (dashed: exact, dotted: not exact)", fontsize=11
    )
    if len(runs) > 1:
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


# ---- command -------------------------------------------------------------------------------------------------------------


def add_command(commands: Any) -> None:
    """Add ``report`` to the subparsers of the command line."""
    parser = commands.add_parser("report", help="what the recoveries of a run were", description=command.__doc__)
    parser.add_argument("logdir", metavar="LOGDIR", help="folder of the TensorBoard files; runs below it are read too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--png", metavar="FILE", help="draw the loss curves with the recoveries marked")
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    """Print the recoveries that are told of in the TensorBoard files of a run."""
    runs = read(args.logdir, curves=args.png is not None)
    findings = [finding for run in runs for finding in run.findings]
    if args.json:
        recoveries = [{"run": _name(run, args.logdir), **recovery} for run in runs for recovery in run.recoveries]
        print(json.dumps({"recoveries": recoveries, "findings": findings}, indent=2))
    else:
        print(table(runs, args.logdir))
        for finding in findings:
            print(f"finding: {finding}", file=sys.stderr)
    if args.png is not None:
        draw(runs, args.logdir, args.png)
    return 0
