# SPDX-License-Identifier: Apache-2.0
"""Run the example's ranks from a preloaded parent, one parent for each version of megatron-core."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = {
    "dp2": [],
    "ep2": ["--expert-model-parallel-size", "2", "--use-distributed-optimizer"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "pp2ep2": ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"],
    "ep2dp2": ["--expert-model-parallel-size", "2"],
}
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
STOCK_LAYOUTS = {
    "overlap": OVERLAP,
    "ep2": ["--expert-model-parallel-size", "2", *OVERLAP],
    "dp2": [],
    "bf16": ["--bf16"],
    "pp2": ["--pipeline-model-parallel-size", "2", "--micro-batch-size", "4"],
    "pp2dp2": ["--pipeline-model-parallel-size", "2"],
    "ep2dp2": ["--expert-model-parallel-size", "2", "--micro-batch-size", "1"],
    "pp2ep2": ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"],
}
WORLD_SIZES = {"pp2dp2": 4, "ep2dp2": 4, "pp2ep2": 4}


def ask_versions(
    script: str, questions: Mapping[str, Sequence[str]], megatron: Callable[[str], Path]
) -> dict[str, list[dict[str, Any]]]:
    """What a script answers to one line of input each, by version of Megatron; all versions at once, each in a process of its
    own that is given the version and prints one line of JSON for each question."""

    def ask(version: str) -> list[dict[str, Any]]:
        process = subprocess.run(
            [sys.executable, script, version],
            input="\n".join(questions[version]) + "\n",
            env={**os.environ, "PYTHONPATH": str(megatron(version)), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        return [json.loads(line) for line in process.stdout.splitlines()]

    with ThreadPoolExecutor(len(questions)) as pool:
        return dict(zip(questions, pool.map(ask, questions)))


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


class RankServer:
    """A parent process that has imported what the ranks need, and forks them for one job after another."""

    def __init__(self, script: str, folder: Path, megatron: Path | None = None) -> None:
        """``script``: a file of this folder that serves by `rank_server.serve`; ``folder``: for what the jobs leave."""
        self._folder, self._jobs = folder, 0
        paths = [str(path) for path in (megatron, ROOT) if path is not None]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        self._log = (folder / "server.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def new_folder(self) -> Path:
        """For the next job."""
        self._jobs += 1
        folder = self._folder / f"{self._jobs:03}"
        folder.mkdir()
        return folder

    def run_job(self, folder: Path, *, world_size: int = 2, timeout: float = 100, **job: Any) -> Run:
        """Run one job to its end. ``job``: see the server."""
        job |= {"out": str(folder), "world_size": world_size, "timeout": timeout}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Run(folder, json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        while line.strip() == "ready":
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the rank server ended:\n" + (self._folder / "server.log").read_text()[-4000:])
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


class _Megatron(RankServer):
    """Ranks of an example with Megatron."""

    script: str
    base: Sequence[str] = ()
    protected: Sequence[str] = ()
    """Options of a run with the plugin, before those of the test."""
    layouts: Mapping[str, Sequence[str]]

    def __init__(self, megatron: Path, folder: Path) -> None:
        super().__init__(self.script, folder, megatron)
        self._baselines: dict[tuple[str, ...], Run] = {}

    def run(
        self,
        layout: str,
        *options: str,
        prepare: str = "",
        tft: dict[str, str] | None = None,
        timeout: float = 100,
        **settings: Any,
    ) -> Run:
        """Run the example on the ranks of a layout. ``prepare``: see `rank_server`; ``settings`` are its options;
        ``tft``: see `stock_server`."""
        folder = self.new_folder()
        files = ("--tensorboard-dir", f"{folder}/tb", "--save-final", f"{folder}/final")
        protected = self.protected if "--enable-recovery-safe-globals" in options else ()
        return self.run_job(
            folder,
            argv=[*self.base, *protected, *self.layouts[layout], *files, *options],
            world_size=WORLD_SIZES.get(layout, 2),
            timeout=timeout,
            prepare=prepare,
            options=settings,
            tft=tft,
        )

    def baseline(self, layout: str, *options: str) -> Run:
        """The run without a fault and without the plugin."""
        key = (layout, *options)
        if key not in self._baselines:
            run = self.run(layout, *options)
            assert run.ended_well, run.tail()
            self._baselines[key] = run
        return self._baselines[key]


class Cluster(_Megatron):
    """Ranks of ``examples/pretrain_moe.py``."""

    script = "rank_server.py"
    base = ("--train-iters", "6", "--eval-interval", "3")
    layouts = LAYOUTS


class StockCluster(_Megatron):
    """Ranks of ``examples/pretrain_gpt.py``, in the stock loop."""

    script = "stock_server.py"
    protected = ("--recovery-audit", "off")  # a second of each run, but where it is what the test is about
    layouts = STOCK_LAYOUTS
