"""Notes on disk about runs that are open in MLflow, so that none stays RUNNING after its process has ended.

In: a run that is about to be created or reopened. Out: a file next to the journals, which exists before the run
does and is locked for as long as the process lives. Whenever and however the process is killed, the next command
finds the note unlocked and closes the run. The note is locked itself, and renamed while it is, which filelock, that
locks a file by its path, does not offer.
"""

import atexit
import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from infra.command import uninterrupted
from infra.tracking.key import RunKey

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TAG = "tracking.note"
"""Names the note that a run was created under; by it the run is found if its id was not written to the note."""
CREATING, OPEN = ".creating", ".open"
"""Suffixes of notes: of a run that nothing refers to yet, named by its tag; and of an open run, named by its id."""

_locked: "dict[Path, tuple[int, MlflowClient]]" = {}
"""This process's notes: the descriptor that holds the lock, and the client of the run's store."""


def announce(note: Path, client: "MlflowClient", experiment_id: str) -> None:
    """Write ``note`` and hold its lock until :func:`release` or the end of this process.

    Where no file can be written or locked, a run is only closed when its command ends normally.
    """
    if note in _locked:
        return
    hidden = note.with_name(f".{os.getpid()}-{note.name}{CREATING}")  # so that the note is locked from the beginning
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps({"store": client.tracking_uri, "experiment_id": experiment_id}).encode())
        _locked[note] = descriptor, client
        os.replace(hidden, note)


def rename(note: Path, run_id: str) -> None:
    """Name ``note`` after its run, which from now on is never deleted, at worst closed."""
    if note in _locked:
        renamed = note.with_name(run_id + OPEN)
        _locked[renamed] = _locked[note]
        os.replace(note, renamed)
        del _locked[note]


def release(note: Path) -> None:
    """Remove the note of a run that was closed."""
    note.unlink(missing_ok=True)
    if note in _locked:
        os.close(_locked.pop(note)[0])


def close_abandoned(folder: Path, client: "MlflowClient") -> None:
    """Close the client's runs whose processes have ended, by their notes in ``folder``; failures are left for later.

    They become KILLED. A run whose key its process had no time to save is deleted, since it is empty and the command
    creates it again when it is repeated.
    """
    for note in sorted(folder.glob(f"*{CREATING}")) + sorted(folder.glob(f"*{OPEN}")):
        with uninterrupted():
            _close(note, client)


def _close(note: Path, client: "MlflowClient") -> None:
    try:
        with note.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its process lives
            kept = json.load(file)
            if kept["store"] != client.tracking_uri or not os.fstat(file.fileno()).st_nlink:
                return  # of another store, or released or replaced since it was listed
            if note.suffix == CREATING:
                for run in client.search_runs([kept["experiment_id"]], f"tags.`{TAG}` = '{note.stem}'"):
                    client.set_terminated(run.info.run_id, "KILLED")
                    client.delete_run(run.info.run_id)
            elif client.get_run(note.stem).info.status == "RUNNING":
                client.set_terminated(note.stem, "KILLED")
            note.unlink(missing_ok=True)
    except Exception:  # noqa: BLE001 an old run must not stop a new one, and the next command tries again
        return


@atexit.register
def close_own() -> None:
    """Close the runs that this process leaves open, for example when it was interrupted between two steps."""
    places = {(note.parent, client) for note, (_, client) in _locked.items()}
    for descriptor, _ in _locked.values():
        os.close(descriptor)
    _locked.clear()
    for folder, client in places:
        close_abandoned(folder, client)


def note_of(key: RunKey) -> Path:
    """The path of the note about an open run."""
    return Path(key.journal) / f"{key.run_id}{OPEN}"
