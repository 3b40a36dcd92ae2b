# SPDX-License-Identifier: Apache-2.0
"""The command ``mindspeed-recovery``. Needs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mindspeed_recovery import __version__, catalogue
from mindspeed_recovery.errors import RecoveryError
from mindspeed_recovery.tools import diagnose, report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 all is well, 1 a finding, 2 bad use."""
    parser = argparse.ArgumentParser(prog="mindspeed-recovery", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mindspeed-recovery {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="DIR|FILE.whl",
        help="a source tree (the folder in which the packages lie) or a wheel, instead of what is installed; repeatable",
    )
    common.add_argument(
        "--catalogue", action="append", metavar="FILE", help="a TOML file instead of the shipped ones; repeatable"
    )
    common.add_argument("--json", action="store_true", help="print JSON")

    states = commands.add_parser(
        "states", parents=[common], help="list what is tracked, for the installed or for given versions"
    )
    states.add_argument(
        "--for",
        action="append",
        default=[],
        dest="versions",
        metavar="PACKAGE==VERSION",
        help="this version, whether it is installed or not; repeatable",
    )
    states.add_argument(
        "--by-version", action="store_true", help="how many states each range of versions has, as a Markdown table"
    )
    states.set_defaults(run=_states)

    verify = commands.add_parser(
        "verify",
        parents=[common],
        help="check that the catalogue fits an upstream, and read recovery code for known faults",
        epilog="Nothing is imported. Exit code: 0 all is well, 1 an entry or the recovery code is at fault, 2 bad use.",
    )
    verify.add_argument("code", nargs="*", metavar="CODE", help="files or folders of recovery code to read as well")
    verify.add_argument("--all", action="store_true", help="show the entries that were found, too")
    verify.set_defaults(run=_verify)

    audit = commands.add_parser(
        "audit",
        help="find state of a program that can hold device tensors and that the catalogue does not know",
        epilog="Nothing is imported. Exit code: 0, or 1 for a finding that --fail-on names; 2 bad use. A comment "
        "'# recovery: ignore[RULE] reason' on the line of a finding, or the line above, leaves it alone.",
    )
    audit.add_argument(
        "paths", nargs="+", metavar="PATH", help="files, folders, wheels, or names of installed packages"
    )
    audit.add_argument(
        "--catalogue",
        action="append",
        default=[],
        metavar="FILE",
        help="a TOML file besides the shipped ones; repeatable",
    )
    audit.add_argument("--only", choices=("tracked", "ignored", "untracked"), help="show these only")
    audit.add_argument("--fail-on", choices=("untracked",), help="exit with 1 if there is one")
    audit.add_argument(
        "--confidence", choices=("low", "medium", "high"), default="medium", help="the least to be shown"
    )
    form = audit.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_const", dest="form", const="json", default="table", help="print JSON")
    form.add_argument(
        "--toml", action="store_const", dest="form", const="toml", help="print entries for a catalogue file"
    )
    audit.set_defaults(run=_audit)

    diagnose.add_command(commands)
    report.add_command(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except RecoveryError as error:
        print(f"mindspeed-recovery: {error}", file=sys.stderr)
        return 2


def _states(args: argparse.Namespace) -> int:
    from mindspeed_recovery.tools import compatibility, states_command

    if args.by_version:
        print(compatibility.table(args.catalogue or catalogue.shipped()))
        return 0
    return states_command.run(args.catalogue or catalogue.shipped(), args.source, args.versions, as_json=args.json)


def _verify(args: argparse.Namespace) -> int:
    from mindspeed_recovery.tools import verify_command

    files = args.catalogue or catalogue.shipped()
    return verify_command.run(args.source, args.code, files, as_json=args.json, show_all=args.all)


def _audit(args: argparse.Namespace) -> int:
    from mindspeed_recovery.tools import audit_command

    files = [*catalogue.shipped(), *args.catalogue]
    return audit_command.run(
        args.paths, files, confidence=args.confidence, only=args.only, fail_on=args.fail_on, form=args.form
    )


if __name__ == "__main__":
    sys.exit(main())
