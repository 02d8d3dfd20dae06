"""What an output folder holds: which pieces are done, what is left over, who else writes there; and its completion."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.errors import UserError
from infra.storage import atomic_file, clear_temporaries, lock, write_json
from pipeline.books.readers import Dropped
from pipeline.encoding import VOCABULARY_SHA256
from pipeline.job import report
from pipeline.job.dedup import EXACT, NEAR, drop_duplicates, find_duplicates
from pipeline.job.plan import Job, Piece
from pipeline.job.record import Record, read_record, reopen
from pipeline.shards import MANIFEST, PIECES, QUARANTINE, SPLITS, Manifest, ShardInfo, read_manifest

SETTINGS, LOCK = "settings.json", ".lock"
# The names of this program's own files: other files in these folders are not ours to delete.
_SHARD = re.compile(r"\d{6,}-\d{3,}\.arrow")
_RECORD = re.compile(r"\d{6,}\.json")


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for this process; the system releases it however the process ends.

    Raises ``UserError`` when another run has locked it, or when the folder cannot be made.
    """
    try:
        (folder / PIECES).mkdir(parents=True, exist_ok=True)
        (folder / PIECES / LOCK).touch()
    except OSError as refused:
        raise UserError(f"--out {folder} cannot be written ({refused.strerror}): name another folder.") from refused
    with lock(folder / PIECES / LOCK, f"another run is writing to {folder}: wait for it, or give another --out."):
        yield


def refuse_foreign(folder: Path) -> None:
    """Raise ``UserError`` when ``folder`` holds a data set without the settings that we note for ours."""
    if (folder / MANIFEST).exists() and not (folder / PIECES / SETTINGS).exists():
        raise UserError(
            f"{folder} holds a data set that was not made here (no {PIECES}/{SETTINGS}): name another --out."
        )


def changed_settings(job: Job) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those by which the job's folder was made: name to (there, now).

    Sources are not compared: the pieces that they change are known by their keys.
    """
    try:
        there = json.loads((job.folder / PIECES / SETTINGS).read_bytes())
    except (OSError, ValueError):
        return {}
    now = json.loads(json.dumps(job.config.identity()))
    del now["sources"]
    return {name: (there[name], now[name]) for name in now if there.get(name, now[name]) != now[name]}


@dataclass(frozen=True)
class Assessment:
    """What is done and what is not, by piece name."""

    done: dict[str, Record]
    todo: dict[str, str]
    """Why each piece is to be done."""


def assess(job: Job) -> Assessment:
    """Compare the plan with what the folder holds; a shard of the recorded length counts as present.

    If any piece is to be done, or an earlier plan had more, the pieces that gave up duplicates are done again: what
    they repeated may be gone.
    """
    done: dict[str, Record] = {}
    todo: dict[str, str] = {}
    for piece in job.pieces:
        found = _record_or_why(job.folder, piece)
        if isinstance(found, Record):
            done[piece.name] = found
        else:
            todo[piece.name] = found
    if todo or _records_of_no_piece(job):
        for name in list(done):
            if any(dropped.reason in (EXACT, NEAR) for dropped in done[name].dropped):
                todo[name] = "held duplicates of books that may have changed"
                del done[name]
    return Assessment(done, todo)


def is_finished(job: Job) -> bool:
    """Whether the folder holds a finished data set of the same inputs."""
    try:
        manifest = read_manifest(job.folder)
    except UserError:
        return False
    return manifest.inputs == job.inventory.summary() and (job.folder / QUARANTINE).is_file()


def finish(job: Job) -> Manifest:
    """Drop duplicates, then write quarantine and manifest from the records.

    Raises ``UserError`` when a piece's record did not arrive here, and when no book was kept.
    """
    folder, records = job.folder, collect(job)
    if job.config.duplicates != "keep":
        records = drop_duplicates(folder, records, find_duplicates(records))
    remove_strays(job, records)
    dropped = write_quarantine(folder, records.values())
    counts = report.totals(records.values())
    if not counts["books_kept"]:
        first = f" Of {dropped[0].book} it is: {dropped[0].detail}." if dropped else ""
        raise UserError(
            f"none of {counts['books_in']:,} books could be kept: {folder / QUARANTINE} gives the reason for each."
            f"{first}"
        )
    manifest = Manifest.of(
        [shard for record in records.values() for shard in record.shards],
        config=job.config.identity(),
        vocabulary_sha256=VOCABULARY_SHA256,
        inputs=job.inventory.summary(),
        report=counts,
    )
    manifest.write(folder)
    return manifest


def collect(job: Job) -> dict[str, Record]:
    """The record of every piece, by name, once all are done.

    Raises ``UserError`` when one is missing, is of other work than the plan's, or describes a shard that is missing.
    """
    found = {piece.name: _record_or_why(job.folder, piece) for piece in job.pieces}
    records = {name: record for name, record in found.items() if isinstance(record, Record)}
    if missing := [name for name in found if name not in records]:
        raise UserError(
            f"{len(missing):,} of {len(found):,} pieces were done but did not arrive in {job.folder} (the first is "
            f"{PIECES}/{missing[0]}.json), so it is unfinished: give an --out on a disk that all workers share, and "
            "run the same command again."
        )
    return records


def _record_or_why(folder: Path, piece: Piece) -> Record | str:
    """The record of ``piece``, or why it is to be done."""
    record = read_record(folder, piece.name)
    if record is None:
        return "not done yet"
    if record.key != piece.key():
        return "inputs or settings changed"
    if not all(_present(folder, shard) for shard in record.shards):
        return "shards missing or cut short"
    return record


def _present(folder: Path, shard: ShardInfo) -> bool:
    path = folder / shard.path
    return path.is_file() and path.stat().st_size == shard.bytes


def begin(job: Job, todo: Iterable[str]) -> None:
    """Mark the folder as unfinished, without a record of the pieces ``todo``, and note the settings of this run.

    All these records go before the first piece is done: one that held a duplicate would be valid again by its key as
    soon as the piece that held the original has been done.
    """
    reopen(job.folder, todo)
    for name in (*SPLITS, PIECES, "."):
        clear_temporaries(job.folder / name)
    write_json(job.folder / PIECES / SETTINGS, job.config.identity())


def clear(folder: Path) -> None:
    """Remove what this program wrote to ``folder``, and nothing else.

    Records go first, so that a kill leaves nothing that looks done; the settings stay until :func:`begin` notes others.
    """
    for record in _named(folder / PIECES, _RECORD):
        record.unlink()
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / QUARANTINE).unlink(missing_ok=True)
    for name in SPLITS:
        for shard in _named(folder / name, _SHARD):
            shard.unlink()
        clear_temporaries(folder / name)
        with suppress(OSError):  # it does not exist, or holds files that are not ours
            (folder / name).rmdir()


def write_quarantine(folder: Path, records: Iterable[Record]) -> list[Dropped]:
    """Write one JSON line per book that was left out, in the order of their ids; returns those books."""
    dropped = sorted((d for record in records for d in record.dropped), key=lambda d: (d.book, d.detail))
    with atomic_file(folder / QUARANTINE) as file:
        for entry in dropped:
            file.write(json.dumps(asdict(entry), ensure_ascii=False).encode() + b"\n")
    return dropped


def remove_strays(job: Job, records: dict[str, Record]) -> None:
    """Remove shards and records of an earlier plan that this one does not have, and what killed workers left.

    Call it when all pieces are done: no worker writes any more.
    """
    for name in (*SPLITS, PIECES):
        clear_temporaries(job.folder / name)
    shards = {shard.path for record in records.values() for shard in record.shards}
    for split in SPLITS:
        for path in _named(job.folder / split, _SHARD):
            if f"{split}/{path.name}" not in shards:
                path.unlink()
    for path in _records_of_no_piece(job):
        path.unlink()


def _records_of_no_piece(job: Job) -> list[Path]:
    names = {f"{piece.name}.json" for piece in job.pieces}
    return [path for path in _named(job.folder / PIECES, _RECORD) if path.name not in names]


def _named(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """The files in ``folder`` with one of our names; none if there is no folder."""
    return [path for path in folder.glob("*") if names.fullmatch(path.name)]
