"""What an output holds: which pieces are done, what is left over, who else writes there; and its completion.

Object storage is listed once, and its files are read by many threads, because each request takes time and no CPU.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from infra.errors import UserError
from infra.storage.directory import CONCURRENT_REQUESTS, StorageDir
from pipeline.books import downloads
from pipeline.books.readers import DroppedBook
from pipeline.books.sources import build_inventory, whole_sources
from pipeline.job import report
from pipeline.job.dedup import EXACT, NEAR, drop_duplicates, find_duplicates
from pipeline.job.partition_result import PartitionResult, mark_undone, read_record, record_file
from pipeline.job.plan import Job, Partition
from pipeline.job.split_history import SplitHistory
from pipeline.job.splits import choose_splits, fill_splits, move_books, note_splits, split_changes
from pipeline.shards import (
    MANIFEST,
    PARTITIONS,
    QUARANTINE,
    SETTINGS_FILE,
    SHARD,
    SPLITS,
    TOKENIZER_FILE,
    TRACKING,
    Manifest,
    read_manifest,
)

_RECORD = re.compile(rf"{PARTITIONS}/\d{{6,}}\.json")
"""What a piece's record is called: other files in its folder are not ours to delete."""


def exclusive_writer(out_dir: StorageDir) -> AbstractContextManager[None]:
    """Hold ``out_dir`` for this process. Raises ``UserError`` when it is held, or cannot be written."""
    out_dir.check_writable("--out")
    return out_dir.exclusive_use(f"another run is writing to {out_dir}: wait for it, or give another --out.")


def check_own_output(out_dir: StorageDir, *, overwrite: bool) -> None:
    """Raise ``UserError`` when ``out_dir`` holds a data set without the settings that we note for ours, or a run.

    A data set may be overwritten. A run's key in MLflow has the name of a data set's, and would be lost.
    """
    if out_dir.exists(SETTINGS_FILE):
        return
    if out_dir.exists(TRACKING) and not out_dir.exists(MANIFEST):
        raise UserError(f"{out_dir} holds a run of this program (its {TRACKING}): name another --out.")
    if out_dir.exists(MANIFEST) and not overwrite:
        raise UserError(
            f"{out_dir} holds a data set that this program did not make (no {SETTINGS_FILE}): name another --out."
        )


def changed_settings(job: Job) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those by which the job's output was made: name to (there, now).

    Sources are not compared: the pieces that they change are known by their keys.
    """
    if not (stored_files := _settings(job.out_dir)):
        return {}
    now = json.loads(json.dumps(job.identity()))
    del now["sources"]
    return {name: (stored_files.get(name), now[name]) for name in now if stored_files.get(name) != now[name]}


def _settings(out_dir: StorageDir) -> dict[str, Any]:
    """What the last run noted at ``out_dir``; nothing where none has."""
    try:
        content = out_dir.read(SETTINGS_FILE)
    except OSError:
        return {}
    try:
        return json.loads(content)
    except ValueError:
        return {}


def _note_settings(job: Job) -> None:
    job.out_dir.write_json(SETTINGS_FILE, job.identity() | {"sources": whole_sources(job.config.sources)})


def source_changes(job: Job) -> list[str]:
    """Lines about sources that are new to the output, and about files of the same sources that came or went."""
    stored_files = _settings(job.out_dir).get("sources", [])
    added = [source for source in whole_sources(job.config.sources) if stored_files and source not in stored_files]
    lines = [f"new sources: {', '.join(added[:3])}{', ...' * (len(added) > 3)}"] if added else []
    with suppress(UserError):  # it is unfinished
        old_inputs, after = read_manifest(job.out_dir).inputs, job.inventory.summary()
        if old_inputs != after:
            lines.append(f"made before from {old_inputs['files']:,} files, {old_inputs['bytes'] / 1e6:,.1f} MB")
    return lines


def missing_sources(job: Job) -> list[str]:
    """Sources whose books the output holds and that are not all among the job's: the books would go without a word."""
    stored_files = set(_settings(job.out_dir).get("sources", ())) - set(whole_sources(job.config.sources))
    if not stored_files or not any(name == MANIFEST or _RECORD.fullmatch(name) for name in job.out_dir.list_files()):
        return []
    read = {os.path.realpath(file.uri) for file in job.inventory.files}

    def is_missing(source: str) -> bool:
        if source.startswith(downloads.PREFIX):  # it would be downloaded
            return True
        try:
            return any(os.path.realpath(file.uri) not in read for file in build_inventory([source]).files)
        except UserError:  # there is none any more
            return True

    return sorted(filter(is_missing, stored_files))


@dataclass(frozen=True)
class PlanStatus:
    """What is done and what is not, by piece name."""

    done: dict[str, PartitionResult]
    todo: dict[str, str]
    """Why each piece is to be done."""


def compare_with_plan(job: Job) -> PlanStatus:
    """Compare the plan with what the output holds; a shard of the recorded length counts as present.

    If any piece is to be done, or an earlier plan had more, the pieces that gave up duplicates are done again: what
    they repeated may be gone.
    """
    stored_files = _files(job.out_dir)
    done: dict[str, PartitionResult] = {}
    todo: dict[str, str] = {}
    for name, record_or_reason in _records_or_why(job, stored_files).items():
        if isinstance(record_or_reason, PartitionResult):
            done[name] = record_or_reason
        else:
            todo[name] = record_or_reason
    if todo or _records_of_no_piece(job, stored_files):
        for name in list(done):
            if any(dropped.reason in (EXACT, NEAR) for dropped in done[name].dropped):
                todo[name] = "had duplicates of books that may have changed"
                del done[name]
    return PlanStatus(done, todo)


def is_finished(job: Job) -> bool:
    """Whether the output is a finished data set of the same inputs."""
    try:
        manifest = read_manifest(job.out_dir)
    except UserError:
        return False
    return manifest.inputs == job.inventory.summary() and job.out_dir.exists(QUARANTINE)


def finish(job: Job, tell: Callable[[str], None] = lambda sentence: None) -> Manifest:
    """Drop duplicates, fill both splits, then write quarantine and manifest from the records.

    ``tell`` is called with a sentence where a text changes its split. Raises ``UserError`` when a piece's record did
    not arrive here, and when no book was kept.
    """
    out_dir, records = job.out_dir, read_results(job)
    history = SplitHistory.read(out_dir, job.config.val_fraction)
    choice = choose_splits(job, records, history)
    if job.config.duplicates != "keep":
        records = drop_duplicates(out_dir, records, find_duplicates(records, choice.rank))
    fill_splits(job, records, choice.splits, history)
    for sentence in split_changes(records, choice.splits, history):
        tell(sentence)
    note_splits(job, records, choice.splits, history)
    records = move_books(job, records, choice.splits)
    remove_strays(job, records)
    dropped = write_quarantine(out_dir, records.values())
    held_out = sorted(book for record in records.values() for book in record.moved if choice.splits[book] == "val")
    counts = report.totals(records.values()) | {"held_out": len(held_out), "held_out_first": held_out[:3]}
    if not counts["books_kept"]:
        first = f" For {dropped[0].book} it is: {dropped[0].detail}." if dropped else ""
        raise UserError(
            f"none of {counts['books_in']:,} books could be kept: {out_dir / QUARANTINE} gives the reason for each."
            f"{first}"
        )
    manifest = Manifest.of(
        [shard for record in records.values() for shard in record.shards],
        config=job.identity(),
        tokenizer_sha256=job.tokenizer.sha256,
        inputs=job.inventory.summary(),
        report=counts,
    )
    manifest.write(out_dir)
    return manifest


def read_results(job: Job) -> dict[str, PartitionResult]:
    """The record of every piece, by name, once all are done.

    Raises ``UserError`` when one is missing, is of other work than the plan's, or describes a shard that is missing.
    """
    records_or_reasons = _records_or_why(job, _files(job.out_dir))
    records = {name: record for name, record in records_or_reasons.items() if isinstance(record, PartitionResult)}
    if missing := [name for name in records_or_reasons if name not in records]:
        raise UserError(
            f"{len(missing):,} of {len(records_or_reasons):,} pieces were done but did not arrive in "
            f"{job.out_dir} (the first is {record_file(missing[0])}), so it is unfinished: use an --out that all "
            "workers share, and run the same command again."
        )
    return records


def _files(out_dir: StorageDir) -> dict[str, int]:
    """Bytes of every file in the folders of a data set, by name. An --out may hold anything besides them."""
    return out_dir.list_files(*SPLITS, PARTITIONS)


def _records_or_why(job: Job, stored_files: dict[str, int]) -> dict[str, PartitionResult | str]:
    """The record of each piece, or why it is to be done, by name; of an output that holds the files
    ``stored_files``."""

    def record_or_why(partition: Partition) -> PartitionResult | str:
        record = read_record(job.out_dir, partition.name) if record_file(partition.name) in stored_files else None
        if record is None:
            return "not done yet"
        if record.key != partition.key():
            return "inputs or settings changed"
        if any(stored_files.get(shard.path) != shard.bytes for shard in record.shards):
            return "shards missing or cut short"
        return record

    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        return dict(
            zip((partition.name for partition in job.partitions), pool.map(record_or_why, job.partitions), strict=True)
        )


def mark_unfinished(job: Job, todo: Iterable[str]) -> None:
    """Mark the output as unfinished, without a record of the pieces ``todo``, and note the settings of this run.

    All these records go before the first piece is done: one that held a duplicate would be valid again by its key as
    soon as the piece that held the original has been done.
    """
    mark_undone(job.out_dir, todo)
    job.out_dir.remove_temporaries(*SPLITS, PARTITIONS, ".")
    if not job.tokenizer.is_gpt2:
        job.out_dir.write(TOKENIZER_FILE, job.tokenizer.content)
    _note_settings(job)


def clear(out_dir: StorageDir) -> None:
    """Remove what this program wrote to ``out_dir``, and nothing else.

    Records go first, so that a kill leaves nothing that looks done; the settings stay until :func:`mark_unfinished`
    notes others. The history of the splits stays, so that what was held out is not trained on.
    """
    stored_files = _files(out_dir)
    out_dir.remove(filter(_RECORD.fullmatch, stored_files))
    out_dir.remove([MANIFEST, QUARANTINE, TRACKING, TOKENIZER_FILE])
    out_dir.remove(filter(SHARD.fullmatch, stored_files))
    out_dir.remove_temporaries(*SPLITS)
    out_dir.remove_empty(*SPLITS)


def write_quarantine(out_dir: StorageDir, records: Iterable[PartitionResult]) -> list[DroppedBook]:
    """Write one JSON line per book that was left out or is doubtful, in the order of their ids; returns those books."""
    listed = (each for record in records for each in record.dropped + record.doubtful)
    dropped = sorted(listed, key=lambda d: (d.book, d.detail))
    lines = (json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in dropped)
    out_dir.write(QUARANTINE, "".join(lines).encode())
    return dropped


def remove_strays(job: Job, records: dict[str, PartitionResult]) -> None:
    """Remove shards and records of an earlier plan that this one does not have, and what killed workers left.

    Call it when all pieces are done: no worker writes any more.
    """
    job.out_dir.remove_temporaries(*SPLITS, PARTITIONS)
    stored_files = _files(job.out_dir)
    shards = {shard.path for record in records.values() for shard in record.shards}
    strays = [name for name in stored_files if SHARD.fullmatch(name) and name not in shards]
    job.out_dir.remove(strays + _records_of_no_piece(job, stored_files))


def _records_of_no_piece(job: Job, stored_files: Iterable[str]) -> list[str]:
    names = {record_file(partition.name) for partition in job.partitions}
    return [name for name in stored_files if _RECORD.fullmatch(name) and name not in names]
