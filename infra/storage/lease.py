"""Leases: exclusive use of a directory in object storage by one of several machines.

A lease is a file that is only written conditionally: it is created if it is missing, and replaced if it still has the
version that was read. The owner renews it. Another command may take over a lease that was not renewed for
``LeaseTiming.stale_seconds``.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from obstore.exceptions import AlreadyExistsError, PreconditionError

from infra.cli.console import console, errors
from infra.errors import UserError
from infra.storage import object_storage
from infra.storage.directory import StorageDir
from infra.storage.files import scratch, write_text

LEASE_FILE = ".lease"
"""Name of the file that is the lease of its directory."""


@dataclass(frozen=True)
class LeaseTiming:
    """Intervals and time limits of a lease."""

    renew_seconds: float = 10.0
    """Interval between renewals, and the longest time until a command notices that another one took its lease."""
    stale_seconds: float = 45.0
    """Time without renewal after which a lease may be taken over; shorter outages of the storage do no harm."""
    poll_seconds: float = 2.0
    """Interval between reads of the lease of a command that may have been killed."""
    release_timeout_seconds: float = 5.0
    """Time limit for removing the lease at the end; a lease that is not removed becomes stale."""


DEFAULT_TIMING = LeaseTiming()

Write = Callable[[str, bytes, Any], dict[str, Any]]
"""Function that writes a file by URI, content and expected version, and returns the new version."""


@contextmanager
def hold_lease(
    directory: StorageDir, timing: LeaseTiming = DEFAULT_TIMING, write: Write = object_storage.write
) -> Iterator[None]:
    """Hold the lease of a directory, which this process has locked, during the block.

    The lease of a killed command is taken over at once on the same machine, and after ``stale_seconds`` on other
    machines. A process that was suspended for longer and lost its lease exits with code 1 within ``renew_seconds``
    after it continues. If another command holds the lease, raises a ``UserError`` that names its machine and process.
    """
    lease = _Lease(directory, timing, write)
    lease.take()
    thread = threading.Thread(target=lease.renew_until_stopped, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        lease.stopped.set()
        thread.join(timing.release_timeout_seconds)


class _Lease:
    """Lease of ``directory``. A local file has the id of the last command on this machine that requested the lease."""

    def __init__(self, directory: StorageDir, timing: LeaseTiming, write: Write) -> None:
        self.stopped = threading.Event()
        self._directory = directory
        self._timing = timing
        self._write_file = write
        self._uri = str(directory / LEASE_FILE)
        self._owner = {"host": socket.gethostname(), "process": os.getpid(), "id": uuid.uuid4().hex}
        self._version: Any = "create"

    def take(self) -> None:
        """Write the lease, and replace a stale lease or the lease of a killed command of this machine.

        Raises ``UserError`` if another command renews the lease, or takes it first.
        """
        owner_file = scratch("leases") / self._directory.digest
        previous_id = owner_file.read_text(encoding="utf-8") if owner_file.exists() else None
        write_text(owner_file, str(self._owner["id"]))
        try:
            self._write()
            return
        except AlreadyExistsError:
            pass
        owner, self._version = self._read()
        # This process has the lock, so the previous command of this machine has died. The lease may also be this
        # command's own, if the response to its first write was lost.
        if owner.get("id", "") not in (previous_id, self._owner["id"]):
            self._wait_until_stale(owner)
        try:
            self._write()
        except (PreconditionError, AlreadyExistsError):
            raise UserError(
                f"Another command has just started to use {self._directory}. Wait for it to finish, or stop it."
            ) from None

    def _wait_until_stale(self, owner: dict[str, Any]) -> None:
        process = f"process {owner.get('process')} on {owner.get('host')}"
        errors.print(
            f"{self._directory} is locked by {process}. Waiting up to {self._timing.stale_seconds:.0f} s to see "
            "whether that command is still running. Press Ctrl-C to exit.",
            markup=False,
        )
        deadline = time.monotonic() + self._timing.stale_seconds
        while (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, self._timing.poll_seconds))
            _, version = self._read()
            if version == "create":
                raise UserError(
                    f"Another command has just finished in {self._directory}, so its files may have changed. Run this "
                    "command again."
                )
            if version != self._version:
                raise UserError(f"{self._directory} is in use by {process}. Wait for it to finish, or stop it.")

    def renew_until_stopped(self) -> None:
        """Renew the lease until ``stopped``, then remove it. Exit this process if another command took the lease."""
        while not self.stopped.wait(self._timing.renew_seconds):
            with suppress(UserError):  # Writes to the directory report unavailable storage.
                self._renew()
        with suppress(UserError):
            if self._is_owner():
                object_storage.remove(self._uri)

    def _renew(self) -> None:
        try:
            self._write()
        except (PreconditionError, AlreadyExistsError):  # The response to this command's last write may have been lost.
            if not self._is_owner():
                errors.print(
                    f"Lost the lock on {self._directory}: this command was suspended for more than "
                    f"{self._timing.stale_seconds:.0f} s and another one took over, or the lock was deleted. Exiting "
                    "without saving.",
                    markup=False,
                )
                console.end()
                os._exit(1)

    def _is_owner(self) -> bool:
        owner, self._version = self._read()
        return owner.get("id") == self._owner["id"]

    def _write(self) -> None:
        # The content must change, because S3 derives the version from it.
        content = json.dumps(self._owner | {"renewed": time.time_ns()})
        self._version = self._write_file(self._uri, content.encode(), self._version)

    def _read(self) -> tuple[dict[str, Any], Any]:
        """Return (owner of the lease, version to replace); an empty owner and "create" if there is no lease."""
        try:
            content, version = object_storage.read_version(self._uri)
        except FileNotFoundError:
            return {}, "create"
        with suppress(ValueError):
            return dict(json.loads(content)), version
        return {}, version
