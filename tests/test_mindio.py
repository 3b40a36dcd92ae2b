# SPDX-License-Identifier: Apache-2.0
"""Recoveries driven by MindIO TFT: two real processes under a stand-in that keeps its observed rules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clusters
import pytest

from mindspeed_recovery.core.notices import DefaultStore
from mindspeed_recovery.runtimes import mindio
from mindspeed_recovery.runtimes.mindio import agreement, chain, layout
from mindspeed_recovery.runtimes.mindio.window import UpdateWindow

pytestmark = pytest.mark.timeout(60)
ROOT = clusters.ROOT
BOTH, NEITHER = [True, True], [False, False]
RESET_HAD_NO_EFFECT = "a name that did not exist"


class Result(clusters.Run):
    """What a toy job left behind."""

    def left(self, rank: int) -> Any:
        return json.loads((self.folder / f"rank{rank}.json").read_text())

    def outcome(self) -> Any:
        """What must not depend on faults: states of all ranks, and every point that was logged."""
        assert self.ended_well, self.tail()
        ranks = [self.left(rank) for rank in range(len(self.codes))]
        return [rank["digest"] for rank in ranks], sorted(ranks[-1]["log"], key=lambda point: (point[0], point[1]))


Run = Callable[..., Result]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run the toy job on two ranks, forked from one parent that has torch loaded."""
    server = clusters.RankServer("mindio_ranks.py", tmp_path_factory.mktemp("mindio-"))

    def run(
        *faults: dict[str, Any],
        plugin: list[bool] = BOTH,
        kind: str = "llm",
        first: str = "plugin",
        job: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Result:
        folder = server.new_folder()
        whole = {
            "layout": kind,
            "plugin": plugin,
            "first": first,
            "faults": faults,
            "settings": settings,
            "timeout": 40,
        }
        return Result(folder, server.run_job(folder, **whole | (job or {})).codes)

    yield run
    server.close()


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> Any:
    return run(plugin=NEITHER).outcome()


def fault(kind: str, step: int, at: str, *hits: str, rank: int = 1, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "step": step, "at": at, "kind": kind, "hits": hits, **more}


CASES = {
    "tracker-and-parameters": [fault("uce", 3, "forward2", "tracker", "weight", "bias", "counts")],
    "temporary-memory": [fault("uce", 3, "forward2")],
    "link": [fault("link", 3, "forward1")],
    "link-in-the-other-rank": [fault("link", 3, "forward2", rank=0)],
    "inside-the-update": [fault("uce", 3, "update", "weight", "tracker", delay=0.3)],
    "temporary-inside-the-update": [fault("uce", 3, "update", delay=0.3)],
    "before-the-log-line": [fault("uce", 3, "log-early", "tracker", "weight")],
    "losses-hit-before-the-log-line": [fault("uce", 3, "log-early", "losses", "tracker", "weight")],
    "writer-lags-behind-its-line": [fault("uce", 3, "log-late", "weight", delay=0.3)],
    "other-rank-lags": [fault("uce", 3, "log-late", "weight", rank=0, delay=0.3)],
    "writer-lags": [fault("link", 3, "log-late", delay=0.3)],
    "reader-lags": [fault("link", 3, "log-late", rank=0, delay=0.3)],
    "repaired-writer-owes-its-line": [fault("uce", 3, "log-reduced", "weight", "tracker", delay=0.3)],
    "training-thread-runs-on-after-stop": [
        fault("linger", 3, "forward2", rank=0),
        fault("uce", 3, "forward1", "weight"),
    ],
    "error-with-device-time": [fault("ecc", 3, "forward2", "tracker", "weight", "bias")],
    "twice": [fault("uce", 3, "forward2", "tracker", "weight"), fault("uce", 3, "forward1", "bias", "weight", entry=2)],
    "update-then-forward": [fault("uce", 3, "update", delay=0.3), fault("link", 4, "forward2", entry=2)],
    "unsafe-tracker": [fault("unsafe", 3, "forward1", "tracker")],
    "unsafe-losses-of-a-finished-step": [fault("unsafe", 3, "log-late", "losses"), fault("link", 4, "forward1")],
}


# ---- whole recoveries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_recovered_run_equals_the_undisturbed_one(run: Run, undisturbed: Any, case: str) -> None:
    result = run(*CASES[case])
    assert result.outcome() == undisturbed
    for rank in range(2):
        assert result.left(rank)["reports"], result.tail()
        assert not any(report["failures"] for report in result.left(rank)["reports"])


@pytest.mark.parametrize(
    "case", ["tracker-and-parameters", "temporary-inside-the-update", "before-the-log-line", "link"]
)
@pytest.mark.parametrize(("kind", "first"), [("llm", "adaptor"), ("older", "plugin"), ("older", "adaptor")])
def test_layouts_and_orders(run: Run, undisturbed: Any, case: str, kind: str, first: str) -> None:
    assert run(*CASES[case], kind=kind, first=first).outcome() == undisturbed


def test_log_line_without_losses_is_missing_on_every_rank(run: Run, undisturbed: Any) -> None:
    result = run(fault("unsafe", 4, "update", "losses"), fault("link", 4, "updated", delay=0.3))
    digests, log = result.outcome()
    assert (digests, log) == (undisturbed[0], [point for point in undisturbed[1] if point[0] != 4])
    assert "the log line of step 4: not every rank has its losses any more" in result.log(0)


def test_rollback_to_either_step(run: Run) -> None:
    assert run(*CASES["tracker-and-parameters"]).left(0)["rolled_back"] == [2]
    result = run(*CASES["inside-the-update"])
    assert result.left(0)["rolled_back"] == [3]
    assert [report["replayed"] for rank in range(2) for report in result.left(rank)["reports"]] == [True, True]


def test_copies_since_the_last_update_are_not_trusted_after_an_error_with_device_time(run: Run) -> None:
    outcomes = [run(*CASES["error-with-device-time"]).left(rank)["reports"][0]["outcomes"] for rank in range(2)]
    assert [outcome["bias"]["source"] for outcome in outcomes] == ["start(3)", "update(2)"]


def test_deployed_reset_without_effect_is_said_once(run: Run) -> None:
    result = run(*CASES["twice"])
    assert [result.log(rank).count(RESET_HAD_NO_EFFECT) for rank in range(2)] == [1, 1]


def test_checkpoint_fallback(run: Run, undisturbed: Any) -> None:
    result = run(fault("uce", 4, "forward2", "weight", "tracker"), replicas=False, save_at=2)
    assert result.outcome() == undisturbed
    assert result.left(0)["rolled_back"] == [2]
    for rank in range(2):
        report = result.left(rank)["reports"][0]
        assert (report["step"], report["failures"]) == (2, [])


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("tracker-and-parameters", [("memory fault", [1], 2, 0)]),
        ("link-in-the-other-rank", [("link fault", [0], 2, 0)]),
        ("before-the-log-line", [("memory fault", [1], 3, 0)]),
        ("twice", [("memory fault", [1], 2, 0), ("memory fault", [1], 2, 1)]),
        ("update-then-forward", [("memory fault", [1], 3, 0), ("link fault", [1], 3, 1)]),
    ],
)
def test_every_rank_knows_what_to_tell_of_a_recovery(run: Run, case: str, told: Any) -> None:
    result = run(*CASES[case])
    for rank in range(2):
        recoveries = result.left(rank)["recoveries"]
        assert [(r["cause"], r["ranks"], r["step"], r["retries"]) for r in recoveries] == told, result.tail()
        for recovery in recoveries:
            assert recovery["exact"]
            phases = set(recovery["phases"])
            assert phases - {"repair"} == {"stop", "clean", "rollback"}
            assert recovery["milliseconds"] == pytest.approx(sum(recovery["phases"].values()))
    lines = [re.findall(r"INFO:mindspeed_recovery:recovery \d+", result.log(rank)) for rank in range(2)]
    assert [len(found) for found in lines] == [len(told), 0], "one line for the job"


def test_a_log_that_cannot_tell_of_a_recovery_does_not_end_it(run: Run, undisturbed: Any) -> None:
    result = run(*CASES["link"], dumb_log=True)
    assert result.outcome() == undisturbed
    assert result.log(1).count("the log does not tell of recovery 1: TypeError") == 1


def test_no_replica_and_no_checkpoint_ends_the_job(run: Run) -> None:
    assert run(fault("uce", 4, "forward2", "weight"), replicas=False).codes == [2, 2]


AFTER_A_LOAD = [fault("uce", 4, "forward2", "weight"), fault("link", 3, "forward1", entry=2)]


def test_lost_step_fails_loudly(run: Run) -> None:
    result = run(*AFTER_A_LOAD, replicas=False, save_at=2)
    assert result.codes == [2, 2], result.tail()
    for rank in range(2):
        assert "FORCE STOP: MindIO TFT rolls back to step 3" in result.log(rank)


def test_fault_after_catching_up_is_recovered(run: Run, undisturbed: Any) -> None:
    later = fault("link", 5, "forward1", entry=2)
    assert run(AFTER_A_LOAD[0], later, replicas=False, save_at=2).outcome() == undisturbed


def test_dump_of_last_words(run: Run) -> None:
    import torch

    result = run(fault("bug", 3, "forward2"))
    assert result.codes == [2, 2], result.tail()
    for rank in range(2):
        words = torch.load(result.folder / f"dump.{rank}")
        assert words["step"] == 2
        assert words["tracker"]["load"].shape == (2,)


def test_peer_without_the_plugin_does_not_hang(run: Run) -> None:
    for case in ("tracker-and-parameters", "before-the-log-line"):
        result = run(*CASES[case], plugin=[False, True])
        assert -9 not in result.codes, result.tail()
        assert "not every rank runs the plugin" in result.log(1)


def test_session_that_exchanges_states_is_given_the_pairs_and_the_group(run: Run, undisturbed: Any) -> None:
    result = run(*CASES["tracker-and-parameters"], exchange=True)
    assert result.outcome() == undisturbed
    for rank in range(2):
        assert f"exchange: step 2, rank {rank}, pairs ((0, 1, 0),), receives {rank == 1}, group of 2" in result.log(
            rank
        )


def test_bugs_of_ours_do_not_end_a_recovery(run: Run) -> None:
    result = run(fault("uce", 3, "forward2", "weight"), broken_session=True)
    assert result.codes == [0, 0], result.tail()
    assert "the recovery may not be exact" in result.log(1)


# ---- the unsafe-data net -------------------------------------------------------------------------------------------


def test_unsafe_state_is_named_and_rebuilt(run: Run) -> None:
    log = run(*CASES["unsafe-tracker"]).log(1)
    assert "unsafe data in state 'tracker' at toy.parallel_state" in log
    assert "rolling back to step 2" in log


def test_unsafe_data_past_the_cap_ends_the_job(run: Run) -> None:
    result = run(*[fault("unsafe", 3, "forward1", "tracker", entry=entry) for entry in range(1, 6)])
    assert result.codes == [2, 2]
    assert "has been tried again 3 times: giving up" in result.log(1)


def test_unsafe_data_of_nobody_is_named(run: Run) -> None:
    result = run(fault("unsafe", 3, "forward1", "weight"))
    assert result.codes == [2, 2]
    assert "that nobody rebuilds: the model's weight, (8,) torch.float32" in result.log(1)


def test_unsafe_global_that_is_not_declared_is_named(run: Run) -> None:
    result = run(fault("unsafe", 3, "forward1", "counts"), untracked=["counts"])
    assert result.codes == [2, 2]
    assert "toy.training:counts" in result.log(1)
    assert "mindspeed_recovery.track(" in result.log(1)


def test_tft_without_an_open_fault_table(run: Run, undisturbed: Any) -> None:
    assert run(*CASES["link"], first="adaptor", no_exception_hook=True).outcome() == undisturbed
    result = run(*CASES["unsafe-tracker"], first="adaptor", no_exception_hook=True)
    assert result.codes == [2, 2]
    assert "takes no further fault texts" in result.log(0)


# ---- the rules of TFT that the stand-in keeps ----------------------------------------------------------------------


def test_callbacks_run_in_order_on_one_thread_that_is_not_the_training_thread(run: Run) -> None:
    result = run(*CASES["twice"], plugin=NEITHER)
    assert result.codes == [2, 2]  # the tracker is unsafe: the recomputed step dies
    result = run(fault("uce", 3, "forward2", "weight"), fault("link", 4, "forward1", entry=2))
    for rank in range(2):
        calls = result.left(rank)["calls"]
        assert [call[0] for call in calls] == ["stop", "clean", "repair", "rollback", "stop", "clean", "rollback"]
        assert len({call[1] for call in calls}) == 1
        assert not any(call[2] for call in calls)


def test_clean_that_finds_nothing_to_rebuild_means_no_repair(run: Run) -> None:
    result = run(fault("uce", 3, "forward2"))
    assert [call[0] for call in result.left(0)["calls"]] == ["stop", "clean", "rollback"]


def test_without_the_plugin_a_temporary_fault_inside_the_update_is_silently_wrong(run: Run, undisturbed: Any) -> None:
    result = run(*CASES["temporary-inside-the-update"], plugin=NEITHER)
    assert result.codes == [0, 0]
    assert result.outcome() != undisturbed
    assert result.left(0)["digest"] != result.left(1)["digest"]


def test_without_the_plugin_a_step_is_lost_silently(run: Run, undisturbed: Any) -> None:
    result = run(*AFTER_A_LOAD, plugin=NEITHER, replicas=False, save_at=2)
    assert result.left(0)["rolled_back"] == [2, 3]
    assert result.outcome() != undisturbed


def test_without_the_plugin_ranks_that_disagree_about_the_log_line_hang(run: Run) -> None:
    result = run(*CASES["writer-lags"], plugin=NEITHER)
    assert result.codes == [2, 2]
    assert "the collective hangs" in result.log(1)


def test_fault_before_the_first_update_is_refused(run: Run) -> None:
    result = run(fault("uce", 1, "forward2", "weight"))
    assert result.codes == [2, 2]
    assert "refused" in result.log(0)


def test_exception_in_clean_ends_every_rank_without_a_dump(run: Run) -> None:
    result = run(fault("uce", 3, "forward2", "weight"), clean="raise")
    assert result.codes == [2, 2]
    assert not list(result.folder.glob("dump*"))


@pytest.mark.parametrize("clean", ["none", "exit"])
def test_what_would_abort_the_process_is_a_failure_with_the_plugin(run: Run, clean: str) -> None:
    assert run(fault("uce", 3, "forward2", "weight"), plugin=NEITHER, clean=clean).codes == [2, -6]
    assert run(fault("uce", 3, "forward2", "weight"), clean=clean).codes == [2, 2]


def test_signals_are_swallowed(run: Run, undisturbed: Any) -> None:
    assert run(fault("signal", 3, "forward1")).outcome() == undisturbed


# ---- installation --------------------------------------------------------------------------------------------------


class Handler:
    _args = _repair_step = _repair_info = None

    def _execute(self) -> Any:
        return 0

    execute_stop = execute_clean = execute_repair = execute_rollback = execute_save = _execute


@pytest.fixture
def decorator(make_module: Callable[..., Any]) -> Any:
    """TFT's module as the plugin sees it, and no more."""
    return make_module(
        layout.DECORATOR,
        save_handler=Handler(),
        tft_start_updating_os=lambda: None,
        tft_end_updating_os=lambda step: None,
        fault_types={"OTHER": "RS_UNKNOWN"},
        fault_handles={},
    )


def test_installation_has_an_inverse_and_is_idempotent(
    decorator: Any, make_module: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    start = decorator.tft_start_updating_os
    importer = make_module("an_optimizer", tft_start_updating_os=start)
    undo = mindio.install(lambda: None)
    assert {f"execute_{phase}" for phase in layout.PHASES} == set(vars(decorator.save_handler))
    assert importer.tft_start_updating_os is decorator.tft_start_updating_os is not start
    assert mindio.install(lambda: None) is undo
    assert "the second installation changes nothing" in caplog.text
    undo()
    assert vars(decorator.save_handler) == {}
    assert importer.tft_start_updating_os is decorator.tft_start_updating_os is start
    mindio.install(lambda: None)()


def test_undo_leaves_what_another_party_has_put_around_ours(decorator: Any) -> None:
    handler = decorator.save_handler
    undo = mindio.install(lambda: None)
    ours = handler.execute_stop
    theirs = handler.execute_stop = lambda: ours()
    undo()
    assert handler.execute_stop is theirs
    assert theirs() == 0


def test_without_a_session_the_callbacks_are_as_before(decorator: Any) -> None:
    undo = mindio.install(lambda: None)
    assert [decorator.save_handler.execute_rollback(), decorator.save_handler.execute_clean()] == [0, 0]
    undo()


@pytest.mark.parametrize("what", ["save_handler", "tft_end_updating_os"])
def test_unknown_tft_is_refused_with_what_was_looked_for(decorator: Any, what: str) -> None:
    delattr(decorator, what)
    with pytest.raises(mindio.MindioLayoutError, match=what):
        mindio.install(lambda: None)
    assert mindio._installed is None


def test_adaptor_that_lacks_a_function_is_refused(decorator: Any, make_module: Callable[..., Any]) -> None:
    make_module("mindio_ttp.adaptor.modellink_adaptor", send_rank_repair=print, recv_rank_repair=print)
    with pytest.raises(mindio.MindioLayoutError, match=r"modellink_adaptor\.feature_rollback"):
        mindio.install(lambda: None)


def test_training_without_a_known_adaptor_is_said_once(decorator: Any, caplog: pytest.LogCaptureFixture) -> None:
    undo = mindio.install(lambda: types.SimpleNamespace())  # type: ignore[arg-type, return-value]
    decorator.tft_start_updating_os()
    decorator.tft_start_updating_os()
    assert decorator.save_handler.execute_stop() == 0
    assert caplog.text.count("none of its known adaptors is loaded (looked for mindspeed_llm") == 1
    undo()


def test_elastic_training_is_refused(decorator: Any, make_module: Callable[..., Any]) -> None:
    functions = dict.fromkeys(("feature_rollback", "send_rank_repair", "recv_rank_repair"), print)
    arguments = types.SimpleNamespace(enable_elastic_training=True)
    make_module("mindio_ttp.adaptor.modellink_adaptor", get_args=lambda: arguments, **functions)
    with pytest.raises(mindio.MindioUnsupported, match="--enable-elastic-training"):
        mindio.install(lambda: None)


def test_arguments_that_are_not_parsed_yet_are_no_reason_to_refuse(
    decorator: Any, make_module: Callable[..., Any]
) -> None:
    def get_args() -> Any:
        raise AssertionError("args is not initialized.")

    functions = dict.fromkeys(("feature_rollback", "send_rank_repair", "recv_rank_repair"), print)
    make_module("mindio_ttp.adaptor.modellink_adaptor", get_args=get_args, **functions)
    mindio.install(lambda: None)()


def test_tft_that_is_not_loaded_is_waited_for_and_never_imported(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "stand_ins")!r}]
from mindspeed_recovery.runtimes import mindio
assert mindio.is_available() and "mindio_ttp" not in sys.modules and "torch" not in sys.modules
try:
    mindio.install(lambda: None)
except mindio.MindioLayoutError as error:
    assert "is not loaded" in str(error)
else:
    raise AssertionError
undo = mindio.install_when_loaded(lambda: None)
assert "mindio_ttp" not in sys.modules and "torch" not in sys.modules
from mindio_ttp import framework_ttp
handler = framework_ttp.ttp_decorator.save_handler
assert "execute_stop" in vars(handler)
assert framework_ttp.tft_start_updating_os is framework_ttp.ttp_decorator.tft_start_updating_os
assert framework_ttp.tft_start_updating_os.__name__ == framework_ttp.tft_start_updating_os.__wrapped__.__name__
undo()
assert "execute_stop" not in vars(handler) and not hasattr(framework_ttp.tft_start_updating_os, "__wrapped__")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50, cwd=tmp_path)


@pytest.mark.parametrize("result", [None, "text", SystemExit(1), KeyboardInterrupt(), ValueError()])
def test_chained_callback_answers_an_integer_whatever_happens(result: Any) -> None:
    def original() -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    handler = types.SimpleNamespace(method=original)
    chain.chain(handler, "method", lambda call: chain.code(call(), "method"))
    assert handler.method() == chain.FAILED


# ---- the vote ------------------------------------------------------------------------------------------------------


@pytest.fixture
def voters() -> Callable[..., list[Any]]:
    """``voters(*votes)``: what each voter is told; a vote of None stays away."""
    import torch.distributed as dist

    store = dist.HashStore()

    def vote(*votes: bool | None, announced: int | None = None) -> list[Any]:
        size = len(votes)
        ranks = [
            agreement.Agreement(
                0.5 if None in votes or announced else 20, lambda rank=rank: DefaultStore(store, rank, size)
            )  # type: ignore[misc]
            for rank in range(size)
        ]
        for rank in ranks[:announced]:
            rank.announce()
            rank.announce()
        answers: list[Any] = [None] * size
        threads = [
            threading.Thread(target=lambda i=i: answers.__setitem__(i, ranks[i].vote("1", {"owed": bool(votes[i])})))
            for i in range(size)
            if votes[i] is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return answers

    return vote


def test_every_rank_is_told_the_same_count(voters: Callable[..., list[Any]]) -> None:
    assert voters(True, False, True) == [{"owed": 2}] * 3


def test_vote_without_every_rank_is_void_for_all(voters: Callable[..., list[Any]]) -> None:
    assert voters(True, None, True) == [None] * 3


def test_no_vote_where_a_rank_has_not_announced_itself(voters: Callable[..., list[Any]]) -> None:
    assert voters(True, True, announced=1) == [None] * 2


# ---- the window ----------------------------------------------------------------------------------------------------


def test_lost_step_is_told_from_a_rank_that_lags() -> None:
    window = UpdateWindow()
    assert not window.loses_a_step(3, repaired=False)  # nothing known yet: a restarted process
    window.close(3)
    assert not window.loses_a_step(4, repaired=False)  # no checkpoint was loaded
    window.rolled_back(2, tft_step=5)
    assert window.loses_a_step(5, repaired=True)
    assert not window.loses_a_step(3, repaired=True)  # another rank has finished step 3 since
    assert window.loses_a_step(3, repaired=False)
    assert not window.loses_a_step(2, repaired=False)
    for step in (3, 4, 5):
        window.close(step)
    assert not window.loses_a_step(6, repaired=False)
    window.rolled_back(2, tft_step=2)  # a TFT that names the checkpoint's step
    assert window.loses_a_step(5, repaired=True)


# ---- trackers that differ between the ranks ------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "told"), [([1], True), ([0, 1], False), ([], False)])
def test_sums_that_some_ranks_lose_in_the_rollback_are_told_before_they_are_reduced(
    run: Run, ranks: list[int], told: bool
) -> None:
    result = run(*CASES["tracker-and-parameters"], loses_sums=ranks)
    text = "1 of 2 ranks lost sums of the log line in the rollback"
    for rank in range(2):
        assert (text in result.log(rank)) == told, result.tail()
    assert ("(this rank lost toy.parallel_state:_MOE_LAYER_WISE_LOGGING_TRACKER" in result.log(1)) == told
    assert ("(this rank has all of them)" in result.log(0)) == told


# ---- states that come from a replica -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["tracker-and-parameters", "error-with-device-time"])
def test_rank_that_lost_its_copies_is_given_those_of_its_replica(run: Run, undisturbed: Any, case: str) -> None:
    result = run(*CASES[case], lost_copies=True)
    assert result.outcome() == undisturbed
    outcomes = [result.left(rank)["reports"][0]["outcomes"] for rank in range(2)]
    assert [outcomes[1][name]["source"] for name in ("bias", "rng")] == ["replica 0", "replica 0"]
    assert outcomes[1]["bias"]["tried"] == ["start(3)", "update(2)", "replica 0 (received)"]
    assert outcomes[0]["bias"]["source"] == "start(3)"


def test_rank_that_lost_its_copies_fails_without_its_replica(run: Run) -> None:
    """The negative control: nothing but the exchange makes the run above equal."""
    result = run(*CASES["tracker-and-parameters"], lost_copies=True, exchange="nothing")
    assert result.codes == [2, 2], result.tail()
    assert "bias: no copy of the end of step 2 (unsafe); tried start(3), update(2)" in result.log(1)


def test_rank_that_lost_its_copies_is_rolled_back_with_its_replica_after_an_update(run: Run, undisturbed: Any) -> None:
    result = run(*CASES["temporary-inside-the-update"], lost_copies=True)
    assert result.outcome()[0] == undisturbed[0]
    report = result.left(1)["reports"][0]
    assert report["outcomes"]["bias"]["source"] == "replica 0"
    assert report["failures"] == ["the log line of step 3: not every rank has its sums any more"]
    # Its sums are the rank's own: nobody has them any more, so all ranks leave the line out.
    for rank in range(2):
        assert "the log line of step 3: not every rank has its sums any more" in result.log(rank)


# ---- faults of the recovery itself -----------------------------------------------------------------------------------

LOST = CASES["tracker-and-parameters"]


@pytest.mark.parametrize("struck", [0, 1])
@pytest.mark.parametrize("kind", ["uce", "bug"])
@pytest.mark.parametrize("phase", ["stop", "clean", "repair", "rollback"])
def test_second_fault_in_a_callback_ends_every_rank_with_an_error(run: Run, phase: str, kind: str, struck: int) -> None:
    """As TFT has it: a callback that fails is tried again by nobody. What must not happen is that one rank goes on."""
    result = run(*LOST, strikes=[phase, struck, kind])
    assert result.codes == [2, 2], result.tail()
    assert f"second fault: {kind} in {phase}" in result.log(struck)
    assert "UCE ERROR: in a callback" in result.log(struck) or "a bug in a callback" in result.log(struck)


AGENT = {"agent": True}
"""The controller is not in one of the ranks, which may die."""


@pytest.mark.parametrize("struck", [0, 1])
@pytest.mark.parametrize("phase", ["stop", "repair", "rollback"])
def test_rank_that_dies_in_a_callback_ends_every_rank(run: Run, phase: str, struck: int) -> None:
    result = run(*LOST, strikes=[phase, struck, "die"], job=AGENT)
    assert (result.codes[struck], result.codes[1 - struck]) == (-9, 2), result.tail()


@pytest.mark.parametrize(
    ("broken", "kind", "why"),
    [
        (0, "payload", "its bytes arrived damaged"),
        (0, "step", "step 2 there, 3 here"),
        (1, "step", "step 3 there, 2 here"),
        (0, "catalogue", "another here"),
    ],
)
def test_exchange_that_fails_ends_every_rank_and_says_why(run: Run, broken: int, kind: str, why: str) -> None:
    """The state is one without which training is wrong."""
    result = run(*LOST, lost_copies=True, repair_timeout=2.0, breaks=[broken, kind])
    assert result.codes == [2, 2], result.tail()
    (line,) = re.findall(r"not exact: (bias: .*)", result.log(1))[:1]
    assert re.search(rf"tried start\(3\), update\(2\), replica 0 \(.*{why}", line), line


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("kind", ["die", "hang"])
def test_rank_that_ends_in_the_middle_of_an_exchange_leaves_nobody_waiting(run: Run, kind: str, broken: int) -> None:
    result = run(*LOST, lost_copies=True, repair_timeout=2.0, breaks=[broken, kind], job=AGENT)
    assert (result.codes[broken], result.codes[1 - broken]) == (-9 if kind == "die" else 2, 2), result.tail()
    assert f"the connection to rank {broken} failed" in result.log(1 - broken)
