"""Books as a stream of tokens, without shards: Ray Data reads, cleans and encodes them ahead of training.

Their order is a pure function of (seed, epoch) at any number of readers, and can be resumed anywhere. A book is
held out for validation by the hash of its id, as in shards. Duplicates are kept, and dropped books are counted
without a quarantine file: both need shards.
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

PIECE = 4_000_000
"""Bytes of text per task: few, so that the first tokens arrive soon."""
PARTITIONS_PER_EXECUTION = 256
"""Pieces per execution of Ray Data, so that the first does not wait for all of a large corpus to be submitted."""
MAX_BUFFER_BYTES = 256_000_000
"""Bytes of encoded books that may be buffered before the readers pause."""
MAX_RETRIES = 2
"""Retries of a task whose process died."""
VAL_FRACTION = 0.01
"""Share of the books held out for validation."""
MAX_SEARCH_BYTES = 64_000_000
"""Most bytes of text read to find the books held out for validation."""
BYTES_PER_TOKEN = 4
"""An estimate, until books have been read."""


@dataclass(frozen=True)
class EncodedBook:
    """A book of the stream; its last token is the end of text. Without tokens if it was ``dropped``."""

    partition: int
    """Its place in the epoch's order of pieces."""
    source: str
    book: str
    chars: int
    tokens: np.ndarray
    dropped: str | None = None
    """Why it was left out, as a label to count."""
    drop_detail: str | None = None
    """The reason in full."""
    node: str = ""
    """The machine that encoded it ahead of training; empty for one that was encoded where it is used."""


class Stream:
    """The books of ``sources``; 1% of them, and at least one where all are known, are held out for validation."""

    def __init__(self, sources: Sequence[str], seed: int, reading: ReadingConfig) -> None:
        self.seed = seed
        tokenizer = read_tokenizer(reading.tokenizer)
        self.tokenizer_sha256 = tokenizer.sha256
        self.settings = TokenizeConfig(tuple(sources), val_fraction=VAL_FRACTION, shard_size=PIECE, **asdict(reading))
        if not tokenizer.is_gpt2:
            tokenizer.check_encoders(self.settings.encoder)
        self.inventory = build_inventory(sources)
        identity = self.settings.identity() | {"sources": self.inventory.summary()["sha256"]}
        everything = json.dumps([identity, self.tokenizer_sha256], sort_keys=True)
        self.fingerprint = hashlib.sha256(everything.encode()).hexdigest()
        self.settings = replace(self.settings, val_fraction=self._reachable_fraction())

    def _reachable_fraction(self) -> float:
        """``VAL_FRACTION``, raised to take one book where a small collection has none below it.

        Only for collections whose books are all known beforehand, one a file; others are large.
        """
        files = self.inventory.files
        known = all(is_one_book(FileRange(file, file.size), self.settings) and not file.split for file in files)
        if not known or len(files) < 2:  # a single book is there to train on
            return VAL_FRACTION
        return max(VAL_FRACTION, math.nextafter(min(split_hash(file.id) for file in files), 1))

    def validation_books(self, tokens: int) -> list[EncodedBook]:
        """Books for validation, by id, until they have ``tokens`` tokens or ``MAX_SEARCH_BYTES`` bytes have been
        read."""
        books: list[EncodedBook] = []
        searched = 0
        partitions = make_partitions(self.inventory, self.settings, self.tokenizer_sha256)
        for partition in sorted(partitions, key=lambda piece: piece.split != "val"):
            if partition.split == "train":
                continue
            for book in encoded_books(partition, "val"):
                books.append(book)
                tokens -= len(book.tokens)
                if tokens <= 0:
                    return books
            searched += sum(part.size for part in partition.parts if not is_one_book(part, partition.settings))
            if searched > MAX_SEARCH_BYTES:
                break
        return books

    def read(self, epoch: int, partition: int = 0) -> Iterator[EncodedBook]:
        """The books for training in the order of ``epoch``, starting at its piece number ``partition``."""
        partitions = self.order(epoch)
        for first in range(partition, len(partitions), PARTITIONS_PER_EXECUTION):
            yield from _read_ahead(partitions[first : first + PARTITIONS_PER_EXECUTION])

    def order(self, epoch: int) -> list[Partition]:
        """The pieces of an epoch: files are shuffled, which separates neighbours on disk, then the pieces."""

        def chance(name: str) -> int:
            return xxhash.xxh3_64_intdigest(f"{epoch}/{name}".encode(), seed=self.seed)

        files = sorted(self.inventory.files, key=lambda file: chance(file.id))
        partitions = make_partitions(Inventory(files), self.settings, self.tokenizer_sha256)
        partitions.sort(key=lambda piece: chance(str(piece.index)))
        return [replace(partition, index=index) for index, partition in enumerate(partitions)]


def encoded_books(partition: Partition, split: Split) -> Iterator[EncodedBook]:
    """The books of ``partition`` that are in ``split``, also those that were dropped.

    What cannot be read is in both splits, so that a reader that finds no book at all can say why.
    """
    settings = partition.settings
    for part in partition.parts:
        if (partition.split or is_one_book(part, settings)) and partition.assign_split(part.file.id) != split:
            continue
        for raw in read_or_drop(part, settings):
            if isinstance(raw, RawBook) and partition.assign_split(raw.id) != split:
                continue
            outcome = tokenize(raw, settings, partition.tokenizer, Stopwatch())
            if isinstance(outcome, DroppedBook):
                nothing = np.zeros(0, partition.tokenizer.dtype)
                yield EncodedBook(
                    partition.index, part.file.id, outcome.book, 0, nothing, outcome.reason, outcome.detail
                )
            else:
                book, tokens = outcome
                yield EncodedBook(partition.index, part.file.id, book.id, book.chars, tokens)


def _read_ahead(partitions: list[Partition]) -> Iterator[EncodedBook]:
    """The training books of ``partitions`` in their order, encoded by tasks of Ray Data on free cores.

    Raises ``UserError`` as a task raised it, and when a book kills the task's process.
    """
    import ray.data
    import ray.exceptions

    options = ray.data.DataContext.get_current().execution_options
    options.resource_limits = options.resource_limits.copy(object_store_memory=MAX_BUFFER_BYTES)
    try:
        yield from run_tasks(_training_books, partitions, ordered=True, max_retries=MAX_RETRIES)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as death:
        raise UserError(
            f"a book of --stream killed the process that read it {MAX_RETRIES + 1} times: 'python -m "
            "pipeline.tokenize' "
            "with the same sources finds it and leaves it out; then give --data."
        ) from death


def _training_books(partition: Partition) -> Iterator[EncodedBook]:
    return (replace(book, node=socket.gethostname()) for book in encoded_books(partition, "train"))
