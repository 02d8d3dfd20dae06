"""The two consoles on which commands print: output on stdout, errors and warnings on stderr."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.segment import Segment

_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Visible replacements of control characters: Unicode's pictures of those in ASCII, and U+FFFD for the others."""

_CLOSED_ERRORS = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
"""Errors of a stream that nobody will read again: a pipe whose reader has ended, or a closed terminal."""


class _Stream:
    """A standard stream whose write errors do not reach the code that prints.

    Output that a full disk does not accept is lost; later output is written again once there is free space. A stream
    without a reader is replaced by one that discards everything.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._block()
        with self._tolerant():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._block()
        with self._tolerant():
            self._stream.flush()

    def discard(self) -> None:
        """Discard all further output."""
        with suppress(OSError, ValueError):  # The stream of a notebook has no descriptor.
            null_descriptor = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null_descriptor, self._stream.fileno())
            finally:
                os.close(null_descriptor)

    def _block(self) -> None:
        """Make writes wait for a slow reader; another program on the same terminal or pipe may have disabled it."""
        with suppress(OSError, ValueError):
            if not os.get_blocking(self._stream.fileno()):
                os.set_blocking(self._stream.fileno(), True)

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as failure:
            if failure.errno in _CLOSED_ERRORS:
                self.discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Console(Console):
    """A console whose reader may exit without ending the command: Ctrl-C also ends the ``tee`` of ``| tee log``.

    Control characters are printed as visible symbols. Otherwise the name of a file or book could move the cursor or
    rename the window.
    """

    _live_console: Console | None = None

    def print(self, *objects: Any, **options: Any) -> None:
        if self._live_console and self.is_terminal:
            self._live_console.print(*objects, **options)
            return
        visible = (item.translate(_VISIBLE) if isinstance(item, str) else item for item in objects)
        super().print(*visible, **options)

    @property
    def file(self) -> IO[str]:
        """The stream that this console writes to; its write errors are not raised."""
        return _Stream(super().file)  # type: ignore[return-value]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        Console.file.__set__(self, new_file)

    def render(self, *renderables: Any, **options: Any) -> Iterator[Segment]:
        """Render tables, Markdown and live lines with control characters replaced by visible symbols."""
        for segment in super().render(*renderables, **options):
            yield segment if segment.control else Segment(segment.text.translate(_VISIBLE), segment.style)

    def print_paragraph(self, text: str) -> None:
        """Print a paragraph, wrapped between words on a terminal, and as one line in a pipe."""
        self.print(text, markup=False, soft_wrap=not self.is_terminal)

    @contextmanager
    def redirected_to(self, live_console: Console) -> Iterator[None]:
        """Print on ``live_console`` during the block, so that output appears above its live line and not within it."""
        self._live_console = live_console
        try:
            yield
        finally:
            self._live_console = None

    def show_cursor(self, show: bool = True) -> bool:
        """Keep the cursor visible: a command that exits at once could not show a hidden cursor again."""
        return super().show_cursor(True)

    def on_broken_pipe(self) -> None:
        """Discard all further output; rich's own method would exit."""
        _Stream(super().file).discard()

    def end(self) -> None:
        """Write the buffered output, or discard it if that fails, so that Python does not fail when it exits."""
        stream = super().file
        try:
            stream.flush()
        except OSError:
            _Stream(stream).discard()


console = _Console(highlight=False, emoji=False, soft_wrap=True)
"""The console for the output of commands, on stdout."""

errors = _Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
"""The console for errors, warnings and progress, on stderr."""


@contextmanager
def quiet(is_quiet: bool = True) -> Iterator[None]:
    """Print nothing during the block if ``is_quiet``, for Python programs that call what commands do."""
    previous = console.quiet, errors.quiet
    console.quiet = errors.quiet = is_quiet or console.quiet
    try:
        yield
    finally:
        console.quiet, errors.quiet = previous


def open_streams() -> None:
    """Open closed standard streams, as after ``2>&-``, on the null device.

    Otherwise the next file that is opened, such as a database, would get the descriptor of stdout or stderr, and Ray's
    processes would write their messages to it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 open until the process ends
