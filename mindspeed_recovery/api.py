# SPDX-License-Identifier: Apache-2.0
"""The public functions: declare states, switch the plugin on and off, list what is tracked.

Nothing here imports torch before `enable` is called.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.core.policy import Policy, StateSpec
from mindspeed_recovery.errors import StateError

if TYPE_CHECKING:
    from mindspeed_recovery.core.memory import DeviceMemory
    from mindspeed_recovery.core.session import Session

T = TypeVar("T")

_declared: dict[str, StateSpec] = {}
_active: Session | None = None


def track(
    target: str | None = None,
    /,
    *,
    policy: Policy | str,
    name: str | None = None,
    attr: str | None = None,
    **options: Any,
) -> Any:
    """Declare a state of your own.

    ``track("my_pkg.losses:TRACKER", policy="reset")`` declares a location. Without a target it is a decorator: on a
    function with a cache (``functools.lru_cache``), whose cache is the state; on a class together with ``attr``, the name
    of the class attribute that is the state (``on="instances"``: of the attribute on every instance). ``name`` defaults
    to one made from the location. ``options`` are those of `StateSpec`: quarantine, replay, to, fields, clear, settled,
    on_missing, large, optional, replica, checkpoint, on, why.

    May be called before or after `enable`, before `enable` also without torch. Raises StateError for options that
    contradict each other or a name or location that is declared already, LocationError for a malformed location or, once
    the plugin is enabled, one that an imported module does not have. Training thread only.
    """

    def declare(text: str) -> StateSpec:
        location = Location.parse(text)
        rest = {key: value for key, value in options.items() if key not in ("fields", "clear")}
        clear = options.get("clear")
        return StateSpec(
            name=name or _default_name(location),
            location=location,
            policy=_policy(policy),
            fields=_names(options.get("fields", ())),
            clear=Location.parse(clear) if isinstance(clear, str) else clear,
            source=_caller(),
            **rest,
        )

    settable = {field.name for field in dataclasses.fields(StateSpec)} - {"name", "location", "policy", "source"}
    unknown = set(options) - settable
    if unknown:
        raise StateError(f"track(): unknown option '{min(unknown)}'")

    if target is not None:
        _declare(declare(target))
        return None

    def decorate(thing: T) -> T:
        text = f"{thing.__module__}:{thing.__qualname__}"  # type: ignore[attr-defined]
        if isinstance(thing, type) and attr is None:
            raise StateError(f"{text}: name the class attribute that is the state: @track(..., attr='tracker')")
        # The name is bound in its module only when the decorator has returned: adopted with the next step.
        _declare(declare(f"{text}.{attr}" if attr else text), now=False)
        return thing

    return decorate


def untrack(name: str) -> None:
    """Take back a declaration made with `track`, or stop tracking a state of the catalogue while the plugin is enabled.

    Raises KeyError, with the names there are, for an unknown one.
    """
    known = _declared.pop(name, None) is not None
    if _active is not None and (not known or name in _active.registry):
        _active.untrack(name)
    elif not known:
        raise KeyError(f"no state '{name}' is declared; declared: {', '.join(sorted(_declared)) or 'none'}")


def states() -> list[dict[str, Any]]:
    """Every tracked state: name, policy, location, source, number of places here, bytes, devices, bytes of host copies.

    Before `enable`: what `track` has declared, with 0 places and bytes. Changes nothing, draws no random numbers.
    """
    if _active is not None:
        return [_active.registry.describe(state) for state in _active.registry]
    return [
        {
            "name": s.name,
            "policy": str(s.policy),
            "location": str(s.location),
            "source": s.source,
            "places": 0,
            "bytes": 0,
            "device": "",
            "host_bytes": 0,
        }
        for s in _declared.values()
    ]


def enable(
    *,
    roots: Mapping[str, Any] | None = None,
    memory: DeviceMemory | None = None,
    catalogues: Iterable[Path | str] | None = None,
    strict: bool = False,
    is_fault: Callable[[BaseException], bool] | None = None,
) -> Session:
    """Track the states of the catalogue for the upstream versions that are loaded, and those declared with `track`.

    ``roots``: named objects below which the states on instances are found (``{"model": chunks, "optimizer": optimizer}``).
    ``memory``: the device's memory, by default whatever torch has. ``catalogues``: TOML files; default the shipped ones.
    ``strict``: a recovery that is not exact fails. ``is_fault``: see `Session`. Call it on every rank when model and
    optimizer are built, on the training thread. Returns the session, which a runtime drives.

    Raises CatalogueError for a bad file; LocationError, with entry, version and candidates, if an imported module lacks
    what an entry names (the catalogue does not fit the upstream); StateError for declarations that collide or if the
    plugin is enabled already.
    """
    global _active
    if _active is not None:
        raise StateError("the plugin is enabled already; call mindspeed_recovery.disable() first")
    from mindspeed_recovery import catalogue
    from mindspeed_recovery.core.registry import Registry
    from mindspeed_recovery.core.session import Session

    files = catalogue.shipped() if catalogues is None else catalogues
    registry = Registry([*catalogue.installed_states(files), *_declared.values()])
    session = Session(registry, roots=roots, memory=memory, strict=strict, is_fault=is_fault)
    try:
        session.start()
    except BaseException:
        session.close()
        raise
    _active = session
    return session


def disable() -> None:
    """Undo `enable`: plain containers stand where recovery-aware ones stood, with their contents. Idempotent."""
    global _active
    session, _active = _active, None
    if session is not None:
        session.close()


def _declare(spec: StateSpec, *, now: bool = True) -> None:
    for other in _declared.values():
        if other.name == spec.name or (other.location, other.on, other.fields) == (spec.location, spec.on, spec.fields):
            raise StateError(
                f"state '{spec.name}' ({spec.source}) is declared already, as '{other.name}' ({other.source})"
            )
    if _active is not None:
        _active.track(spec, now=now)
    _declared[spec.name] = spec


def _policy(policy: Policy | str) -> Policy:
    try:
        return Policy(policy)
    except ValueError:
        raise StateError(f"unknown policy '{policy}'; one of {', '.join(map(str, Policy))}") from None


def _names(fields: Iterable[str]) -> tuple[str, ...]:
    if isinstance(fields, str):
        raise StateError(f"fields: write a list of names, ['{fields}']")
    return tuple(fields)


def _default_name(location: Location) -> str:
    parts = (
        re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in (*location.module.split("."), *location.path)
    )
    return ".".join(part for part in parts if part)


def _caller() -> str:
    """File and line of the declaration, for messages."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
