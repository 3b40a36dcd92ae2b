# SPDX-License-Identifier: Apache-2.0
"""Run the example's ranks from a preloaded parent, one parent for each version of megatron-core."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = {
    "dp2": [],
    "ep2": ["--expert-model-parallel-size", "2", "--use-distributed-optimizer"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
}
BASE = ["--train-iters", "6", "--eval-interval", "3"]


@dataclasses.dataclass(frozen=True)
class Run:
    """What one job left behind."""

    folder: Path
    codes: list[int]

    @property
    def ended_well(self) -> bool:
        return not any(self.codes)

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")

    def reports(self, rank: int) -> list[dict[str, Any]]:
        """The plugin's recoveries on one rank."""
        return json.loads((self.folder / f"rank{rank}.reports.json").read_text())

    def tail(self) -> str:
        """The end of every rank's output, for a failed assertion."""
        return "\n".join(
            f"--- rank {rank}, exit code {code}\n{self.log(rank)[-3000:]}" for rank, code in enumerate(self.codes)
        )


class Cluster:
    """A parent process that has imported one version of megatron-core and forks the ranks of each job."""

    def __init__(self, megatron: Path, folder: Path) -> None:
        self._folder = folder
        self._jobs = 0
        self._baselines: dict[str, Run] = {}
        environment = os.environ | {
            "PYTHONPATH": f"{megatron}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        self._log = (folder / "server.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "rank_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            if line.strip() != "ready":
                break
        if not line:
            raise RuntimeError("the rank server ended:\n" + (self._folder / "server.log").read_text()[-4000:])
        return line

    def run(self, layout: str, *options: str, prepare: str = "", timeout: float = 60, **settings: Any) -> Run:
        """Run the example on two ranks in a layout. ``prepare``: see `rank_server`; ``settings`` are its options."""
        self._jobs += 1
        folder = self._folder / f"{self._jobs:03}"
        folder.mkdir()
        argv = [
            *BASE,
            *LAYOUTS[layout],
            "--tensorboard-dir",
            f"{folder}/tb",
            "--save-final",
            f"{folder}/final",
            *options,
        ]
        job = {
            "argv": argv,
            "world_size": 2,
            "out": str(folder),
            "timeout": timeout,
            "prepare": prepare,
            "options": settings,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Run(folder, json.loads(self._answer()))

    def baseline(self, layout: str) -> Run:
        """The run without a fault and without the plugin."""
        if layout not in self._baselines:
            run = self.run(layout)
            assert run.ended_well, run.tail()
            self._baselines[layout] = run
        return self._baselines[layout]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()
