# SPDX-License-Identifier: Apache-2.0
"""`mindspeed-recovery verify` on recovery code: dead, split and unsafe resets, and handlers registered twice.

The small upstream and the rollbacks here are made up, in the shape of code that is in use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_sources import lay

from mindspeed_recovery import cli
from mindspeed_recovery.tools import recovery_code, sources
from mindspeed_recovery.tools.library import Library

pytestmark = pytest.mark.timeout(60)

UPSTREAM = {
    "frame/__init__.py": "from frame import parallel_state\nshort = parallel_state\n",
    "frame/parallel_state.py": "_LAYER_TRACKER = {}\n_BUFFER = None\n_FLAG = 0\n"
    "def use():\n    return _LAYER_TRACKER, _LAZY\n",
    "frame/moe.py": "INPUTS = []\nOWN = []\nclass Log:\n    losses = None\n    tracker = {}\n",
    "frame/overlap.py": "from frame.moe import INPUTS\nfrom frame import moe\nINPUTS.append(moe.OWN)\n",
    "frame/late.py": "def pop():\n    from frame.moe import OWN\n    return OWN.pop()\n",
    "frame/reader.py": "from frame import parallel_state\nprint(parallel_state._FROM_OUTSIDE)\n",
}
BAD = """
from frame import short, moe as kept
from frame.moe import Log

def feature_rollback(args):
    if hasattr(args, "num_experts"):
        short._TRACKER = {}
    from frame import moe
    moe.INPUTS = []
"""
CORRECT = """
from frame import short, moe
from frame.moe import Log

def feature_rollback(args):
    short._LAYER_TRACKER = {}          # read by its own module through its global
    short._LAZY = None                 # not defined before its first use, but read there
    short._FROM_OUTSIDE = 1            # read through the module by another one
    moe.INPUTS.clear()
    moe.OWN = []                       # imported by name only when it is used
    Log.losses = None
"""

Check = Callable[..., list[tuple[str, int, str]]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """``check(rollback="…", …)``: kind, line and text of each fault in recovery code of these modules."""

    def faults(upstream: dict[str, str] | None = None, **modules: str) -> list[tuple[str, int, str]]:
        root = lay(tmp_path / "up", {**UPSTREAM, **(upstream or {})})
        code = lay(
            tmp_path / "code" / "ha", {"__init__.py": "", **{f"{name}.py": text for name, text in modules.items()}}
        )
        library = Library([sources.open_tree(root), sources.open_tree(code.parent)])
        report = recovery_code.check(sources.python_files(code), library, {})
        assert report.problems == []
        for fault in report.faults:
            assert Path(fault.path).parent == code
        return [(fault.kind, fault.line, fault.text) for fault in report.faults]

    return faults


def test_both_faults_of_a_rollback_are_found_with_their_lines(check: Check) -> None:
    dead, split = check(rollback=BAD)
    assert dead[:2] == ("dead reset", 7)
    assert "frame.parallel_state neither defines nor reads '_TRACKER'" in dead[2]
    assert "there is _LAYER_TRACKER" in dead[2]
    assert split[:2] == ("split reset", 9)
    assert "frame.moe:INPUTS" in split[2]
    assert "overlap.py:1 " in split[2]
    assert "clear()" in split[2]


def test_correct_rollback_has_no_fault(check: Check) -> None:
    assert check(rollback=CORRECT) == []


@pytest.mark.parametrize(
    "line",
    [
        "import frame.parallel_state as ps; ps._X = {}",
        "import frame.parallel_state; frame.parallel_state._X = {}",
        "from frame import parallel_state; alias = parallel_state; alias._X = {}",
        "import sys; sys.modules['frame.parallel_state']._X = {}",
        "import importlib; importlib.import_module('frame.parallel_state')._X = {}",
        "from frame import short; setattr(short, '_X', {})",
        "from frame import short; short._X: dict = {}",
        "from frame import short; short._X, y = {}, 1",
        "from frame.moe import Log; Log.losses_ = None",
        "from frame import moe; moe.Log.losses_ = None",
    ],
)
@pytest.mark.parametrize("where", ["module", "function", "method"])
def test_dead_reset_is_seen_however_it_is_written(check: Check, line: str, where: str) -> None:
    parts = line.split("; ")
    text = "\n".join(parts)
    if where == "function":
        text = "def rollback():\n    " + "\n    ".join(parts)
    elif where == "method":
        text = "class A:\n    def rollback(self):\n        " + "\n        ".join(parts)
    assert [fault[0] for fault in check(rollback=text)] == ["dead reset"]


@pytest.mark.parametrize(
    "line",
    [
        "self._X = {}",
        "unknown._X = {}",
        "import not_here; not_here._X = {}",
        "from frame import short; x = short._X",
        "from frame import short; del short._X",
        "import frame; frame.moe = None",  # a submodule
    ],
)
def test_what_is_no_dead_reset_is_not_reported(check: Check, line: str) -> None:
    assert check(rollback="def rollback(self, unknown):\n    " + "\n    ".join(line.split("; "))) == []


def test_module_that_makes_names_at_run_time_is_not_accused(check: Check) -> None:
    text = "from frame import loose\ndef rollback():\n    loose._X = {}\n"
    for body in ("def __getattr__(name): pass\n", "for n in range(3):\n    globals()[f'_{n}'] = n\n"):
        assert check({"frame/loose.py": body}, rollback=text) == []
    assert [fault[0] for fault in check({"frame/loose.py": "A = 1\n"}, rollback=text)] == ["dead reset"]


def test_split_reset_through_a_second_import_and_of_the_codes_own_global(check: Check) -> None:
    chain = {"frame/again.py": "from frame.overlap import INPUTS as OTHER\n"}
    text = "from frame import moe\ndef rollback():\n    moe.INPUTS = []\n"
    ((kind, _, message),) = check(chain, rollback=text)
    assert kind == "split reset"
    assert "again.py:1" in message
    own = "STATE = {}\ndef rollback():\n    global STATE\n    STATE = {}\n"
    assert [f[:2] for f in check(rollback=own, user="from ha.rollback import STATE\n")] == [("split reset", 4)]
    assert check(rollback=own, user="import ha.rollback\n") == []


@pytest.mark.parametrize(
    ("body", "faults"),
    [
        ("moe.Log.tracker['x'].zero_()", 1),
        ("for t in tensors:\n        t.fill_(0)", 1),
        ("moe.Log.tracker['x'] += total", 1),
        ("x = moe.Log.tracker['x']\n    x *= total", 1),
        ("torch._foreach_zero_(tensors)", 1),
        ("helper()", 1),
        ("other.helper()", 0),  # a method of something else
        ("fresh = torch.empty(3)\n    fresh.zero_()\n    tensors[0].copy_(fresh)", 0),
        ("torch.empty(3).fill_(1)", 0),
        ("count = 0\n    count += len(tensors)", 0),
        ("moe.Log.tracker['n'] += 1", 0),
        ("tensors[0].copy_(other)", 0),
    ],
)
@pytest.mark.parametrize("how", ["by name", "registered", "elsewhere"])
def test_in_place_work_on_a_tensor_is_a_fault_in_the_rollback_path(
    check: Check, body: str, faults: int, how: str
) -> None:
    name = {"by name": "feature_rollback", "registered": "act", "elsewhere": "act"}[how]
    text = f"import torch\nfrom frame import moe\nfrom ha.tools import helper\ndef {name}(tensors, other, total):\n    {body}\n"
    if how == "registered":
        text += "rt.register_rollback_handler(act)\n"
    found = check(rollback=text, tools="def helper(buffer):\n    buffer.zero_()\n")
    assert [fault[0] for fault in found] == ["unsafe reset"] * (0 if how == "elsewhere" else faults)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("rt.register_stop_handler(a)\nrt.register_stop_handler(b)", 1),
        ("register_stop_handler(a)\ndef f():\n    register_stop_handler(b)", 1),
        ("rt.register_stop_handler(a)\nrt.register_clean_handler(b)", 0),
        ("if A:\n    rt.register_stop_handler(a)\nelse:\n    rt.register_stop_handler(b)", 0),
        ("try:\n    rt.register_stop_handler(a)\nexcept E:\n    rt.register_stop_handler(b)", 0),
        ("if A:\n    rt.register_stop_handler(a)\nrt.register_stop_handler(b)", 1),
        ("rt.register_error_handler('x', a)\nrt.register_error_handler('y', b)", 0),
        ("rt.register_error_handler('x', a)\nrt.register_error_handler('x', b)", 1),
        ("s.register_handler(Kind.A, a)\ns.register_handler(Kind.B, b)", 0),
        ("s.register_handler(Kind.A, a)\ns.register_handler(Kind.A, b)", 1),
        ("def a(): pass\ndef b(): pass\nrt.register_stop_handler(a, 1)\nrt.register_stop_handler(b, 2)", 1),
        ("one.register_stop_handler(a)\ntwo.register_stop_handler(b)", 0),
        ("m.register_forward_hook(a)\nm.register_forward_hook(b)", 0),
    ],
)
def test_handler_registered_twice_is_a_slot_overwrite(check: Check, text: str, faults: int) -> None:
    found = check(setup=text)
    assert [fault[0] for fault in found] == ["slot overwrite"] * faults
    if found:
        assert "setup.py:" in found[0][2]


def test_handler_registered_in_two_files_is_a_slot_overwrite(check: Check) -> None:
    register = "from rt import register_stop_handler\nregister_stop_handler(f)\n"
    (fault,) = check(one=register, two="import rt\n\n\nrt.register_stop_handler(f)\n")
    assert fault[:2] == ("slot overwrite", 4)
    assert "one.py:2" in fault[2]


CATALOGUE = """
package = "frame"
[[state]]
name = "tracker"
why = "a test"
policy = "reset"
at = [
  { versions = ">=1,<2", location = "frame.parallel_state:_TRACKER" },
  { versions = ">=2", location = "frame.parallel_state:_LAYER_TRACKER" },
]
"""


@pytest.mark.parametrize(("text", "code"), [(BAD, 1), (CORRECT, 0)])
def test_command_reads_recovery_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int) -> None:
    lay(tmp_path / "up", UPSTREAM)
    lay(tmp_path / "ha", {"rollback.py": text, "broken.py": "def f(:\n"})
    (tmp_path / "c.toml").write_text(CATALOGUE)
    options = ["--source", str(tmp_path / "up"), "--catalogue", str(tmp_path / "c.toml"), str(tmp_path / "ha")]
    assert cli.main(["verify", *options]) == code
    out = capsys.readouterr().out
    assert "broken.py:1: not Python" in out
    assert cli.main(["verify", *options, "--json"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["well"] == (code == 0)
    assert [(f["kind"], f["line"]) for f in report["code"]["faults"]] == (
        [("dead reset", 7), ("split reset", 9)] if code else []
    )
    if code:
        path = tmp_path / "ha" / "rollback.py"
        assert f"{path}:7: dead reset: " in out
        assert "the catalogue has this state at frame.parallel_state:_LAYER_TRACKER" in out
        assert out.splitlines()[-1] == "2 faults in 2 files of recovery code"
    else:
        assert out.splitlines()[-1] == "all is well"


def test_modules_that_no_source_has_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay(tmp_path / "up", UPSTREAM)
    lay(tmp_path, {"r.py": "import not_here.state\ndef rollback():\n    not_here.state.X = 1\n", "c.toml": CATALOGUE})
    code = cli.main(
        ["verify", "--source", str(tmp_path / "up"), "--catalogue", str(tmp_path / "c.toml"), str(tmp_path / "r.py")]
    )
    assert code == 0
    assert "not checked: what the code assigns in not_here" in capsys.readouterr().out
