"""What a run is asked to train on, known before torch is imported: where it lies and what it holds.

In: a config. Out: the same with whole paths; its stream of books, and the manifest of that, which is an estimate.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.shards import Manifest
from pipeline.stream import BYTES_PER_TOKEN, EncodedBook, Stream, whole_path
from train.config import TrainConfig


def absolute(config: TrainConfig) -> TrainConfig:
    """``config`` as workers need it, which run in a folder of Ray's: local sources by their whole paths."""
    if not config.stream:
        return replace(config, data=config.data.resolve())
    return replace(config, stream=tuple(whole_path(source) for source in config.stream))


def stream_of(config: TrainConfig) -> Stream:
    """The books that ``config`` names with ``--stream``. Raises ``UserError`` when there are none."""
    return Stream(config.stream, config.seed, config.reading)


def estimate(stream: Stream, book_tokens: float | None = None, held_out: Sequence[EncodedBook] = ()) -> Manifest:
    """What can be said of a stream: its fingerprint, and an epoch's totals as estimated by the size of its sources.

    ``book_tokens`` is the mean length of a book, by which books are estimated; else there are as many as files.
    """
    summary = stream.inventory.summary()
    tokens = max(1, summary["bytes"] // BYTES_PER_TOKEN)
    books = tokens / book_tokens if book_tokens else summary["files"]
    kept = [book for book in held_out if not book.dropped]
    val = {"books": len(kept), "tokens": sum(len(b.tokens) for b in kept), "chars": sum(b.chars for b in kept)}
    return Manifest(
        config=stream.settings.identity(),
        vocabulary_sha256=stream.vocabulary_sha256,
        shards=[],
        inputs=summary,
        report={},
        fingerprint=stream.fingerprint,
        splits={"train": {"books": round(books), "tokens": tokens}, "val": val},
    )
