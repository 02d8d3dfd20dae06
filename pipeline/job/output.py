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
from infra.storage.directory import REQUESTS, StorageDir
from infra.storage.files import clear_temporaries
from infra.storage.lease import sole_user
from pipeline.books import downloads
from pipeline.books.readers import Dropped
from pipeline.books.sources import find, whole_sources
from pipeline.job import report
from pipeline.job.dedup import EXACT, NEAR, drop_duplicates, find_duplicates
from pipeline.job.partition_result import Record, read_record, record_file, reopen
from pipeline.job.plan import Job, Piece
from pipeline.job.split_history import SplitHistory
from pipeline.job.splits import choose_splits, fill_splits, move_books, note_splits, split_changes
from pipeline.shards import (
    MANIFEST,
    PIECES,
    QUARANTINE,
    SETTINGS,
    SHARD,
    SPLITS,
    TRACKING,
    VOCABULARY_FILE,
    Manifest,
    read_manifest,
)

_RECORD = re.compile(rf"{PIECES}/\d{{6,}}\.json")
"""What a piece's record is called: other files in its folder are not ours to delete."""


def sole_writer(place: StorageDir) -> AbstractContextManager[None]:
    """Hold ``place`` for this process. Raises ``UserError`` when it is held, or cannot be written."""
    if place.remote:
        place.refuse_unusable("--out")
    refusal = f"another run is writing to {place}: wait for it, or give another --out."
    return sole_user(place, refusal)


def refuse_foreign(place: StorageDir, *, overwrite: bool) -> None:
    """Raise ``UserError`` when ``place`` holds a data set without the settings that we note for ours, or a run.

    A data set may be overwritten. A run's key in MLflow has the name of a data set's, and would be lost.
    """
    if place.exists(SETTINGS):
        return
    if place.exists(TRACKING) and not place.exists(MANIFEST):
        raise UserError(f"{place} holds a run of this program (its {TRACKING}): name another --out.")
    if place.exists(MANIFEST) and not overwrite:
        raise UserError(f"{place} holds a data set that this program did not make (no {SETTINGS}): name another --out.")


def changed_settings(job: Job) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those by which the job's output was made: name to (there, now).

    Sources are not compared: the pieces that they change are known by their keys.
    """
    if not (there := _settings(job.place)):
        return {}
    now = json.loads(json.dumps(job.identity()))
    del now["sources"]
    return {name: (there.get(name), now[name]) for name in now if there.get(name) != now[name]}


def _settings(place: StorageDir) -> dict[str, Any]:
    """What the last run noted at ``place``; nothing where none has."""
    try:
        content = place.read(SETTINGS)
    except OSError:
        return {}
    try:
        return json.loads(content)
    except ValueError:
        return {}


def _note_settings(job: Job) -> None:
    job.place.write_json(SETTINGS, job.identity() | {"sources": whole_sources(job.config.sources)})


def source_changes(job: Job) -> list[str]:
    """Lines about sources that are new to the output, and about files of the same sources that came or went."""
    there = _settings(job.place).get("sources", [])
    added = [source for source in whole_sources(job.config.sources) if there and source not in there]
    lines = [f"new sources: {', '.join(added[:3])}{', ...' * (len(added) > 3)}"] if added else []
    with suppress(UserError):  # it is unfinished
        before, after = read_manifest(job.place).inputs, job.inventory.summary()
        if before != after:
            lines.append(f"made before from {before['files']:,} files, {before['bytes'] / 1e6:,.1f} MB")
    return lines


def missing_sources(job: Job) -> list[str]:
    """Sources whose books the output holds and that are not all among the job's: the books would go without a word."""
    there = set(_settings(job.place).get("sources", ())) - set(whole_sources(job.config.sources))
    if not there or not any(name == MANIFEST or _RECORD.fullmatch(name) for name in job.place.files()):
        return []
    read = {os.path.realpath(file.uri) for file in job.inventory.files}

    def is_missing(source: str) -> bool:
        if source.startswith(downloads.PREFIX):  # it would be downloaded
            return True
        try:
            return any(os.path.realpath(file.uri) not in read for file in find([source]).files)
        except UserError:  # there is none any more
            return True

    return sorted(filter(is_missing, there))


@dataclass(frozen=True)
class Assessment:
    """What is done and what is not, by piece name."""

    done: dict[str, Record]
    todo: dict[str, str]
    """Why each piece is to be done."""


def assess(job: Job) -> Assessment:
    """Compare the plan with what the output holds; a shard of the recorded length counts as present.

    If any piece is to be done, or an earlier plan had more, the pieces that gave up duplicates are done again: what
    they repeated may be gone.
    """
    there = _files(job.place)
    done: dict[str, Record] = {}
    todo: dict[str, str] = {}
    for name, found in _records_or_why(job, there).items():
        if isinstance(found, Record):
            done[name] = found
        else:
            todo[name] = found
    if todo or _records_of_no_piece(job, there):
        for name in list(done):
            if any(dropped.reason in (EXACT, NEAR) for dropped in done[name].dropped):
                todo[name] = "had duplicates of books that may have changed"
                del done[name]
    return Assessment(done, todo)


def is_finished(job: Job) -> bool:
    """Whether the output is a finished data set of the same inputs."""
    try:
        manifest = read_manifest(job.place)
    except UserError:
        return False
    return manifest.inputs == job.inventory.summary() and job.place.exists(QUARANTINE)


def finish(job: Job, tell: Callable[[str], None] = lambda sentence: None) -> Manifest:
    """Drop duplicates, fill both splits, then write quarantine and manifest from the records.

    ``tell`` is called with a sentence where a text changes its split. Raises ``UserError`` when a piece's record did
    not arrive here, and when no book was kept.
    """
    place, records = job.place, collect(job)
    history = SplitHistory.read(place, job.config.val_fraction)
    choice = choose_splits(job, records, history)
    if job.config.duplicates != "keep":
        records = drop_duplicates(place, records, find_duplicates(records, choice.rank))
    fill_splits(job, records, choice.splits, history)
    for sentence in split_changes(records, choice.splits, history):
        tell(sentence)
    note_splits(job, records, choice.splits, history)
    records = move_books(job, records, choice.splits)
    remove_strays(job, records)
    dropped = write_quarantine(place, records.values())
    held_out = sorted(book for record in records.values() for book in record.moved if choice.splits[book] == "val")
    counts = report.totals(records.values()) | {"held_out": len(held_out), "held_out_first": held_out[:3]}
    if not counts["books_kept"]:
        first = f" For {dropped[0].book} it is: {dropped[0].detail}." if dropped else ""
        raise UserError(
            f"none of {counts['books_in']:,} books could be kept: {place / QUARANTINE} gives the reason for each."
            f"{first}"
        )
    manifest = Manifest.of(
        [shard for record in records.values() for shard in record.shards],
        config=job.identity(),
        vocabulary_sha256=job.vocabulary.sha256,
        inputs=job.inventory.summary(),
        report=counts,
    )
    manifest.write(place)
    return manifest


def collect(job: Job) -> dict[str, Record]:
    """The record of every piece, by name, once all are done.

    Raises ``UserError`` when one is missing, is of other work than the plan's, or describes a shard that is missing.
    """
    found = _records_or_why(job, _files(job.place))
    records = {name: record for name, record in found.items() if isinstance(record, Record)}
    if missing := [name for name in found if name not in records]:
        step = "" if job.place.remote else "give an --out on a disk that all workers share, and "
        raise UserError(
            f"{len(missing):,} of {len(found):,} pieces were done but did not arrive in {job.place} (the first is "
            f"{record_file(missing[0])}), so it is unfinished: {step}run the same command again."
        )
    return records


def _files(place: StorageDir) -> dict[str, int]:
    """Bytes of every file in the folders of a data set, by name. A local --out may hold anything besides them."""
    return {name: size for folder in _folders(place) for name, size in place.files(folder).items()}


def _folders(place: StorageDir) -> Iterable[str]:
    return ("",) if place.remote else (*SPLITS, PIECES)


def _records_or_why(job: Job, there: dict[str, int]) -> dict[str, Record | str]:
    """The record of each piece, or why it is to be done, by name; of an output that holds the files ``there``."""

    def record_or_why(piece: Piece) -> Record | str:
        record = read_record(job.place, piece.name) if record_file(piece.name) in there else None
        if record is None:
            return "not done yet"
        if record.key != piece.key():
            return "inputs or settings changed"
        if any(there.get(shard.path) != shard.bytes for shard in record.shards):
            return "shards missing or cut short"
        return record

    with ThreadPoolExecutor(REQUESTS) as pool:
        return dict(zip((piece.name for piece in job.pieces), pool.map(record_or_why, job.pieces), strict=True))


def begin(job: Job, todo: Iterable[str]) -> None:
    """Mark the output as unfinished, without a record of the pieces ``todo``, and note the settings of this run.

    All these records go before the first piece is done: one that held a duplicate would be valid again by its key as
    soon as the piece that held the original has been done.
    """
    reopen(job.place, todo)
    remove_half_written(job.place, *SPLITS, PIECES, ".")
    if not job.vocabulary.is_gpt2:
        job.place.write(VOCABULARY_FILE, job.vocabulary.content)
    _note_settings(job)


def clear(place: StorageDir) -> None:
    """Remove what this program wrote to ``place``, and nothing else.

    Records go first, so that a kill leaves nothing that looks done; the settings stay until :func:`begin` notes others.
    The history of the splits stays, so that what was held out is not trained on.
    """
    there = _files(place)
    place.remove(filter(_RECORD.fullmatch, there))
    place.remove([MANIFEST, QUARANTINE, TRACKING, VOCABULARY_FILE])
    place.remove(filter(SHARD.fullmatch, there))
    remove_half_written(place, *SPLITS)
    if not place.remote:
        for name in SPLITS:
            with suppress(OSError):  # it does not exist, or holds files that are not ours
                (place.folder / name).rmdir()


def remove_half_written(place: StorageDir, *folders: str) -> None:
    """Remove what killed writers left in these folders. Object storage shows no half-written files."""
    if not place.remote:
        for name in folders:
            clear_temporaries(place.folder / name)


def write_quarantine(place: StorageDir, records: Iterable[Record]) -> list[Dropped]:
    """Write one JSON line per book that was left out or is doubtful, in the order of their ids; returns those books."""
    listed = (each for record in records for each in record.dropped + record.doubtful)
    dropped = sorted(listed, key=lambda d: (d.book, d.detail))
    lines = (json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in dropped)
    place.write(QUARANTINE, "".join(lines).encode())
    return dropped


def remove_strays(job: Job, records: dict[str, Record]) -> None:
    """Remove shards and records of an earlier plan that this one does not have, and what killed workers left.

    Call it when all pieces are done: no worker writes any more.
    """
    remove_half_written(job.place, *SPLITS, PIECES)
    there = _files(job.place)
    shards = {shard.path for record in records.values() for shard in record.shards}
    strays = [name for name in there if SHARD.fullmatch(name) and name not in shards]
    job.place.remove(strays + _records_of_no_piece(job, there))


def _records_of_no_piece(job: Job, there: Iterable[str]) -> list[str]:
    names = {record_file(piece.name) for piece in job.pieces}
    return [name for name in there if _RECORD.fullmatch(name) and name not in names]
