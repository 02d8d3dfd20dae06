"""What a command is doing, while it does it: one live line on a terminal, and in a pipe or a file a line now and then.

All other output appears above the live line; the others go to stderr, so that a file gets nothing but what the command
is for.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.live import Live
from rich.text import Text

from infra.cli.console import console, errors
from infra.cli.units import format_duration

FIRST_SECONDS = 2.0
"""How long something may take before a pipe is told that it is being done."""

PIPE_INTERVAL_SECONDS = 30.0
"""Between two lines in a pipe."""

REFRESH_HZ = 2.0
"""Of the live line, per second."""


class Status:
    """Something that is being done. Other threads may show it at any time."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._details = ""
        self._clock = clock
        self._since = clock()

    def update(self, what: str, details: str = "") -> None:
        """Do ``what`` from now on, with ``details`` to show beside it in the place of the seconds that it takes."""
        if what != self._what:
            self._since = self._clock()
        self._what, self._details = what, details

    @property
    def seconds(self) -> float:
        return self._clock() - self._since

    def __str__(self) -> str:
        if self._details:
            return f"{self._what}: {self._details}"
        return f"{self._what} ({format_duration(int(self.seconds))})"


_statuses: list[Status] = []
"""What is being done, the innermost last, which is shown."""


class PipeLines:
    """The lines that a pipe gets: the first after seconds, and then seldom."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._printed_at = float("-inf")

    def due(self, task: Status) -> str:
        """The line about ``task`` that is due now; empty if none is."""
        if task.seconds < FIRST_SECONDS or self._clock() - self._printed_at < PIPE_INTERVAL_SECONDS:
            return ""
        self._printed_at = self._clock()
        return f"... {task}"


_pipe_lines = PipeLines()


@contextmanager
def status(what: str) -> Iterator[Status]:
    """Show that ``what`` is being done until the block ends, and for how long. Blocks may be nested, in one thread."""
    task = Status(what)
    _statuses.append(task)
    try:
        with nullcontext() if len(_statuses) > 1 else _shown():
            yield task
    finally:
        _statuses.remove(task)


@contextmanager
def _shown() -> Iterator[None]:
    if console.is_interactive:
        live = Live(console=console, get_renderable=_line, refresh_per_second=REFRESH_HZ, transient=True)
        with live, errors.printed_by(console):
            yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_print_periodically, args=(ended,), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


IMPORTING = "importing torch and MLflow"
"""What takes commands seconds before they can say more."""


def _line() -> Text:
    return Text(str(_statuses[-1]) if _statuses else "", style="dim", no_wrap=True, overflow="ellipsis")


def _print_periodically(ended: threading.Event) -> None:
    while not ended.wait(FIRST_SECONDS / 4):
        if _statuses and (line := _pipe_lines.due(_statuses[-1])):
            errors.print(line, markup=False)
