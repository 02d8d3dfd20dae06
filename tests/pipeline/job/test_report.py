"""The counts and rates of the report."""

import re

import pytest

from infra.tracking.names import MAX_TOP_LEVEL_METRICS, group_under_detail
from pipeline.books.readers import DroppedBook, FileRange
from pipeline.books.sources import Inventory, SourceFile
from pipeline.config import TokenizeConfig
from pipeline.job.partition_result import PartitionResult
from pipeline.job.plan import Partition
from pipeline.job.report import METRICS, JobStats, Stopwatch, format_estimate, make_report, sum_results
from pipeline.shards import ShardInfo


def result(
    lengths: dict[str, int], dropped: list[DroppedBook], *, read: int, replaced: int, verified: int
) -> PartitionResult:
    """Books by their tokens, of four characters each, in one shard."""
    books = [(book, "0" * 64, 4 * tokens, tokens) for book, tokens in lengths.items()]
    total = sum(lengths.values())
    shard = ShardInfo("train/000000-000.arrow", "train", 2 * total, len(books), total, 4 * total, "0" * 32)
    flagged = [DroppedBook(book, "undecodable bytes", "kept") for book in lengths]
    removed = {"footer": 1_000, "credits": replaced}
    labels = {"line ends: CRLF": len(books)}
    return PartitionResult("key", [shard], books, dropped, labels, {}, [], read, replaced, verified, flagged, removed)


RESULTS = [
    result({"a": 1000, "b": 1001}, [DroppedBook("c", "empty", "")], read=8100, replaced=3, verified=500),
    result({"d": 1_000_000, "e": 1_000_001}, [DroppedBook("f", "empty", ""), DroppedBook("g", "language", "")],
           read=8_100_000, replaced=2, verified=0),
]  # fmt: skip


def test_totals_are_sums_over_all_records() -> None:
    counts = sum_results(iter(RESULTS))
    assert {bound: count for bound, count in counts.pop("tokens_per_book").items() if count} == {
        "up to 1,000": 1, "up to 3,000": 1, "up to 1,000,000": 1, "over 1,000,000": 1
    }  # fmt: skip
    assert counts == {
        "books_read": 7, "books_kept": 4, "books_val": 0, "books_dropped": {"empty": 2, "language": 1},
        "books_flagged": {"undecodable bytes": 4}, "removed_chars": {"credits": 5, "footer": 2_000},
        "read_bytes": 8_108_100, "chars": 8_008_008, "tokens": 2_002_002,
        "replaced_bytes": 5, "labels": {"line ends: CRLF": 4}, "verified_bytes": 500,
    }  # fmt: skip


def test_an_estimate_covers_the_remaining_work() -> None:
    file = SourceFile("a.txt", "a.txt", 800_000_000, 0)
    partitions = [Partition(number, (FileRange(file, 800_000_000),), TokenizeConfig()) for number in range(4)]

    def numbers(
        plan: list[Partition], todo: list[Partition], done: list[PartitionResult], workers: int, *, on_ray: bool
    ) -> list[str]:
        told = format_estimate(plan, todo, done, workers, token_bytes=2, uses_ray=on_ray)
        return re.findall(r"[\d,.]+s?", told.replace(", ", " "))

    assert numbers(partitions, partitions[1:], [], 2, on_ray=True) == ["600.0", "1,200.0", "27s", "2"], (
        "12 s, 2.4 GB at 160 MB/s"
    )
    assert numbers(partitions[:1], partitions[:1], [], 8, on_ray=False)[2] == "13s", (
        "one partition is done by one worker"
    )
    assert numbers(partitions, partitions[:1], RESULTS[:1], 2, on_ray=False)[0] == "197.6", "2,001 of 8,100 bytes"
    assert numbers(partitions, [], RESULTS, 2, on_ray=False) == ["0.0", "0.0", "0s", "2"]
    wide = format_estimate(partitions, partitions[1:], [], 2, token_bytes=4, uses_ray=False)
    assert "600.0 million tokens, 2,400.0 MB" in wide, "of a tokenizer of more than 65,536 ids"


def test_rates_are_of_this_run() -> None:
    progress = JobStats()
    for _ in range(2):
        progress.add({"bytes": 3_000_000, "tokens": 1_000_000, "seconds": {"read": 0.25, "encode": 0.5}})
    progress.wall = Stopwatch({"plan": 1.0, "work": 4.0})
    assert progress.metrics() == pytest.approx(
        {
            "time/plan": 1, "time/work": 4, "time/stage_read": 0.5, "time/stage_encode": 1,
            "throughput/read_mb_per_second": 12, "throughput/read_tokens_per_second": 4e6,
            "throughput/encode_mb_per_second": 6, "throughput/encode_tokens_per_second": 2e6,
            "throughput/mb_per_second": 1.5, "throughput/tokens_per_second": 5e5,
        }
    )  # fmt: skip
    named = group_under_detail(progress.metrics(), METRICS)
    assert {name for name in named if not name.startswith("detail/")} == {
        "time/work", "throughput/mb_per_second", "throughput/tokens_per_second",
    }  # fmt: skip
    assert named["detail/throughput/read_mb_per_second"] == 12
    assert len(METRICS) <= MAX_TOP_LEVEL_METRICS
    nothing = Inventory([]).summary()
    report = make_report("tokens", sum_results(RESULTS), progress, "f" * 64, nothing, "about 2 min: `train`").markdown()
    for number in ("4 books, 2,002,002 tokens", "2 empty, 1 language", "8,008,008", "4.00", "6.0 MB", "about 2 min"):
        assert number in report
    assert report.index("| encode | 1.00 | 6 | 2.0 |") < report.index("| read | 0.50 | 12 | 4.0 |")
    odd = sum_results(RESULTS) | {"labels": {"looks like HTML or XML": 3}, "books_val": 5, "extra_validation_books": 4}
    inputs = nothing | {"skipped": {".csv": 2, "in a test split": 1}, "named_splits": {"train": 3, "val": 1}}
    report = make_report(
        "tokens", odd | {"first_extra_validation_books": ["a", "b", "c"]}, JobStats(), "f" * 64, inputs, ""
    ).markdown()
    for number in (
        "3 look like HTML",
        "5 books, 4 of them although --val-fraction does not select them (`a`, `b`, `c`, ...)",
        "2 .csv, 1 in a test split",
        "3 for training, 1 for",
    ):
        assert number in report
    assert JobStats().metrics() == {}
