"""Book streams: Ray Data reads, cleans and encodes books ahead of training, without shards.

The order of the books is a pure function of (seed, epoch) for any number of readers, and a stream can be resumed at any
book. A book is held out for validation by the hash of its id, as in shards. Duplicates are kept and dropped books are
only counted, because dropping duplicates and listing dropped books need shards.
"""

import hashlib
import json
import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import xxhash

from infra.errors import UserError
from pipeline.books.readers import DroppedBook, FileRange, RawBook
from pipeline.books.sources import Inventory, build_inventory
from pipeline.config import ReadingConfig, TokenizeConfig
from pipeline.encoding.tokenizer import read_tokenizer
from pipeline.job.executor import run_tasks
from pipeline.job.plan import Partition, is_one_book, make_partitions, split_hash
from pipeline.job.report import Stopwatch
from pipeline.job.task import read_or_drop, tokenize
from pipeline.shards import Split

PARTITIONS_PER_EXECUTION = 256
"""Number of partitions per execution of Ray Data, so that the first one does not wait until all are submitted."""
MAX_BUFFER_BYTES = 256_000_000
"""Maximum number of bytes of encoded books that are buffered before the readers pause."""
MAX_RETRIES = 2
"""Number of retries of a task whose process crashed."""
BYTES_PER_TOKEN = 4
"""Estimated bytes of text per token, used until books have been read."""


@dataclass(frozen=True)
class EncodedBook:
    """Book of a stream. Its last token is the end of text; a dropped book has no tokens."""

    partition: int
    """Index of the book's partition in the order of the epoch."""
    source: str
    book: str
    chars: int
    tokens: np.ndarray
    dropped: str | None = None
    """Reason why the book was dropped, as a label to count; None if it was kept."""
    drop_detail: str | None = None
    """Details of the reason; None if the book was kept."""
    node: str = ""
    """Machine that encoded the book ahead of training; empty if it was encoded in the process that uses it."""


class Stream:
    """Book stream of ``sources``; 1% of the books, and at least one if all ids are known, are held out."""

    partition_bytes = 4_000_000
    """Bytes of text per task; small tasks provide the first tokens soon."""
    val_fraction = 0.01
    """Fraction of the books that are held out for validation."""
    max_search_bytes = 64_000_000
    """Maximum number of bytes of text that are read to find the books held out for validation."""

    def __init__(self, sources: Sequence[str], seed: int, reading: ReadingConfig) -> None:
        self.seed = seed
        tokenizer = read_tokenizer(reading.tokenizer)
        self.tokenizer_sha256 = tokenizer.sha256
        self.settings = TokenizeConfig(
            tuple(sources), val_fraction=self.val_fraction, shard_size=self.partition_bytes, **asdict(reading)
        )
        if not tokenizer.is_gpt2:
            tokenizer.check_encoders(self.settings.encoder)
        self.inventory = build_inventory(sources)
        identity = self.settings.identity() | {"sources": self.inventory.summary()["sha256"]}
        identity_json = json.dumps([identity, self.tokenizer_sha256], sort_keys=True)
        self.fingerprint = hashlib.sha256(identity_json.encode()).hexdigest()
        self.settings = replace(self.settings, val_fraction=self._reachable_fraction())

    def _reachable_fraction(self) -> float:
        """Return :attr:`val_fraction`, or the larger fraction that holds out one book of a small collection.

        Only collections whose files are one book each are considered, because their ids are known.
        """
        files = self.inventory.files
        are_ids_known = all(is_one_book(FileRange(file, file.size), self.settings) and not file.split for file in files)
        if not are_ids_known or len(files) < 2:  # A single book is trained on.
            return self.val_fraction
        return max(self.val_fraction, math.nextafter(min(split_hash(file.id) for file in files), 1))

    def validation_books(self, tokens: int) -> list[EncodedBook]:
        """Return books for validation until they have ``tokens`` tokens or ``max_search_bytes`` bytes are read."""
        books: list[EncodedBook] = []
        searched_bytes = 0
        partitions = make_partitions(self.inventory, self.settings, self.tokenizer_sha256)
        for partition in sorted(partitions, key=lambda partition: partition.split != "val"):
            if partition.split == "train":
                continue
            for book in encoded_books(partition, "val"):
                books.append(book)
                tokens -= len(book.tokens)
                if tokens <= 0:
                    return books
            ranges = (file_range for file_range in partition.ranges if not is_one_book(file_range, partition.settings))
            searched_bytes += sum(file_range.size for file_range in ranges)
            if searched_bytes > self.max_search_bytes:
                break
        return books

    def read(self, epoch: int, partition: int = 0) -> Iterator[EncodedBook]:
        """Yield the training books in the order of ``epoch``, starting at its partition number ``partition``."""
        partitions = self.order_partitions(epoch)
        for start in range(partition, len(partitions), PARTITIONS_PER_EXECUTION):
            yield from _read_ahead(partitions[start : start + PARTITIONS_PER_EXECUTION])

    def order_partitions(self, epoch: int) -> list[Partition]:
        """Return the partitions of an epoch in shuffled order, made from shuffled files.

        Shuffling the files first puts neighbors on the disk into different partitions.
        """

        def random_key(name: str) -> int:
            return xxhash.xxh3_64_intdigest(f"{epoch}/{name}".encode(), seed=self.seed)

        files = sorted(self.inventory.files, key=lambda file: random_key(file.id))
        partitions = make_partitions(Inventory(files), self.settings, self.tokenizer_sha256)
        partitions.sort(key=lambda partition: random_key(str(partition.index)))
        return [replace(partition, index=index) for index, partition in enumerate(partitions)]


def encoded_books(partition: Partition, split: Split) -> Iterator[EncodedBook]:
    """Yield the books of ``partition`` that are in ``split``, including dropped ones.

    Unreadable books are in both splits, so that a reader without any book can report the reason.
    """
    settings = partition.settings
    for file_range in partition.ranges:
        if (partition.split or is_one_book(file_range, settings)) and partition.assign_split(
            file_range.file.id
        ) != split:
            continue
        for raw in read_or_drop(file_range, settings):
            if isinstance(raw, RawBook) and partition.assign_split(raw.id) != split:
                continue
            outcome = tokenize(raw, settings, partition.tokenizer, Stopwatch())
            if isinstance(outcome, DroppedBook):
                no_tokens = np.zeros(0, partition.tokenizer.dtype)
                yield EncodedBook(
                    partition.index, file_range.file.id, outcome.book, 0, no_tokens, outcome.reason, outcome.detail
                )
            else:
                book, tokens = outcome
                yield EncodedBook(partition.index, file_range.file.id, book.id, book.chars, tokens)


def _read_ahead(partitions: list[Partition]) -> Iterator[EncodedBook]:
    """Yield the training books of ``partitions`` in order, encoded by Ray Data tasks on free cores.

    Raises the ``UserError`` of a task, and a ``UserError`` if a book crashes the process of its task.
    """
    import ray.data
    import ray.exceptions

    options = ray.data.DataContext.get_current().execution_options
    options.resource_limits = options.resource_limits.copy(object_store_memory=MAX_BUFFER_BYTES)
    try:
        yield from run_tasks(_training_books, partitions, keeps_order=True, max_retries=MAX_RETRIES)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise UserError(
            f"A book of --stream crashed its reader {MAX_RETRIES + 1} times. Tokenize the same sources with "
            "'python -m pipeline.tokenize', which skips it, and train with --data."
        ) from error


def _training_books(partition: Partition) -> Iterator[EncodedBook]:
    return (replace(book, node=socket.gethostname()) for book in encoded_books(partition, "train"))
