"""Files on this machine's disk: written whole or not at all, and locked.

A reader never sees half a file: data goes to a temporary name in the same folder, is fsynced, and is
renamed to the final name.
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

TEMPORARY = ".partial-"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes ``path``, durably, when the block ends without an error.

    The umask decides who can read it. It is always a new one: a link of its name, which another user may have made in a
    folder that both can write, is removed and not followed. Raises ``UserError`` when it cannot be written: a full
    disk, a quota, a read-only folder.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as refused:
        raise _refusal(path, refused) from refused
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
            raise _refusal(path, failure) from failure
        raise


def _refusal(path: Path, refused: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written ({refused.strerror}): make room or fix the folder, then run the same command again."
    )


@contextmanager
def lock(path: Path, refusal: str, *, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock file ``path``; the system releases it however the process ends.

    Waits ``patience`` seconds for another process that holds it, then raises ``UserError`` with ``refusal``. Raises
    ``OSError`` when its folder does not exist, which the library would create.
    """
    os.scandir(path.parent).close()
    # No soft lock on file systems without flock: it would outlive a process that is killed.
    file_lock = FileLock(path, timeout=patience, thread_local=False, fallback_to_soft=False)
    try:
        file_lock.acquire()
    except Timeout:
        raise UserError(refusal) from None
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
    with atomic_file(path) as file:
        file.write(text.encode())


def json_text(value: Any) -> str:
    """``value`` as indented JSON with sorted keys, so that equal values give equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as :func:`json_text`, atomically."""
    write_text(path, json_text(value))


def clear_temporaries(folder: Path) -> None:
    """Remove temporary files that killed writers left in ``folder`` (only while no writer is alive)."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        leftover.unlink(missing_ok=True)


def scratch(*parts: str, within: str | None = None) -> Path:
    """A folder for temporary files of this user, on this machine's own disk, which no other user can read.

    It is in the folder ``within``, by default TMPDIR. Raises ``UserError`` if another user owns a folder of its name,
    or could have written to it.
    """
    top = Path(within or tempfile.gettempdir()) / f"throughline-{os.getuid()}"
    with suppress(FileExistsError):
        top.mkdir(mode=0o700)
    status = top.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{top} belongs to another user. Set TMPDIR to a folder of your own.")
    if status.st_mode & 0o077:
        raise UserError(f"{top} is open to other users. Remove it, or set TMPDIR to a folder of your own.")
    folder = top.joinpath(*parts)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
