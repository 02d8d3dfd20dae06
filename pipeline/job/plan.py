"""Division of the inputs into partitions, the units of work, each of which becomes one shard per split.

Partitions only depend on the inventory and the config, so that the shards do not depend on the number of workers.
"""

import hashlib
import json
import zipfile
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.parquet as pq
import xxhash

from infra.storage.directory import StorageDir
from pipeline.books.readers import DAMAGE_ERRORS, FileRange, archive_members
from pipeline.books.sources import Inventory, SourceFile, build_inventory
from pipeline.config import TokenizeConfig
from pipeline.encoding.tokenizer import GPT2_SHA256, Tokenizer, load_by_hash, read_tokenizer
from pipeline.shards import FORMAT_VERSION, TOKENIZER_FILE, Split

MAX_RANGES_PER_PARTITION = 4096
"""Maximum number of file ranges in a partition, so that only seconds of work are repeated after a crash."""
COMPRESSION_RATIO = 3
"""Assumed bytes of text per compressed byte."""

# With this seed, the sample's 66 books have a validation split of typical size at the default fraction.
_SPLIT_SEED = 2


@dataclass(frozen=True)
class Partition:
    """Unit of work: ranges of files whose books become a shard per split."""

    index: int
    ranges: tuple[FileRange, ...]
    settings: TokenizeConfig
    tokenizer_sha256: str = GPT2_SHA256

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the partition's books. Raises ``UserError`` if the file in the settings has changed."""
        return load_by_hash(self.tokenizer_sha256, self.settings.tokenizer)

    @property
    def name(self) -> str:
        """Number of the partition in the names of its files."""
        return f"{self.index:06d}"

    @property
    def split(self) -> Split | None:
        """Split in the names of the partition's files, which is the same for all; None if the ids of books decide."""
        return self.ranges[0].file.split

    def assign_split(self, book: str) -> Split:
        """Return the split of a book of the partition, unless :mod:`pipeline.job.splits` moves the book."""
        return self.split or assign_split(book, self.settings.val_fraction)

    @property
    def size(self) -> int:
        """Estimated bytes of text in the partition."""
        return sum(file_range.size for file_range in self.ranges)

    def key(self) -> str:
        """Return a hash of all inputs and settings that determine the shards; equal keys mean equal shards."""
        ranges = [
            [file.id, file.uri, file.size, file.modified, file.version, file.split, file_range.start, file_range.stop]
            for file_range in self.ranges
            for file in [file_range.file]
        ]
        settings = self.settings.identity() | {"sources": []}
        identity = [FORMAT_VERSION, self.tokenizer_sha256, self.index, settings, ranges]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


class Job:
    """Run of the command, with its settings, output folder, inputs and partitions."""

    def __init__(self, config: TokenizeConfig) -> None:
        self.tokenizer = read_tokenizer(config.tokenizer)
        self.out_dir = StorageDir.of(config.out)
        if not self.tokenizer.is_gpt2:
            self.tokenizer.check_encoders(config.encoder)
            # Workers on other machines can only read the copy in the output.
            config = replace(config, tokenizer=(self.out_dir / TOKENIZER_FILE).address)
        self.config = config
        self.inventory = build_inventory(config.sources, config.mirror)
        self.partitions = make_partitions(self.inventory, config, self.tokenizer.sha256)

    def identity(self) -> dict[str, Any]:
        """Return the settings and the hash of the tokenizer, which determine the bytes of the shards."""
        return self.config.identity() | {"tokenizer": self.tokenizer.sha256}


def make_partitions(
    inventory: Inventory, config: TokenizeConfig, tokenizer_sha256: str = GPT2_SHA256
) -> list[Partition]:
    """Make partitions of about ``shard_size`` bytes of text; a larger book is a partition by itself.

    All files of a partition have the same split in their names, or all have none.
    """
    groups: list[list[FileRange]] = []
    free_bytes = -1
    for file in sorted(inventory.files, key=lambda file: file.split or ""):
        for file_range in split_file(file, config):
            is_full = file_range.size > free_bytes or len(groups[-1]) == MAX_RANGES_PER_PARTITION
            if is_full or groups[-1][-1].file.split != file.split:
                groups.append([])
                free_bytes = config.shard_size
            groups[-1].append(file_range)
            free_bytes -= file_range.size
    return [Partition(index, tuple(ranges), config, tokenizer_sha256) for index, ranges in enumerate(groups)]


def split_file(file: SourceFile, config: TokenizeConfig) -> list[FileRange]:
    """Split ``file`` into ranges of about ``shard_size`` bytes, if its format lets a reader start in the middle."""
    step = config.shard_size
    if file.compression and file.format != "parquet":
        return [FileRange(file, file.size * COMPRESSION_RATIO)]
    if file.size <= step and file.format != "parquet":
        return [FileRange(file, file.size)]
    if file.format == "lines" or (file.format == "text" and _is_seekable(config.doc_separator)):
        starts = range(0, file.size, step)
        return [FileRange(file, min(step, file.size - start), start, min(start + step, file.size)) for start in starts]
    if file.format in ("parquet", "zip"):
        return _split_container(file, step)
    return [FileRange(file, file.size)]


def _is_seekable(separator: str | None) -> bool:
    """Return whether a reader that starts in the middle finds the same separators as a reader that starts at the
    beginning.

    This is not possible for a separator that can overlap itself: the position of ``--`` in ``---`` depends on the
    preceding text.
    """
    return bool(separator) and not any(separator.startswith(separator[i:]) for i in range(1, len(separator)))


def _split_container(file: SourceFile, step: int) -> list[FileRange]:
    """Return ranges of row groups or archive members.

    A file that cannot be opened is one range, so that its task reports the reason.
    """
    try:
        with file.open() as opened:
            if file.format == "zip":
                sizes = [info.file_size for info in archive_members(zipfile.ZipFile(opened))]
            else:
                metadata = pq.read_metadata(opened)
                sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    except (OSError, *DAMAGE_ERRORS):
        return [FileRange(file, file.size)]
    ranges: list[FileRange] = []
    start = total = 0
    for stop, size in enumerate(sizes, 1):
        total += size
        if total >= step or stop == len(sizes):
            ranges.append(FileRange(file, total, start, stop))
            start, total = stop, 0
    return ranges or [FileRange(file, file.size)]


def is_one_book(file_range: FileRange, config: TokenizeConfig) -> bool:
    """Return whether ``file_range`` is a file of one book, whose id is known before it is read."""
    return file_range.file.format == "text" and not config.doc_separator


def assign_split(book: str, val_fraction: float) -> Split:
    """Return the split of a book by its id only, so that the split stays the same when books are added.

    If a split would be empty, :mod:`pipeline.job.splits` moves a book.
    """
    return "val" if split_hash(book) < val_fraction else "train"


def split_hash(book: str) -> float:
    """Return the hash of a book's id, in [0, 1)."""
    return xxhash.xxh3_64_intdigest(book.encode(), seed=_SPLIT_SEED) / 2**64
