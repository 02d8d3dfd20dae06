"""Where a data set or a run lives: a folder on this machine, or one in object storage, behind one interface.

Machines of a cluster share object storage and nothing else; scratch is what each of them has for itself.
"""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import xxhash

from infra.errors import UserError
from infra.storage import object_storage
from infra.storage.files import TEMPORARY, atomic_file, json_text, lock, sync_folder
from infra.storage.object_storage import error_reason, is_remote, list_files, locate, open_file

_BLOCK = 8 << 20

LEASE = ".lease"
"""The file by which a command holds a place in object storage; see ``infra.storage.lease``."""

REQUESTS = 32
"""Requests to object storage at a time, each of which takes tens of milliseconds and no CPU."""


@dataclass(frozen=True)
class StorageDir:
    """A folder, by its path or its URI (``s3://bucket/folder``, ``gs://...``, ``az://...``).

    Names of files are relative to it, with ``/`` between parts. Where object storage keeps failing, or does not
    answer, every method raises ``UserError``.
    """

    LOCK: ClassVar[str] = ".command"
    """The file by which a command holds a folder."""

    address: str

    @classmethod
    def of(cls, directory: "StorageDir | Path | str") -> "StorageDir":
        """``directory`` with a whole path, so that it means the same in every process of this machine."""
        if isinstance(directory, StorageDir):
            return directory
        text = str(directory)
        if not is_remote(text):
            return cls(str(Path(text).resolve()))
        path, mark, query = text.partition("?")
        return cls(path.rstrip("/") + mark + query)

    @property
    def is_remote(self) -> bool:
        return is_remote(self.address)

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> "StorageDir":
        return self._at(self._path.rpartition("/")[0])

    @property
    def local_path(self) -> Path:
        """The folder on this machine. Only for places that are not remote."""
        assert not self.is_remote, f"{self.address} is not on this machine"
        return Path(self.address)

    @property
    def digest(self) -> str:
        """A name for scratch that belongs to it."""
        return hashlib.sha256(self.address.encode()).hexdigest()[:16]

    def __truediv__(self, name: str) -> "StorageDir":
        return self._at(f"{self._path}/{quote(name) if self.is_remote else name}")

    @property
    def _path(self) -> str:
        """The address without the query of a URI, which may name an endpoint."""
        return self.address.partition("?")[0] if self.is_remote else self.address

    def _at(self, path: str) -> "StorageDir":
        return StorageDir(path + self.address.removeprefix(self._path))

    def __str__(self) -> str:
        return self.address

    def check_writable(self, flag: str) -> None:
        """Raise ``UserError`` when this machine cannot write here: a bucket that does not exist, or a refusal.

        Writes and removes a file of a few bytes.
        """
        probe = f"{TEMPORARY}probe-{os.getpid()}"
        try:
            if not self.is_remote:
                self.local_path.mkdir(parents=True, exist_ok=True)
            self.write(probe, b"probe")
            self.remove([probe])
        except OSError as refused:
            raise UserError(f"{flag} {self} cannot be written ({refused.strerror}): name another place.") from refused
        except UserError as refused:
            why = error_reason(refused.__cause__ or refused)
            raise UserError(f"{flag} {self} cannot be written ({why}): name another place.") from refused

    @property
    def lock_file(self) -> Path:
        """What a command of this machine locks: a file in the folder or, as object storage has no locks, in scratch."""
        return scratch("locks") / self.digest if self.is_remote else self.local_path / self.LOCK

    @contextmanager
    def lock(self, refusal: str) -> Iterator[None]:
        """Hold it against other commands of this machine for the block's duration, and no longer than this process.

        A folder is made if it is missing. Raises ``UserError``: ``refusal`` when another process holds it, or why the
        folder cannot be written.
        """
        try:
            self.lock_file.parent.mkdir(parents=True, exist_ok=True)
            self.lock_file.touch()
        except OSError as refused:
            raise UserError(f"{self} cannot be written ({refused.strerror}): name another --out.") from refused
        with lock(self.lock_file, refusal):
            yield

    def exists(self, name: str) -> bool:
        """Whether it holds a file of this name."""
        if not self.is_remote:
            return (self.local_path / name).is_file()
        try:
            return object_storage.file_size(str(self / name)) >= 0
        except FileNotFoundError:
            return False

    def list_files(self, below: str = "") -> dict[str, int]:
        """Bytes of every file by its name, of those in the folder ``below`` it and deeper; none where it is missing.

        Without leases.
        """
        start = self / below if below else self
        if self.is_remote:
            _, bucket, path = locate(self.address)
            root = f"{bucket}/{path}".rstrip("/") + "/"
            sizes = {entry.path.removeprefix(root): entry.size for entry in list_files(start.address)}
            return {name: size for name, size in sizes.items() if LEASE not in name.split("/")}
        size_by_name: dict[str, int] = {}
        for parent, _, names in os.walk(start.local_path):
            for path in (Path(parent) / name for name in names):
                with suppress(OSError):  # removed meanwhile, as temporary files are, or a link to itself
                    size_by_name[path.relative_to(self.local_path).as_posix()] = path.stat().st_size
        return size_by_name

    def read(self, name: str) -> bytes:
        """The content of a file. Raises ``FileNotFoundError`` when there is none."""
        if not self.is_remote:
            return (self.local_path / name).read_bytes()
        return object_storage.read(str(self / name))

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Replace a file, whole and durably."""
        if not self.is_remote:
            (self.local_path / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.local_path / name) as file:
                file.write(content)
        else:
            object_storage.write(str(self / name), memoryview(content).cast("B"))

    def write_json(self, name: str, value: Any) -> None:
        """Replace a file by ``value`` as JSON, of which equal values give equal bytes."""
        self.write(name, json_text(value).encode())

    def upload(self, file: Path, name: str) -> None:
        """Copy a local file to here, whole; where it is here already, nothing is done."""
        if self.is_remote:
            object_storage.write(str(self / name), file)
        elif file != self.local_path / name:
            (self.local_path / name).parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as source, atomic_file(self.local_path / name) as sink:
                shutil.copyfileobj(source, sink, _BLOCK)

    def download(self, name: str, file: Path, expected: str | None = None) -> None:
        """Copy a file from here to a local ``file``, whole.

        Raises ``FileNotFoundError`` when there is none, and ``UserError`` when its checksum (xxh3-128) is not the
        ``expected`` one.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        hasher = xxhash.xxh3_128()
        with open_file(str(self / name)) as source, atomic_file(file) as sink:
            while block := source.read(_BLOCK):
                hasher.update(block)
                sink.write(block)
            if expected and hasher.hexdigest() != expected:
                raise UserError(f"{self / name} is damaged: its checksum is not that of its manifest; make it again.")

    def checksum(self, name: str) -> str:
        """xxh3-128 of a file's bytes, in hexadecimal. Raises ``FileNotFoundError`` when there is none."""
        hasher = xxhash.xxh3_128()
        with open_file(str(self / name)) as file:
            while block := file.read(_BLOCK):
                hasher.update(block)
        return hasher.hexdigest()

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, durably; those that do not exist are skipped. Those of a folder go in the given order."""
        if not self.is_remote:
            paths = [path for name in names if (path := self.local_path / name).exists()]
            for path in paths:
                path.unlink(missing_ok=True)
            for parent in dict.fromkeys(path.parent for path in paths):
                sync_folder(parent)
            return
        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(lambda name: object_storage.remove(str(self / name)), names))


def check_object_name(name: str) -> None:
    """Raise ``UserError`` when what ``--name`` calls so cannot be kept in object storage under that name."""
    if not re.fullmatch(r"[\w.-]*[\w-][\w.-]*", name, re.ASCII):
        raise UserError(f"--name {name!r} is not a name for object storage: use letters, digits, '.', '_' and '-'.")


def scratch(*parts: str, within: str | None = None) -> Path:
    """A folder for this user's files ``within`` TMPDIR, on this machine's own disk, which no other user can read.

    Raises ``UserError`` when somebody else has made a folder of its name, or has been able to put files in it.
    """
    top = Path(within or tempfile.gettempdir()) / f"throughline-{os.getuid()}"
    with suppress(FileExistsError):
        top.mkdir(mode=0o700)
    status = top.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{top} belongs to another user: set TMPDIR to a folder of your own.")
    if status.st_mode & 0o077:
        raise UserError(f"{top} is open to other users: remove it, or set TMPDIR to a folder of your own.")
    folder = top.joinpath(*parts)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class WorkingCopy:
    """The local folder in which a command writes what belongs to a place: the place itself unless it is remote.

    What is written there is complete in the place only once it has been sent.
    """

    directory: StorageDir
    local_path: Path

    @classmethod
    def of(
        cls, directory: StorageDir, *, empty: bool, include: Callable[[str], bool] = lambda name: True
    ) -> "WorkingCopy":
        """That of ``directory``: empty where ``empty``, else with the place's files whose names are ``include``.

        Each machine's copy of a remote place is made anew, because another machine may have continued it.
        """
        if not directory.is_remote:
            return cls(directory, directory.local_path)
        local_path = cls.folder_of(directory)
        shutil.rmtree(local_path, ignore_errors=True)
        local_path.mkdir(mode=0o700)
        if not empty:
            for name in directory.list_files():
                if include(name):
                    directory.download(name, local_path / name)
        return cls(directory, local_path)

    @staticmethod
    def folder_of(directory: StorageDir) -> Path:
        """The folder of a place's copy, alone in one that exists; of a place that is not remote its own."""
        return directory.local_path if not directory.is_remote else scratch("copies", directory.digest) / directory.name

    def push(self, *names: str) -> None:
        """Send these files to the place, in this order; those that do not exist here are skipped."""
        for name in names:
            if (self.local_path / name).is_file():
                self.directory.upload(self.local_path / name, name)

    def discard(self) -> None:
        """Remove it and its place."""
        shutil.rmtree(self.local_path, ignore_errors=True)
        if self.directory.is_remote:
            self.directory.remove(self.directory.list_files())
