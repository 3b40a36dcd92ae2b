# SPDX-License-Identifier: Apache-2.0
"""Catalogue files: what is read from them, and what is said about everything that is wrong in one."""

import datetime
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from mindspeed_recovery import catalogue
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.errors import CatalogueError

pytestmark = pytest.mark.timeout(60)

STATE = """
[[state]]
name = "tracker"
why = "partial sums"
policy = "reset"
"""
GOOD = f"""
package = "toy-core"
{STATE}
quarantine = true
at = [
  {{ versions = ">=0.8,<0.13", location = "toy.old:_TRACKER", clear = "toy.old:clear" }},
  {{ versions = ">=0.13", location = "toy.new:_TRACKER", fields = ["values"] }},
]
"""


def states(text: str, version: str | None) -> list[StateSpec]:
    return catalogue.parse(text, "toy.toml").states(None if version is None else Version(version))


@pytest.mark.parametrize(
    ("version", "location"),
    [
        ("0.7.9", None), ("0.8", "toy.old:_TRACKER"), ("0.8.0", "toy.old:_TRACKER"), ("0.12.9", "toy.old:_TRACKER"),
        ("0.13.0", "toy.new:_TRACKER"), ("9.0", "toy.new:_TRACKER"), (None, None),
    ],
)  # fmt: skip
def test_each_version_has_the_row_that_covers_it(version: str | None, location: str | None) -> None:
    assert [str(spec.location) for spec in states(GOOD, version)] == ([location] if location else [])


def test_row_options_are_added_to_those_of_the_entry() -> None:
    [old], [new] = states(GOOD, "0.9"), states(GOOD, "0.13")
    assert (old.quarantine, new.quarantine) == (True, True)
    assert (str(old.clear), old.fields) == ("toy.old:clear", ())
    assert (new.clear, new.fields) == (None, ("values",))
    assert (old.policy, old.why) == (Policy.RESET, "partial sums")
    assert (old.source, new.source) == ("toy.toml:11, toy-core 0.9", "toy.toml:12, toy-core 0.13")


def test_each_row_knows_its_line() -> None:
    rows = catalogue.parse(GOOD, "toy.toml").entries["tracker"]
    for row in rows:
        line = GOOD.splitlines()[int(row.spec.source.split(":")[1]) - 1]
        assert str(row.spec.location) in line


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ('[{ versions = ">=1,<2", location = "a:b" }, { versions = ">=2", location = "a:c" }]', [7, 7]),
        ('[\n  # { versions = ">=0,<1", location = "a:a" },\n  { versions = ">=1", location = "a:b" },\n]', [9]),
        ('[\n  { "versions" = ">=1", location = "a:b" },\n]', [3]),
    ],
    ids=["one line", "comment", "quoted key"],
)
def test_line_of_a_row_that_cannot_be_told_is_that_of_its_table(rows: str, lines: list[int]) -> None:
    loaded = catalogue.parse(f"{HEAD.rstrip()}\nat = {rows}\n", "toy.toml")
    assert [row.spec.source for row in loaded.entries["tracker"]] == [f"toy.toml:{line}" for line in lines]


def test_no_line_is_better_than_a_wrong_one() -> None:
    text = STATE.replace('"partial sums"', '"""\n[[state]]\n"""') + 'location = "a:b"'
    (row,) = catalogue.parse(text, "toy.toml").entries["tracker"]
    assert row.spec.source == "toy.toml"


def test_file_without_a_package_gives_one_location() -> None:
    [spec] = states(STATE + 'location = "mine:TRACKER"\nto = "empty"', None)
    assert (str(spec.location), spec.to) == ("mine:TRACKER", "empty")


@pytest.mark.parametrize("file", catalogue.shipped(), ids=lambda path: path.name)
def test_shipped_file_is_right(file: Path) -> None:
    loaded = catalogue.load(file)
    assert loaded.package
    assert loaded.entries
    for rows in loaded.entries.values():
        assert all(row.spec.why for row in rows)


def test_the_shipped_files_are_there() -> None:
    names = [path.name for path in catalogue.shipped()]
    assert names == ["megatron-core.toml", "mindspeed-llm.toml", "mindspeed.toml", "torch-npu.toml"]


def test_names_are_unique_over_the_shipped_files() -> None:
    names = [name for file in catalogue.shipped() for name in catalogue.load(file).entries]
    assert len(names) == len(set(names))


# ---------------------------------------------------------------- what is wrong

HEAD = 'package = "toy-core"\n' + STATE
ROW = 'location = "toy:X"'
WRONG: dict[str, tuple[str, str]] = {
    "not TOML": ("[[state]", "toy.toml: not TOML:"),
    "unknown key of the file": ('pakage = "x"', "toy.toml: unknown key 'pakage'; did you mean 'package'?"),
    "unknown key of a state": (
        STATE + 'location = "a:b"\nquarantin = true',
        "toy.toml: entry 'tracker': unknown key 'quarantin'; did you mean 'quarantine'?",
    ),
    "unknown key of a row": (
        HEAD + 'at = [{ versions = ">=1", locatoin = "a:b" }]',
        "entry 'tracker': key 'at', row 1: unknown key 'locatoin'; did you mean 'location'?",
    ),
    "unknown key like none": (STATE + 'location = "a:b"\nzzz = 1', "entry 'tracker': unknown key 'zzz'; known: "),
    "unknown policy": (
        STATE.replace('"reset"', '"resett"') + 'location = "a:b"',
        "entry 'tracker': key 'policy': unknown policy 'resett'; one of reset, drop",
    ),
    "no policy": (STATE.replace('policy = "reset"', "") + 'location = "a:b"', "entry 'tracker': key 'policy': missing"),
    "no why": (STATE.replace('why = "partial sums"', "") + 'location = "a:b"', "entry 'tracker': key 'why': missing"),
    "empty why": (STATE.replace("partial sums", "  ") + 'location = "a:b"', "entry 'tracker': key 'why'"),
    "no name": (STATE.replace('name = "tracker"', "") + 'location = "a:b"', "entry number 1: key 'name'"),
    "name that is none": (
        STATE.replace('"tracker"', '"A b"') + 'location = "a:b"',
        "entry 'A b': name: write lower-case",
    ),
    "name with a colon": (STATE.replace('"tracker"', '"a: b"') + 'location = "a:b"', "entry 'a: b': "),
    "neither at nor location": (STATE, "entry 'tracker': give either 'at'"),
    "both at and location": (HEAD + ROW + "\nat = []", "entry 'tracker': give either 'at'"),
    "no rows": (HEAD + "at = []", "entry 'tracker': key 'at': no rows"),
    "rows without a package": (
        STATE + f'at = [{{ versions = ">=1", {ROW} }}]',
        "entry 'tracker': key 'at': version ranges need",
    ),
    "row that is no table": (HEAD + "at = [1]", "entry 'tracker': key 'at', row 1: write { versions"),
    "row without versions": (HEAD + f"at = [{{ {ROW} }}]", "row 1: key 'versions': '' is not a range"),
    "row without location": (HEAD + 'at = [{ versions = ">=1" }]', "row 1: key 'location': missing"),
    "bad location": (
        HEAD + 'at = [{ versions = ">=1", location = "a.b" }]',
        "row 1: key 'location': 'a.b' is not a location",
    ),
    "bad clear": (STATE + 'location = "a:b"\nclear = "x"', "entry 'tracker': key 'clear': 'x' is not a location"),
    "gap": (
        HEAD + f'at = [{{ versions = ">=1,<2", {ROW} }}, {{ versions = ">=3", {ROW} }}]',
        "row 2: key 'versions': begins at 3, but the row before it ends at 2",
    ),
    "overlap": (
        HEAD + f'at = [{{ versions = ">=1,<3", {ROW} }}, {{ versions = ">=2", {ROW} }}]',
        "row 2: key 'versions': begins at 2, but the row before it ends at 3",
    ),
    "row after the last one": (
        HEAD + f'at = [{{ versions = ">=1", {ROW} }}, {{ versions = ">=2", {ROW} }}]',
        "row 2: key 'versions': begins at 2, but the row before it ends at no version",
    ),
    "duplicate name": (2 * (STATE + 'location = "a:b"\n'), "toy.toml: entry 'tracker': key 'name': duplicate name"),
    "state that is no list": ("[state]\nname = 'x'", "toy.toml: key 'state': write each state as [[state]]"),
    "wrong type": (
        STATE + 'location = "a:b"\nquarantine = "yes"',
        "entry 'tracker': key 'quarantine': 'yes' is not a bool",
    ),
    "wrong type in a row": (
        HEAD + 'at = [{ versions = ">=1", location = "a:b", fields = "x" }]',
        "row 1: key 'fields': 'x' is not a list",
    ),
    "fields that are no names": (STATE + 'location = "a:b"\nfields = [1]', "entry 'tracker': key 'fields'"),
    "options that contradict": (
        STATE.replace('"reset"', '"drop"') + 'location = "a:b"\nreplay = true',
        "entry 'tracker': replay: only with policy 'reset', not 'drop'",
    ),
    "instances of a module": (STATE + 'location = "a:b"\non = "instances"', "entry 'tracker': location: a:b must be"),
    "empty list of locations": (STATE + "location = []", "entry 'tracker': key 'location': an empty list"),
    "list of no texts": (STATE + "location = [1]", "entry 'tracker': key 'location': 1 is not a str"),
    "empty braces": (STATE + 'location = "a:{}"', "entry 'tracker': key 'location': 'a:' is not a location"),
    "braces that do not end": (
        STATE + 'location = "a:{b"',
        "entry 'tracker': key 'location': 'a:{b' is not a location",
    ),
    "bad location in a list": (
        STATE + 'location = ["a:b", "c"]',
        "entry 'tracker': key 'location': 'c' is not a location",
    ),
    "bad version_from": ('package = "x"\nversion_from = "y"', "toy.toml: key 'version_from': 'y' is not a location"),
    "package that is no text": ("package = 1", "toy.toml: key 'package': 1 is not a str"),
}
for _range in ("1", "<2", ">=2,<1", ">=1,<1", ">1", "==1", ">=x", ">=1,<y", ">=1,>=2", ">=1,<2,<3", "*"):
    WRONG[f"range {_range}"] = (
        HEAD + f'at = [{{ versions = "{_range}", {ROW} }}]',
        f"toy.toml: entry 'tracker': key 'at', row 1: key 'versions': '{_range}' is not a range",
    )


@pytest.mark.parametrize("what", sorted(WRONG))
def test_error_names_file_entry_and_key(what: str) -> None:
    text, message = WRONG[what]
    with pytest.raises(CatalogueError) as caught:
        catalogue.parse(text, "toy.toml")
    assert str(caught.value).startswith("toy.toml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "1" * 5000], ids=["nesting", "digits"])
def test_text_that_the_parser_cannot_bear_is_a_catalogue_error(text: str) -> None:
    with pytest.raises(CatalogueError, match=r"toy\.toml: "):
        catalogue.parse(text, "toy.toml")


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match=r"absent\.toml: cannot be read"):
        catalogue.load(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CatalogueError, match=r"binary\.toml: cannot be read"):
        catalogue.load(tmp_path / "binary.toml")


def test_duplicate_name_in_two_files_names_both(tmp_path: Path) -> None:
    files = [tmp_path / "one.toml", tmp_path / "two.toml"]
    for file in files:
        file.write_text(STATE + 'location = "a:b"')
    with pytest.raises(CatalogueError, match=r"two\.toml: entry 'tracker': duplicate name, also in .*one\.toml"):
        catalogue.installed_states(files)


# ---------------------------------------------------------------- versions


@pytest.fixture
def toy_version(make_module: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Version | None]:
    """``toy_version(loaded, installed)``: the version found with these."""

    def version(loaded: Any = None, installed: str | None = None) -> Version | None:
        if loaded is not None:
            make_module("toy_info", __version__=loaded)

        def of_package(name: str) -> str:
            if installed is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed

        monkeypatch.setattr(importlib.metadata, "version", of_package)
        return catalogue.parse('package = "toy"\nversion_from = "toy_info:__version__"', "toy.toml").version()

    return version


def test_version_of_the_loaded_module_comes_before_the_metadata(toy_version: Callable[..., Any]) -> None:
    assert toy_version("0.12.1", "0.13.0") == Version("0.12.1")


def test_metadata_serves_where_the_module_is_not_loaded(toy_version: Callable[..., Any]) -> None:
    assert toy_version(None, "0.13.0") == Version("0.13.0")


def test_package_that_is_not_there_has_no_version_and_no_states(toy_version: Callable[..., Any]) -> None:
    assert toy_version() is None
    assert states(GOOD, None) == []


@pytest.mark.parametrize("text", ["0.13.0rc1", "0.13.0.dev7", "0.13.0rc0+local", "0.13.0.post1", "0.13+abc"])
def test_pre_release_counts_as_its_version(toy_version: Callable[..., Any], text: str) -> None:
    assert toy_version(text) == Version("0.13.0")


def test_version_that_is_none_is_a_catalogue_error(toy_version: Callable[..., Any]) -> None:
    with pytest.raises(CatalogueError, match=r"toy\.toml: package 'toy' has the version 'main', which is not one"):
        toy_version("main")


def test_version_location_that_is_absent_is_an_error_that_names_the_file(make_module: Callable[..., Any]) -> None:
    make_module("toy_info_absent")
    loaded = catalogue.parse('package = "toy"\nversion_from = "toy_info_absent:__version__"', "toy.toml")
    with pytest.raises(CatalogueError, match=r"toy\.toml"):
        loaded.version()


# ---------------------------------------------------------------- a package of unknown version


@pytest.fixture
def checkout(tmp_path: Path) -> str:
    """The catalogue GOOD for a package that no distribution knows."""
    assert importlib.util.find_spec("toy_checkout") is None
    file = tmp_path / "checkout.toml"
    file.write_text(GOOD.replace('"toy-core"', '"toy-checkout"'))
    return str(file)


def test_package_without_a_version_has_the_newest_rows_once_it_is_loaded(
    checkout: str, make_module: Callable[..., Any]
) -> None:
    assert catalogue.installed_states([checkout]) == []
    make_module("toy_checkout")
    [spec] = catalogue.installed_states([checkout])
    assert (str(spec.location), spec.source) == (
        "toy.new:_TRACKER",
        "checkout.toml:12, toy-checkout of unknown version",
    )


def test_package_without_a_version_is_found_on_the_path_and_not_imported(
    checkout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_checkout.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert [spec.name for spec in catalogue.installed_states([checkout])] == ["tracker"]
    assert "toy_checkout" not in sys.modules


def test_package_whose_rows_all_end_has_no_states_while_its_version_is_unknown(
    tmp_path: Path, make_module: Callable[..., Any]
) -> None:
    make_module("toy_ended")
    (tmp_path / "ended.toml").write_text(
        HEAD.replace("toy-core", "toy-ended") + f'at = [{{ versions = ">=1,<2", {ROW} }}]'
    )
    assert catalogue.installed_states([tmp_path / "ended.toml"]) == []


@pytest.mark.parametrize("file", catalogue.shipped(), ids=lambda path: path.name)
def test_every_shipped_file_knows_a_source_checkout_by_its_loaded_module(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = catalogue.load(file)
    if loaded.version_from is None:
        assert loaded.package is not None
        monkeypatch.setitem(sys.modules, loaded.package.replace("-", "_"), ModuleType("loaded"))
        assert loaded.is_importable()
        assert loaded.states(None, unknown=True)


# ---------------------------------------------------------------- an entry of several states


def test_names_in_braces_are_a_state_each() -> None:
    text = STATE + 'to = "none"\nlocation = "toy.box:Box.{_FIRST, second.queue}"'
    specs = states(text, None)
    assert [(spec.name, str(spec.location), spec.to) for spec in specs] == [
        ("tracker.first", "toy.box:Box._FIRST", "none"),
        ("tracker.queue", "toy.box:Box.second.queue", "none"),
    ]


def test_places_in_a_list_are_a_state_each_and_namesakes_are_numbered() -> None:
    text = HEAD + 'at = [{ versions = ">=1", location = ["toy.a:X", "toy.b:X", "toy.c:{X, Y}"] }]'
    assert {spec.name: str(spec.location) for spec in states(text, "1.0")} == {
        "tracker.x": "toy.a:X",
        "tracker.x-2": "toy.b:X",
        "tracker.x-3": "toy.c:X",
        "tracker.y": "toy.c:Y",
    }


def test_state_of_an_entry_that_only_some_rows_have() -> None:
    text = HEAD + 'at = [{ versions = ">=1,<2", location = "toy:{A}" }, { versions = ">=2", location = "toy:{A, B}" }]'
    assert [spec.name for spec in states(text, "1.0")] == ["tracker.a"]
    assert [spec.name for spec in states(text, "2.0")] == ["tracker.a", "tracker.b"]


def test_options_of_the_entry_hold_for_each_of_its_states() -> None:
    specs = states(STATE + 'location = ["toy:A", "toy:B"]\noptional = true\nquarantine = true', None)
    assert [(spec.optional, spec.quarantine, spec.why) for spec in specs] == [(True, True, "partial sums")] * 2


# ---------------------------------------------------------------- anything at all

KEYS = st.sampled_from(
    ["package", "version_from", "state", "name", "why", "policy", "at", "location", "versions", "on", "quarantine", "replay",
     "to", "fields", "clear", "settled", "on_missing", "large", "optional", "odd"]
)  # fmt: skip
SCALARS = st.one_of(
    st.sampled_from(
        ["a-name", "reset", "drop", "constant", "replicate", "ignored", "pkg.module:NAME", "pkg:Class.attr", ">=1,<2", ">=2",
         "instances", "module", "zeros", "none", "empty", "after-update", "error", "", "a: b"]
    ),
    st.text(max_size=6), st.booleans(), st.integers(-3, 3), st.floats(), st.dates(), st.times(),
)  # fmt: skip
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=12,
)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["versions", "location", "fields", "to", "clear", "odd"]), NESTED, max_size=4),
    max_size=3,
)
TABLES = st.lists(
    st.one_of(
        st.dictionaries(KEYS, NESTED, max_size=8),
        st.fixed_dictionaries(
            {"name": SCALARS, "why": SCALARS, "policy": SCALARS},
            optional={
                "at": st.one_of(ROWS, NESTED),
                "location": st.one_of(SCALARS, st.lists(st.one_of(SCALARS, st.just("pkg:A.{b, c}")), max_size=3)),
                "to": NESTED,
                "fields": NESTED,
                "clear": SCALARS,
            },
        ),
    ),
    max_size=3,
)
FILES = st.one_of(
    st.dictionaries(KEYS, NESTED, max_size=4),
    st.fixed_dictionaries({"state": TABLES}, optional={"package": SCALARS, "version_from": SCALARS}),
)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(letter):08X}" for letter in value) + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else str(value)


@settings(max_examples=200, deadline=None)
@given(FILES)
def test_any_tables_are_read_or_are_a_catalogue_error(tables: dict[str, Any]) -> None:
    text = "\n".join(f"{key} = {toml(value)}" for key, value in tables.items())
    try:
        loaded = catalogue.parse(text, "fuzz.toml")
        loaded.states(Version("1.5"))
    except CatalogueError as error:
        assert str(error).startswith("fuzz.toml: ")  # noqa: PT017


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_read_or_is_a_catalogue_error(text: str) -> None:
    try:
        catalogue.parse(text, "fuzz.toml")
    except CatalogueError as error:
        assert str(error).startswith("fuzz.toml: ")  # noqa: PT017
