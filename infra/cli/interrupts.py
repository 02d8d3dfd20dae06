"""The owner of Ctrl-C, SIGTERM (which schedulers send) and SIGHUP (sent when a terminal is closed) in this process.

All three mean the same. The first raises ``KeyboardInterrupt`` in the main thread, once that is safe, or requests work
to stop by itself. A second one exits at once. Both have a deadline, because schedulers often send SIGKILL 30 s later.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from infra.cli.console import errors

EXIT_INTERRUPTED = 130
"""Exit code of a command that was interrupted."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

REPEAT_SECONDS = 0.01
"""Delay of an interrupt that arrives where it cannot be raised."""

CHECK_SECONDS = 0.2
"""Interval between two checks of the deadline of a requested stop."""


class Interrupts:
    """The state of this process's interrupts. Its methods have no effect outside the main thread."""

    def __init__(self) -> None:
        self.stop_timeout_seconds = 18.0
        """Time limit for work to stop and save after a request."""
        self.exit_timeout_seconds = 28.0
        """Time limit for a command to exit after its first interrupt."""
        self._number = signal.SIGINT
        """The last signal."""
        self._is_delaying = False
        self._delayed: signal.Signals | None = None
        self._stop_message = ""
        """Printed at a request to stop; empty where an interrupt is raised instead."""
        self._requested_at: float | None = None
        self._exits = False
        """Whether the process is a command's, which may be ended, and not that of a program which calls ours."""
        self._report_lost = sys.unraisablehook

    @property
    def stop_requested(self) -> bool:
        """Whether the work in the block of :meth:`stop_requests` must stop. Any thread may read it."""
        return bool(self._stop_message and self._requested_at)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle interrupts during the block, and then let the previous handlers do so.

        For Python callers, whose next Ctrl-C is their own, and for calls that replace handlers: Ray installs one for
        SIGTERM that prints a stack and aborts.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {number: signal.getsignal(number) for number in SIGNALS}
        previous_hook = sys.unraisablehook
        self._install()
        try:
            yield
        finally:
            sys.unraisablehook = previous_hook
            for number, handler in previous_handlers.items():
                if handler is not None:  # None stands for one that was not installed from Python.
                    signal.signal(number, handler)

    @contextmanager
    def in_command(self) -> Iterator[None]:
        """Handle interrupts from now on, and end this process if the block lasts too long after the first of them.

        Python writes the number of a signal to a descriptor even while the main thread is in a call that does not
        return, and whatever handlers a library has installed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._install()
        self._requested_at = None
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        ended = threading.Event()

        def watch() -> None:
            with os.fdopen(reader, "rb", buffering=0) as numbers:
                while (number := numbers.read(1)) and number[0] not in SIGNALS:
                    pass
                if number and not ended.wait(self.exit_timeout_seconds):
                    errors.print("Interrupted; exiting without waiting any longer. Finished work is kept.")
                    os._exit(EXIT_INTERRUPTED)

        threading.Thread(target=watch, name="exit deadline", daemon=True).start()
        self._exits = True
        try:
            yield
        finally:
            self._exits = False
            ended.set()
            signal.set_wakeup_fd(previous)
            os.close(writer)

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Delay a first interrupt until the block or function ends; a second one is not delayed.

        For what must not be left half done: creating a run, or calls into SQLAlchemy, which turns an interrupt into an
        error of its own.
        """
        if self._is_delaying or threading.current_thread() is not threading.main_thread():
            yield
            return
        with self.handled():
            self._is_delaying = True
            try:
                yield
            finally:
                self._is_delaying = False
                delayed, self._delayed = self._delayed, None
        if delayed:
            signal.raise_signal(delayed)

    @contextmanager
    def stop_requests(self, message: str) -> Iterator[None]:
        """Print ``message`` and set :attr:`stop_requested` at the first interrupt during the block, which then ends.

        If it does not end in time, ``KeyboardInterrupt`` is raised. A second interrupt exits at once, also after the
        block; in a program that calls ours it raises ``KeyboardInterrupt``.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(CHECK_SECONDS):
                if self._requested_at and time.monotonic() - self._requested_at >= self.stop_timeout_seconds:
                    errors.print(
                        f"Not stopped within {self.stop_timeout_seconds:.0f} s. Exiting; finished work is kept."
                    )
                    self._stop_message, self._requested_at = "", None
                    self._interrupt_main()
                    return

        with self.handled():
            self._requested_at, self._stop_message = None, message
            threading.Thread(target=watch, name="stop deadline", daemon=True).start()
            try:
                yield
            finally:
                self._stop_message = ""
                ended.set()

    def _install(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # set by nohup, and for work in the background
                signal.signal(number, self._handle)
        if sys.unraisablehook != self._handle_lost:
            self._report_lost = sys.unraisablehook
            sys.unraisablehook = self._handle_lost

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = signal.Signals(number)
        if self._is_delaying and not self._delayed:
            self._delayed = self._number
        elif self._stop_message and not self.stop_requested:
            self._requested_at = time.monotonic()
            errors.print(f"\n{self._stop_message}. Press Ctrl-C again to exit at once.")
        elif self._requested_at and self._exits:
            os._exit(EXIT_INTERRUPTED)
        elif frame and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            # An interrupted import would leave its lock taken, for which each thread that imports something then waits.
            self._repeat()
        else:
            raise KeyboardInterrupt

    def _handle_lost(self, lost: Any) -> None:
        """Repeat an interrupt in a finalizer or a weak reference's callback, out of which no exception propagates.

        One Ctrl-C in ten was lost in this way, or by the lock of an import, while Ray was being imported.
        """
        if issubclass(lost.exc_type, KeyboardInterrupt):
            self._repeat()
        else:
            self._report_lost(lost)

    def _repeat(self) -> None:
        threading.Timer(REPEAT_SECONDS, self._interrupt_main).start()

    def _interrupt_main(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, self._number)


interrupts = Interrupts()
"""The interrupts of this process."""
