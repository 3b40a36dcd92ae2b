# SPDX-License-Identifier: Apache-2.0
"""``python -m mindspeed_recovery.run pretrain_gpt.py …``: run a training script that was not edited for the plugin.

Under torchrun: ``torchrun … -m mindspeed_recovery.run pretrain_gpt.py …``. The script sees what it would see if Python had
been given it directly: ``sys.argv``, ``sys.path[0]``, ``__main__``; its exit code and its tracebacks are its own.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType

import mindspeed_recovery  # noqa: F401  registers the flag in Megatron's parser

USAGE = "usage: python -m mindspeed_recovery.run SCRIPT [ARGUMENT ...]"


def main(argv: Sequence[str]) -> int:
    """Run the script ``argv[0]`` with the arguments after it, as ``__main__``. Returns 2 where there is none to run.

    Whatever the script raises, SystemExit included, passes through.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    script = argv[0]
    if not os.path.isfile(script):
        print(f"mindspeed_recovery.run: can't open script '{script}'\n{USAGE}", file=sys.stderr)
        return 2
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    _hide_own_frames(script)
    runpy.run_path(script, run_name="__main__")
    return 0


def _hide_own_frames(script: str) -> None:
    """An uncaught error shows the traceback that the script alone would have, unless the script sets its own hook."""
    show = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        inner = traceback
        while inner is not None and inner.tb_frame.f_code.co_filename != script:
            inner = inner.tb_next
        error.__traceback__ = inner or traceback  # a syntax error in the script has no frame of its own
        show(kind, error, error.__traceback__)

    sys.excepthook = excepthook


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
