"""The command ``python -m pipeline.inspect data/tokens --verify``, which shows a finished data set.

It prints a table of the manifest and a few decoded passages. With ``--verify``, it recomputes all checksums, and with
``--reencode`` also all tokens. The exit code is 1 if one differs.
"""

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro
from rich.markup import escape

from infra.cli import command
from infra.cli.console import console, errors
from infra.cli.options import Switch
from infra.cli.progress import status
from infra.cli.table import Report, Table
from infra.cli.units import format_count, format_duration
from infra.device.hardware import device_info
from infra.device.host import cpu_count
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.encoding.tokenizer import GPT2_SHA256, EncodingMismatch, Tokenizer, load_from
from pipeline.next_command import next_command
from pipeline.shards import MANIFEST_FILE, SPLITS, TOKENIZER_FILE, Manifest, Shard, ShardInfo, read_manifest


@dataclass(frozen=True)
class InspectConfig:
    """Show the contents of a data set of token shards, and verify it."""

    data: Annotated[str, tyro.conf.Positional] = "data/tokens"
    """Data set of token shards, a folder or s3://bucket/folder (gs://, az://)."""

    verify: Switch = False
    """Recompute all checksums and compare them with the manifest."""

    reencode: Switch = False
    """In addition to --verify, decode every book, encode it again with the reference library, and compare the tokens.
    The reference library is tiktoken or, for a tokenizer.json, tokenizers."""

    passages: int = 3
    """Number of passages to decode, from books spread over the data set (at least 0)."""

    passage_tokens: int = 60
    """Number of tokens per passage (at least 1)."""

    def __post_init__(self) -> None:
        if self.passages < 0:
            raise UserError(f"--passages {self.passages} must be at least 0.")
        if self.passage_tokens < 1:
            raise UserError(f"--passage-tokens {self.passage_tokens} must be at least 1.")


def main(config: InspectConfig) -> int:
    data_dir = StorageDir.of(config.data)
    manifest = read_manifest(data_dir)
    _print_manifest(data_dir, manifest)
    verify = config.verify or config.reencode
    tokenizer_fault = _find_tokenizer_fault(data_dir, manifest) if verify else None
    damaged = list(find_damage(data_dir, manifest)) if verify else []
    for sentence in (*damaged, *filter(None, [tokenizer_fault])):
        errors.print(escape(sentence), style="red")
    if damaged:
        errors.print(
            f"{len(damaged):,} of {format_count(len(manifest.shards), 'shard')} damaged. Delete the damaged shards, "
            f"and run the same 'python -m pipeline.tokenize' command with --out {data_dir} again to re-create them.",
            markup=False,
        )
    if damaged or tokenizer_fault:
        return 1
    if verify:
        console.print(
            f"Verified {format_count(len(manifest.shards), 'shard')}: all match the checksums in {MANIFEST_FILE}."
        )
    if config.reencode and not _reencode(data_dir, manifest):
        return 1
    for title, text in decode_passages(data_dir, manifest, config.passages, config.passage_tokens):
        console.print(f"\n[bold]{escape(title)}[/bold]\n{escape(text)}")
    console.print()
    Report([("Next", next_command(config.data, manifest, device_info()))]).show()
    return 0


def find_damage(data_dir: StorageDir, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence about each shard that is missing or differs from the manifest."""
    sizes = {name: size for split in SPLITS for name, size in data_dir.list_files(split).items()}

    def check(info: ShardInfo) -> str | None:
        path, size = data_dir / info.path, sizes.get(info.path)
        if size is None:
            return f"{path} is missing."
        if size != info.bytes:
            return f"{path} has {size:,} bytes instead of {info.bytes:,}."
        checksum = data_dir.checksum(info.path)
        return None if checksum == info.checksum else f"{path} has checksum {checksum} instead of {info.checksum}."

    with ThreadPoolExecutor(max_workers=2 * cpu_count()) as pool:
        yield from (sentence for sentence in pool.map(check, manifest.shards) if sentence)


def _reencode(data_dir: StorageDir, manifest: Manifest) -> bool:
    """Print whether the books of the data set have the tokens of the reference library, and return it."""
    tokenizer = load_from(data_dir, manifest.tokenizer_sha256)
    if tokenizer is None:
        raise UserError(f"{data_dir} was created without a tokenizer, so its books have no text. Remove --reencode.")
    faults = list(find_encoding_faults(data_dir, manifest, tokenizer))
    for sentence in faults:
        errors.print(escape(sentence), style="red")
    books = sum(info.rows for info in manifest.shards)
    if faults:
        errors.print(
            f"{len(faults):,} of {format_count(books, 'book')} differ. Re-create the data set with 'python -m "
            f"pipeline.tokenize --overwrite --encoder tiktoken'.",
            markup=False,
        )
    else:
        tokens = sum(info.tokens for info in manifest.shards)
        console.print(
            f"Encoded {format_count(books, 'book')} again with {tokenizer.library}: all {tokens:,} tokens are equal."
        )
    return not faults


def find_encoding_faults(data_dir: StorageDir, manifest: Manifest, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a sentence about each book whose tokens are not those that the reference library gives for its text.

    Threads suffice, because the reference libraries release the GIL. Each has one shard and the text of one book in
    memory.
    """
    total, start = sum(info.tokens for info in manifest.shards), time.perf_counter()
    finished, lock = 0, threading.Lock()

    def check(info: ShardInfo) -> list[str]:
        nonlocal finished
        shard, faults = Shard(data_dir / info.path), []
        for row in range(info.rows):
            ids = shard.tokens[int(shard.offsets[row]) : int(shard.offsets[row + 1])]
            book, sha256 = (shard.batch.column(name)[row].as_py() for name in ("book", "sha256"))
            if fault := find_encoding_fault(tokenizer, book, sha256, ids):
                faults.append(f"{data_dir / info.path}: {fault}")
            with lock:
                finished += len(ids)
            seconds = time.perf_counter() - start
            progress = f"{finished:,} of {total:,} tokens | {finished / seconds:,.0f} tokens/s"
            time_left = format_duration(round(seconds * (total / max(1, finished) - 1)))
            live_status.update("re-encoding", f"{progress} | {time_left} left")
        return faults

    with ThreadPoolExecutor(max_workers=cpu_count()) as pool, status("re-encoding") as live_status:
        for faults in pool.map(check, manifest.shards):
            yield from faults


def find_encoding_fault(tokenizer: Tokenizer, book: str, sha256: str, ids: np.ndarray) -> str | None:
    """Return a sentence if ``ids`` are not the reference's tokens of the book whose text has the hash ``sha256``."""
    if ids[-1:].tolist() != [tokenizer.end_of_text]:
        return f"The tokens of {book} do not end with the end-of-text token."
    text = tokenizer.decode_bytes(ids[:-1])
    if hashlib.sha256(text).hexdigest() != sha256:
        return f"The tokens of {book} do not decode to its text with sha256 {sha256[:12]}."
    try:
        tokenizer.verify(book, text, ids[:-1], len(text))
    except EncodingMismatch as difference:
        return str(difference)
    return None


def _find_tokenizer_fault(data_dir: StorageDir, manifest: Manifest) -> str | None:
    """Return a sentence if the data set's tokenizer file is missing or differs from the manifest; else None."""
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
    return f"{file} {fault}. Restore it by copying the file that was used with --tokenizer."


def decode_passages(data_dir: StorageDir, manifest: Manifest, count: int, length: int) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of ``count`` passages of at most ``length`` tokens, each from the middle of a book.

    The books are evenly spaced in the data set.
    """
    books = sum(info.rows for info in manifest.shards)
    selected = {int(number) for number in np.linspace(0, books - 1, count)} if books else set()
    tokenizer = load_from(data_dir, manifest.tokenizer_sha256)
    first_book = 0
    for info in manifest.shards:
        for row in sorted(number - first_book for number in selected if first_book <= number < first_book + info.rows):
            shard = Shard(data_dir / info.path)
            begin, end = int(shard.offsets[row]), int(shard.offsets[row + 1]) - 1
            middle = max(begin, (begin + end - length) // 2)
            book = shard.batch.column("book")[row].as_py()
            ids = shard.tokens[middle : min(middle + length, end)].tolist()
            text = tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
            yield f"{book}, from token {middle - begin:,}, {info.path}", text
        first_book += info.rows


def _print_manifest(data_dir: StorageDir, manifest: Manifest) -> None:
    lines = [
        (split, *(f"{sums[name]:,}" for name in ("shards", "books", "tokens", "chars")), f"{size / 1e6:,.1f}")
        for split, sums in manifest.splits.items()
        for size in [sum(info.bytes for info in manifest.shards if info.split == split)]
    ]
    title = f"{data_dir}, fingerprint {manifest.fingerprint[:12]}"
    Table(title, ("split", "shards", "books", "tokens", "characters", "size (MB)"), lines).show()
    report = manifest.report
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report.get("books_dropped", {}).items())
    console.print(f"dropped: {dropped or 'none'}", markup=False)
    settings = ", ".join(f"{name} {value}" for name, value in sorted(manifest.config.items()))
    console.print(f"settings: {settings}", markup=False)


if __name__ == "__main__":
    command.run(main, InspectConfig, module="pipeline.inspect")
