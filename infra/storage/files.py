"""Files on this machine's disk: atomic writes, locks, and temporary files.

A file is written under a temporary name in the same folder, fsynced, and renamed to its final name, so that a reader
never sees an incomplete file.
"""

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from infra.errors import UserError

TEMPORARY_PREFIX = ".partial-"
"""Prefix of the names of files that are being written."""


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes ``path``, durably, if the block ends without an error.

    The umask decides who can read the file. A link at the temporary name, which another user may have planted in a
    shared folder, is removed and not followed. Raises ``UserError`` if writing fails, for example on a full disk.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as failure:
        raise _write_error(path, failure) from failure
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as failure:
        temporary.unlink(missing_ok=True)
        if isinstance(failure, OSError) and failure.errno is not None:
            raise _write_error(path, failure) from failure
        raise


def _write_error(path: Path, failure: OSError) -> UserError:
    return UserError(
        f"Cannot write {path}: {failure.strerror}. Free disk space or fix the folder's permissions, then run the same "
        "command again."
    )


@contextmanager
def lock(path: Path, message: str, *, timeout: float = 0.0) -> Iterator[None]:
    """Hold the lock file ``path`` during the block. The operating system also releases it if the process is killed.

    Raises ``UserError`` with ``message`` if another process still holds the lock after ``timeout`` seconds, and
    ``OSError`` if the folder of ``path`` does not exist.
    """
    os.scandir(path.parent).close()  # Raise for a missing folder, because filelock would create it.
    # A soft lock, which filelock uses on file systems without flock, would outlive a killed process.
    file_lock = FileLock(path, timeout=timeout, thread_local=False, fallback_to_soft=False)
    try:
        file_lock.acquire()
    except Timeout:
        raise UserError(message) from None
    try:
        yield
    finally:
        file_lock.release()


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically and durably."""
    with atomic_file(path) as file:
        file.write(text.encode())


def json_text(value: Any) -> str:
    """Format ``value`` as indented JSON with sorted keys, so that equal values give equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as :func:`json_text` formats it, atomically and durably."""
    write_text(path, json_text(value))


def clear_temporaries(folder: Path) -> None:
    """Remove temporary files of killed writers in ``folder``. Other writers must not be running."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        leftover.unlink(missing_ok=True)


def scratch(*parts: str, within: str | None = None) -> Path:
    """Create a private folder for temporary files of this user on this machine's disk, and return it.

    ``parts`` are its path in the scratch folder, which is in the folder ``within``, by default TMPDIR. Raises
    ``UserError`` if another user owns the scratch folder, or could have written to it.
    """
    top = Path(within or tempfile.gettempdir()) / f"throughline-{os.getuid()}"
    with suppress(FileExistsError):
        top.mkdir(mode=0o700)
    status = top.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{top} belongs to another user. Set TMPDIR to a private folder.")
    if status.st_mode & 0o077:
        raise UserError(f"{top} is accessible to other users. Delete it, or set TMPDIR to a private folder.")
    folder = top.joinpath(*parts)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
