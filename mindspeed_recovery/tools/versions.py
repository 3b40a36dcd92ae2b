# SPDX-License-Identifier: Apache-2.0
"""Which version of a package a source tree holds, read without running anything of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from packaging.version import InvalidVersion, Version

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.tools.sources import SourceError, SourceFile, SourceTree
from mindspeed_recovery.tools.symbols import dotted, targets

_UNKNOWN = object()


def version_of(package: str, version_from: Location | None, trees: Iterable[SourceTree]) -> Version | None:
    """The release version of a package in the first tree that tells it; None where none does.

    Asked are, in each tree: the metadata of a wheel or an installation, what the catalogue names (``version_from``), then what
    a checkout's build has left, and the ``__version__`` or ``version = "…"`` of its setup.py or pyproject.toml.
    """
    for tree in trees:
        for text in _texts(package, version_from, tree):
            try:
                return Version(Version(text).base_version)  # a release candidate has what its release has
            except InvalidVersion:
                continue
    return None


def _texts(package: str, version_from: Location | None, tree: SourceTree) -> Iterator[str]:
    words = re.split(r"[-_.]+", package)
    distribution = "_".join(words)
    yield from _metadata(tree, f"{distribution}-*.dist-info/METADATA")
    file = tree.find(version_from.module) if version_from is not None else None
    if file is not None and version_from is not None and len(version_from.path) == 1:
        yield _text_of(file, version_from.path[0])
    yield from _metadata(tree, f"{distribution}*.egg-info/PKG-INFO")
    for pattern in ("setup.py", "pyproject.toml"):
        for project in tree.beside(pattern):
            # A checkout may hold several packages and one setup.py: it counts only if it names this one.
            text = _read(project)
            if re.search("=\\s*[\"']" + "[-_.]".join(words) + "[\"']", text):
                match = re.search(r"""^\s*(?:__version__|version)\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
                yield match[1] if match else ""


def _metadata(tree: SourceTree, pattern: str) -> Iterator[str]:
    for metadata in tree.beside(pattern):
        match = re.search(r"^Version:\s*(\S+)", _read(metadata), re.MULTILINE)
        yield match[1] if match else ""


def _read(file: SourceFile) -> str:
    try:
        return file.text() if file.path.endswith(".py") else file.read().decode("utf-8", "replace")
    except (SourceError, OSError):
        return ""


def _text_of(file: SourceFile, name: str) -> str:
    """The text that a module gives a name, where its assignments are plain enough to be read."""
    try:
        tree = file.parse()
    except SourceError:
        return ""
    known: dict[str, object] = {}
    for node in tree.body:
        for target, value in targets(node):
            if isinstance(target, ast.Name):
                known[target.id] = _value(value, known)
    text = known.get(name, _UNKNOWN)
    return text if isinstance(text, str) else ""


def _value(node: ast.expr | None, known: dict[str, object]) -> object:
    """Constants, tuples, slices, ``+``, f-strings, ``str()`` and ``".".join(map(str, …))``: what version modules use."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id, _UNKNOWN)
    if isinstance(node, (ast.Tuple, ast.List)):
        items = [_value(item, known) for item in node.elts]
        return _UNKNOWN if _UNKNOWN in items else tuple(items)
    if isinstance(node, ast.JoinedStr):
        parts = [_value(part.value if isinstance(part, ast.FormattedValue) else part, known) for part in node.values]
        return _UNKNOWN if _UNKNOWN in parts else "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _value(node.left, known), _value(node.right, known)
        return left + right if isinstance(left, str) and isinstance(right, str) else _UNKNOWN
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        whole = _value(node.value, known)
        first, last = (None if end is None else _value(end, known) for end in (node.slice.lower, node.slice.upper))
        if (
            isinstance(whole, (tuple, str))
            and isinstance(first, (int, type(None)))
            and isinstance(last, (int, type(None)))
        ):
            return whole[first:last]
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return _call(node, known)
    return _UNKNOWN


def _call(node: ast.Call, known: dict[str, object]) -> object:
    argument = node.args[0]
    if isinstance(argument, ast.Call) and dotted(argument.func) == "map" and len(argument.args) == 2:
        argument = argument.args[1]  # map(str, …): joined as text either way
    value = _value(argument, known)
    if isinstance(node.func, ast.Attribute) and node.func.attr == "join" and isinstance(value, tuple):
        separator = _value(node.func.value, known)
        return separator.join(map(str, value)) if isinstance(separator, str) else _UNKNOWN
    return str(value) if dotted(node.func) == "str" and value is not _UNKNOWN else _UNKNOWN
