# SPDX-License-Identifier: Apache-2.0
"""``--enable-recovery-safe-globals`` and its options, in Megatron's own argument parser.

Megatron builds its parser inside ``parse_args()`` and rejects what it does not know, so the options are added where it adds
its own: in ``megatron.training.arguments.add_megatron_arguments``, which every version (0.12 – 0.19) looks up by name at
the moment it parses. It does not matter whether that module is imported before or after `install`, nor whether the script
parses through ``pretrain(extra_args_provider=…)`` or ``parse_and_validate_args()``.

Importing this module imports neither torch nor Megatron. A parsed flag installs `megatron_loop`; without it nothing else
in the process is changed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from mindspeed_recovery.errors import CatalogueError

FLAG = "--enable-recovery-safe-globals"

_ARGUMENTS = "megatron.training.arguments"
_BUILDER = "add_megatron_arguments"

_active = False
_hooked = False


def add_recovery_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument group "recovery" to ``parser`` and return it; does nothing if the flag is there already.

    Values are checked while they are parsed (argparse's error, exit code 2): catalogue files must exist and be right, an
    option without the flag is an error.
    """
    if FLAG in parser._option_string_actions:
        return parser
    group = parser.add_argument_group("recovery", "recover global state in place after a device fault")
    group.add_argument(FLAG, action="store_true", help="make global training state recoverable in place")
    options = [
        group.add_argument(
            "--recovery-patches",
            nargs="+",
            type=_catalogue,
            default=[],
            metavar="FILE",
            help="catalogue files (TOML) of your own states, besides those that come with mindspeed-recovery",
        ),
        group.add_argument(
            "--recovery-max-retries",
            type=_at_least(0),
            default=8,
            metavar="N",
            help="give up after N recoveries of one step (default: %(default)s)",
        ),
        group.add_argument(
            "--recovery-strict", action="store_true", help="a recovery that is not exact fails instead of warning"
        ),
        group.add_argument(
            "--recovery-drill",
            type=_at_least(1),
            metavar="STEP",
            help="rehearse a recovery at this step, without a fault, and compare the recomputed step",
        ),
        group.add_argument(
            "--recovery-audit",
            choices=("off", "warn", "error"),
            default="warn",
            help="after the second step, name every device tensor that nobody would restore; error: end the job then "
            "(default: %(default)s)",
        ),
    ]
    _check_after_parsing(parser, options)
    return parser


def _check_after_parsing(parser: argparse.ArgumentParser, options: list[argparse.Action]) -> None:
    # Every other entry of argparse (parse_args, the intermixed ones) comes through this method.
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parse_and_check(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse(*args, **kwargs)
        if namespace.enable_recovery_safe_globals:
            from mindspeed_recovery.frameworks import megatron_loop

            megatron_loop.install_when_loaded()
        else:
            for option in options:
                if getattr(namespace, option.dest) != option.default:
                    parser.error(f"argument {option.option_strings[0]}: needs {FLAG}")
        return namespace, rest

    parser.parse_known_args = parse_and_check  # type: ignore[method-assign]


def _catalogue(text: str) -> str:
    from mindspeed_recovery import catalogue

    try:
        catalogue.load(text)
    except CatalogueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def install() -> None:
    """Add the options to every parser that Megatron builds from now on. Idempotent; `uninstall` is the inverse."""
    global _active, _hooked
    _active = True
    if not _hooked:
        _hooked = True  # wrapt keeps its hooks for the life of the process
        wrapt.register_post_import_hook(_wrap_builder, _ARGUMENTS)  # at once if it is imported already
    elif _ARGUMENTS in sys.modules:
        _wrap_builder(sys.modules[_ARGUMENTS])


def uninstall() -> None:
    """Megatron builds its own parser again."""
    global _active
    _active = False
    module = sys.modules.get(_ARGUMENTS)
    build = getattr(module, _BUILDER, None)
    if getattr(build, "_recovery_wrapper", False):
        setattr(module, _BUILDER, build.__wrapped__)  # type: ignore[union-attr]


def _wrap_builder(module: ModuleType) -> None:
    build = getattr(module, _BUILDER, None)
    # A Megatron without this function keeps its parser, which then rejects the flag by name.
    if not _active or build is None or getattr(build, "_recovery_wrapper", False):
        return

    @functools.wraps(build)
    def add_arguments_and_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_recovery_arguments(build(parser))

    add_arguments_and_ours._recovery_wrapper = True  # type: ignore[attr-defined]
    setattr(module, _BUILDER, add_arguments_and_ours)
