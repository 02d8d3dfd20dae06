"""Markdown for MLflow's pages, files and the terminal: tables whose cells may contain any text, and short lists."""

from collections.abc import Iterable, Sequence


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table. A cell may contain Markdown; what would end it, or begin a line or HTML, is escaped."""
    return [f"| {' | '.join(map(_cell, line))} |" for line in (heading, ["---"] * len(heading), *rows)]


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A paragraph with a line ``**name:** text`` per row; a text may contain Markdown but no HTML.

    MLflow shows the first 100 pixels of a run's description, which are five such lines, and folds the rest.
    """
    return "  \n".join(f"**{name}:** {' '.join(text.replace('<', '&lt;').split())}" for name, text in rows)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
