"""What an output folder already holds: which pieces are done, what is left over, and who else writes there."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.errors import UserError
from infra.storage import atomic_file, clear_temporaries, held, write_json
from pipeline.books.clean import Dropped
from pipeline.config import TokenizeConfig
from pipeline.job.dedup import EXACT, NEAR
from pipeline.job.plan import Piece
from pipeline.job.record import Record, read_record, reopen
from pipeline.shards import MANIFEST, PIECES, QUARANTINE, SPLITS

SETTINGS, LOCK = "settings.json", ".lock"
# What this program calls its files: the folders may hold others, which are not ours to delete.
_SHARD = re.compile(r"\d{6,}-\d{3,}\.arrow")
_RECORD = re.compile(r"\d{6,}\.json")


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; the system lets go of it however the process ends.

    Raises ``UserError`` when another run holds it, or when the folder cannot be made.
    """
    try:
        (folder / PIECES).mkdir(parents=True, exist_ok=True)
        (folder / PIECES / LOCK).touch()
    except OSError as refused:
        raise UserError(f"--out {folder} cannot be written ({refused.strerror}): name another folder.") from refused
    with held(folder / PIECES / LOCK, f"another run is writing to {folder}: wait for it, or give another --out."):
        yield


def refuse_foreign(folder: Path) -> None:
    """Raise ``UserError`` when ``folder`` holds a data set without the settings that we note for ours."""
    if (folder / MANIFEST).exists() and not (folder / PIECES / SETTINGS).exists():
        raise UserError(
            f"{folder} holds a data set that was not made here (no {PIECES}/{SETTINGS}): name another --out."
        )


def changed_settings(folder: Path, config: TokenizeConfig) -> dict[str, tuple[Any, Any]]:
    """Settings by which ``folder`` was made and that ``config`` has otherwise: name to (there, now).

    Other sources are no other settings: the pieces that they change are known by their keys.
    """
    try:
        there = json.loads((folder / PIECES / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    now = json.loads(json.dumps(config.identity()))
    del now["sources"]
    return {name: (there[name], now[name]) for name in now if there.get(name, now[name]) != now[name]}


@dataclass(frozen=True)
class Assessment:
    """What is done and what is not, by piece name."""

    done: dict[str, Record]
    todo: dict[str, str]
    """Why each piece is to be done."""


def assess(folder: Path, plan: list[Piece]) -> Assessment:
    """Compare ``plan`` with what ``folder`` holds; a shard of the recorded length counts as there.

    When any piece is to be done, or an earlier plan had more, so are those that gave up duplicates: what they repeated
    may be gone.
    """
    done: dict[str, Record] = {}
    todo: dict[str, str] = {}
    for piece in plan:
        found = _record_or_why(folder, piece)
        if isinstance(found, Record):
            done[piece.name] = found
        else:
            todo[piece.name] = found
    changed = bool(todo or _records_of_no_piece(folder, plan))
    for name in list(done) if changed else []:
        if any(dropped.reason in (EXACT, NEAR) for dropped in done[name].dropped):
            todo[name] = "held duplicates of books that may have changed"
            del done[name]
    return Assessment(done, todo)


def collect(folder: Path, plan: list[Piece]) -> dict[str, Record]:
    """The record of every piece, by name, once all are done.

    Raises ``UserError`` when one is missing, is of other work than the plan's, or describes a shard that is missing.
    """
    found = {piece.name: _record_or_why(folder, piece) for piece in plan}
    records = {name: record for name, record in found.items() if isinstance(record, Record)}
    if missing := [name for name in found if name not in records]:
        raise UserError(
            f"{len(missing):,} of {len(plan):,} pieces were done but did not arrive in {folder} (the first is "
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


def _present(folder: Path, shard: Any) -> bool:
    path = folder / shard.path
    return path.is_file() and path.stat().st_size == shard.bytes


def begin(folder: Path, config: TokenizeConfig, todo: Iterable[str]) -> None:
    """Make ``folder`` unfinished: no manifest, no record of a piece ``todo``, no half-written files, and the settings
    of this run noted.

    All these records go before the first piece is done: one that held a duplicate is valid again by its key as soon
    as the piece that held the original has been done.
    """
    reopen(folder, todo)
    for name in (*SPLITS, PIECES, "."):
        clear_temporaries(folder / name)
    write_json(folder / PIECES / SETTINGS, config.identity())


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
        with suppress(OSError):  # it is not there, or holds what is not ours
            (folder / name).rmdir()


def write_quarantine(folder: Path, records: Iterable[Record]) -> list[Dropped]:
    """Write one JSON line for every book that was left out, in the order of their ids; returns those books."""
    dropped = sorted((d for record in records for d in record.dropped), key=lambda d: (d.book, d.detail))
    with atomic_file(folder / QUARANTINE) as file:
        for entry in dropped:
            file.write(json.dumps(asdict(entry), ensure_ascii=False).encode() + b"\n")
    return dropped


def remove_strays(folder: Path, records: dict[str, Record], plan: list[Piece]) -> None:
    """Remove shards and records of an earlier plan that this one does not name, and what killed workers left.

    Call it when all pieces are done: no worker writes any more.
    """
    for name in (*SPLITS, PIECES):
        clear_temporaries(folder / name)
    shards = {shard.path for record in records.values() for shard in record.shards}
    for split in SPLITS:
        for path in _named(folder / split, _SHARD):
            if f"{split}/{path.name}" not in shards:
                path.unlink()
    for path in _records_of_no_piece(folder, plan):
        path.unlink()


def _records_of_no_piece(folder: Path, plan: list[Piece]) -> list[Path]:
    names = {f"{piece.name}.json" for piece in plan}
    return [path for path in _named(folder / PIECES, _RECORD) if path.name not in names]


def _named(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """The files in ``folder`` with one of our names; none where there is no folder."""
    return [path for path in folder.glob("*") if names.fullmatch(path.name)]
