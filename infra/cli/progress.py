"""What a command is doing, while it does it: one live line on a terminal, and in a pipe or a file a line now and then.

All other output appears above the live line; the others go to stderr, so that a file gets nothing but what the command
is for.
"""

import threading
import time
from collections.abc import Iterator
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

    def __init__(self, what: str) -> None:
        self._what = what
        self._details = ""
        self._since = time.monotonic()

    def update(self, what: str, details: str = "") -> None:
        """Do ``what`` from now on, with ``details`` to show beside it in the place of the seconds that it takes."""
        if what != self._what:
            self._since = time.monotonic()
        self._what, self._details = what, details

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def __str__(self) -> str:
        if self._details:
            return f"{self._what}: {self._details}"
        return f"{self._what} ({format_duration(int(self.seconds))})"


_statuses: list[Status] = []
"""What is being done, the innermost last, which is shown."""

_last = [float("-inf")]
"""When a pipe was told last."""


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
        task = _statuses[-1] if _statuses else None
        if task and task.seconds >= FIRST_SECONDS and time.monotonic() - _last[0] >= PIPE_INTERVAL_SECONDS:
            _last[0] = time.monotonic()
            errors.print(f"... {task}", markup=False)
