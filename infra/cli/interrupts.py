"""Interrupts of this process: Ctrl-C, SIGTERM (which schedulers send) and SIGHUP (sent when a terminal is closed).

All three signals are handled alike. The first one raises ``KeyboardInterrupt`` in the main thread, once that is safe,
or requests the current work to stop and save. A second one exits at once. Stopping and exiting have a time limit,
because schedulers often send SIGKILL 30 s later.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from infra.background import repeated
from infra.cli.console import errors

EXIT_INTERRUPTED = 130
"""Exit code of a command that was interrupted."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

REPEAT_DELAY_SECONDS = 0.01
"""Delay after which an interrupt is sent again that arrived where it cannot be raised."""

CHECK_INTERVAL_SECONDS = 0.2
"""Interval between two checks whether a requested stop has exceeded its time limit."""

IMPORTLIB = "<frozen importlib._bootstrap>"
"""File name in the frames of Python's own code that imports a module."""


class Interrupts:
    """State of this process's interrupts. The methods have no effect outside the main thread."""

    def __init__(self) -> None:
        self.stop_timeout_seconds = 18.0
        """Time limit for work to stop and save after an interrupt requested it."""
        self.exit_timeout_seconds = 28.0
        """Time limit for a command to exit after its first interrupt."""
        self.import_timeout_seconds = 8.0
        """Time limit for an import to end before an interrupt is raised in it."""
        self._number = signal.SIGINT
        """Number of the last signal."""
        self._is_delaying = False
        self._delayed_signal: signal.Signals | None = None
        self._import_wait_began: float | None = None
        """When the interrupt arrived that waits for an import to end; None if no interrupt waits."""
        self._stop_message = ""
        """Message to print when a stop is requested; empty while interrupts are raised instead."""
        self._requested_at: float | None = None
        self._can_exit = False
        """Whether this process runs one of the commands, and not a Python program that calls this package."""
        self._report_unraisable = sys.unraisablehook

    @property
    def stop_requested(self) -> bool:
        """Whether the work in the block of :meth:`stop_requests` must stop. Any thread may read it."""
        return bool(self._stop_message and self._requested_at)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle interrupts during the block, and restore the previous handlers after it.

        Python programs that call this package keep their own handlers. Libraries may replace handlers during the block:
        Ray installs one for SIGTERM that prints a stack trace and aborts.
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
                if handler is not None:  # None stands for a handler that was not installed from Python.
                    signal.signal(number, handler)

    @contextmanager
    def in_command(self) -> Iterator[None]:
        """Handle interrupts from now on, and end this process if the block takes too long after the first one.

        The time limit holds even while the main thread is in a call that does not return, and with any handlers of
        libraries, because Python writes the number of each signal to a descriptor that a thread reads.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._install()
        self._requested_at = None
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        ended = threading.Event()

        def watch() -> None:
            with os.fdopen(reader, "rb", buffering=0) as numbers:
                while (number := numbers.read(1)) and number[0] not in SIGNALS:
                    pass
                if number and not ended.wait(self.exit_timeout_seconds):
                    errors.print(
                        f"Interrupted, and not stopped within {self.exit_timeout_seconds:.0f} s. Exiting; finished "
                        "work is saved."
                    )
                    os._exit(EXIT_INTERRUPTED)

        threading.Thread(target=watch, name="exit deadline", daemon=True).start()
        self._can_exit = True
        try:
            yield
        finally:
            self._can_exit = False
            ended.set()
            signal.set_wakeup_fd(previous_descriptor)
            os.close(writer)

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Delay a first interrupt until the block or function ends; a second one is not delayed.

        Use it for work that must not end halfway, such as creating a run, and for calls to SQLAlchemy, which would
        raise its own error for an interrupt.
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
                delayed_signal, self._delayed_signal = self._delayed_signal, None
        if delayed_signal:
            signal.raise_signal(delayed_signal)

    @contextmanager
    def stop_requests(self, message: str) -> Iterator[None]:
        """Print ``message`` and set :attr:`stop_requested` at the first interrupt, so that the block can save and end.

        If the block does not end in time, ``KeyboardInterrupt`` is raised. A second interrupt exits at once, also after
        the block. In a Python program that calls this package it raises ``KeyboardInterrupt``.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def check_deadline() -> None:
            if self._requested_at and time.monotonic() - self._requested_at >= self.stop_timeout_seconds:
                errors.print(f"Not stopped within {self.stop_timeout_seconds:.0f} s. Exiting; finished work is saved.")
                self._stop_message, self._requested_at = "", None
                self._interrupt_main()

        with self.handled(), repeated(check_deadline, CHECK_INTERVAL_SECONDS, "stop deadline"):
            self._requested_at, self._stop_message = None, message
            try:
                yield
            finally:
                self._stop_message = ""

    def _install(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and shells ignore signals of background work.
                signal.signal(number, self._handle)
        if sys.unraisablehook != self._handle_unraisable:
            self._report_unraisable = sys.unraisablehook
            sys.unraisablehook = self._handle_unraisable

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = signal.Signals(number)
        arrived_at, self._import_wait_began = self._import_wait_began or time.monotonic(), None
        if self._is_delaying and not self._delayed_signal:
            self._delayed_signal = self._number
        elif self._stop_message and not self.stop_requested:
            self._requested_at = time.monotonic()
            errors.print(f"\n{self._stop_message}. Press Ctrl-C again to exit immediately.")
        elif self._requested_at and self._can_exit:
            os._exit(EXIT_INTERRUPTED)
        elif self._must_wait_for_import(frame, arrived_at):
            self._import_wait_began = arrived_at
            self._repeat()
        else:
            raise KeyboardInterrupt

    def _must_wait_for_import(self, frame: FrameType | None, arrived_at: float) -> bool:
        """Return whether an import must go on before an interrupt that arrived in ``frame`` is raised.

        An interrupted import leaves a part of its package loaded, with which the next one fails by another exception.
        Within importlib it does not release its lock, and every later import of the module would wait for it.
        """
        if frame is None or all(caller.f_code.co_filename != IMPORTLIB for caller, _ in traceback.walk_stack(frame)):
            return False
        is_late = time.monotonic() - arrived_at >= self.import_timeout_seconds
        return not is_late or frame.f_code.co_filename == IMPORTLIB

    def _handle_unraisable(self, unraisable: Any) -> None:
        """Repeat an interrupt that arrived in a finalizer or a weak reference's callback, where Python cannot raise it.

        One Ctrl-C in ten was lost there, or in an import, while Ray was imported.
        """
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._repeat()
        else:
            self._report_unraisable(unraisable)

    def _repeat(self) -> None:
        threading.Timer(REPEAT_DELAY_SECONDS, self._interrupt_main).start()

    def _interrupt_main(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, self._number)


interrupts = Interrupts()
"""The interrupts of this process."""
