"""What every command has in common: it parses flags into a config, runs, and exits with a code.

The codes: 0, done; 1, it did not succeed (or a traceback: a bug of ours); 2, a mistake of the user (one sentence on
stderr, no traceback); 130, interrupted by Ctrl-C.
"""

import atexit
import errno
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

from rich.markup import escape

from infra.cli import flags
from infra.cli.console import console, errors, open_streams
from infra.errors import UserError

Config = TypeVar("Config")

EXIT_INTERRUPTED = 130

program = ""
"""How the command was called, as ``throughline run``; empty for ``python -m``. The console script sets it."""

EXIT_TIMEOUT_SECONDS = 28.0
"""How long a command may take to end after Ctrl-C or SIGTERM; schedulers often follow the latter by SIGKILL in 30 s."""


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
    _interrupt_where_it_is_safe()
    interrupt_on_termination()
    try:
        with _exit_deadline():
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


def interrupt_on_termination() -> None:
    """Handle SIGTERM, which schedulers send, and SIGHUP, sent when a terminal is closed, like Ctrl-C.

    Call it again after Ray has started, which replaces SIGTERM's handler by one that prints a stack and aborts.
    """

    def interrupt(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # not callable where interrupts are ignored, as in the background
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # which nohup sets
                signal.signal(number, interrupt)


@contextmanager
def restore_signal_handlers() -> Iterator[None]:
    """Do a command's work in a Python program, which gets its own signal handlers back when the block ends.

    A command need not do so: its process ends with it.
    """
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in previous_handlers.items():
                if handler is not None:  # which Python did not install
                    signal.signal(number, handler)


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay a first Ctrl-C or SIGTERM until the block or function ends; a second one is not delayed.

    For what must not be left half done: creating a run, or calls into SQLAlchemy, which turns an interrupt into an
    error of its own.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    if not callable(previous_handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if came:
            previous_handler(number, frame)
        came.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def _interrupt_where_it_is_safe() -> None:
    """Let a Ctrl-C interrupt a moment later where Python would lose it, or would block other threads for ever by it.

    The import system's own code leaves the import lock taken when it is interrupted, for which each thread that imports
    something then waits. And out of a finalizer or a weak reference's callback no exception propagates: Python prints
    it and continues. One Ctrl-C in ten met either while Ray was being imported.
    """

    def later() -> None:
        main = threading.main_thread().ident
        threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            later()
        else:
            signal.default_int_handler(number, frame)

    report = sys.unraisablehook

    def repeat(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            later()
        else:
            report(lost)

    sys.unraisablehook = repeat
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where interrupts are ignored
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def _exit_deadline() -> Iterator[None]:
    """End this process ``EXIT_TIMEOUT_SECONDS`` after the first Ctrl-C, SIGTERM or SIGHUP that arrives during the
    block.

    Python's C handler writes to the descriptor even if the main thread does not return from a call into Ray, and
    whichever handlers Ray Tune has installed in place of ours.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    ended = threading.Event()

    def watch() -> None:
        with os.fdopen(reader, "rb", buffering=0) as signals:
            while (number := signals.read(1)) and number[0] not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                pass
            if number and not ended.wait(EXIT_TIMEOUT_SECONDS):
                errors.print("Interrupted; exiting without waiting any longer. Finished work is kept.")
                os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, name="leaving", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(previous_descriptor)
        os.close(writer)


def exit_with_error(mistake: Exception) -> NoReturn:
    """Print a user's mistake and exit with code 2."""
    errors.print(f"[red]error:[/red] {escape(str(mistake))}")
    sys.exit(2)
