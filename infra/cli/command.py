"""What every command has in common: it parses flags into a config, runs, and exits with a code.

The codes: 0, done; 1, it did not succeed (or a traceback: a bug of ours); 2, a mistake of the user (one sentence on
stderr, no traceback); 130, interrupted by Ctrl-C.
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
"""How the command was called, as ``throughline run``; empty for ``python -m``. The console script sets it."""


def run(
    main: Callable[[Config], int | None], config: type[Config], module: str, default: Callable[[], Config] | None = None
) -> NoReturn:
    """Parse ``config`` from the command line, call ``main`` with it, and exit with its code.

    ``module`` is the name after ``python -m``; ``default`` makes the instance whose values flags override, and may
    raise ``UserError``. The docstrings of ``config`` and of its fields are what ``--help`` prints, line by line; it
    rejects invalid values by raising ``ValueError`` or ``UserError`` in ``__post_init__``.
    """
    open_streams()
    for stream in (console, errors):
        atexit.register(stream.end)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale may not have all characters, which must not end the work
        sys.stdout.reconfigure(errors="replace")
    reduce_gc_frequency()
    atexit.register(gc.freeze)  # otherwise the last collection, of objects that are about to go anyway, takes 0.7 s
    try:
        with interrupts.in_command():
            code = main(flags.parse_flags(config, program or f"python -m {module}", default and default()))
    except UserError as mistake:
        exit_with_error(mistake)
    except OSError as failure:
        if failure.errno != errno.ENAMETOOLONG:
            raise
        exit_with_error(
            UserError(f"{str(failure.filename)[:60]}... is too long a name for this system: give a shorter one.")
        )
    except KeyboardInterrupt:
        errors.print("Interrupted. Finished work is kept; run the same command again to continue.")
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code or 0)


def reduce_gc_frequency() -> None:
    """Run this process's garbage collector after 100,000 new objects instead of 700.

    Ray, MLflow and torch create a million objects that stay; looking among them takes a quarter of their imports' time.
    """
    gc.set_threshold(100_000, 50, 100)


def exit_with_error(mistake: Exception) -> NoReturn:
    """Print a user's mistake and exit with code 2."""
    errors.print(f"[red]error:[/red] {escape(str(mistake))}")
    sys.exit(2)
