# SPDX-License-Identifier: Apache-2.0
"""The package as users install it: from a wheel and editable."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import packaging
import pytest
import wrapt
from clusters import ROOT

pytestmark = pytest.mark.timeout(180)

SHOW = (
    "import sys; from mindspeed_recovery import catalogue; print(*catalogue.shipped(), sep='\\n');"
    "assert 'torch' not in sys.modules; catalogue.load(catalogue.shipped()[0])"
)


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def shipped(python: Path | str, path: Path | None, cwd: Path) -> list[Path]:
    environment = {"PATH": "/usr/bin:/bin", **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run(
        [str(python), "-c", SHOW], capture_output=True, text=True, cwd=cwd, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    for name in ("mindspeed_recovery", "patches"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(sources))
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_the_catalogue_inside_the_package_and_nothing_else_at_the_top(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "mindspeed_recovery/patches/megatron-core.toml" in names
    assert "mindspeed_recovery/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"mindspeed_recovery"}


def test_the_wheel_asks_for_no_torch(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(line.split()[1].split(">")[0].split(";")[0] for line in required) == ["packaging", "tomli", "wrapt"]
    assert {line.split()[1] for line in lines if line.startswith("Provides-Extra")} == {"demo", "report", "test"}


def test_the_catalogue_is_found_from_a_wheel(wheel, tmp_path):
    pip("install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel))
    found = shipped(sys.executable, tmp_path / "site", tmp_path)
    assert [file.name for file in found] == [file.name for file in sorted((ROOT / "patches").glob("*.toml"))]
    assert all(file.is_relative_to(tmp_path / "site") for file in found)


def test_the_catalogue_is_found_from_an_editable_install(sources, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", tmp_path / "venv"],
        check=True,
        timeout=60,
    )
    python = tmp_path / "venv" / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--editable", str(sources))
    # Its requirements, and not the editable install that the tests themselves may run from.
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    for package in (packaging, wrapt):
        folder = Path(package.__file__).parent
        (requirements / folder.name).symlink_to(folder)
    assert shipped(python, requirements, tmp_path) == sorted((sources / "patches").glob("*.toml"))
