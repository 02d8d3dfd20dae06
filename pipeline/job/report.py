"""Report of a tokenizing job for the terminal and MLflow; the manifest stores its counts, which are reproducible."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from infra.cli.table import Report, Table
from infra.cli.units import format_count, format_duration
from pipeline.books.cleaning import SUSPECT_PREFIX
from pipeline.job.partition_result import PartitionResult
from pipeline.job.plan import Partition

METRICS = (
    "books/read", "books/kept", "books/train", "books/val", "tokens/train", "tokens/val", "text/chars", "time/work",
    "throughput/mb_per_second", "throughput/tokens_per_second",
)  # fmt: skip
"""Top-level metrics of a data set in MLflow; all others are under ``detail/``."""
TOKENS_PER_BYTE = 0.25
"""Estimated number of tokens per byte of English text."""
BYTES_PER_SECOND = 80e6
"""Estimated bytes of text per second and worker, measured on slow cores."""
START_SECONDS = 3
"""Estimated seconds to start and finish a command."""
RAY_SECONDS = 9
"""Estimated additional seconds to start and stop Ray."""
LENGTH_BINS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
"""Upper bounds of the bins of book lengths, in tokens."""


def sum_results(results: Iterable[PartitionResult]) -> dict[str, Any]:
    """Sum up ``results``: books read, kept and dropped by reason; characters, tokens, book lengths and bytes."""
    results = list(results)
    reasons = Counter(dropped.reason for result in results for dropped in result.dropped)
    labels: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    for result in results:
        labels.update(result.labels)
        removed.update(result.removed)
    lengths = [tokens for result in results for *_, tokens in result.books]
    return {
        "books_read": len(lengths) + reasons.total(),
        "books_kept": len(lengths),
        "books_dropped": dict(sorted(reasons.items())),
        "books_flagged": dict(sorted(Counter(book.reason for result in results for book in result.flagged).items())),
        "books_val": sum(shard.rows for result in results for shard in result.shards if shard.split == "val"),
        "read_bytes": sum(result.read_bytes for result in results),
        "chars": sum(chars for result in results for _, _, chars, _ in result.books),
        "tokens": sum(lengths),
        "tokens_per_book": _make_histogram(lengths),
        "replaced_bytes": sum(result.replaced for result in results),
        "removed_chars": dict(sorted(removed.items())),
        "labels": dict(sorted(labels.items())),
        "verified_bytes": sum(result.verified_bytes for result in results),
    }


def format_dropped(counts: dict[str, Any]) -> str:
    """Return the numbers of dropped books by reason as text."""
    return _format_counts(counts["books_dropped"]) or "none"


def _format_counts(counts: dict[str, int], template: str = "{count:,} {name}") -> str:
    return ", ".join(template.format(name=name, count=count) for name, count in counts.items())


def _make_histogram(lengths: list[int]) -> dict[str, int]:
    bins = [f"up to {bound:,}" for bound in LENGTH_BINS] + [f"over {LENGTH_BINS[-1]:,}"]
    counts = Counter(bins[bisect_left(LENGTH_BINS, length)] for length in lengths)
    return {name: counts[name] for name in bins}


def format_estimate(
    plan: list[Partition],
    todo: list[Partition],
    done: Iterable[PartitionResult],
    workers: int,
    *,
    token_bytes: int,
    uses_ray: bool,
) -> str:
    """Estimate the tokens and the time of ``todo``, from the finished partitions or else from English books."""
    results = list(done)
    read_bytes = sum(result.read_bytes for result in results)
    written_tokens = sum(shard.tokens for result in results for shard in result.shards)
    size = sum(partition.size for partition in todo)
    tokens = size * (written_tokens / read_bytes if read_bytes else TOKENS_PER_BYTE)
    start = START_SECONDS + RAY_SECONDS * uses_ray
    seconds = start + size / min(workers, len(plan)) / BYTES_PER_SECOND if todo else 0
    return (
        f"about {tokens / 1e6:,.1f} million tokens, {token_bytes * tokens / 1e6:,.1f} MB of shards, "
        f"{format_duration(round(seconds))} with {format_count(workers, 'worker')}"
    )


class Stopwatch(dict[str, float]):
    """Measured seconds by stage."""

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the stage ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to the stage ``name``."""
        self[name] = self.get(name, 0.0) + seconds


@dataclass
class JobStats:
    """Amount of data that this command processed, and the time that it took."""

    partitions: int = 0
    bytes: int = 0
    tokens: int = 0
    seconds: Stopwatch = field(default_factory=Stopwatch)
    """Seconds of the workers by stage, summed up over all workers."""
    wall: Stopwatch = field(default_factory=Stopwatch)
    """Wall-clock seconds of the command by phase."""

    def add(self, summary: dict[str, Any]) -> None:
        """Add the summary of a partition."""
        self.partitions += 1
        self.bytes += summary["bytes"]
        self.tokens += summary["tokens"]
        for stage, seconds in summary["seconds"].items():
            self.seconds.add(stage, seconds)

    def metrics(self) -> dict[str, float]:
        """Return the rates and times by the names of their metrics."""
        values = {f"time/{phase}": seconds for phase, seconds in self.wall.items()}
        for stage, seconds in self.seconds.items():
            values[f"time/stage_{stage}"] = seconds
            if seconds:
                values[f"throughput/{stage}_mb_per_second"] = self.bytes / 1e6 / seconds
                values[f"throughput/{stage}_tokens_per_second"] = self.tokens / seconds
        work = self.wall.get("work")
        if work and self.partitions:
            values["throughput/mb_per_second"] = self.bytes / 1e6 / work
            values["throughput/tokens_per_second"] = self.tokens / work
        return values


def format_skipped_files(inputs: dict[str, Any]) -> str:
    """Return the numbers of skipped files by kind as text, empty if there are none.

    ``inputs`` is as in the manifest.
    """
    return ", ".join(f"{count:,} {kind}" for kind, count in inputs["skipped"].items())


def format_named_splits(inputs: dict[str, Any]) -> str:
    """Return the numbers of files by the split in their names as text, empty if there are none.

    ``inputs`` is as in the manifest.
    """
    uses = {"train": "training", "val": "validation"}
    return ", ".join(f"{count:,} for {uses[split]}" for split, count in inputs["named_splits"].items())


def make_report(
    name: str, counts: dict[str, Any], progress: JobStats, fingerprint: str, inputs: dict[str, Any], next_command: str
) -> Report:
    """Make the report about the contents of the data set ``name`` and the work of this command."""
    ratio = counts["chars"] / counts["tokens"] if counts["tokens"] else 0.0
    content = f"{format_count(counts['books_kept'], 'book')}, {format_count(counts['tokens'], 'token')}"
    summary = [
        ("What", f"{content} in `{name}` (fingerprint `{fingerprint[:12]}`)"),
        ("Books", f"{counts['books_read']:,} read; dropped: {format_dropped(counts)}"),
        ("Text", f"{counts['chars']:,} characters, {ratio:.2f} characters per token"),
    ]
    if skipped := format_skipped_files(inputs):
        summary.append(("Skipped files", skipped))
    if named_files := format_named_splits(inputs):
        summary.append(("Splits", f"files by the split in their names: {named_files}"))
    sections: list[str | Table] = []
    if progress.partitions:
        rates = progress.metrics()
        amount_done = f"{format_count(progress.partitions, 'partition')}, {progress.bytes / 1e6:,.1f} MB in this run"
        speeds = [rates.get(f"throughput/{unit}_per_second", 0) for unit in ("mb", "tokens")]
        summary.insert(
            1, ("Speed", f"{speeds[0]:,.0f} MB/s, {speeds[1]:,.0f} tokens/s while tokenizing; {amount_done}")
        )
        rows: list[tuple[str, str, str, str]] = []
        for stage, seconds in sorted(progress.seconds.items(), key=lambda item: -item[1]):
            speeds = [amount / 1e6 / seconds if seconds else 0 for amount in (progress.bytes, progress.tokens)]
            rows.append((stage, f"{seconds:.2f}", f"{speeds[0]:,.0f}", f"{speeds[1]:,.1f}"))
        heading = ("stage", "worker time (s)", "MB/s per worker", "million tokens/s per worker")
        sections.append(Table("Time by stage, slowest first", heading, rows))
    normal, suspect = (
        {label: count for label, count in counts["labels"].items() if label.startswith(SUSPECT_PREFIX) == is_suspect}
        for is_suspect in (False, True)
    )
    lengths = {length: count for length, count in counts["tokens_per_book"].items() if count}
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in progress.wall.items())
    details = [
        (
            "normalized",
            f"{_format_counts(normal) or 'none'}; {format_count(counts['replaced_bytes'], 'undecodable byte')}",
        ),
        ("removed characters", _format_counts(counts["removed_chars"], "{name} {count:,}") or "none"),
        ("compared with the reference", f"{counts['verified_bytes'] / 1e6:.1f} MB, identical"),
        ("tokens per book", _format_counts(lengths)),
        ("time", phases),
    ]
    sections.append(Table("", ("property", "value"), details))
    if not counts["books_val"]:
        summary.append(("Validation", "the validation split is empty; train with `--cycle 20s+0`"))
    elif extra := counts["extra_validation_books"]:
        examples = ", ".join(f"`{book}`" for book in counts["first_extra_validation_books"])
        summary.append(
            ("Validation", f"{format_count(counts['books_val'], 'book')}, {extra:,} of them although --val-fraction "
             f"does not select them ({examples}{', ...' * (extra > 3)}): the split would be empty otherwise, or an "
             "earlier data set in this `--out` held them out")
        )  # fmt: skip
    if suspect or counts["books_flagged"]:
        flags = [f"{n:,} {reason}" for reason, n in counts["books_flagged"].items()]
        flags += (f"{n:,} {label if n == 1 else label.replace('looks', 'look', 1)}" for label, n in suspect.items())
        summary.append(("Flagged", ", ".join(flags)))
    summary.append(("Next", next_command))
    return Report(summary, appendix=sections)
