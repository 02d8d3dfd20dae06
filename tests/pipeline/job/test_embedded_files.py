"""Local books for machines that do not have this machine's disk: carried while they are few, else refused."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books.sources import SourceFile, build_inventory
from pipeline.config import SAMPLE, TokenizeConfig
from pipeline.job.embedded_files import embed_local_files, is_any_missing
from pipeline.job.plan import make_partitions
from pipeline.job.task import run_partition


def test_carried_books_make_the_same_shards_on_a_machine_without_them(
    tmp_path: Path, write_books: Callable[..., Path]
) -> None:
    books = write_books(tmp_path / "books", 3)
    config = TokenizeConfig((str(books), SAMPLE))
    plan = make_partitions(build_inventory(config.sources), config)
    here, there = StorageDir.of(tmp_path / "here"), StorageDir.of(tmp_path / "there")
    for partition in plan:
        run_partition(partition, here, f"test-{uuid.uuid4()}")
    partitions = embed_local_files(plan, ["w1"])
    assert [partition.key() for partition in partitions] == [partition.key() for partition in plan]
    for book in books.iterdir():
        book.unlink()
    for partition in partitions:
        run_partition(partition, there, f"test-{uuid.uuid4()}")
    assert {name: there.read(name) for name in there.list_files()} == {
        name: here.read(name) for name in here.list_files()
    }


def test_many_local_books_are_refused(tmp_path: Path, write_books: Callable[..., Path]) -> None:
    config = TokenizeConfig((str(write_books(tmp_path / "books", 3)),))
    with pytest.raises(UserError, match=r"which w1 cannot read\..* s3://bucket/books"):
        embed_local_files(make_partitions(build_inventory(config.sources), config), ["w1"], 10_000)


def test_a_file_of_another_size_or_time_is_another_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"12345")
    path, modified = str(tmp_path / "a.txt"), (tmp_path / "a.txt").stat().st_mtime_ns
    assert not is_any_missing([(path, 5, modified)])
    assert not is_any_missing([(path, 5, 0)])
    for size, time in ((6, modified), (4, modified), (5, modified + 1)):
        assert is_any_missing([(path, size, time)])
    assert is_any_missing([(str(tmp_path / "b.txt"), 5, modified)])


def test_a_file_that_changed_after_the_plan_is_not_embedded(tmp_path: Path, write_books: Callable[..., Path]) -> None:
    books = write_books(tmp_path / "books", 2)
    config = TokenizeConfig((str(books),))
    plan = make_partitions(build_inventory(config.sources), config)
    (books / "book 0001.txt").write_text("Another text. " * 99, encoding="utf-8")
    with pytest.raises(UserError, match=r"book 0001\.txt changed"):
        embed_local_files(plan, ["w1"])


def test_each_machine_reads_its_own_sample() -> None:
    (own,) = build_inventory([SAMPLE]).files
    with own.open() as mine, SourceFile(SAMPLE, "/another/python/kjv.jsonl", own.size, 0).open() as theirs:
        assert mine.read() == theirs.read()
