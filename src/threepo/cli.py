"""The command line. Nothing heavy is imported before a command needs it, so help and mistakes answer at once.

The commands stand in commands.py and lab/commands.py, each with its arguments. Exit status: 0 done; 1 `certify` has
found wrong weights; 2 something in the input to fix, said in one line; 128 + n stopped by signal n, state saved.
"""

import argparse
import errno
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import threepo
from threepo.commands import COMMANDS
from threepo.errors import Interrupted, ThreepoWarning, UserError
from threepo.lab.commands import LAB_COMMANDS
from threepo.ranks import launch
from threepo.ranks.world import RankError

_format_warning = warnings.formatwarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: else the next file opened gets its number, and what libraries print
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives
    # Before `datasets` is imported: ours is the only progress bar, and an error is one line.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    warnings.formatwarning = _one_line
    options = _parse(build_parser(), arguments)
    failure: type[Exception] | None = None
    try:
        if launch.ranks_started() > 1 and not options.command.on_ranks:
            raise UserError("torchrun: only `threepo train`, `sft` and `eval` run on several ranks; start without it")
        with launch.one_voice():
            options.command.action(options)
        sys.stdout.flush()
        return 0
    except (UserError, RankError) as error:
        message, failure = str(error), type(error)  # the error itself would keep a folder open
        status = error.exit_status if isinstance(error, UserError) else 2
    except Interrupted as stop:
        message, status = str(stop), 128 + stop.signal_number
    except KeyboardInterrupt:
        message, status = "interrupted", 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:  # not of standard output
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would write the rest at exit
        if error.errno == errno.EPIPE:  # a reader such as `head` has read enough
            return 128 + signal.SIGPIPE
        what = "standard output or a temporary file"
        message, status = f"cannot write {what}: {error.strerror}; free some space, then repeat the command", 2
    launch.report_end(message, failure)
    return status


def _one_line(message: Any, category: Any, *where: Any, **more: Any) -> str:
    """Format a warning: one about the run in one line, any other as Python does."""
    ours = issubclass(category, ThreepoWarning)
    return f"threepo: warning: {message}\n" if ours else _format_warning(message, category, *where, **more)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Arguments in any order: argparse does not accept positional words after an option."""
    options, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-")]
    more = options.command.more
    if unknown or (rest and not more):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        setattr(options, more, [*getattr(options, more), *rest])
    return options


def build_parser() -> argparse.ArgumentParser:
    """All commands with their arguments; a command of two words stands under its first."""
    parser = argparse.ArgumentParser(prog="threepo", description="RLVR that explores in weight space.")
    version = f"threepo {threepo.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    below = {"": parser.add_subparsers(title="commands", metavar="COMMAND", required=True)}
    for command in (*COMMANDS, *LAB_COMMANDS):
        group, _, name = command.name.rpartition(" ")
        adding = below[group].add_parser(name, help=command.help)
        if command.action is None:
            below[name] = adding.add_subparsers(title="commands", metavar="COMMAND", required=True)
            continue
        for names, how in command.arguments:
            adding.add_argument(*names, **how)
        adding.set_defaults(command=command)
    return parser
