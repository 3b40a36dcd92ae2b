# SPDX-License-Identifier: Apache-2.0
"""`mindspeed-recovery audit` over the planted package, toy packages, damaged files and released megatron-core versions."""

from __future__ import annotations

import ast
import collections
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clusters import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from planted.cases import PLANTED
from test_sources import lay, wheel

from mindspeed_recovery import catalogue, cli
from mindspeed_recovery.core.policy import Policy
from mindspeed_recovery.tools import audit, audit_command, audit_facts, sources

pytestmark = pytest.mark.timeout(120)

PACKAGE = ROOT / "tests" / "planted"
DATA = ROOT / "tests" / "data"
VERSIONS = ("0.12.1", "0.15.3", "0.19.2")

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(path, …)``: exit code and JSON; ``text=True``: exit code and standard output."""

    def call(*arguments: str | Path, text: bool = False) -> tuple[int, Any]:
        capsys.readouterr()
        code = cli.main(["audit", *map(str, arguments), *([] if text else ["--json"])])
        out = capsys.readouterr().out
        return code, out if text else json.loads(out)

    return call


def locations(report: dict[str, Any]) -> set[str]:
    return {finding["location"] for finding in report["findings"]}


def found(folder: Path, run: Run, source: str, *more: str, name: str = "state") -> dict[str, dict[str, Any]]:
    """The findings in a module ``pkg.state`` with this source, by the last part of their location."""
    lay(folder, {"pkg/__init__.py": "", f"pkg/{name}.py": textwrap.dedent(source)})
    report = run(folder / "pkg", *more)[1]
    return {finding["location"].partition(":")[2]: finding for finding in report["findings"]}


# ---------------------------------------------------------------- the planted package


def test_each_hiding_place_is_found_and_nothing_else(run: Run) -> None:
    code, report = run(PACKAGE)
    assert code == 0
    assert locations(report) == {location for location, _ in PLANTED.values()}
    assert len(report["findings"]) == len(PLANTED) == 13
    assert {finding["status"] for finding in report["findings"]} == {"untracked"}


def test_hiding_places_are_called_by_their_kind(run: Run) -> None:
    kinds = {finding["location"]: finding["kind"] for finding in run(PACKAGE)[1]["findings"]}
    told = {
        "module global": "module global",
        "deque": "queue",
        "class attribute": "class attribute",
        "dataclass": "object in a global",
        "bound method": "bound method",
        "closure": "closure",
        "default argument": "mutable default",
        "lru_cache": "cached function",
        "memo decorator": "memo decorator",
        "function attribute": "function attribute",
        "globals()": "computed global",
    }
    assert {place: kinds[PLANTED[place][0]] for place in told} == told


def test_declared_states_are_tracked(run: Run, tmp_path: Path) -> None:
    rows = "\n".join(
        f'[[state]]\nname = "state-{number}"\nwhy = "planted"\npolicy = "reset"\nlocation = "{location}"\n'
        for number, (location, _) in enumerate(PLANTED.values())
    )
    file = tmp_path / "planted.toml"
    file.write_text(rows)
    code, report = run(PACKAGE, "--catalogue", file, "--fail-on", "untracked")
    assert code == 0
    assert report["counts"] == {"tracked": 13, "ignored": 0, "untracked": 0}
    file.write_text(rows.replace(PLANTED["closure"][0], "planted.state:another"))
    code, report = run(PACKAGE, "--catalogue", file, "--fail-on", "untracked", "--only", "untracked")
    assert code == 1
    assert locations(report) == {PLANTED["closure"][0]}


def test_entries_that_are_printed_load_and_cover_what_was_found(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(run(PACKAGE, "--toml", text=True)[1])
    assert len(catalogue.load(file).entries) == 13
    assert run(PACKAGE, "--catalogue", file)[1]["counts"]["untracked"] == 0


# ---------------------------------------------------------------- what is state, and what is not


def test_host_constants_numbers_and_registered_tensors_are_not_reported(run: Run, tmp_path: Path) -> None:
    source = """
        import torch

        TABLE = {"a": torch.float32}
        SCALE = torch.ones(1)
        SIZES = []
        LAST = None
        COUNT = 0


        def step(loss: torch.Tensor):
            global LAST, COUNT
            LAST = loss.detach().cpu()
            COUNT += loss.numel()
            SIZES.append(loss.shape)
            TABLE["loss"] = loss.item()


        class Layer(torch.nn.Module):
            def __init__(self, device):
                self.weight = torch.nn.Parameter(torch.ones(1, device=device))
                self.inner = torch.nn.Linear(2, 2)
                self.register_buffer("mask", torch.ones(1, device=device))
                self.size = 3
    """
    assert found(tmp_path, run, source) == {}
    device = source.replace("loss.detach().cpu()", "loss.detach()").replace(
        "self.size = 3", "self.size = torch.ones(1).cuda()"
    )
    assert set(found(tmp_path, run, device)) == {"LAST", "Layer.size"}


def test_a_tensor_is_followed_through_calls_to_the_global_behind_a_getter(run: Run, tmp_path: Path) -> None:
    source = """
        import torch

        _TRACKER = {}


        def get_tracker():
            return _TRACKER


        def save(name, loss, group=None):
            tracker = get_tracker()
            tracker[name] = {}
            tracker[name]["values"] = loss


        def forward(x):
            save("z", torch.logsumexp(x, -1))
    """
    finding = found(tmp_path, run, source)["_TRACKER"]
    assert (finding["holds"], finding["policy"]) == ("tensor", "reset")
    assert any("save" in writer for writer in finding["writers"])
    assert found(tmp_path, run, source.replace("torch.logsumexp(x, -1)", "x.shape")) == {}


def test_what_one_call_hands_over_does_not_come_out_of_another(run: Run, tmp_path: Path) -> None:
    source = """
        import torch

        A, B = None, None


        def same(value):
            return value


        def step(x):
            global A, B
            A = same(torch.ones(1, device="cuda"))
            B = same(3)
    """
    assert set(found(tmp_path, run, source)) == {"A"}


def test_annotations_of_numbers_rule_tensors_out(run: Run, tmp_path: Path) -> None:
    source = """
        import torch

        KEPT = None


        def keep(value: int):
            global KEPT
            KEPT = value


        def step(x):
            keep(torch.ones(1, device="cuda"))
    """
    assert found(tmp_path, run, source) == {}
    assert set(found(tmp_path, run, source.replace("value: int", "value"))) == {"KEPT"}


def test_handles_and_random_states_are_told_apart_from_tensors(run: Run, tmp_path: Path) -> None:
    source = """
        import torch

        STREAM = None
        GROUPS = {}
        STATES = {}


        def start(ranks):
            global STREAM
            STREAM = torch.cuda.Stream()
            GROUPS["dp"] = torch.distributed.new_group(ranks)
            STATES["rng"] = torch.cuda.get_rng_state()
    """
    findings = found(tmp_path, run, source)
    assert {name: (f["holds"], f["policy"]) for name, f in findings.items()} == {
        "STREAM": ("handle", "ignored"),
        "GROUPS": ("handle", "ignored"),
        "STATES": ("random state", "snapshot"),
    }


def test_attributes_of_modules_optimizers_and_what_they_hold(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        class Dispatcher:
            def dispatch(self, tokens):
                self.order = torch.argsort(tokens)


        class Transient:
            def use(self, tokens):
                self.order = torch.argsort(tokens)


        class Layer(torch.nn.Module):
            def __init__(self):
                self.dispatcher = Dispatcher()

            def forward(self, x):
                self.cached = x.detach()


        class Adam(torch.optim.Optimizer):
            def step(self):
                self.scale = torch.ones(1, device="cuda")
    """
    findings = found(tmp_path, run, source)
    assert {name: finding["rule"] for name, finding in findings.items()} == {
        "Dispatcher.order": "AUD203",
        "Layer.cached": "AUD201",
        "Adam.scale": "AUD202",
    }
    assert {finding["on"] for finding in findings.values()} == {"instances"}


def test_what_is_called_is_no_tensor_and_layers_are_the_modules_own(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        def act(x):
            return torch.relu(x)


        def make(name):
            return act


        class Wrapper(torch.nn.Module):
            def __init__(self, model):
                self.model = model.to(device="cuda")
                self.act = make("relu")(3)
                self.layers = torch.nn.ModuleList()
                self.layers.append(torch.nn.Linear(2, 2))

            def forward(self, x):
                return self.act(self.model(x))
    """
    assert found(tmp_path, run, source) == {}
    assert set(found(tmp_path, run, source.replace("self.act(self.model(x))", "x"))) == {"Wrapper.model", "Wrapper.act"}
    plain = source.replace("import torch\n", "import torch\nfrom torch import nn\n", 1).replace("torch.nn.", "nn.")
    assert found(tmp_path, run, plain) == {}


def test_a_write_to_an_attribute_that_no_candidate_has_says_nothing_of_them(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        class Left:
            def __init__(self):
                self.size = 1


        class Right:
            def __init__(self):
                self.scale = torch.ones(1, device="cuda")


        class Layer(torch.nn.Module):
            def __init__(self):
                self.meta = {"left": Left(), "right": Right()}

            def forward(self, x):
                self.meta["right"].scale = x.detach()
                self.meta["right"].history = x.detach()
    """
    assert set(found(tmp_path, run, source)) == {"Right.scale"}
    only = source.replace('"left": Left(), ', "")
    assert set(found(tmp_path, run, only)) == {"Right.scale", "Right.history"}


def test_private_names_are_told_as_python_stores_them(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        class Adam(torch.optim.Optimizer):
            def step(self):
                self.__fill(torch.ones(1, device="cuda"))

            def __fill(self, value):
                self.__flat = value

            def __len__(self):
                return 1
    """
    assert set(found(tmp_path, run, source)) == {"Adam._Adam__flat"}


def test_what_an_autograd_function_is_given_is_followed(run: Run, tmp_path: Path) -> None:
    source = """
        import torch

        HANDLES = {}


        class Wait(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, handles):
                ctx.handles = handles
                return x

            @staticmethod
            def backward(ctx, grad):
                ctx.handles["last"] = torch.distributed.all_reduce(grad, async_op=True)
                return grad, None


        def step(x):
            return Wait.apply(x, HANDLES)
    """
    assert {name: f["holds"] for name, f in found(tmp_path, run, source).items()} == {"HANDLES": "handle"}
    assert found(tmp_path, run, source.replace("x, HANDLES)", "x, {})")) == {}


def test_a_function_that_is_handed_over_answers_the_call_that_did_so(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        def default(value, other):
            return other() if callable(other) else other


        class Layer(torch.nn.Module):
            def __init__(self, size):
                self.size = default(None, size)
                self.mask = default(None, lambda: torch.ones(1, device="cuda"))
    """
    assert set(found(tmp_path, run, source)) == {"Layer.mask"}


def test_data_sets_are_on_the_host_and_trainers_last(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        class Adam(torch.optim.Optimizer):
            pass


        class Rows(torch.utils.data.Dataset):
            def __init__(self, rows):
                self.rows = torch.cat(rows)
                self.table = torch.zeros(3, device="cuda")


        class Trainer:
            def __init__(self, rows):
                self.data = Rows(rows)
                self.optimizer = Adam()
                self.average = {}

            def keep(self, name, tensor):
                self.average[name] = tensor.detach()
    """
    assert set(found(tmp_path, run, source)) == {"Rows.table", "Trainer.average"}
    assert found(tmp_path, run, source.replace("self.optimizer = Adam()", "pass")) == {}


def test_tensors_keep_their_device_through_their_methods(run: Run, tmp_path: Path) -> None:
    source = """
        import torch

        KEPT, STATES = [], {}


        def keep(x, accelerator):
            KEPT.append(torch.tensor(()).new_empty(3, device=x.device))
            STATES["rng"] = accelerator.get_rng_state()
    """
    findings = found(tmp_path, run, source)
    assert {name: f["holds"] for name, f in findings.items()} == {"KEPT": "tensor", "STATES": "random state"}
    assert found(tmp_path, run, source.replace("x.device", '"cpu"').replace("get_rng_state", "get_state")) == {}


def test_a_local_list_holds_what_is_put_in_it(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        class Engine(torch.nn.Module):
            def reserve(self, shape, count, pinned):
                buffers = []
                for _ in range(count):
                    buffer = torch.zeros(shape, device="cuda")
                    if pinned:
                        buffer = self.accelerator.pin_memory(buffer)
                    buffers.append(buffer)
                self.buffers = buffers
    """
    assert set(found(tmp_path, run, source)) == {"Engine.buffers"}
    assert found(tmp_path, run, source.replace("buffers.append(buffer)", "buffers.append(buffer.shape)")) == {}


def test_the_apply_of_an_autograd_function_is_bound_to_no_object(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.kept = x.detach()
                return x


        scale = Scale.apply
    """
    assert found(tmp_path, run, source) == {}


def test_singletons_of_a_metaclass_or_a_decorator(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        class Single(type):
            _instances = {}

            def __call__(cls, *args):
                if cls not in cls._instances:
                    cls._instances[cls] = super().__call__(*args)
                return cls._instances[cls]


        class Buffers(metaclass=Single):
            def __init__(self):
                self.buffer = torch.empty(3, device="cuda")


        def single(cls):
            kept = {}

            def make(*args):
                if cls not in kept:
                    kept[cls] = cls(*args)
                return kept[cls]

            return make


        @single
        class Pool:
            def __init__(self):
                self.block = torch.empty(3, device="cuda")


        @single
        class Counter:
            def __init__(self):
                self.count = 0
    """
    assert {name: f["rule"] for name, f in found(tmp_path, run, source).items()} == {
        "Single._instances": "AUD111",
        "Pool": "AUD108",
    }


def test_who_holds_an_object_by_name_is_told(run: Run, tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/a.py": "import torch\nQUEUE = []\ndef put(x):\n    QUEUE.append(x.detach())\n",
            "pkg/b.py": "from pkg.a import QUEUE\ndef take():\n    return QUEUE.pop()\n",
            "pkg/c.py": "from pkg import a\ndef take():\n    return a.QUEUE.pop()\n",
        },
    )
    (finding,) = run(tmp_path / "pkg")[1]["findings"]
    assert finding["importers"] == ["pkg.b"]
    assert "held by name: pkg.b" in run(tmp_path / "pkg", text=True)[1]


def test_a_comment_with_a_reason_ignores_a_finding(run: Run, tmp_path: Path) -> None:
    source = "import torch\nA = None  # recovery: ignore[{}]{}\ndef f(x):\n    global A\n    A = x.detach()\n"
    lay(tmp_path, {"pkg/__init__.py": "", "pkg/a.py": source.format("AUD101", " rebuilt by f")})
    code, report = run(tmp_path / "pkg", "--fail-on", "untracked")
    assert code == 0
    (finding,) = report["findings"]
    assert (finding["status"], finding["by"]) == ("ignored", "rebuilt by f")
    for rule, reason, problems in (("AUD111", " another rule", 0), ("AUD101", "", 1)):
        lay(tmp_path, {"pkg/a.py": source.format(rule, reason)})
        code, report = run(tmp_path / "pkg", "--fail-on", "untracked")
        assert code == 1
        assert len(report["problems"]) >= problems


def test_a_part_that_no_entry_names_stays_untracked(run: Run, tmp_path: Path) -> None:
    source = """
        import torch


        class Pool:
            def __init__(self):
                self.first = torch.empty(3, device="cuda")
                self.second = torch.empty(3, device="cuda")


        POOL = Pool()
    """
    file = tmp_path / "mine.toml"
    row = '[[state]]\nname = "{0}"\nwhy = "x"\npolicy = "reset"\nlocation = "pkg.state:POOL.{0}"\n'
    file.write_text(row.format("first"))
    finding = found(tmp_path, run, source, "--catalogue", str(file))["POOL"]
    assert (finding["status"], finding["missing"]) == ("untracked", ["second"])
    file.write_text(row.format("first") + row.format("second"))
    assert found(tmp_path, run, source, "--catalogue", str(file))["POOL"]["status"] == "tracked"


# ---------------------------------------------------------------- what can be audited


def test_a_wheel_a_folder_a_file_and_an_installed_package(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\nA = None\ndef f(x):\n    global A\n    A = x.detach()\n"
    files = {"some_pkg/__init__.py": "", "some_pkg/a.py": text}
    lay(tmp_path / "tree", files)
    archive = wheel(tmp_path / "some_pkg-1.0-py3-none-any.whl", files)
    monkeypatch.syspath_prepend(str(tmp_path / "tree"))
    folder = tmp_path / "tree"
    for path in (folder, folder / "some_pkg", folder / "some_pkg" / "a.py", archive, "some_pkg"):
        assert locations(run(path)[1]) == {"some_pkg.a:A"}, path
    assert "some_pkg" not in sys.modules


def test_namespace_packages_and_source_folders_have_the_names_that_python_gives_them(run: Run, tmp_path: Path) -> None:
    text = "import torch\nA = None\ndef f(x):\n    global A\n    A = x.detach()\n"
    lay(tmp_path / "one", {"space/core/__init__.py": "", "space/core/a.py": "from space.core import b\n" + text})
    lay(tmp_path / "two", {"src/thing/__init__.py": "", "src/thing/a.py": text})
    assert locations(run(tmp_path / "one" / "space")[1]) == {"space.core.a:A"}
    assert locations(run(tmp_path / "one")[1]) == {"space.core.a:A"}
    assert locations(run(tmp_path / "two")[1]) == {"thing.a:A"}


def test_a_path_that_is_not_there_is_bad_use(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("no/such/folder", "no_such_package"):
        assert cli.main(["audit", path]) == 2
        error = capsys.readouterr().err
        assert error.startswith("mindspeed-recovery: ")
        assert error.count("\n") == 1


def test_damaged_files_are_one_line_each(run: Run, tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/good.py": "import torch\nA = None\ndef f(x):\n    global A\n    A = x.detach()\n",
            "pkg/syntax.py": "def f(:\n",
            "pkg/null.py": b"a = 1\0\n",
            "pkg/latin.py": b"a = 'caf\xe9'\n",
            "pkg/said.py": b"# -*- coding: latin-1 -*-\n# caf\xe9\nimport torch\nB = []\ndef g(x):\n    B.append(x.detach())\n",
            "pkg/codec.py": b"# -*- coding: no-such-codec -*-\na = 1\n",
            "pkg/deep.py": "a = " + "(" * 5000 + ")" * 5000 + "\n",
            "pkg/long.py": "a = " + "+".join(["b"] * 950) + "\n",
            "pkg/attributes.py": "a = b" + ".c" * 3000 + "\n",
            "pkg/large.py": b"a = 1\n" * (10 << 17),
            "pkg/binary.py": bytes(range(256)) * 10,
        },
    )
    os.symlink("loop.py", tmp_path / "pkg" / "loop.py")
    os.symlink(tmp_path / "pkg", tmp_path / "pkg" / "again")
    code, report = run(tmp_path / "pkg")
    assert code == 0
    assert locations(report) == {"pkg.good:A", "pkg.said:B"}
    lines = [Path(problem.split(": ")[0].split(".py")[0]).name for problem in report["problems"]]
    assert len(lines) == len(set(lines))
    assert {"syntax", "null", "latin", "codec", "deep", "large", "binary", "loop"} <= set(lines)
    assert all("\n" not in problem for problem in report["problems"])
    assert "not read: " in run(tmp_path / "pkg", text=True)[1]


_WORDS = [
    "global", "torch", ".zeros(1,device=d)", "X", "=", "self", ".", "(", ")", "[", "]", "def f(a,b={}):",
    "class C:", "\n", "\n    ", "\n        ", "lambda:", "nonlocal", "import", "from", "*", "@", "lru_cache",
    "return", "yield", ":", "globals()['X']", "setattr(", "super().__call__", "for x in", "async", "await",
    "match X:", "case", "\\", "'", "é", "# recovery: ignore[AUD101]", "with", "as", ",", "if", "else", "try:",
    "except", "del", "{", "}", "...", "f'{X}'",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(_WORDS), max_size=40).map(" ".join) | st.text(max_size=80) | st.binary(max_size=80))
def test_no_source_ends_the_audit(source: str | bytes) -> None:
    data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
    file = sources.SourceFile("pkg.a", "pkg/a.py", lambda: data)
    result = audit.audit([file])
    assert len(result.problems) <= 2
    catalogue.parse(audit_command.to_toml(result.judged), "printed.toml")


@settings(max_examples=40, deadline=None)
@given(seed=st.randoms(use_true_random=False))
def test_no_mutilated_module_ends_the_audit(seed: Any) -> None:
    lines = (PACKAGE / "state.py").read_text().splitlines()
    for _ in range(seed.randint(1, 6)):
        at = seed.randrange(len(lines))
        lines[at] = seed.choice(
            ["", lines[seed.randrange(len(lines))].lstrip(), "    " + lines[at], lines[at][: len(lines[at]) // 2]]
        )
    data = "\n".join(lines).encode()
    audit.audit([sources.SourceFile("planted.state", "state.py", lambda: data)])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_no_catalogue_file_crashes_the_command(tmp_path_factory: pytest.TempPathFactory, text: str | bytes) -> None:
    file = tmp_path_factory.mktemp("catalogue") / "mine.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    assert cli.main(["audit", str(PACKAGE / "cases.py"), "--catalogue", str(file)]) in (0, 2)


def test_nothing_is_imported_and_torch_is_not_needed(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "pkg/__init__.py": "raise SystemExit('imported')",
            "pkg/a.py": "import torch\nA = []\ndef f(x):\n    A.append(x.detach())\n",
        },
    )
    program = (
        "import sys; sys.modules['torch'] = None; from mindspeed_recovery import cli;"
        f"code = cli.main(['audit', {str(tmp_path / 'pkg')!r}]); assert 'pkg' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pkg.a:A" in done.stdout


# ---------------------------------------------------------------- released versions


def test_each_file_is_read_and_parsed_once(
    megatron: Callable[[str], Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: collections.Counter[str] = collections.Counter()
    real = sources.SourceFile.parse

    def parse(self: sources.SourceFile, data: bytes | None = None) -> ast.Module:
        parsed[self.module] += 1
        return real(self, data)

    monkeypatch.setattr(sources.SourceFile, "parse", parse)
    report = run(megatron("0.19.2") / "megatron")[1]
    assert report["files"] == len(parsed) > 500
    assert set(parsed.values()) == {1}


def test_facts_hold_no_tree() -> None:
    tree = ast.parse((PACKAGE / "state.py").read_text())
    facts = audit_facts.read(tree, "planted.state", "state.py")
    seen: set[int] = set()
    waiting: list[Any] = [facts]
    while waiting:
        value = waiting.pop()
        assert not isinstance(value, ast.AST)
        if id(value) in seen or isinstance(value, (str, int)):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif hasattr(value, "__dict__"):
            waiting += vars(value).values()
    assert len(seen) > 100


CENSUS = json.loads((DATA / "audit_census.json").read_text(encoding="utf-8"))
SAMPLE = json.loads((DATA / "audit_sample.json").read_text(encoding="utf-8"))


def test_the_known_state_of_released_versions_is_found(megatron: Callable[[str], Path], run: Run) -> None:
    missed, total = [], 0
    for version in VERSIONS:
        there = locations(run(megatron(version))[1])
        states = [row["location"] for row in CENSUS["states"] if row["version"] == version]
        missed += [(version, location) for location in states if location not in there]
        total += len(states)
    assert total > 55
    assert 1 - len(missed) / total >= 0.95, missed


def test_the_catalogue_is_recognised(megatron: Callable[[str], Path], run: Run) -> None:
    for version in VERSIONS:
        findings = {f["location"]: f for f in run(megatron(version))[1]["findings"]}
        trackers = [
            f for f in findings.values() if f["by"] == "mtp-loss-tracker" or "mtp-loss-tracker" in f["by"].split(", ")
        ]
        assert [f["status"] for f in trackers] == ["tracked"], version
        assert any(f["status"] == "ignored" and f["by"] for f in findings.values())


def test_findings_are_mostly_right() -> None:
    rows = SAMPLE["findings"]
    assert len({(row["tree"], row["rule"], row["location"]) for row in rows}) == len(rows) == 100
    assert sum(row["holds"] for row in rows) / len(rows) >= 0.7
    assert all(row.get("note") for row in rows if not row["holds"])


def test_trees_that_the_rules_were_not_made_on() -> None:
    trees = json.loads((DATA / "audit_unseen.json").read_text(encoding="utf-8"))["trees"]
    assert len(trees) >= 4
    for tree in trees:
        assert len(set(tree["sample"])) == 40, tree["tree"]
        assert set(tree["wrong"]) <= set(tree["sample"]), tree["tree"]
        assert set(tree["missed"]) < set(tree["known"]), tree["tree"]
        assert len(tree["wrong"]) <= 0.3 * 40, tree["tree"]
        assert len(tree["missed"]) <= 0.2 * len(tree["known"]), tree["tree"]


def test_what_was_labelled_is_still_reported(megatron: Callable[[str], Path], run: Run) -> None:
    for version in ("0.12.1", "0.19.2"):
        wanted = {
            row["location"] for row in SAMPLE["findings"] if row["tree"] == f"megatron-core-{version}" and row["holds"]
        }
        assert wanted
        assert wanted <= locations(run(megatron(version))[1])


def test_printed_entries_of_a_release_load(megatron: Callable[[str], Path], run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(run(megatron("0.12.1"), "--only", "untracked", "--toml", text=True)[1])
    entries = catalogue.load(file).entries
    assert len(entries) > 30
    assert {row.spec.policy for rows in entries.values() for row in rows} > {Policy.RESET, Policy.IGNORED}
    assert run(megatron("0.12.1"), "--catalogue", file)[1]["counts"]["untracked"] == 0


def test_rules_name_no_framework() -> None:
    names = re.compile(r"megatron|mindspeed(?!_recovery|-recovery)|deepspeed|fairseq|nemo|moe", re.IGNORECASE)
    for file in (ROOT / "mindspeed_recovery" / "tools").glob("audit*.py"):
        assert not names.search(file.read_text(encoding="utf-8")), file
