"""The output folder of a job: its finished partitions, its exclusive writer, and the completion of the data set.

Object storage is listed once, and many threads read its files, because requests take time but no CPU.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from infra.cli.units import format_count
from infra.errors import UserError
from infra.storage.directory import CONCURRENT_REQUESTS, StorageDir
from pipeline.books import downloads
from pipeline.books.readers import DroppedBook
from pipeline.books.sources import build_inventory, to_absolute_sources
from pipeline.job import report
from pipeline.job.dedup import EXACT_DUPLICATE, NEAR_DUPLICATE, drop_duplicates, find_duplicates
from pipeline.job.partition_result import PartitionResult, mark_undone, read_result, result_file
from pipeline.job.plan import Job, Partition
from pipeline.job.split_history import SplitHistory
from pipeline.job.splits import choose_splits, describe_split_changes, fill_splits, move_books, note_splits
from pipeline.shards import (
    MANIFEST_FILE,
    PARTITIONS_FOLDER,
    QUARANTINE_FILE,
    SETTINGS_FILE,
    SHARD_PATTERN,
    SPLITS,
    TOKENIZER_FILE,
    TRACKING_FILE,
    Manifest,
    read_manifest,
)

_RESULT_FILE = re.compile(rf"{PARTITIONS_FOLDER}/\d{{6,}}\.json")
"""Pattern of the path of a partition's result. Other files in its folder are never deleted."""


def exclusive_writer(out_dir: StorageDir) -> AbstractContextManager[None]:
    """Lock ``out_dir`` for this process. Raises ``UserError`` if it is locked or cannot be written."""
    out_dir.check_writable("--out")
    message = f"Another command is writing to {out_dir}. Wait for it to finish, or choose another --out."
    return out_dir.exclusive_use(message)


def check_own_output(out_dir: StorageDir, *, overwrite: bool) -> None:
    """Raise ``UserError`` if ``out_dir`` contains a training run, or a data set that this program did not create.

    Such a data set may be overwritten. A training run may not, because the references to the MLflow runs of both have
    the same file name.
    """
    if out_dir.exists(SETTINGS_FILE):
        return
    if out_dir.exists(TRACKING_FILE) and not out_dir.exists(MANIFEST_FILE):
        raise UserError(f"{out_dir} contains a training run ({TRACKING_FILE}). Choose another --out.")
    if out_dir.exists(MANIFEST_FILE) and not overwrite:
        raise UserError(
            f"{out_dir} contains a data set without {SETTINGS_FILE}, so it was not created by this program. Choose "
            "another --out, or replace it with --overwrite."
        )


def changed_settings(job: Job) -> dict[str, tuple[Any, Any]]:
    """Return (stored value, new value) by name of the settings that differ from the settings of the output.

    Sources are not compared, because the keys of the partitions show which partitions they change.
    """
    if not (stored := _stored_settings(job.out_dir)):
        return {}
    settings = json.loads(json.dumps(job.identity()))
    del settings["sources"]
    return {name: (stored.get(name), value) for name, value in settings.items() if stored.get(name) != value}


def _stored_settings(out_dir: StorageDir) -> dict[str, Any]:
    """Return the settings that the last run stored in ``out_dir``; an empty dict if there are none."""
    try:
        content = out_dir.read(SETTINGS_FILE)
    except OSError:
        return {}
    try:
        return json.loads(content)
    except ValueError:
        return {}


def _write_settings(job: Job) -> None:
    job.out_dir.write_json(SETTINGS_FILE, job.identity() | {"sources": to_absolute_sources(job.config.sources)})


def source_changes(job: Job) -> list[str]:
    """Return lines about new sources, and about added or removed files of the same sources."""
    stored = _stored_settings(job.out_dir).get("sources", [])
    new_sources = [source for source in to_absolute_sources(job.config.sources) if stored and source not in stored]
    lines = [f"new sources: {', '.join(new_sources[:3])}{', ...' * (len(new_sources) > 3)}"] if new_sources else []
    with suppress(UserError):  # The data set may be unfinished.
        old_inputs, new_inputs = read_manifest(job.out_dir).inputs, job.inventory.summary()
        if old_inputs != new_inputs:
            lines.append(
                f"previously created from {format_count(old_inputs['files'], 'file')}, "
                f"{old_inputs['bytes'] / 1e6:,.1f} MB"
            )
    return lines


def missing_sources(job: Job) -> list[str]:
    """Return sources of the output that the job does not read, so that their books would disappear silently."""
    sources = set(_stored_settings(job.out_dir).get("sources", ())) - set(to_absolute_sources(job.config.sources))
    names = job.out_dir.list_files()
    if not sources or not any(name == MANIFEST_FILE or _RESULT_FILE.fullmatch(name) for name in names):
        return []
    input_paths = {os.path.realpath(file.uri) for file in job.inventory.files}

    def is_missing(source: str) -> bool:
        if source.startswith(downloads.SOURCE_PREFIX):  # Its inventory would download the books.
            return True
        try:
            return any(os.path.realpath(file.uri) not in input_paths for file in build_inventory([source]).files)
        except UserError:  # The files of the source were deleted.
            return True

    return sorted(filter(is_missing, sources))


@dataclass(frozen=True)
class PlanStatus:
    """Finished and unfinished partitions of a plan, by name."""

    done: dict[str, PartitionResult]
    """Results of the finished partitions."""
    todo: dict[str, str]
    """Reasons why the other partitions are unfinished."""


def compare_with_plan(job: Job) -> PlanStatus:
    """Compare the plan with the output; a shard counts as present if its size is correct.

    If any partition is unfinished, or an earlier plan had more partitions, all partitions with dropped duplicates are
    processed again, because the originals of the duplicates may have changed.
    """
    stored_files = _files(job.out_dir)
    done: dict[str, PartitionResult] = {}
    todo: dict[str, str] = {}
    for name, result_or_reason in _results_or_reasons(job, stored_files).items():
        if isinstance(result_or_reason, PartitionResult):
            done[name] = result_or_reason
        else:
            todo[name] = result_or_reason
    if todo or _obsolete_results(job, stored_files):
        for name in list(done):
            if any(dropped.reason in (EXACT_DUPLICATE, NEAR_DUPLICATE) for dropped in done[name].dropped):
                todo[name] = "with duplicates of books that may have changed"
                del done[name]
    return PlanStatus(done, todo)


def is_finished(job: Job) -> bool:
    """Return whether the output is a finished data set of the same inputs."""
    try:
        manifest = read_manifest(job.out_dir)
    except UserError:
        return False
    return manifest.inputs == job.inventory.summary() and job.out_dir.exists(QUARANTINE_FILE)


def finish(job: Job, print_line: Callable[[str], None] = lambda line: None) -> Manifest:
    """Drop duplicates, fill both splits, and write the quarantine and the manifest from the partitions' results.

    Calls ``print_line`` with a sentence if texts change their split. Raises ``UserError`` if the result of a partition
    is missing, or if no book was kept.
    """
    out_dir, results = job.out_dir, read_results(job)
    history = SplitHistory.read(out_dir, job.config.val_fraction)
    choice = choose_splits(job, results, history)
    if job.config.duplicates != "keep":
        results = drop_duplicates(out_dir, results, find_duplicates(results, choice.rank))
    fill_splits(job, results, choice.splits, history)
    for sentence in describe_split_changes(results, choice.splits, history):
        print_line(sentence)
    note_splits(job, results, choice.splits, history)
    results = move_books(job, results, choice.splits)
    remove_strays(job, results)
    dropped = write_quarantine(out_dir, results.values())
    moved_books = (book for result in results.values() for book in result.moved_books)
    extra = sorted(book for book in moved_books if choice.splits[book] == "val")
    counts = report.sum_results(results.values())
    counts |= {"extra_validation_books": len(extra), "first_extra_validation_books": extra[:3]}
    if not counts["books_kept"]:
        example = f" The first is {dropped[0].book}: {dropped[0].detail}." if dropped else ""
        raise UserError(
            f"No book was kept ({counts['books_read']:,} read). {out_dir / QUARANTINE_FILE} lists the reasons.{example}"
        )
    manifest = Manifest.of(
        [shard for result in results.values() for shard in result.shards],
        config=job.identity(),
        tokenizer_sha256=job.tokenizer.sha256,
        inputs=job.inventory.summary(),
        report=counts,
    )
    manifest.write(out_dir)
    return manifest


def read_results(job: Job) -> dict[str, PartitionResult]:
    """Return the results of all partitions by name, after all are finished.

    Raises ``UserError`` if a result is missing, does not match the plan, or describes a missing shard.
    """
    results_or_reasons = _results_or_reasons(job, _files(job.out_dir))
    results = {name: result for name, result in results_or_reasons.items() if isinstance(result, PartitionResult)}
    if missing := [name for name in results_or_reasons if name not in results]:
        raise UserError(
            f"{len(missing):,} of {format_count(len(results_or_reasons), 'partition')} finished but are missing from "
            f"{job.out_dir} (first: {result_file(missing[0])}). Use an --out that all workers share, then run the same "
            "command again."
        )
    return results


def _files(out_dir: StorageDir) -> dict[str, int]:
    """Return the size of every file in a data set's folders by name, without other files in the output."""
    return out_dir.list_files(*SPLITS, PARTITIONS_FOLDER)


def _results_or_reasons(job: Job, stored_files: dict[str, int]) -> dict[str, PartitionResult | str]:
    """Return the result of each partition, or the reason why it is unfinished, by name.

    ``stored_files`` are the sizes of the output's files.
    """

    def result_or_reason(partition: Partition) -> PartitionResult | str:
        result = read_result(job.out_dir, partition.name) if result_file(partition.name) in stored_files else None
        if result is None:
            return "not finished"
        if result.key != partition.key():
            return "with changed inputs or settings"
        if any(stored_files.get(shard.path) != shard.bytes for shard in result.shards):
            return "with missing or truncated shards"
        return result

    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        return dict(
            zip(
                (partition.name for partition in job.partitions),
                pool.map(result_or_reason, job.partitions),
                strict=True,
            )
        )


def mark_unfinished(job: Job, todo: Iterable[str]) -> None:
    """Mark the output as unfinished, remove the results of the partitions ``todo``, and store the settings of this run.

    The results are removed before the first partition is processed. Otherwise a result with a dropped duplicate would
    become valid again, by its key, as soon as the partition with the original is finished.
    """
    mark_undone(job.out_dir, todo)
    job.out_dir.remove_temporaries(*SPLITS, PARTITIONS_FOLDER, ".")
    if not job.tokenizer.is_gpt2:
        job.out_dir.write(TOKENIZER_FILE, job.tokenizer.content)
    _write_settings(job)


def clear(out_dir: StorageDir) -> None:
    """Remove only the files of ``out_dir`` that this program wrote.

    Results are removed first, so that no partition looks finished after a kill. The settings stay until
    :func:`mark_unfinished` replaces them. The history of the splits stays, so that held-out texts are not trained on.
    """
    stored_files = _files(out_dir)
    out_dir.remove(filter(_RESULT_FILE.fullmatch, stored_files))
    out_dir.remove([MANIFEST_FILE, QUARANTINE_FILE, TRACKING_FILE, TOKENIZER_FILE])
    out_dir.remove(filter(SHARD_PATTERN.fullmatch, stored_files))
    out_dir.remove_temporaries(*SPLITS)
    out_dir.remove_empty(*SPLITS)


def write_quarantine(out_dir: StorageDir, results: Iterable[PartitionResult]) -> list[DroppedBook]:
    """Write one JSON line per dropped or flagged book to the quarantine; return the entries, sorted by book id."""
    entries = sorted(
        (entry for result in results for entry in result.dropped + result.flagged),
        key=lambda entry: (entry.book, entry.detail),
    )
    lines = (json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in entries)
    out_dir.write(QUARANTINE_FILE, "".join(lines).encode())
    return entries


def remove_strays(job: Job, results: dict[str, PartitionResult]) -> None:
    """Remove shards and results of earlier plans that are not in this plan, and files of killed workers.

    Call it after all partitions are finished, when workers no longer write.
    """
    job.out_dir.remove_temporaries(*SPLITS, PARTITIONS_FOLDER)
    stored_files = _files(job.out_dir)
    shards = {shard.path for result in results.values() for shard in result.shards}
    strays = [name for name in stored_files if SHARD_PATTERN.fullmatch(name) and name not in shards]
    job.out_dir.remove(strays + _obsolete_results(job, stored_files))


def _obsolete_results(job: Job, stored_files: Iterable[str]) -> list[str]:
    names = {result_file(partition.name) for partition in job.partitions}
    return [name for name in stored_files if _RESULT_FILE.fullmatch(name) and name not in names]
