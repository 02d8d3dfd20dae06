"""Choice of the split of every book after all partitions are finished.

The split of a book is the first of these that exists:

- the split that its text had in an earlier data set of the same output (:mod:`pipeline.job.split_history`)
- the split in the name of its file
- the split that the hash of its id selects

Of few books, the hash may select none or all. One book is then moved to the empty split. It is the book whose hash is
nearest to the fraction, and preferably one without history. If several files are one book each, it is one of these
books, so that other kinds of sources do not change the choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from infra.storage.directory import StorageDir
from pipeline.job.dedup import Rank, without_books
from pipeline.job.partition_result import PartitionResult
from pipeline.job.plan import Job, is_one_book, split_hash
from pipeline.job.split_history import SplitHistory
from pipeline.shards import Shard, ShardInfo, Split, shard_path, write_batch


@dataclass(frozen=True)
class Choice:
    """Chosen splits by book id."""

    splits: dict[str, Split]
    moved: set[str] = field(default_factory=set)
    """Ids of the books that are not in the split to which their partition wrote them."""
    editions: set[str] = field(default_factory=set)
    """Ids of the books that are only held out because they are editions of a held-out text of an earlier data set."""

    def rank(self, book: str) -> Rank:
        """Return the sort key of a book among duplicates, of which the first is kept: held-out books first, then by id.

        A book that is held out or moved only because of another text is after the other books, so that the same book
        is kept when the data set is re-created.
        """
        return self.splits[book] == "train", book in self.editions, book in self.moved, book


def choose_splits(job: Job, results: dict[str, PartitionResult], history: SplitHistory) -> Choice:
    """Choose the splits of all books in ``results``, the results by partition name."""
    history = history.restrict_to(job.config.val_fraction)
    choice = Choice({})
    new_signatures: dict[str, list[int]] = {}
    for partition in job.partitions:
        result = results[partition.name]
        for book, sha256, *_ in result.books:
            assigned, was_val = partition.assign_split(book), history.was_held_out(book, sha256)
            if was_val is None or (not was_val and partition.split == "val"):
                choice.splits[book] = assigned
                if assigned == "train" and book in result.signatures:
                    new_signatures[book] = result.signatures[book]
            else:
                choice.splits[book] = "val" if was_val else "train"
                if choice.splits[book] != assigned:
                    choice.moved.add(book)
    if new_signatures and history.signatures:
        from pipeline.job.similarity import find_similar  # Imported here, because few jobs need it.

        for book in find_similar(new_signatures, history.signatures.values()):
            choice.splits[book] = "val"
            choice.editions.add(book)
    return choice


def fill_splits(job: Job, results: dict[str, PartitionResult], splits: dict[str, Split], history: SplitHistory) -> None:
    """Move one of the books in ``results`` to a split of ``splits`` that is empty; a single book is trained on."""
    history = history.restrict_to(job.config.val_fraction)
    texts = {book: sha256 for result in results.values() for book, sha256, *_ in result.books}
    val_count = sum(splits[book] == "val" for book in texts)
    if not val_count and job.config.val_fraction and len(texts) > 1:
        ranges = (file_range for partition in job.partitions for file_range in partition.ranges)
        files = [file_range.file.id for file_range in ranges if is_one_book(file_range, job.config)]
        one_book_files = [book for book in files if book in texts]
        candidates = one_book_files if len(one_book_files) > 1 else texts
        moved = min(candidates, key=lambda book: (history.was_held_out(book, texts[book]) is False, split_hash(book)))
        splits[moved] = "val"
    elif texts and val_count == len(texts):
        moved = max(texts, key=lambda book: (not history.was_held_out(book, texts[book]), split_hash(book)))
        splits[moved] = "train"


def describe_split_changes(
    results: dict[str, PartitionResult], splits: dict[str, Split], history: SplitHistory
) -> Iterator[str]:
    """Yield a sentence about books that were held out and are now trained on, and a sentence about the reverse."""
    moved: dict[Split, list[str]] = {"train": [], "val": []}
    for result in results.values() if history.is_val else ():
        for book, sha256, *_ in result.books:
            was_val = history.is_val.get(bytes.fromhex(sha256))
            if was_val is not None and was_val != (splits[book] == "val"):
                moved[splits[book]].append(book)
    for books, old_use, new_use in (
        (moved["train"], "held out for validation", "trained on"),
        (moved["val"], "trained on", "held out for validation"),
    ):
        if books:
            yield (
                f"Books that were {old_use} in an earlier data set of this --out and are now {new_use}: "
                f"{len(books):,}, for example {min(books)}."
            )


def note_splits(job: Job, results: dict[str, PartitionResult], splits: dict[str, Split], history: SplitHistory) -> None:
    """Write the history with the books in ``results``, before any of them is moved."""
    history = history.restrict_to(job.config.val_fraction)
    # With --duplicates keep, copies of a text can be in both splits. The history omits them, so that their ids decide.
    in_both = _texts_in_both_splits(results, splits) if job.config.duplicates == "keep" else set()
    for partition in job.partitions:
        result = results[partition.name]
        for book, sha256, *_ in result.books:
            if sha256 not in in_both:
                is_val, is_val_by_id = splits[book] == "val", partition.assign_split(book) == "val"
                signature = result.signatures.get(book)
                history.add(book, sha256, is_val=is_val, is_val_by_id=is_val_by_id, signature=signature)
    history.write(job.out_dir)


def _texts_in_both_splits(results: dict[str, PartitionResult], splits: dict[str, Split]) -> set[str]:
    """Return the hashes of the texts that are in both splits."""
    texts: dict[Split, set[str]] = {"train": set(), "val": set()}
    for result in results.values():
        for book, sha256, *_ in result.books:
            texts[splits[book]].add(sha256)
    return texts["train"] & texts["val"]


def move_books(job: Job, results: dict[str, PartitionResult], splits: dict[str, Split]) -> dict[str, PartitionResult]:
    """Move books to their ``splits`` if their partition wrote them to the other split; return the updated results."""
    changed: dict[str, PartitionResult] = {}
    for partition in job.partitions:
        result = results[partition.name]
        moved = sorted(book for book, *_ in result.books if splits[book] != partition.assign_split(book))
        if moved != result.moved_books:
            changed[partition.name] = _with_books_moved(job.out_dir, partition.name, result, moved)
            changed[partition.name].write(job.out_dir, partition.name)
    return results | changed


def _with_books_moved(out_dir: StorageDir, name: str, result: PartitionResult, moved: list[str]) -> PartitionResult:
    """Rewrite the shards of ``result`` so that exactly the books ``moved`` have changed their split.

    Returns the updated result. Moved books are written before they are removed, and the result is written last, so that
    the partition is processed again after a kill.
    """
    moving = set(moved).symmetric_difference(result.moved_books)
    new_shards: list[ShardInfo] = []
    for info in result.shards:
        batch = Shard(out_dir / info.path).batch
        moving_rows = batch.filter(pa.array([book in moving for book in batch.column("book").to_pylist()]))
        if moving_rows.num_rows:
            other_split: Split = "train" if info.split == "val" else "val"
            paths = {shard.path for shard in (*result.shards, *new_shards)}
            path = next(
                path for number in range(len(paths) + 1) if (path := shard_path(other_split, name, number)) not in paths
            )
            new_shards.append(write_batch(out_dir, path, other_split, moving_rows))
    old_shards = [shard for info in result.shards if (shard := without_books(out_dir, info, moving))]
    return replace(result, shards=old_shards + new_shards, moved_books=moved)
