"""Split the inputs into pieces: the work of one task each, and one shard a split.

In: the inventory and the config. Out: pieces whose files, order and names depend on those alone, never
on the number of workers, so that the shards of one worker and of a hundred are the same bytes.
"""

import hashlib
import json
import math
from dataclasses import dataclass, replace

import xxhash

from pipeline.config import TokenizeConfig
from pipeline.encoding import VOCABULARY_SHA256
from pipeline.shards import FORMAT_VERSION, Split
from pipeline.sources import Inventory, SourceFile, holds_many

FILES_A_PIECE = 4096
"""Tiny files are limited by number, so that a crash repeats seconds of work and not minutes."""

# Chosen so that the sample's 66 books give a validation split of ordinary length at the default share.
_SPLIT_SEED = 2


@dataclass(frozen=True)
class Piece:
    """The work of one task: read these files, write this shard of each split."""

    index: int
    files: tuple[SourceFile, ...]
    settings: TokenizeConfig

    @property
    def name(self) -> str:
        """The piece's number as file names carry it."""
        return f"{self.index:06d}"

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(file.size for file in self.files)

    def key(self) -> str:
        """Hash of all that decides this piece's shards: equal keys mean the work need not be done again."""
        files = [[file.id, file.uri, file.size, file.modified] for file in self.files]
        parts = [FORMAT_VERSION, VOCABULARY_SHA256, self.index, self.settings.identity() | {"sources": []}, files]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def make_plan(inventory: Inventory, config: TokenizeConfig) -> list[Piece]:
    """Pieces of about ``shard_size`` bytes; a file is never split, so a larger one is a piece of its own."""
    groups: list[list[SourceFile]] = []
    room = -1
    for file in inventory.files:
        if file.size > room or len(groups[-1]) == FILES_A_PIECE:
            groups.append([])
            room = config.shard_size
        groups[-1].append(file)
        room -= file.size
    settings = replace(config, val_fraction=_reachable_fraction(inventory, config.val_fraction))
    return [Piece(index, tuple(files), settings) for index, files in enumerate(groups)]


def split_of(book: str, val_fraction: float) -> Split:
    """The split of a book: by its id alone, so that it stays when books are added."""
    return "val" if _position(book) < val_fraction else "train"


def _reachable_fraction(inventory: Inventory, val_fraction: float) -> float:
    """``val_fraction``, raised to take one book where a small collection has none below it.

    Only for collections whose books are all known beforehand, one a file; others are large.
    """
    if not val_fraction or any(holds_many(file) for file in inventory.files):
        return val_fraction
    lowest = min(_position(file.id) for file in inventory.files)
    return val_fraction if lowest < val_fraction else math.nextafter(lowest, 1)


def _position(book: str) -> float:
    """A book's place in [0, 1)."""
    return xxhash.xxh3_64_intdigest(book.encode(), seed=_SPLIT_SEED) / 2**64
