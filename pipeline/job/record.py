"""What one piece became, on disk beside the shards: written last, it makes the piece done."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.storage import sync_folder, write_json
from pipeline.books.clean import Dropped
from pipeline.shards import MANIFEST, PIECES, ShardInfo


@dataclass(frozen=True)
class Record:
    """The outcome of a piece. The same for the same inputs and settings, so it holds no times."""

    key: str
    shards: list[ShardInfo]
    books: list[tuple[str, str, int, int]]
    """Id, sha256, characters and tokens of each book kept, by id."""
    dropped: list[Dropped]
    traits: dict[str, int]
    """Kept books by what was recognised in them."""
    signatures: dict[str, list[int]]
    """MinHash signatures by book id, when near duplicates are looked for."""
    read_bytes: int
    replaced: int
    """Bytes of kept books that no character set explains."""
    verified_bytes: int

    def write(self, folder: Path, name: str) -> None:
        """Mark the piece as done."""
        (folder / PIECES).mkdir(parents=True, exist_ok=True)
        values = vars(self) | {"shards": [vars(s) for s in self.shards], "dropped": [vars(d) for d in self.dropped]}
        write_json(folder / PIECES / f"{name}.json", values)


def read_record(folder: Path, name: str) -> Record | None:
    """The record of a piece, or None where there is none that can be read."""
    try:
        values = json.loads((folder / PIECES / f"{name}.json").read_text(encoding="utf-8"))
        parsed = {
            "shards": [ShardInfo(**shard) for shard in values["shards"]],
            "books": [tuple(book) for book in values["books"]],
            "dropped": [Dropped(**dropped) for dropped in values["dropped"]],
        }
        return Record(**values | parsed)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def reopen(folder: Path, names: Iterable[str]) -> None:
    """Make the data set in ``folder`` unfinished and its pieces ``names`` undone, durably.

    Call it before any shard of these pieces is written: a manifest or a record that outlived the shards it describes
    would vouch for those that replace them.
    """
    for parent, files in ((folder, [MANIFEST]), (folder / PIECES, [f"{name}.json" for name in names])):
        there = [parent / name for name in files if (parent / name).exists()]
        for path in there:
            path.unlink(missing_ok=True)
        if there:
            sync_folder(parent)
