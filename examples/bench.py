# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs, measured on this machine: ``make bench``.

    python examples/bench.py [--full] [--only TEXT] [--out DIR]

Prints a table and writes ``DIR/bench.json``. Needs neither a device nor Megatron: the core is measured on host memory, and a
repair between two forked ranks over gloo on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.registry import Registry
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.testing import ranks
from mindspeed_recovery.testing.bench import Row, medians, table, timed

HOME = sys.modules["bench_states"] = types.ModuleType("bench_states")
"""The states that are measured are its globals."""


def state(name: str, policy: str, value: Any, **options: Any) -> StateSpec:
    attribute = name.replace("-", "_")
    setattr(HOME, attribute, value)
    return StateSpec(name, Location.parse(f"bench_states:{attribute}"), Policy(policy), source="the bench", **options)


def started(*specs: StateSpec) -> Session:
    session = Session(Registry(specs))
    session.start()
    return session


def trackers(count: int, **options: Any) -> list[StateSpec]:
    """States like Megatron's tracker of auxiliary losses: a dict with a small tensor in it."""
    return [
        state(f"tracker-{number}", "reset", {"values": torch.zeros(4)}, quarantine=True, **options)
        for number in range(count)
    ]


# ---- rows ----------------------------------------------------------------------------------------------------------------


def container_operations(full: bool) -> list[Row]:
    keys, loops = [f"loss-{number}" for number in range(64)], 2000 if full else 500
    session = started(state("live", "reset", dict.fromkeys(keys, 0.0), quarantine=True))
    live, plain = HOME.live, dict.fromkeys(keys, 0.0)  # type: ignore[attr-defined]

    def operations(of: dict[str, float]) -> dict[str, Callable[[], object]]:
        return {
            "[]": lambda: [of[key] for key in keys for _ in range(loops)],
            "in": lambda: [key in of for key in keys for _ in range(loops)],
            ".items()": lambda: [list(of.items()) for _ in range(loops)],
            ".setdefault": lambda: [of.setdefault(key, 0.0) for key in keys for _ in range(loops)],
        }

    rows = []
    for name, ours in operations(live).items():
        mine, theirs = medians(ours, operations(plain)[name], repeats=9)
        rows.append(Row(f"tracker in the live state: `{name}`", "plain dict", mine / theirs))
    session.close()
    return rows


def step_copies(full: bool) -> list[Row]:
    session = started(
        state("bias", "replicate", [torch.zeros(256) for _ in range(64)]),
        state("counts", "replicate", [torch.zeros(256) for _ in range(64)]),
        state("generator", "snapshot", torch.get_rng_state()),
        *trackers(200, replay=True),
    )
    steps = iter(range(1, 10**6))

    def step() -> None:
        number = next(steps)
        session.begin_step(number)
        session.before_update(number)

    (taken,) = medians(step, repeats=100 if full else 30)
    session.close()
    return [Row("both copies of a step: 64 × 256 bias and counts, RNG, 200 trackers", "", taken * 1e6, 300, "µs")]


def clean_and_rollback(full: bool) -> list[Row]:
    rows = []
    for count in (100, 1000, 10_000) if full else (100, 1000):
        session = started(*trackers(count))
        session.begin_step(1)
        plain = [{"values": 0} for _ in range(count)]

        def phases(session: Session = session) -> None:
            session.stop()
            session.clean()
            session.before_rollback(0)
            session.after_rollback()

        def loop(plain: list[dict[str, int]] = plain) -> None:
            for one in plain:
                one.clear()

        ours, theirs = medians(phases, loop, repeats=5)
        rows.append(Row(f"clean and rollback of {count:,} trackers", "a loop of `dict.clear()`", ours / theirs, 5))
        rows.append(Row(f"the same, for one of {count:,}", "", ours / count * 1e6, None, "µs"))
        session.close()
    return rows


def repair_of_small_tensors(full: bool) -> list[Row]:
    count = 10_000 if full else 2_000
    ours, theirs = _repair([torch.zeros(128) for _ in range(count)], one_message=False, repeats=3)
    return [
        Row(f"repair of {count:,} tensors of 512 B", "one send and recv for each", theirs / ours, 20, at_least=True)
    ]


def repair_of_large_tensors(full: bool) -> list[Row]:
    megabytes = 1024 if full else 128
    tensors = [torch.zeros(megabytes * 2**20 // 64 // 4) for _ in range(64)]
    ours, theirs = _repair(tensors, one_message=True, repeats=3)
    return [Row(f"repair of {megabytes} MiB in 64 tensors, with checksums", "one send and recv", ours / theirs, 1.15)]


def import_time(full: bool) -> list[Row]:
    def run(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    with_plugin, without = medians(run("import mindspeed_recovery"), run("pass"), repeats=9 if full else 5)
    return [Row("`import mindspeed_recovery`", "", (with_plugin - without) * 1e3, 50, "ms")]


def _repair(tensors: list[torch.Tensor], one_message: bool, repeats: int) -> list[float]:
    """Seconds of a repair of these tensors from rank 0 to rank 1, and of plain messages with the same bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def body(rank: int, listener: Any) -> int:
            store = ranks.join(listener, 2, serves=rank == 0)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            taken = _repair_as(rank, tensors, one_message, repeats)
            (folder / f"{rank}.json").write_text(json.dumps(taken))
            ranks.leave(store, 2, serves=rank == 0)
            return 0

        codes = ranks.run(2, body, folder, timeout=300)
        if any(codes):
            raise RuntimeError((folder / "rank1.log").read_text()[-500:] or f"exit codes {codes}")
        taken: list[float] = json.loads((folder / "1.json").read_text())
        return taken


def _repair_as(rank: int, tensors: list[torch.Tensor], one_message: bool, repeats: int) -> list[float]:
    session = started(state("many", "replicate", tensors, large=True))
    session.begin_step(1)
    session.before_update(1)
    session.after_log(1)
    session.begin_step(2)
    plan = types.SimpleNamespace(step=1, rank=rank, pairs=((0, 1, 0),))
    messages = [torch.cat(tensors)] if one_message else [tensor.clone() for tensor in tensors]

    def prepare() -> None:
        if rank == 1:
            session.copies.discard(since=0.0)
        session.stop()
        session.clean()
        dist.barrier()

    def repair() -> None:
        session.after_repair(plan, dist.group.WORLD)
        session.before_rollback(1)  # the receiver writes what has arrived into the live tensors

    def plain() -> None:
        dist.barrier()
        for message, target in zip(messages, [torch.empty(0)] if one_message else tensors):
            if rank == 0:
                dist.send(message, 1)
                continue
            dist.recv(message, 0)
            if not one_message:
                target.copy_(message)

    ours, theirs = [], []
    for _ in range(repeats + 1):  # the first of each does not count
        prepare()
        ours.append(timed(repair))
        session.after_rollback()
        theirs.append(timed(plain))
    return [statistics.median(times[1:]) for times in (ours, theirs)]


ROWS: tuple[Callable[[bool], list[Row]], ...] = (
    container_operations,
    step_copies,
    clean_and_rollback,
    repair_of_small_tensors,
    repair_of_large_tensors,
    import_time,
)


def main(argv: list[str] | None = None) -> int:
    """Measure; return 0, or 1 if something could not be measured. A goal that is missed is said, and is no error."""
    parser = argparse.ArgumentParser(description="Measure what the plugin costs on this machine.")
    parser.add_argument("--full", action="store_true", help="the sizes that the goals name")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose function has this in its name")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: runs/bench")
    args = parser.parse_args(argv)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    chosen = [function for function in ROWS if args.only in function.__name__]
    if not chosen:
        parser.error(f"--only: the rows are {', '.join(function.__name__ for function in ROWS)}")
    rows: list[Row] = []
    failed = {}
    for function in chosen:
        print(f"measuring {function.__name__} …", file=sys.stderr, flush=True)
        try:
            rows += function(args.full)
        except Exception as error:
            failed[function.__name__] = f"{type(error).__name__}: {error}"
    machine = {"processor": _processor(), "cores": os.cpu_count(), "torch": torch.__version__, "full": args.full}
    args.out.mkdir(parents=True, exist_ok=True)
    results = {"machine": machine, "rows": [row._asdict() | {"met": row.met} for row in rows], "failed": failed}
    (args.out / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))
    print(f"\n{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}; {args.out}/bench.json")
    for name, reason in failed.items():
        print(f"{name} could not be measured: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


if __name__ == "__main__":
    sys.exit(main())
