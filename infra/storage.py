"""Write files whole or not at all, and be the only one who does.

A reader never sees half a file: data goes to a temporary name in the same folder, is fsynced, and is
renamed over the final name.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from infra.command import UserError

TEMPORARY = ".partial-"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a private temporary file that becomes ``path``, durably, when the block ends without an error.

    Raises ``UserError`` when the system does not take it: a full disk, a quota, a folder that may not be written to.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as refused:
        raise _refusal(path, refused) from refused
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as failure:
        temporary.unlink(missing_ok=True)
        if isinstance(failure, OSError) and failure.errno is not None:
            raise _refusal(path, failure) from failure
        raise


def _refusal(path: Path, refused: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written ({refused.strerror}): make room or mend the folder, then run the same command again."
    )


@contextmanager
def held(path: Path, refusal: str, *, patience: float = 0.0) -> Iterator[None]:
    """Be the only process that holds ``path``, a lock file; the system lets go of it however the process ends.

    Waits ``patience`` seconds for another that holds it, then raises ``UserError`` with ``refusal``.
    """
    with path.open("w") as lock:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise UserError(refusal) from None
                time.sleep(0.1)
        yield


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON with sorted keys, atomically, so that equal values give equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def clear_temporaries(folder: Path) -> None:
    """Remove what killed writers left in ``folder`` (call only when no writer is alive)."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        leftover.unlink(missing_ok=True)
