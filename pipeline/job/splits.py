"""Fill both splits of a small data set, once all pieces are done and duplicates dropped.

The hash of its id puts a book into its split (:func:`pipeline.job.plan.split_of`), which of few books may take none or
all. Then one book is moved: the nearest to the share. Of all books those count first that are files of their own, so
that another kind of source beside them does not change the choice. What was held out in this way is remembered by id
and text in the output's settings, and held out again whatever else the data set is made from later.
"""

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa

from infra.storage_dir import StorageDir
from pipeline.job.dedup import thinned
from pipeline.job.plan import Job, is_one_book, position_of, split_of
from pipeline.job.record import Record
from pipeline.shards import Shard, Split, shard_path, write_batch


def held_out_besides(job: Job, records: Iterable[Record], before: dict[str, str]) -> dict[str, str]:
    """Books to hold out that their ids do not, id to sha256; ``before`` are those of the output's earlier data sets."""
    share = job.config.val_fraction
    kept = {book: sha256 for record in records for book, sha256, *_ in record.books}
    if not share or len(kept) < 2:
        return {}
    texts = set(before.values())
    held = {book: sha256 for book, sha256 in kept.items() if book in before or sha256 in texts}
    parts = (part for piece in job.pieces for part in piece.parts)
    alone = [part.file.id for part in parts if is_one_book(part, job.config) and part.file.id in kept] or list(kept)
    if not any(book in held or split_of(book, share) == "val" for book in alone):
        nearest = min(alone, key=position_of)
        held[nearest] = kept[nearest]
    return {book: sha256 for book, sha256 in sorted(held.items()) if split_of(book, share) == "train"}


def fill_splits(job: Job, records: dict[str, Record], held: Iterable[str]) -> dict[str, Record]:
    """Move ``held`` to validation, and one book to training if none is there; returns the updated records."""
    share, moved = job.config.val_fraction, set(held)
    kept = [book for record in records.values() for book, *_ in record.books]
    if kept and all(book in moved or split_of(book, share) == "val" for book in kept):
        moved ^= {max(kept, key=lambda book: (book not in moved, position_of(book)))}
    changed: dict[str, Record] = {}
    for name, record in records.items():
        wanted = sorted(moved.intersection(book for book, *_ in record.books)) if moved else []
        if wanted != record.moved:
            changed[name] = _with_moved(job.place, name, record, wanted)
            changed[name].write(job.place, name)
    return records | changed


def _with_moved(place: StorageDir, name: str, record: Record, wanted: list[str]) -> Record:
    """``record`` and its shards with ``wanted``, and no other books, in the split that is not their ids'.

    What moves is written before it is removed, and the record last: after a kill the piece is done again.
    """
    moving = set(wanted).symmetric_difference(record.moved)
    shards = list(record.shards)
    for info in record.shards:
        batch = Shard(place / info.path).batch
        here = batch.filter(pa.array([book in moving for book in batch.column("book").to_pylist()]))
        if here.num_rows:
            other: Split = "train" if info.split == "val" else "val"
            taken = {shard.path for shard in shards}
            path = next(
                path for number in range(len(taken) + 1) if (path := shard_path(other, name, number)) not in taken
            )
            shards.append(write_batch(place, path, other, here))
    left = [after for info in record.shards if (after := thinned(place, info, moving))]
    return replace(record, shards=left + shards[len(record.shards) :], moved=wanted)
