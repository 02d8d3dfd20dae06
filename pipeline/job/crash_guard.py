"""Skipping of a book that crashes its worker, so that the other books of its partition are still tokenized.

A partition whose worker crashed is processed again, and the same book would crash the worker every time. Before each
book, a worker therefore writes a note with the next step to its machine's disk. This takes two microseconds, and a note
in the page cache survives the process. A task that finds the note of a crashed worker counts a crash of that book.
After ``MAX_CRASHES`` crashes, the book is skipped. Each command has its own notes, so that a killed command or a power
failure does not count as a crash.
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
"""Number of crashes after which a book is skipped."""
_LENGTH_BYTES = 8


class CrashGuard:
    """Notes of one partition in one run; the context manager removes them at the end, also after an error."""

    def __init__(self, run: str, partition: str) -> None:
        try:
            self._open(scratch(run), partition)
        except OSError as failure:
            raise _write_error(failure) from failure

    def _open(self, folder: Path, partition: str) -> None:
        self._note = folder / f"{partition}.note"
        self._counts = folder / f"{partition}.json"
        self.crash_counts: dict[str, int] = {}
        with suppress(FileNotFoundError, ValueError):  # A kill or a full disk may have truncated the file.
            self.crash_counts = json.loads(self._counts.read_text(encoding="utf-8"))
        if self._note.exists() and (step := _read(self._note)):
            self.crash_counts[step] = self.crash_counts.get(step, 0) + 1
            write_json(self._counts, self.crash_counts)
        self._file = os.open(self._note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def enter(self, step: str) -> bool:
        """Write a note that ``step`` is next; return False if it has crashed too many workers and must be skipped."""
        name = step.encode("utf-8", "replace")
        try:
            os.pwrite(self._file, len(name).to_bytes(_LENGTH_BYTES, "little") + name, 0)
        except OSError as failure:
            raise _write_error(failure) from failure
        return self.crash_counts.get(step, 0) < MAX_CRASHES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._note.unlink(missing_ok=True)
        self._counts.unlink(missing_ok=True)


def remove_notes(run: str) -> None:
    """Remove a run's notes from this machine; only crashed workers leave notes."""
    with suppress(OSError, UserError):
        shutil.rmtree(scratch(run))


def _write_error(failure: OSError) -> UserError:
    return UserError(
        f"Cannot write to {tempfile.gettempdir()} on {socket.gethostname()}: {failure.strerror}. Free disk space or "
        "set TMPDIR to another folder, then run the same command again."
    )


def _read(note: Path) -> str:
    content = note.read_bytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    return content[_LENGTH_BYTES : _LENGTH_BYTES + length].decode("utf-8", "replace")
