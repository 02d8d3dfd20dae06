"""Show a finished data set: ``python -m pipeline.inspect data/tokens --verify``, or one at ``s3://bucket/tokens``.

Prints its manifest as a table and a few decoded passages. With ``--verify``, every checksum is computed
again; exit code 1 if one differs.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro
from rich.markup import escape

from infra.cli import command
from infra.cli.console import console, errors
from infra.cli.table import Table
from infra.device.host import cpu_count
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.encoding.tokenizer import GPT2_SHA256, load_from
from pipeline.shards import MANIFEST, SPLITS, TOKENIZER_FILE, Manifest, Shard, ShardInfo, read_manifest


@dataclass(frozen=True)
class InspectConfig:
    """Show what a folder of token shards holds, and verify it."""

    data: Annotated[str, tyro.conf.Positional] = "data/tokens"
    """The token shards: a folder, or s3://bucket/folder (gs://, az://)."""

    verify: bool = False
    """Compute every checksum again, in parallel."""

    passages: int = 3
    """Passages to decode, at least 0, from books spread over the data set."""

    length: int = 60
    """Tokens per passage, at least 1."""

    def __post_init__(self) -> None:
        if self.passages < 0 or self.length < 1:
            raise UserError("--passages must be 0 or more, and --length 1 or more.")


def main(config: InspectConfig) -> int:
    data_dir = StorageDir.of(config.data)
    manifest = read_manifest(data_dir)
    _show(data_dir, manifest)
    tokenizer_fault = _tokenizer_fault(data_dir, manifest) if config.verify else None
    damaged = list(verify(data_dir, manifest)) if config.verify else []
    for sentence in (*damaged, *filter(None, [tokenizer_fault])):
        errors.print(escape(sentence), style="red")
    if damaged:
        errors.print(
            f"{len(damaged)} of {len(manifest.shards)} shards are damaged: delete them, and run "
            f"'python -m pipeline.tokenize' with --out {data_dir} as before to make them again.",
            markup=False,
        )
    if damaged or tokenizer_fault:
        return 1
    if config.verify:
        console.print(f"All {len(manifest.shards):,} shards match their checksums in {MANIFEST}.")
    for title, text in passages(data_dir, manifest, config.passages, config.length):
        console.print(f"\n[bold]{escape(title)}[/bold]\n{escape(text)}")
    return 0


def verify(data_dir: StorageDir, manifest: Manifest) -> Iterator[str]:
    """A sentence for every shard that is missing or differs from the manifest."""
    sizes = {name: size for split in SPLITS for name, size in data_dir.list_files(split).items()}

    def check(info: ShardInfo) -> str | None:
        path, size = data_dir / info.path, sizes.get(info.path)
        if size is None:
            return f"{path} is missing"
        if size != info.bytes:
            return f"{path} has {size:,} bytes instead of {info.bytes:,}"
        checksum = data_dir.checksum(info.path)
        return None if checksum == info.checksum else f"{path} has checksum {checksum} instead of {info.checksum}"

    with ThreadPoolExecutor(max_workers=2 * cpu_count()) as pool:
        yield from (sentence for sentence in pool.map(check, manifest.shards) if sentence)


def _tokenizer_fault(data_dir: StorageDir, manifest: Manifest) -> str | None:
    """A sentence when the data set's own vocabulary is missing or differs from the manifest."""
    if manifest.tokenizer_sha256 == GPT2_SHA256:
        return None
    file = data_dir / TOKENIZER_FILE
    try:
        digest = hashlib.sha256(data_dir.read(TOKENIZER_FILE)).hexdigest()
    except FileNotFoundError:
        fault = "is missing"
    else:
        if digest == manifest.tokenizer_sha256:
            return None
        fault = f"has sha256 {digest[:12]} instead of {manifest.tokenizer_sha256[:12]}"
    return f"{file} {fault}. Copy the file that was given with --tokenizer there."


def passages(data_dir: StorageDir, manifest: Manifest, count: int, length: int) -> Iterator[tuple[str, str]]:
    """``count`` passages of at most ``length`` tokens, from the middle of evenly spaced books: title and text."""
    books = sum(info.rows for info in manifest.shards)
    wanted = {int(place) for place in np.linspace(0, books - 1, count)} if books else set()
    tokenizer = load_from(data_dir, manifest.tokenizer_sha256)
    first = 0
    for info in manifest.shards:
        for row in sorted(place - first for place in wanted if first <= place < first + info.rows):
            shard = Shard(data_dir / info.path)
            begin, end = int(shard.offsets[row]), int(shard.offsets[row + 1]) - 1
            middle = max(begin, (begin + end - length) // 2)
            book = shard.batch.column("book")[row].as_py()
            ids = shard.tokens[middle : min(middle + length, end)].tolist()
            text = tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
            yield f"{book}, from token {middle - begin:,}, {info.path}", text
        first += info.rows


def _show(data_dir: StorageDir, manifest: Manifest) -> None:
    lines = [
        (split, *(f"{sums[name]:,}" for name in ("shards", "books", "tokens", "chars")), f"{size / 1e6:,.1f} MB")
        for split, sums in manifest.splits.items()
        for size in [sum(info.bytes for info in manifest.shards if info.split == split)]
    ]
    title = f"{data_dir}, fingerprint {manifest.fingerprint[:12]}"
    Table(title, ("split", "shards", "books", "tokens", "characters", "size"), lines).show()
    report = manifest.report
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report.get("books_dropped", {}).items())
    console.print(f"left out: {dropped or 'nothing'}", markup=False)
    settings = ", ".join(f"{name} {value}" for name, value in sorted(manifest.config.items()))
    console.print(f"made with: {settings}", markup=False)


if __name__ == "__main__":
    command.run(main, InspectConfig, module="pipeline.inspect")
