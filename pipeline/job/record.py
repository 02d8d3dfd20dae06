"""What one piece became, on disk beside the shards: written last, it marks the piece as done."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.schema import from_json, strict, to_json
from infra.storage import sync_folder, write_json
from pipeline.books.readers import Dropped
from pipeline.shards import MANIFEST, PIECES, ShardInfo


@strict
@dataclass
class Record:
    """The outcome of a piece. It holds no times, so that equal inputs and settings give equal records."""

    key: str
    shards: list[ShardInfo]
    books: list[tuple[str, str, int, int]]
    """Id, sha256, characters and tokens of each book kept, by id."""
    dropped: list[Dropped]
    traits: dict[str, int]
    """Number of kept books by what was recognized in them."""
    signatures: dict[str, list[int]]
    """MinHash signatures by book id, when near duplicates are looked for."""
    read_bytes: int
    replaced: int
    """Undecodable bytes in the kept books."""
    verified_bytes: int

    def write(self, folder: Path, name: str) -> None:
        """Mark the piece as done."""
        (folder / PIECES).mkdir(parents=True, exist_ok=True)
        write_json(folder / PIECES / f"{name}.json", to_json(self))


def read_record(folder: Path, name: str) -> Record | None:
    """The record of a piece, or None where there is none that can be read."""
    path = folder / PIECES / f"{name}.json"
    try:
        return from_json(Record, json.loads(path.read_bytes()), path)
    except (OSError, ValueError):
        return None


def reopen(folder: Path, names: Iterable[str]) -> None:
    """Mark the data set in ``folder`` as unfinished and its pieces ``names`` as not done, durably.

    Call it before any shard of these pieces is written: a manifest or record that outlived the shards it describes
    would vouch for those that replace them.
    """
    for parent, files in ((folder, [MANIFEST]), (folder / PIECES, [f"{name}.json" for name in names])):
        existing = [parent / name for name in files if (parent / name).exists()]
        for path in existing:
            path.unlink(missing_ok=True)
        if existing:
            sync_folder(parent)
