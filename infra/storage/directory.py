"""Interface to a directory of data, runs or experiments, with one implementation for each kind of storage.

Machines of a cluster only share object storage. To add a kind of storage, write a module with a subclass of
:class:`StorageDir` and import it in ``infra.storage``.
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

    File names are relative to the directory, with ``/`` between their parts. Every method raises ``UserError`` if
    object storage keeps failing or does not respond.
    """

    LOCK_FILE: ClassVar[str] = ".command"
    """Name of the lock file in a local directory."""

    _by_scheme: ClassVar[dict[str, type["StorageDir"]]] = {}

    address: str
    """Absolute path or URI of the directory."""

    def __init_subclass__(cls, *, schemes: Iterable[str]) -> None:
        """Register the implementation for URIs with these ``schemes``; the empty scheme stands for paths."""
        StorageDir._by_scheme.update(dict.fromkeys(schemes, cls))

    @staticmethod
    def of(location: "StorageDir | Path | str", name: str = "") -> "StorageDir":
        """Return the directory at ``location``, or ``name`` in it, with an absolute address.

        As with ``pathlib``, an absolute path or a URI as ``name`` replaces ``location``.
        """
        if isinstance(location, StorageDir) and not name:
            return location
        text = str(location)
        if name.startswith("/") or _find_scheme(name):
            text, name = name, ""
        return StorageDir._by_scheme[_find_scheme(text)].parse(text, name)

    @classmethod
    @abstractmethod
    def parse(cls, text: str, name: str) -> Self:
        """Return the directory ``name`` in the location ``text``, or the location itself if ``name`` is empty."""

    @property
    @abstractmethod
    def local_path(self) -> Path | None:
        """The directory as a folder on this machine; None if it is in object storage, which all machines share."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the directory's address."""

    @property
    @abstractmethod
    def parent(self) -> "StorageDir":
        """The directory that contains this directory."""

    @abstractmethod
    def __truediv__(self, name: str) -> "StorageDir":
        """Return the file or directory ``name`` in this directory."""

    @property
    def digest(self) -> str:
        """Short hash of the address, which identifies the directory."""
        return hashlib.sha256(self.address.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.address

    @abstractmethod
    def check_writable(self, flag: str) -> None:
        """Raise a ``UserError`` that names ``flag`` if this machine cannot write to the directory."""

    @abstractmethod
    def create(self, message: str) -> AbstractContextManager[None]:
        """Create the directory and hold it as :meth:`exclusive_use` does.

        Raises ``UserError`` if the directory exists or cannot be created.
        """

    @property
    @abstractmethod
    def lock_path(self) -> Path:
        """The file on this machine that :meth:`lock` locks."""

    @contextmanager
    def lock(self, message: str) -> Iterator[None]:
        """Lock the directory against other commands of this machine. The lock ends with the block or the process.

        Raises ``UserError`` with ``message`` if another process has the lock, or if it cannot be created.
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

        Raises ``UserError`` if a command of this machine is using the directory, or may be using it.
        """

    @abstractmethod
    def exclusive_use(self, message: str) -> AbstractContextManager[None]:
        """Hold the directory against other commands on every machine that can write to it.

        Raises ``UserError`` if another command holds it: with ``message`` on this machine, otherwise with the name of
        the other command's machine and process.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether the directory has a file with this name."""

    @abstractmethod
    def entries(self) -> set[str] | None:
        """Return the names of the files and directories directly in this one; None if it does not exist."""

    @abstractmethod
    def list_files(self, *folders: str) -> dict[str, int]:
        """Return the size in bytes of every file by name, at any depth; with ``folders``, only of files in these.

        Missing folders count as empty.
        """

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Raises ``FileNotFoundError`` if it is missing."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises ``FileNotFoundError`` if it is missing."""

    @abstractmethod
    def map(self, name: str) -> bytes | mmap.mmap:
        """Return the content of a file as a read-only buffer; a local file is memory-mapped.

        Raises ``FileNotFoundError`` if the file is missing.
        """

    @abstractmethod
    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write or replace a file atomically and durably."""

    def write_json(self, name: str, value: Any) -> None:
        """Write ``value`` as JSON to a file; equal values give equal bytes."""
        self.write(name, json_text(value).encode())

    @abstractmethod
    def upload(self, file: Path, name: str) -> None:
        """Copy a local ``file`` to the file ``name`` of the directory, atomically and durably."""

    def download(self, name: str, file: Path, checksum: str | None = None) -> None:
        """Copy the file ``name`` of the directory to a local ``file``, atomically and durably.

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
        """Return the xxh3-128 hash of a file in hexadecimal. Raises ``FileNotFoundError`` if it is missing."""
        hasher = xxhash.xxh3_128()
        with self.open(name) as file:
            while block := file.read(BLOCK_BYTES):
                hasher.update(block)
        return hasher.hexdigest()

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files durably, and skip missing ones. A local directory removes them in the order of ``names``."""

    @abstractmethod
    def remove_on_own_disk(self, names: Iterable[str]) -> None:
        """Remove files from a local directory, which may be on a different disk than the driver's directory.

        Do nothing in storage that all machines share.
        """

    @abstractmethod
    def remove_temporaries(self, *folders: str) -> None:
        """Remove unfinished files of killed writers in ``folders``. Other writers must not be running."""

    @abstractmethod
    def remove_empty(self, *folders: str) -> None:
        """Remove the empty folders among ``folders``."""


def _find_scheme(text: str) -> str:
    """Return the scheme of a URI if an implementation is registered for it; empty for a path."""
    scheme = urlsplit(text).scheme if "://" in text else ""
    return scheme if scheme in StorageDir._by_scheme else ""
