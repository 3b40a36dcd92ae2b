# SPDX-License-Identifier: Apache-2.0
"""The demonstration says that it holds only if it does."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from mindspeed_recovery.testing.compare import Comparison, compare_scalars

pytestmark = pytest.mark.timeout(60)


def load_demo() -> Any:
    path = Path(__file__).parents[1] / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


demo = load_demo()

FAULT_LINE = "INFO:mindspeed_recovery:rank 1: uce fault after step 19: UCE ERROR: at step 20\n"
ROLLED_BACK_LINE = "INFO:mindspeed_recovery:rank 1: back at step 19; {'stop': 1.0}\n"
UNSAFE_LINE = "[rank1]: pkg.simulator.UnsafeDataError: There is unsafe data in the input tensor.\n"
PEER_LINE = "[rank0]: pkg.RecoveryFailed: FORCE STOP: on rank 1: There is unsafe data in the input tensor.\n"
RECOVERY_LINE = 'recovery: {"stop": 1.5, "rollback": 2.25}\n'
DEATH = FAULT_LINE + ROLLED_BACK_LINE + PEER_LINE + UNSAFE_LINE + "[rank1]: operator aten.cos.default\n"


def outcomes(
    no_fault: tuple[int | None, str] = (0, "iteration 40/40\n"),
    unprotected: tuple[int | None, str] = (1, DEATH),
    protected: tuple[int | None, str] = (0, "iteration 40/40\n" + RECOVERY_LINE),
) -> dict[Any, Any]:
    ended = (no_fault, unprotected, protected)
    return {run: demo.Outcome(*how) for run, how in zip(demo.RUNS, ended)}


def same(count: int = 3) -> Comparison:
    return Comparison(compared=count, equal=count)


def different() -> Comparison:
    return Comparison(compared=3, equal=2, differences=["'z_loss' at step 21: 1.0 is not 2.0"])


class TestVerdict:
    def test_all_as_promised_holds(self) -> None:
        assert demo.judge(outcomes(), same(), [same(), same()]) == []

    @pytest.mark.parametrize(
        ("changed", "problem"),
        [
            ({"no_fault": (1, "")}, "'no fault' did not end well: exit code 1"),
            ({"protected": (1, RECOVERY_LINE)}, "'fault, with the plugin' did not end well: exit code 1"),
            ({"protected": (None, RECOVERY_LINE)}, "did not end well: ran out of time"),
            ({"unprotected": (0, DEATH)}, "'fault, no plugin' survived"),
            ({"unprotected": (None, DEATH)}, "'fault, no plugin' did not die: it ran out of time"),
            ({"unprotected": (1, "ImportError: no\n")}, "died, but not of 'There is unsafe data"),
            ({"unprotected": (1, FAULT_LINE + UNSAFE_LINE)}, "died, but not of"),
            ({"protected": (0, "iteration 40/40\n")}, "reports no recovery"),
        ],
        ids=[
            "undisturbed run failed",
            "protected run failed",
            "protected run hung",
            "unprotected run survived",
            "unprotected run hung",
            "unprotected run died of something else",
            "unsafe data before the rollback",
            "fault never fired",
        ],
    )
    def test_a_run_that_ends_otherwise_does_not(self, changed: dict[str, Any], problem: str) -> None:
        (text,) = demo.judge(outcomes(**changed), same(), [same(), same()])
        assert problem in text

    def test_a_differing_scalar_does_not(self) -> None:
        (text,) = demo.judge(outcomes(), different(), [same(), same()])
        assert text.startswith("TensorBoard scalars: 2 of 3 equal")
        assert text.endswith("'z_loss' at step 21: 1.0 is not 2.0")

    def test_a_differing_state_of_one_rank_does_not(self) -> None:
        (text,) = demo.judge(outcomes(), same(), [same(), different()])
        assert text.startswith("state of rank 1: 2 of 3 equal")

    def test_nothing_to_compare_does_not(self) -> None:
        (text,) = demo.judge(outcomes(), Comparison(), [same(), same()])
        assert "there is nothing to compare" in text

    def test_missing_files_are_a_difference(self, tmp_path: Path) -> None:
        points = demo.attempt(compare_scalars, tmp_path / "a", tmp_path / "b")
        assert not points.identical
        assert "no TensorBoard event file" in points.differences[0]


class TestReport:
    def report(self, points: Comparison, states: list[Comparison]) -> Any:
        problems = demo.judge(outcomes(), points, states)
        report = demo.make_report(outcomes(), points, states, demo.FAULT, problems)
        return json.loads(json.dumps(report))

    def test_it_says_what_was_found(self) -> None:
        report = self.report(same(608), [same(), same()])
        versions = report.pop("versions")
        assert report == {
            "fault": "uce@rank=1,step=20,at=router,visit=3",
            "holds": True,
            "problems": [],
            "scalars_compared": 608,
            "scalars_identical": 608,
            "state_identical": True,
            "unprotected_error": UNSAFE_LINE.strip(),
            "recovery_milliseconds": {"stop": 1.5, "rollback": 2.25},
        }
        assert set(versions) == {"python", "torch", "megatron-core", "tensorboard", "mindspeed-recovery"}

    def test_differences_are_in_it(self) -> None:
        report = self.report(different(), [same(), different()])
        assert (report["holds"], len(report["problems"])) == (False, 2)
        assert (report["scalars_compared"], report["scalars_identical"]) == (3, 2)
        assert report["state_identical"] is False

    def test_milliseconds_of_several_recoveries_are_summed(self) -> None:
        ended = outcomes(protected=(0, 2 * RECOVERY_LINE))
        report = demo.make_report(ended, same(), [same()], demo.FAULT, [])
        assert report["recovery_milliseconds"] == {"stop": 3.0, "rollback": 4.5}


class TestProgram:
    """The whole program, with runs that only write what real ones would."""

    @pytest.fixture
    def played(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        def play(ended: dict[Any, Any], loss: float = 1.0) -> tuple[int, Any]:
            def execute(run: Any, log: Path, seconds: float, told: Any) -> Any:
                writer = SummaryWriter(str(log.parent))
                for step in range(1, 4 if run.faulty and not run.protected else 6):
                    value = loss if run.protected and step == 5 else 1.0
                    for tag in demo.CURVES:
                        writer.add_scalar(tag, value, step)
                writer.close()
                told(3)
                return ended[run]

            monkeypatch.setattr(demo, "command", lambda run, *rest: run)
            monkeypatch.setattr(demo, "execute", execute)
            monkeypatch.setattr(demo, "compare_states", lambda a, b: same())
            code = demo.demonstrate(tmp_path, 5, "uce@rank=1,step=4,at=router")
            return code, json.loads((tmp_path / "report.json").read_text())

        return play

    def test_success_is_exit_code_0(self, played: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, report = played(outcomes())
        assert (code, report["problems"], report["scalars_compared"]) == (0, [], 15)
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        out = capsys.readouterr().out
        assert "TensorBoard scalars: 15 of 15 identical" in out
        assert f"tensorboard --logdir {tmp_path}" in out

    def test_a_second_time_forgets_the_first(self, played: Any) -> None:
        played(outcomes(), loss=2.0)
        assert played(outcomes())[0] == 0

    def test_one_differing_scalar_is_exit_code_1(self, played: Any, capsys: pytest.CaptureFixture[str]) -> None:
        code, report = played(outcomes(), loss=1.0000001)
        assert (code, report["scalars_compared"], report["scalars_identical"]) == (1, 15, 12)
        assert "does not hold: TensorBoard scalars: 12 of 15 equal" in capsys.readouterr().err

    def test_an_unprotected_run_that_survives_is_exit_code_1(self, played: Any) -> None:
        code, report = played(outcomes(unprotected=(0, "")))
        assert (code, report["unprotected_error"]) == (1, None)


def ends(stat: Path, within: float) -> bool:
    """Whether the process ends in time: SIGKILL returns before it took effect."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            state = stat.read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


class TestRunning:
    def execute(self, tmp_path: Path, script: str, seconds: float) -> tuple[Any, list[int]]:
        told: list[int] = []
        line = [sys.executable, "-c", script]
        return demo.execute(line, tmp_path / "log.txt", seconds, told.append), told

    def test_output_and_exit_code_are_kept(self, tmp_path: Path) -> None:
        outcome, told = self.execute(tmp_path, "print('iteration 10/40'); raise SystemExit(3)", 30)
        assert (outcome.exit_code, outcome.log) == (3, "iteration 10/40\n")
        assert told[-1] == 10

    def test_a_run_over_time_is_ended(self, tmp_path: Path) -> None:
        outcome, _ = self.execute(tmp_path, "import time; time.sleep(60)", 0.5)
        assert outcome.exit_code is None
        assert outcome.ending == "ran out of time"

    def test_what_does_not_answer_is_killed_with_its_children(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo, "GRACE_SECONDS", 0.3)
        script = (
            "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
            "start_new_session=True); print(child.pid, flush=True); time.sleep(60)"
        )
        outcome, _ = self.execute(tmp_path, script, 3)
        assert outcome.exit_code is None
        assert ends(Path("/proc", outcome.log.strip(), "stat"), within=10)

    def test_an_interrupt_ends_the_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[subprocess.Popen[bytes]] = []

        def interrupted(process: subprocess.Popen[bytes]) -> None:
            started.append(process)
            end(process)

        end = demo.end
        monkeypatch.setattr(demo, "end", interrupted)

        def told(iteration: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            demo.execute([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 30, told)
        assert started[0].returncode is not None


class TestCall:
    @pytest.mark.parametrize(
        ("fault", "problem"),
        [
            ("uce@rank=1,step=20", "has no at="),
            ("link@rank=1,step=20,at=router", "needs damaged memory"),
            ("uce@rank=1,step=1,at=router", "the step must be from 2"),
            ("uce@rank=1,step=41,at=router", "to 40"),
            ("uce@rank=2,step=20,at=router", "only ranks 0 to 1"),
        ],
    )
    def test_a_fault_that_cannot_be_shown_is_refused(self, fault: str, problem: str) -> None:
        assert problem in demo.fault_problem(fault, 40)

    def test_the_default_fault_can_be_shown(self) -> None:
        assert demo.fault_problem(demo.FAULT, 40) is None

    def test_missing_packages_are_one_line_with_the_remedy(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(demo.PACKAGES, "no_such_package.core", "no-such-package")
        assert demo.main([]) == 2
        text = capsys.readouterr().err
        assert "no-such-package" in text
        assert "pip install 'mindspeed-recovery[demo]'" in text
        assert text.count("\n") == 1
