# SPDX-License-Identifier: Apache-2.0
"""Read Python packages as text: a folder, a wheel, or what is installed. Nothing of them is imported or run.

A `SourceTree` names files by module; a file is read only when it is asked for. Whatever is wrong with a file (syntax,
encoding, size) is a `SourceError` of one line, so that a tool can say it and go on with the next.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import io
import os
import re
import tokenize
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mindspeed_recovery.errors import RecoveryError

LARGEST_FILE = 4 << 20
"""Bytes. Larger Python files are generated tables; parsing one would take gigabytes."""

_LOOKED_AT = 60  # files of a folder that are asked whether it is a namespace package
_COMPILED = (".so", ".pyd")


class SourceError(RecoveryError):
    """A source tree or one of its files cannot be read; the text says which, and what to do."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a tree. ``path`` is for people; ``compiled`` means an extension module, which has no text."""

    module: str
    path: str
    read: Callable[[], bytes] = field(compare=False, repr=False)
    is_package: bool = False
    compiled: bool = False

    def text(self, data: bytes | None = None) -> str:
        """The text, decoded as Python would; of ``data``, where that is read already. Raises SourceError."""
        data = self.data() if data is None else data
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            return data.decode(encoding)
        except (SyntaxError, UnicodeDecodeError, LookupError) as error:
            raise SourceError(f"{self.path}: not text: {error}") from None

    def parse(self, data: bytes | None = None) -> ast.Module:
        """The syntax tree; of ``data``, where that is read already. Raises SourceError."""
        data = self.data() if data is None else data
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # odd escapes in a source that is only read
                return ast.parse(data)
        except SyntaxError as error:
            raise SourceError(f"{self.path}:{error.lineno or 1}: not Python of this version: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise SourceError(f"{self.path}: cannot be parsed: {type(error).__name__}: {error}") from None

    def data(self) -> bytes:
        """What the file contains. Raises SourceError, also for a file that is too large."""
        if self.compiled:
            raise SourceError(f"{self.path}: a compiled module has no source")
        try:
            data = self.read()
        except (OSError, RuntimeError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
            raise SourceError(f"{self.path}: cannot be read: {error}") from None
        if len(data) > LARGEST_FILE:
            raise SourceError(f"{self.path}: {len(data)} bytes, more than the {LARGEST_FILE} that are read")
        return data


class SourceTree:
    """Packages by name. ``label`` names the tree for people.

    ``list_package(top)`` yields the files of one top-level package, in the order in which Python looks for them;
    ``read_beside(pattern)`` the files beside the packages whose path matches (metadata, setup.py).
    """

    def __init__(
        self,
        label: str,
        list_package: Callable[[str], Iterable[SourceFile]],
        read_beside: Callable[[str], Iterable[SourceFile]],
    ) -> None:
        self.label = label
        self.beside = read_beside
        self._list_package = list_package
        self._packages: dict[str, dict[str, list[SourceFile]]] = {}
        self._above: dict[str, set[str]] = {}

    def find(self, module: str) -> SourceFile | None:
        """The file that Python would take for this module."""
        return next(iter(self.all_of(module)), None)

    def all_of(self, module: str) -> list[SourceFile]:
        """Every file that could be this module: more than one where ``m.py`` and ``m/__init__.py`` stand side by side."""
        return self._package(module.split(".", 1)[0]).get(module, [])

    def modules(self, package: str) -> Iterator[SourceFile]:
        """The modules of a package (``megatron`` or ``megatron.core``), by name, each once."""
        for name, files in self._package(package.split(".", 1)[0]).items():
            if f"{name}.".startswith(f"{package}."):
                yield files[0]

    def has(self, package: str) -> bool:
        """Whether there is anything of this package or module."""
        top = package.split(".", 1)[0]
        self._package(top)
        return package in self._above[top]

    def holds(self, module: str) -> bool:
        """Whether the regular package that the module belongs to is in this tree.

        A namespace package (no ``__init__.py``) may be spread over several trees: that one part of it is here does not
        mean that another should be.
        """
        parts = module.split(".")
        names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return any(self.find(name) is not None for name in names)

    def _package(self, top: str) -> dict[str, list[SourceFile]]:
        if top not in self._packages:
            found: dict[str, list[SourceFile]] = {}
            for file in self._list_package(top):
                found.setdefault(file.module, []).append(file)
            for files in found.values():
                files.sort(key=lambda file: (not file.is_package, file.compiled))
            self._packages[top] = dict(sorted(found.items()))
            self._above[top] = {name[:end] for name in found for end in (*_dots(name), len(name))}
        return self._packages[top]


def open_tree(path: str | Path) -> SourceTree:
    """A folder that holds packages, or a wheel (any zip file). Raises SourceError."""
    path = Path(path)
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise SourceError(f"{path}: there is no such file or folder")
    if not zipfile.is_zipfile(path):
        raise SourceError(
            f"{path}: neither a folder nor a wheel; give the folder that holds the packages, or a .whl file"
        )
    return _archive(path)


def installed() -> SourceTree:
    """What is installed here, found by Python's own path without importing it."""

    def list_package(top: str) -> Iterator[SourceFile]:
        try:
            spec = importlib.util.find_spec(top)  # of a top-level name: this imports nothing
        except (ImportError, ValueError, AttributeError):
            return
        if spec is None:
            return
        if spec.submodule_search_locations is None:
            if spec.has_location and spec.origin:
                yield from _file(Path(spec.origin), (top,))
            return
        seen: set[str] = set()
        for folder in spec.submodule_search_locations:
            files = list(_walk(Path(folder), (top,)))
            yield from (file for file in files if file.module not in seen)  # the first folder on the path wins
            seen.update(file.module for file in files)

    def beside(pattern: str) -> Iterator[SourceFile]:
        yield from ()

    return SourceTree("installed", list_package, beside)


def installed_version(package: str) -> str | None:
    """The version that a distribution's metadata gives, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def python_files(path: Path) -> list[SourceFile]:
    """A file, or every Python file below a folder, with the module names that their packages give them.

    Raises SourceError for a path that is absent or holds no Python file.
    """
    if not path.exists():
        raise SourceError(f"{path}: there is no such file or folder")
    start = path.resolve()
    package = (start if start.is_dir() else start.parent).relative_to(package_root(path)).parts
    if start.is_dir():
        files = [file for file in _walk(start, package, shown=path) if not file.compiled]
    else:
        files = list(_file(start, (*package, start.stem), shown=path))
    if not files:
        raise SourceError(f"{path}: no Python file; give a .py file or a folder of them")
    return files


def everything(path: str) -> tuple[list[SourceFile], SourceTree]:
    """Every Python file below a path, or of a wheel or an installed package, by module; and the tree that they are of.

    ``path``: a file, folder or wheel, or, where there is no such thing, the name of an installed module or package. A folder
    without ``__init__.py`` whose files import each other by its name is a namespace package, and named so. Raises
    SourceError.
    """
    place = Path(path)
    if place.is_dir():
        root = package_root(place)
        if root == place.resolve() and _is_namespace(root):
            files = [file for file in _walk(root, (root.name,), shown=place) if not file.compiled]
            root = root.parent
        else:
            files = python_files(place)
        return [_without_source_folder(file, root) for file in files], open_tree(root)
    if place.is_file() and zipfile.is_zipfile(place):
        tree = open_tree(place)
        tops = dict.fromkeys(
            PurePosixPath(name).parts[0] for name in zipfile.ZipFile(place).namelist() if name.strip("/")
        )
        found = [file for top in tops for file in tree.modules(top.removesuffix(".py")) if not file.compiled]
        if not found:
            raise SourceError(f"{path}: no Python file in this archive")
        return found, tree
    if place.is_file():
        return python_files(place), open_tree(package_root(place))
    if place.is_symlink() or not all(part.isidentifier() for part in path.split(".")):
        raise SourceError(f"{path}: there is no such file or folder")
    here = installed()
    found = [file for file in here.modules(path) if not file.compiled]
    if not found:
        raise SourceError(f"{path}: there is no such file, folder or installed package")
    return found, here


def _is_namespace(folder: Path) -> bool:
    """Whether files in the folder import modules of it by its name."""
    if not folder.name.isidentifier():
        return False
    pattern = re.compile(rf"^\s*(?:from|import)\s+{re.escape(folder.name)}\.(\w+)", re.MULTILINE)
    for number, file in enumerate(_walk(folder, ())):
        if number >= _LOOKED_AT:
            break
        try:
            text = file.data().decode("utf-8", "replace") if not file.compiled else ""
        except SourceError:
            continue
        if any((folder / name).is_dir() or (folder / f"{name}.py").is_file() for name in pattern.findall(text)):
            return True
    return False


def _without_source_folder(file: SourceFile, root: Path) -> SourceFile:
    """``src.package.module`` is imported as ``package.module``."""
    if file.module.startswith("src.") and not (root / "src" / "__init__.py").exists():
        return dataclasses.replace(file, module=file.module[4:])
    return file


def package_root(path: Path) -> Path:
    """The folder from which Python would import a file, or the modules of a folder: the first one above that is no package."""
    start = path.resolve()
    folder = start if start.is_dir() else start.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder


def _folder(root: Path) -> SourceTree:
    def list_package(top: str) -> Iterator[SourceFile]:
        if (root / top).is_dir():
            yield from _walk(root / top, (top,))
        yield from _file(root / f"{top}.py", (top,))

    def beside(pattern: str) -> Iterator[SourceFile]:
        for path in sorted(root.glob(pattern)):
            if path.is_file():
                yield SourceFile("", str(path), path.read_bytes)

    return SourceTree(str(root), list_package, beside)


def _archive(path: Path) -> SourceTree:
    try:
        archive = zipfile.ZipFile(path)
        names = sorted(archive.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path}: cannot be read: {error}; fetch the wheel again") from None

    def reader(name: str) -> Callable[[], bytes]:
        return lambda: archive.read(name)

    def list_package(top: str) -> Iterator[SourceFile]:
        for name in names:
            if name.startswith(f"{top}/") or name == f"{top}.py":
                yield from _named(PurePosixPath(name).parts, f"{path.name}/{name}", reader(name))

    def beside(pattern: str) -> Iterator[SourceFile]:
        for name in names:
            if len(PurePosixPath(name).parts) == len(PurePosixPath(pattern).parts) and PurePosixPath(name).match(
                pattern
            ):
                yield SourceFile("", f"{path.name}/{name}", reader(name))

    return SourceTree(path.name, list_package, beside)


def _walk(folder: Path, package: tuple[str, ...], shown: Path | None = None) -> Iterator[SourceFile]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name.isidentifier() and name != "__pycache__")
        inner = Path(here).relative_to(folder)
        for name in sorted(files):
            parts = (*package, *inner.parts, name)
            yield from _named(parts, str((shown or folder) / inner / name), (Path(here) / name).read_bytes)


def _file(path: Path, names: tuple[str, ...], shown: Path | None = None) -> Iterator[SourceFile]:
    if path.is_file():
        yield from _named((*names[:-1], path.name), str(shown or path), path.read_bytes)


def _named(parts: tuple[str, ...], path: str, read: Callable[[], bytes]) -> Iterator[SourceFile]:
    """The file as a module, if its name makes it one."""
    stem, _, ending = parts[-1].partition(".")
    names = parts[:-1] if stem == "__init__" and ending == "py" else (*parts[:-1], stem)
    compiled = parts[-1].endswith(_COMPILED)
    if (ending == "py" or compiled) and all(name.isidentifier() and name != "__pycache__" for name in names):
        yield SourceFile(
            ".".join(names), path, read, is_package=names is not parts and stem == "__init__", compiled=compiled
        )


def _dots(name: str) -> Iterator[int]:
    return (index for index, letter in enumerate(name) if letter == ".")
