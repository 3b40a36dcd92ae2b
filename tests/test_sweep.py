# SPDX-License-Identifier: Apache-2.0
"""The sweep: a fault in every live device storage, one run each."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import ROOT

from mindspeed_recovery.testing import outcomes, sweep
from mindspeed_recovery.testing.outcomes import Expectation, Result, expected
from mindspeed_recovery.testing.simulator import UnsafeMemory
from mindspeed_recovery.testing.storages import live_storages

pytestmark = pytest.mark.timeout(120)

JOBS = ROOT / "tests" / "sweep_jobs"
TOY = JOBS / "toy.py"
SAMPLE = 104
MOE = ["--", "--train-iters", "3", "--eval-interval", "2"]
EP2 = [*MOE, "--expert-model-parallel-size", "2", "--use-distributed-optimizer"]


def run(*arguments: str, megatron: Path | None = None, limit: float = 100) -> subprocess.CompletedProcess[str]:
    paths = [ROOT, ROOT / "examples", *([megatron] if megatron else [])]
    return subprocess.run(
        [sys.executable, "-m", "mindspeed_recovery.testing.sweep", *arguments],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    out = tmp_path_factory.mktemp("toy")
    return run(str(TOY), "--out", str(out), "--points", "forward", "--timeout", "3", "--ranks", "1", "--json")


# ---- the main job ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_a_sample_of_all_storages_recovers_as_the_table_says(megatron: Callable[[str], Path], tmp_path: Path) -> None:
    done = run(
        "examples/pretrain_moe.py", "--out", str(tmp_path), "--sample", str(SAMPLE), "--seed", "1", "--steps", "1,2",
        "--json", *EP2, megatron=megatron("0.19.2"), limit=880,
    )  # fmt: skip
    told = json.loads(done.stdout)
    wrong = [result for result in told["results"] if not result["as_expected"]]
    assert done.returncode == 0, (wrong[:5], done.stderr[-2000:])
    assert told["cases"] == SAMPLE
    assert told["not_expected"] == 0
    hit = Counter((result["kind"], result["point"]) for result in told["results"])
    assert {point for _, point in hit} == {"forward", "router", "backward", "update", "optimizer", "log", "eval"}
    kinds = {kind for kind, _ in hit}
    assert {"parameter", "optimizer", "held", "temporary", "all"} <= kinds
    assert {"state moe-aux-loss-tracker", "state router-expert-bias", "state mtp-loss-tracker"} <= kinds
    assert {result["outcome"] for result in told["results"]} == {"recovered", "error"}, "both rows of the table"


def test_a_state_that_no_catalogue_knows_is_hit_and_told(megatron: Callable[[str], Path], tmp_path: Path) -> None:
    """The sweep takes nothing from the registry: what is not protected shows."""
    done = run(
        str(JOBS / "leaking_moe.py"), "--out", str(tmp_path), "--points", "router", "--only", "leaking_moe.",
        "--json", *EP2, megatron=megatron("0.19.2"),
    )  # fmt: skip
    results = json.loads(done.stdout)["results"]
    assert done.returncode == 1
    assert len(results) == 4, "two on each rank"
    assert not any(result["as_expected"] for result in results)
    read = [result for result in results if "leaking_moe.READ" in result["case"]]
    assert all("There is unsafe data in the input tensor." in result["message"] for result in read)


def test_without_the_plugin_a_fault_in_a_state_ends_the_job(megatron: Callable[[str], Path], tmp_path: Path) -> None:
    done = run(
        "examples/pretrain_moe.py", "--out", str(tmp_path), "--unprotected", "--points", "router",
        "--only", "_MOE_METRICS_TRACKER._metrics.z_loss", "--json", *EP2, megatron=megatron("0.19.2"),
    )  # fmt: skip
    results = json.loads(done.stdout)["results"]
    assert done.returncode == 1
    assert len(results) == 2
    assert all("There is unsafe data in the input tensor." in result["message"] for result in results)


# ---- outcomes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "outcome"),
    [("repaired", "recovered"), ("unnoticed", "silently different"), ("refused", "error"), ("waited_for", "hang")],
)
def test_each_way_to_end_is_told_from_the_others(
    toy: subprocess.CompletedProcess[str], tensor: str, outcome: str
) -> None:
    results = [r for r in json.loads(toy.stdout)["results"] if f"GLOBALS.{tensor}" in r["case"]]
    assert [r["outcome"] for r in results] == [outcome]
    assert results[0]["as_expected"] == (outcome == "recovered")
    assert toy.returncode == 1
    if outcome == "error":
        assert "refused is lost" in results[0]["message"]


def test_what_ended_as_expected_leaves_nothing_and_the_others_their_output(tmp_path: Path) -> None:
    arguments = [str(TOY), "--out", str(tmp_path), "--points", "forward", "--ranks", "1", "--json"]
    result = json.loads(run(*arguments, "--only", "repaired").stdout)["results"][0]
    assert result["as_expected"]
    assert not list((tmp_path / "runs").glob("case*"))
    result = json.loads(run(*arguments, "--only", "refused").stdout)["results"][0]
    (folder,) = (tmp_path / "runs").glob("case*")
    assert str(folder) in result["message"]
    assert "refused is lost" in (folder / "rank0.log").read_text()


def test_a_storage_that_is_not_there_any_more_is_no_success(tmp_path: Path) -> None:
    toy = sweep.Sweep(TOY, [], 1, tmp_path)
    cases = toy.survey([2], ["forward"])
    assert toy.run(cases[0]._replace(storage="toy.GLOBALS.none", kind="held")).outcome == outcomes.MISSED


def test_the_first_row_that_covers_a_case_counts() -> None:
    table = (Expectation("error", points=("forward",), last_step=1, says="too early"), Expectation("recovered", "held"))
    assert expected("held", "forward", 1, table).outcome == "error"
    assert expected("held", "forward", 2, table).outcome == "recovered"
    assert not table[0].met("error", "for another reason")
    with pytest.raises(LookupError, match="no row for parameter at forward of step 2"):
        expected("parameter", "forward", 2, table)


def test_what_was_not_expected_stands_out_in_the_table() -> None:
    results = [
        Result("a", "held", "forward", "recovered", "recovered", True),
        Result("b", "held", "log", "hang", "recovered", False),
        Result("c", "all", "log", "error", "error", True),
    ]
    assert outcomes.table(results).splitlines() == [
        "| storage | forward | log |",
        "|---|---|---|",
        "| all |  | 1 error |",
        "| held | 1 recovered | 1 **hang, not expected** |",
    ]


# ---- which cases --------------------------------------------------------------------------------------------------------


def case(number: int, kind: str = "held", point: str = "log") -> sweep.Case:
    return sweep.Case(0, 2, point, f"tensor{number}", kind)


def test_a_sample_has_every_kind_and_point_and_only_the_seed_decides() -> None:
    cases = [case(n, "optimizer") for n in range(500)] + [case(0, "parameter"), case(0, "held", "eval")]
    chosen = sweep.sample(cases, 10, seed=3)
    assert len(set(chosen)) == 10
    assert {(c.kind, c.point) for c in chosen} == {("optimizer", "log"), ("parameter", "log"), ("held", "eval")}
    assert chosen == sweep.sample(cases, 10, seed=3)
    assert chosen != sweep.sample(cases, 10, seed=4)
    assert len(sweep.sample(cases, 10_000, seed=3)) == len(cases)


def test_shards_are_all_cases_each_once(tmp_path: Path) -> None:
    arguments = [str(TOY), "--ranks", "1", "--points", "forward", "--list", "--out", str(tmp_path)]
    whole = run(*arguments).stdout.splitlines()
    parts = [run(*arguments, "--shard", f"{part}/2").stdout.splitlines() for part in (1, 2)]
    assert len(whole) == 7  # weight, bias, four globals, and all together
    assert sorted(parts[0] + parts[1]) == sorted(whole)


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    arguments = [str(TOY), "--out", str(tmp_path), "--points", "forward", "--ranks", "1", "--json", "--only", "re"]
    first = json.loads(run(*arguments).stdout)["results"]
    file = tmp_path / "cases.jsonl"
    lines = file.read_text().splitlines()
    kept = json.loads(lines[1]) | {"message": "as it was written"}
    file.write_text("\n".join([lines[0], json.dumps(kept), lines[2][:20]]))  # the last line is cut
    again = json.loads(run(*arguments).stdout)["results"]
    assert len(again) == len(first) == 2
    assert again[0]["message"] == "as it was written"
    assert again[1]["case"] == first[1]["case"]
    assert again[1]["outcome"] == first[1]["outcome"]


# ---- bad use ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "nowhere.py is not a Python script"),
        ([str(ROOT / "setup.py"), "--points", "nowhen"], "nowhen: the points are forward, router"),
        ([str(TOY), "--shard", "3/2"], "counted from 1"),
        ([str(TOY), "--shard", "one"], "--shard takes I/N"),
        ([str(TOY), "--steps", "x"], "--steps takes numbers"),
        ([str(TOY), "--points", "eval", "--ranks", "1"], "the job passed none of the points eval"),
        ([str(TOY), "--points", "forward", "--ranks", "1", "--only", "nothing"], "no storage's name has nothing in it"),
        ([str(ROOT / "tests" / "equal.py")], "has no parse_args, join, pretrain"),
        ([str(TOY), "--ranks", "1", "--", "--nonsense"], "the run without a fault failed"),
    ],
)
def test_bad_use_says_what_to_do(
    tmp_path: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = run_here(functools.partial(sweep.main, [*_before_rest(arguments, ["--out", str(tmp_path)])]), capsys)
    assert code == 2
    assert says in output
    assert "Traceback" not in output


def _before_rest(arguments: list[str], more: list[str]) -> list[str]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:at], *more, *arguments[at:]]


def run_here(main: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    before = dict(sys.modules), list(sys.path)
    try:
        code = main()
    finally:
        for name in set(sys.modules) - set(before[0]):
            if name in ("toy", "setup", "equal"):
                del sys.modules[name]
        sys.path[:] = before[1]
    return code, capsys.readouterr().err


def test_results_of_another_sweep_are_not_mixed_in(tmp_path: Path) -> None:
    sweep.Record(tmp_path / "cases.jsonl", {"script": "a"})
    with pytest.raises(sweep.SweepError, match="is of another sweep"):
        sweep.Record(tmp_path / "cases.jsonl", {"script": "b"})


# ---- storages ----------------------------------------------------------------------------------------------------------


def names(memory: UnsafeMemory, roots: dict[str, Any] | None = None, states: Any = None) -> dict[str, str]:
    found = live_storages(memory, roots or {}, states or {})
    return {storage.name: storage.kind for storage in found if "mine" in storage.name or "model" in storage.name}


def test_a_storage_is_named_by_what_holds_it(memory: UnsafeMemory, make_module: Callable[..., Any]) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("counts", torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    one = torch.ones(1)
    module = make_module(
        "mine",
        "import functools\n"
        "@functools.lru_cache\n"
        "def cached(t): return t\n"
        "def closed(t):\n"
        "    def inner(): return t\n"
        "    return inner\n"
        "class Holder:\n"
        "    attribute = None\n",
        table={"a": {"b": torch.ones(2)}, "view": one},
        queue=[torch.ones(3)],
    )
    module.cached(torch.ones(4))
    module.inner = module.closed(torch.ones(5))
    module.Holder.attribute = torch.ones(6)
    found = names(memory, {"model": model, "optimizer": optimizer}, {"my-state": [module.queue[0]]})
    assert found == {
        "model._parameters.weight": "parameter",
        "model._parameters.bias": "parameter",
        "model._buffers.counts": "buffer",
        "mine.table.a.b": "held",
        "mine.table.view": "held",
        "mine.queue[0]": "state my-state",
        "mine.inner.<closure>[0]": "held",
        "mine.Holder.attribute": "held",
    } | {name: kind for name, kind in found.items() if name.startswith("mine.cached")}
    assert any(name.startswith("mine.cached.<cache>") for name in found)
    of_optimizer = [s for s in live_storages(memory, {"optimizer": optimizer}, {}) if s.kind == "optimizer"]
    assert len(of_optimizer) == 2


def test_what_nothing_holds_is_temporary_and_counted(memory: UnsafeMemory) -> None:
    ones = [torch.ones(7, 3), torch.ones(7, 3)]
    found = [s.name for s in live_storages(memory, {}, {}) if "(7, 3)" in s.name]
    assert found == ["temporary (7, 3) float32 #0", "temporary (7, 3) float32 #1"]
    del ones


def test_host_memory_and_empty_storages_are_left_out(memory: UnsafeMemory, make_module: Callable[..., Any]) -> None:
    make_module("mine", host=memory.host_empty((3,), torch.float32), empty=torch.empty(0))
    assert names(memory) == {}
