"""Token shards and their manifest, the file formats between tokenizing and training.

A data set is a folder with ``train/*.arrow``, ``val/*.arrow``, ``quarantine.jsonl``, ``manifest.json`` and
``tracking.json``. Only ``tracking.json`` differs when the data set is re-created, because it refers to the MLflow run
that created the data set. ``tokenizer.json`` is added unless the tokenizer is GPT-2's.

A shard is an uncompressed Arrow IPC file with one record batch and one row per book. The child buffer of ``tokens`` is
therefore the contiguous token stream of the shard, which a memory map slices without a copy, and the list offsets are
the book boundaries. The manifest is written last, so that a folder without a manifest is unfinished.

This module imports neither Ray nor torch, so that training and notebooks can open shards quickly.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import xxhash

from infra.errors import UserError, first_line
from infra.schema import from_json, strict, to_json
from infra.storage.directory import StorageDir
from infra.tracking.run_ref import RunRef

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
QUARANTINE_FILE = "quarantine.jsonl"
TRACKING_FILE = "tracking.json"
TOKENIZER_FILE = "tokenizer.json"
PARTITIONS_FOLDER = "partitions"
"""Name of the folder with the results of the finished partitions."""
SETTINGS_FILE = f"{PARTITIONS_FOLDER}/settings.json"
"""Path of the file with the settings of the data set, which is written before the first shard."""
SPLIT_HISTORY_FILE = f"{PARTITIONS_FOLDER}/split_history.feather"
"""Path of the file with the split of every text in the data sets of the folder."""

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")

SHARD_PATTERN = re.compile(rf"({'|'.join(SPLITS)})/\d{{6,}}-\d{{3,}}\.arrow")
"""Pattern of the path of a shard in its data set. Other files in its folder are never read, written or deleted."""


def shard_path(split: Split, partition: str, number: int) -> str:
    """Return the path, in its data set, of a partition's shard ``number`` of ``split``."""
    return f"{split}/{partition}-{number:03d}.arrow"


_COLUMNS = pa.schema(
    [
        pa.field("book", pa.string(), nullable=False),
        pa.field("title", pa.string()),
        pa.field("author", pa.string()),
        pa.field("language", pa.string()),
        pa.field("released", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("chars", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class ShardRow:
    """Book in a shard.

    ``tokens`` is uint16 or uint32 and ends with the end of text. ``sha256`` is the hash of the cleaned text.
    ``released`` is the date of the edition in the form of its header.
    """

    book: str
    title: str | None
    author: str | None
    language: str | None
    source: str
    sha256: str
    chars: int
    tokens: np.ndarray
    released: str | None = None


@strict
@dataclass(frozen=True)
class ShardInfo:
    """Entry of a shard in the manifest. ``path`` is relative to the data set; ``checksum`` is the file's xxh3-128."""

    path: str
    split: Split
    bytes: int
    rows: int
    tokens: int
    chars: int
    checksum: str

    def __post_init__(self) -> None:
        # A manifest may come from an untrusted author, and its paths are read and written.
        if not SHARD_PATTERN.fullmatch(self.path):
            raise UserError(f"Path {self.path!r} is not the name of a shard.")


@strict
@dataclass(frozen=True)
class Manifest:
    """Description of a finished data set: its settings, its inputs, and a checksum of every shard."""

    config: dict[str, Any]
    tokenizer_sha256: str
    shards: list[ShardInfo]
    inputs: dict[str, Any]
    """Number and bytes of the source files, and a hash over their ids and sizes."""
    report: dict[str, Any]
    """Counts of the report, such as books kept and dropped, characters and tokens."""
    fingerprint: str
    """Hash over the splits and checksums of all shards; equal fingerprints mean byte-equal token streams."""
    format_version: int = FORMAT_VERSION
    splits: dict[str, dict[str, int]] = field(kw_only=True)
    """Numbers of shards, books, tokens and characters of each split."""

    @classmethod
    def of(
        cls,
        shards: Iterable[ShardInfo],
        *,
        config: dict[str, Any],
        tokenizer_sha256: str,
        inputs: dict[str, Any],
        report: dict[str, Any],
    ) -> "Manifest":
        """Create the manifest of ``shards``, in path order, with its totals and fingerprint."""
        ordered = sorted(shards, key=lambda shard: shard.path)
        identity = json.dumps([[s.split, s.path, s.checksum] for s in ordered] + [tokenizer_sha256])
        splits = {split: {"shards": 0, "books": 0, "tokens": 0, "chars": 0} for split in SPLITS}
        for shard in ordered:
            for name, count in (("shards", 1), ("books", shard.rows), ("tokens", shard.tokens), ("chars", shard.chars)):
                splits[shard.split][name] += count
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        return cls(config, tokenizer_sha256, ordered, inputs, report, fingerprint, splits=splits)

    def longest_shard(self, split: str) -> int:
        """Return the number of tokens of the longest shard of ``split``; 0 without one."""
        return max((shard.tokens for shard in self.shards if shard.split == split), default=0)

    def write(self, data_dir: StorageDir | Path) -> None:
        """Write the manifest to ``data_dir``, which finishes the data set."""
        StorageDir.of(data_dir).write_json(MANIFEST_FILE, to_json(self))


def read_manifest(location: StorageDir | Path | str) -> Manifest:
    """Read the manifest of a finished data set, local or in object storage."""
    data_dir = StorageDir.of(location)
    path = data_dir / MANIFEST_FILE
    try:
        content = data_dir.read(MANIFEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        stored_files = data_dir.list_files()
        if any(name.partition("/")[0] in (*SPLITS, PARTITIONS_FOLDER) for name in stored_files):
            raise UserError(
                f"{data_dir} has no {MANIFEST_FILE}, so the data set is unfinished. Run "
                f"'python -m pipeline.tokenize --out {data_dir}' again to finish it."
            ) from None
        advice = f"Create them with 'python -m pipeline.tokenize --out {data_dir}'."
        if stored_files:
            advice = f"If it contains books, run 'python -m pipeline.tokenize {data_dir} --out data/tokens'."
        raise UserError(f"There are no token shards in {data_dir}. {advice}") from None
    try:
        values = json.loads(content)
        if (version := values["format_version"]) == FORMAT_VERSION:
            return from_json(Manifest, values, "the manifest")
        fault = f"has format version {version}, but this program reads version {FORMAT_VERSION}"
    except (KeyError, TypeError, ValueError, UserError) as damage:
        fault = f"is damaged ({first_line(damage).rstrip('.')})"
    raise UserError(
        f"{path} {fault}. Re-create the data set with 'python -m pipeline.tokenize --out {data_dir} --overwrite'."
    )


def find_producing_run(location: StorageDir | Path | str) -> RunRef | None:
    """Return the MLflow run that created a data set; None if it is unknown or not reachable from this machine."""
    data_dir = StorageDir.of(location)
    try:
        content = data_dir.read(TRACKING_FILE)
    except OSError:
        return None
    try:
        run_ref = from_json(RunRef, json.loads(content), data_dir / TRACKING_FILE)
    except (ValueError, UserError):
        return None
    return run_ref if run_ref.is_reachable else None


def write_shard(data_dir: StorageDir | Path, path: str, split: Split, rows: list[ShardRow]) -> ShardInfo:
    """Write ``rows`` in this order as the shard ``path`` in ``data_dir``, atomically and durably.

    The type of the token ids is that of the first row.
    """
    lengths = np.fromiter((len(row.tokens) for row in rows), dtype=np.int64, count=len(rows))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    tokens = np.concatenate([row.tokens for row in rows]) if rows else np.zeros(0, dtype=np.uint16)
    item = pa.field("item", pa.from_numpy_dtype(tokens.dtype), nullable=False)
    field = pa.field("tokens", pa.large_list(item), nullable=False)
    streams = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(tokens), type=field.type)
    columns = [pa.array([getattr(row, column.name) for row in rows], type=column.type) for column in _COLUMNS]
    schema = _COLUMNS.append(field)
    return write_batch(data_dir, path, split, pa.record_batch([*columns, streams], schema=schema))


def write_batch(data_dir: StorageDir | Path, path: str, split: Split, batch: pa.RecordBatch) -> ShardInfo:
    """Write a record batch with the columns of a shard as the shard ``path`` in ``data_dir``, atomically and durably.

    The file is built in memory, because an upload may have to be retried, and the checksum would need another read.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = memoryview(sink.getvalue())
    StorageDir.of(data_dir).write(path, content)
    return ShardInfo(
        path=path,
        split=split,
        bytes=len(content),
        rows=batch.num_rows,
        tokens=len(batch.column("tokens").flatten()),
        chars=int(batch.column("chars").to_numpy().sum()),
        checksum=xxhash.xxh3_128_hexdigest(content),
    )


def checksum(path: Path) -> str:
    """Return the xxh3-128 hash of a file's bytes in hexadecimal, as in ``ShardInfo.checksum``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


class Shard:
    """Token stream and books of a shard. A local file is memory-mapped and not read."""

    def __init__(self, path: StorageDir | Path) -> None:
        file = StorageDir.of(path)
        try:
            self.batch = pa.ipc.open_file(pa.py_buffer(file.parent.map(file.name))).get_batch(0)
        except (OSError, ValueError) as damage:
            raise UserError(
                f"{path} cannot be read as a token shard ({damage}). Run 'python -m pipeline.inspect "
                f"{path.parent.parent} --verify' to see which shards are damaged."
            ) from damage

    @cached_property
    def tokens(self) -> np.ndarray:
        """Token stream of the shard (uint16 or uint32), a read-only view of the memory map."""
        return self.batch.column("tokens").values.to_numpy(zero_copy_only=True)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Book boundaries in ``tokens`` (int64, rows + 1 values); book i is ``tokens[offsets[i]:offsets[i + 1]]``."""
        return self.batch.column("tokens").offsets.to_numpy(zero_copy_only=True)


class TokenShards:
    """Opened data set: its manifest, and the memory-mapped shards of each split in path order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)

    def open(self, split: Split) -> list[Shard]:
        """Open the shards of ``split``.

        Raises ``UserError`` if a shard is missing or has another size, or if the data set was re-created after its
        manifest was read.
        """
        opened = []
        for info in self.manifest.shards:
            if info.split != split:
                continue
            path = self.folder / info.path
            size = path.stat().st_size if path.is_file() else None
            if size != info.bytes:
                state = "is missing" if size is None else f"has {size:,} bytes instead of {info.bytes:,}"
                raise UserError(
                    f"{path} {state}. Run 'python -m pipeline.tokenize --out {self.folder}' to re-create it."
                )
            opened.append(Shard(path))
        # Tokenizing removes the manifest before it writes a shard, so the shards match an unchanged manifest.
        if read_manifest(self.folder).fingerprint != self.manifest.fingerprint:
            raise UserError(f"{self.folder} was re-created while it was opened. Run the same command again.")
        return opened

    def streams(self, split: Split) -> list[np.ndarray]:
        """Return the token streams of the shards of ``split``."""
        return [shard.tokens for shard in self.open(split)]
