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
from pipeline.books.readers import Dropped
from pipeline.job.partition_result import Record
from pipeline.shards import Shard, ShardInfo, write_batch

EXACT = "duplicate"
NEAR = "near duplicate"
Rank = tuple[bool, bool, bool, str]
"""What books of the same text are sorted by."""


def find_duplicates(records: dict[str, Record], rank: Callable[[str], Rank]) -> dict[str, Dropped]:
    """Books to leave out, by id, each with the book that it duplicates; near ones only if there are signatures.

    Of several, the first by ``rank`` is kept.
    """
    texts = {book: sha256 for record in records.values() for book, sha256, *_ in record.books}
    first: dict[str, str] = {}
    found: dict[str, Dropped] = {}
    for book in sorted(texts, key=rank):
        original = first.setdefault(texts[book], book)
        if original != book:
            found[book] = Dropped(book, EXACT, f"the same text as {original}")
    every = {book: signature for record in records.values() for book, signature in record.signatures.items()}
    if signatures := {book: every[book] for book in sorted(every, key=rank) if book not in found}:
        from pipeline.job.similarity import near_duplicates  # only runs that ask for it need its library

        for book, (original, similarity) in near_duplicates(signatures).items():
            found[book] = Dropped(book, NEAR, f"{similarity:.0%} of its phrases are those of {original}")
    return found


def drop_duplicates(place: StorageDir, records: dict[str, Record], duplicates: dict[str, Dropped]) -> dict[str, Record]:
    """Remove ``duplicates`` from shards and records; returns the updated records, by piece name."""
    hits = {name: {book for book, *_ in record.books if book in duplicates} for name, record in records.items()}
    affected = {name: {book: duplicates[book] for book in hit} for name, hit in hits.items() if hit}
    with ThreadPoolExecutor() as pool:
        changed = dict(
            zip(affected, pool.map(lambda name: _thin(place, records[name], affected[name]), affected), strict=True)
        )
        list(pool.map(lambda name: changed[name].write(place, name), changed))
    return records | changed


def _thin(place: StorageDir, record: Record, out: dict[str, Dropped]) -> Record:
    """``record`` and its shards without the books in ``out``. A shard without books is deleted."""
    return replace(
        record,
        shards=[left for info in record.shards if (left := thinned(place, info, out))],
        books=[book for book in record.books if book[0] not in out],
        dropped=record.dropped + [out[book] for book in sorted(out)],
        signatures={book: signature for book, signature in record.signatures.items() if book not in out},
        moved=[book for book in record.moved if book not in out],
    )


def thinned(place: StorageDir, info: ShardInfo, out: Container[str]) -> ShardInfo | None:
    """A shard after its books in ``out`` have been removed from it; None, and no file, where none is left."""
    batch = Shard(place / info.path).batch
    left = batch.filter(pa.array([book not in out for book in batch.column("book").to_pylist()]))
    if left.num_rows == batch.num_rows:
        return info
    if left.num_rows:
        return write_batch(place, info.path, info.split, left)
    place.remove([info.path])
    return None
