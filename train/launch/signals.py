"""Ctrl-C and SIGTERM while a run trains: the first asks for the end of the step, a second exits."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from infra.cli.command import EXIT_INTERRUPTED
from infra.cli.console import errors

STOP_SECONDS = 18.0
"""How long a step and its checkpoint may take after Ctrl-C, out of the 30 s within which the command ends."""


class StopRequest:
    requested_at: float | None = None
    """When it came, by ``time.monotonic``."""
    is_overdue = False

    def __bool__(self) -> bool:
        return self.requested_at is not None

    def check_deadline(self) -> bool:
        """Whether the step and its checkpoint take too long; says so."""
        if self.requested_at is None or self.is_overdue or time.monotonic() - self.requested_at < STOP_SECONDS:
            return False
        errors.print(f"No step was finished and saved within {STOP_SECONDS:.0f} s; exiting without it.")
        self.is_overdue = True
        return True


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM during the block; a second one, then or later, exits.

    Once the stop is overdue, another SIGINT raises ``KeyboardInterrupt`` instead: see :func:`interrupt_main`.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(signum: int, frame: object) -> None:
        if stop.is_overdue:
            raise KeyboardInterrupt
        if stop:
            os._exit(EXIT_INTERRUPTED)
        stop.requested_at = time.monotonic()
        errors.print("\nStopping after this step and saving; press again to exit at once.")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        if not stop:
            for number, handler in previous.items():
                signal.signal(number, handler)


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
