"""What can be known about a run's data before torch is imported: where it is and what it contains."""

from collections.abc import Sequence
from dataclasses import replace

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books.sources import absolute_source
from pipeline.shards import Manifest
from pipeline.stream import BYTES_PER_TOKEN, EncodedBook, Stream
from train.config import Cycle, DatasetConfig
from train.data.windows import refuse_short


def with_absolute_paths(dataset: DatasetConfig) -> DatasetConfig:
    """``dataset`` with absolute paths of local sources, because workers run in a folder of Ray's."""
    if not dataset.stream:
        return replace(dataset, data=StorageDir.of(dataset.data).address)
    tokenizer = dataset.reading.tokenizer and StorageDir.of(dataset.reading.tokenizer).address
    reading = replace(dataset.reading, tokenizer=tokenizer)
    return replace(dataset, stream=tuple(absolute_source(source) for source in dataset.stream), reading=reading)


def open_stream(dataset: DatasetConfig) -> Stream:
    """The books that ``config`` names with ``--stream``. Raises ``UserError`` when there are none."""
    return Stream(dataset.stream, dataset.seed, dataset.reading)


def estimate_manifest(
    stream: Stream, book_tokens: float | None = None, held_out: Sequence[EncodedBook] = ()
) -> Manifest:
    """The manifest of a stream: its fingerprint, and an epoch's totals as estimated from the size of its sources.

    ``book_tokens`` is the mean length of a book, from which the number of books is estimated; without it, every file
    counts as one.
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


def check_split_lengths(dataset: DatasetConfig, context_length: int, cycle: Cycle, manifest: Manifest) -> None:
    """Raise ``UserError`` when the shards of a split that ``config`` uses are shorter than a window."""
    if dataset.stream:
        return
    for split in ("train", "val") if cycle.val else ("train",):
        lengths = (shard.tokens for shard in manifest.shards if shard.split == split)
        refuse_short(split, lengths, context_length)


def check_enough_tokens(dataset: DatasetConfig, global_batch: int, context_length: int, manifest: Manifest) -> None:
    """Raise ``UserError`` when a step needs more tokens than the shards have."""
    available = manifest.splits["train"]["tokens"]
    available_windows = available // context_length
    if not dataset.stream and 0 < available_windows < global_batch:
        raise UserError(
            f"--global-batch {global_batch:,} needs {global_batch * context_length:,} tokens for one step, and "
            f"{dataset.data} has {available:,} for training: give at most {available_windows:,}."
        )
