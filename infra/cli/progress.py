"""Progress of a command: one live line on a terminal, or a line every 30 s in a pipe or a file.

All other output appears above the live line. The lines for pipes are printed on stderr, so that stdout has only the
results of the command.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.live import Live
from rich.text import Text

from infra.background import repeated
from infra.cli.console import console, errors
from infra.cli.units import format_duration

FIRST_LINE_SECONDS = 2.0
"""Time after which an activity is printed to a pipe for the first time."""

PIPE_INTERVAL_SECONDS = 30.0
"""Interval between two progress lines in a pipe."""

REFRESH_HZ = 2.0
"""Refreshes of the live line per second."""


class Status:
    """Current activity of a command. Other threads may read it at any time."""

    def __init__(self, activity: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._activity = activity
        self._details = ""
        self._clock = clock
        self._started_at = clock()

    def update(self, activity: str, details: str = "") -> None:
        """Set the ``activity``, shown with ``details`` or, without them, with the seconds since it started."""
        if activity != self._activity:
            self._started_at = self._clock()
        self._activity, self._details = activity, details

    @property
    def seconds(self) -> float:
        """Seconds since the activity started."""
        return self._clock() - self._started_at

    def __str__(self) -> str:
        if self._details:
            return f"{self._activity}: {self._details}"
        return f"{self._activity} ({format_duration(int(self.seconds))})"


_statuses: list[Status] = []
"""Activities of the nested blocks, the innermost last; that one is shown."""


class PipeLines:
    """Progress lines for a pipe: the first after two seconds, and then one every 30 seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._printed_at = float("-inf")

    def take_line(self, current: Status) -> str:
        """Return the line to print now about the ``current`` activity; empty if it is too early for one."""
        if current.seconds < FIRST_LINE_SECONDS or self._clock() - self._printed_at < PIPE_INTERVAL_SECONDS:
            return ""
        self._printed_at = self._clock()
        return f"... {current}"


_pipe_lines = PipeLines()


@contextmanager
def status(activity: str) -> Iterator[Status]:
    """Show the ``activity``, a gerund, and its duration until the block ends. Blocks of one thread may be nested."""
    current = Status(activity)
    _statuses.append(current)
    try:
        with nullcontext() if len(_statuses) > 1 else _progress_display():
            yield current
    finally:
        _statuses.remove(current)


@contextmanager
def _progress_display() -> Iterator[None]:
    if console.quiet:  # A notebook's live line is a widget, which rich would show nevertheless.
        yield
        return
    if console.is_interactive:
        live = Live(console=console, get_renderable=_live_line, refresh_per_second=REFRESH_HZ, transient=True)
        with live, errors.redirected_to(console):
            yield
        return
    with repeated(_print_if_due, FIRST_LINE_SECONDS / 4, "progress"):
        yield


IMPORTING_ACTIVITY = "importing torch and MLflow"
"""Activity of a command in its first seconds."""


def _live_line() -> Text:
    return Text(str(_statuses[-1]) if _statuses else "", style="dim", no_wrap=True, overflow="ellipsis")


def _print_if_due() -> None:
    if _statuses and (line := _pipe_lines.take_line(_statuses[-1])):
        errors.print(line, markup=False)
