"""Result of one partition, stored beside the shards; it is written last and marks the partition as finished."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from infra.errors import UserError
from infra.schema import from_json, strict, to_json
from infra.storage.directory import StorageDir
from pipeline.books.readers import DroppedBook
from pipeline.shards import MANIFEST_FILE, PARTITIONS_FOLDER, ShardInfo


@strict
@dataclass
class PartitionResult:
    """Result of a partition, without times, so that equal inputs and settings give equal results."""

    key: str
    """Hash of the inputs and settings, by which a result is recognized as current."""
    shards: list[ShardInfo]
    books: list[tuple[str, str, int, int]]
    """(id, sha256, number of characters, number of tokens) of each kept book, sorted by id."""
    dropped: list[DroppedBook]
    labels: dict[str, int]
    """Number of kept books by recognized property."""
    signatures: dict[str, list[int]]
    """MinHash signatures by book id, if near duplicates are dropped."""
    moved_books: list[str]
    """Sorted ids of the books that are not in the split that their ids select."""
    read_bytes: int
    replaced: int
    """Number of undecodable bytes in the kept books."""
    verified_bytes: int
    flagged: list[DroppedBook] = field(default_factory=list)
    """Kept books with possible errors, each with a description of the errors."""
    removed: dict[str, int] = field(default_factory=dict)
    """Number of characters that cleaning removed from the kept books, by rule."""

    def write(self, out_dir: StorageDir, name: str) -> None:
        """Write the result as that of partition ``name``, which marks the partition as finished."""
        out_dir.write_json(result_file(name), to_json(self))


def result_file(name: str) -> str:
    """Return the path of the result of partition ``name`` in the data set."""
    return f"{PARTITIONS_FOLDER}/{name}.json"


def read_result(directory: StorageDir | Path, name: str) -> PartitionResult | None:
    """Read the result of a partition; return None if it is missing or damaged.

    Raises ``UserError`` if the storage fails.
    """
    try:
        content = StorageDir.of(directory).read(result_file(name))
    except OSError:
        return None
    try:
        return from_json(PartitionResult, json.loads(content), name)
    except (ValueError, UserError):
        return None


def mark_undone(out_dir: StorageDir, names: Iterable[str]) -> None:
    """Durably mark the data set in ``out_dir`` and its partitions ``names`` as unfinished.

    Call it before any shard of these partitions is written. Otherwise a manifest or result that survives a kill could
    describe shards that were replaced.
    """
    out_dir.remove([MANIFEST_FILE, *(result_file(name) for name in names)])
