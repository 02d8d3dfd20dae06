"""The work of one task: read a piece's files, clean, encode, write its shards, and record what was done.

In: a ``Piece`` and the output folder. Out: a ``Record`` on disk, written last, which makes the piece done;
and how long each stage took. Nothing here knows of Ray.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.books.clean import Book, Dropped, clean
from pipeline.books.filters import refuse
from pipeline.books.readers import RawBook, Unreadable, read_books
from pipeline.encoding import encode, verify
from pipeline.job.crash_guard import DEATHS, Witness
from pipeline.job.plan import Piece, split_of
from pipeline.job.record import Record, reopen
from pipeline.shards import END_OF_TEXT, SPLITS, ShardInfo, ShardRow, Split, write_shard

VERIFIED_PIECES = 8
"""One piece in this many has its first book encoded again by tiktoken, which is 15 times slower."""


class Stages:
    """Seconds spent by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time of the block to ``stage``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Work:
    """One piece being done. Books go in one by one; shards are written when they are full, and at the end."""

    def __init__(self, piece: Piece, folder: Path, witness: Witness) -> None:
        self.piece = piece
        self.folder = folder
        self.witness = witness
        self.stages = Stages()
        self.rows: dict[Split, list[ShardRow]] = {split: [] for split in SPLITS}
        self.waiting = 0
        self.shards: list[ShardInfo] = []
        self.books: list[tuple[str, str, int, int]] = []
        self.dropped: list[Dropped] = []
        self.traits: Counter[str] = Counter()
        self.signatures: dict[str, list[int]] = {}
        self.read_bytes = self.replaced = self.verified = 0

    def run(self) -> Record:
        """Do the whole piece and mark it as done."""
        for raw in self._reading():
            if isinstance(raw, Unreadable):
                self.dropped.append(Dropped(raw.id, "unreadable", raw.reason))
                continue
            self.read_bytes += len(raw.data)
            if not self.witness.at(raw.id):
                self.dropped.append(Dropped(raw.id, "killed its worker", f"{DEATHS} times, while it was worked on"))
                continue
            self._take(raw)
            if self.waiting >= self.piece.settings.shard_size:
                self._write()
        if not self.witness.at("writing"):
            raise RuntimeError(f"the worker of piece {self.piece.name} died {DEATHS} times while it wrote the shard")
        self._write()
        record = Record(
            self.piece.key(), self.shards, sorted(self.books), self.dropped, dict(sorted(self.traits.items())),
            self.signatures, self.read_bytes, self.replaced, self.verified,
        )  # fmt: skip
        with self.stages.time("write"):
            record.write(self.folder, self.piece.name)
        return record

    def _reading(self) -> Iterator[RawBook | Unreadable]:
        """The piece's books, with the time that reading them takes."""
        for part in self.piece.parts:
            books = read_books(part, self.piece.settings)
            for number in count():
                if not self.witness.at(f"reading {part.file.id} {part.start} {number}"):
                    yield Unreadable(part.file.id, f"reading book {number} of it killed the worker {DEATHS} times")
                    break
                with self.stages.time("read"):
                    book = next(books, None)
                if book is None:
                    break
                yield book

    def _take(self, raw: RawBook) -> None:
        settings = self.piece.settings
        with self.stages.time("clean"):
            book = clean(raw, join=settings.join_lines)
            refused = book if isinstance(book, Dropped) else refuse(book, settings)
        if isinstance(book, Dropped) or refused:
            assert isinstance(refused, Dropped)
            self.dropped.append(refused)
            return
        with self.stages.time("encode"):
            ids = encode(book.text, settings.encoder)
        if not self.verified and self.piece.index % VERIFIED_PIECES == 0:
            with self.stages.time("verify"):
                self.verified = verify(book.id, book.text, ids)
        if settings.duplicates == "near":
            from pipeline.job.similarity import signature  # an extra step that few runs take

            with self.stages.time("compare"):
                self.signatures[book.id] = signature(book.text)
        row = _row(book, ids)
        self.rows[split_of(book.id, settings.val_fraction)].append(row)
        self.waiting += len(book.text)
        self.books.append((book.id, book.sha256, book.chars, len(row.tokens)))
        self.traits.update(book.traits)
        self.replaced += book.replaced

    def _write(self) -> None:
        """Write what waits as one shard a split."""
        with self.stages.time("write"):
            for split in SPLITS:
                if self.rows[split]:
                    number = sum(shard.split == split for shard in self.shards)
                    path = f"{split}/{self.piece.name}-{number:03d}.arrow"
                    self.shards.append(write_shard(self.folder, path, split, self.rows[split]))
                    self.rows[split] = []
        self.waiting = 0


def do_piece(piece: Piece, folder: Path, run: str) -> dict[str, Any]:
    """Do the work of ``piece`` and return a small summary: its number, seconds by stage, bytes, tokens, books.

    ``run`` names the command's run, for the notes of :mod:`pipeline.job.crash_guard`. Raises ``UserError`` when a
    source is gone or the folder cannot be written, ``EncodingMismatch`` when tiktoken disagrees; the piece is
    then as good as not begun.
    """
    reopen(folder, [piece.name])  # which is not the command's own where a worker's --out is on another disk
    with Witness(run, piece.name) as witness:
        work = Work(piece, folder, witness)
        record = work.run()
    return {
        "piece": piece.index,
        "seconds": work.stages.seconds,
        "input_bytes": piece.size,
        "bytes": record.read_bytes,
        "books": len(record.books),
        "tokens": sum(shard.tokens for shard in record.shards),
    }


def _row(book: Book, ids: np.ndarray) -> ShardRow:
    tokens = np.append(ids, np.uint16(END_OF_TEXT))
    return ShardRow(
        book.id, book.title, book.author, book.language, book.source, book.sha256, book.chars, tokens, book.released
    )
