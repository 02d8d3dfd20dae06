"""Split the inputs into pieces: the work of one task each, and one shard per split.

They depend on the inventory and the config alone, so that one worker and a hundred make the same bytes.
"""

import hashlib
import json
import zipfile
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.parquet as pq
import xxhash

from infra.storage.directory import StorageDir
from pipeline.books.readers import DAMAGE, FileRange, members
from pipeline.books.sources import Inventory, SourceFile, build_inventory
from pipeline.config import TokenizeConfig
from pipeline.encoding.tokenizer import GPT2_SHA256, Tokenizer, load_by_hash, read_tokenizer
from pipeline.shards import FORMAT_VERSION, TOKENIZER_FILE, Split

PARTS_PER_PIECE = 4096
"""Limits the number of tiny files in a piece, so that a crash repeats seconds of work and not minutes."""
COMPRESSION = 3
"""Assumed bytes of text per compressed byte."""

# Chosen so that the sample's 66 books give a validation split of ordinary length at the default share.
_SPLIT_SEED = 2


@dataclass(frozen=True)
class Partition:
    """The work of one task: read these parts of files, write a shard of each split."""

    index: int
    parts: tuple[FileRange, ...]
    settings: TokenizeConfig
    tokenizer_sha256: str = GPT2_SHA256

    @property
    def tokenizer(self) -> Tokenizer:
        """What its books are encoded with. Raises ``UserError`` when another is at the place that the settings name."""
        return load_by_hash(self.tokenizer_sha256, self.settings.tokenizer)

    @property
    def name(self) -> str:
        """The piece's number as file names carry it."""
        return f"{self.index:06d}"

    @property
    def split(self) -> Split | None:
        """The split that the names of its files tell, the same for all of them; None where the books' ids decide."""
        return self.parts[0].file.split

    def assign_split(self, book: str) -> Split:
        """The split of one of its books, unless :mod:`pipeline.job.splits` moves it."""
        return self.split or assign_split(book, self.settings.val_fraction)

    @property
    def size(self) -> int:
        """Estimated bytes of text."""
        return sum(part.size for part in self.parts)

    def key(self) -> str:
        """Hash of everything that decides this piece's shards: with an equal key, the work need not be repeated."""
        parts = [
            [file.id, file.uri, file.size, file.modified, file.version, file.split, part.start, part.stop]
            for part in self.parts
            for file in [part.file]
        ]
        settings = self.settings.identity() | {"sources": []}
        everything = [FORMAT_VERSION, self.tokenizer_sha256, self.index, settings, parts]
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


class Job:
    """One run of the command: its settings, where its output goes, its inputs, and the pieces they are split into."""

    def __init__(self, config: TokenizeConfig) -> None:
        self.tokenizer = read_tokenizer(config.tokenizer)
        self.out_dir = StorageDir.of(config.out)
        if not self.tokenizer.is_gpt2:
            self.tokenizer.check_encoders(config.encoder)
            config = replace(
                config, tokenizer=(self.out_dir / TOKENIZER_FILE).address
            )  # every worker can read it there
        self.config = config
        self.inventory = build_inventory(config.sources, config.mirror)
        self.partitions = make_partitions(self.inventory, config, self.tokenizer.sha256)

    def identity(self) -> dict[str, Any]:
        """What decides the bytes of the shards: the settings, and the vocabulary by its hash."""
        return self.config.identity() | {"tokenizer": self.tokenizer.sha256}


def make_partitions(
    inventory: Inventory, config: TokenizeConfig, tokenizer_sha256: str = GPT2_SHA256
) -> list[Partition]:
    """Pieces of about ``shard_size`` bytes of text. A book is never split: one that is larger is a piece of its own.

    Files whose names tell their split are in other pieces than those of another split, and than others.
    """
    groups: list[list[FileRange]] = []
    room = -1
    for file in sorted(inventory.files, key=lambda file: file.split or ""):
        for part in split_file(file, config):
            if part.size > room or len(groups[-1]) == PARTS_PER_PIECE or groups[-1][-1].file.split != file.split:
                groups.append([])
                room = config.shard_size
            groups[-1].append(part)
            room -= part.size
    return [Partition(index, tuple(parts), config, tokenizer_sha256) for index, parts in enumerate(groups)]


def split_file(file: SourceFile, config: TokenizeConfig) -> list[FileRange]:
    """``file`` in parts of about ``shard_size``, if its form lets a reader begin in the middle."""
    step = config.shard_size
    if file.compression and file.format != "parquet":
        return [FileRange(file, file.size * COMPRESSION)]
    if file.size <= step and file.format != "parquet":
        return [FileRange(file, file.size)]
    if file.format == "lines" or (file.format == "text" and _found_anywhere(config.doc_separator)):
        starts = range(0, file.size, step)
        return [FileRange(file, min(step, file.size - start), start, min(start + step, file.size)) for start in starts]
    if file.format in ("parquet", "zip"):
        return _split_container(file, step)
    return [FileRange(file, file.size)]


def _found_anywhere(separator: str | None) -> bool:
    """Whether a reader that begins in the middle finds the same separators as one that begins at the start.

    Not for a separator that can overlap itself: where ``---`` contains a ``--`` depends on what comes before.
    """
    return bool(separator) and not any(separator.startswith(separator[i:]) for i in range(1, len(separator)))


def _split_container(file: SourceFile, step: int) -> list[FileRange]:
    """Ranges of row groups or archive members; the whole file if it cannot be opened, so that its task says why."""
    try:
        with file.open() as opened:
            if file.format == "zip":
                sizes = [info.file_size for info in members(zipfile.ZipFile(opened))]
            else:
                metadata = pq.read_metadata(opened)
                sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    except (OSError, *DAMAGE):
        return [FileRange(file, file.size)]
    parts: list[FileRange] = []
    start = total = 0
    for stop, size in enumerate(sizes, 1):
        total += size
        if total >= step or stop == len(sizes):
            parts.append(FileRange(file, total, start, stop))
            start, total = stop, 0
    return parts or [FileRange(file, file.size)]


def is_one_book(part: FileRange, config: TokenizeConfig) -> bool:
    """Whether ``part`` is a file of one book, whose id is known before it is read."""
    return part.file.format == "text" and not config.doc_separator


def assign_split(book: str, val_fraction: float) -> Split:
    """The split of a book: by its id alone, so that it stays when books are added.

    Where this leaves a split empty, :mod:`pipeline.job.splits` makes an exception.
    """
    return "val" if split_hash(book) < val_fraction else "train"


def split_hash(book: str) -> float:
    """A book's place in [0, 1)."""
    return xxhash.xxh3_64_intdigest(book.encode(), seed=_SPLIT_SEED) / 2**64
