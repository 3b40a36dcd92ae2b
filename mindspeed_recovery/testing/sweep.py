# SPDX-License-Identifier: Apache-2.0
"""A fault in every live device storage of a job, one run each, compared bit for bit with the run without a fault.

    python -m mindspeed_recovery.testing.sweep examples/pretrain_moe.py --out runs/sweep -- --train-iters 3

The storages are those that the garbage collector finds at each point of a step (`storages`): nothing has to be listed for a
storage to be hit. What must become of each fault is written down beforehand (`outcomes.EXPECTED`).

The job is a script with three functions, as ``examples/pretrain_moe.py`` has them: ``parse_args(argv)``; ``join(store, rank,
world_size)``, which sets up torch.distributed and returns what ``pretrain`` wants as its store; ``pretrain(args, rank,
world_size, store, prepare)``, which builds a `Job`, calls ``prepare(job)`` and runs it. It takes ``--tensorboard-dir DIR``,
``--save-final FILE`` (written to ``FILE.rank<R>``) and ``--enable-recovery-safe-globals``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import random
import shutil
import socket
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from mindspeed_recovery import api, catalogue
from mindspeed_recovery.core.policy import Policy
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.errors import RecoveryError
from mindspeed_recovery.testing import outcomes, ranks
from mindspeed_recovery.testing.compare import compare_scalars, compare_states
from mindspeed_recovery.testing.faults import ALL, POINTS, FaultInjector, FaultSpec
from mindspeed_recovery.testing.outcomes import Result
from mindspeed_recovery.testing.simulator import UnsafeMemory
from mindspeed_recovery.testing.storages import Storage, live_storages, storage_named
from mindspeed_recovery.tools.progress import Progress

_FLAG = "--enable-recovery-safe-globals"


class SweepError(RecoveryError):
    """The sweep cannot be run; the text says why and what to do."""


class Job(Protocol):
    """One rank's job, before it runs. ``injector`` is asked at every point; ``roots``: model and optimizer by name."""

    injector: FaultInjector
    memory: UnsafeMemory
    roots: Mapping[str, Any]


class Case(NamedTuple):
    """A fault in one storage; ``storage`` is its name at that point, or ``all``."""

    rank: int
    step: int
    point: str
    storage: str
    kind: str

    def __str__(self) -> str:
        return f"rank={self.rank} step={self.step} at={self.point} {self.storage}"


class Sweep:
    """Runs one job again and again, as forks of this process. ``folder``: for what the runs leave; those that ended as was
    expected leave nothing."""

    def __init__(
        self,
        script: Path,
        argv: Sequence[str],
        size: int,
        folder: Path,
        *,
        protected: bool = True,
        timeout: float = 60.0,
    ) -> None:
        """``timeout``: seconds after which a run counts as hung. Raises SweepError for a script that is not a job."""
        self._size, self._folder, self._timeout = size, folder, timeout
        self._argv = [*argv, *([_FLAG] if protected else [])]
        self._module = _load(script)
        self._baseline: Path | None = None

    def survey(self, steps: Sequence[int], points: Sequence[str]) -> list[Case]:
        """Every storage of every rank at the points of these steps, each alone and all together, from one run without a
        fault, which is also what the others are compared with. Raises SweepError where the run fails."""
        folder = self._new_folder("baseline")
        codes = self._run(folder, lambda job, rank: _Survey(job, rank, steps, points))
        if any(codes):
            raise SweepError(f"the run without a fault failed (exit codes {codes}): see {folder}/rank*.log")
        self._baseline = folder
        cases = []
        for rank in range(self._size):
            for step, point, found in _left(folder, rank)["storages"]:
                cases.append(Case(rank, step, point, ALL, ALL))
                cases += [Case(rank, step, point, name, kind) for name, kind in found]
        if not cases:
            raise SweepError(
                f"the job passed none of the points {', '.join(points)} in steps {', '.join(map(str, steps))}"
            )
        return cases

    def run(self, case: Case) -> Result:
        """One run with a fault."""
        began = time.monotonic()
        folder = self._new_folder("case")
        codes = self._run(folder, lambda job, rank: _strike(job, rank, case))
        outcome, message = self._judge(folder, codes, case)
        expectation = outcomes.expected(case.kind, case.point, case.step)
        as_expected = expectation.met(outcome, message)
        if as_expected:
            shutil.rmtree(folder)
        else:
            message += f" (see {folder})"
        seconds = round(time.monotonic() - began, 2)
        return Result(str(case), case.kind, case.point, outcome, expectation.outcome, as_expected, message, seconds)

    def _new_folder(self, name: str) -> Path:
        number = 0
        while (folder := self._folder / f"{name}{number:05}").exists():
            number += 1
        folder.mkdir(parents=True)
        return folder

    def _run(self, folder: Path, injector: Any) -> list[int]:
        argv = [*self._argv, "--tensorboard-dir", f"{folder}/tb", "--save-final", f"{folder}/final"]

        def body(rank: int, listener: socket.socket) -> int:
            left: dict[str, Any] = {}
            jobs: list[Job] = []

            def prepare(job: Job) -> None:
                job.injector = injector(job, rank)
                jobs.append(job)

            store = ranks.join(listener, self._size, serves=rank == 0)
            torch.manual_seed(0)
            try:
                args = self._module.parse_args(argv)
                self._module.pretrain(args, rank, self._size, self._module.join(store, rank, self._size), prepare)
            except Exception as error:
                left["error"] = f"{type(error).__name__}: {error}"
                raise
            finally:
                reports = api._active.reports if api._active is not None else []
                left["failures"] = [line for report in reports for line in report.failures]
                left |= (
                    {"struck": jobs[0].injector.struck, "storages": getattr(jobs[0].injector, "found", [])}
                    if jobs
                    else {}
                )
                (folder / f"rank{rank}.json").write_text(json.dumps(left))
                ranks.leave(store, self._size, serves=rank == 0, failed="error" in left)
            return 0

        return ranks.run(self._size, body, folder, self._timeout)

    def _judge(self, folder: Path, codes: list[int], case: Case) -> tuple[str, str]:
        left = [_left(folder, rank) for rank in range(self._size)]
        if ranks.HUNG in codes:
            return outcomes.HANG, f"exit codes {codes}"
        if any(codes):
            errors = [f"rank {rank}: {rest.get('error', codes[rank])}" for rank, rest in enumerate(left)]
            return (outcomes.ERROR if all(codes) else outcomes.HANG), "; ".join(errors)
        if not left[case.rank]["struck"]:
            return outcomes.MISSED, "no such storage was there"
        assert self._baseline is not None
        differences = compare_scalars(self._baseline / "tb", folder / "tb").differences
        for rank in range(self._size):
            differences += compare_states(
                f"{self._baseline}/final.rank{rank}", f"{folder}/final.rank{rank}"
            ).differences
        if not differences:
            return outcomes.RECOVERED, ""
        told = any(rest["failures"] for rest in left)
        return (outcomes.TOLD if told else outcomes.SILENT), "; ".join(differences[:3])


def _left(folder: Path, rank: int) -> dict[str, Any]:
    file = folder / f"rank{rank}.json"
    return json.loads(file.read_text()) if file.exists() else {}


class _Survey(FaultInjector):
    """Notes the storages where a point is first passed in each step, and fires nothing."""

    def __init__(self, job: Job, rank: int, steps: Sequence[int], points: Sequence[str]) -> None:
        super().__init__([], rank, job.memory, lambda names: [])
        self.found: list[tuple[int, str, list[tuple[str, str]]]] = []
        self._job, self._due = job, {(step, point) for step in steps for point in points}

    def at(self, point: str, step: int) -> None:
        super().at(point, step)
        if (step, point) in self._due:
            self._due.remove((step, point))
            self.found.append((step, point, [(found.name, found.kind) for found in _storages(self._job)]))


def _strike(job: Job, rank: int, case: Case) -> FaultInjector:
    states = (ALL,) if case.storage == ALL else ("storage",)
    fault = FaultSpec("uce", case.rank, case.step, case.point, states)

    def resolve(_: Sequence[str]) -> Iterable[torch.Tensor]:
        tensor = storage_named(job.memory, job.roots, case.storage)
        return [] if tensor is None else [tensor]

    return FaultInjector([fault], rank, job.memory, resolve)


def _storages(job: Job) -> list[Storage]:
    specs = [spec for spec in catalogue.installed_states(catalogue.shipped()) if spec.policy is not Policy.IGNORED]
    registry = Registry(specs)  # only names for the table
    registry.find_owners(job.roots)
    states = {state.name: [tensor for _, tensor in state.tensors()] for state in registry}
    return live_storages(job.memory, job.roots, states)


def _load(script: Path) -> ModuleType:
    """Import the script and what it needs, once for all runs."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None or not script.exists():
        raise SweepError(f"{script} is not a Python script: give the job, for example examples/pretrain_moe.py")
    module = sys.modules[script.stem] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(script.parent))
    spec.loader.exec_module(module)
    missing = [name for name in ("parse_args", "join", "pretrain") if not hasattr(module, name)]
    if missing:
        raise SweepError(f"{script} has no {', '.join(missing)}: see the documentation of {__name__}")
    import torch.utils.tensorboard  # noqa: F401

    return module


# ---- which cases, and what is known of them -----------------------------------------------------------------------------


def sample(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """``count`` of the cases: kinds of storage and points take turns, so that those with few storages are in it too."""
    chance = random.Random(seed)
    strata: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        strata[case.kind, case.point].append(case)
    piles = [strata[key] for key in sorted(strata)]
    for pile in piles:
        chance.shuffle(pile)
    chance.shuffle(piles)
    chosen: list[Case] = []
    while piles and len(chosen) < count:
        for pile in piles:
            chosen.append(pile.pop())
        piles = [pile for pile in piles if pile]
    return chosen[:count]


class Record:
    """What is known of the cases, a line each, so that a sweep that was interrupted goes on where it was."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        """Raises SweepError where the file is of another sweep."""
        self._file, self.results = file, list[Result]()
        line = json.dumps(about, sort_keys=True)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(line + "\n")
            return
        first, *rest = file.read_text().splitlines() or [""]
        if first != line:
            raise SweepError(f"{file} is of another sweep ({first}): give another --out, or remove it")
        for text in rest:
            try:
                self.results.append(Result(**json.loads(text)))
            except (ValueError, TypeError):  # cut when the sweep was ended
                continue
        self._file.write_text("".join(f"{text}\n" for text in (first, *map(_json, self.results))))

    def add(self, result: Result) -> None:
        self.results.append(result)
        with self._file.open("a") as file:
            file.write(_json(result) + "\n")


def _json(result: Result) -> str:
    return json.dumps(dataclasses.asdict(result))


# ---- the command ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep; return 0 if every case ended as expected, 1 if one did not, 2 on bad use."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    rest: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1 :]
    args = _parser().parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        return _sweep(args, rest)
    except SweepError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"sweep: interrupted; the same command goes on with what is missing in {args.out}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_recovery.testing.sweep",
        description="Hit every live device storage of a job with a fault, one run each.",
        epilog="Options of the job follow after --.",
    )
    parser.add_argument("script", type=Path, help="the job, for example examples/pretrain_moe.py")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the job (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"), metavar="DIR", help="default: runs/sweep")
    parser.add_argument("--steps", default="2", metavar="K,K", help="steps with faults (default: 2)")
    parser.add_argument("--points", default=",".join(POINTS), metavar="P,P", help="default: all")
    parser.add_argument("--sample", type=int, metavar="N", help="only N cases")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample (default: 0)")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="the I-th of N parts; each with its own --out")
    parser.add_argument("--only", metavar="TEXT", help="only storages with this in their name")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="of one run, in seconds (default: 60)")
    parser.add_argument("--unprotected", action="store_true", help="without the plugin: what the faults would do")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


def _sweep(args: argparse.Namespace, argv: list[str]) -> int:
    points, steps, (shard, shards) = _checked(args)
    shutil.rmtree(args.out / "runs", ignore_errors=True)
    sweep = Sweep(
        args.script, argv, args.ranks, args.out / "runs", protected=not args.unprotected, timeout=args.timeout
    )
    cases = sweep.survey(steps, points)
    if args.only is not None:
        cases = [case for case in cases if args.only in case.storage]
        if not cases:
            raise SweepError(f"no storage's name has {args.only} in it; --list shows them all")
    # All of them are mixed as well: what a sweep that was interrupted has seen then stands for the rest.
    cases = sample(cases, args.sample or len(cases), args.seed)[shard - 1 :: shards]
    if args.list:
        print("\n".join(f"{case.kind:<40} {case}" for case in cases))
        return 0
    about = {"script": str(args.script), "argv": argv, "ranks": args.ranks, "protected": not args.unprotected}
    record = Record(args.out / "cases.jsonl", about)
    known = {result.case for result in record.results}
    progress = Progress()
    for case in progress.each([case for case in cases if str(case) not in known], "faults", len(cases) - len(known)):
        record.add(sweep.run(case))
    progress.done()
    return _tell(args, about, [result for result in record.results if result.case in {str(case) for case in cases}])


def _checked(args: argparse.Namespace) -> tuple[list[str], list[int], tuple[int, int]]:
    points = args.points.split(",")
    unknown = [point for point in points if point not in POINTS]
    if unknown:
        raise SweepError(f"--points: {', '.join(unknown)}: the points are {', '.join(POINTS)}")
    try:
        steps = [int(step) for step in args.steps.split(",")]
        shard, shards = map(int, args.shard.split("/"))
    except ValueError:
        raise SweepError("--steps takes numbers, as in 1,2; --shard takes I/N, as in 1/4") from None
    if not 1 <= shard <= shards or args.ranks < 1 or (args.sample is not None and args.sample < 1) or min(steps) < 1:
        raise SweepError("--ranks, --sample, --steps and the parts of --shard are counted from 1")
    return points, steps, (shard, shards)


def _tell(args: argparse.Namespace, about: dict[str, Any], results: list[Result]) -> int:
    wrong = [result for result in results if not result.as_expected]
    summary = {**about, "cases": len(results), "not_expected": len(wrong)}
    everything = {**summary, "results": [dataclasses.asdict(result) for result in results]}
    (args.out / "sweep.json").write_text(json.dumps(everything, indent=1))
    if args.json:
        print(json.dumps(everything))
    else:
        print(outcomes.table(results))
        print(f"\n{len(results)} faults, {len(wrong)} not as expected")
        for result in wrong:
            print(f"  {result.case}: {result.outcome}, expected {result.expected}: {result.message}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
