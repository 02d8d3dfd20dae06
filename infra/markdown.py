"""Markdown for MLflow's pages and for files: tables whose cells may contain any text."""

from collections.abc import Iterable, Sequence


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table. A cell may contain Markdown; what would end it, or begin a line or HTML, is escaped."""
    return [f"| {' | '.join(map(_cell, line))} |" for line in (heading, ["---"] * len(heading), *rows)]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
