"""Processing of one partition: read its files, clean and encode the books, write shards, and store the result."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from infra.errors import UserError, first_line
from infra.storage.directory import StorageDir
from pipeline.books.cleaning import Book, clean
from pipeline.books.filters import drop_reason
from pipeline.books.readers import DroppedBook, FileRange, RawBook, read_books
from pipeline.config import ReadingConfig, TokenizeConfig
from pipeline.encoding.tokenizer import Tokenizer
from pipeline.job.crash_guard import MAX_CRASHES, CrashGuard
from pipeline.job.partition_result import PartitionResult, result_file
from pipeline.job.plan import Partition
from pipeline.job.report import Stopwatch
from pipeline.shards import MANIFEST_FILE, SPLITS, ShardRow, Split, shard_path, write_shard

T = TypeVar("T")

VERIFICATION_INTERVAL = 8
"""Interval of the partitions whose first book is also encoded with the reference, which takes 15 times as long."""


def drop_on_error(book: str, work: Callable[[], T]) -> T | DroppedBook:
    """Return the result of ``work`` on one book, or an entry that drops the book if ``work`` fails.

    Raises ``UserError`` and ``OSError`` like ``work``, because the book does not cause them.
    """
    try:
        return work()
    except (UserError, OSError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as failure:  # noqa: BLE001 a panic of a Rust library is not an Exception
        return DroppedBook(book, "failed", f"{type(failure).__name__}: {first_line(failure)}")


def read_or_drop(file_range: FileRange, settings: ReadingConfig) -> Iterator[RawBook | DroppedBook]:
    """Yield the books of :func:`read_books` and, after an error, an entry that drops the unread books."""
    books = read_books(file_range, settings)
    for number in count():
        unread_books = f"{file_range.file.id} from its book {number} on" if number else file_range.file.id
        book = drop_on_error(unread_books, partial(next, books, None))
        if book is None:
            return
        yield book


def clean_and_filter(raw: RawBook, settings: ReadingConfig) -> Book | DroppedBook:
    """Return the cleaned book in ``raw``, or an entry with the reason why it is dropped."""
    book = clean(raw, join=settings.join_lines)
    return drop_reason(book, settings) or book if isinstance(book, Book) else book


def tokenize(
    raw: RawBook | DroppedBook, settings: TokenizeConfig, tokenizer: Tokenizer, stages: Stopwatch
) -> tuple[Book, np.ndarray] | DroppedBook:
    """Return (cleaned book, its tokens including the end of text), or an entry with the reason why it is dropped."""
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
    """Writer of the shards of one partition, one whenever enough text is buffered, and one at the end."""

    def __init__(self, partition: Partition, out_dir: StorageDir, guard: CrashGuard) -> None:
        self.partition = partition
        self.tokenizer = partition.tokenizer
        self.out_dir = out_dir
        self.guard = guard
        self.stages = Stopwatch()
        self.rows: dict[Split, list[ShardRow]] = {split: [] for split in SPLITS}
        self.buffered_bytes = 0
        self.labels: Counter[str] = Counter()
        self.result = PartitionResult(
            partition.key(), [], [], [], self.labels, {}, [], read_bytes=0, replaced=0, verified_bytes=0
        )

    def run(self) -> PartitionResult:
        """Process the whole partition and mark it as finished."""
        result = self.result
        for raw in self._read_books():
            if isinstance(raw, RawBook):
                result.read_bytes += len(raw.data)
                if not self.guard.enter(raw.id):
                    result.dropped.append(
                        DroppedBook(raw.id, "crashed the worker", f"{MAX_CRASHES} times while it was processed")
                    )
                    continue
            self._add(raw)
            if self.buffered_bytes >= self.partition.settings.shard_size:
                self._write()
        if not self.guard.enter("writing"):
            raise RuntimeError(
                f"The worker of partition {self.partition.name} crashed {MAX_CRASHES} times while it wrote the shard."
            )
        self._write()
        result.books.sort()
        with self.stages.time("write"):
            result.write(self.out_dir, self.partition.name)
        return result

    def _read_books(self) -> Iterator[RawBook | DroppedBook]:
        """Yield the books of the partition and measure the time of reading."""
        for file_range in self.partition.ranges:
            books = read_or_drop(file_range, self.partition.settings)
            for number in count():
                if not self.guard.enter(f"reading {file_range.file.id} {file_range.start} {number}"):
                    yield DroppedBook(
                        file_range.file.id,
                        "unreadable",
                        f"reading book {number} of this file crashed the worker {MAX_CRASHES} times",
                    )
                    break
                with self.stages.time("read"):
                    book = next(books, None)
                if book is None:
                    break
                yield book

    def _add(self, raw: RawBook | DroppedBook) -> None:
        result = self.result
        outcome = tokenize(raw, self.partition.settings, self.tokenizer, self.stages)
        if not isinstance(outcome, DroppedBook):
            outcome = drop_on_error(outcome[0].id, partial(self._verify_and_sign, *outcome))
        if isinstance(outcome, DroppedBook):
            result.dropped.append(outcome)
            return
        book, tokens = outcome
        row = ShardRow(
            book.id, book.title, book.author, book.language, book.source, book.sha256, book.chars, tokens, book.released
        )
        self.rows[self.partition.assign_split(book.id)].append(row)
        self.buffered_bytes += len(book.text)
        result.books.append((book.id, book.sha256, book.chars, len(tokens)))
        self.labels.update(book.labels)
        result.replaced += book.replaced_bytes
        result.flagged += book.flags
        result.removed = dict(Counter(result.removed) + Counter(book.removed))

    def _verify_and_sign(self, book: Book, tokens: np.ndarray) -> tuple[Book, np.ndarray]:
        """Compare the partition's first book with the reference, and store the book's MinHash signature if needed."""
        if not self.result.verified_bytes and self.partition.index % VERIFICATION_INTERVAL == 0:
            with self.stages.time("verify"):
                self.result.verified_bytes = self.tokenizer.verify(book.id, book.text, tokens[:-1])
        if self.partition.settings.duplicates == "drop-near":
            from pipeline.job.similarity import make_signature  # Imported here, because few jobs need it.

            with self.stages.time("compare"):
                self.result.signatures[book.id] = make_signature(book.text)
        return book, tokens

    def _write(self) -> None:
        """Write the buffered books, one shard per split."""
        with self.stages.time("write"):
            for split in SPLITS:
                if self.rows[split]:
                    number = sum(shard.split == split for shard in self.result.shards)
                    path = shard_path(split, self.partition.name, number)
                    self.result.shards.append(write_shard(self.out_dir, path, split, self.rows[split]))
                    self.rows[split] = []
        self.buffered_bytes = 0


def run_partition(partition: Partition, out_dir: StorageDir, run: str) -> dict[str, Any]:
    """Process ``partition`` and return a small summary: its number, seconds by stage, bytes, tokens, books.

    ``run`` is the id of the command for the notes of :mod:`pipeline.job.crash_guard`. Raises ``UserError`` if a source
    was deleted or ``out_dir`` cannot be written, and ``EncodingMismatch`` if the reference gives different ids. The
    next attempt then processes the whole partition again.
    """
    # An old manifest on this machine's own disk must be removed here. On shared storage the driver has removed it, and
    # a machine that lost its connection may reach this line after others have finished the data set.
    out_dir.remove_on_own_disk([MANIFEST_FILE])
    out_dir.remove([result_file(partition.name)])  # An earlier attempt may have written it before its worker crashed.
    with CrashGuard(run, partition.name) as guard:
        writer = PartitionWriter(partition, out_dir, guard)
        result = writer.run()
    return {
        "partition": partition.index,
        "seconds": dict(writer.stages),
        "input_bytes": partition.size,
        "bytes": result.read_bytes,
        "books": len(result.books),
        "tokens": sum(shard.tokens for shard in result.shards),
    }
