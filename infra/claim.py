"""Hold a place against other commands: those of this machine, and of object storage those of any other machine.

In: a place. Out: a block during which no other command writes there. Machines may share nothing but the storage, which
has no locks, and Arrow's filesystems have no conditional writes. So each command writes a claim of its own, under a
random name, and then lists all claims: of two commands that start together at least one sees the other, because S3,
Google Cloud Storage and their like list whatever was written before. A claim is renewed while its command runs and is
stale once it has not been for ``STALE_SECONDS``. Ages are differences between times that the storage recorded, so that
the clocks of the machines do not matter.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.console import errors
from infra.errors import UserError
from infra.object_storage import listing
from infra.place import CLAIMS, Place, scratch
from infra.storage import write_text

RENEW_SECONDS = 10.0
"""Between two renewals; as long as it takes to find out that another command is running."""

STALE_SECONDS = 45.0
"""Age from which a claim no longer counts: storage may be away for most of that time."""

LOOK_SECONDS = 2.0
"""Between two looks at the claim of a command that may have been killed."""

LEAVE_SECONDS = 5.0
"""How long to wait for the removal of the claim; without it, others wait for it to become stale."""


@contextmanager
def sole_user(place: Place, refusal: str) -> Iterator[None]:
    """Hold ``place`` against other commands for the block's duration, and hardly longer than this process.

    On this machine it is locked by :meth:`Place.locked` with ``refusal``. In object storage a claim holds
    it against other machines. One that was left there by a killed command delays the next command on the same machine
    not at all, and on another one for at most ``STALE_SECONDS``. A process that was stopped for longer and whose place
    has been taken since exits at once with code 1, up to ``RENEW_SECONDS`` after it continues. Raises ``UserError``
    when another command holds the place, naming its machine and process.
    """
    with place.locked(refusal):
        if not place.remote or place.address.startswith("hf:"):  # where each renewal would be a commit
            yield
            return
        note = scratch("claims") / place.digest
        claim = _Claim(place, note)
        stale = claim.take()
        thread = threading.Thread(target=claim.keep, args=(stale,), name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            claim.ended.set()
            thread.join(LEAVE_SECONDS)


class _Claim:
    """A claim to ``place``, whose name is in the file ``note`` of this machine as long as the claim may exist."""

    def __init__(self, place: Place, note: Path) -> None:
        self.ended = threading.Event()
        self._place = place
        self._claims = place / CLAIMS
        self._note = note
        self._name = f"{uuid.uuid4().hex}.json"
        self._content = json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode()

    def take(self) -> set[str]:
        """Wait until there is no other claim but stale ones, and return those.

        The claim that an earlier command of this machine left is removed: its lock is ours, so it was killed. Raises
        ``UserError`` if another claim is renewed, or removed meanwhile.
        """
        if self._note.exists():
            self._claims.remove([self._note.read_text(encoding="utf-8")])
        write_text(self._note, self._name)
        began, first, told = time.monotonic(), dict[str, int](), False
        try:
            while True:
                self._write()
                times = self._times()
                if self._name not in times:  # whoever has just taken the place removed it with the stale ones
                    continue
                now = times.pop(self._name)
                for other, changed in times.items():
                    if first.setdefault(other, changed) != changed:
                        raise UserError(
                            f"{self._place} is in use by {self._holder(other)}: wait for it, or stop it there."
                        )
                if first.keys() - times.keys():  # and what this command has read there already may be old
                    raise UserError(
                        f"another command has just ended in {self._place}, or taken it over: run the same one again."
                    )
                left = STALE_SECONDS - (now - max(times.values(), default=0)) / 1e9
                left = min(left, STALE_SECONDS - (time.monotonic() - began))
                if not times or left <= 0:
                    self._claims.remove(times)
                    return set(times)
                if not told:
                    told, newest = True, max(times, key=times.__getitem__)
                    errors.print(
                        f"{self._place} was in use {STALE_SECONDS - left:.0f} s ago by {self._holder(newest)}: waiting "
                        f"up to {left:.0f} s to see whether that still runs; Ctrl-C exits.",
                        markup=False,
                    )
                time.sleep(min(left, LOOK_SECONDS))
        except BaseException:
            self._remove()
            raise

    def keep(self, stale: set[str]) -> None:
        """Renew the claim until ``ended``, then remove it. Exit when another command has taken the place meanwhile.

        A process that was stopped may renew its claim just when another removes it as one of ``stale`` ones, so these
        are removed again.
        """
        while not self.ended.wait(RENEW_SECONDS):
            with suppress(UserError):  # storage that is away is reported by whatever writes to it
                there = self._times()
                if self._name not in there:
                    self._leave()
                if back := stale & there.keys():
                    self._claims.remove(back)
                self._write()
        self._remove()

    def _leave(self) -> None:
        errors.print(
            f"{self._place} is in use by another command, because this one had stopped for more than "
            f"{STALE_SECONDS:.0f} s; or its files were removed. Exiting without saving anything more.",
            markup=False,
        )
        sys.stdout.flush()
        os._exit(1)

    def _write(self) -> None:
        self._claims.write(self._name, self._content)

    def _times(self) -> dict[str, int]:
        """When each claim was written, in nanoseconds of the storage's clock."""
        return {entry.path.rpartition("/")[2]: entry.modified for entry in listing(self._claims.address)}

    def _holder(self, name: str) -> str:
        try:
            found = json.loads(self._claims.read(name))
            return f"process {found['process']} on {found['host']}"
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # removed meanwhile, or not ours
            return "another command"

    def _remove(self) -> None:
        with suppress(UserError):
            self._claims.remove([self._name])
            self._note.unlink(missing_ok=True)
