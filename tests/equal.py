# SPDX-License-Identifier: Apache-2.0
"""When a run of the stock loop equals another: every point of TensorBoard, and the final state of every rank."""

from __future__ import annotations

import re

from clusters import Run

from mindspeed_recovery.testing.compare import compare_scalars, compare_states

ON = "--enable-recovery-safe-globals"


def faults(*specs: str) -> list[str]:
    """The options that inject these faults."""
    return [option for spec in specs for option in ("--fault", spec)]


def console(run: Run) -> list[str]:
    """The log lines of a run, without times."""
    lines = []
    for line in run.log(len(run.codes) - 1).splitlines():
        match = re.search(r"(iteration +\d+/.*consumed samples: +\d+ \|).*?per iteration \(ms\): [\d.]+ \|(.*)", line)
        if match:
            lines.append(match[1] + match[2])
        elif "validation loss at" in line:
            lines.append(line.strip())
    return lines


def differences(run: Run, baseline: Run) -> list[str]:
    """What is not equal; each point counts once."""
    scalars = compare_scalars(baseline.folder / "tb", run.folder / "tb")
    assert scalars.compared > 100
    found = list(scalars.differences)
    for rank in range(len(run.codes)):
        states = compare_states(f"{baseline.folder}/final.rank{rank}", f"{run.folder}/final.rank{rank}")
        found += [f"rank {rank}: {difference}" for difference in states.differences]
    return found


def assert_equal(run: Run, baseline: Run) -> None:
    assert run.ended_well, run.tail()
    found = differences(run, baseline)
    assert not found, found[:10]
