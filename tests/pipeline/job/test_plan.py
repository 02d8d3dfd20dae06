"""Partitions: their bounds, and the keys by which their work is known to be done."""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.books.readers import FileRange
from pipeline.books.sources import Inventory, SourceFile, build_inventory
from pipeline.config import TokenizeConfig
from pipeline.job import plan
from pipeline.job.plan import Partition, make_partitions, split_file

FILE = SourceFile("a.txt", "/a.txt", 100, 1)
RANGE = FileRange(FILE, 100, 0, None)
PARTITION = Partition(3, (RANGE,), TokenizeConfig())


def other(name: str, value: Any) -> Partition:
    """:data:`PARTITION` with another value for a field of its own, its settings, its part or its file."""
    if name in ("index", "ranges"):
        return replace(PARTITION, **{name: value})
    if hasattr(PARTITION.settings, name):
        return replace(PARTITION, settings=replace(PARTITION.settings, **{name: value}))
    if name in ("start", "stop"):
        return replace(PARTITION, ranges=(replace(RANGE, **{name: value}),))
    return replace(PARTITION, ranges=(replace(RANGE, file=replace(FILE, **{name: value})),))


def test_what_decides_a_shard_is_in_its_key_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    decides: dict[str, Any] = {
        "id": "b.txt", "uri": "/b.txt", "size": 101, "modified": 2, "start": 1, "stop": 100, "index": 4,
        "ranges": (RANGE, RANGE), "min_chars": 7, "val_fraction": 0.5, "encoder": "tiktoken", "duplicates": "drop-near",
        "join_lines": True, "languages": ("en",),
    }  # fmt: skip
    keys = [other(name, value).key() for name, value in decides.items()]
    keys.append(replace(PARTITION, tokenizer_sha256="0").key())
    with monkeypatch.context() as patch:
        patch.setattr(plan, "FORMAT_VERSION", 0)
        keys.append(PARTITION.key())
    assert len({PARTITION.key(), *keys}) == 1 + len(keys)
    for name, value in {"sources": ("b",), "workers": 7, "out": Path("b"), "overwrite": True}.items():
        assert other(name, value).key() == PARTITION.key(), name


def sizes(files: list[int], **settings: Any) -> list[list[int]]:
    inventory = Inventory([SourceFile(f"{n:04d}.txt", "", size, 0) for n, size in enumerate(files)])
    config = TokenizeConfig(shard_size=1_000_000, **settings)
    return [[file_range.size for file_range in partition.ranges] for partition in make_partitions(inventory, config)]


def test_a_piece_takes_books_until_it_is_full_and_a_larger_one_alone() -> None:
    assert sizes([600_000, 400_000, 1, 999_999, 1_000_000]) == [[600_000, 400_000], [1, 999_999], [1_000_000]]
    assert sizes([1, 3_000_000, 1]) == [[1], [3_000_000], [1]]
    assert sizes([1_000_001, 0, 1]) == [[1_000_001], [0, 1]]


def test_a_piece_has_a_limited_number_of_files() -> None:
    assert [len(partition) for partition in sizes([0] * (2 * plan.MAX_RANGES_PER_PARTITION + 1))] == [4096, 4096, 1]


def test_parts_cover_a_file_and_compressed_ones_count_three_times_their_size() -> None:
    config = TokenizeConfig(shard_size=1_000_000)
    lines = SourceFile("a.jsonl", "", 2_500_000, 0)
    bounds = [(file_range.start, file_range.stop, file_range.size) for file_range in split_file(lines, config)]
    assert bounds == [
        (0, 1_000_000, 1_000_000), (1_000_000, 2_000_000, 1_000_000), (2_000_000, 2_500_000, 500_000)
    ]  # fmt: skip
    for name in ("a.jsonl.gz", "a.txt.zst"):
        assert split_file(SourceFile(name, "", 2_500_000, 0), config) == [
            FileRange(SourceFile(name, "", 2_500_000, 0), 7_500_000)
        ]


def test_containers_are_split_at_members_and_row_groups(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_STORED) as archive:
        for number in range(5):
            archive.writestr(f"{number}.txt", b"x" * 500_000)
    texts = [f"{n:06d}" * 100_000 for n in range(5)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=1, use_dictionary=False)
    for name, expected in (("a.zip", [(0, 2), (2, 4), (4, 5)]), ("a.parquet", [(0, 2), (2, 4), (4, 5)])):
        (file,) = build_inventory([str(tmp_path / name)]).files
        ranges = split_file(file, TokenizeConfig(shard_size=1_000_000))
        assert [(file_range.start, file_range.stop) for file_range in ranges] == expected
        assert 2_500_000 <= sum(file_range.size for file_range in ranges) < 3_100_000
