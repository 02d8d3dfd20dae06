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
"""Pictures of the control characters: Unicode has them for those of ASCII."""


_ENDED = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
"""Errors of a stream that nobody will read again: a pipe whose reader has ended, a terminal that was closed."""


class _Stream:
    """A standard stream whose errors do not reach those who print.

    What a full disk does not take is lost, and what is printed once there is room again is not. A stream that nobody
    reads any longer is replaced by one that discards everything.
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
        with suppress(OSError, ValueError):  # a notebook's stream has no descriptor
            nothing = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nothing, self._stream.fileno())
            finally:
                os.close(nothing)

    def _block(self) -> None:
        """Wait for a slow reader: another program that has the same terminal or pipe may have chosen not to."""
        with suppress(OSError, ValueError):
            if not os.get_blocking(self._stream.fileno()):
                os.set_blocking(self._stream.fileno(), True)

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as failure:
            if failure.errno in _ENDED:
                self.discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Console(Console):
    """A console whose reader may go away without ending the work: Ctrl-C also ends the ``tee`` of ``| tee log``.

    Control characters are shown and not sent: the name of a file or book could move the cursor or rename the window.
    """

    _other: Console | None = None

    def print(self, *objects: Any, **how: Any) -> None:
        if self._other and self.is_terminal:
            self._other.print(*objects, **how)
            return
        super().print(*(thing.translate(_VISIBLE) if isinstance(thing, str) else thing for thing in objects), **how)

    @property
    def file(self) -> IO[str]:
        """The stream that this console writes to, whose errors stay there."""
        return _Stream(super().file)  # type: ignore[return-value]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        Console.file.__set__(self, new_file)

    def render(self, *things: Any, **how: Any) -> Iterator[Segment]:
        """What rich makes of tables, Markdown and live lines, which may contain such names, too."""
        for segment in super().render(*things, **how):
            yield segment if segment.control else Segment(segment.text.translate(_VISIBLE), segment.style)

    def prose(self, text: str) -> None:
        """Print a paragraph: on a terminal wrapped between words, in a pipe in one line."""
        self.print(text, markup=False, soft_wrap=not self.is_terminal)

    @contextmanager
    def printed_by(self, other: Console) -> Iterator[None]:
        """During the block, which shows a live line on ``other``, what would appear within that is printed above it."""
        self._other = other
        try:
            yield
        finally:
            self._other = None

    def show_cursor(self, show: bool = True) -> bool:
        """Never hide the cursor: where a command exits at once, nothing would show it again."""
        return super().show_cursor(True)

    def on_broken_pipe(self) -> None:
        """Discard all further output, where rich would exit."""
        _Stream(super().file).discard()

    def end(self) -> None:
        """Write what is still buffered, or discard it, so that Python does not fail with it when it exits."""
        stream = super().file
        try:
            stream.flush()
        except OSError:
            _Stream(stream).discard()


console = _Console(highlight=False, emoji=False, soft_wrap=True)
"""Where commands print their output."""

errors = _Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
"""Where commands print errors and warnings."""


def open_streams() -> None:
    """Open the standard streams that are closed, as by ``2>&-``, on a file that discards what is written to it.

    Otherwise the next file to be opened, such as a database, would be what Ray's processes write their messages to.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 for the process's life
