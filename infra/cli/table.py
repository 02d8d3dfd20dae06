"""Reports of commands: summary fields, paragraphs and tables, for the terminal and as Markdown."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table as RichTable

from infra.cli.console import console
from infra.facts import Fact

COLUMN_GAP = 2
"""Number of spaces between two columns."""

MIN_WRAP_WIDTH = 10
"""Minimum width of a wrapped column in characters, however narrow the terminal is."""

Column = Sequence[str]
"""A heading, followed by the cells below it."""


@dataclass(frozen=True)
class Table:
    """Table of a report, with headings and cells of plain text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self) -> None:
        """Print the table, split into as many parts as the terminal's width requires."""
        for table in split_table(self.columns, self.rows, self.title, console.width):
            console.print(table)

    def markdown(self) -> str:
        """Return the title and the table as Markdown.

        Cells are escaped, so that they cannot end the table or contain links or HTML.
        """
        rows = (self.columns, ["---"] * len(self.columns), *self.rows)
        lines = [f"| {' | '.join(map(_format_cell, row))} |" for row in rows]
        return "\n".join([f"#### {self.title}", "", *lines] if self.title else lines)


@dataclass(frozen=True)
class Report:
    """Results of a command: the summary and the sections are printed, and everything is written to ``summary.md`` and
    MLflow."""

    summary: Sequence[tuple[str, str]]
    """Most important results as (name, text), the next step last. A text may contain Markdown."""
    sections: Sequence[str | Table] = ()
    """Paragraphs in Markdown, and tables."""
    details: Sequence[Fact] = ()
    """Quantities that become metrics without being printed or written."""
    appendix: Sequence[str | Table] = ()
    """Sections that are not printed on the terminal."""

    def metrics(self) -> dict[str, float]:
        """Return the report's quantities by the names of their MLflow metrics."""
        tables = [section for section in (*self.sections, *self.appendix) if isinstance(section, Table)]
        cells = (cell for table in tables for row in table.rows for cell in row)
        return dict(Fact.joined(*(text for _, text in self.summary), *cells, *self.details).metrics)

    def show(self) -> None:
        """Print the sections, and then the summary, which remains visible at the bottom of the terminal."""
        for section in self.sections:
            if isinstance(section, Table):
                section.show()
            else:
                console.print_paragraph(section)
            console.print()
        width = max((len(name) for name, _ in self.summary), default=0)
        for name, text in self.summary:
            console.print(f"[bold]{escape(name):{width}}[/bold]  {escape(text.replace('`', ''))}")

    def markdown(self) -> str:
        """Return the report as Markdown: the summary first, then the sections and the appendix."""
        all_sections = (*self.sections, *self.appendix)
        sections = [section.markdown() if isinstance(section, Table) else section for section in all_sections]
        return "\n\n".join([format_summary(self.summary), *sections] if self.summary else sections) + "\n"


def bullet_list(sentences: Iterable[str]) -> str:
    """Return a bullet list in Markdown."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def format_summary(rows: Sequence[tuple[str, str]]) -> str:
    """Return a Markdown paragraph of ``**name:** text``; a text may contain Markdown but no HTML.

    The first and the last row each have a line, and the other rows share one. MLflow shows only the first 100 pixels of
    a run's description, which are five lines, and fades the last two.
    """
    lines = [f"**{name}:** {' '.join(text.replace('<', '&lt;').split())}" for name, text in rows]
    if len(lines) > 3:
        lines[1:-1] = [" · ".join(lines[1:-1])]
    return "  \n".join(lines)


def split_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, width: int) -> Iterator[RichTable]:
    """Yield the table for a terminal of ``width`` characters, split into parts if its columns do not fit.

    Each part repeats the first column, and all parts have similar widths.

    - Columns of text, in which a cell begins with a letter or contains "=", are aligned to the left. They are wrapped
      between words if that saves a part, and within a word that does not fit beside the first column.
    - Columns of numbers are aligned to the right. Only their heading is wrapped, so that numbers stay complete.
    """
    cells_by_column = list(zip(columns, *rows, strict=True))
    parts = _split_columns(cells_by_column, width)
    if len(parts) > 1:
        splits = (_split_columns(cells_by_column, narrower) for narrower in range(width + 1))
        parts = next(split for split in splits if len(split) == len(parts))
    for part in parts:
        table = RichTable(
            title=escape(title) or None, title_justify="left", show_header=any(columns), box=None,
            padding=(0, COLUMN_GAP, 0, 0), pad_edge=False,
        )  # fmt: skip
        for column, column_width in zip(part, _compute_widths(part, width), strict=True):
            is_text = _is_text(column)
            justify, overflow = ("left", "fold") if is_text else ("right", "ellipsis")
            label = "\n".join(textwrap.wrap(column[0], column_width))
            table.add_column(escape(label), justify=justify, overflow=overflow, no_wrap=not is_text, width=column_width)
        for line in zip(*(cells for _, *cells in part), strict=True):
            table.add_row(*map(escape, line))
        yield table
        title = ""


def _split_columns(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Return the columns in parts of at most ``width`` characters if possible, each with the first column."""
    first_column, *remaining = columns
    parts: list[list[Column]] = [[first_column]]
    for column in remaining:
        if (
            len(parts[-1]) > 1
            and sum(_min_width(each) + COLUMN_GAP for each in (*parts[-1], column)) - COLUMN_GAP > width
        ):
            parts.append([first_column])
        parts[-1].append(column)
    return parts


def _compute_widths(columns: Sequence[Column], width: int) -> list[int]:
    """Return the width of each column in characters: its longest cell if there is space, else an equal share of it."""
    widths = [_min_width(column) for column in columns]
    if len(columns) == 2 and _is_text(columns[1]):
        widths[1] = min(widths[1], max(MIN_WRAP_WIDTH, width - widths[0] - COLUMN_GAP))
    space = max(0, width - sum(widths) - COLUMN_GAP * (len(widths) - 1))
    missing = [_max_width(column) - minimum for column, minimum in zip(columns, widths, strict=True)]
    for number, index in enumerate(sorted(range(len(widths)), key=missing.__getitem__)):
        extra = min(missing[index], space // (len(widths) - number))
        widths[index] += extra
        space -= extra
    return widths


def _is_text(column: Column) -> bool:
    return any(cell[:1].isalpha() or "=" in cell for cell in column[1:])


def _max_width(column: Column) -> int:
    return max(map(len, column))


def _min_width(column: Column) -> int:
    """Return the width of the longest word or, for numbers, of the longest cell or word of the heading."""
    heading, *cells = column
    words = [word for text in (column if _is_text(column) else [heading]) for word in text.split()]
    return max(map(len, [*words, *([] if _is_text(column) else cells)]), default=0)


def _format_cell(text: str) -> str:
    """Return ``text`` from any source as a Markdown cell; links, images and HTML in it are escaped."""
    for character, escaped in (("\\", "\\\\"), ("[", "\\["), ("|", "\\|"), ("<", "&lt;")):
        text = text.replace(character, escaped)
    return " ".join(text.split())
