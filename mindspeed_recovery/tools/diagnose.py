# SPDX-License-Identifier: Apache-2.0
"""``mindspeed-recovery diagnose``: what a training log says about unsafe data, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mindspeed_recovery import catalogue
from mindspeed_recovery.core.policy import Policy
from mindspeed_recovery.errors import UNSAFE_DATA, RecoveryError
from mindspeed_recovery.tools import loglines, symptoms
from mindspeed_recovery.tools.known import Known, KnownStates, Sure
from mindspeed_recovery.tools.loglines import Line
from mindspeed_recovery.tools.reading import Name, Sources, is_infrastructure, read_by
from mindspeed_recovery.tools.symptoms import Needs, Symptom
from mindspeed_recovery.tools.tracebacks import Assembler, Frame, Traceback

NOTHING_FOUND = "not an unsafe-data failure"

ON, OFF, WITHOUT_EFFECT, UNKNOWN = "on", "off", "without effect", "unknown"

_MOST_WRITERS = 20_000
_MOST_CAUSES = 1_000
_MOST_RANKS = 100_000
_PATIENCE = 5_000
"""Lines of a log after which a traceback that nobody went on with is taken to be cut off."""

_WIRED = "/mindspeed_recovery/frameworks/megatron_job.py"
"""A frame of this file is only there where the flag is on and a runtime is."""

_NAMED_BY = {
    Sure.EXACT: "the source",
    Sure.IN_MODULE: "the line of code",
    Sure.BY_NAME: "similar names: not certain",
}

_DONE_ON_ROLLBACK = {
    Policy.RESET: "reset",
    Policy.DROP: "dropped and made anew",
    Policy.CONSTANT: "written back from a host copy",
    Policy.REPLICATE: "put back from a host copy",
    Policy.SNAPSHOT: "put back from a host copy",
}


@dataclass
class Cause:
    """One reason why a job failed, over all ranks and recoveries."""

    symptom: Symptom
    states: list[str]
    """Entries of the catalogue; several where the log does not tell them apart."""
    location: str | None
    """Where the state lives; None where nothing names it."""
    known: list[Known]
    how: str
    """Where the name comes from."""
    error: str
    frame: Frame | None
    log: str
    line: int
    recoveries: set[int] = field(default_factory=set)
    """Numbers of the recoveries after which it came; 0: before the first."""
    ranks: set[int] = field(default_factory=set)
    occurrences: int = 0
    shapes: list[str] = field(default_factory=list)
    advice: tuple[str, str] = ("", "")

    @property
    def catalogued(self) -> bool:
        return bool(self.known)


@dataclass
class Diagnosis:
    """What a log says. ``flag``: whether the plugin was switched on; ``other``: the last line of the last traceback that is
    of another kind."""

    causes: list[Cause]
    flag: str
    recoveries: int
    other: str | None
    left_out: int = 0


Found = tuple[list[Known], list[Name], str]
"""States that a line may have read, the names in it, and how the states were found."""


class Diagnoser:
    """Reads logs, one after the other, and diagnoses what is in them. ``roots``: folders with the sources that ran."""

    def __init__(self, known: KnownStates, roots: Iterable[Path] = ()) -> None:
        self._known = known
        self._sources = Sources(roots, known.packages)
        self._causes: dict[tuple[Any, ...], Cause] = {}
        self._left_out = 0
        self._other: str | None = None
        self._flag = UNKNOWN
        self._arguments_name_flag = False
        self._rollbacks: dict[str, Counter[int | None]] = {kind: Counter() for kind in symptoms.ROLLBACKS}
        self._found: dict[int, Found] = {}  # each rank tells the same
        self._log = ""
        self._writers: dict[str, Assembler] = {}
        self._open: dict[str, int] = {}

    def read(self, name: str, stream: BinaryIO) -> None:
        """Read one log to its end. Raises OSError where the stream does."""
        self._log = name
        self._writers.clear()
        self._open.clear()
        try:
            for line in loglines.read(stream, loglines.rank_of_path(name), symptoms.MARKS, lambda: bool(self._open)):
                self._take(line)
        except EOFError:
            pass  # a gzipped log that is cut off; what is there has been read
        for writer in self._writers.values():
            self._diagnose_all(writer.finish())

    def result(self) -> Diagnosis:
        """What has been found so far."""
        causes = list(self._causes.values())
        # An error's text alone, in a runtime's log line say, tells of a failure that a traceback tells of as well.
        with_frames = {cause.symptom.name for cause in causes if cause.frame is not None}
        causes = [cause for cause in causes if cause.frame is not None or cause.symptom.name not in with_frames]
        causes.sort(key=lambda cause: min(cause.recoveries, default=0))  # stable: else in the order of the logs
        for cause in causes:
            cause.advice = _advice(cause, self._flag)
        return Diagnosis(causes, self._flag, self._recoveries(None), self._other, self._left_out)

    # ---- lines -------------------------------------------------------------------------------------------------------

    def _take(self, line: Line) -> None:
        writer = self._writers.get(line.stream)
        if writer is None:
            self._make_room()
            writer = self._writers[line.stream] = Assembler((UNSAFE_DATA,))
        if not writer.is_open:
            self._take_event(line)
        self._diagnose_all(writer.feed(line))
        if writer.is_open:
            self._open.setdefault(line.stream, line.number)
            if "File" in line.text:
                self._open[line.stream] = line.number
        else:
            self._open.pop(line.stream, None)
        for stream in [s for s, at in self._open.items() if line.number - at > _PATIENCE]:
            self._writers[stream].abandon()
            del self._open[stream]

    def _make_room(self) -> None:
        if len(self._writers) >= _MOST_WRITERS:
            oldest = next(iter(self._writers))
            self._diagnose_all(self._writers.pop(oldest).finish())
            self._open.pop(oldest, None)

    def _take_event(self, line: Line) -> None:
        text = line.text
        for kind, pattern in symptoms.ROLLBACKS.items():
            match = pattern.search(text)
            if match is not None:
                for writer in self._writers.values():  # what came before it counts as before it
                    self._diagnose_all(writer.settle())
                groups = match.groupdict()
                counts, rank = self._rollbacks[kind], line.rank
                rank = int(groups["rank"]) if groups.get("rank") else rank
                if len(counts) < _MOST_RANKS or rank in counts:
                    counts[rank] = max(counts[rank] + 1, int(groups.get("number") or 0))
        argument = symptoms.FLAG_ARGUMENT.search(text)
        if symptoms.FLAG_WITHOUT_EFFECT.search(text):
            self._flag = WITHOUT_EFFECT
        elif argument is not None:
            self._arguments_name_flag = True
            self._set_flag(ON if argument["value"] == "True" else OFF)
        elif symptoms.FLAG_WRITTEN in text or symptoms.PLUGIN_STARTED.search(text):
            self._set_flag(ON)
        elif symptoms.END_OF_ARGUMENTS in text and not self._arguments_name_flag:
            self._set_flag(OFF)  # Megatron prints all of its arguments: the plugin was not there

    def _set_flag(self, value: str) -> None:
        if self._flag in (UNKNOWN, OFF):
            self._flag = value

    def _recoveries(self, rank: int | None) -> int:
        """How many recoveries the log has told of so far: on a rank, or on the one that had most."""
        counted = [counts[rank] for counts in self._rollbacks.values() if rank is not None and rank in counts]
        counted = counted or [max(counts.values(), default=0) for counts in self._rollbacks.values()]
        return max(counted)

    # ---- tracebacks --------------------------------------------------------------------------------------------------

    def _diagnose_all(self, tracebacks: Iterable[Traceback]) -> None:
        for traceback in tracebacks:
            if any(_WIRED in frame.file.replace("\\", "/") for frame in traceback.frames):
                self._set_flag(ON)
            cause = self._diagnose(traceback)
            if cause is None:
                self._other = traceback.last_line
            else:
                self._add(cause, traceback)

    def _diagnose(self, traceback: Traceback) -> Cause | None:
        frame = next((f for f in reversed(traceback.frames) if not is_infrastructure(f)), None)
        code = f"{frame.source}\n{frame.function}" if frame is not None else ""
        last_line = traceback.last_line
        found: Found | None = None
        for symptom in symptoms.SYMPTOMS:
            if not symptom.error.search(last_line) or (symptom.code is not None and not symptom.code.search(code)):
                continue
            found = found or self._find_state(traceback, frame)
            known, names, how = found
            rolled_back = self._recoveries(traceback.rank) > 0
            if (symptom.needs is Needs.ROLLBACK_OR_STATE and not (rolled_back or known)) or (
                symptom.needs is Needs.ROLLBACK_AND_STATE and not (rolled_back and known)
            ):
                continue
            return self._cause(symptom, traceback, frame, known, names, how)
        return None

    def _find_state(self, traceback: Traceback, frame: Frame | None) -> Found:
        if frame is None:
            return [], [], ""
        frames = [f for f in traceback.frames if not is_infrastructure(f)]
        key = hash(tuple((f.file, f.line, f.function, f.source, f.anchors) for f in frames))
        if key not in self._found:
            if len(self._found) >= _MOST_CAUSES:
                self._found.clear()
            self._found[key] = self._look_up(frame, frames)
        return self._found[key]

    def _look_up(self, frame: Frame, frames: list[Frame]) -> Found:
        names = read_by(frames, self._sources)
        module = self._sources.module_name(frame.file)
        known, sure = self._known.match(names, module, frame.function)
        if not known and len(frames) > 1:  # a small function that reads what its caller has chosen
            caller = frames[-2]
            module = self._sources.module_name(caller.file)
            known, _ = self._known.match(read_by(frames[:-1], self._sources), module, caller.function)
            sure = Sure.BY_NAME
        here = [row for row in known if self._exists(row)]  # else a state of another version
        return here or known, names, _NAMED_BY[sure]

    def _cause(
        self,
        symptom: Symptom,
        traceback: Traceback,
        frame: Frame | None,
        known: list[Known],
        names: list[Name],
        how: str,
    ) -> Cause:
        noted = [note.state for note in traceback.notes if note.state]
        location: str | None = None
        if traceback.notes:  # the process itself has looked
            rows = [row for state in noted for row in self._known.named(state)[:1]]
            seen = {row.spec.name for row in known}
            known = sorted(rows, key=lambda row: row.spec.name not in seen)
            how, location = "the process itself", traceback.notes[0].place
        elif not known and symptom.state is not None:
            known, how = self._known.named(symptom.state)[-1:], "the error's text"
        states = list(dict.fromkeys(noted or [row.spec.name for row in known]))
        if location is None and known:
            location = str(known[0].spec.location)
        if location is None:
            named = next((name for name in names if self._is_state(name)), None)
            location, how = (str(named), "the source") if named is not None else (None, how)
        return Cause(
            symptom=symptom,
            states=states,
            location=location,
            known=known,
            how=how if location else "",
            error=traceback.last_line,
            frame=frame,
            log=self._log,
            line=traceback.number,
            shapes=list(dict.fromkeys(f"{note.shape} {note.dtype}" for note in traceback.notes)),
        )

    def _exists(self, known: Known) -> bool:
        source = self._sources.of_module(known.spec.location.module)
        return source is not None and known.spec.location.path[0] in source.names

    def _is_state(self, name: Name) -> bool:
        """Whether a name that the catalogue does not have is worth a declaration: a global, or an attribute of a class."""
        if not name.owner_known or not name.path or name.derived or name.module in (None, "builtins"):
            return False
        assert name.module is not None
        if name.module.split(".")[0] == "torch":
            return False
        source = self._sources.of_module(name.module)
        return source is None or source.definition(*name.path) is None

    def _add(self, cause: Cause, traceback: Traceback) -> None:
        where = (cause.frame.file, cause.frame.line, cause.frame.function) if cause.frame and not cause.states else ()
        key = (cause.symptom.name, tuple(sorted(cause.states)), cause.location if not cause.states else "", where)
        if key not in self._causes and len(self._causes) >= _MOST_CAUSES:
            self._left_out += 1
            return
        cause = self._causes.setdefault(key, cause)
        cause.occurrences += 1
        cause.recoveries.add(min(self._recoveries(traceback.rank), _MOST_RANKS))
        if traceback.rank is not None and len(cause.ranks) < _MOST_RANKS:
            cause.ranks.add(traceback.rank)


# ---- what to do ----------------------------------------------------------------------------------------------------------


def _advice(cause: Cause, flag: str) -> tuple[str, str]:
    """Two lines."""
    rehearse = "Rehearse it without a fault: --recovery-drill STEP."
    switch_on = f"Start the job with {symptoms.FLAG_WRITTEN}"
    spec = cause.known[0].spec if cause.known else None
    if flag == WITHOUT_EFFECT:
        return (f"{symptoms.FLAG_WRITTEN} was given but had no effect: the log says why, in a WARNING.", rehearse)
    if spec is not None and spec.policy is Policy.IGNORED:
        second = f"{switch_on}: it makes a second entry of the loop good." if flag != ON else rehearse
        return (f"The catalogue leaves this state alone: {spec.why}.", second)
    if spec is not None and flag == ON:
        versions = cause.known[0].versions
        return (
            f"The flag was on: see whether the version that ran is {versions or 'what the catalogue describes'}, and what "
            "the log says of this state at start-up.",
            "Run it once with --recovery-drill STEP, which names a state whose declaration does not fit, and report that.",
        )
    if spec is not None:
        done = _DONE_ON_ROLLBACK[spec.policy]
        return (f"{switch_on}: on rollback this state is then {done}, on every rank.", rehearse)
    if cause.states:  # of the user's own declarations, which are not at hand
        return (
            f"The job tracks '{cause.states[0]}' by a declaration of its own, whose policy or fields do not rebuild it.",
            rehearse,
        )
    if cause.location is not None and cause.frame is not None and ":" in cause.location and " " not in cause.location:
        instances = ', on="instances"' if "." in cause.location.split(":")[1] else ""
        return (
            f'Declare it: mindspeed_recovery.track("{cause.location}", policy="reset"{instances}); "drop" for a cache, '
            '"constant" if it is made once, "snapshot" if training depends on it.',
            rehearse if flag == ON else f"{switch_on}, and rehearse: --recovery-drill STEP.",
        )
    return (
        "Nothing in the log names the state. Give the sources that ran with --source DIR.",
        "Or let the process name it: with the flag on, the error carries the names of its unsafe tensors.",
    )


# ---- output --------------------------------------------------------------------------------------------------------------


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain data."""
    return {
        "found": bool(diagnosis.causes),
        "flag": diagnosis.flag,
        "recoveries": diagnosis.recoveries,
        "other": diagnosis.other,
        "left_out": diagnosis.left_out,
        "causes": [
            {
                "symptom": cause.symptom.name,
                "title": cause.symptom.title,
                "states": cause.states,
                "location": cause.location,
                "catalogued": cause.catalogued,
                "policy": str(cause.known[0].spec.policy) if cause.known else None,
                "versions": cause.known[0].versions if cause.known else None,
                "named_by": cause.how or None,
                "shapes": cause.shapes,
                "error": cause.error,
                "frame": dataclasses.asdict(cause.frame) if cause.frame is not None else None,
                "log": cause.log,
                "line": cause.line,
                "ranks": sorted(cause.ranks),
                "recoveries": sorted(cause.recoveries),
                "occurrences": cause.occurrences,
                "advice": list(cause.advice),
            }
            for cause in diagnosis.causes
        ],
    }


def as_text(diagnosis: Diagnosis) -> str:
    """The diagnosis for people."""
    if not diagnosis.causes:
        other = f"\nthe last traceback ends with: {_short(diagnosis.other)}" if diagnosis.other else ""
        return NOTHING_FOUND + other
    lines = [
        f"{len(diagnosis.causes)} cause{'s' * (len(diagnosis.causes) > 1)}; "
        f"{_counted(diagnosis.recoveries, 'recovery', 'recoveries')} in the log; "
        f"{symptoms.FLAG_WRITTEN}: {diagnosis.flag}"
    ]
    for number, cause in enumerate(diagnosis.causes, 1):
        lines += ["", *_cause_lines(number, cause)]
    if diagnosis.left_out:
        lines += ["", f"{diagnosis.left_out} more tracebacks are of further causes"]
    return "\n".join(lines)


def _cause_lines(number: int, cause: Cause) -> Iterator[str]:
    yield f"{number}. {cause.symptom.title}: {_subject(cause)}"
    if cause.location is not None and cause.states:
        yield f"   at {_short(cause.location)}{f', {cause.shapes[0]}' if cause.shapes else ''}"
    frame = cause.frame
    if frame is not None:
        yield f"   in {frame.function or '?'}, {_short(frame.file)}:{frame.line}"
        if frame.source.strip():
            yield f"       {_short(frame.source.strip())}"
    yield f"   {_short(cause.error)}"
    ranks = f"rank{'s' * (len(cause.ranks) > 1)} {_ranges(cause.ranks)}, " if cause.ranks else ""
    times = _counted(cause.occurrences, "time", "times")
    after = [f"after recovery {n}" if n else "no recovery in the log before it" for n in sorted(cause.recoveries)[:3]]
    more = ", …" if len(cause.recoveries) > 3 else ""
    yield f"   {ranks}{times}, {', '.join(after)}{more}; first at {cause.log}:{cause.line}"
    if cause.how:
        yield f"   named by {cause.how}"
    for line in cause.advice:
        yield f"   -> {line}"


def _subject(cause: Cause) -> str:
    if not cause.states:
        return f"{_short(cause.location)} (not catalogued)" if cause.location else "no state is named"
    names = " or ".join(f"'{state}'" for state in cause.states[:4])
    policies = dict.fromkeys(f"{known.spec.policy}, {known.versions}".rstrip(", ") for known in cause.known)
    what = f"catalogued: {'; '.join(policies)}" if policies else "not in these catalogue files"
    return f"state {names} ({what})"


def _short(text: str | None, longest: int = 200) -> str:
    """On one line, without characters that a terminal acts upon."""
    line = "".join(c if c.isprintable() else " " for c in text or "")
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _ranges(numbers: set[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts[:20]) + (", …" if len(parts) > 20 else "")


# ---- command -------------------------------------------------------------------------------------------------------------


def add_command(commands: Any) -> None:
    """Add ``diagnose`` to the subparsers of the command line."""
    parser = commands.add_parser(
        "diagnose",
        help="find out from training logs which state a recovery left unsafe, and what to do",
        description="Read training logs (of one rank or many, also mixed, gzipped, cut off) and name the states that were "
        "unsafe, or left from the aborted step. Exit code: 0 nothing found, 1 a diagnosis, 2 bad use.",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a log file, or - for standard input")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="DIR",
        help="the sources that ran, if not installed; repeatable",
    )
    parser.add_argument(
        "--catalogue",
        action="append",
        default=[],
        metavar="FILE",
        help="a TOML file besides the shipped ones; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Raises RecoveryError for a file that cannot be read."""
    for folder in args.source:
        if not Path(folder).is_dir():
            raise RecoveryError(f"--source {folder}: not a folder")
    known = KnownStates([*catalogue.shipped(), *args.catalogue])
    diagnosis = diagnose(args.logs, known, [Path(folder) for folder in args.source])
    print(json.dumps(as_json(diagnosis), indent=2) if args.json else as_text(diagnosis))
    return 1 if diagnosis.causes else 0


def diagnose(logs: Sequence[str], known: KnownStates, roots: Iterable[Path] = ()) -> Diagnosis:
    """Diagnose log files; ``-`` is standard input. Raises RecoveryError for one that cannot be read."""
    diagnoser = Diagnoser(known, roots)
    for log in logs:
        try:
            if log == "-":
                diagnoser.read("standard input", sys.stdin.buffer)
            else:
                with loglines.open_log(log) as stream:
                    diagnoser.read(log, stream)
        except (OSError, zlib.error) as error:
            raise RecoveryError(f"{log}: cannot be read: {error}") from None
    return diagnoser.result()
