# SPDX-License-Identifier: Apache-2.0
"""`mindspeed-recovery diagnose`: what it names in tracebacks made for real, in logs of every shape, and in no other logs."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import unsafe_reads
from clusters import ask_versions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version

from mindspeed_recovery import catalogue, cli
from mindspeed_recovery.core.unsafe_note import UnsafeNote, parse
from mindspeed_recovery.errors import CatalogueError
from mindspeed_recovery.tools import loglines, symptoms
from mindspeed_recovery.tools.diagnose import NOTHING_FOUND, Cause, Diagnoser, Diagnosis, as_json, as_text
from mindspeed_recovery.tools.known import KnownStates
from mindspeed_recovery.tools.reading import Sources, parse_line, read_by
from mindspeed_recovery.tools.tracebacks import Frame

pytestmark = pytest.mark.timeout(120)

VERSIONS = ("0.12.1", "0.19.2")
UNSAFE = "RuntimeError: There is unsafe data in the input tensor."
ROLLBACK = "INFO rank:0 start to rollback callback, repair_id_:1"


@pytest.fixture(scope="module")
def known() -> KnownStates:
    return KnownStates(catalogue.shipped())


@pytest.fixture
def diagnose(known: KnownStates) -> Callable[..., Diagnosis]:
    """``diagnose(text, …, sources=[], name="log")``: of logs given as text."""

    def run(*texts: str, sources: tuple[Path, ...] = (), name: str = "log") -> Diagnosis:
        diagnoser = Diagnoser(known, sources)
        for text in texts:
            diagnoser.read(name, io.BytesIO(text.encode()))
        return diagnoser.result()

    return run


def only(diagnosis: Diagnosis) -> Cause:
    assert len(diagnosis.causes) == 1, as_text(diagnosis)
    return diagnosis.causes[0]


def traceback_of(source: str, path: str = "/job/a.py", function: str = "f", error: str = UNSAFE) -> str:
    return f'Traceback (most recent call last):\n  File "{path}", line 7, in {function}\n    {source}\n{error}\n'


MOE_UTILS = "/opt/lib/python3.10/site-packages/megatron/core/transformer/moe/moe_utils.py"
ROUTER = "/opt/lib/python3.10/site-packages/megatron/core/transformer/moe/router.py"
FOUND_INF = traceback_of(
    "self.found_inf.fill_(0.0)", "/opt/lib/site-packages/megatron/core/optimizer/optimizer.py", "_unscale"
)
BIAS = traceback_of("scores = scores + self.expert_bias", ROUTER, "routing")


# ---- tracebacks made for real --------------------------------------------------------------------------------------------


def states_of(version: str) -> list[str]:
    there = {spec.name for spec in catalogue.load(unsafe_reads.cases.CATALOGUE).states(Version(version))}
    return [state for state in unsafe_reads.CASES if state in there]


PAIRS = [(version, state) for version in VERSIONS for state in states_of(version)]

NOT_TOLD_APART = {
    "loss-scale-fp32": ["loss-scale-one", "loss-scale-fp32"],  # which class the optimizer is of, no line says
    "grad-scaler-growth-factor": ["grad-scaler-scale", "grad-scaler-growth-factor"],  # one product of the two
}


@pytest.fixture(scope="module")
def reads(megatron: Callable[[str], Path]) -> dict[tuple[str, str], dict[str, Any]]:
    questions = {version: states_of(version) for version in VERSIONS}
    answers = ask_versions(unsafe_reads.__file__, questions, megatron)
    return {(version, answer["state"]): answer for version, found in answers.items() for answer in found}


def test_ten_states_and_more_are_told_from_each_other() -> None:
    for version in VERSIONS:
        assert len([state for state in states_of(version) if state not in NOT_TOLD_APART]) >= 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("version", "state"), PAIRS)
def test_the_state_of_a_real_traceback_is_named_from_the_sources(version, state, reads, diagnose, megatron):
    answer = reads[version, state]
    assert answer["traceback"], answer
    cause = only(diagnose(answer["traceback"], sources=(megatron(version),)))
    assert cause.symptom.name == "unsafe-data"
    assert cause.states == NOT_TOLD_APART.get(state, [state])
    assert cause.catalogued
    assert cause.frame is not None
    assert "/megatron/core/" in cause.frame.file


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("version", "state"), PAIRS)
def test_the_process_itself_names_the_state_and_no_other(version, state, reads):
    notes = [parse(text) for text in reads[version, state]["notes"]]
    assert {note.state for note in notes if note} == {state}
    assert all(note is not None and "/megatron/core/" in note.file for note in notes), notes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("state", list(NOT_TOLD_APART))
def test_notes_tell_apart_what_the_line_of_code_cannot(state, reads, diagnose):
    answer = reads["0.12.1", state]
    cause = only(diagnose(answer["traceback"] + "\n".join(answer["notes"]) + "\n"))
    assert (cause.states, cause.how, cause.shapes) == ([state], "the process itself", ["(1,) torch.float32"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_without_sources_the_line_itself_names_most_states(version, reads, diagnose):
    """As in a log from another machine: the folder is not here, nor installed."""
    right = wrong = 0
    for state in states_of(version):
        text = reads[version, state]["traceback"]
        for folder in {
            frame_file.split("/megatron/")[0] for frame_file in text.split('"') if "/megatron/" in frame_file
        }:
            text = text.replace(folder, "/gone/site-packages")
        cause = only(diagnose(text))
        right += state in cause.states
        wrong += bool(cause.states) and state not in cause.states
    assert wrong == 0
    assert right >= 10


def test_nothing_is_imported(megatron: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "log").write_text(FOUND_INF)
    code = (
        "import sys; from mindspeed_recovery import cli; rc = cli.main(sys.argv[1:]); "
        "bad = {'torch', 'numpy', 'megatron'} & {name.split('.')[0] for name in sys.modules}; "
        "print(bad); sys.exit(rc)"
    )
    arguments = ["diagnose", str(tmp_path / "log"), "--source", str(megatron("0.19.2"))]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1, result.stderr
    assert "'found-inf'" in result.stdout
    assert result.stdout.endswith("set()\n")


# ---- logs of every shape -------------------------------------------------------------------------------------------------


def prefixed(text: str, rank: int, form: str) -> list[str]:
    return [form.format(rank=rank) + line for line in text.splitlines()]


FORMS = [
    "[rank{rank}]:",
    "[rank{rank}]: ",
    "[default{rank}]:",
    "[1,{rank}]<stderr>:",
    "{rank}: ",
    "worker-9: [rank{rank}]: ",
]
FORMS += ["2026-01-02 10:00:00,123 [rank{rank}]: ", "[rank{rank}]: 2026-01-02T10:00:00.123456Z "]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_two_ranks_in_one_log_are_told_apart(form, seed, diagnose):
    """Line by line mixed, each with another failure, and an ordinary log line now and then."""
    mixed = random.Random(seed)
    queues = [prefixed(FOUND_INF, 0, form), prefixed(BIAS, 1, form)]
    lines = []
    while any(queues):
        lines.append(mixed.choice([queue for queue in queues if queue]).pop(0))
        lines.append(f"{form.format(rank=mixed.randrange(4))}iteration 12/ 500 | lm loss: 2.3")
    diagnosis = diagnose("\n".join(lines))
    assert {tuple(cause.states): cause.ranks for cause in diagnosis.causes} == {
        ("found-inf",): {0},
        ("router-expert-bias",): {1},
    }


def test_two_ranks_without_prefixes_are_taken_together(diagnose):
    lines = [line for line in FOUND_INF.splitlines() for _ in range(2)]
    cause = only(diagnose("\n".join(lines)))
    assert cause.states == ["found-inf"]
    assert cause.occurrences == 2


def test_one_cause_on_all_ranks_and_in_each_recovery_is_one(diagnose):
    log = []
    for recovery in (1, 2):
        log += [f"INFO rank:{rank} start to rollback callback, repair_id_:{recovery}" for rank in (0, 1, 2, 5)]
        log += [line for rank in (0, 1, 2, 5) for line in prefixed(BIAS, rank, "[rank{rank}]: ")]
    log += prefixed(FOUND_INF, 3, "[rank{rank}]: ")
    diagnosis = diagnose("\n".join(log))
    first, second = diagnosis.causes
    assert (first.states, first.ranks, first.occurrences) == (["router-expert-bias"], {0, 1, 2, 5}, 8)
    assert first.recoveries == {1, 2}
    assert (second.states, second.recoveries, diagnosis.recoveries) == (["found-inf"], {2}, 2)
    assert "ranks 0-2, 5, 8 times, after recovery 1, after recovery 2" in as_text(diagnosis)


@pytest.mark.parametrize("name", ["logs/rank_7.log", "log/attempt_0/7/stderr.log"])
def test_the_rank_is_in_the_name_of_a_file_of_its_own(name, diagnose):
    assert only(diagnose(FOUND_INF, name=name)).ranks == {7}
    assert only(diagnose(FOUND_INF, name="slurm-1234.out")).ranks == set()


def coloured(text: str) -> str:
    return "\n".join(f"\x1b[31m{line}\x1b[0m" for line in text.splitlines())


@pytest.mark.parametrize(
    "change",
    [
        coloured,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "12%|### \r13%|### \r" + text,
        lambda text: text.split("\n", 1)[1],  # begins in the middle of a traceback
        lambda text: text.rstrip("\n"),
        lambda text: "2026-01-01 ERROR train: " + text,
        lambda text: text.replace("RuntimeError:", "torch_npu.SomeError:"),
        lambda text: text + "[ERROR] 2026-01-01-10:00:00 (PID:1, Device:0, RankID:-1) ERR00003 PTA invalid value\n",
        lambda text: text.replace("RuntimeError: ", "RuntimeError: operator failed\n"),  # the text on a later line
        lambda text: text + "\nDuring handling of the above exception, another exception occurred:\n\n" + text,
        lambda text: "x" * 100_000 + "\n" + text,
        lambda text: "\x00\xff" + "\n" + text,
    ],
)  # fmt: skip
def test_the_shape_of_a_log_does_not_matter(change, diagnose):
    assert only(diagnose(change(FOUND_INF))).states == ["found-inf"]


def test_blocks_and_lines_without_end(known, monkeypatch):
    monkeypatch.setattr(loglines, "BLOCK", 200)
    diagnoser = Diagnoser(known)
    diagnoser.read("log", io.BytesIO(("lm loss\n" * 99 + FOUND_INF + "y" * 5000 + "\n" + BIAS).encode()))
    assert [(cause.states, cause.line) for cause in diagnoser.result().causes] == [
        (["found-inf"], 100),
        (["router-expert-bias"], 105),
    ]


def test_a_log_that_ends_within_a_traceback_names_no_failure(diagnose):
    cut = FOUND_INF.rsplit("\n", 2)[0] + "\n"
    assert diagnose(cut).causes == []
    assert only(diagnose(cut, FOUND_INF)).states == ["found-inf"]


def test_the_text_alone_counts_where_there_is_no_traceback(diagnose):
    line = "[ERROR] train failed: There is unsafe data in the input tensor."
    cause = only(diagnose(line))
    assert (cause.states, cause.location, cause.frame) == ([], None, None)
    assert only(diagnose(f"{line}\n{FOUND_INF}{line}\n")).states == ["found-inf"]


def test_memory_does_not_grow_with_the_log(known):
    class Endless(io.RawIOBase):
        def __init__(self, size: int) -> None:
            self.left = size

        def read(self, size: int = -1) -> bytes:
            block = (b"[rank1]: iteration 1/ 5 | lm loss: 2.3\n" * 200 + FOUND_INF.encode()) * 20
            self.left -= len(block)
            return block if self.left > 0 else b""

    peaks = []
    for size in (2_000_000, 20_000_000):
        diagnoser = Diagnoser(known)
        tracemalloc.start()
        diagnoser.read("log", Endless(size))  # type: ignore[arg-type]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert diagnoser.result().causes[0].states == ["found-inf"]
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 30_000_000


# ---- kin of unsafe data --------------------------------------------------------------------------------------------------

TIMER = traceback_of(
    "assert not self._started, 'timer has already been started'",
    "/x/site-packages/megatron/core/timers.py",
    "start",
    "AssertionError: timer has already been started",
)
SHARED = traceback_of(
    "assert self.cached_output is not None",
    "/x/site-packages/megatron/core/transformer/moe/shared_experts.py",
    "get_output",
    "AssertionError",
)
PRE_HOOK = traceback_of(
    "assert self.remove_forward_pre_hook_handles[module] is not None",
    "/x/site-packages/megatron/core/distributed/distributed_data_parallel.py",
    "disable_forward_pre_hook",
    "KeyError: GPTModel(",
)
QUEUE = traceback_of(
    "inputs = AG_SHARED_EXPERTS_INPUTS.pop(0)",
    "/x/mindspeed/core/transformer/moe/moe_layer.py",
    "backward",
    "IndexError: pop from empty list",
)
HANDLE = traceback_of(
    "assert self.param_gather_handle is None",
    "/x/site-packages/megatron/core/distributed/param_and_grad_buffer.py",
    "start_param_sync",
    "AssertionError",
)


@pytest.mark.parametrize(
    ("text", "symptom", "state"),
    [
        (TIMER, "timer-running", "timers"),
        (SHARED, "shared-expert-leftover", "shared-expert-output"),
        (PRE_HOOK, "pre-hooks-removed", "forward-pre-hooks"),
        (
            PRE_HOOK.replace("assert self.remove_forward", "del self.remove_forward"),
            "pre-hooks-removed",
            "forward-pre-hooks",
        ),
    ],
)
def test_kin_of_unsafe_data_is_named(text, symptom, state, diagnose):
    cause = only(diagnose(text))
    assert (cause.symptom.name, cause.states) == (symptom, [state])


@pytest.mark.parametrize(
    ("text", "symptom", "subject"),
    [(QUEUE, "queue-out-of-step", None), (HANDLE, "leftover", ["param-gather-handle"])],
)
def test_ordinary_errors_count_only_after_a_rollback(text, symptom, subject, diagnose):
    cause = only(diagnose(f"{ROLLBACK}\n{text}"))
    assert cause.symptom.name == symptom
    assert subject is None or cause.states == subject
    assert cause.recoveries == {1}
    assert diagnose(text).causes == []


def test_a_queue_that_no_catalogue_has_is_named_by_its_global(diagnose, tmp_path):
    source = tmp_path / "mindspeed" / "core" / "transformer" / "moe" / "moe_layer.py"
    source.parent.mkdir(parents=True)
    source.write_text("from mindspeed.queues import AG_SHARED_EXPERTS_INPUTS\n\n\nclass F:\n    @staticmethod\n"
                      "    def backward(ctx):\n        inputs = AG_SHARED_EXPERTS_INPUTS.pop(0)\n")  # fmt: skip
    cause = only(diagnose(f"{ROLLBACK}\n{QUEUE}", sources=(tmp_path,)))
    assert cause.location == "mindspeed.queues:AG_SHARED_EXPERTS_INPUTS"
    assert 'track("mindspeed.queues:AG_SHARED_EXPERTS_INPUTS", policy="reset")' in cause.advice[0]


ORDINARY = {
    "healthy": "iteration 1/ 5 | lm loss: 2.3\n" * 100,
    "empty": "",
    "no memory": traceback_of("x = torch.ones(9)", error="torch.OutOfMemoryError: NPU out of memory."),
    "a bug": traceback_of("batch['tokens']", error="KeyError: 'tokens'"),
    "an empty list": traceback_of("queue.pop()", error="IndexError: pop from empty list"),
    "a shape": traceback_of("self.linear(x)", ROUTER, error="RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    "an assertion on catalogued state": traceback_of("assert self.expert_bias is None", ROUTER, error="AssertionError"),
    "a recovery that went well": f"{ROLLBACK}\nrecovery 1: rolled back to step 4, exact; states: 3 reset; ms: clean 1.0\n",
    "an error of another rank": traceback_of(
        "self.run()",
        error="mindspeed_recovery.errors.RecoveryFailed: FORCE STOP: the job has ended on another rank: There is unsafe data "
        "in the input tensor.",
    ),
    "a bug after a recovery": f"{ROLLBACK}\n{traceback_of('batch[0]', error='IndexError: list index out of range')}",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_logs_are_no_unsafe_data_failures(name, diagnose):
    diagnosis = diagnose(ORDINARY[name])
    assert diagnosis.causes == []
    assert as_text(diagnosis).startswith(NOTHING_FOUND)


# ---- what is said --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "flag", "advice"),
    [
        ("  enable_recovery_safe_globals .................... True", "on", "--recovery-drill STEP, which names"),
        ("  enable_recovery_safe_globals .................... False", "off", "Start the job with --enable-recovery"),
        ("+ torchrun pretrain_gpt.py --enable-recovery-safe-globals", "on", "The flag was on"),
        ("mindspeed-recovery: 40 states tracked, 12 present here", "on", "The flag was on"),
        ("-------------------- end of arguments ---------------------", "off", "Start the job with"),
        (
            "WARNING:mindspeed_recovery:--enable-recovery-safe-globals has no effect: no runtime",
            "without effect",
            "no effect",
        ),
        ("", "unknown", "Start the job with --enable-recovery-safe-globals: on rollback this state is then reset"),
    ],
)
def test_whether_the_flag_was_on_and_what_follows(line, flag, advice, diagnose):
    diagnosis = diagnose(f"{line}\n{FOUND_INF}")
    assert diagnosis.flag == flag
    assert advice in "\n".join(only(diagnosis).advice)


def test_our_own_frames_show_that_the_flag_was_on(diagnose):
    frame = '  File "/x/site-packages/mindspeed_recovery/frameworks/megatron_job.py", line 9, in _enter\n    result = train()\n'
    head, rest = FOUND_INF.split("\n", 1)
    assert diagnose(f"{head}\n{frame}{rest}").flag == "on"


def test_a_global_of_the_users_is_named_with_its_declaration(diagnose, tmp_path):
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "losses.py").write_text("SUMS = {}\n\n\ndef add(x):\n    sums = SUMS\n    sums['a'] += x\n")
    log = traceback_of("sums['a'] += x", "/job/my_pkg/losses.py", "add").replace("line 7", "line 6")
    cause = only(diagnose(log, sources=(tmp_path,)))
    assert (cause.states, cause.catalogued) == ([], False)
    assert cause.location is not None
    assert cause.location.endswith(":SUMS.a")


def test_an_untracked_tensor_of_a_note_is_not_catalogued(diagnose):
    note = UnsafeNote(None, "my_pkg.losses:SUMS", "(3,)", "torch.float32", "/job/my_pkg/losses.py", 6)
    cause = only(diagnose(f"{traceback_of('sums += x')}{note}\n"))
    assert (cause.location, cause.how) == ("my_pkg.losses:SUMS", "the process itself")
    assert cause.advice[0].startswith('Declare it: mindspeed_recovery.track("my_pkg.losses:SUMS"')


# ---- following names -----------------------------------------------------------------------------------------------------

PROGRAM = """
import torch
from helpers import get_tracker, Base
import helpers as h

CACHE = {}

def caller(x):
    kept = CACHE
    helper(x, kept["a"])

def helper(x, values):
    return x + values

def through_getter(x):
    a, b = get_tracker(), x
    a += b

class Layer(Base):
    def forward(self, x):
        return x * self.inherited

def through_module(x):
    return h.TABLE["row"] + x

def fresh(x):
    return torch.max(CACHE["a"] * 2, x)

class Model:
    def __init__(self):
        self.rotary = h.Rotary()
    def prepare(self, x):
        table = self.rotary(8)
        return x, table, None
    def run(self, x):
        prepared = self.prepare(x)
        (x, table) = prepared[:2]
        return passing(x, table=table)

def passing(*args, **kwargs):
    return last(*args, **kwargs)

def last(x, table=None):
    table = (table,) * 2 if table is None else table
    first, second = table
    return torch.cos(first)
"""
HELPERS = """
_TRACKER = None
TABLE = {}

def get_tracker():
    global _TRACKER
    return _TRACKER

class Base:
    inherited = 1

class Rotary:
    def forward(self, length):
        return torch.arange(length)
"""


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([("caller", 'helper(x, kept["a"])', ""), ("helper", "return x + values", "~~^~~~~~~~")], "program:CACHE.a"),
        ([("through_getter", "a += b", "")], "helpers:_TRACKER"),
        ([("forward", "return x * self.inherited", "")], "helpers:Base.inherited"),
        ([("through_module", 'return h.TABLE["row"] + x', "")], "helpers:TABLE.row"),
        (
            [
                ("run", "return passing(x, table=table)", "       ^^^^^^^^^^^^^^^^^^^^^^^"),
                ("passing", "return last(*args, **kwargs)", "       ^^^^^^^^^^^^^^^^^^^^^"),
                ("last", "return torch.cos(first)", "       ^^^^^^^^^^^^^^^^"),
            ],
            "helpers:Rotary.forward",
        ),
    ],
)
def test_a_name_is_followed_to_where_the_state_lives(frames, expected, tmp_path):
    sources, made = program(tmp_path, frames)
    assert expected in map(str, read_by(made, sources))


def test_what_comes_out_of_a_call_is_no_state_to_declare(tmp_path):
    sources, made = program(tmp_path, [("run", "return passing(x, table=table)", "")])
    names = read_by(made, sources)
    assert "helpers:Rotary.forward" in map(str, names)
    assert [str(name) for name in names if name.owner_known and not name.derived] == []


def test_the_result_of_an_operation_is_nobodys_state(tmp_path):
    line = 'return torch.max(CACHE["a"] * 2, x)'
    marks = "       ^^^^^^^^^^^^^^^^^^^^^^^^^^^^"
    sources, made = program(tmp_path, [("fresh", line, marks)])
    assert "program:CACHE.a" not in map(str, read_by(made, sources))
    sources, made = program(tmp_path, [("fresh", line, "")])  # before Python 3.11: it may be any part of the line
    assert "program:CACHE.a" in map(str, read_by(made, sources))


def program(folder: Path, frames: list[tuple[str, str, str]]) -> tuple[Sources, list[Frame]]:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "helpers.py").write_text(HELPERS)
    lines = [line.strip() for line in PROGRAM.splitlines()]
    made = [
        Frame("/elsewhere/program.py", lines.index(text) + 1, function, f"    {text}", f"    {marks}" if marks else "")
        for function, text, marks in frames
    ]
    return Sources([folder]), made


def test_a_line_that_moved_to_another_number_is_found_by_its_text(tmp_path):
    sources, made = program(tmp_path, [("through_getter", "a += b", "")])
    made[0].line += 40
    assert "helpers:_TRACKER" in map(str, read_by(made, sources))
    made[0].source = "    a -= b"  # no line of this source at all
    assert "helpers:_TRACKER" not in map(str, read_by(made, sources))


@pytest.mark.parametrize(
    "line",
    ["for a in b:", "f(", "x = g(a, [b,", "elif a:", "a is None", "with a as b:", "overflow_buf=self.buf,", "else:"],
)
def test_a_line_by_itself_is_read(line):
    tree = parse_line(line)
    assert tree is not None or line == "else:"


# ---- the command ---------------------------------------------------------------------------------------------------------


def test_exit_codes_and_json(tmp_path, capsys, monkeypatch):
    bad, good, packed = tmp_path / "bad.log", tmp_path / "good.log", tmp_path / "bad.log.gz"
    bad.write_text(FOUND_INF)
    good.write_text(ORDINARY["no memory"])
    packed.write_bytes(gzip.compress(FOUND_INF.encode()))
    assert cli.main(["diagnose", str(good)]) == 0
    assert capsys.readouterr().out == (
        f"{NOTHING_FOUND}\nthe last traceback ends with: torch.OutOfMemoryError: NPU out of memory.\n"
    )
    assert cli.main(["diagnose", str(good), str(bad), str(packed), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    (cause,) = answer["causes"]
    assert (answer["found"], cause["states"], cause["occurrences"], cause["log"]) == (True, ["found-inf"], 2, str(bad))
    assert len(cause["advice"]) == 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FOUND_INF.encode())))
    assert cli.main(["diagnose", "-"]) == 1
    for wrong in (
        ["missing.log"],
        [str(bad), "--source", str(good)],
        [str(bad), "--catalogue", str(bad)],
        [str(tmp_path)],
    ):
        assert cli.main(["diagnose", *wrong]) == 2, wrong
    with pytest.raises(SystemExit, match="2"):
        cli.main(["diagnose"])
    packed.write_bytes(b"no gzip")
    assert cli.main(["diagnose", str(packed)]) == 2
    packed.write_bytes(gzip.compress(FOUND_INF.encode())[:-4])  # cut off
    assert cli.main(["diagnose", str(packed)]) in (0, 1)


def test_a_catalogue_of_ones_own_is_read_besides_the_shipped_ones(tmp_path, capsys):
    own, log = tmp_path / "own.toml", tmp_path / "log"
    own.write_text('[[state]]\nname = "sums"\nwhy = "w"\npolicy = "reset"\nlocation = "losses:SUMS"\n')
    log.write_text(traceback_of("SUMS += x", "/job/losses.py"))
    assert cli.main(["diagnose", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["causes"][0]["states"] == []
    assert cli.main(["diagnose", str(log), "--json", "--catalogue", str(own)]) == 1
    assert json.loads(capsys.readouterr().out)["causes"][0]["states"] == ["sums"]


def test_each_pattern_of_a_log_line_has_its_mark():
    """The scan finds a line by its marks only."""
    lines = [
        "recovery 1: rolled back to step 4, exact",
        "rank 1: back at step 4; {}",
        "rank:0 start to rollback callback",
        "[rollback] rank 1 rollback success",
        "rank:1 successfully gather and rollback at iteration 4",
    ]
    assert [any(p.search(line) for p in symptoms.ROLLBACKS.values()) for line in lines] == [True] * len(lines)
    lines += [symptoms.FLAG_WRITTEN, "enable_recovery_safe_globals ... True", "mindspeed-recovery: 3 states tracked"]
    lines += [symptoms.END_OF_ARGUMENTS, UNSAFE, str(UnsafeNote("a", "b:C", "(1,)", "torch.int8"))]
    assert [line for line in lines if not any(mark.decode() in line for mark in symptoms.MARKS)] == []


# ---- anything at all -----------------------------------------------------------------------------------------------------

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

PIECES = st.sampled_from(
    [line + "\n" for text in (FOUND_INF, BIAS, TIMER, QUEUE) for line in text.splitlines()]
    + ['  File "', '  File "\x00.py", line 99999999999, in x\n', '  File "/etc/../../a.py", line 0\n', "    ^^^^\n"]
    + [
        "\x1b[31",
        "[rank",
        "[rank1]: ",
        "1: ",
        "\r",
        "\n",
        "unsafe tensor: ",
        "File",
        ROLLBACK + "\n",
        "E" * 9000,
        "    ((((\n",
    ]
)


@FUZZ
@given(st.lists(st.one_of(PIECES.map(str.encode), st.binary(max_size=60)), max_size=40), st.integers(1, 300))
def test_no_log_breaks_it(known, pieces, block):
    before, loglines.BLOCK = loglines.BLOCK, block
    try:
        diagnoser = Diagnoser(known)
        for _ in range(2):
            diagnoser.read("log", io.BytesIO(b"".join(pieces)))
        text = as_text(diagnoser.result())
        json.dumps(as_json(diagnoser.result()))
    finally:
        loglines.BLOCK = before
    assert text.isprintable() or "\n" in text


@FUZZ
@given(
    st.one_of(st.binary(max_size=300), st.text(max_size=300).map(lambda text: (PROGRAM + text).encode())),
    st.integers(1, 60),
)
def test_no_source_breaks_it(tmp_path, content, line):
    (tmp_path / "program.py").write_bytes(content)
    for source in ("", "    a += b", content.decode("utf-8", "replace")[:80]):
        read_by([Frame("/x/program.py", line, "f", source, "    ^^^")] * 2, Sources([tmp_path]))


CODE = st.recursive(
    st.sampled_from(["a", "self.b", "CACHE", "f()", "x[0]", "'k'", "lambda: a", "*a", "(yield)"]),
    lambda inner: (
        st.builds("{}.c({}, k={})[{}]".format, inner, inner, inner, inner)
        | st.builds("({} if {} else {})".format, inner, inner, inner)
    ),
    max_leaves=12,
)


@FUZZ
@given(st.lists(st.builds("{} = {}".format, st.sampled_from(["a", "a, b", "self.b", "CACHE"]), CODE), max_size=6), CODE)
def test_no_program_breaks_it(tmp_path, statements, read):
    body = "".join(f"    {statement}\n" for statement in statements)
    (tmp_path / "program.py").write_text(f"CACHE = {{}}\ndef f(self, x):\n{body}    {read}\n")
    frame = Frame("/x/program.py", len(statements) + 3, "f", f"    {read}", "")
    assert len(read_by([frame, frame], Sources([tmp_path]))) < 5000


@FUZZ
@given(
    st.one_of(
        st.text(max_size=200),
        st.dictionaries(
            st.sampled_from(["name", "why", "policy", "location", "at", "on", "fields"]), st.text(max_size=9)
        ).map(lambda table: "[[state]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())),
    )
)
def test_no_catalogue_breaks_it(tmp_path, text):
    file = tmp_path / "own.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(CatalogueError):
        KnownStates([file]).match([], "m", "f")


@given(
    st.builds(
        UnsafeNote,
        st.one_of(st.none(), st.just("a-b.c")),
        st.text(max_size=30),
        st.just("(2, 3)"),
        st.just("torch.int8"),
    )
)
def test_a_note_is_read_as_it_was_written(note):
    read = parse(f"[rank1]: {note}")
    assert read is not None
    assert (read.state, read.shape, read.dtype) == (note.state, note.shape, note.dtype)
