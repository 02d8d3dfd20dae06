"""Open a source file and yield the books in it, or the reason why it cannot be read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.command import UserError
from pipeline.config import SAMPLE
from pipeline.sources import SourceFile


@dataclass(frozen=True)
class RawBook:
    """A book as its source holds it."""

    id: str
    source: str
    data: bytes
    title: str | None = None
    author: str | None = None
    language: str | None = None


@dataclass(frozen=True)
class Unreadable:
    """A file, or a place in one, that gave no book."""

    id: str
    reason: str


def read_books(file: SourceFile) -> Iterator[RawBook | Unreadable]:
    """The books of ``file`` in a fixed order.

    Raises ``UserError`` when the file is gone: that is a source that vanished, not a bad book, and
    quarantining what a lost disk held would call the data set finished without it.
    """
    try:
        if file.id == SAMPLE:
            yield from _sample(Path(file.uri))
        else:
            yield RawBook(file.id, file.id, Path(file.uri).read_bytes())
    except FileNotFoundError as gone:
        raise UserError(
            f"{file.uri} was there when the work was planned and is gone: put it back, or run the same command "
            "again to go on without it."
        ) from gone
    except PermissionError as refused:
        yield Unreadable(file.id, f"unreadable: {refused.strerror}")


def _sample(path: Path) -> Iterator[RawBook]:
    """The Bible's books in their order: one line a verse, chapters set apart by an empty line and a heading."""
    book, chapter, lines = "", 0, []
    with path.open(encoding="utf-8") as file:
        for verse in map(json.loads, file):
            if verse["book"] != book:
                if lines:
                    yield _sample_book(book, lines)
                book, chapter, lines = verse["book"], 0, [verse["book"], ""]
            if verse["chapter"] != chapter:
                chapter = verse["chapter"]
                lines += ["", f"Chapter {chapter}", ""]
            lines.append(verse["text"])
    if lines:
        yield _sample_book(book, lines)


def _sample_book(name: str, lines: list[str]) -> RawBook:
    text = "\n".join(lines) + "\n"
    return RawBook(f"{SAMPLE}/{name}", SAMPLE, text.encode(), title=name, author="King James Version", language="en")
