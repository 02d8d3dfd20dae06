"""Duplicates in different partitions and splits are removed from shards, records and the disk."""

import dataclasses
import json
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infra.storage.directory import StorageDir
from pipeline.books.sources import build_inventory
from pipeline.config import TokenizeConfig
from pipeline.encoding.tokenizer import gpt2
from pipeline.job.dedup import Rank, drop_duplicates, find_duplicates
from pipeline.job.partition_result import PartitionResult, read_result
from pipeline.job.plan import make_partitions
from pipeline.job.task import run_partition
from pipeline.shards import Shard, checksum


def by_id(book: str) -> Rank:
    """The rank of a book where none is held out."""
    return True, False, False, book


@pytest.fixture
def results(
    tmp_path: Path, prose: Callable[..., str], limit_partitions: Callable[[int], None]
) -> dict[str, PartitionResult]:
    """Four partitions: two originals, an exact copy and an empty book, another copy alone, a near one with a third
    book."""
    limit_partitions(2)
    books = tmp_path / "books"
    books.mkdir()
    for name, text in {
        "a": prose(1, 200), "b": prose(2, 200), "c": prose(1, 200).replace("\n", "\r\n"), "d": "", "e": prose(2, 200),
        "f": "", "g": prose(1, 200) + "THE END\n", "h": prose(3, 200),
    }.items():  # fmt: skip
        (books / f"{name}.txt").write_text(text, encoding="utf-8")
    config = TokenizeConfig((str(books),), duplicates="drop-near", val_fraction=0)
    planned = make_partitions(build_inventory(config.sources), config)
    for partition in planned:
        run_partition(partition, StorageDir.of(tmp_path), f"test-{uuid.uuid4()}")
    found = {partition.name: read_result(tmp_path, partition.name) for partition in planned}
    return {name: result for name, result in reversed(found.items()) if result}  # whichever is done first


def test_the_first_by_id_is_kept_and_the_others_are_removed_everywhere(
    results: dict[str, PartitionResult], tmp_path: Path, prose: Callable[..., str]
) -> None:
    thinned = drop_duplicates(StorageDir.of(tmp_path), results, find_duplicates(results, by_id))
    kept = {name: [book for book, *_ in result.books] for name, result in sorted(thinned.items())}
    assert list(kept.values()) == [["books/a.txt", "books/b.txt"], [], [], ["books/h.txt"]]
    reasons = {d.book: (d.reason, d.detail) for result in thinned.values() for d in result.dropped}
    assert reasons == {
        "books/c.txt": ("duplicate", "same text as books/a.txt"), "books/d.txt": reasons["books/d.txt"],
        "books/e.txt": ("duplicate", "same text as books/b.txt"), "books/f.txt": reasons["books/f.txt"],
        "books/g.txt": ("near duplicate", reasons["books/g.txt"][1]),
    }  # fmt: skip
    assert "phrases are also in books/a.txt" in reasons["books/g.txt"][1]
    assert reasons["books/d.txt"][0] == reasons["books/f.txt"][0] == "empty"
    for name, result in thinned.items():
        assert read_result(tmp_path, name) == result, "on disk as well"
        assert list(result.signatures) == kept[name]
        for info in result.shards:
            shard = Shard(tmp_path / info.path)
            assert shard.batch.column("book").to_pylist() == kept[name]
            assert checksum(tmp_path / info.path) == info.checksum
            assert (info.rows, info.tokens) == (len(kept[name]), len(shard.tokens))
    first = Shard(tmp_path / "train/000000-000.arrow")
    assert np.array_equal(first.tokens[: first.offsets[1] - 1], gpt2().encode(prose(1, 200).encode()))
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == ["000000-000.arrow", "000003-000.arrow"]
    assert find_duplicates(thinned, by_id) == {}


def test_a_run_killed_while_dropping_ends_with_the_same_records(
    results: dict[str, PartitionResult], tmp_path: Path
) -> None:
    duplicates = find_duplicates(results, by_id)
    some = {book: dropped for book, dropped in duplicates.items() if book in ("books/c.txt", "books/g.txt")}
    half = drop_duplicates(StorageDir.of(tmp_path), results, some)
    whole = drop_duplicates(StorageDir.of(tmp_path), half, find_duplicates(half, by_id))
    assert {d.book for result in whole.values() for d in result.dropped} >= duplicates.keys()
    values = json.dumps([dataclasses.asdict(whole[name]) for name in sorted(whole)])
    assert all(f'"{book}"' in values for book in duplicates)
    assert not find_duplicates(whole, by_id)
