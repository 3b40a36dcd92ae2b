# SPDX-License-Identifier: Apache-2.0
"""The phases of the session at the callbacks of TFT.

==========  =================================================================================================
callback    what is added
==========  =================================================================================================
stop        the commit gate, before the device stops
clean       quarantine after it; "nothing to rebuild" becomes a request for repair inside an update
repair      the losses of the last step are made fit for it; states move between the ranks after it
rollback    the vote on the log line and restoring before it, the final reset and the check after it
save        the quarantine is lifted before a last-words checkpoint
==========  =================================================================================================

All run on TFT's thread, `save` on one of its own. An error of ours is a warning and the original goes on: a recovery that
works without the plugin works with it. Only what must not go on (a step that would be lost silently, a state without which
training is wrong, a recovery that is not exact under ``strict``) makes the callback fail.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol

from mindspeed_recovery.core.notices import catalogue_digest
from mindspeed_recovery.core.session import Session
from mindspeed_recovery.errors import RecoveryFailed
from mindspeed_recovery.runtimes.mindio import layout as layouts
from mindspeed_recovery.runtimes.mindio import losses
from mindspeed_recovery.runtimes.mindio.account import Account
from mindspeed_recovery.runtimes.mindio.agreement import Agreement
from mindspeed_recovery.runtimes.mindio.chain import NOTHING_TO_REBUILD, OK, code
from mindspeed_recovery.runtimes.mindio.layout import Layout, MindioLayoutError, MindioUnsupported
from mindspeed_recovery.runtimes.mindio.plan import NO_REPAIR, RepairPlan, read_plan
from mindspeed_recovery.runtimes.mindio.unsafe_net import UnsafeNet
from mindspeed_recovery.runtimes.mindio.window import UpdateWindow
from mindspeed_recovery.runtimes.standalone import LogSink

logger = logging.getLogger("mindspeed_recovery")

Original = Callable[[], Any]

_UNFINISHED = "unfinished-"


class Duties(Protocol):
    """What a training loop does after the log line of a step: an evaluation, a checkpoint. All ranks do it, or none."""

    def unfinished(self, step: int) -> Mapping[str, bool]:
        """Whether this rank has something of ``step`` still to do, by name; the names are the same on every rank."""

    def rolled_back(self, step: int, owed: Mapping[str, bool] | None, from_checkpoint: bool) -> None:
        """Training goes on after ``step``, and begins with what is ``owed``: any rank had it to do. None: the ranks could
        not agree. ``from_checkpoint``: the checkpoint of ``step`` was loaded. Called before the adaptor goes back in its
        data and before states are restored."""


class Recovery:
    """Drives the session that ``session()`` returns (None while there is none) through the recoveries of one process."""

    def __init__(
        self,
        decorator: ModuleType,
        session: Callable[[], Session | None],
        sink: Callable[[], LogSink | None],
        duties: Callable[[], Duties | None],
        *,
        max_retries: int,
        timeout: float,
        copy_before_update: bool,
    ) -> None:
        self._decorator, self._session, self._sink, self._duties = decorator, session, sink, duties
        self._copy_before_update = copy_before_update
        self.window = UpdateWindow()
        self.agreement = Agreement(timeout)
        self.account = Account(decorator, sink)
        self.net = UnsafeNet(decorator, self._active_session, self._iteration, self._model, max_retries)
        self._layout: Layout | None = None
        self._aside = False
        self._copied: int | None = None
        self._stopped = False
        self._logged: int | None = None
        self._plan: RepairPlan | None = None
        self._notes: list[str] = []
        self._warned: set[str] = set()

    # ---- training thread -------------------------------------------------------------------------------------------

    def before_window(self) -> None:
        """The optimizer of this rank is about to write, for the first time or not, in the step after ``iteration``."""
        session = self._active_session()
        if session is None:
            return
        self._harmless("announce", self.agreement.announce)
        if not self._copy_before_update:
            return
        step: int | None = None
        try:
            step = self._iteration() + 1
        except Exception as error:
            self._warn("before update", "training goes on without copies", error)
        if step is not None and self._copied != step:
            self._copied = step
            session.before_update(step)  # lets faults of the device through, and nothing else

    def _active_session(self) -> Session | None:
        """The session, if there is one and an adaptor that we know. One that we do not know is refused, once."""
        session = None if self._aside else self._session()
        if session is None or self._layout is not None:
            return session
        try:
            adaptor = layouts.find_adaptor()
            if adaptor is None:
                raise layouts.no_adaptor()
            layouts.check_elastic(self._decorator, adaptor)
        except (MindioLayoutError, MindioUnsupported) as error:
            self._aside = True
            logger.error("%s", error)
            return None
        self._layout = adaptor
        return session

    def _iteration(self) -> int:
        """The last step that is done, logging included."""
        assert self._layout is not None
        return self._layout.arguments().iteration

    def _log_values(self) -> Any:
        return self._layout.log_values() if self._layout is not None else None

    def _model(self) -> list[Any]:
        return self._layout.model(self._decorator.save_handler._args) if self._layout is not None else []

    # ---- TFT's thread ----------------------------------------------------------------------------------------------

    def stop(self, original: Original) -> int:
        session = self._active_session()
        if session is not None:
            # Before the device stops: a copy that meets FORCE STOP then belongs to a step that is given up.
            self._stopped, self._plan, self._logged = True, None, None
            self._harmless("stop", session.stop)
        return code(original(), "stop")

    def clean(self, original: Original) -> int:
        result = code(original(), "clean")
        session = self._active_session()
        if session is None:
            return result
        if result == NOTHING_TO_REBUILD and self.window.is_open:
            # TFT would leave this rank out of its repair, whatever its step: half its parameters may be updated.
            logger.debug(
                "stopped inside the optimizer's update: this rank asks for a repair, though its memory is whole"
            )
            result = OK
        if result not in (OK, NOTHING_TO_REBUILD):
            return result
        self._logged = self._iteration()  # a repair overwrites it with that of the source
        error_time = self.window.opened_at if self.net.device_time_known else None
        self.net.device_time_known = False
        # TFT repairs such an error only if it came after the last window had opened. Its device time cannot be compared
        # with ours, so nothing that was copied since then is trusted.
        self._harmless("clean", lambda: session.clean(error_time))
        return result

    def repair(self, original: Original) -> int:
        session = self._active_session()
        if session is not None:
            self._join(session)
        plan = NO_REPAIR
        try:
            plan = self._plan = read_plan(self._decorator)
        except Exception as error:
            self._warn("repair", "what TFT has planned cannot be read, no states are exchanged", error)
        introduced = False
        if session is not None and plan.pairs:
            introduced = self._introduce(session)
            self._harmless("before repair", lambda: losses.make_ready(self._log_values(), plan.receives))
        result = code(original(), "repair")
        if session is not None and result == OK and introduced:
            self._harmless("after repair", lambda: self._exchange_states(session, plan))
        return result

    def rollback(self, original: Original) -> int:
        session, adaptor = self._active_session(), self._layout
        if session is None or adaptor is None:
            return code(original(), "rollback")
        self._set_device()
        self._join(session)
        arguments, tft_step = adaptor.arguments(), self._decorator.save_handler._repair_step
        loaded = adaptor.checkpoint_loaded() or (self._plan is not None and self._plan.loads_checkpoint)
        step = arguments.iteration if loaded else tft_step
        losses.drop_unsafe(adaptor.log_values(), session.memory.is_unsafe)
        replay, self._notes = False, [self.account.note] if self.account.note else []
        duties = self._duties()
        owed: Mapping[str, bool] | None = {} if loaded else None  # a checkpoint is saved when all else is done
        if not loaded:
            try:
                replay, owed = self._settle_step(session, adaptor, arguments, step, duties)
            except RecoveryFailed:
                raise
            except Exception as error:
                self._warn("log line", "each rank decides for itself", error)
                replay = arguments.iteration != step
        before = set(vars(adaptor.rollback.mpu)) if hasattr(adaptor.rollback, "mpu") else None
        sink = self._sink()
        if sink is not None:
            self._harmless("log", lambda: sink.rollback(step))
        if duties is not None:
            self._harmless("evaluation and checkpoint", lambda: duties.rolled_back(step, owed, loaded))
        restore = functools.partial(session.before_rollback, step, replay=replay, from_checkpoint=loaded)
        self._harmless("before rollback", restore)
        layout: dict[str, str] = {}
        self._harmless("trackers", lambda: layout.update(session.sum_layout()))
        result = code(original(), "rollback")
        if before is not None:
            self._report_dead_names(adaptor.rollback.mpu, before)
        self._stopped, self._copied, self._plan, self._logged = False, None, None, None
        if loaded or owed is not None:  # else the ranks cannot agree on anything
            self._harmless("trackers", lambda: self._compare_trackers(session, layout))
        if result == OK:
            self.window.rolled_back(step, tft_step)
            self._harmless("after rollback", lambda: self.account.close(session.after_rollback(), self._notes))
        return result

    def save(self, original: Original) -> Any:
        session = self._active_session()
        if session is not None:
            self._harmless("before save", session.before_save)
        return original()

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _join(self, session: Session) -> None:
        """A recovery that stops nobody (a node is exchanged between two steps), or that has begun before this process was
        there, begins here for this rank."""
        if not self._stopped:
            self._stopped = True
            self._harmless("stop", session.stop)

    def _settle_step(
        self, session: Session, adaptor: Layout, arguments: Any, step: int, duties: Duties | None
    ) -> tuple[bool, Mapping[str, bool] | None]:
        """Whether the log line of ``step`` is written again, and what else of it is owed (None: no agreement), alike on
        every rank; also refuses to lose a step.

        The adaptor decides on each rank by itself: it replays where ``iteration`` is not the step that it rolls back to.
        Ranks set ``iteration`` after their own part of logging, so one may have done so and another not; the replay's
        collectives would then wait for ever. The line is owed if *any* rank has not finished it: that rank may be the one
        that writes it. It can be written if *every* rank has the losses of the step, and none has lost sums that go into it
        (a process that was started again has none, and not even the names that the others would reduce). Then
        ``iteration`` is set so that the adaptor's rule gives this answer everywhere. Nothing else reads it before the
        adaptor sets it to the step.
        """
        values = adaptor.log_values()
        known = arguments.iteration if self._logged is None else min(arguments.iteration, self._logged)
        repaired = self._plan is not None and self._plan.receives
        owed, mute = known < step, values is not None and values.losses_reduced_ is None
        lost = self.window.loses_a_step(step, repaired)
        sums = session.sums(step)
        votes = {"owed": owed, "mute": mute, "lost": lost, "sums": sums is True, "gone": sums is None}
        unfinished = duties.unfinished(step) if duties is not None else {}
        votes |= {f"{_UNFINISHED}{name}": value for name, value in unfinished.items()}
        counts = None
        try:
            counts = self.agreement.vote(self._recovery(), votes, self.account.note)
            self._notes = self.agreement.notes
        except Exception as error:
            logger.warning("the vote on the log line of step %d failed: %s", step, error)
        if lost or (counts is not None and counts["lost"]):
            raise RecoveryFailed(
                f"MindIO TFT rolls back to step {step}, but since the last checkpoint was loaded this job has not computed "
                f"that step again (this rank holds step {self.window.done}): steps would be lost silently. Start the job "
                "again from the checkpoint"
            )
        if self.window.done is not None and step > self.window.done and not repaired:
            session.report_missing(
                f"the parameters of this rank are those of step {self.window.done}: MindIO TFT rolls back to step {step} "
                "without a repair of it"
            )
        if counts is None:
            return arguments.iteration != step and not mute, None  # what the adaptor will do
        partial = counts["sums"] > 0 and counts["gone"] > 0
        replay = counts["owed"] > 0 and counts["mute"] == 0 and not partial
        if counts["owed"] and not replay:
            gone = "sums" if partial else "losses"
            session.report_missing(f"the log line of step {step}: not every rank has its {gone} any more")
        if not replay:
            arguments.iteration = step
        elif arguments.iteration == step:
            arguments.iteration = step - 1
        return replay, {name: counts[f"{_UNFINISHED}{name}"] > 0 for name in unfinished}

    def _compare_trackers(self, session: Session, before: dict[str, str]) -> None:
        """The rollback of the adaptor may throw a tracker's sums away: on every rank it makes no difference, but if only some
        ranks have lost them, the next reduction of the log line hangs or mixes them up."""
        now = session.sum_layout()
        lost = sorted(path for path, shape in before.items() if now.get(path) != shape)
        counts = self.agreement.vote(f"{self._recovery()}/trackers", {"lost": bool(lost), "voted": True})
        if counts is not None and 0 < counts["lost"] < counts["voted"]:
            mine = f"this rank lost {', '.join(lost)}" if lost else "this rank has all of them"
            session.report_missing(
                f"{counts['lost']} of {counts['voted']} ranks lost sums of the log line in the rollback ({mine}): ranks that "
                "differ in them hang or log wrong values when they reduce them. Let the rollback clear them on every rank"
            )

    def _introduce(self, session: Session) -> bool:
        """Before the adaptor's repair, so that nobody waits for this rank after it. False: no states move here."""
        try:
            if self.agreement.introduce(self._recovery(), catalogue_digest(session.registry)):
                return True
            logger.warning("this rank came late to its repair: no states move between it and the others")
        except Exception as error:
            self._warn("introduction", "no states move in this recovery", error)
        return False

    def _exchange_states(self, session: Session, plan: RepairPlan) -> None:
        """States that this rank lost come from its replicas, over the adaptor's groups of all ranks in this repair.

        Only pairs are kept whose other rank runs the plugin with the same states: a rank that waited in the group for one
        that does not would find the group's links broken when its time is up, and the adaptor needs them.
        """
        groups = self._layout.repair_groups() if self._layout is not None else None
        if groups is None:
            logger.info("the adaptor has no gloo group of the ranks in this repair: no states move between them")
            return
        peers = {pair: pair[0] if pair[1] == plan.rank else pair[1] for pair in plan.pairs}
        words = self.agreement.words(self._recovery(), peers.values())
        mine = catalogue_digest(session.registry)
        for peer, word in words.items():
            if word != mine:
                reason = (
                    "does not run the plugin" if word is None else "tracks other states (another catalogue or version)"
                )
                logger.warning("rank %d %s: no states move between it and rank %d", peer, reason, plan.rank)
        pairs = tuple(pair for pair, peer in peers.items() if words[peer] == mine)
        if pairs:
            session.after_repair(replace(plan, pairs=pairs), *groups)

    def _recovery(self) -> str:
        """The name of the recovery that is going on, alike on all ranks."""
        return str(getattr(self._decorator, "repair_id_", ""))

    def _report_dead_names(self, module: ModuleType, before: set[str]) -> None:
        """A reset of a name that the module has never had made the name and reset nothing."""
        for name in sorted(set(vars(module)) - before):
            logger.info(
                "the deployed rollback set %s.%s, a name that did not exist: that reset had no effect; the tracked states "
                "are reset by the plugin",
                module.__name__,
                name,
            )

    def _set_device(self) -> None:
        if "torch_npu" in sys.modules and hasattr(self._decorator, "set_device"):
            self._decorator.set_device()

    def _harmless(self, what: str, call: Callable[[], Any]) -> None:
        """An error of ours must not end what TFT could have completed."""
        try:
            call()
        except RecoveryFailed:
            raise
        except Exception as error:
            self._warn(what, "the recovery may not be exact", error)

    def _warn(self, what: str, consequence: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s: %s: %s: %s", what, consequence, type(error).__name__, error, exc_info=True)
