# SPDX-License-Identifier: Apache-2.0
"""What unsafe data, and state that a rollback left behind, look like in a log: the texts, in one place.

The first symptom that fits a traceback is taken. Texts that only a recovery can bring about stand for themselves; ordinary
ones count where the log shows a rollback before, or where the line reads a state of the catalogue, or both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from mindspeed_recovery.core.unsafe_note import PREFIX
from mindspeed_recovery.errors import FORCE_STOP, UNSAFE_DATA
from mindspeed_recovery.tools.tracebacks import HEADER


class Needs(Enum):
    """What has to come together with a text."""

    NOTHING = "nothing"
    ROLLBACK_OR_STATE = "a rollback before, or a state of the catalogue"
    ROLLBACK_AND_STATE = "a rollback before, and a state of the catalogue"


@dataclass(frozen=True)
class Symptom:
    """``error``: what the last line of the traceback matches; ``code``: what the line of code, or the name of its function,
    matches. ``state``: the entry that it is about where the line does not tell."""

    name: str
    title: str
    error: re.Pattern[str]
    code: re.Pattern[str] | None = None
    needs: Needs = Needs.NOTHING
    state: str | None = None


SYMPTOMS = (
    # Not where a runtime tells this rank of the error of another.
    Symptom("unsafe-data", "unsafe data was read", re.compile(rf"^(?!.*{FORCE_STOP}).*{re.escape(UNSAFE_DATA)}")),
    Symptom(
        "timer-running",
        "a timer still runs since the step that was cut",
        re.compile(r"^AssertionError: timer\b.*\bhas already been started"),
        state="timers",
    ),
    Symptom(
        "shared-expert-leftover",
        "an output of the shared experts is left from the step that was cut",
        re.compile(r"^AssertionError"),
        re.compile(r"\bcached_output is (?:not )?None"),
        state="shared-expert-output",
    ),
    Symptom(
        "pre-hooks-removed",
        "the forward pre-hooks were removed by the first entry of the loop",
        re.compile(r"^(?:KeyError|AssertionError)"),
        re.compile(r"forward_pre_hook"),
        state="forward-pre-hooks",
    ),
    Symptom(
        "no-sync-function",
        "the loop was entered again with what its first entry had set",
        re.compile(r"^AssertionError.*\bno_sync_func\b"),
        state="no-sync-function",
    ),
    Symptom(
        "queue-out-of-step",
        "a queue and those who fill it went apart in a rollback",
        re.compile(r"^IndexError: pop from (?:an? )?empty (?:list|deque)"),
        needs=Needs.ROLLBACK_OR_STATE,
    ),
    Symptom(
        "leftover",
        "state is left from the step that was cut",
        re.compile(r"^(?:AssertionError|IndexError|KeyError|RuntimeError|ValueError|AttributeError)"),
        needs=Needs.ROLLBACK_AND_STATE,
    ),
)

ROLLBACKS = {
    "plugin": re.compile(r"\brecovery (?P<number>\d{1,6}): rolled back to step \d"),
    "standalone": re.compile(r"\brank (?P<rank>\d{1,7}): back at step \d"),
    "mindio": re.compile(r"\brank[: ]?(?P<rank>\d{1,7}) start to rollback callback"),
    "adaptor": re.compile(r"\[rollback\] rank (?P<rank>\d{1,7}) rollback success"),
    "adaptor-gather": re.compile(r"\brank[: ]?(?P<rank>\d{1,7}) successfully gather and rollback at iteration"),
}
"""Lines that tell of a rollback. Several may tell of the same one, so each kind is counted by itself."""

FLAG_ARGUMENT = re.compile(r"\benable_recovery_safe_globals\b[\s.]*(?P<value>True|False)\b")
FLAG_WRITTEN = "--enable-recovery-safe-globals"
FLAG_WITHOUT_EFFECT = re.compile(r"--enable-recovery-safe-globals has no effect")
PLUGIN_STARTED = re.compile(r"mindspeed-recovery: \d+ states tracked")
END_OF_ARGUMENTS = "end of arguments"

MARKS = tuple(
    text.encode()
    for text in (
        'File "',
        HEADER,
        UNSAFE_DATA,
        PREFIX,
        "rolled back to step",
        ": back at step",
        "start to rollback callback",
        "rollback success",
        "gather and rollback at",
        "recovery_safe_globals",
        "recovery-safe-globals",
        "states tracked",
        END_OF_ARGUMENTS,
    )
)
"""What makes a line of a log worth a look; each pattern above contains one of these, or stands inside a traceback."""
