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
from pipeline.books.readers import DroppedBook, FileRange, RawBook, read_books
from pipeline.config import ReadingConfig, TokenizeConfig
from pipeline.encoding.tokenizer import Tokenizer
from pipeline.job.crash_guard import MAX_CRASHES, CrashGuard
from pipeline.job.partition_result import PartitionResult, record_file
from pipeline.job.plan import Partition
from pipeline.job.report import Stopwatch
from pipeline.shards import MANIFEST, SPLITS, ShardRow, Split, shard_path, write_shard

T = TypeVar("T")

VERIFIED_PIECES = 8
"""In one of this many pieces, the first book is encoded again by the reference, which is 15 times slower."""


def drop_on_error(book: str, work: Callable[[], T]) -> T | DroppedBook:
    """What ``work`` on one book returns; where it fails, that the book is left out, because the others can be kept.

    Raises ``UserError`` and ``OSError`` as ``work`` does: those are not the book's fault.
    """
    try:
        return work()
    except (UserError, OSError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as failure:  # noqa: BLE001 a panic of a library in Rust is no Exception
        return DroppedBook(book, "failed", f"{type(failure).__name__}: {first_line(failure)}")


def read_or_drop(part: FileRange, settings: ReadingConfig) -> Iterator[RawBook | DroppedBook]:
    """The books of :func:`read_books`, and where that fails, which of them are left out."""
    books = read_books(part, settings)
    for number in count():
        unread_part = f"{part.file.id} from its book {number} on" if number else part.file.id
        book = drop_on_error(unread_part, partial(next, books, None))
        if book is None:
            return
        yield book


def clean_and_filter(raw: RawBook, settings: ReadingConfig) -> Book | DroppedBook:
    """The book in ``raw``, or why it is left out."""
    book = clean(raw, join=settings.join_lines)
    return drop_reason(book, settings) or book if isinstance(book, Book) else book


def tokenize(
    raw: RawBook | DroppedBook, settings: TokenizeConfig, tokenizer: Tokenizer, stages: Stopwatch
) -> tuple[Book, np.ndarray] | DroppedBook:
    """The cleaned book and its tokens, the last of them the end of text; or why it is left out."""
    if isinstance(raw, DroppedBook):
        return raw
    return drop_on_error(raw.id, partial(_tokenize, raw, settings, tokenizer, stages))


def _tokenize(
    raw: RawBook, settings: TokenizeConfig, tokenizer: Tokenizer, stages: Stopwatch
) -> tuple[Book, np.ndarray] | DroppedBook:
    with stages.time("clean"):
        book = clean_and_filter(raw, settings)
    if isinstance(book, DroppedBook):
        return book
    with stages.time("encode"):
        return book, np.append(tokenizer.encode(book.text, settings.encoder), tokenizer.dtype(tokenizer.end_of_text))


class PartitionWriter:
    """One piece being done. Books go in one by one; shards are written when they are full, and at the end."""

    def __init__(self, partition: Partition, out_dir: StorageDir, guard: CrashGuard) -> None:
        self.partition = partition
        self.tokenizer = partition.tokenizer
        self.out_dir = out_dir
        self.guard = guard
        self.stages = Stopwatch()
        self.rows: dict[Split, list[ShardRow]] = {split: [] for split in SPLITS}
        self.buffered_bytes = 0
        self.traits: Counter[str] = Counter()
        self.record = PartitionResult(
            partition.key(), [], [], [], self.traits, {}, [], read_bytes=0, replaced=0, verified_bytes=0
        )

    def run(self) -> PartitionResult:
        """Do the whole piece and mark it as done."""
        record = self.record
        for raw in self._reading():
            if isinstance(raw, RawBook):
                record.read_bytes += len(raw.data)
                if not self.guard.enter(raw.id):
                    record.dropped.append(
                        DroppedBook(raw.id, "killed its worker", f"{MAX_CRASHES} times, while it was worked on")
                    )
                    continue
            self._add(raw)
            if self.buffered_bytes >= self.partition.settings.shard_size:
                self._write()
        if not self.guard.enter("writing"):
            raise RuntimeError(
                f"the worker of piece {self.partition.name} died {MAX_CRASHES} times while it wrote the shard"
            )
        self._write()
        record.books.sort()
        with self.stages.time("write"):
            record.write(self.out_dir, self.partition.name)
        return record

    def _reading(self) -> Iterator[RawBook | DroppedBook]:
        """The piece's books, timed."""
        for part in self.partition.parts:
            books = read_or_drop(part, self.partition.settings)
            for number in count():
                if not self.guard.enter(f"reading {part.file.id} {part.start} {number}"):
                    yield DroppedBook(
                        part.file.id, "unreadable", f"reading book {number} of it killed the worker {MAX_CRASHES} times"
                    )
                    break
                with self.stages.time("read"):
                    book = next(books, None)
                if book is None:
                    break
                yield book

    def _add(self, raw: RawBook | DroppedBook) -> None:
        record = self.record
        outcome = tokenize(raw, self.partition.settings, self.tokenizer, self.stages)
        if not isinstance(outcome, DroppedBook):
            outcome = drop_on_error(outcome[0].id, partial(self._verify_and_sign, *outcome))
        if isinstance(outcome, DroppedBook):
            record.dropped.append(outcome)
            return
        book, tokens = outcome
        row = ShardRow(
            book.id, book.title, book.author, book.language, book.source, book.sha256, book.chars, tokens, book.released
        )
        self.rows[self.partition.assign_split(book.id)].append(row)
        self.buffered_bytes += len(book.text)
        record.books.append((book.id, book.sha256, book.chars, len(tokens)))
        self.traits.update(book.traits)
        record.replaced += book.replaced
        record.doubtful += book.doubts
        record.removed = dict(Counter(record.removed) + Counter(book.removed))

    def _verify_and_sign(self, book: Book, tokens: np.ndarray) -> tuple[Book, np.ndarray]:
        """The book as it is, compared with the reference if it is the piece's first, and its signature recorded."""
        if not self.record.verified_bytes and self.partition.index % VERIFIED_PIECES == 0:
            with self.stages.time("verify"):
                self.record.verified_bytes = self.tokenizer.verify(book.id, book.text, tokens[:-1])
        if self.partition.settings.duplicates == "near":
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
                    path = shard_path(split, self.partition.name, number)
                    self.record.shards.append(write_shard(self.out_dir, path, split, self.rows[split]))
                    self.rows[split] = []
        self.buffered_bytes = 0


def do_piece(partition: Partition, out_dir: StorageDir, run: str) -> dict[str, Any]:
    """Do the work of ``partition`` and return a small summary: its number, seconds by stage, bytes, tokens, books.

    ``run`` names the running command, for the notes of :mod:`pipeline.job.crash_guard`. Raises ``UserError`` when a
    source is gone or ``out_dir`` cannot be written, ``EncodingMismatch`` when the reference disagrees; the piece is
    then done again from its beginning.
    """
    # The driver has removed an old manifest where it sees the same files, and a machine that was cut off may only be
    # here when others have finished the data set.
    out_dir.remove_on_own_disk([MANIFEST])
    out_dir.remove([record_file(partition.name)])  # An earlier attempt may have written it before its worker died.
    with CrashGuard(run, partition.name) as guard:
        work = PartitionWriter(partition, out_dir, guard)
        record = work.run()
    return {
        "piece": partition.index,
        "seconds": dict(work.stages),
        "input_bytes": partition.size,
        "bytes": record.read_bytes,
        "books": len(record.books),
        "tokens": sum(shard.tokens for shard in record.shards),
    }
