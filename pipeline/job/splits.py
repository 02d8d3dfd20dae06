"""Choose the split of every book, once all pieces are done.

A book is in the split that its text had in an earlier data set of the same output (:mod:`pipeline.job.split_history`),
else in the one that the name of its file tells, else in the one of its id's hash. Of few books the hash may take none
or all. Then one book is moved: the nearest to the share, of files that are books of their own if there are several, so
that another kind of source beside them does not change the choice; and rather a new one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from infra.storage.directory import StorageDir
from pipeline.job.dedup import Rank, without_books
from pipeline.job.partition_result import PartitionResult
from pipeline.job.plan import Job, is_one_book, split_hash
from pipeline.job.split_history import SplitHistory
from pipeline.shards import Shard, Split, shard_path, write_batch


@dataclass(frozen=True)
class Choice:
    """The split of each book, in ``splits``."""

    splits: dict[str, Split]
    moved: set[str] = field(default_factory=set)
    """Books that are in another split than their piece has put them."""
    editions: set[str] = field(default_factory=set)
    """Books that are held out only as editions of a text that is not among the books."""

    def rank(self, book: str) -> Rank:
        """Its place among books of the same text, of which the first is kept: a held-out one, or the first by id.

        One that is moved only because of another's text comes after that, also when the data set is made again.
        """
        return self.splits[book] == "train", book in self.editions, book in self.moved, book


def choose_splits(job: Job, records: dict[str, PartitionResult], history: SplitHistory) -> Choice:
    """The splits of all books in ``records``, by piece name."""
    history = history.valid_for(job.config.val_fraction)
    choice = Choice({})
    unknown: dict[str, list[int]] = {}
    for partition in job.partitions:
        record = records[partition.name]
        for book, sha256, *_ in record.books:
            by_piece, is_val = partition.assign_split(book), history.split_known(book, sha256)
            if is_val is None or (not is_val and partition.split == "val"):
                choice.splits[book] = by_piece
                if by_piece == "train" and book in record.signatures:
                    unknown[book] = record.signatures[book]
            else:
                choice.splits[book] = "val" if is_val else "train"
                if choice.splits[book] != by_piece:
                    choice.moved.add(book)
    if unknown and history.signatures:
        from pipeline.job.similarity import similar_to  # only runs that look for near duplicates need its library

        for book in similar_to(unknown, history.signatures.values()):
            choice.splits[book] = "val"
            choice.editions.add(book)
    return choice


def fill_splits(job: Job, records: dict[str, PartitionResult], splits: dict[str, Split], history: SplitHistory) -> None:
    """Move one of the books in ``records`` to the split that has none, in ``splits``; an only book is trained on."""
    share = job.config.val_fraction
    known = history.valid_for(share)
    texts = {book: sha256 for record in records.values() for book, sha256, *_ in record.books}
    held = sum(splits[book] == "val" for book in texts)
    if not held and share and len(texts) > 1:
        parts = (part for partition in job.partitions for part in partition.parts)
        alone = [part.file.id for part in parts if is_one_book(part, job.config) and part.file.id in texts]
        candidates = alone if len(alone) > 1 else texts
        chosen = min(candidates, key=lambda book: (known.split_known(book, texts[book]) is False, split_hash(book)))
        splits[chosen] = "val"
    elif texts and held == len(texts):
        chosen = max(texts, key=lambda book: (not known.split_known(book, texts[book]), split_hash(book)))
        splits[chosen] = "train"


def split_changes(
    records: dict[str, PartitionResult], splits: dict[str, Split], history: SplitHistory
) -> Iterator[str]:
    """A sentence about the books that were held out and are trained on now, and one about the reverse."""
    moved: dict[Split, list[str]] = {"train": [], "val": []}
    for record in records.values() if history.is_val else ():
        for book, sha256, *_ in record.books:
            was_val = history.is_val.get(bytes.fromhex(sha256))
            if was_val is not None and was_val != (splits[book] == "val"):
                moved[splits[book]].append(book)
    for books, was, now in (
        (moved["train"], "held out for validation", "trained on"),
        (moved["val"], "trained on", "held out for validation"),
    ):
        if books:
            yield (
                f"Books that were {was} in an earlier data set of this --out and are {now} now: {len(books):,}, "
                f"such as {min(books)}."
            )


def note_splits(job: Job, records: dict[str, PartitionResult], splits: dict[str, Split], history: SplitHistory) -> None:
    """Write the history with the books in ``records``, before any of them is moved."""
    history = history.valid_for(job.config.val_fraction)
    # Copies that --duplicates keep leaves in both splits are left to their ids.
    apart = _in_both(records, splits) if job.config.duplicates == "keep" else set()
    for partition in job.partitions:
        record = records[partition.name]
        for book, sha256, *_ in record.books:
            if sha256 not in apart:
                is_val, by_id = splits[book] == "val", partition.assign_split(book) == "val"
                history.add(book, sha256, is_val=is_val, by_id=by_id, signature=record.signatures.get(book))
    history.write(job.out_dir)


def _in_both(records: dict[str, PartitionResult], splits: dict[str, Split]) -> set[str]:
    """The texts that are in both splits."""
    texts: dict[Split, set[str]] = {"train": set(), "val": set()}
    for record in records.values():
        for book, sha256, *_ in record.books:
            texts[splits[book]].add(sha256)
    return texts["train"] & texts["val"]


def move_books(job: Job, records: dict[str, PartitionResult], splits: dict[str, Split]) -> dict[str, PartitionResult]:
    """Move books to their ``splits`` where their piece has put them into the other; returns the updated records."""
    changed: dict[str, PartitionResult] = {}
    for partition in job.partitions:
        record = records[partition.name]
        wanted = sorted(book for book, *_ in record.books if splits[book] != partition.assign_split(book))
        if wanted != record.moved:
            changed[partition.name] = _with_books_moved(job.out_dir, partition.name, record, wanted)
            changed[partition.name].write(job.out_dir, partition.name)
    return records | changed


def _with_books_moved(out_dir: StorageDir, name: str, record: PartitionResult, wanted: list[str]) -> PartitionResult:
    """``record`` and its shards with ``wanted``, and no other books, in the other split than its piece put them.

    What moves is written before it is removed, and the record last: after a kill the piece is done again.
    """
    moving = set(wanted).symmetric_difference(record.moved)
    shards = list(record.shards)
    for info in record.shards:
        batch = Shard(out_dir / info.path).batch
        here = batch.filter(pa.array([book in moving for book in batch.column("book").to_pylist()]))
        if here.num_rows:
            other: Split = "train" if info.split == "val" else "val"
            taken = {shard.path for shard in shards}
            path = next(
                path for number in range(len(taken) + 1) if (path := shard_path(other, name, number)) not in taken
            )
            shards.append(write_batch(out_dir, path, other, here))
    left = [after for info in record.shards if (after := without_books(out_dir, info, moving))]
    return replace(record, shards=left + shards[len(record.shards) :], moved=wanted)
