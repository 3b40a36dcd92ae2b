# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_live_audit` do besides training."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspeed_recovery


def after_step(job: Any, step: int, out: str, forgotten: Sequence[str] = ()) -> None:
    """After one step of ``examples/pretrain_moe.py``, before its log line, write to ``out.rank<R>`` what the audit finds, and
    what it finds without each of the ``forgotten`` states, by its name."""
    log = job.runtime.log

    def audit_and_log(number: int) -> None:
        if number == step:
            states = mindspeed_recovery.api._active.registry._states
            found = {"": [one.path for one in mindspeed_recovery.audit.live()]}
            for name in forgotten:
                state = states.pop(name)
                found[name] = [one.path for one in mindspeed_recovery.audit.live()]
                states[name] = state
            Path(f"{out}.rank{job.rank}").write_text(json.dumps(found))
        log(number)

    job.runtime.log = audit_and_log


def speak() -> None:
    """The plugin logs at DEBUG."""
    logging.getLogger("mindspeed_recovery").setLevel("DEBUG")
