"""Tables for the terminal that fit its width: columns that do not fit follow below, beside the first one again."""

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

GAP = 2
"""Spaces between two columns."""


Column = Sequence[str]
"""A heading and the cells below it."""


def tables(heading: Sequence[str], lines: Sequence[Sequence[str]], title: str, width: int) -> Iterator[Table]:
    """The table in as many parts as ``width`` needs, about equally wide; nothing in it is cut off.

    The first column is aligned to the left and the others, which are numbers, to the right.
    """
    columns = list(zip(heading, *lines, strict=True))
    parts = _parts(columns, width)
    if len(parts) > 1:
        parts = next(found for least in range(width + 1) if len(found := _parts(columns, least)) == len(parts))
    for part in parts:
        yield _made(part, title)
        title = ""


def _parts(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """The columns in parts of at most ``width`` where that is possible, each with the first column."""
    first, *others = columns
    parts: list[list[Column]] = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and _width([*parts[-1], column]) > width:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _width(columns: Sequence[Column]) -> int:
    return sum(max(map(len, column)) + GAP for column in columns) - GAP


def _made(columns: Sequence[Column], title: str) -> Table:
    made = Table(title=escape(title) if title else None, title_justify="left", box=None, padding=(0, GAP, 0, 0))
    for number, (name, *_) in enumerate(columns):
        made.add_column(escape(name), justify="right" if number else "left", no_wrap=True)
    for line in zip(*(cells for _, *cells in columns), strict=True):
        made.add_row(*map(escape, line))
    made.width = _width(columns) + GAP  # also where that is more than the terminal has
    return made
