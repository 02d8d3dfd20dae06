"""Dropping of duplicate books after all partitions are finished, because a task has only the books of its partition.

Of several books with the same text, one that is held out for validation is kept, so that its text is not trained on.
Otherwise the first one by id is kept. Books are not encoded again; a shard is rewritten with its remaining rows. Near
duplicates are dropped optionally, because libraries have several editions of a book that differ in a few words.
"""

from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa

from infra.storage.directory import StorageDir
from pipeline.books.readers import DroppedBook
from pipeline.job.partition_result import PartitionResult
from pipeline.shards import Shard, ShardInfo, write_batch

EXACT_DUPLICATE = "duplicate"
NEAR_DUPLICATE = "near duplicate"
Rank = tuple[bool, bool, bool, str]
"""Sort key of books with the same text; the first one is kept."""


def find_duplicates(results: dict[str, PartitionResult], rank: Callable[[str], Rank]) -> dict[str, DroppedBook]:
    """Return the books to drop by id, each with the book that it duplicates.

    Of several duplicates, the first by ``rank`` is kept. Near duplicates are only found among books with signatures.
    """
    texts = {book: sha256 for result in results.values() for book, sha256, *_ in result.books}
    original_by_text: dict[str, str] = {}
    duplicates: dict[str, DroppedBook] = {}
    for book in sorted(texts, key=rank):
        original = original_by_text.setdefault(texts[book], book)
        if original != book:
            duplicates[book] = DroppedBook(book, EXACT_DUPLICATE, f"same text as {original}")
    all_signatures = {book: signature for result in results.values() for book, signature in result.signatures.items()}
    if signatures := {
        book: all_signatures[book] for book in sorted(all_signatures, key=rank) if book not in duplicates
    }:
        from pipeline.job.similarity import find_near_duplicates  # Imported here, because few jobs need it.

        for book, (original, similarity) in find_near_duplicates(signatures).items():
            duplicates[book] = DroppedBook(
                book, NEAR_DUPLICATE, f"{similarity:.0%} of its phrases are also in {original}"
            )
    return duplicates


def drop_duplicates(
    out_dir: StorageDir, results: dict[str, PartitionResult], duplicates: dict[str, DroppedBook]
) -> dict[str, PartitionResult]:
    """Remove ``duplicates`` from shards and results; return the updated results, by partition name."""
    duplicates_by_partition = {
        name: {book for book, *_ in result.books if book in duplicates} for name, result in results.items()
    }
    affected = {name: {book: duplicates[book] for book in hit} for name, hit in duplicates_by_partition.items() if hit}
    with ThreadPoolExecutor() as pool:
        changed = dict(
            zip(
                affected,
                pool.map(lambda name: _remove_books(out_dir, results[name], affected[name]), affected),
                strict=True,
            )
        )
        list(pool.map(lambda name: changed[name].write(out_dir, name), changed))
    return results | changed


def _remove_books(out_dir: StorageDir, result: PartitionResult, dropped: dict[str, DroppedBook]) -> PartitionResult:
    """Remove the ``dropped`` books from the shards of ``result``, and return the updated result.

    A shard that becomes empty is deleted.
    """
    return replace(
        result,
        shards=[shard for info in result.shards if (shard := without_books(out_dir, info, dropped))],
        books=[book for book in result.books if book[0] not in dropped],
        dropped=result.dropped + [dropped[book] for book in sorted(dropped)],
        signatures={book: signature for book, signature in result.signatures.items() if book not in dropped},
        moved_books=[book for book in result.moved_books if book not in dropped],
    )


def without_books(out_dir: StorageDir, info: ShardInfo, books: Container[str]) -> ShardInfo | None:
    """Remove ``books`` from a shard and return the new shard; delete the shard and return None if it is empty."""
    batch = Shard(out_dir / info.path).batch
    remaining = batch.filter(pa.array([book not in books for book in batch.column("book").to_pylist()]))
    if remaining.num_rows == batch.num_rows:
        return info
    if remaining.num_rows:
        return write_batch(out_dir, info.path, info.split, remaining)
    out_dir.remove([info.path])
    return None
