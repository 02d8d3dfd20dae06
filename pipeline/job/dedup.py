"""Drop duplicate books once all pieces are done, because no task sees the books of another.

Of several, one that is held out for validation is kept, so that its text is not trained on, else the first by id.
Nothing is encoded again: a shard is written again with its other rows. Near duplicates are found, where that is asked
for, because libraries hold a book in several editions that differ in a few words, which an exact comparison would all
keep.
"""

from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa

from infra.storage.directory import StorageDir
from pipeline.books.readers import DroppedBook
from pipeline.job.partition_result import PartitionResult
from pipeline.shards import Shard, ShardInfo, write_batch

EXACT = "duplicate"
NEAR = "near duplicate"
Rank = tuple[bool, bool, bool, str]
"""What books of the same text are sorted by."""


def find_duplicates(records: dict[str, PartitionResult], rank: Callable[[str], Rank]) -> dict[str, DroppedBook]:
    """Books to leave out, by id, each with the book that it duplicates; near ones only if there are signatures.

    Of several, the first by ``rank`` is kept.
    """
    texts = {book: sha256 for record in records.values() for book, sha256, *_ in record.books}
    first: dict[str, str] = {}
    duplicates: dict[str, DroppedBook] = {}
    for book in sorted(texts, key=rank):
        original = first.setdefault(texts[book], book)
        if original != book:
            duplicates[book] = DroppedBook(book, EXACT, f"the same text as {original}")
    every = {book: signature for record in records.values() for book, signature in record.signatures.items()}
    if signatures := {book: every[book] for book in sorted(every, key=rank) if book not in duplicates}:
        from pipeline.job.similarity import near_duplicates  # only runs that ask for it need its library

        for book, (original, similarity) in near_duplicates(signatures).items():
            duplicates[book] = DroppedBook(book, NEAR, f"{similarity:.0%} of its phrases are those of {original}")
    return duplicates


def drop_duplicates(
    out_dir: StorageDir, records: dict[str, PartitionResult], duplicates: dict[str, DroppedBook]
) -> dict[str, PartitionResult]:
    """Remove ``duplicates`` from shards and records; returns the updated records, by piece name."""
    hits = {name: {book for book, *_ in record.books if book in duplicates} for name, record in records.items()}
    affected = {name: {book: duplicates[book] for book in hit} for name, hit in hits.items() if hit}
    with ThreadPoolExecutor() as pool:
        changed = dict(
            zip(
                affected,
                pool.map(lambda name: _remove_books(out_dir, records[name], affected[name]), affected),
                strict=True,
            )
        )
        list(pool.map(lambda name: changed[name].write(out_dir, name), changed))
    return records | changed


def _remove_books(out_dir: StorageDir, record: PartitionResult, out: dict[str, DroppedBook]) -> PartitionResult:
    """``record`` and its shards without the books in ``out``. A shard without books is deleted."""
    return replace(
        record,
        shards=[left for info in record.shards if (left := without_books(out_dir, info, out))],
        books=[book for book in record.books if book[0] not in out],
        dropped=record.dropped + [out[book] for book in sorted(out)],
        signatures={book: signature for book, signature in record.signatures.items() if book not in out},
        moved=[book for book in record.moved if book not in out],
    )


def without_books(out_dir: StorageDir, info: ShardInfo, out: Container[str]) -> ShardInfo | None:
    """A shard after its books in ``out`` have been removed from it; None, and no file, where none is left."""
    batch = Shard(out_dir / info.path).batch
    left = batch.filter(pa.array([book not in out for book in batch.column("book").to_pylist()]))
    if left.num_rows == batch.num_rows:
        return info
    if left.num_rows:
        return write_batch(out_dir, info.path, info.split, left)
    out_dir.remove([info.path])
    return None
