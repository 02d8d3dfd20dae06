"""THE CONTRACT between preparing data and training on it: token shards and their manifest.

A data set is a folder: ``train/*.arrow``, ``val/*.arrow``, ``quarantine.jsonl`` and ``manifest.json``, beside which
``tracking.json`` names the run in MLflow that made it, and so is the one file that differs when it is made again.
A data set of another vocabulary than GPT-2's holds that, too, as ``tokenizer.json``.
A shard is one uncompressed Arrow IPC file with one record batch and one row per book; the child buffer
of ``tokens`` is therefore the shard's contiguous token stream, which a memory map slices without a
copy, and the list offsets are the book boundaries. The manifest is written last: a folder without one
is unfinished. Imports neither Ray nor torch, so that training and notebooks can open shards cheaply.
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

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
QUARANTINE = "quarantine.jsonl"
TRACKING = "tracking.json"
TOKENIZER_FILE = "tokenizer.json"
PARTITIONS = "pieces"
"""The folder that records which part of the work is done."""
SETTINGS_FILE = f"{PARTITIONS}/settings.json"
"""How the data set is made; it is there before the first shard."""
SPLIT_HISTORY = f"{PARTITIONS}/split_history.feather"
"""The split of every text that the folder's data sets have held."""

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")

SHARD = re.compile(rf"({'|'.join(SPLITS)})/\d{{6,}}-\d{{3,}}\.arrow")
"""What a shard is called: other files in a data set's folders are not this program's to read, write or delete."""


def shard_path(split: Split, partition: str, number: int) -> str:
    """Where a data set has the shard ``number`` of those that a piece wrote of ``split``."""
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
    """One book in a shard. ``tokens`` is uint16 or uint32 and ends with the end of text; ``sha256`` is of the cleaned
    text; ``released`` is the date of the edition as its header writes it."""

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
    """A shard as the manifest lists it. ``path`` is relative to the folder; ``checksum`` is xxh3-128 of the file."""

    path: str
    split: Split
    bytes: int
    rows: int
    tokens: int
    chars: int
    checksum: str

    def __post_init__(self) -> None:
        if not SHARD.fullmatch(self.path):  # a manifest may come from elsewhere, and names what is read and written
            raise UserError(f"{self.path!r} is not the name of a shard")


@strict
@dataclass(frozen=True)
class Manifest:
    """A finished data set: how and from what it was made, and a checksum for every shard."""

    config: dict[str, Any]
    tokenizer_sha256: str
    shards: list[ShardInfo]
    inputs: dict[str, Any]
    """The sources: number, bytes and a hash over their ids and sizes."""
    report: dict[str, Any]
    """The counts of the closing report: books kept and dropped, characters, tokens, ..."""
    fingerprint: str
    """Hash over every shard's split and checksum: equal fingerprints mean byte-equal token streams."""
    format_version: int = FORMAT_VERSION
    splits: dict[str, dict[str, int]] = field(kw_only=True)
    """Per split: shards, books, tokens, characters."""

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
        """The manifest of these shards, in path order, with its totals and fingerprint."""
        ordered = sorted(shards, key=lambda shard: shard.path)
        identity = json.dumps([[s.split, s.path, s.checksum] for s in ordered] + [tokenizer_sha256])
        splits = {split: {"shards": 0, "books": 0, "tokens": 0, "chars": 0} for split in SPLITS}
        for shard in ordered:
            for name, count in (("shards", 1), ("books", shard.rows), ("tokens", shard.tokens), ("chars", shard.chars)):
                splits[shard.split][name] += count
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        return cls(config, tokenizer_sha256, ordered, inputs, report, fingerprint, splits=splits)

    def write(self, data_dir: StorageDir | Path) -> None:
        """Finish the data set at ``data_dir``."""
        StorageDir.of(data_dir).write_json(MANIFEST, to_json(self))


def read_manifest(location: StorageDir | Path | str) -> Manifest:
    """The manifest of a finished data set, in a folder or in object storage."""
    data_dir = StorageDir.of(location)
    path = data_dir / MANIFEST
    try:
        content = data_dir.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        there = data_dir.list_files()
        if any(name.partition("/")[0] in (*SPLITS, PARTITIONS) for name in there):
            raise UserError(
                f"{data_dir} has no {MANIFEST}, so its shards are unfinished: run "
                f"'python -m pipeline.tokenize --out {data_dir}' again to finish them."
            ) from None
        make = f"make them with 'python -m pipeline.tokenize --out {data_dir}'."
        if there:
            make = f"if those are books in it, 'python -m pipeline.tokenize {data_dir} --out data/tokens' makes shards."
        raise UserError(f"there are no token shards at {data_dir}: {make}") from None
    try:
        values = json.loads(content)
        if (version := values["format_version"]) == FORMAT_VERSION:
            return from_json(Manifest, values, "it")
        wrong = f"has format version {version}, and this program reads version {FORMAT_VERSION}"
    except (KeyError, TypeError, ValueError, UserError) as damage:
        wrong = f"is damaged ({first_line(damage).rstrip('.')})"
    raise UserError(
        f"{path} {wrong}: make the shards again with 'python -m pipeline.tokenize --out {data_dir} --overwrite'."
    )


def producing_run(location: StorageDir | Path | str) -> RunRef | None:
    """The run in MLflow that made a data set; None where that is not known here."""
    data_dir = StorageDir.of(location)
    try:
        content = data_dir.read(TRACKING)
    except OSError:
        return None
    try:
        run_ref = from_json(RunRef, json.loads(content), data_dir / TRACKING)
    except (ValueError, UserError):
        return None
    return run_ref if run_ref.is_reachable else None


def write_shard(data_dir: StorageDir | Path, path: str, split: Split, rows: list[ShardRow]) -> ShardInfo:
    """Write ``rows``, in the given order, as the shard ``path`` at ``data_dir``, atomically and durably.

    Its ids have the type of the first row's.
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
    """Write one record batch, as shards have it, as the shard ``path`` at ``data_dir``, atomically and durably.

    The file is made in memory, because storage may have to be written again, and a checksum would read it back.
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
    """xxh3-128 of a file's bytes, in hexadecimal, as ``ShardInfo.checksum`` holds it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


class Shard:
    """A shard: its token stream and its books. A local one is memory-mapped, without reading the file."""

    def __init__(self, path: StorageDir | Path) -> None:
        file = StorageDir.of(path)
        try:
            self.batch = pa.ipc.open_file(pa.py_buffer(file.parent.map(file.name))).get_batch(0)
        except (OSError, ValueError) as damage:
            raise UserError(
                f"{path} cannot be read as a token shard ({damage}): 'python -m pipeline.inspect "
                f"{path.parent.parent} --verify' shows what is damaged."
            ) from damage

    @cached_property
    def tokens(self) -> np.ndarray:
        """The shard's token stream, uint16 or uint32, a read-only view of the memory map."""
        return self.batch.column("tokens").values.to_numpy(zero_copy_only=True)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Book boundaries in ``tokens``: book i is ``tokens[offsets[i]:offsets[i + 1]]``; int64, rows + 1 long."""
        return self.batch.column("tokens").offsets.to_numpy(zero_copy_only=True)


class TokenShards:
    """An opened data set: its manifest and the memory-mapped shards of each split, in path order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)

    def open(self, split: Split) -> list[Shard]:
        """The shards of ``split``.

        Raises ``UserError`` naming the first that is missing or of another length, and when the data set has been made
        again since its manifest was read.
        """
        opened = []
        for info in self.manifest.shards:
            if info.split != split:
                continue
            path = self.folder / info.path
            size = path.stat().st_size if path.is_file() else None
            if size != info.bytes:
                state = "is missing" if size is None else f"has {size:,} bytes where the manifest says {info.bytes:,}"
                raise UserError(
                    f"{path} {state}: run 'python -m pipeline.tokenize --out {self.folder}' to make it again."
                )
            opened.append(Shard(path))
        # A new run removes the manifest before it writes a shard: while it is the same one, so are the shards.
        if read_manifest(self.folder).fingerprint != self.manifest.fingerprint:
            raise UserError(f"{self.folder} was made again while it was being opened: run the same command again.")
        return opened

    def streams(self, split: Split) -> list[np.ndarray]:
        return [shard.tokens for shard in self.open(split)]
