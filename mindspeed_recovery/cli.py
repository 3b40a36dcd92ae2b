# SPDX-License-Identifier: Apache-2.0
"""The command ``mindspeed-recovery``. Needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from mindspeed_recovery import __version__, catalogue
from mindspeed_recovery.errors import RecoveryError
from mindspeed_recovery.tools import report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 all is well, 1 a finding, 2 bad use."""
    parser = argparse.ArgumentParser(prog="mindspeed-recovery", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mindspeed-recovery {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    states = commands.add_parser(
        "states", help="list the states that the installed versions have", description=_states.__doc__
    )
    states.add_argument(
        "--catalogue", action="append", metavar="FILE", help="a TOML file instead of the shipped ones; repeatable"
    )
    states.add_argument("--json", action="store_true", help="print JSON")
    states.set_defaults(run=_states)
    report.add_command(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except RecoveryError as error:
        print(f"mindspeed-recovery: {error}", file=sys.stderr)
        return 2


def _states(args: argparse.Namespace) -> int:
    """List the states of the catalogue for the versions of the upstream packages that are installed."""
    specs = catalogue.installed_states(args.catalogue or catalogue.shipped())
    if args.json:
        keys = ("name", "policy", "location", "why", "source")
        print(json.dumps([{key: str(getattr(spec, key)) for key in keys} for spec in specs], indent=2))
        return 0
    if not specs:
        print("no package of the catalogue is installed here")
        return 0
    name, policy = max(len(spec.name) for spec in specs), max(len(str(spec.policy)) for spec in specs)
    for spec in specs:
        print(f"{spec.name:<{name}}  {spec.policy!s:<{policy}}  {spec.location}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
