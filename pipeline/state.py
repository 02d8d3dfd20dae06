"""What an output folder already holds: which pieces are done, what is left over, and who else writes there."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.command import UserError
from infra.storage import atomic_file, clear_temporaries, held, write_json
from pipeline.books import Dropped
from pipeline.config import TokenizeConfig
from pipeline.duplicates import EXACT, NEAR
from pipeline.plan import Piece
from pipeline.records import Record, read_record
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

    When any piece is to be done, so are those that gave up duplicates: what they repeated may be gone.
    """
    done: dict[str, Record] = {}
    todo: dict[str, str] = {}
    for piece in plan:
        record = read_record(folder, piece.name)
        if record is None:
            todo[piece.name] = "not done yet"
        elif record.key != piece.key():
            todo[piece.name] = "inputs or settings changed"
        elif not all(_present(folder, shard) for shard in record.shards):
            todo[piece.name] = "shards missing or cut short"
        else:
            done[piece.name] = record
    for name in list(done) if todo else []:
        if any(dropped.reason in (EXACT, NEAR) for dropped in done[name].dropped):
            todo[name] = "held duplicates of books that may have changed"
            del done[name]
    return Assessment(done, todo)


def _present(folder: Path, shard: Any) -> bool:
    path = folder / shard.path
    return path.is_file() and path.stat().st_size == shard.bytes


def begin(folder: Path, config: TokenizeConfig) -> None:
    """Make ``folder`` unfinished: no manifest, no half-written files, and the settings of this run noted."""
    (folder / MANIFEST).unlink(missing_ok=True)
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
    names = {f"{piece.name}.json" for piece in plan}
    for path in _named(folder / PIECES, _RECORD):
        if path.name not in names:
            path.unlink()


def _named(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """The files in ``folder`` with one of our names; none where there is no folder."""
    return [path for path in folder.glob("*") if names.fullmatch(path.name)]
