# SPDX-License-Identifier: Apache-2.0
"""Reading packages as text: folders, wheels, the installed ones; and what one module is seen to define."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.tools import sources, symbols, versions
from mindspeed_recovery.tools.library import Library
from mindspeed_recovery.tools.sources import SourceError
from mindspeed_recovery.tools.symbols import CLASS, FIELD, FUNCTION, IMPORT, INSTANCE, VALUE

pytestmark = pytest.mark.timeout(60)

FILES = {
    "pkg/__init__.py": "from pkg import inner as alias\n",
    "pkg/inner.py": "X = 1\n",
    "pkg/sub/__init__.py": "",
    "pkg/sub/leaf.py": "Y = 2\n",
    "single.py": "Z = 3\n",
    "pkg/not-a-module.py": "",
    "pkg/__pycache__/inner.py": "",
    "pkg/data.txt": "",
}


def lay(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return root


def wheel(path: Path, files: dict[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(params=["folder", "wheel"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> sources.SourceTree:
    if request.param == "folder":
        return sources.open_tree(lay(tmp_path, FILES))
    return sources.open_tree(wheel(tmp_path / "pkg-1.0-py3-none-any.whl", FILES))


def test_modules_have_the_names_that_python_gives_them(tree: sources.SourceTree) -> None:
    assert [file.module for file in tree.modules("pkg")] == ["pkg", "pkg.inner", "pkg.sub", "pkg.sub.leaf"]
    assert [file.module for file in tree.modules("pkg.sub")] == ["pkg.sub", "pkg.sub.leaf"]
    leaf, single = tree.find("pkg.sub.leaf"), tree.find("single")
    assert leaf is not None
    assert leaf.text() == "Y = 2\n"
    assert leaf.path.endswith("pkg/sub/leaf.py")
    assert single is not None
    assert single.text() == "Z = 3\n"
    assert tree.find("pkg.absent") is None
    assert (tree.has("pkg.sub"), tree.has("pkg.su"), tree.has("other")) == (True, False, False)


def test_a_tree_answers_for_its_regular_packages_only(tmp_path: Path) -> None:
    tree = sources.open_tree(lay(tmp_path, {"space/core/__init__.py": "", "space/core/a.py": ""}))
    assert tree.holds("space.core.gone")
    assert not tree.holds("space.training.a")


def test_installed_packages_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path / "one", {"spread_over/first.py": "raise SystemExit", "spread_over/both.py": "WHO = 1"})
    lay(tmp_path / "two", {"spread_over/second.py": "", "spread_over/both.py": "WHO = 2", "whole/__init__.py": "1 / 0"})
    for folder in ("two", "one"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    tree = sources.installed()
    assert [file.module for file in tree.modules("spread_over")] == [
        "spread_over.both",
        "spread_over.first",
        "spread_over.second",
    ]
    both = tree.find("spread_over.both")
    assert both is not None
    assert both.text() == "WHO = 1", "the first folder on the path wins, as in an import"
    assert tree.has("whole")
    assert not tree.has("surely_not_installed")
    assert not {"spread_over", "whole"} & set(sys.modules)


def test_what_is_no_source_is_named_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"absent: there is no such file or folder"):
        sources.open_tree(tmp_path / "absent")
    lay(tmp_path, {"text.whl": "not a zip", "cut.whl": wheel(tmp_path / "x.whl", FILES).read_bytes()[:-60]})
    for name in ("text.whl", "cut.whl"):
        with pytest.raises(SourceError, match=rf"{name}: neither a folder nor a wheel; give"):
            sources.open_tree(tmp_path / name)
    with pytest.raises(SourceError, match=r"no Python file; give"):
        sources.python_files(lay(tmp_path / "empty", {"a.txt": ""}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"def f(:\n", "bad.py:1: not Python of this version"),
        (b"x = '\xff\xfe'\n", "bad.py"),
        (b"# coding: no-such-coding\n", "bad.py"),
        (b"x = 1\0\n", "bad.py"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "bad.py"),
        (b"#" * (sources.LARGEST_FILE + 1), "more than the"),
    ],
    ids=["syntax", "bytes", "coding", "null", "nesting", "size"],
)
def test_a_bad_file_is_one_line_and_the_others_are_read(tmp_path: Path, data: bytes, message: str) -> None:
    library = Library(
        [sources.open_tree(lay(tmp_path, {"pkg/__init__.py": "", "pkg/bad.py": data, "pkg/good.py": "X = 1"}))]
    )
    assert library.symbols("pkg.bad") is None
    assert library.symbols("pkg.good") is not None
    (problem,) = library.problems.values()
    assert message in problem
    assert "\n" not in problem


def test_a_file_is_decoded_as_it_says(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\nGRÜSSE = 'ä'\n"
    tree = sources.open_tree(lay(tmp_path, {"a.py": text.encode("latin-1"), "b.py": b"\xef\xbb\xbfX = 1\n"}))
    a, b = tree.find("a"), tree.find("b")
    assert a is not None
    assert b is not None
    assert a.text() == text
    assert "GRÜSSE" in symbols.read(a.parse(), "a").names
    assert "X" in symbols.read(b.parse(), "b").names


def test_recovery_code_has_the_module_names_of_its_packages(tmp_path: Path) -> None:
    lay(tmp_path, {"top/__init__.py": "", "top/ha/__init__.py": "", "top/ha/rollback.py": "", "loose/x.py": ""})
    assert [file.module for file in sources.python_files(tmp_path / "top" / "ha")] == ["top.ha", "top.ha.rollback"]
    assert [file.module for file in sources.python_files(tmp_path / "top" / "ha" / "rollback.py")] == [
        "top.ha.rollback"
    ]
    assert [file.module for file in sources.python_files(tmp_path / "loose")] == ["x"]
    assert sources.package_root(tmp_path / "top" / "ha" / "rollback.py") == tmp_path.resolve()


# ---------------------------------------------------------------- what a module defines


def read(text: str, module: str = "pkg.mod") -> symbols.ModuleSymbols:
    return symbols.read(ast.parse(text), module)


@pytest.mark.parametrize(
    "text",
    [
        "X = 1",
        "X: int = 1",
        "(X, Y) = 1, 2",
        "[Y, *X] = 1, 2",
        "for X in (): pass",
        "with open('f') as X: pass",
        "if A:\n    X = 1",
        "try:\n    pass\nexcept A:\n    X = 1",
        "while A:\n    X = 1",
        "match A:\n    case 1:\n        X = 1",
        "def f():\n    global X\n    X = 1",
        "def f():\n    def g():\n        global X\n        X = 1",
        "globals()['X'] = 1",
        "def f():\n    globals()['X'] = 1",
        "setattr(sys.modules[__name__], 'X', 1)",
        "from a import X",
        "from a import b as X",
        "import X",
        "def X(): pass",
        "class X: pass",
        "def f():\n    global X\n    from a import X",
        "def f():\n    global X\n    def X(): pass",
    ],
)
def test_a_global_is_seen_however_it_is_bound(text: str) -> None:
    assert "X" in read(text).names


@pytest.mark.parametrize(
    "text",
    [
        "X: int",
        "def f():\n    X = 1",
        "class A:\n    X = 1",
        "X += 1",
        "print(X)",
        "a.X = 1",
        "if TYPE_CHECKING:\n    from a import X",
    ],
)
def test_what_binds_no_global_is_not_taken_for_one(text: str) -> None:
    assert "X" not in read(text).names


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("x = 1", VALUE),
        ("@classmethod\n    def f(cls):\n        cls.x = 1", VALUE),
        ("def f(self):\n        self.x = 1", INSTANCE),
        ("def f(this, y):\n        (this.x, z) = y", INSTANCE),
        ("def f(self):\n        self.x: int = 1", INSTANCE),
        ("def f(self):\n        self.register_buffer('x', None)", INSTANCE),
        ("def f(self):\n        setattr(self, 'x', None)", INSTANCE),
        ("def f(self):\n        def g():\n            self.x = 1", INSTANCE),
        ("__slots__ = ('x',)", FIELD),
        ("def x(self): pass", FUNCTION),
        ("class x: pass", CLASS),
    ],
)
def test_a_class_attribute_is_seen_with_its_kind(body: str, kind: str) -> None:
    (found,) = read(f"class A:\n    {body}").names["A"]
    assert found.cls is not None
    assert {binding.kind for binding in found.cls.members["x"]} == {kind}


def test_class_attributes_set_from_outside_and_dataclass_fields_are_seen() -> None:
    found = read("@dataclass(frozen=True)\nclass A:\n    x: int\n    y: int = 1\n\nA.z = 1\ndef f():\n    A.w = 1\n")
    (binding,) = found.names["A"]
    assert binding.cls is not None
    kinds = {name: {b.kind for b in bindings} for name, bindings in binding.cls.members.items()}
    assert kinds == {"x": {FIELD}, "y": {FIELD}, "z": {VALUE}, "w": {VALUE}}
    (plain,) = read("class A:\n    x: int\n").names["A"]
    assert plain.cls is not None
    assert "x" not in plain.cls.members, "an annotation alone makes no attribute"


@pytest.mark.parametrize(
    ("text", "cached"),
    [
        ("@lru_cache\ndef f(): pass", True),
        ("@functools.lru_cache(maxsize=8)\ndef f(): pass", True),
        ("@other\n@functools.cache\ndef f(): pass", True),
        ("f = functools.lru_cache(maxsize=8)(g)", True),
        ("f = lru_cache(g)", True),
        ("@other\ndef f(): pass", False),
        ("def f(): pass", False),
    ],
)
def test_a_function_has_a_cache_or_has_none(text: str, cached: bool) -> None:
    (binding,) = read(text).names["f"]
    assert (binding.kind, binding.cached) == (FUNCTION, cached)


def test_relative_imports_are_resolved() -> None:
    found = symbols.read(ast.parse("from . import a\nfrom .b import c\nfrom ..d import e"), "p.q.r")
    assert [found.names[name][0].target for name in "ace"] == ["p.q:a", "p.q.b:c", "p.d:e"]
    package = symbols.read(ast.parse("from . import a"), "p.q", is_package=True)
    assert package.names["a"][0].target == "p.q:a"
    assert found.names["a"][0].kind == IMPORT


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_is_a_source_error(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    file = sources.SourceFile("m", "m.py", lambda: data)
    try:
        symbols.read(file.parse(), "m")
    except SourceError as error:
        assert str(error).startswith("m.py")  # noqa: PT017


def test_names_are_followed_through_imports_and_bases(tmp_path: Path) -> None:
    library = Library(
        [
            sources.open_tree(
                lay(
                    tmp_path,
                    {
                        "p/__init__.py": "from p import deep\nshort = deep\n",
                        "p/deep.py": "class Base:\n    def __init__(self):\n        self.x = 1\nNAME = {}\n",
                        "p/user.py": "from .deep import *\nfrom p.deep import NAME as other\nclass Derived(Base):\n    y = 1\n",
                        "p/loop.py": "from p.loop import a as b\nfrom p.loop import b as a\nclass C(C):\n    pass\n",
                    },
                )
            )
        ]
    )
    assert library.module_of("p", "short") == "p.deep"
    other = library.lookup("p.user", "other")
    assert other is not None
    followed = library.follow(other)
    assert followed is not None
    assert followed.module == "p.deep"
    assert library.origin("p.user:other") == "p.deep:NAME"
    ((at, derived),) = library.classes("p.user", "Derived")
    assert set(library.member_names(at, derived)) == {"__init__", "x", "y"}
    circle = library.lookup("p.loop", "a")
    assert circle is not None
    assert library.follow(circle) is None, "a circle of imports ends"
    assert library.member(*library.classes("p.loop", "C")[0], "x") is None


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"toy/info.py": "A, B = 1, 2\nV = (A, B, 3, 'rc1')\n__version__ = '.'.join(map(str, V[:3])) + V[3]"}, None),
        ({"toy/info.py": "V = (1, 2, 3, 'rc1')\n__version__ = '.'.join(map(str, V[:3])) + ''.join(V[3:])"}, "1.2.3"),
        ({"toy/info.py": "__version__ = f'{1}.{2}'"}, "1.2"),
        ({"toy/info.py": "__version__ = run()", "toy_core-4.5.dist-info/METADATA": "Name: toy-core\nVersion: 4.5\n"}, "4.5"),
        ({"toy_core-4.5.dist-info/METADATA": "Name: toy-core\nVersion: 4.5\n"}, "4.5"),
        ({"setup.py": "__version__ = '2.0.dev0'\n__package_name__ = 'toy_core'\n"}, "2.0"),
        ({"pyproject.toml": "[project]\nname = \"toy-core\"\nversion = \"3.1\"\n"}, "3.1"),
        ({"setup.py": "__version__ = '2.0'\nname = 'another'\n"}, None),
        ({"toy/info.py": "__version__ = 'main'"}, None),
        ({"toy/info.py": "__version__ = ("}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_version_is_read_from_the_tree(tmp_path: Path, files: dict[str, str | bytes], version: str | None) -> None:
    tree = sources.open_tree(lay(tmp_path, {"toy/__init__.py": "", **files}))
    found = versions.version_of("toy-core", Location.parse("toy.info:__version__"), [tree])
    assert found == (None if version is None else Version(version))
