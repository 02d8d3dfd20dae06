"""The entry of every command: parse flags into a config, run, and exit with a code.

Exit codes are 0 for success, 1 for failure or a bug (with a traceback), 2 for invalid input (with a message on stderr
and no traceback), and 130 for an interrupt, such as Ctrl-C.
"""

import atexit
import errno
import gc
import io
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from rich.markup import escape

from infra.cli import flags
from infra.cli.console import console, errors, open_streams
from infra.cli.interrupts import EXIT_INTERRUPTED, interrupts
from infra.errors import UserError

Config = TypeVar("Config")

program = ""
"""The command's name as typed, such as ``throughline run``; empty for ``python -m``. The console script sets it."""


def run(
    main: Callable[[Config], int | None], config: type[Config], module: str, default: Callable[[], Config] | None = None
) -> NoReturn:
    """Parse ``config`` from the command line, call ``main`` with it, and exit with the code that it returns.

    ``--help`` prints the docstrings of ``config`` and of its fields line by line. ``config`` rejects invalid values by
    raising ``ValueError`` or ``UserError`` in ``__post_init__``.

    Args:
        main: the command; returns the exit code, or None for success.
        config: dataclass of the command's flags.
        module: name after ``python -m``.
        default: creates the instance whose values the flags override; may raise ``UserError``.
    """
    open_streams()
    for stream in (console, errors):
        atexit.register(stream.end)
    if isinstance(sys.stdout, io.TextIOWrapper):  # A character that the locale cannot encode must not end the command.
        sys.stdout.reconfigure(errors="replace")
    reduce_gc_frequency()
    atexit.register(gc.freeze)  # The process ends anyway; a last garbage collection would take 0.7 s.
    try:
        with interrupts.in_command():
            code = main(flags.parse_flags(config, program or f"python -m {module}", default and default()))
    except UserError as mistake:
        exit_with_error(mistake)
    except OSError as failure:
        if failure.errno != errno.ENAMETOOLONG:
            raise
        exit_with_error(
            UserError(f"{str(failure.filename)[:60]}... is too long a name for this file system. Use a shorter one.")
        )
    except KeyboardInterrupt as interrupt:
        message = str(interrupt) or "Finished work is saved; run the same command again to continue."
        errors.print(f"Interrupted. {escape(message)}")
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code or 0)


def reduce_gc_frequency() -> None:
    """Run this process's garbage collector after 100,000 new objects instead of 700.

    Importing Ray, MLflow and torch creates a million permanent objects, and collections among them take a quarter of
    the import time.
    """
    gc.set_threshold(100_000, 50, 100)


def exit_with_error(mistake: Exception) -> NoReturn:
    """Print the message of invalid input and exit with code 2."""
    errors.print(f"[red]error:[/red] {escape(str(mistake))}")
    sys.exit(2)
