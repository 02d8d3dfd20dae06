"""Notes on disk about runs that are open in MLflow, so that none stays RUNNING after its process is gone.

In: a run that is about to be created or reopened. Out: a file beside the journals, which exists before the run
does and is locked for as long as the process lives. Whatever kills the process, and whenever, the next command
finds the note without a lock and closes the run.
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
"""Names the note that a run was created under, by which the run is found when its id did not reach the note."""
CREATING, OPEN = ".creating", ".open"
"""Suffixes of a note: named after a run that nothing refers to yet, by its tag, and after an open run, by its id."""

_held: "dict[Path, tuple[int, MlflowClient]]" = {}
"""This process's notes: the descriptor that holds the lock, and the client of the run's store."""


def announce(note: Path, client: "MlflowClient", experiment_id: str) -> None:
    """Write ``note`` and hold its lock until :func:`release` or the end of this process.

    Where no file can be written or locked, runs are only closed by commands that end in an orderly way.
    """
    if note in _held:
        return
    hidden = note.with_name(f".{os.getpid()}-{note.name}{CREATING}")  # so that a note in its place is locked
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps({"store": client.tracking_uri, "experiment_id": experiment_id}).encode())
        _held[note] = descriptor, client
        os.replace(hidden, note)


def rename(note: Path, run_id: str) -> None:
    """Name ``note`` after its run, which from now on is kept and at worst closed."""
    if note in _held:
        renamed = note.with_name(run_id + OPEN)
        _held[renamed] = _held[note]
        os.replace(note, renamed)
        del _held[note]


def release(note: Path) -> None:
    """Remove the note of a run that was closed."""
    note.unlink(missing_ok=True)
    if note in _held:
        os.close(_held.pop(note)[0])


def close_abandoned(folder: Path, client: "MlflowClient") -> None:
    """Close the client's runs whose processes are gone, by their notes in ``folder``; what fails is left for later.

    They become KILLED. One that its process had no time to keep the key of is deleted, since it is empty and the
    command that is repeated creates it anew.
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
                return  # not ours to close, or released or replaced since it was listed
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
    """Close the runs that this process leaves open, as one does that was interrupted between two of its steps."""
    places = {(note.parent, client) for note, (_, client) in _held.items()}
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()
    for folder, client in places:
        close_abandoned(folder, client)


def note_of(key: RunKey) -> Path:
    """Where it is noted that the run is open."""
    return Path(key.journal) / f"{key.run_id}{OPEN}"
