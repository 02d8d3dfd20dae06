"""The interface to a directory of data, runs or experiments, with one implementation for each kind of storage.

Machines of a cluster share object storage and nothing else. A new kind of storage is one module with a subclass of
:class:`StorageDir`, imported by ``infra.storage``.
"""

import hashlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self
from urllib.parse import urlsplit

import xxhash

from infra.errors import UserError
from infra.storage.files import atomic_file, json_text, lock

BLOCK_BYTES = 8 << 20
"""Size of the blocks in which files are copied."""

CONCURRENT_REQUESTS = 32
"""Number of simultaneous requests to object storage, each of which takes tens of milliseconds and no CPU."""


@dataclass(frozen=True)
class StorageDir(ABC):
    """A directory with an absolute path or a URI (``s3://bucket/folder``, ``gs://...``, ``az://...``).

    File names are relative to it, with ``/`` between their parts. Every method raises ``UserError`` if object storage
    keeps failing or does not respond.
    """

    LOCK: ClassVar[str] = ".command"
    """Name of the lock file in a local directory."""

    _by_scheme: ClassVar[dict[str, type["StorageDir"]]] = {}

    address: str
    """The path or the URI."""

    def __init_subclass__(cls, *, schemes: Iterable[str]) -> None:
        """Register the implementation for URIs with these ``schemes``; the empty one stands for paths."""
        StorageDir._by_scheme.update(dict.fromkeys(schemes, cls))

    @staticmethod
    def of(location: "StorageDir | Path | str", name: str = "") -> "StorageDir":
        """The directory at ``location``, or ``name`` in it, with an address for all processes of this machine.

        As with ``pathlib``, an absolute path or a URI as ``name`` replaces ``location``.
        """
        if isinstance(location, StorageDir) and not name:
            return location
        text = str(location)
        if name.startswith("/") or _scheme(name):
            text, name = name, ""
        return StorageDir._by_scheme[_scheme(text)].parse(text, name)

    @classmethod
    @abstractmethod
    def parse(cls, text: str, name: str) -> Self:
        """The directory ``name`` in the one that a user calls ``text``; that one itself if ``name`` is empty."""

    @property
    @abstractmethod
    def local_path(self) -> Path | None:
        """The folder on this machine; None if all machines reach the directory by its address."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the address."""

    @property
    @abstractmethod
    def parent(self) -> "StorageDir":
        """The directory that contains this one."""

    @abstractmethod
    def __truediv__(self, name: str) -> "StorageDir":
        """The file or directory ``name`` in this one."""

    @property
    def digest(self) -> str:
        """A short name that no other directory has."""
        return hashlib.sha256(self.address.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.address

    @abstractmethod
    def check_writable(self, flag: str) -> None:
        """Raise ``UserError`` naming ``flag`` if this machine cannot write here. Leaves nothing behind."""

    @abstractmethod
    def create(self, message: str) -> AbstractContextManager[None]:
        """Create a directory and hold it as :meth:`exclusive_use` does.

        Raises ``UserError`` if it exists or cannot be created.
        """

    @property
    @abstractmethod
    def lock_path(self) -> Path:
        """The file on this machine that :meth:`lock` locks."""

    @contextmanager
    def lock(self, message: str) -> Iterator[None]:
        """Lock the directory against other commands of this machine. The lock ends with the block or the process.

        Raises ``UserError`` with ``message`` if another process has the lock, or with the reason why it cannot be made.
        """
        try:
            self.lock_path.parent.mkdir(parents=True, exist_ok=True)
            self.lock_path.touch()
        except OSError as failure:
            raise UserError(f"Cannot write to --out {self}: {failure.strerror}. Choose another location.") from failure
        with lock(self.lock_path, message):
            yield

    @abstractmethod
    def lock_orphaned(self) -> AbstractContextManager[None]:
        """Lock a directory whose command may have died. Do nothing if the directory was removed.

        Raises ``UserError`` if a command of this machine is using it, or that cannot be known.
        """

    @abstractmethod
    def exclusive_use(self, message: str) -> AbstractContextManager[None]:
        """Hold the directory against other commands on every machine that can reach it.

        Raises ``UserError`` if another command uses it: with ``message``, or naming that command's machine and process.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is a file with this name."""

    @abstractmethod
    def entries(self) -> set[str] | None:
        """Names of the files and directories directly in this one; None if it does not exist."""

    @abstractmethod
    def list_files(self, *folders: str) -> dict[str, int]:
        """The size in bytes of every file by name, at any depth; with ``folders``, only of files in these.

        Missing folders have no files.
        """

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Raises ``FileNotFoundError`` if it is missing."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file. Raises ``FileNotFoundError`` if it is missing."""

    @abstractmethod
    def map(self, name: str) -> bytes | mmap.mmap:
        """The content of a file as a read-only buffer; a local file is memory-mapped. Raises as :meth:`read`."""

    @abstractmethod
    def write(self, name: str, content: bytes | memoryview) -> None:
        """Replace a file atomically and durably."""

    def write_json(self, name: str, value: Any) -> None:
        """Replace a file by ``value`` as JSON; equal values give equal bytes."""
        self.write(name, json_text(value).encode())

    @abstractmethod
    def upload(self, file: Path, name: str) -> None:
        """Replace the file ``name`` by a copy of a local ``file``, atomically and durably."""

    def download(self, name: str, file: Path, checksum: str | None = None) -> None:
        """Copy a file to a local ``file``, atomically and durably.

        Raises ``FileNotFoundError`` if it is missing, and ``UserError`` if its xxh3-128 is not ``checksum``.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        hasher = xxhash.xxh3_128()
        with self.open(name) as source, atomic_file(file) as sink:
            while block := source.read(BLOCK_BYTES):
                hasher.update(block)
                sink.write(block)
            if checksum and hasher.hexdigest() != checksum:
                raise UserError(
                    f"{self / name} is corrupt: its checksum differs from the manifest. Re-create the data set."
                )

    def checksum(self, name: str) -> str:
        """The xxh3-128 of a file in hexadecimal. Raises ``FileNotFoundError`` if it is missing."""
        hasher = xxhash.xxh3_128()
        with self.open(name) as file:
            while block := file.read(BLOCK_BYTES):
                hasher.update(block)
        return hasher.hexdigest()

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files durably, those of a local directory in the given order; missing ones are skipped."""

    @abstractmethod
    def remove_on_own_disk(self, names: Iterable[str]) -> None:
        """Remove files from a local directory, which may be on another disk than the driver's.

        Do nothing in storage that all machines share.
        """

    @abstractmethod
    def remove_temporaries(self, *folders: str) -> None:
        """Remove files in ``folders`` that killed writers did not finish. No writer may be alive."""

    @abstractmethod
    def remove_empty(self, *folders: str) -> None:
        """Remove those of ``folders`` that contain nothing."""


def _scheme(text: str) -> str:
    """The scheme of a URI that an implementation is registered for; empty for a path."""
    scheme = urlsplit(text).scheme if "://" in text else ""
    return scheme if scheme in StorageDir._by_scheme else ""
