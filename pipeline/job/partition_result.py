"""What one piece became, stored beside the shards: written last, it marks the piece as done."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from infra.errors import UserError
from infra.schema import from_json, strict, to_json
from infra.storage.directory import StorageDir
from pipeline.books.readers import DroppedBook
from pipeline.shards import MANIFEST, PARTITIONS, ShardInfo


@strict
@dataclass
class PartitionResult:
    """The outcome of a piece. It holds no times, so that equal inputs and settings give equal records."""

    key: str
    shards: list[ShardInfo]
    books: list[tuple[str, str, int, int]]
    """Id, sha256, characters and tokens of each book kept, by id."""
    dropped: list[DroppedBook]
    traits: dict[str, int]
    """Number of kept books by what was recognized in them."""
    signatures: dict[str, list[int]]
    """MinHash signatures by book id, when near duplicates are looked for."""
    moved: list[str]
    """Books that are in the other split than their ids say, by id."""
    read_bytes: int
    replaced: int
    """Undecodable bytes in the kept books."""
    verified_bytes: int
    doubtful: list[DroppedBook] = field(default_factory=list)
    """Books that were kept, with what may be wrong in them."""
    removed: dict[str, int] = field(default_factory=dict)
    """Characters that cleaning left out of the kept books, by rule."""

    def write(self, out_dir: StorageDir, name: str) -> None:
        """Mark the piece as done."""
        out_dir.write_json(record_file(name), to_json(self))


def record_file(name: str) -> str:
    return f"{PARTITIONS}/{name}.json"


def read_record(directory: StorageDir | Path, name: str) -> PartitionResult | None:
    """The record of a piece, or None where there is none that is whole. Raises ``UserError`` when storage fails."""
    try:
        content = StorageDir.of(directory).read(record_file(name))
    except OSError:
        return None
    try:
        return from_json(PartitionResult, json.loads(content), name)
    except (ValueError, UserError):
        return None


def mark_undone(out_dir: StorageDir, names: Iterable[str]) -> None:
    """Mark the data set at ``out_dir`` as unfinished and its pieces ``names`` as not done, durably.

    Call it before any shard of these pieces is written: a manifest or record that outlived the shards it describes
    would vouch for those that replace them.
    """
    out_dir.remove([MANIFEST, *(record_file(name) for name in names)])
