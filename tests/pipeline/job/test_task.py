"""The work of one task, without Ray: what goes into shards, what into quarantine, and that nothing is half done."""

import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books.cleaning import ENCODING_GUESSED, UNDECODABLE_BYTES
from pipeline.books.readers import DroppedBook, FileRange, RawBook, read_books
from pipeline.books.sources import build_inventory
from pipeline.config import ReadingConfig, TokenizeConfig
from pipeline.encoding.tokenizer import Tokenizer, gpt2
from pipeline.job.output import write_quarantine
from pipeline.job.partition_result import PartitionResult, read_result
from pipeline.job.plan import Partition, make_partitions
from pipeline.job.report import sum_results
from pipeline.job.task import run_partition
from pipeline.shards import Shard, checksum

Prose = Callable[..., str]


def plan_of(folder: Path, **settings) -> list[Partition]:
    config = TokenizeConfig(sources=(str(folder),), **settings)
    return make_partitions(build_inventory(config.sources), config)


def do(folder: Path, out: Path, **settings) -> PartitionResult:
    (partition,) = plan_of(folder, **settings)
    run_partition(partition, StorageDir.of(out), f"test-{uuid.uuid4()}")
    result = read_result(out, partition.name)
    assert result
    return result


def reasons(result: PartitionResult) -> dict[str, str]:
    return {dropped.book.split("/")[-1]: dropped.reason for dropped in result.dropped}


def test_a_shard_holds_every_token_of_its_books(tmp_path: Path, write_books: Callable[..., Path]) -> None:
    books = write_books(tmp_path / "books", 5)
    result = do(books, tmp_path / "out", val_fraction=0)
    (info,) = result.shards
    shard = Shard(tmp_path / "out" / info.path)
    assert checksum(tmp_path / "out" / info.path) == info.checksum
    assert shard.offsets[-1] == len(shard.tokens) == info.tokens
    for number, path in enumerate(sorted(books.iterdir())):
        tokens = shard.tokens[shard.offsets[number] : shard.offsets[number + 1]]
        assert tokens[-1] == gpt2().end_of_text
        assert np.array_equal(tokens[:-1], gpt2().encode(path.read_bytes()))
        assert shard.batch.column("book")[number].as_py() == f"books/{path.name}"


def test_a_record_describes_its_shards_and_what_was_read(tmp_path: Path, prose: Prose) -> None:
    rows = [{"text": prose(n), "title": f"Title {n}", "author": f"Author {n}", "language": "en"} for n in range(9, 20)]
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(data)
    (folder / "short.txt").write_text("Too short.", encoding="utf-8")
    crlf = prose(1).replace("\n", "\r\n").encode() + b"\xc3\xa9" * 50 + b"\xff\xff\r\n"
    (folder / "windows.txt").write_bytes(crlf)
    result = do(folder, tmp_path / "out", val_fraction=0.5, duplicates="drop-near")
    shards = {info.split: Shard(tmp_path / "out" / info.path) for info in result.shards}
    assert [info.path for info in result.shards] == ["train/000000-000.arrow", "val/000000-000.arrow"]
    held = {}
    for info in result.shards:
        shard = shards[info.split]
        rows_here = shard.batch.drop_columns(["tokens"]).to_pylist()
        for row, length in zip(rows_here, np.diff(shard.offsets).tolist(), strict=True):
            held[row["book"]] = (row["book"], row["sha256"], row["chars"], length)
            if row["source"] == "books/rows.jsonl":
                number = row["title"].removeprefix("Title ")
                assert (row["author"], row["language"]) == (f"Author {number}", "en")
        assert info.chars == sum(row["chars"] for row in rows_here)
        assert info.rows == len(rows_here)
        assert info.bytes == (tmp_path / "out" / info.path).stat().st_size
    assert result.books == [held[book] for book in sorted(held)]
    assert len(held) == 12
    assert held.keys() == result.signatures.keys()
    texts = [row["text"].encode() for row in rows]
    assert result.read_bytes == sum(map(len, texts)) + len("Too short.") + len(crlf)
    assert result.verified_bytes == len(texts[0]), "one book of each eighth partition"
    assert result.replaced == 2
    assert result.labels == {"encoding: utf-8, damaged": 1, "line ends: CRLF": 1}
    plan = plan_of(folder, val_fraction=0.5)
    run_partition(replace(plan[0], index=1), StorageDir.of(tmp_path / "out"), f"test-{uuid.uuid4()}")
    other = read_result(tmp_path / "out", "000001")
    assert other
    assert other.verified_bytes == 0


def test_a_book_whose_character_set_was_guessed_is_kept_counted_and_listed(tmp_path: Path, prose: Prose) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "cafe.txt").write_bytes((prose(1) + "A café in Málaga.\n").encode("cp1252"))
    result = do(folder, tmp_path / "out")
    assert [book for book, *_ in result.books] == ["books/cafe.txt"]
    assert [label.endswith("guessed") for label in result.labels] == [True]
    listed = write_quarantine(StorageDir.of(tmp_path / "out"), [result])
    assert [(entry.book, entry.reason) for entry in listed] == [("books/cafe.txt", ENCODING_GUESSED)]
    assert sum_results([result])["books_dropped"] == {}
    assert sum_results([result])["books_flagged"] == {ENCODING_GUESSED: 1}


def test_a_record_counts_what_cleaning_removed_and_lists_books_with_damage(tmp_path: Path, prose: Prose) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    header = "Title: A\nLanguage: English\n\n*** START OF THE PROJECT GUTENBERG EBOOK A ***"
    footer = "*** END OF THE PROJECT GUTENBERG EBOOK A ***"
    for number in range(2):
        (folder / f"{number}.txt").write_text(f"{header}\n\n{prose(number)}\n\n{footer}\n")
    (folder / "damaged.txt").write_bytes(prose(3).encode() + "“Yes”\n".encode() * 9 + b"\xff\xff\n")
    (folder / "rows.jsonl").write_bytes(json.dumps({"text": f"Yes. {prose(4)}"}).encode().replace(b"Yes", b"Y\xffes"))
    result = do(folder, tmp_path / "out")
    assert result.removed == {"header": 2 * len(header), "footer": 2 * len(footer)}
    assert result.replaced == 3
    assert {(flag.book.split("#")[0], flag.reason) for flag in result.flagged} == {
        ("books/damaged.txt", UNDECODABLE_BYTES), ("books/rows.jsonl", UNDECODABLE_BYTES)
    }  # fmt: skip


def test_what_cannot_be_read_is_quarantined_and_the_rest_is_kept(tmp_path: Path, prose: Prose) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    whole = gzip.compress(prose(1).encode())
    table = pa.table({"text": [prose(n) for n in range(20)]})
    pq.write_table(table, tmp_path / "whole.parquet")
    damaged = bytearray((tmp_path / "whole.parquet").read_bytes())
    damaged[2000:3000] = random.Random(0).randbytes(1000)
    (folder / "good.txt").write_text(prose(0), encoding="utf-8")
    (folder / "truncated.txt.gz").write_bytes(whole[: len(whole) // 2])
    (folder / "truncated.txt.zst").write_bytes(pa.compress(prose(1).encode(), codec="zstd", asbytes=True)[:-400])
    (folder / "not.txt.gz").write_bytes(b"this is no gzip file")
    (folder / "not.zip").write_bytes(b"this is no archive")
    (folder / "not.parquet").write_bytes(b"this is no table")
    (folder / "damaged.parquet").write_bytes(damaged)
    (folder / "other.parquet").write_bytes(b"")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.txt").write_bytes(b"\r\n \r\n" * 100)
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 100)
    (folder / "short.txt").write_text("Too short.", encoding="utf-8")
    (folder / "again.txt").write_text("all work and no play \n" * 4000, encoding="utf-8")
    (folder / "signs.txt").write_text("".join(f"{n * 7919 % 10007} = {n}; " for n in range(9000)), encoding="utf-8")
    (folder / "run.txt").write_text("x" * 50_000, encoding="utf-8")
    (folder / "lines.jsonl").write_text(
        json.dumps({"text": prose(2)}) + "\n{broken\n" + json.dumps({"body": "x"}) + "\n[1]\n", encoding="utf-8"
    )
    result = do(folder, tmp_path / "out")
    assert {book for book, *_ in result.books} >= {"mixed/good.txt", "mixed/lines.jsonl#0"}
    assert len(result.books) == 2
    found = reasons(result)
    assert found.pop("empty.txt") == found.pop("blank.txt") == "empty"
    assert found.pop("short.txt") == "too short"
    assert found.pop("again.txt") == "too repetitive"
    assert found.pop("binary.txt") == found.pop("signs.txt") == found.pop("run.txt") == "not text"
    assert set(found.values()) == {"unreadable"}
    assert len([name for name in found if name.startswith("lines.jsonl#")]) == 3
    assert len(found) == 3 + 7


def test_a_book_at_which_something_fails_is_listed_and_the_others_are_kept(
    tmp_path: Path, write_books: Callable[..., Path], prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failures are those of a bug, of a library in Rust, which is no ``Exception``, and while a file is read."""
    panic = type("PanicException", (BaseException,), {})

    encode = Tokenizer.encode

    def failing(self: Tokenizer, text: bytes, encoder: Any) -> np.ndarray:
        for word, failure in {b"BUG": KeyError("no such key"), b"PANIC": panic("index out of bounds")}.items():
            if word in text:
                raise failure
        return encode(self, text, encoder)

    def reading(file_range: FileRange, settings: ReadingConfig) -> Iterator[RawBook | DroppedBook]:
        for book in read_books(file_range, settings):
            yield book
            if isinstance(book, RawBook) and book.id.endswith("#0"):
                raise RuntimeError("the decompressor is confused")

    monkeypatch.setattr(Tokenizer, "encode", failing)
    monkeypatch.setattr("pipeline.job.task.read_books", reading)
    books = write_books(tmp_path / "books", 3)
    (books / "bug.txt").write_text(prose(7) + "BUG", encoding="utf-8")
    (books / "panic.txt").write_text(prose(8) + "PANIC", encoding="utf-8")
    (books / "rows.jsonl").write_text("".join(json.dumps({"text": prose(n)}) + "\n" for n in (9, 10)), encoding="utf-8")
    result = do(books, tmp_path / "out", val_fraction=0)
    assert [book for book, *_ in result.books] == [f"books/book 000{n}.txt" for n in range(3)] + ["books/rows.jsonl#0"]
    assert {(dropped.book, dropped.reason) for dropped in result.dropped} == {
        ("books/bug.txt", "failed"), ("books/panic.txt", "failed"), ("books/rows.jsonl from its book 1 on", "failed"),
    }  # fmt: skip
    assert "PanicException: index out of bounds" in {dropped.detail for dropped in result.dropped}


def test_books_with_a_million_blanks_in_a_row_are_kept_with_the_ids_of_tiktoken(tmp_path: Path, prose: Prose) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    for name, blank in (("blanks", " "), ("lines", "\n"), ("word", "a"), ("usual", "")):
        (folder / f"{name}.txt").write_text(prose(1) + blank * 1_200_000 + "end" + prose(2), encoding="utf-8")
    result = do(folder, tmp_path / "out", val_fraction=0, duplicates="keep")
    (info,) = result.shards
    assert [book for book, *_ in result.books] == [f"books/{n}.txt" for n in ("blanks", "lines", "usual", "word")]
    shard = Shard(tmp_path / "out" / info.path)
    found = {
        name: shard.tokens[shard.offsets[row] : shard.offsets[row + 1] - 1].tolist()
        for row, name in enumerate(("blanks", "lines", "usual", "word"))
    }
    first, last = (gpt2().tiktoken.encode_ordinary(text) for text in (prose(1).rstrip("\n"), f"end{prose(2)}"))
    after = gpt2().tiktoken.encode_ordinary(f" end{prose(2)}")
    assert found["blanks"] == [*first, 198, *[220] * 1_199_999, *after]
    assert found["lines"] == [*first, *[628] * 600_000, 198, *last], "all but the last line feed, by twos"


def test_a_piece_that_is_done_late_leaves_the_manifest(
    tmp_path: Path, write_books: Callable[..., Path], bucket: str
) -> None:
    """As on a machine that was cut off: others have done its partition, and the data set is finished."""
    (partition,) = plan_of(write_books(tmp_path / "books", 2))
    place = StorageDir.of(f"s3://places/late/{bucket}")
    run_partition(partition, place, f"test-{uuid.uuid4()}")
    place.write("manifest.json", b"published")
    run_partition(partition, place, f"test-{uuid.uuid4()}")
    assert place.read("manifest.json") == b"published"
    assert read_result(place, partition.name)


def test_a_source_that_vanishes_stops_the_work(tmp_path: Path, write_books: Callable[..., Path]) -> None:
    books = write_books(tmp_path / "books", 3)
    (partition,) = plan_of(books)
    (books / "book 0001.txt").unlink()
    with pytest.raises(UserError, match=r"book 0001\.txt was deleted"):
        run_partition(partition, StorageDir.of(tmp_path / "out"), f"test-{uuid.uuid4()}")
    assert not list((tmp_path / "out").rglob("*.arrow"))


def test_other_languages_are_left_out(tmp_path: Path, prose: Prose) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    german = "Es war einmal ein König, der hatte drei Töchter, und die jüngste von ihnen war so schön. " * 5
    declared = "Title: T\nLanguage: French\n*** START OF THIS PROJECT GUTENBERG EBOOK T ***\n\n" + prose(3)
    (folder / "english.txt").write_text("It was the best of times, it was the worst of times, he said. " * 5)
    (folder / "german.txt").write_text(german, encoding="utf-8")
    (folder / "declared.txt").write_text(declared, encoding="utf-8")
    result = do(folder, tmp_path / "out", languages=("en",))
    assert reasons(result) == {"german.txt": "language", "declared.txt": "language"}


def test_a_file_of_many_books_fills_several_shards(tmp_path: Path, prose: Prose) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    lines = "".join(json.dumps({"text": prose(n)}) + "\n" for n in range(200))
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    result = do(folder, tmp_path / "out", shard_size=1_000_000, val_fraction=0.3)
    assert sum(info.chars for info in result.shards) > 3_000_000
    for split, count in (("train", 4), ("val", 3)):
        names = [info.path for info in result.shards if info.split == split]
        assert names == [f"{split}/000000-{n:03d}.arrow" for n in range(count)]
    assert sum(info.rows for info in result.shards) == 200


def test_the_book_that_kills_its_worker_is_skipped(tmp_path: Path, write_books: Callable[..., Path]) -> None:
    books = write_books(tmp_path / "books", 3)
    with (books / "book 0001.txt").open("a") as file:
        file.write("KILLER\n")
    program = f"""
        import os, sys
        import pipeline.job.task
        from infra.storage.directory import StorageDir
        from pipeline.config import TokenizeConfig
        from pipeline.job.plan import make_partitions
        from pipeline.books.sources import build_inventory

        from pipeline.encoding.tokenizer import Tokenizer

        encode = Tokenizer.encode
        def deadly(self, text, encoder):
            if b"KILLER" in text:
                os.kill(os.getpid(), {signal.SIGKILL})
            return encode(self, text, encoder)
        Tokenizer.encode = deadly
        config = TokenizeConfig(sources=({str(books)!r},))
        (partition,) = make_partitions(build_inventory(config.sources), config)
        pipeline.job.task.run_partition(partition, StorageDir.of({str(tmp_path / "out")!r}), "deadly-{os.getpid()}")
    """
    codes = []
    while not codes or codes[-1]:
        codes.append(subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=Path.cwd()).returncode)
        assert len(codes) < 6
    assert codes == [-signal.SIGKILL] * 3 + [0]
    result = read_result(tmp_path / "out", "000000")
    assert result
    assert result.dropped == [
        DroppedBook("books/book 0001.txt", "crashed the worker", "3 times while it was processed")
    ]
    assert len(result.books) == 2


def test_a_full_disk_leaves_no_half_shard_and_the_next_run_makes_it_whole(
    tmp_path: Path, write_books: Callable[..., Path]
) -> None:
    books, out = write_books(tmp_path / "books", 5), tmp_path / "out"
    (out / "train").mkdir(parents=True)
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
    try:
        with pytest.raises(UserError, match=r"train/.*\.arrow"):
            do(books, out, val_fraction=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))
    assert not [path for path in out.rglob("*") if path.is_file()]
    (info,) = do(books, out, val_fraction=0).shards
    assert checksum(out / info.path) == info.checksum
