"""The work on one piece: read a piece's files, clean, encode, write its shards, and record the outcome."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from infra.errors import UserError, first_line
from infra.storage.directory import StorageDir
from pipeline.books.clean import Book, clean
from pipeline.books.filters import drop_reason
from pipeline.books.readers import Dropped, Part, RawBook, read_books
from pipeline.config import Reading, TokenizeConfig
from pipeline.encoding.tokenizer import Vocabulary
from pipeline.job.crash_guard import DEATHS, CrashGuard
from pipeline.job.partition_result import Record, record_file, reopen
from pipeline.job.plan import Piece
from pipeline.job.report import Stopwatch
from pipeline.shards import SPLITS, ShardRow, Split, shard_path, write_shard

T = TypeVar("T")

VERIFIED_PIECES = 8
"""In one of this many pieces, the first book is encoded again by the reference, which is 15 times slower."""


def or_dropped(book: str, work: Callable[[], T]) -> T | Dropped:
    """What ``work`` on one book returns; where it fails, that the book is left out, because the others can be kept.

    Raises ``UserError`` and ``OSError`` as ``work`` does: those are not the book's fault.
    """
    try:
        return work()
    except (UserError, OSError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as failure:  # noqa: BLE001 a panic of a library in Rust is no Exception
        return Dropped(book, "failed", f"{type(failure).__name__}: {first_line(failure)}")


def read(part: Part, settings: Reading) -> Iterator[RawBook | Dropped]:
    """The books of :func:`read_books`, and where that fails, which of them are left out."""
    books = read_books(part, settings)
    for number in count():
        rest = f"{part.file.id} from its book {number} on" if number else part.file.id
        book = or_dropped(rest, partial(next, books, None))
        if book is None:
            return
        yield book


def cleaned(raw: RawBook, settings: Reading) -> Book | Dropped:
    """The book in ``raw``, or why it is left out."""
    book = clean(raw, join=settings.join_lines)
    return drop_reason(book, settings) or book if isinstance(book, Book) else book


def tokenize(
    raw: RawBook | Dropped, settings: TokenizeConfig, vocabulary: Vocabulary, stages: Stopwatch
) -> tuple[Book, np.ndarray] | Dropped:
    """The cleaned book and its tokens, the last of them the end of text; or why it is left out."""
    if isinstance(raw, Dropped):
        return raw
    return or_dropped(raw.id, partial(_tokenize, raw, settings, vocabulary, stages))


def _tokenize(
    raw: RawBook, settings: TokenizeConfig, vocabulary: Vocabulary, stages: Stopwatch
) -> tuple[Book, np.ndarray] | Dropped:
    with stages.time("clean"):
        book = cleaned(raw, settings)
    if isinstance(book, Dropped):
        return book
    with stages.time("encode"):
        return book, np.append(vocabulary.encode(book.text, settings.encoder), vocabulary.dtype(vocabulary.end_of_text))


class PieceWriter:
    """One piece being done. Books go in one by one; shards are written when they are full, and at the end."""

    def __init__(self, piece: Piece, place: StorageDir, guard: CrashGuard) -> None:
        self.piece = piece
        self.vocabulary = piece.vocabulary
        self.place = place
        self.guard = guard
        self.stages = Stopwatch()
        self.rows: dict[Split, list[ShardRow]] = {split: [] for split in SPLITS}
        self.waiting = 0
        self.traits: Counter[str] = Counter()
        self.record = Record(piece.key(), [], [], [], self.traits, {}, [], read_bytes=0, replaced=0, verified_bytes=0)

    def run(self) -> Record:
        """Do the whole piece and mark it as done."""
        record = self.record
        for raw in self._reading():
            if isinstance(raw, RawBook):
                record.read_bytes += len(raw.data)
                if not self.guard.at(raw.id):
                    record.dropped.append(
                        Dropped(raw.id, "killed its worker", f"{DEATHS} times, while it was worked on")
                    )
                    continue
            self._add(raw)
            if self.waiting >= self.piece.settings.shard_size:
                self._write()
        if not self.guard.at("writing"):
            raise RuntimeError(f"the worker of piece {self.piece.name} died {DEATHS} times while it wrote the shard")
        self._write()
        record.books.sort()
        with self.stages.time("write"):
            record.write(self.place, self.piece.name)
        return record

    def _reading(self) -> Iterator[RawBook | Dropped]:
        """The piece's books, timed."""
        for part in self.piece.parts:
            books = read(part, self.piece.settings)
            for number in count():
                if not self.guard.at(f"reading {part.file.id} {part.start} {number}"):
                    yield Dropped(
                        part.file.id, "unreadable", f"reading book {number} of it killed the worker {DEATHS} times"
                    )
                    break
                with self.stages.time("read"):
                    book = next(books, None)
                if book is None:
                    break
                yield book

    def _add(self, raw: RawBook | Dropped) -> None:
        record = self.record
        outcome = tokenize(raw, self.piece.settings, self.vocabulary, self.stages)
        if not isinstance(outcome, Dropped):
            outcome = or_dropped(outcome[0].id, partial(self._checked, *outcome))
        if isinstance(outcome, Dropped):
            record.dropped.append(outcome)
            return
        book, tokens = outcome
        row = ShardRow(
            book.id, book.title, book.author, book.language, book.source, book.sha256, book.chars, tokens, book.released
        )
        self.rows[self.piece.split_of(book.id)].append(row)
        self.waiting += len(book.text)
        record.books.append((book.id, book.sha256, book.chars, len(tokens)))
        self.traits.update(book.traits)
        record.replaced += book.replaced
        record.doubtful += book.doubts
        record.removed = dict(Counter(record.removed) + Counter(book.removed))

    def _checked(self, book: Book, tokens: np.ndarray) -> tuple[Book, np.ndarray]:
        """The book as it is, compared with the reference if it is the piece's first, and its signature recorded."""
        if not self.record.verified_bytes and self.piece.index % VERIFIED_PIECES == 0:
            with self.stages.time("verify"):
                self.record.verified_bytes = self.vocabulary.verify(book.id, book.text, tokens[:-1])
        if self.piece.settings.duplicates == "near":
            from pipeline.job.similarity import signature  # an extra step that few runs take

            with self.stages.time("compare"):
                self.record.signatures[book.id] = signature(book.text)
        return book, tokens

    def _write(self) -> None:
        """Write the waiting books, one shard per split."""
        with self.stages.time("write"):
            for split in SPLITS:
                if self.rows[split]:
                    number = sum(shard.split == split for shard in self.record.shards)
                    path = shard_path(split, self.piece.name, number)
                    self.record.shards.append(write_shard(self.place, path, split, self.rows[split]))
                    self.rows[split] = []
        self.waiting = 0


def do_piece(piece: Piece, place: StorageDir, run: str) -> dict[str, Any]:
    """Do the work of ``piece`` and return a small summary: its number, seconds by stage, bytes, tokens, books.

    ``run`` names the running command, for the notes of :mod:`pipeline.job.crash_guard`. Raises ``UserError`` when a
    source is gone or ``place`` cannot be written, ``EncodingMismatch`` when the reference disagrees; the piece is
    then done again from its beginning.
    """
    if place.remote:
        # An earlier attempt may have recorded it before its worker died. The manifest is left: the driver has removed
        # an old one, and a machine that was cut off may be here only when others have finished the data set.
        place.remove([record_file(piece.name)])
    else:
        reopen(place, [piece.name])  # the manifest, too: this may be another disk than the driver's
    with CrashGuard(run, piece.name) as guard:
        work = PieceWriter(piece, place, guard)
        record = work.run()
    return {
        "piece": piece.index,
        "seconds": dict(work.stages),
        "input_bytes": piece.size,
        "bytes": record.read_bytes,
        "books": len(record.books),
        "tokens": sum(shard.tokens for shard in record.shards),
    }
