"""Hold a place against other commands: those of this machine, and of object storage those of any other machine.

Machines may share nothing but the storage, where a lease is a file that is only ever written conditionally: created
where there is none, and replaced where it is still the version that was seen. Its holder renews it; a lease that was
not renewed for ``STALE_SECONDS`` is taken over.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from obstore.exceptions import AlreadyExistsError, PreconditionError

from infra.cli.console import console, errors
from infra.errors import UserError
from infra.storage import object_storage
from infra.storage.directory import LEASE, StorageDir, scratch
from infra.storage.files import write_text

RENEW_SECONDS = 10.0
"""Between two renewals; as long as it takes to find out that another command is running."""

STALE_SECONDS = 45.0
"""How long a lease counts without being renewed: storage may be away for most of that time."""

POLL_SECONDS = 2.0
"""Between two looks at the lease of a command that may have been killed."""

RELEASE_TIMEOUT_SECONDS = 5.0
"""How long to wait for the removal of the lease; without it, others wait for it to become stale."""


@contextmanager
def exclusive_use(directory: StorageDir, refusal: str) -> Iterator[None]:
    """Hold ``directory`` against other commands for the block's duration, and hardly longer than this process.

    On this machine it is locked by :meth:`StorageDir.lock` with ``refusal``, in object storage also by a lease. One
    that a killed command left there delays the next command on the same machine not at all, and on another one for
    ``STALE_SECONDS``. A process that was stopped for longer and whose place has been taken since exits at once with
    code 1, up to ``RENEW_SECONDS`` after it continues. Raises ``UserError`` when another command holds the place,
    naming its machine and process.
    """
    with directory.lock(refusal):
        if not directory.is_remote:
            yield
            return
        lease = _Lease(directory)
        lease.take()
        thread = threading.Thread(target=lease.renew_until_stopped, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            lease.ended.set()
            thread.join(RELEASE_TIMEOUT_SECONDS)


class _Lease:
    """The lease of ``directory``. A file of this machine names the last command here that wanted it."""

    def __init__(self, directory: StorageDir) -> None:
        self.ended = threading.Event()
        self._directory = directory
        self._uri = str(directory / LEASE)
        self._owner = {"host": socket.gethostname(), "process": os.getpid(), "id": uuid.uuid4().hex}
        self._version: Any = "create"

    def take(self) -> None:
        """Write the lease, over one that an earlier command of this machine left, or once another's is stale.

        Raises ``UserError`` if another command renews it, or takes it first.
        """
        owner_file = scratch("leases") / self._directory.digest
        previous_id = owner_file.read_text(encoding="utf-8") if owner_file.exists() else None
        write_text(owner_file, str(self._owner["id"]))
        try:
            self._write()
            return
        except AlreadyExistsError:
            pass
        holder, self._version = self._read()
        # An earlier command's lock is ours, so it was killed; and of our own write the answer may have been lost.
        if holder.get("id", "") not in (previous_id, self._owner["id"]):
            self._wait_until_stale(holder)
        try:
            self._write()
        except (PreconditionError, AlreadyExistsError):
            raise UserError(
                f"another command has just taken {self._directory}: wait for it, or stop it there."
            ) from None

    def _wait_until_stale(self, holder: dict[str, Any]) -> None:
        who = f"process {holder.get('process')} on {holder.get('host')}"
        errors.print(
            f"{self._directory} is held by {who}: waiting up to {STALE_SECONDS:.0f} s to see whether that still runs; "
            "Ctrl-C exits.",
            markup=False,
        )
        until = time.monotonic() + STALE_SECONDS
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
            _, version = self._read()
            if version == "create":  # and what this command has read there already may be old
                raise UserError(f"another command has just ended in {self._directory}: run the same one again.")
            if version != self._version:
                raise UserError(f"{self._directory} is in use by {who}: wait for it, or stop it there.")

    def renew_until_stopped(self) -> None:
        """Renew the lease until ``ended``, then remove it. Exit when another command has taken the place meanwhile."""
        while not self.ended.wait(RENEW_SECONDS):
            with suppress(UserError):  # storage that is away is reported by whatever writes to it
                self._renew()
        with suppress(UserError):
            if self._is_mine():
                object_storage.remove(self._uri)

    def _renew(self) -> None:
        try:
            self._write()
        except (PreconditionError, AlreadyExistsError):  # perhaps by this command, whose last answer was lost
            if not self._is_mine():
                errors.print(
                    f"{self._directory} is in use by another command, because this one had stopped for more than "
                    f"{STALE_SECONDS:.0f} s; or its files were removed. Exiting without saving anything more.",
                    markup=False,
                )
                console.end()
                os._exit(1)

    def _is_mine(self) -> bool:
        holder, self._version = self._read()
        return holder.get("id") == self._owner["id"]

    def _write(self) -> None:
        content = json.dumps(self._owner | {"renewed": time.time_ns()})  # a version of S3's is made of the content
        self._version = object_storage.write(self._uri, content.encode(), self._version)

    def _read(self) -> tuple[dict[str, Any], Any]:
        """Who holds the lease, and the version of it to replace; no one where there is none."""
        try:
            content, version = object_storage.read_version(self._uri)
        except FileNotFoundError:
            return {}, "create"
        with suppress(ValueError):
            return dict(json.loads(content)), version
        return {}, version
