"""The work of one task: read a piece's files, clean, encode, write its shards, and record what was done.

In: a ``Piece`` and the output folder. Out: a ``Record`` on disk, written last, which makes the piece done;
and how long each stage took. Nothing here knows of Ray.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infra.storage import write_json
from pipeline.books import Book, Dropped, clean
from pipeline.encoding import encode, verify
from pipeline.plan import Piece, split_of
from pipeline.reading import RawBook, Unreadable, read_books
from pipeline.shards import END_OF_TEXT, SPLITS, ShardInfo, ShardRow, Split, write_shard

PIECES = "pieces"
VERIFIED_PIECES = 8
"""One piece in this many has its first book encoded again by tiktoken, which is 15 times slower."""


@dataclass(frozen=True)
class Record:
    """What one piece became; the same for the same inputs and config, so it holds no times."""

    key: str
    shards: list[ShardInfo]
    books: list[tuple[str, str, int, int]]
    """Id, sha256, characters and tokens of each book kept."""
    dropped: list[Dropped]
    read_bytes: int
    verified_bytes: int

    def write(self, folder: Path, name: str) -> None:
        """Mark the piece as done."""
        (folder / PIECES).mkdir(parents=True, exist_ok=True)
        write_json(folder / PIECES / f"{name}.json", asdict(self))


def read_record(folder: Path, name: str) -> Record | None:
    """The record of a piece, or None where there is none that can be read."""
    try:
        values = json.loads((folder / PIECES / f"{name}.json").read_text(encoding="utf-8"))
        return Record(
            **values
            | {
                "shards": [ShardInfo(**shard) for shard in values["shards"]],
                "books": [tuple(book) for book in values["books"]],
                "dropped": [Dropped(**dropped) for dropped in values["dropped"]],
            }
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


@dataclass
class Stages:
    """Seconds spent by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time of the block to ``stage``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def do_piece(piece: Piece, folder: Path) -> dict[str, Any]:
    """Do the work of ``piece`` and return a small summary: its number, seconds by stage, bytes, tokens, books.

    Raises ``UserError`` when a source is gone, ``EncodingMismatch`` when tiktoken disagrees, ``OSError``
    when the folder cannot be written; the piece is then as good as not begun.
    """
    stages = Stages()
    rows: dict[Split, list[ShardRow]] = {split: [] for split in SPLITS}
    dropped: list[Dropped] = []
    read_bytes = verified = 0
    for raw in _reading(piece, stages):
        if isinstance(raw, Unreadable):
            dropped.append(Dropped(raw.id, "unreadable", raw.reason))
            continue
        read_bytes += len(raw.data)
        with stages.time("clean"):
            book = clean(raw)
        if isinstance(book, Dropped):
            dropped.append(book)
            continue
        with stages.time("encode"):
            ids = encode(book.text, piece.settings.encoder)
        if not verified and piece.index % VERIFIED_PIECES == 0:
            with stages.time("verify"):
                verified = verify(book.id, book.text, ids)
        rows[split_of(book.id, piece.settings.val_fraction)].append(_row(book, ids))
    with stages.time("write"):
        name = f"{piece.name}.arrow"
        shards = [write_shard(folder, f"{split}/{name}", split, rows[split]) for split in SPLITS if rows[split]]
        kept = [(row.book, row.sha256, row.chars, len(row.tokens)) for split in SPLITS for row in rows[split]]
        record = Record(piece.key(), shards, sorted(kept), dropped, read_bytes, verified)
        record.write(folder, piece.name)
    return {
        "piece": piece.index,
        "seconds": stages.seconds,
        "input_bytes": piece.size,
        "bytes": read_bytes,
        "books": len(kept),
        "tokens": sum(shard.tokens for shard in shards),
    }


def _reading(piece: Piece, stages: Stages) -> Iterator[RawBook | Unreadable]:
    """The piece's books, with the time that reading them takes."""
    for file in piece.files:
        books = read_books(file)
        while True:
            with stages.time("read"):
                book = next(books, None)
            if book is None:
                break
            yield book


def _row(book: Book, ids: np.ndarray) -> ShardRow:
    tokens = np.append(ids, np.uint16(END_OF_TEXT))
    return ShardRow(
        book.id, book.title, book.author, book.language, book.source, book.sha256, book.chars, tokens, book.released
    )
