"""What a run did, in numbers, for the terminal, for MLflow and (the counts, which are reproducible) the manifest."""

import shlex
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from infra.cli.table import Report, Table
from infra.cli.units import format_duration
from pipeline.books.clean import SUSPECT_PREFIX
from pipeline.job.partition_result import PartitionResult
from pipeline.job.plan import Partition

METRICS = (
    "books/in", "books/kept", "books/train", "books/val", "tokens/train", "tokens/val", "text/chars", "time/work",
    "throughput/MB_per_second", "throughput/tokens_per_second",
)  # fmt: skip
"""The numbers of a data set's page in MLflow; its other metrics are under ``detail/``."""
TOKENS_PER_BYTE = 0.25
BYTES_PER_SECOND = 80e6
"""Text per worker, as measured on modest cores."""
START_SECONDS = 3
"""Seconds to start and to finish."""
RAY_SECONDS = 9
"""Seconds more to start and stop Ray."""
LENGTH_BINS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
"""Upper bounds of the bins of book lengths, in tokens."""


def totals(records: Iterable[PartitionResult]) -> dict[str, Any]:
    """Counts over ``records``: books in, kept, dropped by reason, characters, tokens, book lengths, bytes checked."""
    records = list(records)
    reasons = Counter(dropped.reason for record in records for dropped in record.dropped)
    traits: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    for record in records:
        traits.update(record.traits)
        removed.update(record.removed)
    lengths = [tokens for record in records for *_, tokens in record.books]
    return {
        "books_in": len(lengths) + reasons.total(),
        "books_kept": len(lengths),
        "books_dropped": dict(sorted(reasons.items())),
        "books_doubtful": dict(sorted(Counter(d.reason for record in records for d in record.doubtful).items())),
        "books_val": sum(shard.rows for record in records for shard in record.shards if shard.split == "val"),
        "read_bytes": sum(record.read_bytes for record in records),
        "chars": sum(chars for record in records for _, _, chars, _ in record.books),
        "tokens": sum(lengths),
        "tokens_a_book": _histogram(lengths),
        "replaced_bytes": sum(record.replaced for record in records),
        "removed_chars": dict(sorted(removed.items())),
        "traits": dict(sorted(traits.items())),
        "verified_bytes": sum(record.verified_bytes for record in records),
    }


def format_dropped(counts: dict[str, Any]) -> str:
    return _list(counts["books_dropped"]) or "none"


def _list(counts: dict[str, int], form: str = "{count:,} {name}") -> str:
    return ", ".join(form.format(name=name, count=count) for name, count in counts.items())


def _histogram(lengths: list[int]) -> dict[str, int]:
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
    on_ray: bool,
) -> str:
    """What ``todo`` will make and take, from the pieces that are done or, without any, from English books."""
    records = list(done)
    read = sum(record.read_bytes for record in records)
    made = sum(shard.tokens for record in records for shard in record.shards)
    size = sum(partition.size for partition in todo)
    tokens = size * (made / read if read else TOKENS_PER_BYTE)
    start = START_SECONDS + RAY_SECONDS * on_ray
    seconds = start + size / min(workers, len(plan)) / BYTES_PER_SECOND if todo else 0
    return (
        f"about {tokens / 1e6:,.1f} million tokens, {token_bytes * tokens / 1e6:,.1f} MB of shards, "
        f"{format_duration(round(seconds))} with {workers} workers"
    )


class Stopwatch(dict[str, float]):
    """Seconds by what they were spent on."""

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self[name] = self.get(name, 0.0) + seconds


@dataclass
class JobStats:
    """What this run did itself, and how long it took."""

    pieces: int = 0
    bytes: int = 0
    tokens: int = 0
    seconds: Stopwatch = field(default_factory=Stopwatch)
    """Worker seconds by stage."""
    wall: Stopwatch = field(default_factory=Stopwatch)
    """Wall-clock seconds of the command by phase."""

    def add(self, summary: dict[str, Any]) -> None:
        self.pieces += 1
        self.bytes += summary["bytes"]
        self.tokens += summary["tokens"]
        for stage, seconds in summary["seconds"].items():
            self.seconds.add(stage, seconds)

    def metrics(self) -> dict[str, float]:
        """Rates and times, under grouped metric names."""
        values = {f"time/{phase}": seconds for phase, seconds in self.wall.items()}
        for stage, seconds in self.seconds.items():
            values[f"time/stage_{stage}"] = seconds
            if seconds:
                values[f"throughput/{stage}_MB_per_second"] = self.bytes / 1e6 / seconds
                values[f"throughput/{stage}_tokens_per_second"] = self.tokens / seconds
        work = self.wall.get("work")
        if work and self.pieces:
            values["throughput/MB_per_second"] = self.bytes / 1e6 / work
            values["throughput/tokens_per_second"] = self.tokens / work
        return values


def skipped_files(inputs: dict[str, Any]) -> str:
    """What the sources hold that is not read, by kind; empty where that is nothing. ``inputs`` as in the manifest."""
    return ", ".join(f"{count:,} {kind}" for kind, count in inputs["skipped"].items())


def named_splits(inputs: dict[str, Any]) -> str:
    """The splits that the names of files tell; empty where they tell none. ``inputs`` as in the manifest."""
    uses = {"train": "training", "val": "validation"}
    return ", ".join(f"{count:,} for {uses[split]}" for split, count in inputs["named_splits"].items())


def data_report(
    name: str, counts: dict[str, Any], progress: JobStats, fingerprint: str, inputs: dict[str, Any]
) -> Report:
    """What the data set ``name`` holds, and what this run did for it."""
    ratio = counts["chars"] / counts["tokens"] if counts["tokens"] else 0.0
    content = f"{counts['books_kept']:,} books, {counts['tokens']:,} tokens"
    facts = [
        ("What", f"{content} in `{name}` (fingerprint `{fingerprint[:12]}`)"),
        ("Books", f"{counts['books_in']:,} in; dropped: {format_dropped(counts)}"),
        ("Text", f"{counts['chars']:,} characters, {ratio:.2f} characters per token"),
    ]
    if skipped := skipped_files(inputs):
        facts.append(("Skipped", f"files: {skipped}"))
    if named := named_splits(inputs):
        facts.append(("Splits", f"files, by their names: {named}"))
    pieces: list[str | Table] = []
    if progress.pieces:
        rates = progress.metrics()
        done = f"{progress.pieces:,} pieces, {progress.bytes / 1e6:,.1f} MB"
        speeds = [rates.get(f"throughput/{unit}_per_second", 0) for unit in ("MB", "tokens")]
        facts.insert(1, ("Speed", f"this run: {done}, {speeds[0]:,.0f} MB/s, {speeds[1]:,.0f} tokens/s while working"))
        rows: list[tuple[str, str, str, str]] = []
        for stage, seconds in sorted(progress.seconds.items(), key=lambda item: -item[1]):
            speeds = [amount / 1e6 / seconds if seconds else 0 for amount in (progress.bytes, progress.tokens)]
            rows.append((stage, f"{seconds:.2f}", f"{speeds[0]:,.0f}", f"{speeds[1]:,.1f}"))
        heading = ("stage", "worker seconds", "MB/s per worker", "million tokens/s per worker")
        pieces.append(Table("Time by stage, slowest first", heading, rows))
    usual, odd = (
        {trait: count for trait, count in counts["traits"].items() if trait.startswith(SUSPECT_PREFIX) == seems}
        for seems in (False, True)
    )
    lengths = {label: count for label, count in counts["tokens_a_book"].items() if count}
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in progress.wall.items())
    about = [
        ("normalized", f"{_list(usual) or 'nothing'}; {counts['replaced_bytes']:,} undecodable bytes"),
        ("removed, in characters", _list(counts["removed_chars"], "{name} {count:,}") or "nothing"),
        ("checked against the vocabulary's own library", f"{counts['verified_bytes'] / 1e6:.1f} MB, equal"),
        ("tokens per book", _list(lengths)),
        ("time", phases),
    ]
    pieces.append(Table("", ("", ""), about))
    if not counts["books_val"]:
        facts.append(("Validation", "the validation split is empty; train with `--cycle N+0`"))
    elif moved := counts["held_out"]:
        first = ", ".join(f"`{book}`" for book in counts["held_out_first"])
        facts.append(
            ("Validation", f"{counts['books_val']:,} books; {moved:,} of them not by --val-fraction "
             f"({first}{', ...' * (moved > 3)}), but because no other book is held out, or an earlier "
             "data set of this `--out` held them out")
        )  # fmt: skip
    if odd or counts["books_doubtful"]:
        doubts = [f"{n:,} {reason}" for reason, n in counts["books_doubtful"].items()]
        doubts += (f"{n:,} {trait if n == 1 else trait.replace('looks', 'look', 1)}" for trait, n in odd.items())
        facts.append(("Doubtful", ", ".join(doubts)))
    cycle = "" if counts["books_val"] else " --cycle 200+0"
    facts.append(("Next", f"`python -m train.run --data {shlex.quote(name)}{cycle}`"))
    return Report(facts, pieces)
