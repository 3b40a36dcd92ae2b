# SPDX-License-Identifier: Apache-2.0
"""What the documents say is so: every command runs, every table is what the program prints, every text is one of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import ROOT

from mindspeed_recovery import catalogue
from mindspeed_recovery.tools import compatibility

pytestmark = pytest.mark.timeout(240)

DOCUMENTS = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")
PROGRAMS = ("mindspeed-recovery", "python", ".venv/bin/python", "make", "torchrun", ".venv/bin/torchrun", "pip")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def commands(document: str) -> list[str]:
    """Every command of the document, in its order: lines of shell blocks, and code in a line that begins with a program."""
    text = text_of(document)
    found: list[tuple[int, str]] = []
    for block in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        if block[1] not in ("sh", "bash", ""):
            continue
        lines = block[2].replace("\\\n", " ").splitlines()
        if not block[1]:  # what a terminal shows: only what stands behind a prompt was typed
            lines = [line.strip()[2:] for line in lines if line.strip().startswith("$ ")]
        found += [(block.start(), " ".join(line.split("  #")[0].split())) for line in lines if line.strip()]
    outside = re.sub(r"^ *```.*?^ *```$", lambda m: " " * len(m[0]), text, flags=re.MULTILINE | re.DOTALL)
    for code in re.finditer(r"`([^`]+)`", outside):
        words = code[1].split()
        if len(words) > 1 and words[0] in PROGRAMS:
            found.append((code.start(), " ".join(words)))
    return list(dict.fromkeys(command for _, command in sorted(found)))


def environment(megatron: Path | None = None) -> dict[str, str]:
    """Of a shell in which the package is installed."""
    paths = [str(path) for path in (megatron, ROOT) if path]
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


# A part of a command that stands for something of the reader's, or takes too long here, and what is put in its place.
PLACEHOLDERS = (
    (r"\.venv/bin/torchrun|(?<!\S)torchrun", "{python} -m torch.distributed.run"),
    (r"\.venv/bin/python|(?<!\S)python(?=\s)", "{python}"),
    (r"\.cache/megatron/0\.19\.2", "{megatron}"),
    (r"megatron_core-[\d.…]+\S*\.whl", "{megatron}"),
    (r"--source Megatron-LM --source MindSpeed --source MindSpeed-LLM", "--source {megatron}"),
    (r"MindSpeed-LLM/mindspeed_llm/core/high_availability", "{root}/tests/stand_ins/adaptor"),
    (r"(?<!\S)examples/", "{root}/examples/"),
    (r"(?<!\S)tests/", "{root}/tests/"),
    (r"\bLOGDIR\b", "{logs}"),
    (r"\bLOG…?(?=\s|$)", "{log}"),
    (r"\btrain\.log\b", "{log}"),
    (r"\bPATH…?(?=\s|$)", "{root}/tests/planted"),
    (r"--sample 100", "--sample 2"),
    (r"--index-url …", "--index-url https://download.pytorch.org/whl/cpu"),
    (r"(?<=sweep) examples", " {root}/examples"),
    (r"^make ", "make -n -C {root} "),  # these run the tests, or are run by them
    (r"-k \"?every_version\"?", "-k every_version --collect-only"),  # minutes
    (r"(?<!\S)my_states\.toml", "{states}"),
)
# What is no command to run: a flag of a program that is named for its own sake, or other people's.
NOT_RUN = (
    "torchrun … -m mindspeed_recovery.run pretrain_gpt.py … --enable-recovery-safe-globals",  # tests/test_flag.py
    "pip install mindspeed-recovery",  # tests/test_packaging.py
    "pip install tensorboard matplotlib",
)


@pytest.fixture(scope="module")
def places(megatron: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the placeholders stand for: a run with two recoveries, a log of a job that died, states of one's own."""
    folder = tmp_path_factory.mktemp("documents")
    core = megatron("0.19.2")
    job = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    job += ["--tee", "3", f"{ROOT}/examples/pretrain_moe.py", "--train-iters", "4", "--tensorboard-dir"]
    fault = ["--fault", "uce@rank=1,step=3,at=router,states=moe-aux-loss-tracker"]
    died = subprocess.run(
        [*job, f"{folder}/died", *fault],
        env=environment(core),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    log = folder / "train.log"
    log.write_text(died.stdout + died.stderr)
    recovered = [*job, f"{folder}/logs", *fault, "--enable-recovery-safe-globals"]
    subprocess.run(recovered, env=environment(core), capture_output=True, timeout=100, check=True)
    states = folder / "my_states.toml"
    states.write_text(re.findall(r"^```toml\n(.*?)^```$", text_of("README.md"), re.MULTILINE | re.DOTALL)[0])
    return {
        "python": sys.executable, "megatron": str(core), "root": str(ROOT), "logs": f"{folder}/logs", "log": str(log),
        "states": str(states),
    }  # fmt: skip


@pytest.mark.parametrize("command", list(dict.fromkeys(c for document in DOCUMENTS for c in commands(document))))
def test_every_command_runs(command: str, places: dict[str, str], tmp_path: Path) -> None:
    if command in NOT_RUN:
        pytest.skip("run by another test, or none of ours")
    line = command
    for pattern, put in PLACEHOLDERS:
        line = re.sub(pattern, put, line)
    line = line.format(**places)
    assert "…" not in line, f"what stands for … in: {command}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment(Path(places["megatron"])), capture_output=True, text=True,
        timeout=110, check=False,
    )  # fmt: skip
    findings = ("diagnose", "verify", "audit")  # 1 is what they say of something that they have found
    allowed = (0, 1) if any(f"mindspeed-recovery {name}" in line for name in findings) else (0,)
    assert done.returncode in allowed, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr


def test_the_commands_are_found() -> None:
    assert len(commands("README.md")) > 12
    assert "mindspeed-recovery diagnose train.log" in commands("README.md")
    assert "make test" in commands("CONTRIBUTING.md")


def test_both_languages_have_the_same_commands_and_examples() -> None:
    assert commands("README.zh-CN.md") == commands("README.md")
    code = r"^```(python|toml|sh|bash)\n(.*?)^```$"
    english, chinese = (re.findall(code, text_of(name), re.MULTILINE | re.DOTALL) for name in DOCUMENTS[:2])
    assert [without_comments(code) for _, code in chinese] == [without_comments(code) for _, code in english]


def without_comments(code: str) -> list[str]:
    return [stripped for line in code.splitlines() if (stripped := line.split("#")[0].rstrip())]


def test_both_languages_have_the_same_structure() -> None:
    english, chinese = (
        [re.match("#+", line)[0] for line in text_of(name).splitlines() if re.match("#+ ", line)]  # type: ignore[index]
        for name in DOCUMENTS[:2]
    )
    assert chinese == english
    links = re.compile(r"\]\(([^)]+)\)")
    english, chinese = (links.findall(text_of(name)) for name in DOCUMENTS[:2])
    english.remove("README.zh-CN.md")  # the one pair that differs: each leads to the other language, once
    chinese.remove("README.md")
    assert sorted(chinese) == sorted(english)


@pytest.mark.parametrize("document", DOCUMENTS[:2])
def test_the_table_of_versions_is_that_of_the_catalogue(document: str) -> None:
    written = re.search(r"<!-- by-version: begin -->\n(.*?)\n<!-- by-version: end -->", text_of(document), re.DOTALL)
    assert written
    assert written[1] == compatibility.table(catalogue.shipped())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text_of(document)):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_texts_to_look_up_are_those_that_are_printed() -> None:
    """The left column of the troubleshooting table, against the sources."""
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "mindspeed_recovery").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # texts that go on in the next line
    section = re.search(r"^## Troubleshooting$(.*?)^## ", text_of("README.md"), re.MULTILINE | re.DOTALL)
    assert section
    rows = [line for line in section[1].splitlines() if line.startswith("| ") and not line.startswith("| the log")]
    assert len(rows) > 8
    for row in rows:
        for text in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            for part in re.split(r"'…'|…|\bN\b|\bR\b", text):
                words = part.strip(" :'.,")
                assert len(words) < 6 or words in sources or words in KIN, f"nothing prints {words!r}"


KIN = ("cached_output is not None", "has already been started", "pop from empty list")
"""Texts of upstream, which `diagnose` knows by pattern."""


def test_a_new_version_is_entered_as_the_guide_says(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", text_of("CONTRIBUTING.md"), re.DOTALL)
    assert block
    file = tmp_path / "new.toml"
    file.write_text('package = "megatron-core"\n' + re.sub(r"^   ", "", block[1], flags=re.MULTILINE))
    loaded = catalogue.load(file)
    assert len(loaded.entries["moe-aux-loss-tracker"]) == 2
