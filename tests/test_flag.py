# SPDX-License-Identifier: Apache-2.0
"""The flag: in the parser that Megatron builds, whatever was imported first; nothing else changes without it."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clusters import ROOT

import mindspeed_recovery
from mindspeed_recovery.frameworks import megatron_flag, megatron_loop

pytestmark = pytest.mark.timeout(120)

FLAG = "--enable-recovery-safe-globals"
CATALOGUE = """
[[state]]
name = "mine"
policy = "reset"
location = "my_package.losses:TRACKER"
why = "sums of my losses"
"""


@pytest.fixture
def catalogue(tmp_path: Path) -> str:
    file = tmp_path / "mine.toml"
    file.write_text(CATALOGUE)
    return str(file)


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    monkeypatch.setattr(megatron_loop, "install_when_loaded", lambda: None)
    return megatron_flag.add_recovery_arguments(argparse.ArgumentParser(allow_abbrev=False))


# ---- values --------------------------------------------------------------------------------------------------------------


def test_flag_is_off_by_default(parser):
    args = parser.parse_args([])
    assert not args.enable_recovery_safe_globals
    assert (args.recovery_patches, args.recovery_strict, args.recovery_drill) == ([], False, None)
    assert args.recovery_audit == "warn"


def test_values_are_read(parser, catalogue):
    options = ["--recovery-patches", catalogue, catalogue, "--recovery-max-retries", "0", "--recovery-strict"]
    args = parser.parse_args([FLAG, *options, "--recovery-drill", "1", "--recovery-audit", "error"])
    assert args.recovery_audit == "error"
    assert args.enable_recovery_safe_globals
    assert args.recovery_strict
    assert (args.recovery_patches, args.recovery_max_retries, args.recovery_drill) == ([catalogue, catalogue], 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([FLAG, "--recovery-patches", "/no/such/file.toml"], "--recovery-patches: /no/such/file.toml: cannot be read"),
        ([FLAG, "--recovery-max-retries", "-1"], "--recovery-max-retries: -1 is less than 0"),
        ([FLAG, "--recovery-max-retries", "many"], "--recovery-max-retries: 'many' is not a whole number"),
        ([FLAG, "--recovery-drill", "0"], "--recovery-drill: 0 is less than 1"),
        (["--recovery-drill", "3"], f"--recovery-drill: needs {FLAG}"),
        (["--recovery-strict"], f"--recovery-strict: needs {FLAG}"),
        (["--recovery-audit", "off"], f"--recovery-audit: needs {FLAG}"),
        ([FLAG, "--recovery-audit", "loud"], "--recovery-audit: invalid choice: 'loud'"),
        (["--recovery-max-retries", "3"], f"--recovery-max-retries: needs {FLAG}"),
    ],
)
def test_wrong_value_is_refused_while_parsing(parser, capsys, options, message):
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(options)
    assert exit.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


def test_catalogue_with_an_error_is_refused_with_its_place(parser, capsys, tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(CATALOGUE.replace("reset", "rest"))
    with pytest.raises(SystemExit):
        parser.parse_args([FLAG, "--recovery-patches", str(file)])
    assert "wrong.toml: entry 'mine': key 'policy': unknown policy 'rest'" in capsys.readouterr().err


def test_adding_the_options_twice_changes_nothing(parser):
    actions = list(parser._actions)
    assert megatron_flag.add_recovery_arguments(parser) is parser
    assert parser._actions == actions


def test_help_shows_one_group(parser):
    text = parser.format_help()
    assert text.count("\nrecovery:") == 1
    for option in (
        "--recovery-patches",
        "--recovery-max-retries",
        "--recovery-strict",
        "--recovery-drill",
        "--recovery-audit",
    ):
        assert option in text.split("\nrecovery:")[1]


def test_flag_installs_the_loop_and_its_absence_does_not(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(megatron_loop, "install_when_loaded", lambda: calls.append(1))
    parser = megatron_flag.add_recovery_arguments(argparse.ArgumentParser())
    parser.parse_args([])
    assert not calls
    parser.parse_known_args([FLAG, "--unknown"])
    assert calls


# ---- the framework's parser ----------------------------------------------------------------------------------------------

OLD_ARGUMENTS = """
import argparse
def add_megatron_arguments(parser):
    parser.add_argument("--lr", type=float)
    return parser
def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
"""


@pytest.fixture
def arguments(make_module, monkeypatch):
    """The argument module of 0.12, in small; loaded after the plugin, and the plugin installed again."""
    monkeypatch.setattr(megatron_loop, "install_when_loaded", lambda: None)
    for name in ("megatron", "megatron.training"):
        if name not in sys.modules:
            make_module(name)
    yield make_module("megatron.training.arguments", OLD_ARGUMENTS)
    megatron_flag.install()


def test_parser_of_a_script_with_its_own_arguments_knows_the_flag(arguments, monkeypatch):
    parse_args = arguments.parse_args  # by name, as scripts import it, before the plugin acts
    megatron_flag.install()

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--mine", type=int)
        return parser

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", FLAG, "--mine", "3", "--lr", "0.1"])
    args = parse_args(provider)
    assert (args.enable_recovery_safe_globals, args.mine, args.lr) == (True, 3, 0.1)
    assert sys.argv == ["pretrain_gpt.py", FLAG, "--mine", "3", "--lr", "0.1"]


def test_help_of_the_framework_shows_the_group(arguments, monkeypatch, capsys):
    megatron_flag.install()
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--help"])
    with pytest.raises(SystemExit) as exit:
        arguments.parse_args()
    assert exit.value.code == 0
    assert capsys.readouterr().out.count("--recovery-max-retries N") >= 1


def test_installing_twice_wraps_once_and_uninstalling_restores(arguments, monkeypatch):
    original = arguments.add_megatron_arguments
    megatron_flag.install()
    wrapped = arguments.add_megatron_arguments
    megatron_flag.install()
    assert arguments.add_megatron_arguments is wrapped
    assert wrapped.__wrapped__ is original
    megatron_flag.uninstall()
    assert arguments.add_megatron_arguments is original
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", FLAG])
    with pytest.raises(SystemExit):
        arguments.parse_args()


def test_framework_without_the_parser_function_is_left_alone(arguments):
    del arguments.add_megatron_arguments
    before = dict(vars(arguments))
    megatron_flag.install()
    assert vars(arguments) == before


# ---- import order, on the real framework ---------------------------------------------------------------------------------

# The CPU stand-ins come first in every order; they import the package, so the hook is taken back and set again.
ORDERS = {
    "plugin first": "PLUGIN; import megatron.core, megatron.training",
    "plugin after core": "import megatron.core; PLUGIN; import megatron.training",
    "plugin last": "import megatron.core, megatron.training; BEFORE; PLUGIN",
    "plugin twice": "PLUGIN; import megatron.training; PLUGIN; importlib.reload(mindspeed_recovery)",
}
SCRIPT = """
import argparse, importlib, json, sys
from mindspeed_recovery.frameworks import megatron_cpu, megatron_flag, megatron_loop
megatron_flag.uninstall()
megatron_cpu.install(training=True)
before = None
def snapshot():
    return {name: dict(vars(module)) for name, module in list(sys.modules.items())
            if module is not None and name.split(".")[0] == "megatron"}
def changed(before):
    return sorted(f"{name}:{attribute}" for name, attributes in before.items() for attribute, value in attributes.items()
                  if vars(sys.modules[name]).get(attribute) is not value)
def wrapped():
    return sorted(f"{name}:{attribute}" for name, attributes in snapshot().items() for attribute, value in attributes.items()
                  if getattr(value, "_recovery_wrapper", False) is True)
ORDER
from megatron.training.arguments import parse_args
answer = {"argv": list(sys.argv)}
off = parse_args(ignore_unknown_args=True)
answer["off"] = [off.enable_recovery_safe_globals, wrapped(), changed(before) if before else None]
sys.argv.append("--enable-recovery-safe-globals")
answer["on"] = [parse_args().enable_recovery_safe_globals, wrapped()]
megatron_loop.uninstall()
answer["undone"] = wrapped()
# Not --help itself: 0.19.2 has a help text of its own that argparse cannot print.
parser = sys.modules["megatron.training.arguments"].add_megatron_arguments(argparse.ArgumentParser())
answer["group"] = [action.dest for group in parser._action_groups if group.title == "recovery" for action in
                   group._group_actions]
answer["options"] = sorted(parser._option_string_actions)
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def answers(megatron) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": f"{megatron('0.19.2')}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    processes = {}
    for name, order in ORDERS.items():
        plugin = "import mindspeed_recovery; megatron_flag.install()"
        script = SCRIPT.replace("ORDER", order.replace("PLUGIN", plugin).replace("BEFORE", "before = snapshot()"))
        processes[name] = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
    outputs = {name: process.communicate(timeout=90) for name, process in processes.items()}
    return {name: json.loads(out.splitlines()[-1]) if out else error[-3000:] for name, (out, error) in outputs.items()}


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_imports_does_not_matter(answers, order):
    answer = answers[order]
    assert isinstance(answer, dict), answer
    hook = ["megatron.training.arguments:add_megatron_arguments"]
    assert answer["off"] == [False, hook, hook if order == "plugin last" else None]
    enabled, wrapped = answer["on"]
    assert enabled
    names = {location.split(":")[1] for location in megatron_loop.wrappers()}
    assert set(megatron_loop.wrappers()) <= set(wrapped)
    everywhere = {place.split(":")[1] for place in wrapped if place not in hook}  # modules that hold them by name
    assert everywhere == names
    assert answer["undone"] == hook
    assert answer["group"][0] == "enable_recovery_safe_globals"
    assert len(answer["group"]) == 6


def test_a_machine_without_tensorboard_trains_with_the_plugin():
    """Its jobs have no writer: nothing of the plugin needs one."""
    script = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorboard":
            raise ModuleNotFoundError(f"No module named '{name}'")
sys.meta_path.insert(0, Missing())
import mindspeed_recovery
from mindspeed_recovery import cli  # every command is defined here
from mindspeed_recovery.frameworks import megatron_job, megatron_loop
from mindspeed_recovery.logs import sinks, tensorboard
from mindspeed_recovery.runtimes import mindio, standalone
session = mindspeed_recovery.enable()
session.begin_step(1); session.before_update(1); session.stop(); session.clean(); session.before_rollback(0)
assert session.after_rollback().exact
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_torch_and_no_framework():
    code = (
        "import sys, mindspeed_recovery; print({m.split('.')[0] for m in sys.modules} & {'torch', 'megatron', 'numpy'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "set()"
    assert mindspeed_recovery.__version__


# ---- the command lines of the examples ------------------------------------------------------------------------------------

OTHER_OPTIONS = {
    "torchrun": {"--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port"},
    "MindSpeed": {
        "--moe-permutation-async-comm",
        "--tokenizer-name-or-path",
        "--use-fused-rmsnorm",
        "--use-fused-rotary-pos-emb",
        "--use-fused-swiglu",
    },
    "MindSpeed-LLM": {"--enable-high-availability", "--enable-hbmfault-repair"},
}
"""Options of the examples that other parsers than Megatron's register, as read in their sources."""


@pytest.mark.parametrize(
    ("script", "parsers"),
    [
        ("pretrain_mindspeed_llm.sh", ["torchrun", "MindSpeed", "MindSpeed-LLM"]),
        ("pretrain_megatron_npu.sh", ["torchrun"]),
    ],
)
def test_every_option_of_a_command_line_is_known(answers, script, parsers):
    file = ROOT / "examples" / script
    subprocess.run(["bash", "-n", str(file)], check=True, timeout=10)
    options = set(re.findall(r"(?<!\S)--[a-z][a-z0-9_-]*", file.read_text()))
    known = set(answers["plugin first"]["options"]).union(*(OTHER_OPTIONS[parser] for parser in parsers))
    assert not options - known
    assert FLAG in options
    for name in parsers:
        assert OTHER_OPTIONS[name] <= options, "nothing in the list is out of use"


# ---- the launcher --------------------------------------------------------------------------------------------------------


def python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=30)


SCRIPTS = {
    "arguments": "import sys; print(sys.argv, __name__, __file__, sys.path[0])",
    "exit code": "import sys; sys.exit(7)",
    "exit text": "raise SystemExit('no data')",
    "error": "def inner():\n    raise ValueError('deep')\ntry:\n    {}['x']\nexcept KeyError:\n    inner()\n",
    "syntax": "def f(:\n",
    "interrupt": "raise KeyboardInterrupt",
    "main": "import pickle, sys\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__ is sys.modules['__main__'].A)",
    "sibling": "import sibling_module; print(sibling_module.VALUE)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_behaves_as_if_python_had_been_given_it(tmp_path, name):
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    (tmp_path / "sibling_module.py").write_text("VALUE = 3\n")
    plain = python("script.py", "--lr", "1", cwd=tmp_path)
    launched = python("-m", "mindspeed_recovery.run", "script.py", "--lr", "1", cwd=tmp_path)
    assert launched.returncode == plain.returncode
    assert launched.stdout == plain.stdout.replace(str(tmp_path / "script.py"), "script.py")
    if name != "syntax":  # no frame of the script to begin at
        assert launched.stderr.replace(str(tmp_path) + os.sep, "") == plain.stderr.replace(str(tmp_path) + os.sep, "")
    else:
        assert launched.stderr.endswith(plain.stderr.split("\n", 1)[1])


def test_launcher_without_a_script_says_how_to_use_it(tmp_path):
    for argv, text in (([], "usage:"), (["missing.py"], "can't open script 'missing.py'")):
        done = python("-m", "mindspeed_recovery.run", *argv, cwd=tmp_path)
        assert done.returncode == 2
        assert text in done.stderr
