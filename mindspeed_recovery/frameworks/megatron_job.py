# SPDX-License-Identifier: Apache-2.0
"""One training job of Megatron's stock loop under a recovery runtime; `megatron_loop` puts it around the loop's functions.

It keeps what ``train()`` has in local variables (position, sums of the log line, counted operations), tells the runtime
where a step is, and makes good before a second call of ``train()`` what the fault interrupted: data, evaluation, the end of
the iteration with its checkpoint. Under MindIO TFT the adaptor restores data and position, and the ranks agree in its
rollback on what is made good; where they cannot, an interrupted evaluation or checkpoint is left out, with a WARNING.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from mindspeed_recovery import api, catalogue
from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.core.report import Report
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.frameworks import megatron, megatron_checkpoint
from mindspeed_recovery.frameworks.megatron import MegatronJob, before_first_write
from mindspeed_recovery.frameworks.megatron_audit import LiveAudit
from mindspeed_recovery.frameworks.megatron_drill import Rehearsal
from mindspeed_recovery.frameworks.megatron_reentry import RecordedData, Reentry, known
from mindspeed_recovery.logs import sinks
from mindspeed_recovery.runtimes import mindio
from mindspeed_recovery.runtimes import standalone as standalone_runtime
from mindspeed_recovery.runtimes.standalone import StandaloneRuntime

if TYPE_CHECKING:
    from mindspeed_recovery.core.checkpoint import Loaded
    from mindspeed_recovery.frameworks.megatron_loop import Standalone, Wrapped

logger = logging.getLogger("mindspeed_recovery")

LOG_SUMS: dict[str, Any] = {}
"""What the console's log line sums up between two lines. ``train()`` keeps it in a local variable, which a second call
would begin anew; here it is a tracked state."""

_LOG_SUMS_NAME = "console-log-sums"

_MARKS = {"evaluation": {"eval"}, "checkpoint": {"end", "save"}}
"""Under which marks it is made up for."""

_COUNTS = ("consumed_train_samples", "skipped_train_samples", "consumed_train_bins")


class Loop:
    """One training job in this process: from the first call of ``train()`` until it returns. Training thread, but `log`'s
    replay, which is the runtime's."""

    def __init__(self, training: Any, train: Wrapped, arguments: dict[str, Any], standalone: Standalone | None) -> None:
        """``training``: the module ``megatron.training.training``; ``train``: its function; ``arguments``: those of
        ``train()``, by name, in which the data iterators are replaced; ``standalone``: None where MindIO TFT is the
        runtime."""
        self._training = training
        self._args = training.get_args()
        self._arguments = arguments
        self.entries = 0
        self.done: int = self._args.iteration
        self._operations = self._args.num_floating_point_operations_so_far
        self._step_operations: Any = 0
        self._logging = False
        self._thread = threading.get_ident()
        self._entering = self._should_exit = False
        self._doing: tuple[str, int] | None = None  # and after which step
        self._evaluations: list[tuple[int, int]] = []
        self._enabled = False
        self._undo: list[Callable[[], None]] = []
        self._session = self._start_session(standalone)
        megatron_checkpoint.warn_of_format(self._args)
        self._writer = self._training.get_tensorboard_writer()
        self.sink = sinks.find(self._writer, getattr(self._training, "get_wandb_writer", lambda: None)())
        self._reentry = Reentry(self._training, arguments["model"], arguments["optimizer"], arguments["config"])
        self._data: dict[str, RecordedData] = {}
        self._rehearsal: Rehearsal | None = None
        if self._args.recovery_drill is not None and self._args.recovery_drill > self.done:
            self._rehearsal = Rehearsal(
                training, self._session, arguments["model"], arguments["optimizer"], self._args.recovery_drill
            )
        self._audit = LiveAudit(self._args.recovery_audit, self._loaders)
        self._runtime = self._make_runtime(standalone) if standalone is not None else None
        self._driver: StandaloneRuntime | _Foreign
        if self._runtime is not None:
            self._driver = self._runtime
        else:
            self._driver = self._follow_mindio(self._chores(train))
        if self._runtime is not None or self._rehearsal is not None:
            self._record_data(getattr(standalone.device, "host", nullcontext) if standalone else nullcontext)
            self._undo.append(before_first_write(arguments["optimizer"], self._before_write))

    # ---- start and end -----------------------------------------------------------------------------------------------

    def _start_session(self, standalone: Standalone | None) -> Session:
        session = api._active
        if session is None:
            session = api.enable(
                roots=megatron.roots(self._arguments["model"], self._arguments["optimizer"]),
                memory=standalone.device if standalone else None,
                catalogues=[*catalogue.shipped(), *self._args.recovery_patches],
                strict=self._args.recovery_strict,
                is_fault=standalone_runtime.is_fault if standalone else mindio.is_fault,
            )
            self._enabled = True
        LOG_SUMS.clear()
        session.track(
            StateSpec(
                name=_LOG_SUMS_NAME,
                location=Location.parse(f"{__name__}:LOG_SUMS"),
                policy=Policy.SNAPSHOT,
                settled="after-logging",
                why="sums of the console's log line since the line before",
                source="megatron_job",
            )
        )
        self._undo.append(lambda: session.untrack(_LOG_SUMS_NAME))
        self._training.print_rank_0(f"mindspeed-recovery: {session.summary()}")
        return session

    def _make_runtime(self, standalone: Standalone) -> StandaloneRuntime:
        return StandaloneRuntime(
            store=standalone.store,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=standalone.device,
            job=_StockJob(self, self._arguments),
            write_log=self._write,
            session=self._session,
            sink=self.sink,
            context=standalone.context,
            max_retries=self._args.recovery_max_retries,
            timeout=standalone.timeout,
        )

    def _record_data(self, host: Callable[[], AbstractContextManager[Any]]) -> None:
        for name, step in (("train", lambda: self.done + 1), ("valid", lambda: self.done)):
            data = self._data[name] = RecordedData(self._arguments[f"{name}_data_iterator"], step, host)
            self._arguments[f"{name}_data_iterator"] = data.data

    def _loaders(self) -> dict[str, Any]:
        return {name: value for name, value in self._arguments.items() if name.endswith("data_iterator")}

    def _follow_mindio(self, chores: Mapping[str, Callable[[int], bool]]) -> _Foreign:
        driver = _Foreign(self._session, self.sink, self._write, self._rolled_back, chores, self.done)
        self._undo.append(
            mindio.install_when_loaded(
                lambda: self._session,
                sink=lambda: self.sink,
                duties=lambda: driver,
                max_retries=self._args.recovery_max_retries,
            )
        )
        return driver

    @property
    def recovered_by_itself(self) -> bool:
        """Whether an error that leaves `run` is the end. MindIO TFT, which catches it outside, may come again."""
        return self._runtime is not None

    @property
    def milliseconds(self) -> list[dict[str, float]]:
        """By phase of each recovery, as far as the runtime tells."""
        return self._runtime.recoveries if self._runtime is not None else []

    @property
    def reports(self) -> list[Report]:
        """Of the session, one for each recovery."""
        return self._session.reports

    def run(self, train: Wrapped, arguments: inspect.BoundArguments) -> Any:
        """``train()``, until it ends or, under MindIO TFT, fails."""
        if self._runtime is None:
            self._arguments["opt_param_scheduler"] = arguments.arguments["opt_param_scheduler"]  # TFT loads a new one
            try:
                return self._enter(train, arguments)
            except Exception as error:
                self._session.explain(error)
                raise
        return self._runtime.run(lambda: self._enter(train, arguments), [], step=self.done)

    def close(self) -> None:
        """Undo everything: hooks, iterators, the writer's queue, and the session if it was made here. Idempotent."""
        while self._undo:
            self._undo.pop()()
        for data in self._data.values():
            data.release()
        if self.sink is not None:
            self.sink.uninstall()
        if self._writer is not None:
            self._writer.flush()  # as train() has just done
        if self._enabled:
            self._enabled = False
            api.disable()

    def _enter(self, train: Wrapped, arguments: inspect.BoundArguments) -> Any:
        self._begin_entry()
        self._entering = True
        result = train(*arguments.args, **arguments.kwargs)
        if self._should_exit:
            sys.exit(0)
        return result

    def train_begins(self) -> bool:
        """``train()`` has begun. Returns whether for the first time. If not by `run`, somebody between us and it has called
        it again: MindIO TFT's wrapper, where the adaptor's came before ours."""
        if not self._entering:
            self._begin_entry()
        self._entering = False
        return self.entries == 1

    def _begin_entry(self) -> None:
        self._thread = threading.get_ident()
        self.entries += 1
        self._should_exit = self.entries > 1 and self._reenter()
        if self._should_exit:
            self._args.train_iters = self._args.iteration  # train() then only cleans up

    # ---- steps -------------------------------------------------------------------------------------------------------

    def owns_this_thread(self) -> bool:
        """Whether this is the thread that ``train()`` runs on."""
        return threading.get_ident() == self._thread

    def train_step(self, train_step: Wrapped, call: inspect.BoundArguments) -> Any:
        """``train_step()`` is called."""
        step = self._args.curr_iteration + 1
        self._step_operations = 0
        for data in self._data.values():
            data.forget(step - 2)  # a rank that failed inside an update goes back two steps
        self._driver.begin_step(step)
        rehearsal = self._rehearsal
        if rehearsal is not None and rehearsal.step == step:
            result = rehearsal.train_step(train_step, call, self._data.values(), self._reentry)
        else:
            result = train_step(*call.args, **call.kwargs)
        self._audit.after_step(step)
        return result

    def _before_write(self) -> None:
        if self._rehearsal is not None:
            self._rehearsal.before_write()
        self._driver.begin_update(self._args.curr_iteration + 1)

    def add_operations(self, operations: Any) -> None:
        """``train()`` counts the operations of a step in a local variable, by one call in each step besides logging's."""
        if not self._logging:
            self._step_operations = operations

    def log_again(self, training_log: Wrapped, call: inspect.BoundArguments) -> Any:
        """A runtime of its own writes an owed line, on its thread and with new sums; those of the line are tracked."""
        call.arguments["total_loss_dict"] = LOG_SUMS
        self._start_interval()
        result = training_log(*call.args, **call.kwargs)
        self._session.after_log(call.arguments["iteration"])
        return result

    def log(self, training_log: Wrapped, call: inspect.BoundArguments) -> Any:
        """``training_log()`` is called: the update is over, and the position is that of the next step."""
        step = call.arguments["iteration"]
        self._note_evaluation(step)
        call.arguments["total_loss_dict"] = LOG_SUMS
        if call.arguments.get("is_first_iteration"):
            call.arguments["is_first_iteration"] = self.entries == 1
        self.done = step
        self._operations += self._step_operations
        line = _Line(training_log, call, self._session.memory.host_empty if self._runtime is not None else None)
        self._driver.end_update(step, line)
        self._logging = True
        try:
            self._driver.log(step)
        finally:
            line.forget_tensors()
            self._logging = False
        return line.result

    def _write(self, step: int, line: _Line) -> None:
        if not self.owns_this_thread():
            self._start_interval()
        line.write()

    def _start_interval(self) -> None:
        """A line is written again: a rank that was in an evaluation has stopped this timer, and its end is a barrier."""
        timer = self._training.get_timers()("interval-time")
        if not timer._started:
            timer.start()

    def evaluate(self, evaluate: Callable[[], Any], step: int) -> Any:
        """``evaluate_and_print_results()`` is called after ``step``."""
        self._note_evaluation(step)
        return self._do("evaluation", evaluate, "eval", step)

    def save(self, save: Callable[[], Any]) -> Any:
        """``save_checkpoint_and_time()`` is called; in Megatron's loop inside `end_iteration`."""
        megatron_checkpoint.announce(self._session.checkpoint, self._args, self.done)
        return self._do("checkpoint", save, "save", self.done)

    def states(self, step: int) -> dict[str, Any]:
        """What the plugin adds to a checkpoint of ``step``. Also on the thread of last words."""
        return megatron_checkpoint.states(self._session.checkpoint, self._args, step)

    def last_states(self) -> dict[str, Any]:
        """What it adds to the checkpoint that ``pretrain()`` saves when ``train()`` has ended, if it will."""
        if not self._args.save or self._checkpoint_due(self.done):
            return {}
        try:
            megatron_checkpoint.announce(self._session.checkpoint, self._args, self.done)
            return self.states(self.done)
        except Exception as error:  # training has ended well
            logger.warning("the last checkpoint will not hold the tracked states: %s: %s", type(error).__name__, error)
            return {}

    def loaded(self, loaded: Loaded | None) -> None:
        """The framework has loaded a checkpoint in a recovery: its states are put back with the rollback."""
        self._session.checkpoint.loaded = loaded

    def resume(self, loaded: Loaded) -> None:
        """This process has begun with a checkpoint. Raises StateError: see `Session.resume`."""
        self._session.resume(self.done, loaded)

    def end_iteration(self, decide: Callable[[], bool], step: int) -> bool:
        """``checkpoint_and_decide_exit()`` is called after ``step``."""
        return self._do(None, decide, "end", step)

    def _do(self, what: str | None, call: Callable[[], Any], mark: str | None = None, step: int = 0) -> Any:
        self._doing = (what, self.done) if what is not None else None
        result = call()
        self._doing = None
        if mark is not None:
            self._driver.mark(mark, step)
        return result

    # ---- position ----------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Where the job is in its data: what ``args`` and the local variables of ``train()`` hold after `done`."""
        counts = {name: getattr(self._args, name) for name in _COUNTS if hasattr(self._args, name)}
        return counts | {"iteration": self.done, "num_floating_point_operations_so_far": self._operations}

    def go_back(self, position: dict[str, Any]) -> None:
        """``train()`` is to begin at an earlier `position`."""
        vars(self._args).update(position)
        self.done, self._operations = position["iteration"], position["num_floating_point_operations_so_far"]

    # ---- again -------------------------------------------------------------------------------------------------------

    def _reenter(self) -> bool:
        """Before ``train()`` is called again. Returns whether it should end: the interrupted iteration decided so."""
        # The aborted step may have left a generator (no_sync) that changes the model when it is collected.
        gc.collect()
        self._reentry.prepare()
        step = self._args.iteration
        evaluation_owed = self._evaluation_owed(step)
        if self._runtime is not None:
            self._data["train"].go_back(step + 1)
            self._data["valid"].go_back(step if evaluation_owed else step + 1)
            self._forget_evaluations(step if evaluation_owed else step + 1)
        for data in self._data.values():
            data.follow()
        if evaluation_owed or self._runtime is not None:  # MindIO TFT's adaptor has gathered the parameters
            self._reentry.without_hooks(lambda: self._evaluate(step) if evaluation_owed else None)
        if self._runtime is None and self._driver.marked("save") < step:
            self._save(step)
        should_exit = self._driver.marked("end") < step and self._end_iteration(step)
        self._reentry.stop_timers()
        return should_exit

    def _rolled_back(self, step: int, left_out: list[str]) -> None:
        """MindIO TFT goes back to ``step``, and its adaptor to where ``args`` says in the data. On its thread."""
        evaluation_owed = self._evaluation_owed(step)
        self._forget_evaluations(step if evaluation_owed else step + 1)
        doing, self._doing = self._doing, None
        lost = "evaluation" if "eval" in left_out else None
        if (
            doing is not None
            and doing[1] == step
            and all(self._driver.marked(mark) == step for mark in _MARKS[doing[0]])
        ):
            lost = doing[0]
        if lost is not None:
            self._session.report_missing(
                f"the {lost} after step {step} is left out: the ranks could not agree to repeat it"
            )

    def _chores(self, train: Wrapped) -> dict[str, Callable[[int], bool]]:
        """What ``train()`` does after the log line of a step, and whether it is due; only what it calls by name, where our
        wrapper tells that it has been done."""
        code = getattr(inspect.unwrap(train), "__code__", None)

        def follows(name: str) -> bool:
            return name in getattr(code, "co_names", ())

        chores: dict[str, Callable[[int], bool]] = {}
        if follows("evaluate_and_print_results"):
            chores["eval"] = self._evaluation_due
        if follows("checkpoint_and_decide_exit"):
            chores["end"] = lambda step: True
        elif follows("save_checkpoint_and_time"):  # MindSpeed-LLM's loop has the rest inline
            chores["save"] = self._checkpoint_due
        return chores

    def _evaluation_owed(self, step: int) -> bool:
        return self._evaluation_due(step) and self._driver.marked("eval") < step

    def _evaluation_due(self, step: int) -> bool:
        args = self._args
        first = getattr(args, "start_eval_at_iter", None)
        due = args.eval_interval and step % args.eval_interval == 0 and args.do_valid
        return bool(due) and (first is None or step >= first)

    def _checkpoint_due(self, step: int) -> bool:
        args = self._args
        return bool(args.save and args.save_interval) and step % args.save_interval == 0

    def _note_evaluation(self, step: int) -> None:
        """Remember where the validation data is before the evaluation after ``step``."""
        if self._evaluation_due(step) and step not in dict(self._evaluations):
            self._evaluations = [*self._evaluations[-3:], (step, self._args.consumed_valid_samples)]

    def _forget_evaluations(self, first: int) -> None:
        again = [consumed for step, consumed in self._evaluations if step >= first]
        if again:
            self._args.consumed_valid_samples = again[0]
        self._evaluations = [(step, consumed) for step, consumed in self._evaluations if step < first]

    def _evaluate(self, step: int) -> None:
        """As ``train()`` evaluates after ``step``."""
        training = self._training
        self._call(
            training.evaluate_and_print_results,
            prefix=f"iteration {step}",
            iteration=step,
            data_iterator=self._arguments["valid_data_iterator"],
            verbose=False,
            write_to_tensorboard=True,
        )
        if self._args.num_experts is not None and hasattr(training, "get_moe_metrics_tracker"):
            training.get_moe_metrics_tracker().clear()

    def _save(self, step: int) -> None:
        """As ``train()`` saves after ``step``."""
        self._training.get_timers()("interval-time", log_level=0).start()  # which saving stops
        self._call(
            self._training.save_checkpoint_and_time,
            iteration=step,
            num_floating_point_operations_so_far=self._operations,
            checkpointing_context=self._arguments.get("checkpointing_context"),  # MindSpeed-LLM's loop has none
        )

    def _end_iteration(self, step: int) -> bool:
        """As ``train()`` ends the iteration: checkpoints, conditions to exit."""
        self._training.get_timers()("interval-time", log_level=0).start()  # which saving stops
        return self._call(
            self._training.checkpoint_and_decide_exit,
            iteration=step,
            num_floating_point_operations_so_far=self._operations,
        )

    def _call(self, function: Wrapped, **options: Any) -> Any:
        """Call with ``options`` and those of ``train()``'s own arguments that this version's function has."""
        return function(**known(function, **{**self._arguments, **options}))


class _Line:
    """One call of ``training_log()``: as it is for now and, for a replay after a fault, with its tensors on the host."""

    def __init__(self, training_log: Wrapped, call: inspect.BoundArguments, host_empty: Any) -> None:
        self.result: Any = None
        self._training_log = training_log
        self._live: inspect.BoundArguments | None = call
        self._signature = call.signature

        def save(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            host = host_empty(list(value.shape), value.dtype).copy_(value.detach())
            return _OnHost(host, value.device)

        self._host = {
            name: value if value is LOG_SUMS else tree_map(save, value)
            for name, value in (call.arguments.items() if host_empty is not None else ())
        }

    def forget_tensors(self) -> None:
        """A replay uses the host's copies."""
        self._live = None

    def write(self) -> None:
        call = self._live
        if call is None:
            values = {
                name: value if value is LOG_SUMS else tree_map(_to_device, value) for name, value in self._host.items()
            }
            call = inspect.BoundArguments(self._signature, values)
        self.result = self._training_log(*call.args, **call.kwargs)


class _OnHost:
    def __init__(self, host: Any, device: Any) -> None:
        self.host, self.device = host, device


def _to_device(value: Any) -> Any:
    if not isinstance(value, _OnHost):
        return value
    return torch.empty(value.host.shape, dtype=value.host.dtype, device=value.device).copy_(value.host)


class _Foreign:
    """Stands for a runtime that has its own way into the job (MindIO TFT): the copies before a step and the log are ours,
    and what the step has still to do after its log line. `Duties` of that runtime."""

    def __init__(
        self,
        session: Session,
        sink: Any,
        write_log: Callable[[int, Any], None],
        rolled_back: Callable[[int, list[str]], None],
        chores: Mapping[str, Callable[[int], bool]],
        step: int,
    ) -> None:
        """``rolled_back(step, left_out)``: a recovery goes back, and nobody makes up for what this rank had still to do;
        ``chores``: what is done after a step, by name, and whether it is due; ``step``: the last one done."""
        self._session, self._sink, self._write_log = session, sink, write_log
        self._rolled_back, self._chores = rolled_back, dict(chores)
        self._marks: dict[str, int] = dict.fromkeys(("eval", "end", "save"), step)
        self._line: Any = None

    def begin_step(self, step: int) -> None:
        for what in [what for what, unfinished in self.unfinished(step - 1).items() if unfinished]:
            logger.debug("'%s' after step %d was not noticed: the loop does it in another way", what, step - 1)
            del self._chores[what]
        if self._sink is not None:
            self._sink.settle(step - 1)
            self._sink.begin(step)
        self._session.begin_step(step)

    def begin_update(self, step: int) -> None:
        """The copies before the update are taken where the runtime learns of it."""

    def end_update(self, step: int, line: Any) -> None:
        self._line = line

    def log(self, step: int) -> None:
        self._write_log(step, self._line)
        self._line = None
        self._session.after_log(step)

    def mark(self, what: str, step: int) -> None:
        self._marks[what] = step

    def marked(self, what: str) -> int:
        return self._marks[what]

    def unfinished(self, step: int) -> dict[str, bool]:
        return {
            what: what in self._chores and self._chores[what](step) and done < step
            for what, done in self._marks.items()
        }

    def rolled_back(self, step: int, owed: Mapping[str, bool] | None, from_checkpoint: bool) -> None:
        if from_checkpoint:
            LOG_SUMS.clear()  # as in a process that has begun with it
        owed = owed or {}
        left_out = [what for what, unfinished in self.unfinished(step).items() if unfinished and not owed.get(what)]
        self._marks = {what: step - 1 if owed.get(what) else step for what in self._marks}
        self._rolled_back(step, left_out)


class _StockJob(MegatronJob):
    """The job as the standalone runtime restores it: parameters, optimizer, scheduler, position in the data."""

    def __init__(self, loop: Loop, arguments: dict[str, Any]) -> None:
        super().__init__(
            arguments["model"], arguments["optimizer"], arguments["opt_param_scheduler"], SimpleNamespace()
        )
        self._loop = loop

    def host_state(self) -> Any:
        return super().host_state(), self._loop.position()

    def load_host_state(self, state: Any) -> None:
        job, position = state
        super().load_host_state(job)
        self._loop.go_back(position)
