"""Skip a book that crashes its worker, so that the rest of its piece is still done.

A piece whose worker died is done again, without end for the same book. A worker therefore notes what it is
about to do on its machine's disk before every book: this takes two microseconds, and a note in the page
cache outlives the process. A task that finds the note of a dead worker counts a crash of that book, and
after ``MAX_CRASHES`` of them the book is skipped. Notes are kept per command, so that a killed command or a
machine that lost power is not counted against any book.
"""

import json
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from infra.errors import UserError
from infra.storage.files import scratch, write_json

MAX_CRASHES = 3
_LENGTH = 8


class CrashGuard:
    """The notes of one piece in one run. A context manager: they are removed when the piece ends, also by an error."""

    def __init__(self, run: str, partition: str) -> None:
        try:
            self._open(scratch(run), partition)
        except OSError as refused:
            raise _refusal(refused) from refused

    def _open(self, folder: Path, partition: str) -> None:
        self._note = folder / f"{partition}.note"
        self._counts = folder / f"{partition}.json"
        self.crash_counts: dict[str, int] = {}
        with suppress(FileNotFoundError, ValueError):  # ValueError: a kill or a full disk cut it short
            self.crash_counts = json.loads(self._counts.read_text(encoding="utf-8"))
        if self._note.exists() and (location := _read(self._note)):
            self.crash_counts[location] = self.crash_counts.get(location, 0) + 1
            write_json(self._counts, self.crash_counts)
        self._file = os.open(self._note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def enter(self, location: str) -> bool:
        """Note that ``location`` comes next; False when it has crashed too many workers and must be skipped."""
        name = location.encode("utf-8", "replace")
        try:
            os.pwrite(self._file, len(name).to_bytes(_LENGTH, "little") + name, 0)
        except OSError as refused:
            raise _refusal(refused) from refused
        return self.crash_counts.get(location, 0) < MAX_CRASHES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._note.unlink(missing_ok=True)
        self._counts.unlink(missing_ok=True)


def remove_notes(run: str) -> None:
    """Remove the notes of a run from this machine: those of the workers that died."""
    with suppress(OSError, UserError):
        shutil.rmtree(scratch(run))


def _refusal(refused: OSError) -> UserError:
    return UserError(
        f"{tempfile.gettempdir()} of {socket.gethostname()} cannot be written ({refused.strerror}): make room there, "
        "or set TMPDIR to another folder; then run the same command again."
    )


def _read(note: Path) -> str:
    content = note.read_bytes()
    length = int.from_bytes(content[:_LENGTH], "little")
    return content[_LENGTH : _LENGTH + length].decode("utf-8", "replace")
