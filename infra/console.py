"""The two consoles on which commands print: output on stdout, errors and warnings on stderr."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.segment import Segment

_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Pictures of the control characters: Unicode has them for those of ASCII."""


class _Console(Console):
    """A console whose reader may go away without ending the work: Ctrl-C also ends the ``tee`` of ``| tee log``.

    Control characters are shown and not sent: the name of a file or book could move the cursor or rename the window.
    """

    _other: Console | None = None

    def print(self, *objects: Any, **how: Any) -> None:
        if self._other and self.is_terminal:
            self._other.print(*objects, **how)
            return
        shown = [thing.translate(_VISIBLE) if isinstance(thing, str) else thing for thing in objects]
        try:
            super().print(*shown, **how)
        except OSError:  # a terminal that was closed, a log on a disk that is full
            self.on_broken_pipe()

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
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.file.fileno())
        os.close(nothing)


console = _Console(highlight=False, emoji=False, soft_wrap=True)
"""Where commands print their output."""

errors = _Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
"""Where commands print errors and warnings."""
