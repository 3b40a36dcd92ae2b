# SPDX-License-Identifier: Apache-2.0
"""Three runs of `pretrain_moe.py` on two ranks, and the proof that the recovered one is the undisturbed one.

1. without a fault;
2. with a device-memory fault and no plugin: the run dies of unsafe data in the step that is recomputed;
3. with the same fault and the plugin: every TensorBoard scalar and each rank's final state are as in run 1.

    python examples/demo.py --out runs/demo

Everything is compared bit for bit. Writes ``report.json``, ``curves.png`` and one folder for each run (event
files, final states, the ranks' output in ``log.txt``). The exit code is 0 if all of this holds, 1 if not, 2
for a wrong call or a missing package, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mindspeed_recovery.testing.compare import Comparison, compare_scalars, compare_states, scalars, value_of

RANKS = 2
FAULT = f"uce@rank={RANKS - 1},step=20,at=router,visit=3"
UNSAFE = "There is unsafe data in the input tensor."
ROLLED_BACK = "back at step"  # what the runtime logs when it has recovered and the step is about to be recomputed
CURVES = {"lm loss": "lm loss", "load_balancing_loss": "MoE load balancing loss", "z_loss": "MoE z loss"}
POLL_SECONDS = 0.2
START_SECONDS, STEP_SECONDS = 120.0, 3.0  # what a run may take on a slow and busy machine
GRACE_SECONDS = 45.0  # torchrun gives its ranks 30 seconds before it kills them
PACKAGES = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "tensorboard": "tensorboard",
    "matplotlib": "matplotlib",
}


@dataclass(frozen=True)
class Run:
    """One of the three runs; ``name`` is its folder, and its name in TensorBoard."""

    name: str
    title: str
    faulty: bool = False
    protected: bool = False


NO_FAULT = Run("no-fault", "no fault")
UNPROTECTED = Run("unprotected", "fault, no plugin", faulty=True)
PROTECTED = Run("protected", "fault, with the plugin", faulty=True, protected=True)
RUNS = (NO_FAULT, UNPROTECTED, PROTECTED)


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``exit_code``: None if it ran out of time; ``log``: the ranks' output."""

    exit_code: int | None
    log: str

    @property
    def ending(self) -> str:
        return "ran out of time" if self.exit_code is None else f"exit code {self.exit_code}"


# ---- running -----------------------------------------------------------------------------------------------


def command(run: Run, folder: Path, train_iters: int, fault: str) -> list[str]:
    """The command line of a run that leaves its files in ``folder``."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    line += ["--nproc-per-node", str(RANKS), str(Path(__file__).with_name("pretrain_moe.py"))]
    line += ["--expert-model-parallel-size", str(RANKS), "--use-distributed-optimizer"]
    line += ["--train-iters", str(train_iters)]
    line += ["--tensorboard-dir", str(folder), "--save-final", str(folder / "final")]
    line += ["--fault", fault] if run.faulty else []
    line += ["--enable-recovery-safe-globals"] if run.protected else []
    return line


def execute(line: list[str], log: Path, seconds: float, told: Callable[[int], None]) -> Outcome:
    """Run a command for at most ``seconds``, its output in ``log``; ``told`` hears how far it is."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # the order of sums must not depend on the machine's load
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "LOGLEVEL": "INFO",
    }
    with log.open("wb") as output:
        # A session of its own: Ctrl-C comes here alone, and `end` passes it on once.
        process = subprocess.Popen(
            line,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                told(last_iteration(read(log)))
            exit_code = process.poll()
        finally:
            end(process)
    return Outcome(exit_code, read(log))


def end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun if it still runs; it ends its ranks. If it does not answer, kill it and them."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        lists = Path(f"/proc/{process.pid}/task").glob("*/children")
        ranks = [int(pid) for children in lists for pid in children.read_text().split()]
        for pid in [*ranks, process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def last_iteration(log: str) -> int:
    return max((int(number) for number in re.findall(r"^iteration (\d+)/", log, re.MULTILINE)), default=0)


def clear(folder: Path) -> None:
    """Make ``folder``, without the files of an earlier run: old event files would be merged with the new."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("*tfevents*", "final.rank*", "log.txt"):
        for file in folder.glob(pattern):
            file.unlink()


class Show(Protocol):
    """Told a run, the iteration it has reached, and whether it has ended."""

    def __call__(self, run: Run, iteration: int, ended: bool) -> None: ...


@contextlib.contextmanager
def progress(train_iters: int) -> Iterator[Show]:
    """Gives what shows how far the runs are: bars if rich is there, lines of text if not."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield LinesOfProgress(train_iters).show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bars:
        tasks = {run: bars.add_task(label(run), total=train_iters, start=False) for run in RUNS}

        def show(run: Run, iteration: int, ended: bool) -> None:
            bars.start_task(tasks[run])
            bars.update(tasks[run], completed=iteration)
            if ended:
                bars.stop_task(tasks[run])

        yield show


@dataclass
class LinesOfProgress:
    """Progress as lines of text: one when a run starts, one at each iteration it reports."""

    train_iters: int
    shown: set[tuple[Run, int]] = field(default_factory=set)

    def show(self, run: Run, iteration: int, ended: bool) -> None:
        if (run, iteration) not in self.shown:
            self.shown.add((run, iteration))
            reached = f"iteration {iteration}/{self.train_iters}" if iteration else "starting"
            print(f"{label(run)}: {reached}", flush=True)


def label(run: Run) -> str:
    return f"run {RUNS.index(run) + 1} of {len(RUNS)}, {run.title}"


# ---- judging -----------------------------------------------------------------------------------------------


def unprotected_error(log: str) -> str | None:
    """The line of the unsafe-data error that ended a recomputed step; None without one after a rollback."""
    recomputed = log.partition(ROLLED_BACK)[2]
    error = re.search(rf"^(?:\[rank\d+\]: )?[\w.]+: {re.escape(UNSAFE)}.*$", recomputed, re.MULTILINE)
    return error and error[0].strip()


def recoveries(log: str) -> list[dict[str, float]]:
    """Milliseconds by phase, for each recovery that a run reports."""
    return [json.loads(text) for text in re.findall(r"^recovery: (\{.*\})$", log, re.MULTILINE)]


def attempt(compare: Callable[[Path, Path], Comparison], a: Path, b: Path) -> Comparison:
    """``compare(a, b)``; files that are not there are a difference."""
    try:
        return compare(a, b)
    except OSError as error:
        comparison = Comparison()
        comparison.note(str(error))
        return comparison


def judge(outcomes: dict[Run, Outcome], points: Comparison, states: Sequence[Comparison]) -> list[str]:
    """What does not hold, one sentence each; empty if the demonstration succeeded.

    ``points`` and ``states`` (one for each rank) compare the protected run with the one without a fault.
    """
    problems = [
        f"the run '{run.title}' did not end well: {outcomes[run].ending}"
        for run in (NO_FAULT, PROTECTED)
        if outcomes[run].exit_code != 0
    ]
    unprotected = outcomes[UNPROTECTED]
    if unprotected.exit_code == 0:
        problems.append(f"the run '{UNPROTECTED.title}' survived: this fault does not need the plugin")
    elif unprotected.exit_code is None:
        problems.append(f"the run '{UNPROTECTED.title}' did not die: it {unprotected.ending}")
    elif unprotected_error(unprotected.log) is None:
        problems.append(f"the run '{UNPROTECTED.title}' died, but not of '{UNSAFE}' in the recomputed step")
    if not recoveries(outcomes[PROTECTED].log):
        problems.append(f"the run '{PROTECTED.title}' reports no recovery: no fault was recovered")
    compared = {
        "TensorBoard scalars": points,
        **{f"state of rank {rank}": state for rank, state in enumerate(states)},
    }
    for what, comparison in compared.items():
        if not comparison.identical:
            first = next(iter(comparison.differences), "there is nothing to compare")
            count = f"{comparison.equal} of {comparison.compared}"
            problems.append(
                f"{what}: {count} equal between the runs without a fault and with the plugin; first: {first}"
            )
    return problems


def make_report(
    outcomes: dict[Run, Outcome],
    points: Comparison,
    states: Sequence[Comparison],
    fault: str,
    problems: list[str],
) -> dict[str, Any]:
    """What ``report.json`` holds. Milliseconds are summed by phase if there was more than one recovery."""
    milliseconds: dict[str, float] = {}
    for recovery in recoveries(outcomes[PROTECTED].log):
        for phase, value in recovery.items():
            milliseconds[phase] = round(milliseconds.get(phase, 0.0) + value, 3)
    return {
        "fault": fault,
        "holds": not problems,
        "problems": problems,
        "scalars_compared": points.compared,
        "scalars_identical": points.equal,
        "state_identical": all(state.identical for state in states),
        "unprotected_error": unprotected_error(outcomes[UNPROTECTED].log),
        "recovery_milliseconds": milliseconds,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    import mindspeed_recovery

    found = {"python": platform.python_version()}
    for package in ("torch", "megatron-core", "tensorboard"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "unknown"
    return {**found, "mindspeed-recovery": mindspeed_recovery.__version__}


# ---- showing -----------------------------------------------------------------------------------------------


def curve(folder: Path, tag: str) -> tuple[list[int], list[float]]:
    """Steps and values of a tag, the last value of a point that was written twice; empty without files."""
    try:
        points = scalars(folder)
    except FileNotFoundError:
        return [], []
    steps = sorted(step for name, step in points if name == tag)
    return steps, [value_of(points[tag, step][-1]) for step in steps]


def draw(out: Path, fault_step: int, report: dict[str, Any]) -> None:
    """Draw the curves of the three runs to ``out/curves.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    died = ": dies" if report["unprotected_error"] else ""
    recovered = ": recovers" if report["recovery_milliseconds"] else ""
    ink, pale, dark, red = "#333333", "#a9cdec", "#0b3c6f", "#d1342f"
    style: Any = {
        "font.size": 11,
        "text.color": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
    }
    style |= {"axes.edgecolor": "#999999", "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(1, len(CURVES), figsize=(12, 4.3))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
        for axes, (tag, title) in zip(panels, CURVES.items()):
            # Wide and pale, narrower and red, thin and dashed: each lies in the one before, so all are seen.
            axes.plot(
                *curve(out / NO_FAULT.name, tag),
                color=pale,
                linewidth=8.5,
                solid_capstyle="round",
                label=NO_FAULT.title,
            )
            steps, values = curve(out / UNPROTECTED.name, tag)
            axes.plot(steps, values, color=red, linewidth=3.4, label=UNPROTECTED.title + died)
            axes.plot(
                steps[-1:],
                values[-1:],
                color=red,
                marker="X",
                markersize=12,
                markeredgecolor="white",
                zorder=5,
            )
            dashed = {"color": dark, "linewidth": 1.5, "linestyle": (0, (4, 2))}
            axes.plot(*curve(out / PROTECTED.name, tag), **dashed, label=PROTECTED.title + recovered)
            axes.axvline(fault_step, color=red, linewidth=1.2, linestyle=":", zorder=0)
            axes.set_title(title, fontsize=12, loc="left", fontweight="bold")
            axes.set_xlabel("iteration")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y", color="#eeeeee")
            axes.set_axisbelow(True)
            where = {"xycoords": ("data", "axes fraction"), "xytext": (7, 0), "textcoords": "offset points"}
            axes.annotate(f"memory fault\nin step {fault_step}", (fault_step, 0.98), color=red, va="top", **where)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(RUNS), frameon=False, handlelength=3.5)
        equal = f"{report['scalars_identical']} of {report['scalars_compared']}"
        figure.suptitle(f"{equal} logged points of the recovered run are those of the run without a fault, bit for bit")
        figure.savefig(out / "curves.png", dpi=110)
        pyplot.close(figure)


def table(out: Path, outcomes: dict[Run, Outcome], report: dict[str, Any]) -> str:
    """The runs, and what comparing them gave, as lines of text."""
    milliseconds = report["recovery_milliseconds"]
    phases = ", ".join(f"{phase} {value:.0f}" for phase, value in milliseconds.items())
    notes = {
        NO_FAULT: "",
        UNPROTECTED: f"died of: {UNSAFE}" if report["unprotected_error"] else "",
        PROTECTED: f"recovered in {sum(milliseconds.values()):.0f} ms ({phases})" if milliseconds else "",
    }
    lines = [f"{'run':<24}{'ended':<17}last step logged"]
    for run in RUNS:
        last = max(curve(out / run.name, "lm loss")[0], default=0)
        lines.append(f"{run.title:<24}{outcomes[run].ending:<17}{last:<18}{notes[run]}".rstrip())
    equal = f"{report['scalars_identical']} of {report['scalars_compared']}"
    return "\n".join(
        [
            *lines,
            "",
            f"'{PROTECTED.title}' compared with '{NO_FAULT.title}', bit for bit:",
            f"  TensorBoard scalars: {equal} identical",
            f"  final state of {RANKS} ranks: {'identical' if report['state_identical'] else 'DIFFERENT'}",
        ]
    )


# ---- the program -------------------------------------------------------------------------------------------


def missing_packages() -> list[str]:
    def found(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package that it would be in
            return False

    return [package for module, package in PACKAGES.items() if not found(module)]


def fault_problem(text: str, train_iters: int) -> str | None:
    """Why the demonstration cannot show this fault."""
    from mindspeed_recovery.testing.faults import FaultSpec, FaultSpecError

    try:
        fault = FaultSpec.parse(text)
    except FaultSpecError as error:
        return str(error)
    if fault.kind != "uce":
        return f"{text}: the demonstration needs damaged memory, that is a uce fault"
    if not 2 <= fault.step <= train_iters:
        return f"{text}: the step must be from 2 (nothing is recovered before the first update) to {train_iters}"
    if fault.rank >= RANKS:
        return f"{text}: there are only ranks 0 to {RANKS - 1}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Recover a small MoE pretraining from a memory fault, bit for bit.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--train-iters", type=int, default=40, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--fault", default=FAULT, metavar="SPEC", help="a fault as in pretrain_moe.py; default: %(default)s"
    )
    args = parser.parse_args(argv)
    if missing := missing_packages():
        print(
            f"demo.py: missing: {', '.join(missing)}. pip install 'mindspeed-recovery[demo]' brings all but "
            "torch and megatron-core, which are your own; `make demo` sets up everything",
            file=sys.stderr,
        )
        return 2
    if problem := fault_problem(args.fault, args.train_iters):
        parser.error(f"--fault {problem}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, so that the ranks end too
    try:
        return demonstrate(args.out, args.train_iters, args.fault)
    except KeyboardInterrupt:
        print("\ninterrupted; the ranks have been ended", file=sys.stderr)
        return 130


def demonstrate(out: Path, train_iters: int, fault: str) -> int:
    """Make the three runs, compare them, write everything to ``out``. Returns the exit code."""
    from mindspeed_recovery.testing.faults import FaultSpec

    outcomes = {}
    with progress(train_iters) as show:
        for run in RUNS:
            folder = out / run.name
            clear(folder)
            line = command(run, folder, train_iters, fault)
            seconds = START_SECONDS + train_iters * STEP_SECONDS
            told = functools.partial(show, run, ended=False)
            outcomes[run] = execute(line, folder / "log.txt", seconds, told)
            # The ranks report every tenth iteration only.
            reached = train_iters if outcomes[run].exit_code == 0 else last_iteration(outcomes[run].log)
            show(run, reached, True)

    points = attempt(compare_scalars, out / NO_FAULT.name, out / PROTECTED.name)
    finals = [[out / run.name / f"final.rank{rank}" for run in (NO_FAULT, PROTECTED)] for rank in range(RANKS)]
    states = [attempt(compare_states, *pair) for pair in finals]
    problems = judge(outcomes, points, states)
    report = make_report(outcomes, points, states, fault, problems)
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw(out, FaultSpec.parse(fault).step, report)

    print("\n" + table(out, outcomes, report))
    print(f"\nwritten: {out / 'report.json'}, {out / 'curves.png'}; the ranks' output: {out}/*/log.txt")
    print(f"look at the curves: tensorboard --logdir {out}")
    for problem in problems:
        print(f"demo.py: does not hold: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
