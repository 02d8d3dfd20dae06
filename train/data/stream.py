"""A book stream as the data of a run; Ray Data reads and encodes the books while the model trains."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books.sources import to_absolute_source
from pipeline.encoding.tokenizer import Tokenizer, load_by_hash
from pipeline.shards import Manifest
from pipeline.stream import BYTES_PER_TOKEN, EncodedBook, Stream
from train.config import BatchConfig, Cycle
from train.data.source import DataSource
from train.data.stream_windows import StreamPosition, StreamWindows
from train.data.windows import VALIDATION_SEED, Windows, count_ids
from train.model_config import ModelSpec


class StreamSource(DataSource):
    """The books of a run with ``--stream``. Their sources are listed once, on the first access."""

    has_epoch = False
    reads_on_ray = True

    @cached_property
    def stream(self) -> Stream:
        """The book stream. Raises ``UserError`` if there are no books."""
        return Stream(self.dataset.stream, self.dataset.seed, self.dataset.reading)

    @cached_property
    def manifest(self) -> Manifest:
        return estimate_manifest(self.stream)

    def absolute(self) -> Self:
        tokenizer = self.dataset.reading.tokenizer and StorageDir.of(self.dataset.reading.tokenizer).address
        reading = replace(self.dataset.reading, tokenizer=tokenizer)
        sources = tuple(to_absolute_source(source) for source in self.dataset.stream)
        return type(self)(replace(self.dataset, stream=sources, reading=reading))

    def load_tokenizer(self, manifest: Manifest) -> Tokenizer:
        return load_by_hash(manifest.tokenizer_sha256, self.dataset.reading.tokenizer)

    def check_lengths(self, context_length: int, cycle: Cycle, manifest: Manifest) -> None:
        """Do nothing, because lengths are unknown until the books are read."""

    def check_enough_tokens(self, global_batch: int, context_length: int, manifest: Manifest) -> None:
        """Do nothing, because the books are read as often as needed."""

    def producing_run(self) -> None:
        """Return None, because books are not the output of a run."""

    def check_reachable(self, host: str) -> None:
        """Do nothing, because Ray reads the books on machines that can reach them."""

    def download(self) -> None:
        """Do nothing, because the books are read during the run."""

    def open(
        self,
        model: ModelSpec,
        batch: BatchConfig,
        cycle: Cycle,
        on_download: Callable[[Manifest, int], None] = lambda manifest, number: None,
    ) -> "StreamData":
        return StreamData(self.stream, model.context_length, batch, cycle)


class StreamData:
    """The opened data of a run with ``--stream``. Raises ``UserError`` if the validation books are too short."""

    first_batch_activity = "waiting for Ray Data to read and encode the first books"

    def __init__(self, stream: Stream, context_length: int, batch: BatchConfig, cycle: Cycle) -> None:
        length = context_length
        self.stream = stream
        self.windows = StreamWindows(self._read, length, stream.seed)
        self.validation = None
        self.epoch_windows = None
        self.books = self.tokens = self.chars = 0
        self.dropped: Counter[str] = Counter()
        self.encoded_on: Counter[str] = Counter()
        """Number of tokens encoded during the run, by machine."""
        held_out = []
        if cycle.validates:
            held_out = self.stream.validation_books(cycle.max_val_batches * batch.global_batch * length + 1)
            tokens = np.concatenate([book.tokens for book in held_out] or [np.zeros(0, np.uint16)])
            if len(tokens) <= length:
                raise UserError(
                    f"--stream: the validation books have {len(tokens):,} tokens, but a window needs {length + 1:,}"
                    f"{_format_first_drop(held_out)}. Add more books, or turn validation off with "
                    f"--cycle {cycle.train_part}+0."
                )
            self.validation = Windows([tokens], length, VALIDATION_SEED, split="val")
        self._held_out = held_out

    def _read(self, epoch: int, partition: int) -> Iterator[EncodedBook]:
        """Yield and count the stream's books that are not dropped. Raises ``UserError`` if all are dropped."""
        first_dropped: EncodedBook | None = None
        for book in self.stream.read(epoch, partition):
            if book.dropped:
                self.dropped[book.dropped] += 1
                first_dropped = first_dropped or book
                continue
            self.books += 1
            self.tokens += len(book.tokens)
            self.encoded_on[book.node] += len(book.tokens)
            self.chars += book.chars
            yield book
        if first_dropped and not self.books:
            raise UserError(
                f"--stream has no book that can be used for training{_format_first_drop([first_dropped])}. Use other "
                "books, or change the reading settings."
            )

    @property
    def tokenizer(self) -> Tokenizer:
        return load_by_hash(self.stream.tokenizer_sha256, self.stream.settings.tokenizer)

    @property
    def manifest(self) -> Manifest:
        """The stream's manifest, with the mean length of the books that were read so far."""
        return estimate_manifest(self.stream, self.tokens / self.books if self.books else None, self._held_out)

    def count_ids(self, vocab_size: int) -> np.ndarray:
        """Return how often each of ``vocab_size`` ids occurs in the current block."""
        return count_ids([self.windows.block], vocab_size)

    def summary(self) -> dict[str, Any]:
        """Return counts of the books that were read, including a last block that has not been trained on."""
        counts = {"books": self.books, "tokens": self.tokens, "chars": self.chars}
        return counts | {"dropped": dict(self.dropped), "encoded_on": dict(self.encoded_on)}

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return the start of the block that contains the window at ``position``."""
        return asdict(
            next(
                block_position
                for block_position in reversed(self.windows.block_positions)
                if block_position.position <= position
            )
        )

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Begin at the block that :meth:`state_dict` returned."""
        if state_dict:
            self.windows.load_state_dict(StreamPosition(**state_dict))


def estimate_manifest(
    stream: Stream, book_tokens: float | None = None, held_out: Sequence[EncodedBook] = ()
) -> Manifest:
    """Estimate the manifest of a stream: its fingerprint, and the totals of an epoch by the size of its sources.

    The number of books is estimated from ``book_tokens``, the mean length of a book. Without it, every file counts as
    one book.
    """
    summary = stream.inventory.summary()
    tokens = max(1, summary["bytes"] // BYTES_PER_TOKEN)
    books = tokens / book_tokens if book_tokens else summary["files"]
    usable_books = [book for book in held_out if not book.dropped]
    val = {
        "books": len(usable_books),
        "tokens": sum(len(b.tokens) for b in usable_books),
        "chars": sum(b.chars for b in usable_books),
    }
    return Manifest(
        config=stream.settings.identity(),
        tokenizer_sha256=stream.tokenizer_sha256,
        shards=[],
        inputs=summary,
        report={},
        fingerprint=stream.fingerprint,
        splits={"train": {"books": round(books), "tokens": tokens}, "val": val},
    )


def _format_first_drop(books: Sequence[EncodedBook]) -> str:
    """Format the first of ``books`` that was dropped and its reason, in brackets; empty if none was dropped."""
    return next((f" ({book.book} was dropped: {book.drop_detail})" for book in books if book.dropped), "")
