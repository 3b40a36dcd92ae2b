# SPDX-License-Identifier: Apache-2.0
"""`mindspeed-recovery verify` over toy packages and over released megatron-core versions."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import keyword
import os
import random
import re
import shutil
import string
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from test_sources import lay, wheel

from mindspeed_recovery import catalogue, cli
from mindspeed_recovery.tools import library, progress, sources, verify

pytestmark = pytest.mark.timeout(120)

CI_VERSIONS = ("0.12.1", "0.15.3", "0.19.2")
VERSIONS = (
    "0.6.0", "0.7.0", "0.8.0", "0.9.0", "0.10.0", "0.11.0", "0.12.1", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1",
    "0.17.1", "0.18.2", "0.19.2",
)  # fmt: skip
full = pytest.mark.full

NOT_IN_WHEELS = {
    "nccl-ep-over-budget": "from 0.20 on, which is not released",
    "nccl-ep-required-tokens": "from 0.20 on, which is not released",
    "rng-cpu": "torch binds this name in C++",
    "rng-numpy": "numpy.random.mtrand is a compiled module",
    "gtp-bookkeeping.graph-wgrad-rings": "from 0.20 on, which is not released",
    "gtp-bookkeeping.pools": "from 0.20 on, which is not released",
    "legacy-feature-bank": "megatron.legacy is in checkouts of Megatron-LM only",
}
"""Entries whose location no text of a wheel shows, and why. `test_generators_that_no_text_shows_are_there` checks two."""

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("verify", …)``: exit code and JSON; ``text=True``: exit code and standard output."""

    def call(*arguments: str | Path, text: bool = False) -> tuple[int, Any]:
        capsys.readouterr()
        code = cli.main([*map(str, arguments), *([] if text else ["--json"])])
        out = capsys.readouterr().out
        return code, out if text else json.loads(out)

    return call


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {entry["entry"]: entry["status"] for source in report["sources"] for entry in source["entries"]}


# ---------------------------------------------------------------- released versions


def versions() -> list[Any]:
    return [pytest.param(v, marks=() if v in CI_VERSIONS else full) for v in VERSIONS]


@pytest.mark.parametrize("version", versions())
def test_catalogue_fits_the_release(version: str, megatron: Callable[[str], Path], run: Run) -> None:
    code, report = run("verify", "--source", megatron(version))
    (source,) = (s for s in report["sources"] if s["package"] == "megatron-core")
    assert source["version"] == version
    assert code == 0, [entry for entry in source["entries"] if entry["status"] != "found"]
    assert source["problems"] == []
    tree = megatron(version)
    for entry in source["entries"]:
        module = Path(*entry["location"].split(":")[0].split("."))
        if entry["status"] == "optional":
            assert not (tree / module).is_dir(), entry
            assert not (tree / module.with_suffix(".py")).exists(), entry
        if entry["location"].startswith("megatron.") and entry["entry"] not in NOT_IN_WHEELS:
            assert entry["status"] == "found", entry


@full
@pytest.mark.timeout(400)
def test_each_entry_is_found_in_some_release(megatron: Callable[[str], Path], run: Run) -> None:
    found: set[str] = set()
    for version in VERSIONS:
        report = run("verify", "--source", megatron(version))[1]
        found |= {entry for entry, status in statuses(report).items() if status == "found"}
    file = next(file for file in catalogue.shipped() if file.name == "megatron-core.toml")
    assert set(catalogue.load(file).entries) - found == set(NOT_IN_WHEELS)


def test_generators_that_no_text_shows_are_there() -> None:
    import numpy.random.mtrand
    import torch

    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(numpy.random.mtrand._rand, numpy.random.RandomState)


def test_wheel_gives_the_same_as_its_unpacked_folder(megatron: Callable[[str], Path], tmp_path: Path, run: Run) -> None:
    root = megatron("0.12.1")
    packed = tmp_path / "megatron_core-0.12.1-py3-none-any.whl"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(root.rglob("*.py")):
            archive.write(path, path.relative_to(root))
    code, report = run("verify", "--source", packed)
    assert code == 0
    assert statuses(report) == statuses(run("verify", "--source", root)[1])
    places = [entry["place"] for entry in report["sources"][0]["entries"] if entry["location"].startswith("megatron.")]
    places = [place for place in places if place]
    assert len(places) > 50
    assert all(re.fullmatch(rf"{packed.name}/megatron/[\w/]+\.py:\d+", place) for place in places)


# ---------------------------------------------------------------- each entry, renamed and removed


class Copies:
    """A version's modules in memory, of which some may be changed; a text that was seen before is not parsed again."""

    def __init__(self, root: Path) -> None:
        self.tree = sources.open_tree(root)
        self.files = {file.module: file for file in self.tree.modules("megatron") if not file.compiled}
        self.texts = {module: file.text() for module, file in self.files.items()}
        self._parsed: dict[tuple[str, str], Any] = {}

    def check(self, entry: str, version: str, changed: dict[str, str]) -> verify.Finding:
        texts = {**self.texts, **changed}
        files = [
            dataclasses.replace(file, path=module, read=texts[module].encode) for module, file in self.files.items()
        ]
        tree = sources.SourceTree("copy", lambda top: files if top == "megatron" else (), lambda pattern: ())
        loaded = catalogue.load(CATALOGUE)
        others = [rows[-1].spec.location for name, rows in loaded.entries.items() if name != entry]
        alone = dataclasses.replace(loaded, entries={entry: loaded.entries[entry]})
        (finding,) = verify.check(alone, tree, version=Version(version), known=others).findings
        return finding


@pytest.fixture(scope="module")
def copies(megatron: Callable[[str], Path]) -> Iterator[Callable[[str], Copies]]:
    parse = library.Library._parse
    seen: dict[tuple[str, bytes], Any] = {}

    def remembered(self: Any, file: Any) -> Any:
        key = (file.module, file.read())
        if seen.get(key) is None:
            seen[key] = parse(self, file)
        return seen[key]

    patch = pytest.MonkeyPatch()
    patch.setattr(library.Library, "_parse", remembered)
    yield functools.cache(lambda version: Copies(megatron(version)))
    patch.undo()


class Removed(ast.NodeTransformer):
    """Every statement that binds a name or an attribute of that name is taken out."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _is_it(self, node: ast.AST | None) -> bool:
        names = (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
        return self.name in names

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        parts = [t for target in node.targets for t in ([target, *getattr(target, "elts", ())])]
        return None if any(map(self._is_it, parts)) else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return None if self._is_it(node.target) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return None if self._is_it(node) else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        call = node.value
        named = isinstance(call, ast.Call) and call.args and getattr(call.args[0], "value", None) == self.name
        return None if named else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        node.names = [alias for alias in node.names if self.name not in (alias.name, alias.asname)]
        return node if node.names else None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body",):
            if getattr(node, field, None) == [] and not isinstance(node, ast.Module):
                setattr(node, field, [ast.Pass()])
        return node


def renamed(text: str, name: str, new: str) -> str:
    return re.sub(rf"\b{re.escape(name)}\b", new, text)


def removed(text: str, name: str) -> str:
    return ast.unparse(ast.fix_missing_locations(Removed(name).visit(ast.parse(text))))


CATALOGUE = Path(__file__).resolve().parent.parent / "patches" / "megatron-core.toml"


def targets() -> list[Any]:
    """Every entry with the newest release that it can be tried on, and that release's location of it."""
    result = []
    for name, rows in catalogue.load(CATALOGUE).entries.items():
        for version in sorted(VERSIONS, key=lambda v: (v in CI_VERSIONS, Version(v)), reverse=True):
            row = next((row for row in rows if row.covers(Version(version))), None)
            if row is not None:
                break
        else:
            continue
        location = row.spec.location
        if location.module.startswith("megatron.") and name not in NOT_IN_WHEELS:
            marks = () if version in CI_VERSIONS else full
            result.append(pytest.param(version, name, location, id=name, marks=marks))
    return result


def test_all_entries_but_those_outside_of_megatron_are_tried() -> None:
    tried = {param.id for param in targets()}
    foreign = {"rng-cpu", "rng-cuda", "rng-python", "rng-numpy"}
    assert tried | foreign | set(NOT_IN_WHEELS) == set(catalogue.load(CATALOGUE).entries)


@pytest.mark.parametrize(("version", "entry", "location"), targets())
def test_entry_that_is_renamed_or_removed_upstream_is_named(
    version: str, entry: str, location: Any, copies: Callable[[str], Copies]
) -> None:
    copy, name, first = copies(version), location.path[-1], location.path[0]
    new = "q" + "".join(random.Random(entry).choices(string.ascii_lowercase, k=9))
    untouched = copy.check(entry, version, {})
    assert str(untouched.status) == "found", untouched
    definition = untouched.place.split(":")[0]  # where it is defined, and where the catalogue looks
    texts = {module: copy.texts[module] for module in (location.module, definition)}
    changes = {
        "renamed": {module: renamed(text, name, new) for module, text in texts.items()},
        "removed": {module: removed(text, name) for module, text in texts.items()},
        "holder renamed": {module: renamed(text, first, new) for module, text in texts.items()},
        "module emptied": {location.module: ""},
    }
    for what, changed in changes.items():
        finding = copy.check(entry, version, changed)
        assert finding.entry == entry
        assert str(finding.status) in ("gone", "renamed", "another shape"), (what, finding)


@pytest.mark.parametrize("entry", ["moe-aux-loss-tracker", "router-expert-bias", "causal-mask-cache"])
def test_command_names_the_entry_that_a_changed_tree_lost(
    entry: str, megatron: Callable[[str], Path], tmp_path: Path, run: Run
) -> None:
    version, location = "0.12.1", next(param.values[2] for param in targets() if param.id == entry)
    location = next(
        row for row in catalogue.load(CATALOGUE).entries[entry] if row.covers(Version(version))
    ).spec.location
    shutil.copytree(
        megatron(version) / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("*.so", "*.pyc")
    )
    assert run("verify", "--source", tmp_path)[0] == 0
    path = (tmp_path / Path(*location.module.split("."))).with_suffix(".py")
    path.write_text(renamed(path.read_text(), location.path[-1], location.path[-1] + "_v2"))
    code, report = run("verify", "--source", tmp_path)
    lost = {name: status for name, status in statuses(report).items() if status in ("gone", "renamed")}
    assert (code, lost) == (1, {entry: "renamed"})
    (finding,) = (e for e in report["sources"][0]["entries"] if e["entry"] == entry)
    assert finding["candidates"][0].startswith(f"{location.path[-1]}_v2 (")


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,30}", fullmatch=True)


@full
@pytest.mark.timeout(400)
@settings(max_examples=300, deadline=None)
@given(st.sampled_from([param for param in targets() if not param.marks]), NAMES)
def test_no_new_name_hides_the_loss_of_the_old_one(copies: Callable[[str], Copies], param: Any, new: str) -> None:
    version, entry, location = param.values
    copy, name = copies(version), location.path[-1]
    definition = copy.check(entry, version, {}).place.split(":")[0]
    texts = {module: copy.texts[module] for module in (location.module, definition)}
    assume(new != name and not keyword.iskeyword(new))
    assume(not any(re.search(rf"\b{new}\b", text) for text in texts.values()))
    changed = {module: renamed(text, name, new) for module, text in texts.items()}
    assert not copy.check(entry, version, changed).status.well


# ---------------------------------------------------------------- what each finding means

MODULE = """
import functools
from toy.other import BORROWED, Workspace

TRACKER = {}
BOX = None
OBJECT = None
COUNTER: "Counter" = None
FLAG = False

def make():
    global OBJECT
    OBJECT = Counter()

def clear(): pass
def clear_one(which): pass

@functools.lru_cache
def mask(n): return n

def plain(n): return n

class Counter:
    shared = {}
    def __init__(self):
        self.count = 0
        self.register_buffer("total", None)
    @property
    def double(self): return 2 * self.count
    @functools.lru_cache
    def forward(self): pass

class Derived(Counter):
    pass
"""
TOY = {
    "toy/__init__.py": "",
    "toy/info.py": "__version__ = '1.2.3'",
    "toy/mod.py": MODULE,
    "toy/other.py": "BORROWED = []\nclass Workspace:\n    def __init__(self): self.buffer = {}\n",
}


def toy_catalogue(path: Path, *entries: str) -> Path:
    """``entries``: TOML of states, without name and why. The toy's flag comes first."""
    head = 'package = "toy"\nversion_from = "toy.info:__version__"\n'
    states = [
        f'[[state]]\nname = "entry-{number}"\nwhy = "a test"\n{text}\n'
        for number, text in enumerate(('policy = "reset"\nlocation = "toy.mod:FLAG"', *entries))
    ]
    path.write_text(head + "\n".join(states))
    return path


@pytest.fixture
def toy(tmp_path: Path, run: Run) -> Callable[..., dict[str, Any]]:
    """``toy(entry, files)``: what verify says about one entry; ``files`` replace those of the toy."""

    def check(entry: str, files: dict[str, str | bytes] | None = None) -> dict[str, Any]:
        root = lay(tmp_path / "toy", {**TOY, **(files or {})})
        code, report = run("verify", "--source", root, "--catalogue", toy_catalogue(tmp_path / "toy.toml", entry))
        finding: dict[str, Any] = report["sources"][0]["entries"][1]
        assert code == (0 if finding["status"] in ("found", "optional", "unchecked") else 1)
        return finding

    return check


GOOD = [
    'policy = "reset"\nlocation = "toy.mod:TRACKER"',
    'policy = "reset"\nlocation = "toy.mod:OBJECT.count"',
    'policy = "reset"\nlocation = "toy.mod:COUNTER.total"',
    'policy = "reset"\nlocation = "toy.mod:BOX.count"',  # nothing tells what it holds
    'policy = "reset"\nlocation = "toy.mod:OBJECT"\nfields = ["count", "shared"]',
    'policy = "reset"\nlocation = "toy.mod:Counter.shared"',
    'policy = "drop"\nlocation = "toy.mod:mask"',
    'policy = "drop"\nlocation = "toy.mod:Counter.forward"',
    'policy = "drop"\nlocation = "toy.mod:BOX"',
    'policy = "reset"\non = "instances"\nlocation = "toy.mod:Counter.count"',
    'policy = "reset"\non = "instances"\nlocation = "toy.mod:Derived.total"',
    'policy = "reset"\nlocation = "toy.mod:BOX"\nclear = "toy.mod:clear"',
    'policy = "reset"\nlocation = "toy.mod:TRACKER"\nfields = ["total"]',  # a text in the module: a key of the dict
    'policy = "reset"\nlocation = "toy.mod:BOX"\nfields = ["buffer"]',  # of a class that the module imports
    'policy = "ignored"\nlocation = "toy.mod:plain"',
]


@pytest.mark.parametrize("entry", GOOD)
def test_entry_that_fits_is_found_with_its_line(entry: str, toy: Callable[..., dict[str, Any]]) -> None:
    finding = toy(entry)
    assert finding["status"] == "found", finding
    path, line = finding["place"].rsplit(":", 1)
    assert Path(path).read_text().splitlines()[int(line) - 1].strip()


BAD = {
    'policy = "reset"\nlocation = "toy.mod:TRACKERS"': ("renamed", "TRACKER (", "toy.mod has no 'TRACKERS'"),
    'policy = "reset"\nlocation = "toy.mod:_QUEUE"': ("gone", None, "toy.mod has no '_QUEUE'"),
    'policy = "reset"\nlocation = "toy.module:TRACKER"': ("renamed", "toy.mod", "there is no module toy.module"),
    'policy = "reset"\nlocation = "toy.zzz.yyy:_QUEUE"': ("gone", None, "there is no module"),
    'policy = "reset"\nlocation = "toy.other:Counter.shared"': ("renamed", "toy.mod:Counter.shared (", "has no 'Counter'"),
    'policy = "reset"\nlocation = "toy.other:OBJECT"': ("renamed", "toy.mod:OBJECT (", "has no 'OBJECT'"),
    'policy = "reset"\non = "instances"\nlocation = "toy.mod:Counter.counts"': ("renamed", "count (", "has no 'counts'"),
    'policy = "reset"\nlocation = "toy.mod:BORROWED"': ("another shape", "toy.other:BORROWED", "only imported"),
    'policy = "reset"\nlocation = "toy.mod:Counter.count"': ("another shape", None, "each Counter, not of the class"),
    'policy = "reset"\non = "instances"\nlocation = "toy.mod:Counter.shared"': ("another shape", None, "of the class"),
    'policy = "reset"\non = "instances"\nlocation = "toy.mod:Counter.double"': ("another shape", None, "property"),
    'policy = "reset"\nlocation = "toy.mod:Derived.shared"': ("another shape", "toy.mod:Counter.shared", "only inherits"),
    'policy = "drop"\nlocation = "toy.mod:Derived.forward"': ("another shape", "toy.mod:Counter.forward", "only inherits"),
    'policy = "drop"\nlocation = "toy.mod:plain"': ("another shape", None, "'plain' has no cache"),
    'policy = "reset"\nlocation = "toy.mod:mask"': ("another shape", None, "'mask' is a function"),
    'policy = "reset"\nlocation = "toy.mod:Counter"': ("another shape", None, "'Counter' is a class"),
    'policy = "reset"\nlocation = "toy.mod:OBJECT"\nfields = ["counts"]': ("another shape", "count (", "no attribute 'counts'"),
    'policy = "reset"\nlocation = "toy.mod:TRACKER"\nfields = ["zz"]': ("another shape", None, "uses the key 'zz'"),
    'policy = "reset"\nlocation = "toy.mod:BOX"\nclear = "toy.mod:clean"': ("another shape", "clear (", "clear: toy.mod"),
    'policy = "reset"\nlocation = "toy.mod:BOX"\nclear = "toy.mod:clear_one"': ("another shape", None, "needs arguments"),
    'policy = "reset"\nlocation = "toy.mod:BOX"\nclear = "toy.mod:FLAG"': ("another shape", None, "not a function"),
}  # fmt: skip


@pytest.mark.parametrize("entry", BAD)
def test_entry_that_does_not_fit_says_how(entry: str, toy: Callable[..., dict[str, Any]]) -> None:
    status, candidate, text = BAD[entry]
    finding = toy(entry)
    assert finding["status"] == status, finding
    assert text in finding["text"]
    if candidate is None:
        assert not finding["candidates"] or status == "gone"
    else:
        assert candidate in finding["candidates"][0]


@pytest.mark.parametrize("location", ["toy.mod:TRACKERS", "toy.zzz.yyy:_QUEUE", "toy.mod:Counter.shares"])
def test_what_only_some_builds_have_may_be_absent(location: str, toy: Callable[..., dict[str, Any]]) -> None:
    entry = f'policy = "reset"\nlocation = "{location}"'
    assert toy(entry)["status"] in ("renamed", "gone")
    assert toy(entry + "\noptional = true")["status"] == "optional"


TRACKER = 'policy = "snapshot"\nlocation = "toy.mod:Tracker.sums"'
AMBIGUOUS: dict[str, dict[str, str | bytes]] = {
    "class twice": {"toy/mod.py": MODULE + "class Tracker:\n    sums = {}\nclass Tracker:\n    sums = {}\n"},
    "second module": {
        "toy/mod.py": MODULE + "class Tracker:\n    sums = {}\n",
        "toy/copy.py": "class Tracker:\n    sums = {}\n",
    },
    "file and folder": {
        "toy/mod.py": MODULE,
        "toy/mod/__init__.py": MODULE + "class Tracker:\n    sums = {}\n",
    },
}
CLEAR_CUT: dict[str, dict[str, str | bytes]] = {
    "arms of one if": {
        "toy/mod.py": MODULE
        + "if A:\n    class Tracker:\n        sums = {}\nelse:\n    class Tracker:\n        sums = {}\n"
    },
    "imported elsewhere": {
        "toy/mod.py": MODULE + "class Tracker:\n    sums = {}\n",
        "toy/copy.py": "from toy.mod import Tracker\nTracker.sums.clear()\n",
    },
    "another class of that name": {
        "toy/mod.py": MODULE + "class Tracker:\n    sums = {}\n",
        "toy/copy.py": "class Tracker:\n    pass\nother.sums = 1\n",
    },
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_two_definitions_are_ambiguous(what: str, toy: Callable[..., dict[str, Any]]) -> None:
    finding = toy(TRACKER, AMBIGUOUS[what])
    assert finding["status"] == "ambiguous", finding
    assert finding["candidates"]


@pytest.mark.parametrize("what", CLEAR_CUT)
def test_definitions_that_cannot_both_be_meant_are_not_ambiguous(what: str, toy: Callable[..., dict[str, Any]]) -> None:
    assert toy(TRACKER, CLEAR_CUT[what])["status"] == "found"


def test_second_definition_with_an_entry_of_its_own_is_not_ambiguous(tmp_path: Path, run: Run) -> None:
    root = lay(tmp_path / "toy", {**TOY, **AMBIGUOUS["second module"]})
    both = toy_catalogue(tmp_path / "toy.toml", TRACKER, TRACKER.replace("toy.mod", "toy.copy"))
    assert run("verify", "--source", root, "--catalogue", both)[0] == 0
    one = toy_catalogue(tmp_path / "one.toml", TRACKER)
    assert run("verify", "--source", root, "--catalogue", one)[0] == 1


def test_part_of_a_namespace_package_that_is_not_in_the_source_is_optional(tmp_path: Path, run: Run) -> None:
    root = lay(tmp_path / "src", {"space/core/__init__.py": "", "space/core/a.py": "X = {}"})
    text = '[[state]]\nname = "{0}"\nwhy = "a test"\npolicy = "reset"\nlocation = "space.{1}"\n'
    (tmp_path / "c.toml").write_text(text.format("one", "core.a:X") + text.format("two", "training.a:X"))
    code, report = run("verify", "--source", root, "--catalogue", tmp_path / "c.toml")
    assert (code, statuses(report)) == (0, {"one": "found", "two": "optional"})
    lay(root, {"space/training/__init__.py": ""})
    code, report = run("verify", "--source", root, "--catalogue", tmp_path / "c.toml")
    assert (code, statuses(report)["two"]) == (1, "gone")


def test_file_that_cannot_be_parsed_is_said_and_is_not_well(tmp_path: Path, run: Run) -> None:
    root = lay(tmp_path / "toy", {**TOY, "toy/bad.py": "def f(:\n"})
    entry = 'policy = "reset"\nlocation = "toy.bad:X"'
    file = toy_catalogue(tmp_path / "toy.toml", entry)
    code, report = run("verify", "--source", root, "--catalogue", file)
    assert (code, statuses(report)["entry-1"]) == (1, "unreadable")
    assert re.search(r"toy/bad\.py:1: not Python of this version", report["sources"][0]["problems"][0])
    assert "toy/bad.py:1" in run("verify", "--source", root, "--catalogue", file, text=True)[1]


ROWS = """
at = [
  {{ versions = ">=1,<2", location = "toy.mod:{0}" }},
  {{ versions = ">=2", location = "toy.mod:{1}" }},
]"""


@pytest.mark.parametrize(
    ("info", "good"),
    [
        ("__version__ = '1.9'", ("TRACKER", "_NEW")),
        ("__version__ = '2.0rc1'", ("_OLD", "TRACKER")),
        ("__version__ = unknown()", ("_OLD", "TRACKER")),  # the newest row
    ],
)
def test_the_version_of_the_source_chooses_the_row(tmp_path: Path, run: Run, info: str, good: tuple[str, str]) -> None:
    root = lay(tmp_path / "toy", {**TOY, "toy/info.py": info})
    for names, expected in ((good, 0), (good[::-1], 1)):
        entry = 'policy = "snapshot"' + ROWS.format(*names)
        file = toy_catalogue(tmp_path / "toy.toml", entry)
        assert run("verify", "--source", root, "--catalogue", file)[0] == expected


# ---------------------------------------------------------------- use


def test_text_names_the_dead_entry_its_line_and_the_candidate(tmp_path: Path, run: Run) -> None:
    root = lay(tmp_path / "toy", TOY)
    file = toy_catalogue(tmp_path / "toy.toml", 'policy = "reset"\nlocation = "toy.mod:TRACKERS"')
    code, out = run("verify", "--source", root, "--catalogue", file, text=True)
    assert code == 1
    assert f"toy 1.2.3 in {root}: 1 of 2 entries found, 1 renamed" in out
    line = file.read_text().splitlines().index('location = "toy.mod:TRACKERS"') - 4
    assert re.search(rf"renamed +entry-1  \(toy\.toml:{line + 1}\)", out)
    assert re.search(rf"candidate: TRACKER \({root}/toy/mod\.py:\d+\)", out)
    assert "entry-0" not in out
    assert out.splitlines()[-1] == "1 of the entries do not fit: entry-1"
    assert "entry-0" in run("verify", "--source", root, "--catalogue", file, "--all", text=True)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "absent"], "absent: there is no such file or folder"),
        (["--source", "text.whl"], "text.whl: neither a folder nor a wheel; give the folder"),
        (["--source", "empty"], "no package of the catalogue"),
        (["--source", "toy", "absent.py"], "absent.py: there is no such file or folder"),
        (["--source", "toy", "empty"], "no Python file; give a .py file"),
        (["--source", "old"], "has no entry for toy 0.1; its first is for 1"),
        (["--catalogue", "absent.toml"], "absent.toml: cannot be read"),
        ([], "none of these is installed: toy; give a source tree or wheel with --source"),
    ],
)
def test_bad_use_is_told_with_a_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    lay(tmp_path / "toy", TOY)
    lay(tmp_path, {"text.whl": "x", "empty/a.txt": "", "old/toy/info.py": "__version__ = '0.1'", "old/toy/mod.py": ""})
    (tmp_path / "toy.toml").write_text(
        'package = "toy"\nversion_from = "toy.info:__version__"\n[[state]]\nname = "a"\nwhy = "b"\npolicy = "reset"\n'
        'at = [{ versions = ">=1", location = "toy.mod:TRACKER" }]\n'
    )
    catalogues = [] if "--catalogue" in arguments else ["--catalogue", "toy.toml"]
    assert cli.main(["verify", *arguments, *catalogues]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mindspeed-recovery: ")
    assert message in err


def test_command_needs_no_torch_and_runs_nothing_of_upstream(tmp_path: Path) -> None:
    poison = "raise SystemExit('imported')\n"
    site = lay(tmp_path / "site", {"torch/__init__.py": poison, "numpy/__init__.py": poison})
    lay(site, {name: poison + text if name.endswith("__init__.py") else text for name, text in TOY.items()})
    file = toy_catalogue(tmp_path / "toy.toml", 'policy = "reset"\nlocation = "torch.cuda:default_generators"')
    script = (
        "import sys, random; before = random.getstate()\n"
        "from mindspeed_recovery import cli, track, states\n"
        "track('mine:X', policy='reset'); states()\n"
        f"codes = [cli.main([*c, '--catalogue', {str(file)!r}]) for c in (['verify'], ['states'], ['verify', {__file__!r}])]\n"
        "assert codes == [1, 0, 1], codes\n"  # the poisoned torch has no such name
        "assert random.getstate() == before\n"
        "assert not {'torch', 'toy', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{Path(cli.__file__).parent.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_random_numbers_are_left_alone(tmp_path: Path, run: Run, plugin: Any) -> None:
    import numpy as np
    import torch

    def generators() -> list[bytes]:
        return [
            torch.get_rng_state().numpy().tobytes(),
            repr(np.random.get_state()).encode(),
            repr(random.getstate()).encode(),
        ]

    root = lay(tmp_path / "toy", TOY)
    file = toy_catalogue(tmp_path / "toy.toml")
    before = generators()
    run("verify", "--source", root, "--catalogue", file)
    run("states", "--source", root, "--catalogue", file)
    plugin.track("toy_rng.mod:TRACKER", policy="reset")
    plugin.enable(catalogues=[])
    plugin.track("toy_rng.mod:OTHER", policy="snapshot")
    plugin.states()
    assert generators() == before
    torch.rand(1), np.random.rand(), random.random()
    assert not set(generators()) & set(before), "the comparison would have seen a draw"


class Stream:
    def __init__(self, terminal: bool) -> None:
        self.text, self._terminal = "", terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_when_it_takes_longer_than_a_second(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    stream = Stream(terminal)
    shown = progress.Progress(stream)  # type: ignore[arg-type]
    for number in shown.each(range(30), "work", 30):
        assert bool(stream.text) == (number > 10), (number, stream.text)
        now += 0.1
    assert f"work: {12} of 30" in stream.text
    shown.done()
    assert stream.text.endswith("\r") if terminal else stream.text == "work: 12 of 30\n"


# ---------------------------------------------------------------- states


def test_states_are_listed_with_policy_location_and_line(run: Run) -> None:
    code, listed = run("states", "--for", "megatron-core==0.12.1")
    assert code == 0
    expected = catalogue.load(CATALOGUE).states(Version("0.12.1"))
    assert [(s["name"], s["policy"], s["location"]) for s in listed] == [
        (spec.name, str(spec.policy), str(spec.location)) for spec in expected
    ]
    lines = CATALOGUE.read_text().splitlines()
    for state in listed:
        file, number = state["catalogue"].split(":")
        assert file == CATALOGUE.name
        assert state["location"] in lines[int(number) - 1]
    code, out = run("states", "--for", "megatron-core==0.12.1", text=True)
    for state in listed:
        row = f"{state['name']} {state['policy']} {state['location']} {state['catalogue']}"
        assert row in [" ".join(line.split()) for line in out.splitlines()]
    assert out.splitlines()[-1] == f"{len(expected)} states of megatron-core 0.12.1"


def test_states_of_a_source_are_those_of_its_version(tmp_path: Path, run: Run) -> None:
    packed = wheel(tmp_path / "toy.whl", {**TOY})
    entry = 'policy = "reset"' + ROWS.format("TRACKER", "_NEW")
    file = toy_catalogue(tmp_path / "toy.toml", entry)
    listed = run("states", "--source", packed, "--catalogue", file)[1]
    assert [state["location"] for state in listed] == ["toy.mod:FLAG", "toy.mod:TRACKER"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--for", "megatron==0.12"], "the catalogue does not know 'megatron'; it has "),
        (["--for", "megatron-core"], "'' is not a version; write megatron-core==1.2.3"),
        (["--source", "absent"], "there is no such file or folder"),
        (["--source", "."], "no package of the catalogue; give"),
    ],
)
def test_bad_use_of_states_is_told_with_a_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["states", *arguments]) == 2
    assert message in capsys.readouterr().err
