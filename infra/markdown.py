"""Markdown for MLflow's pages, files and the terminal: tables whose cells may contain any text, and short lists."""

from collections.abc import Iterable, Sequence


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table. A cell may contain Markdown; what would end it, or begin a line or HTML, is escaped."""
    return [f"| {' | '.join(map(_cell, line))} |" for line in (heading, ["---"] * len(heading), *rows)]


def plain(text: str) -> str:
    """``text`` that others may have written, for a cell: links and pictures in it are shown as they are written."""
    return text.replace("\\", "\\\\").replace("[", "\\[")


def facts(rows: Iterable[tuple[str, str]], *, apart: bool = False) -> str:
    """A paragraph of ``**name:** text``; a text may contain Markdown but no HTML.

    The first and the last row have a line each, and the rows between them share one; ``apart`` gives each row its own,
    for a terminal. MLflow shows the first 100 pixels of a run's description, which are five lines, and fades the lower
    60 of them: three lines are easy to read, a fourth and a fifth, into which they may wrap, hardly.
    """
    lines = [f"**{name}:** {' '.join(text.replace('<', '&lt;').split())}" for name, text in rows]
    if not apart and len(lines) > 3:
        lines[1:-1] = [" · ".join(lines[1:-1])]
    return "  \n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
