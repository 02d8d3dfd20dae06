"""What a command has found, for people: facts, paragraphs and tables, told once for the terminal and in Markdown."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from infra.console import console

GAP = 2
"""Spaces between two columns."""

SHORTEST = 10
"""Characters of a word that are not parted, however narrow the terminal is."""

Column = Sequence[str]
"""A heading and the cells below it."""


@dataclass(frozen=True)
class Part:
    """One table of a report: cells of plain text, below a heading, which may be empty."""

    title: str
    heading: Sequence[str]
    lines: Sequence[Sequence[str]]

    def show(self) -> None:
        """Print the table, in as many parts as the terminal's width needs."""
        for table in tables(self.heading, self.lines, self.title, console.width):
            console.print(table)

    def markdown(self) -> str:
        """The table below its title; nothing in a cell ends it, or begins a line, a link or HTML."""
        rows = (self.heading, ["---"] * len(self.heading), *self.lines)
        lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
        return "\n".join([f"#### {self.title}", "", *lines] if self.title else lines)


@dataclass(frozen=True)
class Report:
    """What was found, which the terminal, ``summary.md`` and the page in MLflow tell alike."""

    facts: Sequence[tuple[str, str]]
    """What somebody wants to know first, by name; at the end what to do next. A text may contain Markdown."""
    pieces: Sequence[str | Part] = ()
    """Paragraphs in Markdown, and tables."""

    def show(self) -> None:
        for piece in self.pieces:
            if isinstance(piece, Part):
                piece.show()
            else:
                console.prose(piece)
            console.print()
        width = max((len(name) for name, _ in self.facts), default=0)
        for name, text in self.facts:
            console.print(f"[bold]{escape(name):{width}}[/bold]  {escape(text.replace('`', ''))}")

    def markdown(self) -> str:
        pieces = [piece.markdown() if isinstance(piece, Part) else piece for piece in self.pieces]
        return "\n\n".join([facts(self.facts), *pieces] if self.facts else pieces) + "\n"


def listed(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A paragraph of ``**name:** text``; a text may contain Markdown but no HTML.

    The first and the last row have a line each, and the rows between them share one. MLflow shows the first 100 pixels
    of a run's description, which are five lines, and fades the lower 60 of them: three lines are easy to read, a fourth
    and a fifth, into which they may wrap, hardly.
    """
    lines = [f"**{name}:** {' '.join(text.replace('<', '&lt;').split())}" for name, text in rows]
    if len(lines) > 3:
        lines[1:-1] = [" · ".join(lines[1:-1])]
    return "  \n".join(lines)


def tables(heading: Sequence[str], lines: Sequence[Sequence[str]], title: str, width: int) -> Iterator[Table]:
    """The table for a terminal: columns that do not fit follow below, beside the first one again; nothing is cut off.

    Columns of text, in which a cell begins with a letter or has a setting, are aligned to the left and wrapped between
    words where that saves a part, and within a word that does not fit beside the first column; those of numbers are
    aligned to the right. Parts are about equally wide.
    """
    columns = list(zip(heading, *lines, strict=True))
    parts = _parts(columns, width)
    if len(parts) > 1:
        parts = next(found for least in range(width + 1) if len(found := _parts(columns, least)) == len(parts))
    for part in parts:
        made = Table(
            title=escape(title) or None, title_justify="left", show_header=any(heading), box=None,
            padding=(0, GAP, 0, 0), pad_edge=False,
        )  # fmt: skip
        for column, own in zip(part, _widths(part, width), strict=True):
            text = _is_text(column)
            justify, overflow = ("left", "fold") if text else ("right", "ellipsis")
            made.add_column(escape(column[0]), justify=justify, overflow=overflow, no_wrap=not text, width=own)
        for line in zip(*(cells for _, *cells in part), strict=True):
            made.add_row(*map(escape, line))
        yield made
        title = ""


def _parts(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """The columns in parts of at most ``width`` where that is possible, each with the first column."""
    first, *others = columns
    parts: list[list[Column]] = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and sum(_least(each) + GAP for each in (*parts[-1], column)) - GAP > width:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """The width of each column: its longest cell where there is room, of long text what the others leave."""
    widths = [_least(column) for column in columns]
    if len(columns) == 2 and _is_text(columns[1]):
        widths[1] = min(widths[1], max(SHORTEST, width - widths[0] - GAP))
    room = max(0, width - sum(widths) - GAP * (len(widths) - 1))
    wanted = [_longest(column) - least for column, least in zip(columns, widths, strict=True)]
    for number, place in enumerate(sorted(range(len(widths)), key=wanted.__getitem__)):
        more = min(wanted[place], room // (len(widths) - number))
        widths[place] += more
        room -= more
    return widths


def _is_text(column: Column) -> bool:
    return any(cell[:1].isalpha() or "=" in cell for cell in column[1:])


def _longest(column: Column) -> int:
    return max(map(len, column))


def _least(column: Column) -> int:
    """The width of its longest word, if the column is text."""
    return max(len(word) for cell in column for word in cell.split() or [""]) if _is_text(column) else _longest(column)


def _cell(text: str) -> str:
    """``text`` that others may have written: links and pictures in it are shown as they are written."""
    for sign, shown in (("\\", "\\\\"), ("[", "\\["), ("|", "\\|"), ("<", "&lt;")):
        text = text.replace(sign, shown)
    return " ".join(text.split())
